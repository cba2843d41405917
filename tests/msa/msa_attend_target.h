#pragma once

#include "fovea/error.h"
#include "tests/msa/msa_attend_case.h"
#include "tests/support/compare.h"

namespace fovea::test {

/// What suites of msa_attend that run on every implementation have in common.
class AttendTargetTest : public TargetTest {
 public:
  void run(AttendCase& attend, int threads = 1) {
    attend.run(options_of(attend.problem()), threads);
  }
  // Cases that an implementation for some shapes refuses run on the one for all of them.
  static Options options_of(const MsaAttendProblem& problem) {
    try {
      MsaAttend::plan(problem, GetParam().device(), GetParam().options());
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kUnsupported) throw;
      return {"cuda_portable"};
    }
    return GetParam().options();
  }
  /// Of an output of the target.
  static int num_rounded() { return rounds_weights(GetParam().implementation) ? 1 : 0; }
  void expect_reference(AttendCase& attend, int threads = 1) {
    AttendCase expected = attend;
    expected.run({"ref"});
    run(attend, threads);
    EXPECT_TRUE(attend.out_close_to(expected, num_rounded()));
    EXPECT_TRUE(ExpectClose(attend.lse.view(), expected.lse.view(), kLse));
  }
};

}  // namespace fovea::test
