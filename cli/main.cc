// fovea: the command line. This file alone knows the option parser; the verbs live in their own
// files.

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <span>
#include <string>

#include "cli/bench.h"
#include "cli/verbs.h"
#include "fovea/device.h"
#include "fovea/dsa_backend.h"
#include "fovea/error.h"
#include "fovea/implementation.h"
#include "fovea/log.h"
#include "fovea/version.h"

namespace fovea::cli {
namespace {

constexpr int64_t kMaxCount = int64_t{1} << 40;  // more of anything is a typing error
const CLI::Range kPositive(int64_t{1}, kMaxCount, "COUNT >= 1");
const CLI::Range kNotNegative(int64_t{0}, kMaxCount, "COUNT >= 0");

// Options by verb, and the verb that was chosen.
struct CommandLine {
  bool verbose = false;
  InfoOptions info;
  RunOptions run;
  VerifyOptions verify;
  GenTraceOptions gen_trace;
  ReplayVerbOptions replay;
  BenchOptions bench;
};

void add_settings(CLI::App* verb, RunSettings* settings) {
  verb->add_option("--device", settings->device, "Where to run: cpu or cuda:N")
      ->capture_default_str();
  verb->add_option("--threads", settings->threads, "Threads of the CPU; default: all")
      ->check(CLI::Range(1, 4096));
  verb->add_option("--impl", settings->implementation,
                   "Force one implementation (see `fovea info`)");
}

void add_info(CLI::App& app, InfoOptions* options) {
  CLI::App* verb = app.add_subcommand("info", "Version, devices, operators and implementations");
  verb->footer("Example: fovea info --json");
  CLI::Option* json = verb->add_flag("--json", options->json, "Print JSON");
  verb->add_flag("--markdown", options->markdown, "Print the support matrix as Markdown")
      ->excludes(json);
  verb->add_flag("--devices", options->devices, "Only the devices, and which kernel code they run");
  CLI::Option* explain = verb->add_flag("--explain", options->explain,
                                        "What the DSA backend runs for the facts below, and why");
  ExplainOptions* facts = &options->facts;
  const auto choice = [&](const char* name, std::string* value, std::vector<std::string> words) {
    verb->add_option(name, *value)
        ->check(CLI::IsMember(std::move(words)))
        ->capture_default_str()
        ->needs(explain)
        ->group("Facts");
  };
  choice("--mode", &facts->mode,
         {"extend", "mixed", "decode", "idle", "target_verify", "draft_extend", "draft_extend_v2"});
  choice("--row-format", &facts->row_format, {"v32", "bf16", "f576"});
  std::vector<std::string> names;
  for (const DsaImplementationInfo& entry : dsa_implementations()) names.emplace_back(entry.name);
  choice("--prefill-implementation", &facts->prefill_implementation, names);
  choice("--decode-implementation", &facts->decode_implementation, names);
  choice("--extend-kv-source", &facts->extend_kv_source, {"cache", "fresh"});
  const auto count = [&](const char* name, int64_t* value, const char* text) {
    verb->add_option(name, *value, text)->check(kNotNegative)->needs(explain)->group("Facts");
  };
  count("--topk", &facts->topk, "Selection width, 2048 when absent");
  count("--max-kv-len", &facts->max_kv_len, "Longest request; absent: no host lengths");
  count("--sum-kv-len", &facts->sum_kv_len, "All requests together");
  count("--num-rows", &facts->num_rows, "New rows of the batch, 1 when absent");
  count("--mha-chunk-capacity", &facts->mha_chunk_capacity,
        "Bound of the summed length of a dense or unpacked batch, 131072 when absent");
  verb->add_option("--contiguous-kv-ratio", facts->contiguous_kv_ratio,
                   "auto unpacks a v32 cache below so many keys per row; 0: never")
      ->check(CLI::Range(0.0, 1e12))
      ->needs(explain)
      ->group("Facts");
  const auto flag = [&](const char* name, bool* value, const char* text) {
    verb->add_flag(name, *value, text)->needs(explain)->group("Facts");
  };
  flag("--prefix", &facts->has_prefix, "Some request has a prefix");
  flag("--mha-inputs", &facts->mha_inputs, "The caller can supply expanded heads");
  flag("--context-parallel", &facts->context_parallel, "The batch is one rank's part");
  flag("--deterministic,!--no-deterministic", &facts->deterministic, "On when absent");
  flag("--force-absorbed", &facts->force_absorbed, "Never dense attention");
}

void add_run(CLI::App& app, RunOptions* options) {
  CLI::App* verb = app.add_subcommand("run", "One operator on tensors from a safetensors file");
  verb->footer(
      "Example: fovea run merge_lse in.safetensors out.safetensors --impl ref\n"
      "Tensors and parameters of every operator: docs/run.md");
  verb->add_option("operator", options->op, "Name of the operator")->required();
  verb->add_option("input", options->input_path, "Tensors by field name; params in __metadata__")
      ->required();
  verb->add_option("output", options->output_path, "Receives every output")->required();
  verb->add_flag("--json", options->json, "Print the summary as JSON");
  add_settings(verb, &options->settings);
}

void add_verify(CLI::App& app, VerifyOptions* options) {
  CLI::App* verb =
      app.add_subcommand("verify", "Every implementation against the reference and golden files");
  verb->footer("Example: fovea verify sparse_mla\nExits with 1 when an implementation differs.");
  verb->add_option("operator", options->op, "Only this operator");
  verb->add_option("--device", options->device,
                   "Only this device: cpu or cuda:N; default: the CPU and every GPU");
  verb->add_option("--golden", options->golden, "Folder of golden files")
      ->check(CLI::ExistingDirectory);
  verb->add_option("--seed", options->seed, "Seed of the generated problems")
      ->check(kNotNegative)
      ->capture_default_str();
  verb->add_flag("--json", options->json, "Print JSON");
}

// What is served and how, in the order of docs/replay.md.
void add_replay_options(CLI::App* verb, ReplayOptions* options) {
  const auto count = [&](const char* name, int64_t* value, const char* text) {
    return verb->add_option(name, *value, text)->check(kPositive);
  };
  verb->add_option("--model", options->model, "Model preset")->capture_default_str();
  count("--tp", &options->tp, "Tensor parallel size; divides the heads")->capture_default_str();
  verb->add_option("--layers", options->layers,
                   "pattern (one of each kind), all, a number, or a list such as 0,3,60")
      ->capture_default_str();
  count("--max-requests", &options->max_requests, "Requests to replay; default: all");
  verb->add_option("--skip", options->skip, "Requests left out at the start")->check(kNotNegative);
  count("--token-scale", &options->token_scale,
        "One replayed token stands for so many; divides 512")
      ->capture_default_str();
  count("--topk", &options->topk, "Selection width; default: the model's");
  count("--page", &options->page, "Tokens per page; default: the model's, made to fit the scale");
  count("--chunk", &options->chunk, "Prefill rows per step")->capture_default_str();
  count("--max-batch", &options->max_batch, "Requests running at once")->capture_default_str();
  count("--cache-tokens", &options->cache_tokens,
        "Capacity of the cache; default: the whole trace");
  verb->add_flag("!--no-prefix-sharing", options->prefix_sharing, "Requests share no pages");
  verb->add_flag("--mixed", options->mixed, "Decode rows join prefill chunks");
  verb->add_flag("--spread-arrivals", options->spread_arrivals,
                 "Spread requests with equal timestamps, seeded");
  verb->add_flag("--deterministic,!--no-deterministic", options->deterministic,
                 "Equal digests whatever the schedule; on when absent");
  verb->add_option("--check", options->check_rows, "Rows to recompute in fp64")
      ->check(kNotNegative)
      ->capture_default_str();
  verb->add_option("--inject", options->inject)->group("");  // docs/testing.md
}

void add_replay(CLI::App& app, ReplayVerbOptions* options) {
  CLI::App* verb =
      app.add_subcommand("replay", "A recorded trace through the attention side of a server");
  verb->footer(
      "Example: fovea replay trace.jsonl --model deepseek-v3.2 --tp 16 --token-scale 64 "
      "--topk 64 --check 100\nExits with 1 when a checked row is wrong.");
  verb->add_option("trace", options->trace_path, "Trace file, JSONL or CSV")->required();
  verb->add_option("--format", options->format, "auto, mooncake, blocks16 or csv")
      ->capture_default_str();
  add_replay_options(verb, &options->replay);
  verb->add_option("--arrivals", options->arrivals, "asap, or trace: by timestamp")
      ->capture_default_str();
  verb->add_option("--seed", options->seed, "Seed of everything random")
      ->check(kNotNegative)
      ->capture_default_str();
  verb->add_option("--draft-tokens", options->replay.draft_tokens,
                   "Speculative decoding: tokens drafted per request and round, 1 to 7")
      ->check(CLI::Range(int64_t{1}, kMaxDraftTokens));
  verb->add_option("--accept", options->accept,
                   "Chance that a drafted token is accepted, 0 to 1; default 0.7")
      ->check(CLI::Range(0.0, 1.0));
  verb->add_option("--draft-mode", options->draft_mode,
                   "v1: draft extend of the accepted rows (default); v2: of every verified row");
  verb->add_flag("--graph", options->replay.graph,
                 "Decode steps and rounds of drafts as captured graphs");
  verb->add_option("--json", options->json_path, "Write the result as JSON");
  verb->add_option("--report", options->report_path, "Write an HTML report");
  add_settings(verb, &options->settings);
}

void add_gen_trace(CLI::App& app, GenTraceOptions* options) {
  CLI::App* verb = app.add_subcommand("gen-trace", "Make a request trace with shared prefixes");
  verb->footer("Example: fovea gen-trace trace.jsonl --requests 100 --style agent --seed 7");
  verb->add_option("output", options->output_path, "File to write, JSONL")->required();
  verb->add_option("--style", options->style, "conversation or agent")->capture_default_str();
  verb->add_option("--requests", options->num_requests, "Number of requests")
      ->check(kPositive)
      ->capture_default_str();
  verb->add_option("--seed", options->seed, "Equal seeds give equal traces")
      ->check(kNotNegative)
      ->capture_default_str();
  verb->add_option("--duration-ms", options->duration_ms, "Span of the arrivals")
      ->check(CLI::Range(1e-3, 1e12))
      ->capture_default_str();
  verb->add_option("--mean-input", options->mean_input_length, "Prompt tokens, on average")
      ->check(kPositive)
      ->capture_default_str();
  verb->add_option("--mean-output", options->mean_output_length, "Output tokens, on average")
      ->check(kPositive)
      ->capture_default_str();
  verb->add_option("--block-tokens", options->block_tokens, "Prompt tokens per hash id: 512 or 16")
      ->check(CLI::IsMember({512, 16}))
      ->capture_default_str();
  verb->add_flag("--json", options->json, "Print the summary as JSON");
}

void add_bench(CLI::App& app, BenchOptions* options) {
  CLI::App* verb = app.add_subcommand("bench", "Checked timings as shares of measured ceilings");
  verb->footer(
      "Example: fovea bench topk_select --threads 1\nWhat the figures mean: docs/bench.md");
  verb->add_option("operator", options->op, "Only this operator");
  verb->add_option("--case", options->case_name, "Only cases whose name contains this");
  verb->add_option("--device", options->device, "Where to run: cpu or cuda:N")
      ->capture_default_str();
  verb->add_flag("--graph", options->graph, "On a GPU: time launches of a captured graph");
  verb->add_option("--suite", options->suite,
                   "perf: the shapes that other kernels were measured on, beside their times")
      ->check(CLI::IsMember({"perf"}));
  verb->add_option("--threads", options->num_threads, "Threads of the CPU; default: all")
      ->check(CLI::Range(1, 4096));
  verb->add_option("--impl", options->implementations,
                   "Compare these implementations, interleaved: ref,cpu")
      ->delimiter(',')
      ->allow_extra_args(false);
  verb->add_option("--isa", options->isa, "Limit the instruction set")
      ->check(CLI::IsMember({"baseline", "avx2", "avx3", "avx512bf16"}));
  verb->add_option("--json", options->json_path, "Also write the result as JSON");
  verb->add_flag("--ceilings", options->ceilings, "Measure the ceilings of this machine anew");
  verb->add_flag("--quick", options->quick, "The least number of samples");
}

// Wrong values of the environment are usage errors, reported before a verb starts.
void check_environment() {
  const char* forced = std::getenv("FOVEA_FORCE_IMPL");
  try {
    force_implementations(forced != nullptr ? forced : "");
    current_cpu_isa();
  } catch (const Error& error) {
    throw UsageError(error.what());
  }
}

// Failures and surprises always; which implementation runs on request.
void log_to_stderr(bool verbose) {
  set_log_sink([verbose](LogLevel level, std::string_view message) {
    if (level == LogLevel::kDispatch && !verbose) return;
    constexpr const char* kNames[] = {"dispatch", "warning", "error"};
    fmt::print(stderr, "fovea: {}: {}\n", kNames[static_cast<int>(level)], message);
  });
}

int dispatch(const CLI::App& app, const CommandLine& line) {
  log_to_stderr(line.verbose);
  check_environment();
  if (app.got_subcommand("info")) return info(line.info);
  if (app.got_subcommand("verify")) return verify(line.verify);
  if (app.got_subcommand("replay")) return replay(line.replay);
  if (app.got_subcommand("gen-trace")) return gen_trace(line.gen_trace);
  if (app.got_subcommand("bench")) return run_bench(line.bench);
  return run(line.run);
}

int parse_and_dispatch(int argc, char** argv) {
  CommandLine line;
  for (const char* word : std::span(argv, static_cast<size_t>(argc))) {
    line.bench.command += (line.bench.command.empty() ? "" : " ") + std::string(word);
  }
  CLI::App app("Sparse and linear attention for LLM serving: operators and traffic replay",
               "fovea");
  app.footer("Example: fovea info\nExit codes: 0 ok, 1 mismatch, 2 usage, 3 files and run time");
  app.set_version_flag("--version", std::string(version()));
  app.add_flag("-v,--verbose", line.verbose, "Say on stderr which implementations run and why");
  // Not "required": an unknown verb is then reported as itself.
  app.require_subcommand(0, 1);
  app.fallthrough();
  add_info(app, &line.info);
  add_run(app, &line.run);
  add_verify(app, &line.verify);
  add_replay(app, &line.replay);
  add_gen_trace(app, &line.gen_trace);
  add_bench(app, &line.bench);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    // Help and version arrive here too, with code 0.
    return app.exit(error) == 0 ? kExitOk : kExitUsage;
  }
  if (app.get_subcommands().empty()) {
    fmt::print(stderr, "{}", app.help());
    return kExitUsage;
  }
  return dispatch(app, line);
}

}  // namespace

Device RunSettings::parsed_device() const {
  try {
    return parse_device(device, threads);
  } catch (const Error& error) {
    // A device that exists elsewhere is no typing error.
    if (error.code() == ErrorCode::kUnsupported) throw;
    throw UsageError(error.what());
  }
}

}  // namespace fovea::cli

int main(int argc, char** argv) {
  try {
    const int code = fovea::cli::parse_and_dispatch(argc, argv);
    // A full disk or closed pipe shows when the buffer is flushed.
    if (std::fflush(stdout) != 0) throw std::runtime_error("stdout cannot be written");
    return code;
  } catch (const fovea::cli::UsageError& error) {
    fmt::print(stderr, "fovea: {}\nRun `fovea --help` for usage.\n", error.what());
    return fovea::cli::kExitUsage;
  } catch (const std::exception& error) {
    fmt::print(stderr, "fovea: {}\n", error.what());
    return fovea::cli::kExitFailure;
  }
}
