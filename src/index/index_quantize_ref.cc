#include <algorithm>
#include <bit>
#include <cmath>

#include "fovea/numeric.h"
#include "src/core/access.h"
#include "src/core/fp8_tile.h"
#include "src/core/workspace.h"
#include "src/index/index_quantize_impl.h"

namespace fovea::internal {
namespace {

double rounded(double value) { return bf16_to_float(bf16_from_float(static_cast<float>(value))); }

// A row of Di channels: the values so far (each one a bf16), and where a step puts its results.
struct Row {
  double* x;
  double* y;
  int64_t count;
};

// x <- (x - mean) / sqrt(variance + eps) * weight + bias
void layer_norm(const Row& row, const float* weight, const float* bias) {
  double mean = 0;
  for (int64_t i = 0; i < row.count; ++i) mean += row.x[i];
  mean /= static_cast<double>(row.count);
  double variance = 0;
  for (int64_t i = 0; i < row.count; ++i) variance += (row.x[i] - mean) * (row.x[i] - mean);
  variance /= static_cast<double>(row.count);
  for (int64_t i = 0; i < row.count; ++i) {
    const double normal = (row.x[i] - mean) / std::sqrt(variance + kIndexNormEps);
    row.x[i] = rounded(normal * static_cast<double>(weight[i]) + static_cast<double>(bias[i]));
  }
}

// (a, b) <- (a cos - b sin, b cos + a sin) for each pair of the first `rope` channels.
void rotate(const Row& row, int64_t rope, RopeStyle style, const float* cos_sin) {
  for (int64_t i = 0; i < rope / 2; ++i) {
    const int64_t first = style == RopeStyle::kHalfSplit ? i : 2 * i;
    const int64_t second = style == RopeStyle::kHalfSplit ? i + rope / 2 : 2 * i + 1;
    const double cosine = cos_sin[i];
    const double sine = cos_sin[rope / 2 + i];
    const double a = row.x[first];
    const double b = row.x[second];
    row.x[first] = rounded(a * cosine - b * sine);
    row.x[second] = rounded(b * cosine + a * sine);
  }
}

// y_i = Di^-1/2 sum_j (-1)^popcount(i & j) x_j: the Sylvester-Hadamard matrix in natural order.
void hadamard(const Row& row) {
  for (int64_t i = 0; i < row.count; ++i) {
    double sum = 0;
    for (int64_t j = 0; j < row.count; ++j) {
      sum += std::popcount(static_cast<uint64_t>(i & j)) % 2 == 0 ? row.x[j] : -row.x[j];
    }
    row.y[i] = rounded(sum / std::sqrt(static_cast<double>(row.count)));
  }
  std::copy(row.y, row.y + row.count, row.x);
}

struct Scratch {
  double* x;
  double* y;
  bf16_t* narrow;

  Scratch(const IndexQuantizeProblem& problem, WorkspaceCutter& cutter)
      : x(cutter.take<double>(problem.head_dim)),
        y(cutter.take<double>(problem.head_dim)),
        narrow(cutter.take<bf16_t>(problem.head_dim)) {}
};

// Norm (k only), rope, rotation, quantisation of one row; returns its scale.
float quantize_row(const IndexQuantizeProblem& problem, const IndexQuantizeTensors& tensors,
                   const Scratch& scratch, const bf16_t* source, bool norm, int64_t t,
                   uint8_t* codes) {
  const Row row{scratch.x, scratch.y, problem.head_dim};
  for (int64_t i = 0; i < row.count; ++i) row.x[i] = bf16_to_float(source[i]);
  if (norm) {
    layer_norm(row, access<const float, 1>(tensors.norm_weight).data,
               access<const float, 1>(tensors.norm_bias).data);
  }
  if (problem.rope_dim > 0) {
    const auto cos_sin = access<const float, 2>(tensors.cos_sin);
    const int64_t position = access<const int32_t, 1>(tensors.positions)(t);
    rotate(row, problem.rope_dim, problem.rope_style,
           cos_sin.row(std::clamp<int64_t>(position, 0, cos_sin.shape[0] - 1)));
  }
  if (problem.hadamard) hadamard(row);
  for (int64_t i = 0; i < row.count; ++i) {
    scratch.narrow[i] = bf16_from_float(static_cast<float>(row.x[i]));  // exact
  }
  return quantize_tile(scratch.narrow, row.count, index_tile_scale, problem.scale_mode, codes);
}

}  // namespace

size_t index_quantize_ref_bytes(const IndexQuantizeProblem& problem, const Device&) {
  WorkspaceCutter cutter({});
  Scratch(problem, cutter);
  return cutter.used_bytes();
}

void index_quantize_ref(const IndexQuantizeProblem& problem, const Device&,
                        const IndexQuantizeTensors& tensors, Workspace workspace) {
  WorkspaceCutter cutter(workspace);
  const Scratch scratch(problem, cutter);
  const auto q = access<const bf16_t, 3>(tensors.q);
  const auto head_gate = access<const float, 2>(tensors.head_gate);
  const auto q_fp8 = access<uint8_t, 3>(tensors.q_fp8);
  const auto q_scale = access<float, 2>(tensors.q_scale);
  const auto head_weight = access<float, 2>(tensors.head_weight);
  const double per_head =
      1 / std::sqrt(static_cast<double>(problem.num_heads) * static_cast<double>(problem.head_dim));
  for (int64_t t = 0; t < q.shape[0]; ++t) {
    for (int64_t h = 0; h < problem.num_heads; ++h) {
      const float scale =
          quantize_row(problem, tensors, scratch, q.row(t, h), false, t, q_fp8.row(t, h));
      q_scale(t, h) = scale;
      head_weight(t, h) = static_cast<float>(static_cast<double>(head_gate(t, h)) * per_head *
                                             static_cast<double>(scale));
    }
  }
  const auto k = access<const bf16_t, 2>(tensors.k);
  const auto k_fp8 = access<uint8_t, 2>(tensors.k_fp8);
  const auto k_scale = access<float, 1>(tensors.k_scale);
  for (int64_t t = 0; t < k.shape[0]; ++t) {
    k_scale(t) = quantize_row(problem, tensors, scratch, k.row(t), true, t, k_fp8.row(t));
  }
}

}  // namespace fovea::internal
