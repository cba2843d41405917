// Copies of whole rows past the caches, for calls that write more than the caches hold. Included
// after src/core/simd.h by *_cpu.cc files, once per instruction set, hence the guard of that kind.

#include <hwy/cache_control.h>

#include <algorithm>
#include <cstring>

#if defined(FOVEA_CACHE_STREAM_ROW_CPU_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOVEA_CACHE_STREAM_ROW_CPU_H_
#undef FOVEA_CACHE_STREAM_ROW_CPU_H_
#else
#define FOVEA_CACHE_STREAM_ROW_CPU_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace fovea::internal::HWY_NAMESPACE {

/// From this many written bytes on, rows are streamed: they would push one another out of the
/// caches anyway, and an ordinary store first reads the line that it overwrites. Below, the reader
/// that follows finds them in a cache.
inline constexpr int64_t kStreamFromBytes = int64_t{32} << 20;

inline constexpr int64_t kLineBytes = 64;

/// Streaming stores write 16 bytes or more at a time.
inline constexpr int64_t kStreamAlignment = 16;

/// Copies `bytes` bytes past the caches; `to` and `bytes` are multiples of kStreamAlignment. Not
/// even the ends of a row, which may share a line with another row, use ordinary stores: one that
/// misses the caches holds up every store behind it. hwy::FlushStream() must follow before another
/// thread reads.
HWY_INLINE void stream_row(const uint8_t* from, uint8_t* to, int64_t bytes) {
  const hn::ScalableTag<uint8_t> d8;
  const hn::CappedTag<uint8_t, kStreamAlignment> end8;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d8));
  const auto end_lanes = static_cast<int64_t>(hn::Lanes(end8));
  int64_t i = 0;
  const auto stream_ends_until = [&](int64_t stop) {
    for (; i < stop; i += end_lanes) hn::Stream(hn::LoadU(end8, from + i), end8, to + i);
  };
  const auto misalignment = static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) % kLineBytes);
  stream_ends_until(std::min(bytes, (kLineBytes - misalignment) % kLineBytes));
  for (; i + lanes <= bytes; i += lanes) hn::Stream(hn::LoadU(d8, from + i), d8, to + i);
  stream_ends_until(bytes);
}

/// Asks for the lines of a row that will be read or written soon: the slots of a cache come in any
/// order, which no hardware prefetcher foresees.
HWY_INLINE void prefetch_row(const uint8_t* row, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += kLineBytes) hwy::Prefetch(row + i);
}

/// How many rows ahead that happens: the time of three rows is about a memory latency.
inline constexpr int64_t kPrefetchRows = 3;

}  // namespace fovea::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // once per instruction set
