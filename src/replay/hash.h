#pragma once

#include <cstdint>

/// Integer hashing of the replay: equal on every platform.
namespace fovea::internal {

/// A bijection of 64 bits whose output bits all depend on all input bits (the finaliser of
/// SplitMix64).
inline uint64_t mix64(uint64_t value) noexcept {
  value += 0x9E3779B97F4A7C15u;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
  return value ^ (value >> 31);
}

/// Hash of an ordered list of words.
template <class... Words>
uint64_t hash_words(uint64_t first, Words... rest) noexcept {
  uint64_t hash = mix64(first);
  ((hash = mix64(hash ^ static_cast<uint64_t>(rest)) + 0x632BE59BD9B4E019u), ...);
  return hash;
}

/// First word of every hash, so that draws for different ends never coincide.
enum class HashDomain : uint64_t {
  kPromptToken = 1,
  kGeneratedToken,
  kPrivateToken,
  kArrival,
  kTarget,
  kSample,
  kDraftToken,
  kAcceptance,
};

/// Hash of `words` in a domain.
template <class... Words>
uint64_t hash_in(HashDomain domain, Words... words) noexcept {
  return hash_words(static_cast<uint64_t>(domain), words...);
}

/// Maps 64 random bits to [0, count), count >= 1, without division.
inline int64_t scale_to(uint64_t random, int64_t count) noexcept {
  // The upper 32 bits are enough: count is a number of tokens, far below 2^32.
  return static_cast<int64_t>(((random >> 32) * static_cast<uint64_t>(count)) >> 32);
}

}  // namespace fovea::internal
