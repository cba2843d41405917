#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kda/causal_conv1d_cpu.cc"
#include "src/core/simd.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "src/core/parallel.h"
#include "src/core/simd_math.h"
#include "src/kda/causal_conv1d_impl.h"
#include "src/kda/window_simd.h"

HWY_BEFORE_NAMESPACE();
namespace fovea::internal::HWY_NAMESPACE {
namespace {

// Outputs that are computed at a time: they share the loads of the weights and of most inputs.
constexpr int64_t kRowGroup = 4;
// Rows of a prefill that are worth a task, at kConvBlock channels.
constexpr int64_t kRowsPerPiece = 64;
// Rows of an update or requests of a verify in a task: they share the turned weights.
constexpr int64_t kEntriesPerPiece = 16;

// The channels [first, first + count) of a call, and what one worker needs for them.
struct ConvBlock {
  const CausalConv1dProblem* problem;
  Accessor<const bf16_t, 2> x;
  Accessor<bf16_t, 2> out;
  WindowPool<bf16_t> pool;
  int64_t first;
  int64_t count;
  float* weights;   // [kConvWidth + 1][kConvBlock], zeros from `count` on
  bf16_t* history;  // [kConvHistory][kConvBlock]: a window, oldest row first

  const bf16_t* input(int64_t row) const { return x.row(row) + first; }
  bf16_t* output(int64_t row) const { return out.row(row) + first; }
  ChannelRange channels() const { return {first, count}; }
};

template <class T>
float load_scalar(T value) {
  if constexpr (std::is_same_v<T, bf16_t>)
    return bf16_to_float(value);
  else
    return value;
}

// Four taps of Lanes(d) channels that lie side by side, to the four rows at `to`.
HWY_INLINE void turn_taps(F32 d, const float* from, float* to) {
  hn::Vec<F32> w0, w1, w2, w3;
  hn::LoadInterleaved4(d, from, w0, w1, w2, w3);
  hn::StoreU(w0, d, to);
  hn::StoreU(w1, d, to + kConvBlock);
  hn::StoreU(w2, d, to + 2 * kConvBlock);
  hn::StoreU(w3, d, to + 3 * kConvBlock);
}
HWY_INLINE void turn_taps(F32 d, const bf16_t* from, float* to) {
  // A channel's taps are two words; the even taps are their lower halves.
  const hn::RebindToUnsigned<F32> d32;
  hn::Vec<decltype(d32)> low, high;
  hn::LoadInterleaved2(d32, reinterpret_cast<const uint32_t*>(from), low, high);
  const auto upper_half = hn::Set(d32, 0xFFFF0000u);
  hn::StoreU(hn::BitCast(d, hn::ShiftLeft<16>(low)), d, to);
  hn::StoreU(hn::BitCast(d, hn::And(low, upper_half)), d, to + kConvBlock);
  hn::StoreU(hn::BitCast(d, hn::ShiftLeft<16>(high)), d, to + 2 * kConvBlock);
  hn::StoreU(hn::BitCast(d, hn::And(high, upper_half)), d, to + 3 * kConvBlock);
}

// Turns weight [D, 4] into four rows of a block, so that neighbouring channels are neighbours.
template <class T>
void turn_weights(const ConstTensorView& tensor, const ConvBlock& block) {
  const auto weight = access<const T, 2>(tensor);
  const F32 d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  if (weight.stride[0] == kConvWidth) {
    for (; i + lanes <= block.count; i += lanes) {
      turn_taps(d, weight.row(block.first + i), block.weights + i);
    }
  }
  for (; i < block.count; ++i) {
    const T* from = weight.row(block.first + i);
    for (int64_t w = 0; w < kConvWidth; ++w) {
      block.weights[w * kConvBlock + i] = load_scalar(from[w]);
    }
  }
}

template <class T>
void load_bias(const ConstTensorView& tensor, const ConvBlock& block) {
  const T* from = static_cast<const T*>(tensor.data) + block.first;
  for (int64_t i = 0; i < block.count; ++i) {
    block.weights[kConvWidth * kConvBlock + i] = load_scalar(from[i]);
  }
}

void load_weights(const CausalConv1dTensors& tensors, const ConvBlock& block) {
  for (int64_t w = 0; w <= kConvWidth; ++w) {
    std::fill(block.weights + w * kConvBlock + block.count, block.weights + (w + 1) * kConvBlock,
              0.0f);
  }
  if (block.problem->weight_dtype == DType::kBf16)
    turn_weights<bf16_t>(tensors.weight, block);
  else
    turn_weights<float>(tensors.weight, block);
  if (!tensors.bias.defined()) {
    std::fill_n(block.weights + kConvWidth * kConvBlock, block.count, 0.0f);
  } else if (block.problem->bias_dtype == DType::kBf16) {
    load_bias<bf16_t>(tensors.bias, block);
  } else {
    load_bias<float>(tensors.bias, block);
  }
}

// `kRows` consecutive outputs of Lanes(d) channels, from kRows + 3 inputs. Every output is the same
// chain of operations whatever kRows is: bias, then w = 0..3.
template <int64_t kRows, bool kSilu>
HWY_INLINE void convolve_vector(F32 d, const float* weights,
                                const std::array<const bf16_t*, kRows + kConvHistory>& in,
                                const std::array<bf16_t*, kRows>& out, int64_t i) {
  const auto w0 = hn::LoadU(d, weights + i);
  const auto w1 = hn::LoadU(d, weights + kConvBlock + i);
  const auto w2 = hn::LoadU(d, weights + 2 * kConvBlock + i);
  const auto w3 = hn::LoadU(d, weights + 3 * kConvBlock + i);
  const auto bias = hn::LoadU(d, weights + 4 * kConvBlock + i);
  auto x0 = load_bf16(d, in[0] + i);
  auto x1 = load_bf16(d, in[1] + i);
  auto x2 = load_bf16(d, in[2] + i);
  for (int64_t row = 0; row < kRows; ++row) {
    const auto x3 = load_bf16(d, in[static_cast<size_t>(row + kConvHistory)] + i);
    auto y = hn::MulAdd(w0, x0, bias);
    y = hn::MulAdd(w1, x1, y);
    y = hn::MulAdd(w2, x2, y);
    y = hn::MulAdd(w3, x3, y);
    if constexpr (kSilu) {
      y = hn::Div(y, hn::Add(hn::Set(d, 1.0f), exp_f32(d, hn::Neg(y))));
    }
    store_bf16(d, round_to_bf16(d, y), out[static_cast<size_t>(row)] + i);
    x0 = x1;
    x1 = x2;
    x2 = x3;
  }
}

template <int64_t kRows, bool kSilu>
void convolve_rows(const ConvBlock& block,
                   const std::array<const bf16_t*, kRows + kConvHistory>& in,
                   const std::array<bf16_t*, kRows>& out) {
  const F32 d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= block.count; i += lanes) {
    convolve_vector<kRows, kSilu>(d, block.weights, in, out, i);
  }
  const int64_t rest = block.count - i;
  if (rest == 0) return;
  // The last channels go through vectors of their own: nothing behind a row is touched.
  constexpr size_t kLanes = hn::MaxLanes(F32());
  bf16_t staged_in[static_cast<size_t>(kRows + kConvHistory)][kLanes] = {};
  bf16_t staged_out[static_cast<size_t>(kRows)][kLanes];
  std::array<const bf16_t*, kRows + kConvHistory> in_rows;
  std::array<bf16_t*, kRows> out_rows;
  for (size_t row = 0; row < in.size(); ++row) {
    std::memcpy(staged_in[row], in[row] + i, static_cast<size_t>(rest) * sizeof(bf16_t));
    in_rows[row] = staged_in[row];
  }
  for (size_t row = 0; row < out.size(); ++row) out_rows[row] = staged_out[row];
  convolve_vector<kRows, kSilu>(d, block.weights + i, in_rows, out_rows, 0);
  for (size_t row = 0; row < out.size(); ++row) {
    std::memcpy(out[row] + i, staged_out[row], static_cast<size_t>(rest) * sizeof(bf16_t));
  }
}

template <int64_t kRows>
void convolve(const ConvBlock& block, const std::array<const bf16_t*, kRows + kConvHistory>& in,
              const std::array<bf16_t*, kRows>& out) {
  if (block.problem->activation == ConvActivation::kSilu)
    convolve_rows<kRows, true>(block, in, out);
  else
    convolve_rows<kRows, false>(block, in, out);
}

Window load_window(const ConvBlock& block, int64_t slot) {
  return load_window(block.pool, slot, block.channels(), block.history, kConvBlock);
}
void store_window(const ConvBlock& block, int64_t slot, const Window& window) {
  store_window(block.pool, slot, block.channels(), window);
}

// Rows [from, end) of the sequence that begins at `begin`.
void convolve_sequence(const ConvBlock& block, int64_t begin, int64_t from, int64_t end,
                       int64_t start) {
  Window before{};
  if (from - begin < kConvHistory) before = load_window(block, start);
  const auto input = [&](int64_t row) {
    return row >= begin ? block.input(row)
                        : before[static_cast<size_t>(kConvHistory - (begin - row))];
  };
  const auto group = [&]<int64_t kRows>(int64_t row) {
    std::array<const bf16_t*, kRows + kConvHistory> in;
    std::array<bf16_t*, kRows> out;
    for (size_t i = 0; i < in.size(); ++i) {
      in[i] = input(row - kConvHistory + static_cast<int64_t>(i));
    }
    for (size_t i = 0; i < out.size(); ++i) out[i] = block.output(row + static_cast<int64_t>(i));
    convolve<kRows>(block, in, out);
  };
  int64_t row = from;
  for (; row + kRowGroup <= end; row += kRowGroup) group.template operator()<kRowGroup>(row);
  for (; row < end; ++row) group.template operator()<1>(row);
}

// The window of a sequence behind its first `position` rows.
Window window_at(const ConvBlock& block, const SequenceRows& rows, int64_t position,
                 int64_t start) {
  Window before{};
  if (position < kConvHistory) before = load_window(block, start);
  Window window;
  for (int64_t i = 0; i < kConvHistory; ++i) {
    const int64_t row = position - kConvHistory + i;
    window[static_cast<size_t>(i)] =
        row >= 0 ? block.input(rows.begin + row) : before[static_cast<size_t>(kConvHistory + row)];
  }
  return window;
}

// A call: makes the block of a worker.
struct ConvCall {
  const CausalConv1dProblem& problem;
  const CausalConv1dTensors& tensors;
  ConvCpuScratch scratch;
  StateRoutes routes;
  int64_t num_blocks;

  ConvBlock block(int64_t index, int worker) const {
    const int64_t first = index * kConvBlock;
    bf16_t* rows = scratch.rows + worker * ConvCpuScratch::kRowsPerWorker;
    return {&problem,
            access<const bf16_t, 2>(tensors.x),
            access<bf16_t, 2>(tensors.out),
            window_pool<bf16_t>(tensors.window_state, problem.window_layout),
            first,
            std::min(kConvBlock, problem.num_channels - first),
            scratch.weights + worker * ConvCpuScratch::kWeightsPerWorker,
            rows};
  }
  int64_t num_rows() const { return tensors.x.shape[0]; }

  // Calls body(block, begin, end) for the pieces of [0, count), blocks of one piece one after the
  // other, so that neighbouring tasks read neighbouring memory.
  template <class Body>
  void for_each_piece(int64_t count, int64_t grain, const Body& body) const {
    const int64_t pieces = (count + grain - 1) / grain;
    ParallelFor(pieces * num_blocks, 1, [&](int64_t first, int64_t last, int worker) {
      for (int64_t i = first; i < last; ++i) {
        const int64_t begin = i / num_blocks * grain;
        body(block(i % num_blocks, worker), begin, std::min(begin + grain, count));
      }
    });
  }
};

void store_snapshots(const ConvCall& call) {
  const auto seq = access<const int32_t, 1>(call.tensors.snapshot_seq);
  const auto pos = access<const int32_t, 1>(call.tensors.snapshot_pos);
  const auto slot = access<const int32_t, 1>(call.tensors.snapshot_slot);
  const int64_t sequences = call.tensors.q_indptr.shape[0] - 1;
  call.for_each_piece(seq.shape[0], 1, [&](const ConvBlock& block, int64_t m, int64_t) {
    if (seq(m) < 0 || seq(m) >= sequences || !block.pool.contains(slot(m))) return;
    const SequenceRows rows{call.scratch.offsets[seq(m)], call.scratch.offsets[seq(m) + 1]};
    if (pos(m) < 0 || pos(m) > rows.length()) return;
    store_window(block, slot(m), window_at(block, rows, pos(m), call.routes.start(seq(m))));
  });
}

// The windows at the ends of the sequences, after everything that reads the ones at their starts.
void store_ends(const ConvCall& call) {
  const int64_t sequences = call.tensors.q_indptr.shape[0] - 1;
  call.for_each_piece(
      sequences, kEntriesPerPiece, [&](const ConvBlock& block, int64_t first, int64_t last) {
        for (int64_t n = first; n < last; ++n) {
          const SequenceRows rows{call.scratch.offsets[n], call.scratch.offsets[n + 1]};
          const int64_t slot = call.routes.finish(n);
          if (slot < 0) continue;
          if (rows.length() == 0 && call.routes.in_place(n)) continue;
          store_window(block, slot, window_at(block, rows, rows.length(), call.routes.start(n)));
        }
      });
}

void prefill(const ConvCall& call) {
  const PackedOffsets packed(call.tensors.q_indptr, call.num_rows());
  int64_t* const offsets = call.scratch.offsets;
  SequenceReader reader(packed);
  offsets[0] = packed.clamped(0);
  for (int64_t n = 0; n < packed.sequences; ++n) offsets[n + 1] = reader.next().end;
  call.for_each_piece(
      call.num_rows(), kRowsPerPiece, [&](const ConvBlock& block, int64_t first, int64_t last) {
        load_weights(call.tensors, block);
        int64_t n = std::upper_bound(offsets, offsets + packed.sequences + 1, first) - offsets - 1;
        for (n = std::max<int64_t>(n, 0); n < packed.sequences && offsets[n] < last; ++n) {
          const int64_t from = std::max(first, offsets[n]);
          const int64_t end = std::min(last, offsets[n + 1]);
          if (from < end) convolve_sequence(block, offsets[n], from, end, call.routes.start(n));
        }
      });
  if (!call.tensors.window_state.defined()) return;
  store_snapshots(call);
  store_ends(call);
}

void clear(bf16_t* to, int64_t count) {
  std::memset(to, 0, static_cast<size_t>(count) * sizeof(bf16_t));
}

void update(const ConvCall& call) {
  call.for_each_piece(
      call.num_rows(), kEntriesPerPiece, [&](const ConvBlock& block, int64_t first, int64_t last) {
        load_weights(call.tensors, block);
        for (int64_t t = first; t < last; ++t) {
          if (call.routes.is_padding(t)) {
            clear(block.output(t), block.count);
            continue;
          }
          const Window before = load_window(block, call.routes.start(t));
          const bf16_t* const x = block.input(t);
          convolve<1>(block, {before[0], before[1], before[2], x}, {block.output(t)});
          const int64_t slot = call.routes.finish(t);
          if (slot >= 0) store_window(block, slot, {before[1], before[2], x});
        }
      });
}

void verify(const ConvCall& call) {
  const int64_t draft_rows = call.problem.rows_per_request;
  const auto scratch = access<bf16_t, 4>(call.tensors.window_scratch);
  const auto* parent = static_cast<const int32_t*>(call.tensors.parent.data);
  const auto request = [&](const ConvBlock& block, int64_t r) {
    const bool is_padding = call.routes.is_padding(r);
    const Window committed = load_window(block, is_padding ? -1 : call.routes.start(r));
    for (int64_t t = 0; t < draft_rows; ++t) {
      // The path back to the committed state: its last row before t comes last.
      Window before = committed;
      std::array<int64_t, kConvHistory> path{};
      int64_t length = 0;
      for (int64_t node = parent_row(parent, t); node >= 0 && length < kConvHistory;
           node = parent_row(parent, node)) {
        path[static_cast<size_t>(length++)] = node;
      }
      for (int64_t i = length - 1; i >= 0; --i) {
        before = {before[1], before[2], block.input(r * draft_rows + path[static_cast<size_t>(i)])};
      }
      const int64_t row = r * draft_rows + t;
      const bf16_t* const x = block.input(row);
      if (is_padding) {
        clear(block.output(row), block.count);
      } else {
        convolve<1>(block, {before[0], before[1], before[2], x}, {block.output(row)});
      }
      if (!scratch) continue;
      const Window after{before[1], before[2], x};
      for (int64_t i = 0; i < kConvHistory; ++i) {
        bf16_t* const to = scratch.row(r, t, i) + block.first;
        if (is_padding)
          clear(to, block.count);
        else
          std::memcpy(to, after[static_cast<size_t>(i)],
                      static_cast<size_t>(block.count) * sizeof(bf16_t));
      }
    }
  };
  call.for_each_piece(call.num_rows() / draft_rows, kEntriesPerPiece,
                      [&](const ConvBlock& block, int64_t first, int64_t last) {
                        load_weights(call.tensors, block);
                        for (int64_t r = first; r < last; ++r) request(block, r);
                      });
}

void causal_conv1d(const CausalConv1dProblem& problem, const Device& device,
                   const CausalConv1dTensors& tensors, Workspace workspace) {
  WorkspaceCutter cutter(workspace);
  const ConvCpuScratch scratch = cut_conv_scratch(problem, device, &cutter);
  check_conv_contents(problem, tensors, scratch.faults);
  const ConvCall call{problem, tensors, scratch, conv_routes(tensors),
                      (problem.num_channels + kConvBlock - 1) / kConvBlock};
  const ThreadScope threads(device.num_threads);
  switch (problem.mode) {
    case ConvMode::kPrefill:
      return prefill(call);
    case ConvMode::kUpdate:
      return update(call);
    case ConvMode::kVerify:
      return verify(call);
  }
}

}  // namespace
}  // namespace fovea::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fovea::internal {

HWY_EXPORT(causal_conv1d);

void causal_conv1d_cpu(const CausalConv1dProblem& problem, const Device& device,
                       const CausalConv1dTensors& tensors, Workspace workspace) {
  current_cpu_isa();  // applies FOVEA_CPU_ISA before the first dispatch
  HWY_DYNAMIC_DISPATCH(causal_conv1d)(problem, device, tensors, workspace);
}

}  // namespace fovea::internal
#endif
