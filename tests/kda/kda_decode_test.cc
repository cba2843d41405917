#include "fovea/kda_decode.h"

#include "fovea/error.h"
#include "tests/kda/kda_case.h"

namespace fovea {
namespace {

using test::DecodeCase;
using test::kda_layer;
using test::PrefillCase;
using test::Tensor;

class KdaDecodeTest : public test::TargetTest {
 public:
  Options options() const { return GetParam().options(); }
  void run(DecodeCase& call, int threads = 1) { call.run(options(), threads); }
  void expect_reference(const DecodeCase& call) { test::expect_kda_reference(call, options()); }
};
INSTANTIATE_TEST_SUITE_P(Targets, KdaDecodeTest, testing::ValuesIn(test::targets_of("kda_decode")),
                         test::target_name);

TEST_P(KdaDecodeTest, OneRowIsAPrefillOfOneToken) {
  const KdaLayer layer = kda_layer(2, 4, 64, 64);
  DecodeCase call(layer, 5);
  PrefillCase prefill(layer, {1, 1, 1, 1, 1});
  prefill.inputs = call.inputs;
  prefill.state = call.state;
  prefill.run({"ref"});
  run(call);
  const test::KdaLimits limits = test::kda_limits(options().implementation);
  EXPECT_TRUE(test::within(call.out.view(), prefill.out.view(), limits.out));
  EXPECT_TRUE(test::within(call.state.view(), prefill.state.view(), 1e-5));
}

}  // namespace
}  // namespace fovea
