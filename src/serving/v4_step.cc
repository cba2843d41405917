#include "src/serving/v4_step.h"

#include <algorithm>
#include <string>

#include "src/batch/forward_modes.h"
#include "src/core/check.h"
#include "src/core/workspace.h"

namespace fovea::internal {
namespace {

void check_request_rows(const V4BackendConfig& config, const ForwardBatch& batch) {
  if (config.window_storage != V4WindowStorage::kRing) return;
  for (const int32_t rows : batch.host_ext_len) {
    check_range(kV4Op, "host_ext_len of a request with a ring", rows, 0, max_request_rows(config));
  }
}

void check_snapshots(const V4BackendConfig& config, const V4Batch& batch) {
  if (!batch.snapshot_seq.defined()) return;
  if (!is_extend(batch.forward.mode)) {
    invalid(kV4Op, "snapshot_seq in mode " + std::string(to_string(batch.forward.mode)) +
                       "; snapshots belong to extend and mixed");
  }
  check_tensor(kV4Op, "snapshot_seq", batch.snapshot_seq, DType::kI32, {kAnyExtent});
  const int64_t count = batch.snapshot_seq.shape[0];
  check_range(kV4Op, "snapshot_seq.shape[0]", count, 0, config.max_requests + config.max_rows);
  check_tensor(kV4Op, "snapshot_pos", batch.snapshot_pos, DType::kI32, {count});
  check_tensor(kV4Op, "snapshot_slot", batch.snapshot_slot, DType::kI32, {count});
}

// States are moved whole.
void check_packed(const char* name, const TensorView& state) {
  int64_t stride = 1;
  for (int axis = state.rank - 1; axis > 0; --axis) {
    if (state.stride[static_cast<size_t>(axis)] != stride) {
      invalid(kV4Op, std::string(name) + " = " + to_string(state) + ", expected packed states");
    }
    stride *= state.shape[static_cast<size_t>(axis)];
  }
}

struct CompressorShape {
  int64_t ratio;
  int64_t head_dim;
  int64_t state_tokens;  // 0: online
};

// Names of the tensors of a compressor, for messages.
struct CompressorNames {
  const char *kv_gate, *ape, *norm_weight, *state, *pool;
};
constexpr CompressorNames kCompressorNames = {"compressor.kv_gate", "compressor.ape",
                                              "compressor.norm_weight", "compressor.state",
                                              "compressor.pool"};
constexpr CompressorNames kIndexerNames = {"indexer.kv_gate", "indexer.ape", "indexer.norm_weight",
                                           "indexer.state", "indexer.pool"};

void check_compressor(const CompressorNames& names, const CompressorShape& shape, int64_t rows,
                      const V4Compressor& compressor) {
  const int64_t channels = compressor_channels(shape.ratio, shape.head_dim);
  check_tensor(kV4Op, names.kv_gate, compressor.kv_gate, DType::kF32, {rows, 2 * channels});
  check_tensor(kV4Op, names.ape, compressor.ape, DType::kF32, {shape.ratio, channels});
  check_tensor(kV4Op, names.norm_weight, compressor.norm_weight, DType::kF32, {shape.head_dim});
  if (shape.state_tokens > 0) {
    check_tensor(kV4Op, names.state, compressor.state, DType::kF32,
                 {kAnyExtent, shape.state_tokens, 2, channels});
  } else {
    check_tensor(kV4Op, names.state, compressor.state, DType::kF32,
                 {kAnyExtent, 3, shape.head_dim});
  }
  check_packed(names.state, compressor.state);
  check_tensor(kV4Op, names.pool, compressor.pool, DType::kU8, {kAnyExtent, kAnyExtent});
}

}  // namespace

V4StepArrays::V4StepArrays(const V4BackendConfig& config, int64_t max_requests, int64_t max_rows,
                           const StepHome& home) {
  size_t bytes = 0;
  cut(config, max_requests, max_rows, {}, &bytes);
  reserve_memory("the arrays of a step", home, bytes, &memory_);
  cut(config, max_requests, max_rows, memory_.workspace(), &bytes);
  fill_bytes(memory_.data(), home.device, 0, memory_.bytes(), home.stream);
}

void V4StepArrays::cut(const V4BackendConfig& config, int64_t max_requests, int64_t max_rows,
                       Workspace memory, size_t* bytes) {
  WorkspaceCutter cutter(memory);
  const auto array = [&](std::initializer_list<int64_t> shape) {
    TensorView view = make_tensor(static_cast<void*>(nullptr), DType::kI32, shape);
    view.data = cutter.take<int32_t>(view.num_elements());
    return view;
  };
  all_.window_indices = array({max_rows, config.window});
  for (TensorView* view : {&all_.window_len, &all_.window_slots, &all_.positions, &all_.csa_len,
                           &all_.selected_len, &all_.hca_len, &all_.kept, &all_.emitted}) {
    *view = array({max_rows});
  }
  all_.own_slots = array({max_requests});
  if (config.csa) all_.selection = array({max_rows, config.topk});
  *bytes = cutter.used_bytes();
}

V4StepArrays::Views V4StepArrays::views(int64_t requests, int64_t rows) const {
  Views views = all_;
  for (TensorView* view : {&views.window_indices, &views.window_len, &views.window_slots,
                           &views.positions, &views.csa_len, &views.selected_len, &views.hca_len,
                           &views.kept, &views.emitted, &views.selection}) {
    if (view->defined()) *view = slice_rows(*view, 0, rows);
  }
  views.own_slots = slice_rows(views.own_slots, 0, requests);
  return views;
}

V4Step::V4Step(const V4BackendConfig& config, const StepHome& home)
    : RowStep(metadata_config(config), home),
      row_arrays(config, config.max_requests, arrays.max_rows(), home) {}

V4Step::V4Step(const V4BackendConfig& config, const StepHome& home, const StepBucket& bucket_in)
    : RowStep(metadata_config(config), home, bucket_in),
      row_arrays(config, bucket_in.num_requests, arrays.max_rows(), home) {}

void check_v4_batch(const V4BackendConfig& config, const V4Batch& batch,
                    const std::optional<StepBucket>& bucket) {
  check_row_batch(kV4Op, "compressors need the rows of a request in one call",
                  metadata_config(config), batch.forward, bucket, batch.kv_len_delta);
  check_request_rows(config, batch.forward);
  const int64_t requests = batch.forward.seq_len.shape[0];
  check_optional(kV4Op, "in_slot", batch.in_slot, DType::kI32, {requests});
  check_optional(kV4Op, "out_slot", batch.out_slot, DType::kI32, {requests});
  if (batch.out_slot.defined() && !batch.in_slot.defined()) {
    invalid(kV4Op, "out_slot is given without in_slot; -1 means no state");
  }
  check_snapshots(config, batch);
  if (config.window_storage == V4WindowStorage::kTokenPages) {
    if (!batch.window_table.defined()) return;
    invalid(kV4Op,
            "window_table is given, but window_storage is that of the token pages; leave it out");
  }
  const bool is_ring = config.window_storage == V4WindowStorage::kRing;
  check_tensor(kV4Op, "window_table", batch.window_table, DType::kI32,
               {requests, is_ring ? 1 : kAnyExtent});
}

void check_v4_tensors(const V4BackendConfig& config, const V4Step& step, int64_t ratio,
                      const V4ForwardTensors& tensors) {
  if (ratio != 0 && ratio != kCsaRatio && ratio != kHcaRatio) {
    invalid(kV4Op, "ratio = " + std::to_string(ratio) + ", expected 0, 4 or 128");
  }
  if ((ratio == kCsaRatio && !config.csa) || (ratio == kHcaRatio && !config.hca)) {
    invalid(kV4Op, "ratio = " + std::to_string(ratio) +
                       ", but the backend has no such layers; set " +
                       (ratio == kCsaRatio ? "csa" : "hca"));
  }
  if (!step.begun) invalid(kV4Op, "no step has begun");
  const ForwardMode mode = step.mode;
  if (ratio > 0 && (mode == ForwardMode::kDraftExtend || mode == ForwardMode::kDraftExtendV2)) {
    unsupported(kV4Op, "a layer of ratio " + std::to_string(ratio) + " in mode " +
                           std::string(to_string(mode)) + "; draft layers have ratio 0");
  }
  if (mode == ForwardMode::kTargetVerify && !step.bucket) {
    invalid(kV4Op, "target_verify without a step plan, which keeps what commit needs");
  }
  const int64_t rows = step.padded_rows, heads = config.num_heads;
  check_tensor(kV4Op, "q", tensors.q, DType::kBf16, {rows, heads, kLatentDim});
  check_optional(kV4Op, "kv", tensors.kv, DType::kBf16, {rows, kLatentDim});
  check_optional(kV4Op, "sink", tensors.sink, DType::kF32, {heads});
  check_tensor(kV4Op, "cos_sin", tensors.cos_sin, DType::kF32, {kAnyExtent, kV4RopeWidth});
  check_range(kV4Op, "cos_sin.shape[0]", tensors.cos_sin.shape[0], rows > 0 ? 1 : 0, kMaxInt32);
  check_tensor(kV4Op, "window_pool", tensors.window_pool, DType::kU8, {kAnyExtent, kAnyExtent});
  check_tensor(kV4Op, "out", tensors.out, DType::kBf16, {rows, heads, kLatentDim});
  check_tensor(kV4Op, "lse", tensors.lse, DType::kF32, {rows, heads});
  if (ratio == 0) return;
  if (mode != ForwardMode::kIdle && !step.batch.in_slot.defined()) {
    invalid(kV4Op,
            "the batch has no in_slot, which layers of ratio " + std::to_string(ratio) + " need");
  }
  const bool is_online = ratio == kHcaRatio && config.hca_form == CompressorForm::kOnline;
  const int64_t tokens = is_online            ? 0
                         : ratio == kCsaRatio ? config.csa_state_tokens
                                              : config.hca_state_tokens;
  check_compressor(kCompressorNames, {ratio, kLatentDim, tokens}, rows, tensors.compressor);
  if (ratio != kCsaRatio) return;
  check_compressor(kIndexerNames, {ratio, kV4IndexDim, tokens}, rows, tensors.indexer);
  check_tensor(kV4Op, "index_q", tensors.index_q, DType::kBf16,
               {rows, config.index_heads, kV4IndexDim});
  check_tensor(kV4Op, "head_gate", tensors.head_gate, DType::kF32, {rows, config.index_heads});
  check_optional(kV4Op, "indices", tensors.indices, DType::kI32, {rows, config.topk});
}

}  // namespace fovea::internal
