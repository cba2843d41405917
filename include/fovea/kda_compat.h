#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string_view>

#include "fovea/device.h"
#include "fovea/dtype.h"
#include "fovea/export.h"
#include "fovea/implementation.h"
#include "fovea/kda.h"
#include "fovea/tensor.h"

/// What exists only for engines that call KDA prefills as `extend`, and for kernels that take
/// equal-length batches only. The library's own operator is kda_prefill. Names of the original:
/// docs/kda_extend.md.
namespace fovea::compat {

/// The largest call that a dense-only implementation has to serve.
struct KdaDenseBounds {
  KdaLayer layer;          ///< beta kProb, gate kGiven in f32, f32 states, no normalisation.
  int64_t max_rows = 0;    ///< Of B: 1..8.
  int64_t max_bucket = 0;  ///< Of T: 2048, 4096, 8192 or 16384.
  Device device;
};

/// B sequences of equal length T. Rows behind a sequence's end are neutral: q, k and v are 0, beta
/// is 0 and g is 0, so that the state passes through them unchanged.
struct KdaDenseGroup {
  ConstTensorView q;              ///< bf16 [B, T, H, K], normalised
  ConstTensorView k;              ///< bf16 [B, T, H, K], normalised
  ConstTensorView v;              ///< bf16 [B, T, HV, V]
  ConstTensorView g;              ///< f32 [B, T, HV, K]: log decay, activated, <= 0
  ConstTensorView beta;           ///< f32 [B, T, HV]
  ConstTensorView initial_state;  ///< f32 [B, HV, K, V]
  float scale = 0;
  TensorView out;          ///< bf16 [B, T, HV, V]
  TensorView final_state;  ///< f32 [B, HV, K, V]
};

/// An implementation of KDA for batches of equal length.
class FOVEA_API KdaDense {
 public:
  virtual ~KdaDense();
  virtual std::string_view name() const noexcept = 0;
  /// For every group inside the bounds; must not fall when a bound grows.
  virtual size_t workspace_bytes() const noexcept = 0;
  /// Computes out and final_state from the rest of the group. May throw anything; must not
  /// allocate and must be safe to call from several threads, each with its own workspace.
  virtual void run(const KdaDenseGroup& group, Workspace workspace) const = 0;
};

/// Makes an implementation for the bounds of one plan.
using KdaDenseFactory = std::function<std::unique_ptr<const KdaDense>(const KdaDenseBounds&)>;

/// kda_prefill itself on the dense form: sequences of T rows each, states in layout kv.
FOVEA_API std::unique_ptr<const KdaDense> kda_dense_prefill(const KdaDenseBounds& bounds);

struct KdaExtendProblem {
  int64_t num_heads = 0;             ///< H
  int64_t num_value_heads = 0;       ///< HV, a multiple of H
  int64_t head_dim_k = 128;          ///< K
  int64_t head_dim_v = 128;          ///< V
  int64_t max_rows = 0;              ///< Bound of T.
  int64_t max_sequences = 0;         ///< Bound of N.
  int64_t max_tracks = 0;            ///< Bound of both track lists together.
  std::optional<float> lower_bound;  ///< Given: GateKind::kLowerBound; otherwise kSoftplus.
  DType g_dtype = DType::kBf16;      ///< kBf16 or kF32
  DType beta_dtype = DType::kF32;    ///< kF32 or kBf16
  DType state_dtype = DType::kF32;   ///< kF32 or kBf16
  /// Runs eligible calls by groups of equal length; empty: every call runs kda_prefill.
  KdaDenseFactory dense;
  bool strict = false;  ///< A call that the dense implementation fails at is an error.
};

/// Tensors of one call. Of q, k, v, g, beta and out a first axis of extent 1 may be left out.
struct KdaExtendTensors {
  ConstTensorView q;                ///< bf16 [1, T, H, K], as projected: normalised here
  ConstTensorView k;                ///< bf16 [1, T, H, K]
  ConstTensorView v;                ///< bf16 [1, T, HV, V]
  ConstTensorView g;                ///< raw; [1, T, HV * K] or [1, T, HV, K]
  ConstTensorView beta;             ///< [1, T, HV], probabilities
  TensorView ssm_states;            ///< [slots, HV, V, K], read and updated
  ConstTensorView cache_indices;    ///< i32 [N]; outside the pool: zero state, nothing stored
  ConstTensorView query_start_loc;  ///< i32 or i64 [N+1]
  std::optional<std::span<const int32_t>> extend_seq_lens_cpu;  ///< [N]; dense groups need it
  ConstTensorView a_log;    ///< optional f32 or bf16, HV elements in any shape; kSoftplus needs it
  ConstTensorView dt_bias;  ///< optional f32 or bf16 [HV * K] or [HV, K]
  bool is_spec_decode = false;              ///< A speculative extend: never grouped.
  bool return_intermediate_states = false;  ///< The result has h.
  ConstTensorView track_seq;         ///< optional i32 [M]: snapshots inside, as snapshot_seq,
  ConstTensorView track_pos;         ///< i32 [M]: tokens of this call,
  ConstTensorView track_slot;        ///< i32 [M]
  ConstTensorView track_final_seq;   ///< optional i32 [F]: snapshots at the end of a sequence
  ConstTensorView track_final_slot;  ///< i32 [F]
  TensorView out;                    ///< bf16 [1, T, HV, V]
  /// Of state_dtype [1, E, HV, V, K]; with return_intermediate_states and M > 0: the state before
  /// every 64 rows of each sequence, as KdaPrefillTensors::chunk_states.
  TensorView h;
};

struct KdaExtendResult {
  TensorView out;
  /// Absent unless return_intermediate_states; tensors.h when snapshots inside were asked,
  /// otherwise f32 [1, 0, HV, V, K] without memory.
  TensorView h;
};

/// How many calls of a plan took which way. Every call that returns is one of the first eight.
struct KdaExtendRoutes {
  int64_t dense = 0;        ///< Groups of equal length.
  int64_t native = 0;       ///< No dense implementation was given.
  int64_t speculative = 0;  ///< is_spec_decode.
  int64_t snapshot = 0;     ///< Snapshots inside.
  int64_t no_lengths = 0;   ///< No host lengths.
  int64_t single = 0;       ///< One sequence, or none.
  int64_t refused = 0;      ///< Types, shapes or lengths that the grouping does not take.
  int64_t fallback = 0;     ///< Groups failed; kda_prefill ran from the unchanged pool.
  int64_t groups = 0;       ///< Groups that ran, those of failed calls included.
};

/// A KDA prefill under the arguments of an engine's `extend`:
///
///   q, k <- x / sqrt(sum x^2 + 1e-6), rounded to bf16; then kda_prefill with beta kProb, the raw
///   gate kLowerBound or kSoftplus, scale K^-1/2, states in place at cache_indices.
///
/// Dense groups. With `dense`, calls run by groups of at most 8 consecutive sequences, each padded
/// to the smallest of 2048, 4096, 8192 and 16384 rows that covers its longest member. Eligible: two
/// sequences or more, host lengths known, not speculative, no snapshots inside (otherwise another
/// route, silently); K = V = 128, HV = H, g bf16, beta f32, a_log given, lengths of 1..16384 that
/// sum to T and agree with query_start_loc (otherwise a refusal, logged once per reason at level
/// warning). The first group of each (rows, bucket) is logged at level dispatch. Padding is
/// neutral for every a_log, because the gate is activated first. All routes read the same
/// normalised rows; their results differ by fp32 rounding.
///
/// Transaction: final states of all groups wait in the workspace and are copied by the last step,
/// so that a failure at any group leaves every slot bit-identical. Then the call runs again as
/// kda_prefill from the same raw arguments, with a line at level error; with `strict` the failure
/// is thrown, `out` unspecified.
///
/// Snapshots: (track_seq, track_pos) inside and (track_final_seq, its length) at the end, each to
/// its slot, with the rules of kda_prefill for legal positions and slots.
///
/// plan() throws Error(kInvalidArgument) as KdaPrefill, and Error(kUnsupported) for another device
/// than the CPU. run() throws Error(kInvalidArgument) for tensors that contradict the plan, before
/// anything is written; it does not allocate, except for log lines. workspace_bytes() depends on
/// the bounds alone, never falls when one grows, and covers the largest group. Deterministic for
/// any thread count if `dense` is. Thread-safe: each run needs its own workspace.
///
/// Source: Kimi Linear technical report; grouping in docs/kda_extend.md.
class FOVEA_API KdaExtend {
 public:
  static KdaExtend plan(const KdaExtendProblem& problem, const Device& device,
                        const Options& options = {});

  size_t workspace_bytes() const noexcept;
  KdaExtendResult run(const KdaExtendTensors& tensors, Workspace workspace) const;
  /// Counts of all copies of this plan.
  KdaExtendRoutes routes() const noexcept;

  struct State;

 private:
  explicit KdaExtend(std::shared_ptr<State> state);
  std::shared_ptr<State> state_;
};

}  // namespace fovea::compat
