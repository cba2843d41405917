#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "fovea/error.h"
#include "fovea/kda_compat.h"
#include "fovea/kda_prefill.h"
#include "fovea/log.h"
#include "src/core/fault_injection.h"
#include "src/serving/kda_extend_dense.h"
#include "tests/kda/kda_case.h"

namespace fovea::compat {
namespace {

using test::Tensor;

constexpr int64_t kDim = 128, kSlots = 26;

KdaExtendProblem problem_of(int64_t max_sequences = 20, int64_t max_rows = 600, int64_t heads = 1) {
  KdaExtendProblem problem;
  problem.num_heads = problem.num_value_heads = heads;
  problem.max_rows = max_rows;
  problem.max_sequences = max_sequences;
  problem.max_tracks = 4;
  problem.lower_bound = -5.0f;
  return problem;
}

/// The elements of rows [begin, end) of axis 1 of [B, T, ..] are all zero in row `b`.
template <class T>
bool zeros(const ConstTensorView& view, int64_t b, int64_t begin, int64_t end) {
  const int64_t width = view.num_elements() / view.shape[0] / view.shape[1];
  const T* const data = static_cast<const T*>(view.data) + b * view.shape[1] * width;
  return std::all_of(data + begin * width, data + end * width, [](T value) {
    if constexpr (std::is_same_v<T, float>)
      return value == 0;
    else
      return value.bits == 0;
  });
}

/// What the implementations of the tests saw and do.
struct Seen {
  std::vector<std::pair<int64_t, int64_t>> groups;  // rows, bucket
  int64_t throws_at = -1;                           // group of the run
};

/// Takes groups of equal length, demands that padding is neutral and skips it: each sequence to the
/// last row that is not neutral.
class Shortened final : public KdaDense {
 public:
  Shortened(const KdaDenseBounds& bounds, Seen* seen) : seen_(seen), plan_(plan_of(bounds)) {}
  static KdaDenseFactory factory(Seen* seen) {
    return [seen](const KdaDenseBounds& bounds) {
      return std::make_unique<const Shortened>(bounds, seen);
    };
  }

  std::string_view name() const noexcept override { return "shortened"; }
  size_t workspace_bytes() const noexcept override { return plan_.workspace_bytes(); }

  void run(const KdaDenseGroup& group, Workspace workspace) const override {
    seen_->groups.emplace_back(group.q.shape[0], group.q.shape[1]);
    const bool fails = seen_->throws_at == static_cast<int64_t>(seen_->groups.size()) - 1;
    for (int64_t b = 0; b < group.q.shape[0]; ++b) {
      const int64_t bucket = group.q.shape[1];
      const auto* const strengths =
          static_cast<const float*>(group.beta.data) + b * bucket * group.beta.shape[2];
      int64_t length = bucket;
      while (length > 0 && strengths[(length - 1) * group.beta.shape[2]] == 0) --length;
      EXPECT_TRUE(zeros<bf16_t>(group.q, b, length, bucket));
      EXPECT_TRUE(zeros<bf16_t>(group.k, b, length, bucket));
      EXPECT_TRUE(zeros<bf16_t>(group.v, b, length, bucket));
      EXPECT_TRUE(zeros<float>(group.g, b, length, bucket));
      EXPECT_TRUE(zeros<float>(group.beta, b, length, bucket));
      run_one(group, b, length, workspace);
    }
    if (fails) throw std::runtime_error("no more groups today");
  }

 private:
  static KdaPrefill plan_of(const KdaDenseBounds& bounds) {
    KdaPrefillProblem problem;
    problem.layer = bounds.layer;
    problem.max_rows = bounds.max_bucket;
    problem.max_sequences = 1;
    problem.state_layout = StateLayout::kKv;
    return KdaPrefill::plan(problem, bounds.device);
  }

  void run_one(const KdaDenseGroup& group, int64_t b, int64_t length, Workspace workspace) const {
    const auto rows = [&](auto view) {
      view.data = reinterpret_cast<decltype(view.data)>(reinterpret_cast<uintptr_t>(view.data) +
                                                        static_cast<uintptr_t>(b * view.stride[0]) *
                                                            size_of(view.dtype));
      --view.rank;
      for (size_t axis = 0; axis < static_cast<size_t>(view.rank); ++axis) {
        view.shape[axis] = view.shape[axis + 1];
        view.stride[axis] = view.stride[axis + 1];
      }
      return slice_rows(view, 0, length);
    };
    const std::vector<int32_t> offsets = {0, static_cast<int32_t>(length)};
    KdaPrefillTensors tensors;
    tensors.q = rows(group.q);
    tensors.k = rows(group.k);
    tensors.v = rows(group.v);
    tensors.g = rows(group.g);
    tensors.beta = rows(group.beta);
    tensors.out = rows(group.out);
    tensors.q_indptr = make_tensor(static_cast<const void*>(offsets.data()), DType::kI32, {2});
    tensors.state = slice_rows(group.final_state, b, b + 1);
    std::memcpy(tensors.state.data, slice_rows(group.initial_state, b, b + 1).data,
                static_cast<size_t>(tensors.state.num_elements()) * sizeof(float));
    plan_.run(tensors, workspace);
  }

  Seen* seen_;
  KdaPrefill plan_;
};

/// One call of sequences of random rows, its slots permuted.
struct Call {
  Call(const KdaExtendProblem& problem_in, const std::vector<int32_t>& lengths_in,
       uint64_t seed = 11)
      : problem(problem_in), lengths(lengths_in) {
    KdaLayer layer = test::kda_layer(problem.num_heads, problem.num_value_heads, problem.head_dim_k,
                                     problem.head_dim_v);
    layer.normalise = true;
    layer.gate.kind = problem.lower_bound ? GateKind::kLowerBound : GateKind::kSoftplus;
    layer.gate.dtype = problem.g_dtype;
    layer.beta_dtype = problem.beta_dtype;
    layer.state_dtype = problem.state_dtype;
    rows = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
    inputs = test::KdaInputs(layer, rows, seed);
    states = test::random_states(layer, kSlots, seed + 1);
    out = Tensor(DType::kBf16, {1, rows, problem.num_value_heads, problem.head_dim_v});
    out.fill_bytes(0xFF);
    for (size_t n = 0; n < lengths.size(); ++n) {
      slots.push_back(static_cast<int32_t>((n * 7 + 3) % kSlots));
    }
  }

  KdaExtendTensors tensors() {
    offsets = test::offsets_of(lengths);
    slot_list = Tensor::i32({static_cast<int64_t>(slots.size())}, slots);
    offset_list = Tensor::i32({static_cast<int64_t>(offsets.size())}, offsets);
    KdaExtendTensors t;
    inputs.bind(&t);
    t.ssm_states = states;
    t.cache_indices = slot_list;
    t.query_start_loc = offset_list;
    t.extend_seq_lens_cpu = std::span<const int32_t>(lengths);
    t.out = out;
    return t;
  }

  KdaExtendResult run(const KdaExtend& plan, const KdaExtendTensors& t) {
    std::vector<uint8_t> memory(plan.workspace_bytes() + 64, 0xFF);  // NaN wherever it is not set
    const auto misalignment = reinterpret_cast<uintptr_t>(memory.data()) % 64;
    return plan.run(t, {memory.data() + (64 - misalignment) % 64, plan.workspace_bytes()});
  }
  KdaExtendResult run(const KdaExtend& plan) { return run(plan, tensors()); }

  KdaExtendProblem problem;
  std::vector<int32_t> lengths, slots, offsets;
  int64_t rows = 0;
  test::KdaInputs inputs;
  Tensor states, out, slot_list, offset_list;
};

KdaExtend plan_of(KdaExtendProblem problem, KdaDenseFactory dense = {}) {
  problem.dense = std::move(dense);
  return KdaExtend::plan(problem, Device::cpu(1));
}

/// Outputs and states of both calls agree to fp32 rounding.
void expect_equal(const Call& actual, const Call& expected) {
  EXPECT_TRUE(test::within(actual.out.view(), expected.out.view(), 1e-3));
  EXPECT_TRUE(test::within(actual.states.view(), expected.states.view(),
                           actual.problem.state_dtype == DType::kF32 ? 1e-5 : 1e-3));
}

TEST(KdaExtend, GroupsEqualTheNativePathForEveryALogAndGate) {
  for (const float a_log : {-8.0f, -5.0f, 0.0f, 4.0f}) {
    for (const bool bounded : {true, false}) {
      KdaExtendProblem problem = problem_of(2, 80);
      if (!bounded) problem.lower_bound.reset();
      Call dense(problem, {70, 5});
      test::fill(dense.inputs.a_log, a_log);
      Call native = dense;
      const KdaExtend by_groups = plan_of(problem, kda_dense_prefill);
      dense.run(by_groups);
      native.run(plan_of(problem));
      EXPECT_EQ(by_groups.routes().dense, 1);
      expect_equal(dense, native);
      EXPECT_NE(dense.states.bytes(), Call(problem, {70, 5}).states.bytes());
    }
  }
}

TEST(KdaExtend, RawGatesOfMinusThousandAreNoPaddingWhereActivatedZerosAre) {
  // exp(-5) * 1000 = 6.7: sigmoid leaves 0.0012 of the bound -5, a decay of 0.006 a row, of 12 over
  // 2048 rows.
  KdaPrefillProblem problem;
  problem.layer = test::kda_layer(1, 1, 16, 16);
  problem.layer.gate.kind = GateKind::kLowerBound;
  problem.max_rows = 2048;
  problem.max_sequences = 1;
  for (const bool raw : {true, false}) {
    if (!raw) problem.layer.gate = {.kind = GateKind::kGiven, .dtype = DType::kBf16};
    const KdaPrefill plan = KdaPrefill::plan(problem, Device::cpu(1));
    test::KdaInputs rows(problem.layer, 2048, 1);
    for (Tensor* tensor : {&rows.q, &rows.k, &rows.v, &rows.beta}) test::fill(*tensor, 0);
    test::fill(rows.g, raw ? -1000.0f : 0.0f);
    if (raw) test::fill(rows.a_log, -5.0f);
    if (raw) test::fill(rows.dt_bias, 0.0f);
    Tensor states = test::random_states(problem.layer, 1, 2);
    const Tensor before = states;
    Tensor out(DType::kBf16, {2048, 1, 16});
    const Tensor offsets = Tensor::i32({2}, {0, 2048});
    KdaPrefillTensors tensors;
    rows.bind(&tensors);
    tensors.q_indptr = offsets;
    tensors.state = states;
    tensors.out = out;
    HostBuffer workspace(plan.workspace_bytes());
    plan.run(tensors, workspace.workspace());
    if (raw) {
      EXPECT_LT(test::rms(states.view()), 1e-4 * test::rms(before.view()));
    } else {
      EXPECT_EQ(states.bytes(), before.bytes());
    }
  }
}

TEST(KdaExtend, NormalisesAndScalesAsKdaPrefillDoes) {
  Call call(problem_of(), {33, 70});
  Tensor states = call.states;
  Tensor out(DType::kBf16, {call.rows, 1, kDim});
  KdaPrefillProblem problem;
  problem.layer = call.inputs.layer;  // normalise, scale K^-1/2
  problem.max_rows = call.rows;
  problem.max_sequences = 2;
  const KdaPrefill plan = KdaPrefill::plan(problem, Device::cpu(1), {.implementation = "ref"});
  const KdaExtendTensors t = call.tensors();
  KdaPrefillTensors tensors;
  call.inputs.bind(&tensors);
  tensors.q_indptr = t.query_start_loc;
  tensors.in_slot = tensors.out_slot = t.cache_indices;
  tensors.state = states;
  tensors.out = out;
  HostBuffer workspace(plan.workspace_bytes());
  plan.run(tensors, workspace.workspace());
  call.run(plan_of(call.problem));
  // q and k rounded to bf16: 2^-9 at most, each.
  ConstTensorView packed = call.out.view();
  packed.rank = 3;
  packed.shape = out.view().shape;
  packed.stride = out.view().stride;
  EXPECT_TRUE(test::within(packed, out.view(), 6e-3));
  EXPECT_TRUE(test::within(call.states.view(), states.view(), 6e-3));
}

TEST(KdaExtend, OneToTwentySequencesGoByGroupsOfEight) {
  Seen seen;
  const KdaExtend by_groups = plan_of(problem_of(), Shortened::factory(&seen));
  const KdaExtend direct = plan_of(problem_of());
  for (int64_t count = 1; count <= 20; ++count) {
    std::vector<int32_t> lengths;
    for (int64_t n = 0; n < count; ++n) lengths.push_back(static_cast<int32_t>(1 + (n * 5) % 17));
    Call dense(problem_of(), lengths, static_cast<uint64_t>(count));
    dense.slots[static_cast<size_t>(count / 2)] = -1;
    if (count > 8) dense.slots[8] = kSlots;  // outside, as padding
    Call native = dense;
    seen.groups.clear();
    dense.run(by_groups);
    native.run(direct);
    expect_equal(dense, native);
    std::vector<std::pair<int64_t, int64_t>> expected;
    for (int64_t first = 0; count > 1 && first < count; first += 8) {
      expected.emplace_back(std::min<int64_t>(8, count - first), 2048);
    }
    EXPECT_EQ(seen.groups, expected) << count;
  }
  EXPECT_EQ(by_groups.routes().single, 1);
  EXPECT_EQ(by_groups.routes().dense, 19);
  EXPECT_EQ(by_groups.routes().groups, 7 * 1 + 8 * 2 + 4 * 3);
  EXPECT_EQ(direct.routes().native, 20);
}

TEST(KdaExtend, PaddingSlotsLeaveEveryStateAlone) {
  Seen seen;
  Call call(problem_of(), {3, 9});
  call.slots = {-1, -7};
  const std::vector<uint8_t> before = call.states.bytes();
  call.run(plan_of(call.problem, Shortened::factory(&seen)));
  EXPECT_EQ(seen.groups.size(), 1u);
  EXPECT_EQ(call.states.bytes(), before);
  for (const double value : test::to_doubles(call.out.view())) ASSERT_TRUE(std::isfinite(value));
}

TEST(KdaExtend, TheBucketIsTheSmallestThatCoversTheLongestMember) {
  EXPECT_EQ(internal::extend_bucket(1), 2048);
  EXPECT_EQ(internal::extend_bucket(2048), 2048);
  EXPECT_EQ(internal::extend_bucket(2049), 4096);
  EXPECT_EQ(internal::extend_bucket(4097), 8192);
  EXPECT_EQ(internal::extend_bucket(8193), 16384);
  EXPECT_EQ(internal::extend_bucket(16384), 16384);
  Seen seen;
  Call dense(problem_of(9, 2100), {2, 2049, 2, 2, 2, 2, 2, 2, 3});
  Call native = dense;
  dense.run(plan_of(dense.problem, Shortened::factory(&seen)));
  native.run(plan_of(native.problem));
  expect_equal(dense, native);
  const std::vector<std::pair<int64_t, int64_t>> expected = {{8, 4096}, {1, 2048}};
  EXPECT_EQ(seen.groups, expected);
}

TEST(KdaExtend, StatesOfBf16AreRoundedOnce) {
  KdaExtendProblem problem = problem_of();
  problem.state_dtype = DType::kBf16;
  Seen seen;
  Call dense(problem, {40, 66});
  Call native = dense;
  dense.run(plan_of(problem, Shortened::factory(&seen)));
  native.run(plan_of(problem));
  EXPECT_EQ(seen.groups.size(), 1u);
  expect_equal(dense, native);
}

/// Collects log lines while it lives.
struct Sink {
  Sink() {
    set_log_sink([this](LogLevel level, std::string_view text) {
      if (text.find("kda_extend") != std::string_view::npos) lines.emplace_back(level, text);
    });
  }
  ~Sink() { set_log_sink({}); }
  int64_t count(LogLevel level, const std::string& part) const {
    return std::count_if(lines.begin(), lines.end(), [&](const auto& line) {
      return line.first == level && line.second.find(part) != std::string::npos;
    });
  }
  std::vector<std::pair<LogLevel, std::string>> lines;
};

TEST(KdaExtend, AFailureAnywhereLeavesTheStatesAndTheNextPathRunsFromThem) {
  for (const bool strict : {true, false}) {
    Seen seen;
    KdaExtendProblem problem = problem_of();
    problem.strict = strict;
    const KdaExtend plan = plan_of(problem, Shortened::factory(&seen));
    const Call fresh(problem, {3, 1, 2, 4, 2, 1, 5, 2, 66, 3});
    Call native = fresh;
    native.run(plan_of(problem));
    // Two groups with their gates and sequences, and the commit.
    const int64_t places = 2 + 10 + 10 + 1;
    for (int64_t nth = 1; nth <= places + 1; ++nth) {
      Call call = fresh;
      const internal::LaunchFault fault(nth);
      const bool fails = nth <= places;
      if (strict && fails) {
        EXPECT_THROW(call.run(plan), Error);
        EXPECT_EQ(call.states.bytes(), fresh.states.bytes()) << nth;
      } else {
        call.run(plan);
        expect_equal(call, native);
        if (fails) {
          EXPECT_EQ(call.states.bytes(), native.states.bytes()) << nth;
          EXPECT_EQ(call.out.bytes(), native.out.bytes()) << nth;
        }
      }
      EXPECT_EQ(fault.fired(), fails) << nth;
    }
    EXPECT_EQ(plan.routes().fallback, strict ? 0 : places);
    EXPECT_EQ(plan.routes().dense, 1);
  }
}

TEST(KdaExtend, AnythingThatTheImplementationThrowsIsAFailure) {
  for (const bool strict : {true, false}) {
    for (const int64_t group : {0, 1, 2}) {
      Seen seen;
      seen.throws_at = group;
      KdaExtendProblem problem = problem_of();
      problem.strict = strict;
      const KdaExtend plan = plan_of(problem, Shortened::factory(&seen));
      Call call(problem, std::vector<int32_t>(17, 2));
      Call native = call;
      native.run(plan_of(problem));
      const std::vector<uint8_t> before = call.states.bytes();
      const Sink sink;
      if (strict) {
        EXPECT_THROW(call.run(plan), std::runtime_error);
        EXPECT_EQ(call.states.bytes(), before);
      } else {
        call.run(plan);
        EXPECT_EQ(call.states.bytes(), native.states.bytes());
        EXPECT_EQ(call.out.bytes(), native.out.bytes());
      }
      EXPECT_EQ(plan.routes().groups, group);
      EXPECT_EQ(sink.count(LogLevel::kError, "shortened failed (no more groups today)"),
                strict ? 0 : 1);
    }
  }
}

TEST(KdaExtend, AFailureOfTheNativePathLeavesTheStates) {
  Call call(problem_of(), {4, 5});
  const std::vector<uint8_t> before = call.states.bytes();
  const internal::LaunchFault fault(1);
  EXPECT_THROW(call.run(plan_of(call.problem)), Error);
  EXPECT_EQ(call.states.bytes(), before);
}

TEST(KdaExtend, RefusalsAreLoggedOncePerReasonAndRoutesNever) {
  Seen seen;
  const Sink sink;
  KdaExtendProblem problem = problem_of(3);
  const KdaExtend plan = plan_of(problem, Shortened::factory(&seen));
  const auto refused = [&](const std::string& reason, const KdaExtend& by, Call call,
                           const KdaExtendTensors& t) {
    Call native = call;
    for (int64_t times = 0; times < 2; ++times) {
      const int64_t before = by.routes().refused;
      KdaExtendTensors again = t;
      again.out = call.out;
      again.ssm_states = call.states;
      call.run(by, again);
      EXPECT_EQ(by.routes().refused, before + 1) << reason;
      if (times > 0) continue;
      again.out = native.out;
      again.ssm_states = native.states;
      native.run(plan_of(native.problem), again);
      EXPECT_EQ(call.out.bytes(), native.out.bytes()) << reason;
      EXPECT_EQ(call.states.bytes(), native.states.bytes()) << reason;
    }
    EXPECT_EQ(sink.count(LogLevel::kWarning, reason), 1) << reason;
  };
  Call call(problem, {5, 6});
  KdaExtendTensors t = call.tensors();
  t.a_log = {};  // the bounded gate runs without
  refused("a_log is missing", plan, call, t);
  const std::vector<int32_t> other = {6, 5}, more = {5, 6, 1}, short_sum = {5, 5};
  t = call.tensors();
  t.extend_seq_lens_cpu = other;
  refused("contradict query_start_loc", plan, call, t);
  t.extend_seq_lens_cpu = more;
  refused("not one host length", plan, call, t);
  t.extend_seq_lens_cpu = short_sum;
  refused("do not sum", plan, call, t);
  Call empty(problem, {5, 0, 6});
  refused("is empty", plan, empty, empty.tensors());
  Call longer(problem_of(2, 16400), {16385, 3});
  refused("longer than 16384", plan_of(longer.problem, Shortened::factory(&seen)), longer,
          longer.tensors());
  const auto other_problem = [&](const std::string& reason, const KdaExtendProblem& changed) {
    Call changed_call(changed, {5, 6});
    refused(reason, plan_of(changed, Shortened::factory(&seen)), changed_call,
            changed_call.tensors());
  };
  KdaExtendProblem changed = problem_of();
  changed.head_dim_k = 64;
  other_problem("K = 64", changed);
  changed = problem_of();
  changed.num_value_heads = 2;
  other_problem("HV = 2", changed);
  changed = problem_of();
  changed.g_dtype = DType::kF32;
  other_problem("g is f32", changed);
  changed = problem_of();
  changed.beta_dtype = DType::kBf16;
  other_problem("beta is bf16", changed);
  EXPECT_TRUE(seen.groups.empty());

  const size_t before = sink.lines.size();
  t = call.tensors();
  t.is_spec_decode = true;
  call.run(plan, t);
  t = call.tensors();
  t.extend_seq_lens_cpu.reset();
  call.run(plan, t);
  Call single(problem, {7});
  single.run(plan);
  Call nothing(problem, {});
  nothing.run(plan);
  EXPECT_EQ(sink.lines.size(), before);
  EXPECT_EQ(plan.routes().speculative, 1);
  EXPECT_EQ(plan.routes().no_lengths, 1);
  EXPECT_EQ(plan.routes().single, 2);
  EXPECT_EQ(plan.routes().dense, 0);
  EXPECT_TRUE(seen.groups.empty());
  call.run(plan);
  call.run(plan);
  EXPECT_EQ(sink.count(LogLevel::kDispatch, "shortened runs groups of 2 sequences of 2048"), 1);
}

TEST(KdaExtend, TracksAreSnapshotsAndHIsWhatTheOriginalReturns) {
  Seen seen;
  const KdaExtend plan = plan_of(problem_of(), Shortened::factory(&seen));
  Call finals(problem_of(), {70, 9});
  finals.slots = {1, 2};
  Call inside = finals;
  const Tensor seq = Tensor::i32({3}, {1, 0, 7}), slot = Tensor::i32({3}, {20, 21, 22});
  KdaExtendTensors t = finals.tensors();
  t.return_intermediate_states = true;
  t.track_final_seq = seq;
  t.track_final_slot = slot;
  KdaExtendResult result = finals.run(plan, t);
  EXPECT_EQ(plan.routes().dense, 1);
  EXPECT_EQ(to_string(result.h), to_string(packed_shape(DType::kF32, {1, 0, 1, kDim, kDim})));
  EXPECT_EQ(test::entry_bytes(finals.states, 20), test::entry_bytes(finals.states, 2));
  EXPECT_EQ(test::entry_bytes(finals.states, 21), test::entry_bytes(finals.states, 1));
  EXPECT_EQ(test::entry_bytes(finals.states, 22), test::entry_bytes(inside.states, 22));

  const Tensor at_seq = Tensor::i32({1}, {0}), at = Tensor::i32({1}, {64});
  const Tensor at_slot = Tensor::i32({1}, {23});
  Tensor h(DType::kF32, {1, 3, 1, kDim, kDim});
  const Tensor initial = inside.states;
  t = inside.tensors();
  t.return_intermediate_states = true;
  t.track_seq = at_seq;
  t.track_pos = at;
  t.track_slot = at_slot;
  t.track_final_seq = seq;
  t.track_final_slot = slot;
  t.h = h;
  result = inside.run(plan, t);
  EXPECT_EQ(plan.routes().snapshot, 1);
  EXPECT_EQ(result.h.data, t.h.data);
  // Three chunks: before 0 and 64 of the first sequence, before 0 of the second.
  const auto chunk = [&](int64_t c) {
    const auto* const first = h.data<uint8_t>() + c * kDim * kDim * 4;
    return std::vector<uint8_t>(first, first + kDim * kDim * 4);
  };
  EXPECT_EQ(chunk(0), test::entry_bytes(initial, 1));
  EXPECT_EQ(chunk(1), test::entry_bytes(inside.states, 23));
  EXPECT_EQ(chunk(2), test::entry_bytes(initial, 2));
  EXPECT_EQ(test::entry_bytes(inside.states, 20), test::entry_bytes(inside.states, 2));
  EXPECT_EQ(test::entry_bytes(inside.states, 21), test::entry_bytes(inside.states, 1));
  t.track_seq = t.track_pos = t.track_slot = {};
  t.return_intermediate_states = false;
  EXPECT_FALSE(inside.run(plan, t).h.defined());
}

TEST(KdaExtend, AcceptsTheFormsOfTheOriginal) {
  Seen seen;
  Call packed(problem_of(2, 600, 2), {5, 6});
  Call flat = packed;
  const KdaExtend plan = plan_of(packed.problem, Shortened::factory(&seen));
  KdaExtendTensors t = packed.tensors();
  t.out = make_tensor(static_cast<void*>(packed.out.data<bf16_t>()), DType::kBf16, {11, 2, kDim});
  packed.run(plan, t);
  t = flat.tensors();
  const auto batched = [](const ConstTensorView& view) {
    return make_tensor(view.data, view.dtype, {1, view.shape[0], view.shape[1], view.shape[2]});
  };
  t.q = batched(t.q);
  t.k = batched(t.k);
  t.v = batched(t.v);
  t.g = make_tensor(t.g.data, t.g.dtype, {1, 11, 2 * kDim});
  t.beta = make_tensor(t.beta.data, t.beta.dtype, {1, 11, 2});
  t.a_log = make_tensor(t.a_log.data, t.a_log.dtype, {1, 1, 2, 1});
  t.dt_bias = make_tensor(t.dt_bias.data, t.dt_bias.dtype, {2 * kDim});
  flat.run(plan, t);
  EXPECT_EQ(flat.out.bytes(), packed.out.bytes());
  EXPECT_EQ(flat.states.bytes(), packed.states.bytes());
  EXPECT_EQ(plan.routes().dense, 2);

  // Parameters of bf16 are widened.
  Call rounded(packed.problem, {5, 6}), widened = rounded;
  const Tensor a_log = Tensor::bf16({2}, {bf16_from_float(-1.5f), bf16_from_float(0.25f)});
  widened.inputs.a_log = Tensor::f32({2}, {-1.5f, 0.25f});
  t = rounded.tensors();
  t.a_log = a_log;
  rounded.run(plan, t);
  widened.run(plan);
  EXPECT_EQ(rounded.states.bytes(), widened.states.bytes());
  EXPECT_NE(rounded.states.bytes(), flat.states.bytes());
}

TEST(KdaExtend, ResultsDependOnNoThreadCount) {
  KdaExtendProblem problem = problem_of();
  Seen seen;
  problem.dense = Shortened::factory(&seen);
  const Call fresh(problem, {30, 66, 1});
  Call one = fresh, three = fresh;
  one.run(KdaExtend::plan(problem, Device::cpu(1)));
  three.run(KdaExtend::plan(problem, Device::cpu(3)));
  EXPECT_EQ(one.out.bytes(), three.out.bytes());
  EXPECT_EQ(one.states.bytes(), three.states.bytes());
}

TEST(KdaExtend, TheWorkspaceRisesWithTheBoundsToThatOfTheLargestGroup) {
  const auto bytes = [](int64_t sequences, int64_t rows, bool dense) {
    const KdaExtendProblem problem = problem_of(sequences, rows);
    return plan_of(problem, dense ? KdaDenseFactory(kda_dense_prefill) : KdaDenseFactory())
        .workspace_bytes();
  };
  for (const int64_t sequences : {0, 1, 2, 7, 8, 9, 40}) {
    size_t last = 0;
    for (const int64_t rows : {0, 1, 2, 600, 2048, 2049, 4097, 16384, 16385, 40000}) {
      const size_t now = bytes(sequences, rows, true);
      EXPECT_GE(now, last) << sequences << " sequences, " << rows << " rows";
      EXPECT_LE(now, bytes(sequences + 1, rows, true));
      EXPECT_GE(now, bytes(sequences, rows, false));
      last = now;
    }
  }
  // Past eight sequences of 16384 rows only states and normalised rows are added.
  const size_t group = bytes(8, 16384, true), state = kDim * kDim * sizeof(float);
  EXPECT_EQ(bytes(40, 16384, true), group + 32 * state);
  EXPECT_EQ(bytes(8, 40000, true), group + (40000 - 16384) * kDim * 2 * sizeof(bf16_t));
}

TEST(KdaExtend, BadInputIsAnErrorBeforeAnythingIsWritten) {
  Seen seen;
  Call call(problem_of(), {5, 6});
  const KdaExtend plan = plan_of(call.problem, Shortened::factory(&seen));
  const std::vector<uint8_t> states = call.states.bytes(), out = call.out.bytes();
  const auto refuses = [&](const std::string& part, const KdaExtend& by, const auto& change) {
    KdaExtendTensors t = call.tensors();
    change(&t);
    try {
      call.run(by, t);
      ADD_FAILURE() << part;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
    EXPECT_EQ(call.states.bytes(), states) << part;
    EXPECT_EQ(call.out.bytes(), out) << part;
  };
  const Tensor one = Tensor::i32({1}, {0}), two = Tensor::i32({2}, {0, 1});
  const Tensor five = Tensor::i32({5}, {0, 0, 0, 0, 0});
  refuses("q", plan, [](KdaExtendTensors* t) { t->q = {}; });
  refuses("v", plan, [](KdaExtendTensors* t) { t->v = slice_rows(t->v, 0, 4); });
  refuses("g", plan, [](KdaExtendTensors* t) { t->g = t->beta; });
  refuses("out rows", plan_of(problem_of(20, 10)), [](KdaExtendTensors*) {});
  refuses("cache_indices", plan, [&](KdaExtendTensors* t) { t->cache_indices = one; });
  refuses("q_indptr", plan_of(problem_of(1)), [](KdaExtendTensors*) {});
  refuses("a_log", plan, [](KdaExtendTensors* t) { t->a_log = t->dt_bias; });
  refuses("dt_bias", plan, [](KdaExtendTensors* t) { t->dt_bias = t->a_log; });
  refuses("ssm_states", plan, [](KdaExtendTensors* t) { t->ssm_states.stride[0] = 0; });
  refuses("track_pos", plan, [&](KdaExtendTensors* t) { t->track_seq = two; });
  refuses("track_slot", plan, [&](KdaExtendTensors* t) { t->track_slot = two; });
  refuses("track_final_slot", plan, [&](KdaExtendTensors* t) {
    t->track_final_seq = two;
    t->track_final_slot = one;
  });
  refuses("tracks", plan,
          [&](KdaExtendTensors* t) { t->track_final_seq = t->track_final_slot = five; });
  refuses("h", plan, [&](KdaExtendTensors* t) {
    t->track_seq = t->track_pos = t->track_slot = two;
    t->return_intermediate_states = true;
  });
  KdaExtendProblem softplus = problem_of();
  softplus.lower_bound.reset();
  refuses("a_log is missing", plan_of(softplus), [](KdaExtendTensors* t) { t->a_log = {}; });
  EXPECT_THROW(plan_of(problem_of(),
                       [](const KdaDenseBounds&) { return std::unique_ptr<const KdaDense>(); }),
               Error);
  KdaExtendProblem steep = problem_of();
  steep.lower_bound = 1.0f;
  EXPECT_THROW(plan_of(steep), Error);
  try {
    KdaExtend::plan(problem_of(), {.kind = DeviceKind::kCuda});
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
  }
  EXPECT_TRUE(seen.groups.empty());
}

}  // namespace
}  // namespace fovea::compat
