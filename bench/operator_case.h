#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bench/case.h"
#include "bench/inputs.h"
#include "fovea/device.h"

/// The common part of every case: plans, output buffers, workspaces and the comparison with the
/// reference.
namespace fovea::bench {

/// Inputs of an operator whose plan is `Plan` and whose results live in an `Outputs`.
template <class Plan, class Outputs>
class OperatorCase : public CaseInputs {
 public:
  using Problem = typename Plan::Problem;
  using Tensors = typename Plan::Tensors;

  Work work() const final { return work_; }

  PreparedRun prepare(const Device& device, const Options& options) final {
    const std::shared_ptr<Prepared> prepared = make(problem_, device, options);
    return {prepared->plan.implementation().name,
            [prepared](Stream stream) { prepared->run(prepared->there, stream); },
            [this, prepared] {
              prepared->copies.fetch();
              implementation_ = prepared->plan.implementation().name;
              return mismatch(prepared->tensors);
            }};
  }

 protected:
  explicit OperatorCase(const Problem& problem) : problem_(problem) {}

  /// Fresh output buffers: not yet the right result.
  virtual Outputs make_outputs() const = 0;
  /// Inputs and outputs of a full run: every view by conversion of an owned tensor, which a
  /// Placement moves.
  virtual Tensors tensors(Outputs* outputs) = 0;
  /// What is wrong with `actual`; empty when it matches.
  virtual std::string difference(const Tensors& actual, const Tensors& reference) = 0;

  /// Rows that the reference recomputes one by one; empty: everything, in one run. For problems
  /// that would take the reference seconds.
  virtual std::vector<int64_t> sampled_rows() const { return {}; }
  /// What the reference is planned for: the whole problem, or one that fits every part of row_of().
  virtual Problem reference_problem() const { return problem_; }
  /// The part of `full` that computes one row alone. Views may refer to members that the next call
  /// changes.
  virtual Tensors row_of(const Tensors& full, int64_t row) {
    (void)row;
    return full;
  }

  Problem problem_;
  Work work_;                   ///< Filled by the constructor of the derived class.
  std::string implementation_;  ///< Whose result is compared.

 private:
  struct Prepared {
    Plan plan;
    Outputs outputs;
    DeviceTensors copies;
    Tensors tensors{};  ///< On the host.
    Tensors there{};    ///< Where the plan runs.
    HostBuffer host_workspace;
    DeviceBuffer device_workspace;
    void run(const Tensors& part, Stream stream = {}) {
      const bool on_gpu = plan.device().kind == DeviceKind::kCuda;
      plan.run(part, on_gpu ? device_workspace.workspace() : host_workspace.workspace(), stream);
    }
  };

  std::shared_ptr<Prepared> make(const Problem& problem, const Device& device,
                                 const Options& options) {
    auto prepared = std::make_shared<Prepared>(Prepared{Plan::plan(problem, device, options),
                                                        make_outputs(),
                                                        DeviceTensors(device),
                                                        {},
                                                        {},
                                                        {},
                                                        {}});
    prepared->tensors = tensors(&prepared->outputs);
    {
      const Placement placement(&prepared->copies);
      prepared->there = tensors(&prepared->outputs);
    }
    const size_t bytes = prepared->plan.workspace_bytes();
    if (device.kind == DeviceKind::kCuda) {
      prepared->device_workspace.reserve(device, bytes);
    } else {
      prepared->host_workspace.reserve(bytes);
    }
    return prepared;
  }

  std::string mismatch(const Tensors& actual) {
    const std::vector<int64_t> rows = sampled_rows();
    if (!reference_) {
      reference_ = make(reference_problem(), Device::cpu(1), Options{"ref"});
      if (rows.empty()) reference_->run(reference_->tensors);
      for (const int64_t row : rows) reference_->run(row_of(reference_->tensors, row));
    }
    if (rows.empty()) return difference(actual, reference_->tensors);
    for (const int64_t row : rows) {
      const std::string wrong = difference(row_of(actual, row), row_of(reference_->tensors, row));
      if (!wrong.empty()) return "row " + std::to_string(row) + ", " + wrong;
    }
    return {};
  }

  std::shared_ptr<Prepared> reference_;
};

}  // namespace fovea::bench
