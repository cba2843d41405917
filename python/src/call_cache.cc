#include "python/src/call_cache.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <list>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace fovea::python {

void CallKey::add(std::string_view text) {
  add(text.size());
  while (!text.empty()) {
    uint64_t word = 0;
    const size_t bytes = std::min(text.size(), sizeof(word));
    std::memcpy(&word, text.data(), bytes);
    add(word);
    text.remove_prefix(bytes);
  }
}

void CallKey::add(const TensorView& view, bool is_writable) {
  add(static_cast<uint64_t>(view.dtype) << 16 | static_cast<uint64_t>(view.rank) << 8 |
      static_cast<uint64_t>(is_writable));
  for (size_t axis = 0; axis < static_cast<size_t>(view.rank); ++axis) {
    add(static_cast<uint64_t>(view.shape[axis]));
    add(static_cast<uint64_t>(view.stride[axis]));
  }
}

// Folded products of 128 bits: every word changes about half of the bits.
uint64_t CallKey::hash() const noexcept {
  uint64_t hash = count_;
  for (const uint64_t word : *this) {
    const auto product =
        static_cast<unsigned __int128>(hash ^ word ^ 0x9e3779b97f4a7c15u) * 0xd1342543de82ef95u;
    hash = static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64) ^ hash >> 29;
  }
  return hash;
}

namespace {

struct Entry {
  uint64_t hash;
  std::vector<uint64_t> words;
  std::shared_ptr<const CallRecord> record;
};

using Entries = std::list<Entry>;

}  // namespace

struct CallCache::State {
  mutable std::mutex mutex;
  Entries entries;  // the latest first
  std::unordered_multimap<uint64_t, Entries::iterator> by_hash;
  CallCacheInfo info;
  std::atomic<int64_t> hits{0};
  std::atomic<uint64_t> generation{1};  // since the cache was cleared

  Entries::iterator find(uint64_t hash, const CallKey& key) {
    const auto [begin, end] = by_hash.equal_range(hash);
    for (auto it = begin; it != end; ++it) {
      const std::vector<uint64_t>& words = it->second->words;
      if (std::equal(words.begin(), words.end(), key.begin(), key.end())) return it->second;
    }
    return entries.end();
  }

  void drop_last() {
    const auto last = std::prev(entries.end());
    const auto [begin, end] = by_hash.equal_range(last->hash);
    by_hash.erase(std::find_if(begin, end, [&](const auto& item) { return item.second == last; }));
    entries.erase(last);
  }
};

CallCache::CallCache() : state_(*new State) {}

// Never destroyed: a thread may be in a call while the process ends.
CallCache& CallCache::instance() {
  static auto* const cache = new CallCache;
  return *cache;
}

std::shared_ptr<const CallRecord> CallCache::find(const CallKey& key, Latest* latest) {
  if (!key.fits()) return nullptr;
  const uint64_t generation = state_.generation.load(std::memory_order_acquire);
  if (latest->generation == generation &&
      std::equal(latest->words.begin(), latest->words.end(), key.begin(), key.end())) {
    state_.hits.fetch_add(1, std::memory_order_relaxed);
    return latest->record;
  }
  const uint64_t hash = key.hash();
  const std::lock_guard<std::mutex> lock(state_.mutex);
  const auto found = state_.find(hash, key);
  if (found == state_.entries.end()) {
    ++state_.info.misses;
    return nullptr;
  }
  state_.hits.fetch_add(1, std::memory_order_relaxed);
  state_.entries.splice(state_.entries.begin(), state_.entries, found);
  *latest = {found->words, found->record, generation};
  return found->record;
}

void CallCache::insert(const CallKey& key, std::shared_ptr<const CallRecord> record) {
  if (!key.fits()) return;
  const uint64_t hash = key.hash();
  const std::lock_guard<std::mutex> lock(state_.mutex);
  if (state_.find(hash, key) != state_.entries.end()) return;  // another thread's call
  state_.entries.push_front({hash, {key.begin(), key.end()}, std::move(record)});
  state_.by_hash.emplace(hash, state_.entries.begin());
  if (state_.entries.size() > kMaxEntries) state_.drop_last();
}

void CallCache::clear() {
  const std::lock_guard<std::mutex> lock(state_.mutex);
  state_.by_hash.clear();
  state_.entries.clear();
  state_.generation.fetch_add(1, std::memory_order_release);
}

CallCacheInfo CallCache::info() const {
  const std::lock_guard<std::mutex> lock(state_.mutex);
  CallCacheInfo info = state_.info;
  info.hits = state_.hits.load(std::memory_order_relaxed);
  info.entries = static_cast<int64_t>(state_.entries.size());
  return info;
}

}  // namespace fovea::python
