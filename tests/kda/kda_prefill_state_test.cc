#include <functional>

#include "fovea/error.h"
#include "fovea/kda_prefill.h"
#include "src/core/fault_injection.h"
#include "tests/kda/kda_case.h"
#include "tests/support/guarded_tensors.h"

// States, slots, snapshots, transactions and memory of a prefill. Values: kda_prefill_test.cc.
namespace fovea {
namespace {

using test::entry_bytes;
using test::kda_layer;
using test::PrefillCase;
using test::Tensor;

class KdaPrefillStateTest : public test::TargetTest {
 public:
  Options options() const { return GetParam().options(); }
  test::KdaLimits limits() const { return test::kda_limits(GetParam().implementation); }
  void run(PrefillCase& call, int threads = 1) { call.run(options(), threads); }
  void expect_reference(const PrefillCase& call) { test::expect_kda_reference(call, options()); }
};
INSTANTIATE_TEST_SUITE_P(Targets, KdaPrefillStateTest,
                         testing::ValuesIn(test::targets_of("kda_prefill")), test::target_name);

const KdaLayer kSmall = kda_layer(1, 2, 16, 8);
// A GPU takes the second by tiles and tensor cores, the first token by token.
const KdaLayer kLayers[] = {kSmall, kda_layer(1, 2, 64, 16)};

bool all_bytes(const std::vector<uint8_t>& bytes, uint8_t value) {
  return std::all_of(bytes.begin(), bytes.end(), [&](uint8_t byte) { return byte == value; });
}

TEST_P(KdaPrefillStateTest, NothingToDo) {
  PrefillCase none(kSmall, {});
  none.with_pool(3, {}, {});
  const std::vector<uint8_t> pool = none.state.bytes();
  run(none);
  EXPECT_EQ(none.state.bytes(), pool);
  PrefillCase empty(kSmall, {0, 0, 0});
  empty.with_states();
  const std::vector<uint8_t> states = empty.state.bytes();
  run(empty);
  EXPECT_EQ(empty.state.bytes(), states);
  empty.has_initial_state = Tensor(DType::kU8, {3});
  run(empty);
  EXPECT_EQ(empty.state.bytes(), states);
}

TEST_P(KdaPrefillStateTest, SlotsOfPaddingStartAtZeroAndStoreNothing) {
  for (const KdaLayer& shape : kLayers) {
    SCOPED_TRACE(testing::Message() << "K " << shape.head_dim_k);
    for (const std::vector<int32_t>& slots : std::vector<std::vector<int32_t>>{
             {-1, 4, 2}, {0, -1, 4}, {4, 0, -1}, {-1, -1, -1}, {3, 1, 0}, {5, 4, INT32_MIN}}) {
      SCOPED_TRACE(testing::PrintToString(slots));
      PrefillCase call(shape, {20, 40, 7}, 2);
      call.with_pool(5, slots, slots);  // 4 is the last slot of the pool
      const Tensor before = call.state;
      expect_reference(call);
      run(call);
      for (int32_t slot = 0; slot < 5; ++slot) {
        const bool used = std::count(slots.begin(), slots.end(), slot) > 0;
        EXPECT_EQ(entry_bytes(call.state, slot) == entry_bytes(before, slot), !used) << slot;
      }
    }
  }
}

TEST_P(KdaPrefillStateTest, InAndOutSlotsAreListsOfTheirOwn) {
  for (const KdaLayer& shape : kLayers) {
    SCOPED_TRACE(testing::Message() << "K " << shape.head_dim_k);
    // Two sequences fork from slot 0, which stays; the third starts at zero and overwrites slot 3.
    PrefillCase call(shape, {20, 33, 5}, 3);
    call.with_pool(4, {0, 0, -1}, {1, 2, 3});
    const std::vector<uint8_t> origin = entry_bytes(call.state, 0);
    expect_reference(call);
    run(call);
    EXPECT_EQ(entry_bytes(call.state, 0), origin);

    PrefillCase in_only = call;
    in_only.out_slot = {};
    const Tensor before = in_only.state;
    run(in_only);
    EXPECT_EQ(in_only.state.bytes(), before.bytes());
  }
}

TEST_P(KdaPrefillStateTest, AFreshSlotMayHoldNan) {
  for (const KdaLayer& shape : kLayers) {
    SCOPED_TRACE(testing::Message() << "K " << shape.head_dim_k);
    for (const DType dtype : {DType::kF32, DType::kBf16}) {
      KdaLayer layer = shape;
      layer.state_dtype = dtype;
      PrefillCase call(layer, {20, 70, 0}, 4);
      call.with_pool(4, {2, 1, 0}, {2, 1, 3});
      call.has_initial_state = Tensor::from<uint8_t>(DType::kU8, {3}, {0, 1, 0});
      const int64_t block = call.state.view().num_elements() / 4;
      test::fill_elements(call.state, 2 * block, 4 * block, std::nanf(""));
      test::fill_elements(call.state, 0, block, std::nanf(""));
      expect_reference(call);
      run(call);
      EXPECT_TRUE(all_bytes(entry_bytes(call.state, 3), 0));  // fork of no initial state
    }
  }
}

TEST_P(KdaPrefillStateTest, EmptySequencesKeepOrCopyTheirState) {
  for (const KdaLayer& shape : kLayers) {
    SCOPED_TRACE(testing::Message() << "K " << shape.head_dim_k);
    for (const size_t place : {size_t{0}, size_t{1}, size_t{2}}) {
      std::vector<int32_t> lengths{9, 17, 33};
      lengths[place] = 0;
      const auto entry = static_cast<int64_t>(place);
      PrefillCase call(shape, lengths, 5);
      call.with_pool(8, {0, 1, 2}, {0, 1, 2});
      const Tensor before = call.state;

      PrefillCase in_place = call;
      run(in_place);
      EXPECT_EQ(entry_bytes(in_place.state, entry), entry_bytes(before, entry));
      in_place.has_initial_state = Tensor(DType::kU8, {3});
      in_place.state = before;
      run(in_place);
      EXPECT_EQ(entry_bytes(in_place.state, entry), entry_bytes(before, entry));

      PrefillCase fork = call;
      fork.out_slot = Tensor::i32({3}, {3, 4, 5});
      expect_reference(fork);
      run(fork);
      EXPECT_EQ(entry_bytes(fork.state, 3 + entry), entry_bytes(before, entry));
      EXPECT_EQ(entry_bytes(fork.state, entry), entry_bytes(before, entry));

      PrefillCase fresh = fork;
      fresh.state = before;
      fresh.has_initial_state = Tensor(DType::kU8, {3});
      run(fresh);
      EXPECT_TRUE(all_bytes(entry_bytes(fresh.state, 3 + entry), 0));

      PrefillCase no_start = fork;
      no_start.state = before;
      no_start.in_slot = Tensor::i32({3}, {-1, -1, 8});
      run(no_start);
      EXPECT_TRUE(all_bytes(entry_bytes(no_start.state, 3 + entry), 0));
    }
  }
}

TEST_P(KdaPrefillStateTest, BothLayoutsHoldTheSameState) {
  // K = V hides a swap of the axes, so that it has to be looked for.
  for (const auto& [dim_k, dim] :
       std::vector<std::pair<int64_t, int64_t>>{{16, 16}, {16, 8}, {64, 64}, {64, 16}}) {
    PrefillCase vk(kda_layer(1, 2, dim_k, dim), {40}, 6);
    vk.with_states();
    PrefillCase kv = vk;
    kv.problem.state_layout = StateLayout::kKv;
    kv.state = Tensor(DType::kF32, {1, 2, dim_k, dim});
    const auto transpose = [&](const Tensor& from, Tensor& to, int64_t rows, int64_t columns) {
      for (int64_t h = 0; h < 2; ++h) {
        for (int64_t i = 0; i < rows; ++i) {
          for (int64_t j = 0; j < columns; ++j) {
            to.data<float>()[(h * columns + j) * rows + i] =
                from.data<float>()[(h * rows + i) * columns + j];
          }
        }
      }
    };
    transpose(vk.state, kv.state, dim, dim_k);
    run(vk);
    run(kv);
    EXPECT_EQ(kv.out.bytes(), vk.out.bytes());
    Tensor back(DType::kF32, {1, 2, dim, dim_k});
    transpose(kv.state, back, dim_k, dim);
    EXPECT_EQ(back.bytes(), vk.state.bytes());
  }
}

TEST_P(KdaPrefillStateTest, SnapshotsAreTheStatesOfShorterCalls) {
  for (const KdaLayer& shape : kLayers) {
    SCOPED_TRACE(testing::Message() << "K " << shape.head_dim_k);
    for (const DType dtype : {DType::kF32, DType::kBf16}) {
      for (const CommitMode commit : {CommitMode::kDirect, CommitMode::kStaged}) {
        KdaLayer layer = shape;
        layer.state_dtype = dtype;
        PrefillCase call(layer, {130, 70, 0}, 7);
        call.problem.commit = commit;
        call.with_pool(12, {0, 1, 2}, {0, -1, 2});
        const Tensor before = call.state;
        // Sequence 0 at 0, 64, 128 and its end 130; sequence 1, which stores nothing else, at 64;
        // the empty sequence at 0.
        call.with_snapshots({0, 1, 0, 0, 0, 2}, {64, 64, 0, 130, 128, 0}, {3, 4, 5, 6, 7, 8});
        expect_reference(call);
        PrefillCase whole = call;
        run(whole);
        EXPECT_EQ(entry_bytes(whole.state, 5), entry_bytes(before, 0));
        EXPECT_EQ(entry_bytes(whole.state, 6), entry_bytes(whole.state, 0));
        EXPECT_EQ(entry_bytes(whole.state, 8), entry_bytes(before, 2));
        for (const int32_t p : {64, 128}) {
          PrefillCase part = call;
          part.snapshot_seq = part.snapshot_pos = part.snapshot_slot = {};
          part.q_indptr = Tensor::i32({4}, {0, p, p, p});
          run(part);
          EXPECT_EQ(entry_bytes(part.state, 0), entry_bytes(whole.state, p == 64 ? 3 : 7));
        }
      }
    }
  }
}

// More of them than a warp has lanes, in an order of their own.
TEST_P(KdaPrefillStateTest, TheOrderOfManySnapshotsDoesNotMatter) {
  const std::vector<int32_t> lengths{320, 170, 240};
  for (const KdaLayer& shape : kLayers) {
    SCOPED_TRACE(testing::Message() << "K " << shape.head_dim_k);
    std::vector<int32_t> sequence, position, slot;
    for (int32_t n = 0; n < 3; ++n) {
      for (int32_t p = 16; p <= lengths[static_cast<size_t>(n)]; p += 16) {
        sequence.push_back(n);
        position.push_back(p);
        slot.push_back(static_cast<int32_t>(slot.size()) + 3);
      }
    }
    const size_t count = slot.size();
    ASSERT_EQ(count, 45u);
    PrefillCase ordered(shape, lengths, 12);
    ordered.problem.chunk = 16;
    ordered.with_pool(static_cast<int64_t>(count) + 3, {0, 1, 2}, {0, 1, 2});
    PrefillCase mixed = ordered;
    ordered.with_snapshots(sequence, position, slot);
    expect_reference(ordered);
    run(ordered);
    const auto shuffled = [&](const std::vector<int32_t>& list) {
      std::vector<int32_t> result;
      for (size_t i = 0; i < count; ++i) result.push_back(list[(i * 17 + 5) % count]);
      return result;
    };
    mixed.with_snapshots(shuffled(sequence), shuffled(position), shuffled(slot));
    run(mixed);
    EXPECT_EQ(mixed.state.bytes(), ordered.state.bytes());
  }
}

TEST_P(KdaPrefillStateTest, IllegalSnapshotsWriteNothing) {
  for (const KdaLayer& shape : kLayers) {
    SCOPED_TRACE(testing::Message() << "K " << shape.head_dim_k);
    PrefillCase call(shape, {130, 70}, 8);
    call.with_pool(6, {0, 1}, {0, 1});
    const Tensor before = call.state;
    call.with_snapshots({0, 0, 0, 2, -1, 0, 0, 1}, {63, 65, 131, 0, 0, 64, 64, 128},
                        {2, 3, 4, 5, 5, -1, 6, 5});
    run(call);
    EXPECT_EQ(test::entries_bytes(call.state, 2, 6), test::entries_bytes(before, 2, 6));
    expect_reference(call);
  }
}

TEST_P(KdaPrefillStateTest, AFixedChunkAllowsSnapshotsAtItsMultiples) {
  for (const KdaLayer& shape : kLayers) {
    SCOPED_TRACE(testing::Message() << "K " << shape.head_dim_k);
    for (const int32_t chunk : {16, 32, 64}) {
      PrefillCase call(shape, {130}, 9);
      call.problem.chunk = chunk;
      call.with_pool(6, {0}, {0}).with_snapshots({0, 0, 0}, {16, 32, 96}, {2, 3, 4});
      const Tensor before = call.state;
      expect_reference(call);
      run(call);
      EXPECT_EQ(entry_bytes(call.state, 2) != entry_bytes(before, 2), chunk == 16);
      EXPECT_EQ(entry_bytes(call.state, 3) != entry_bytes(before, 3), chunk <= 32);
      EXPECT_EQ(entry_bytes(call.state, 4) != entry_bytes(before, 4), chunk <= 32);
    }
  }
}

TEST_P(KdaPrefillStateTest, DenseStatesBeforeEveryChunk) {
  for (const KdaLayer& shape : kLayers) {
    SCOPED_TRACE(testing::Message() << "K " << shape.head_dim_k);
    for (const int64_t chunk : {0, 16}) {
      for (const StateLayout layout : {StateLayout::kVk, StateLayout::kKv}) {
        PrefillCase call(shape, {130, 0, 64, 5}, 10);
        call.problem.chunk = chunk;
        call.problem.state_layout = layout;
        call.with_states();
        const Tensor before = call.state;
        const int64_t entries = chunk == 0 ? 3 + 0 + 1 + 1 : 9 + 0 + 4 + 1;
        call.chunk_states = test::random_states(shape, entries + 2, 11, layout);
        const Tensor untouched = call.chunk_states;
        PrefillCase expected = call;
        expected.run({"ref"});
        PrefillCase cut = call;
        run(call);
        EXPECT_TRUE(test::within(call.chunk_states.view(), expected.chunk_states.view(),
                                 limits().state_fp32));
        EXPECT_EQ(entry_bytes(call.chunk_states, 0), entry_bytes(before, 0));
        EXPECT_EQ(entry_bytes(call.chunk_states, entries - 1), entry_bytes(before, 3));
        EXPECT_EQ(test::entries_bytes(call.chunk_states, entries, entries + 2),
                  test::entries_bytes(untouched, entries, entries + 2));
        // An array that is too short takes what fits.
        test::GuardedMemory memory(2 * call.chunk_states.bytes().size() /
                                   static_cast<size_t>(entries + 2));
        KdaPrefillTensors tensors = cut.tensors();
        tensors.chunk_states.shape[0] = 2;
        tensors.chunk_states.data = memory.data();
        cut.run(options(), tensors);
        EXPECT_TRUE(std::equal(
            call.chunk_states.bytes().begin(),
            call.chunk_states.bytes().begin() +
                2 * static_cast<int64_t>(call.chunk_states.bytes().size()) / (entries + 2),
            static_cast<const uint8_t*>(memory.data())));
      }
    }
  }
}

TEST_P(KdaPrefillStateTest, StagedAndDirectCommitsGiveTheSameBits) {
  for (const KdaLayer& shape : kLayers) {
    SCOPED_TRACE(testing::Message() << "K " << shape.head_dim_k);
    PrefillCase direct(shape, {130, 0, 20}, 11);
    direct.with_pool(9, {0, 1, 2}, {0, 3, -1}).with_snapshots({0, 2}, {64, 20}, {5, 6});
    PrefillCase staged = direct;
    staged.problem.commit = CommitMode::kStaged;
    run(direct);
    run(staged);
    EXPECT_EQ(staged.state.bytes(), direct.state.bytes());
    EXPECT_EQ(staged.out.bytes(), direct.out.bytes());
  }
}

TEST_P(KdaPrefillStateTest, AFailureBeforeTheStagedCommitLeavesThePoolBitIdentical) {
  PrefillCase call(kSmall, {130, 0, 20}, 12);
  call.problem.commit = CommitMode::kStaged;
  call.with_pool(9, {0, 1, 2}, {0, 3, -1}).with_snapshots({0, 2}, {64, 20}, {5, 6});
  const std::vector<uint8_t> before = call.state.bytes();
  int64_t stages = 0;
  for (bool failed = true; failed; ++stages) {
    const internal::LaunchFault fault(stages + 1);
    try {
      run(call);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kDevice);
    }
    failed = fault.fired();
    EXPECT_EQ(call.state.bytes() == before, failed) << "stage " << stages;
    ASSERT_LT(stages, 100);
  }
  EXPECT_GE(stages, 3);  // the run itself, the commit, and the one that went through
}

TEST_P(KdaPrefillStateTest, RowsOfNoSequenceAreNeitherReadNorWritten) {
  for (const DType gate_dtype : {DType::kF32, DType::kBf16}) {
    KdaLayer layer = kda_layer(2, 4, 20, 12);
    layer.gate.dtype = gate_dtype;
    layer.normalise = true;
    PrefillCase call(layer, {70}, 13);
    call.q_indptr = Tensor::i32({3}, {3, 40, 65});
    call.problem.max_sequences = 2;
    call.with_states();
    PrefillCase clean = call;
    run(clean);
    for (Tensor* tensor :
         {&call.inputs.q, &call.inputs.k, &call.inputs.v, &call.inputs.g, &call.inputs.beta}) {
      const int64_t row = tensor->view().num_elements() / 70;
      test::fill_elements(*tensor, 0, 3 * row, std::nanf(""));
      test::fill_elements(*tensor, 65 * row, 70 * row, std::nanf(""));
    }
    run(call);
    EXPECT_EQ(call.out.bytes(), clean.out.bytes());
    EXPECT_EQ(call.state.bytes(), clean.state.bytes());
    EXPECT_TRUE(all_bytes(test::entries_bytes(call.out, 0, 3), 0x55));
    EXPECT_TRUE(all_bytes(test::entries_bytes(call.out, 65, 70), 0x55));
    expect_reference(call);
  }
}

TEST_P(KdaPrefillStateTest, OffsetsAreCutAndNeverFall) {
  for (const KdaLayer& shape : kLayers) {
    SCOPED_TRACE(testing::Message() << "K " << shape.head_dim_k);
    PrefillCase call(shape, {40}, 14);
    call.q_indptr = Tensor::i32({6}, {-3, 10, 4, 30, -7, INT32_MAX});
    call.problem.max_sequences = 5;
    call.with_states();
    PrefillCase clean = call;
    clean.q_indptr = Tensor::i32({6}, {0, 10, 10, 30, 30, 40});
    run(call);
    run(clean);
    EXPECT_EQ(call.out.bytes(), clean.out.bytes());
    EXPECT_EQ(call.state.bytes(), clean.state.bytes());
    // The same as 64-bit offsets, one beyond 32 bits.
    PrefillCase wide = clean;
    wide.state = test::random_states(shape, 5, 7);
    wide.q_indptr =
        Tensor::from<int64_t>(DType::kI64, {6}, {-3, 10, 4, 30, -7, (int64_t{1} << 40) + 2});
    run(wide);
    EXPECT_EQ(wide.out.bytes(), clean.out.bytes());
    EXPECT_EQ(wide.state.bytes(), clean.state.bytes());
  }
}

TEST_P(KdaPrefillStateTest, StridesAreHonouredAndGapsNotRead) {
  for (const auto& [dim_k, dim_v] : std::vector<std::pair<int64_t, int64_t>>{{20, 12}, {64, 16}}) {
    for (const DType type : {DType::kF32, DType::kBf16}) {
      KdaLayer layer = kda_layer(2, 4, dim_k, dim_v);
      layer.gate.dtype = layer.beta_dtype = type;
      layer.state_dtype = type;
      PrefillCase call(layer, {70, 5}, 15);
      call.with_pool(5, {1, 3}, {1, 4}).with_snapshots({0}, {64}, {0});
      call.chunk_states = test::random_states(layer, 3, 16);
      PrefillCase packed = call;
      run(packed);
      const test::Spread q(call.inputs.q, 8), k(call.inputs.k, 24), v(call.inputs.v, 3);
      const test::Spread g(call.inputs.g, 5), beta(call.inputs.beta, 7),
          bias(call.inputs.dt_bias, 2);
      const test::Spread state(call.state, 16), chunk_states(call.chunk_states, 4),
          out(call.out, 9);
      KdaPrefillTensors tensors = call.tensors();
      tensors.q = q.view();
      tensors.k = k.view();
      tensors.v = v.view();
      tensors.g = g.view();
      tensors.beta = beta.view();
      tensors.dt_bias = bias.view();
      tensors.state = state.view();
      tensors.chunk_states = chunk_states.view();
      tensors.out = out.view();
      call.run(options(), tensors);
      const auto expect_equal = [](const test::Spread& spread, const Tensor& expected,
                                   int64_t gap) {
        EXPECT_EQ(test::to_doubles(spread.view()), test::to_doubles(expected.view()));
        const int64_t entries = spread.view().shape[0];
        const auto size = static_cast<int64_t>(size_of(spread.view().dtype));
        for (int64_t i = 0; i < entries; ++i) {
          const std::vector<uint8_t> bytes = entry_bytes(spread.storage(), i);
          EXPECT_TRUE(all_bytes({bytes.end() - gap * size, bytes.end()}, 0xFF)) << "gap " << i;
        }
      };
      expect_equal(state, packed.state, 16);
      expect_equal(chunk_states, packed.chunk_states, 4);
      expect_equal(out, packed.out, 9);
    }
  }
}

TEST_P(KdaPrefillStateTest, TensorsMayEndAtAnUnreadablePage) {
  KdaLayer layer = kda_layer(1, 2, 60, 20);
  layer.normalise = true;
  PrefillCase call(layer, {37}, 17);
  call.with_states();
  PrefillCase plain = call;
  run(plain);
  KdaPrefillTensors tensors = call.tensors();
  test::GuardedTensors memory;
  memory.guard(tensors.q);
  memory.guard(tensors.k);
  memory.guard(tensors.v);
  memory.guard(tensors.g);
  memory.guard(tensors.beta);
  memory.guard(tensors.a_log);
  memory.guard(tensors.dt_bias);
  memory.guard(tensors.q_indptr);
  memory.guard(tensors.state);
  memory.guard(tensors.out);
  const KdaPrefill plan = KdaPrefill::plan(call.problem, GetParam().device(), options());
  test::GuardedMemory scratch((plan.workspace_bytes() + 63) / 64 * 64);
  plan.run(tensors, {scratch.data(), plan.workspace_bytes()});
  EXPECT_EQ(test::to_doubles(tensors.out), test::to_doubles(plain.out.view()));
  EXPECT_EQ(test::to_doubles(tensors.state), test::to_doubles(plain.state.view()));
}

TEST_P(KdaPrefillStateTest, TheLastSlotMayEndAtAnUnreadablePageBesidePadding) {
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    KdaLayer layer = kda_layer(1, 2, 20, 12);
    layer.state_dtype = dtype;
    PrefillCase call(layer, {20, 17, 5}, 23);
    call.with_pool(3, {-1, 2, -1}, {-1, 2, -1});
    PrefillCase plain = call;
    run(plain);
    test::GuardedTensors memory;
    KdaPrefillTensors tensors = call.tensors();
    memory.guard(tensors.state);
    call.run(options(), tensors);
    EXPECT_EQ(test::to_doubles(tensors.state), test::to_doubles(plain.state.view()));
    EXPECT_EQ(call.out.bytes(), plain.out.bytes());
  }
}

TEST_P(KdaPrefillStateTest, MoreThan65535SequencesTimesHeads) {
  const int64_t sequences = 1100;
  PrefillCase call(kda_layer(4, 60, 2, 3), std::vector<int32_t>(sequences, 1), 18);
  expect_reference(call.with_states());
}

TEST_P(KdaPrefillStateTest, PoolsBeyond32Bits) {
  if (GetParam().kind == DeviceKind::kCuda) GTEST_SKIP() << test::kNoSparseMapping;
  PrefillCase call(kSmall, {70, 20}, 19);
  call.with_pool(3, {2, 0}, {1, 0}).with_snapshots({0}, {64}, {2});
  call.problem.max_snapshots = 0;
  call.snapshot_seq = call.snapshot_pos = call.snapshot_slot = {};
  PrefillCase expected = call;
  run(expected);
  const int64_t pitch = (int64_t{1} << 31) + 16;
  const int64_t block = call.state.view().num_elements() / 3;
  test::SparseMapping pool(static_cast<size_t>(2 * pitch + block) * sizeof(float));
  for (int64_t slot = 0; slot < 3; ++slot) {
    std::copy_n(call.state.data<float>() + slot * block, block,
                static_cast<float*>(pool.data()) + slot * pitch);
  }
  KdaPrefillTensors tensors = call.tensors();
  tensors.state.data = pool.data();
  tensors.state.stride[0] = pitch;
  call.run(options(), tensors);
  for (int64_t slot = 0; slot < 3; ++slot) {
    EXPECT_TRUE(std::equal(expected.state.data<float>() + slot * block,
                           expected.state.data<float>() + (slot + 1) * block,
                           static_cast<const float*>(pool.data()) + slot * pitch));
  }
  EXPECT_EQ(call.out.bytes(), expected.out.bytes());
}

TEST_P(KdaPrefillStateTest, CheckFindsFaultsBeforeAnythingIsWritten) {
  for (const KdaLayer& shape : kLayers) {
    SCOPED_TRACE(testing::Message() << "K " << shape.head_dim_k);
    struct Damage {
      KdaFault fault;
      int32_t entry;
      std::function<void(PrefillCase&)> apply;
    };
    const auto slots = [](Tensor PrefillCase::*list, std::vector<int32_t> values) {
      return [=](PrefillCase& call) { call.*list = Tensor::i32({3}, values); };
    };
    const std::vector<Damage> damages = {
        {KdaFault::kOffsets, 2,
         [](PrefillCase& call) {
           call.q_indptr = Tensor::i32({4}, {0, 130, 129, 150});
         }},
        {KdaFault::kOffsets, 3,
         [](PrefillCase& call) {
           call.q_indptr = Tensor::i32({4}, {0, 130, 130, 151});
         }},
        {KdaFault::kOffsets, 0,
         [](PrefillCase& call) {
           call.q_indptr = Tensor::i32({4}, {-1, 130, 130, 150});
         }},
        {KdaFault::kInSlot, 1, slots(&PrefillCase::in_slot, {0, 9, 2})},
        {KdaFault::kOutSlot, 2, slots(&PrefillCase::out_slot, {0, 3, 9})},
        {KdaFault::kDuplicateOutSlot, 2, slots(&PrefillCase::out_slot, {0, 3, 0})},
        {KdaFault::kSnapshotSequence, 1, slots(&PrefillCase::snapshot_seq, {0, 3, 2})},
        {KdaFault::kSnapshotPosition, 0, slots(&PrefillCase::snapshot_pos, {63, 0, 20})},
        {KdaFault::kSnapshotSlot, 1, slots(&PrefillCase::snapshot_slot, {5, 9, 6})},
        {KdaFault::kSnapshotSlot, 2, slots(&PrefillCase::snapshot_slot, {5, 7, 3})},
        {KdaFault::kSnapshotSlot, 1, slots(&PrefillCase::snapshot_slot, {5, 5, 6})},
    };
    for (const Damage& damage : damages) {
      SCOPED_TRACE(testing::Message() << to_string(damage.fault) << " " << damage.entry);
      PrefillCase call(shape, {130, 0, 20}, 20);
      call.problem.check = true;
      call.with_pool(9, {0, 1, 2}, {0, 3, -1}).with_snapshots({0, 0, 2}, {64, 0, 20}, {5, 7, 6});
      call.report = Tensor(DType::kI32, {2});
      PrefillCase good = call;
      run(good);
      EXPECT_EQ(good.report.values<int32_t>(), (std::vector<int32_t>{0, -1}));
      damage.apply(call);
      const std::vector<uint8_t> before = call.state.bytes();
      if (GetParam().kind == DeviceKind::kCpu) {
        EXPECT_THROW(run(call), Error);
      } else {
        run(call);
      }
      EXPECT_EQ(call.report.values<int32_t>(),
                (std::vector<int32_t>{static_cast<int32_t>(damage.fault), damage.entry}));
      EXPECT_EQ(call.state.bytes(), before);
      EXPECT_TRUE(all_bytes(call.out.bytes(), 0x55));
    }
  }
}

TEST_P(KdaPrefillStateTest, RunDoesNotAllocate) {
  PrefillCase call(kSmall, {130, 20}, 21);
  call.problem.check = true;
  call.problem.commit = CommitMode::kStaged;
  call.with_pool(5, {0, 1}, {0, 2}).with_snapshots({0}, {64}, {3});
  for (const int threads : {1, 2}) {
    const KdaPrefill plan = KdaPrefill::plan(call.problem, GetParam().device(threads), options());
    HostBuffer scratch(plan.workspace_bytes());
    const KdaPrefillTensors tensors = call.tensors();
    for (int warm_up = 0; warm_up < 5; ++warm_up) plan.run(tensors, scratch.workspace());
    const test::AllocationCounter counter;
    plan.run(tensors, scratch.workspace());
    EXPECT_EQ(counter.count(), 0);
  }
}

TEST_P(KdaPrefillStateTest, WorkspaceDependsOnBoundsAlone) {
  PrefillCase call(kSmall, {130, 20}, 22);
  call.problem.commit = CommitMode::kStaged;
  size_t previous = 0;
  for (const int64_t rows : {0, 1, 150, 1000}) {
    call.problem.max_rows = rows;
    const KdaPrefill plan = KdaPrefill::plan(call.problem, GetParam().device(), options());
    EXPECT_GE(plan.workspace_bytes(), previous);
    previous = plan.workspace_bytes();
  }
}

TEST(KdaPrefill, RefusesWhatItsTablesDoNotList) {
  const Device cpu = Device::cpu(1);
  PrefillCase good(kSmall, {20, 5}, 1);
  good.with_pool(4, {0, 1}, {2, -1}).with_snapshots({0}, {0}, {3});
  const auto refuse_plan = [&](auto&& change) {
    KdaPrefillProblem problem = good.problem;
    change(problem);
    EXPECT_THROW(KdaPrefill::plan(problem, cpu), Error);
  };
  refuse_plan([](KdaPrefillProblem& p) { p.max_rows = -1; });
  refuse_plan([](KdaPrefillProblem& p) { p.max_sequences = int64_t{1} << 31; });
  refuse_plan([](KdaPrefillProblem& p) { p.max_snapshots = -1; });
  refuse_plan([](KdaPrefillProblem& p) { p.chunk = 48; });
  refuse_plan([](KdaPrefillProblem& p) { p.v_columns = 48, p.layer.head_dim_v = 96; });
  refuse_plan([](KdaPrefillProblem& p) { p.v_columns = 32, p.layer.head_dim_v = 48; });
  refuse_plan([](KdaPrefillProblem& p) { p.state_layout = StateLayout::kKv; });  // snapshots
  refuse_plan([](KdaPrefillProblem& p) { p.layer.num_heads = 0; });
  refuse_plan([](KdaPrefillProblem& p) { p.layer.num_value_heads = 0; });
  refuse_plan([](KdaPrefillProblem& p) { p.layer.num_heads = 4; });  // 2 is no multiple
  refuse_plan([](KdaPrefillProblem& p) { p.layer.head_dim_k = 257; });
  refuse_plan([](KdaPrefillProblem& p) { p.layer.head_dim_v = 0; });
  refuse_plan([](KdaPrefillProblem& p) { p.layer.scale = -1; });
  refuse_plan([](KdaPrefillProblem& p) { p.layer.scale = std::nanf(""); });
  refuse_plan([](KdaPrefillProblem& p) { p.layer.gate.dtype = DType::kI32; });
  refuse_plan([](KdaPrefillProblem& p) { p.layer.state_dtype = DType::kU8; });
  refuse_plan([](KdaPrefillProblem& p) { p.layer.beta_dtype = DType::kNone; });
  for (const float bound : {0.0f, -5.001f, 1.0f, std::nanf("")}) {
    refuse_plan([bound](KdaPrefillProblem& p) {
      p.layer.gate.kind = GateKind::kLowerBound;
      p.layer.gate.lower_bound = bound;
    });
  }

  const KdaPrefill plan = KdaPrefill::plan(good.problem, cpu);
  const auto refuse_run = [&](auto&& change) {
    PrefillCase call = good;
    const std::vector<uint8_t> before = call.state.bytes();
    KdaPrefillTensors tensors = call.tensors();
    change(tensors);
    EXPECT_THROW(test::run(plan, tensors), Error);
    EXPECT_TRUE(all_bytes(call.out.bytes(), 0x55));
    EXPECT_EQ(call.state.bytes(), before);
  };
  refuse_run([](KdaPrefillTensors& t) { t.q = {}; });
  refuse_run([](KdaPrefillTensors& t) { t.k.shape[2] = 15; });
  refuse_run([](KdaPrefillTensors& t) { t.v.shape[0] = 24; });
  refuse_run([](KdaPrefillTensors& t) { t.g.dtype = DType::kF32; });
  refuse_run([](KdaPrefillTensors& t) { t.beta.dtype = DType::kBf16; });
  refuse_run([](KdaPrefillTensors& t) { t.g.stride[2] = 2; });
  refuse_run([](KdaPrefillTensors& t) { t.a_log = {}; });
  refuse_run([](KdaPrefillTensors& t) { t.dt_bias.shape[0] = 1; });
  refuse_run([](KdaPrefillTensors& t) { t.q_indptr.shape[0] = 0; });
  refuse_run([](KdaPrefillTensors& t) { t.q_indptr.shape[0] = 4; });
  refuse_run([](KdaPrefillTensors& t) { t.q_indptr.dtype = DType::kF32; });
  refuse_run([](KdaPrefillTensors& t) { t.state = {}; });
  refuse_run([](KdaPrefillTensors& t) { t.state.dtype = DType::kBf16; });
  refuse_run([](KdaPrefillTensors& t) { t.state.shape[2] = 16; });
  refuse_run([](KdaPrefillTensors& t) { t.in_slot.shape[0] = 1; });
  refuse_run([](KdaPrefillTensors& t) { t.out_slot.dtype = DType::kI64; });
  refuse_run([](KdaPrefillTensors& t) { t.in_slot = t.out_slot = {}; });  // a pool without lists
  refuse_run([](KdaPrefillTensors& t) { t.snapshot_seq = {}; });
  refuse_run([](KdaPrefillTensors& t) { t.snapshot_pos.shape[0] = 2; });
  refuse_run([](KdaPrefillTensors& t) { t.snapshot_slot = {}; });
  refuse_run([](KdaPrefillTensors& t) { t.out.shape[0] = 24; });
  refuse_run([](KdaPrefillTensors& t) { t.chunk_states = t.out; });
  refuse_run([](KdaPrefillTensors& t) { t.out.stride[0] = 8; });  // rows that overlap
  refuse_run([](KdaPrefillTensors& t) { t.state.stride[0] = 0; });
  Tensor report(DType::kI32, {2});
  refuse_run([&](KdaPrefillTensors& t) { t.report = report; });  // without check
}

}  // namespace
}  // namespace fovea
