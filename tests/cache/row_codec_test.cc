#include "fovea/row_codec.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "fovea/error.h"
#include "tests/support/memory.h"
#include "tests/support/targets.h"

namespace fovea {
namespace {

using test::Tensor;

TEST(RowCodec, PlansRefuseWhatTheirTableDoesNotList) {
  const Device cpu = Device::cpu(1);
  for (const RowCodecProblem& wrong :
       {RowCodecProblem{-1, RowFormat::kV32, 64, 576}, RowCodecProblem{1, RowFormat::kV32, 0, 576},
        RowCodecProblem{1, RowFormat::kV32, 257, 576}, RowCodecProblem{1, RowFormat::kV32, 64, 512},
        RowCodecProblem{1, RowFormat::kV32, 64, 0}, RowCodecProblem{1, RowFormat::kF576, 64, 512},
        RowCodecProblem{1, RowFormat::kF576, 0, 576}, RowCodecProblem{1, RowFormat::kI132, 0, 128},
        RowCodecProblem{1, RowFormat::kI132, 64, 0}, RowCodecProblem{1, RowFormat::kBf16, -1, 576},
        RowCodecProblem{1, RowFormat::kBf16, 64, 0}}) {
    EXPECT_THROW(PackRows::plan(wrong, cpu), Error);
    EXPECT_THROW(UnpackRows::plan(wrong, cpu), Error);
  }
  EXPECT_THROW(PackRows::plan({1, RowFormat::kV32, 64, 576}, cpu, {"nonsense"}), Error);
  for (const float k_scale : {0.0f, -1.0f, std::numeric_limits<float>::infinity(),
                              std::numeric_limits<float>::quiet_NaN()}) {
    RowCodecProblem problem{1, RowFormat::kF576, 64, 576, ScaleMode::kFp32, k_scale};
    EXPECT_THROW(PackRows::plan(problem, cpu), Error) << k_scale;
    EXPECT_THROW(UnpackRows::plan(problem, cpu), Error) << k_scale;
    problem.row_format = RowFormat::kV32;  // has scales of its own
    EXPECT_NO_THROW(PackRows::plan(problem, cpu)) << k_scale;
  }
}

TEST(RowCodec, RunRefusesTensorsThatDoNotMatchThePlanBeforeItWrites) {
  const Device cpu = Device::cpu(1);
  Tensor pool(DType::kU8, {3, 2 * 656}), bf16_pool(DType::kBf16, {6, 576});
  pool.fill_bytes(0x11);
  const Tensor src(DType::kBf16, {2, 576}), slots(DType::kI32, {2});
  Tensor out(DType::kBf16, {2, 576});
  const PackRows packs = PackRows::plan({2, RowFormat::kV32, 2, 576}, cpu);
  const UnpackRows unpacks = UnpackRows::plan({2, RowFormat::kV32, 2, 576}, cpu);
  const Tensor more_src(DType::kBf16, {3, 576}), more_slots(DType::kI32, {3});
  EXPECT_THROW(packs.run({more_src, more_slots, pool}, {}), Error);  // planned for 2 rows
  EXPECT_THROW(packs.run({more_src, slots, pool}, {}), Error);
  EXPECT_THROW(packs.run({Tensor(DType::kF32, {2, 576}), slots, pool}, {}), Error);
  EXPECT_THROW(packs.run({src, Tensor(DType::kI64, {2}), pool}, {}), Error);
  EXPECT_THROW(packs.run({src, slots, Tensor(DType::kU8, {3, 2 * 656 - 1})}, {}), Error);
  EXPECT_THROW(packs.run({src, slots, bf16_pool}, {}), Error);  // v32 is packed
  EXPECT_THROW(packs.run({src, slots, {}}, {}), Error);
  TensorView overlapping = pool.view();
  overlapping.stride[0] = 656;
  EXPECT_THROW(packs.run({src, slots, overlapping}, {}), Error);
  TensorView strided_slots = Tensor(DType::kI32, {4}).view();
  strided_slots.shape[0] = 2;
  strided_slots.stride[0] = 2;
  EXPECT_THROW(packs.run({src, strided_slots, pool}, {}), Error);
  TensorView overlapping_out = out.view();
  overlapping_out.stride[0] = 100;
  EXPECT_THROW(unpacks.run({pool, slots, overlapping_out}, {}), Error);
  EXPECT_THROW(unpacks.run({pool, slots, Tensor(DType::kBf16, {2, 512})}, {}), Error);
  EXPECT_EQ(pool.bytes(), std::vector<uint8_t>(3 * 2 * 656, 0x11));
  // A paged bf16 pool needs a page size; a flat one does not.
  const PackRows flat = PackRows::plan({2, RowFormat::kBf16, 0, 576}, cpu);
  EXPECT_THROW(flat.run({src, slots, Tensor(DType::kU8, {3, 2 * 1152})}, {}), Error);
  EXPECT_NO_THROW(flat.run({src, Tensor::i32({2}, {0, 1}), bf16_pool}, {}));
}

TEST(RowCodec, RefusesRopePartsThatMakeNoRowBeforeItWrites) {
  const Device cpu = Device::cpu(1);
  const Tensor latent(DType::kBf16, {2, 512}), whole(DType::kBf16, {2, 576});
  const Tensor rope(DType::kBf16, {2, 64}), slots = Tensor::i32({2}, {0, 1});
  Tensor pool(DType::kU8, {2, 1152});
  pool.fill_bytes(0x11);
  for (const RowFormat format : {RowFormat::kBf16, RowFormat::kV32, RowFormat::kF576}) {
    const PackRows plan = PackRows::plan({2, format, 1, 576}, cpu);
    EXPECT_THROW(test::run(plan, {whole, slots, pool, rope}), Error);
    EXPECT_THROW(test::run(plan, {latent, slots, pool}), Error);  // and nothing for the rest
    EXPECT_THROW(test::run(plan, {latent, slots, pool, Tensor(DType::kBf16, {3, 64})}), Error);
    EXPECT_THROW(test::run(plan, {latent, slots, pool, Tensor(DType::kBf16, {1, 64})}), Error);
    EXPECT_THROW(test::run(plan, {latent, slots, pool, Tensor(DType::kBf16, {2, 63})}), Error);
    EXPECT_THROW(test::run(plan, {latent, slots, pool, Tensor(DType::kBf16, {2, 128})}), Error);
    EXPECT_THROW(test::run(plan, {latent, slots, pool, Tensor(DType::kF32, {2, 64})}), Error);
    EXPECT_THROW(test::run(plan, {latent, slots, pool, Tensor(DType::kBf16, {128})}), Error);
  }
  // Formats and widths without a rope part.
  const PackRows index = PackRows::plan({2, RowFormat::kI132, 1, 128}, cpu);
  EXPECT_THROW(index.run({rope, slots, pool, rope}, {}), Error);
  const PackRows narrow = PackRows::plan({2, RowFormat::kBf16, 1, 512}, cpu);
  EXPECT_THROW(narrow.run({Tensor(DType::kBf16, {2, 448}), slots, pool, rope}, {}), Error);
  EXPECT_EQ(pool.bytes(), std::vector<uint8_t>(2 * 1152, 0x11));
}

}  // namespace
}  // namespace fovea
