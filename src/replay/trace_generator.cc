#include <algorithm>
#include <charconv>
#include <cmath>
#include <fstream>

#include "fovea/error.h"
#include "fovea/trace.h"
#include "src/core/check.h"
#include "src/replay/hash.h"

namespace fovea {
namespace {

constexpr char kOp[] = "generate_trace";

/// Draws from a counter, with +, * and comparisons of doubles only, so that traces are equal
/// everywhere.
class Draw {
 public:
  explicit Draw(uint64_t seed) : state_(internal::mix64(seed)) {}

  double uniform() { return static_cast<double>(internal::mix64(state_++) >> 11) * 0x1p-53; }
  int64_t integer(int64_t count) {
    return std::min(count - 1, static_cast<int64_t>(uniform() * static_cast<double>(count)));
  }

  /// A length >= 1 with the given mean and a long tail: the product of two uniforms has mean 1/4.
  int64_t length(int64_t mean) {
    return std::max<int64_t>(
        1, static_cast<int64_t>(4 * uniform() * uniform() * static_cast<double>(mean)));
  }

 private:
  uint64_t state_;
};

// A text that grows: the ids of its full blocks never change, the id of a partial block does.
struct Context {
  int64_t tokens = 0;
  std::vector<int64_t> full_blocks;
};

class TraceBuilder {
 public:
  explicit TraceBuilder(const TraceGeneratorOptions& options) : options_(options) {}

  void append(Context* context, int64_t tokens) {
    context->tokens = std::min(context->tokens + tokens, kMaxTraceTokens);
    const auto full = static_cast<size_t>(context->tokens / options_.block_tokens);
    while (context->full_blocks.size() < full) context->full_blocks.push_back(next_id_++);
  }

  // A request whose prompt is the whole context.
  TraceRequest request(const Context& context, double timestamp_ms, int64_t output_length) {
    TraceRequest result{timestamp_ms, context.tokens, output_length, context.full_blocks};
    if (context.tokens % options_.block_tokens != 0) result.hash_ids.push_back(next_id_++);
    return result;
  }

 private:
  const TraceGeneratorOptions& options_;
  int64_t next_id_ = 0;
};

std::vector<double> arrival_times(const TraceGeneratorOptions& options, Draw* draw) {
  std::vector<double> times;
  for (int64_t i = 0; i < options.num_requests; ++i) {
    times.push_back(std::floor(draw->uniform() * options.duration_ms));
  }
  std::sort(times.begin(), times.end());
  return times;
}

// Every chat starts with the system prompt of two blocks and a bit; a turn adds the last answer and
// the next question.
void generate_conversation(const TraceGeneratorOptions& options, Draw* draw, Trace* trace) {
  TraceBuilder builder(options);
  Context system;
  builder.append(&system, std::min(2 * options.block_tokens, options.mean_input_length / 2 + 1));
  struct Chat {
    Context context;
    int64_t last_output = 0;
  };
  std::vector<Chat> chats;
  for (const double time : arrival_times(options, draw)) {
    // Two of three requests continue one of the eight youngest chats.
    const auto open = static_cast<int64_t>(std::min<size_t>(chats.size(), 8));
    const bool opens = open == 0 || draw->integer(3) == 0;
    if (opens) chats.push_back({system, 0});
    Chat& chat =
        opens ? chats.back() : chats[chats.size() - 1 - static_cast<size_t>(draw->integer(open))];
    const int64_t mean_question =
        opens ? options.mean_input_length : std::max<int64_t>(1, options.mean_input_length / 8);
    builder.append(&chat.context, chat.last_output + draw->length(mean_question));
    chat.last_output = draw->length(options.mean_output_length);
    trace->requests.push_back(builder.request(chat.context, time, chat.last_output));
  }
}

// One context per eight requests, at least two; a call appends a short tail of its own.
void generate_agent(const TraceGeneratorOptions& options, Draw* draw, Trace* trace) {
  TraceBuilder builder(options);
  std::vector<Context> contexts(
      static_cast<size_t>(std::max<int64_t>(2, options.num_requests / 8)));
  for (Context& context : contexts) {
    builder.append(&context,
                   options.mean_input_length / 2 + draw->length(options.mean_input_length / 2 + 1));
  }
  for (const double time : arrival_times(options, draw)) {
    const auto count = static_cast<int64_t>(contexts.size());
    Context call = contexts[static_cast<size_t>(draw->integer(count))];
    builder.append(&call, draw->length(std::max<int64_t>(1, options.mean_input_length / 16)));
    trace->requests.push_back(
        builder.request(call, time, draw->length(options.mean_output_length)));
  }
}

}  // namespace

Trace generate_trace(const TraceGeneratorOptions& options) {
  internal::check_range(kOp, "num_requests", options.num_requests, 1, 10'000'000);
  internal::check_range(kOp, "mean_input_length", options.mean_input_length, 1,
                        kMaxTraceTokens / 8);
  internal::check_range(kOp, "mean_output_length", options.mean_output_length, 1,
                        kMaxTraceTokens / 8);
  if (options.block_tokens != 512 && options.block_tokens != 16) {
    internal::invalid(
        kOp, "block_tokens = " + std::to_string(options.block_tokens) + ", expected 512 or 16");
  }
  if (!std::isfinite(options.duration_ms) || options.duration_ms < 0) {
    internal::invalid(
        kOp, "duration_ms = " + std::to_string(options.duration_ms) + ", expected finite and >= 0");
  }
  Trace trace;
  trace.source = "generated " + std::string(to_string(options.style)) + " trace, seed " +
                 std::to_string(options.seed);
  trace.block_tokens = options.block_tokens;
  Draw draw(options.seed);
  if (options.style == TraceStyle::kConversation)
    generate_conversation(options, &draw, &trace);
  else
    generate_agent(options, &draw, &trace);
  return trace;
}

std::string trace_to_jsonl(const Trace& trace) {
  if (!trace.has_hashes) {
    internal::invalid("trace_to_jsonl",
                      "the trace has no hash ids; only such traces have a JSONL form");
  }
  std::string text;
  for (const TraceRequest& request : trace.requests) {
    char timestamp[32];
    const auto end = std::to_chars(timestamp, timestamp + sizeof timestamp, request.timestamp_ms);
    text += "{\"timestamp\": " + std::string(timestamp, end.ptr) +
            ", \"input_length\": " + std::to_string(request.input_length) +
            ", \"output_length\": " + std::to_string(request.output_length) + ", \"hash_ids\": [";
    for (size_t i = 0; i < request.hash_ids.size(); ++i) {
      text += (i == 0 ? "" : ", ") + std::to_string(request.hash_ids[i]);
    }
    text += "]}\n";
  }
  return text;
}

void write_trace(const Trace& trace, const std::string& path) {
  const std::string text = trace_to_jsonl(trace);
  std::ofstream file(path, std::ios::binary);
  file << text;
  file.close();
  if (!file) throw Error(ErrorCode::kIo, "trace: cannot write '" + path + "'");
}

}  // namespace fovea
