#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "fovea/dtype.h"

/// The JSON header of a safetensors file.
namespace fovea::internal {

struct SafetensorsEntry {
  std::string name;
  DType dtype = DType::kNone;
  std::vector<int64_t> shape;
  int64_t begin = 0;  ///< Byte range in the data section, [begin, end).
  int64_t end = 0;
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;  ///< In the order of the data.
  std::map<std::string, std::string> metadata;
};

/// Parses and checks a header against the length of the data section. Throws Error(kIo) naming
/// `source` and the tensor.
SafetensorsHeader parse_safetensors_header(std::string_view text, int64_t data_bytes,
                                           std::string_view source);

/// Throws Error(kIo, "<source>: <what>").
[[noreturn]] void io_failure(std::string_view source, const std::string& what);

/// A name for messages: quoted, shortened, without control characters.
std::string quote_name(std::string_view name);

}  // namespace fovea::internal
