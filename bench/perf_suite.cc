#include "bench/perf_suite.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "bench/cases.h"
#include "fovea/error.h"

namespace fovea::bench {
namespace {

// The card that the peers were measured on.
constexpr double kReadGbPerS = 4330;
constexpr double kBf16Gflops = 775e3;
constexpr double kFp8Gflops = 1464e3;

class Rows {
 public:
  void section(std::string name, double peak_gflops) {
    section_ = std::move(name);
    peak_gflops_ = peak_gflops;
  }
  void add(std::string name, double peer_us, double target_us, BenchCase bench_case) {
    rows_.push_back(
        {section_, std::move(name), peer_us, target_us, std::move(bench_case), peak_gflops_});
  }
  std::vector<PerfRow> take() { return std::move(rows_); }

 private:
  std::string section_;
  double peak_gflops_ = 0;
  std::vector<PerfRow> rows_;
};

SparseMlaProblem attention(int64_t rows, int64_t heads, RowFormat format) {
  SparseMlaProblem problem;
  problem.max_rows = rows;
  problem.num_heads = heads;
  problem.topk = 2048;
  problem.softmax_scale = static_cast<float>(1 / std::sqrt(192.0));
  problem.row_format = format;
  problem.page_size = format == RowFormat::kBf16 ? 0 : 64;
  return problem;
}

// 64 regions of 32K tokens.
BenchCase decode(int64_t heads, int64_t tokens, int64_t batch) {
  return sparse_mla_case(attention(batch * tokens, heads, RowFormat::kV32), {64, 32768, tokens});
}

void add_decode(Rows& rows) {
  rows.section("Sparse MLA decode, V3.2 fp8 rows", kBf16Gflops);
  struct Shape {
    int64_t heads, tokens, batch;
    double peer_us, target_us;
  };
  for (const Shape& s :
       {Shape{128, 1, 1, 21.5, 13}, Shape{128, 1, 8, 30.5, 22}, Shape{128, 1, 32, 67.2, 50},
        Shape{128, 1, 64, 102, 88}, Shape{128, 1, 128, 194, 165}, Shape{128, 2, 64, 194, 165},
        Shape{128, 2, 128, 372, 300}, Shape{64, 1, 1, 21.9, 13}, Shape{64, 1, 32, 52, 36},
        Shape{64, 1, 128, 122, 85}, Shape{16, 1, 128, 122, 60}, Shape{8, 1, 128, 122, 60}}) {
    rows.add(fmt::format("H{}, {} token{}, batch {}", s.heads, s.tokens, s.tokens == 1 ? "" : "s",
                         s.batch),
             s.peer_us, s.target_us, decode(s.heads, s.tokens, s.batch));
  }
  rows.section("Sparse MLA decode, V4 rows", kBf16Gflops);
  struct V4Row {
    int64_t batch;
    double peer_us, target_us;
  };
  const auto v4 = [&](const char* name, int64_t heads, int64_t extra_topk,
                      std::initializer_list<V4Row> shapes) {
    for (const V4Row& s : shapes) {
      rows.add(fmt::format("{}, batch {}", name, s.batch), s.peer_us, s.target_us,
               v4_attention_case({heads, s.batch, RowFormat::kV4, extra_topk}));
    }
  };
  v4("H64, 128 window + 512", 64, 512, {{1, 17.1, 9}, {32, 29.9, 20}, {128, 53.2, 32}});
  v4("H128, 128 + 1024", 128, 1024, {{1, 18.1, 10}, {32, 49.5, 36}, {128, 110.8, 92}});
  v4("H128, window only", 128, 0, {{1, 14.2, 7}, {32, 15.6, 9}, {128, 28.4, 17}, {256, 50.5, 29}});
  rows.section("Sparse MLA decode, R512 rows", kBf16Gflops);
  for (const V4Row& s : {V4Row{1, 51, 7}, V4Row{128, 174, 17}, V4Row{256, 313, 29}}) {
    rows.add(fmt::format("H128, window only, batch {}", s.batch), s.peer_us, s.target_us,
             swa_decode_case({128, s.batch, RowFormat::kR512}));
  }
}

void add_prefill(Rows& rows) {
  rows.section("Sparse MLA prefill, bf16, 4096 query tokens, top-k 2048", kBf16Gflops);
  // Targets are rates: multiply-adds of logits and output over 4096 x 2048 keys.
  const auto target_us = [](int64_t heads, int64_t width, int64_t topk, double tflops) {
    return 2.0 * 4096 * static_cast<double>(topk * heads * (width + 512)) / (tflops * 1e6);
  };
  struct Shape {
    int64_t heads, keys;
    double peer_us, tflops;
  };
  for (const Shape& s :
       {Shape{128, 8192, 3970, 620}, Shape{128, 32768, 4050, 620}, Shape{128, 65536, 4260, 590},
        Shape{64, 8192, 2010, 600}, Shape{64, 65536, 2220, 560}}) {
    rows.add(fmt::format("H{}, {}K keys", s.heads, s.keys / 1024), s.peer_us,
             target_us(s.heads, 576, 2048, s.tflops),
             sparse_mla_case(attention(4096, s.heads, RowFormat::kBf16), {1, s.keys, 4096}));
  }
  rows.section("Sparse MLA prefill, bf16, 4096 query tokens, d 512, 8K keys", kBf16Gflops);
  const auto narrow = [&](int64_t heads, int64_t topk, double peer_us, double tflops) {
    SparseMlaProblem problem = attention(4096, heads, RowFormat::kBf16);
    problem.head_dim_qk = 512;
    problem.topk = topk;
    rows.add(fmt::format("H{}, top-k {}", heads, topk), peer_us,
             target_us(heads, 512, topk, tflops), sparse_mla_case(problem, {1, 8192, 4096}));
  };
  narrow(64, 512, 667, 500);
  narrow(128, 1024, 1970, 590);
}

void add_indexer(Rows& rows) {
  rows.section("Indexer logits, 64 heads x 128, fp8", kFp8Gflops);
  for (const auto& [keys, peer_us] :
       {std::pair<int64_t, double>{16384, 880}, {32768, 2010}, {65536, 4250}}) {
    const ScoringShape shape{IndexLayout::kRagged, 4096, keys, 1, true};
    const double pairs = 4096.0 * (static_cast<double>(keys) - 2047.5);
    rows.add(fmt::format("ragged, 4096 rows, {}K keys", keys / 1024), peer_us,
             2 * pairs * 64 * 128 / 1.15e9, index_logits_case(shape));
  }
  struct Paged {
    int64_t rows_each, batch;
    double peer_us, target_share;
  };
  // Parity: within 3 %.
  for (const Paged& p :
       {Paged{1, 1, 9.9, 1.03}, Paged{1, 32, 82.7, 1.03}, Paged{1, 128, 289.5, 1.03},
        Paged{2, 32, 91.4, 1}, Paged{2, 128, 300, 1}}) {
    const ScoringShape shape{IndexLayout::kPaged, p.rows_each * p.batch, 65536, p.rows_each};
    rows.add(fmt::format("paged, {} row{}, batch {} at 64K", p.rows_each,
                         p.rows_each == 1 ? " per request" : "s", p.batch),
             p.peer_us, p.target_share * p.peer_us, index_logits_case(shape));
  }
  rows.section("Top-2048 of fp32 rows", kBf16Gflops);
  struct TopK {
    int64_t rows, width;
    double peer_us, target_us;
  };
  for (const TopK& t :
       {TopK{1, 16384, 16.6, 9}, TopK{1, 65536, 38.4, 13}, TopK{1, 131072, 43.5, 16},
        TopK{16, 65536, 37, 14}, TopK{16, 131072, 56.6, 20}, TopK{128, 65536, 43, 22},
        TopK{128, 131072, 75, 38}, TopK{4096, 65536, 1080, 450}, TopK{4096, 131072, 1970, 900}}) {
    rows.add(fmt::format("{} x {}K", t.rows, t.width / 1024), t.peer_us, t.target_us,
             topk_select_case(t.rows, t.width, Values::kNormal));
  }
  rows.section("Fused select", kFp8Gflops);
  rows.add("4096 x 64K", 5330, 5330 / 1.25,
           index_select_case({IndexLayout::kRagged, 4096, 65536, 1, true}));
  rows.add("128 paged rows x 64K", 332.5, 332.5 / 1.1,
           index_select_case({IndexLayout::kPaged, 128, 65536}));
}

// Raw gates, logits of beta and keys to normalise, as the peers take them. FlashKDA knows the gate
// with a lower bound only.
KdaLayer kda_layer(int64_t heads, GateKind gate) {
  KdaLayer layer;
  layer.num_heads = layer.num_value_heads = heads;
  layer.gate.kind = gate;
  layer.beta_kind = BetaKind::kLogit;
  layer.beta_dtype = DType::kBf16;
  layer.normalise = true;
  return layer;
}

void add_recurrent(Rows& rows) {
  rows.section("KDA, K = V = 128", kBf16Gflops);
  const auto equal = [](size_t count, int64_t length) {
    return std::vector<int64_t>(count, length);
  };
  const std::vector<int64_t> mixed{1300, 547, 2048, 963, 271, 3063};
  struct Prefill {
    int64_t heads;
    const char* name;
    std::vector<int64_t> lengths;
    double peer_us, target_us;
  };
  for (const Prefill& p :
       {Prefill{64, "1x8192", equal(1, 8192), 1199, 650},
        Prefill{64, "8x1024", equal(8, 1024), 810, 520}, Prefill{64, "mixed 6", mixed, 1024, 600},
        Prefill{64, "32x256", equal(32, 256), 899, 560},
        Prefill{96, "1x8192", equal(1, 8192), 1408, 900},
        Prefill{96, "8x1024", equal(8, 1024), 1195, 780},
        Prefill{32, "1x8192", equal(1, 8192), 986, 450},
        Prefill{32, "8x1024", equal(8, 1024), 426, 290},
        Prefill{12, "1x8192", equal(1, 8192), 857, 300},
        Prefill{12, "8x1024", equal(8, 1024), 218, 160},
        Prefill{12, "1x2048", equal(1, 2048), 237, 110},
        Prefill{8, "1x8192", equal(1, 8192), 825, 290},
        Prefill{8, "8x1024", equal(8, 1024), 191, 140}}) {
    KdaPrefillProblem problem;
    problem.layer = kda_layer(p.heads, GateKind::kLowerBound);
    rows.add(fmt::format("H{}, {}", p.heads, p.name), p.peer_us, p.target_us,
             kda_prefill_case(problem, p.lengths));
  }
  struct Decode {
    int64_t batch;
    double peer_us, target_us;
  };
  for (const Decode& d : {Decode{1, 9.7, 7.5}, Decode{64, 180, 142}, Decode{256, 765, 560}}) {
    KdaDecodeProblem problem;
    problem.layer = kda_layer(64, GateKind::kSoftplus);
    problem.max_rows = d.batch;
    rows.add(fmt::format("decode fp32 state, H64, batch {}", d.batch), d.peer_us, d.target_us,
             kda_decode_case(problem));
  }
}

void add_blocks(Rows& rows) {
  rows.section("MSA, 64 query / 4 KV heads, block 128, top-k 16", kBf16Gflops);
  const auto prefill = [&](const char* name, int64_t heads, int64_t context, BlockLists lists,
                           double peer_us, double target_us) {
    AttendShape shape{1, 8192, context, heads, heads / 16};
    shape.lists = lists;
    rows.add(fmt::format("prefill 8192 tokens, {}, {} lists", name,
                         lists == BlockLists::kRandom ? "random" : "clustered"),
             peer_us, target_us, msa_attend_case(shape));
  };
  prefill("8K context", 64, 8192, BlockLists::kRandom, 3440, 1800);
  prefill("64K context", 64, 65536, BlockLists::kRandom, 4110, 2200);
  prefill("16/1 heads, 64K", 16, 65536, BlockLists::kRandom, 1070, 600);
  prefill("8K context", 64, 8192, BlockLists::kClustered, 3410, 1150);
  prefill("64K context", 64, 65536, BlockLists::kClustered, 3980, 1350);
  prefill("16/1 heads, 64K", 16, 65536, BlockLists::kClustered, 1010, 360);
  // 64 regions of 32K tokens, or one for each request of fewer.
  const auto decode = [&](const char* name, int64_t heads, int64_t batch, double peer_us,
                          double target_us) {
    AttendShape shape{batch, 1, 32768, heads, heads / 16};
    shape.regions = std::min<int64_t>(batch, 64);
    rows.add(fmt::format("decode, {}batch {}", name, batch), peer_us, target_us,
             msa_attend_case(shape));
  };
  decode("", 64, 1, 15.7, 9);
  decode("", 64, 16, 41.4, 26);
  decode("", 64, 64, 98.9, 80);
  decode("", 64, 128, 206, 152);
  decode("16/1 heads, ", 16, 64, 41.4, 24);
}

void add_metadata(Rows& rows) {
  rows.section("Metadata", kBf16Gflops);
  for (BenchCase& entry : metadata_refresh_cases()) {
    if (entry.name != "target_verify_64x128k") continue;
    rows.add("refresh, 64 requests x 4 rows x 128K", 210, 10, std::move(entry));
  }
}

std::string us_text(double us) { return us > 0 ? fmt::format("{:.1f}", us) : "-"; }
Json us_or_null(double us) { return us > 0 ? Json(us) : Json(); }

}  // namespace

std::vector<PerfRow> perf_rows() {
  Rows rows;
  add_decode(rows);
  add_prefill(rows);
  add_indexer(rows);
  add_recurrent(rows);
  add_blocks(rows);
  add_metadata(rows);
  return rows.take();
}

double perf_floor_us(const Work& work, double peak_gflops) {
  return std::max(work.bytes() / (kReadGbPerS * 1e3), work.flops / (peak_gflops * 1e3));
}

PerfResult run_perf_row(const PerfRow& row, const RunSettings& settings,
                        const ThroughputLimits& limits) {
  PerfResult result{row};
  RunSettings own = settings;
  own.only_cold = true;
  own.graph = settings.gpu.kind == DeviceKind::kCuda;
  CaseOutcome outcome;
  try {
    outcome = run_case(row.bench_case, own, limits);
  } catch (const Error& error) {  // the other rows still count
    result.check = std::string(kFailed) + error.what();
    return result;
  }
  for (const Rejection& rejection : outcome.rejections) {
    result.check = (rejection.wrong ? "WRONG RESULT: " : "refused: ") + rejection.reason;
  }
  if (outcome.measurements.empty()) return result;
  const Measurement& measured = outcome.measurements.front();
  result.value_us = 1e3 * measured.time.median_ms;
  result.floor_us = perf_floor_us(measured.work, row.peak_gflops);
  return result;
}

std::string perf_heading() {
  return fmt::format("{:<52} {:>9} {:>9} {:>9} {:>10} {:>7}  {}\n", "row (times in us)", "value",
                     "target", "peer", "peer/value", "floor", "check");
}

std::string perf_line(const PerfResult& r) {
  const bool has_value = r.value_us > 0;
  return fmt::format(
      "{:<52} {:>9} {:>9} {:>9} {:>10} {:>7}  {}{}\n", r.row.name, us_text(r.value_us),
      us_text(r.row.target_us), us_text(r.row.peer_us),
      has_value && r.row.peer_us > 0 ? fmt::format("{:.2f}", r.row.peer_us / r.value_us) : "-",
      has_value ? fmt::format("{:.0f}%", 100 * r.floor_us / r.value_us) : "-", r.check,
      r.met() ? ", met" : "");
}

Json perf_json(const std::string& device, const std::string& commit, const std::string& date,
               const std::vector<PerfResult>& results) {
  Json rows = Json::array();
  for (const PerfResult& r : results) {
    const bool has_value = r.value_us > 0;
    rows.push(
        Json::object({{"name", r.row.name},
                      {"section", r.row.section},
                      {"value", us_or_null(r.value_us)},
                      {"unit", "us"},
                      {"target", us_or_null(r.row.target_us)},
                      {"peer", us_or_null(r.row.peer_us)},
                      {"ratio_to_peer",
                       has_value && r.row.peer_us > 0 ? Json(r.row.peer_us / r.value_us) : Json()},
                      {"floor", us_or_null(r.floor_us)},
                      {"floor_share", has_value ? Json(r.floor_us / r.value_us) : Json()},
                      {"met", r.met()},
                      {"check", r.check}}));
  }
  return Json::object(
      {{"device", device}, {"commit", commit}, {"date", date}, {"rows", std::move(rows)}});
}

}  // namespace fovea::bench
