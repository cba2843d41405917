// Calls by name: the operators of the room kda.

#include <cmath>
#include <limits>
#include <string>

#include "fovea/causal_conv1d.h"
#include "fovea/kda_commit.h"
#include "fovea/kda_decode.h"
#include "fovea/kda_gate.h"
#include "fovea/kda_prefill.h"
#include "fovea/kda_stages.h"
#include "fovea/kda_verify.h"
#include "src/binding/bindings.h"

namespace fovea::internal {
namespace {

// The gate's parameters and tensors, over rows [T, HV, K].
template <class Tensors>
KdaGate bind_gate(NamedCall& call, Tensors* tensors) {
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

void bind_beta(NamedCall& call, DType dtype, KdaLayer* layer) {
  layer->beta_dtype = dtype;
  layer->beta_kind =
      call.choice<BetaKind>("beta_kind", {{"prob", BetaKind::kProb}, {"logit", BetaKind::kLogit}});
  layer->allow_neg_eigval = call.flag("allow_neg_eigval", false);
}

// 0 where it is left out: K^-1/2.
float bind_scale(NamedCall& call) {
  const float scale = call.number("scale", std::numeric_limits<float>::quiet_NaN());
  if (scale == 0) call.refuse("scale = 0, expected a value > 0; leave it out for K^-1/2");
  return std::isnan(scale) ? 0.0f : scale;
}

// The parameters of a layer but its state, with g, beta, a_log and dt_bias. The axes H, V are known
// by now.
template <class Tensors>
KdaLayer bind_layer(NamedCall& call, Tensors* tensors) {
  KdaLayer layer;
  layer.gate = bind_gate(call, tensors);
  tensors->beta = call.in("beta", "bf16|f32 [T, HV]");
  bind_beta(call, tensors->beta.dtype, &layer);
  layer.normalise = call.flag("normalise", false);
  layer.scale = bind_scale(call);
  layer.num_heads = call.extent("H");
  layer.num_value_heads = call.extent("HV");
  layer.head_dim_k = call.extent("K");
  layer.head_dim_v = call.extent("V");
  return layer;
}

template <class Tensors>
void bind_qkv(NamedCall& call, Tensors* tensors) {
  tensors->q = call.in("q", "bf16 [T, H, K]");
  tensors->k = call.in("k", "bf16 [T, H, K]");
  tensors->v = call.in("v", "bf16 [T, HV, V]");
}

// q, k and v, or `qkv` instead. The state names V, and with it and HV what `qkv` leaves for H.
template <class Tensors>
void bind_qkv_or_packed(NamedCall& call, Tensors* tensors) {
  if (!call.has("qkv")) {
    bind_qkv(call, tensors);
    return;
  }
  tensors->qkv = call.in("qkv", "bf16 [T, D]");
  const int64_t keys =
      call.extent("D") - call.extent("HV") * call.extent("V");  // of q and k together
  const int64_t dim = 2 * call.extent("K");
  if (dim == 0 || keys <= 0 || keys % dim != 0) {
    call.refuse("qkv = " + to_string(tensors->qkv) + ", expected [T, 2*H*K + HV*V] with HV, V " +
                "and K of state = " + to_string(tensors->state));
  }
  call.set_extent("H", keys / dim, "qkv", {"D", "HV", "V", "K"});
}

VerifyMode verify_mode_param(NamedCall& call) {
  return call.choice<VerifyMode>(
      "mode", {{"states", VerifyMode::kStates}, {"records", VerifyMode::kRecords}});
}

WindowLayout window_layout_param(NamedCall& call) {
  return call.choice<WindowLayout>(
      "window_layout", {{"wd", WindowLayout::kWd}, {"dw", WindowLayout::kDw}}, WindowLayout::kWd);
}

// The axes R and Td: T rows are R requests of rows_per_request each.
int64_t bind_requests(NamedCall& call) {
  const int64_t draft_rows = call.integer("rows_per_request");
  const int64_t rows = call.extent("T");
  if (draft_rows < 1 || rows % draft_rows != 0) {
    call.refuse("params.rows_per_request = " + std::to_string(draft_rows) +
                ", expected a divisor of the " + std::to_string(rows) + " rows");
  }
  call.set_extent("R", rows / draft_rows, "rows / rows_per_request", {"T"});
  call.set_extent("Td", draft_rows, "params.rows_per_request");
  return draft_rows;
}

// What a verify keeps: the axis E of records is 2K + V.
const char* scratch_declaration(NamedCall& call, VerifyMode mode) {
  if (mode == VerifyMode::kStates) return "f32 [R, Td, HV, V, K]";
  call.set_extent("E", 2 * call.extent("K") + call.extent("V"), "2*K + V", {"K", "V"});
  return "f32 [R, Td, HV, E]";
}

template <class Problem, class Tensors>
void bind_snapshots(NamedCall& call, Problem* problem, Tensors* tensors) {
  if (!call.has("snapshot_seq") && !call.has("snapshot_pos") && !call.has("snapshot_slot")) return;
  tensors->snapshot_seq = call.in("snapshot_seq", "i32 [M]");
  tensors->snapshot_pos = call.in("snapshot_pos", "i32 [M]");
  tensors->snapshot_slot = call.in("snapshot_slot", "i32 [M]");
  problem->max_snapshots = call.extent("M");
}

}  // namespace

void run_kda_gate(NamedCall& call) {
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

void run_kda_prefill(NamedCall& call) {
  KdaPrefillTensors tensors;
  KdaPrefillProblem problem;
  bind_qkv(call, &tensors);
  problem.layer = bind_layer(call, &tensors);
  tensors.q_indptr = call.in("q_indptr", "i32|i64 [N+1]");
  problem.state_layout = call.choice<StateLayout>(
      "state_layout", {{"vk", StateLayout::kVk}, {"kv", StateLayout::kKv}}, StateLayout::kVk);
  problem.chunk = call.integer("chunk", 0);
  problem.v_columns = call.integer("v_columns", 0);
  problem.commit = call.choice<CommitMode>(
      "commit", {{"direct", CommitMode::kDirect}, {"staged", CommitMode::kStaged}},
      CommitMode::kDirect);
  problem.check = call.flag("check", false);
  tensors.in_slot = call.opt("in_slot", "i32 [N]");
  tensors.out_slot = call.opt("out_slot", "i32 [N]");
  tensors.has_initial_state = call.opt("has_initial_state", "u8 [N]");
  bind_snapshots(call, &problem, &tensors);
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
  // How many entries there are is the caller's to say: it follows from the offsets.
  if (call.is_given("chunk_states")) {
    const bool vk = problem.state_layout == StateLayout::kVk;
    const std::string dtype(to_string(problem.layer.state_dtype));
    tensors.chunk_states =
        call.out("chunk_states", dtype + (vk ? " [E, HV, V, K]" : " [E, HV, K, V]"));
  }
  call.run(plan, tensors);
}

void run_kda_decode(NamedCall& call) {
  KdaDecodeTensors tensors;
  KdaDecodeProblem problem;
  tensors.state = call.update("state", "f32|bf16 [slots, HV, V, K]");
  bind_qkv_or_packed(call, &tensors);
  problem.layer = bind_layer(call, &tensors);
  problem.layer.state_dtype = tensors.state.dtype;
  tensors.slot = call.opt("slot", "i32 [T]");
  tensors.has_initial_state = call.opt("has_initial_state", "u8 [T]");
  problem.check = call.flag("check", false);
  problem.max_rows = call.extent("T");
  const KdaDecode plan = call.plan<KdaDecode>(problem);
  tensors.out = call.out("out", "bf16 [T, HV, V]", NamedCall::Writes::kAll);
  call.run(plan, tensors);
}

void run_kda_verify(NamedCall& call) {
  KdaVerifyTensors tensors;
  KdaVerifyProblem problem;
  tensors.state = call.in("state", "f32|bf16 [slots, HV, V, K]");
  bind_qkv_or_packed(call, &tensors);
  problem.layer = bind_layer(call, &tensors);
  problem.layer.state_dtype = tensors.state.dtype;
  problem.mode = verify_mode_param(call);
  problem.rows_per_request = bind_requests(call);
  problem.max_requests = call.extent("R");
  tensors.slot = call.opt("slot", "i32 [R]");
  tensors.has_initial_state = call.opt("has_initial_state", "u8 [R]");
  tensors.parent = call.opt("parent", "i32 [Td]");
  problem.check = call.flag("check", false);
  const KdaVerify plan = call.plan<KdaVerify>(problem);
  tensors.out = call.out("out", "bf16 [T, HV, V]");
  tensors.scratch = call.out("scratch", scratch_declaration(call, problem.mode));
  call.run(plan, tensors);
}

void run_kda_commit(NamedCall& call) {
  KdaCommitTensors tensors;
  KdaCommitProblem problem;
  problem.mode = verify_mode_param(call);
  problem.window_layout = window_layout_param(call);
  problem.check = call.flag("check", false);
  tensors.state = call.update("state", "f32|bf16 [slots, HV, V, K]");
  tensors.scratch = call.in("scratch", scratch_declaration(call, problem.mode));
  tensors.accepted = call.in("accepted", "i32 [R]");
  tensors.slot = call.in("slot", "i32 [R]");
  tensors.in_slot = call.opt("in_slot", "i32 [R]");
  tensors.has_initial_state = call.opt("has_initial_state", "u8 [R]");
  tensors.parent = call.opt("parent", "i32 [Td]");
  tensors.track_slot = call.opt("track_slot", "i32 [R]");
  tensors.track_accepted = call.opt("track_accepted", "i32 [R]");
  if (call.has("window_scratch") || call.has("window_state")) {
    tensors.window_scratch = call.in("window_scratch", "bf16 [R, Td, 3, D]");
    tensors.window_state = call.update("window_state", problem.window_layout == WindowLayout::kWd
                                                           ? "bf16 [slots, 3, D]"
                                                           : "bf16 [slots, D, 3]");
  }
  problem.state_dtype = tensors.state.dtype;
  problem.num_value_heads = call.extent("HV");
  problem.head_dim_k = call.extent("K");
  problem.head_dim_v = call.extent("V");
  problem.max_requests = call.extent("R");
  problem.rows_per_request = call.extent("Td");
  const KdaCommit plan = call.plan<KdaCommit>(problem);
  call.run(plan, tensors);
}

namespace {

// The slots and windows of a convolution, by mode.
void bind_windows(NamedCall& call, CausalConv1dProblem* problem, CausalConv1dTensors* tensors) {
  const bool is_prefill = problem->mode == ConvMode::kPrefill;
  const bool is_verify = problem->mode == ConvMode::kVerify;
  if (is_prefill) {
    tensors->q_indptr = call.in("q_indptr", "i32|i64 [N+1]");
    tensors->in_slot = call.opt("in_slot", "i32 [N]");
    tensors->out_slot = call.opt("out_slot", "i32 [N]");
    tensors->has_initial_state = call.opt("has_initial_state", "u8 [N]");
    bind_snapshots(call, problem, tensors);
    problem->max_sequences = call.extent("N");
  } else {
    const std::string entries = is_verify ? "[R]" : "[T]";
    tensors->slot = call.opt("slot", "i32 " + entries);
    tensors->has_initial_state = call.opt("has_initial_state", "u8 " + entries);
  }
  if (is_verify) tensors->parent = call.opt("parent", "i32 [Td]");
  if (!call.has("window_state")) return;
  const bool is_pool = !is_prefill || tensors->in_slot.defined() || tensors->out_slot.defined();
  const std::string declaration =
      std::string("bf16 [") + (is_pool ? "slots" : "N") +
      (problem->window_layout == WindowLayout::kWd ? ", 3, D]" : ", D, 3]");
  if (is_verify) {
    TensorView pool;
    const ConstTensorView read = call.in("window_state", declaration);
    static_cast<TensorShape&>(pool) = read;
    pool.data = const_cast<void*>(read.data);  // this mode only reads it
    tensors->window_state = pool;
  } else {
    tensors->window_state = call.update("window_state", declaration);
  }
}

}  // namespace

void run_causal_conv1d(NamedCall& call) {
  CausalConv1dTensors tensors;
  CausalConv1dProblem problem;
  problem.mode = call.choice<ConvMode>("mode",
                                       {{"prefill", ConvMode::kPrefill},
                                        {"update", ConvMode::kUpdate},
                                        {"verify", ConvMode::kVerify}},
                                       ConvMode::kPrefill);
  problem.activation = call.choice<ConvActivation>(
      "activation", {{"silu", ConvActivation::kSilu}, {"none", ConvActivation::kNone}},
      ConvActivation::kSilu);
  problem.window_layout = window_layout_param(call);
  problem.check = call.flag("check", false);
  tensors.x = call.in("x", "bf16 [T, D]");
  tensors.weight = call.in("weight", "bf16|f32 [D, 4]");
  tensors.bias = call.opt("bias", "bf16|f32 [D]");
  problem.weight_dtype = tensors.weight.dtype;
  if (tensors.bias.defined()) problem.bias_dtype = tensors.bias.dtype;
  problem.num_channels = call.extent("D");
  problem.max_rows = call.extent("T");
  if (problem.mode == ConvMode::kVerify) {
    problem.rows_per_request = bind_requests(call);
  } else {
    call.integer("rows_per_request", 1);
  }
  bind_windows(call, &problem, &tensors);
  const CausalConv1d plan = call.plan<CausalConv1d>(problem);
  tensors.out = call.out("out", "bf16 [T, D]");
  if (problem.mode == ConvMode::kVerify) {
    tensors.window_scratch = call.out("window_scratch", "bf16 [R, Td, 3, D]");
  }
  call.run(plan, tensors);
}

namespace {

// Rows, sequences and heads of a stage. The axes T, H, HV and K are known.
void bind_stage_bounds(NamedCall& call, KdaStageProblem* problem) {
  problem->max_rows = call.extent("T");
  problem->max_sequences = call.extent("N");
  problem->layer.num_heads = call.extent("H");
  problem->layer.num_value_heads = call.extent("HV");
  problem->layer.head_dim_k = call.extent("K");
}

// The declaration of a tensor that hands over between stages.
std::string stage_type(const KdaStageProblem& problem, const std::string& axes) {
  return std::string(to_string(problem.stage_dtype)) + " " + axes;
}

// Type and axes of what a later stage reads first: the others must have its type.
void bind_stage_dtype(NamedCall& call, const std::string& first, KdaStageProblem* problem) {
  problem->stage_dtype = call.dtype_of(first) == DType::kBf16 ? DType::kBf16 : DType::kF32;
}

void bind_stage_chunk(NamedCall& call, KdaStageProblem* problem) {
  problem->chunk = call.integer("chunk", problem->chunk);
  call.set_extent("C", problem->chunk, "params.chunk");
}

}  // namespace

void run_kda_stage_gate(NamedCall& call) {
  KdaStageProblem problem;
  KdaStageGateTensors tensors;
  tensors.q = call.in("q", "bf16 [T, H, K]");
  tensors.k = call.in("k", "bf16 [T, H, K]");
  problem.layer.gate = bind_gate(call, &tensors);
  tensors.q_indptr = call.in("q_indptr", "i32|i64 [N+1]");
  problem.layer.normalise = call.flag("normalise", false);
  problem.stage_dtype = call.choice<DType>(
      "stage_dtype", {{"f32", DType::kF32}, {"bf16", DType::kBf16}}, DType::kF32);
  bind_stage_chunk(call, &problem);
  bind_stage_bounds(call, &problem);
  const KdaStageGate plan = call.plan<KdaStageGate>(problem);
  tensors.g_sum = call.out("g_sum", "f32 [T, HV, K]");
  tensors.q_hat = call.out("q_hat", stage_type(problem, "[T, H, K]"));
  tensors.k_hat = call.out("k_hat", stage_type(problem, "[T, H, K]"));
  call.run(plan, tensors);
}

void run_kda_stage_intra(NamedCall& call) {
  KdaStageProblem problem;
  KdaStageIntraTensors tensors;
  bind_stage_dtype(call, "q_hat", &problem);
  tensors.q_hat = call.in("q_hat", stage_type(problem, "[T, H, K]"));
  tensors.k_hat = call.in("k_hat", stage_type(problem, "[T, H, K]"));
  tensors.g_sum = call.in("g_sum", "f32 [T, HV, K]");
  tensors.v = call.in("v", "bf16 [T, HV, V]");
  tensors.beta = call.in("beta", "bf16|f32 [T, HV]");
  tensors.q_indptr = call.in("q_indptr", "i32|i64 [N+1]");
  bind_beta(call, tensors.beta.dtype, &problem.layer);
  problem.layer.head_dim_v = call.extent("V");
  bind_stage_chunk(call, &problem);
  bind_stage_bounds(call, &problem);
  const KdaStageIntra plan = call.plan<KdaStageIntra>(problem);
  tensors.p = call.out("p", stage_type(problem, "[T, HV, C]"));
  tensors.x = call.out("x", stage_type(problem, "[T, HV, C]"));
  tensors.w = call.out("w", stage_type(problem, "[T, HV, K]"));
  tensors.u0 = call.out("u0", stage_type(problem, "[T, HV, V]"));
  tensors.kr = call.out("kr", stage_type(problem, "[T, HV, K]"));
  call.run(plan, tensors);
}

void run_kda_stage_inter(NamedCall& call) {
  KdaStageProblem problem;
  KdaStageInterTensors tensors;
  bind_stage_dtype(call, "w", &problem);
  tensors.w = call.in("w", stage_type(problem, "[T, HV, K]"));
  tensors.kr = call.in("kr", stage_type(problem, "[T, HV, K]"));
  tensors.u0 = call.in("u0", stage_type(problem, "[T, HV, V]"));
  tensors.g_sum = call.in("g_sum", "f32 [T, HV, K]");
  tensors.q_indptr = call.in("q_indptr", "i32|i64 [N+1]");
  tensors.initial_state = call.opt("initial_state", "f32 [N, HV, V, K]");
  problem.layer.head_dim_v = call.extent("V");
  call.set_extent("H", 1, "one group of heads");  // queries have no part in this stage
  bind_stage_chunk(call, &problem);
  bind_stage_bounds(call, &problem);
  const KdaStageInter plan = call.plan<KdaStageInter>(problem);
  if (!call.is_given("chunk_states")) {
    // The most chunks that so many rows and sequences have.
    const int64_t slack = call.extent("N") * (problem.chunk - 1);
    call.set_extent("E", (call.extent("T") + slack) / problem.chunk, "chunks", {"N", "T"});
  }
  tensors.chunk_states = call.out("chunk_states", "f32 [E, HV, V, K]");
  tensors.u = call.out("u", stage_type(problem, "[T, HV, V]"));
  tensors.final_state = call.out_if_wanted("final_state", "f32 [N, HV, V, K]");
  call.run(plan, tensors);
}

void run_kda_stage_output(NamedCall& call) {
  KdaStageProblem problem;
  KdaStageOutputTensors tensors;
  bind_stage_dtype(call, "q_hat", &problem);
  tensors.q_hat = call.in("q_hat", stage_type(problem, "[T, H, K]"));
  tensors.g_sum = call.in("g_sum", "f32 [T, HV, K]");
  tensors.p = call.in("p", stage_type(problem, "[T, HV, C]"));
  tensors.u = call.in("u", stage_type(problem, "[T, HV, V]"));
  tensors.chunk_states = call.in("chunk_states", "f32 [E, HV, V, K]");
  tensors.q_indptr = call.in("q_indptr", "i32|i64 [N+1]");
  problem.layer.scale = bind_scale(call);
  problem.layer.head_dim_v = call.extent("V");
  problem.chunk = call.extent("C");
  bind_stage_bounds(call, &problem);
  const KdaStageOutput plan = call.plan<KdaStageOutput>(problem);
  tensors.out = call.out("out", "bf16 [T, HV, V]");
  call.run(plan, tensors);
}

}  // namespace fovea::internal
