#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "fovea/error.h"
#include "fovea/trace.h"

namespace fovea {
namespace {

constexpr int64_t kBlockSizes[] = {512, 16};

// Walks the lines of a text and gives every error its place.
class LineReader {
 public:
  LineReader(std::string_view text, const std::string& name) : text_(text), name_(name) {}

  // The next line that is not blank, without its line end; false at the end of the text.
  bool next(std::string_view* line) {
    while (offset_ < text_.size()) {
      const size_t end = std::min(text_.find('\n', offset_), text_.size());
      *line = text_.substr(offset_, end - offset_);
      offset_ = end + 1;
      ++number_;
      if (!line->empty() && line->back() == '\r') line->remove_suffix(1);
      if (line->find_first_not_of(" \t") != std::string_view::npos) return true;
    }
    return false;
  }

  int64_t number() const { return number_; }

  [[noreturn]] void fail(const std::string& what) const {
    throw Error(ErrorCode::kIo,
                "trace: " + name_ + ": line " + std::to_string(number_) + ": " + what);
  }

 private:
  std::string_view text_;
  const std::string& name_;
  size_t offset_ = 0;
  int64_t number_ = 0;
};

// Lengths and timestamps of both formats obey the same limits.
void check_request(const LineReader& lines, const TraceRequest& request) {
  const auto check_length = [&](const char* key, int64_t value, int64_t lowest) {
    if (value >= lowest && value <= kMaxTraceTokens) return;
    lines.fail(std::string(key) + " = " + std::to_string(value) + ", expected " +
               std::to_string(lowest) + ".." + std::to_string(kMaxTraceTokens));
  };
  check_length("input_length", request.input_length, 1);
  check_length("output_length", request.output_length, 0);
  if (!std::isfinite(request.timestamp_ms) || request.timestamp_ms < 0) {
    lines.fail("timestamp = " + std::to_string(request.timestamp_ms) +
               ", expected milliseconds >= 0");
  }
}

const nlohmann::json& require(const LineReader& lines, const nlohmann::json& object,
                              const char* key) {
  const auto found = object.find(key);
  if (found == object.end()) lines.fail("key '" + std::string(key) + "' is missing");
  return *found;
}

int64_t require_integer(const LineReader& lines, const nlohmann::json& value, const char* key) {
  if (value.is_number_unsigned()) {
    const uint64_t number = value.get<uint64_t>();
    if (number > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      lines.fail(std::string(key) + " = " + value.dump() + " is out of range");
    }
    return static_cast<int64_t>(number);
  }
  if (!value.is_number_integer()) {
    lines.fail(std::string(key) + " is a " + value.type_name() +
               (value.is_number() ? " with a fraction" : "") + ", expected an integer");
  }
  return value.get<int64_t>();
}

TraceRequest parse_json_request(const LineReader& lines, std::string_view line) {
  nlohmann::json object;
  try {
    object = nlohmann::json::parse(line);
  } catch (const nlohmann::json::exception& error) {
    lines.fail("not valid JSON (truncated?): " + std::string(error.what()));
  }
  if (!object.is_object()) {
    lines.fail("a " + std::string(object.type_name()) + ", expected an object");
  }
  TraceRequest request;
  const nlohmann::json& timestamp = require(lines, object, "timestamp");
  if (!timestamp.is_number()) {
    lines.fail("timestamp is a " + std::string(timestamp.type_name()) + ", expected a number");
  }
  request.timestamp_ms = timestamp.get<double>();
  request.input_length =
      require_integer(lines, require(lines, object, "input_length"), "input_length");
  request.output_length =
      require_integer(lines, require(lines, object, "output_length"), "output_length");
  check_request(lines, request);
  const nlohmann::json& ids = require(lines, object, "hash_ids");
  if (!ids.is_array()) {
    lines.fail("hash_ids is a " + std::string(ids.type_name()) + ", expected an array");
  }
  request.hash_ids.reserve(ids.size());
  for (const nlohmann::json& id : ids) {
    request.hash_ids.push_back(require_integer(lines, id, "hash_ids[]"));
  }
  return request;
}

int64_t blocks_of(int64_t tokens, int64_t block_tokens) {
  return (tokens + block_tokens - 1) / block_tokens;
}

// The block sizes that fit every line so far; a line that none fits is an error.
class BlockSize {
 public:
  explicit BlockSize(TraceFormat format) {
    for (const int64_t block : kBlockSizes) {
      const bool asked = format == TraceFormat::kAuto ||
                         (format == TraceFormat::kMooncake ? block == 512 : block == 16);
      if (asked) candidates_.push_back(block);
    }
  }

  void look_at(const LineReader& lines, const TraceRequest& request) {
    const auto count = static_cast<int64_t>(request.hash_ids.size());
    std::vector<int64_t> fitting;
    std::string expected;
    for (const int64_t block : candidates_) {
      const int64_t needed = blocks_of(request.input_length, block);
      if (needed == count) fitting.push_back(block);
      expected += (expected.empty() ? "" : " or ") + std::to_string(needed) + " (blocks of " +
                  std::to_string(block) + ")";
    }
    if (fitting.empty()) {
      lines.fail("hash_ids has " + std::to_string(count) + " ids, but input_length = " +
                 std::to_string(request.input_length) + " needs " + expected);
    }
    candidates_ = fitting;
  }

  int64_t value() const { return candidates_.front(); }

 private:
  std::vector<int64_t> candidates_;
};

Trace parse_jsonl(std::string_view text, const std::string& name, TraceFormat format) {
  Trace trace;
  LineReader lines(text, name);
  BlockSize block_size(format);
  std::string_view line;
  while (lines.next(&line)) {
    trace.requests.push_back(parse_json_request(lines, line));
    block_size.look_at(lines, trace.requests.back());
  }
  trace.block_tokens = block_size.value();
  return trace;
}

template <class T>
T parse_csv_field(const LineReader& lines, std::string_view field, const char* name) {
  const size_t first = std::min(field.find_first_not_of(" \t"), field.size());
  const size_t last = field.find_last_not_of(" \t");
  field = field.substr(first, last == std::string_view::npos ? 0 : last + 1 - first);
  T value{};
  const auto parsed = std::from_chars(field.data(), field.data() + field.size(), value);
  if (parsed.ec != std::errc() || parsed.ptr != field.data() + field.size()) {
    lines.fail(std::string(name) + " = '" + std::string(field) + "', expected " +
               (std::is_integral_v<T> ? "an integer" : "a number"));
  }
  return value;
}

Trace parse_csv(std::string_view text, const std::string& name) {
  Trace trace;
  trace.has_hashes = false;
  LineReader lines(text, name);
  std::string_view line;
  while (lines.next(&line)) {
    if (lines.number() == 1 && line == "timestamp_ms,input_length,output_length") continue;
    std::string_view fields[3];
    size_t count = 0;
    for (size_t begin = 0; begin <= line.size(); ++count) {
      const size_t end = std::min(line.find(',', begin), line.size());
      if (count < 3) fields[count] = line.substr(begin, end - begin);
      begin = end + 1;
    }
    if (count != 3) {
      lines.fail(std::to_string(count) +
                 " fields, expected 3: timestamp_ms,input_length,output_length");
    }
    TraceRequest request;
    request.timestamp_ms = parse_csv_field<double>(lines, fields[0], "timestamp_ms");
    request.input_length = parse_csv_field<int64_t>(lines, fields[1], "input_length");
    request.output_length = parse_csv_field<int64_t>(lines, fields[2], "output_length");
    check_request(lines, request);
    trace.requests.push_back(std::move(request));
  }
  return trace;
}

}  // namespace

Trace parse_trace(std::string_view text, const std::string& name, TraceFormat format) {
  const bool csv = format == TraceFormat::kCsv ||
                   (format == TraceFormat::kAuto && std::string_view(name).ends_with(".csv"));
  Trace trace = csv ? parse_csv(text, name) : parse_jsonl(text, name, format);
  if (trace.requests.empty()) {
    throw Error(ErrorCode::kIo, "trace: " + name + ": holds no request");
  }
  trace.source = name;
  return trace;
}

Trace read_trace(const std::string& path, TraceFormat format) {
  std::error_code ignored;
  std::ifstream file(path, std::ios::binary);
  if (!file || std::filesystem::is_directory(path, ignored)) {
    throw Error(ErrorCode::kIo, "trace: cannot open '" + path + "'");
  }
  std::ostringstream text;
  text << file.rdbuf();
  // Copying nothing sets failbit of the target: an empty file is reported as such by the parser.
  if (file.bad()) throw Error(ErrorCode::kIo, "trace: cannot read '" + path + "'");
  return parse_trace(text.view(), path, format);
}

}  // namespace fovea
