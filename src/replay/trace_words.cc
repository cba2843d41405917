#include <initializer_list>
#include <string>

#include "fovea/replay.h"
#include "fovea/trace.h"
#include "src/core/check.h"

namespace fovea {
namespace {

// Finds `text` among the words of an enumeration, or throws with the list of them.
template <class Enum>
Enum parse_word(const char* option, std::string_view text, std::initializer_list<Enum> values) {
  std::string known;
  for (const Enum value : values) {
    if (text == to_string(value)) return value;
    known += (known.empty() ? "" : ", ") + std::string(to_string(value));
  }
  internal::invalid("replay",
                    std::string(option) + " = '" + std::string(text) + "', expected " + known);
}

}  // namespace

std::string_view to_string(TraceFormat format) noexcept {
  switch (format) {
    case TraceFormat::kAuto:
      return "auto";
    case TraceFormat::kMooncake:
      return "mooncake";
    case TraceFormat::kBlocks16:
      return "blocks16";
    case TraceFormat::kCsv:
      return "csv";
  }
  return "unknown";
}

TraceFormat parse_trace_format(std::string_view text) {
  return parse_word(
      "trace format", text,
      {TraceFormat::kAuto, TraceFormat::kMooncake, TraceFormat::kBlocks16, TraceFormat::kCsv});
}

std::string_view to_string(TraceStyle style) noexcept {
  return style == TraceStyle::kConversation ? "conversation" : "agent";
}

TraceStyle parse_trace_style(std::string_view text) {
  return parse_word("trace style", text, {TraceStyle::kConversation, TraceStyle::kAgent});
}

std::string_view to_string(Arrivals arrivals) noexcept {
  return arrivals == Arrivals::kAsap ? "asap" : "trace";
}

Arrivals parse_arrivals(std::string_view text) {
  return parse_word("arrivals", text, {Arrivals::kAsap, Arrivals::kTrace});
}

std::string_view to_string(DraftMode mode) noexcept { return mode == DraftMode::kV1 ? "v1" : "v2"; }

DraftMode parse_draft_mode(std::string_view text) {
  return parse_word("draft mode", text, {DraftMode::kV1, DraftMode::kV2});
}

std::string_view to_string(StepKind kind) noexcept {
  switch (kind) {
    case StepKind::kPrefill:
      return "prefill";
    case StepKind::kDecode:
      return "decode";
    case StepKind::kMixed:
      return "mixed";
    case StepKind::kVerify:
      return "verify";
    case StepKind::kIdle:
      return "idle";
  }
  return "unknown";
}

}  // namespace fovea
