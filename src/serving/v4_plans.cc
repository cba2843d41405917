#include "src/serving/v4_plans.h"

#include <algorithm>
#include <string>

#include "src/core/access.h"
#include "src/core/check.h"
#include "src/serving/row_step.h"

namespace fovea::internal {
namespace {

void check_format(const char* name, RowFormat format) {
  if (format == RowFormat::kV4 || format == RowFormat::kBf16) return;
  invalid(kV4Op,
          std::string(name) + " = " + std::string(to_string(format)) + ", expected v4 or bf16");
}

void check_window(const V4BackendConfig& config) {
  check_range(kV4Op, "window", config.window, 1, kMaxInt32);
  check_range(kV4Op, "max_request_rows", config.max_request_rows, 0, kMaxInt32);
  if (config.window_storage == V4WindowStorage::kTokenPages) return;
  check_range(kV4Op, "window_page_size", config.window_page_size, 1, 256);
}

// A ring holds the window of the first row of a step beside all of its rows.
void check_ring(const V4BackendConfig& config) {
  if (config.window_storage != V4WindowStorage::kRing) return;
  const int64_t needed = config.window + max_request_rows(config) - 1;
  if (config.window_page_size >= needed) return;
  invalid(kV4Op, "window_page_size = " + std::to_string(config.window_page_size) +
                     " rows of a ring, expected at least window + max_request_rows - 1 = " +
                     std::to_string(needed) + "; lower max_request_rows or use pages");
}

// Tokens behind the step's rows that a row still needs, when all but the first may be taken back.
void check_states(const V4BackendConfig& config, const char* name, int64_t tokens, int64_t span) {
  const int64_t needed = std::max(span, span - 2 + config.rows_per_request);
  if (tokens >= needed && tokens <= kMaxInt32) return;
  invalid(kV4Op, std::string(name) + " = " + std::to_string(tokens) + ", expected at least " +
                     std::to_string(needed) + " with rows_per_request = " +
                     std::to_string(config.rows_per_request) + "; draft fewer tokens");
}

void check_page(const V4BackendConfig& config, int64_t ratio) {
  if (config.page_size % ratio == 0) return;
  invalid(kV4Op, "page_size = " + std::to_string(config.page_size) + ", expected a multiple of " +
                     std::to_string(ratio) + ": a page holds whole groups of a layer's ratio");
}

V4Compress compressor(const V4BackendConfig& config, int64_t ratio, int64_t head_dim,
                      RowFormat format, const Device& device, const OperatorOptions& options) {
  V4CompressProblem problem;
  problem.max_rows = metadata_config(config).max_rows;
  problem.max_requests = config.max_requests;
  problem.ratio = ratio;
  problem.head_dim = head_dim;
  problem.row_format = format;
  problem.scale_mode = config.index_scale_mode;
  problem.page_size = compressed_page(config, ratio);
  problem.eps = config.eps;
  if (ratio == kHcaRatio) problem.form = config.hca_form;
  return V4Compress::plan(problem, device, options("v4_compress"));
}

SparseMlaProblem attention(const V4BackendConfig& config) {
  SparseMlaProblem problem;
  problem.max_rows = metadata_config(config).max_rows;
  problem.num_heads = config.num_heads;
  problem.head_dim_qk = kLatentDim;
  problem.topk = config.window;
  problem.softmax_scale = config.softmax_scale;
  problem.row_format = config.window_format;
  problem.page_size = config.window_storage == V4WindowStorage::kTokenPages
                          ? config.page_size
                          : config.window_page_size;
  problem.extra_row_format = config.compressed_format;
  problem.inverse_rope_dim = kV4RopeWidth;
  return problem;
}

SwaIndicesProblem window_problem(const V4BackendConfig& config) {
  SwaIndicesProblem problem;
  problem.max_rows = metadata_config(config).max_rows;
  problem.max_requests = config.max_requests;
  problem.window = problem.width = config.window;
  problem.page_size = attention(config).page_size;
  if (config.window_storage == V4WindowStorage::kRing) problem.storage = WindowStorage::kRing;
  return problem;
}

RowCodecProblem pack_problem(const V4BackendConfig& config) {
  RowCodecProblem problem;
  problem.max_rows = metadata_config(config).max_rows;
  problem.row_format = config.window_format;
  problem.page_size = attention(config).page_size;
  problem.width = kLatentDim;
  return problem;
}

IndexQuantize quantize_plan(const V4BackendConfig& config, const Device& device,
                            const OperatorOptions& options) {
  IndexQuantizeProblem problem;
  problem.max_rows = metadata_config(config).max_rows;
  problem.num_heads = config.index_heads;
  problem.head_dim = kV4IndexDim;
  problem.rope_dim = 0;  // queries come rotated
  problem.scale_mode = config.index_scale_mode;
  return IndexQuantize::plan(problem, device, options("index_quantize"));
}

IndexSelect select_plan(const V4BackendConfig& config, const Device& device,
                        const OperatorOptions& options) {
  IndexSelectProblem problem;
  problem.layout = IndexLayout::kPaged;
  problem.max_rows = metadata_config(config).max_rows;
  problem.max_width = config.table_width / kCsaRatio;
  problem.num_heads = config.index_heads;
  problem.head_dim = kV4IndexDim;
  problem.topk = config.topk;
  problem.transform = IndexTransform::kPaged;
  problem.page_size = compressed_page(config, kCsaRatio);
  problem.logits_budget_bytes = config.logits_budget_bytes;
  return IndexSelect::plan(problem, device, options("index_select"));
}

double as_double(int64_t value) { return static_cast<double>(value); }

double row_bytes_of(RowFormat format) {
  return format == RowFormat::kV4 ? 584 : 2 * as_double(kLatentDim);
}

// Keys of ratio `ratio` that a row of this length sees beside its window.
int64_t entries_of(const V4BackendConfig& config, int64_t ratio, int64_t row_len) {
  if (ratio == 0) return 0;
  const int64_t entries = std::max<int64_t>(row_len, 0) / ratio;
  return ratio == kCsaRatio ? std::min(entries, config.topk) : entries;
}

}  // namespace

int64_t max_request_rows(const V4BackendConfig& config) {
  return std::max(config.max_request_rows > 0 ? config.max_request_rows : config.max_rows,
                  config.rows_per_request);
}

void check_v4_config(const V4BackendConfig& config) {
  check_range(kV4Op, "num_heads", config.num_heads, 1, kMaxInt32);
  check_positive_finite(kV4Op, "softmax_scale", config.softmax_scale);
  check_format("window_format", config.window_format);
  check_format("compressed_format", config.compressed_format);
  check_range(kV4Op, "page_size", config.page_size, 1, 256);
  check_range(kV4Op, "table_width", config.table_width, 1, kMaxInt32);
  check_range(kV4Op, "max_requests", config.max_requests, 1, kMaxInt32 - 1);
  check_range(kV4Op, "max_rows", config.max_rows, 1, kMaxInt32 - 1);
  check_range(kV4Op, "rows_per_request", config.rows_per_request, 1, kMaxInt32);
  check_window(config);
  check_ring(config);
  if (config.csa) {
    check_page(config, kCsaRatio);
    check_states(config, "csa_state_tokens", config.csa_state_tokens, 2 * kCsaRatio);
    check_range(kV4Op, "index_heads", config.index_heads, 1, kMaxInt32);
    check_range(kV4Op, "topk", config.topk, 1, kMaxInt32);
  }
  if (!config.hca) return;
  check_page(config, kHcaRatio);
  if (config.hca_form == CompressorForm::kStored) {
    check_states(config, "hca_state_tokens", config.hca_state_tokens, kHcaRatio);
  }
}

DsaConfig metadata_config(const V4BackendConfig& config) {
  return metadata_config(RowBounds{config.page_size, config.table_width, config.max_requests,
                                   config.max_rows, config.rows_per_request});
}

V4Plans::V4Plans(const V4BackendConfig& config, const Device& device,
                 const OperatorOptions& options)
    : refresh(refresh_plans(metadata_config(config), device, options)),
      window(BuildSwaIndices::plan(window_problem(config), device, options("build_swa_indices"))),
      pack(PackRows::plan(pack_problem(config), device, options("pack_rows"))),
      attend_window(SparseMla::plan(attention(config), device, options("sparse_mla"))) {
  if (config.csa) {
    compress_csa =
        compressor(config, kCsaRatio, kLatentDim, config.compressed_format, device, options);
    compress_index = compressor(config, kCsaRatio, kV4IndexDim, RowFormat::kI132, device, options);
    quantize = quantize_plan(config, device, options);
    select = select_plan(config, device, options);
    SparseMlaProblem problem = attention(config);
    problem.extra_topk = config.topk;
    problem.extra_page_size = compressed_page(config, kCsaRatio);
    attend_csa = SparseMla::plan(problem, device, options("sparse_mla"));
  }
  if (!config.hca) return;
  compress_hca =
      compressor(config, kHcaRatio, kLatentDim, config.compressed_format, device, options);
  SparseMlaProblem problem = attention(config);
  problem.extra_topk = config.table_width / kHcaRatio;
  if (problem.extra_topk > 0) {
    problem.extra_page_size = compressed_page(config, kHcaRatio);
    problem.extra_max_pages = (config.table_width + config.page_size - 1) / config.page_size;
  }
  attend_hca = SparseMla::plan(problem, device, options("sparse_mla"));
}

size_t V4Plans::workspace_bytes() const {
  size_t bytes =
      std::max({window.workspace_bytes(), pack.workspace_bytes(), attend_window.workspace_bytes()});
  const auto add = [&](const auto& plan) {
    if (plan) bytes = std::max(bytes, plan->workspace_bytes());
  };
  add(compress_csa);
  add(compress_index);
  add(quantize);
  add(select);
  add(attend_csa);
  add(compress_hca);
  add(attend_hca);
  for (const MetadataRefresh& plan : refresh) bytes = std::max(bytes, plan.workspace_bytes());
  return bytes;
}

OperatorWork swa_indices_work(const V4BackendConfig& config, int64_t rows) {
  return {0, 4 * as_double(rows * (config.window + 1))};
}

OperatorWork pack_window_work(const V4BackendConfig& config, int64_t rows) {
  return {0, as_double(rows) * (2 * as_double(kLatentDim) + row_bytes_of(config.window_format))};
}

// A token's values and logits are read, and kept in the state; every ratio-th token makes a row of
// c * ratio terms, an exponential, a product and a sum of each.
OperatorWork compress_work(const V4BackendConfig& config, int64_t ratio, int64_t head_dim,
                           int64_t rows, int64_t requests) {
  const auto channels = as_double(compressor_channels(ratio, head_dim));
  const double made = as_double(rows) / as_double(ratio);
  const double row_bytes =
      head_dim == kV4IndexDim ? kV4IndexDim + 4 : row_bytes_of(config.compressed_format);
  const double span = as_double(ratio) * channels / as_double(head_dim);
  return {3 * made * span * as_double(head_dim), 16 * as_double(rows) * channels +
                                                     made * row_bytes +
                                                     8 * as_double(requests) * channels * span};
}

OperatorWork index_query_work(const V4BackendConfig& config, int64_t rows) {
  return {0, as_double(rows * config.index_heads * (3 * kV4IndexDim + 12))};
}

// As in DSA, over entries: a row that sees all of them scores none.
OperatorWork entry_select_work(const V4BackendConfig& config, const MetadataFields& fields) {
  const auto row_len = access<const int32_t, 1>(fields.row_len);
  const auto q_indptr = access<const int32_t, 1>(fields.q_indptr);
  double pairs = 0, bytes = 4 * as_double(row_len.shape[0] * config.topk);
  for (int64_t r = 0; r + 1 < q_indptr.shape[0]; ++r) {
    int64_t longest = 0;
    for (int64_t t = q_indptr(r); t < q_indptr(r + 1); ++t) {
      const int64_t entries = std::max(row_len(t), 0) / kCsaRatio;
      if (entries <= config.topk) continue;
      pairs += as_double(entries);
      bytes += as_double(config.index_heads * (kV4IndexDim + 4));
      longest = std::max(longest, entries);
    }
    bytes += as_double(longest * (kV4IndexDim + 4));
  }
  return {pairs * as_double(2 * config.index_heads * (kV4IndexDim + 1)), bytes + 8 * pairs};
}

// 4 * H * 512 per row and visible key; a key at most once per request.
OperatorWork attend_work(const V4BackendConfig& config, int64_t ratio,
                         const MetadataFields& fields) {
  const auto row_len = access<const int32_t, 1>(fields.row_len);
  const auto q_indptr = access<const int32_t, 1>(fields.q_indptr);
  double pairs = 0, bytes = 0;
  for (int64_t r = 0; r + 1 < q_indptr.shape[0]; ++r) {
    int64_t rows = 0, last = 0, entries = 0;
    for (int64_t t = q_indptr(r); t < q_indptr(r + 1); ++t) {
      const int64_t len = std::max(row_len(t), 0);
      const int64_t seen = entries_of(config, ratio, len);
      pairs += as_double(std::min(len, config.window) + seen);
      entries += seen;
      last = std::max(last, len);
      ++rows;
    }
    bytes +=
        as_double(std::min(last, config.window + rows - 1)) * row_bytes_of(config.window_format);
    const int64_t all = ratio == 0 ? 0 : last / ratio;
    bytes += as_double(std::min(entries, all)) * row_bytes_of(config.compressed_format);
    bytes += as_double(rows * config.num_heads * 4 * kLatentDim);
  }
  return {4 * pairs * as_double(config.num_heads * kLatentDim), bytes};
}

}  // namespace fovea::internal
