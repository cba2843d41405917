#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "fovea/dsa_backend.h"
#include "fovea/index_quantize.h"
#include "tests/support/memory.h"

/// A plain model of one serving engine's caches: what each slot must hold, which arrays a step must
/// have, what each row must select and give. Lists and scalar loops, from the definitions; nothing
/// here asks the backend.
namespace fovea::test {

/// The backend and the model disagree.
class StepFailure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Throws StepFailure("<what><index> = <actual>, expected <expected>") when the two differ.
void expect_equal(int64_t actual, int64_t expected, const char* what, int64_t index);

/// What one token at one position is to one layer: inputs, and what the pools must hold of it.
struct TokenImage {
  std::vector<bf16_t> q;        ///< [H * 576]
  std::vector<bf16_t> k;        ///< [576]
  std::vector<bf16_t> index_q;  ///< [Hi * Di]
  std::vector<bf16_t> index_k;  ///< [Di]
  std::vector<float> gate;      ///< [Hi]

  std::vector<uint8_t> row;          ///< Bytes of the latent row.
  std::vector<uint8_t> index_codes;  ///< [Di]
  float index_scale = 0;

  std::vector<float> score_key;     ///< [Di], decoded codes
  std::vector<float> score_query;   ///< [Hi * Di], decoded codes
  std::vector<float> score_weight;  ///< [Hi]
};

/// Images of (layer, token, position), each made alone and once.
class TokenImages {
 public:
  explicit TokenImages(const DsaConfig& config);

  const TokenImage& at(int layer, int32_t token, int64_t position);

  /// f32 tensors that forward takes.
  const Tensor& cos_sin() const { return cos_sin_; }
  const Tensor& norm_weight() const { return norm_weight_; }
  const Tensor& norm_bias() const { return norm_bias_; }

 private:
  TokenImage make(int layer, int32_t token, int64_t position);
  void pack_latent(TokenImage& image) const;
  void quantize_index(TokenImage& image, int64_t position);
  std::vector<double> index_vector(const bf16_t* source, bool norm, int64_t position) const;
  void check_codes(std::span<const double> exact, std::span<const float> codes, float scale) const;

  DsaConfig config_;
  Tensor cos_sin_, norm_weight_, norm_bias_;
  IndexQuantize quantize_;
  HostBuffer workspace_;
  std::unordered_map<uint64_t, std::unique_ptr<TokenImage>> images_;
};

/// Scale of the caches of kF576.
inline constexpr float kF576Scale = 0.5f;

/// Values of channels of a latent row, as attention reads them.
std::vector<double> decode_row(const DsaConfig& config, const TokenImage& image);

/// One request of a step.
struct ModelWork {
  int request = -1;              ///< -1: a padded request.
  int64_t seq_len = 0;           ///< As the engine passes it.
  int64_t kv_len = 0;            ///< L
  int64_t rows = 0;              ///< n
  int64_t first_position = 0;    ///< Of its first row.
  std::vector<int32_t> history;  ///< Tokens of positions 0 .. of its last row or key.
  int32_t pool_row = 0;
  std::vector<int32_t> pages;  ///< Pages of positions 0 ..; a padded request has the dummy page.

  /// Keys that row i sees.
  int64_t row_len(int64_t i) const { return kv_len - rows + 1 + i; }
};

struct ModelStep {
  ForwardMode mode = ForwardMode::kDecode;
  std::vector<ModelWork> work;
  int64_t num_rows = 0;     ///< E as the engine passes it; at least the sum of rows.
  int64_t padded_rows = 0;  ///< T as the engine passes it; 0: E
  bool has_plan = false;

  int64_t live_rows() const;
};

/// Every field of the metadata against lists made from `step`. Throws StepFailure.
void check_metadata(const DsaConfig& config, const ModelStep& step, const MetadataFields& fields,
                    bool ragged);

/// Positions that a row selects, then -1, from scalar logits of the quantised keys.
struct ModelSelection {
  std::vector<int32_t> positions;
  std::vector<double> logits;  ///< Empty when everything is selected.
  double slack = 0;            ///< Logits nearer than this may be ordered either way in fp32.
};
ModelSelection select_positions(const DsaConfig& config, const TokenImage& query,
                                std::span<const TokenImage* const> keys);

/// Whether `positions` is a selection of the row if logits may be off by the slack.
bool is_legal_selection(const ModelSelection& expected, std::span<const int32_t> positions);

/// One row's attention over `positions` in fp64. Throws StepFailure.
void check_attention(const DsaConfig& config, double softmax_scale, const TokenImage& query,
                     std::span<const TokenImage* const> keys, std::span<const int32_t> positions,
                     const bf16_t* out, const float* lse);

}  // namespace fovea::test
