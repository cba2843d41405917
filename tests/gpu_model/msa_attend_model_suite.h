#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <type_traits>

#include "tests/gpu_model/gpu_model.h"
#include "tests/gpu_model/msa_attend_model.h"
#include "tests/msa/msa_attend_case.h"
#include "tests/support/compare.h"

namespace fovea::test {

/// Suite of an implementation of msa_attend that `kRun` runs by the model of a GPU. What it returns
/// is passed on.
template <auto kRun>
class MsaAttendModelSuite : public testing::Test {
 protected:
  void TearDown() override { gpu::settings() = {}; }

  static auto run(AttendCase& attend) {
    MsaAttendProblem problem = attend.problem();
    if (problem.softmax_scale == 0) {
      problem.softmax_scale = 1.0f / std::sqrt(static_cast<float>(problem.head_dim));
    }
    attend.make_outputs();
    return kRun(problem, attend.tensors());
  }
  static auto expect_reference(AttendCase& attend) {
    AttendCase expected = attend;
    expected.run({"ref"});
    const auto compare = [&] {
      EXPECT_TRUE(attend.out_close_to(expected, 1));
      EXPECT_TRUE(ExpectClose(attend.lse.view(), expected.lse.view(), kLse));
    };
    if constexpr (std::is_void_v<decltype(run(attend))>) {
      run(attend);
      compare();
    } else {
      const auto result = run(attend);
      compare();
      return result;
    }
  }
  /// Groups, head dimensions and blocks of every kind; requests without rows, rows without blocks.
  static void expect_reference_for_every_shape() {
    struct Form {
      int64_t group, kv_heads, dim, block;
    };
    uint64_t seed = 1;
    for (const Form& form : {Form{1, 3, 64, 16}, Form{16, 1, 128, 128}, Form{5, 2, 48, 40},
                             Form{16, 2, 16, 64}, Form{8, 1, 80, 100}}) {
      const auto b = static_cast<int32_t>(form.block);
      AttendCase attend(
          PagedBatch({2 * b + 5, 0, b + b / 2, 1, b - 1}, {2, 0, 5, 1, 1}, form.block, seed, 1, 2),
          form.group * form.kv_heads, form.kv_heads, form.dim, 3, seed);
      attend.causal = seed % 2 == 0;
      attend.has_sink = true;
      attend.sink = Tensor::f32({attend.heads}, Rng(seed).normals(attend.heads, 2));
      gpu::settings().seed = static_cast<unsigned>(++seed);
      SCOPED_TRACE(form.block);
      expect_reference(attend);
    }
  }
};

}  // namespace fovea::test
