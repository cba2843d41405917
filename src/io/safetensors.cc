#include "fovea/safetensors.h"

#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "fovea/error.h"
#include "fovea/json.h"
#include "src/io/safetensors_header.h"

namespace fovea {
namespace {

using internal::io_failure;

constexpr int64_t kPrefixBytes = 8;

// Bytes of a file or of memory, read front to back.
class Source {
 public:
  virtual ~Source() = default;
  virtual int64_t bytes() const = 0;
  /// Fills `target`; the caller stays within bytes().
  virtual void read(void* target, int64_t count) = 0;
};

class MemorySource : public Source {
 public:
  explicit MemorySource(std::string_view bytes) : rest_(bytes) {}
  int64_t bytes() const override { return static_cast<int64_t>(rest_.size()); }
  void read(void* target, int64_t count) override {
    if (count == 0) return;
    std::memcpy(target, rest_.data(), static_cast<size_t>(count));
    rest_.remove_prefix(static_cast<size_t>(count));
  }

 private:
  std::string_view rest_;
};

class FileHandle {
 public:
  /// `shown` is the path in messages.
  FileHandle(const std::string& path, const char* mode, const std::string& shown)
      : shown_(shown), file_(std::fopen(path.c_str(), mode)) {
    if (file_ == nullptr) fail("cannot be opened");
  }
  ~FileHandle() {
    if (file_ != nullptr) std::fclose(file_);
  }
  FileHandle(const FileHandle&) = delete;
  FileHandle& operator=(const FileHandle&) = delete;

  std::FILE* get() const { return file_; }
  [[noreturn]] void fail(const std::string& what) const {
    io_failure(shown_, what + ": " + std::strerror(errno));
  }
  void close() {
    std::FILE* file = std::exchange(file_, nullptr);
    if (std::fclose(file) != 0) fail("cannot be written");
  }

 private:
  std::string shown_;
  std::FILE* file_;
};

class FileSource : public Source {
 public:
  explicit FileSource(const std::string& path)
      : path_(path), bytes_(regular_file_bytes(path)), file_(path, "rb", path) {}
  int64_t bytes() const override { return bytes_; }
  void read(void* target, int64_t count) override {
    const auto wanted = static_cast<size_t>(count);
    if (std::fread(target, 1, wanted, file_.get()) != wanted) {
      io_failure(path_, "ended early: it changed while it was read");
    }
  }

 private:
  // Asked before the file is opened: opening a pipe would wait for its writer.
  static int64_t regular_file_bytes(const std::string& path) {
    std::error_code error;
    const std::filesystem::file_status status = std::filesystem::status(path, error);
    if (!std::filesystem::exists(status)) io_failure(path, "no such file");
    if (!std::filesystem::is_regular_file(status)) io_failure(path, "is not a regular file");
    const auto bytes = static_cast<int64_t>(std::filesystem::file_size(path, error));
    if (error) io_failure(path, error.message());
    return bytes;
  }

  std::string path_;
  int64_t bytes_;
  FileHandle file_;
};

TensorFile read(Source& input, std::string_view source) {
  const int64_t total_bytes = input.bytes();
  std::array<uint8_t, kPrefixBytes> prefix{};
  if (total_bytes < kPrefixBytes) {
    io_failure(source,
               "has " + std::to_string(total_bytes) + " bytes, a safetensors file has at least 8");
  }
  input.read(prefix.data(), kPrefixBytes);
  uint64_t header_bytes = 0;
  for (size_t i = 0; i < prefix.size(); ++i) header_bytes |= uint64_t{prefix[i]} << (8 * i);
  if (header_bytes > uint64_t{kMaxSafetensorsHeaderBytes}) {
    io_failure(source, "the header claims " + std::to_string(header_bytes) +
                           " bytes, expected at most " +
                           std::to_string(kMaxSafetensorsHeaderBytes));
  }
  const int64_t rest_bytes = total_bytes - kPrefixBytes;
  if (static_cast<int64_t>(header_bytes) > rest_bytes) {
    io_failure(source, "the header claims " + std::to_string(header_bytes) + " bytes, but only " +
                           std::to_string(rest_bytes) + " follow");
  }
  std::string text(static_cast<size_t>(header_bytes), '\0');
  input.read(text.data(), static_cast<int64_t>(header_bytes));
  internal::SafetensorsHeader header = internal::parse_safetensors_header(
      text, rest_bytes - static_cast<int64_t>(header_bytes), source);
  TensorFile file;
  file.metadata = std::move(header.metadata);
  for (const internal::SafetensorsEntry& entry : header.entries) {
    const TensorView view = file.tensors.add(entry.name, entry.dtype, entry.shape);
    input.read(view.data, entry.end - entry.begin);
  }
  return file;
}

std::string_view dtype_word(DType dtype) {
  switch (dtype) {
    case DType::kU8:
      return "U8";
    case DType::kI32:
      return "I32";
    case DType::kI64:
      return "I64";
    case DType::kF32:
      return "F32";
    case DType::kBf16:
      return "BF16";
    case DType::kNone:
      break;
  }
  return "?";
}

int64_t bytes_of(const ConstTensorView& tensor) {
  return tensor.num_elements() * static_cast<int64_t>(size_of(tensor.dtype));
}

// The length prefix and the header, padded with spaces so that the data starts 8-byte aligned.
std::string format_header(const TensorFile& file, std::string_view source) {
  Json header = Json::object();
  if (!file.metadata.empty()) {
    Json metadata = Json::object();
    for (const auto& [key, value] : file.metadata) metadata.set(key, value);
    header.set("__metadata__", std::move(metadata));
  }
  int64_t offset = 0;
  for (const std::string& name : file.tensors.names()) {
    const ConstTensorView tensor = file.tensors.find(name);
    if (name == "__metadata__") io_failure(source, "a tensor cannot be named '__metadata__'");
    Json shape = Json::array();
    for (int axis = 0; axis < tensor.rank; ++axis) {
      shape.push(tensor.shape[static_cast<size_t>(axis)]);
    }
    Json offsets = Json::array({offset, offset + bytes_of(tensor)});
    offset += bytes_of(tensor);
    header.set(name, Json::object({{"dtype", dtype_word(tensor.dtype)},
                                   {"shape", std::move(shape)},
                                   {"data_offsets", std::move(offsets)}}));
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  if (static_cast<int64_t>(text.size()) > kMaxSafetensorsHeaderBytes) {
    io_failure(source, "the header would have " + std::to_string(text.size()) +
                           " bytes, expected at most " +
                           std::to_string(kMaxSafetensorsHeaderBytes));
  }
  std::string prefix;
  for (int i = 0; i < 8; ++i) {
    prefix += static_cast<char>(static_cast<uint64_t>(text.size()) >> (8 * i) & 0xFF);
  }
  return prefix + text;
}

void write_to(const std::string& path, const TensorFile& file, const std::string& header,
              const std::string& shown) {
  FileHandle handle(path, "wb", shown);
  const auto put = [&](const void* bytes, size_t count) {
    if (std::fwrite(bytes, 1, count, handle.get()) != count) handle.fail("cannot be written");
  };
  put(header.data(), header.size());
  for (const std::string& name : file.tensors.names()) {
    const ConstTensorView tensor = file.tensors.find(name);
    put(tensor.data, static_cast<size_t>(bytes_of(tensor)));
  }
  handle.close();
}

}  // namespace

TensorFile read_safetensors(const std::string& path) {
  FileSource source(path);
  return read(source, path);
}

TensorFile parse_safetensors(std::string_view bytes, std::string_view source) {
  MemorySource memory(bytes);
  return read(memory, source);
}

std::string format_safetensors(const TensorFile& file) {
  std::string bytes = format_header(file, "safetensors");
  for (const std::string& name : file.tensors.names()) {
    const ConstTensorView tensor = file.tensors.find(name);
    bytes.append(static_cast<const char*>(tensor.data), static_cast<size_t>(bytes_of(tensor)));
  }
  return bytes;
}

void write_safetensors(const std::string& path, const TensorFile& file) {
  const std::string header = format_header(file, path);
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::status(path, error);
  if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status)) {
    write_to(path, file, header, path);  // a device or pipe is written in place
    return;
  }
  const std::string partial = path + ".partial-" + std::to_string(getpid());
  try {
    write_to(partial, file, header, path);
    std::filesystem::rename(partial, path, error);
    if (error) io_failure(path, "cannot be replaced: " + error.message());
  } catch (...) {
    std::filesystem::remove(partial, error);
    throw;
  }
}

}  // namespace fovea
