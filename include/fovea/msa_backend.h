#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fovea/dsa_backend.h"
#include "fovea/export.h"
#include "fovea/msa_block_scores.h"
#include "fovea/msa_select_blocks.h"
#include "fovea/tensor.h"

namespace fovea {

/// Configuration of a backend for block-sparse attention: fixed for the life of an engine. Every
/// field has a row in docs/msa_backend.md.
struct MsaBackendConfig {
  int64_t num_heads = 0;     ///< Hq, local query heads: a multiple of num_kv_heads.
  int64_t num_kv_heads = 0;  ///< Hkv
  int64_t head_dim = 128;    ///< D
  int64_t index_heads = 0;   ///< Hi; 0: num_kv_heads.
  int64_t index_dim = 128;   ///< Di
  int64_t block_size = 128;  ///< P, 1..256: tokens of a block, which is a page of the cache.
  int64_t page_size = 0;     ///< 0, or block_size: any other value is an error.
  int64_t topk = 16;         ///< K: blocks that a row attends to, forced ones included.
  int64_t init_blocks = 0;   ///< Blocks 0 .. init_blocks - 1 are always chosen.
  int64_t local_blocks = 1;  ///< So are the row's own block and the local_blocks - 1 before it.
  BlockScore score = BlockScore::kMax;
  IndexReduce index_reduce = IndexReduce::kPerGroup;
  float index_scale = 1;         ///< Of the index scores.
  float softmax_scale = 0;       ///< 0: D^-1/2.
  bool dense_layers = false;     ///< The model has layers that attend to every block.
  int64_t table_width = 0;       ///< W of req_to_token: context plus the headroom of a verify.
  int64_t max_requests = 0;      ///< Bound of R.
  int64_t max_rows = 0;          ///< Bound of E and T.
  int64_t rows_per_request = 1;  ///< N of TARGET_VERIFY and the draft-extend modes: one committed
                                 ///< token and N - 1 drafted ones.
  /// A row's bits depend on the tokens of its own request alone: not on chunks, batch mates, the
  /// bucket of the step or the mode that it runs in. No fallback.
  bool deterministic = true;
  /// A failed operator (Error kDevice, kInternal) is an error at once. Otherwise the next
  /// implementation of its list runs on the same tensors, with a log line; not with `deterministic`
  /// nor with a forced implementation.
  bool strict = false;
  std::string implementation;  ///< Forces one implementation for every operator that has it.
};

/// One forward call of an engine.
struct MsaBatch {
  ForwardBatch forward;      ///< Lengths and rows; without a context split.
  int32_t kv_len_delta = 0;  ///< kDecode: added to seq_len; step j of a chain of drafts has j + 1.
};

/// One layer's forward. Slots of the pools are those of req_to_token; they fill whole pages.
struct MsaForwardTensors {
  ConstTensorView q;  ///< bf16 [T, Hq, D]
  ConstTensorView k;  ///< bf16 [T, Hkv, D]; absent, with v and index_k: the rows are in the pools
  ConstTensorView v;  ///< bf16 [T, Hkv, D]
  ConstTensorView index_q;      ///< bf16 [T, Hi, Di]; sparse layers
  ConstTensorView index_k;      ///< bf16 [T, Di]; sparse layers
  ConstTensorView topk_blocks;  ///< optional i32 [Hkv, T, K]: a selection made elsewhere, any
                                ///< order; the index branch is skipped and its tensors are absent
  TensorView k_pool;            ///< bf16 [slots, Hkv, D], any strides but the last
  TensorView v_pool;            ///< of k_pool's shape and strides
  TensorView index_pool;        ///< bf16 [slots, 1, Di]; sparse layers
  TensorView blocks;  ///< optional i32 [Hkv, T, K]: receives the selection; rows >= E are -1
  TensorView out;     ///< bf16 [T, Hq, D]; rows >= E are 0
  TensorView lse;     ///< optional f32 [T, Hq]; rows >= E are -inf
};

/// How many forwards took which way.
struct MsaRoutes {
  int64_t idle = 0;      ///< No request.
  int64_t extend = 0;    ///< kExtend, kMixed.
  int64_t decode = 0;    ///< kDecode.
  int64_t verify = 0;    ///< kTargetVerify.
  int64_t draft = 0;     ///< kDraftExtend, kDraftExtendV2.
  int64_t dense = 0;     ///< Of all these: dense layers.
  int64_t given = 0;     ///< Of all these: with topk_blocks.
  int64_t fallback = 0;  ///< Operators of any layer that another implementation took over.
};

/// The arrays of one step, at fixed addresses; otherwise as DsaStepPlan.
class FOVEA_API MsaStepPlan {
 public:
  MsaStepPlan(MsaStepPlan&&) noexcept;
  MsaStepPlan& operator=(MsaStepPlan&&) noexcept;
  ~MsaStepPlan();

  const StepBucket& bucket() const noexcept;
  const MetadataFields& metadata() const noexcept;

  struct State;

 private:
  friend class MsaBackend;
  explicit MsaStepPlan(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

/// Serves models with block-sparse attention over a paged cache:
///
///   backend.begin_step(batch);
///   for (layer : layers) backend.forward(tensors) or backend.forward_dense(tensors);
///
/// or, with buffers that live on,
///
///   MsaStepPlan plan = backend.make_step_plan({ForwardMode::kTargetVerify, 64, 4});
///   backend.begin_step(batch, &plan);          // each replay
///   for (layer : layers) backend.forward(plan, tensors), ...;
///
/// A layer stores the rows of k, v and index_k in the slots of its tokens, scores the blocks that
/// each row sees and selects K of them for every KV head (msa_score_select), and attends over those
/// (msa_attend); rows of one request have a position, a mask and a list each, whatever the mode. A
/// dense layer attends to every block and has no index branch. Store precedes scoring: a row sees
/// its own key. All seven forward modes.
///
/// What a cache holds. A forward writes the slots of its rows and nothing else. Slots past a
/// request's length are never looked at, so that rejected rows of a verify and what a failed
/// forward has left take part in nothing; the step that is run again writes them again. What can be
/// judged on the host is judged before anything is written.
///
/// Buffers are allocated by the constructor and by make_step_plan; begin_step and forward allocate
/// nothing, except that a fallback may need a larger workspace. Device contents (lengths, tables,
/// slots, lists) are never trusted and never an error. Results depend on no thread count. One
/// backend serves one stream of steps; it is not thread-safe.
///
/// On a GPU begin_step and forward submit work to `stream` and wait for nothing; tensors are memory
/// of the device and are never read by the host. A whole step may be captured in a Graph at its
/// first call, with a step plan, and replayed with new contents of the same arrays; routes() then
/// counts what was captured. The steps of a backend share scratch memory: they, and replays, follow
/// one another in the order of streams; steps that may overlap need a backend each.
class FOVEA_API MsaBackend {
 public:
  /// Throws Error(kInvalidArgument / kUnsupported), naming the field; Error(kOutOfMemory).
  MsaBackend(const MsaBackendConfig& config, const Device& device);
  ~MsaBackend();
  MsaBackend(MsaBackend&&) noexcept;
  MsaBackend& operator=(MsaBackend&&) noexcept;

  /// Buffers for the steps of one bucket: every mode but kExtend and kMixed. Not while the calling
  /// thread captures. Throws Error(kInvalidArgument), naming the field; Error(kOutOfMemory).
  MsaStepPlan make_step_plan(const StepBucket& bucket);

  /// Throws Error(kInvalidArgument / kUnsupported) naming the tensor; then nothing changed. Tensors
  /// live until the step's last forward.
  void begin_step(const MsaBatch& batch, Stream stream = {});
  void begin_step(const MsaBatch& batch, MsaStepPlan* plan, Stream stream = {});

  /// A sparse layer. Throws Error(kInvalidArgument) before anything is written for tensors that do
  /// not fit (among them slots that do not fill whole pages, lists of another width than K), and
  /// what a failed operator throws.
  void forward(const MsaForwardTensors& tensors, Stream stream = {});
  void forward(const MsaStepPlan& plan, const MsaForwardTensors& tensors, Stream stream = {});

  /// A dense layer: without index_q, index_k, index_pool, blocks and topk_blocks.
  void forward_dense(const MsaForwardTensors& tensors, Stream stream = {});
  void forward_dense(const MsaStepPlan& plan, const MsaForwardTensors& tensors, Stream stream = {});

  const MsaBackendConfig& config() const noexcept;
  const MsaRoutes& routes() const noexcept;
  const MetadataFields& metadata() const noexcept;  ///< of the current step

  /// Columns of the lists: K, with index_reduce kUnion Hi / Hkv * K.
  int64_t list_width() const noexcept;

  /// Receives every operator call from now on; null stops it. The calls are appended: at once on
  /// the CPU; on a GPU once their work is done, at a later begin_step or forward, and all of them
  /// at the next set_profile, which waits. Nothing that is captured is timed.
  void set_profile(std::vector<OperatorCall>* calls);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace fovea
