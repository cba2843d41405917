#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "fovea/call_operator.h"

namespace fovea::python {

/// All that decides how a call is planned, as a row of words: operator, device, names, types and
/// shapes of tensors, parameters. Equal words: the same plan.
class CallKey {
 public:
  void add(uint64_t word) {
    if (count_ < words_.size()) words_[count_] = word;
    ++count_;
  }
  void add(std::string_view text);
  void add(const TensorView& view, bool is_writable);

  /// A key that is too long stands for no call.
  bool fits() const noexcept { return count_ <= words_.size(); }
  const uint64_t* begin() const noexcept { return words_.data(); }
  const uint64_t* end() const noexcept { return words_.data() + count_; }
  uint64_t hash() const noexcept;

 private:
  std::array<uint64_t, 256> words_;
  size_t count_ = 0;
};

struct CallCacheInfo {
  int64_t hits = 0;
  int64_t misses = 0;
  int64_t entries = 0;
};

/// The records of the latest calls, at most kMaxEntries, for all threads; the one that was not used
/// for longest goes first. Thread-safe.
class CallCache {
 public:
  static constexpr size_t kMaxEntries = 512;

  static CallCache& instance();

  /// The record of a key and the cache that it is of.
  struct Latest {
    std::vector<uint64_t> words;
    std::shared_ptr<const CallRecord> record;
    uint64_t generation = 0;
  };
  /// Null when there is none. `latest`, of one function and under one lock, is what it found last:
  /// calls that repeat one another are not looked up.
  std::shared_ptr<const CallRecord> find(const CallKey& key, Latest* latest);
  void insert(const CallKey& key, std::shared_ptr<const CallRecord> record);
  void clear();
  CallCacheInfo info() const;

 private:
  struct State;

  CallCache();
  State& state_;
};

}  // namespace fovea::python
