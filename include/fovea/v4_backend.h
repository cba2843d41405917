#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fovea/dsa_backend.h"
#include "fovea/dtype.h"
#include "fovea/export.h"
#include "fovea/tensor.h"
#include "fovea/v4_compress.h"

namespace fovea {

/// Where the window rows of a request are.
enum class V4WindowStorage : uint8_t {
  kTokenPages,  ///< In the pages of its tokens (req_to_token): they live as long as those.
  kPaged,       ///< In pages of their own, freed behind the window: V4Batch::window_table.
  kRing,        ///< In a ring of window_page_size rows: V4Batch::window_table [R, 1].
};

/// Configuration of a DeepSeek-V4 attention backend: fixed for the life of an engine. Every field
/// has a row in docs/v4_backend.md.
struct V4BackendConfig {
  int64_t num_heads = 0;                       ///< H: local query heads.
  float softmax_scale = 0.04419417382415922f;  ///< 512^-1/2; finite, > 0.
  int64_t window = 128;                        ///< W, a row's own token included.
  V4WindowStorage window_storage = V4WindowStorage::kTokenPages;
  int64_t window_page_size = 0;  ///< kPaged: rows per page; kRing: of a ring. Else ignored.
  /// Most rows of one request in one step, which are all stored before any is read: a ring needs
  /// window_page_size >= window + max_request_rows - 1. 0: max_rows.
  int64_t max_request_rows = 0;
  RowFormat window_format = RowFormat::kV4;      ///< kV4 or kBf16.
  RowFormat compressed_format = RowFormat::kV4;  ///< kV4 or kBf16.
  bool csa = true;                 ///< Layers of ratio 4 exist: page_size is a multiple of 4.
  bool hca = true;                 ///< Layers of ratio 128 exist: page_size is a multiple of 128.
  int64_t csa_state_tokens = 8;    ///< S of the rings of ratio 4, >= 8 - 2 + rows_per_request.
  int64_t hca_state_tokens = 128;  ///< S of ratio 128, >= 128 - 2 + rows_per_request, if stored.
  CompressorForm hca_form = CompressorForm::kStored;
  int64_t index_heads = 64;  ///< Hi of ratio 4.
  int64_t topk = 512;        ///< Entries that a row of ratio 4 sees at most.
  ScaleMode index_scale_mode = ScaleMode::kFp32;
  float eps = 1e-6f;             ///< Of the compressors' RMSNorm.
  int64_t page_size = 256;       ///< P: tokens of a page; P / 4 or P / 128 compressed rows.
  int64_t table_width = 0;       ///< Columns of req_to_token.
  int64_t max_requests = 0;      ///< Bound of R.
  int64_t max_rows = 0;          ///< Bound of E and T.
  int64_t rows_per_request = 1;  ///< Of TARGET_VERIFY and DRAFT_EXTEND_V2.
  int64_t logits_budget_bytes = int64_t{512} << 20;
  /// Only the chosen implementations run: no fallback, so that a row always has the same bits.
  bool deterministic = true;
  /// A failed operator (Error kDevice, kInternal) is an error at once. Otherwise the next
  /// implementation of its list runs on the same tensors, with a log line; not with `deterministic`
  /// nor with a forced implementation.
  bool strict = false;
  std::string implementation;  ///< Forces one implementation for every operator that has it.
};

/// One forward call of an engine.
struct V4Batch {
  ForwardBatch forward;  ///< Lengths and rows; without a context split.
  /// kPaged: i32 [R, columns], page of tokens c * window_page_size ..; kRing: i32 [R, 1], the
  /// request's ring. -1: freed, or none.
  ConstTensorView window_table;
  /// Layers of ratio > 0: the compressor states are read in in_slot and left in out_slot.
  ConstTensorView in_slot;   ///< i32 [R]; outside the states: nothing is read
  ConstTensorView out_slot;  ///< i32 [R]; absent: in_slot. Outside the states: a padded request
  /// kExtend, kMixed, ratio 4: the state behind row snapshot_pos (0: before the first) of request
  /// snapshot_seq becomes a copy in snapshot_slot. What is out of range writes nothing. A layer of
  /// ratio 128 has none: it resumes at multiples of 128, where a group starts and needs no state.
  ConstTensorView snapshot_seq;  ///< optional i32 [M], M <= max_requests + max_rows
  ConstTensorView snapshot_pos;
  ConstTensorView snapshot_slot;
  int32_t kv_len_delta = 0;  ///< kDecode: added to seq_len; step j of a chain of drafts has j + 1.
};

/// A compressor of a layer: 2*c*d floats a token, c = 2 for ratio 4, else 1; d = 512, or 128 of the
/// indexer.
struct V4Compressor {
  ConstTensorView kv_gate;      ///< f32 [T, 2*c*d]: values, then logits
  ConstTensorView ape;          ///< f32 [ratio, c*d]
  ConstTensorView norm_weight;  ///< f32 [d]
  TensorView state;             ///< f32 [states, S, 2, c*d]; online [states, 3, d]
  TensorView pool;              ///< u8 [pages, >= bytes of P / ratio rows]
};

/// One layer's forward.
struct V4ForwardTensors {
  ConstTensorView q;        ///< bf16 [T, H, 512], rotated
  ConstTensorView kv;       ///< bf16 [T, 512], rotated; absent: the rows are in the pool
  ConstTensorView sink;     ///< optional f32 [H]
  ConstTensorView cos_sin;  ///< f32 [max_pos, 64]: the layer's table, for everything it turns
  TensorView window_pool;   ///< u8 [pages, page bytes]
  V4Compressor compressor;  ///< ratio > 0
  // Ratio 4.
  V4Compressor indexer;       ///< d = 128, rows of i132
  ConstTensorView index_q;    ///< bf16 [T, Hi, 128], rotated
  ConstTensorView head_gate;  ///< f32 [T, Hi], before the factor Hi^-1/2 * 128^-1/2
  TensorView indices;         ///< optional i32 [T, topk]: receives the selection, slots of the
                              ///< compressor's pool ascending by entry, then -1; rows >= E are -1
  TensorView out;             ///< bf16 [T, H, 512], turned back; rows >= E are 0
  TensorView lse;             ///< f32 [T, H], sink excluded; rows >= E are -inf
};

/// How many forwards took which way.
struct V4Routes {
  int64_t idle = 0;      ///< No request.
  int64_t window = 0;    ///< Ratio 0.
  int64_t all = 0;       ///< Ratio 4 whose rows see every entry: nothing is scored.
  int64_t selected = 0;  ///< Ratio 4 through the indexer.
  int64_t pages = 0;     ///< Ratio 128.
  int64_t snapshot = 0;  ///< Of these: with snapshots.
  int64_t commits = 0;   ///< commit() calls.
  int64_t fallback = 0;  ///< Operators that another implementation took over.
};

/// The arrays of one step, at fixed addresses; otherwise as DsaStepPlan.
class FOVEA_API V4StepPlan {
 public:
  V4StepPlan(V4StepPlan&&) noexcept;
  V4StepPlan& operator=(V4StepPlan&&) noexcept;
  ~V4StepPlan();

  const StepBucket& bucket() const noexcept;
  const MetadataFields& metadata() const noexcept;

  struct State;

 private:
  friend class V4Backend;
  explicit V4StepPlan(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

/// Attention of DeepSeek-V4: a window of W tokens and, in layers of ratio 4 or 128, one compressed
/// entry per group of that many tokens.
///
///   backend.begin_step(batch);
///   for (layer : layers) backend.forward(ratio, tensors);
///
/// and for drafts
///
///   V4StepPlan plan = backend.make_step_plan({ForwardMode::kTargetVerify, 64, 4});
///   backend.begin_step(batch, &plan);
///   for (layer : layers) backend.forward(plan, ratio, tensors);
///   for (layer : layers) backend.commit(plan, ratio, tensors, accepted);
///
/// With p the position of a row, n_c = floor((p + 1) / ratio) and one sink per head:
///   out = turn_back(softmax over { window rows max(0, p - W + 1) .. p, entries } of q . k * v)
/// Entries: none (ratio 0), the min(topk, n_c) best of 0 .. n_c - 1 by the indexer (ratio 4), all
/// n_c (ratio 128). A forward stores the window rows, runs the compressors, selects, attends: the
/// entry that a row's own token completes is visible to it. The last 64 channels of out are turned
/// back by the row's angle, the same table throughout.
///
/// States. Ratio > 0: the state of a request moves from in_slot to out_slot; a forward that throws
/// has left in_slot as it was where the two differ. In place, a failed step can be run again when
/// the ring has S >= c * ratio - 1 + n tokens for its n rows, which a decode always has: the
/// entries that it has written are written again before they are read. Other rows of the pools keep
/// their bytes whatever happens; those of the step's own tokens are written again.
///
/// Verify. Rows that are not kept leave nothing that is read: the next step begins at the first of
/// them and rewrites ring entries and cached rows, hence rows_per_request <= S - c * ratio + 2.
/// The online form keeps no tokens: its verify leaves the states alone, and commit(), which every
/// form accepts, gives them the accepted rows.
///
/// Buffers are allocated by the constructor and by make_step_plan; begin_step, forward and commit
/// allocate nothing, except that a fallback may need a larger workspace. Device contents are never
/// trusted. Results depend on no thread count. One backend serves one stream of steps; it is not
/// thread-safe. On a GPU everything is submitted to `stream` and nothing waits; a step in a step
/// plan may be captured in a Graph at its first call and replayed with new contents of the same
/// arrays. A prefill (kExtend, kMixed) whose host lengths fit 4 * topk scores nothing.
///
/// Source: compressed attention of the DeepSeek-V4 technical report; docs/v4_backend.md.
class FOVEA_API V4Backend {
 public:
  /// Throws Error(kInvalidArgument / kUnsupported), naming the field; Error(kOutOfMemory).
  V4Backend(const V4BackendConfig& config, const Device& device);
  ~V4Backend();
  V4Backend(V4Backend&&) noexcept;
  V4Backend& operator=(V4Backend&&) noexcept;

  /// Buffers for the steps of one bucket: every mode but kExtend and kMixed. Throws
  /// Error(kInvalidArgument), naming the field; Error(kOutOfMemory).
  V4StepPlan make_step_plan(const StepBucket& bucket) const;

  /// Throws Error(kInvalidArgument / kUnsupported) naming the tensor; then nothing changed. Tensors
  /// live until the step's last forward, or commit.
  void begin_step(const V4Batch& batch, Stream stream = {});
  void begin_step(const V4Batch& batch, V4StepPlan* plan, Stream stream = {});

  /// `ratio`: 0, 4 or 128. Layers of ratio > 0 refuse the draft-extend modes. Throws
  /// Error(kInvalidArgument / kUnsupported) before anything is written, and what a failed operator
  /// throws.
  void forward(int64_t ratio, const V4ForwardTensors& tensors, Stream stream = {});
  void forward(const V4StepPlan& plan, int64_t ratio, const V4ForwardTensors& tensors,
               Stream stream = {});

  /// Makes the first accepted[r] rows of a verify the requests' states, with the tensors of its
  /// forward. `accepted`: i32 [R], the first row included; outside 0..N: clamped. A ring needs it
  /// not, whose entries say how far it is; it is then only counted. Throws Error(kInvalidArgument)
  /// when the plan holds no verify.
  void commit(const V4StepPlan& plan, int64_t ratio, const V4ForwardTensors& tensors,
              const ConstTensorView& accepted, Stream stream = {});

  const V4BackendConfig& config() const noexcept;
  const V4Routes& routes() const noexcept;
  const MetadataFields& metadata() const noexcept;  ///< of the current step

  /// Receives every operator call from now on; null stops it. Otherwise as
  /// KdaBackend::set_profile.
  void set_profile(std::vector<OperatorCall>* calls);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace fovea
