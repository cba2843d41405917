#include "cli/output_file.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "fovea/error.h"

namespace fovea::cli {
namespace {

[[noreturn]] void cannot_write(const std::string& path) {
  throw Error(ErrorCode::kIo, path + ": cannot be written: " + std::strerror(errno));
}

}  // namespace

void check_writable(const std::string& path) {
  if (path.empty()) return;
  std::error_code error;
  const bool existed = std::filesystem::exists(path, error);
  std::FILE* file = std::fopen(path.c_str(), "ab");
  if (file == nullptr) cannot_write(path);
  std::fclose(file);
  if (!existed) std::filesystem::remove(path, error);
}

void write_text(const std::string& path, const std::string& text) {
  if (path.empty()) return;
  std::FILE* file = std::fopen(path.c_str(), "wb");
  if (file == nullptr) cannot_write(path);
  const bool written = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  if (std::fclose(file) != 0 || !written) cannot_write(path);
}

}  // namespace fovea::cli
