#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "fovea/index_logits.h"
#include "fovea/numeric.h"
#include "tests/support/memory.h"
#include "tests/support/rng.h"

namespace fovea::test {

/// Sets the strides of a view (elements), for inputs that are slices of something wider.
inline TensorView strided(void* memory, DType dtype, std::initializer_list<int64_t> shape,
                          std::initializer_list<int64_t> stride) {
  TensorView view = make_tensor(memory, dtype, shape);
  std::copy(stride.begin(), stride.end(), view.stride.begin());
  return view;
}

/// Queries, weights and keys of index_logits, and what the formula says about them.
struct LogitsCase {
  int64_t rows, heads, dim, keys;
  std::vector<uint8_t> q_fp8;
  std::vector<float> head_weight;
  std::vector<uint8_t> k_fp8;
  std::vector<float> k_scale;

  LogitsCase(uint64_t seed, int64_t num_rows, int64_t num_heads, int64_t head_dim, int64_t num_keys)
      : rows(num_rows), heads(num_heads), dim(head_dim), keys(num_keys) {
    Rng rng(seed);
    q_fp8 = codes(rng, rows * heads * dim);
    head_weight = rng.normals(rows * heads, 0.01f);
    k_fp8 = codes(rng, keys * dim);
    k_scale.resize(static_cast<size_t>(keys));
    // Both scale modes: any value, and powers of two.
    for (float& scale : k_scale) {
      scale = rng.integer(0, 1) == 0 ? std::exp2(static_cast<float>(rng.integer(-20, 4)))
                                     : std::exp2(rng.uniform(-20.0f, 4.0f));
    }
  }

  /// Codes as quantisation makes them: mostly normals up to the largest code, some zeros,
  /// subnormals and extremes.
  static std::vector<uint8_t> codes(Rng& rng, int64_t count) {
    std::vector<uint8_t> result(static_cast<size_t>(count));
    for (uint8_t& code : result) {
      code = e4m3_from_float(160.0f * rng.normal());
      if (rng.integer(0, 15) == 0) code = static_cast<uint8_t>(rng.integer(0, 0x7E));
      if (rng.integer(0, 63) == 0) code = 0xFE;
    }
    return result;
  }

  uint8_t* q_row(int64_t t, int64_t h) {
    return &q_fp8[static_cast<size_t>((t * heads + h) * dim)];
  }
  uint8_t* k_row(int64_t j) { return &k_fp8[static_cast<size_t>(j * dim)]; }

  /// The logit in fp64, and a bound of what fp32 may do to it: Di products summed, Hi weighted
  /// terms (a product and a sum each), one product with the scale; each step rounds once by 2^-24
  /// of at most the sum of magnitudes.
  ///
  /// Sums of e4m3 tensor cores have a bound of their own. Each of the four steps of a dot has 33
  /// addends, which lose less than 2^-13 of the largest. Losses of products of both signs are as
  /// often positive as negative, so that together they stay below 2^-10 of the sum of magnitudes;
  /// those of one sign add up, and have one_sign_bound.
  struct Expected {
    double logit;
    double bound;
    double e4m3_bound;
    double one_sign_bound;
  };
  Expected expect(int64_t t, int64_t j) const {
    double sum = 0;
    double magnitude = 0;
    for (int64_t h = 0; h < heads; ++h) {
      double dot = 0;
      double dot_magnitude = 0;
      for (int64_t d = 0; d < dim; ++d) {
        const double product =
            static_cast<double>(
                e4m3_to_float(q_fp8[static_cast<size_t>((t * heads + h) * dim + d)])) *
            static_cast<double>(e4m3_to_float(k_fp8[static_cast<size_t>(j * dim + d)]));
        dot += product;
        dot_magnitude += std::fabs(product);
      }
      const double weight = head_weight[static_cast<size_t>(t * heads + h)];
      sum += weight * (dot < 0 ? 0 : dot);
      magnitude += std::fabs(weight) * dot_magnitude;
    }
    const double scale = k_scale[static_cast<size_t>(j)];
    const double steps = static_cast<double>(dim + 2 * heads + 2);
    const double bound = steps * 0x1p-24 * std::fabs(scale) * magnitude;
    const double scaled = std::fabs(scale) * magnitude;
    return {scale * sum, bound, bound + 0x1p-10 * scaled, bound + 0x1p-7 * scaled};
  }

  ConstTensorView q() const {
    return make_tensor(static_cast<const void*>(q_fp8.data()), DType::kU8, {rows, heads, dim});
  }
  ConstTensorView weight() const {
    return make_tensor(static_cast<const void*>(head_weight.data()), DType::kF32, {rows, heads});
  }

  /// Tensors of the ragged layout.
  IndexLogitsTensors ragged(ConstTensorView k_start, ConstTensorView k_end,
                            TensorView logits) const {
    IndexLogitsTensors tensors;
    tensors.q_fp8 = q();
    tensors.head_weight = weight();
    tensors.k_fp8 = make_tensor(static_cast<const void*>(k_fp8.data()), DType::kU8, {keys, dim});
    tensors.k_scale = make_tensor(static_cast<const void*>(k_scale.data()), DType::kF32, {keys});
    tensors.k_start = k_start;
    tensors.k_end = k_end;
    tensors.logits = logits;
    return tensors;
  }

  /// Keys [first, first + count) as one request's pages and the request's page_table row.
  struct Pool {
    int64_t page_size;
    Tensor pool;
    std::vector<int32_t> pages;
  };
  Pool paged(int64_t page_size, int64_t first, int64_t count, uint8_t background) const {
    const int64_t num_pages = (count + page_size - 1) / page_size;
    Pool result{page_size,
                Tensor(DType::kU8, {std::max<int64_t>(num_pages, 1), page_size * (dim + 4)}),
                std::vector<int32_t>(static_cast<size_t>(num_pages))};
    result.pool.fill_bytes(background);
    for (int64_t i = 0; i < num_pages; ++i) {
      // In reverse, so that neighbours in the table are not neighbours in memory.
      result.pages[static_cast<size_t>(i)] = static_cast<int32_t>(num_pages - 1 - i);
    }
    for (int64_t p = 0; p < count; ++p) {
      uint8_t* page = result.pool.data<uint8_t>() +
                      result.pages[static_cast<size_t>(p / page_size)] * page_size * (dim + 4);
      std::memcpy(page + (p % page_size) * dim, &k_fp8[static_cast<size_t>((first + p) * dim)],
                  static_cast<size_t>(dim));
      std::memcpy(page + page_size * dim + (p % page_size) * 4,
                  &k_scale[static_cast<size_t>(first + p)], 4);
    }
    return result;
  }
};

}  // namespace fovea::test
