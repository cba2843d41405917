#pragma once

#include "fovea/msa_attend.h"

namespace fovea::test::gpu {

/// Runs msa_attend as cuda_sm90 on the model, with settings(). The problem has every field that
/// plan() would fill in.
void run_msa_attend_sm90(const MsaAttendProblem& problem, const MsaAttendTensors& tensors);

/// The same as cuda_sm90_decode; returns the blocks of a cluster.
int64_t run_msa_attend_decode(const MsaAttendProblem& problem, const MsaAttendTensors& tensors);

}  // namespace fovea::test::gpu
