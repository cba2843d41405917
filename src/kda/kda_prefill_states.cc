#include "src/core/parallel.h"
#include "src/kda/kda_prefill_impl.h"

namespace fovea::internal {

int64_t kda_prefill_staging_bytes(const KdaPrefillProblem& problem) {
  if (problem.commit == CommitMode::kDirect) return 0;
  const KdaLayer& layer = problem.layer;
  return (problem.max_sequences + problem.max_snapshots) * layer.num_value_heads *
         layer.head_dim_v * layer.head_dim_k * static_cast<int64_t>(size_of(layer.state_dtype));
}

PrefillStates::PrefillStates(const KdaPrefillProblem& problem, const KdaPrefillTensors& tensors,
                             void* staging)
    : problem_(problem),

      states_(tensors.state, problem.state_layout),
      routes_(tensors.state, tensors.in_slot, tensors.out_slot, tensors.has_initial_state),
      offsets_(tensors.q_indptr, tensors.q.shape[0]) {
  if (tensors.snapshot_seq.defined()) {
    num_snapshots_ = tensors.snapshot_seq.shape[0];
    snapshot_seq_ = static_cast<const int32_t*>(tensors.snapshot_seq.data);
    snapshot_pos_ = static_cast<const int32_t*>(tensors.snapshot_pos.data);
    snapshot_slot_ = static_cast<const int32_t*>(tensors.snapshot_slot.data);
  }
  if (problem.commit == CommitMode::kStaged) {
    const KdaLayer& layer = problem.layer;
    staged_.data = staging;
    staged_.is_bf16 = layer.state_dtype == DType::kBf16;
    staged_.entries = offsets_.sequences + num_snapshots_;
    staged_.k_stride = 1;
    staged_.v_stride = layer.head_dim_k;
    staged_.head_stride = layer.head_dim_v * layer.head_dim_k;
    staged_.entry_stride = layer.num_value_heads * staged_.head_stride;
  }
}

int64_t PrefillStates::final_entry(int64_t n, int64_t length) const {
  return length == 0 && routes_.in_place(n) ? -1 : routes_.finish(n);
}

int64_t PrefillStates::snapshot_entry(int64_t m, int64_t n, int64_t length) const {
  if (snapshot_seq_[m] != n || snapshot_slot_[m] < 0 || snapshot_slot_[m] >= states_.entries ||
      !snapshot_is_legal(snapshot_pos_[m], length, snapshot_interval(problem_.chunk))) {
    return -1;
  }
  return snapshot_slot_[m];
}

StateTarget PrefillStates::final_target(int64_t n, int64_t length) const {
  const int64_t entry = final_entry(n, length);
  if (problem_.commit == CommitMode::kDirect || entry < 0) return {states_, entry};
  return {staged_, n};
}

StateTarget PrefillStates::snapshot_target(int64_t m, int64_t n, int64_t length, int64_t p) const {
  const int64_t entry = snapshot_pos_[m] == p ? snapshot_entry(m, n, length) : -1;
  if (problem_.commit == CommitMode::kDirect || entry < 0) return {states_, entry};
  return {staged_, offsets_.sequences + m};
}

void PrefillStates::copy(int64_t staged, int64_t entry, int64_t head) const {
  const KdaLayer& layer = problem_.layer;
  for (int64_t d = 0; d < layer.head_dim_v; ++d) {
    for (int64_t c = 0; c < layer.head_dim_k; ++c) {
      states_.store(entry, head, d, c, staged_.load(staged, head, d, c));
    }
  }
}

void PrefillStates::commit() const {
  if (problem_.commit == CommitMode::kDirect) return;
  begin_launch("kda_prefill");
  const int64_t heads = problem_.layer.num_value_heads;
  SequenceReader reader(offsets_);
  for (int64_t n = 0; n < offsets_.sequences; ++n) {
    const int64_t length = reader.next().length();
    const auto copy_heads = [&](int64_t staged, int64_t entry) {
      if (entry < 0) return;
      ParallelFor(heads, 1, [&](int64_t begin, int64_t end, int) {
        for (int64_t h = begin; h < end; ++h) copy(staged, entry, h);
      });
    };
    copy_heads(n, final_entry(n, length));
    for (int64_t m = 0; m < num_snapshots_; ++m) {
      copy_heads(offsets_.sequences + m, snapshot_entry(m, n, length));
    }
  }
}

}  // namespace fovea::internal
