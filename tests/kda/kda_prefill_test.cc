#include "fovea/kda_prefill.h"

#include "fovea/error.h"
#include "tests/kda/kda_case.h"

// What a prefill computes. States, slots and memory: kda_prefill_state_test.cc.
namespace fovea {
namespace {

using test::kda_layer;
using test::PrefillCase;
using test::Tensor;

class KdaPrefillTest : public test::TargetTest {
 public:
  Options options() const { return GetParam().options(); }
  test::KdaLimits limits() const { return test::kda_limits(GetParam().implementation); }
  void run(PrefillCase& call, int threads = 1) { call.run(options(), threads); }
  void expect_reference(const PrefillCase& call) { test::expect_kda_reference(call, options()); }
};
INSTANTIATE_TEST_SUITE_P(Targets, KdaPrefillTest,
                         testing::ValuesIn(test::targets_of("kda_prefill")), test::target_name);

class FullKdaPrefillTest : public KdaPrefillTest {};
INSTANTIATE_TEST_SUITE_P(Targets, FullKdaPrefillTest,
                         testing::ValuesIn(test::targets_of("kda_prefill")), test::target_name);

KdaLayer with_gate(KdaLayer layer, GateKind kind, DType dtype = DType::kBf16) {
  layer.gate.kind = kind;
  layer.gate.dtype = dtype;
  return layer;
}

TEST_P(KdaPrefillTest, EveryLengthAroundAChunk) {
  for (const int32_t length :
       {0, 1, 2, 15, 16, 17, 31, 32, 33, 37, 63, 64, 65, 97, 127, 128, 130}) {
    for (const int64_t chunk : {0, 16, 32, 64}) {
      SCOPED_TRACE(testing::Message() << "length " << length << ", chunk " << chunk);
      PrefillCase call(kda_layer(1, 2, 32, 16), {length}, 3);
      call.problem.chunk = chunk;
      expect_reference(call.with_states());
    }
  }
}

TEST_P(KdaPrefillTest, PackedSequences) {
  const std::vector<std::vector<int32_t>> lists = {
      {15},    {256, 244, 500}, {15, 85, 200, 100}, {4, 4, 4}, {17, 16, 32},
      {0, 70}, {33, 0, 65},     {64, 5, 0},         {0, 0, 0}, std::vector<int32_t>(21, 3)};
  for (std::vector<int32_t> lengths : lists) {
    if (lengths.size() == 21) lengths.back() = 300;  // 20 short ones and a long one
    SCOPED_TRACE(testing::PrintToString(lengths));
    PrefillCase call(kda_layer(1, 1, 16, 16), lengths, 4);
    expect_reference(call.with_states());
  }
}

TEST_P(KdaPrefillTest, EveryKindOfGateBetaNormStateTypeAndLayout) {
  uint64_t seed = 100;
  for (const GateKind gate : {GateKind::kSoftplus, GateKind::kLowerBound, GateKind::kGiven}) {
    for (const DType gate_dtype : {DType::kBf16, DType::kF32}) {
      for (const int beta : {0, 1, 2}) {
        for (const bool normalise : {false, true}) {
          for (const DType state_dtype : {DType::kF32, DType::kBf16}) {
            KdaLayer layer = with_gate(kda_layer(1, 2, 20, 12), gate, gate_dtype);
            layer.beta_kind = beta == 0 ? BetaKind::kProb : BetaKind::kLogit;
            layer.allow_neg_eigval = beta == 2;
            layer.beta_dtype = gate_dtype == DType::kBf16 ? DType::kF32 : DType::kBf16;
            layer.normalise = normalise;
            layer.state_dtype = state_dtype;
            SCOPED_TRACE(testing::Message() << "seed " << ++seed);
            PrefillCase none(layer, {5, 70}, seed);
            expect_reference(none);
            PrefillCase kv(layer, {5, 70}, seed);
            kv.problem.state_layout = StateLayout::kKv;
            expect_reference(kv.with_states());
            PrefillCase vk(layer, {70, 5}, seed);
            expect_reference(vk.with_states());
            PrefillCase in(layer, {40, 5}, seed);
            in.with_pool(4, {3, 0}, {});
            in.out_slot = {};
            expect_reference(in);
            PrefillCase out(layer, {40, 5}, seed);
            out.with_pool(4, {}, {2, 1});
            out.in_slot = {};
            expect_reference(out);
            PrefillCase both(layer, {40, 5}, seed);
            expect_reference(both.with_pool(4, {3, 0}, {3, 1}));
          }
        }
      }
    }
  }
}

TEST_P(KdaPrefillTest, HeadDimensions) {
  for (const auto& [dim_k, dim_v] : std::vector<std::pair<int64_t, int64_t>>{{64, 64},
                                                                             {128, 128},
                                                                             {64, 128},
                                                                             {128, 64},
                                                                             {60, 60},
                                                                             {100, 100},
                                                                             {1, 1},
                                                                             {3, 256},
                                                                             {256, 5},
                                                                             {17, 33}}) {
    SCOPED_TRACE(testing::Message() << "K " << dim_k << ", V " << dim_v);
    KdaLayer layer = kda_layer(1, 2, dim_k, dim_v);
    layer.normalise = true;
    PrefillCase call(layer, {70, 20}, 5);
    expect_reference(call.with_states());
  }
}

TEST_P(KdaPrefillTest, GroupedValueHeadsReadTheKeysOfTheirGroup) {
  for (const int64_t group : {1, 2, 3, 8}) {
    PrefillCase call(kda_layer(2, 2 * group, 16, 8), {33, 40}, 6);
    expect_reference(call.with_states());
  }
}

TEST_P(KdaPrefillTest, ScaleIsAppliedToTheOutputAlone) {
  KdaLayer layer = kda_layer(1, 1, 16, 16);
  layer.scale = 4;
  PrefillCase scaled(layer, {50}, 6);
  scaled.with_states();
  expect_reference(scaled);
  PrefillCase plain = scaled;
  plain.problem.layer.scale = 1;
  run(scaled);
  run(plain);
  EXPECT_EQ(scaled.state.bytes(), plain.state.bytes());
  std::vector<double> expected = test::to_doubles(plain.out.view());
  for (double& value : expected) value *= 4;
  EXPECT_EQ(test::to_doubles(scaled.out.view()), expected);
}

// The rows of `call` from position p of sequence 0 on, replaced by those of another seed.
void replace_tail(PrefillCase& call, int64_t p) {
  const PrefillCase other(call.problem.layer, {static_cast<int32_t>(call.rows())}, 999);
  const auto replace = [&](Tensor& tensor, const Tensor& source) {
    const auto row = static_cast<int64_t>(tensor.bytes().size()) / call.rows();
    std::copy(source.bytes().begin() + p * row, source.bytes().end(),
              tensor.data<uint8_t>() + p * row);
  };
  replace(call.inputs.q, other.inputs.q);
  replace(call.inputs.k, other.inputs.k);
  replace(call.inputs.v, other.inputs.v);
  replace(call.inputs.g, other.inputs.g);
  replace(call.inputs.beta, other.inputs.beta);
}

TEST_P(KdaPrefillTest, WhatStandsBehindAPositionChangesNoBitBeforeIt) {
  // A GPU takes K = 64 by tiles and tensor cores.
  for (const int64_t dim_k : {24, 64}) {
    for (const GateKind gate : {GateKind::kSoftplus, GateKind::kLowerBound, GateKind::kGiven}) {
      PrefillCase base(with_gate(kda_layer(1, 2, dim_k, 16), gate, DType::kF32), {150}, 8);
      base.with_pool(5, {0}, {1}).with_snapshots({0, 0}, {64, 128}, {2, 3});
      PrefillCase whole = base;
      run(whole);
      for (const int64_t p : {1, 5, 15, 16, 17, 33, 64, 70, 128, 149}) {
        const auto expect_prefix = [&](PrefillCase& call, const char* what) {
          SCOPED_TRACE(testing::Message() << what << " at " << p);
          run(call);
          EXPECT_EQ(test::entries_bytes(call.out, 0, p), test::entries_bytes(whole.out, 0, p));
          if (p >= 64) {
            EXPECT_EQ(test::entry_bytes(call.state, 2), test::entry_bytes(whole.state, 2));
          }
          if (p >= 128) {
            EXPECT_EQ(test::entry_bytes(call.state, 3), test::entry_bytes(whole.state, 3));
          }
        };
        PrefillCase other_tail = base;
        replace_tail(other_tail, p);
        expect_prefix(other_tail, "another tail");
        PrefillCase closed = base;
        if (gate == GateKind::kGiven) {
          test::fill_elements(closed.inputs.g, p * 2 * dim_k, 150 * 2 * dim_k, -1000.0f);
          expect_prefix(closed, "a tail of closed gates");
        }
        PrefillCase shorter = base;
        shorter.q_indptr = Tensor::i32({2}, {0, static_cast<int32_t>(p)});
        expect_prefix(shorter, "the end");
        // What is not finite in one of the tensors, then NaN in all of them.
        for (Tensor test::KdaInputs::*tensor :
             {&test::KdaInputs::q, &test::KdaInputs::k, &test::KdaInputs::v, &test::KdaInputs::g,
              &test::KdaInputs::beta}) {
          if (p != 5 && p != 33 && p != 70) break;
          for (const float value : {std::nanf(""), -std::numeric_limits<float>::infinity()}) {
            PrefillCase one = base;
            Tensor& changed = one.inputs.*tensor;
            const int64_t elements = changed.view().num_elements();
            test::fill_elements(changed, p * elements / 150, elements, value);
            expect_prefix(one, "one tensor that is not finite");
          }
        }
        PrefillCase poisoned = base;
        for (Tensor* tensor : {&poisoned.inputs.q, &poisoned.inputs.k, &poisoned.inputs.v,
                               &poisoned.inputs.g, &poisoned.inputs.beta}) {
          test::fill_elements(*tensor, p * tensor->view().num_elements() / 150,
                              tensor->view().num_elements(), std::nanf(""));
        }
        expect_prefix(poisoned, "NaN");
      }
    }
  }
}

TEST_P(KdaPrefillTest, BatchMatesAndThreadsChangeNoBit) {
  const KdaLayer layer = kda_layer(1, 3, 32, 32);
  PrefillCase batch(layer, {40, 0, 100, 1, 65}, 9);
  batch.with_states();
  const PrefillCase untouched = batch;
  run(batch);
  for (const int threads : {2, 3, 8}) {
    PrefillCase again = untouched;
    run(again, threads);
    EXPECT_EQ(again.out.bytes(), batch.out.bytes());
    EXPECT_EQ(again.state.bytes(), batch.state.bytes());
  }
  // Sequence 2 alone: rows 40..139 of the same tensors.
  PrefillCase alone = untouched;
  alone.q_indptr = Tensor::i32({2}, {40, 140});
  alone.state = test::random_states(layer, 1, 7);
  const std::vector<uint8_t> start = test::entry_bytes(untouched.state, 2);
  std::copy(start.begin(), start.end(), alone.state.data<uint8_t>());
  run(alone);
  EXPECT_EQ(test::entries_bytes(alone.out, 40, 140), test::entries_bytes(batch.out, 40, 140));
  EXPECT_EQ(alone.state.bytes(), test::entry_bytes(batch.state, 2));
}

TEST_P(KdaPrefillTest, TheColumnsOfAChainChangeNoBit) {
  for (const int64_t dim : {64, 128}) {
    PrefillCase call(kda_layer(1, 2, dim, dim), {70, 0, 33}, 13);
    call.with_states();
    const PrefillCase untouched = call;
    run(call);
    for (int64_t columns = 16; columns <= dim; columns *= 2) {
      PrefillCase cut = untouched;
      cut.problem.v_columns = columns;
      run(cut);
      EXPECT_EQ(cut.out.bytes(), call.out.bytes()) << columns;
      EXPECT_EQ(cut.state.bytes(), call.state.bytes()) << columns;
    }
  }
}

// A sequence in two calls, the second from the state of the first.
TEST_P(KdaPrefillTest, TwoPartsAreTheWhole) {
  for (const int32_t p : {64, 128}) {
    PrefillCase whole(kda_layer(1, 2, 32, 32), {200}, 10);
    whole.with_states();
    PrefillCase parts = whole;
    run(whole);
    parts.q_indptr = Tensor::i32({2}, {0, p});
    run(parts);
    parts.q_indptr = Tensor::i32({2}, {p, 200});
    run(parts);
    EXPECT_TRUE(test::within(parts.out.view(), whole.out.view(), limits().out));
    EXPECT_TRUE(test::within(parts.state.view(), whole.state.view(), limits().state_fp32));
  }
}

TEST_P(KdaPrefillTest, ALoopOfDecodesIsAPrefill) {
  PrefillCase whole(kda_layer(1, 2, 32, 32), {70}, 11);
  whole.with_states();
  PrefillCase steps = whole;
  run(whole);
  KdaDecodeProblem problem{.layer = whole.problem.layer, .max_rows = 1};
  const KdaDecode decode = KdaDecode::plan(problem, test::device_of({"ref"}), {"ref"});
  const KdaPrefillTensors rows = steps.tensors();
  for (int64_t t = 0; t < 70; ++t) {
    KdaDecodeTensors row;
    row.q = slice_rows(rows.q, t, t + 1);
    row.k = slice_rows(rows.k, t, t + 1);
    row.v = slice_rows(rows.v, t, t + 1);
    row.g = slice_rows(rows.g, t, t + 1);
    row.beta = slice_rows(rows.beta, t, t + 1);
    row.a_log = rows.a_log;
    row.dt_bias = rows.dt_bias;
    row.state = rows.state;
    row.out = slice_rows(rows.out, t, t + 1);
    test::run(decode, row);
  }
  EXPECT_TRUE(test::within(whole.out.view(), steps.out.view(), limits().out));
  EXPECT_TRUE(test::within(whole.state.view(), steps.state.view(), limits().state_fp32));
}

TEST_P(KdaPrefillTest, ClosedGatesOfSomeChannels) {
  for (const int share : {10, 50, 90}) {
    PrefillCase call(with_gate(kda_layer(1, 2, 32, 16), GateKind::kGiven, DType::kF32), {150}, 12);
    call.with_states();
    test::Rng rng(static_cast<uint64_t>(share));
    for (int64_t i = 0; i < 150 * 2 * 32; ++i) {
      if (rng.integer(0, 99) < share) test::fill_elements(call.inputs.g, i, i + 1, -1000.0f);
    }
    expect_reference(call);
  }
}

TEST_P(KdaPrefillTest, ATokenThatClosesEveryChannelForgetsWhatWasBefore) {
  for (const int64_t reset : {0, 7, 16, 63, 64, 90}) {
    PrefillCase call(with_gate(kda_layer(1, 1, 32, 16), GateKind::kGiven), {100}, 13);
    call.with_states();
    test::fill_elements(call.inputs.g, reset * 32, (reset + 1) * 32, -1000.0f);
    expect_reference(call);
    PrefillCase fresh = call;
    fresh.q_indptr = Tensor::i32({2}, {static_cast<int32_t>(reset), 100});
    fresh.has_initial_state = Tensor(DType::kU8, {1});  // 0
    run(call);
    run(fresh);
    Tensor expected = call.out;
    const std::vector<uint8_t> tail = test::entries_bytes(fresh.out, reset, 100);
    std::copy(tail.begin(), tail.end(),
              expected.data<uint8_t>() + reset * static_cast<int64_t>(16 * sizeof(bf16_t)));
    EXPECT_TRUE(test::within(call.out.view(), expected.view(), limits().out));
    EXPECT_TRUE(test::within(call.state.view(), fresh.state.view(), limits().state_fp32));
  }
}

TEST_P(KdaPrefillTest, WithoutDecayALongSequenceKeepsItsState) {
  PrefillCase call(with_gate(kda_layer(1, 1, 32, 32), GateKind::kGiven), {700}, 14);
  test::fill(call.inputs.g, 0.0f);
  expect_reference(call.with_states());
}

TEST_P(KdaPrefillTest, SaturatedLowerBound) {
  // +80: every step decays by exp(-5); -80: by nothing; in turns: both within a block.
  for (const int kind : {0, 1, 2}) {
    PrefillCase call(with_gate(kda_layer(1, 1, 32, 16), GateKind::kLowerBound), {130}, 15);
    test::fill(call.inputs.a_log, 1.0f);
    for (int64_t t = 0; t < 130; ++t) {
      const bool up = kind == 0 || (kind == 2 && t % 16 >= 8);
      test::fill_elements(call.inputs.g, t * 32, (t + 1) * 32, up ? 80.0f : -80.0f);
    }
    expect_reference(call.with_states());
    run(call);
    for (const double value : test::to_doubles(call.out.view())) EXPECT_TRUE(std::isfinite(value));
  }
}

TEST_P(KdaPrefillTest, RatesAndBiases) {
  for (const GateKind gate : {GateKind::kSoftplus, GateKind::kLowerBound}) {
    for (const float rate : {-8.0f, -5.0f, 0.0f, 4.0f}) {
      for (const float bias : {-8.0f, 8.0f}) {
        SCOPED_TRACE(testing::Message() << "a_log " << rate << ", dt_bias " << bias);
        PrefillCase call(with_gate(kda_layer(1, 1, 32, 16), gate), {80}, 16);
        test::fill(call.inputs.a_log, rate);
        test::fill(call.inputs.dt_bias, bias);
        expect_reference(call.with_states());
        // Padding by raw gates of -1000 is not neutral for every rate; whatever it is, it is the
        // reference's.
        test::fill_elements(call.inputs.g, 50 * 32, 80 * 32, -1000.0f);
        expect_reference(call);
      }
    }
  }
}

TEST_P(KdaPrefillTest, RowsOfActivatedZerosAreNeutral) {
  PrefillCase call(with_gate(kda_layer(1, 2, 32, 16), GateKind::kGiven), {80}, 17);
  call.with_states();
  PrefillCase padded = call;
  for (Tensor* tensor : {&padded.inputs.q, &padded.inputs.k, &padded.inputs.v, &padded.inputs.g,
                         &padded.inputs.beta}) {
    const int64_t elements = tensor->view().num_elements();
    test::fill_elements(*tensor, 50 * elements / 80, elements, 0.0f);
  }
  call.q_indptr = Tensor::i32({2}, {0, 50});
  run(call);
  run(padded);
  EXPECT_TRUE(test::within(padded.state.view(), call.state.view(), limits().state_fp32));
  for (const uint8_t byte : test::entries_bytes(padded.out, 50, 80)) EXPECT_EQ(byte & 0x7F, 0);
}

TEST_P(KdaPrefillTest, WithBetaZeroTheStateOnlyDecays) {
  PrefillCase call(with_gate(kda_layer(1, 1, 8, 4), GateKind::kGiven, DType::kF32), {20}, 18);
  call.with_states();
  test::fill(call.inputs.beta, 0.0f);
  const std::vector<double> q = test::to_doubles(call.inputs.q.view());
  const std::vector<double> g = test::to_doubles(call.inputs.g.view());
  std::vector<double> state = test::to_doubles(call.state.view());
  std::vector<float> expected;
  for (size_t t = 0; t < 20; ++t) {
    for (size_t d = 0; d < 4; ++d) {
      double sum = 0;
      for (size_t c = 0; c < 8; ++c) {
        state[d * 8 + c] *= std::exp(g[t * 8 + c]);
        sum += state[d * 8 + c] * q[t * 8 + c];
      }
      expected.push_back(static_cast<float>(sum / std::sqrt(8.0)));
    }
  }
  run(call);
  const Tensor out = test::float_tensor(DType::kBf16, {20, 1, 4}, expected);
  EXPECT_TRUE(test::within(call.out.view(), out.view(), limits().out));
  const Tensor final_state =
      Tensor::f32({1, 1, 4, 8}, std::vector<float>(state.begin(), state.end()));
  EXPECT_TRUE(test::within(call.state.view(), final_state.view(), limits().state_fp32));
}

TEST_P(KdaPrefillTest, WithBetaOneAndAUnitKeyTheStateRecallsTheValue) {
  PrefillCase call(with_gate(kda_layer(1, 1, 16, 8), GateKind::kGiven), {70}, 19);
  call.with_states();
  test::fill(call.inputs.beta, 1.0f);
  test::fill(call.inputs.g, 0.0f);
  test::fill_elements(call.inputs.k, 69 * 16, 70 * 16, 0.25f);  // length 1
  run(call);
  for (int64_t d = 0; d < 8; ++d) {
    double recalled = 0;
    for (int64_t c = 0; c < 16; ++c) {
      recalled += 0.25 * static_cast<double>(call.state.data<float>()[d * 16 + c]);
    }
    EXPECT_NEAR(recalled, bf16_to_float(call.inputs.v.data<bf16_t>()[69 * 8 + d]),
                10 * limits().state_fp32);
  }
}

TEST_P(KdaPrefillTest, IdenticalKeysOf256Tokens) {
  for (const float beta : {0.9f, 1.0f}) {
    PrefillCase call(with_gate(kda_layer(1, 1, 64, 64), GateKind::kGiven), {256}, 20);
    test::fill(call.inputs.beta, beta);
    test::fill(call.inputs.g, 0.0f);
    test::fill(call.inputs.k, 0.125f);  // length 1
    expect_reference(call.with_states());
    // A fresh state holds one value along the key, which errors of 16 corrections may outweigh.
    call.has_initial_state = Tensor(DType::kU8, {1});
    expect_reference(call);
  }
}

TEST_P(KdaPrefillTest, ParallelKeysWithNegativeEigenvalues) {
  KdaLayer layer = with_gate(kda_layer(1, 1, 16, 16), GateKind::kGiven);
  layer.beta_kind = BetaKind::kLogit;
  layer.allow_neg_eigval = true;
  PrefillCase call(layer, {150}, 21);
  test::fill(call.inputs.beta, 30.0f);  // beta = 2
  test::fill(call.inputs.g, 0.0f);
  test::fill(call.inputs.k, 0.25f);
  expect_reference(call.with_states());
}

TEST_P(KdaPrefillTest, ZeroVectors) {
  for (const bool normalise : {false, true}) {
    KdaLayer layer = kda_layer(1, 1, 16, 8);
    layer.normalise = normalise;
    PrefillCase call(layer, {40}, 22);
    call.with_states();
    test::fill_elements(call.inputs.q, 5 * 16, 6 * 16, 0.0f);
    test::fill_elements(call.inputs.k, 9 * 16, 30 * 16, 0.0f);
    expect_reference(call);
    run(call);
    for (const uint8_t byte : test::entry_bytes(call.out, 5)) EXPECT_EQ(byte & 0x7F, 0);
  }
}

TEST_P(KdaPrefillTest, TheEpsilonOfTheNormStandsInsideTheRoot) {
  // A key of length 1e-3 becomes 1 / sqrt(2) long. With beta = 1, no decay and a fresh state, one
  // token leaves S = k v^T: its length is that of the key.
  KdaLayer layer = with_gate(kda_layer(1, 1, 16, 1), GateKind::kGiven);
  layer.normalise = true;
  PrefillCase call(layer, {1}, 26);
  call.with_states();
  call.has_initial_state = Tensor(DType::kU8, {1});
  test::fill(call.inputs.g, 0.0f);
  test::fill(call.inputs.beta, 1.0f);
  test::fill(call.inputs.v, 1.0f);
  test::fill(call.inputs.k, 0.00025f);
  const double length = 4 * static_cast<double>(bf16_to_float(bf16_from_float(0.00025f)));
  run(call);
  double sum = 0;
  for (const double value : test::to_doubles(call.state.view())) sum += value * value;
  EXPECT_NEAR(std::sqrt(sum), length / std::sqrt(length * length + 1e-6), 10 * limits().state_fp32);
}

TEST_P(KdaPrefillTest, NanReachesLaterRowsOfItsValueHeadsOnly) {
  for (const auto& [dim_k, dim_v] : std::vector<std::pair<int64_t, int64_t>>{{16, 8}, {64, 16}}) {
    PrefillCase call(kda_layer(2, 4, dim_k, dim_v), {70, 70}, 23);
    call.with_states();
    PrefillCase clean = call;
    // Row 30, key head 1.
    call.inputs.k.data<bf16_t>()[(30 * 2 + 1) * dim_k + 3] = bf16_t{0x7FC0};
    run(clean);
    run(call);
    for (int64_t t = 0; t < 140; ++t) {
      for (int64_t h = 0; h < 4; ++h) {
        const int64_t first = (t * 4 + h) * dim_v;
        if (t >= 30 && t < 70 && h >= 2) continue;
        EXPECT_TRUE(std::equal(call.out.data<bf16_t>() + first,
                               call.out.data<bf16_t>() + first + dim_v,
                               clean.out.data<bf16_t>() + first))
            << "row " << t << ", head " << h;
      }
    }
    for (const int64_t t : {30, 69}) {
      for (int64_t d = 0; d < dim_v; ++d) {
        EXPECT_TRUE(std::isnan(bf16_to_float(call.out.data<bf16_t>()[(t * 4 + 2) * dim_v + d])));
      }
    }
  }
}

TEST_P(FullKdaPrefillTest, ModelShapes) {
  for (const GateKind gate : {GateKind::kSoftplus, GateKind::kLowerBound}) {
    KdaLayer layer = with_gate(kda_layer(2, 4, 128, 128), gate);
    layer.normalise = true;
    layer.beta_kind = BetaKind::kLogit;
    PrefillCase call(layer, {15, 285, 0, 800, 63}, 24);
    expect_reference(call.with_states());
  }
}

TEST_P(FullKdaPrefillTest, EqualLengths) {
  struct Shape {
    int32_t batch, length;
    int64_t heads, value_heads;
  };
  for (const auto& [batch, length, heads, value_heads] :
       {Shape{1, 63, 1, 1}, Shape{2, 500, 3, 3}, Shape{3, 1000, 2, 8}, Shape{4, 1024, 4, 4},
        Shape{2, 1500, 4, 4}, Shape{4, 2048, 8, 8}, Shape{8, 1024, 2, 2}}) {
    SCOPED_TRACE(testing::Message() << batch << " x " << length << ", " << value_heads << " heads");
    KdaLayer layer = kda_layer(heads, value_heads, 128, 128);
    layer.normalise = true;
    PrefillCase call(layer, std::vector<int32_t>(static_cast<size_t>(batch), length), 27);
    expect_reference(call.with_states());
  }
}

TEST_P(FullKdaPrefillTest, ManyHeadsOfALongSequence) {
  // 1 x 8192 with 96 heads; the reference computes the first and the last of them.
  KdaLayer layer = with_gate(kda_layer(96, 96, 128, 128), GateKind::kLowerBound);
  layer.normalise = true;
  PrefillCase call(layer, {8192}, 28);
  call.with_states();
  PrefillCase expected = call;
  run(call, 2);
  for (const int64_t head : {0, 95}) {
    const auto cut = [&](auto view, size_t axis) {
      const auto size = static_cast<int64_t>(size_of(view.dtype));
      view.data =
          const_cast<char*>(static_cast<const char*>(view.data)) + head * view.stride[axis] * size;
      view.shape[axis] = 1;
      return view;
    };
    KdaPrefillTensors t = expected.tensors();
    t.q = cut(t.q, 1);
    t.k = cut(t.k, 1);
    t.v = cut(t.v, 1);
    t.g = cut(t.g, 1);
    t.beta = cut(t.beta, 1);
    t.a_log = cut(t.a_log, 0);
    t.dt_bias = cut(t.dt_bias, 0);
    t.state = cut(t.state, 1);
    t.out = cut(t.out, 1);
    expected.problem.layer.num_heads = expected.problem.layer.num_value_heads = 1;
    expected.run({"ref"}, t);
    EXPECT_TRUE(test::within(cut(call.out.view(), 1), t.out, limits().out));
    EXPECT_TRUE(test::within(cut(call.state.view(), 1), t.state, limits().state_fp32));
  }
}

TEST_P(FullKdaPrefillTest, LongRaggedSequences) {
  PrefillCase call(kda_layer(1, 1, 64, 64), {1300, 547, 2048, 963, 271, 3063}, 25);
  expect_reference(call.with_states());
}

}  // namespace
}  // namespace fovea
