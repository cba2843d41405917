#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "fovea/causal_conv1d.h"
#include "tests/support/compare.h"
#include "tests/support/memory.h"
#include "tests/support/rng.h"
#include "tests/support/targets.h"

/// Random problems of the short convolution.
namespace fovea::test {

/// Bits of the window of one slot: [3][D], oldest first, whatever the layout.
using WindowBits = std::vector<uint16_t>;

inline WindowBits window_bits(const Tensor& pool, WindowLayout layout, int64_t slot) {
  const ConstTensorView view = pool.view();
  const bool is_wd = layout == WindowLayout::kWd;
  const int64_t channels = view.shape[is_wd ? 2 : 1];
  WindowBits bits;
  for (int64_t row = 0; row < kConvHistory; ++row) {
    for (int64_t d = 0; d < channels; ++d) {
      const int64_t at = is_wd ? row * channels + d : d * kConvHistory + row;
      bits.push_back(pool.data<bf16_t>()[slot * kConvHistory * channels + at].bits);
    }
  }
  return bits;
}

/// A window pool [slots, 3, D] or [slots, D, 3] of random values.
inline Tensor random_windows(int64_t slots, int64_t channels, WindowLayout layout, uint64_t seed) {
  Rng rng(seed);
  const std::vector<bf16_t> values = rng.bf16_normals(slots * kConvHistory * channels);
  return layout == WindowLayout::kWd ? Tensor::bf16({slots, kConvHistory, channels}, values)
                                     : Tensor::bf16({slots, channels, kConvHistory}, values);
}

inline Tensor list_of(const std::vector<int32_t>& values) {
  return Tensor::i32({static_cast<int64_t>(values.size())}, values);
}
inline Tensor flags_of(const std::vector<uint8_t>& values) {
  return Tensor::from(DType::kU8, {static_cast<int64_t>(values.size())}, values);
}

/// A causal_conv1d call. Members are free to change between construction and run(); an undefined
/// tensor is left out.
struct ConvCase {
  CausalConv1dProblem problem;
  Tensor x, weight, bias, window_state, q_indptr, in_slot, out_slot, slot, has_initial_state;
  Tensor snapshot_seq, snapshot_pos, snapshot_slot, parent, out, window_scratch, report;

  /// Random rows, weights and bias.
  ConvCase(ConvMode mode, int64_t rows, int64_t channels, uint64_t seed = 1) {
    Rng rng(seed);
    problem.mode = mode;
    problem.num_channels = channels;
    problem.max_rows = rows;
    x = Tensor::bf16({rows, channels}, rng.bf16_normals(rows * channels));
    weight = Tensor::bf16({channels, kConvWidth}, rng.bf16_normals(channels * kConvWidth, 0.5f));
    bias = Tensor::bf16({channels}, rng.bf16_normals(channels, 0.3f));
    out = Tensor(DType::kBf16, {rows, channels});
    out.fill_bytes(0x55);
  }

  static ConvCase prefill(const std::vector<int32_t>& lengths, int64_t channels,
                          uint64_t seed = 1) {
    std::vector<int32_t> offsets{0};
    for (const int32_t length : lengths) offsets.push_back(offsets.back() + length);
    ConvCase call(ConvMode::kPrefill, offsets.back(), channels, seed);
    call.problem.max_sequences = static_cast<int64_t>(lengths.size());
    call.q_indptr = list_of(offsets);
    return call;
  }
  static ConvCase verify(int64_t requests, int64_t draft_rows, int64_t channels,
                         uint64_t seed = 1) {
    ConvCase call(ConvMode::kVerify, requests * draft_rows, channels, seed);
    call.problem.rows_per_request = draft_rows;
    call.window_scratch = Tensor(DType::kBf16, {requests, draft_rows, kConvHistory, channels});
    call.window_scratch.fill_bytes(0x55);
    return call;
  }

  ConvCase& with_windows(int64_t slots, WindowLayout layout, uint64_t seed = 7) {
    problem.window_layout = layout;
    window_state = random_windows(slots, problem.num_channels, layout, seed);
    return *this;
  }
  ConvCase& with_slots(const std::vector<int32_t>& in, const std::vector<int32_t>& to) {
    in_slot = list_of(in);
    out_slot = list_of(to);
    return *this;
  }
  ConvCase& with_snapshots(const std::vector<int32_t>& sequence,
                           const std::vector<int32_t>& position, const std::vector<int32_t>& to) {
    problem.max_snapshots = static_cast<int64_t>(sequence.size());
    snapshot_seq = list_of(sequence);
    snapshot_pos = list_of(position);
    snapshot_slot = list_of(to);
    return *this;
  }
  /// fp32 weights and bias.
  ConvCase& widened() {
    problem.weight_dtype = problem.bias_dtype = DType::kF32;
    for (Tensor* tensor : {&weight, &bias}) {
      const std::vector<double> values = to_doubles(tensor->view());
      const bool is_bias = tensor == &bias;
      const std::vector<float> floats(values.begin(), values.end());
      const int64_t channels = problem.num_channels;
      *tensor =
          is_bias ? Tensor::f32({channels}, floats) : Tensor::f32({channels, kConvWidth}, floats);
    }
    return *this;
  }

  int64_t rows() const { return x.view().shape[0]; }
  WindowBits window(int64_t at) const {
    return window_bits(window_state, problem.window_layout, at);
  }
  /// Bits of the inputs of three rows: what a window of them holds.
  WindowBits inputs(std::array<int64_t, kConvHistory> from) const {
    WindowBits bits;
    for (const int64_t row : from) {
      for (int64_t d = 0; d < problem.num_channels; ++d) {
        bits.push_back(x.data<bf16_t>()[row * problem.num_channels + d].bits);
      }
    }
    return bits;
  }

  CausalConv1dTensors tensors() {
    CausalConv1dTensors t;
    t.x = x;
    t.weight = weight;
    t.bias = bias;
    t.window_state = window_state;
    t.q_indptr = q_indptr;
    t.in_slot = in_slot;
    t.out_slot = out_slot;
    t.slot = slot;
    t.has_initial_state = has_initial_state;
    t.snapshot_seq = snapshot_seq;
    t.snapshot_pos = snapshot_pos;
    t.snapshot_slot = snapshot_slot;
    t.parent = parent;
    t.out = out;
    t.window_scratch = window_scratch;
    t.report = report;
    return t;
  }

  void run(const Options& options, int threads = 1) { run(options, tensors(), threads); }
  void run(const Options& options, const CausalConv1dTensors& t, int threads = 1) {
    test::run(CausalConv1d::plan(problem, device_of(options, threads), options), t);
  }
};

/// Window bits that follow `window` after inputs `rows` of a call.
inline WindowBits window_after(const ConvCase& call, const WindowBits& window,
                               const std::vector<int64_t>& rows) {
  const auto channels = static_cast<size_t>(call.problem.num_channels);
  WindowBits all = window;
  for (const int64_t row : rows) {
    for (size_t d = 0; d < channels; ++d) {
      all.push_back(call.x.data<bf16_t>()[static_cast<size_t>(row) * channels + d].bits);
    }
  }
  return WindowBits(all.end() - static_cast<int64_t>(kConvHistory * channels), all.end());
}

/// The out tensor within the rounding of bf16: fp32 sums of four products and an exponential. The
/// terms of a sum near zero may cancel, which bounds the error by theirs.
inline constexpr Tolerance kConvOutput{.absolute = 2e-6, .relative = 1.01 / 128, .cosine = 1e-6};

}  // namespace fovea::test
