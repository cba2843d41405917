#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "fovea/device.h"
#include "fovea/kda_compat.h"
#include "fovea/kda_gate.h"
#include "src/core/workspace.h"

/// kda_extend by groups of equal length.
namespace fovea::internal {

inline constexpr char kExtendOp[] = "kda_extend";
inline constexpr int64_t kExtendBuckets[] = {2048, 4096, 8192, 16384};
inline constexpr int64_t kMaxExtendLength = 16384;
inline constexpr int64_t kMaxGroupRows = 8;

/// The smallest bucket that covers `length`; the largest one for what none covers.
int64_t extend_bucket(int64_t length);

/// One call, checked, without batch axes; q and k are normalised, parameters are f32.
struct ExtendCall {
  ConstTensorView q, k, v;                         // bf16 [T, heads, dim]
  ConstTensorView g;                               // bf16 [T, HV, K], raw
  ConstTensorView beta;                            // f32 [T, HV]
  ConstTensorView a_log;                           // f32 [HV]
  ConstTensorView dt_bias;                         // optional f32 [HV, K]
  TensorView states;                               // [slots, HV, V, K]
  TensorView out;                                  // bf16 [T, HV, V]
  std::span<const int32_t> slots;                  // [N]
  std::span<const int32_t> lengths;                // [N], 1..16384, sum T
  std::span<const int32_t> final_seq, final_slot;  // snapshots at the end
};

class ExtendGroups {
 public:
  /// `layer`: with the raw gate.
  ExtendGroups(const compat::KdaExtendProblem& problem, const KdaLayer& layer,
               const Device& device);

  size_t workspace_bytes() const { return workspace_bytes_; }
  const compat::KdaDense& implementation() const { return *dense_; }

  /// Writes call.out as groups finish, and states as its last step. `groups` counts those that ran
  /// to their end.
  void run(const ExtendCall& call, Workspace workspace, int64_t* groups) const;

 private:
  struct Staging {
    bf16_t *q, *k, *v, *out;
    float *g, *beta;
    float* initial;  // [B, HV, K, V]
    float* finals;   // [N, HV, K, V]
    Workspace gate, dense;
  };
  struct Group {
    int64_t first = 0;  // sequence
    int64_t rows = 0;   // B
    int64_t bucket = 0;
    int64_t begin[kMaxGroupRows] = {};  // token
    int64_t length[kMaxGroupRows] = {};
  };
  Staging cut(WorkspaceCutter* cutter) const;
  void stage_rows(const ExtendCall& call, const Group& group, const Staging& staging) const;
  void activate(const ExtendCall& call, const Group& group, const Staging& staging) const;
  void gather(const ExtendCall& call, const Group& group, const Staging& staging) const;
  void unpack(const ExtendCall& call, const Group& group, const Staging& staging) const;
  void commit(const ExtendCall& call, const Staging& staging) const;

  KdaLayer layer_;
  Device device_;
  int64_t max_sequences_;
  compat::KdaDenseBounds bounds_;
  KdaGateActivation gate_;
  std::unique_ptr<const compat::KdaDense> dense_;
  size_t workspace_bytes_ = 0;
};

}  // namespace fovea::internal
