// fovea run: the operators of the room kda.

#include <cmath>
#include <limits>

#include "cli/run_bindings.h"
#include "fovea/kda_decode.h"
#include "fovea/kda_gate.h"
#include "fovea/kda_prefill.h"

namespace fovea::cli {
namespace {

// The gate's parameters and tensors, over rows [T, HV, K].
template <class Tensors>
KdaGate bind_gate(OperatorCall& call, Tensors* tensors) {
  KdaGate gate;
  gate.kind = call.choice<GateKind>("gate", {{"softplus", GateKind::kSoftplus},
                                             {"lower_bound", GateKind::kLowerBound},
                                             {"given", GateKind::kGiven}});
  gate.lower_bound = call.number("lower_bound", -5.0f);
  tensors->g = call.in("g", "bf16|f32 [T, HV, K]");
  gate.dtype = tensors->g.dtype;
  tensors->a_log = call.opt("a_log", "f32 [HV]");
  tensors->dt_bias = call.opt("dt_bias", "f32 [HV, K]");
  return gate;
}

// The parameters of a layer but its state, with g, beta, a_log and dt_bias. The axes H, V are known
// by now.
template <class Tensors>
KdaLayer bind_layer(OperatorCall& call, Tensors* tensors) {
  KdaLayer layer;
  layer.gate = bind_gate(call, tensors);
  tensors->beta = call.in("beta", "bf16|f32 [T, HV]");
  layer.beta_dtype = tensors->beta.dtype;
  layer.beta_kind =
      call.choice<BetaKind>("beta_kind", {{"prob", BetaKind::kProb}, {"logit", BetaKind::kLogit}});
  layer.allow_neg_eigval = call.flag("allow_neg_eigval", false);
  layer.normalise = call.flag("normalise", false);
  const float scale = call.number("scale", std::numeric_limits<float>::quiet_NaN());
  if (scale == 0) call.refuse("scale = 0, expected a value > 0; leave it out for K^-1/2");
  layer.scale = std::isnan(scale) ? 0.0f : scale;
  layer.num_heads = call.extent("H");
  layer.num_value_heads = call.extent("HV");
  layer.head_dim_k = call.extent("K");
  layer.head_dim_v = call.extent("V");
  return layer;
}

template <class Tensors>
void bind_qkv(OperatorCall& call, Tensors* tensors) {
  tensors->q = call.in("q", "bf16 [T, H, K]");
  tensors->k = call.in("k", "bf16 [T, H, K]");
  tensors->v = call.in("v", "bf16 [T, HV, V]");
}

}  // namespace

void run_kda_gate(OperatorCall& call) {
  KdaGateTensors tensors;
  KdaGateProblem problem;
  problem.gate = bind_gate(call, &tensors);
  problem.max_rows = call.extent("T");
  problem.num_value_heads = call.extent("HV");
  problem.head_dim_k = call.extent("K");
  const KdaGateActivation plan = call.plan<KdaGateActivation>(problem);
  tensors.log_decay = call.out("log_decay", "f32 [T, HV, K]");
  call.run(plan, tensors);
}

void run_kda_prefill(OperatorCall& call) {
  KdaPrefillTensors tensors;
  KdaPrefillProblem problem;
  bind_qkv(call, &tensors);
  problem.layer = bind_layer(call, &tensors);
  tensors.q_indptr = call.in("q_indptr", "i32|i64 [N+1]");
  problem.state_layout = call.choice<StateLayout>(
      "state_layout", {{"vk", StateLayout::kVk}, {"kv", StateLayout::kKv}}, StateLayout::kVk);
  problem.chunk = call.integer("chunk", 0);
  problem.commit = call.choice<CommitMode>(
      "commit", {{"direct", CommitMode::kDirect}, {"staged", CommitMode::kStaged}},
      CommitMode::kDirect);
  problem.check = call.flag("check", false);
  tensors.in_slot = call.opt("in_slot", "i32 [N]");
  tensors.out_slot = call.opt("out_slot", "i32 [N]");
  tensors.has_initial_state = call.opt("has_initial_state", "u8 [N]");
  if (call.has("snapshot_seq") || call.has("snapshot_pos") || call.has("snapshot_slot")) {
    tensors.snapshot_seq = call.in("snapshot_seq", "i32 [M]");
    tensors.snapshot_pos = call.in("snapshot_pos", "i32 [M]");
    tensors.snapshot_slot = call.in("snapshot_slot", "i32 [M]");
    problem.max_snapshots = call.extent("M");
  }
  problem.max_rows = call.extent("T");
  problem.max_sequences = call.extent("N");
  if (call.has("state")) {
    const bool listed = tensors.in_slot.defined() || tensors.out_slot.defined();
    const bool vk = problem.state_layout == StateLayout::kVk;
    tensors.state = call.update("state", listed ? "f32|bf16 [slots, HV, V, K]"
                                         : vk   ? "f32|bf16 [N, HV, V, K]"
                                                : "f32|bf16 [N, HV, K, V]");
    problem.layer.state_dtype = tensors.state.dtype;
  }
  const KdaPrefill plan = call.plan<KdaPrefill>(problem);
  tensors.out = call.out("out", "bf16 [T, HV, V]");
  call.run(plan, tensors);
}

void run_kda_decode(OperatorCall& call) {
  KdaDecodeTensors tensors;
  KdaDecodeProblem problem;
  // The state names V, and with it and HV what `qkv` leaves for H.
  tensors.state = call.update("state", "f32|bf16 [slots, HV, V, K]");
  if (call.has("qkv")) {
    tensors.qkv = call.in("qkv", "bf16 [T, D]");
    const int64_t keys =
        call.extent("D") - call.extent("HV") * call.extent("V");  // of q and k together
    const int64_t dim = 2 * call.extent("K");
    if (dim == 0 || keys <= 0 || keys % dim != 0) {
      call.refuse("qkv = " + to_string(tensors.qkv) + ", expected [T, 2*H*K + HV*V] with HV, V " +
                  "and K of state = " + to_string(tensors.state));
    }
    call.set_extent("H", keys / dim, "qkv");
  } else {
    bind_qkv(call, &tensors);
  }
  problem.layer = bind_layer(call, &tensors);
  problem.layer.state_dtype = tensors.state.dtype;
  tensors.slot = call.opt("slot", "i32 [T]");
  tensors.has_initial_state = call.opt("has_initial_state", "u8 [T]");
  problem.check = call.flag("check", false);
  problem.max_rows = call.extent("T");
  const KdaDecode plan = call.plan<KdaDecode>(problem);
  tensors.out = call.out("out", "bf16 [T, HV, V]");
  call.run(plan, tensors);
}

}  // namespace fovea::cli
