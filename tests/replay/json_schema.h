#pragma once

#include <string>
#include <vector>

#include "fovea/json.h"

namespace fovea::test {

/// Ways in which `value` breaks a JSON schema, one sentence each with its place; empty: it is
/// valid. Knows type, enum, required, additionalProperties = false, properties, items, minimum,
/// maximum and pattern (regular expression of std::regex); any other keyword than these and the
/// annotations is reported, so that a schema cannot ask for what nobody checks.
std::vector<std::string> schema_errors(const Json& schema, const Json& value,
                                       const std::string& place = "$");

/// The JSON in a file.
Json read_json(const std::string& path);

}  // namespace fovea::test
