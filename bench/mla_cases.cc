#include <fmt/format.h>

#include <memory>
#include <utility>

#include "bench/cases.h"
#include "bench/check.h"
#include "bench/inputs.h"
#include "fovea/merge_lse.h"

namespace fovea::bench {
namespace {

/// An output of merge_lse and the plan that fills it.
struct MergeLseRun {
  MergeLse plan;
  OwnedTensor out, lse;
  HostBuffer workspace;
};

class MergeLseInputs : public CaseInputs {
 public:
  explicit MergeLseInputs(const MergeLseProblem& problem) : problem_(problem) {
    Generator generator(1);
    const int64_t rows = problem.max_rows, heads = problem.num_heads, dim = problem.head_dim;
    out_parts_ = normal_bf16(&generator, {problem.num_parts, rows, heads, dim});
    lse_parts_ = normal_f32(&generator, {problem.num_parts, rows, heads});
  }

  Work work() const override {
    const auto out_bytes =
        static_cast<double>(out_parts_.bytes()) / static_cast<double>(problem_.num_parts);
    const auto lse_bytes =
        static_cast<double>(lse_parts_.bytes()) / static_cast<double>(problem_.num_parts);
    Work work;
    work.flops = 2.0 * static_cast<double>(out_parts_.num_elements());
    work.bytes_read = static_cast<double>(out_parts_.bytes() + lse_parts_.bytes());
    work.bytes_written = out_bytes + lse_bytes;
    return work;
  }

  PreparedRun prepare(const Device& device, const Options& options) override {
    const std::shared_ptr<MergeLseRun> state = make_run(device, options);
    return {state->plan.implementation().name, [this, state] { run(state.get()); },
            [this, state] { return mismatch(*state); }};
  }

 private:
  std::shared_ptr<MergeLseRun> make_run(const Device& device, const Options& options) {
    const int64_t rows = problem_.max_rows, heads = problem_.num_heads, dim = problem_.head_dim;
    auto state = std::make_shared<MergeLseRun>(MergeLseRun{
        MergeLse::plan(problem_, device, options), OwnedTensor(DType::kBf16, {rows, heads, dim}),
        OwnedTensor(DType::kF32, {rows, heads}), HostBuffer()});
    state->workspace.reserve(state->plan.workspace_bytes());
    return state;
  }
  void run(MergeLseRun* state) {
    state->plan.run({out_parts_, lse_parts_, {}, state->out, state->lse},
                    state->workspace.workspace());
  }
  std::string mismatch(const MergeLseRun& state) {
    if (!reference_) {
      reference_ = make_run(Device::cpu(1), {"ref"});
      run(reference_.get());
    }
    const std::string wrong = compare("out", state.out, reference_->out, kBf16Output);
    return wrong.empty() ? compare("lse", state.lse, reference_->lse, kFp32Output) : wrong;
  }

  MergeLseProblem problem_;
  OwnedTensor out_parts_, lse_parts_;
  std::shared_ptr<MergeLseRun> reference_;
};

}  // namespace

std::vector<BenchCase> merge_lse_cases() {
  std::vector<BenchCase> cases;
  for (const int64_t rows : {1, 64}) {
    BenchCase entry;
    entry.op = "merge_lse";
    entry.name = fmt::format("h128_parts8_rows{}", rows);
    entry.description = fmt::format("8 parts, {} rows, 128 heads x 512, bf16", rows);
    entry.make = [rows] {
      return std::make_unique<MergeLseInputs>(MergeLseProblem{8, rows, 128, 512, DType::kBf16});
    };
    cases.push_back(std::move(entry));
  }
  return cases;
}

}  // namespace fovea::bench
