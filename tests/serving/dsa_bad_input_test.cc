// Bad input of sparse attention, one test a kind: what the host can see is an Error before anything
// is written, what only the device holds is masked.

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "fovea/context_split.h"
#include "fovea/dsa_backend.h"
#include "fovea/error.h"
#include "fovea/index_logits.h"
#include "fovea/metadata_check.h"
#include "fovea/mha_varlen.h"
#include "fovea/mla_inputs.h"
#include "fovea/numeric.h"
#include "fovea/row_codec.h"
#include "fovea/sparse_mla.h"
#include "fovea/topk_select.h"
#include "tests/serving/dsa_rig.h"
#include "tests/support/compare.h"

namespace fovea {
namespace {

using test::DsaRig;
using test::StepOptions;
using test::Tensor;
using test::to_doubles;
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr ForwardMode kExtend = ForwardMode::kExtend;
constexpr ForwardMode kDecode = ForwardMode::kDecode;
using Words = std::vector<std::string>;
using Adjust = std::function<void(ForwardBatch&, DsaForwardTensors&)>;

DsaConfig tiny(RowFormat format = RowFormat::kV32) { return DsaRig::small_config(4, format); }

void expect_error(const Words& words, const std::function<void()>& act,
                  ErrorCode code = ErrorCode::kInvalidArgument) {
  try {
    act();
    ADD_FAILURE() << "no error about " << words.front();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    for (const std::string& word : words) {
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos)
          << "'" << word << "' is not in: " << error.what();
    }
  }
}

void expect_refused(const Words& words, DsaConfig config,
                    ErrorCode code = ErrorCode::kInvalidArgument) {
  expect_error(
      words, [&] { DsaBackend(config, Device::cpu(1)); }, code);
}

// One step of two requests whose batch or tensors `adjust` spoils; outputs and pools stay.
void expect_step_refused(const Words& words, const Adjust& adjust, ForwardMode mode = kExtend,
                         const DsaConfig& config = tiny(),
                         ErrorCode code = ErrorCode::kInvalidArgument) {
  DsaRig rig(config, 1);
  rig.step(kExtend, {{0, 9}, {1, 9}});
  StepOptions options;
  TensorView pools[2];
  std::vector<double> before[2];
  options.adjust = [&](ForwardBatch& batch, DsaForwardTensors& tensors) {
    pools[0] = tensors.kv_pool;
    pools[1] = tensors.index_pool;
    for (int i = 0; i < 2; ++i) before[i] = to_doubles(pools[i]);
    adjust(batch, tensors);
  };
  const bool extend = mode == kExtend;
  expect_error(
      words,
      [&] {
        rig.step(mode, {{0, extend ? 3 : 1}, {1, extend ? 2 : 1}}, options);
      },
      code);
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(pools[i].defined());
    EXPECT_EQ(to_doubles(pools[i]), before[i]);
  }
  for (const uint8_t byte : rig.out.bytes()) ASSERT_EQ(byte, 0xFF);
  for (const uint8_t byte : rig.lse.bytes()) ASSERT_EQ(byte, 0xFF);
}

template <class Plan>
void run(const Plan& plan, const typename Plan::Tensors& tensors) {
  HostBuffer workspace;
  workspace.reserve(plan.workspace_bytes());
  plan.run(tensors, workspace.workspace());
}

TEST(DsaBadInput, AnIndexWidthOrHeadCountThatNoGpuKernelHasRunsHereOrIsNamed) {
  DsaConfig config = tiny();
  config.index_dim = 96;
  expect_refused({"index_dim = 96", "power of two", "hadamard = false"}, config);
  config.hadamard = false;
  config.index_heads = 3;
  config.rope_dim = 32;
  DsaRig rig(config, 1);
  rig.step(kExtend, {{0, 20}});
  for (const double lse : to_doubles(rig.lse)) EXPECT_TRUE(std::isfinite(lse));
}

TEST(DsaBadInput, APageSizeOutsideTheRange) {
  for (const int64_t page_size : {int64_t{-4}, int64_t{0}, int64_t{257}}) {
    DsaConfig config = tiny();
    config.page_size = page_size;
    expect_refused({"page_size = " + std::to_string(page_size)}, config);
    EXPECT_THROW(page_bytes(RowFormat::kV32, page_size, 576), Error);
  }
}

TEST(DsaBadInput, APageSizeBesideATableOfSlots) {
  const Tensor table = Tensor::i32({2, 4}, std::vector<int32_t>(8));
  const Tensor logits = Tensor::f32({2, 4}, std::vector<float>(8));
  const Tensor row_len = Tensor::i32({2}, {4, 4});
  Tensor indices(DType::kI32, {2, 2});
  const auto select = [&](int64_t page_size) {
    run(TopkSelect::plan({2, 4, 2, IndexTransform::kPaged, page_size}, Device::cpu(1)),
        {.logits = logits, .row_len = row_len, .token_table = table, .indices = indices});
  };
  expect_error({"token_table", "page_size = 4", "0 or 1"}, [&] { select(4); });
  EXPECT_NO_THROW(select(0));
  EXPECT_NO_THROW(select(1));
}

TEST(DsaBadInput, ASelectionWidthThatNoOperatorHas) {
  for (const int64_t topk : {int64_t{0}, int64_t{-1}, int64_t{1} << 31}) {
    DsaConfig config = tiny();
    config.topk = topk;
    expect_refused({"topk = " + std::to_string(topk)}, config);
  }
}

TEST(DsaBadInput, IndicesOfAnotherWidthTypeOrStride) {
  const auto given = [](auto spoil) -> Adjust {
    return [spoil](ForwardBatch&, DsaForwardTensors& t) {
      t.topk_indices = t.indices;
      t.indices = {};
      spoil(t.topk_indices);
    };
  };
  expect_step_refused({"topk_indices"}, given([](auto& view) { view.shape[1] = 7; }));
  expect_step_refused({"topk_indices"}, given([](auto& view) { view.dtype = DType::kI64; }));
  expect_step_refused({"topk_indices"}, given([](auto& view) { view.stride[1] = 2; }));
  expect_step_refused({"indices"}, [](auto&, auto& t) { t.indices.stride[1] = 2; });
}

TEST(DsaBadInput, FewerPaddedRowsThanRows) {
  expect_step_refused({"padded_rows = 4", "num_rows = 5"},
                      [](auto& batch, auto&) { batch.padded_rows = 4; });
}

TEST(DsaBadInput, MoreTableRowsThanIndexRows) {
  const Tensor table = Tensor::i32({3, 4}, std::vector<int32_t>(12));
  const Tensor logits = Tensor::f32({2, 4}, std::vector<float>(8));
  Tensor indices(DType::kI32, {2, 2});
  expect_error({"token_table.shape[0]", "3"}, [&] {
    run(TopkSelect::plan({2, 4, 2, IndexTransform::kPaged}, Device::cpu(1)),
        {.logits = logits,
         .row_len = Tensor::i32({2}, {4, 4}),
         .token_table = table,
         .indices = indices});
  });
}

TEST(DsaBadInput, RowsOfTheRequestsThatDoNotSumToTheRowsOfTheBatch) {
  static constexpr int32_t kSum[] = {3, 3};
  expect_step_refused({"host_ext_len sums to 6", "num_rows = 5"},
                      [](auto& batch, auto&) { batch.host_ext_len = kSum; });
  expect_step_refused(
      {"num_rows = 1", "2 requests"}, [](auto& batch, auto&) { batch.num_rows = 1; }, kDecode);
}

TEST(DsaBadInput, OffsetsOfQueriesAndKeysForDifferentBatches) {
  const Tensor q(DType::kBf16, {2, 1, 192}), k(DType::kBf16, {2, 1, 192}),
      v(DType::kBf16, {2, 1, 128});
  Tensor out(DType::kBf16, {2, 1, 128}), lse(DType::kF32, {2, 1});
  expect_error({"kv_indptr"}, [&] {
    run(MhaVarlen::plan(
            {.max_rows = 2, .max_keys = 2, .max_requests = 2, .num_heads = 1, .softmax_scale = 1},
            Device::cpu(1)),
        {.q = q,
         .k = k,
         .v = v,
         .q_indptr = Tensor::i32({3}, {0, 1, 2}),
         .kv_indptr = Tensor::i32({2}, {0, 2}),
         .out = out,
         .lse = lse});
  });
}

// There is no argument that could ask for them: a row sees exactly its row_len leading keys.
template <class T>
concept CanBeNonCausal = requires(T value) {
  value.causal;
}
|| requires(T value) { value.encoder_out_cache_loc; }
|| requires(T value) { value.is_cross_attention; };
static_assert(!CanBeNonCausal<DsaConfig> && !CanBeNonCausal<DsaLayer> &&
              !CanBeNonCausal<ForwardBatch> && !CanBeNonCausal<DsaForwardTensors>);

TEST(DsaBadInput, NonCausalRequestsCannotBeAskedFor) {
  DsaRig rig(tiny(), 1);
  rig.step(kExtend, {{0, 7}});
  const std::vector<double> row_len = to_doubles(rig.backend().metadata().row_len);
  EXPECT_EQ(row_len, (std::vector<double>{1, 2, 3, 4, 5, 6, 7}));
}

TEST(DsaBadInput, HostLengthsBelowTheRowsOrNegative) {
  static constexpr int32_t kShort[] = {12, 1}, kNegative[] = {12, -3}, kRows[] = {6, -1};
  expect_step_refused({"request 1", "host_seq_len = 1"},
                      [](auto& batch, auto&) { batch.host_seq_len = kShort; });
  expect_step_refused({"request 1", "host_seq_len = -3"},
                      [](auto& batch, auto&) { batch.host_seq_len = kNegative; });
  expect_step_refused({"request 1", "host_ext_len = -1"},
                      [](auto& batch, auto&) { batch.host_ext_len = kRows; });
}

TEST(DsaBadInput, DeviceLengthsBelowTheRowsOrNegativeAreEmptyRows) {
  for (const ForwardMode mode : {kExtend, kDecode}) {
    DsaRig rig(tiny(), 1);
    rig.step(kExtend, {{0, 9}, {1, 9}});
    const Tensor lengths = Tensor::i32({2}, {-5, 1});
    StepOptions options;
    options.host_lengths = false;
    options.adjust = [&](ForwardBatch& batch, DsaForwardTensors&) { batch.seq_len = lengths; };
    const int rows = mode == kExtend ? 3 : 1;
    rig.step(mode, {{0, rows}, {1, rows}}, options);
    const float* const lse = rig.lse.data<float>();
    // The last row of request 1 sees its only key.
    for (int64_t i = 0; i < int64_t{2} * rows * 4; ++i) {
      EXPECT_EQ(lse[i] == -kInf, i < (int64_t{2} * rows - 1) * 4) << i;
      if (lse[i] != -kInf) continue;
      for (int64_t c = 0; c < 512; ++c) {
        ASSERT_EQ(rig.out.data<bf16_t>()[i * 512 + c].bits, 0);
      }
    }
  }
}

TEST(DsaBadInput, KeysOfAOneShotStepThatDoNotSumToTheLengths) {
  DsaConfig config = tiny();
  config.topk = 64;
  config.deterministic = false;
  const Tensor q(DType::kBf16, {5, 4, 192}), k(DType::kBf16, {22, 4, 192}),
      v(DType::kBf16, {23, 4, 128});
  Tensor out(DType::kBf16, {5, 4, 128});
  expect_step_refused(
      {"k_mha", "23"},
      [&](ForwardBatch& batch, DsaForwardTensors& t) {
        batch.mha_inputs = true;
        t.q_mha = q;
        t.k_mha = k;
        t.v_mha = v;
        t.out_mha = out;
      },
      kExtend, config);
}

TEST(DsaBadInput, SlotsBeyondThePoolAreMaskedLikeMinusOne) {
  std::vector<double> out[2];
  for (const bool huge : {false, true}) {
    DsaRig rig(tiny(), 1);
    rig.step(kExtend, {{0, 9}});
    StepOptions options;
    Tensor given(DType::kI32, {1, 8});
    options.adjust = [&](ForwardBatch&, DsaForwardTensors& t) {
      const auto capacity = static_cast<int32_t>(t.kv_pool.shape[0] * 4);
      const ConstTensorView table = rig.backend().metadata().page_table;
      const int32_t first = static_cast<const int32_t*>(table.data)[0] * 4;
      const int32_t bad[] = {capacity, std::numeric_limits<int32_t>::max(), -9};
      for (int i = 0; i < 8; ++i) {
        const bool valid = i % 2 == 0;
        given.data<int32_t>()[i] = valid ? first + i / 2 : (huge ? bad[i % 3] : -1);
      }
      t.topk_indices = given;
      t.indices = {};
    };
    rig.step(kDecode, {{0, 1}}, options);
    out[huge ? 1 : 0] = to_doubles(rig.lse);
    for (const double lse : out[huge ? 1 : 0]) EXPECT_TRUE(std::isfinite(lse));
  }
  EXPECT_EQ(out[0], out[1]);
}

TEST(DsaBadInput, StoresBeyondThePoolAreSkipped) {
  DsaRig rig(tiny(), 1);
  rig.step(kExtend, {{0, 9}});
  StepOptions options;
  std::vector<double> before;
  TensorView pool;
  Tensor loc(DType::kI32, {1});
  options.adjust = [&](ForwardBatch& batch, DsaForwardTensors& t) {
    pool = t.kv_pool;
    before = to_doubles(pool);
    loc.data<int32_t>()[0] = static_cast<int32_t>(pool.shape[0] * 4);
    batch.out_cache_loc = loc;
  };
  rig.step(kDecode, {{0, 1}}, options);
  EXPECT_EQ(to_doubles(pool), before);
}

// What was masked is reported on request, with its place.
MetadataReport report_of(const std::vector<int32_t>& seq_len, const std::vector<int32_t>& slots,
                         const std::vector<int32_t>& store_slots) {
  const MetadataCheck check = MetadataCheck::plan({.mode = kDecode,
                                                   .max_requests = 2,
                                                   .max_rows = 2,
                                                   .table_width = 4,
                                                   .page_size = 1,
                                                   .capacity = 9},
                                                  Device::cpu(1));
  Tensor word(DType::kI32, {8});
  run(check, {.seq_len = Tensor::i32({2}, seq_len),
              .pool_row = Tensor::i32({2}, {0, 1}),
              .req_to_token = Tensor::i32({2, 4}, slots),
              .ext_len = {},
              .out_cache_loc = Tensor::i32({2}, store_slots),
              .topk_indices = {},
              .error_word = word});
  MetadataReport report;
  static_assert(sizeof report == 32);
  std::memcpy(&report, word.data<int32_t>(), sizeof report);
  return report;
}

TEST(DsaBadInput, MaskedContentsAreReportedWithTheirPlace) {
  const std::vector<int32_t> slots = {1, 2, 3, 4, 5, 6, 7, 8};
  EXPECT_EQ(report_of({2, 3}, slots, {2, 7}).fault, MetadataFault::kNone);

  const MetadataReport slot = report_of({2, 3}, {1, 2, 3, 4, 5, 6, 9, 8}, {2, 7});
  EXPECT_EQ(slot.fault, MetadataFault::kSlotRange);
  EXPECT_EQ((std::vector<int32_t>{slot.request, slot.position, slot.value, slot.limit}),
            (std::vector<int32_t>{1, 2, 9, 9}));

  const MetadataReport negative = report_of({2, -3}, slots, {2, 7});
  EXPECT_EQ(negative.fault, MetadataFault::kNegativeLength);
  EXPECT_EQ(negative.request, 1);
  EXPECT_EQ(report_of({0, 3}, slots, {2, 7}).fault, MetadataFault::kRowsOverLength);
  EXPECT_EQ(report_of({2, 5}, slots, {2, 7}).fault, MetadataFault::kLengthOverWidth);
  EXPECT_EQ(report_of({2, 3}, slots, {2, 9}).fault, MetadataFault::kStoreSlot);
}

TEST(DsaBadInput, LengthsBeyondTheTableAndMoreRowsOrRequestsThanPlanned) {
  static constexpr int32_t kLong[] = {129, 11};
  expect_step_refused({"request 0", "host_seq_len = 129", "table_width = 128"},
                      [](auto& batch, auto&) { batch.host_seq_len = kLong; });
  expect_step_refused({"num_rows = 161"}, [](auto& batch, auto&) { batch.num_rows = 161; });
  expect_step_refused({"padded_rows = 161"}, [](auto& batch, auto&) { batch.padded_rows = 161; });
  const int64_t most = tiny().max_requests;
  const Tensor many(DType::kI32, {most + 1});
  expect_step_refused({"seq_len.shape[0] = " + std::to_string(most + 1)},
                      [&](auto& batch, auto&) { batch.seq_len = many; });
}

TEST(DsaBadInput, BucketsBeyondTheConfigurationAndBatchesBeyondTheirBucket) {
  DsaConfig config = tiny();
  config.rows_per_request = 3;
  DsaRig rig(config, 1);
  const auto make = [&](ForwardMode mode, int64_t requests, int64_t rows) {
    return rig.backend().make_step_plan({mode, requests, rows});
  };
  const int64_t most = config.max_requests;
  expect_error({"bucket.num_requests = " + std::to_string(most + 1)},
               [&] { make(kDecode, most + 1, 1); });
  expect_error({"bucket.rows_per_request = 2"}, [&] { make(kDecode, 1, 2); });
  expect_error({"bucket.rows_per_request = 4"}, [&] { make(ForwardMode::kTargetVerify, 1, 4); });
  expect_error({"bucket.mode = extend"}, [&] { make(kExtend, 1, 1); });

  rig.step(kExtend, {{0, 9}, {1, 9}});
  DsaStepPlan small = make(kDecode, 1, 1), verify = make(ForwardMode::kTargetVerify, 2, 3);
  StepOptions options;
  int seen = 0;
  options.adjust = [&](ForwardBatch& batch, DsaForwardTensors&) {
    expect_error({"seq_len.shape[0] = 2", "num_requests = 1"},
                 [&] { rig.backend().begin_step(batch, &small); });
    expect_error({"mode = decode", "target_verify"},
                 [&] { rig.backend().begin_step(batch, &verify); });
    ++seen;
  };
  rig.step(kDecode, {{0, 1}, {1, 1}}, options);
  EXPECT_EQ(seen, 1);
}

TEST(DsaBadInput, AScheduleForOtherWorkersOrGroups) {
  const Tensor row_len = Tensor::i32({4}, {1000, 300, 700, 5});
  Tensor schedule(DType::kI32, {5, 2});
  const auto plan = [&](int64_t workers, int64_t group) {
    return PagedSchedule::plan({.max_rows = 4, .workers = workers, .rows_per_group = group},
                               Device::cpu(1));
  };
  EXPECT_NO_THROW(run(plan(4, 2), {row_len, schedule}));
  expect_error({"schedule"}, [&] { run(plan(5, 1), {row_len, schedule}); });
  expect_error({"rows_per_group"}, [&] { run(plan(4, 3), {row_len, schedule}); });
}

TEST(DsaBadInput, AnImplementationOfTheOtherCacheForm) {
  DsaConfig config = tiny(RowFormat::kBf16);
  config.decode_implementation = "flashmla_kv";
  expect_refused({"decode_implementation = flashmla_kv", "row_format = bf16", "expected auto"},
                 config, ErrorCode::kUnsupported);
  config = tiny(RowFormat::kV32);
  config.prefill_implementation = "fa3";
  expect_refused({"prefill_implementation = fa3", "row_format = v32", "expected auto"}, config,
                 ErrorCode::kUnsupported);
}

TEST(DsaBadInput, APoolOfTheOtherCacheForm) {
  expect_step_refused({"kv_pool"}, [](auto&, auto& t) { t.kv_pool.dtype = DType::kBf16; });
  // 4 tokens of 656 bytes are too few for 4 of 1152.
  expect_step_refused(
      {"kv_pool"}, [](auto&, auto& t) { t.kv_pool.shape[1] = 4 * 656; }, kExtend,
      tiny(RowFormat::kBf16));
}

TEST(DsaBadInput, AQueryOfAnotherWidth) {
  expect_step_refused({"q ", "576"}, [](auto&, auto& t) { t.q.shape[2] = 512; });
}

TEST(DsaBadInput, AQueryOfTheLatentPartAlone) {
  expect_step_refused({"q_rope", "576"}, [](auto&, auto& t) {
    t.q.shape[2] = 512;  // wide enough in memory
  });
  const Tensor nope(DType::kBf16, {5, 4, 512});
  expect_step_refused({"q_rope is missing", "q_nope"}, [&](auto&, auto& t) {
    t.q = {};
    t.q_nope = nope;
  });
}

TEST(DsaBadInput, ARopePartOfTheQueryInTheExpandedForm) {
  DsaConfig config = tiny();
  config.topk = 64;
  config.deterministic = false;
  const Tensor q(DType::kBf16, {5, 4, 192}), rope(DType::kBf16, {5, 4, 64}),
      k(DType::kBf16, {23, 4, 192}), v(DType::kBf16, {23, 4, 128});
  Tensor out(DType::kBf16, {5, 4, 128});
  out.fill_bytes(0xFF);
  expect_step_refused(
      {"q_rope", "one-shot", "force_absorbed"},
      [&](ForwardBatch& batch, DsaForwardTensors& t) {
        batch.mha_inputs = true;
        t.q = {};
        t.q_rope = rope;
        t.q_mha = q;
        t.k_mha = k;
        t.v_mha = v;
        t.out_mha = out;
      },
      kExtend, config);
  for (const uint8_t byte : out.bytes()) ASSERT_EQ(byte, 0xFF);
}

TEST(DsaBadInput, NothingToSelectWith) {
  expect_step_refused({"index_q is missing"}, [](auto&, auto& t) { t.index_q = {}; });
  expect_step_refused({"head_gate"}, [](auto&, auto& t) { t.head_gate = {}; });
}

TEST(DsaBadInput, RopeTablesThatAreMissing) {
  expect_step_refused({"cos_sin"}, [](auto&, auto& t) { t.cos_sin = {}; });
}

TEST(DsaBadInput, AContextSplitOfASpeculativeStep) {
  DsaConfig config = tiny();
  config.context_parallel = true;
  for (const ForwardMode mode : {ForwardMode::kTargetVerify, ForwardMode::kDraftExtend,
                                 ForwardMode::kDraftExtendV2, kDecode, ForwardMode::kIdle}) {
    DsaBatchFacts facts;
    facts.mode = mode;
    facts.context_parallel = true;
    expect_error(
        {"mode = " + std::string(to_string(mode)), "context split"},
        [&] { dsa_dispatch(config, Device::cpu(1), facts); }, ErrorCode::kUnsupported);
  }
  const ContextSplit split;
  const auto give_split = [&](ForwardBatch& batch, DsaForwardTensors&) {
    batch.context_split = &split;
    batch.store_positions = batch.positions;
  };
  expect_step_refused({"context_split in mode decode"}, give_split, kDecode, config,
                      ErrorCode::kUnsupported);
  expect_step_refused({"context_parallel"}, give_split);
}

TEST(DsaBadInput, FusedRopeOfACacheOfRows) {
  for (const RowFormat format : {RowFormat::kBf16, RowFormat::kV32}) {
    DsaConfig config = tiny(format);
    config.fuse_rope = true;
    expect_refused({"fuse_rope", "row_format", "expected f576"}, config);
  }
}

TEST(DsaBadInput, RopeTableOfFusedRopeThatIsMissing) {
  DsaConfig config = tiny(RowFormat::kF576);
  config.fuse_rope = true;
  DsaRig rig(config, 1);
  const Tensor q_nope(DType::kBf16, {1, 4, 512}), q_rope(DType::kBf16, {1, 4, 64}),
      k_latent(DType::kBf16, {1, 512}), k_rope(DType::kBf16, {1, 64});
  StepOptions options;
  options.adjust = [&](ForwardBatch&, DsaForwardTensors& t) {
    t.q = t.k = {};
    t.q_nope = q_nope;
    t.q_rope = q_rope;
    t.k_latent = k_latent;
    t.k_rope = k_rope;
  };
  expect_error({"mla_cos_sin is missing"}, [&] { rig.step(kExtend, {{0, 1}}, options); });
  for (const uint8_t byte : rig.out.bytes()) ASSERT_EQ(byte, 0xFF);
}

TEST(DsaBadInput, RopeTableOfTheQuantisingPassThatIsMissing) {
  const Tensor nope(DType::kBf16, {1, 512}), rope(DType::kBf16, {1, 64});
  Tensor codes(DType::kU8, {1, 576});
  expect_error({"cos_sin"}, [&] {
    run(MlaRopeQuantize::plan({.max_rows = 1, .num_heads = 1}, Device::cpu(1)),
        {.q_nope = {},
         .q_rope = {},
         .k_nope = nope,
         .k_rope = rope,
         .positions = Tensor::i32({1}, {0}),
         .cos_sin = {},
         .q_fp8 = {},
         .k_fp8 = codes});
  });
}

TEST(DsaBadInput, AZigzagSplitOfSeveralRequests) {
  const int32_t lengths[] = {9, 9};
  expect_error({"zigzag", "2 requests"}, [&] {
    context_split({.ranks = 2, .rank = 0, .scheme = ContextScheme::kZigzag}, lengths, lengths);
  });
}

TEST(DsaBadInput, ADraftTree) {
  DsaConfig config = tiny();
  config.draft_topk = 2;
  expect_refused({"draft_topk = 2"}, config, ErrorCode::kUnsupported);
}

TEST(DsaBadInput, AModeThatDoesNotExist) {
  expect_step_refused(
      {"mode = 7"}, [](auto& batch, auto&) { batch.mode = static_cast<ForwardMode>(7); }, kExtend,
      tiny(), ErrorCode::kUnsupported);
}

TEST(DsaBadInput, LengthsThatAreNotContiguous) {
  const Tensor wide(DType::kI32, {4});
  expect_step_refused({"seq_len"}, [&](auto& batch, auto&) {
    batch.seq_len = wide;
    batch.seq_len.shape[0] = 2;
    batch.seq_len.stride[0] = 2;
  });
  const Tensor matrix(DType::kI32, {2, 2});
  expect_step_refused({"seq_len"}, [&](auto& batch, auto&) { batch.seq_len = matrix; });
}

TEST(DsaBadInput, NanLogitsSelectPositionsOfTheRow) {
  std::vector<float> values(16, std::nanf(""));
  values[5] = 1;
  values[9] = -kInf;
  Tensor indices(DType::kI32, {1, 4});
  run(TopkSelect::plan({1, 16, 4}, Device::cpu(1)), {.logits = Tensor::f32({1, 16}, values),
                                                     .row_len = Tensor::i32({1}, {12}),
                                                     .indices = indices});
  EXPECT_EQ(indices.values<int32_t>(), (std::vector<int32_t>{0, 1, 5, 9}));
}

TEST(DsaBadInput, NoRowsAndNoRequestsSucceed) {
  for (const ForwardMode mode :
       {kExtend, ForwardMode::kMixed, kDecode, ForwardMode::kIdle, ForwardMode::kTargetVerify,
        ForwardMode::kDraftExtend, ForwardMode::kDraftExtendV2}) {
    DsaRig rig(tiny(), 1);
    EXPECT_NO_THROW(rig.step(mode, {})) << to_string(mode);
    EXPECT_EQ(rig.out.view().num_elements(), 0) << to_string(mode);
    EXPECT_EQ(to_doubles(rig.backend().metadata().kv_indptr), std::vector<double>{0})
        << to_string(mode);
  }
}

}  // namespace
}  // namespace fovea
