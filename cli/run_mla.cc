// fovea run: the operators of the room mla.

#include "cli/run_bindings.h"
#include "fovea/merge_lse.h"

namespace fovea::cli {

void run_merge_lse(OperatorCall& call) {
  MergeLseTensors tensors;
  tensors.out_parts = call.in("out_parts", "bf16|f32 [P, T, H, D]");
  tensors.lse_parts = call.in("lse_parts", "f32 [P, T, H]");
  tensors.sink = call.opt("sink", "f32 [H]");
  const DType dtype = tensors.out_parts.dtype;
  tensors.out = call.out("out", std::string(to_string(dtype)) + " [T, H, D]");
  tensors.lse = call.out("lse", "f32 [T, H]");
  MergeLseProblem problem;
  problem.num_parts = call.extent("P");
  problem.max_rows = call.extent("T");
  problem.num_heads = call.extent("H");
  problem.head_dim = call.extent("D");
  problem.dtype = dtype;
  call.run<MergeLse>(problem, tensors);
}

}  // namespace fovea::cli
