#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kda/kda_verify_cpu.cc"
#include "src/core/simd.h"

#include <algorithm>

#include "src/core/parallel.h"
#include "src/core/simd_math.h"
#include "src/kda/kda_math.h"
#include "src/kda/kda_row_simd.h"
#include "src/kda/kda_step_simd.h"
#include "src/kda/kda_verify_impl.h"
#include "src/kda/kda_verify_work.h"

HWY_BEFORE_NAMESPACE();
namespace fovea::internal::HWY_NAMESPACE {
namespace {

static_assert(kVerifyRows == kStepRows);

// Decodes, normalises and activates the draft rows of a value head, and keeps the k and g of
// records.
void prepare_rows(const VerifyCall& call, const VerifyWork& work, int64_t request, int64_t head) {
  const KdaLayer& layer = call.layer;
  const int64_t rows = call.problem.rows_per_request;
  const int64_t key_head = head / (layer.num_value_heads / layer.num_heads);
  const int64_t dim_k = layer.head_dim_k, padded = work.padded;
  const auto scale = static_cast<float>(kda_scale(layer));
  const F32 d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  std::fill_n(work.bias, padded, 0.0f);
  const float* const bias = call.inputs.bias_of(head);
  if (bias != nullptr) std::copy_n(bias, dim_k, work.bias);
  const GateHead gate = gate_head(layer.gate, call.inputs.rate_of(head), bias);
  std::fill_n(work.beta, kda_padded(rows), 0.0f);
  for (int64_t t = 0; t < rows; ++t) {
    const int64_t row = request * rows + t;
    float* const key = work.key + t * padded;
    float* const query = work.query + t * padded;
    load_row(call.inputs.k.row(row, key_head), dim_k, padded, key);
    scale_row(layer.normalise, 1.0f, padded, key);
    load_row(call.inputs.q.row(row, key_head), dim_k, padded, query);
    scale_row(layer.normalise, scale, padded, query);
    auto dot = hn::Zero(d);
    for (int64_t i = 0; i < padded; i += lanes) {
      dot = hn::MulAdd(hn::LoadU(d, key + i), hn::LoadU(d, query + i), dot);
    }
    work.query_key[t] = hn::GetLane(hn::SumOfLanes(d, dot));
    work.beta[t] = call.inputs.beta.value(row, head);
    if (call.inputs.g.is_bf16)
      load_row(call.inputs.g.bf16(row, head), dim_k, padded, work.log_decay);
    else
      load_row(call.inputs.g.f32(row, head), dim_k, padded, work.log_decay);
    log_decay_row(gate, work.bias, padded, work.log_decay);
    float* const decay = work.decay + t * padded;
    for (int64_t i = 0; i < padded; i += lanes)
      hn::StoreU(exp_f32(d, hn::LoadU(d, work.log_decay + i)), d, decay + i);
    if (call.problem.mode == VerifyMode::kRecords) {
      float* const record = call.kept.at(request, t, head);
      std::copy_n(key, dim_k, record);
      std::copy_n(work.log_decay, dim_k, record + dim_k);
    }
  }
  activate_beta(layer, kda_padded(rows), work.beta);
}

// Rows of a state somewhere.
struct RowsAt {
  float* data;
  int64_t stride;
};

// The committed state rows [first, first + count) of a head, in the worker's memory.
void load_start(const VerifyCall& call, const VerifyWork& work, int64_t entry, int64_t head,
                int64_t first, int64_t count) {
  const int64_t dim_k = call.layer.head_dim_k;
  for (int64_t r = 0; r < count; ++r) {
    float* const to = work.node(0) + r * work.padded;
    if (entry < 0) {
      std::fill_n(to, work.padded, 0.0f);
      continue;
    }
    const int64_t at = call.states.offset(entry, head, first + r, 0);
    if (call.states.is_bf16)
      load_row(static_cast<const bf16_t*>(call.states.data) + at, dim_k, work.padded, to);
    else
      load_row(static_cast<const float*>(call.states.data) + at, dim_k, work.padded, to);
  }
}

// State rows [first, first + kRows) of one value head through all draft rows.
template <int kRows>
void verify_rows(const VerifyCall& call, const VerifyWork& work, int64_t request, int64_t head,
                 int64_t first) {
  const KdaLayer& layer = call.layer;
  const int64_t dim_k = layer.head_dim_k;
  const bool keeps_states = call.problem.mode == VerifyMode::kStates;
  // Whole groups of channels need no padding, so that kept states are computed where they stay.
  const bool in_place = keeps_states && dim_k == work.padded;
  load_start(call, work, call.routes.start(request), head, first, kRows);
  const auto node = [&](int64_t t) -> RowsAt {
    if (t < 0) return {work.node(0), work.padded};
    if (in_place) {
      return {call.kept.at(request, t, head) + first * call.kept.v_stride, call.kept.v_stride};
    }
    // Only a tree comes back to a row that is not the last one.
    return {work.node(call.parent != nullptr ? 1 + t : 1), work.padded};
  };
  for (int64_t t = 0; t < call.problem.rows_per_request; ++t) {
    const int64_t row = request * call.problem.rows_per_request + t;
    const StepToken token{work.decay + t * work.padded, work.key + t * work.padded,
                          work.query + t * work.padded, work.query_key[t], work.beta[t]};
    float v[kRows], out[kRows], u[kRows];
    const bf16_t* const values = call.inputs.v.row(row, head) + first;
    for (int r = 0; r < kRows; ++r) v[r] = bf16_to_float(values[r]);
    const RowsAt from = node(parent_row(call.parent, t)), to = node(t);
    step_rows<kRows>(token, work.padded, from.data, from.stride, to.data, to.stride, v, out, u);
    bf16_t* const outputs = call.out.row(row, head) + first;
    for (int r = 0; r < kRows; ++r) outputs[r] = bf16_from_float(out[r]);
    float* const kept = call.kept.at(request, t, head);
    if (!keeps_states) {
      std::copy_n(u, kRows, kept + 2 * dim_k + first);
    } else if (!in_place) {
      for (int64_t r = 0; r < kRows; ++r) {
        std::copy_n(to.data + r * to.stride, dim_k, kept + (first + r) * call.kept.v_stride);
      }
    }
  }
}

// A request without a slot.
void clear_rows(const VerifyCall& call, int64_t request, int64_t head) {
  const int64_t dim_k = call.layer.head_dim_k, dim_v = call.layer.head_dim_v;
  for (int64_t t = 0; t < call.problem.rows_per_request; ++t) {
    std::fill_n(call.out.row(request * call.problem.rows_per_request + t, head), dim_v, bf16_t{});
    float* const kept = call.kept.at(request, t, head);
    if (call.problem.mode == VerifyMode::kRecords) {
      std::fill_n(kept, 2 * dim_k + dim_v, 0.0f);
      continue;
    }
    for (int64_t row = 0; row < dim_v; ++row) {
      std::fill_n(kept + row * call.kept.v_stride, dim_k, 0.0f);
    }
  }
}

void kda_verify(const KdaVerifyProblem& problem, const Device& device,
                const KdaVerifyTensors& tensors, Workspace workspace) {
  WorkspaceCutter cutter(workspace);
  judge_kda_verify(problem, tensors, cutter.take<int64_t>(kda_verify_check_elements(problem)));
  const size_t first_bytes = cutter.used_bytes();
  VerifyWork(problem, &cutter);
  const size_t worker_bytes = cutter.used_bytes() - first_bytes;
  const VerifyCall call{
      problem,
      problem.layer,
      KdaInputs(split_qkv(problem.layer, tensors)),
      StateAccess(tensors.state, StateLayout::kVk),
      StateRoutes(tensors.state, tensors.slot, tensors.slot, tensors.has_initial_state),
      static_cast<const int32_t*>(tensors.parent.data),
      VerifyScratch(tensors.scratch),
      access<bf16_t, 3>(tensors.out)};
  const int64_t heads = problem.layer.num_value_heads, dim_v = problem.layer.head_dim_v;
  const int64_t requests = call.out.shape[0] / problem.rows_per_request;
  const ThreadScope threads(device.num_threads);
  ParallelFor(requests * heads, 1, [&](int64_t begin, int64_t end, int worker) {
    WorkspaceCutter own({static_cast<char*>(workspace.data) + first_bytes +
                             static_cast<size_t>(worker) * worker_bytes,
                         worker_bytes});
    const VerifyWork work(problem, &own);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t request = i / heads, head = i % heads;
      if (call.routes.is_padding(request)) {
        clear_rows(call, request, head);
        continue;
      }
      prepare_rows(call, work, request, head);
      int64_t row = 0;
      for (; row + kStepRows <= dim_v; row += kStepRows) {
        verify_rows<kStepRows>(call, work, request, head, row);
      }
      for (; row < dim_v; ++row) verify_rows<1>(call, work, request, head, row);
    }
  });
}

}  // namespace
}  // namespace fovea::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fovea::internal {

HWY_EXPORT(kda_verify);

size_t kda_verify_cpu_workspace(const KdaVerifyProblem& problem, const Device& device) {
  WorkspaceCutter worker({});
  VerifyWork(problem, &worker);
  WorkspaceCutter first({});
  first.take<int64_t>(kda_verify_check_elements(problem));
  return first.used_bytes() + static_cast<size_t>(device.num_threads) * worker.used_bytes();
}

void kda_verify_cpu(const KdaVerifyProblem& problem, const Device& device,
                    const KdaVerifyTensors& tensors, Workspace workspace) {
  current_cpu_isa();  // applies FOVEA_CPU_ISA before the first dispatch
  HWY_DYNAMIC_DISPATCH(kda_verify)(problem, device, tensors, workspace);
}

}  // namespace fovea::internal
#endif
