#include "fovea/kda_stages.h"

#include "fovea/error.h"
#include "src/kda/kda_math.h"
#include "tests/kda/kda_case.h"

namespace fovea {
namespace {

using test::kda_layer;
using test::Tensor;

// A call and everything that its stages hand over.
struct StageCase {
  KdaStageProblem problem;
  test::KdaInputs inputs;
  std::vector<int32_t> offsets;
  Tensor q_indptr, initial_state;
  Tensor g_sum, q_hat, k_hat, p, x, w, u0, kr, chunk_states, u, final_state, out;

  StageCase(const KdaLayer& layer, const std::vector<int32_t>& lengths, int64_t chunk,
            uint64_t seed = 1, DType stage_dtype = DType::kF32)
      : offsets(test::offsets_of(lengths)) {
    const auto sequences = static_cast<int64_t>(lengths.size());
    const int64_t rows = offsets.back();
    const int64_t heads = layer.num_value_heads;
    problem = {.layer = layer,
               .max_rows = rows,
               .max_sequences = sequences,
               .chunk = chunk,
               .stage_dtype = stage_dtype};
    inputs = test::KdaInputs(layer, rows, seed);
    q_indptr = Tensor::i32({sequences + 1}, offsets);
    initial_state = test::random_states(layer, sequences, seed + 1);
    int64_t chunks = 0;
    for (const int32_t length : lengths) chunks += (length + chunk - 1) / chunk;
    const auto rows_of = [&](int64_t num_heads, int64_t width, DType dtype) {
      Tensor tensor(dtype, {rows, num_heads, width});
      tensor.fill_bytes(0xFF);  // NaN: what a stage leaves out shows
      return tensor;
    };
    g_sum = rows_of(heads, layer.head_dim_k, DType::kF32);
    q_hat = rows_of(layer.num_heads, layer.head_dim_k, stage_dtype);
    k_hat = q_hat;
    p = rows_of(heads, chunk, stage_dtype);
    x = p;
    w = rows_of(heads, layer.head_dim_k, stage_dtype);
    kr = w;
    u0 = rows_of(heads, layer.head_dim_v, stage_dtype);
    u = u0;
    out = rows_of(heads, layer.head_dim_v, DType::kBf16);
    chunk_states = Tensor(DType::kF32, {chunks, heads, layer.head_dim_v, layer.head_dim_k});
    final_state = initial_state;
    chunk_states.fill_bytes(0xFF);
    final_state.fill_bytes(0xFF);
  }

  template <class Op>
  void run(const Options& options, const typename Op::Tensors& tensors, int threads = 1) {
    const Op plan = Op::plan(problem, test::device_of(options, threads), options);
    HostBuffer workspace(plan.workspace_bytes());
    // What a workspace held before must not pass for a table of sequences.
    std::fill_n(static_cast<uint8_t*>(workspace.data()), workspace.bytes(), uint8_t{0x11});
    plan.run(tensors, workspace.workspace());
  }

  void gate(const Options& options, int threads = 1) {
    KdaStageGateTensors t{.q = inputs.q, .k = inputs.k, .g = inputs.g, .q_indptr = q_indptr};
    if (problem.layer.gate.kind != GateKind::kGiven) {
      t.a_log = inputs.a_log;
      t.dt_bias = inputs.dt_bias;
    }
    t.g_sum = g_sum;
    t.q_hat = q_hat;
    t.k_hat = k_hat;
    run<KdaStageGate>(options, t, threads);
  }
  KdaStageIntraTensors intra_tensors() {
    return {.q_hat = q_hat,
            .k_hat = k_hat,
            .g_sum = g_sum,
            .v = inputs.v,
            .beta = inputs.beta,
            .q_indptr = q_indptr,
            .p = p,
            .x = x,
            .w = w,
            .u0 = u0,
            .kr = kr};
  }
  void intra(const Options& options, int threads = 1) {
    run<KdaStageIntra>(options, intra_tensors(), threads);
  }
  KdaStageInterTensors inter_tensors() {
    return {.w = w,
            .kr = kr,
            .u0 = u0,
            .g_sum = g_sum,
            .q_indptr = q_indptr,
            .initial_state = initial_state,
            .chunk_states = chunk_states,
            .u = u,
            .final_state = final_state};
  }
  void inter(const Options& options, int threads = 1) {
    run<KdaStageInter>(options, inter_tensors(), threads);
  }
  KdaStageOutputTensors output_tensors() {
    return {.q_hat = q_hat,
            .g_sum = g_sum,
            .p = p,
            .chunk_states = chunk_states,
            .u = u,
            .q_indptr = q_indptr,
            .out = out};
  }
  void output(const Options& options, int threads = 1) {
    run<KdaStageOutput>(options, output_tensors(), threads);
  }

  // fn(sequence, first row, rows, number) for every chunk.
  template <class Function>
  void each_chunk(Function&& fn) const {
    int64_t number = 0;
    for (size_t n = 0; n + 1 < offsets.size(); ++n) {
      for (int64_t first = offsets[n]; first < offsets[n + 1]; first += problem.chunk) {
        fn(n, first, std::min<int64_t>(problem.chunk, offsets[n + 1] - first), number++);
      }
    }
  }
};

KdaLayer stage_layer(GateKind gate = GateKind::kSoftplus) {
  KdaLayer layer = kda_layer(1, 2, 12, 10);
  layer.gate.kind = gate;
  layer.normalise = true;
  layer.beta_kind = BetaKind::kLogit;
  return layer;
}

const std::vector<int32_t> kLengths{70, 0, 17, 1};

double at(const Tensor& tensor, int64_t t, int64_t h, int64_t c) {
  const ConstTensorView view = tensor.view();
  const int64_t flat = (t * view.shape[1] + h) * view.shape[2] + c;
  return view.dtype == DType::kF32
             ? static_cast<double>(tensor.data<float>()[flat])
             : static_cast<double>(bf16_to_float(tensor.data<bf16_t>()[flat]));
}

double beta_at(const StageCase& call, int64_t t, int64_t h) {
  const auto b = static_cast<double>(call.inputs.beta.data<float>()[t * 2 + h]);
  return 1 / (1 + std::exp(-b));
}

double state_at(const Tensor& states, int64_t entry, int64_t h, int64_t d, int64_t c) {
  return static_cast<double>(states.data<float>()[((entry * 2 + h) * 10 + d) * 12 + c]);
}

testing::AssertionResult stage_within(const Tensor& actual, const Tensor& reference,
                                      const Options& options) {
  const bool bf16 = reference.view().dtype == DType::kBf16;
  return test::within(actual.view(), reference.view(),
                      bf16 ? 5e-3 : test::kda_limits(options.implementation).state_fp32);
}

class KdaStageGateTest : public test::TargetTest {};
INSTANTIATE_TEST_SUITE_P(Targets, KdaStageGateTest,
                         testing::ValuesIn(test::targets_of("kda_stage_gate")), test::target_name);
class KdaStageIntraTest : public test::TargetTest {};
INSTANTIATE_TEST_SUITE_P(Targets, KdaStageIntraTest,
                         testing::ValuesIn(test::targets_of("kda_stage_intra")), test::target_name);
class KdaStageInterTest : public test::TargetTest {};
INSTANTIATE_TEST_SUITE_P(Targets, KdaStageInterTest,
                         testing::ValuesIn(test::targets_of("kda_stage_inter")), test::target_name);
class KdaStageOutputTest : public test::TargetTest {};
INSTANTIATE_TEST_SUITE_P(Targets, KdaStageOutputTest,
                         testing::ValuesIn(test::targets_of("kda_stage_output")),
                         test::target_name);

TEST_P(KdaStageGateTest, SumsRestartWithEveryChunkAndSequence) {
  const Options options = GetParam().options();
  for (const GateKind kind : {GateKind::kSoftplus, GateKind::kLowerBound, GateKind::kGiven}) {
    for (const int64_t chunk : {16, 32, 64}) {
      StageCase call(stage_layer(kind), kLengths, chunk, 2);
      if (kind == GateKind::kGiven) {
        test::fill_elements(call.inputs.g, 100, 130,
                            -1000.0f);  // clamped to -160 in base 2
      }
      call.gate(options);
      const KdaGateProblem problem{
          .max_rows = 88, .num_value_heads = 2, .head_dim_k = 12, .gate = call.problem.layer.gate};
      Tensor decay(DType::kF32, {88, 2, 12}), expected(DType::kF32, {88, 2, 12});
      KdaGateTensors gate{.g = call.inputs.g, .log_decay = decay};
      if (kind != GateKind::kGiven) {
        gate.a_log = call.inputs.a_log;
        gate.dt_bias = call.inputs.dt_bias;
      }
      test::run(KdaGateActivation::plan(problem, Device::cpu(1), {"ref"}), gate);
      call.each_chunk([&](size_t, int64_t first, int64_t count, int64_t) {
        for (int64_t i = 0; i < 24; ++i) {
          double sum = 0;
          for (int64_t t = first; t < first + count; ++t) {
            sum += std::max(-160.0,
                            static_cast<double>(decay.data<float>()[t * 24 + i]) / std::log(2.0));
            expected.data<float>()[t * 24 + i] = static_cast<float>(sum);
          }
        }
      });
      EXPECT_TRUE(stage_within(call.g_sum, expected, options));
    }
  }
}

TEST_P(KdaStageGateTest, SmallTermsBehindAClosedChannelAreNotRoundedAway) {
  // After a term of -160 the sum has steps of 2^-16; 63 terms of 2^-10 and a bit, each rounded to a
  // step on its own, would drift by dozens of them.
  StageCase call(stage_layer(GateKind::kGiven), {64}, 64, 11);
  call.problem.layer.gate.dtype = DType::kF32;
  const auto small = static_cast<float>(-0.00101 * std::log(2.0));
  call.inputs.g = test::float_tensor(DType::kF32, {64, 2, 12}, std::vector<float>(64 * 24, small));
  test::fill_elements(call.inputs.g, 0, 24, -1000.0f);
  call.gate(GetParam().options());
  const bool fp32 = test::kda_limits(GetParam().implementation).state_fp32 <= 1e-5;
  for (int64_t t = 0; t < 64; ++t) {
    EXPECT_NEAR(at(call.g_sum, t, 1, 3), -160 - 0.00101 * static_cast<double>(t),
                fp32 ? 2e-5 : 1e-3);
  }
}

TEST_P(KdaStageGateTest, NormalisedKeysHaveLengthOne) {
  const Options options = GetParam().options();
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    StageCase call(stage_layer(), kLengths, 16, 3, dtype);
    test::fill_elements(call.inputs.k, 5 * 12, 6 * 12, 0.0f);
    call.gate(options);
    for (int64_t t = 0; t < 88; ++t) {
      double sum = 0;
      for (int64_t c = 0; c < 12; ++c) sum += at(call.k_hat, t, 0, c) * at(call.k_hat, t, 0, c);
      EXPECT_NEAR(sum, t == 5 ? 0 : 1, dtype == DType::kF32 ? 1e-5 : 1e-2);
    }
    StageCase plain(kda_layer(1, 2, 12, 10), kLengths, 16, 3, dtype);
    plain.gate(options);
    EXPECT_EQ(test::to_doubles(plain.q_hat.view()), test::to_doubles(plain.inputs.q.view()));
    EXPECT_EQ(test::to_doubles(plain.k_hat.view()), test::to_doubles(plain.inputs.k.view()));
  }
}

TEST_P(KdaStageIntraTest, EveryMatrixFollowsItsFormula) {
  const Options options = GetParam().options();
  for (const int64_t chunk : {16, 32, 64}) {
    StageCase call(stage_layer(), kLengths, chunk, 4);
    call.gate({"ref"});
    call.intra(options);
    StageCase expected = call;
    const auto put = [](Tensor& tensor, int64_t t, int64_t h, int64_t c, double value) {
      const ConstTensorView view = tensor.view();
      tensor.data<float>()[(t * 2 + h) * view.shape[2] + c] = static_cast<float>(value);
    };
    // (I + A) X, which must be I.
    Tensor product = call.x, identity = call.x;
    call.each_chunk([&](size_t, int64_t first, int64_t count, int64_t) {
      for (int64_t h = 0; h < 2; ++h) {
        const auto decayed = [&](const Tensor& left, int64_t i, int64_t j) {
          double sum = 0;
          for (int64_t c = 0; c < 12; ++c) {
            sum += at(left, i, 0, c) * at(call.k_hat, j, 0, c) *
                   std::exp2(at(call.g_sum, i, h, c) - at(call.g_sum, j, h, c));
          }
          return sum;
        };
        for (int64_t i = 0; i < count; ++i) {
          for (int64_t j = 0; j < chunk; ++j) {
            const bool inside = j < count;
            put(expected.p, first + i, h, j,
                j <= i ? decayed(call.q_hat, first + i, first + j) : 0.0);
            double sum = inside ? at(call.x, first + i, h, j) : 0.0;
            for (int64_t l = 0; l < i && inside; ++l) {
              sum += beta_at(call, first + i, h) * decayed(call.k_hat, first + i, first + l) *
                     at(call.x, first + l, h, j);
            }
            put(product, first + i, h, j, sum);
            put(identity, first + i, h, j, i == j ? 1.0 : 0.0);
          }
          for (int64_t c = 0; c < 12; ++c) {
            double sum = 0;
            for (int64_t j = 0; j <= i; ++j) {
              sum += at(call.x, first + i, h, j) * beta_at(call, first + j, h) *
                     at(call.k_hat, first + j, 0, c) * std::exp2(at(call.g_sum, first + j, h, c));
            }
            put(expected.w, first + i, h, c, sum);
            put(expected.kr, first + i, h, c,
                at(call.k_hat, first + i, 0, c) *
                    std::exp2(at(call.g_sum, first + count - 1, h, c) -
                              at(call.g_sum, first + i, h, c)));
          }
          for (int64_t d = 0; d < 10; ++d) {
            double sum = 0;
            for (int64_t j = 0; j <= i; ++j) {
              sum += at(call.x, first + i, h, j) * beta_at(call, first + j, h) *
                     at(call.inputs.v, first + j, h, d);
            }
            put(expected.u0, first + i, h, d, sum);
          }
        }
      }
    });
    EXPECT_TRUE(stage_within(call.p, expected.p, options)) << "p, chunk " << chunk;
    EXPECT_TRUE(stage_within(product, identity, options)) << "(I + A) x, chunk " << chunk;
    EXPECT_TRUE(stage_within(call.w, expected.w, options)) << "w, chunk " << chunk;
    EXPECT_TRUE(stage_within(call.u0, expected.u0, options)) << "u0, chunk " << chunk;
    EXPECT_TRUE(stage_within(call.kr, expected.kr, options)) << "kr, chunk " << chunk;
    for (int64_t t = 0; t < 88; ++t) {  // above the diagonal: exactly zero
      for (int64_t j = t < 70 ? t % chunk + 1 : t < 87 ? (t - 70) % chunk + 1 : 1; j < chunk; ++j) {
        EXPECT_EQ(at(call.p, t, 1, j), 0);
        EXPECT_EQ(at(call.x, t, 1, j), 0);
      }
    }
  }
}

TEST_P(KdaStageIntraTest, TheInverseOfIdenticalKeysStaysBounded) {
  // A is beta below the diagonal. With beta = 1 the inverse is I minus the
  // first subdiagonal.
  const Options options = GetParam().options();
  KdaLayer layer = kda_layer(1, 2, 12, 10);
  layer.gate.kind = GateKind::kGiven;
  for (const int64_t chunk : {16, 32, 64}) {
    StageCase call(layer, {64}, chunk, 5);
    test::fill(call.inputs.k, 0.0f);
    for (int64_t t = 0; t < 64; ++t) {
      test::fill_elements(call.inputs.k, t * 12, t * 12 + 1, 1.0f);
    }
    test::fill(call.inputs.g, 0.0f);
    test::fill(call.inputs.beta, 1.0f);
    call.gate({"ref"});
    call.intra(options);
    for (int64_t t = 0; t < 64; ++t) {
      for (int64_t j = 0; j < chunk; ++j) {
        const int64_t i = t % chunk;
        EXPECT_NEAR(at(call.x, t, 0, j), i == j ? 1 : i == j + 1 ? -1 : 0, 1e-4);
      }
    }
  }
}

TEST_P(KdaStageInterTest, EveryChunkAdvancesTheState) {
  const Options options = GetParam().options();
  for (const bool with_initial : {false, true}) {
    StageCase call(stage_layer(), kLengths, 16, 6);
    call.gate({"ref"});
    call.intra({"ref"});
    KdaStageInterTensors tensors = call.inter_tensors();
    if (!with_initial) tensors.initial_state = {};
    call.run<KdaStageInter>(options, tensors);
    Tensor expected_u = call.u, entering = call.chunk_states, leaving = call.final_state;
    const auto put_state = [](Tensor& states, int64_t e, int64_t h, int64_t d, int64_t c,
                              double value) {
      states.data<float>()[((e * 2 + h) * 10 + d) * 12 + c] = static_cast<float>(value);
    };
    for (size_t i = 0; i < leaving.values<float>().size(); ++i) {
      leaving.data<float>()[i] = with_initial ? call.initial_state.data<float>()[i] : 0.0f;
    }
    call.each_chunk([&](size_t n, int64_t first, int64_t count, int64_t number) {
      for (int64_t h = 0; h < 2; ++h) {
        for (int64_t d = 0; d < 10; ++d) {
          const auto sequence = static_cast<int64_t>(n);
          std::vector<double> next(12);
          for (int64_t c = 0; c < 12; ++c) {
            put_state(entering, number, h, d, c, state_at(leaving, sequence, h, d, c));
            next[static_cast<size_t>(c)] = std::exp2(at(call.g_sum, first + count - 1, h, c)) *
                                           state_at(call.chunk_states, number, h, d, c);
          }
          for (int64_t t = first; t < first + count; ++t) {
            double sum = at(call.u0, t, h, d);
            for (int64_t c = 0; c < 12; ++c) {
              sum -= at(call.w, t, h, c) * state_at(call.chunk_states, number, h, d, c);
              next[static_cast<size_t>(c)] += at(call.kr, t, h, c) * at(call.u, t, h, d);
            }
            expected_u.data<float>()[(t * 2 + h) * 10 + d] = static_cast<float>(sum);
          }
          for (int64_t c = 0; c < 12; ++c) {
            put_state(leaving, sequence, h, d, c, next[static_cast<size_t>(c)]);
          }
        }
      }
    });
    EXPECT_TRUE(stage_within(call.u, expected_u, options));
    EXPECT_TRUE(stage_within(call.chunk_states, entering, options));
    EXPECT_TRUE(stage_within(call.final_state, leaving, options));
  }
}

TEST_P(KdaStageOutputTest, FollowsItsFormula) {
  const Options options = GetParam().options();
  StageCase call(stage_layer(), kLengths, 32, 7);
  call.gate({"ref"});
  call.intra({"ref"});
  call.inter({"ref"});
  call.output(options);
  std::vector<float> expected(88 * 2 * 10);
  call.each_chunk([&](size_t, int64_t first, int64_t count, int64_t number) {
    for (int64_t t = first; t < first + count; ++t) {
      for (int64_t h = 0; h < 2; ++h) {
        for (int64_t d = 0; d < 10; ++d) {
          double sum = 0;
          for (int64_t c = 0; c < 12; ++c) {
            sum += at(call.q_hat, t, 0, c) * std::exp2(at(call.g_sum, t, h, c)) *
                   state_at(call.chunk_states, number, h, d, c);
          }
          for (int64_t j = 0; j <= t - first; ++j) {
            sum += at(call.p, t, h, j) * at(call.u, first + j, h, d);
          }
          expected[static_cast<size_t>((t * 2 + h) * 10 + d)] =
              static_cast<float>(sum / std::sqrt(12.0));
        }
      }
    }
  });
  EXPECT_TRUE(test::within(call.out.view(),
                           test::float_tensor(DType::kBf16, {88, 2, 10}, expected).view(), 1e-3));
}

// The four stages of one implementation are a prefill.
void expect_a_prefill(const Options& options, const KdaLayer& layer, int64_t chunk, DType dtype) {
  const std::vector<int32_t> lengths{130, 0, 17, 1};
  StageCase call(layer, lengths, chunk, 8, dtype);
  call.gate(options);
  call.intra(options);
  call.inter(options);
  call.output(options);
  test::PrefillCase prefill(layer, lengths);
  prefill.inputs = call.inputs;
  prefill.state = call.initial_state;
  prefill.run({"ref"});
  const test::KdaLimits limits = test::kda_limits(options.implementation);
  const bool exact = dtype == DType::kF32;
  EXPECT_TRUE(test::within(call.out.view(), prefill.out.view(), exact ? limits.out : 1e-2));
  EXPECT_TRUE(test::within(call.final_state.view(), prefill.state.view(),
                           exact ? limits.state_fp32 : 1e-2));
}

TEST_P(KdaStageInterTest, TheChainIsAPrefill) {
  for (const GateKind kind : {GateKind::kSoftplus, GateKind::kLowerBound, GateKind::kGiven}) {
    for (const int64_t chunk : {16, 32, 64}) {
      for (const DType dtype : {DType::kF32, DType::kBf16}) {
        expect_a_prefill(GetParam().options(), stage_layer(kind), chunk, dtype);
      }
    }
  }
}

TEST_P(KdaStageInterTest, TheChainOfWideHeadsIsAPrefill) {
  for (const auto& [dim_k, dim_v] : {std::pair{128, 128}, std::pair{256, 40}, std::pair{61, 100}}) {
    KdaLayer layer = stage_layer();
    layer.head_dim_k = dim_k;
    layer.head_dim_v = dim_v;
    for (const DType dtype : {DType::kF32, DType::kBf16}) {
      SCOPED_TRACE(std::to_string(dim_k) + " x " + std::to_string(dim_v));
      expect_a_prefill(GetParam().options(), layer, 64, dtype);
    }
  }
}

TEST_P(KdaStageInterTest, ThreadsChangeNoBit) {
  const Options options = GetParam().options();
  StageCase one(stage_layer(), {130, 0, 17, 1}, 16, 9);
  StageCase many = one;
  for (const auto& [call, threads] : {std::pair{&one, 1}, std::pair{&many, 3}}) {
    call->gate(options, threads);
    call->intra(options, threads);
    call->inter(options, threads);
    call->output(options, threads);
  }
  EXPECT_EQ(one.g_sum.bytes(), many.g_sum.bytes());
  EXPECT_EQ(one.x.bytes(), many.x.bytes());
  EXPECT_EQ(one.w.bytes(), many.w.bytes());
  EXPECT_EQ(one.u.bytes(), many.u.bytes());
  EXPECT_EQ(one.final_state.bytes(), many.final_state.bytes());
  EXPECT_EQ(one.out.bytes(), many.out.bytes());
}

TEST_P(KdaStageInterTest, RowsOfNoSequenceAndChunksPastTheArrayAreLeftOut) {
  const Options options = GetParam().options();
  StageCase call(stage_layer(), {70}, 16, 10);
  call.q_indptr = Tensor::i32({2}, {3, 60});
  StageCase blank = call;
  call.gate(options);
  call.intra(options);
  KdaStageInterTensors inter = call.inter_tensors();
  inter.chunk_states.shape[0] = 2;  // of 4
  call.run<KdaStageInter>(options, inter);
  KdaStageOutputTensors output = call.output_tensors();
  output.chunk_states.shape[0] = 2;
  call.run<KdaStageOutput>(options, output);
  for (const auto& [written, untouched] :
       {std::pair{&call.g_sum, &blank.g_sum}, std::pair{&call.p, &blank.p},
        std::pair{&call.w, &blank.w}, std::pair{&call.u, &blank.u},
        std::pair{&call.out, &blank.out}}) {
    EXPECT_EQ(test::entries_bytes(*written, 0, 3), test::entries_bytes(*untouched, 0, 3));
    EXPECT_EQ(test::entries_bytes(*written, 60, 70), test::entries_bytes(*untouched, 60, 70));
    EXPECT_NE(test::entries_bytes(*written, 3, 35), test::entries_bytes(*untouched, 3, 35));
  }
  EXPECT_EQ(test::entries_bytes(call.chunk_states, 2, 5),
            test::entries_bytes(blank.chunk_states, 2, 5));
  EXPECT_EQ(test::entries_bytes(call.out, 35, 60), test::entries_bytes(blank.out, 35, 60));
}

TEST_P(KdaStageInterTest, WithoutSequencesNothingIsReadOrWritten) {
  const Options options = GetParam().options();
  StageCase call(stage_layer(), {70}, 16, 10);
  call.q_indptr = Tensor::i32({1}, {0});
  StageCase blank = call;
  call.gate(options);
  call.intra(options);
  call.output(options);
  for (const auto& [written, untouched] :
       {std::pair{&call.g_sum, &blank.g_sum}, std::pair{&call.q_hat, &blank.q_hat},
        std::pair{&call.p, &blank.p}, std::pair{&call.u0, &blank.u0},
        std::pair{&call.out, &blank.out}}) {
    EXPECT_EQ(written->bytes(), untouched->bytes());
  }
}

TEST(KdaStages, RefuseWhatTheirTablesDoNotList) {
  const Device cpu = Device::cpu(1);
  StageCase good(stage_layer(), {20}, 16);
  for (const int64_t chunk : {0, 8, 48, 128}) {
    KdaStageProblem problem = good.problem;
    problem.chunk = chunk;
    EXPECT_THROW(KdaStageGate::plan(problem, cpu), Error);
    EXPECT_THROW(KdaStageIntra::plan(problem, cpu), Error);
    EXPECT_THROW(KdaStageInter::plan(problem, cpu), Error);
    EXPECT_THROW(KdaStageOutput::plan(problem, cpu), Error);
  }
  KdaStageIntraTensors intra = good.intra_tensors();
  intra.p.shape[2] = 32;
  EXPECT_THROW(good.run<KdaStageIntra>({"ref"}, intra), Error);
  KdaStageInterTensors inter = good.inter_tensors();
  inter.u.dtype = DType::kBf16;
  EXPECT_THROW(good.run<KdaStageInter>({"ref"}, inter), Error);
  KdaStageOutputTensors output = good.output_tensors();
  output.q_indptr.shape[0] = 3;
  EXPECT_THROW(good.run<KdaStageOutput>({"ref"}, output), Error);
}

}  // namespace
}  // namespace fovea
