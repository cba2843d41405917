#include "fovea/causal_conv1d.h"

#include <gmock/gmock.h>

#include <cmath>
#include <cstring>

#include "fovea/error.h"
#include "fovea/kda.h"
#include "fovea/numeric.h"
#include "src/core/fault_injection.h"
#include "tests/kda/conv_case.h"

namespace fovea {
namespace {

using test::ConvCase;
using test::flags_of;
using test::list_of;
using test::Tensor;
using test::window_after;
using test::WindowBits;

constexpr WindowLayout kLayouts[] = {WindowLayout::kWd, WindowLayout::kDw};

class CausalConv1dTest : public test::TargetTest {
 protected:
  Options options() const { return GetParam().options(); }
  void run(ConvCase& call, int threads = 1) { call.run(options(), threads); }

  // Runs the case and its reference; what both wrote must agree, for 1 and 3 threads.
  void expect_reference(const ConvCase& call) {
    ConvCase expected = call;
    expected.run({"ref"});
    Tensor first;
    for (const int threads : {1, 3}) {
      ConvCase actual = call;
      run(actual, threads);
      EXPECT_TRUE(test::ExpectClose(actual.out.view(), expected.out.view(), test::kConvOutput));
      EXPECT_EQ(actual.window_state.bytes(), expected.window_state.bytes());
      EXPECT_EQ(actual.window_scratch.bytes(), expected.window_scratch.bytes());
      if (threads == 1) first = actual.out;
      EXPECT_EQ(actual.out.bytes(), first.bytes()) << threads << " threads";
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Targets, CausalConv1dTest,
                         testing::ValuesIn(test::targets_of("causal_conv1d")), test::target_name);

std::vector<bf16_t> bf16_values(const std::vector<float>& values) {
  std::vector<bf16_t> result;
  for (const float value : values) result.push_back(bf16_from_float(value));
  return result;
}

TEST_P(CausalConv1dTest, WeighsTheRowAndTheThreeBeforeIt) {
  ConvCase call = ConvCase::prefill({3}, 1);
  call.problem.activation = ConvActivation::kNone;
  call.x = Tensor::bf16({3, 1}, bf16_values({1, 2, 4}));
  call.weight = Tensor::bf16({1, 4}, bf16_values({1000, 100, 10, 1}));
  call.bias = Tensor::bf16({1}, bf16_values({0.5}));
  call.window_state = Tensor::bf16({1, 3, 1}, bf16_values({-3, 0, 7}));
  run(call);
  // -3000 + 0 + 70 + 1, 700 + 10 + 2, 7000 + 100 + 20 + 4, each plus the bias and rounded to bf16.
  EXPECT_EQ(bf16_to_float(call.out.data<bf16_t>()[0]), -2928.0f);
  EXPECT_EQ(bf16_to_float(call.out.data<bf16_t>()[1]), 712.0f);
  EXPECT_EQ(bf16_to_float(call.out.data<bf16_t>()[2]), 7136.0f);
  EXPECT_EQ(call.window(0), call.inputs({0, 1, 2}));
  call.problem.activation = ConvActivation::kSilu;
  call.weight = Tensor::bf16({1, 4}, bf16_values({0, 0, 0, 1}));
  run(call);
  EXPECT_NEAR(bf16_to_float(call.out.data<bf16_t>()[0]), 1.5 / (1 + std::exp(-1.5)), 4e-3);
}

TEST_P(CausalConv1dTest, AgreesWithTheReferenceInEveryModeLayoutAndWidth) {
  for (const WindowLayout layout : kLayouts) {
    for (const int64_t channels : {1, 3, 19, 64, 515, 1100}) {
      SCOPED_TRACE(std::to_string(channels) + " channels, " + std::string(to_string(layout)));
      ConvCase prefill = ConvCase::prefill({2, 0, 70, 1, 3, 0, 129}, channels);
      prefill.with_windows(12, layout)
          .with_slots({3, -1, 4, 4, 99, 6, 7}, {3, 8, 9, 5, -1, 0, 7})
          .with_snapshots({2, 6, 3, 2, 0}, {1, 129, 0, 65, 5}, {10, 11, 1, 2, 2});
      expect_reference(prefill);
      prefill.has_initial_state = flags_of({0, 1, 1, 0, 1, 1, 0});
      prefill.problem.activation = ConvActivation::kNone;
      expect_reference(prefill.widened());
      ConvCase update(ConvMode::kUpdate, 5, channels, 3);
      update.with_windows(9, layout);
      update.slot = list_of({8, -1, 2, 9, 0});
      update.has_initial_state = flags_of({1, 1, 0, 1, 1});
      update.problem.bias_dtype = DType::kF32;
      update.bias = {};
      expect_reference(update);
      ConvCase verify = ConvCase::verify(4, 6, channels, 4);
      verify.with_windows(5, layout);
      verify.slot = list_of({2, 7, 2, 0});
      expect_reference(verify);
      verify.parent = list_of({-1, 0, 0, 2, 1, 3});
      expect_reference(verify);
    }
  }
}

TEST_P(CausalConv1dTest, WindowsOfShortSequencesShift) {
  for (const WindowLayout layout : kLayouts) {
    ConvCase call = ConvCase::prefill({0, 1, 2, 3, 40}, 70);
    call.with_windows(8, layout).with_slots({0, 1, 2, 3, 4}, {0, 1, 2, 3, 4});
    const ConvCase before = call;
    run(call);
    int64_t row = 0;
    for (const int64_t length : {0, 1, 2, 3, 40}) {
      std::vector<int64_t> rows;
      for (int64_t i = 0; i < length; ++i) rows.push_back(row++);
      const int64_t slot = length == 40 ? 4 : length;
      EXPECT_EQ(call.window(slot), window_after(call, before.window(slot), rows)) << length;
    }
    for (const int64_t slot : {5, 6, 7}) EXPECT_EQ(call.window(slot), before.window(slot));
  }
}

TEST_P(CausalConv1dTest, AnyCutIntoCallsHasTheSameBits) {
  constexpr int64_t kRows = 23, kChannels = 83;
  for (const WindowLayout layout : kLayouts) {
    ConvCase whole = ConvCase::prefill({kRows}, kChannels);
    whole.with_windows(1, layout);
    const Tensor initial = whole.window_state;
    run(whole);
    const auto part = [&](int64_t begin, int64_t end, const Tensor& windows, ConvMode mode) {
      ConvCase call(mode, end - begin, kChannels);
      call.problem.window_layout = layout;
      call.problem.max_sequences = mode == ConvMode::kPrefill ? 1 : 0;
      if (mode == ConvMode::kPrefill)
        call.q_indptr = list_of({0, static_cast<int32_t>(end - begin)});
      call.weight = whole.weight;
      call.bias = whole.bias;
      call.window_state = windows;
      CausalConv1dTensors tensors = call.tensors();
      tensors.x = slice_rows(static_cast<const Tensor&>(whole.x).view(), begin, end);
      call.run(options(), tensors);
      return call;
    };
    const auto out_bytes = [&](const ConvCase& call) { return call.out.bytes(); };
    for (const int64_t cut : {0, 1, 2, 3, 4, 5, 11, 21, 22, 23}) {
      const ConvCase head = part(0, cut, initial, ConvMode::kPrefill);
      const ConvCase tail = part(cut, kRows, head.window_state, ConvMode::kPrefill);
      std::vector<uint8_t> joined = out_bytes(head);
      joined.insert(joined.end(), tail.out.bytes().begin(), tail.out.bytes().end());
      EXPECT_EQ(joined, whole.out.bytes()) << "cut at " << cut;
      EXPECT_EQ(tail.window_state.bytes(), whole.window_state.bytes()) << "cut at " << cut;
    }
    Tensor windows = initial;
    std::vector<uint8_t> joined;
    for (int64_t row = 0; row < kRows; ++row) {
      const ConvCase step = part(row, row + 1, windows, ConvMode::kUpdate);
      joined.insert(joined.end(), step.out.bytes().begin(), step.out.bytes().end());
      windows = step.window_state;
    }
    EXPECT_EQ(joined, whole.out.bytes());
    EXPECT_EQ(windows.bytes(), whole.window_state.bytes());
  }
}

TEST_P(CausalConv1dTest, SnapshotsAtEveryPositionFallBackToTheOldWindow) {
  constexpr int64_t kLength = 6;
  for (const WindowLayout layout : kLayouts) {
    for (const bool has_initial : {true, false}) {
      ConvCase call = ConvCase::prefill({2, kLength}, 45);
      call.with_windows(12, layout).with_slots({0, 1}, {0, -1});
      call.has_initial_state = flags_of({1, has_initial});
      std::vector<int32_t> sequence, position, slot;
      for (int32_t p = 0; p <= kLength; ++p) {
        sequence.push_back(1);
        position.push_back(p);
        slot.push_back(p + 2);
      }
      call.with_snapshots(sequence, position, slot);
      WindowBits window = has_initial ? call.window(1) : WindowBits(3 * 45, 0);
      run(call);
      for (int64_t p = 0; p <= kLength; ++p) {
        EXPECT_EQ(call.window(p + 2), window) << "p = " << p;
        if (p < kLength) window = window_after(call, window, {2 + p});
      }
    }
  }
}

TEST_P(CausalConv1dTest, SnapshotsOutOfRangeWriteNothing) {
  for (const WindowLayout layout : kLayouts) {
    ConvCase call = ConvCase::prefill({4, 3}, 20);
    call.with_windows(6, layout)
        .with_slots({0, 1}, {-1, -1})
        .with_snapshots({0, 0, 2, -1, 0, 1, 1}, {5, -1, 0, 0, 1, 1, 2}, {2, 3, 4, 5, 6, -1, 99});
    const Tensor before = call.window_state;
    run(call);
    EXPECT_EQ(call.window_state.bytes(), before.bytes());
  }
}

TEST_P(CausalConv1dTest, SlotsOfPrefillFollowTheirOwnLists) {
  for (const WindowLayout layout : kLayouts) {
    // In place, a fork of slot 0, from zero, nothing stored, an empty fork, an empty one without a
    // start, an empty one in place whose flag says "fresh".
    ConvCase call = ConvCase::prefill({5, 4, 5, 6, 0, 0, 0}, 33);
    call.with_windows(9, layout).with_slots({0, 0, -1, 1, 1, 2000000000, 6},
                                            {0, 2, 3, -7, 4, 5, 6});
    call.has_initial_state = flags_of({1, 1, 1, 1, 1, 1, 0});
    call.in_slot = list_of({0, 7, -1, 1, 1, 2000000000, 6});
    const ConvCase before = call;
    run(call);
    EXPECT_EQ(call.window(0), call.inputs({2, 3, 4}));
    EXPECT_EQ(call.window(2), call.inputs({6, 7, 8}));
    EXPECT_EQ(call.window(3), call.inputs({11, 12, 13}));
    EXPECT_EQ(call.window(4), before.window(1));
    EXPECT_EQ(call.window(5), WindowBits(3 * 33, 0));
    for (const int64_t slot : {1, 6, 7, 8}) EXPECT_EQ(call.window(slot), before.window(slot));
    // A sequence alone with its start gives the same rows.
    ConvCase alone = ConvCase::prefill({4}, 33);
    alone.with_windows(1, layout);
    alone.window_state = before.window_state;
    alone.with_slots({7}, {8});
    alone.weight = call.weight;
    alone.bias = call.bias;
    CausalConv1dTensors tensors = alone.tensors();
    tensors.x = slice_rows(static_cast<const Tensor&>(call.x).view(), 5, 9);
    alone.run(options(), tensors);
    EXPECT_EQ(std::memcmp(alone.out.data<uint8_t>(), call.out.data<uint8_t>() + 5 * 66, 4 * 66), 0);
  }
}

TEST_P(CausalConv1dTest, FreshSequenceIgnoresTheNaNOfItsSlot) {
  for (const WindowLayout layout : kLayouts) {
    for (const ConvMode mode : {ConvMode::kPrefill, ConvMode::kUpdate, ConvMode::kVerify}) {
      ConvCase call = mode == ConvMode::kPrefill  ? ConvCase::prefill({1, 1}, 50)
                      : mode == ConvMode::kUpdate ? ConvCase(mode, 2, 50)
                                                  : ConvCase::verify(2, 1, 50);
      call.with_windows(2, layout);
      ConvCase zero = call;
      call.window_state.fill_bytes(0xFF);
      zero.window_state.fill_bytes(0);
      call.has_initial_state = flags_of({0, 0});
      run(call);
      run(zero);
      EXPECT_EQ(call.out.bytes(), zero.out.bytes());
      if (mode != ConvMode::kVerify) {
        EXPECT_EQ(call.window_state.bytes(), zero.window_state.bytes());
      }
      EXPECT_EQ(call.window_scratch.bytes(), zero.window_scratch.bytes());
    }
  }
}

TEST_P(CausalConv1dTest, WithoutWindowsHistoriesAreZeroAndNothingIsStored) {
  for (const ConvMode mode : {ConvMode::kPrefill, ConvMode::kUpdate, ConvMode::kVerify}) {
    ConvCase call = mode == ConvMode::kPrefill  ? ConvCase::prefill({1, 1}, 50)
                    : mode == ConvMode::kUpdate ? ConvCase(mode, 2, 50)
                                                : ConvCase::verify(2, 1, 50);
    ConvCase zero = call;
    zero.with_windows(2, WindowLayout::kWd);
    zero.window_state.fill_bytes(0);
    run(call);
    run(zero);
    EXPECT_EQ(call.out.bytes(), zero.out.bytes());
  }
}

TEST_P(CausalConv1dTest, RowsOfNoSequenceAreNeitherReadNorWritten) {
  ConvCase call = ConvCase::prefill({9}, 37);
  call.q_indptr = list_of({2, 5, 7});
  call.problem.max_sequences = 2;
  ConvCase clean = call;
  for (const int64_t row : {0, 1, 7, 8}) {
    std::memset(call.x.data<bf16_t>() + row * 37, 0xFF, 74);
  }
  run(call);
  run(clean);
  EXPECT_EQ(call.out.bytes(), clean.out.bytes());
  for (const int64_t row : {0, 1, 7, 8}) {
    EXPECT_EQ(call.out.data<bf16_t>()[row * 37].bits, 0x5555) << row;
  }
}

TEST_P(CausalConv1dTest, HostileOffsetsAreCutAndRaised) {
  for (const bool is_wide : {false, true}) {
    ConvCase call = ConvCase::prefill({20}, 18);
    call.problem.max_sequences = 4;
    call.with_windows(4, WindowLayout::kDw);
    ConvCase clean = call;
    clean.q_indptr = list_of({0, 6, 6, 20, 20});
    const std::vector<int32_t> hostile{-5, 6, 3, 2000000000, 7};
    call.q_indptr =
        is_wide ? Tensor::from(DType::kI64, {5},
                               std::vector<int64_t>{-(int64_t{1} << 40), 6, 3, int64_t{1} << 40, 7})
                : list_of(hostile);
    run(call);
    run(clean);
    EXPECT_EQ(call.out.bytes(), clean.out.bytes());
    EXPECT_EQ(call.window_state.bytes(), clean.window_state.bytes());
  }
}

TEST_P(CausalConv1dTest, PaddingOfUpdateAndVerifyIsZeroAndTouchesNothing) {
  for (const WindowLayout layout : kLayouts) {
    ConvCase call(ConvMode::kUpdate, 3, 29);
    call.with_windows(4, layout);
    call.slot = list_of({-1, 3, 4});
    const ConvCase before = call;
    run(call);
    for (const int64_t row : {0, 2}) {
      for (int64_t d = 0; d < 29; ++d) EXPECT_EQ(call.out.data<bf16_t>()[row * 29 + d].bits, 0);
    }
    EXPECT_EQ(call.window(3), window_after(call, before.window(3), {1}));
    for (const int64_t slot : {0, 1, 2}) EXPECT_EQ(call.window(slot), before.window(slot));
    call = ConvCase::verify(3, 2, 29);
    call.with_windows(4, layout);
    call.slot = list_of({-1, 3, 4});
    run(call);
    const auto half = static_cast<int64_t>(call.window_scratch.bytes().size()) / 3;
    for (const int64_t request : {0, 2}) {
      for (int64_t i = 0; i < half; ++i) {
        ASSERT_EQ(call.window_scratch.bytes()[static_cast<size_t>(request * half + i)], 0);
      }
      for (int64_t i = 0; i < 2 * 29; ++i) {
        ASSERT_EQ(call.out.data<bf16_t>()[request * 58 + i].bits, 0);
      }
    }
  }
}

// Bits of the window behind draft row t of request r.
WindowBits draft_window(const ConvCase& call, int64_t r, int64_t t) {
  const int64_t count = kConvHistory * call.problem.num_channels;
  WindowBits bits;
  for (int64_t i = 0; i < count; ++i) {
    bits.push_back(
        call.window_scratch.data<bf16_t>()[(r * call.problem.rows_per_request + t) * count + i]
            .bits);
  }
  return bits;
}

TEST_P(CausalConv1dTest, VerifyEqualsStepsAndKeepsTheWindowBehindEveryDraft) {
  constexpr int64_t kRequests = 3, kDrafts = 5, kChannels = 77;
  for (const WindowLayout layout : kLayouts) {
    ConvCase call = ConvCase::verify(kRequests, kDrafts, kChannels);
    call.with_windows(7, layout);
    call.slot = list_of({6, 0, 3});
    const Tensor before = call.window_state;
    run(call);
    EXPECT_EQ(call.window_state.bytes(), before.bytes());
    ConvCase step(ConvMode::kUpdate, kRequests, kChannels);
    step.problem.window_layout = layout;
    step.weight = call.weight;
    step.bias = call.bias;
    step.slot = call.slot;
    step.window_state = call.window_state;
    for (int64_t t = 0; t < kDrafts; ++t) {
      for (int64_t r = 0; r < kRequests; ++r) {
        std::copy_n(call.x.data<bf16_t>() + (r * kDrafts + t) * kChannels, kChannels,
                    step.x.data<bf16_t>() + r * kChannels);
      }
      run(step);
      for (int64_t r = 0; r < kRequests; ++r) {
        EXPECT_EQ(std::memcmp(call.out.data<bf16_t>() + (r * kDrafts + t) * kChannels,
                              step.out.data<bf16_t>() + r * kChannels, 2 * kChannels),
                  0)
            << "request " << r << ", draft " << t;
        EXPECT_EQ(draft_window(call, r, t), step.window(call.slot.data<int32_t>()[r]));
      }
    }
  }
}

TEST_P(CausalConv1dTest, EveryPathOfATreeIsAChainOfItsOwn) {
  constexpr int64_t kChannels = 21;
  // Two children of the committed state and of row 0; 4 and 5 deep; illegal parents count as -1:
  // the row itself, a later one, one beyond the tree, -2.
  const std::vector<int32_t> parent{-1, 0, 0, 1, 3, 4, -1, 7, 9, 2000000000, -2, 6};
  const std::vector<std::vector<int64_t>> paths{
      {0}, {0, 1}, {0, 2}, {0, 1, 3}, {0, 1, 3, 4}, {0, 1, 3, 4, 5},
      {6}, {7},    {8},    {9},       {10},         {6, 11}};
  const auto rows = static_cast<int64_t>(parent.size());
  for (const WindowLayout layout : kLayouts) {
    ConvCase tree = ConvCase::verify(2, rows, kChannels);
    tree.with_windows(2, layout);
    tree.parent = list_of(parent);
    run(tree);
    for (int64_t r = 0; r < 2; ++r) {
      for (int64_t t = 0; t < rows; ++t) {
        const auto& path = paths[static_cast<size_t>(t)];
        const auto length = static_cast<int64_t>(path.size());
        ConvCase chain = ConvCase::verify(1, length, kChannels);
        chain.problem.window_layout = layout;
        chain.weight = tree.weight;
        chain.bias = tree.bias;
        chain.window_state = tree.window_state;
        chain.slot = list_of({static_cast<int32_t>(r)});
        for (int64_t i = 0; i < length; ++i) {
          std::copy_n(tree.x.data<bf16_t>() + (r * rows + path[static_cast<size_t>(i)]) * kChannels,
                      kChannels, chain.x.data<bf16_t>() + i * kChannels);
        }
        run(chain);
        EXPECT_EQ(draft_window(tree, r, t), draft_window(chain, 0, length - 1)) << t;
        EXPECT_EQ(std::memcmp(tree.out.data<bf16_t>() + (r * rows + t) * kChannels,
                              chain.out.data<bf16_t>() + (length - 1) * kChannels, 2 * kChannels),
                  0)
            << "row " << t;
      }
    }
  }
}

// A view of `tensor` whose axes stand further apart, NaN between, ending at an unreadable page.
class Apart {
 public:
  Apart(const Tensor& tensor, const std::vector<int64_t>& gaps)
      : view_(tensor.view()), memory_(bytes(tensor, gaps)) {
    const auto size = static_cast<int64_t>(size_of(view_.dtype));
    std::memset(memory_.data(), 0xFF, static_cast<size_t>(extent_ * size));
    view_.data = memory_.data();
    source_ = tensor.view();
    copy([&](int64_t packed, int64_t apart) {
      std::memcpy(static_cast<char*>(memory_.data()) + apart * size,
                  static_cast<const char*>(source_.data) + packed * size,
                  static_cast<size_t>(size));
    });
  }
  TensorView view() const { return view_; }
  /// The elements, packed; fails when memory between them was written.
  std::vector<uint8_t> packed() {
    const auto size = static_cast<int64_t>(size_of(view_.dtype));
    std::vector<uint8_t> result(static_cast<size_t>(view_.num_elements() * size));
    auto* bytes = static_cast<uint8_t*>(memory_.data());
    copy([&](int64_t packed, int64_t apart) {
      std::memcpy(result.data() + packed * size, bytes + apart * size, static_cast<size_t>(size));
      std::memset(bytes + apart * size, 0xFF, static_cast<size_t>(size));
    });
    for (int64_t i = 0; i < extent_ * size; ++i) EXPECT_EQ(bytes[i], 0xFF) << "gap at byte " << i;
    return result;
  }

 private:
  size_t bytes(const Tensor& tensor, const std::vector<int64_t>& gaps) {
    view_ = TensorView{};
    static_cast<TensorShape&>(view_) = tensor.view();
    int64_t stride = 1;
    extent_ = 1;
    for (int axis = view_.rank - 1; axis >= 0; --axis) {
      const auto i = static_cast<size_t>(axis);
      view_.stride[i] = stride;
      extent_ += (view_.shape[i] - 1) * stride;
      stride = stride * view_.shape[i] + (axis > 0 ? gaps[i - 1] : 0);
    }
    return static_cast<size_t>(extent_) * size_of(view_.dtype);
  }
  template <class Body>
  void copy(const Body& body) const {
    for (int64_t flat = 0; flat < view_.num_elements(); ++flat) {
      int64_t rest = flat, at = 0;
      for (int axis = view_.rank - 1; axis >= 0; --axis) {
        const auto i = static_cast<size_t>(axis);
        at += rest % view_.shape[i] * view_.stride[i];
        rest /= view_.shape[i];
      }
      body(flat, at);
    }
  }

  TensorView view_;
  int64_t extent_ = 0;
  test::GuardedMemory memory_;
  ConstTensorView source_;
};

TEST_P(CausalConv1dTest, HonoursStridesAndReadsNothingBetween) {
  for (const WindowLayout layout : kLayouts) {
    for (const ConvMode mode : {ConvMode::kPrefill, ConvMode::kUpdate, ConvMode::kVerify}) {
      SCOPED_TRACE(std::string(to_string(mode)) + " " + std::string(to_string(layout)));
      ConvCase call = mode == ConvMode::kPrefill  ? ConvCase::prefill({2, 7}, 37)
                      : mode == ConvMode::kUpdate ? ConvCase(mode, 9, 37)
                                                  : ConvCase::verify(3, 3, 37);
      call.with_windows(10, layout);
      if (mode == ConvMode::kPrefill) {
        call.with_slots({2, 9}, {2, 8});
      } else {
        call.slot =
            list_of(mode == ConvMode::kUpdate ? std::vector<int32_t>{0, 1, 2, 3, 4, 5, 6, 7, 9}
                                              : std::vector<int32_t>{0, 9, 4});
      }
      const Tensor initial = call.window_state;
      Apart x(call.x, {5}), weight(call.weight, {3}), bias(call.bias, {}), out(call.out, {9}),
          pool(call.window_state, {7, 2});
      CausalConv1dTensors tensors = call.tensors();
      tensors.x = x.view();
      tensors.weight = weight.view();
      tensors.bias = bias.view();
      tensors.out = out.view();
      tensors.window_state = pool.view();
      if (mode == ConvMode::kVerify) {
        Apart scratch(call.window_scratch, {3, 2, 1});
        tensors.window_scratch = scratch.view();
        call.run(options(), tensors);
        run(call);
        EXPECT_EQ(scratch.packed(), call.window_scratch.bytes());
      } else {
        call.run(options(), tensors);
        run(call);
      }
      EXPECT_EQ(out.packed(), call.out.bytes());
      EXPECT_EQ(pool.packed(), call.window_state.bytes());
    }
  }
}

TEST_P(CausalConv1dTest, OverlappingViewsOfWindowsAreRefused) {
  // A transposed layout whose steps overlap, [D][3 + Td - 1] seen as [R, Td, 3, D]: step t + 1
  // would lie on the rows of step t.
  ConvCase call = ConvCase::verify(1, 4, 8);
  call.with_windows(1, WindowLayout::kDw);
  TensorView scratch = call.window_scratch.view();
  scratch.stride = {48, 8, 8, 1, 0};
  CausalConv1dTensors tensors = call.tensors();
  tensors.window_scratch = scratch;
  const std::vector<uint8_t> before = call.window_scratch.bytes();
  EXPECT_THROW(call.run(options(), tensors), Error);
  EXPECT_EQ(call.window_scratch.bytes(), before);
  EXPECT_EQ(call.out.data<bf16_t>()[0].bits, 0x5555);
  // Slots of a pool, channels of a slot, rows of out.
  tensors = call.tensors();
  tensors.window_state.shape[0] = 2;
  tensors.window_state.stride[0] = 23;
  EXPECT_THROW(call.run(options(), tensors), Error);
  tensors = call.tensors();
  tensors.window_state.stride[1] = 2;
  EXPECT_THROW(call.run(options(), tensors), Error);
  tensors = call.tensors();
  tensors.out.stride[0] = 7;
  EXPECT_THROW(call.run(options(), tensors), Error);
}

TEST_P(CausalConv1dTest, WindowsHaveThreeRowsWhateverTheStride) {
  // A pool of longer windows, seen through strides: rows 3 and 4 are not part of it.
  ConvCase call(ConvMode::kUpdate, 2, 16);
  call.with_windows(2, WindowLayout::kWd);
  Tensor longer(DType::kBf16, {2, 5, 16});
  longer.fill_bytes(0xFF);
  for (int64_t slot = 0; slot < 2; ++slot) {
    std::copy_n(call.window_state.data<bf16_t>() + slot * 48, 48,
                longer.data<bf16_t>() + slot * 80);
  }
  CausalConv1dTensors tensors = call.tensors();
  tensors.window_state = longer;
  EXPECT_THROW(call.run(options(), tensors), Error);
  tensors.window_state.shape[1] = 3;
  call.run(options(), tensors);
  const Tensor strided_out = call.out;
  run(call);
  EXPECT_EQ(strided_out.bytes(), call.out.bytes());
  for (int64_t slot = 0; slot < 2; ++slot) {
    EXPECT_EQ(std::memcmp(longer.data<bf16_t>() + slot * 80,
                          call.window_state.data<bf16_t>() + slot * 48, 96),
              0);
    for (int64_t i = 48; i < 80; ++i) EXPECT_EQ(longer.data<bf16_t>()[slot * 80 + i].bits, 0xFFFF);
  }
}

TEST_P(CausalConv1dTest, NaNStaysInItsChannelAndTheRowsThatSeeIt) {
  ConvCase call = ConvCase::prefill({12}, 40);
  call.x.data<bf16_t>()[4 * 40 + 17] = bf16_t{0x7FC0};
  run(call);
  for (int64_t row = 0; row < 12; ++row) {
    for (int64_t d = 0; d < 40; ++d) {
      const bool sees = d == 17 && row >= 4 && row < 8;
      EXPECT_EQ(std::isnan(bf16_to_float(call.out.data<bf16_t>()[row * 40 + d])), sees)
          << row << ", " << d;
    }
  }
}

TEST_P(CausalConv1dTest, SiluOfExtremeSumsIsFinite) {
  ConvCase call = ConvCase::prefill({1}, 8);
  call.weight = Tensor::bf16({8, 4}, std::vector<bf16_t>(32, bf16_from_float(1)));
  call.bias = {};
  call.x = Tensor::bf16({1, 8}, bf16_values({-1e4f, -90, -30, 0, 30, 90, 1e4f, 1e30f}));
  run(call);
  const float expected[] = {0, 0, 0, 0, 30, 90, 1e4f, 1e30f};
  for (size_t i = 0; i < 8; ++i) {
    EXPECT_NEAR(bf16_to_float(call.out.data<bf16_t>()[i]), expected[i],
                4e-3f * expected[i] + 1e-9f);
  }
}

TEST_P(CausalConv1dTest, EmptyCallsDoNothing) {
  ConvCase none = ConvCase::prefill({}, 10);
  none.with_windows(3, WindowLayout::kWd).with_slots({}, {});
  const Tensor before = none.window_state;
  run(none);
  EXPECT_EQ(none.window_state.bytes(), before.bytes());
  ConvCase empty = ConvCase::prefill({0, 0}, 10);
  empty.with_windows(2, WindowLayout::kDw);
  empty.has_initial_state = flags_of({0, 1});
  const Tensor windows = empty.window_state;
  run(empty);
  EXPECT_EQ(empty.window_state.bytes(), windows.bytes());
  ConvCase update(ConvMode::kUpdate, 0, 10);
  run(update);
  ConvCase verify = ConvCase::verify(0, 3, 10);
  run(verify);
}

TEST_P(CausalConv1dTest, AFailedLaunchLeavesEverythingBitIdentical) {
  for (const ConvMode mode : {ConvMode::kPrefill, ConvMode::kUpdate, ConvMode::kVerify}) {
    ConvCase call = mode == ConvMode::kPrefill  ? ConvCase::prefill({2, 7}, 37)
                    : mode == ConvMode::kUpdate ? ConvCase(mode, 2, 37)
                                                : ConvCase::verify(2, 3, 37);
    call.with_windows(2, WindowLayout::kWd);
    const ConvCase before = call;
    const internal::LaunchFault fault(1);
    EXPECT_THROW(run(call), Error);
    EXPECT_TRUE(fault.fired());
    EXPECT_EQ(call.out.bytes(), before.out.bytes());
    EXPECT_EQ(call.window_state.bytes(), before.window_state.bytes());
    EXPECT_EQ(call.window_scratch.bytes(), before.window_scratch.bytes());
  }
}

TEST_P(CausalConv1dTest, RunsWithoutAllocations) {
  if (GetParam().kind == DeviceKind::kCuda) GTEST_SKIP() << "counts allocations of the host";
  ConvCase call = ConvCase::prefill({2, 70}, 600);
  call.problem.check = true;
  call.with_windows(4, WindowLayout::kDw).with_slots({0, 1}, {0, 1}).with_snapshots({1}, {5}, {2});
  const CausalConv1d plan = CausalConv1d::plan(call.problem, GetParam().device(), options());
  HostBuffer workspace(plan.workspace_bytes());
  const CausalConv1dTensors tensors = call.tensors();
  plan.run(tensors, workspace.workspace());
  const test::AllocationCounter counter;
  plan.run(tensors, workspace.workspace());
  EXPECT_EQ(counter.count(), 0);
}

TEST_P(CausalConv1dTest, ReachesWindowsBeyondTwoToThe32Bytes) {
  if (GetParam().kind == DeviceKind::kCuda) GTEST_SKIP() << test::kNoSparseMapping;
  constexpr int64_t kChannels = 12288, kSlots = 58300;  // 73,728 bytes a slot
  ASSERT_GT(kSlots * kConvHistory * kChannels * 2, int64_t{1} << 32);
  test::SparseMapping memory(kSlots * kConvHistory * kChannels * sizeof(bf16_t));
  for (const WindowLayout layout : kLayouts) {
    ConvCase call(ConvMode::kUpdate, 1, kChannels);
    call.with_windows(1, layout);
    call.slot = list_of({kSlots - 1});
    auto* const window = static_cast<bf16_t*>(memory.data()) + (kSlots - 1) * 3 * kChannels;
    std::copy_n(call.window_state.data<bf16_t>(), 3 * kChannels, window);
    CausalConv1dTensors tensors = call.tensors();
    tensors.window_state = layout == WindowLayout::kWd
                               ? make_tensor(memory.data(), DType::kBf16, {kSlots, 3, kChannels})
                               : make_tensor(memory.data(), DType::kBf16, {kSlots, kChannels, 3});
    call.run(options(), tensors);
    const Tensor far_out = call.out;
    call.slot = list_of({0});
    run(call);
    EXPECT_EQ(far_out.bytes(), call.out.bytes());
    EXPECT_EQ(std::memcmp(window, call.window_state.data<bf16_t>(), 6 * kChannels), 0);
  }
}

// With check: the fault, its entry, and nothing written.
void expect_fault(ConvCase call, const Options& options, KdaFault fault, int32_t entry) {
  call.problem.check = true;
  call.report = Tensor(DType::kI32, {2});
  const ConvCase before = call;
  if (options.implementation.starts_with("cuda")) {
    call.run(options);
  } else {
    try {
      call.run(options);
      ADD_FAILURE() << "no error for " << to_string(fault);
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), testing::HasSubstr(std::string(to_string(fault))));
      EXPECT_THAT(error.what(), testing::HasSubstr("causal_conv1d"));
    }
  }
  EXPECT_EQ(call.report.values<int32_t>(),
            (std::vector<int32_t>{static_cast<int32_t>(fault), entry}));
  EXPECT_EQ(call.out.bytes(), before.out.bytes());
  EXPECT_EQ(call.window_state.bytes(), before.window_state.bytes());
}

TEST_P(CausalConv1dTest, CheckFindsFaultsBeforeAnythingIsWritten) {
  const auto base = [] {
    ConvCase call = ConvCase::prefill({4, 3}, 20);
    call.with_windows(6, WindowLayout::kWd).with_slots({0, 1}, {0, 1});
    return call;
  };
  ConvCase call = base();
  call.q_indptr = list_of({0, 4, 3});
  expect_fault(call, options(), KdaFault::kOffsets, 2);
  call = base();
  call.with_slots({0, 6}, {0, 1});
  expect_fault(call, options(), KdaFault::kInSlot, 1);
  call = base();
  call.with_slots({0, 1}, {7, 1});
  expect_fault(call, options(), KdaFault::kOutSlot, 0);
  call = base();
  call.with_slots({0, 1}, {3, 3});
  expect_fault(call, options(), KdaFault::kDuplicateOutSlot, 1);
  call = base().with_snapshots({0, 2}, {1, 1}, {4, 5});
  expect_fault(call, options(), KdaFault::kSnapshotSequence, 1);
  call = base().with_snapshots({0, 0}, {3, 5}, {4, 5});
  expect_fault(call, options(), KdaFault::kSnapshotPosition, 1);
  for (const int32_t slot : {0, 6}) {
    call = base().with_snapshots({0, 1}, {3, 2}, {4, slot});
    expect_fault(call, options(), KdaFault::kSnapshotSlot, 1);
  }
  ConvCase update(ConvMode::kUpdate, 2, 20);
  update.with_windows(6, WindowLayout::kWd);
  update.slot = list_of({5, 5});
  expect_fault(update, options(), KdaFault::kDuplicateOutSlot, 1);
  // Without faults: as without check. A verify only reads, so its slots may repeat; -1 may too.
  for (const bool is_verify : {false, true}) {
    ConvCase good = is_verify ? ConvCase::verify(3, 2, 20) : ConvCase(ConvMode::kUpdate, 3, 20);
    good.with_windows(6, WindowLayout::kWd);
    good.slot =
        list_of(is_verify ? std::vector<int32_t>{5, 5, -1} : std::vector<int32_t>{5, -1, -1});
    ConvCase checked = good;
    checked.problem.check = true;
    checked.report = Tensor(DType::kI32, {2});
    run(good);
    run(checked);
    EXPECT_EQ(checked.out.bytes(), good.out.bytes());
    EXPECT_EQ(checked.report.data<int32_t>()[0], 0);
  }
}

// What plan() or run() of a changed case throws; empty: nothing.
template <class Change>
std::string refusal(ConvCase call, const Change& change) {
  change(call);
  try {
    call.run({});
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_EQ(call.out.data<bf16_t>()[0].bits, 0x5555);
    return error.what();
  }
  return {};
}

TEST(CausalConv1d, RefusesWhatItsContractDoesNotList) {
  const ConvCase good = [] {
    ConvCase call = ConvCase::prefill({4, 3}, 20);
    call.with_windows(6, WindowLayout::kWd).with_slots({0, 1}, {0, 1});
    return call;
  }();
  EXPECT_EQ(refusal(good, [](ConvCase&) {}), "");
  const auto expect = [&](const char* word, const auto& change) {
    EXPECT_THAT(refusal(good, change), testing::HasSubstr(word));
  };
  expect("num_channels", [](ConvCase& call) { call.problem.num_channels = 0; });
  expect("max_rows", [](ConvCase& call) { call.problem.max_rows = -1; });
  expect("x.shape[0]", [](ConvCase& call) { call.problem.max_rows = 6; });
  expect("q_indptr", [](ConvCase& call) { call.problem.max_sequences = 1; });
  expect("q_indptr", [](ConvCase& call) { call.q_indptr = {}; });
  expect("rows_per_request", [](ConvCase& call) { call.problem.rows_per_request = 2; });
  expect("weight_dtype", [](ConvCase& call) { call.problem.weight_dtype = DType::kI32; });
  expect("weight", [](ConvCase& call) { call.problem.weight_dtype = DType::kF32; });
  expect("bias", [](ConvCase& call) { call.problem.bias_dtype = DType::kF32; });
  expect("window_state", [](ConvCase& call) { call.problem.window_layout = WindowLayout::kDw; });
  expect("window_state", [](ConvCase& call) { call.window_state = {}; });
  expect("window_state", [](ConvCase& call) { call.in_slot = call.out_slot = {}; });
  expect("slot", [](ConvCase& call) { call.slot = list_of({0, 1}); });
  expect("in_slot", [](ConvCase& call) { call.in_slot = list_of({0}); });
  expect("has_initial_state", [](ConvCase& call) { call.has_initial_state = flags_of({1}); });
  expect("parent", [](ConvCase& call) { call.parent = list_of({-1}); });
  expect("report", [](ConvCase& call) { call.report = Tensor(DType::kI32, {2}); });
  expect("snapshot_pos",
         [](ConvCase& call) { call.with_snapshots({0}, {1}, {5}).snapshot_pos = {}; });
  expect("snapshot_seq",
         [](ConvCase& call) { call.with_snapshots({0}, {1}, {5}).problem.max_snapshots = 0; });
  expect("snapshots", [](ConvCase& call) {
    call.with_windows(2, WindowLayout::kWd).with_snapshots({0}, {1}, {1});
    call.in_slot = call.out_slot = {};
  });
  expect("multiple", [](ConvCase& call) {
    call = ConvCase::verify(2, 3, 20);
    call.problem.rows_per_request = 4;
    call.window_scratch = {};
  });
}

}  // namespace
}  // namespace fovea
