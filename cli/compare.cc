#include "cli/compare.h"

#include <cstring>

namespace fovea::cli {

bool same_bytes(const ConstTensorView& a, const ConstTensorView& b) {
  if (to_string(a) != to_string(b)) return false;
  const size_t bytes = static_cast<size_t>(a.num_elements()) * size_of(a.dtype);
  return bytes == 0 || std::memcmp(a.data, b.data, bytes) == 0;
}

}  // namespace fovea::cli
