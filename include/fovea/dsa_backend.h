#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "fovea/device.h"
#include "fovea/dtype.h"
#include "fovea/export.h"
#include "fovea/metadata.h"
#include "fovea/tensor.h"

namespace fovea {

/// Where EXTEND reads the keys of its own new rows.
enum class ExtendKvSource : uint8_t {
  kCache,  ///< Stored first and read back through the codec: a row does not depend on chunking or
           ///< prefix hits.
  kFresh,  ///< This call's unquantised rows, where no request has a prefix.
};

/// Configuration of a DeepSeek sparse attention backend: fixed for the life of an engine.
struct DsaConfig {
  int64_t num_heads = 0;     ///< Local query heads (model heads / tensor parallel).
  int64_t index_heads = 64;  ///< Hi.
  int64_t index_dim = 128;   ///< Di.
  int64_t rope_dim = 64;     ///< R.
  int64_t topk = 2048;
  int64_t page_size = 64;                  ///< P.
  RowFormat row_format = RowFormat::kV32;  ///< Latent cache: kBf16 or kV32.
  ScaleMode kv_scale_mode = ScaleMode::kFp32;
  ScaleMode index_scale_mode = ScaleMode::kFp32;
  RopeStyle index_rope_style = RopeStyle::kHalfSplit;
  bool hadamard = true;
  int64_t max_requests = 0;     ///< Bound of R.
  int64_t max_rows = 0;         ///< Bound of E and T (the prefill chunk).
  int64_t table_width = 0;      ///< W of req_to_token.
  bool deterministic = true;    ///< One-shot off, kCache, batch-invariant operators.
  bool force_absorbed = false;  ///< One-shot off.
  ExtendKvSource extend_kv_source = ExtendKvSource::kCache;
  int64_t mha_chunk_capacity = 131072;  ///< Bound of the summed KV length of a one-shot batch.
  int64_t logits_budget_bytes = int64_t{512} << 20;
  std::string implementation;  ///< Forces one implementation for every operator that has it.
};

/// One forward call of an engine: lengths and rows, in the terms of docs/concepts.md.
struct ForwardBatch {
  ForwardMode mode = ForwardMode::kDecode;
  ConstTensorView seq_len;        ///< i32 [R]
  ConstTensorView pool_row;       ///< i32 [R]
  ConstTensorView ext_len;        ///< i32 [R]; kExtend, kMixed
  ConstTensorView req_to_token;   ///< i32 [rows, W]
  ConstTensorView positions;      ///< i32 [T], global position of each row
  ConstTensorView out_cache_loc;  ///< i32 [T], slot of each row's new token; -1 in padding
  int64_t num_rows = 0;           ///< E
  int64_t padded_rows = 0;        ///< T; 0: E
  /// Optional host copies; the skip rule and one-shot need them.
  std::span<const int32_t> host_seq_len;
  std::span<const int32_t> host_ext_len;
};

/// The facts that dispatch looks at.
struct DsaBatchFacts {
  ForwardMode mode = ForwardMode::kDecode;
  bool has_host_lengths = false;
  int64_t max_kv_len = 0;  ///< With host lengths only.
  int64_t sum_kv_len = 0;  ///< With host lengths only.
  int64_t num_rows = 0;
  bool has_prefix = false;
  bool mha_inputs = false;  ///< The caller can supply expanded per-head keys and values.
};

/// What runs, and why: a value, never state.
struct DsaDispatch {
  bool one_shot = false;  ///< Dense multi-head attention instead of selection.
  bool skip_selection =
      false;  ///< Every length fits topk: identity selection, logits are not computed.
  IndexTransform transform = IndexTransform::kPaged;
  std::vector<std::string> reasons;  ///< One sentence per decision, for --explain.
};

/// Pure: the same arguments give the same answer.
FOVEA_API DsaDispatch dsa_dispatch(const DsaConfig& config, const Device& device,
                                   const DsaBatchFacts& facts);

/// The tensors of one layer's forward. k = latent | rope of the new tokens.
struct DsaForwardTensors {
  ConstTensorView q;        ///< bf16 [T, H, 576], absorbed
  ConstTensorView k;        ///< bf16 [T, 576]; absent: nothing is stored, the rows are in the pool
  ConstTensorView index_q;  ///< bf16 [T, Hi, Di], before rope
  ConstTensorView index_k;  ///< bf16 [T, Di], before the LayerNorm
  ConstTensorView norm_weight;  ///< f32 [Di]
  ConstTensorView norm_bias;    ///< f32 [Di]
  ConstTensorView head_gate;    ///< f32 [T, Hi]
  ConstTensorView cos_sin;      ///< f32 [max_pos, rope_dim]
  ConstTensorView
      topk_indices;    ///< optional i32 [T, K]: a selection made elsewhere; the indexer is skipped
  TensorView kv_pool;  ///< this layer's latent pool
  TensorView index_pool;  ///< this layer's index-key pool
  TensorView indices;     ///< optional i32 [T, K]: receives the selection (after the transform)
  TensorView out;         ///< bf16 [T, H, 512]
  TensorView lse;         ///< f32 [T, H]
};

struct DsaLayer {
  int64_t id = 0;
  float softmax_scale = 0;
};

/// One timed operator call, for profiles: filled when a profile is attached.
struct OperatorCall {
  std::string name;  ///< e.g. "sparse_mla"
  std::string implementation;
  double elapsed_ms = 0;
  double flops = 0;
  double bytes = 0;
};

/// Attention of DeepSeek-V3.2 / GLM-5 over paged caches: metadata, indexer, selection, sparse
/// attention.
///
///   backend.begin_step(batch);                 // refreshes the metadata, decides the dispatch
///   for (layer : layers) backend.forward(layer, tensors);
///
/// Persistent buffers are allocated by the constructor; begin_step and forward allocate nothing.
/// One backend serves one stream of steps; it is not thread-safe.
class FOVEA_API DsaBackend {
 public:
  /// Throws Error(kInvalidArgument / kUnsupported) for a configuration that no operator supports,
  /// naming the field.
  DsaBackend(const DsaConfig& config, const Device& device);
  ~DsaBackend();
  DsaBackend(DsaBackend&&) noexcept;
  DsaBackend& operator=(DsaBackend&&) noexcept;

  /// Throws Error(kInvalidArgument) naming request and field when host lengths break an invariant;
  /// then nothing changed.
  void begin_step(const ForwardBatch& batch);

  /// Stores the new rows, selects, attends. Store precedes scoring: a row sees its own key.
  void forward(const DsaLayer& layer, const DsaForwardTensors& tensors);

  const DsaConfig& config() const noexcept;
  const DsaDispatch& dispatch() const noexcept;  ///< of the current step
  const MetadataFields& metadata()
      const noexcept;  ///< of the current step; views of the live shapes

  /// Receives every operator call from now on; null stops it. The calls are appended.
  void set_profile(std::vector<OperatorCall>* calls) noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace fovea
