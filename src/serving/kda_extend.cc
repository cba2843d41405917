#include <algorithm>
#include <atomic>
#include <exception>
#include <string>
#include <utility>

#include "fovea/kda_compat.h"
#include "fovea/kda_prefill.h"
#include "src/core/access.h"
#include "src/core/check.h"
#include "src/core/log.h"
#include "src/core/parallel.h"
#include "src/kda/kda_checks.h"
#include "src/kda/kda_math.h"
#include "src/kda/kda_state.h"
#include "src/serving/kda_extend_dense.h"

namespace fovea::compat {
namespace {

using internal::check_tensor;
using internal::ExtendCall;
using internal::invalid;
using internal::kAnyExtent;
using internal::kExtendOp;

/// Without a leading axis of extent 1 that makes the rank one too many.
template <class View>
View unbatched(View view, int rank) {
  if (view.rank != rank + 1 || view.shape[0] != 1) return view;
  for (size_t axis = 0; axis < static_cast<size_t>(rank); ++axis) {
    view.shape[axis] = view.shape[axis + 1];
    view.stride[axis] = view.stride[axis + 1];
  }
  view.rank = rank;
  return view;
}

/// [T, HV, K] of either form of g.
ConstTensorView gate_rows(const ConstTensorView& g, int64_t rows, int64_t heads, int64_t dim) {
  if (g.rank == 3 && g.shape[0] == rows && g.shape[1] == heads && g.shape[2] == dim) return g;
  if (g.rank == 4) return unbatched(g, 3);
  ConstTensorView flat = unbatched(g, 2);
  if (flat.rank != 2 || flat.shape[1] != heads * dim) return g;
  flat.rank = 3;
  flat.shape = {flat.shape[0], heads, dim};
  flat.stride = {flat.stride[0], dim, 1};
  return flat;
}

void check_parameter(const char* name, const ConstTensorView& tensor, int64_t count) {
  if (!tensor.defined()) return;
  internal::check_float_type(kExtendOp, name, tensor.dtype);
  if (tensor.num_elements() != count) {
    invalid(kExtendOp, std::string(name) + " is " + to_string(tensor) + ", expected " +
                           std::to_string(count) + " elements");
  }
  if (tensor.data == nullptr) invalid(kExtendOp, std::string(name) + " has no data");
}

/// The elements in row-major order, as fp32.
ConstTensorView widen(const ConstTensorView& tensor, float* to, int64_t rows, int64_t columns) {
  if (!tensor.defined()) return {};
  const int64_t count = tensor.num_elements();
  for (int64_t i = 0; i < count; ++i) {
    int64_t rest = i, offset = 0;
    for (int axis = tensor.rank - 1; axis >= 0; --axis) {
      const auto at = static_cast<size_t>(axis);
      offset += rest % tensor.shape[at] * tensor.stride[at];
      rest /= tensor.shape[at];
    }
    to[i] = tensor.dtype == DType::kF32
                ? static_cast<const float*>(tensor.data)[offset]
                : bf16_to_float(static_cast<const bf16_t*>(tensor.data)[offset]);
  }
  const void* const data = to;
  return columns == 0 ? make_tensor(data, DType::kF32, {rows})
                      : make_tensor(data, DType::kF32, {rows, columns});
}

/// Rows of [T, H, K] with length 1. Eight sums, added in pairs.
ConstTensorView normalise(const ConstTensorView& from, bf16_t* to) {
  const auto rows = internal::access<const bf16_t, 3>(from);
  const int64_t heads = from.shape[1], dim = from.shape[2];
  internal::ParallelFor(from.shape[0], 16, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin * heads; i < end * heads; ++i) {
      const bf16_t* const x = rows.row(i / heads, i % heads);
      float sums[8] = {};
      for (int64_t c = 0; c < dim; ++c) {
        const float value = bf16_to_float(x[c]);
        sums[c % 8] += value * value;
      }
      const float sum =
          ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
      const float factor = internal::kda_inverse_norm(sum);
      for (int64_t c = 0; c < dim; ++c) {
        to[i * dim + c] = bf16_from_float(bf16_to_float(x[c]) * factor);
      }
    }
  });
  return make_tensor(static_cast<const void*>(to), DType::kBf16, {from.shape[0], heads, dim});
}

std::span<const int32_t> elements(const ConstTensorView& list) {
  if (!list.defined()) return {};
  return {static_cast<const int32_t*>(list.data), static_cast<size_t>(list.shape[0])};
}

KdaLayer layer_of(const KdaExtendProblem& problem) {
  KdaLayer layer;
  layer.num_heads = problem.num_heads;
  layer.num_value_heads = problem.num_value_heads;
  layer.head_dim_k = problem.head_dim_k;
  layer.head_dim_v = problem.head_dim_v;
  layer.gate.kind = problem.lower_bound ? GateKind::kLowerBound : GateKind::kSoftplus;
  layer.gate.lower_bound = problem.lower_bound.value_or(layer.gate.lower_bound);
  layer.gate.dtype = problem.g_dtype;
  layer.beta_dtype = problem.beta_dtype;
  layer.state_dtype = problem.state_dtype;
  return layer;
}

KdaPrefill native_plan(const KdaExtendProblem& problem, const Device& device,
                       const Options& options) {
  if (device.kind != DeviceKind::kCpu) {
    internal::unsupported(kExtendOp, "device = " + to_string(device) + "; use kda_prefill there");
  }
  KdaPrefillProblem prefill;
  prefill.layer = layer_of(problem);
  prefill.max_rows = problem.max_rows;
  prefill.max_sequences = problem.max_sequences;
  prefill.max_snapshots = problem.max_tracks;
  return KdaPrefill::plan(prefill, device, options);
}

/// What the grouping does not take of a plan; empty: nothing.
std::string static_refusal(const KdaExtendProblem& problem) {
  if (problem.head_dim_k != 128 || problem.head_dim_v != 128) {
    return "K = " + std::to_string(problem.head_dim_k) +
           " and V = " + std::to_string(problem.head_dim_v) + ", expected 128";
  }
  if (problem.num_value_heads != problem.num_heads) {
    return "HV = " + std::to_string(problem.num_value_heads) +
           ", expected H = " + std::to_string(problem.num_heads);
  }
  if (problem.g_dtype != DType::kBf16) return "g is f32, expected bf16";
  if (problem.beta_dtype != DType::kF32) return "beta is bf16, expected f32";
  return {};
}

/// The same of a call.
std::string refusal(const KdaExtendTensors& tensors, int64_t rows) {
  if (!tensors.a_log.defined()) return "a_log is missing";
  const std::span<const int32_t> lengths = *tensors.extend_seq_lens_cpu;
  if (static_cast<int64_t>(lengths.size()) != tensors.cache_indices.shape[0]) {
    return "there is not one host length a sequence";
  }
  const internal::PackedOffsets offsets(tensors.query_start_loc, rows);
  int64_t sum = 0;
  bool agree = offsets.raw(0) == 0;
  for (size_t n = 0; n < lengths.size(); ++n) {
    if (lengths[n] < 1) return "a sequence is empty";
    if (lengths[n] > internal::kMaxExtendLength) return "a sequence is longer than 16384 rows";
    sum += lengths[n];
    agree = agree && offsets.raw(static_cast<int64_t>(n) + 1) == sum;
  }
  if (sum != rows) return "host lengths do not sum to the rows";
  if (!agree) return "host lengths contradict query_start_loc";
  return {};
}

/// Called while an exception is handled.
std::string current_reason() {
  try {
    throw;
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an unknown exception";
  }
}

}  // namespace

struct KdaExtend::State {
  KdaExtendProblem problem;
  Device device;
  KdaLayer layer;
  KdaPrefill native;
  std::string refused;  // static_refusal
  std::unique_ptr<const internal::ExtendGroups> groups;
  size_t workspace_bytes = 0;
  std::atomic<int64_t> dense = 0, direct = 0, speculative = 0, snapshot = 0, no_lengths = 0,
                       single = 0, refusals = 0, fallback = 0, num_groups = 0;

  State(const KdaExtendProblem& problem_in, const Device& device_in, const Options& options);

  /// What both ways read, in the workspace.
  struct Prepared {
    bf16_t *q, *k;
    float *a_log, *dt_bias;
    int32_t* tracks;  // [3, max_tracks]
    Workspace rest;
  };
  Prepared cut(internal::WorkspaceCutter* cutter) const;

  KdaExtendTensors checked(const KdaExtendTensors& tensors) const;
  std::atomic<int64_t>* route(const KdaExtendTensors& tensors);
  ExtendCall call_of(const KdaExtendTensors& tensors, const Prepared& prepared) const;
  void run_native(const KdaExtendTensors& tensors, const ExtendCall& call,
                  const Prepared& prepared) const;
  void run_groups(const ExtendCall& call, const Prepared& prepared);
  bool groups_failed(const ExtendCall& call, const Prepared& prepared);
};

KdaExtend::State::State(const KdaExtendProblem& problem_in, const Device& device_in,
                        const Options& options)
    : problem(problem_in),
      device(device_in),
      layer(layer_of(problem_in)),
      native(native_plan(problem_in, device_in, options)),
      refused(static_refusal(problem_in)) {
  if (problem.dense && refused.empty() && problem.max_sequences > 1 && problem.max_rows > 1) {
    groups = std::make_unique<const internal::ExtendGroups>(problem, layer, device);
  }
  internal::WorkspaceCutter cutter({});
  cut(&cutter);
  workspace_bytes = cutter.used_bytes();
}

KdaExtend::State::Prepared KdaExtend::State::cut(internal::WorkspaceCutter* cutter) const {
  const int64_t keys = problem.max_rows * layer.num_heads * layer.head_dim_k;
  Prepared prepared;
  prepared.q = cutter->take<bf16_t>(keys);
  prepared.k = cutter->take<bf16_t>(keys);
  prepared.a_log = cutter->take<float>(layer.num_value_heads);
  prepared.dt_bias = cutter->take<float>(layer.num_value_heads * layer.head_dim_k);
  prepared.tracks = cutter->take<int32_t>(3 * problem.max_tracks);
  // Groups and kda_prefill never run at once.
  const size_t bytes =
      std::max(native.workspace_bytes(), groups != nullptr ? groups->workspace_bytes() : 0);
  prepared.rest = {cutter->take<char>(static_cast<int64_t>(bytes)), bytes};
  return prepared;
}

/// The tensors without batch axes.
KdaExtendTensors KdaExtend::State::checked(const KdaExtendTensors& tensors) const {
  const int64_t value_heads = layer.num_value_heads;
  const int64_t dim_k = layer.head_dim_k, dim_v = layer.head_dim_v;
  KdaExtendTensors call = tensors;
  call.out = unbatched(tensors.out, 3);
  check_tensor(kExtendOp, "out", call.out, DType::kBf16, {kAnyExtent, value_heads, dim_v});
  internal::check_no_aliasing(kExtendOp, "out", call.out);
  const int64_t rows = call.out.shape[0];
  internal::check_range(kExtendOp, "out rows", rows, 0, problem.max_rows);
  call.q = unbatched(tensors.q, 3);
  call.k = unbatched(tensors.k, 3);
  call.v = unbatched(tensors.v, 3);
  call.beta = unbatched(tensors.beta, 2);
  call.g = gate_rows(tensors.g, rows, value_heads, dim_k);
  check_tensor(kExtendOp, "q", call.q, DType::kBf16, {rows, layer.num_heads, dim_k});
  check_tensor(kExtendOp, "k", call.k, DType::kBf16, {rows, layer.num_heads, dim_k});
  check_tensor(kExtendOp, "v", call.v, DType::kBf16, {rows, value_heads, dim_v});
  check_tensor(kExtendOp, "g", call.g, problem.g_dtype, {rows, value_heads, dim_k});
  check_tensor(kExtendOp, "beta", call.beta, problem.beta_dtype, {rows, value_heads});
  check_tensor(kExtendOp, "ssm_states", call.ssm_states, problem.state_dtype,
               {kAnyExtent, value_heads, dim_v, dim_k});
  internal::check_no_aliasing(kExtendOp, "ssm_states", call.ssm_states);
  internal::check_indptr(kExtendOp, call.query_start_loc, problem.max_sequences);
  check_tensor(kExtendOp, "cache_indices", call.cache_indices, DType::kI32,
               {call.query_start_loc.shape[0] - 1});
  check_parameter("a_log", call.a_log, value_heads);
  check_parameter("dt_bias", call.dt_bias, value_heads * dim_k);
  if (!call.a_log.defined() && layer.gate.kind == GateKind::kSoftplus) {
    invalid(kExtendOp, "a_log is missing, which the softplus gate needs; pass it or lower_bound");
  }
  const auto check_list = [&](const char* name, const ConstTensorView& list,
                              const ConstTensorView& first) {
    if (!first.defined() && list.defined()) {
      invalid(kExtendOp, std::string(name) + " is given without its sequences");
    }
    if (!first.defined()) return int64_t{0};
    const int64_t extent = first.rank == 1 ? first.shape[0] : kAnyExtent;
    check_tensor(kExtendOp, name, list, DType::kI32, {extent});
    return list.shape[0];
  };
  const int64_t inside = check_list("track_seq", call.track_seq, call.track_seq);
  check_list("track_pos", call.track_pos, call.track_seq);
  check_list("track_slot", call.track_slot, call.track_seq);
  const int64_t finals = check_list("track_final_seq", call.track_final_seq, call.track_final_seq);
  check_list("track_final_slot", call.track_final_slot, call.track_final_seq);
  internal::check_range(kExtendOp, "tracks", inside + finals, 0, problem.max_tracks);
  call.h = {};
  if (call.return_intermediate_states && inside > 0) {
    call.h = unbatched(tensors.h, 4);
    check_tensor(kExtendOp, "h", call.h, problem.state_dtype,
                 {kAnyExtent, value_heads, dim_v, dim_k});
    internal::check_no_aliasing(kExtendOp, "h", call.h);
  }
  return call;
}

/// The counter of the way that this call takes: `dense` is the groups.
std::atomic<int64_t>* KdaExtend::State::route(const KdaExtendTensors& call) {
  if (!problem.dense) return &direct;
  if (call.is_spec_decode) return &speculative;
  if (call.track_seq.defined() && call.track_seq.shape[0] > 0) return &snapshot;
  if (!call.extend_seq_lens_cpu) return &no_lengths;
  if (call.extend_seq_lens_cpu->size() <= 1) return &single;
  const std::string reason = refused.empty() ? refusal(call, call.out.shape[0]) : refused;
  if (reason.empty()) return &dense;
  internal::log_once(LogLevel::kWarning, std::string(kExtendOp) + ": no groups, because " + reason +
                                             "; runs kda_prefill");
  return &refusals;
}

ExtendCall KdaExtend::State::call_of(const KdaExtendTensors& tensors,
                                     const Prepared& prepared) const {
  const internal::ThreadScope scope(device.num_threads);
  const int64_t heads = layer.num_value_heads;
  ExtendCall call;
  call.q = normalise(tensors.q, prepared.q);
  call.k = normalise(tensors.k, prepared.k);
  call.v = tensors.v;
  call.g = tensors.g;
  call.beta = tensors.beta;
  call.a_log = widen(tensors.a_log, prepared.a_log, heads, 0);
  call.dt_bias = widen(tensors.dt_bias, prepared.dt_bias, heads, layer.head_dim_k);
  call.states = tensors.ssm_states;
  call.out = tensors.out;
  call.slots = elements(tensors.cache_indices);
  if (tensors.extend_seq_lens_cpu) call.lengths = *tensors.extend_seq_lens_cpu;
  call.final_seq = elements(tensors.track_final_seq);
  call.final_slot = elements(tensors.track_final_slot);
  return call;
}

void KdaExtend::State::run_native(const KdaExtendTensors& tensors, const ExtendCall& call,
                                  const Prepared& prepared) const {
  KdaPrefillTensors prefill;
  prefill.q = call.q;
  prefill.k = call.k;
  prefill.v = call.v;
  prefill.g = call.g;
  prefill.beta = call.beta;
  prefill.a_log = call.a_log;
  prefill.dt_bias = call.dt_bias;
  prefill.q_indptr = tensors.query_start_loc;
  prefill.state = call.states;
  prefill.in_slot = prefill.out_slot = tensors.cache_indices;
  prefill.chunk_states = tensors.h;
  prefill.out = call.out;
  const std::span<const int32_t> seq = elements(tensors.track_seq);
  const size_t count = seq.size() + call.final_seq.size();
  if (count > 0) {
    int32_t *const to_seq = prepared.tracks, *const to_pos = to_seq + count;
    int32_t* const to_slot = to_pos + count;
    std::copy(call.final_seq.begin(), call.final_seq.end(),
              std::copy(seq.begin(), seq.end(), to_seq));
    std::copy(call.final_slot.begin(), call.final_slot.end(),
              std::copy_n(elements(tensors.track_slot).begin(), seq.size(), to_slot));
    std::copy_n(elements(tensors.track_pos).begin(), seq.size(), to_pos);
    // The length that kda_prefill sees; of sequences outside the call the position is never read.
    const auto num_sequences = static_cast<int64_t>(call.slots.size());
    for (size_t m = seq.size(); m < count; ++m) to_pos[m] = 0;
    internal::SequenceReader reader(
        internal::PackedOffsets(tensors.query_start_loc, call.out.shape[0]));
    for (int64_t n = 0; n < num_sequences; ++n) {
      const auto length = static_cast<int32_t>(reader.next().length());
      for (size_t m = seq.size(); m < count; ++m) {
        if (to_seq[m] == n) to_pos[m] = length;
      }
    }
    const auto list = [&](const int32_t* data) {
      return make_tensor(static_cast<const void*>(data), DType::kI32,
                         {static_cast<int64_t>(count)});
    };
    prefill.snapshot_seq = list(to_seq);
    prefill.snapshot_pos = list(to_pos);
    prefill.snapshot_slot = list(to_slot);
  }
  native.run(prefill, {prepared.rest.data, native.workspace_bytes()});
}

void KdaExtend::State::run_groups(const ExtendCall& call, const Prepared& prepared) {
  int64_t ran = 0;
  try {
    groups->run(call, prepared.rest, &ran);
    num_groups += ran;
  } catch (...) {
    num_groups += ran;
    throw;
  }
}

bool KdaExtend::State::groups_failed(const ExtendCall& call, const Prepared& prepared) {
  try {
    run_groups(call, prepared);
    return false;
  } catch (...) {
    if (problem.strict) throw;
    internal::log(LogLevel::kError,
                  std::string(kExtendOp) + ": " + std::string(groups->implementation().name()) +
                      " failed (" + current_reason() + "); states are unchanged, runs kda_prefill");
    return true;
  }
}

KdaExtend::KdaExtend(std::shared_ptr<State> state) : state_(std::move(state)) {}

KdaExtend KdaExtend::plan(const KdaExtendProblem& problem, const Device& device,
                          const Options& options) {
  return KdaExtend(std::make_shared<State>(problem, device, options));
}

size_t KdaExtend::workspace_bytes() const noexcept { return state_->workspace_bytes; }

KdaExtendResult KdaExtend::run(const KdaExtendTensors& tensors, Workspace workspace) const {
  State& state = *state_;
  internal::check_workspace(kExtendOp, state.workspace_bytes, workspace);
  const KdaExtendTensors call = state.checked(tensors);
  internal::WorkspaceCutter cutter(workspace);
  const State::Prepared prepared = state.cut(&cutter);
  std::atomic<int64_t>* way = state.route(call);
  const ExtendCall inputs = state.call_of(call, prepared);
  if (way != &state.dense) {
    state.run_native(call, inputs, prepared);
  } else if (state.groups_failed(inputs, prepared)) {
    way = &state.fallback;
    state.run_native(call, inputs, prepared);
  }
  ++*way;
  KdaExtendResult result{.out = tensors.out, .h = {}};
  if (!call.return_intermediate_states) return result;
  const KdaLayer& layer = state.layer;
  result.h = call.h.defined()
                 ? tensors.h
                 : make_tensor(static_cast<void*>(nullptr), DType::kF32,
                               {1, 0, layer.num_value_heads, layer.head_dim_v, layer.head_dim_k});
  return result;
}

KdaExtendRoutes KdaExtend::routes() const noexcept {
  const State& state = *state_;
  return {state.dense,  state.direct,   state.speculative, state.snapshot,  state.no_lengths,
          state.single, state.refusals, state.fallback,    state.num_groups};
}

}  // namespace fovea::compat
