#include "src/serving/msa_plans.h"

#include <algorithm>
#include <string>

#include "src/core/access.h"
#include "src/core/check.h"
#include "src/msa/msa_checks.h"

namespace fovea::internal {
namespace {

constexpr const char* kOp = kMsaBackendOp;

PackRows store_plan(int64_t max_rows, int64_t width, const Device& device,
                    const OperatorOptions& options) {
  RowCodecProblem problem;
  problem.max_rows = max_rows;
  problem.width = width;
  return PackRows::plan(problem, device, options("pack_rows"));
}

MsaScoreSelect select_plan(const MsaBackendConfig& config, int64_t max_requests, int64_t max_rows,
                           const Device& device, const OperatorOptions& options) {
  MsaScoreSelectProblem problem;
  problem.max_rows = max_rows;
  problem.max_requests = max_requests;
  problem.max_pages = msa_table_pages(config);
  problem.num_heads = config.index_heads;
  problem.num_kv_heads = config.num_kv_heads;
  problem.head_dim = config.index_dim;
  problem.block_size = config.block_size;
  problem.score = config.score;
  problem.index_scale = config.index_scale;
  problem.topk = config.topk;
  problem.init_blocks = config.init_blocks;
  problem.local_blocks = config.local_blocks;
  problem.index_reduce = config.index_reduce;
  return MsaScoreSelect::plan(problem, device, options("msa_score_select"));
}

MsaAttend attend_plan(const MsaBackendConfig& config, int64_t max_requests, int64_t max_rows,
                      int64_t topk, const Device& device, const OperatorOptions& options) {
  MsaAttendProblem problem;
  problem.max_rows = max_rows;
  problem.max_requests = max_requests;
  problem.max_pages = msa_table_pages(config);
  problem.num_heads = config.num_heads;
  problem.num_kv_heads = config.num_kv_heads;
  problem.head_dim = config.head_dim;
  problem.block_size = config.block_size;
  problem.topk = topk;
  problem.softmax_scale = config.softmax_scale;
  problem.batch_invariant = config.deterministic;
  return MsaAttend::plan(problem, device, options("msa_attend"));
}

void check_absent(const char* name, const ConstTensorView& tensor, const char* why) {
  if (!tensor.defined()) return;
  invalid(kOp, std::string(name) + " is given, but " + why + "; leave it out");
}

void check_aligned(const char* name, const ConstTensorView& tensor, DType dtype,
                   std::initializer_list<int64_t> shape) {
  check_tensor(kOp, name, tensor, dtype, shape);
  check_msa_alignment(kOp, name, tensor);
}

// bf16 [slots, heads, dim] of whole pages.
void check_pool(const MsaBackendConfig& config, const char* name, const TensorView& pool,
                int64_t heads, int64_t dim) {
  check_aligned(name, pool, DType::kBf16, {kAnyExtent, heads, dim});
  check_msa_slots(kOp, name, pool.shape[0], config.block_size);
  // The last channel of a row lies before the first of the next one, in the order of the strides.
  const int64_t slot = pool.stride[0], head = heads > 1 ? pool.stride[1] : dim;
  const bool apart = head >= dim && (pool.shape[0] <= 1 || slot >= head * (heads - 1) + dim ||
                                     (slot >= dim && head >= slot * (pool.shape[0] - 1) + dim));
  if (apart) return;
  invalid(kOp, std::string(name) + " = " + to_string(pool) +
                   ", expected rows of slots and heads that do not overlap");
}

void check_pools(const MsaBackendConfig& config, const MsaForwardTensors& tensors) {
  const TensorView &k = tensors.k_pool, &v = tensors.v_pool;
  check_pool(config, "k_pool", k, config.num_kv_heads, config.head_dim);
  check_pool(config, "v_pool", v, config.num_kv_heads, config.head_dim);
  bool equal = k.shape[0] == v.shape[0];
  for (size_t axis = 0; axis < 2; ++axis) {
    equal = equal && (k.shape[axis] <= 1 || k.stride[axis] == v.stride[axis]);
  }
  if (equal) return;
  invalid(kOp, "v_pool = " + to_string(v) + ", expected slots and strides of k_pool = " +
                   to_string(k) + ", which share their slots");
}

// k, v and index_k: all that the layer stores, or none.
void check_new_rows(const MsaBackendConfig& config, int64_t rows, bool indexes,
                    const MsaForwardTensors& tensors) {
  const int64_t heads = config.num_kv_heads, dim = config.head_dim;
  const bool given =
      tensors.k.defined() || tensors.v.defined() || (indexes && tensors.index_k.defined());
  if (!given) return;
  check_tensor(kOp, "k", tensors.k, DType::kBf16, {rows, heads, dim});
  check_tensor(kOp, "v", tensors.v, DType::kBf16, {rows, heads, dim});
  if (!indexes) return;
  check_tensor(kOp, "index_k", tensors.index_k, DType::kBf16, {rows, config.index_dim});
}

}  // namespace

MsaBackendConfig check_msa_config(const MsaBackendConfig& given) {
  MsaBackendConfig config = given;
  if (config.index_heads == 0) config.index_heads = config.num_kv_heads;
  check_range(kOp, "num_heads", config.num_heads, 1, kMaxInt32);
  check_range(kOp, "num_kv_heads", config.num_kv_heads, 1, kMaxInt32);
  check_range(kOp, "block_size", config.block_size, 1, 256);
  check_range(kOp, "table_width", config.table_width, 1, kMaxInt32 - config.block_size);
  check_range(kOp, "max_requests", config.max_requests, 1, kMaxInt32 - 1);
  check_range(kOp, "max_rows", config.max_rows, 1, kMaxInt32 - 1);
  check_range(kOp, "rows_per_request", config.rows_per_request, 1, kMaxInt32);
  check_range(kOp, "max_requests * rows_per_request", config.max_requests * config.rows_per_request,
              1, kMaxInt32 - 1);
  check_msa_bounds(kOp, config.max_rows, config.max_requests, msa_table_pages(config),
                   config.block_size, config.page_size);
  if (config.num_heads % config.num_kv_heads != 0) {
    invalid(kOp,
            "num_heads = " + std::to_string(config.num_heads) +
                ", expected a multiple of num_kv_heads = " + std::to_string(config.num_kv_heads));
  }
  check_msa_index(kOp, config.index_heads, config.index_dim, config.index_scale);
  check_msa_score(kOp, config.score);
  MsaSelectBlocksProblem selection;
  selection.num_heads = config.index_heads;
  selection.num_kv_heads = config.num_kv_heads;
  selection.topk = config.topk;
  selection.init_blocks = config.init_blocks;
  selection.local_blocks = config.local_blocks;
  selection.index_reduce = config.index_reduce;
  check_msa_selection(kOp, selection);
  return config;
}

DsaConfig metadata_config(const MsaBackendConfig& config) {
  RowBounds bounds;
  bounds.page_size = config.block_size;
  bounds.table_width = config.table_width;
  bounds.max_requests = config.max_requests;
  bounds.max_rows = config.max_rows;
  bounds.rows_per_request = config.rows_per_request;
  return metadata_config(bounds);
}

int64_t msa_table_pages(const MsaBackendConfig& config) {
  return (config.table_width + config.block_size - 1) / config.block_size;
}

int64_t msa_list_columns(const MsaBackendConfig& config) {
  return msa_list_width(config.index_reduce, config.topk, config.index_heads, config.num_kv_heads);
}

MsaPlans::MsaPlans(const MsaBackendConfig& config, int64_t max_requests, int64_t max_rows,
                   const Device& device, const OperatorOptions& options)
    : store_row(store_plan(max_rows, config.num_kv_heads * config.head_dim, device, options)),
      store_head(store_plan(max_rows, config.head_dim, device, options)),
      store_index(store_plan(max_rows, config.index_dim, device, options)),
      select(select_plan(config, max_requests, max_rows, device, options)),
      attend(
          attend_plan(config, max_requests, max_rows, msa_list_columns(config), device, options)) {
  if (!config.dense_layers) return;
  attend_all =
      attend_plan(config, max_requests, max_rows, msa_table_pages(config), device, options);
}

size_t MsaPlans::workspace_bytes() const {
  const size_t bytes =
      std::max({store_row.workspace_bytes(), store_head.workspace_bytes(),
                store_index.workspace_bytes(), select.workspace_bytes(), attend.workspace_bytes()});
  return attend_all ? std::max(bytes, attend_all->workspace_bytes()) : bytes;
}

void check_msa_forward(const MsaBackendConfig& config, int64_t rows, bool dense,
                       const MsaForwardTensors& tensors) {
  const int64_t heads = config.num_heads, kv_heads = config.num_kv_heads;
  const int64_t width = msa_list_columns(config);
  const bool given = tensors.topk_blocks.defined();
  if (dense) {
    constexpr char kWhy[] = "a dense layer attends to every block";
    check_absent("index_q", tensors.index_q, kWhy);
    check_absent("index_k", tensors.index_k, kWhy);
    check_absent("index_pool", tensors.index_pool, kWhy);
    check_absent("topk_blocks", tensors.topk_blocks, kWhy);
    check_absent("blocks", tensors.blocks, kWhy);
  } else if (given) {
    constexpr char kWhy[] = "topk_blocks holds the selection already";
    check_absent("index_q", tensors.index_q, kWhy);
    check_absent("index_k", tensors.index_k, kWhy);
    check_absent("index_pool", tensors.index_pool, kWhy);
    check_absent("blocks", tensors.blocks, kWhy);
    check_tensor(kOp, "topk_blocks", tensors.topk_blocks, DType::kI32, {kv_heads, rows, width});
  } else {
    check_aligned("index_q", tensors.index_q, DType::kBf16,
                  {rows, config.index_heads, config.index_dim});
    check_pool(config, "index_pool", tensors.index_pool, 1, config.index_dim);
    check_optional(kOp, "blocks", tensors.blocks, DType::kI32, {kv_heads, rows, width});
  }
  check_aligned("q", tensors.q, DType::kBf16, {rows, heads, config.head_dim});
  check_new_rows(config, rows, !dense && !given, tensors);
  check_pools(config, tensors);
  check_aligned("out", tensors.out, DType::kBf16, {rows, heads, config.head_dim});
  check_optional(kOp, "lse", tensors.lse, DType::kF32, {rows, heads});
}

namespace {

double as_double(int64_t value) { return static_cast<double>(value); }

// Tokens that a row of this length attends to in its selected blocks: whole ones before its own.
int64_t selected_tokens(const MsaBackendConfig& config, int64_t row_len) {
  const int64_t blocks = (row_len + config.block_size - 1) / config.block_size;
  const int64_t width = msa_list_columns(config);
  if (blocks <= width) return row_len;
  const int64_t own = row_len - (blocks - 1) * config.block_size;
  return (width - 1) * config.block_size + own;
}

}  // namespace

OperatorWork msa_store_work(int64_t rows, int64_t channels) {
  return {0, 4 * as_double(rows * channels)};
}

// A row that fits the list is not scored. 2 Hi Di per (row, key); the keys of a request that has a
// scored row once; queries of scored rows; every list.
OperatorWork msa_select_work(const MsaBackendConfig& config, const MetadataFields& fields) {
  const auto row_len = access<const int32_t, 1>(fields.row_len);
  const auto q_indptr = access<const int32_t, 1>(fields.q_indptr);
  const auto kv_len = access<const int32_t, 1>(fields.kv_len);
  const int64_t query = config.index_heads * config.index_dim;
  double pairs = 0;
  double bytes = 4 * as_double(row_len.shape[0] * config.num_kv_heads * msa_list_columns(config));
  for (int64_t r = 0; r < kv_len.shape[0]; ++r) {
    int64_t scored = 0;
    const int64_t end = std::min<int64_t>(q_indptr(r + 1), row_len.shape[0]);
    for (int64_t t = q_indptr(r); t < end; ++t) {
      if (row_len(t) <= config.topk * config.block_size) continue;
      ++scored;
      pairs += row_len(t);
    }
    if (scored > 0) bytes += 2 * as_double(scored * query + kv_len(r) * config.index_dim);
  }
  return {2 * pairs * as_double(query), bytes};
}

// 4 D per query head and visible selected token; a token of a request at most once per KV head;
// queries and outputs.
OperatorWork msa_attend_work(const MsaBackendConfig& config, bool dense,
                             const MetadataFields& fields) {
  const auto row_len = access<const int32_t, 1>(fields.row_len);
  const auto q_indptr = access<const int32_t, 1>(fields.q_indptr);
  const auto kv_len = access<const int32_t, 1>(fields.kv_len);
  double pairs = 0, tokens = 0;
  for (int64_t r = 0; r < kv_len.shape[0]; ++r) {
    const int64_t end = std::min<int64_t>(q_indptr(r + 1), row_len.shape[0]);
    double of_request = 0;
    for (int64_t t = q_indptr(r); t < end; ++t) {
      const int64_t length = std::max(row_len(t), 0);
      of_request += as_double(dense ? length : selected_tokens(config, length));
    }
    pairs += of_request;
    tokens += std::min(of_request, as_double(kv_len(r)));
  }
  const double rows = as_double(row_len.shape[0]);
  return {4 * pairs * as_double(config.num_heads * config.head_dim),
          4 * as_double(config.head_dim) *
              (tokens * as_double(config.num_kv_heads) + rows * as_double(config.num_heads))};
}

}  // namespace fovea::internal
