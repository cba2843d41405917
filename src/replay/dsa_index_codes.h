#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "fovea/index_quantize.h"
#include "src/replay/dsa_inputs.h"

/// Index keys and queries of generated rows in e4m3, and fp64 logits over them.
namespace fovea::internal {

struct IndexKeys {
  std::vector<uint8_t> codes;  // [count, Di]
  std::vector<float> scales;   // [count]
};

struct IndexQuery {
  std::vector<uint8_t> codes;      // [Hi, Di]
  std::vector<float> scales;       // [Hi]
  std::vector<float> head_weight;  // [Hi]
};

/// Quantises rows from the generator by one implementation of index_quantize. Thread-safe.
class IndexCodec {
 public:
  /// An empty implementation is the best one.
  IndexCodec(const DsaInputs& inputs, const std::string& implementation);

  /// Keys of positions 0..count-1.
  IndexKeys keys(int64_t layer, int64_t request, int64_t count) const;
  IndexQuery query(int64_t layer, int64_t request, int64_t position) const;

 private:
  const DsaInputs& inputs_;
  std::vector<float> cos_sin_;
  IndexQuantize quantize_keys_;
  IndexQuantize quantize_query_;
};

/// logit(j) = scale[j] * sum_h head_weight[h] * max(0, <query h, key j>) of keys 0..count-1 in
/// fp64.
std::vector<double> fp64_logits(const IndexQuery& query, const IndexKeys& keys, int64_t count);

/// Whether two quantisations of the same values agree up to a rounding of the bf16 values between
/// their stages: every channel within one e4m3 step or one scale, and at most one in eight
/// different by more than 2^-7.
bool same_up_to_rounding(std::span<const uint8_t> a, float scale_a, std::span<const uint8_t> b,
                         float scale_b);

}  // namespace fovea::internal
