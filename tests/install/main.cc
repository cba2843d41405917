// Merges two halves of an attention through the installed library: sums of exponentials 2 and 8,
// outputs 10 and 0.
#include <fovea/fovea.h>

#include <cmath>
#include <cstdio>

int main() {
  const float parts[2] = {10.0f, 0.0f};
  const float lse_parts[2] = {std::log(2.0f), std::log(8.0f)};
  float out = 0;
  float lse = 0;
  fovea::MergeLseProblem problem;
  problem.num_parts = 2;
  problem.max_rows = problem.num_heads = problem.head_dim = 1;
  problem.dtype = fovea::DType::kF32;
  fovea::MergeLseTensors tensors;
  tensors.out_parts =
      fovea::make_tensor(static_cast<const void*>(parts), fovea::DType::kF32, {2, 1, 1, 1});
  tensors.lse_parts =
      fovea::make_tensor(static_cast<const void*>(lse_parts), fovea::DType::kF32, {2, 1, 1});
  tensors.out = fovea::make_tensor(static_cast<void*>(&out), fovea::DType::kF32, {1, 1, 1});
  tensors.lse = fovea::make_tensor(static_cast<void*>(&lse), fovea::DType::kF32, {1, 1});
  const auto plan = fovea::MergeLse::plan(problem, fovea::Device::cpu(1));
  fovea::HostBuffer scratch(plan.workspace_bytes());
  plan.run(tensors, scratch.workspace());
  if (std::fabs(out - 2.0f) > 1e-6f) {
    std::printf("out = %g, expected 2\n", static_cast<double>(out));
    return 1;
  }
  // Operators register themselves; a static library must not lose them.
  if (fovea::operators().empty()) {
    std::printf("no operator is registered\n");
    return 1;
  }
  std::printf("%zu operators, merged output %g\n", fovea::operators().size(),
              static_cast<double>(out));
  return 0;
}
