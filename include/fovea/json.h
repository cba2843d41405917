#pragma once

#include <concepts>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "fovea/export.h"

namespace fovea {

/// A JSON value: parameters in, reports out. A plain value type: copies are deep, it owns its
/// content and knows nothing about files. Not thread-safe while it is changed.
///
/// Numbers are int64 or finite doubles. What JSON cannot express is refused where it enters: a
/// non-finite number, an integer outside int64, a key that occurs twice. Keys keep their order;
/// which keys are known is the caller's business.
class FOVEA_API Json {
 public:
  enum class Kind : uint8_t { kNull, kBool, kInteger, kNumber, kString, kArray, kObject };
  using Array = std::vector<Json>;
  using Member = std::pair<std::string, Json>;
  using Object = std::vector<Member>;

  /// Deepest nesting that parse() accepts.
  static constexpr int kMaxDepth = 64;

  Json() = default;                    ///< null
  Json(bool value) : value_(value) {}  // NOLINT: literals read as themselves, here and below
  template <std::integral Integer>
  requires(!std::same_as<Integer, bool>) Json(Integer value)  // NOLINT
      : value_(checked_integer(value)) {}
  /// Throws Error(kInvalidArgument) for NaN and infinities.
  Json(double value);                                           // NOLINT
  Json(std::string value) : value_(std::move(value)) {}         // NOLINT
  Json(std::string_view value) : value_(std::string(value)) {}  // NOLINT
  Json(const char* value) : value_(std::string(value)) {}       // NOLINT

  static Json array(Array items = {}) { return Json(Storage(std::move(items))); }
  /// The keys must be distinct.
  static Json object(Object members = {}) { return Json(Storage(std::move(members))); }

  /// Parses one JSON text. Throws Error(kInvalidArgument, "<source>: ...") with the byte position
  /// for malformed text, NaN, Infinity, numbers that overflow, a repeated key and nesting beyond
  /// kMaxDepth.
  static Json parse(std::string_view text, std::string_view source);

  Kind kind() const noexcept { return static_cast<Kind>(value_.index()); }

  /// The value as this type; Error(kInvalidArgument) naming both kinds when it is another one.
  /// as_number() takes integers too; as_integer() takes doubles without a fraction (64.0).
  bool as_bool() const;
  int64_t as_integer() const;
  double as_number() const;
  const std::string& as_string() const;
  const Array& items() const;
  const Object& members() const;

  /// The member, or null when the value is no object or has no such key.
  const Json* find(std::string_view key) const noexcept;

  /// Appends to an array.
  Json& push(Json item);
  /// Replaces or appends a member of an object; returns the object, so that calls can be chained.
  Json& set(std::string_view key, Json item);

  /// JSON text: on one line for indent < 0, otherwise indented. Doubles are written so that they
  /// parse back to the same bits; bytes that are not UTF-8 become U+FFFD.
  std::string dump(int indent = -1) const;

  friend bool operator==(const Json&, const Json&) = default;

 private:
  // The order of the alternatives is that of Kind.
  using Storage = std::variant<std::monostate, bool, int64_t, double, std::string, Array, Object>;

  explicit Json(Storage value) : value_(std::move(value)) {}

  template <class Integer>
  static int64_t checked_integer(Integer value) {
    if (!std::in_range<int64_t>(value)) refuse_integer();
    return static_cast<int64_t>(value);
  }
  [[noreturn]] static void refuse_integer();

  Storage value_;
};

/// "null", "bool", "integer", "number", "string", "array", "object".
FOVEA_API std::string_view to_string(Json::Kind kind) noexcept;

}  // namespace fovea
