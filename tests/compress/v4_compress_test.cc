#include "fovea/v4_compress.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "fovea/error.h"
#include "fovea/numeric.h"
#include "fovea/row_codec.h"
#include "tests/support/compare.h"
#include "tests/support/memory.h"
#include "tests/support/rng.h"
#include "tests/support/targets.h"

namespace fovea {
namespace {

using test::Tensor;
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct RigSpec {
  int64_t ratio = 4;
  int64_t dim = 512;
  RowFormat format = RowFormat::kBf16;
  CompressorForm form = CompressorForm::kStored;
  int64_t ring = 0;  // 0: the shortest
  int64_t requests = 1;
  int64_t tokens = 40;  // of each request
  int64_t page_size = 2;
  uint64_t seed = 1;
};

// Tokens [begin, end) of a request, in one call.
struct Chunk {
  int64_t request;
  int64_t begin;
  int64_t end;
};

// Requests with all their tokens, fed to the operator piece by piece; their states are NaN and the
// pool is full of 0xAB at the start, and every request has its own pages and state, out of order.
class Rig {
 public:
  explicit Rig(const RigSpec& spec) : spec_(spec), channels_((spec.ratio == 4 ? 2 : 1) * spec.dim) {
    test::Rng rng(spec.seed);
    if (spec_.ring == 0) spec_.ring = spec.ratio == 4 ? 8 : 128;
    for (int64_t r = 0; r < spec.requests; ++r)
      gates.push_back(rng.normals(spec.tokens * 2 * channels_, 1.5f));
    ape = Tensor::f32({spec.ratio, channels_}, rng.normals(spec.ratio * channels_));
    norm_weight = Tensor::f32({spec.dim}, rng.normals(spec.dim));
    const int64_t positions = std::max<int64_t>(spec.tokens, 1);
    std::vector<float> angles;
    for (int64_t p = 0; p < positions; ++p) {
      for (int i = 0; i < 64; ++i) {
        const double angle = static_cast<double>(p) * std::pow(160000.0, -(i % 32) / 32.0);
        angles.push_back(static_cast<float>(i < 32 ? std::cos(angle) : std::sin(angle)));
      }
    }
    cos_sin = Tensor::f32({positions, 64}, angles);
    // One state more than requests, at the end.
    state = spec.form == CompressorForm::kStored
                ? Tensor(DType::kF32, {spec.requests + 1, spec_.ring, 2, channels_})
                : Tensor(DType::kF32, {spec.requests + 1, 3, spec.dim});
    state.fill_bytes(0xFF);
    std::vector<int32_t> slots, pages;
    const int64_t columns =
        std::max<int64_t>(1, (spec.tokens / spec.ratio + spec.page_size - 1) / spec.page_size);
    for (int64_t r = 0; r < spec.requests; ++r) {
      slots.push_back(static_cast<int32_t>(spec.requests - 1 - r));
      for (int64_t column = 0; column < columns; ++column)
        pages.push_back(static_cast<int32_t>((columns - 1 - column) * spec.requests + r));
    }
    state_slot = Tensor::i32({spec.requests}, slots);
    page_table = Tensor::i32({spec.requests, columns}, pages);
    page_bytes_ = page_bytes(spec.format, spec.page_size, spec.dim) + 5;
    pool = Tensor(DType::kU8, {columns * spec.requests, page_bytes_});
    pool.fill_bytes(0xAB);
  }

  V4CompressProblem problem(int64_t rows) const {
    V4CompressProblem problem;
    problem.max_rows = rows;
    problem.max_requests = spec_.requests;
    problem.ratio = spec_.ratio;
    problem.head_dim = spec_.dim;
    problem.row_format = spec_.format;
    problem.page_size = spec_.page_size;
    problem.form = spec_.form;
    return problem;
  }

  V4CompressTensors tensors() {
    return {.ape = ape,
            .norm_weight = norm_weight,
            .cos_sin = cos_sin,
            .state = state,
            .state_slot = state_slot,
            .page_table = page_table,
            .pool = pool};
  }

  // One call; returns what it emitted.
  std::vector<int32_t> feed(const Options& options, const std::vector<Chunk>& chunks,
                            int threads = 1) {
    std::vector<float> gate;
    std::vector<int32_t> positions, requests;
    for (const Chunk& chunk : chunks) {
      const std::vector<float>& from = gates[static_cast<size_t>(chunk.request)];
      gate.insert(gate.end(), from.begin() + chunk.begin * 2 * channels_,
                  from.begin() + chunk.end * 2 * channels_);
      for (int64_t t = chunk.begin; t < chunk.end; ++t) {
        positions.push_back(static_cast<int32_t>(t));
        requests.push_back(static_cast<int32_t>(chunk.request));
      }
    }
    return run(options, gate, positions, requests, threads);
  }

  std::vector<int32_t> run(const Options& options, const std::vector<float>& gate,
                           const std::vector<int32_t>& positions,
                           const std::vector<int32_t>& requests, int threads = 1) {
    const auto rows = static_cast<int64_t>(positions.size());
    const Tensor kv_gate = Tensor::f32({rows, 2 * channels_}, gate);
    const Tensor position_list = Tensor::i32({rows}, positions);
    const Tensor request_list = Tensor::i32({rows}, requests);
    Tensor emitted(DType::kI32, {rows});
    emitted.fill_bytes(0x55);
    V4CompressTensors call = tensors();
    call.kv_gate = kv_gate;
    call.positions = position_list;
    call.row_to_request = request_list;
    call.emitted = emitted;
    test::run(V4Compress::plan(problem(rows), test::device_of(options, threads), options), call);
    return emitted.values<int32_t>();
  }

  int32_t slot_of(int64_t r, int64_t g) const {
    const int64_t columns = page_table.view().shape[1];
    return page_table.data<int32_t>()[r * columns + g / spec_.page_size] *
               static_cast<int32_t>(spec_.page_size) +
           static_cast<int32_t>(g % spec_.page_size);
  }

  // The stored row, decoded.
  std::vector<double> row(int32_t slot) const {
    Tensor out(DType::kBf16, {1, spec_.dim});
    const RowCodecProblem codec{1, spec_.format, spec_.page_size, spec_.dim};
    const Tensor slots = Tensor::i32({1}, {slot});
    test::run(UnpackRows::plan(codec, Device::cpu(1), {"ref"}), {pool, slots, out});
    return test::to_doubles(out);
  }

  // Row g of request r from the formula.
  std::vector<double> expected(int64_t r, int64_t g) const {
    const bool overlaps = spec_.ratio == 4;
    std::vector<long double> e;
    for (int64_t i = 0; i < spec_.dim; ++i) {
      long double sum = 0, value = 0;
      for (int64_t t = (overlaps ? g - 1 : g) * spec_.ratio; t < (g + 1) * spec_.ratio; ++t) {
        if (t < 0) continue;
        const int64_t channel = overlaps && t >= g * spec_.ratio ? spec_.dim + i : i;
        const float* gate = gates[static_cast<size_t>(r)].data() + t * 2 * channels_;
        const long double weight =
            std::exp(static_cast<long double>(gate[channels_ + channel]) +
                     ape.data<float>()[t % spec_.ratio * channels_ + channel]);
        sum += weight;
        value += weight * gate[channel];
      }
      e.push_back(value / sum);
    }
    long double squares = 0;
    for (const long double x : e) squares += x * x;
    const long double rms = std::sqrt(squares / static_cast<long double>(spec_.dim) + 1e-6L);
    std::vector<double> y;
    for (size_t i = 0; i < e.size(); ++i)
      y.push_back(static_cast<double>(e[i] / rms * norm_weight.data<float>()[i]));
    for (size_t i = 0; i < 32; ++i) {
      const float* angles = cos_sin.data<float>() + g * spec_.ratio * 64;
      double* x = y.data() + spec_.dim - 64 + 2 * i;
      const double a = x[0], b = x[1];
      x[0] = a * angles[i] - b * angles[32 + i];
      x[1] = b * angles[i] + a * angles[32 + i];
    }
    return y;
  }

  void expect_row(int64_t r, int64_t g) const {
    const std::vector<double> found = row(slot_of(r, g)), wanted = expected(r, g);
    const double largest =
        std::accumulate(wanted.begin(), wanted.end(), 0.0,
                        [](double m, double x) { return std::max(m, std::fabs(x)); });
    for (size_t i = 0; i < wanted.size(); ++i) {
      // One rounding to bf16 of what is within 2e-5 of the formula; then, for codes, half a step of
      // three mantissa bits, or of the smallest codes.
      double limit = std::fabs(wanted[i]) / 255 + largest * 2e-5;
      if (spec_.format != RowFormat::kBf16)
        limit += std::fabs(wanted[i]) / 16 + largest / 448 * 0x1p-8;
      ASSERT_NEAR(found[i], wanted[i], limit)
          << "request " << r << " row " << g << " channel " << i;
    }
  }

  // States of the requests alone: the one more must stay as it is.
  std::vector<uint8_t> states() const {
    const size_t bytes = state.bytes().size() / static_cast<size_t>(spec_.requests + 1);
    EXPECT_TRUE(std::all_of(state.bytes().end() - static_cast<int64_t>(bytes), state.bytes().end(),
                            [](uint8_t byte) { return byte == 0xFF; }));
    return {state.bytes().begin(), state.bytes().end() - static_cast<int64_t>(bytes)};
  }

  int64_t channels() const { return channels_; }

  std::vector<std::vector<float>> gates;  // [tokens, 2*c*d] of each request
  Tensor ape, norm_weight, cos_sin, state, state_slot, page_table, pool;

 private:
  RigSpec spec_;
  int64_t channels_;
  int64_t page_bytes_ = 0;
};

class V4CompressTest : public test::TargetTest {
 protected:
  Options options() const { return GetParam().options(); }
};
INSTANTIATE_TEST_SUITE_P(Targets, V4CompressTest,
                         testing::ValuesIn(test::targets_of("v4_compress")), test::target_name);

const RigSpec kSpecs[] = {
    {.ratio = 4},
    {.ratio = 4, .format = RowFormat::kV4, .page_size = 64},
    {.ratio = 4, .dim = 128, .format = RowFormat::kI132, .page_size = 64},
    {.ratio = 128, .format = RowFormat::kV4, .tokens = 400},
    {.ratio = 128, .form = CompressorForm::kOnline, .tokens = 400},
};

TEST_P(V4CompressTest, RowsFollowTheFormula) {
  for (RigSpec spec : kSpecs) {
    spec.requests = 2;
    Rig rig(spec);
    const int64_t n = spec.tokens - 1;
    const std::vector<int32_t> emitted = rig.feed(options(), {{1, 0, n}, {0, 0, n}});
    for (int64_t r = 0; r < 2; ++r) {
      for (int64_t t = 0; t < n; ++t) {
        const bool completes = (t + 1) % spec.ratio == 0;
        EXPECT_EQ(emitted[static_cast<size_t>((1 - r) * n + t)],
                  completes ? rig.slot_of(r, t / spec.ratio) : -1);
        if (completes) rig.expect_row(r, t / spec.ratio);
      }
    }
  }
}

TEST_P(V4CompressTest, CuttingAPromptChangesNoBit) {
  for (const RigSpec& spec : kSpecs) {
    Rig whole(spec);
    whole.feed(options(), {{0, 0, spec.tokens}});
    const std::vector<std::vector<int64_t>> cuts =
        spec.ratio == 4
            ? std::vector<std::vector<int64_t>>{{1},     {2},    {3},    {4},         {5},
                                                {7},     {8},    {9},    {12},        {13},
                                                {3, 10}, {1, 2}, {4, 8}, {11, 12, 13}}
            : std::vector<std::vector<int64_t>>{{1},        {127},      {128},     {129},
                                                {100, 300}, {128, 256}, {255, 257}};
    for (std::vector<int64_t> ends : cuts) {
      Rig cut(spec);
      ends.push_back(spec.tokens);
      int64_t begin = 0;
      for (const int64_t end : ends) {
        cut.feed(options(), {{0, begin, end}}, 2);
        begin = end;
      }
      EXPECT_EQ(cut.pool.bytes(), whole.pool.bytes()) << "cut at " << ends[0];
      EXPECT_EQ(cut.states(), whole.states()) << "cut at " << ends[0];
    }
  }
}

TEST_P(V4CompressTest, TokenByTokenEqualsPrefill) {
  for (RigSpec spec : kSpecs) {
    for (const int64_t n : {1, 3, 4, 5, 7, 8, 9, 127, 128, 129, 257}) {
      if (spec.ratio == 4 && n > 40) continue;
      Rig prefill(spec), steps(spec);
      prefill.feed(options(), {{0, 0, n}});
      for (int64_t t = 0; t < n; ++t) {
        const std::vector<int32_t> emitted = steps.feed(options(), {{0, t, t + 1}});
        EXPECT_EQ(emitted[0] >= 0, (t + 1) % spec.ratio == 0);
      }
      EXPECT_EQ(steps.pool.bytes(), prefill.pool.bytes()) << n << " tokens";
      EXPECT_EQ(steps.states(), prefill.states()) << n << " tokens";
    }
  }
}

TEST_P(V4CompressTest, NothingDependsOnThreadsOrOtherRequests) {
  for (RigSpec spec : kSpecs) {
    spec.requests = 3;
    Rig together(spec), threaded(spec), alone(spec);
    const std::vector<Chunk> chunks = {{2, 0, spec.tokens}, {0, 0, 3}, {1, 0, spec.tokens - 1}};
    together.feed(options(), chunks);
    threaded.feed(options(), chunks, 3);
    for (const Chunk& chunk : chunks) alone.feed(options(), {chunk});
    EXPECT_EQ(threaded.pool.bytes(), together.pool.bytes());
    EXPECT_EQ(threaded.states(), together.states());
    EXPECT_EQ(alone.pool.bytes(), together.pool.bytes());
    EXPECT_EQ(alone.states(), together.states());
  }
}

TEST_P(V4CompressTest, OnlineEqualsStored) {
  RigSpec spec{.ratio = 128, .tokens = 300};
  Rig stored(spec);
  spec.form = CompressorForm::kOnline;
  Rig online(spec);
  stored.feed(options(), {{0, 0, 150}});
  stored.feed(options(), {{0, 150, 300}});
  online.feed(options(), {{0, 0, 150}});
  online.feed(options(), {{0, 150, 300}});
  for (int64_t g = 0; g < 2; ++g) {
    const std::vector<double> a = stored.row(stored.slot_of(0, g)),
                              b = online.row(online.slot_of(0, g));
    for (size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], std::fabs(a[i]) / 127 + 1e-4);
  }
}

TEST_P(V4CompressTest, AFinishedGroupLeavesAnEmptyOnlineState) {
  Rig rig({.ratio = 128, .form = CompressorForm::kOnline, .tokens = 300});
  rig.feed(options(), {{0, 0, 256}});
  for (int64_t i = 0; i < 512; ++i) {
    EXPECT_EQ(rig.state.data<float>()[i], -kInf);
    EXPECT_EQ(rig.state.data<float>()[512 + i], 0);
    EXPECT_EQ(rig.state.data<float>()[1024 + i], 0);
  }
}

TEST_P(V4CompressTest, TheRingHoldsTheLastTokensAndKeepsOlderOnes) {
  Rig rig({.ratio = 4, .ring = 11, .tokens = 40});
  const int64_t channels = rig.channels();
  const auto holds = [&](int64_t entry, int64_t t) {
    const float* at = rig.state.data<float>() + entry * 2 * channels;
    const float* gate = rig.gates[0].data() + t * 2 * channels;
    const float* ape = rig.ape.data<float>() + t % 4 * channels;
    for (int64_t i = 0; i < channels; ++i) {
      if (at[i] != gate[i] || at[channels + i] != gate[channels + i] + ape[i]) return false;
    }
    return true;
  };
  rig.feed(options(), {{0, 0, 5}});
  for (int64_t t = 0; t < 5; ++t) EXPECT_TRUE(holds(t, t));
  for (int64_t entry = 5; entry < 11; ++entry)
    EXPECT_TRUE(std::isnan(rig.state.data<float>()[entry * 2 * channels]));
  rig.feed(options(), {{0, 5, 40}});
  for (int64_t t = 29; t < 40; ++t) EXPECT_TRUE(holds(t % 11, t)) << "token " << t;
}

TEST_P(V4CompressTest, ADraftTakenBackLeavesNoTrace) {
  // From every residue: n rows are verified, a of them kept, the rest comes anew with other values.
  for (const auto& [ratio, ring] : {std::pair<int64_t, int64_t>{4, 16}, {128, 136}}) {
    const int64_t base = ratio == 4 ? 12 : 250;
    for (int64_t residue = 0; residue < 4; ++residue) {
      for (const int64_t n : {1, 2, 5, 10}) {
        for (const int64_t accepted : {int64_t{1}, (n + 1) / 2, n}) {
          const RigSpec spec{.ratio = ratio, .dim = 128, .ring = ring, .tokens = base + 40};
          Rig plain(spec), drafted(spec);
          const int64_t start = base + residue, kept = start + accepted;
          plain.feed(options(), {{0, 0, start + 20}});
          drafted.feed(options(), {{0, 0, start}});
          const std::vector<float> truth = drafted.gates[0];
          const auto first_wrong = drafted.gates[0].begin() + kept * 2 * drafted.channels();
          std::fill(first_wrong, drafted.gates[0].end(), kNan);
          drafted.feed(options(), {{0, start, start + n}});
          drafted.gates[0] = truth;
          drafted.feed(options(), {{0, kept, start + 20}});
          EXPECT_EQ(drafted.pool.bytes(), plain.pool.bytes())
              << "ratio " << ratio << ", " << n << " drafts at " << start << ", kept " << accepted;
        }
      }
    }
  }
}

TEST_P(V4CompressTest, PaddingIsNeitherReadNorWritten) {
  for (const RigSpec& spec : kSpecs) {
    Rig expected(spec), rig(spec);
    const int64_t width = 2 * rig.channels();
    const std::vector<int32_t> wanted = expected.feed(options(), {{0, 0, 9}});
    // Rows of no request, of requests that are not there and at negative positions around and the
    // request in two runs, all of them NaN.
    std::vector<float> gate;
    std::vector<int32_t> positions, requests, live;
    const auto pad = [&](int32_t position, int32_t request) {
      gate.insert(gate.end(), static_cast<size_t>(width), kNan);
      positions.push_back(position);
      requests.push_back(request);
    };
    pad(3, -1);
    pad(-1, 0);
    for (int32_t t = 0; t < 9; ++t) {
      live.push_back(static_cast<int32_t>(positions.size()));
      const auto from = rig.gates[0].begin() + t * width;
      gate.insert(gate.end(), from, from + width);
      positions.push_back(t);
      requests.push_back(0);
    }
    pad(9, 1);
    pad(127, INT_MAX);
    pad(INT_MIN, 0);
    pad(7, INT_MIN);
    const std::vector<int32_t> emitted = rig.run(options(), gate, positions, requests, 2);
    for (size_t row = 0; row < emitted.size(); ++row) {
      const auto found = std::find(live.begin(), live.end(), static_cast<int32_t>(row));
      EXPECT_EQ(emitted[row],
                found == live.end() ? -1 : wanted[static_cast<size_t>(found - live.begin())]);
    }
    EXPECT_EQ(rig.pool.bytes(), expected.pool.bytes());
    EXPECT_EQ(rig.states(), expected.states());
  }
}

TEST_P(V4CompressTest, ARequestWithoutAStateIsPadding) {
  for (const RigSpec& spec : kSpecs) {
    for (const int32_t slot : {-1, 2, INT_MIN, INT_MAX}) {
      Rig rig(spec);
      rig.state_slot.data<int32_t>()[0] = slot;
      const Rig before = rig;
      const std::vector<int32_t> emitted = rig.feed(options(), {{0, 0, 8}});
      EXPECT_EQ(emitted, std::vector<int32_t>(8, -1));
      EXPECT_EQ(rig.pool.bytes(), before.pool.bytes());
      EXPECT_EQ(rig.state.bytes(), before.state.bytes());
    }
  }
}

TEST_P(V4CompressTest, ARowWithoutAPageIsNotStoredAndTheStateAdvances) {
  for (const RigSpec& spec : kSpecs) {
    Rig expected(spec);
    expected.feed(options(), {{0, 0, spec.tokens}});
    const int64_t pages = expected.pool.view().shape[0];
    for (const int32_t page : {int32_t{-1}, static_cast<int32_t>(pages), INT_MIN, INT_MAX}) {
      Rig rig(spec);
      rig.page_table.data<int32_t>()[0] = page;
      const std::vector<int32_t> emitted = rig.feed(options(), {{0, 0, spec.tokens}});
      for (int64_t t = spec.ratio - 1; t < spec.tokens; t += spec.ratio) {
        const int64_t g = t / spec.ratio;
        EXPECT_EQ(emitted[static_cast<size_t>(t)], g < spec.page_size ? -1 : rig.slot_of(0, g));
        if (g >= spec.page_size) rig.expect_row(0, g);
      }
      EXPECT_EQ(rig.states(), expected.states());
      const int64_t page_bytes = rig.pool.view().shape[1];
      const auto skipped = static_cast<int64_t>(expected.page_table.data<int32_t>()[0]);
      EXPECT_TRUE(std::all_of(rig.pool.bytes().begin() + skipped * page_bytes,
                              rig.pool.bytes().begin() + (skipped + 1) * page_bytes,
                              [](uint8_t byte) { return byte == 0xAB; }));
    }
  }
  // A table that is too narrow.
  Rig rig({.ratio = 4, .tokens = 40});
  rig.page_table = Tensor::i32({1, 1}, {2});
  const std::vector<int32_t> emitted = rig.feed(options(), {{0, 0, 40}});
  for (int64_t t = 3; t < 40; t += 4)
    EXPECT_EQ(emitted[static_cast<size_t>(t)], t < 8 ? 4 + t / 4 : -1);
}

TEST_P(V4CompressTest, PositionsPastTheTableTurnByItsLastRow) {
  Rig expected({.ratio = 4, .tokens = 40}), rig({.ratio = 4, .tokens = 40});
  const std::vector<float> all = rig.cos_sin.values<float>();
  rig.cos_sin = Tensor::f32({9, 64}, {all.begin(), all.begin() + 9 * 64});
  for (int64_t p = 9; p < 40; ++p)
    std::copy_n(all.data() + 8 * 64, 64, expected.cos_sin.data<float>() + p * 64);
  rig.feed(options(), {{0, 0, 40}});
  expected.feed(options(), {{0, 0, 40}});
  EXPECT_EQ(rig.pool.bytes(), expected.pool.bytes());
}

TEST_P(V4CompressTest, LogitsOfMinusInfinityHaveNoWeight) {
  for (const RigSpec& spec : kSpecs) {
    if (spec.format == RowFormat::kI132) continue;
    Rig rig(spec);
    const int64_t width = 2 * rig.channels();
    for (int64_t t = 0; t < spec.ratio; ++t) {
      for (int64_t i = 0; i < rig.channels(); i += 2) {
        // Channel 0 (modulo 4) has no weight at all, channel 2 all of it on the last token.
        if (i % 4 == 0 || t + 1 < spec.ratio)
          rig.gates[0][static_cast<size_t>(t * width + rig.channels() + i)] = -kInf;
      }
    }
    const std::vector<int32_t> emitted = rig.feed(options(), {{0, 0, spec.ratio}});
    const std::vector<double> row = rig.row(emitted.back());
    for (size_t i = 0; i < 448; i += 4) EXPECT_EQ(row[i], 0) << i;
    for (const double x : row) EXPECT_TRUE(std::isfinite(x));
  }
}

TEST_P(V4CompressTest, ReadsAndWritesNothingOutsideTheTensors) {
  for (const RigSpec& spec : kSpecs) {
    Rig expected(spec), rig(spec);
    expected.feed(options(), {{0, 0, 30}});
    const int64_t width = 2 * rig.channels();
    const auto guard = [](const auto* data, size_t bytes, test::GuardedMemory& memory) {
      std::memcpy(memory.data(), data, bytes);
    };
    const size_t gate_bytes = static_cast<size_t>(30 * width) * 4;
    test::GuardedMemory gate(gate_bytes), ape(rig.ape.bytes().size()),
        weight(rig.norm_weight.bytes().size()), state(rig.state.bytes().size()),
        pool(rig.pool.bytes().size()), emitted(30 * 4);
    guard(rig.gates[0].data(), gate_bytes, gate);
    guard(rig.ape.bytes().data(), rig.ape.bytes().size(), ape);
    guard(rig.norm_weight.bytes().data(), rig.norm_weight.bytes().size(), weight);
    guard(rig.state.bytes().data(), rig.state.bytes().size(), state);
    guard(rig.pool.bytes().data(), rig.pool.bytes().size(), pool);
    std::vector<int32_t> positions(30);
    std::iota(positions.begin(), positions.end(), 0);
    const Tensor position_list = Tensor::i32({30}, positions);
    const Tensor request_list = Tensor::i32({30}, std::vector<int32_t>(30, 0));
    V4CompressTensors call = rig.tensors();
    call.kv_gate = make_tensor(static_cast<const void*>(gate.data()), DType::kF32, {30, width});
    call.positions = position_list;
    call.row_to_request = request_list;
    call.ape.data = ape.data();
    call.norm_weight.data = weight.data();
    call.state.data = state.data();
    call.pool.data = pool.data();
    call.emitted = make_tensor(emitted.data(), DType::kI32, {30});
    const V4Compress plan = V4Compress::plan(rig.problem(30), GetParam().device(1), options());
    EXPECT_EQ(plan.workspace_bytes(), 0u);
    plan.run(call, {});
    EXPECT_EQ(std::memcmp(pool.data(), expected.pool.bytes().data(), expected.pool.bytes().size()),
              0);
    EXPECT_EQ(
        std::memcmp(state.data(), expected.state.bytes().data(), expected.state.bytes().size()), 0);
    const test::AllocationCounter counter;
    plan.run(call, {});
    EXPECT_EQ(counter.count(), 0);
  }
}

TEST(V4Compress, RefusesWhatItsTableDoesNotList) {
  Rig rig({.ratio = 4, .ring = 9});
  const V4CompressProblem good = rig.problem(8);
  const Device cpu = Device::cpu(1);
  const auto refuse_plan = [&](auto&& change) {
    V4CompressProblem problem = good;
    change(problem);
    EXPECT_THROW(V4Compress::plan(problem, cpu), Error);
  };
  refuse_plan([](V4CompressProblem& p) { p.max_rows = -1; });
  refuse_plan([](V4CompressProblem& p) { p.max_requests = int64_t{1} << 31; });
  refuse_plan([](V4CompressProblem& p) { p.ratio = 8; });
  refuse_plan([](V4CompressProblem& p) { p.head_dim = 48; });
  refuse_plan([](V4CompressProblem& p) { p.head_dim = 1024; });
  refuse_plan([](V4CompressProblem& p) { p.head_dim = 100; });
  refuse_plan([](V4CompressProblem& p) { p.row_format = RowFormat::kV32; });
  refuse_plan([](V4CompressProblem& p) { p.row_format = RowFormat::kI132; });  // d is 512
  refuse_plan([](V4CompressProblem& p) { p.row_format = RowFormat::kV4, p.head_dim = 128; });
  refuse_plan([](V4CompressProblem& p) { p.page_size = 0; });
  refuse_plan([](V4CompressProblem& p) { p.page_size = 257; });
  refuse_plan([](V4CompressProblem& p) { p.form = CompressorForm::kOnline; });  // of ratio 4
  refuse_plan([](V4CompressProblem& p) {
    p.ratio = 128, p.form = CompressorForm::kOnline, p.rows_per_request = 2;
  });
  refuse_plan([](V4CompressProblem& p) { p.rows_per_request = -1; });
  for (const float eps : {-1e-6f, kInf, kNan})
    refuse_plan([eps](V4CompressProblem& p) { p.eps = eps; });

  const auto run_with = [&](auto&& change, const V4CompressProblem& problem) {
    const Tensor gate(DType::kF32, {8, 2 * rig.channels()});
    const Tensor list = Tensor::i32({8}, {0, 1, 2, 3, 4, 5, 6, 7});
    const Tensor requests = Tensor::i32({8}, std::vector<int32_t>(8, 0));
    Tensor emitted(DType::kI32, {8});
    emitted.fill_bytes(0x55);
    V4CompressTensors call = rig.tensors();
    call.kv_gate = gate;
    call.positions = list;
    call.row_to_request = requests;
    call.emitted = emitted;
    change(call);
    const Rig before = rig;
    EXPECT_THROW(V4Compress::plan(problem, cpu).run(call, {}), Error);
    EXPECT_EQ(rig.pool.bytes(), before.pool.bytes());
    EXPECT_EQ(emitted.bytes(), std::vector<uint8_t>(32, 0x55));
  };
  const auto refuse = [&](auto&& change) { run_with(change, good); };
  refuse([](V4CompressTensors& t) { t.kv_gate = {}; });
  refuse([](V4CompressTensors& t) { t.kv_gate.shape[1] -= 1; });
  refuse([](V4CompressTensors& t) { t.ape.shape[0] = 3; });
  refuse([](V4CompressTensors& t) { t.norm_weight.shape[0] = 511; });
  refuse([](V4CompressTensors& t) { t.positions.shape[0] = 7; });
  refuse([](V4CompressTensors& t) { t.row_to_request.dtype = DType::kI64; });
  refuse([](V4CompressTensors& t) { t.cos_sin.shape[1] = 32; });
  refuse([](V4CompressTensors& t) { t.cos_sin.shape[0] = 0; });
  refuse([](V4CompressTensors& t) { t.state.shape[1] = 7; });
  refuse([](V4CompressTensors& t) { t.state.rank = 3; });
  refuse([](V4CompressTensors& t) { t.state_slot.shape[0] = 2; });
  refuse([](V4CompressTensors& t) { t.page_table.shape[0] = 2; });
  refuse([](V4CompressTensors& t) { t.pool.shape[1] = 2 * 1024 - 1; });
  refuse([](V4CompressTensors& t) { t.emitted.shape[0] = 7; });
  // A verify of 4 rows needs 8 - 2 + 4 entries.
  V4CompressProblem verify = good;
  verify.rows_per_request = 4;
  run_with([](V4CompressTensors&) {}, verify);
}

}  // namespace
}  // namespace fovea
