// fovea gen-trace: a seeded request trace with shared prefixes.

#include <fmt/format.h>

#include "cli/verbs.h"
#include "fovea/error.h"
#include "fovea/json.h"
#include "fovea/trace.h"

namespace fovea::cli {
namespace {

TraceGeneratorOptions generator_options(const GenTraceOptions& options) {
  TraceGeneratorOptions result;
  result.style = parse_trace_style(options.style);
  result.num_requests = options.num_requests;
  result.seed = static_cast<uint64_t>(options.seed);
  result.duration_ms = options.duration_ms;
  result.mean_input_length = options.mean_input_length;
  result.mean_output_length = options.mean_output_length;
  result.block_tokens = options.block_tokens;
  return result;
}

Trace generate(const GenTraceOptions& options) {
  try {
    return generate_trace(generator_options(options));
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kInvalidArgument) throw;
    throw UsageError(error.what());
  }
}

}  // namespace

int gen_trace(const GenTraceOptions& options) {
  const Trace trace = generate(options);
  write_trace(trace, options.output_path);
  int64_t input_tokens = 0, output_tokens = 0;
  for (const TraceRequest& request : trace.requests) {
    input_tokens += request.input_length;
    output_tokens += request.output_length;
  }
  const auto count = static_cast<int64_t>(trace.requests.size());
  if (options.json) {
    fmt::print("{}\n", Json::object({{"output", options.output_path},
                                     {"requests", count},
                                     {"input_tokens", input_tokens},
                                     {"output_tokens", output_tokens}})
                           .dump(2));
  } else {
    fmt::print("{}: {} requests, {} prompt tokens, {} output tokens\n", options.output_path, count,
               input_tokens, output_tokens);
  }
  return kExitOk;
}

}  // namespace fovea::cli
