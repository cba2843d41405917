#include "tests/serving/dsa_random_steps_model.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>

#include "fovea/numeric.h"
#include "tests/serving/dsa_rig.h"
#include "tests/support/compare.h"
#include "tests/support/rng.h"

namespace fovea::test {
namespace {

constexpr int64_t kWidth = 576;
constexpr int64_t kLatent = 512;

double round_bf16(double value) {
  return double{bf16_to_float(bf16_from_float(static_cast<float>(value)))};
}

std::vector<bf16_t> uniform_bf16(Rng& rng, int64_t count) {
  std::vector<bf16_t> values(static_cast<size_t>(count));
  for (bf16_t& value : values) value = bf16_from_float(rng.uniform(-1.5f, 1.5f));
  return values;
}

std::vector<float> decode_codes(const Tensor& codes) {
  std::vector<float> values;
  for (const uint8_t code : codes.values<uint8_t>()) values.push_back(e4m3_to_float(code));
  return values;
}

IndexQuantizeProblem one_row(const DsaConfig& config) {
  IndexQuantizeProblem problem;
  problem.max_rows = 1;
  problem.num_heads = config.index_heads;
  problem.head_dim = config.index_dim;
  problem.rope_dim = config.rope_dim;
  problem.rope_style = config.index_rope_style;
  problem.hadamard = config.hadamard;
  problem.scale_mode = config.index_scale_mode;
  return problem;
}

}  // namespace

void expect_equal(int64_t actual, int64_t expected, const char* what, int64_t index) {
  if (actual == expected) return;
  throw StepFailure(std::string(what) + "[" + std::to_string(index) +
                    "] = " + std::to_string(actual) + ", expected " + std::to_string(expected));
}

TokenImages::TokenImages(const DsaConfig& config)
    : config_(config),
      cos_sin_(make_cos_sin(config.table_width, config.rope_dim)),
      norm_weight_(make_norm_weight(config.index_dim)),
      norm_bias_(make_norm_bias(config.index_dim)),
      quantize_(IndexQuantize::plan(one_row(config), Device::cpu(1))) {
  workspace_.reserve(quantize_.workspace_bytes());
}

const TokenImage& TokenImages::at(int layer, int32_t token, int64_t position) {
  const uint64_t key = (static_cast<uint64_t>(layer) << 56) | (static_cast<uint64_t>(token) << 24) |
                       static_cast<uint64_t>(position);
  std::unique_ptr<TokenImage>& image = images_[key];
  if (image == nullptr) image = std::make_unique<TokenImage>(make(layer, token, position));
  return *image;
}

TokenImage TokenImages::make(int layer, int32_t token, int64_t position) {
  Rng rng(static_cast<uint64_t>(layer) * 1000000007u + static_cast<uint64_t>(token) * 10007u +
          static_cast<uint64_t>(position) + 5u);
  TokenImage image;
  image.q = uniform_bf16(rng, config_.num_heads * kWidth);
  image.k = uniform_bf16(rng, kWidth);
  image.index_q = uniform_bf16(rng, config_.index_heads * config_.index_dim);
  image.index_k = uniform_bf16(rng, config_.index_dim);
  image.gate = rng.normals(config_.index_heads);
  pack_latent(image);
  quantize_index(image, position);
  return image;
}

// docs/formats.md, a scalar at a time.
void TokenImages::pack_latent(TokenImage& image) const {
  const auto append = [&](const auto& value) {
    const auto* const bytes = reinterpret_cast<const uint8_t*>(&value);
    image.row.insert(image.row.end(), bytes, bytes + sizeof(value));
  };
  if (config_.row_format == RowFormat::kBf16) {
    for (const bf16_t value : image.k) append(value);
    return;
  }
  if (config_.row_format != RowFormat::kV32) {
    for (const bf16_t value : image.k) append(e4m3_from_float(bf16_to_float(value) / kF576Scale));
    return;
  }
  std::vector<float> scales;
  for (size_t tile = 0; tile < 4; ++tile) {
    float amax = 0;
    for (size_t i = 0; i < 128; ++i) {
      amax = std::max(amax, std::fabs(bf16_to_float(image.k[tile * 128 + i])));
    }
    const float scale = amax / 448.0f;
    scales.push_back(config_.kv_scale_mode == ScaleMode::kFp32
                         ? scale
                         : std::exp2(std::ceil(std::log2(std::max(scale, 1e-4f)))));
    for (size_t i = 0; i < 128; ++i) {
      append(e4m3_from_float(bf16_to_float(image.k[tile * 128 + i]) / scales.back()));
    }
  }
  for (const float scale : scales) append(scale);
  for (size_t i = static_cast<size_t>(kLatent); i < static_cast<size_t>(kWidth); ++i) {
    append(image.k[i]);
  }
}

// LayerNorm, rope and rotation of one index vector in fp64, each rounded to bf16.
std::vector<double> TokenImages::index_vector(const bf16_t* source, bool norm,
                                              int64_t position) const {
  const auto dim = static_cast<size_t>(config_.index_dim);
  const auto rope = static_cast<size_t>(config_.rope_dim);
  std::vector<double> x(dim);
  for (size_t i = 0; i < dim; ++i) x[i] = double{bf16_to_float(source[i])};
  if (norm) {
    const double count = static_cast<double>(dim);
    const double mean = std::accumulate(x.begin(), x.end(), 0.0) / count;
    double variance = 0;
    for (const double value : x) variance += (value - mean) * (value - mean) / count;
    for (size_t i = 0; i < dim; ++i) {
      x[i] = round_bf16((x[i] - mean) / std::sqrt(variance + 1e-6) *
                            double{norm_weight_.data<float>()[i]} +
                        double{norm_bias_.data<float>()[i]});
    }
  }
  const float* const angles = cos_sin_.data<float>() + position * config_.rope_dim;
  for (size_t i = 0; i < rope / 2; ++i) {
    const bool half = config_.index_rope_style == RopeStyle::kHalfSplit;
    double& a = x[half ? i : 2 * i];
    double& b = x[half ? i + rope / 2 : 2 * i + 1];
    const double cosine = double{angles[i]}, sine = double{angles[rope / 2 + i]};
    const double turned = round_bf16(a * cosine - b * sine);
    b = round_bf16(b * cosine + a * sine);
    a = turned;
  }
  if (!config_.hadamard) return x;
  std::vector<double> rotated(dim);
  for (size_t i = 0; i < dim; ++i) {
    for (size_t j = 0; j < dim; ++j) rotated[i] += std::popcount(i & j) % 2 == 0 ? x[j] : -x[j];
    rotated[i] = round_bf16(rotated[i] / std::sqrt(static_cast<double>(dim)));
  }
  return rotated;
}

// Codes follow from bf16 values whose last bit may differ from the fp64 form's.
void TokenImages::check_codes(std::span<const double> exact, std::span<const float> codes,
                              float scale) const {
  double amax = 1e-4;
  for (const double value : exact) amax = std::max(amax, std::fabs(value));
  const double unit = amax / 448;
  const double expected =
      config_.index_scale_mode == ScaleMode::kFp32 ? unit : std::exp2(std::ceil(std::log2(unit)));
  const double ratio = double{scale} / expected;
  bool good = ratio > 0.98 && ratio < 1.02;
  // A bf16 maximum next to a power of two may round to either side of it.
  if (config_.index_scale_mode == ScaleMode::kPow2) good = good || ratio == 2 || ratio == 0.5;
  for (size_t i = 0; i < exact.size(); ++i) {
    const double error = std::fabs(double{codes[i]} * double{scale} - exact[i]);
    // Half a step of e4m3 and two of bf16.
    good = good && error <= (0x1p-4 + 0x1p-7) * std::fabs(exact[i]) + 0x1p-9 * double{scale} +
                                0x1p-7 * amax;
  }
  if (!good) throw StepFailure("an index vector is far from its fp64 form");
}

void TokenImages::quantize_index(TokenImage& image, int64_t position) {
  const int64_t heads = config_.index_heads, dim = config_.index_dim;
  const Tensor q = Tensor::bf16({1, heads, dim}, image.index_q),
               k = Tensor::bf16({1, dim}, image.index_k),
               gate = Tensor::f32({1, heads}, image.gate),
               positions = Tensor::i32({1}, {static_cast<int32_t>(position)});
  Tensor q_fp8(DType::kU8, {1, heads, dim}), k_fp8(DType::kU8, {1, dim}),
      q_scale(DType::kF32, {1, heads}), k_scale(DType::kF32, {1}), weight(DType::kF32, {1, heads});
  IndexQuantizeTensors tensors;
  tensors.q = q;
  tensors.k = k;
  tensors.norm_weight = norm_weight_;
  tensors.norm_bias = norm_bias_;
  tensors.head_gate = gate;
  tensors.positions = positions;
  tensors.cos_sin = cos_sin_;
  tensors.q_fp8 = q_fp8;
  tensors.q_scale = q_scale;
  tensors.k_fp8 = k_fp8;
  tensors.k_scale = k_scale;
  tensors.head_weight = weight;
  quantize_.run(tensors, workspace_.workspace());
  image.index_codes = k_fp8.values<uint8_t>();
  image.index_scale = k_scale.data<float>()[0];
  image.score_key = decode_codes(k_fp8);
  image.score_query = decode_codes(q_fp8);
  image.score_weight = weight.values<float>();
  check_codes(index_vector(image.index_k.data(), true, position), image.score_key,
              image.index_scale);
  for (int64_t h = 0; h < heads; ++h) {
    const float scale = q_scale.data<float>()[h];
    check_codes(index_vector(image.index_q.data() + h * dim, false, position),
                std::span(image.score_query)
                    .subspan(static_cast<size_t>(h * dim), static_cast<size_t>(dim)),
                scale);
    const double expected = double{image.gate[static_cast<size_t>(h)]} * double{scale} /
                            std::sqrt(static_cast<double>(heads * dim));
    const double actual = double{image.score_weight[static_cast<size_t>(h)]};
    if (std::fabs(actual - expected) > 1e-6 * std::fabs(expected)) {
      throw StepFailure("a head weight is not gate * scale / sqrt(Hi * Di)");
    }
  }
}

std::vector<double> decode_row(const DsaConfig& config, const TokenImage& image) {
  std::vector<double> values;
  if (config.row_format == RowFormat::kBf16) {
    for (const bf16_t value : image.k) values.push_back(double{bf16_to_float(value)});
    return values;
  }
  const bool tiles = config.row_format == RowFormat::kV32;
  for (size_t i = 0; i < static_cast<size_t>(tiles ? kLatent : kWidth); ++i) {
    float scale = kF576Scale;
    if (tiles) std::memcpy(&scale, image.row.data() + kLatent + 4 * (i / 128), sizeof(scale));
    values.push_back(double{bf16_to_float(bf16_from_float(e4m3_to_float(image.row[i]) * scale))});
  }
  for (size_t i = values.size(); i < static_cast<size_t>(kWidth); ++i) {
    values.push_back(double{bf16_to_float(image.k[i])});
  }
  return values;
}

ModelSelection select_positions(const DsaConfig& config, const TokenImage& query,
                                std::span<const TokenImage* const> keys) {
  const auto topk = static_cast<size_t>(config.topk),
             heads = static_cast<size_t>(config.index_heads),
             dim = static_cast<size_t>(config.index_dim);
  ModelSelection selection;
  selection.positions.assign(topk, -1);
  if (keys.size() <= topk) {
    std::iota(selection.positions.begin(),
              selection.positions.begin() + static_cast<std::ptrdiff_t>(keys.size()), 0);
    return selection;
  }
  double largest = 0;
  for (const TokenImage* key : keys) {
    double logit = 0, magnitude = 0;
    for (size_t h = 0; h < heads; ++h) {
      double dot = 0, absolute = 0;
      for (size_t d = 0; d < dim; ++d) {
        const double product = double{query.score_query[h * dim + d]} * double{key->score_key[d]};
        dot += product;
        absolute += std::fabs(product);
      }
      logit += double{query.score_weight[h]} * std::max(0.0, dot);
      magnitude += std::fabs(double{query.score_weight[h]}) * absolute;
    }
    selection.logits.push_back(logit * double{key->index_scale});
    largest = std::max(largest, magnitude * double{key->index_scale});
  }
  selection.slack = 0x1p-19 * largest;
  std::vector<int32_t> order(keys.size());
  std::iota(order.begin(), order.end(), 0);
  // Stable: of equal logits the lower position comes first.
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return selection.logits[static_cast<size_t>(a)] > selection.logits[static_cast<size_t>(b)];
  });
  std::copy_n(order.begin(), topk, selection.positions.begin());
  std::sort(selection.positions.begin(), selection.positions.end());
  return selection;
}

bool is_legal_selection(const ModelSelection& expected, std::span<const int32_t> positions) {
  const std::vector<double>& logits = expected.logits;
  const auto len = static_cast<int32_t>(logits.size());
  double kth = std::numeric_limits<double>::infinity();
  for (const int32_t position : expected.positions) {
    if (position < 0) return false;
    kth = std::min(kth, logits[static_cast<size_t>(position)]);
  }
  for (size_t i = 0; i < positions.size(); ++i) {
    if (positions[i] < 0 || positions[i] >= len) return false;
    if (i > 0 && positions[i] <= positions[i - 1]) return false;
    if (logits[static_cast<size_t>(positions[i])] < kth - expected.slack) return false;
  }
  for (int32_t j = 0; j < len; ++j) {
    const bool chosen = std::binary_search(positions.begin(), positions.end(), j);
    if (!chosen && logits[static_cast<size_t>(j)] > kth + expected.slack) return false;
  }
  return true;
}

void check_attention(const DsaConfig& config, double softmax_scale, const TokenImage& query,
                     std::span<const TokenImage* const> keys, std::span<const int32_t> positions,
                     const bf16_t* out, const float* lse) {
  std::vector<std::vector<double>> rows;
  for (const int32_t position : positions) {
    if (position >= 0) rows.push_back(decode_row(config, *keys[static_cast<size_t>(position)]));
  }
  for (size_t h = 0; h < static_cast<size_t>(config.num_heads); ++h) {
    std::vector<double> scores;
    for (const std::vector<double>& row : rows) {
      double dot = 0;
      for (size_t d = 0; d < row.size(); ++d) {
        dot += double{bf16_to_float(query.q[h * row.size() + d])} * row[d];
      }
      scores.push_back(dot * softmax_scale);
    }
    const double largest = *std::max_element(scores.begin(), scores.end());
    double sum = 0;
    for (const double score : scores) sum += std::exp(score - largest);
    const double expected_lse = largest + std::log(sum);
    if (!(std::fabs(double{lse[h]} - expected_lse) <= 1e-4 * std::max(1.0, largest))) {
      throw StepFailure("lse = " + std::to_string(lse[h]) + ", expected " +
                        std::to_string(expected_lse));
    }
    std::vector<double> expected(static_cast<size_t>(kLatent)), actual;
    for (size_t i = 0; i < rows.size(); ++i) {
      const double weight = std::exp(scores[i] - expected_lse);
      for (size_t d = 0; d < expected.size(); ++d) expected[d] += weight * rows[i][d];
    }
    for (size_t d = 0; d < expected.size(); ++d) {
      actual.push_back(double{bf16_to_float(out[h * expected.size() + d])});
    }
    const double error = relative_rms(actual, expected);
    if (!(error <= 5e-3)) {
      throw StepFailure("output of head " + std::to_string(h) + " is off by " +
                        std::to_string(error) + " (relative rms)");
    }
  }
}

}  // namespace fovea::test
