#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "fovea/export.h"

/// Request traces of LLM servers: readers, writer and generator. File forms: docs/replay.md.
namespace fovea {

/// One request of a trace, in the trace's own (unscaled) tokens.
struct TraceRequest {
  double timestamp_ms = 0;    ///< Arrival since the start of the trace, >= 0; a request never
                              ///< arrives before the rows above it.
  int64_t input_length = 0;   ///< Prompt tokens, >= 1.
  int64_t output_length = 0;  ///< Generated tokens, >= 0.
  /// One id per block of block_tokens prompt tokens, ceil(input_length / block_tokens) of them; an
  /// id stands for its block and everything before it. Empty in a trace without sharing (CSV).
  std::vector<int64_t> hash_ids;
};

struct Trace {
  std::string source;          ///< File name or what made it; for messages.
  int64_t block_tokens = 512;  ///< Prompt tokens that one hash id covers.
  bool has_hashes = true;      ///< False: no request shares anything (CSV of arrivals).
  std::vector<TraceRequest> requests;
};

/// The form of a trace file.
enum class TraceFormat : uint8_t {
  kAuto,      ///< kCsv when the name ends in .csv, else JSONL with the block size that fits.
  kMooncake,  ///< JSONL, one id per 512 prompt tokens.
  kBlocks16,  ///< JSONL, one id per 16 prompt tokens.
  kCsv,       ///< Lines `timestamp_ms,input_length,output_length`, optional heading line.
};

/// "auto", "mooncake", "blocks16", "csv".
FOVEA_API std::string_view to_string(TraceFormat format) noexcept;

/// Parses those words. Throws Error(kInvalidArgument) listing them.
FOVEA_API TraceFormat parse_trace_format(std::string_view text);

/// Largest input_length and output_length that a reader accepts: longer ones are taken for damage.
inline constexpr int64_t kMaxTraceTokens = int64_t{1} << 24;

/// Reads a trace file. JSONL lines are objects with `timestamp` (ms), `input_length`,
/// `output_length` and `hash_ids`; unknown keys are ignored; blank lines are skipped. kAuto takes
/// 512-token blocks when the id count of the first line fits them, else 16-token blocks.
///
/// Throws Error(kIo) naming file and line when the file cannot be read, a line is not valid JSON
/// (truncated), a key is missing or of the wrong type, a length is negative or above
/// kMaxTraceTokens, a timestamp negative, or the id count does not fit the length; and naming the
/// file when it holds no request.
FOVEA_API Trace read_trace(const std::string& path, TraceFormat format = TraceFormat::kAuto);

/// The same from text; `name` stands for the file name in messages.
FOVEA_API Trace parse_trace(std::string_view text, const std::string& name,
                            TraceFormat format = TraceFormat::kAuto);

/// What generate_trace imitates.
enum class TraceStyle : uint8_t {
  kConversation,  ///< Chats of several turns: a turn's prompt is the whole chat so far; all chats
                  ///< share a system prompt.
  kAgent,         ///< Bursts of calls over one of a few long common contexts, with short own tails.
};

/// "conversation", "agent".
FOVEA_API std::string_view to_string(TraceStyle style) noexcept;

/// Parses those words. Throws Error(kInvalidArgument) listing them.
FOVEA_API TraceStyle parse_trace_style(std::string_view text);

struct TraceGeneratorOptions {
  TraceStyle style = TraceStyle::kConversation;
  int64_t num_requests = 24;
  uint64_t seed = 1;
  double duration_ms = 60000;        ///< Arrivals spread over this span.
  int64_t mean_input_length = 8192;  ///< New prompt tokens of a chat's first turn, or of a context.
  int64_t mean_output_length = 256;
  int64_t block_tokens = 512;  ///< 512 or 16.
};

/// A seeded trace with shared prefixes: equal options give an equal trace on every platform. Throws
/// Error(kInvalidArgument) naming the option.
FOVEA_API Trace generate_trace(const TraceGeneratorOptions& options);

/// The trace as JSONL, one request a line; parse_trace reads it back. Throws
/// Error(kInvalidArgument) for a trace without hashes.
FOVEA_API std::string trace_to_jsonl(const Trace& trace);

/// Writes trace_to_jsonl to a file. Throws Error(kIo) naming it.
FOVEA_API void write_trace(const Trace& trace, const std::string& path);

}  // namespace fovea
