#include "fovea/kda_prefill.h"

#include "fovea/error.h"
#include "tests/kda/kda_case.h"

namespace fovea {
namespace {

using test::kda_layer;
using test::PrefillCase;
using test::Tensor;

class KdaPrefillTest : public test::TargetTest {
 public:
  Options options() const { return GetParam().options(); }
  void run(PrefillCase& call, int threads = 1) { call.run(options(), threads); }
  void expect_reference(const PrefillCase& call) { test::expect_kda_reference(call, options()); }
};
INSTANTIATE_TEST_SUITE_P(Targets, KdaPrefillTest,
                         testing::ValuesIn(test::targets_of("kda_prefill")), test::target_name);

TEST_P(KdaPrefillTest, EveryLengthAroundAChunk) {
  for (const int32_t length : {1, 2, 15, 16, 17, 31, 32, 33, 37, 63, 64, 65, 97, 127, 128, 130}) {
    SCOPED_TRACE(length);
    PrefillCase call(kda_layer(1, 1, 32, 16), {length}, 3);
    expect_reference(call.with_states());
  }
}

}  // namespace
}  // namespace fovea
