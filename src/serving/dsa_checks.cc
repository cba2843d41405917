#include "src/serving/dsa_checks.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <string>
#include <utility>

#include "src/batch/forward_modes.h"
#include "src/core/check.h"
#include "src/serving/dsa_dispatch.h"
#include "src/serving/dsa_shapes.h"
#include "src/serving/dsa_split.h"

namespace fovea::internal {
namespace {

[[noreturn]] void bad_request(size_t request, const std::string& what) {
  invalid(kDsaOp, "request " + std::to_string(request) + ": " + what);
}

std::string in_mode(ForwardMode mode) { return " in mode " + std::string(to_string(mode)); }

// Most rows of a request where ext_len says how many.
int64_t most_rows(const DsaConfig& config, const ForwardBatch& batch,
                  const std::optional<StepBucket>& bucket) {
  if (batch.mode != ForwardMode::kDraftExtend) return config.max_rows;
  return bucket ? bucket->rows_per_request : config.rows_per_request;
}

int64_t host_rows(const DsaConfig& config, const ForwardBatch& batch, size_t request) {
  return batch.host_ext_len.empty() ? fixed_rows(config, batch.mode) : batch.host_ext_len[request];
}

void check_host_rows(const DsaConfig& config, const ForwardBatch& batch,
                     const std::optional<StepBucket>& bucket, size_t request) {
  const int64_t rows = host_rows(config, batch, request);
  const int64_t fixed = fixed_rows(config, batch.mode);
  const int64_t least = fixed > 0 ? fixed : 0;
  const int64_t most = fixed > 0 ? fixed : most_rows(config, batch, bucket);
  if (rows >= least && rows <= most) return;
  bad_request(request, "host_ext_len = " + std::to_string(rows) + ", expected " +
                           (fixed > 0      ? std::to_string(fixed)
                            : rows < least ? std::string(">= 0")
                                           : "at most " + std::to_string(most)) +
                           in_mode(batch.mode));
}

void check_host_length(const DsaConfig& config, const ForwardBatch& batch,
                       const std::optional<StepBucket>& bucket, int32_t kv_len_delta,
                       size_t request) {
  const int64_t seq_len = batch.host_seq_len[request];
  const int64_t addend = length_addend(config, batch.mode, kv_len_delta);
  const int64_t len = seq_len + addend;
  const int64_t rows = host_rows(config, batch, request);
  // A padded request has one token, whatever its rows: the rows before it are empty.
  const bool is_padding =
      bucket && batch.mode == ForwardMode::kDraftExtendV2 && seq_len == kPaddedSeqLen;
  if (seq_len >= 0 && (len >= rows || is_padding) && len <= config.table_width) return;
  std::string found = "host_seq_len = " + std::to_string(seq_len);
  if (seq_len < 0) bad_request(request, found + ", expected >= 0");
  if (batch.mode == ForwardMode::kTargetVerify) {
    found += " plus " + std::to_string(addend) + " rows to verify";
  } else if (addend != 0) {
    found += " plus kv_len_delta = " + std::to_string(addend);
  }
  if (len < rows) {
    bad_request(request, found + ", expected at least its " + std::to_string(rows) +
                             " new rows; seq_len includes them" + in_mode(batch.mode));
  }
  bad_request(request,
              found + ", expected at most table_width = " + std::to_string(config.table_width));
}

void check_host_lengths(const DsaConfig& config, const ForwardBatch& batch,
                        const std::optional<StepBucket>& bucket, int32_t kv_len_delta) {
  if (batch.host_seq_len.empty() && batch.host_ext_len.empty()) return;
  const auto requests = static_cast<size_t>(batch.seq_len.shape[0]);
  const auto check_size = [&](const char* name, size_t size) {
    if (size == requests) return;
    invalid(kDsaOp, std::string(name) + " has " + std::to_string(size) + " entries, expected " +
                        std::to_string(requests) + " (one per request)");
  };
  check_size("host_seq_len", batch.host_seq_len.size());
  if (reads_ext_len(batch.mode) || !batch.host_ext_len.empty()) {
    check_size("host_ext_len", batch.host_ext_len.size());
  }
  int64_t sum = 0;
  for (size_t r = 0; r < requests; ++r) {
    check_host_rows(config, batch, bucket, r);
    check_host_length(config, batch, bucket, kv_len_delta, r);
    sum += host_rows(config, batch, r);
  }
  const int64_t tokens = stored_tokens(batch);
  if (sum != tokens) {
    invalid(kDsaOp,
            "host_ext_len sums to " + std::to_string(sum) + ", expected " +
                (batch.context_split != nullptr ? "out_cache_loc.shape[0] = " : "num_rows = ") +
                std::to_string(tokens));
  }
}

// E against R, as far as the mode decides it.
void check_row_count(const DsaConfig& config, const ForwardBatch& batch,
                     const std::optional<StepBucket>& bucket) {
  const int64_t requests = batch.seq_len.shape[0];
  const int64_t fixed = fixed_rows(config, batch.mode);
  if (fixed > 0 && batch.num_rows != requests * fixed) {
    invalid(kDsaOp, "num_rows = " + std::to_string(batch.num_rows) + ", expected " +
                        std::to_string(fixed) + " for each of the " + std::to_string(requests) +
                        " requests" + in_mode(batch.mode));
  }
  if (batch.mode != ForwardMode::kDraftExtend) return;
  const int64_t most = requests * most_rows(config, batch, bucket);
  if (batch.num_rows > most) {
    invalid(kDsaOp, "num_rows = " + std::to_string(batch.num_rows) + ", expected at most " +
                        std::to_string(requests) + " requests * rows_per_request = " +
                        std::to_string(most) + in_mode(batch.mode));
  }
}

// `rows`: T. The rank of a context split stores the tokens of the whole batch.
void check_stored_rows(const DsaConfig& config, const ForwardBatch& batch, int64_t rows) {
  if (batch.context_split == nullptr) {
    check_tensor(kDsaOp, "out_cache_loc", batch.out_cache_loc, DType::kI32, {rows});
    if (batch.store_positions.defined()) {
      invalid(kDsaOp, "store_positions is given without a context_split; leave it out");
    }
    return;
  }
  check_tensor(kDsaOp, "out_cache_loc", batch.out_cache_loc, DType::kI32, {kAnyExtent});
  const int64_t tokens = stored_tokens(batch);
  check_range(kDsaOp, "out_cache_loc.shape[0]", tokens, batch.num_rows, config.max_rows);
  check_tensor(kDsaOp, "store_positions", batch.store_positions, DType::kI32, {tokens});
}

void check_bucket_shape(const StepBucket& bucket, const ForwardBatch& batch) {
  if (batch.mode != bucket.mode) {
    invalid(kDsaOp, "mode = " + std::string(to_string(batch.mode)) +
                        ", expected that of the plan's bucket, " +
                        std::string(to_string(bucket.mode)));
  }
  if (batch.seq_len.shape[0] != bucket.num_requests) {
    invalid(kDsaOp, "seq_len.shape[0] = " + std::to_string(batch.seq_len.shape[0]) +
                        ", expected num_requests = " + std::to_string(bucket.num_requests) +
                        " of the plan's bucket; fill up with padded requests");
  }
  check_range(kDsaOp, "padded_rows", batch.padded_rows, 0,
              bucket.num_requests * bucket.rows_per_request);
}

// u8 [pages, >= needed bytes].
void check_pool(const char* name, const TensorView& pool, int64_t needed_bytes) {
  check_tensor(kDsaOp, name, pool, DType::kU8, {kAnyExtent, kAnyExtent});
  if (pool.shape[1] >= needed_bytes) return;
  invalid(kDsaOp, std::string(name) + " = " + to_string(pool) + ", expected pages of at least " +
                      std::to_string(needed_bytes) + " bytes");
}

void check_cos_sin(const char* name, const ConstTensorView& cos_sin, int64_t rope_dim) {
  check_tensor(kDsaOp, name, cos_sin, DType::kF32, {kAnyExtent, rope_dim});
  if (cos_sin.shape[0] == 0) {
    invalid(kDsaOp, std::string(name) + ".shape[0] = 0, expected at least one position");
  }
}

void check_index_tensors(const DsaConfig& config, const DsaDispatch& dispatch,
                         const StepShape& shape, const DsaForwardTensors& tensors) {
  const int64_t heads = config.index_heads, rows = shape.padded_rows;
  const bool scores = scores_rows(dispatch, tensors);
  if (scores) {
    check_tensor(kDsaOp, "index_q", tensors.index_q, DType::kBf16, {rows, heads, config.index_dim});
    check_tensor(kDsaOp, "head_gate", tensors.head_gate, DType::kF32, {rows, heads});
  }
  const bool stores = tensors.save_kv && tensors.index_k.defined();
  if (stores) {
    check_tensor(kDsaOp, "index_k", tensors.index_k, DType::kBf16,
                 {shape.padded_tokens, config.index_dim});
    check_tensor(kDsaOp, "norm_weight", tensors.norm_weight, DType::kF32, {config.index_dim});
    check_tensor(kDsaOp, "norm_bias", tensors.norm_bias, DType::kF32, {config.index_dim});
  }
  if (!scores && !stores) return;
  if (config.rope_dim > 0) {
    check_cos_sin("cos_sin", tensors.cos_sin, config.rope_dim);
  }
  check_pool("index_pool", tensors.index_pool, config.page_size * (config.index_dim + 4));
}

// Either the whole or both of its parts; with fuse_rope the parts. `leading`: the shape without
// channels. False when all three are absent.
bool check_parts(const DsaConfig& config, const char* name, const ConstTensorView& whole,
                 const char* latent_name, const ConstTensorView& latent, const char* rope_name,
                 const ConstTensorView& rope, std::initializer_list<int64_t> leading) {
  const bool parts = latent.defined() || rope.defined();
  const auto both = [&] { return std::string(latent_name) + " and " + rope_name; };
  if (whole.defined() && parts) {
    invalid(kDsaOp, std::string(name) + " is given beside " + both() + "; leave one form out");
  }
  if (whole.defined() && config.fuse_rope) {
    invalid(kDsaOp,
            std::string(name) + " is given, but fuse_rope takes " + both() + " before rope");
  }
  if (parts && !rope.defined()) {
    invalid(kDsaOp, std::string(rope_name) + " is missing, but " + latent_name +
                        " holds 512 channels without it; give both, or " + name + " of 576");
  }
  if (!parts && whole.defined() && whole.rank > 0 &&
      whole.shape[static_cast<size_t>(whole.rank) - 1] == kLatentDim) {
    invalid(kDsaOp, std::string(name) + " = " + to_string(whole) + " without " + rope_name +
                        ", expected 576 channels; or give " + both());
  }
  const auto check = [&](const char* what, const ConstTensorView& tensor, int64_t channels) {
    if (leading.size() == 2) {
      check_tensor(kDsaOp, what, tensor, DType::kBf16,
                   {leading.begin()[0], leading.begin()[1], channels});
    } else {
      check_tensor(kDsaOp, what, tensor, DType::kBf16, {leading.begin()[0], channels});
    }
  };
  if (parts) {
    check(latent_name, latent, kLatentDim);
    check(rope_name, rope, kRopeWidth);
  } else if (whole.defined()) {
    check(name, whole, kLatentWidth);
  }
  return parts || whole.defined();
}

void check_queries(const DsaConfig& config, const StepShape& shape,
                   const DsaForwardTensors& tensors) {
  if (!check_parts(config, "q", tensors.q, "q_nope", tensors.q_nope, "q_rope", tensors.q_rope,
                   {shape.padded_rows, config.num_heads})) {
    invalid(kDsaOp, config.fuse_rope ? "q_nope and q_rope are missing; fuse_rope takes both"
                                     : "q is missing; give it, or q_nope and q_rope");
  }
}

void check_keys(const DsaConfig& config, const DsaDispatch& dispatch, const StepShape& shape,
                const DsaForwardTensors& tensors) {
  const bool given = check_parts(config, "k", tensors.k, "k_latent", tensors.k_latent, "k_rope",
                                 tensors.k_rope, {shape.padded_tokens});
  if (dispatch.fresh_kv && !given) {
    invalid(kDsaOp,
            "k is missing: this step reads its fresh rows; give it, or use "
            "extend_kv_source = cache");
  }
  if (tensors.save_kv && given && !tensors.index_k.defined() && !tensors.topk_indices.defined()) {
    invalid(kDsaOp,
            "index_k is missing, but k is stored: a row selects among stored index keys; "
            "give both, or topk_indices");
  }
  if (config.fuse_rope && (given || !dispatch.one_shot)) {
    check_cos_sin("mla_cos_sin", tensors.mla_cos_sin, kRopeWidth);
  }
}

void check_one_shot(const DsaConfig& config, const StepShape& shape, const DsaLayer& layer,
                    const DsaForwardTensors& tensors) {
  const int64_t rows = shape.padded_rows, heads = config.num_heads;
  if (layer.logit_cap != 0) {
    invalid(kDsaOp, "logit_cap = " + std::to_string(layer.logit_cap) +
                        " under one-shot, expected 0; set force_absorbed");
  }
  for (const auto& [name, tensor] :
       {std::pair{"q_nope", &tensors.q_nope}, std::pair{"q_rope", &tensors.q_rope}}) {
    if (!tensor->defined()) continue;
    invalid(kDsaOp, std::string(name) + " is given under one-shot, which reads q_mha, k_mha and " +
                        "v_mha; leave it out, or set force_absorbed");
  }
  check_tensor(kDsaOp, "q_mha", tensors.q_mha, DType::kBf16, {rows, heads, kMhaWidthQk});
  check_tensor(kDsaOp, "k_mha", tensors.k_mha, DType::kBf16,
               {shape.sum_kv_len, heads, kMhaWidthQk});
  check_tensor(kDsaOp, "v_mha", tensors.v_mha, DType::kBf16, {shape.sum_kv_len, heads, kMhaWidthV});
  check_tensor(kDsaOp, "out_mha", tensors.out_mha, DType::kBf16, {rows, heads, kMhaWidthV});
}

// A scale that nothing applies is a mistake of the caller.
void check_scales(const DsaConfig& config, const DsaLayer& layer) {
  check_positive_finite(kDsaOp, "q_scale", layer.q_scale);
  check_positive_finite(kDsaOp, "k_scale", layer.k_scale);
  if (layer.k_scale != 1 && config.row_format != RowFormat::kF576) {
    invalid(kDsaOp, "k_scale = " + std::to_string(layer.k_scale) +
                        " with row_format = " + std::string(to_string(config.row_format)) +
                        ", expected 1: only the rows of an f576 cache have one scale");
  }
  if (layer.q_scale != 1 && !config.fuse_rope) {
    invalid(kDsaOp, "q_scale = " + std::to_string(layer.q_scale) +
                        " without fuse_rope, expected 1: queries stay bf16");
  }
}

// Every number by itself.
void check_bounds(const DsaConfig& config) {
  check_range(kDsaOp, "num_heads", config.num_heads, 1, kMaxInt32);
  check_range(kDsaOp, "index_heads", config.index_heads, 1, kMaxInt32);
  check_range(kDsaOp, "index_dim", config.index_dim, 1, kMaxInt32);
  check_range(kDsaOp, "rope_dim", config.rope_dim, 0, config.index_dim);
  check_range(kDsaOp, "topk", config.topk, 1, kMaxInt32);
  check_range(kDsaOp, "page_size", config.page_size, 1, 256);
  check_range(kDsaOp, "max_requests", config.max_requests, 0, kMaxInt32 - 1);
  check_range(kDsaOp, "max_rows", config.max_rows, 0, kMaxInt32 - 1);
  check_range(kDsaOp, "table_width", config.table_width, 1, kMaxInt32);
  check_range(kDsaOp, "rows_per_request", config.rows_per_request, 1, kMaxInt32);
  check_range(kDsaOp, "mha_chunk_capacity", config.mha_chunk_capacity, 0, kMaxInt32);
  check_range(kDsaOp, "logits_budget_bytes", config.logits_budget_bytes, 1,
              std::numeric_limits<int64_t>::max());
  check_range(kDsaOp, "cache_slots", config.cache_slots, 0, kMaxInt32);
  check_range(kDsaOp, "split_parts", config.split_parts, 0, 65536);
}

}  // namespace

int64_t fixed_rows(const DsaConfig& config, ForwardMode mode) {
  if (is_decode(mode)) return 1;
  return reads_ext_len(mode) ? 0 : config.rows_per_request;
}

int64_t length_addend(const DsaConfig& config, ForwardMode mode, int32_t kv_len_delta) {
  return mode == ForwardMode::kTargetVerify ? config.rows_per_request : kv_len_delta;
}

void check_dsa_config(const DsaConfig& config) {
  check_bounds(config);
  if (config.draft_topk != 1) {
    unsupported(kDsaOp, "draft_topk = " + std::to_string(config.draft_topk) +
                            ", expected 1: drafts are chains, a draft tree is not supported");
  }
  if (config.rope_dim % 2 != 0) {
    invalid(kDsaOp, "rope_dim = " + std::to_string(config.rope_dim) + ", expected an even number");
  }
  if (config.hadamard && !std::has_single_bit(static_cast<uint64_t>(config.index_dim))) {
    invalid(kDsaOp, "index_dim = " + std::to_string(config.index_dim) +
                        ", but hadamard needs a power of two; set hadamard = false");
  }
  if (config.row_format != RowFormat::kBf16 && config.row_format != RowFormat::kV32 &&
      config.row_format != RowFormat::kF576) {
    invalid(kDsaOp, "row_format = " + std::string(to_string(config.row_format)) +
                        ", expected bf16, v32 or f576");
  }
  if (config.fuse_rope && config.row_format != RowFormat::kF576) {
    invalid(kDsaOp, "fuse_rope with row_format = " + std::string(to_string(config.row_format)) +
                        ", expected f576: only it takes queries and keys of codes");
  }
  check_dsa_implementations(kDsaOp, config);
  if (config.check && config.cache_slots == 0) {
    invalid(kDsaOp,
            "check is on, but cache_slots = 0; give the slots of the pools, dummy page included");
  }
  if (config.split_parts > 0 && config.deterministic) {
    unsupported(kDsaOp,
                "split_parts with deterministic: the cuts depend on the batch; expected "
                "split_parts = 0, or deterministic = false");
  }
}

void check_bucket(const DsaConfig& config, const StepBucket& bucket) {
  if (!is_known(bucket.mode) || is_extend(bucket.mode)) {
    invalid(kDsaOp, "bucket.mode = " +
                        (is_known(bucket.mode) ? std::string(to_string(bucket.mode))
                                               : std::to_string(static_cast<int>(bucket.mode))) +
                        ", expected a decode, verify or draft mode; a prefill has no fixed shape");
  }
  check_range(kDsaOp, "bucket.num_requests", bucket.num_requests, 0, config.max_requests);
  const int64_t fixed = fixed_rows(config, bucket.mode);
  check_range(kDsaOp, "bucket.rows_per_request", bucket.rows_per_request, fixed > 0 ? fixed : 1,
              fixed > 0 ? fixed : config.rows_per_request);
  check_range(kDsaOp, "bucket.num_requests * rows_per_request",
              bucket.num_requests * bucket.rows_per_request, 0, config.max_rows);
}

void check_forward_batch(const DsaConfig& config, const ForwardBatch& batch,
                         const std::optional<StepBucket>& bucket, int32_t kv_len_delta) {
  if (!is_known(batch.mode)) {
    unsupported(kDsaOp, "mode = " + std::to_string(static_cast<int>(batch.mode)) +
                            ", expected one of the seven forward modes");
  }
  check_tensor(kDsaOp, "seq_len", batch.seq_len, DType::kI32, {kAnyExtent});
  const int64_t requests = batch.seq_len.shape[0];
  check_range(kDsaOp, "seq_len.shape[0]", requests, 0, config.max_requests);
  check_tensor(kDsaOp, "pool_row", batch.pool_row, DType::kI32, {requests});
  check_tensor(kDsaOp, "req_to_token", batch.req_to_token, DType::kI32,
               {kAnyExtent, config.table_width});
  check_range(kDsaOp, "num_rows", batch.num_rows, 0, config.max_rows);
  check_range(kDsaOp, "padded_rows", batch.padded_rows, 0, config.max_rows);
  if (batch.padded_rows > 0 && batch.padded_rows < batch.num_rows) {
    invalid(kDsaOp, "padded_rows = " + std::to_string(batch.padded_rows) +
                        ", expected 0 or at least num_rows = " + std::to_string(batch.num_rows));
  }
  if (reads_ext_len(batch.mode)) {
    check_tensor(kDsaOp, "ext_len", batch.ext_len, DType::kI32, {requests});
  } else if (batch.ext_len.defined()) {
    invalid(kDsaOp, "ext_len is given, but mode " + std::string(to_string(batch.mode)) +
                        " has a fixed number of rows per request; leave it out");
  }
  if (bucket) check_bucket_shape(*bucket, batch);
  check_row_count(config, batch, bucket);
  const int64_t rows = std::max(batch.num_rows, batch.padded_rows);
  check_tensor(kDsaOp, "positions", batch.positions, DType::kI32, {rows});
  check_stored_rows(config, batch, rows);
  check_host_lengths(config, batch, bucket, kv_len_delta);
  if (batch.context_split != nullptr) check_context_split(config, batch);
}

void check_draft_steps(const ForwardBatch& batch, std::span<const DraftStep> steps) {
  check_range(kDsaOp, "number of draft steps", static_cast<int64_t>(steps.size()), 0,
              kMaxRefreshSteps);
  if (batch.mode != ForwardMode::kDecode) {
    invalid(kDsaOp, "mode = " + std::string(to_string(batch.mode)) +
                        ", expected decode in a chain of drafts");
  }
  for (const auto& [name, tensor] : {std::pair{"positions", &batch.positions},
                                     std::pair{"out_cache_loc", &batch.out_cache_loc}}) {
    if (tensor->defined()) {
      invalid(kDsaOp,
              std::string(name) + " is given, but every draft step has its own; leave it out");
    }
  }
  for (size_t i = 0; i < steps.size(); ++i) {
    if (steps[i].plan == nullptr) {
      invalid(kDsaOp, "plan of draft step " + std::to_string(i) + " is null");
    }
    for (size_t j = 0; j < i; ++j) {
      if (steps[j].plan != steps[i].plan) continue;
      invalid(kDsaOp, "draft steps " + std::to_string(j) + " and " + std::to_string(i) +
                          " name one plan; every step needs its own");
    }
  }
}

int64_t stored_tokens(const ForwardBatch& batch) {
  return batch.context_split != nullptr ? batch.out_cache_loc.shape[0] : batch.num_rows;
}

// Those of the whole batch, also on a rank of a context split: every rank decides alike.
DsaBatchFacts batch_facts(const DsaConfig& config, const ForwardBatch& batch,
                          int32_t kv_len_delta) {
  DsaBatchFacts facts;
  facts.mode = batch.mode;
  facts.num_rows = stored_tokens(batch);
  facts.context_parallel = batch.context_split != nullptr;
  facts.mha_inputs = batch.mha_inputs;
  facts.has_host_lengths = batch.seq_len.shape[0] == 0 || !batch.host_seq_len.empty();
  for (size_t r = 0; r < batch.host_seq_len.size(); ++r) {
    const int64_t len = batch.host_seq_len[r] + length_addend(config, batch.mode, kv_len_delta);
    facts.max_kv_len = std::max(facts.max_kv_len, len);
    facts.sum_kv_len += len;
    if (len > host_rows(config, batch, r)) facts.has_prefix = true;
  }
  return facts;
}

bool scores_rows(const DsaDispatch& dispatch, const DsaForwardTensors& tensors) {
  const bool selects = !dispatch.one_shot || tensors.indices.defined();
  return selects && !dispatch.skip_selection && !tensors.topk_indices.defined();
}

void check_forward_tensors(const DsaConfig& config, const DsaDispatch& dispatch,
                           const StepShape& shape, const DsaLayer& layer,
                           const DsaForwardTensors& tensors) {
  const int64_t rows = shape.padded_rows, heads = config.num_heads;
  check_positive_finite(kDsaOp, "softmax_scale", layer.softmax_scale);
  check_scales(config, layer);
  if (dispatch.one_shot) {
    check_one_shot(config, shape, layer, tensors);
  } else {
    check_queries(config, shape, tensors);
    check_tensor(kDsaOp, "out", tensors.out, DType::kBf16, {rows, heads, kLatentDim});
  }
  check_tensor(kDsaOp, "lse", tensors.lse, DType::kF32, {rows, heads});
  check_keys(config, dispatch, shape, tensors);
  check_optional(kDsaOp, "topk_indices", tensors.topk_indices, DType::kI32, {rows, config.topk});
  check_optional(kDsaOp, "indices", tensors.indices, DType::kI32, {rows, config.topk});
  if (tensors.topk_indices.defined() && tensors.indices.defined()) {
    invalid(kDsaOp,
            "indices is given beside topk_indices, which holds the selection already; "
            "leave one out");
  }
  check_pool("kv_pool", tensors.kv_pool,
             page_bytes(config.row_format, config.page_size, kLatentWidth));
  check_index_tensors(config, dispatch, shape, tensors);
}

}  // namespace fovea::internal
