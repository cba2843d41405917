// libFuzzer: a file is either read, and then survives a round trip, or refused with Error(kIo).

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "fovea/error.h"
#include "fovea/json.h"
#include "fovea/safetensors.h"

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

void check_round_trip(const fovea::TensorFile& file) {
  const std::string bytes = fovea::format_safetensors(file);
  const fovea::TensorFile again = fovea::parse_safetensors(bytes, "again");
  require(again.metadata == file.metadata);
  require(again.tensors.names() == file.tensors.names());
  for (const std::string& name : file.tensors.names()) {
    const fovea::ConstTensorView a = file.tensors.find(name), b = again.tensors.find(name);
    require(to_string(a) == to_string(b));
    const size_t length = static_cast<size_t>(a.num_elements()) * fovea::size_of(a.dtype);
    require(length == 0 || std::memcmp(a.data, b.data, length) == 0);
  }
}

// Parameters come from the same file: they are parsed, or refused with Error(kInvalidArgument).
void check_params(const fovea::TensorFile& file) {
  const auto params = file.metadata.find("params");
  if (params == file.metadata.end()) return;
  try {
    const fovea::Json value = fovea::Json::parse(params->second, "params");
    require(fovea::Json::parse(value.dump(), "again") == value);
  } catch (const fovea::Error& error) {
    require(error.code() == fovea::ErrorCode::kInvalidArgument);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t length) {
  try {
    const fovea::TensorFile file =
        fovea::parse_safetensors({reinterpret_cast<const char*>(data), length}, "fuzz");
    check_round_trip(file);
    check_params(file);
  } catch (const fovea::Error& error) {
    require(error.code() == fovea::ErrorCode::kIo);
  }
  return 0;
}
