#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fovea/context_split.h"
#include "fovea/device.h"
#include "fovea/dtype.h"
#include "fovea/export.h"
#include "fovea/metadata.h"
#include "fovea/metadata_check.h"
#include "fovea/tensor.h"

namespace fovea {

/// What computes the attention of a step.
enum class DsaKernel : uint8_t {
  kCacheDirect,     ///< sparse_mla over the paged cache.
  kContiguousBf16,  ///< The batch's rows unpacked once a layer, then sparse_mla over that array.
  kOneShotMha,      ///< mha_varlen over expanded heads; legal because every key would be selected.
};

/// "cache_direct", "contiguous_bf16", "one_shot_mha".
FOVEA_API std::string_view to_string(DsaKernel kernel) noexcept;

/// Configuration of a DeepSeek sparse attention backend: fixed for the life of an engine. Every
/// field has a row in docs/dsa_backend.md.
struct DsaConfig {
  int64_t num_heads = 0;     ///< Local query heads (model heads / tensor parallel).
  int64_t index_heads = 64;  ///< Hi.
  int64_t index_dim = 128;   ///< Di.
  int64_t rope_dim = 64;     ///< R.
  int64_t topk = 2048;
  int64_t page_size = 64;                  ///< P.
  RowFormat row_format = RowFormat::kV32;  ///< Latent cache: kBf16, kV32 or kF576.
  ScaleMode kv_scale_mode = ScaleMode::kFp32;
  ScaleMode index_scale_mode = ScaleMode::kFp32;
  RopeStyle index_rope_style = RopeStyle::kHalfSplit;
  bool hadamard = true;
  int64_t max_requests = 0;       ///< Bound of R.
  int64_t max_rows = 0;           ///< Bound of E and T (the prefill chunk).
  int64_t table_width = 0;        ///< W of req_to_token: context plus the headroom of a verify.
  int64_t rows_per_request = 1;   ///< N of TARGET_VERIFY and the draft-extend modes: one committed
                                  ///< token and N - 1 drafted ones.
  int64_t draft_topk = 1;         ///< Branches of a draft; a tree (> 1) is refused.
  bool deterministic = true;      ///< One-shot off, kCache, batch-invariant operators.
  bool force_absorbed = false;    ///< One-shot off.
  bool context_parallel = false;  ///< Batches may carry a ContextSplit; one-shot off.
  ExtendKvSource extend_kv_source = ExtendKvSource::kCache;
  int64_t mha_chunk_capacity =
      131072;  ///< Bound of the summed KV length of a one-shot or contiguous batch, in tokens.
  int64_t logits_budget_bytes = int64_t{512} << 20;
  std::string implementation;  ///< Forces one implementation for every operator that has it.
  /// Attention of EXTEND and MIXED: "auto", "cache_direct", "contiguous_bf16" (not with
  /// `deterministic`, because it depends on the size of the batch), or an engine's name for one of
  /// them: "flashmla_sparse", "flashmla_kv", "flashmla_auto", "fa3", "tilelang", "trtllm", "aiter".
  /// A name that cannot read row_format is refused: dsa_implementations().
  std::string prefill_implementation = "auto";
  /// Attention of every other mode: "auto", "cache_direct", or an engine's name.
  std::string decode_implementation = "auto";
  /// "auto" prefill over a v32 cache: plain EXTEND takes contiguous_bf16 when sum L < ratio * E and
  /// sum L fits mha_chunk_capacity. 0: never. Not with `deterministic`.
  double contiguous_kv_ratio = 0;
  /// Parts of the split plan of sparse decode (SplitScheduleProblem::parts), which then balances
  /// the batch over workers. 0: every row is cut by itself. Not with `deterministic`: the cuts
  /// depend on the batch.
  int64_t split_parts = 0;
  /// A failed operator (Error kDevice, kInternal) is an error at once. Otherwise the next
  /// implementation in its list runs on the same tensors, with a log line; not with `deterministic`
  /// (another implementation has other bits) nor with a forced implementation.
  bool strict = false;
  /// Off: selections (`indices`, `topk_indices`) are positions of the request, mapped to slots by a
  /// later pass; same attention, for reuse across steps and for debugging.
  bool fuse_transform = true;
  /// kF576 only: q and k arrive as (q_nope, q_rope), (k_latent, k_rope) before rope, and one pass
  /// ropes and quantises both.
  bool fuse_rope = false;
  RopeStyle rope_style = RopeStyle::kInterleaved;  ///< Of fuse_rope.
  /// After every refresh, the reference builder runs on scratch arrays and every field is compared;
  /// a difference is Error(kMismatch), never a fallback. On a GPU it waits and compares on the
  /// host.
  bool verify_metadata = false;
  /// Device contents that were masked or clamped are reported: step.report(), and a log line, for
  /// which a GPU is waited for.
  bool check = false;
  int64_t cache_slots = 0;  ///< Slots of the pools, the dummy page included; `check` needs it.
};

/// One forward call of an engine: lengths and rows, in the terms of docs/concepts.md. The tensors
/// live until the step's last forward.
struct ForwardBatch {
  ForwardMode mode = ForwardMode::kDecode;
  ConstTensorView seq_len;        ///< i32 [R]; what it includes differs by mode, docs/concepts.md
  ConstTensorView pool_row;       ///< i32 [R]
  ConstTensorView ext_len;        ///< i32 [R]; kExtend, kMixed, kDraftExtend
  ConstTensorView req_to_token;   ///< i32 [rows, W]
  ConstTensorView positions;      ///< i32 [T], global position of each row
  ConstTensorView out_cache_loc;  ///< i32 [T], slot of each row's new token; -1 in padding
  /// E. kDraftExtend without host lengths: an upper bound, at most R * N; rows past the sum of
  /// ext_len behave as padding.
  int64_t num_rows = 0;
  int64_t padded_rows = 0;  ///< T; 0: E
  /// Optional host copies; the skip rule and one-shot need them. Where ext_len is read, both or
  /// none.
  std::span<const int32_t> host_seq_len;
  std::span<const int32_t> host_ext_len;
  bool mha_inputs = false;  ///< The caller can supply q_mha, k_mha, v_mha, out_mha.
  /// kExtend, kMixed with context_parallel: the rank's part of the batch; lives as long as the
  /// tensors. Then num_rows, positions and every query tensor are those of the rank's rows, while
  /// out_cache_loc, store_positions, k and index_k are those of all tokens of the batch, gathered
  /// in token order: every rank stores everything.
  const ContextSplit* context_split = nullptr;
  ConstTensorView store_positions;  ///< i32 [tokens]; with context_split
};

/// The facts that dispatch looks at.
struct DsaBatchFacts {
  ForwardMode mode = ForwardMode::kDecode;
  bool has_host_lengths = false;
  int64_t max_kv_len = 0;  ///< With host lengths only.
  int64_t sum_kv_len = 0;  ///< With host lengths only.
  int64_t num_rows = 0;
  bool has_prefix = false;        ///< With host lengths only: some request has seq_len > ext_len.
  bool mha_inputs = false;        ///< The caller can supply expanded per-head keys and values.
  bool context_parallel = false;  ///< The batch carries a ContextSplit.
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
                                                      ///< one-shot uses no indices.
  DispatchReasons reasons;                            ///< One sentence per decision, for --explain.
};

/// Pure: the same arguments give the same answer. Throws Error(kUnsupported) for a mode that is
/// none of ForwardMode, naming it, and for a context split outside kExtend and kMixed; for names of
/// implementations as the constructor of DsaBackend does.
///
/// One-shot runs when all of these hold: mode EXTEND or MIXED, host lengths, expanded inputs, max L
/// <= topk (prefill_implementation "trtllm": <= mha_chunk_capacity, as in the original), sum L <=
/// mha_chunk_capacity, no context parallelism, neither force_absorbed nor deterministic. Otherwise
/// the contiguous kernel runs when it is chosen, the mode is EXTEND or MIXED, the cache is v32 and
/// the host lengths show that sum L fits; "auto" chooses it in EXTEND alone, when sum L <
/// contiguous_kv_ratio * E. Otherwise the cache is read directly.
FOVEA_API DsaDispatch dsa_dispatch(const DsaConfig& config, const Device& device,
                                   const DsaBatchFacts& facts);

/// How an implementation name reads one row format; absent: it cannot, and the constructor refuses
/// the pair.
struct DsaFormatSupport {
  RowFormat row_format = RowFormat::kBf16;
  std::optional<DsaKernel> prefill;  ///< Of EXTEND and MIXED, when one-shot does not run.
  std::optional<DsaKernel> decode;   ///< Of every other mode.
};

/// One name that prefill_implementation and decode_implementation accept.
struct DsaImplementationInfo {
  std::string_view name;
  bool native = false;  ///< false: an engine's name for one of the native ones.
  std::array<DsaFormatSupport, 3> formats;
  /// kContiguousBf16 may run instead of prefill over a v32 cache, by contiguous_kv_ratio.
  bool chooses_by_ratio = false;
  /// One-shot takes requests up to mha_chunk_capacity instead of topk.
  bool long_one_shot = false;
  std::string_view restriction;  ///< One sentence.

  /// The entry of the format, or null.
  const DsaFormatSupport* support(RowFormat row_format) const noexcept {
    for (const DsaFormatSupport& entry : formats) {
      if (entry.row_format == row_format) return &entry;
    }
    return nullptr;
  }
};

/// Every name, native ones first. Static memory.
FOVEA_API std::span<const DsaImplementationInfo> dsa_implementations() noexcept;

/// What a kernel can do on this build's devices.
struct DsaKernelInfo {
  DsaKernel kernel = DsaKernel::kCacheDirect;
  std::string_view op;         ///< The operator that computes it.
  IndexTransform transform;    ///< Where its indices point; without meaning for kOneShotMha.
  bool prefill = false;        ///< EXTEND and MIXED.
  bool decode = false;         ///< Every other mode, and therefore step plans.
  bool deterministic = false;  ///< May run with DsaConfig::deterministic.
  bool logit_cap = false;      ///< Takes DsaLayer::logit_cap > 0.
};

/// The three kernels. Static memory.
FOVEA_API std::span<const DsaKernelInfo> dsa_kernels() noexcept;

/// The tensors of one layer's forward. k = latent | rope of the new tokens.
struct DsaForwardTensors {
  ConstTensorView q;               ///< bf16 [T, H, 576], absorbed; not read under one-shot
  ConstTensorView q_nope, q_rope;  ///< instead of q: bf16 [T, H, 512], [T, H, 64]
  ConstTensorView k;  ///< bf16 [T, 576]; absent: no latent row is stored, the rows are in the pool
  ConstTensorView k_latent, k_rope;  ///< instead of k: bf16 [T, 512], [T, 64]
  bool save_kv = true;               ///< false: nothing is stored, whatever k and index_k hold
  ConstTensorView index_q;  ///< bf16 [T, Hi, Di], before rope; may be absent when nothing is
                            ///< scored (skip_selection, topk_indices)
  ConstTensorView index_k;  ///< bf16 [T, Di], before the LayerNorm; may be absent with k, or with
                            ///< topk_indices
  ConstTensorView norm_weight;   ///< f32 [Di]; with index_k
  ConstTensorView norm_bias;     ///< f32 [Di]; with index_k
  ConstTensorView head_gate;     ///< f32 [T, Hi]; with index_q
  ConstTensorView cos_sin;       ///< f32 [max_pos, rope_dim]; with index_q or index_k
  ConstTensorView mla_cos_sin;   ///< f32 [max_pos, 64]; with fuse_rope
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
  float q_scale = 1;    ///< kF576 with fuse_rope: q is quantised as q / q_scale.
  float k_scale = 1;    ///< kF576: of the layer's cache.
};

/// Shape of a step whose buffers live on: what an engine captures one graph for.
struct StepBucket {
  ForwardMode mode = ForwardMode::kDecode;
  int64_t num_requests = 0;      ///< R, padded requests included.
  int64_t rows_per_request = 1;  ///< N; kDecode and kIdle: 1. kDraftExtend: the most that any
                                 ///< request has. kExtend and kMixed have no buckets.
};

/// The arrays of one step. Made by a backend for one bucket, at fixed addresses: begin_step writes
/// into them, forward reads them, nothing is allocated, so that a captured step may be replayed
/// with new contents. Two plans share no memory. Move-only; lives no longer than its backend.
class FOVEA_API DsaStepPlan {
 public:
  DsaStepPlan(DsaStepPlan&&) noexcept;
  DsaStepPlan& operator=(DsaStepPlan&&) noexcept;
  ~DsaStepPlan();

  const StepBucket& bucket() const noexcept;
  const DsaDispatch& dispatch() const noexcept;     ///< of the step that it holds
  const MetadataFields& metadata() const noexcept;  ///< views of the live shapes
  /// With `check`: what the last begin_step found in the device contents, after a replay what that
  /// found. Waits for the stream of the last begin_step, which still exists; throws
  /// Error(kInvalidArgument) while that is being captured.
  MetadataReport report() const;

  struct State;

 private:
  friend class DsaBackend;
  explicit DsaStepPlan(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

/// One forward of a draft model in a chain of drafts: step j drafts the token after position
/// seq_len + j.
struct DraftStep {
  DsaStepPlan* plan = nullptr;               ///< a kDecode bucket
  ConstTensorView positions;                 ///< i32 [R]
  ConstTensorView out_cache_loc;             ///< i32 [R]
  std::optional<int32_t> kv_len_delta = {};  ///< Added to seq_len; absent: j + 1. 0 for every step
                                             ///< reproduces the original.
};

/// One timed operator call, for profiles: filled when a profile is attached (set_profile).
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
/// or, with buffers that live on,
///
///   DsaStepPlan plan = backend.make_step_plan({ForwardMode::kTargetVerify, 64, 4});
///   backend.begin_step(batch, &plan);          // each replay
///   for (layer : layers) backend.forward(plan, layer, tensors);
///
/// Modes: all seven of ForwardMode. Buffers are allocated by the constructor and by make_step_plan
/// from bounds; begin_step and forward allocate nothing, except that the first forward with a new
/// (softmax_scale, logit_cap, scales) makes its plans.
///
/// With `deterministic` a row's output, lse and selection depend on the tokens of its own request
/// alone: bit-equal for any chunking of the prompt, batch mates, page size, padding, thread count
/// and for rows decoded, verified or extended. Host lengths change no bit then.
///
/// Device contents (lengths, tables, slots) are never trusted and never an error. One backend
/// serves one stream of steps; it is not thread-safe.
///
/// On a GPU the tensors of batches and forwards are device memory (host_seq_len and host_ext_len
/// stay host memory), and begin_step and forward submit their work to `stream` and return: they
/// neither wait nor allocate nor read what is on the device, so that a whole step may be captured
/// in a Graph on its first call and replayed with new contents of the same arrays. What waits all
/// the same: verify_metadata, which a capture refuses, and the log of `check`, which a capture
/// leaves to report(). The steps of a backend share scratch memory: they, and the replays of what
/// was captured, must follow one another in the order of streams; steps that may overlap need a
/// backend each. Plans and backend live until the work that was submitted is done. The CPU runs in
/// the calling thread and ignores `stream`.
class FOVEA_API DsaBackend {
 public:
  /// Throws Error(kInvalidArgument / kUnsupported) for a configuration that no operator supports,
  /// naming the field; Error(kOutOfMemory) when the buffers do not fit.
  DsaBackend(const DsaConfig& config, const Device& device);
  ~DsaBackend();
  DsaBackend(DsaBackend&&) noexcept;
  DsaBackend& operator=(DsaBackend&&) noexcept;

  /// Buffers for the steps of one bucket; holds a legal step of padded requests (kPaddedSeqLen,
  /// kPaddedPoolRow) before its first begin_step. Throws Error(kInvalidArgument) for a bucket
  /// outside the configuration's bounds or in EXTEND or MIXED, naming the field;
  /// Error(kOutOfMemory). Does not wait for work that the caller has submitted; any stream may use
  /// the plan. Not while the calling thread captures.
  DsaStepPlan make_step_plan(const StepBucket& bucket) const;

  /// Throws Error(kInvalidArgument), naming request and field, when a tensor does not fit the
  /// configuration or host lengths break an invariant (L >= rows >= 0, sum of rows = E, max L <=
  /// W); Error(kUnsupported) for a mode; with verify_metadata Error(kMismatch). Then nothing
  /// changed: the previous step stays current (after kMismatch: its arrays are the refreshed ones).
  void begin_step(const ForwardBatch& batch, Stream stream = {});

  /// The same into a plan of the bucket (mode, R, N); afterwards `forward(plan, ...)` runs the
  /// step.
  void begin_step(const ForwardBatch& batch, DsaStepPlan* plan, Stream stream = {});

  /// Refreshes the plans of a chain of drafts, 0 to 8 of them, in one call: `batch` is a kDecode
  /// batch whose seq_len is the committed length before the chain, without positions and
  /// out_cache_loc. Without steps nothing is launched. Throws as begin_step, and for two steps that
  /// name one plan.
  void begin_draft_steps(const ForwardBatch& batch, std::span<const DraftStep> steps,
                         Stream stream = {});

  /// Stores the new rows, selects, attends. Store precedes scoring: a row sees its own key.
  ///
  /// Throws Error(kInvalidArgument) before anything is written when a tensor is missing or does not
  /// fit, or no step has begun.
  void forward(const DsaLayer& layer, const DsaForwardTensors& tensors, Stream stream = {});
  void forward(const DsaStepPlan& plan, const DsaLayer& layer, const DsaForwardTensors& tensors,
               Stream stream = {});

  const DsaConfig& config() const noexcept;
  const DsaDispatch& dispatch() const noexcept;  ///< of the current step
  const MetadataFields& metadata()
      const noexcept;  ///< of the current step; views of the live shapes
  /// Of the current step, with `check`. Waits for the stream of the last begin_step.
  MetadataReport report() const;

  /// Receives every operator call from now on; null stops it. The calls are appended.
  ///
  /// On a GPU a call is appended when its work is done, by a later begin_step or forward, or by the
  /// next set_profile, which waits for all of them; and flops and bytes come from host lengths, or
  /// without them from bounds. What is captured is not recorded. Throws Error(kDevice).
  void set_profile(std::vector<OperatorCall>* calls);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace fovea
