#pragma once

/// Whether a sanitizer watches this build: everything takes five to twenty times as long.
namespace fovea::test {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

/// For the size of a loop that repeats one path: the sanitizer sees the path either way.
template <class T>
constexpr T by_build(T plain, T sanitized) {
  return kSanitized ? sanitized : plain;
}

}  // namespace fovea::test
