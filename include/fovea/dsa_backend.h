#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
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
  kFresh,  ///< This call's unquantised rows, where the contiguous kernel runs and no request has a
           ///< prefix.
};

/// What computes the attention of a step.
enum class DsaKernel : uint8_t {
  kCacheDirect,     ///< sparse_mla over the paged cache.
  kContiguousBf16,  ///< The batch's rows unpacked once a layer, then sparse_mla over that array.
  kOneShotMha,      ///< mha_varlen over expanded heads; legal because every key would be selected.
};

/// "cache_direct", "contiguous_bf16", "one_shot_mha".
FOVEA_API std::string_view to_string(DsaKernel kernel) noexcept;

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
  int64_t mha_chunk_capacity =
      131072;  ///< Bound of the summed KV length of a one-shot or contiguous batch, in tokens.
  int64_t logits_budget_bytes = int64_t{512} << 20;
  std::string implementation;  ///< Forces one implementation for every operator that has it.
  /// Preferred kernel of EXTEND and MIXED over a v32 cache: kCacheDirect or kContiguousBf16 (not
  /// with `deterministic`, because it depends on the size of the batch). A bf16 cache is always
  /// read directly.
  DsaKernel prefill_kernel = DsaKernel::kCacheDirect;
  /// A failed operator (Error kDevice, kInternal) is an error at once. Otherwise the next
  /// implementation in its list runs on the same tensors, with a log line; not with `deterministic`
  /// (another implementation has other bits) nor with a forced implementation.
  bool strict = false;
  /// Off: selections (`indices`, `topk_indices`) are positions of the request, mapped to slots by a
  /// later pass; same attention, for reuse across steps and for debugging.
  bool fuse_transform = true;
};

/// One forward call of an engine: lengths and rows, in the terms of docs/concepts.md. The tensors
/// live until the step's last forward.
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
  /// Optional host copies; the skip rule and one-shot need them. In kExtend and kMixed both or
  /// none.
  std::span<const int32_t> host_seq_len;
  std::span<const int32_t> host_ext_len;
  bool mha_inputs = false;  ///< The caller can supply q_mha, k_mha, v_mha, out_mha.
};

/// The facts that dispatch looks at.
struct DsaBatchFacts {
  ForwardMode mode = ForwardMode::kDecode;
  bool has_host_lengths = false;
  int64_t max_kv_len = 0;  ///< With host lengths only.
  int64_t sum_kv_len = 0;  ///< With host lengths only.
  int64_t num_rows = 0;
  bool has_prefix = false;  ///< With host lengths only: some request has seq_len > ext_len.
  bool mha_inputs = false;  ///< The caller can supply expanded per-head keys and values.
};

/// Sentences in static memory, one per decision: copying them allocates nothing.
class DispatchReasons {
 public:
  void add(std::string_view sentence) noexcept {
    if (count_ < sentences_.size()) sentences_[count_++] = sentence;
  }
  const std::string_view* begin() const noexcept { return sentences_.data(); }
  const std::string_view* end() const noexcept { return sentences_.data() + count_; }
  size_t size() const noexcept { return count_; }

 private:
  std::array<std::string_view, 16> sentences_{};
  size_t count_ = 0;
};

/// What runs, and why: a value, never state.
struct DsaDispatch {
  DsaKernel kernel = DsaKernel::kCacheDirect;
  bool one_shot = false;  ///< kernel is kOneShotMha.
  bool skip_selection =
      false;              ///< Every length fits topk: identity selection, logits are not computed.
  bool fresh_kv = false;  ///< kContiguousBf16 reads this call's k instead of the cache.
  IndexTransform transform = IndexTransform::kPaged;  ///< kRagged exactly with kContiguousBf16;
                                                      ///< under one-shot no indices are used.
  DispatchReasons reasons;                            ///< One sentence per decision, for --explain.
};

/// Pure: the same arguments give the same answer. Throws Error(kUnsupported) for a mode that this
/// backend does not have, naming it.
///
/// One-shot runs when all of these hold: mode EXTEND or MIXED, host lengths, expanded inputs, max L
/// <= topk, sum L <= mha_chunk_capacity, neither force_absorbed nor deterministic. Otherwise the
/// contiguous kernel runs when it is preferred, the mode is EXTEND or MIXED, the cache is v32 and
/// the host lengths show that sum L fits. Otherwise the cache is read directly.
FOVEA_API DsaDispatch dsa_dispatch(const DsaConfig& config, const Device& device,
                                   const DsaBatchFacts& facts);

/// The tensors of one layer's forward. k = latent | rope of the new tokens.
struct DsaForwardTensors {
  ConstTensorView q;  ///< bf16 [T, H, 576], absorbed; not read under one-shot
  ConstTensorView k;  ///< bf16 [T, 576]; absent: no latent row is stored, the rows are in the pool
  ConstTensorView index_q;  ///< bf16 [T, Hi, Di], before rope; may be absent when nothing is
                            ///< scored (skip_selection, topk_indices)
  ConstTensorView index_k;  ///< bf16 [T, Di], before the LayerNorm; may be absent with k, or with
                            ///< topk_indices
  ConstTensorView norm_weight;   ///< f32 [Di]; with index_k
  ConstTensorView norm_bias;     ///< f32 [Di]; with index_k
  ConstTensorView head_gate;     ///< f32 [T, Hi]; with index_q
  ConstTensorView cos_sin;       ///< f32 [max_pos, rope_dim]; with index_q or index_k
  ConstTensorView topk_indices;  ///< optional i32 [T, K]: a selection made elsewhere, in the form
                                 ///< of `indices`; the indexer is skipped. Without fuse_transform,
                                 ///< rows that fit topk are rebuilt as the identity.
  TensorView kv_pool;            ///< this layer's latent pool: u8 [pages, page bytes]
  TensorView index_pool;         ///< this layer's index-key pool: u8 [pages, page bytes]
  TensorView indices;  ///< optional i32 [T, K]: receives the selection: slots (kPaged) or rows of
                       ///< the batch's keys (kRagged), positions without fuse_transform; rows >= E
                       ///< are -1. Under one-shot: what the cache-direct kernel would have used.
  TensorView out;      ///< bf16 [T, H, 512]; rows >= E are 0. Not written under one-shot.
  TensorView lse;      ///< f32 [T, H]; rows >= E are -inf
  ConstTensorView q_mha;  ///< one-shot: bf16 [T, H, 192]
  ConstTensorView k_mha;  ///< one-shot: bf16 [S, H, 192], S = sum L: prefix and new tokens of each
                          ///< request, requests in order
  ConstTensorView v_mha;  ///< one-shot: bf16 [S, H, 128]
  TensorView out_mha;     ///< one-shot: bf16 [T, H, 128]; rows >= E are 0
};

struct DsaLayer {
  int64_t id = 0;
  float softmax_scale =
      0;                ///< Of the MHA form: (128 + 64)^-1/2 times the context extension factor.
  float logit_cap = 0;  ///< > 0: s = cap * tanh(s / cap); not offered under one-shot.
};

/// One timed operator call, for profiles: filled when a profile is attached.
///
/// flops and bytes follow docs/dsa_backend.md: what the operator has to do for the live rows, not
/// what an implementation happens to do.
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
/// Modes EXTEND, MIXED, DECODE and IDLE; any other is an error that names it. Persistent buffers
/// are allocated by the constructor from the bounds of the configuration; begin_step and forward
/// allocate nothing, except that the first forward with a new (softmax_scale, logit_cap) makes its
/// plans.
///
/// With `deterministic` a row's output, lse and selection depend on the tokens of its own request
/// alone: bit-equal for any chunking of the prompt, batch mates, page size, padding, thread count
/// and for rows decoded instead of extended. Host lengths change no bit then.
///
/// Device contents (lengths, tables, slots) are never trusted and never an error. One backend
/// serves one stream of steps; it is not thread-safe.
class FOVEA_API DsaBackend {
 public:
  /// Throws Error(kInvalidArgument / kUnsupported) for a configuration that no operator supports,
  /// naming the field; Error(kOutOfMemory) when the buffers do not fit.
  DsaBackend(const DsaConfig& config, const Device& device);
  ~DsaBackend();
  DsaBackend(DsaBackend&&) noexcept;
  DsaBackend& operator=(DsaBackend&&) noexcept;

  /// Throws Error(kInvalidArgument), naming request and field, when a tensor does not fit the
  /// configuration or host lengths break an invariant (L >= rows >= 0, sum of rows = E, max L <=
  /// W); Error(kUnsupported) for a mode. Then nothing changed: the previous step stays current.
  void begin_step(const ForwardBatch& batch);

  /// Stores the new rows, selects, attends. Store precedes scoring: a row sees its own key.
  ///
  /// Throws Error(kInvalidArgument) before anything is written when a tensor is missing or does not
  /// fit, or no step has begun.
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
