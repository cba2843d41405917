#include <array>
#include <cmath>

#include "fovea/numeric.h"
#include "src/core/element.h"
#include "src/kda/causal_conv1d_impl.h"

namespace fovea::internal {
namespace {

using Window = std::array<bf16_t, kConvHistory>;

// One call; `channel` is d of the formula.
struct ConvReference {
  const CausalConv1dProblem& problem;
  const CausalConv1dTensors& tensors;
  StateRoutes routes;
  WindowPool<bf16_t> pool;
  Accessor<const bf16_t, 2> x;
  Accessor<bf16_t, 2> out;

  // The window of a slot; zeros for -1.
  Window window(int64_t slot, int64_t channel) const {
    Window result{};
    for (int64_t row = 0; slot >= 0 && row < kConvHistory; ++row) {
      result[static_cast<size_t>(row)] = *pool.at(slot, row, channel);
    }
    return result;
  }
  void store(const Window& window, int64_t slot, int64_t channel) const {
    if (slot < 0) return;
    for (int64_t row = 0; row < kConvHistory; ++row) {
      *pool.at(slot, row, channel) = window[static_cast<size_t>(row)];
    }
  }

  // y of a row whose history is `before`.
  bf16_t result(const Window& before, bf16_t input, int64_t channel) const {
    const auto weight = [&](int64_t w) {
      return element(tensors.weight, channel * kConvWidth + w);
    };
    double sum = tensors.bias.defined() ? element(tensors.bias, channel) : 0;
    for (int64_t w = 0; w < kConvHistory; ++w) {
      sum += weight(w) * bf16_to_float(before[static_cast<size_t>(w)]);
    }
    sum += weight(kConvHistory) * bf16_to_float(input);
    if (problem.activation == ConvActivation::kSilu) sum /= 1 + std::exp(-sum);
    return bf16_from_float(static_cast<float>(sum));
  }
};

Window shifted(const Window& window, bf16_t input) { return {window[1], window[2], input}; }

void prefill(const ConvReference& conv, int64_t channel) {
  const CausalConv1dTensors& tensors = conv.tensors;
  const PackedOffsets offsets(tensors.q_indptr, conv.x.shape[0]);
  const auto snapshot_seq = access<const int32_t, 1>(tensors.snapshot_seq);
  const auto snapshot_pos = access<const int32_t, 1>(tensors.snapshot_pos);
  const auto snapshot_slot = access<const int32_t, 1>(tensors.snapshot_slot);
  SequenceReader reader(offsets);
  for (int64_t n = 0; n < offsets.sequences; ++n) {
    const SequenceRows rows = reader.next();
    Window window = conv.window(conv.routes.start(n), channel);
    for (int64_t position = 0; position <= rows.length(); ++position) {
      for (int64_t m = 0; m < snapshot_seq.shape[0]; ++m) {
        if (snapshot_seq(m) != n || snapshot_pos(m) != position) continue;
        if (conv.pool.contains(snapshot_slot(m))) conv.store(window, snapshot_slot(m), channel);
      }
      if (position == rows.length()) break;
      const bf16_t input = conv.x(rows.begin + position, channel);
      conv.out(rows.begin + position, channel) = conv.result(window, input, channel);
      window = shifted(window, input);
    }
    const bool stays = rows.length() == 0 && conv.routes.in_place(n);
    if (!stays) conv.store(window, conv.routes.finish(n), channel);
  }
}

void update(const ConvReference& conv, int64_t channel) {
  for (int64_t t = 0; t < conv.x.shape[0]; ++t) {
    if (conv.routes.is_padding(t)) {
      conv.out(t, channel) = bf16_t{};
      continue;
    }
    const Window window = conv.window(conv.routes.start(t), channel);
    const bf16_t input = conv.x(t, channel);
    conv.out(t, channel) = conv.result(window, input, channel);
    conv.store(shifted(window, input), conv.routes.finish(t), channel);
  }
}

void verify(const ConvReference& conv, int64_t channel) {
  const int64_t draft_rows = conv.problem.rows_per_request;
  const auto scratch = access<bf16_t, 4>(conv.tensors.window_scratch);
  const auto* parent = static_cast<const int32_t*>(conv.tensors.parent.data);
  for (int64_t r = 0; r < conv.x.shape[0] / draft_rows; ++r) {
    const bool is_padding = conv.routes.is_padding(r);
    for (int64_t t = 0; t < draft_rows; ++t) {
      // The window behind row t: its path back to the committed state, three inputs of it.
      Window before = conv.window(is_padding ? -1 : conv.routes.start(r), channel);
      std::array<int64_t, kConvHistory> path{};
      int64_t length = 0;
      for (int64_t node = parent_row(parent, t); node >= 0 && length < kConvHistory;
           node = parent_row(parent, node)) {
        path[static_cast<size_t>(length++)] = node;
      }
      for (int64_t i = length - 1; i >= 0; --i) {
        before = shifted(before, conv.x(r * draft_rows + path[static_cast<size_t>(i)], channel));
      }
      const bf16_t input = conv.x(r * draft_rows + t, channel);
      conv.out(r * draft_rows + t, channel) =
          is_padding ? bf16_t{} : conv.result(before, input, channel);
      const Window after = is_padding ? Window{} : shifted(before, input);
      for (int64_t row = 0; scratch && row < kConvHistory; ++row) {
        scratch(r, t, row, channel) = after[static_cast<size_t>(row)];
      }
    }
  }
}

}  // namespace

// The operator channel by channel: y = activation(bias + sum_w weight[w] x[t - 3 + w]).
void causal_conv1d_ref(const CausalConv1dProblem& problem, const Device&,
                       const CausalConv1dTensors& tensors, Workspace workspace) {
  WorkspaceCutter cutter(workspace);
  check_conv_contents(problem, tensors, cut_conv_check_scratch(problem, &cutter));
  const ConvReference conv{problem,
                           tensors,
                           conv_routes(tensors),
                           window_pool<bf16_t>(tensors.window_state, problem.window_layout),
                           access<const bf16_t, 2>(tensors.x),
                           access<bf16_t, 2>(tensors.out)};
  for (int64_t channel = 0; channel < problem.num_channels; ++channel) {
    if (problem.mode == ConvMode::kPrefill) prefill(conv, channel);
    if (problem.mode == ConvMode::kUpdate) update(conv, channel);
    if (problem.mode == ConvMode::kVerify) verify(conv, channel);
  }
}

}  // namespace fovea::internal
