#include "tests/replay/json_schema.h"

#include <fstream>
#include <regex>
#include <set>
#include <sstream>

namespace fovea::test {
namespace {

bool has_type(const Json& value, const std::string& type) {
  const std::string found(to_string(value.kind()));
  if (type == "boolean") return found == "bool";
  if (type == "number") return found == "number" || found == "integer";
  return found == type;
}

bool has_any_type(const Json& value, const Json& types) {
  if (types.kind() == Json::Kind::kString) return has_type(value, types.as_string());
  for (const Json& type : types.items()) {
    if (has_type(value, type.as_string())) return true;
  }
  return false;
}

class Validator {
 public:
  explicit Validator(std::vector<std::string>* errors) : errors_(errors) {}

  void validate(const Json& schema, const Json& value, const std::string& place) {
    static const std::set<std::string> known = {
        "$schema", "title",      "description", "type",    "enum",    "required",
        "items",   "properties", "minimum",     "maximum", "pattern", "additionalProperties"};
    for (const auto& [keyword, content] : schema.members()) {
      if (!known.contains(keyword)) report(place, "schema keyword '" + keyword + "' is unknown");
    }
    if (const Json* type = schema.find("type"); type != nullptr && !has_any_type(value, *type)) {
      report(place, "is " + value.dump() + ", expected type " + type->dump());
      return;
    }
    if (const Json* choices = schema.find("enum")) {
      bool found = false;
      for (const Json& choice : choices->items()) found = found || choice == value;
      if (!found) report(place, value.dump() + " is not among " + choices->dump());
    }
    validate_number(schema, value, place);
    if (const Json* pattern = schema.find("pattern")) {
      if (!std::regex_search(value.as_string(), std::regex(pattern->as_string()))) {
        report(place, value.dump() + " does not match " + pattern->dump());
      }
    }
    if (value.kind() == Json::Kind::kObject) validate_object(schema, value, place);
    if (const Json* items = schema.find("items")) {
      for (size_t i = 0; i < value.items().size(); ++i) {
        validate(*items, value.items()[i], place + "[" + std::to_string(i) + "]");
      }
    }
  }

 private:
  void report(const std::string& place, const std::string& what) {
    errors_->push_back(place + ": " + what);
  }

  void validate_number(const Json& schema, const Json& value, const std::string& place) {
    if (!has_type(value, "number")) return;
    const Json* minimum = schema.find("minimum");
    const Json* maximum = schema.find("maximum");
    if ((minimum != nullptr && value.as_number() < minimum->as_number()) ||
        (maximum != nullptr && value.as_number() > maximum->as_number())) {
      report(place, value.dump() + " is out of range");
    }
  }

  void validate_object(const Json& schema, const Json& value, const std::string& place) {
    if (const Json* required = schema.find("required")) {
      for (const Json& key : required->items()) {
        if (value.find(key.as_string()) == nullptr) report(place, "lacks " + key.as_string());
      }
    }
    const Json* properties = schema.find("properties");
    if (properties == nullptr) return;
    const Json* additional = schema.find("additionalProperties");
    for (const auto& [key, member] : value.members()) {
      if (const Json* property = properties->find(key)) {
        validate(*property, member, place + "." + key);
      } else if (additional != nullptr && !additional->as_bool()) {
        report(place, "has the unknown member " + key);
      }
    }
  }

  std::vector<std::string>* errors_;
};

}  // namespace

std::vector<std::string> schema_errors(const Json& schema, const Json& value,
                                       const std::string& place) {
  std::vector<std::string> errors;
  Validator(&errors).validate(schema, value, place);
  return errors;
}

Json read_json(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return Json::parse(text.str(), path);
}

}  // namespace fovea::test
