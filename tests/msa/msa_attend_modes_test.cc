#include <gtest/gtest.h>

#include "fovea/error.h"
#include "fovea/msa_attend.h"
#include "tests/msa/msa_attend_case.h"
#include "tests/support/compare.h"

namespace fovea {
namespace {

using test::AttendCase;
using test::PagedBatch;
using test::Tensor;

// Low-precision caches: the reference multiplies the exactly decoded values, so only rounding of
// sums and of the output differs. q8kv8 implementations may round weights to e4m3 (half an ulp is
// 2^-4 relative, averaged over keys).
constexpr test::Tolerance kFp8Output{.absolute = 5e-2, .relative = 5e-2, .cosine = 1e-3};

class MsaAttendModesTest : public test::TargetTest {
 public:
  void SetUp() override {
    test::TargetTest::SetUp();
    if (GetParam().kind == DeviceKind::kCuda && GetParam().implementation != "cuda_portable")
      GTEST_SKIP() << "takes kv_mode bf16 only";
  }
  void run(AttendCase& attend, int threads = 1) { attend.run(GetParam().options(), threads); }
  static int num_rounded() { return test::rounds_weights(GetParam().implementation) ? 1 : 0; }
  void expect_reference(AttendCase& attend, const test::Tolerance& tolerance) {
    AttendCase expected = attend;
    expected.run({"ref"});
    run(attend, 2);
    EXPECT_TRUE(attend.out_close_to(expected, num_rounded(), tolerance));
    EXPECT_TRUE(test::ExpectClose(attend.lse.view(), expected.lse.view(), test::kLse));
  }
};
INSTANTIATE_TEST_SUITE_P(Targets, MsaAttendModesTest,
                         testing::ValuesIn(test::targets_of("msa_attend")), test::target_name);

// The e4m3 codes of a bf16 tensor; NaN stays NaN.
Tensor codes_of(const Tensor& values, std::initializer_list<int64_t> shape) {
  Tensor codes(DType::kU8, shape);
  for (size_t i = 0; i < codes.bytes().size(); ++i)
    codes.data<uint8_t>()[i] = e4m3_from_float(bf16_to_float(values.data<bf16_t>()[i]));
  return codes;
}

AttendCase eight_bit_case(MsaKvMode mode, int64_t group, int64_t dim, uint64_t seed) {
  AttendCase attend(PagedBatch({100, 61, 17}, {3, 9, 1}, 16, seed), 2 * group, 2, dim, 4, seed);
  attend.mode = mode;
  attend.k = codes_of(attend.k, {attend.batch.slots(), 2, dim});
  attend.v = codes_of(attend.v, {attend.batch.slots(), 2, dim});
  if (mode == MsaKvMode::kQ8Kv8)
    attend.q = codes_of(attend.q, {attend.batch.num_rows, 2 * group, dim});
  return attend;
}

// A cache of e2m1 codes with scales; unused tokens have NaN scales.
AttendCase four_bit_case(int64_t group, int64_t dim, uint64_t seed) {
  AttendCase attend = eight_bit_case(MsaKvMode::kQ8Kv8, group, dim, seed);
  attend.mode = MsaKvMode::kQ8Kv4;
  test::Rng rng(seed);
  const int64_t pages = attend.batch.num_pages;
  attend.has_k_scale = attend.has_v_scale = true;
  for (const auto& [pool, scale] :
       {std::pair{&attend.k, &attend.k_scale}, std::pair{&attend.v, &attend.v_scale}}) {
    *pool = Tensor(DType::kU8, {pages, 2, 16, dim / 2});
    for (size_t i = 0; i < pool->bytes().size(); ++i)
      pool->data<uint8_t>()[i] = static_cast<uint8_t>(rng.next());
    *scale = Tensor(DType::kU8, {pages, 2, 16, dim / 16});
    scale->fill_bytes(0x7F);
    for (int64_t r = 0; r < 3; ++r) {
      for (int64_t j = 0; j < attend.batch.lengths[static_cast<size_t>(r)]; ++j) {
        const int64_t slot = attend.batch.slot(r, j);
        for (int64_t g = 0; g < 2; ++g) {
          for (int64_t i = 0; i < dim / 16; ++i)
            scale->data<uint8_t>()[((slot / 16 * 2 + g) * 16 + slot % 16) * dim / 16 + i] =
                e4m3_from_float(rng.uniform(0.2f, 1.2f));
        }
      }
    }
  }
  return attend;
}

TEST_P(MsaAttendModesTest, Kv8EqualsTheBf16CacheOfItsValues) {
  // e4m3 values are bf16 numbers: the same bits.
  AttendCase attend = eight_bit_case(MsaKvMode::kKv8, 8, 64, 3);
  run(attend);
  AttendCase bf16 = attend;
  bf16.mode = MsaKvMode::kBf16;
  for (auto member : {&AttendCase::k, &AttendCase::v}) {
    bf16.*member = Tensor(DType::kBf16, {attend.batch.slots(), 2, 64});
    for (int64_t i = 0; i < attend.batch.slots() * 2 * 64; ++i)
      (bf16.*member).data<bf16_t>()[i] =
          bf16_from_float(e4m3_to_float((attend.*member).data<uint8_t>()[i]));
  }
  bf16.make_outputs();
  expect_reference(bf16, test::kBf16Output);
  EXPECT_TRUE(attend.out_close_to(bf16, 2 * num_rounded()));
  expect_reference(attend, test::kBf16Output);
}

TEST_P(MsaAttendModesTest, Kv8ScalarScales) {
  AttendCase attend = eight_bit_case(MsaKvMode::kKv8, 4, 128, 5);
  attend.has_k_scale = attend.has_v_scale = true;
  attend.k_scale = Tensor::f32({1}, {0.37f});
  attend.v_scale = Tensor::f32({1}, {2.5f});
  expect_reference(attend, test::kBf16Output);
  // LSE is that of the true logits.
  AttendCase scaled = attend;
  scaled.has_k_scale = false;
  scaled.softmax_scale = 0.37f / std::sqrt(128.0f);
  scaled.make_outputs();
  run(scaled);
  EXPECT_TRUE(test::ExpectClose(scaled.lse.view(), attend.lse.view(), test::kLse));
}

TEST_P(MsaAttendModesTest, SmallCase12Q8Kv8ScalesOfEveryShape) {
  for (const int64_t group : {1, 2, 8}) {
    AttendCase base = eight_bit_case(MsaKvMode::kQ8Kv8, group, 64, 7);
    expect_reference(base, kFp8Output);
    const int64_t rows = base.batch.num_rows, slots = base.batch.slots();
    test::Rng rng(3);
    const auto uniform = [&](int64_t count) {
      std::vector<float> values;
      for (int64_t i = 0; i < count; ++i) values.push_back(rng.uniform(0.3f, 1.7f));
      return values;
    };
    for (const int kind : {0, 1, 2}) {
      AttendCase attend = base;
      attend.has_q_scale = attend.has_k_scale = attend.has_v_scale = true;
      if (kind == 0) {
        attend.q_scale = Tensor::f32({1}, {0.6f});
        attend.k_scale = Tensor::f32({1}, {1.7f});
        attend.v_scale = Tensor::f32({1}, {0.4f});
      } else if (kind == 1) {
        attend.q_scale = Tensor::f32({2}, uniform(2));
        attend.k_scale = Tensor::f32({2}, uniform(2));
        attend.v_scale = Tensor::f32({2}, uniform(2));
      } else {
        attend.q_scale = Tensor::f32({rows, 2}, uniform(rows * 2));
        attend.k_scale = Tensor::f32({slots, 2}, uniform(slots * 2));
        attend.v_scale = Tensor::f32({slots, 2}, uniform(slots * 2));
        // Scales of tokens that nobody sees may be NaN.
        const int64_t last_page = base.batch.slot(2, 16) / 16;
        for (int64_t slot = last_page * 16 + 1; slot < last_page * 16 + 16; ++slot) {
          for (int64_t g = 0; g < 2; ++g) {
            attend.k_scale.data<float>()[slot * 2 + g] = std::nanf("");
            attend.v_scale.data<float>()[slot * 2 + g] = std::nanf("");
          }
        }
      }
      attend.make_outputs();
      expect_reference(attend, kFp8Output);
    }
    // Kinds of different shapes together.
    AttendCase mixed = base;
    mixed.has_q_scale = mixed.has_k_scale = true;
    mixed.q_scale = Tensor::f32({2}, uniform(2));
    mixed.k_scale = Tensor::f32({slots, 2}, uniform(slots * 2));
    mixed.make_outputs();
    expect_reference(mixed, kFp8Output);
  }
}

TEST_P(MsaAttendModesTest, PackedScalesOfOneHead) {
  // With one KV head [1] and [Hkv] are the same, and [slots, 1] has rows of one element.
  AttendCase attend(PagedBatch({100}, {4}, 16, 3), 4, 1, 64, 4);
  attend.mode = MsaKvMode::kQ8Kv8;
  attend.q = codes_of(attend.q, {4, 4, 64});
  attend.k = codes_of(attend.k, {attend.batch.slots(), 1, 64});
  attend.v = codes_of(attend.v, {attend.batch.slots(), 1, 64});
  attend.has_v_scale = attend.has_k_scale = true;
  attend.k_scale = Tensor::f32({1}, {1.5f});
  std::vector<float> scales;
  for (int64_t s = 0; s < attend.batch.slots(); ++s)
    scales.push_back(0.5f + 0.01f * static_cast<float>(s));
  attend.v_scale = Tensor::f32({attend.batch.slots(), 1}, scales);
  expect_reference(attend, kFp8Output);
}

TEST_P(MsaAttendModesTest, SmallCase12EveryE2m1CodeInBothNibbles) {
  // One visible token with q = 0: the output is its value row. Byte i holds codes i and 15 - i.
  AttendCase attend = four_bit_case(4, 64, 3);
  attend.batch = PagedBatch({1}, {1}, 16, 3);
  attend.q = Tensor(DType::kU8, {1, 8, 64});
  const int64_t pages = attend.batch.num_pages, slot = attend.batch.slot(0, 0);
  for (const auto member : {&AttendCase::k, &AttendCase::v}) {
    attend.*member = Tensor(DType::kU8, {pages, 2, 16, 32});
    for (int64_t g = 0; g < 2; ++g) {
      for (uint8_t i = 0; i < 32; ++i)
        (attend.*member).data<uint8_t>()[((slot / 16 * 2 + g) * 16 + slot % 16) * 32 + i] =
            static_cast<uint8_t>((i % 16) | ((15 - i % 16) << 4));
    }
  }
  // Scales 1, 2, 1.5 and 448 of the groups of 16 channels.
  const float scales[] = {1.0f, 2.0f, 1.5f, 448.0f};
  for (const auto member : {&AttendCase::k_scale, &AttendCase::v_scale}) {
    attend.*member = Tensor(DType::kU8, {pages, 2, 16, 4});
    (attend.*member).fill_bytes(0x7F);
    for (int64_t g = 0; g < 2; ++g) {
      for (int64_t i = 0; i < 4; ++i)
        (attend.*member).data<uint8_t>()[((slot / 16 * 2 + g) * 16 + slot % 16) * 4 + i] =
            e4m3_from_float(scales[i]);
    }
  }
  attend.blocks = Tensor(DType::kI32, {2, 1, 4});
  for (const float global : {1.0f, 0.25f}) {
    attend.has_global_scales = global != 1.0f;
    attend.k_global_scale = Tensor::f32({1}, {3.0f});
    attend.v_global_scale = Tensor::f32({1}, {global});
    attend.make_outputs();
    run(attend);
    for (int64_t h = 0; h < 8; ++h) {
      for (int64_t d = 0; d < 64; ++d) {
        const auto code = static_cast<uint8_t>(d % 2 == 0 ? d / 2 % 16 : 15 - d / 2 % 16);
        const float product = e2m1_to_float(code) * scales[d / 16];
        // Saturates at 448; the others are e4m3 numbers (1.5 * 1.5 = 2.25 and 6 * 1.5 = 9 too).
        const float value = std::clamp(product, -448.0f, 448.0f) * global;
        EXPECT_EQ(attend.out_at(0, h, d), value) << "channel " << d;
      }
      EXPECT_EQ(attend.lse_at(0, h), 0.0f);
    }
  }
}

TEST_P(MsaAttendModesTest, Q8Kv4MatchesTheReference) {
  for (const int64_t dim : {64, 128}) {
    AttendCase attend = four_bit_case(4, dim, 11);
    expect_reference(attend, kFp8Output);
    attend.has_q_scale = attend.has_global_scales = true;
    attend.q_scale = Tensor::f32({1}, {0.5f});
    attend.k_global_scale = Tensor::f32({1}, {0.7f});
    attend.v_global_scale = Tensor::f32({1}, {1.3f});
    attend.has_sink = true;
    attend.sink = Tensor::f32({8}, std::vector<float>(8, 0.5f));
    attend.make_outputs();
    expect_reference(attend, kFp8Output);
  }
}

TEST_P(MsaAttendModesTest, KnownFault5NanTailsOfFp8CachesChangeNoBit) {
  for (const MsaKvMode mode : {MsaKvMode::kKv8, MsaKvMode::kQ8Kv8}) {
    AttendCase attend = eight_bit_case(mode, 2, 64, 9);
    run(attend);
    AttendCase zeros = attend;
    for (auto member : {&AttendCase::k, &AttendCase::v}) {
      for (int64_t i = 0; i < attend.batch.slots() * 128; ++i) {
        uint8_t& code = (zeros.*member).data<uint8_t>()[i];
        if ((code & 0x7F) == 0x7F) code = 0;
      }
    }
    zeros.make_outputs();
    run(zeros);
    EXPECT_EQ(zeros.out.bytes(), attend.out.bytes());
  }
  AttendCase attend = four_bit_case(2, 64, 9);
  run(attend);
  AttendCase zeros = attend;
  for (auto member : {&AttendCase::k_scale, &AttendCase::v_scale}) {
    for (size_t i = 0; i < (zeros.*member).bytes().size(); ++i) {
      uint8_t& code = (zeros.*member).data<uint8_t>()[i];
      if (code == 0x7F) code = 0;
    }
  }
  zeros.make_outputs();
  run(zeros);
  EXPECT_EQ(zeros.out.bytes(), attend.out.bytes());
}

TEST_P(MsaAttendModesTest, PagedEightBitPools) {
  AttendCase attend = eight_bit_case(MsaKvMode::kKv8, 4, 64, 3);
  run(attend);
  MsaAttendTensors tensors = attend.tensors();
  const int64_t pages = attend.batch.num_pages;
  for (ConstTensorView* pool : {&tensors.k_pool, &tensors.v_pool}) {
    pool->rank = 4;
    pool->shape = {pages, 2, 16, 64};
    pool->stride = {16 * 128, 64, 128, 1};
  }
  const std::vector<uint8_t> expected = attend.out.bytes();
  attend.out.fill_bytes(0x55);
  test::run(MsaAttend::plan(attend.problem(), GetParam().device(1), GetParam().options()), tensors);
  EXPECT_EQ(attend.out.bytes(), expected);
}

TEST(MsaAttendModes, ScalesThatDoNotFitAreRefused) {
  const Device cpu = Device::cpu(1);
  const auto refuse = [&](AttendCase attend, const char* word, auto change) {
    attend.make_outputs();
    MsaAttendTensors tensors = attend.tensors();
    change(tensors);
    try {
      test::run(MsaAttend::plan(attend.problem(), cpu), tensors);
      ADD_FAILURE() << word << " was accepted";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
    }
    EXPECT_EQ(attend.out.bytes(), std::vector<uint8_t>(attend.out.bytes().size(), 0x55));
  };
  const AttendCase kv8 = eight_bit_case(MsaKvMode::kKv8, 4, 64, 3);
  const Tensor pair = Tensor::f32({2}, {1, 1});
  refuse(kv8, "k_scale", [&](MsaAttendTensors& t) { t.k_scale = pair; });
  refuse(kv8, "q_scale", [&](MsaAttendTensors& t) { t.q_scale = pair; });
  refuse(kv8, "v_pool", [](MsaAttendTensors& t) { t.v_pool.dtype = DType::kBf16; });
  const AttendCase q8 = eight_bit_case(MsaKvMode::kQ8Kv8, 4, 64, 3);
  const Tensor three = Tensor::f32({3}, {1, 1, 1});
  refuse(q8, "k_scale", [&](MsaAttendTensors& t) { t.k_scale = three; });
  refuse(q8, "q = ", [&](MsaAttendTensors& t) { t.q.dtype = DType::kBf16; });
  refuse(q8, "v_global_scale", [&](MsaAttendTensors& t) { t.v_global_scale = pair; });
  const AttendCase kv4 = four_bit_case(4, 64, 3);
  refuse(kv4, "k_scale", [](MsaAttendTensors& t) { t.k_scale = {}; });
  refuse(kv4, "v_scale", [&](MsaAttendTensors& t) { t.v_scale = pair; });
  refuse(kv4, "v_scale", [](MsaAttendTensors& t) { t.v_scale.shape[3] = 2; });
  refuse(kv4, "k_pool", [](MsaAttendTensors& t) {
    t.k_pool.rank = 3;
    t.k_pool.shape = {64, 2, 32};
  });
}

}  // namespace
}  // namespace fovea
