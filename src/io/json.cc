#include "fovea/json.h"

#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "src/core/check.h"

namespace fovea {
namespace {

using Nlohmann = nlohmann::ordered_json;

// Builds a Json from parser events, so that repeated keys are seen and nesting stays bounded.
class Builder : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit Builder(std::string_view source) : source_(source) {}

  bool null() override { return add(Json()); }
  bool boolean(bool value) override { return add(Json(value)); }
  bool number_integer(int64_t value) override { return add(Json(value)); }
  bool number_unsigned(uint64_t value) override {
    if (!std::in_range<int64_t>(value)) {
      fail("the integer " + std::to_string(value) + " does not fit 64 signed bits");
    }
    return add(Json(value));
  }
  bool number_float(double value, const std::string& text) override {
    if (!std::isfinite(value)) fail("the number " + text + " is not finite");
    return add(Json(value));
  }
  bool string(std::string& value) override { return add(Json(std::move(value))); }
  bool binary(nlohmann::json::binary_t&) override { return false; }  // never sent for JSON text
  bool start_object(size_t) override { return open(true); }
  bool start_array(size_t) override { return open(false); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(std::string& name) override {
    if (!levels_.back().keys.insert(name).second) fail("the key '" + name + "' occurs twice");
    levels_.back().key = std::move(name);
    return true;
  }
  bool parse_error(size_t position, const std::string& token,
                   const nlohmann::detail::exception&) override {
    // A number that overflows arrives here too, and so do NaN and Infinity, which JSON lacks.
    fail("malformed JSON or a number that is not finite at byte " + std::to_string(position) +
         ", near '" + token.substr(0, kMaxQuotedBytes) + "'");
  }

  Json take() { return std::move(result_); }

 private:
  static constexpr size_t kMaxQuotedBytes = 80;

  struct Level {
    bool is_object;
    Json::Array items;
    Json::Object members;
    std::string key;  // of the member whose value comes next
    std::set<std::string> keys;
  };

  [[noreturn]] void fail(const std::string& what) const {
    internal::invalid(std::string(source_).c_str(), what);
  }

  bool open(bool is_object) {
    if (levels_.size() >= Json::kMaxDepth) {
      fail("nesting deeper than " + std::to_string(Json::kMaxDepth) + " levels");
    }
    levels_.emplace_back().is_object = is_object;
    return true;
  }

  bool close() {
    Level level = std::move(levels_.back());
    levels_.pop_back();
    return add(level.is_object ? Json::object(std::move(level.members))
                               : Json::array(std::move(level.items)));
  }

  bool add(Json value) {
    if (levels_.empty()) {
      result_ = std::move(value);
    } else if (Level& level = levels_.back(); level.is_object) {
      level.members.emplace_back(std::move(level.key), std::move(value));
    } else {
      level.items.push_back(std::move(value));
    }
    return true;
  }

  std::string_view source_;
  std::vector<Level> levels_;
  Json result_;
};

[[noreturn]] void refuse_kind(Json::Kind found, std::string_view expected) {
  internal::invalid("json", std::string("found a value of type ") + std::string(to_string(found)) +
                                ", expected " + std::string(expected));
}

Nlohmann to_nlohmann(const Json& value) {
  switch (value.kind()) {
    case Json::Kind::kNull:
      return nullptr;
    case Json::Kind::kBool:
      return value.as_bool();
    case Json::Kind::kInteger:
      return value.as_integer();
    case Json::Kind::kNumber:
      return value.as_number();
    case Json::Kind::kString:
      return value.as_string();
    case Json::Kind::kArray: {
      Nlohmann array = Nlohmann::array();
      for (const Json& item : value.items()) array.push_back(to_nlohmann(item));
      return array;
    }
    case Json::Kind::kObject: {
      Nlohmann object = Nlohmann::object();
      for (const auto& [key, item] : value.members()) object[key] = to_nlohmann(item);
      return object;
    }
  }
  return nullptr;
}

}  // namespace

std::string_view to_string(Json::Kind kind) noexcept {
  switch (kind) {
    case Json::Kind::kNull:
      return "null";
    case Json::Kind::kBool:
      return "bool";
    case Json::Kind::kInteger:
      return "integer";
    case Json::Kind::kNumber:
      return "number";
    case Json::Kind::kString:
      return "string";
    case Json::Kind::kArray:
      return "array";
    case Json::Kind::kObject:
      return "object";
  }
  return "?";
}

Json::Json(double value) : value_(value) {
  if (!std::isfinite(value)) {
    internal::invalid("json", "the number " + std::to_string(value) +
                                  " is not finite; JSON has no word for it, use null or a string");
  }
}

void Json::refuse_integer() { internal::invalid("json", "an integer outside 64 signed bits"); }

Json Json::parse(std::string_view text, std::string_view source) {
  Builder builder(source);
  nlohmann::json::sax_parse(text.begin(), text.end(), &builder);
  return builder.take();
}

bool Json::as_bool() const {
  if (kind() != Kind::kBool) refuse_kind(kind(), "true or false");
  return std::get<bool>(value_);
}

int64_t Json::as_integer() const {
  if (kind() == Kind::kInteger) return std::get<int64_t>(value_);
  if (kind() != Kind::kNumber) refuse_kind(kind(), "an integer");
  const double number = std::get<double>(value_);
  // 2^53: beyond it a double no longer names one integer.
  if (number != std::trunc(number) || std::fabs(number) > 0x1p53) {
    internal::invalid("json",
                      "found the number " + std::to_string(number) + ", expected an integer");
  }
  return static_cast<int64_t>(number);
}

double Json::as_number() const {
  if (kind() == Kind::kInteger) return static_cast<double>(std::get<int64_t>(value_));
  if (kind() != Kind::kNumber) refuse_kind(kind(), "a number");
  return std::get<double>(value_);
}

const std::string& Json::as_string() const {
  if (kind() != Kind::kString) refuse_kind(kind(), "a string");
  return std::get<std::string>(value_);
}

const Json::Array& Json::items() const {
  if (kind() != Kind::kArray) refuse_kind(kind(), "an array");
  return std::get<Array>(value_);
}

const Json::Object& Json::members() const {
  if (kind() != Kind::kObject) refuse_kind(kind(), "an object");
  return std::get<Object>(value_);
}

const Json* Json::find(std::string_view key) const noexcept {
  const Object* object = std::get_if<Object>(&value_);
  if (object == nullptr) return nullptr;
  for (const Member& member : *object) {
    if (member.first == key) return &member.second;
  }
  return nullptr;
}

Json& Json::push(Json item) {
  if (kind() != Kind::kArray) refuse_kind(kind(), "an array");
  std::get<Array>(value_).push_back(std::move(item));
  return *this;
}

Json& Json::set(std::string_view key, Json item) {
  if (kind() != Kind::kObject) refuse_kind(kind(), "an object");
  if (Json* present = const_cast<Json*>(find(key)); present != nullptr) {
    *present = std::move(item);
  } else {
    std::get<Object>(value_).emplace_back(key, std::move(item));
  }
  return *this;
}

std::string Json::dump(int indent) const {
  return to_nlohmann(*this).dump(indent, ' ', false, Nlohmann::error_handler_t::replace);
}

}  // namespace fovea
