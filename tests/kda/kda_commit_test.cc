#include "fovea/kda_commit.h"

#include <gmock/gmock.h>

#include <array>
#include <cstring>

#include "fovea/error.h"
#include "src/core/fault_injection.h"
#include "tests/kda/verify_case.h"

namespace fovea {
namespace {

using test::CommitCase;
using test::ConvCase;
using test::DecodeCase;
using test::entry_bytes;
using test::flags_of;
using test::kda_layer;
using test::list_of;
using test::Tensor;
using test::VerifyCase;

constexpr VerifyMode kModes[] = {VerifyMode::kStates, VerifyMode::kRecords};
constexpr DType kPools[] = {DType::kF32, DType::kBf16};
constexpr WindowLayout kLayouts[] = {WindowLayout::kWd, WindowLayout::kDw};

// A layer whose gates leave some channels open and close others at once.
KdaLayer layer_of(DType pool, int64_t dim_k = 64, int64_t dim_v = 48) {
  KdaLayer layer = kda_layer(1, 2, dim_k, dim_v);
  layer.state_dtype = pool;
  return layer;
}

class KdaCommitTest : public test::TargetTest {
 protected:
  Options options() const { return GetParam().options(); }
  double limit(DType pool) const {
    const test::KdaLimits limits = test::kda_limits(GetParam().implementation);
    return pool == DType::kF32 ? limits.state_fp32 : limits.state_bf16;
  }
  void run(CommitCase& call, int threads = 1) { call.run(options(), threads); }

  // A verify by the reference: what is under test is the commit.
  static VerifyCase verified(VerifyCase call) {
    call.run({"ref"});
    return call;
  }
  void expect_reference(const CommitCase& call) {
    CommitCase expected = call;
    expected.run({"ref"});
    CommitCase first = call;
    for (const int threads : {1, 3}) {
      CommitCase actual = call;
      run(actual, threads);
      EXPECT_TRUE(test::within(actual.state.view(), expected.state.view(),
                               limit(call.problem.state_dtype)));
      EXPECT_EQ(actual.window_state.bytes(), expected.window_state.bytes());
      if (threads == 1) first = actual;
      EXPECT_EQ(actual.state.bytes(), first.state.bytes());
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Targets, KdaCommitTest, testing::ValuesIn(test::targets_of("kda_commit")),
                         test::target_name);

TEST_P(KdaCommitTest, AgreesWithTheReferenceForEverySize) {
  uint64_t seed = 1;
  for (const VerifyMode mode : kModes) {
    for (const DType pool : kPools) {
      for (const auto& [dim_k, dim_v] : std::vector<std::pair<int64_t, int64_t>>{
               {128, 128}, {60, 100}, {100, 61}, {1, 3}, {256, 5}}) {
        VerifyCase verify(layer_of(pool, dim_k, dim_v), mode, 5, 4, ++seed);
        verify.with_pool(9, {5, -1, 2, 9, 0});
        verify.has_initial_state = flags_of({1, 1, 0, 1, 1});
        for (const bool is_tree : {false, true}) {
          if (is_tree) verify.parent = list_of({-1, 0, 0, 1});
          CommitCase call(verified(verify), {4, 2, 3, 1, 1});
          expect_reference(call);
          expect_reference(call.with_tracks({7, 6, 8, 1, -1}, {1, 1, 2, 3, 1}));
        }
      }
    }
  }
}

TEST_P(KdaCommitTest, EveryCountGivesTheStateOfADecodeLoop) {
  constexpr int64_t kDrafts = 4;
  for (const DType pool : kPools) {
    for (const VerifyMode mode : kModes) {
      VerifyCase verify(layer_of(pool), mode, kDrafts + 1, kDrafts);
      verify.with_pool(kDrafts + 1, {0, 1, 2, 3, 4});
      verify = verified(verify);
      // Request a accepts a tokens.
      CommitCase call(verify, {0, 1, 2, 3, 4});
      const Tensor before = call.state;
      run(call);
      EXPECT_EQ(entry_bytes(call.state, 0), entry_bytes(before, 0));
      // fp32 throughout, rounded once at the end.
      KdaLayer wide = layer_of(DType::kF32);
      DecodeCase loop(wide, kDrafts + 1);
      const std::vector<double> start = test::to_doubles(before.view());
      loop.state =
          Tensor::f32({kDrafts + 1, 2, 48, 64}, std::vector<float>(start.begin(), start.end()));
      std::vector<float> expected(start.begin(), start.end());
      for (int64_t t = 0; t < kDrafts; ++t) {
        loop.inputs = verify.rows_of(std::vector<std::vector<int64_t>>(kDrafts + 1, {t})).inputs;
        loop.inputs.layer = wide;
        loop.run({"ref"});
        std::copy_n(loop.state.data<float>() + (t + 1) * 2 * 48 * 64, 2 * 48 * 64,
                    expected.begin() + (t + 1) * 2 * 48 * 64);
      }
      const Tensor rounded = test::float_tensor(pool, {kDrafts + 1, 2, 48, 64}, expected);
      EXPECT_TRUE(test::within(call.state.view(), rounded.view(), limit(pool)));
    }
  }
}

TEST_P(KdaCommitTest, KnownFault16RejectedDraftsLeaveNoTrace) {
  // Four sequences of four drafts, 1, 2, 3, 4 accepted, three rounds, windows too.
  constexpr int64_t kChannels = 45;
  for (const VerifyMode mode : kModes) {
    for (const WindowLayout layout : kLayouts) {
      KdaLayer layer = layer_of(DType::kF32);
      VerifyCase verify(layer, mode, 4, 4);
      verify.with_pool(6, {5, 0, 3, 1});
      DecodeCase plain(layer, 4);
      plain.state = verify.state;
      ConvCase conv = ConvCase::verify(4, 4, kChannels);
      conv.with_windows(6, layout);
      conv.slot = verify.slot;
      ConvCase step(ConvMode::kUpdate, 4, kChannels);
      step.problem.window_layout = layout;
      step.window_state = conv.window_state;
      for (uint64_t round = 0; round < 3; ++round) {
        verify.inputs = test::KdaInputs(layer, 16, 50 + round);
        test::Rng rng(80 + round);
        conv.x = Tensor::bf16({16, kChannels}, rng.bf16_normals(16 * kChannels));
        verify.run({"ref"});
        conv.run({"ref"});
        CommitCase commit = CommitCase(verify, {1, 2, 3, 4}).with_windows(conv);
        run(commit);
        verify.state = commit.state;
        conv.window_state = commit.window_state;
        for (int64_t t = 0; t < 4; ++t) {
          // Those that accepted row t take it; the others stand aside.
          std::vector<int32_t> slots{5, 0, 3, 1};
          for (int64_t r = 0; r < t; ++r) slots[static_cast<size_t>(r)] = -1;
          plain.slot = step.slot = list_of(slots);
          plain.inputs = verify.rows_of({{t}, {t}, {t}, {t}}).inputs;
          plain.run({"ref"});
          for (int64_t r = 0; r < 4; ++r) {
            std::copy_n(conv.x.data<bf16_t>() + (4 * r + t) * kChannels, kChannels,
                        step.x.data<bf16_t>() + r * kChannels);
          }
          step.run({"ref"});
        }
      }
      EXPECT_TRUE(test::within(verify.state.view(), plain.state.view(), limit(DType::kF32)));
      EXPECT_EQ(conv.window_state.bytes(), step.window_state.bytes());
    }
  }
}

TEST_P(KdaCommitTest, CountsOutOfRangeAndPaddingCommitNothing) {
  for (const VerifyMode mode : kModes) {
    VerifyCase verify(layer_of(DType::kF32), mode, 7, 3);
    verify.with_pool(7, {0, 1, 2, 3, 4, -1, 7});
    CommitCase call(verified(verify), {0, -1, 4, 2000000000, -2000000000, 1, 1});
    ConvCase conv = ConvCase::verify(7, 3, 20);
    conv.with_windows(7, WindowLayout::kDw);
    call.with_windows(conv).with_tracks({5, 5, 5, 5, -1, 6, 9}, {0, -7, 4, 5, 1, 0, 1});
    const CommitCase before = call;
    run(call);
    EXPECT_EQ(call.state.bytes(), before.state.bytes());
    EXPECT_EQ(call.window_state.bytes(), before.window_state.bytes());
  }
}

TEST_P(KdaCommitTest, OnlyTheWrittenSlotsChange) {
  for (const VerifyMode mode : kModes) {
    for (const WindowLayout layout : kLayouts) {
      VerifyCase verify(layer_of(DType::kBf16), mode, 2, 3);
      verify.with_pool(8, {6, 1});
      CommitCase call(verified(verify), {2, 3});
      ConvCase conv = ConvCase::verify(2, 3, 37);
      conv.with_windows(8, layout);
      conv.slot = verify.slot;
      conv.run({"ref"});
      call.with_windows(conv).with_tracks({-1, 4}, {1, 1});
      const CommitCase before = call;
      run(call);
      for (const int64_t slot : {0, 2, 3, 5, 7}) {
        EXPECT_EQ(entry_bytes(call.state, slot), entry_bytes(before.state, slot));
        EXPECT_EQ(entry_bytes(call.window_state, slot), entry_bytes(before.window_state, slot));
      }
      for (const int64_t slot : {1, 4, 6}) {
        EXPECT_NE(entry_bytes(call.state, slot), entry_bytes(before.state, slot));
      }
      // Steps a_n - 1 of the windows: the last three inputs of (old window, accepted rows).
      const auto window = [&](int64_t slot) {
        return test::window_bits(call.window_state, layout, slot);
      };
      EXPECT_EQ(window(6), test::window_after(conv, conv.window(6), {0, 1}));
      EXPECT_EQ(window(1), conv.inputs({3, 4, 5}));
      EXPECT_EQ(window(4), test::window_after(conv, conv.window(1), {3}));
    }
  }
}

TEST_P(KdaCommitTest, TheTrackSlotHasACountOfItsOwn) {
  for (const DType pool : kPools) {
    for (const VerifyMode mode : kModes) {
      VerifyCase verify(layer_of(pool), mode, 2, 3);
      verify.with_pool(6, {0, 1});
      verify = verified(verify);
      CommitCase both = CommitCase(verify, {3, 1}).with_tracks({4, 5}, {2, 3});
      run(both);
      CommitCase main(verify, {3, 1});
      run(main);
      CommitCase track(verify, {2, 3});
      track.in_slot = list_of({0, 1});
      track.slot = list_of({4, 5});
      run(track);
      for (const int64_t slot : {0, 1}) {
        EXPECT_EQ(entry_bytes(both.state, slot), entry_bytes(main.state, slot));
      }
      for (const int64_t slot : {4, 5}) {
        EXPECT_EQ(entry_bytes(both.state, slot), entry_bytes(track.state, slot));
      }
    }
  }
}

TEST_P(KdaCommitTest, RecordsStartWhereTheVerifyReadAndGoElsewhere) {
  for (const DType pool : kPools) {
    VerifyCase verify(layer_of(pool), VerifyMode::kRecords, 2, 3);
    verify.with_pool(6, {2, 2});
    verify = verified(verify);
    CommitCase fork(verify, {3, 2});
    fork.in_slot = list_of({2, 2});
    fork.slot = list_of({4, 0});
    const Tensor before = fork.state;
    run(fork);
    EXPECT_EQ(entry_bytes(fork.state, 2), entry_bytes(before, 2));
    VerifyCase states = verify.in_mode(VerifyMode::kStates);
    CommitCase copied(verified(states), {3, 2});
    copied.slot = fork.slot;
    run(copied);
    EXPECT_TRUE(test::within(fork.state.view(), copied.state.view(), limit(pool)));
    // Where the verify read nothing, nothing was kept.
    fork.in_slot = list_of({-1, 6});
    fork.state = before;
    run(fork);
    EXPECT_EQ(fork.state.bytes(), before.bytes());
  }
}

TEST_P(KdaCommitTest, FreshRequestsIgnoreTheNaNOfTheirSlot) {
  for (const VerifyMode mode : kModes) {
    VerifyCase verify(layer_of(DType::kF32), mode, 1, 3);
    verify.with_pool(2, {1});
    verify.has_initial_state = flags_of({0});
    CommitCase call(verified(verify), {2});
    CommitCase zero = call;
    call.state.fill_bytes(0xFF);
    test::fill(zero.state, 0);
    run(call);
    run(zero);
    EXPECT_EQ(entry_bytes(call.state, 1), entry_bytes(zero.state, 1));
  }
}

TEST_P(KdaCommitTest, StatesAreCopiedAndBf16PoolsAreRoundedOnce) {
  for (const DType pool : kPools) {
    for (const int64_t dim_k : {64, 37}) {
      VerifyCase verify(layer_of(pool, dim_k), VerifyMode::kStates, 2, 3);
      verify.with_pool(2, {1, 0});
      test::Rng rng(5);
      verify.scratch = Tensor::f32({2, 3, 2, 48, dim_k}, rng.normals(2 * 3 * 2 * 48 * dim_k));
      CommitCase call(verify, {2, 3});
      run(call);
      for (int64_t r = 0; r < 2; ++r) {
        const int64_t count = 2 * 48 * dim_k;
        const float* from = call.scratch.data<float>() + (r * 3 + (r == 0 ? 1 : 2)) * count;
        const Tensor expected = test::float_tensor(pool, {count}, {from, from + count});
        EXPECT_EQ(entry_bytes(call.state, 1 - r), expected.bytes());
      }
    }
  }
}

TEST_P(KdaCommitTest, OpenChannelsBehindAClosedOneKeepTheirBits) {
  // 63 tokens, the first of which forgets: a difference of sums of -1000 and -1e-3 would be off by
  // 3e-5 of each decay.
  for (const VerifyMode mode : kModes) {
    KdaLayer layer = layer_of(DType::kF32, 32, 16);
    layer.gate.kind = GateKind::kGiven;
    layer.gate.dtype = DType::kF32;
    VerifyCase verify(layer, mode, 1, 63);
    verify.slot = list_of({0});
    for (int64_t i = 0; i < 63 * 2 * 32; ++i) {
      verify.inputs.g.data<float>()[i] = i < 64 ? -1000.0f : -1e-3f;
    }
    CommitCase call(verified(verify), {63});
    expect_reference(call);
  }
}

TEST_P(KdaCommitTest, TreesFollowTheAcceptedNode) {
  const std::vector<int32_t> parent{-1, 0, 0, 2, 1, 3, 99};
  for (const VerifyMode mode : kModes) {
    VerifyCase verify(layer_of(DType::kF32), mode, 7, 7);
    verify.with_pool(7, {0, 1, 2, 3, 4, 5, 6});
    verify.parent = list_of(parent);
    verify = verified(verify);
    // Request r accepts node r.
    CommitCase call(verify, {1, 2, 3, 4, 5, 6, 7});
    run(call);
    const std::vector<std::vector<int64_t>> paths{{0},       {0, 1},       {0, 2}, {0, 2, 3},
                                                  {0, 1, 4}, {0, 2, 3, 5}, {6}};
    for (size_t r = 0; r < paths.size(); ++r) {
      VerifyCase chain = verify.in_mode(VerifyMode::kStates);
      chain.parent = {};
      chain = chain.rows_of(std::vector<std::vector<int64_t>>(7, paths[r]));
      const auto length = static_cast<int32_t>(paths[r].size());
      CommitCase expected(verified(chain), std::vector<int32_t>(7, length));
      expected.run({"ref"});
      const auto slot = static_cast<int64_t>(r);
      EXPECT_TRUE(test::within(slice_rows(call.state.view(), slot, slot + 1),
                               slice_rows(expected.state.view(), slot, slot + 1),
                               limit(DType::kF32)))
          << "node " << r;
    }
  }
}

TEST_P(KdaCommitTest, OneCallCoversAllLayers) {
  constexpr int64_t kLayers = 3, kChannels = 21;
  for (const VerifyMode mode : kModes) {
    for (const WindowLayout layout : kLayouts) {
      std::vector<CommitCase> single;
      for (int64_t l = 0; l < kLayers; ++l) {
        VerifyCase verify(layer_of(DType::kBf16, 32, 16), mode, 2, 3,
                          10 + static_cast<uint64_t>(l));
        verify.with_pool(5, {4, 1}, 20 + static_cast<uint64_t>(l));
        ConvCase conv = ConvCase::verify(2, 3, kChannels, 30 + static_cast<uint64_t>(l));
        conv.with_windows(5, layout, 40 + static_cast<uint64_t>(l));
        conv.slot = verify.slot;
        conv.run({"ref"});
        single.push_back(CommitCase(verified(verify), {3, 1}).with_windows(conv));
        single.back().with_tracks({2, -1}, {1, 2});
      }
      const auto joined = [&](Tensor CommitCase::*member, DType dtype,
                              std::initializer_list<int64_t> shape) {
        Tensor all(dtype, shape);
        uint8_t* to = all.data<uint8_t>();
        for (CommitCase& call : single) {
          to = std::copy((call.*member).bytes().begin(), (call.*member).bytes().end(), to);
        }
        return all;
      };
      CommitCase call = single.front();
      call.problem.num_layers = kLayers;
      call.scratch = mode == VerifyMode::kStates
                         ? joined(&CommitCase::scratch, DType::kF32, {kLayers, 2, 3, 2, 16 * 32})
                         : joined(&CommitCase::scratch, DType::kF32, {kLayers, 2, 3, 2, 80});
      call.state = joined(&CommitCase::state, DType::kBf16, {kLayers, 5, 2, 16, 32});
      call.window_scratch =
          joined(&CommitCase::window_scratch, DType::kBf16, {kLayers, 2, 3, 3, kChannels});
      call.window_state =
          layout == WindowLayout::kWd
              ? joined(&CommitCase::window_state, DType::kBf16, {kLayers, 5, 3, kChannels})
              : joined(&CommitCase::window_state, DType::kBf16, {kLayers, 5, kChannels, 3});
      run(call, 2);
      for (CommitCase& part : single) part.run(options());
      EXPECT_EQ(call.state.bytes(),
                joined(&CommitCase::state, DType::kBf16, {kLayers, 5, 2, 16, 32}).bytes());
      EXPECT_EQ(
          call.window_state.bytes(),
          joined(&CommitCase::window_state, DType::kBf16, {kLayers, 5, 3 * kChannels}).bytes());
    }
  }
}

TEST_P(KdaCommitTest, HonoursStridesOfPoolsAndScratch) {
  for (const VerifyMode mode : kModes) {
    VerifyCase verify(layer_of(DType::kF32, 40, 12), mode, 2, 3);
    verify.with_pool(4, {3, 0});
    CommitCase call(verified(verify), {1, 3});
    const test::Spread scratch(call.scratch, 11), state(call.state, 16, 1);
    KdaCommitTensors tensors = call.tensors();
    tensors.scratch = scratch.view();
    tensors.state = state.view();
    CommitCase strided = call;
    strided.run(options(), tensors);
    run(call);
    EXPECT_EQ(test::to_doubles(state.view()), test::to_doubles(call.state.view()));
  }
}

TEST_P(KdaCommitTest, EmptyCallsAndFailedLaunchesWriteNothing) {
  for (const VerifyMode mode : kModes) {
    VerifyCase verify(layer_of(DType::kF32, 32, 16), mode, 0, 3);
    verify.with_pool(2, {});
    CommitCase none(verify, {});
    const Tensor pool = none.state;
    run(none);
    EXPECT_EQ(none.state.bytes(), pool.bytes());
    VerifyCase two(layer_of(DType::kF32, 32, 16), mode, 2, 3);
    two.with_pool(4, {2, 1});
    CommitCase call(verified(two), {1, 2});
    ConvCase conv = ConvCase::verify(2, 3, 16);
    call.with_windows(conv.with_windows(4, WindowLayout::kWd)).with_tracks({0, 3}, {1, 1});
    const CommitCase before = call;
    const internal::LaunchFault fault(1);
    EXPECT_THROW(run(call), Error);
    EXPECT_TRUE(fault.fired());
    EXPECT_EQ(call.state.bytes(), before.state.bytes());
    EXPECT_EQ(call.window_state.bytes(), before.window_state.bytes());
  }
}

TEST_P(KdaCommitTest, RunsWithoutAllocations) {
  if (GetParam().kind == DeviceKind::kCuda) GTEST_SKIP() << "counts allocations of the host";
  for (const VerifyMode mode : kModes) {
    VerifyCase verify(layer_of(DType::kF32), mode, 2, 3);
    verify.with_pool(4, {2, 1});
    CommitCase call(verified(verify), {1, 2});
    call.problem.check = true;
    const KdaCommit plan = KdaCommit::plan(call.problem, GetParam().device(2), options());
    HostBuffer workspace(plan.workspace_bytes());
    const KdaCommitTensors tensors = call.tensors();
    plan.run(tensors, workspace.workspace());
    const test::AllocationCounter counter;
    plan.run(tensors, workspace.workspace());
    EXPECT_EQ(counter.count(), 0);
  }
}

TEST_P(KdaCommitTest, CheckFindsFaultsBeforeAnythingIsWritten) {
  for (const VerifyMode mode : kModes) {
    VerifyCase verify(layer_of(DType::kF32, 32, 16), mode, 3, 3);
    verify.with_pool(6, {0, 1, 2});
    CommitCase good(verified(verify), {1, 2, 0});
    good.problem.check = true;
    good.report = Tensor(DType::kI32, {2});
    good.with_tracks({3, -1, -1}, {1, 3, 0});
    const auto expect_fault = [&](KdaFault fault, int32_t entry, const auto& change) {
      CommitCase call = good;
      change(call);
      const Tensor before = call.state;
      if (GetParam().kind == DeviceKind::kCuda) {
        run(call);
      } else {
        try {
          run(call);
          ADD_FAILURE() << "no error for " << to_string(fault);
        } catch (const Error& error) {
          EXPECT_THAT(error.what(), testing::HasSubstr(std::string(to_string(fault))));
        }
      }
      EXPECT_EQ(call.report.values<int32_t>(),
                (std::vector<int32_t>{static_cast<int32_t>(fault), entry}));
      EXPECT_EQ(call.state.bytes(), before.bytes());
    };
    CommitCase fine = good;
    run(fine);
    EXPECT_EQ(fine.report.data<int32_t>()[0], 0);
    EXPECT_NE(fine.state.bytes(), good.state.bytes());
    // Two requests may name one slot as long as only one of them commits.
    fine.slot = list_of({0, 1, 1});
    run(fine);
    expect_fault(KdaFault::kInSlot, 2, [](CommitCase& call) { call.in_slot = list_of({0, 1, 6}); });
    expect_fault(KdaFault::kOutSlot, 1, [](CommitCase& call) { call.slot = list_of({0, 6, 2}); });
    expect_fault(KdaFault::kOutSlot, 0, [](CommitCase& call) {
      call.track_slot = list_of({7, -1, -1});
    });
    expect_fault(KdaFault::kDuplicateOutSlot, 1, [](CommitCase& call) {
      call.slot = list_of({1, 1, 2});
    });
    expect_fault(KdaFault::kDuplicateOutSlot, 0, [](CommitCase& call) {
      call.track_slot = list_of({1, -1, -1});
    });
    expect_fault(KdaFault::kAccepted, 2, [](CommitCase& call) {
      call.accepted = list_of({1, 2, 4});
    });
    expect_fault(KdaFault::kAccepted, 1, [](CommitCase& call) {
      call.track_accepted = list_of({1, -1, 0});
    });
  }
}

TEST(KdaCommit, RefusesWhatItsContractDoesNotList) {
  VerifyCase verify(layer_of(DType::kF32, 32, 16), VerifyMode::kStates, 3, 2);
  verify.with_pool(5, {0, 1, 2});
  CommitCase good(verify, {1, 2, 0});
  ConvCase conv = ConvCase::verify(3, 2, 9);
  good.with_windows(conv.with_windows(5, WindowLayout::kWd));
  test::fill(good.scratch, 1);
  const auto refusal = [&](const auto& change) {
    CommitCase call = good;
    change(call);
    const Tensor before = call.state;
    try {
      call.run({});
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_EQ(call.state.bytes(), before.bytes());
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(refusal([](CommitCase&) {}), "");
  const auto expect = [&](const char* word, const auto& change) {
    EXPECT_THAT(refusal(change), testing::HasSubstr(word));
  };
  expect("head_dim_k", [](CommitCase& call) { call.problem.head_dim_k = 257; });
  expect("rows_per_request", [](CommitCase& call) { call.problem.rows_per_request = 0; });
  expect("num_layers", [](CommitCase& call) { call.problem.num_layers = -1; });
  expect("accepted", [](CommitCase& call) { call.problem.max_requests = 2; });
  expect("scratch", [](CommitCase& call) { call.problem.rows_per_request = 3; });
  expect("scratch", [](CommitCase& call) { call.problem.mode = VerifyMode::kRecords; });
  expect("scratch", [](CommitCase& call) { call.problem.num_layers = 1; });
  expect("state", [](CommitCase& call) { call.problem.state_dtype = DType::kBf16; });
  expect("slot", [](CommitCase& call) { call.slot = {}; });
  expect("track", [](CommitCase& call) { call.track_slot = list_of({-1, -1, -1}); });
  expect("window_scratch", [](CommitCase& call) { call.window_scratch = {}; });
  expect("window_state", [](CommitCase& call) { call.window_state = {}; });
  expect("window_state", [](CommitCase& call) { call.problem.window_layout = WindowLayout::kDw; });
  expect("window_state", [](CommitCase& call) {
    call.window_state = test::random_windows(4, 9, WindowLayout::kWd, 1);
  });
  expect("report", [](CommitCase& call) { call.report = Tensor(DType::kI32, {2}); });
  CommitCase call = good;
  KdaCommitTensors tensors = call.tensors();
  tensors.state.stride[0] = 32;
  EXPECT_THROW(call.run({}, tensors), Error);
  tensors = call.tensors();
  tensors.window_state.stride[0] = 5;
  EXPECT_THROW(call.run({}, tensors), Error);
}

}  // namespace
}  // namespace fovea
