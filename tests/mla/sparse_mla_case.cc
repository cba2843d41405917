#include "tests/mla/sparse_mla_case.h"

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstring>
#include <limits>

#include "fovea/metadata.h"
#include "fovea/numeric.h"
#include "tests/support/targets.h"

namespace fovea::test {
namespace {

constexpr int64_t kV32Bytes = 656;
constexpr long double kInfinity = std::numeric_limits<long double>::infinity();

uint16_t bits_of(double bf16_value) { return bf16_from_float(static_cast<float>(bf16_value)).bits; }

uint32_t bits_of_f32(double value) { return std::bit_cast<uint32_t>(static_cast<float>(value)); }

struct HeadFormula {
  long double sum = 0;  // of exp(s_j)
  long double largest = -kInfinity;
  std::vector<double> value;      // sum_j exp(s_j) / sum * v_j
  std::vector<double> magnitude;  // the same of |v_j|
};

HeadFormula apply_formula(const SparseMlaProblem& problem, const std::vector<double>& query,
                          const std::vector<const double*>& keys) {
  HeadFormula head;
  std::vector<long double> weights;
  for (const double* key : keys) {
    double dot[4] = {};  // four chains of additions, for speed
    for (size_t d = 0; d < query.size(); ++d) dot[d % 4] += query[d] * key[d];
    long double logit =
        static_cast<long double>(problem.softmax_scale) * (dot[0] + dot[1] + dot[2] + dot[3]);
    if (problem.logit_cap > 0) logit = problem.logit_cap * std::tanh(logit / problem.logit_cap);
    if (std::isnan(logit) || logit > head.largest) head.largest = logit;
    weights.push_back(std::exp(logit));
    head.sum += weights.back();
  }
  head.value.assign(512, 0);
  head.magnitude.assign(512, 0);
  for (size_t j = 0; j < keys.size(); ++j) {
    const auto weight = static_cast<double>(weights[j] / head.sum);
    for (size_t d = 0; d < 512; ++d) {
      head.value[d] += weight * keys[j][d];
      head.magnitude[d] += weight * std::fabs(keys[j][d]);
    }
  }
  return head;
}

}  // namespace

int64_t latent_row_bytes(RowFormat format, int64_t head_dim_qk) {
  if (format == RowFormat::kV32) return kV32Bytes;
  if (format == RowFormat::kR512) return 512;
  return format == RowFormat::kF576 || format == RowFormat::kV4 ? 576 : 2 * head_dim_qk;
}

int64_t latent_page_bytes(RowFormat format, int64_t head_dim_qk, int64_t page_size) {
  const int64_t apart = format == RowFormat::kV4 ? 8 : 0;
  return page_size * (latent_row_bytes(format, head_dim_qk) + apart);
}

namespace {

void write_v4_row(const std::vector<float>& values, Rng& rng, uint8_t* row, uint8_t* scales,
                  double* decoded) {
  for (int64_t d = 0; d < 448; ++d) {
    // 2^-10 .. 2^-8; the byte after the scales is left as it was.
    if (d % 64 == 0) scales[d / 64] = static_cast<uint8_t>(rng.integer(117, 119));
    const auto scale = std::ldexp(1.0f, scales[d / 64] - 127);
    row[d] = e4m3_from_float(values[static_cast<size_t>(d)] / scale);
    decoded[d] = static_cast<double>(e4m3_to_float(row[d])) * scale;
  }
  for (int64_t d = 448; d < 512; ++d) {
    const bf16_t value = bf16_from_float(values[static_cast<size_t>(d)]);
    std::memcpy(row + 448 + (d - 448) * 2, &value, 2);
    decoded[d] = bf16_to_float(value);
  }
}

void write_r512_row(const std::vector<float>& values, Rng& rng, uint8_t* row, ApartScales scales,
                    double* decoded) {
  float scale = 0.003f * (0.5f + static_cast<float>(rng.uniform()));
  if (scales.bf16) {
    const bf16_t stored = bf16_from_float(scale);
    std::memcpy(scales.bytes, &stored, 2);
    scale = bf16_to_float(stored);
  } else {
    std::memcpy(scales.bytes, &scale, 4);
  }
  for (int64_t d = 0; d < 512; ++d) {
    row[d] = e4m3_from_float(values[static_cast<size_t>(d)] / scale);
    decoded[d] = bf16_to_float(bf16_from_float(e4m3_to_float(row[d]) * scale));
  }
}

}  // namespace

void write_latent_row(RowFormat format, int64_t head_dim_qk, float k_scale, Rng& rng, uint8_t* row,
                      double* decoded, ApartScales scales) {
  const std::vector<float> values = rng.normals(head_dim_qk, 0.3f);
  if (format == RowFormat::kV4) return write_v4_row(values, rng, row, scales.bytes, decoded);
  if (format == RowFormat::kR512) return write_r512_row(values, rng, row, scales, decoded);
  if (format == RowFormat::kF576) {
    for (int64_t d = 0; d < 576; ++d) {
      row[d] = e4m3_from_float(values[static_cast<size_t>(d)] / k_scale);
      decoded[d] = static_cast<double>(k_scale) * e4m3_to_float(row[d]);
    }
    return;
  }
  const int64_t num_codes = format == RowFormat::kV32 ? 512 : 0;
  for (int64_t d = 0; d < num_codes; ++d) {
    const float* tile = values.data() + d / 128 * 128;
    if (d % 128 == 0) {
      // An arbitrary fp32 scale, not a power of two.
      const float scale = 0.003f * (0.5f + static_cast<float>(rng.uniform()));
      std::memcpy(row + 512 + d / 128 * 4, &scale, 4);
    }
    float scale;
    std::memcpy(&scale, row + 512 + d / 128 * 4, 4);
    row[d] = e4m3_from_float(tile[d % 128] / scale);
    decoded[d] = bf16_to_float(bf16_from_float(e4m3_to_float(row[d]) * scale));
  }
  for (int64_t d = num_codes; d < head_dim_qk; ++d) {
    const bf16_t value = bf16_from_float(values[static_cast<size_t>(d)]);
    std::memcpy(row + (num_codes > 0 ? 528 + (d - 512) * 2 : d * 2), &value, 2);
    decoded[d] = bf16_to_float(value);
  }
}

StridedTensor::StridedTensor(DType dtype, std::vector<int64_t> shape, std::vector<int64_t> pads,
                             uint8_t fill)
    : fill_(fill) {
  view_.dtype = dtype;
  view_.rank = static_cast<int>(shape.size());
  int64_t stride = 1;
  int64_t last = 0;  // offset of the last element
  bool empty = false;
  for (size_t axis = shape.size(); axis-- > 0;) {
    view_.shape[axis] = shape[axis];
    view_.stride[axis] = stride;
    last += (shape[axis] - 1) * stride;
    empty = empty || shape[axis] == 0;
    stride *= shape[axis] + pads[axis];
  }
  bytes_ = empty ? 0 : (last + 1) * static_cast<int64_t>(size_of(dtype));
  memory_ = std::make_shared<GuardedMemory>(static_cast<size_t>(bytes_));
  view_.data = memory_->data();
  if (bytes_ > 0) std::memset(view_.data, fill, static_cast<size_t>(bytes_));
}

bool StridedTensor::gaps_untouched() const {
  if (bytes_ == 0) return true;
  const auto element = static_cast<int64_t>(size_of(view_.dtype));
  std::vector<char> owned(static_cast<size_t>(bytes_), 0);
  for (int64_t flat = 0; flat < view_.num_elements(); ++flat) {
    int64_t rest = flat;
    int64_t offset = 0;
    for (int axis = view_.rank - 1; axis >= 0; --axis) {
      const auto i = static_cast<size_t>(axis);
      offset += rest % view_.shape[i] * view_.stride[i];
      rest /= view_.shape[i];
    }
    std::fill_n(owned.begin() + offset * element, element, 1);
  }
  const auto* data = static_cast<const uint8_t*>(view_.data);
  for (int64_t i = 0; i < bytes_; ++i) {
    if (owned[static_cast<size_t>(i)] == 0 && data[i] != fill_) return false;
  }
  return true;
}

testing::AssertionResult SameBits(const Outputs& a, const Outputs& b) {
  if (a.out_bits != b.out_bits) return testing::AssertionFailure() << "out differs";
  if (a.lse_bits != b.lse_bits) return testing::AssertionFailure() << "lse differs";
  if (a.max_logits_bits != b.max_logits_bits)
    return testing::AssertionFailure() << "max_logits differs";
  return testing::AssertionSuccess();
}

std::vector<CaseSpec> few_keys_share_the_weight() {
  std::vector<CaseSpec> specs;
  for (const int64_t topk : {2, 4, 5, 11}) {
    for (uint64_t seed = 7; seed < 12; ++seed) {
      specs.push_back({.rows = 2,
                       .heads = 20,
                       .primary = {RowFormat::kBf16, 0, 40, topk},
                       .invalid_share = 0,
                       .q_scale = 2,
                       .seed = seed});
    }
  }
  return specs;
}

SparseMlaCase::SparseMlaCase(const CaseSpec& spec) : spec_(spec) {
  Rng rng(spec.seed);
  q = StridedTensor(spec.q_code_scale > 0 ? DType::kU8 : DType::kBf16,
                    {spec.rows, spec.heads, spec.head_dim_qk}, {0, 1, 128}, 0xFF);
  for (int64_t t = 0; t < spec.rows; ++t) {
    for (int64_t h = 0; h < spec.heads; ++h) {
      for (int64_t d = 0; d < spec.head_dim_qk; ++d)
        set_q(t, h, d, spec.q_scale * std::clamp(rng.normal(), -1.0f, 1.0f));
    }
  }
  build_cache(caches_[0], spec.primary, rng);
  if (spec.extra.num_keys > 0) build_cache(caches_[1], spec.extra, rng);
  if (spec.sink) {
    sink = StridedTensor(DType::kF32, {spec.heads}, {0}, 0);
    for (int64_t h = 0; h < spec.heads; ++h) {
      const double kind = rng.uniform();
      sink.at<float>({h}) = kind < 0.3 ? INFINITY : kind < 0.6 ? -INFINITY : 3 * rng.normal();
    }
  }
  if (spec.rope_dim > 0) build_rotation(rng);
}

// Positions before, inside and past the table.
void SparseMlaCase::build_rotation(Rng& rng) {
  const int64_t max_pos = 9, half = spec_.rope_dim / 2;
  inverse_rope = StridedTensor(DType::kF32, {max_pos, spec_.rope_dim}, {0, 5}, 0xFF);
  positions = StridedTensor(DType::kI32, {spec_.rows}, {0}, 0);
  for (int64_t p = 0; p < max_pos; ++p) {
    for (int64_t i = 0; i < half; ++i) {
      const auto angle = 3.0 * rng.uniform() * static_cast<double>(p);
      inverse_rope.at<float>({p, i}) = static_cast<float>(std::cos(angle));
      inverse_rope.at<float>({p, half + i}) = static_cast<float>(std::sin(angle));
    }
  }
  const int32_t special[] = {INT_MIN, -1, 0, 8, 9, INT_MAX};
  for (int64_t t = 0; t < spec_.rows; ++t) {
    positions.at<int32_t>({t}) =
        rng.uniform() < 0.3 ? special[rng.integer(0, 5)] : static_cast<int32_t>(rng.integer(0, 8));
  }
}

void SparseMlaCase::turn_back(int64_t t, std::vector<double>& value,
                              std::vector<double>& magnitude) const {
  const int64_t half = spec_.rope_dim / 2;
  for (int64_t i = 0; i < half; ++i) {
    const int64_t p = std::clamp(positions.at<int32_t>({t}), 0, 8);
    const double cosine = inverse_rope.at<float>({p, i});
    const double sine = inverse_rope.at<float>({p, half + i});
    const int64_t at = 512 - 2 * half + 2 * i;
    double* pair = value.data() + at;
    const double x = pair[0], y = pair[1];
    pair[0] = cosine * x + sine * y;
    pair[1] = cosine * y - sine * x;
    double* most = magnitude.data() + at;
    const double most_x = most[0], most_y = most[1];
    most[0] = std::fabs(cosine) * most_x + std::fabs(sine) * most_y;
    most[1] = std::fabs(cosine) * most_y + std::fabs(sine) * most_x;
  }
}

void SparseMlaCase::set_q(int64_t t, int64_t h, int64_t d, float value) {
  if (spec_.q_code_scale > 0)
    q.at<uint8_t>({t, h, d}) = e4m3_from_float(value / spec_.q_code_scale);
  else
    q.at<bf16_t>({t, h, d}) = bf16_from_float(value);
}

double SparseMlaCase::query(int64_t t, int64_t h, int64_t d) const {
  if (spec_.q_code_scale == 0) return bf16_to_float(q.at<bf16_t>({t, h, d}));
  return static_cast<double>(spec_.q_code_scale) * e4m3_to_float(q.at<uint8_t>({t, h, d}));
}

void SparseMlaCase::build_cache(Cache& cache, const CacheSpec& spec, Rng& rng) {
  cache.spec = spec;
  // Byte 0xFF everywhere: NaN as bf16, as e4m3 and as fp32 scale.
  cache.pool =
      spec.page_size == 0
          ? StridedTensor(DType::kBf16, {spec.num_keys, spec_.head_dim_qk}, {0, 128}, 0xFF)
          : StridedTensor(DType::kU8,
                          {spec.num_keys / spec.page_size,
                           latent_page_bytes(spec.format, spec_.head_dim_qk, spec.page_size)},
                          {0, spec.page_pad}, 0xFF);
  if (spec.format == RowFormat::kR512) {
    cache.inv_scale = StridedTensor(spec.bf16_scale ? DType::kBf16 : DType::kF32,
                                    {spec.num_keys, 1}, {0, 2}, 0xFF);
  }
  cache.keys.assign(static_cast<size_t>(spec.num_keys * spec_.head_dim_qk), std::nan(""));
  std::vector<char> referenced(static_cast<size_t>(spec.num_keys), 0);
  if (spec.max_pages > 0) {
    build_table(cache, rng);
  } else {
    build_lists(cache, rng);
  }
  for (int64_t t = 0; t < spec_.rows; ++t) {
    for (const int64_t key : keys_of(cache, t)) referenced[static_cast<size_t>(key)] = 1;
  }
  for (int64_t key = 0; key < spec.num_keys; ++key) {
    if (referenced[static_cast<size_t>(key)] != 0) write_key(cache, key, rng);
  }
}

// Tables with pages that are not there and requests that are none; columns past the lengths hold
// anything.
void SparseMlaCase::build_table(Cache& cache, Rng& rng) {
  const CacheSpec& spec = cache.spec;
  const int64_t requests = 3, pages = spec.num_keys / std::max<int64_t>(1, spec.page_size);
  const auto count = static_cast<int32_t>(pages);
  const int32_t bad[] = {-1, INT_MIN, count, INT_MAX, count + 1000};
  cache.page_table = StridedTensor(DType::kI32, {requests, spec.max_pages}, {0, 3}, 0x7F);
  for (int64_t r = 0; r < requests; ++r) {
    for (int64_t column = 0; column < spec.max_pages; ++column) {
      cache.page_table.at<int32_t>({r, column}) =
          rng.uniform() < spec_.invalid_share ? bad[rng.integer(0, 4)]
                                              : static_cast<int32_t>(rng.integer(0, pages - 1));
    }
  }
  cache.row_to_request = StridedTensor(DType::kI32, {spec_.rows}, {0}, 0);
  cache.length = StridedTensor(DType::kI32, {spec_.rows}, {0}, 0);
  const int32_t outside[] = {-1, 3, INT_MIN, INT_MAX};
  const int64_t special[] = {0, -7, INT_MIN, spec.topk, INT_MAX};
  for (int64_t t = 0; t < spec_.rows; ++t) {
    cache.row_to_request.at<int32_t>({t}) =
        rng.uniform() < 0.15 ? outside[rng.integer(0, 3)] : static_cast<int32_t>(rng.integer(0, 2));
    cache.length.at<int32_t>({t}) = static_cast<int32_t>(
        rng.uniform() < 0.3 ? special[rng.integer(0, 4)] : rng.integer(0, spec.topk));
  }
}

void SparseMlaCase::build_lists(Cache& cache, Rng& rng) {
  const CacheSpec& spec = cache.spec;
  const auto keys = static_cast<int32_t>(spec.num_keys);
  const int32_t bad[] = {INT_MIN,        -123456, -1,         keys,   keys + 114514,
                         1919810 + keys, -keys,   2147480000, INT_MAX};
  cache.indices = StridedTensor(DType::kI32, {spec_.rows, spec.topk}, {0, 5}, 0x7F);
  if (spec.lengths) cache.length = StridedTensor(DType::kI32, {spec_.rows}, {0}, 0);
  for (int64_t t = 0; t < spec_.rows; ++t) {
    // Key 0 stays unreferenced where there is a choice: masked slots must not read it.
    const auto any_key = [&] {
      return static_cast<int32_t>(rng.integer(keys > 1 ? 1 : 0, keys - 1));
    };
    if (spec.lengths) {
      const int64_t special[] = {0, -7, INT_MIN, spec.topk, INT_MAX};
      cache.length.at<int32_t>({t}) = static_cast<int32_t>(
          rng.uniform() < 0.3 ? special[rng.integer(0, 4)] : rng.integer(0, spec.topk));
    }
    const int64_t length = list_length(cache, t);
    for (int64_t slot = 0; slot < spec.topk; ++slot) {
      int32_t& index = cache.indices.at<int32_t>({t, slot});
      if (slot >= length) {
        index = rng.uniform() < 0.5 ? 0 : bad[rng.integer(0, 8)];
      } else if (rng.uniform() < spec_.invalid_share) {
        index = bad[rng.integer(0, 8)];
      } else {
        index = any_key();
      }
    }
  }
}

int64_t SparseMlaCase::list_length(const Cache& cache, int64_t t) {
  const CacheSpec& spec = cache.spec;
  if (spec.max_pages > 0) {
    const int32_t request = cache.row_to_request.at<int32_t>({t});
    if (request < 0 || request >= 3) return 0;
    const int64_t most = std::min(spec.topk, spec.max_pages * std::max<int64_t>(1, spec.page_size));
    return std::clamp<int64_t>(cache.length.at<int32_t>({t}), 0, most);
  }
  if (!spec.lengths) return spec.topk;
  return std::clamp<int64_t>(cache.length.at<int32_t>({t}), 0, spec.topk);
}

std::vector<int64_t> SparseMlaCase::keys_of(const Cache& cache, int64_t t) {
  const CacheSpec& spec = cache.spec;
  std::vector<int64_t> keys;
  if (spec.num_keys == 0) return keys;
  const int64_t page_size = std::max<int64_t>(1, spec.page_size);
  for (int64_t slot = 0; slot < list_length(cache, t); ++slot) {
    int64_t key = 0;
    if (spec.max_pages > 0) {
      const int64_t page =
          cache.page_table.at<int32_t>({cache.row_to_request.at<int32_t>({t}), slot / page_size});
      key = page * page_size + slot % page_size;
    } else {
      key = cache.indices.at<int32_t>({t, slot});
    }
    if (key >= 0 && key < spec.num_keys) keys.push_back(key);
  }
  return keys;
}

std::vector<int64_t> SparseMlaCase::keys_of(int cache, int64_t t) const {
  return keys_of(caches_[static_cast<size_t>(cache)], t);
}

void SparseMlaCase::write_key(Cache& cache, int64_t key, Rng& rng) {
  const CacheSpec& spec = cache.spec;
  const int64_t page = spec.page_size == 0 ? key : key / spec.page_size;
  auto* const start =
      static_cast<uint8_t*>(cache.pool.view().data) +
      page * cache.pool.view().stride[0] * static_cast<int64_t>(size_of(cache.pool.view().dtype));
  const int64_t offset = spec.page_size > 0 ? key % spec.page_size : 0;
  ApartScales scales;
  if (spec.format == RowFormat::kV4) scales.bytes = start + spec.page_size * 576 + offset * 8;
  if (spec.format == RowFormat::kR512) {
    scales.bf16 = spec.bf16_scale;
    scales.bytes = spec.bf16_scale
                       ? reinterpret_cast<uint8_t*>(&cache.inv_scale.at<bf16_t>({key, 0}))
                       : reinterpret_cast<uint8_t*>(&cache.inv_scale.at<float>({key, 0}));
  }
  write_latent_row(spec.format, spec_.head_dim_qk, spec_.k_scale, rng,
                   start + offset * latent_row_bytes(spec.format, spec_.head_dim_qk),
                   cache.keys.data() + key * spec_.head_dim_qk, scales);
}

int32_t& SparseMlaCase::index(int cache, int64_t t, int64_t slot) const {
  return caches_[static_cast<size_t>(cache)].indices.at<int32_t>({t, slot});
}

int32_t& SparseMlaCase::topk_length_of(int cache, int64_t t) const {
  return caches_[static_cast<size_t>(cache)].length.at<int32_t>({t});
}

double SparseMlaCase::key(int cache, int64_t key, int64_t d) const {
  return caches_[static_cast<size_t>(cache)].keys[static_cast<size_t>(key * spec_.head_dim_qk + d)];
}

SparseMlaProblem SparseMlaCase::problem() const {
  SparseMlaProblem problem;
  problem.max_rows = spec_.rows;
  problem.num_heads = spec_.heads;
  problem.head_dim_qk = spec_.head_dim_qk;
  problem.topk = spec_.primary.topk;
  problem.extra_topk = spec_.extra.topk;
  problem.softmax_scale = static_cast<float>(std::pow(spec_.head_dim_qk, -0.55));
  problem.row_format = spec_.primary.format;
  problem.page_size = spec_.primary.page_size;
  if (spec_.extra.num_keys > 0) {
    problem.extra_row_format = spec_.extra.format;
    problem.extra_page_size = spec_.extra.page_size;
    problem.extra_max_pages = spec_.extra.max_pages;
  }
  problem.inverse_rope_dim = spec_.rope_dim;
  problem.empty_lse = spec_.empty_lse;
  problem.logit_cap = spec_.logit_cap;
  if (spec_.q_code_scale > 0) problem.q_scale = spec_.q_code_scale;
  problem.k_scale = spec_.k_scale;
  problem.fixed_splits = spec_.fixed_splits;
  problem.split_parts = spec_.split_parts;
  return problem;
}

StridedTensor SparseMlaCase::schedule(int64_t begin, int64_t end, StridedTensor* indptr) const {
  StridedTensor lengths(DType::kI32, {end - begin}, {0}, 0);
  for (int64_t t = begin; t < end; ++t) {
    lengths.at<int32_t>({t - begin}) = spec_.primary.lengths
                                           ? caches_[0].length.at<int32_t>({t})
                                           : static_cast<int32_t>(spec_.primary.topk);
  }
  StridedTensor lines(DType::kI32, {spec_.split_parts, 8}, {0, 3}, 0x7F);
  *indptr = StridedTensor(DType::kI32, {end - begin + 1}, {0}, 0x7F);
  const SplitSchedule plan =
      SplitSchedule::plan({end - begin, spec_.split_parts}, Device::cpu(1), {"ref"});
  HostBuffer scratch(plan.workspace_bytes());
  plan.run({lengths.view(), lines.view(), indptr->view()}, scratch.workspace());
  return lines;
}

SparseMlaTensors SparseMlaCase::tensors(int64_t begin, int64_t end, Buffers& buffers) const {
  const int64_t rows = end - begin;
  buffers.out = StridedTensor(DType::kBf16, {rows, spec_.heads, 512}, {0, 1, 128}, 0xAB);
  buffers.lse = StridedTensor(DType::kF32, {rows, spec_.heads}, {0, 3}, 0xAB);
  buffers.max_logits = StridedTensor(DType::kF32, {rows, spec_.heads}, {0, 1}, 0xAB);
  SparseMlaTensors tensors;
  tensors.q = slice_rows(q.view(), begin, end);
  tensors.kv = caches_[0].pool.view();
  tensors.indices = slice_rows(caches_[0].indices.view(), begin, end);
  if (spec_.primary.lengths) tensors.topk_length = slice_rows(caches_[0].length.view(), begin, end);
  if (spec_.sink) tensors.sink = sink.view();
  if (spec_.extra.num_keys > 0) {
    const Cache& extra = caches_[1];
    tensors.extra_kv = extra.pool.view();
    tensors.extra_inv_scale = extra.inv_scale.view();
    if (spec_.extra.max_pages > 0) {
      tensors.extra_page_table = extra.page_table.view();
      tensors.extra_len = slice_rows(extra.length.view(), begin, end);
      tensors.row_to_request = slice_rows(extra.row_to_request.view(), begin, end);
    } else {
      tensors.extra_indices = slice_rows(extra.indices.view(), begin, end);
      if (spec_.extra.lengths)
        tensors.extra_topk_length = slice_rows(extra.length.view(), begin, end);
    }
  }
  tensors.inv_scale = caches_[0].inv_scale.view();
  if (spec_.rope_dim > 0) {
    tensors.inverse_rope = inverse_rope.view();
    tensors.positions = slice_rows(positions.view(), begin, end);
  }
  if (spec_.split_parts > 0) {
    buffers.schedule = schedule(begin, end, &buffers.indptr);
    tensors.split_schedule =
        schedule_override.view().defined() ? schedule_override.view() : buffers.schedule.view();
    tensors.split_indptr = buffers.indptr.view();
  }
  tensors.out = buffers.out.view();
  tensors.lse = buffers.lse.view();
  tensors.max_logits = buffers.max_logits.view();
  return tensors;
}

Outputs SparseMlaCase::run(const SparseMlaProblem& problem, const SparseMlaTensors& tensors,
                           const Options& options, int threads) {
  const SparseMla plan = SparseMla::plan(problem, test::device_of(options, threads), options);
  // Whole lines of 64 bytes, so that the workspace is aligned and ends at a guard page.
  const size_t bytes = plan.workspace_bytes();
  EXPECT_EQ(bytes % 64, 0u);
  GuardedMemory scratch(bytes);
  if (bytes > 0) std::memset(scratch.data(), 0xFF, bytes);
  plan.run(tensors, Workspace{scratch.data(), bytes});
  return outputs_of(tensors, plan.implementation().name);
}

Outputs SparseMlaCase::outputs_of(const SparseMlaTensors& tensors,
                                  std::string_view implementation) {
  Outputs outputs;
  outputs.rounds_weights = rounds_weights(implementation);
  outputs.out = to_doubles(tensors.out);
  outputs.lse = to_doubles(tensors.lse);
  outputs.max_logits = to_doubles(tensors.max_logits);
  for (const double value : outputs.out) outputs.out_bits.push_back(bits_of(value));
  for (const double value : outputs.lse) outputs.lse_bits.push_back(bits_of_f32(value));
  for (const double value : outputs.max_logits)
    outputs.max_logits_bits.push_back(bits_of_f32(value));
  return outputs;
}

Outputs SparseMlaCase::run(const Options& options, int threads, int64_t begin, int64_t end) {
  Buffers buffers;
  const SparseMlaTensors tensors = this->tensors(begin, end < 0 ? spec_.rows : end, buffers);
  const Outputs outputs = run(problem(), tensors, options, threads);
  EXPECT_TRUE(buffers.out.gaps_untouched() && buffers.lse.gaps_untouched() &&
              buffers.max_logits.gaps_untouched())
      << "wrote between the rows of an output";
  return outputs;
}

Outputs SparseMlaCase::run_by(Runner runner, std::string_view implementation) {
  Buffers buffers;
  const SparseMlaTensors tensors = this->tensors(0, spec_.rows, buffers);
  runner(problem(), tensors);
  EXPECT_TRUE(buffers.out.gaps_untouched() && buffers.lse.gaps_untouched() &&
              buffers.max_logits.gaps_untouched())
      << "wrote between the rows of an output";
  return outputs_of(tensors, implementation);
}

Outputs SparseMlaCase::run_head(const Options& options, int64_t head) {
  SparseMlaProblem problem = this->problem();
  problem.num_heads = 1;
  Buffers buffers;
  SparseMlaTensors tensors = this->tensors(0, spec_.rows, buffers);
  const auto take_head = [&](auto& view) {
    using Data = decltype(view.data);
    view.shape[1] = 1;
    const int64_t bytes = head * view.stride[1] * static_cast<int64_t>(size_of(view.dtype));
    using Byte = std::conditional_t<std::is_same_v<Data, const void*>, const char, char>;
    view.data = static_cast<Byte*>(view.data) + bytes;
  };
  take_head(tensors.q);
  take_head(tensors.out);
  take_head(tensors.lse);
  take_head(tensors.max_logits);
  if (spec_.sink) {
    tensors.sink.shape[0] = 1;
    tensors.sink.data = static_cast<const float*>(tensors.sink.data) + head;
  }
  return run(problem, tensors, options, 1);
}

Outputs SparseMlaCase::run_with_lists(const Options& options) {
  SparseMlaProblem problem = this->problem();
  problem.extra_max_pages = 0;
  Buffers buffers;
  SparseMlaTensors tensors = this->tensors(0, spec_.rows, buffers);
  tensors.extra_page_table = tensors.extra_len = tensors.row_to_request = {};
  const Cache& cache = caches_[1];
  const StridedTensor lists(DType::kI32, {spec_.rows, spec_.extra.topk}, {0, 1}, 0xFF);
  const int64_t page_size = spec_.extra.page_size;
  for (int64_t t = 0; t < spec_.rows; ++t) {
    for (int64_t g = 0; g < list_length(cache, t); ++g) {
      const int32_t page =
          cache.page_table.at<int32_t>({cache.row_to_request.at<int32_t>({t}), g / page_size});
      const bool there = page >= 0 && page < spec_.extra.num_keys / page_size;
      lists.at<int32_t>({t, g}) =
          there ? static_cast<int32_t>(page * page_size + g % page_size) : -1;
    }
  }
  tensors.extra_indices = lists.view();
  return run(problem, tensors, options, 1);
}

int64_t SparseMlaCase::count_allocations(const Options& options, int threads) {
  Buffers buffers;
  const SparseMlaTensors tensors = this->tensors(0, spec_.rows, buffers);
  const SparseMla plan = SparseMla::plan(problem(), test::device_of(options, threads), options);
  HostBuffer scratch(plan.workspace_bytes());
  // The thread pool allocates on its first use, which need not meet every thread.
  for (int i = 0; i < 20; ++i) plan.run(tensors, scratch.workspace());
  const AllocationCounter counter;
  plan.run(tensors, scratch.workspace());
  return counter.count();
}

void SparseMlaCase::copy_rows_from(const SparseMlaCase& other) {
  q = other.q;
  const CacheSpec& spec = spec_.primary;
  for (int64_t t = 0; t < spec_.rows; ++t) {
    for (int64_t slot = 0; slot < spec.topk; ++slot) index(0, t, slot) = other.index(0, t, slot);
  }
  for (int64_t key = 0; key < spec.num_keys; ++key) {
    for (int64_t d = 0; d < spec_.head_dim_qk; ++d) {
      caches_[0].pool.at<bf16_t>({key, d}) =
          bf16_from_float(static_cast<float>(other.key(0, key, d)));
    }
  }
  caches_[0].keys = other.caches_[0].keys;
}

Outputs SparseMlaCase::expected(int64_t begin, int64_t end) const {
  if (end < 0) end = spec_.rows;
  Outputs outputs;
  const SparseMlaProblem problem = this->problem();
  for (int64_t t = begin; t < end; ++t) {
    std::vector<const double*> keys;
    for (const Cache& cache : caches_) {
      for (const int64_t key : keys_of(cache, t))
        keys.push_back(cache.keys.data() + key * spec_.head_dim_qk);
    }
    for (int64_t h = 0; h < spec_.heads; ++h) {
      std::vector<double> query;
      for (int64_t d = 0; d < spec_.head_dim_qk; ++d) query.push_back(this->query(t, h, d));
      HeadFormula head = apply_formula(problem, query, keys);
      if (spec_.rope_dim > 0) turn_back(t, head.value, head.magnitude);
      const long double lse = std::log(head.sum);
      const long double factor = spec_.sink ? 1 / (1 + std::exp(sink.at<float>({h}) - lse)) : 1.0L;
      const auto share = static_cast<double>(factor);
      for (size_t d = 0; d < 512; ++d) {
        outputs.out.push_back(head.sum == 0 ? 0.0 : share * head.value[d]);
        outputs.magnitude.push_back(head.sum == 0 ? 0.0 : share * head.magnitude[d]);
      }
      const bool flip = head.sum == 0 && spec_.empty_lse == EmptyLse::kPosInf;
      outputs.lse.push_back(static_cast<double>(flip ? kInfinity : lse));
      outputs.max_logits.push_back(static_cast<double>(head.largest));
    }
  }
  return outputs;
}

testing::AssertionResult SparseMlaCase::matches(const Outputs& actual, int64_t begin,
                                                int64_t end) const {
  const Outputs reference = expected(begin, end);
  const auto out =
      ExpectCloseOutputs(actual.out, reference.out, reference.magnitude, actual.num_rounded(),
                         reads_packed_rows() ? kSparseFp8Out : kSparseOut);
  if (!out) return testing::AssertionFailure() << "out: " << out.message();
  const Tolerance lse_limit = reads_packed_rows() ? kSparseFp8Lse : kSparseLse;
  const auto lse = ExpectClose(actual.lse, reference.lse, lse_limit);
  if (!lse) return testing::AssertionFailure() << "lse: " << lse.message();
  const auto largest = ExpectClose(actual.max_logits, reference.max_logits, lse_limit);
  if (!largest) return testing::AssertionFailure() << "max_logits: " << largest.message();
  return testing::AssertionSuccess();
}

testing::AssertionResult SparseMlaCase::agree(const Outputs& a, const Outputs& b) const {
  const int num_rounded = a.num_rounded() + b.num_rounded();
  const auto out = ExpectCloseOutputs(
      a.out, b.out, num_rounded > 0 ? expected().magnitude : std::vector<double>(), num_rounded,
      reads_packed_rows() ? kSparseFp8Out : kSparseOut);
  if (!out) return testing::AssertionFailure() << "out: " << out.message();
  return ExpectClose(a.lse, b.lse, reads_packed_rows() ? kSparseFp8Lse : kSparseLse);
}

bool SparseMlaCase::reads_packed_rows() const {
  return spec_.primary.format != RowFormat::kBf16 ||
         (spec_.extra.num_keys > 0 && spec_.extra.format != RowFormat::kBf16);
}

}  // namespace fovea::test
