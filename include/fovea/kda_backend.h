#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fovea/causal_conv1d.h"
#include "fovea/dsa_backend.h"
#include "fovea/export.h"
#include "fovea/kda.h"
#include "fovea/kda_verify.h"
#include "fovea/tensor.h"

namespace fovea {

/// Configuration of a backend for models that mix Kimi Delta Attention with full attention over a
/// latent cache: fixed for the life of an engine. Every field has a row in docs/kda_backend.md.
struct KdaBackendConfig {
  KdaLayer layer;           ///< Of every KDA layer.
  int64_t num_layers = 1;   ///< L: KDA layers; a commit covers all of them.
  bool convolution = true;  ///< q|k|v pass a causal_conv1d with SiLU first; off: given convolved.
  WindowLayout window_layout = WindowLayout::kWd;
  DType conv_weight_dtype = DType::kBf16;
  DType conv_bias_dtype = DType::kBf16;
  int64_t num_mla_heads = 0;     ///< H of the full-attention layers; 0: there are none.
  int64_t page_size = 64;        ///< P of their bf16 latent cache.
  int64_t table_width = 1;       ///< W of req_to_token.
  int64_t max_requests = 0;      ///< Bound of R.
  int64_t max_rows = 0;          ///< Bound of E and T.
  int64_t rows_per_request = 1;  ///< Td of TARGET_VERIFY: one committed token and the drafted ones.
  int64_t max_snapshots = 0;     ///< Bound of M.
  VerifyMode verify_mode = VerifyMode::kStates;
  CommitMode commit = CommitMode::kDirect;  ///< Of prefills.
  /// A decoded row has the bits of the same row verified, whatever was accepted before it (with
  /// verify_mode kStates and f32 states): a decode runs as a verify of one row. No fallback.
  bool deterministic = true;
  /// A failed operator (Error kDevice, kInternal) is an error at once. Otherwise the next
  /// implementation of its list runs on the same tensors, from the unchanged pools, with a log
  /// line; not with `deterministic` nor with a forced implementation.
  bool strict = false;
  bool check = false;          ///< As in KdaPrefillProblem: faults of slots, positions, counts.
  std::string implementation;  ///< Forces one implementation for every operator that has it.
};

/// One forward call of an engine.
struct KdaBatch {
  ForwardBatch forward;  ///< Lengths and rows; without a context split.
  /// Where the requests' states and windows are, for forward_kda; outside the pool: padding.
  ConstTensorView in_slot;   ///< i32 [R]: read
  ConstTensorView out_slot;  ///< i32 [R]: written; absent: in_slot. In a verify: by the commit.
  ConstTensorView has_initial_state;  ///< optional u8 [R]; 0: starts at zero
  ConstTensorView snapshot_seq;       ///< kExtend, kMixed: optional i32 [M], as KdaPrefillTensors
  ConstTensorView snapshot_pos;
  ConstTensorView snapshot_slot;
  int32_t kv_len_delta = 0;  ///< kDecode: added to seq_len; step j of a chain of drafts has j + 1.
};

/// One KDA layer's forward. D = 2*H*K + HV*V.
struct KdaForwardTensors {
  ConstTensorView qkv;          ///< bf16 [T, D]; with `convolution` its raw inputs
  ConstTensorView g;            ///< bf16 or f32 [T, HV, K]
  ConstTensorView beta;         ///< bf16 or f32 [T, HV]
  ConstTensorView a_log;        ///< f32 [HV]
  ConstTensorView dt_bias;      ///< optional f32 [HV, K]
  ConstTensorView conv_weight;  ///< with `convolution`: [D, 4]
  ConstTensorView conv_bias;    ///< optional [D]
  TensorView state;             ///< [slots, HV, V, K]
  TensorView window;            ///< with `convolution`: bf16 [slots, 3, D] or [slots, D, 3]
  TensorView out;               ///< bf16 [T, HV, V]; rows >= E are 0
};

/// One full-attention layer's forward: latent attention without rope.
struct KdaMlaTensors {
  ConstTensorView q;        ///< bf16 [T, H, 576], absorbed
  ConstTensorView k;        ///< bf16 [T, 576]; absent: the rows are in the pool
  TensorView kv_pool;       ///< u8 [pages, page bytes] of bf16 rows
  float softmax_scale = 0;  ///< Of the layer: finite, > 0.
  TensorView out;           ///< bf16 [T, H, 512]; rows >= E are 0
  TensorView lse;           ///< f32 [T, H]; rows >= E are -inf
};

/// What of a verify stays, for all KDA layers at once.
struct KdaCommitInputs {
  ConstTensorView accepted;        ///< i32 [R]: rows that stay, the first one included
  TensorView state;                ///< [L, slots, HV, V, K]
  TensorView window;               ///< with `convolution`: [L, slots, 3, D] or [L, slots, D, 3]
  ConstTensorView track_slot;      ///< optional i32 [R], as in KdaCommitTensors
  ConstTensorView track_accepted;  ///< i32 [R], with track_slot
};

/// How many forwards of KDA layers took which way.
struct KdaRoutes {
  int64_t idle = 0;         ///< No request.
  int64_t single = 0;       ///< A prefill of one sequence.
  int64_t packed = 0;       ///< A prefill of several.
  int64_t snapshot = 0;     ///< Of these: with snapshots.
  int64_t decode = 0;       ///< One row per request, through kda_decode.
  int64_t verified = 0;     ///< One row per request, as a verify of one row (deterministic).
  int64_t speculative = 0;  ///< TARGET_VERIFY.
  int64_t commits = 0;      ///< commit() calls.
  int64_t fallback = 0;     ///< Operators of any layer that another implementation took over.
  int64_t restored = 0;     ///< Forwards that failed, and whose windows were put back.
};

/// The arrays of one step, at fixed addresses; otherwise as DsaStepPlan. That of a TARGET_VERIFY
/// keeps what the commit needs for all layers.
class FOVEA_API KdaStepPlan {
 public:
  KdaStepPlan(KdaStepPlan&&) noexcept;
  KdaStepPlan& operator=(KdaStepPlan&&) noexcept;
  ~KdaStepPlan();

  const StepBucket& bucket() const noexcept;
  const MetadataFields& metadata() const noexcept;

  struct State;

 private:
  friend class KdaBackend;
  explicit KdaStepPlan(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

/// Serves models of KDA layers and full-attention layers:
///
///   backend.begin_step(batch);
///   for (layer : layers) backend.forward_kda(index, tensors) or backend.forward_mla(tensors);
///
/// and for drafts
///
///   KdaStepPlan plan = backend.make_step_plan({ForwardMode::kTargetVerify, 64, 4});
///   backend.begin_step(batch, &plan);
///   for (layer : layers) backend.forward_kda(plan, index, tensors), ...;
///   backend.commit(plan, {accepted, ...});
///
/// KDA layers: kExtend and kMixed run causal_conv1d and kda_prefill over all sequences (a decode
/// row of a mixed batch is a sequence of one token); kDecode runs the convolution's update and
/// kda_decode, in place, or with `deterministic` a verify of one row and its commit, from in_slot
/// to out_slot; kTargetVerify only reads the pools, commit() writes them. Full-attention layers
/// store their rows and run dense_mla, in every mode.
///
/// Transactions. States and windows of a layer change together: a forward or a commit that throws
/// leaves both pools, snapshots included, bit-identical. What can be judged on the host is judged
/// before anything is written. The convolution comes first and its windows are put back when what
/// follows fails; kda_prefill is atomic as `commit` says, kda_decode and kda_commit are one launch.
/// Every forward of a layer is a transaction of its own: an engine that repeats a step keeps
/// in_slot and out_slot apart.
///
/// Buffers are allocated by the constructor and by make_step_plan; begin_step, forward and commit
/// allocate nothing, except that the first forward with a new softmax_scale makes its plan and a
/// fallback may need a larger workspace. Device contents are never trusted. Results depend on no
/// thread count. One backend serves one stream of steps; it is not thread-safe.
///
/// On a GPU begin_step, forward and commit submit work to `stream` and wait for nothing; tensors
/// and slots are memory of the device and are never read by the host. A whole step, begin_step and
/// commit included, may be captured in a Graph at its first call, with a step plan, and replayed
/// with new contents of the same arrays; routes() then counts what was captured. A fallback that
/// needs a larger workspace waits.
class FOVEA_API KdaBackend {
 public:
  /// Throws Error(kInvalidArgument / kUnsupported), naming the field; Error(kOutOfMemory).
  KdaBackend(const KdaBackendConfig& config, const Device& device);
  ~KdaBackend();
  KdaBackend(KdaBackend&&) noexcept;
  KdaBackend& operator=(KdaBackend&&) noexcept;

  /// Buffers for the steps of one bucket: every mode but kExtend and kMixed. Throws
  /// Error(kInvalidArgument), naming the field; Error(kOutOfMemory).
  KdaStepPlan make_step_plan(const StepBucket& bucket) const;

  /// Throws Error(kInvalidArgument / kUnsupported) naming the tensor; then nothing changed. Tensors
  /// live until the step's last forward, or commit.
  void begin_step(const KdaBatch& batch, Stream stream = {});
  void begin_step(const KdaBatch& batch, KdaStepPlan* plan, Stream stream = {});

  /// `layer`: 0..L-1, which verifies keep apart. Throws Error(kInvalidArgument) before anything is
  /// written for tensors that do not fit, and what a failed operator throws.
  void forward_kda(int64_t layer, const KdaForwardTensors& tensors, Stream stream = {});
  void forward_kda(const KdaStepPlan& plan, int64_t layer, const KdaForwardTensors& tensors,
                   Stream stream = {});
  void forward_mla(const KdaMlaTensors& tensors, Stream stream = {});
  void forward_mla(const KdaStepPlan& plan, const KdaMlaTensors& tensors, Stream stream = {});

  /// Makes the accepted rows of the plan's last verify the requests' states, in out_slot. Throws
  /// Error(kInvalidArgument) when a layer has not been verified since begin_step.
  void commit(const KdaStepPlan& plan, const KdaCommitInputs& inputs, Stream stream = {});

  const KdaBackendConfig& config() const noexcept;
  const KdaRoutes& routes() const noexcept;
  const MetadataFields& metadata() const noexcept;  ///< of the current step

  /// Receives every operator call from now on; null stops it. The calls are appended: at once on
  /// the CPU; on a GPU once their work is done, at a later begin_step, forward or commit, and all
  /// of them at the next set_profile, which waits. Nothing that is captured is timed.
  void set_profile(std::vector<OperatorCall>* calls);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace fovea
