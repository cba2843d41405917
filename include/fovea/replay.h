#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "fovea/ceilings.h"
#include "fovea/device.h"
#include "fovea/export.h"
#include "fovea/metadata.h"
#include "fovea/trace.h"

/// Replay of a request trace through a serving backend: continuous batching, paged caches with
/// prefix sharing, every attention operator really computed, sampled rows recomputed in fp64.
namespace fovea {

/// When requests may be admitted.
enum class Arrivals : uint8_t {
  kAsap,   ///< In row order as soon as budget and capacity allow.
  kTrace,  ///< Not before their timestamp on a virtual clock (VirtualCostModel).
};

/// "asap", "trace".
FOVEA_API std::string_view to_string(Arrivals arrivals) noexcept;

/// Parses those words. Throws Error(kInvalidArgument) listing them.
FOVEA_API Arrivals parse_arrivals(std::string_view text);

/// How the draft model catches up after a verification.
enum class DraftMode : uint8_t {
  kV1,  ///< DRAFT_EXTEND: the rows that stay, a number that differs from request to request.
  kV2,  ///< DRAFT_EXTEND_V2: every verified row; rejected ones are overwritten later.
};

/// "v1", "v2".
FOVEA_API std::string_view to_string(DraftMode mode) noexcept;

/// Parses those words. Throws Error(kInvalidArgument) listing them.
FOVEA_API DraftMode parse_draft_mode(std::string_view text);

/// Largest ReplayOptions::draft_tokens.
inline constexpr int64_t kMaxDraftTokens = 7;

/// Cost of a step on the virtual clock, never measured:
///   ms = token_scale * (prefill_rows * prefill_ms_per_row
///                       + (decode_rows > 0 ? decode_step_ms : 0)
///                       + decode_rows * decode_ms_per_row
///                       + draft_forwards * draft_forward_ms)
/// One replayed token stands for token_scale tokens, hence the factor. A round of drafts has
/// draft_tokens + 1 decode rows per request and draft_tokens forwards of the draft model.
struct VirtualCostModel {
  double prefill_ms_per_row = 0.05;
  double decode_step_ms = 20;
  double decode_ms_per_row = 0.1;
  double draft_forward_ms = 1;
};

struct ReplayOptions {
  std::string model = "deepseek-v3.2";
  /// Where the backend runs. num_threads: of the CPU, which on a GPU makes tensors and checks rows.
  Device device = Device{};
  int64_t tp = 1;                  ///< Tensor parallel size; divides the model's heads.
  std::string layers = "pattern";  ///< "pattern" (one of each kind), "all", a number N (the first
                                   ///< N), or a list "0,3,60".
  int64_t skip = 0;                ///< Requests of the trace left out at its start.
  int64_t max_requests = 0;        ///< 0: all.
  int64_t token_scale = 1;         ///< S, divides 512: a request of n tokens becomes ceil(n / S).
  int64_t topk = 0;                ///< Selection width, in tokens or blocks; 0: the model's.
  int64_t page = 0;      ///< Tokens per page; 0: the model's, made smaller until it divides 512/S.
  int64_t chunk = 8192;  ///< Prefill rows per step.
  int64_t max_batch = 64;    ///< Requests running at once.
  int64_t cache_tokens = 0;  ///< Capacity of the cache; 0: enough for the whole trace, at most 4
                             ///< GiB on the CPU, 60 % of a GPU's free memory.
  bool prefix_sharing = true;
  bool mixed = false;        ///< Decode rows join prefill chunks; such a step drafts nothing.
  int64_t draft_tokens = 0;  ///< D, tokens drafted per request and round, 1..kMaxDraftTokens; 0: no
                             ///< speculative decoding.
  double accept = 0.7;       ///< Chance that a drafted token is accepted if those before it were.
  DraftMode draft_mode = DraftMode::kV1;
  Arrivals arrivals = Arrivals::kAsap;
  bool spread_arrivals = false;  ///< Requests with equal timestamps are spread, seeded, over the
                                 ///< time to the next one.
  VirtualCostModel virtual_cost;
  uint64_t seed = 0;
  bool deterministic = true;
  /// Decode steps and rounds of drafts run in step plans of 1, 2, 4, ... requests, each captured
  /// once, metadata and all layers, and replayed. The CPU runs the recorded calls one by one.
  bool graph = false;
  int64_t check_rows = 0;      ///< Rows to recompute in fp64; 0: none.
  std::string implementation;  ///< Forces one implementation for every operator that has it.
  std::optional<ThroughputLimits> ceilings;  ///< Of this machine, for roofline shares.
  /// Fault injection for tests: "", "page", "snapshot" (kimi-linear), "window" (deepseek-v4) or
  /// "launch:N" (docs/testing.md).
  std::string inject;
};

/// One simulated layer.
struct ReplayLayer {
  int64_t id = 0;
  std::string kind;  ///< "dsa", "kda", "mla", or "draft" for the layer of the draft model
  double ms = 0;     ///< Time of its forward calls; of a replayed graph an equal share.
  int64_t checked_rows = 0;
};

/// Totals of one operator on the layers of one kind, of the calls that were no part of a graph.
struct ReplayOperator {
  std::string name;
  std::string layer_kind;
  std::string implementation;
  int64_t calls = 0;
  double ms = 0;
  double flops = 0;
  double bytes = 0;
  double time_share = 0;                 ///< Of the summed step time, 0..1.
  std::optional<double> roofline_share;  ///< Sum of roofline_ms of the calls / ms; absent without
                                         ///< ceilings.
};

enum class StepKind : uint8_t {
  kPrefill,
  kDecode,  ///< One row of every running request.
  kMixed,
  kVerify,  ///< A round of drafts: draft steps, verification, draft extend.
  kIdle,    ///< No request runs: the server waits for an arrival.
};

/// "prefill", "decode", "mixed", "verify", "idle".
FOVEA_API std::string_view to_string(StepKind kind) noexcept;

/// One step of the run, for charts.
struct ReplayStep {
  StepKind kind = StepKind::kPrefill;
  double virtual_ms = 0;  ///< Virtual clock at the start of the step.
  double real_ms = 0;     ///< Wall time since the first step, at the start of the step.
  double step_ms = 0;     ///< Measured time of the backend: metadata and every layer's forward.
  int64_t running = 0;    ///< Requests holding pages during the step.
  int64_t waiting = 0;    ///< Arrived requests not running (preempted ones included).
  int64_t prefill_tokens = 0;
  int64_t decode_tokens = 0;  ///< Decode rows that stay: one per generated token.
  int64_t pages_used = 0;     ///< Pages held by requests during the step.
  int64_t pages_cached = 0;   ///< Published pages that nobody holds.
  int64_t hit_tokens = 0;   ///< Prompt tokens found in the cache by requests admitted in the step.
  int64_t preempted = 0;    ///< Requests preempted to form the step.
  int64_t verify_rows = 0;  ///< kVerify: rows of the target model, rejected ones included.
};

/// What one forward mode added up to, on the target's layers or on the draft model's.
struct ReplayMode {
  ForwardMode mode = ForwardMode::kExtend;
  bool draft = false;  ///< Of the draft model.
  int64_t steps = 0;   ///< Batches; a draft chain counts each of its steps.
  int64_t rows = 0;    ///< Without padding.
  double ms = 0;       ///< Metadata and forwards. A batch that both models run counts its metadata
                       ///< for the target.
};

/// Speculative decoding, summed over the run.
struct ReplayDrafts {
  int64_t rounds = 0;         ///< Steps of kind kVerify.
  int64_t verifications = 0;  ///< Requests of all rounds.
  int64_t drafted = 0;        ///< Drafted tokens: draft_tokens per verification.
  int64_t decided = 0;   ///< Of those, accepted or first to be rejected; the others lie behind a
                         ///< rejected one or past the end of the output.
  int64_t accepted = 0;  ///< Drafted tokens that became output.
  double rate = 0;       ///< accepted / decided: what ReplayOptions::accept asks for.
  int64_t rolled_back_rows = 0;  ///< Rows of the verifications that did not stay.
  /// Verifications by accepted tokens, 0..draft_tokens.
  std::vector<int64_t> accepted_lengths;
};

/// Captured graphs: one per bucket of requests and part of a round.
struct ReplayGraphs {
  int64_t captures = 0;
  int64_t replays = 0;
  int64_t nodes = 0;  ///< Kernels, copies and fills of all of them; 0 on the CPU.
};

enum class RequestOutcome : uint8_t { kCompleted, kRejected };

/// One request of the run, for charts and messages. Tokens are replayed tokens.
struct ReplayRequest {
  int64_t id = 0;  ///< Row of the trace, counted from 0 before `skip`.
  RequestOutcome outcome = RequestOutcome::kCompleted;
  double arrival_ms = 0;  ///< Trace time (spread, if asked).
  double first_token_virtual_ms = 0;
  double finish_virtual_ms = 0;
  int64_t prompt_tokens = 0;
  int64_t output_tokens = 0;
  int64_t hit_tokens = 0;
  int64_t preemptions = 0;
  std::string message;  ///< Why it was rejected.
};

/// One checked row that was wrong.
struct CheckFailure {
  int64_t request = 0;
  int64_t position = 0;
  int64_t layer = 0;
  std::string layer_kind;  ///< "dsa", "kda", "mla" or "draft"
  std::string op;          ///< The operator whose result was wrong: "sparse_mla", "kda_prefill", ..
  std::string kind;        ///< "selection", "output" or "lse".
  std::string detail;

  /// One line naming all of it.
  FOVEA_API std::string message() const;
};

struct CheckSummary {
  int64_t rows = 0;
  int64_t rows_prefill = 0;
  int64_t rows_decode = 0;
  int64_t rows_selecting = 0;  ///< Rows longer than topk.
  int64_t requests = 0;        ///< Distinct requests among them.
  int64_t mismatches = 0;      ///< Rows with at least one failure.
  double worst = 0;            ///< Largest relative rms error of an output row (limit 5e-3).
  double worst_lse = 0;        ///< Largest |lse error| (limit 1e-3).
  double selection_slack = 0;  ///< Largest misplacement of a selected or left-out key, as a part of
                               ///< the row's max |logit| (limit 2^-16; of fp8 sums 2^-10).
  int64_t rows_requantised = 0;  ///< Rows whose selection is right for the index codes of the
                                 ///< implementation that ran, which differ from the reference's by
                                 ///< a rounding, and not for the reference's own.
  std::vector<CheckFailure> failures;  ///< The first 32.
};

/// Wall time by phase, seconds.
struct ReplayPhases {
  double schedule_s = 0;   ///< Step composition, pages, tables.
  double generate_s = 0;   ///< Input tensors.
  double attention_s = 0;  ///< The backend: what step_ms sums.
  double digest_s = 0;
  double check_s = 0;
  double total_s = 0;
};

struct ReplayResult {
  std::string version;
  std::string device;
  int threads = 1;
  std::string trace_source;
  ReplayOptions options;  ///< As given.
  int64_t page = 0;       ///< Tokens per page used.
  int64_t topk = 0;
  int64_t num_heads = 0;           ///< Local query heads.
  bool sharing = true;             ///< Prefix sharing was really on.
  std::vector<std::string> notes;  ///< Facts a reader must know, e.g. why nothing is shared.

  int64_t completed = 0;
  int64_t rejected = 0;
  int64_t preempted = 0;  ///< Preemptions, not requests.

  int64_t prompt_tokens = 0;
  int64_t output_tokens = 0;
  int64_t reusable_tokens = 0;  ///< Prompt tokens that an infinite cache would have, by whole
                                ///< blocks, from the hashes alone.

  int64_t cache_pages = 0;  ///< Capacity.
  int64_t cache_bytes = 0;
  int64_t hit_tokens = 0;  ///< Prompt tokens found in the cache at first admission.
  int64_t pages_peak = 0;  ///< Most pages held by requests at once.
  int64_t evictions = 0;

  CheckSummary check;
  uint64_t digest_selection = 0;
  uint64_t digest_output = 0;
  int64_t digest_rows = 0;

  int64_t prefill_rows = 0;     ///< Rows computed by prefill, recomputation included.
  int64_t decode_rows = 0;      ///< Decode rows that stay: one per generated token.
  int64_t recomputed_rows = 0;  ///< Of those, rows computed before and lost to preemption.
  double prefill_tokens_per_s = 0;
  double decode_tokens_per_s = 0;
  double step_p50_ms = 0;
  double step_p90_ms = 0;
  double step_p99_ms = 0;
  ReplayPhases phases;

  std::vector<ReplayLayer> layers;
  std::vector<ReplayOperator> ops;
  std::vector<ReplayMode> modes;       ///< In the order in which they first ran.
  std::optional<ReplayDrafts> drafts;  ///< With draft_tokens > 0.
  std::optional<ReplayGraphs> graphs;  ///< With options.graph.
  std::vector<ReplayStep> steps;
  std::vector<ReplayRequest> requests;

  /// No mismatch; `fovea replay` exits 0, else 1.
  bool ok() const noexcept { return check.mismatches == 0; }
};

/// The steps of one kind.
struct StepKindTotals {
  StepKind kind = StepKind::kPrefill;
  int64_t count = 0;
  int64_t rows = 0;  ///< That stay.
  double ms = 0;     ///< Sum of step_ms.
  double p50_ms = 0;
  double p90_ms = 0;
  double p99_ms = 0;
};

/// Of the kinds that ran, in the order of StepKind.
FOVEA_API std::vector<StepKindTotals> step_kind_totals(const ReplayResult& result);

struct ReplayProgress {
  std::string_view phase;  ///< "replay" or "check"
  int64_t steps_done = 0;
  int64_t steps_total = 0;
  int64_t rows_done = 0;  ///< Token rows; of "check", checked rows.
  int64_t rows_total = 0;
  int64_t requests_completed = 0;
  int64_t requests_total = 0;
  int64_t running = 0;
};

using ReplayProgressCallback = std::function<void(const ReplayProgress&)>;

/// Names that ReplayOptions::model accepts.
FOVEA_API std::vector<std::string> replay_models();

/// Runs a trace. The composition of every step is a pure function of trace, options and seed.
/// Digests are equal for any thread count, chunk, batch, page and sharing when
/// options.deterministic, and with and without graphs and drafts of any number, mode and
/// acceptance. No equality is promised between a CPU and a GPU.
///
/// Throws Error(kInvalidArgument) naming the option before anything runs: unknown model (lists what
/// exists), tp that does not divide the heads, scale that does not divide 512, values below their
/// minimum, a skip that leaves no request; Error(kOutOfMemory) when the pools do not fit; and what
/// an operator throws, with the step named. `progress` (may be empty) is called in the calling
/// thread after each step.
FOVEA_API ReplayResult replay(const Trace& trace, const ReplayOptions& options,
                              const ReplayProgressCallback& progress = {});

/// The JSON of docs/replay.schema.json.
FOVEA_API std::string to_json(const ReplayResult& result);

/// A self-contained HTML page with charts.
FOVEA_API std::string render_report_html(const ReplayResult& result);

}  // namespace fovea
