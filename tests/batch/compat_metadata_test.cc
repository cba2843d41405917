#include "fovea/compat_metadata.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <limits>
#include <numeric>
#include <string>

#include "fovea/context_split.h"
#include "fovea/error.h"
#include "tests/support/memory.h"
#include "tests/support/rng.h"

namespace fovea::compat {
namespace {

using test::Tensor;
using Values = std::vector<int32_t>;

constexpr int32_t kUntouched = -77777;
constexpr int32_t kMax = std::numeric_limits<int32_t>::max();

Tensor i32(const Values& values) {
  return Tensor::i32({static_cast<int64_t>(values.size())}, values);
}

Values iota(int32_t count) {
  Values values(static_cast<size_t>(count));
  std::iota(values.begin(), values.end(), 0);
  return values;
}

std::string refusal(const std::function<void()>& function,
                    ErrorCode code = ErrorCode::kInvalidArgument) {
  try {
    function();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code);
    return error.what();
  }
  return "accepted";
}

void expect_text(const std::string& actual, const std::string& fragment) {
  EXPECT_NE(actual.find(fragment), std::string::npos) << actual;
}

// ---- host fields: the worked examples

HostFields fields_of(ForwardMode mode, const Values& seq_len, const Values& ext_len,
                     int64_t padded_rows = 0, bool is_context_split = false) {
  return host_fields({mode, 3, seq_len, ext_len, is_context_split, padded_rows});
}

TEST(CompatHostFieldsTest, ExtendWithPrefix) {
  const HostFields fields = fields_of(ForwardMode::kExtend, {10, 4}, {3, 2});
  EXPECT_EQ(fields.cu_seqlens_q, (Values{0, 3, 5}));
  EXPECT_EQ(fields.max_seqlen_q, 3);
  EXPECT_EQ(fields.nsa_cu_seqlens_q, iota(6));
  EXPECT_EQ(fields.nsa_max_seqlen_q, 1);
  EXPECT_EQ(fields.extend_lens, (Values{3, 2}));
  EXPECT_EQ(fields.seq_lens_sum, 14);
}

TEST(CompatHostFieldsTest, ExtendWithoutPrefixTakesTheKeys) {
  const HostFields fields = fields_of(ForwardMode::kExtend, {5, 3}, {5, 3});
  EXPECT_EQ(fields.cu_seqlens_q, (Values{0, 5, 8}));
  EXPECT_EQ(fields.max_seqlen_q, 5);
  EXPECT_EQ(fields.seq_lens_sum, 8);
}

TEST(CompatHostFieldsTest, ASplitCountsTheRowsOfTheRank) {
  const Values lens = {5, 3};
  const ContextSplit split = context_split({2, 0}, lens, lens);
  const HostFields fields = fields_of(ForwardMode::kExtend, split.kv_len, split.ext_len, 0, true);
  EXPECT_EQ(fields.cu_seqlens_q, (Values{0, 3, 4}));
  EXPECT_EQ(fields.max_seqlen_q, 3);
  EXPECT_EQ(fields.seq_lens_sum, 8);
  // One new token of one key on a rank of its own is still a split, not a whole batch.
  EXPECT_EQ(fields_of(ForwardMode::kExtend, {1}, {1}, 0, true).cu_seqlens_q, (Values{0, 1}));
  const HostFields empty = fields_of(ForwardMode::kExtend, {}, {}, 0, true);
  EXPECT_EQ(empty.cu_seqlens_q, Values{0});
  EXPECT_EQ(empty.max_seqlen_q, 1);
}

TEST(CompatHostFieldsTest, Mixed) {
  const HostFields fields = fields_of(ForwardMode::kMixed, {10, 4}, {1, 2});
  EXPECT_EQ(fields.cu_seqlens_q, (Values{0, 1, 3}));
  EXPECT_EQ(fields.max_seqlen_q, 2);
  EXPECT_EQ(fields.extend_lens, (Values{1, 2}));
}

TEST(CompatHostFieldsTest, DecodeAndIdle) {
  const HostFields fields = fields_of(ForwardMode::kDecode, {10, 4}, {});
  EXPECT_EQ(fields.cu_seqlens_q, (Values{0, 1, 2}));
  EXPECT_EQ(fields.max_seqlen_q, 1);
  EXPECT_EQ(fields.nsa_cu_seqlens_q, (Values{0, 1, 2}));
  EXPECT_EQ(fields.extend_lens, (Values{1, 1}));
  EXPECT_FALSE(fields.seq_lens_sum.has_value());
  EXPECT_EQ(fields_of(ForwardMode::kDecode, {10, 4}, {}, 4).nsa_cu_seqlens_q, iota(5));
  const HostFields idle = fields_of(ForwardMode::kIdle, {}, {}, 2);
  EXPECT_EQ(idle.cu_seqlens_q, Values{0});
  EXPECT_EQ(idle.max_seqlen_q, 0);
  EXPECT_EQ(idle.nsa_cu_seqlens_q, iota(3));
}

TEST(CompatHostFieldsTest, SpeculativeModesHaveOneSequencePerRow) {
  const HostFields verify = fields_of(ForwardMode::kTargetVerify, {7, 2}, {});
  EXPECT_EQ(verify.cu_seqlens_q, iota(7));
  EXPECT_EQ(verify.max_seqlen_q, 1);
  EXPECT_EQ(verify.extend_lens, (Values{3, 3}));
  const HostFields draft = fields_of(ForwardMode::kDraftExtend, {10, 4}, {3, 1});
  EXPECT_EQ(draft.cu_seqlens_q, iota(5));
  EXPECT_EQ(draft.max_seqlen_q, 1);
  EXPECT_EQ(draft.extend_lens, (Values{3, 1}));
  EXPECT_EQ(fields_of(ForwardMode::kDraftExtendV2, {10, 5}, {}).cu_seqlens_q, iota(7));
}

TEST(CompatHostFieldsTest, RefusesWhatDoesNotFit) {
  const auto text = [](ForwardMode mode, const Values& seq_len, const Values& ext_len,
                       int64_t padded_rows = 0, bool is_split = false) {
    return refusal([&] { fields_of(mode, seq_len, ext_len, padded_rows, is_split); });
  };
  expect_text(text(ForwardMode::kExtend, {4, 4}, {1, 5}), "request 1: 5 rows and a KV length of 4");
  expect_text(text(ForwardMode::kExtend, {4}, {-1}), "request 0: -1 rows");
  expect_text(text(ForwardMode::kExtend, {4, 4}, {1}), "ext_len has 1 requests in mode extend");
  expect_text(text(ForwardMode::kDecode, {4}, {1}), "ext_len has 1 requests in mode decode");
  expect_text(text(ForwardMode::kDecode, {4, 0}, {}), "request 1: 1 rows and a KV length of 0");
  expect_text(text(ForwardMode::kTargetVerify, {4, -1}, {}), "request 1: 3 rows");
  expect_text(text(ForwardMode::kDraftExtendV2, {2}, {}), "request 0: 3 rows");
  expect_text(text(ForwardMode::kExtend, {kMax, 1}, {1, 1}), "request 1: the lengths sum to more");
  expect_text(text(ForwardMode::kDecode, {4, 4}, {}, 1), "padded_rows = 1");
  expect_text(text(ForwardMode::kDecode, {4, 4}, {}, 0, true), "a context split in mode decode");
  expect_text(text(static_cast<ForwardMode>(9), {4}, {}), "mode = 9");
}

// ---- lengths

TEST(CompatLengthsTest, CumulativeSumsSaturate) {
  Tensor sums(DType::kI32, {5});
  compute_cu_seqlens(i32({3, -2, 0, 4}), sums);
  EXPECT_EQ(sums.values<int32_t>(), (Values{0, 3, 3, 3, 7}));
  compute_cu_seqlens(i32({kMax, 5, kMax, 1}), sums);
  EXPECT_EQ(sums.values<int32_t>(), (Values{0, kMax, kMax, kMax, kMax}));
  Tensor empty(DType::kI32, {1});
  empty.fill_bytes(0xAB);
  compute_cu_seqlens(i32({}), empty);
  EXPECT_EQ(empty.values<int32_t>(), Values{0});
  expect_text(refusal([&] { compute_cu_seqlens(i32({1, 2}), sums); }), "cu_seqlens = i32 [5]");
}

TEST(CompatLengthsTest, SelectedLengthsAreClippedToTopk) {
  Tensor lens = i32({-4, 0, 5, 6, 7, kMax});
  compute_nsa_seqlens(lens.view(), 6, lens.view());
  EXPECT_EQ(lens.values<int32_t>(), (Values{0, 0, 5, 6, 6, 6}));
  expect_text(refusal([&] { compute_nsa_seqlens(lens.view(), 0, lens.view()); }), "topk = 0");
}

TEST(CompatLengthsTest, PaddingIsZero) {
  Tensor padded(DType::kI32, {4});
  padded.fill_bytes(0xAB);
  pad_nsa_cache_seqlens(i32({6, 4}), padded);
  EXPECT_EQ(padded.values<int32_t>(), (Values{6, 4, 0, 0}));
  TensorView first_row = padded.view();
  first_row.shape[0] = 1;
  pad_nsa_cache_seqlens(first_row, padded);
  EXPECT_EQ(padded.values<int32_t>(), (Values{6, 0, 0, 0}));
  expect_text(refusal([&] {
                pad_nsa_cache_seqlens(i32({1, 2, 3, 4, 5}), padded);
              }),
              "padded.shape[0] = 4");
}

// ---- tables: request A owns pages 2, 5, 7 and request B pages 3, 9 of four tokens

constexpr int64_t kWidth = 12;
const Values kSlotsA = {8, 9, 10, 11, 20, 21, 22, 23, 28, 29, 30, 31};
const Values kSlotsB = {12, 13, 14, 15, 36, 37, 38, 39};

class CompatTableTest : public testing::Test {
 protected:
  // Columns at and after the lengths hold garbage.
  PageTable1Tensors tensors(const Values& kv_len, const Values& row_to_request = {}) {
    Values table(5 * kWidth, kUntouched);
    std::copy_n(kSlotsA.begin(), kv_len[0], table.begin() + 4 * kWidth);
    std::copy_n(kSlotsB.begin(), kv_len[1], table.begin() + 1 * kWidth);
    kv_len_ = i32(kv_len);
    pool_row_ = i32({4, 1});
    req_to_token_ = Tensor::i32({5, kWidth}, table);
    row_to_request_ = i32(row_to_request);
    PageTable1Tensors result{kv_len_.view(), pool_row_.view(), req_to_token_.view(), {}};
    if (!row_to_request.empty()) result.row_to_request = row_to_request_.view();
    return result;
  }

  // The table's rows; places that were not written hold kUntouched.
  std::vector<Values> build(ForwardMode mode, const PageTable1Tensors& inputs, int64_t rows,
                            int64_t columns) {
    Tensor table = Tensor::i32({rows, columns + 1},
                               Values(static_cast<size_t>(rows * (columns + 1)), kUntouched));
    TensorView view = table;
    view.shape[1] = columns;  // a row stride of its own
    build_page_table_1(mode, inputs, view);
    const Values flat = table.values<int32_t>();
    std::vector<Values> result;
    for (int64_t r = 0; r < rows; ++r) {
      const auto begin = flat.begin() + r * (columns + 1);
      EXPECT_EQ(begin[columns], kUntouched) << "past the row";
      result.emplace_back(begin, begin + columns);
    }
    return result;
  }

  static Values row(const Values& slots, int64_t len, int64_t columns) {
    Values values(slots.begin(), slots.begin() + len);
    values.resize(static_cast<size_t>(columns), kUntouched);
    return values;
  }

  Tensor kv_len_, pool_row_, req_to_token_, row_to_request_;
};

TEST_F(CompatTableTest, OneRowPerRequest) {
  const Values a = row(kSlotsA, 10, 10), b = row(kSlotsB, 4, 10);
  for (const auto mode :
       {ForwardMode::kExtend, ForwardMode::kMixed, ForwardMode::kDecode, ForwardMode::kIdle}) {
    EXPECT_EQ(build(mode, tensors({10, 4}), 2, 10), (std::vector<Values>{a, b}));
  }
}

TEST_F(CompatTableTest, OneRowPerQueryRow) {
  const Values a = row(kSlotsA, 10, 10), b4 = row(kSlotsB, 4, 10), b5 = row(kSlotsB, 5, 10);
  for (const auto mode : {ForwardMode::kTargetVerify, ForwardMode::kDraftExtendV2}) {
    EXPECT_EQ(build(mode, tensors({10, 5}, {0, 0, 0, 1, 1, 1}), 6, 10),
              (std::vector<Values>{a, a, a, b5, b5, b5}));
  }
  EXPECT_EQ(build(ForwardMode::kDraftExtend, tensors({10, 4}, {0, 0, 0, 1}), 4, 10),
            (std::vector<Values>{a, a, a, b4}));
}

TEST_F(CompatTableTest, RowsOfNoRequestHoldTheDummyPage) {
  const Values a = row(kSlotsA, 10, 10), b = row(kSlotsB, 4, 10), dummy(10, 0);
  EXPECT_EQ(build(ForwardMode::kDraftExtend, tensors({10, 4}, {0, 1, -1, 2, kMax}), 6, 10),
            (std::vector<Values>{a, b, dummy, dummy, dummy, dummy}));
  EXPECT_EQ(build(ForwardMode::kDecode, tensors({10, 4}), 3, 10),
            (std::vector<Values>{a, b, dummy}));
}

TEST_F(CompatTableTest, PoolRowsOutsideTheTableGiveMaskedSlots) {
  PageTable1Tensors inputs = tensors({10, 4});
  pool_row_.data<int32_t>()[0] = 5;
  pool_row_.data<int32_t>()[1] = -1;
  EXPECT_EQ(build(ForwardMode::kDecode, inputs, 2, 10),
            (std::vector<Values>{row(Values(10, -1), 10, 10), row(Values(4, -1), 4, 10)}));
}

TEST_F(CompatTableTest, FlattenedSlotsOfTheExamples) {
  for (const Values& lens : {Values{10, 4}, Values{5, 3}, Values{0, 0}}) {
    Values expected(kSlotsA.begin(), kSlotsA.begin() + lens[0]);
    expected.insert(expected.end(), kSlotsB.begin(), kSlotsB.begin() + lens[1]);
    Tensor flattened(DType::kI32, {lens[0] + lens[1]});
    build_page_table_1_flattened(tensors(lens), flattened);
    EXPECT_EQ(flattened.values<int32_t>(), expected);
  }
}

TEST_F(CompatTableTest, RefusesWhatDoesNotFit) {
  Tensor table(DType::kI32, {2, 10});
  const auto text = [&](ForwardMode mode, const PageTable1Tensors& inputs) {
    return refusal([&] { build_page_table_1(mode, inputs, table); });
  };
  PageTable1Tensors inputs = tensors({12, 4});
  expect_text(text(ForwardMode::kDecode, inputs),
              "request 0: kv_len = 12, expected 0..10, the columns of page_table_1");
  inputs = tensors({10, 4});
  kv_len_.data<int32_t>()[1] = -1;
  expect_text(text(ForwardMode::kDecode, inputs), "request 1: kv_len = -1");
  kv_len_.data<int32_t>()[1] = 13;
  Tensor flattened(DType::kI32, {13});
  expect_text(refusal([&] { build_page_table_1_flattened(inputs, flattened); }),
              "request 1: kv_len = 13, expected 0..12, the columns of req_to_token");
  inputs = tensors({10, 4});
  expect_text(refusal([&] { build_page_table_1_flattened(inputs, flattened); }),
              "page_table_1_flattened = i32 [13], expected i32 [14]");
  expect_text(text(ForwardMode::kTargetVerify, inputs), "row_to_request is missing");
  inputs = tensors({10, 4}, {0, 1, 1});
  expect_text(text(ForwardMode::kTargetVerify, inputs), "page_table_1.shape[0] = 2, expected 3..");
  expect_text(text(ForwardMode::kDecode, inputs), "row_to_request is given, but mode decode");
  EXPECT_EQ(table.values<int32_t>(), Values(20, 0)) << "written before the refusal";
}

// ---- copies

constexpr ForwardMode kCopyModes[] = {ForwardMode::kDecode, ForwardMode::kIdle,
                                      ForwardMode::kTargetVerify, ForwardMode::kDraftExtend,
                                      ForwardMode::kDraftExtendV2};

enum class Padding { kNone, kZero, kMinusOne, kLast };

// One array of a step: where it stands, and how the copy treats it in which modes.
struct Field {
  const char* name;
  TensorView& (*of)(StepArrays&);
  Padding padding;
  bool is_cumulative, is_table, is_optional;
  bool in_decode, in_draft_only;
};

#define FOVEA_FIELD(member) \
#member, [](StepArrays & arrays) -> TensorView& { return arrays.fields.member; }
const Field kFields[] = {
    {FOVEA_FIELD(kv_len), Padding::kNone, false, false, false, true, false},
    {FOVEA_FIELD(kv_indptr), Padding::kNone, true, false, false, true, false},
    {"page_table_1", [](StepArrays& arrays) -> TensorView& { return arrays.page_table_1; },
     Padding::kZero, false, true, false, true, false},
    {FOVEA_FIELD(topk_length), Padding::kZero, false, false, false, true, false},
    {FOVEA_FIELD(topk_indptr), Padding::kLast, true, false, false, true, false},
    {FOVEA_FIELD(row_len), Padding::kZero, false, false, false, false, false},
    {FOVEA_FIELD(page_table), Padding::kNone, false, true, true, true, false},
    {FOVEA_FIELD(schedule), Padding::kNone, false, true, true, true, false},
    {FOVEA_FIELD(split_schedule), Padding::kNone, false, true, true, true, false},
    {FOVEA_FIELD(split_indptr), Padding::kLast, true, false, true, true, false},
    {FOVEA_FIELD(q_indptr), Padding::kNone, true, false, true, false, true},
    {FOVEA_FIELD(row_to_request), Padding::kMinusOne, false, false, true, false, true},
};
#undef FOVEA_FIELD

// A set of arrays with memory of its own, rows of tables `spare` columns longer than the arrays.
struct Arrays {
  std::deque<Tensor> memory;
  StepArrays arrays;

  void add(const Field& field, int64_t rows, int64_t columns, int64_t spare, test::Rng* rng) {
    const int64_t stride = columns + spare;
    memory.emplace_back(field.is_table ? Tensor(DType::kI32, {rows, stride})
                                       : Tensor(DType::kI32, {rows}));
    TensorView view = memory.back();
    for (int64_t i = 0; i < view.num_elements(); ++i) {
      memory.back().data<int32_t>()[i] =
          rng == nullptr ? kUntouched : static_cast<int32_t>(rng->integer(1, 1 << 30));
    }
    if (field.is_table) view.shape[1] = columns;
    field.of(arrays) = view;
  }
};

struct CopyCase {
  ForwardMode mode;
  int64_t requests = 5, rows = 0, padded = 0;
  Arrays source;
  std::vector<Arrays> destinations;

  // Rows of the source, and what a destination holds beyond.
  CopyCase(ForwardMode mode_in, int copies, uint64_t seed, bool with_optional = true)
      : mode(mode_in) {
    const bool is_decode = mode == ForwardMode::kDecode || mode == ForwardMode::kIdle;
    rows = is_decode ? requests : mode == ForwardMode::kDraftExtend ? 11 : 15;
    padded = rows + 1;
    test::Rng rng(seed);
    destinations.resize(static_cast<size_t>(copies));
    for (const Field& field : kFields) {
      if (field.is_optional && !with_optional) continue;
      const int64_t count = rows_of(field), columns = columns_of(field);
      source.add(field, count, columns, 2, &rng);
      for (int64_t i = 0; i < copies; ++i) {
        const bool is_fixed = std::string_view(field.name).ends_with("schedule");
        destinations[static_cast<size_t>(i)].add(field, count + (is_fixed ? 0 : i),
                                                 columns + (is_fixed ? 0 : i), i + 1, nullptr);
      }
    }
  }

  int64_t rows_of(const Field& field) const {
    const std::string_view name = field.name;
    if (name == "kv_len" || name == "page_table") return requests;
    if (name == "kv_indptr" || name == "q_indptr") return requests + 1;
    if (name == "page_table_1" || name == "row_len") return rows;
    if (name == "topk_indptr" || name == "split_indptr") return padded + 1;
    if (name == "schedule" || name == "split_schedule") return 5;
    return padded;
  }
  int64_t columns_of(const Field& field) const {
    const std::string_view name = field.name;
    return name == "page_table_1" ? 13 : name == "page_table" ? 4 : name == "schedule" ? 2 : 8;
  }

  bool is_copied(const Field& field) const {
    const bool is_decode = mode == ForwardMode::kDecode || mode == ForwardMode::kIdle;
    if (field.in_draft_only) return mode == ForwardMode::kDraftExtend;
    return field.in_decode || !is_decode;
  }

  std::vector<StepArrays> views() const {
    std::vector<StepArrays> result;
    for (const Arrays& destination : destinations) result.push_back(destination.arrays);
    return result;
  }
};

int32_t& at(const TensorView& view, int64_t row, int64_t column) {
  return static_cast<int32_t*>(view.data)[view.rank == 2 ? row * view.stride[0] + column : row];
}

// What the destination must hold after the copy.
int32_t expected_at(const CopyCase& c, const Field& field, const TensorView& source, int64_t row,
                    int64_t column) {
  if (!c.is_copied(field)) return kUntouched;
  if (field.is_cumulative && row == 0) return kUntouched;
  const bool is_source_row = row < source.shape[0];
  if (is_source_row && (source.rank == 1 || column < source.shape[1])) {
    return at(source, row, column);
  }
  if (is_source_row) return kUntouched;  // columns past the source's
  switch (field.padding) {
    case Padding::kNone:
      return kUntouched;
    case Padding::kZero:
      return 0;
    case Padding::kMinusOne:
      return -1;
    case Padding::kLast:
      return at(source, source.shape[0] - 1, 0);
  }
  return kUntouched;
}

void expect_copied(CopyCase& c) {
  for (Arrays& destination : c.destinations) {
    for (const Field& field : kFields) {
      TensorView& to = field.of(destination.arrays);
      if (!to.defined()) continue;
      const int64_t columns = to.rank == 2 ? to.stride[0] : 1;
      for (int64_t r = 0; r < to.shape[0]; ++r) {
        for (int64_t k = 0; k < columns; ++k) {
          const bool is_past_row = to.rank == 2 && k >= to.shape[1];
          const int32_t expected =
              is_past_row ? kUntouched : expected_at(c, field, field.of(c.source.arrays), r, k);
          ASSERT_EQ(at(to, r, k), expected)
              << to_string(c.mode) << ": " << field.name << "[" << r << ", " << k << "]";
        }
      }
    }
  }
}

TEST(CompatCopyTest, OneToEightDestinationsOfAnyStride) {
  for (const ForwardMode mode : kCopyModes) {
    for (int copies = 1; copies <= kMaxCopies; ++copies) {
      CopyCase c(mode, copies, 40 + static_cast<uint64_t>(copies), copies % 2 == 1);
      fused_metadata_copy_multi(mode, c.source.arrays, c.views());
      expect_copied(c);
      verify_metadata_copy(mode, c.source.arrays, c.views());
    }
  }
}

TEST(CompatCopyTest, TheSingleFormIsTheSameCopy) {
  for (const ForwardMode mode : kCopyModes) {
    CopyCase c(mode, 1, 7);
    fused_metadata_copy(mode, c.source.arrays, c.destinations[0].arrays);
    expect_copied(c);
  }
}

TEST(CompatCopyTest, EveryCorruptedFieldIsFound) {
  for (const ForwardMode mode : kCopyModes) {
    for (const Field& field : kFields) {
      CopyCase c(mode, 3, 50);
      if (!c.is_copied(field)) continue;
      SCOPED_TRACE(std::string(to_string(mode)) + ", " + field.name);
      const std::vector<StepArrays> destinations = c.views();
      fused_metadata_copy_multi(mode, c.source.arrays, destinations);
      const TensorView to = field.of(c.destinations[2].arrays);
      const TensorView source = field.of(c.source.arrays);
      // The last entry that is written: padding where the array has some.
      const bool is_padded = field.padding != Padding::kNone;
      const int64_t row = (is_padded ? to : source).shape[0] - 1;
      const int64_t column = to.rank == 1 ? 0 : (is_padded ? to : source).shape[1] - 1;
      const int32_t good = at(to, row, column);
      at(to, row, column) = -5;
      if (field.is_table) at(to, 1, 1) = -6;
      const std::string text = refusal(
          [&] { verify_metadata_copy(mode, c.source.arrays, destinations); }, ErrorCode::kMismatch);
      const std::string place = "fused_metadata_copy: destination 2: " + std::string(field.name);
      if (field.is_table) {
        expect_text(text, place + "[1, 1] = -6, expected " + std::to_string(at(source, 1, 1)));
        expect_text(text, "; 2 of ");
      } else {
        expect_text(text, place + "[" + std::to_string(row) + "] = -5, expected " +
                              std::to_string(good) + "; 1 of ");
      }
    }
  }
}

TEST(CompatCopyTest, ACorruptedSourceRangeIsFoundAtItsFirstIndex) {
  CopyCase c(ForwardMode::kDraftExtend, 1, 3);
  fused_metadata_copy(c.mode, c.source.arrays, c.destinations[0].arrays);
  const TensorView to = c.destinations[0].arrays.fields.topk_indptr;
  const int32_t good = at(to, 7, 0);
  at(to, 7, 0) = 12;
  at(to, 9, 0) = 12;
  EXPECT_EQ(refusal([&] { verify_metadata_copy(c.mode, c.source.arrays, c.views()); },
                    ErrorCode::kMismatch),
            "mismatch: fused_metadata_copy: destination 0: topk_indptr[7] = 12, expected " +
                std::to_string(good) + "; 2 of 12 entries differ");
}

TEST(CompatCopyTest, OptionalArraysArePresentInBothOrInNeither) {
  for (const Field& field : kFields) {
    for (const bool in_source : {true, false}) {
      CopyCase c(ForwardMode::kDraftExtend, 2, 11);
      SCOPED_TRACE(field.name);
      field.of(in_source ? c.destinations[1].arrays : c.source.arrays) = {};
      const std::string text =
          refusal([&] { fused_metadata_copy_multi(c.mode, c.source.arrays, c.views()); });
      expect_text(text, "fused_metadata_copy: ");
      expect_text(text, field.name);
      if (in_source) expect_text(text, "is given in the source only");
      // Nothing was copied, to the first destination either.
      for (const Field& other : kFields) {
        const TensorView to = other.of(c.destinations[0].arrays);
        if (to.defined()) {
          EXPECT_EQ(at(to, 1, 1), kUntouched);
        }
      }
    }
  }
}

TEST(CompatCopyTest, DestinationsAreCheckedBeforeAnyCopy) {
  for (const Field& field : kFields) {
    for (const int64_t axis : {0, 1}) {
      if (axis == 1 && !field.is_table) continue;
      CopyCase c(ForwardMode::kDraftExtend, 2, 13);
      SCOPED_TRACE(field.name);
      const auto i = static_cast<size_t>(axis);
      field.of(c.destinations[1].arrays).shape[i] = field.of(c.source.arrays).shape[i] - 1;
      expect_text(refusal([&] { fused_metadata_copy_multi(c.mode, c.source.arrays, c.views()); }),
                  std::string("fused_metadata_copy: destination: ") + field.name + " = i32 [");
      EXPECT_EQ(at(c.destinations[0].arrays.fields.kv_len, 1, 0), kUntouched);
    }
  }
}

TEST(CompatCopyTest, RefusesWhatDoesNotBelongTogether) {
  const auto text = [](ForwardMode mode, auto change) {
    CopyCase c(ForwardMode::kDraftExtend, 1, 17);
    change(c.source.arrays);
    return refusal([&] { fused_metadata_copy_multi(mode, c.source.arrays, c.views()); },
                   mode == ForwardMode::kExtend || mode == ForwardMode::kMixed
                       ? ErrorCode::kUnsupported
                       : ErrorCode::kInvalidArgument);
  };
  const auto draft = [&](auto change) { return text(ForwardMode::kDraftExtend, change); };
  using A = StepArrays;
  expect_text(text(ForwardMode::kExtend, [](A&) {}), "mode = extend");
  expect_text(text(ForwardMode::kMixed, [](A&) {}), "mode = mixed");
  expect_text(text(static_cast<ForwardMode>(9), [](A&) {}), "mode = 9");
  EXPECT_EQ(draft([](A&) {}), "accepted");
  expect_text(draft([](A& a) { a.fields.kv_indptr.shape[0] = 5; }),
              "source: kv_indptr.shape[0] = 5");
  expect_text(draft([](A& a) { a.fields.topk_indptr.shape[0] = 4; }), "topk_indptr.shape[0] = 4");
  expect_text(draft([](A& a) { a.fields.row_len.shape[0] = 13; }), "topk_length.shape[0] = 12");
  expect_text(draft([](A& a) { a.page_table_1.shape[0] = 5; }), "page_table_1.shape[0] = 5");
  expect_text(draft([](A& a) { a.fields.page_table.shape[0] = 4; }), "page_table.shape[0] = 4");
  expect_text(draft([](A& a) { a.fields.kv_len.dtype = DType::kI64; }), "source: kv_len = i64 [5]");
  expect_text(draft([](A& a) { a.fields.split_indptr = {}; }), "split_schedule is given without");
  expect_text(draft([](A& a) { a.fields.q_indptr = {}; }), "row_to_request is given without");
  CopyCase none(ForwardMode::kDecode, 0, 1), nine(ForwardMode::kDecode, 9, 1);
  for (CopyCase* c : {&none, &nine}) {
    expect_text(refusal([&] { fused_metadata_copy_multi(c->mode, c->source.arrays, c->views()); }),
                "expected 1..8");
  }
}

TEST(CompatCopyTest, CopiesAllocateNothing) {
  CopyCase c(ForwardMode::kTargetVerify, 3, 19);
  const std::vector<StepArrays> destinations = c.views();
  const test::AllocationCounter counter;
  fused_metadata_copy_multi(c.mode, c.source.arrays, destinations);
  verify_metadata_copy(c.mode, c.source.arrays, destinations);
  EXPECT_EQ(counter.count(), 0);
}

}  // namespace
}  // namespace fovea::compat
