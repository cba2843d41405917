#include "src/io/safetensors_header.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>

#include "fovea/error.h"
#include "fovea/tensor.h"

namespace fovea::internal {
namespace {

DType parse_dtype(std::string_view source, const std::string& tensor, const std::string& word) {
  constexpr std::pair<std::string_view, DType> kTypes[] = {
      {"BF16", DType::kBf16}, {"F32", DType::kF32}, {"I32", DType::kI32},
      {"I64", DType::kI64},   {"U8", DType::kU8},   {"F8_E4M3", DType::kU8}};
  for (const auto& [name, dtype] : kTypes) {
    if (name == word) return dtype;
  }
  io_failure(source, "tensor " + quote_name(tensor) + ": dtype " + quote_name(word) +
                         ", expected BF16, F32, I32, I64, U8 or F8_E4M3");
}

// Accepts exactly {"<tensor>": {"dtype": string, "shape": [integers], "data_offsets": [a, b]},
// ..., "__metadata__": {string: string}}, event by event: nothing else is ever stored, so a hostile
// header costs no more memory than its own length.
class HeaderReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit HeaderReader(std::string_view source) : source_(source) {}

  SafetensorsHeader take() { return std::move(header_); }

  bool null() override { refuse("null"); }
  bool boolean(bool) override { refuse("a bool"); }
  bool number_integer(int64_t value) override { refuse("the number " + std::to_string(value)); }
  bool number_float(double, const std::string& text) override { refuse("the number " + text); }
  bool binary(nlohmann::json::binary_t&) override { refuse("binary data"); }

  bool number_unsigned(uint64_t value) override {
    if (state_ != State::kShape && state_ != State::kOffsets) {
      refuse("the number " + std::to_string(value));
    }
    if (!std::in_range<int64_t>(value)) refuse("the number " + std::to_string(value));
    std::vector<int64_t>& list = state_ == State::kShape ? *shape_ : *offsets_;
    const size_t longest = state_ == State::kShape ? kMaxRank : 2;
    if (list.size() == longest) {
      refuse("more than " + std::to_string(longest) + " numbers");
    }
    list.push_back(static_cast<int64_t>(value));
    return true;
  }

  bool string(std::string& value) override {
    if (state_ == State::kMetadata) {
      header_.metadata[key_] = std::move(value);
    } else if (state_ == State::kTensor && key_ == "dtype") {
      dtype_ = parse_dtype(source_, name_, value);
    } else {
      refuse("the string " + quote_name(value));
    }
    return true;
  }

  bool start_object(size_t) override {
    if (state_ == State::kStart) {
      state_ = State::kTop;
    } else if (state_ == State::kTop) {
      state_ = name_ == "__metadata__" ? State::kMetadata : State::kTensor;
      keys_.clear();
      dtype_.reset();
      shape_.reset();
      offsets_.reset();
    } else {
      refuse("an object");
    }
    return true;
  }

  bool key(std::string& key) override {
    if (state_ == State::kTop) {
      name_ = key;
      if (!names_.insert(key).second)
        io_failure(source_, "the name " + quote_name(key) + " occurs twice");
      if (key.empty()) io_failure(source_, "a tensor has an empty name");
      return true;
    }
    if (state_ == State::kTensor && key != "dtype" && key != "shape" && key != "data_offsets") {
      io_failure(source_, "tensor " + quote_name(name_) + ": unknown field " + quote_name(key));
    }
    if (!keys_.insert(key).second) {
      io_failure(source_, quote_name(name_) + ": the field " + quote_name(key) + " occurs twice");
    }
    key_ = std::move(key);
    return true;
  }

  bool end_object() override {
    if (state_ == State::kTensor) add_tensor();
    state_ = state_ == State::kTop ? State::kDone : State::kTop;
    return true;
  }

  bool start_array(size_t) override {
    if (state_ == State::kTensor && key_ == "shape") {
      state_ = State::kShape;
      shape_.emplace();
    } else if (state_ == State::kTensor && key_ == "data_offsets") {
      state_ = State::kOffsets;
      offsets_.emplace();
    } else {
      refuse("an array");
    }
    return true;
  }

  bool end_array() override {
    state_ = State::kTensor;
    return true;
  }

  bool parse_error(size_t position, const std::string&,
                   const nlohmann::detail::exception&) override {
    io_failure(source_, "the header is malformed JSON at byte " + std::to_string(position));
  }

 private:
  enum class State { kStart, kTop, kMetadata, kTensor, kShape, kOffsets, kDone };

  [[noreturn]] void refuse(const std::string& found) const {
    std::string place = "the header";
    if (!name_.empty()) place += ", entry " + quote_name(name_);
    if (state_ != State::kTop && !key_.empty()) place += ", field " + quote_name(key_);
    io_failure(source_, place + ": unexpected " + found);
  }

  void add_tensor() {
    const std::string place = "tensor " + quote_name(name_);
    if (!dtype_) io_failure(source_, place + ": dtype is missing");
    if (!shape_) io_failure(source_, place + ": shape is missing");
    if (!offsets_) io_failure(source_, place + ": data_offsets is missing");
    if (offsets_->size() != 2) {
      io_failure(source_, place + ": data_offsets has " + std::to_string(offsets_->size()) +
                              " numbers, expected 2");
    }
    header_.entries.push_back({name_, *dtype_, std::move(*shape_), (*offsets_)[0], (*offsets_)[1]});
  }

  std::string_view source_;
  State state_ = State::kStart;
  SafetensorsHeader header_;
  std::string name_;  // of the entry of the top level
  std::string key_;   // inside it
  std::set<std::string> names_;
  std::set<std::string> keys_;
  std::optional<DType> dtype_;
  std::optional<std::vector<int64_t>> shape_;
  std::optional<std::vector<int64_t>> offsets_;
};

// Bytes that dtype and shape ask for; nothing on overflow.
std::optional<int64_t> needed_bytes(const SafetensorsEntry& entry) {
  auto bytes = static_cast<int64_t>(size_of(entry.dtype));
  bool is_empty = false;
  for (const int64_t extent : entry.shape) {
    is_empty = is_empty || extent == 0;
    // The strides of an empty tensor must be representable too.
    if (__builtin_mul_overflow(bytes, std::max<int64_t>(extent, 1), &bytes)) return std::nullopt;
  }
  return is_empty ? 0 : bytes;
}

void check_ranges(std::vector<SafetensorsEntry>& entries, int64_t data_bytes,
                  std::string_view source) {
  const auto range = [](const SafetensorsEntry& entry) {
    return "[" + std::to_string(entry.begin) + ", " + std::to_string(entry.end) + ")";
  };
  for (const SafetensorsEntry& entry : entries) {
    const std::string place = "tensor " + quote_name(entry.name) + ": data_offsets " + range(entry);
    if (entry.end < entry.begin) io_failure(source, place + " are reversed");
    if (entry.end > data_bytes) {
      io_failure(source,
                 place + " end after the data, which has " + std::to_string(data_bytes) + " bytes");
    }
    const std::optional<int64_t> needed = needed_bytes(entry);
    if (!needed || *needed != entry.end - entry.begin) {
      io_failure(source, place + " hold " + std::to_string(entry.end - entry.begin) +
                             " bytes, dtype and shape need " +
                             (needed ? std::to_string(*needed) : std::string("more than 2^63")));
    }
  }
  std::stable_sort(entries.begin(), entries.end(),
                   [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
                     return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
                   });
  int64_t covered = 0;
  std::string_view before = "the start of the data";
  for (const SafetensorsEntry& entry : entries) {
    if (entry.begin < covered) {
      io_failure(source, "tensors " + quote_name(before) + " and " + quote_name(entry.name) +
                             " overlap at byte " + std::to_string(entry.begin));
    }
    if (entry.begin > covered) {
      io_failure(source, "tensor " + quote_name(entry.name) + ": bytes [" +
                             std::to_string(covered) + ", " + std::to_string(entry.begin) +
                             ") before it belong to no tensor");
    }
    covered = entry.end;
    before = entry.name;
  }
  if (covered != data_bytes) {
    io_failure(source, "the last " + std::to_string(data_bytes - covered) +
                           " bytes of the data belong to no tensor");
  }
}

}  // namespace

void io_failure(std::string_view source, const std::string& what) {
  throw Error(ErrorCode::kIo, std::string(source) + ": " + what);
}

std::string quote_name(std::string_view name) {
  constexpr size_t kLongest = 80;
  std::string text = "'";
  for (const char c : name.substr(0, kLongest)) {
    text += static_cast<unsigned char>(c) < 0x20 || c == 0x7F ? '?' : c;
  }
  return text + (name.size() > kLongest ? "...'" : "'");
}

SafetensorsHeader parse_safetensors_header(std::string_view text, int64_t data_bytes,
                                           std::string_view source) {
  if (text.empty() || text.front() != '{') {
    io_failure(source, "the header does not start with '{': not a safetensors file");
  }
  HeaderReader reader(source);
  nlohmann::json::sax_parse(text.begin(), text.end(), &reader);
  SafetensorsHeader header = reader.take();
  check_ranges(header.entries, data_bytes, source);
  return header;
}

}  // namespace fovea::internal
