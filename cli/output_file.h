#pragma once

#include <string>

/// Files that a verb writes beside its results on stdout; an empty path means none.
namespace fovea::cli {

/// Throws Error(kIo) when `path` cannot be written: called before a run that may take long. A file
/// that this creates is removed again.
void check_writable(const std::string& path);

/// Throws Error(kIo).
void write_text(const std::string& path, const std::string& text);

}  // namespace fovea::cli
