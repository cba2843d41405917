#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fovea/export.h"
#include "fovea/tensor.h"

namespace fovea {

/// Owned host tensors by name: packed, 64-byte aligned. Movable, not copyable. Views stay valid
/// until their tensor is removed or the map is destroyed; moving the map keeps them.
class FOVEA_API TensorMap {
 public:
  /// Adds a zero-filled tensor. Throws Error(kInvalidArgument) for a name that is empty or taken, a
  /// negative extent or more than kMaxRank axes, Error(kOutOfMemory) when it does not fit.
  TensorView add(std::string_view name, DType dtype, std::span<const int64_t> shape);
  TensorView add(std::string_view name, DType dtype, std::initializer_list<int64_t> shape) {
    return add(name, dtype, std::span<const int64_t>(shape.begin(), shape.size()));
  }

  /// Adds a packed copy of `source`, strides honoured.
  TensorView add_copy(std::string_view name, const ConstTensorView& source);

  /// The tensor, or an undefined view.
  TensorView find(std::string_view name) noexcept;
  ConstTensorView find(std::string_view name) const noexcept;

  /// Whether it was there.
  bool remove(std::string_view name);

  /// Sorted.
  std::vector<std::string> names() const;
  size_t count() const noexcept { return tensors_.size(); }

 private:
  struct Free {
    void operator()(void* block) const noexcept;
  };
  struct Entry {
    TensorShape layout;
    std::unique_ptr<void, Free> block;  // from calloc: untouched pages cost no memory
    void* data;                         // the first aligned byte in it
  };
  std::map<std::string, Entry, std::less<>> tensors_;
};

/// Content of a safetensors file. Parameters of `fovea run` are the JSON text metadata["params"].
struct TensorFile {
  TensorMap tensors;
  std::map<std::string, std::string> metadata;  ///< The `__metadata__` entry.
};

/// Longest header that is read or written.
inline constexpr int64_t kMaxSafetensorsHeaderBytes = 100'000'000;

/// Reads a safetensors file: 8 bytes of header length (little endian), a JSON header, the data.
///
/// Types: BF16, F32, I32, I64, U8, and F8_E4M3 as u8 codes. Every byte of the data belongs to
/// exactly one tensor. Throws Error(kIo), naming file and tensor, for a file that is missing,
/// shorter or longer than its header says, a header beyond kMaxSafetensorsHeaderBytes, malformed
/// JSON, a repeated name, a field that is missing, unknown or of the wrong type, an unknown dtype,
/// more than kMaxRank axes, a byte range that is reversed, outside the data, overlapping, leaves a
/// gap or does not fit dtype and shape. Memory stays within a small multiple of the file's size.
///
/// Source of the format: the safetensors specification, restated in docs/run.md.
FOVEA_API TensorFile read_safetensors(const std::string& path);

/// The same from memory; `source` stands for the path in messages.
FOVEA_API TensorFile parse_safetensors(std::string_view bytes, std::string_view source);

/// Writes tensors in the order of their names (u8 stays U8). A regular file is replaced only when
/// everything is written: a failure leaves the old one. Throws Error(kIo) naming the path.
FOVEA_API void write_safetensors(const std::string& path, const TensorFile& file);

/// The same into memory.
FOVEA_API std::string format_safetensors(const TensorFile& file);

}  // namespace fovea
