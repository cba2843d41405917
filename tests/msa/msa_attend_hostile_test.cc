#include "fovea/msa_attend.h"

#include <gtest/gtest.h>

#include "fovea/error.h"
#include "tests/msa/msa_attend_target.h"

// Tokens, lengths, offsets, pages and lists that nobody should trust.
namespace fovea {
namespace {

using test::AttendCase;
using test::kInfinity;
using test::PagedBatch;
using test::Tensor;

class MsaAttendHostileTest : public test::AttendTargetTest {};
INSTANTIATE_TEST_SUITE_P(Targets, MsaAttendHostileTest,
                         testing::ValuesIn(test::targets_of("msa_attend")), test::target_name);

TEST_P(MsaAttendHostileTest, SmallCase6ZeroLengthAndPaddedRowsAreWritten) {
  AttendCase attend(PagedBatch({20, 0, 1, -4, 33, 16}, {0, 2, 6, 3, 5, 0}, 16, 4, 1, 4), 4, 2, 64,
                    2);
  std::fill_n(attend.blocks.data<int32_t>(), 2 * attend.batch.num_rows * 2, 0);
  attend.has_sink = true;
  attend.sink = Tensor::f32({4}, {0.0f, -kInfinity, kInfinity, 3.0f});
  for (const bool causal : {true, false}) {
    attend.causal = causal;
    attend.make_outputs();
    expect_reference(attend);
    for (const int64_t t : {0, 1, 2, 6, 8, 9, 10, 16, 17, 18, 19}) {
      for (int64_t h = 0; h < 4; ++h) {
        EXPECT_EQ(attend.lse_at(t, h), -kInfinity) << t;
        for (int64_t d = 0; d < 64; ++d)
          EXPECT_EQ(attend.out.data<bf16_t>()[(t * 4 + h) * 64 + d].bits, 0);
      }
    }
    EXPECT_EQ(attend.lse_at(7, 0), attend.lse_at(7, 0));
    EXPECT_NE(attend.lse_at(7, 0), -kInfinity);
  }
  AttendCase none(PagedBatch({}, {}, 16, 4, 1, 0), 4, 2, 64, 2);
  run(none);
  AttendCase padding(PagedBatch({}, {}, 16, 4, 1, 3), 4, 2, 64, 2);
  run(padding, 4);
  EXPECT_EQ(padding.lse_at(2, 3), -kInfinity);
  AttendCase no_list(PagedBatch({30}, {2}, 16), 4, 2, 64, 0);
  run(no_list);
  EXPECT_EQ(no_list.lse_at(1, 3), -kInfinity);
}

TEST_P(MsaAttendHostileTest, KnownFault4RowsOfInvalidIdsAreEmpty) {
  AttendCase attend(PagedBatch({100}, {3}, 16, 2), 4, 2, 64, 3);
  for (int64_t g = 0; g < 2; ++g) {
    attend.set_list(g, 0, {-1, -1, -1});
    attend.set_list(g, 1, {7, 2147483647, -2147483647});
    attend.set_list(g, 2, {8, 100000, -5});
  }
  run(attend, 4);
  for (int64_t t = 0; t < 3; ++t) {
    EXPECT_EQ(attend.lse_at(t, 3), -kInfinity);
    EXPECT_EQ(attend.out_at(t, 3, 5), 0.0f);
  }
}

TEST_P(MsaAttendHostileTest, KnownFault3PagesOutsideTheCacheMaskTheirBlock) {
  AttendCase attend(PagedBatch({100}, {5}, 16, 2), 4, 2, 64, 4);
  int32_t* table = attend.batch.page_table.data<int32_t>();
  table[0] = -1;
  table[1] = static_cast<int32_t>(attend.batch.num_pages);
  table[2] = std::numeric_limits<int32_t>::min();
  for (int64_t g = 0; g < 2; ++g) {
    for (int64_t t = 0; t < 5; ++t) attend.set_list(g, t, {0, 1, 2, 4});
  }
  expect_reference(attend);
  AttendCase only = attend;
  for (int64_t g = 0; g < 2; ++g) {
    for (int64_t t = 0; t < 5; ++t) only.set_list(g, t, {4});
  }
  run(only);
  EXPECT_EQ(only.out.bytes(), attend.out.bytes());
}

TEST_P(MsaAttendHostileTest, KnownFault8HostileLengthsAndOffsets) {
  AttendCase attend(PagedBatch({60, 70, 80}, {5, 5, 5}, 16, 2), 4, 1, 64, 4);
  attend.k.fill_bytes(0x11);
  attend.v.fill_bytes(0x22);
  attend.batch.kv_len = test::i32_vector({2147483647, 70, std::numeric_limits<int32_t>::min()});
  for (const std::vector<int32_t>& offsets : {std::vector<int32_t>{-7, 4, 3, 2147483647},
                                              {3, 3, 15, 15},
                                              {2147483647, 0, 0, 0},
                                              {-2147483647, -1, -1, 7}}) {
    attend.batch.q_indptr = test::i32_vector(offsets);
    attend.make_outputs();
    expect_reference(attend, 2);
  }
  attend.has_offset = true;
  attend.q_offset = test::i32_vector({2147483647, -2147483647, -3});
  attend.make_outputs();
  expect_reference(attend);
}

TEST_P(MsaAttendHostileTest, SmallCase7PoisonChangesNoBit) {
  // Unused pages, and slots past the last row's position in the last page, hold NaN; then zeros.
  for (const int32_t length : {1, 13, 15, 16, 17, 63, 65, 150}) {
    AttendCase attend(PagedBatch({length, 40}, {1, 3}, 16, 3), 8, 2, 64, 4);
    run(attend);
    AttendCase zeros = attend;
    for (auto member : {&AttendCase::k, &AttendCase::v}) {
      bf16_t* pool = (zeros.*member).data<bf16_t>();
      for (int64_t i = 0; i < zeros.batch.slots() * 2 * 64; ++i) {
        if (pool[i].bits == test::kBf16NanBits.bits) pool[i] = bf16_t{0};
      }
    }
    run(zeros);
    EXPECT_EQ(attend.out.bytes(), zeros.out.bytes()) << length;
    EXPECT_EQ(attend.lse.bytes(), zeros.lse.bytes()) << length;
  }
}

TEST_P(MsaAttendHostileTest, KnownFault19TokensOfTheFutureMayBeNan) {
  // Rows of one tile: a NaN token is seen by the rows at and after it only. Every group size.
  for (const int64_t group : {1, 2, 4, 16}) {
    AttendCase attend(PagedBatch({48}, {20}, 16, 3), group, 1, 64, 3);
    for (int64_t t = 0; t < 20; ++t) attend.set_list(0, t, {0, 1, 2});
    AttendCase clean = attend;
    run(clean);
    for (auto member : {&AttendCase::k, &AttendCase::v}) {
      AttendCase poisoned = attend;
      for (int64_t d = 0; d < 64; ++d)
        (poisoned.*member).data<bf16_t>()[poisoned.batch.slot(0, 37) * 64 + d] = test::kBf16NanBits;
      run(poisoned);
      for (int64_t t = 0; t < 20; ++t) {
        const bool sees = 28 + t >= 37;
        for (int64_t h = 0; h < group; ++h) {
          for (int64_t d = 0; d < 64; ++d) {
            if (sees)
              EXPECT_TRUE(std::isnan(poisoned.out_at(t, h, d)));
            else
              EXPECT_EQ(poisoned.out_at(t, h, d), clean.out_at(t, h, d));
          }
        }
      }
    }
  }
}

TEST_P(MsaAttendHostileTest, NanOfOneRowListOrHeadStaysThere) {
  AttendCase attend(PagedBatch({200}, {12}, 16, 3), 8, 2, 64, 4);
  for (int64_t g = 0; g < 2; ++g) {
    for (int64_t t = 0; t < 12; ++t) attend.set_list(g, t, {0, 3, 11});
  }
  attend.set_list(0, 5, {0, 2, 11});
  AttendCase clean = attend;
  run(clean);
  // Block 2 is listed by row 5 and KV head 0 alone; head 6 of row 9 has a NaN query.
  for (int64_t d = 0; d < 64; ++d) {
    attend.v.data<bf16_t>()[attend.batch.slot(0, 2 * 16 + 3) * 128 + d] = test::kBf16NanBits;
    attend.q.data<bf16_t>()[(9 * 8 + 6) * 64 + d] = test::kBf16NanBits;
  }
  run(attend);
  for (int64_t t = 0; t < 12; ++t) {
    for (int64_t h = 0; h < 8; ++h) {
      const bool nan = (t == 5 && h < 4) || (t == 9 && h == 6);
      for (int64_t d = 0; d < 64; ++d) {
        if (nan)
          EXPECT_TRUE(std::isnan(attend.out_at(t, h, d)));
        else
          EXPECT_EQ(attend.out_at(t, h, d), clean.out_at(t, h, d));
      }
    }
  }
}

TEST_P(MsaAttendHostileTest, HugeAndTinyLogits) {
  AttendCase attend(PagedBatch({90}, {4}, 16, 3), 4, 2, 64, 4);
  for (const float scale : {1e-6f, 40.0f, 1000.0f}) {
    attend.softmax_scale = scale;
    attend.make_outputs();
    AttendCase expected = attend;
    expected.run({"ref"});
    run(attend, 2);
    EXPECT_TRUE(test::ExpectClose(attend.lse.view(), expected.lse.view(),
                                  {.absolute = 1e-3, .relative = 1e-5, .cosine = 1e-6}));
  }
  // All logits -inf: an empty row; one of +inf: NaN.
  for (int64_t d = 0; d < 64; ++d) {
    attend.q.data<bf16_t>()[d] = bf16_from_float(d == 0 ? -1.0f : 0.0f);
    attend.q.data<bf16_t>()[64 + d] = bf16_from_float(d == 0 ? 1.0f : 0.0f);
  }
  for (int64_t j = 0; j < 90; ++j)
    attend.k.data<bf16_t>()[attend.batch.slot(0, j) * 128] = bf16_from_float(kInfinity);
  run(attend);
  EXPECT_EQ(attend.lse_at(0, 0), -kInfinity);
  EXPECT_EQ(attend.out_at(0, 0, 5), 0.0f);
  EXPECT_TRUE(std::isnan(attend.out_at(0, 1, 5)));
}

TEST(MsaAttend, SmallCase13RefusesWhatDoesNotFit) {
  const Device cpu = Device::cpu(1);
  AttendCase attend(PagedBatch({200, 90}, {5, 3}, 16, 2), 8, 2, 64, 4);
  const auto refuse_plan = [&](const char* word, auto change) {
    MsaAttendProblem problem = attend.problem();
    change(problem);
    try {
      MsaAttend::plan(problem, cpu);
      ADD_FAILURE() << word << " was accepted";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
    }
  };
  refuse_plan("block_size", [](MsaAttendProblem& p) { p.block_size = 0; });
  refuse_plan("page_size", [](MsaAttendProblem& p) { p.page_size = 128; });
  refuse_plan("num_kv_heads", [](MsaAttendProblem& p) { p.num_kv_heads = 3; });
  refuse_plan("num_kv_heads", [](MsaAttendProblem& p) { p.num_kv_heads = 0; });
  refuse_plan("head_dim", [](MsaAttendProblem& p) { p.head_dim = 100; });
  refuse_plan("softmax_scale", [](MsaAttendProblem& p) { p.softmax_scale = -1; });
  refuse_plan("softmax_scale", [](MsaAttendProblem& p) { p.softmax_scale = kInfinity; });
  refuse_plan("topk", [](MsaAttendProblem& p) { p.topk = -1; });
  refuse_plan("kv_mode", [](MsaAttendProblem& p) { p.kv_mode = static_cast<MsaKvMode>(9); });
  refuse_plan("blocks_layout",
              [](MsaAttendProblem& p) { p.blocks_layout = static_cast<BlocksLayout>(9); });
  refuse_plan("max_rows", [](MsaAttendProblem& p) { p.max_rows = -1; });

  const auto refuse_run = [&](const char* word, auto change) {
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
  refuse_run("slots", [](MsaAttendTensors& t) { t.k_pool.shape[0] = t.v_pool.shape[0] -= 3; });
  refuse_run("strides of k_pool", [](MsaAttendTensors& t) { t.v_pool.stride[0] *= 2; });
  refuse_run("strides of k_pool", [](MsaAttendTensors& t) { t.v_pool.shape[0] -= 16; });
  refuse_run("multiples of 16", [](MsaAttendTensors& t) {
    t.k_pool.data = static_cast<const char*>(t.k_pool.data) + 2;
    t.k_pool.shape[0] -= 16;
  });
  refuse_run("blocks", [](MsaAttendTensors& t) { t.blocks.shape[2] = 3; });
  refuse_run("blocks",
             [](MsaAttendTensors& t) { std::swap(t.blocks.shape[0], t.blocks.shape[1]); });
  refuse_run("k_scale", [](MsaAttendTensors& t) { t.k_scale = t.lse; });
  refuse_run("k_global_scale", [](MsaAttendTensors& t) { t.k_global_scale = t.lse; });
  refuse_run("sink", [](MsaAttendTensors& t) { t.sink = t.lse; });
  refuse_run("k_pool", [](MsaAttendTensors& t) { t.k_pool.dtype = DType::kU8; });
  refuse_run("q ", [](MsaAttendTensors& t) { t.q.shape[1] = 4; });
  refuse_run("lse", [](MsaAttendTensors& t) { t.lse.shape[1] = 4; });
  refuse_run("page_table", [](MsaAttendTensors& t) { t.page_table.shape[1] += 1; });
  refuse_run("kv_len", [](MsaAttendTensors& t) { t.kv_len.dtype = DType::kF32; });
  refuse_run("q_indptr", [](MsaAttendTensors& t) { t.q_indptr = t.kv_len; });
}

}  // namespace
}  // namespace fovea
