#include "src/replay/v4_inputs.h"

#include <algorithm>
#include <array>
#include <vector>

#include "fovea/numeric.h"
#include "src/core/tensor_generator.h"

namespace fovea::internal {
namespace {

// Weights of what queries lean to: powers of two.
constexpr float kQueryFactor = 0.5f;
constexpr float kIndexQueryFactor = 1.0f;

// The token of an entry's group whose logits stand out, and by how much: in an average of many
// independent values it is the one that shows.
int64_t anchor_of(int64_t ratio) { return ratio == kCsaRatio ? 1 : 64; }
float prominence_of(int64_t ratio) { return ratio == kCsaRatio ? 2.0f : 3.0f; }

void make_prominent(int64_t ratio, int64_t width, std::span<float> ape) {
  const int64_t channels = compressor_channels(ratio, width);
  float* const row = ape.data() + anchor_of(ratio) * channels;
  // Of ratio 4 the second half of the channels is that of an entry's own group.
  for (int64_t c = channels - width; c < channels; ++c) row[c] += prominence_of(ratio);
}

}  // namespace

void V4Inputs::window_key(int64_t layer, uint64_t token_id, std::span<bf16_t> kv) const {
  generate_noise({seed_, token_id, layer, TensorKind::kLatentK}, kv);
}

void V4Inputs::gate(int64_t layer, uint64_t token_id, std::span<float> gate) const {
  generate_noise({seed_, token_id, layer, TensorKind::kCompressGate}, gate);
}

void V4Inputs::index_gate(int64_t layer, uint64_t token_id, std::span<float> gate) const {
  generate_noise({seed_, token_id, layer, TensorKind::kIndexCompressGate}, gate);
}

void V4Inputs::lean_to(int64_t layer, int64_t request, int64_t entry, bool index,
                       std::span<bf16_t> base) const {
  const int64_t ratio = this->ratio(layer);
  const auto width = static_cast<int64_t>(base.size());
  const uint64_t token = workload_.token_id(request, entry * ratio + anchor_of(ratio));
  std::array<float, 2 * kV4Width> storage;
  const std::span values(storage.data(), static_cast<size_t>(compressor_channels(ratio, width)));
  index ? index_gate(layer, token, values) : gate(layer, token, values);
  std::transform(values.end() - width, values.end() - kV4RopeDim, base.begin(), bf16_from_float);
  std::fill(base.end() - kV4RopeDim, base.end(), bf16_t{0});
}

void V4Inputs::query(int64_t layer, const RowToken& row, std::span<bf16_t> q) const {
  const TensorStream stream{seed_, row.token_id, layer, TensorKind::kQ};
  const int64_t ratio = this->ratio(layer);
  const int64_t entries = ratio == 0 ? 0 : (row.position + 1) / ratio;
  std::array<bf16_t, kV4Width> base;
  for (int64_t group = 0; group < std::min(kTargets, num_heads_); ++group) {
    if (entries > 0 && group % 2 == kEntryGroup) {
      lean_to(layer, row.request, entry_target(seed_, layer, row, group, entries), false, base);
    } else {
      const int64_t token = window_target(seed_, layer, row, group, shape_.window);
      // A row's own token may be one that was drafted wrong.
      window_key(layer,
                 token == row.position ? row.token_id : workload_.token_id(row.request, token),
                 base);
    }
    for (int64_t h = group; h < num_heads_; h += kTargets) {
      generate_noise_around(stream, {base, kQueryFactor, h * kV4Width},
                            q.subspan(static_cast<size_t>(h * kV4Width), base.size()));
    }
  }
}

void V4Inputs::index_query(int64_t layer, const RowToken& row, std::span<bf16_t> index_q) const {
  const TensorStream stream{seed_, row.token_id, layer, TensorKind::kIndexQ};
  const int64_t entries = (row.position + 1) / kCsaRatio;
  std::array<bf16_t, kV4IndexDim> base{};
  for (int64_t group = 0; group < std::min(kTargets, shape_.index_heads); ++group) {
    // The entries that groups of query heads lean to.
    const int64_t wanted = group - group % 2 + kEntryGroup;
    if (entries > 0) {
      lean_to(layer, row.request, entry_target(seed_, layer, row, wanted, entries), true, base);
    }
    for (int64_t h = group; h < shape_.index_heads; h += kTargets) {
      generate_noise_around(stream, {base, kIndexQueryFactor, h * kV4IndexDim},
                            index_q.subspan(static_cast<size_t>(h * kV4IndexDim), base.size()));
    }
  }
}

void V4Inputs::head_gate(int64_t layer, uint64_t token_id, std::span<float> gate) const {
  generate_noise({seed_, token_id, layer, TensorKind::kHeadGate}, gate);
  for (float& value : gate) value += 0.75f;
}

void V4Inputs::weights(int64_t layer, const V4LayerWeights& weights) const {
  generate_noise({seed_, 0, layer, TensorKind::kSink}, weights.sink);
  const int64_t ratio = this->ratio(layer);
  if (ratio == 0) return;
  generate_noise({seed_, 0, layer, TensorKind::kApe}, weights.ape);
  generate_noise({seed_, 0, layer, TensorKind::kCompressNorm}, weights.norm_weight);
  for (float& value : weights.norm_weight) value = 1.0f + value * 0.125f;
  make_prominent(ratio, kV4Width, weights.ape);
  if (ratio != kCsaRatio) return;
  generate_noise({seed_, 0, layer, TensorKind::kIndexApe}, weights.index_ape);
  generate_noise({seed_, 0, layer, TensorKind::kIndexCompressNorm}, weights.index_norm_weight);
  for (float& value : weights.index_norm_weight) value = 1.0f + value * 0.125f;
  make_prominent(ratio, kV4IndexDim, weights.index_ape);
}

void V4Inputs::cos_sin(bool compresses, int64_t num_positions, float* table) {
  constexpr int64_t kPairs = kV4RopeDim / 2;
  std::vector<double> frequencies = rotary_frequencies(compresses ? 160000 : 10000, kPairs);
  if (compresses) {
    // Pairs that turn more than 32 times within the original context keep their frequency, those
    // that turn less than once have it divided: 64 ln(65536 / (2 pi n)) / (2 ln 160000) is 15.4 for
    // n = 32 and 24.7 for n = 1.
    constexpr double kFirst = 15, kLast = 25, kFactor = 16;
    for (int64_t i = 0; i < kPairs; ++i) {
      const double share =
          std::clamp((static_cast<double>(i) - kFirst) / (kLast - kFirst), 0.0, 1.0);
      double& frequency = frequencies[static_cast<size_t>(i)];
      frequency = frequency / kFactor * share + frequency * (1 - share);
    }
  }
  generate_cos_sin(frequencies, num_positions, table);
}

}  // namespace fovea::internal
