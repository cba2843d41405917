#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "fovea/kda_commit.h"
#include "fovea/kda_verify.h"
#include "tests/kda/conv_case.h"
#include "tests/kda/kda_case.h"

/// Random problems of kda_verify and kda_commit.
namespace fovea::test {

/// A kda_verify call. Members are free to change between construction and run(); an undefined
/// tensor is left out.
struct VerifyCase {
  KdaVerifyProblem problem;
  KdaInputs inputs;
  Tensor qkv, state, slot, has_initial_state, parent, out, scratch, report;

  VerifyCase(const KdaLayer& layer, VerifyMode mode, int64_t requests, int64_t draft_rows,
             uint64_t seed = 1)
      : inputs(layer, requests * draft_rows, seed) {
    problem.layer = layer;
    problem.mode = mode;
    problem.max_requests = requests;
    problem.rows_per_request = draft_rows;
    state = random_states(layer, requests, seed + 1);
    const int64_t heads = layer.num_value_heads, dim_k = layer.head_dim_k, dim_v = layer.head_dim_v;
    out = Tensor(DType::kBf16, {requests * draft_rows, heads, dim_v});
    out.fill_bytes(0x55);
    scratch = mode == VerifyMode::kStates
                  ? Tensor(DType::kF32, {requests, draft_rows, heads, dim_v, dim_k})
                  : Tensor(DType::kF32, {requests, draft_rows, heads, 2 * dim_k + dim_v});
    scratch.fill_bytes(0x55);
  }

  VerifyCase& with_pool(int64_t slots, const std::vector<int32_t>& slot_of_request,
                        uint64_t seed = 7) {
    state = random_states(problem.layer, slots, seed);
    slot = list_of(slot_of_request);
    return *this;
  }

  int64_t requests() const { return problem.max_requests; }
  int64_t draft_rows() const { return problem.rows_per_request; }
  /// The same call that keeps the other thing.
  VerifyCase in_mode(VerifyMode mode) const {
    VerifyCase other(problem.layer, mode, requests(), draft_rows());
    other.problem.check = problem.check;
    other.inputs = inputs;
    other.qkv = qkv;
    other.state = state;
    other.slot = slot;
    other.has_initial_state = has_initial_state;
    other.parent = parent;
    return other;
  }
  /// The inputs of rows[r][i] of every request r, as a call of rows[r].size() draft rows.
  VerifyCase rows_of(const std::vector<std::vector<int64_t>>& rows) const {
    VerifyCase part(problem.layer, problem.mode, requests(),
                    static_cast<int64_t>(rows.front().size()));
    const auto pick = [&](const Tensor& from, Tensor* to) {
      const auto size = static_cast<int64_t>(from.bytes().size()) / (requests() * draft_rows());
      uint8_t* at = to->data<uint8_t>();
      for (size_t r = 0; r < rows.size(); ++r) {
        for (const int64_t t : rows[r]) {
          at = std::copy_n(
              from.bytes().begin() + (static_cast<int64_t>(r) * draft_rows() + t) * size, size, at);
        }
      }
    };
    pick(inputs.q, &part.inputs.q);
    pick(inputs.k, &part.inputs.k);
    pick(inputs.v, &part.inputs.v);
    pick(inputs.g, &part.inputs.g);
    pick(inputs.beta, &part.inputs.beta);
    part.inputs.a_log = inputs.a_log;
    part.inputs.dt_bias = inputs.dt_bias;
    part.state = state;
    part.slot = slot;
    part.has_initial_state = has_initial_state;
    return part;
  }

  KdaVerifyTensors tensors() {
    KdaVerifyTensors t;
    inputs.bind(&t);
    if (qkv.view().defined()) {
      t.q = t.k = t.v = {};
      t.qkv = qkv;
    }
    t.state = state;
    t.slot = slot;
    t.has_initial_state = has_initial_state;
    t.parent = parent;
    t.out = out;
    t.scratch = scratch;
    t.report = report;
    return t;
  }

  void run(const Options& options, int threads = 1) { run(options, tensors(), threads); }
  void run(const Options& options, const KdaVerifyTensors& t, int threads = 1) {
    test::run(KdaVerify::plan(problem, device_of(options, threads), options), t);
  }
};

/// The bytes of draft row t of request r of a tensor [R, Td, ..] or [R * Td, ..].
inline std::vector<uint8_t> draft_bytes(const Tensor& tensor, int64_t rows, int64_t row) {
  const auto size = static_cast<int64_t>(tensor.bytes().size()) / rows;
  return {tensor.bytes().begin() + row * size, tensor.bytes().begin() + (row + 1) * size};
}

/// A kda_commit of what `verify` kept.
struct CommitCase {
  KdaCommitProblem problem;
  Tensor scratch, accepted, slot, state, in_slot, has_initial_state, parent, track_slot,
      track_accepted, window_scratch, window_state, report;

  CommitCase(const VerifyCase& verify, const std::vector<int32_t>& counts) {
    const KdaLayer& layer = verify.problem.layer;
    problem.num_value_heads = layer.num_value_heads;
    problem.head_dim_k = layer.head_dim_k;
    problem.head_dim_v = layer.head_dim_v;
    problem.state_dtype = layer.state_dtype;
    problem.mode = verify.problem.mode;
    problem.max_requests = verify.requests();
    problem.rows_per_request = verify.draft_rows();
    scratch = verify.scratch;
    state = verify.state;
    slot = verify.slot;
    has_initial_state = verify.has_initial_state;
    parent = verify.parent;
    accepted = list_of(counts);
  }

  /// The windows that the verify of the convolution kept, for the same slots.
  CommitCase& with_windows(const ConvCase& conv) {
    problem.window_layout = conv.problem.window_layout;
    window_scratch = conv.window_scratch;
    window_state = conv.window_state;
    return *this;
  }
  CommitCase& with_tracks(const std::vector<int32_t>& slots, const std::vector<int32_t>& counts) {
    track_slot = list_of(slots);
    track_accepted = list_of(counts);
    return *this;
  }

  KdaCommitTensors tensors() {
    KdaCommitTensors t;
    t.scratch = scratch;
    t.accepted = accepted;
    t.slot = slot;
    t.state = state;
    t.in_slot = in_slot;
    t.has_initial_state = has_initial_state;
    t.parent = parent;
    t.track_slot = track_slot;
    t.track_accepted = track_accepted;
    t.window_scratch = window_scratch;
    t.window_state = window_state;
    t.report = report;
    return t;
  }

  void run(const Options& options, int threads = 1) { run(options, tensors(), threads); }
  void run(const Options& options, const KdaCommitTensors& t, int threads = 1) {
    test::run(KdaCommit::plan(problem, device_of(options, threads), options), t);
  }
};

}  // namespace fovea::test
