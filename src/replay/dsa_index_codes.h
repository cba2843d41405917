#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "fovea/index_quantize.h"
#include "src/replay/dsa_inputs.h"
#include "src/replay/staged_tensor.h"

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

/// Which implementation of an operator that has the name; else, or where it is empty, the best one
/// of the device.
struct CodecChoice {
  std::string implementation = {};
  Device device = {};
};

/// Quantises rows from the generator by one implementation of index_quantize. Thread-safe.
class IndexCodec {
 public:
  IndexCodec(const DsaInputs& inputs, const CodecChoice& choice);

  /// Keys of positions 0..count-1.
  IndexKeys keys(int64_t layer, int64_t request, int64_t count) const;
  IndexQuery query(int64_t layer, int64_t request, int64_t position) const;

 private:
  void run(const IndexQuantize& plan, const IndexQuantizeTensors& tensors) const;

  const DsaInputs& inputs_;
  Device device_;
  StagedTensor cos_sin_;
  int64_t num_positions_ = 0;
  IndexQuantize quantize_keys_;
  IndexQuantize quantize_query_;
};

/// logit(j) = scale[j] * sum_h head_weight[h] * max(0, <query h, key j>) of keys 0..count-1 in
/// fp64.
std::vector<double> fp64_logits(const IndexQuery& query, const IndexKeys& keys, int64_t count);

/// How far from its place a key may be selected or left out by the scores of `run`, as a share of
/// the row's max |logit|: 2^-16, or 2^-10 where the sums of fp8 tensor cores make them.
double selection_tolerance(int64_t num_heads, int64_t head_dim, const CodecChoice& run);

/// Whether two quantisations of the same values agree up to a rounding of the bf16 values between
/// their stages: every channel within one e4m3 step or one scale, and at most one in eight
/// different by more than 2^-7.
bool same_up_to_rounding(std::span<const uint8_t> a, float scale_a, std::span<const uint8_t> b,
                         float scale_b);

}  // namespace fovea::internal
