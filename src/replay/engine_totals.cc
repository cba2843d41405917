#include "src/replay/engine_totals.h"

#include <algorithm>

namespace fovea::internal {
namespace {

void add_call(const OperatorCall& call, const std::string& layer_kind,
              const std::optional<ThroughputLimits>& ceilings,
              std::vector<ReplayOperator>* operators) {
  auto found = std::find_if(operators->begin(), operators->end(), [&](const ReplayOperator& op) {
    return op.name == call.name && op.layer_kind == layer_kind &&
           op.implementation == call.implementation;
  });
  if (found == operators->end()) {
    ReplayOperator op;
    op.name = call.name;
    op.layer_kind = layer_kind;
    op.implementation = call.implementation;
    found = operators->insert(operators->end(), op);
  }
  ++found->calls;
  found->ms += call.elapsed_ms;
  found->flops += call.flops;
  found->bytes += call.bytes;
  if (ceilings) {
    found->roofline_share =
        found->roofline_share.value_or(0) + roofline_ms(*ceilings, call.flops, call.bytes);
  }
}

}  // namespace

ReplayMode& EngineTotals::mode(ForwardMode mode, bool draft) {
  for (ReplayMode& known : modes) {
    if (known.mode == mode && known.draft == draft) return known;
  }
  return modes.emplace_back(ReplayMode{mode, draft});
}

void EngineTotals::add_calls(std::span<const OperatorCall> calls, const std::string& layer_kind,
                             const std::optional<ThroughputLimits>& ceilings) {
  for (const OperatorCall& call : calls) add_call(call, layer_kind, ceilings, &operators);
}

}  // namespace fovea::internal
