// libFuzzer: a trace is either read, and then obeys its own rules and survives a round trip, or
// refused with Error(kIo). The first byte chooses the format.

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "fovea/error.h"
#include "fovea/trace.h"

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

void check_rules(const fovea::Trace& trace) {
  require(!trace.requests.empty());
  for (const fovea::TraceRequest& request : trace.requests) {
    require(std::isfinite(request.timestamp_ms) && request.timestamp_ms >= 0);
    require(request.input_length >= 1 && request.input_length <= fovea::kMaxTraceTokens);
    require(request.output_length >= 0 && request.output_length <= fovea::kMaxTraceTokens);
    const int64_t blocks = (request.input_length + trace.block_tokens - 1) / trace.block_tokens;
    require(static_cast<int64_t>(request.hash_ids.size()) == (trace.has_hashes ? blocks : 0));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t length) {
  if (length == 0) return 0;
  constexpr fovea::TraceFormat kFormats[] = {
      fovea::TraceFormat::kAuto, fovea::TraceFormat::kMooncake, fovea::TraceFormat::kBlocks16,
      fovea::TraceFormat::kCsv};
  const fovea::TraceFormat format = kFormats[data[0] % 4];
  try {
    const fovea::Trace trace =
        fovea::parse_trace({reinterpret_cast<const char*>(data) + 1, length - 1}, "fuzz", format);
    check_rules(trace);
    if (trace.has_hashes) {
      const fovea::Trace again =
          fovea::parse_trace(fovea::trace_to_jsonl(trace), "again",
                             trace.block_tokens == 512 ? fovea::TraceFormat::kMooncake
                                                       : fovea::TraceFormat::kBlocks16);
      require(again.requests.size() == trace.requests.size());
    }
  } catch (const fovea::Error& error) {
    require(error.code() == fovea::ErrorCode::kIo);
  }
  return 0;
}
