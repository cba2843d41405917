#include "src/replay/digest.h"

#include <bit>

#include "src/replay/hash.h"

namespace fovea::internal {
namespace {

// Four independent chains, because one multiply-and-rotate chain is bound by latency. Word i goes
// to chain i % 4.
class WordHash {
 public:
  explicit WordHash(const DigestRow& row) {
    const uint64_t start = hash_words(static_cast<uint64_t>(row.request), row.position, row.layer);
    for (uint64_t c = 0; c < 4; ++c) chains_[c] = mix64(start + c);
  }

  void add(uint64_t word) {
    uint64_t& chain = chains_[count_++ % 4];
    chain = std::rotl(chain ^ word, 29) * 0x9E3779B97F4A7C15u;
  }

  uint64_t finish() const {
    return hash_words(chains_[0], chains_[1], chains_[2], chains_[3], count_);
  }

 private:
  uint64_t chains_[4];
  uint64_t count_ = 0;
};

}  // namespace

uint64_t digest_selection(const DigestRow& row, std::span<const int32_t> positions) {
  WordHash hash(row);
  for (const int32_t position : positions) hash.add(static_cast<uint32_t>(position));
  return hash.finish();
}

uint64_t digest_output(const DigestRow& row, std::span<const bf16_t> output) {
  WordHash hash(row);
  size_t i = 0;
  for (; i + 4 <= output.size(); i += 4) {
    // Built from the elements, not from memory, so that it does not depend on the byte order.
    hash.add(uint64_t{output[i].bits} | uint64_t{output[i + 1].bits} << 16 |
             uint64_t{output[i + 2].bits} << 32 | uint64_t{output[i + 3].bits} << 48);
  }
  for (; i < output.size(); ++i) hash.add(output[i].bits);
  return hash.finish();
}

}  // namespace fovea::internal
