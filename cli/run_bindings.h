#pragma once

#include "cli/operator_call.h"

/// One function per operator of `fovea run`; the files are by room.
namespace fovea::cli {

void run_merge_lse(OperatorCall& call);

}  // namespace fovea::cli
