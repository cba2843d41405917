#include <cstring>

#include "src/cache/move_rows_impl.h"
#include "src/core/access.h"
#include "src/core/parallel.h"
#include "src/core/row_layout.h"

namespace fovea::internal {
namespace {

// A token is a few cache lines; 64 of them (8 to 74 KB) are worth a task.
constexpr int64_t kRowsPerPiece = 64;

// What one call works on. The parts of a token from the two regions of a page lie side by side in
// `tokens`.
struct MoveContext {
  PagedRows<uint8_t> pool;
  Accessor<const int32_t, 1> src;
  Accessor<const int32_t, 1> dst;
  int64_t first_bytes;  // of a token in the first region; 0: one record
  int64_t row_bytes;
  uint8_t* tokens;

  // A pair with equal slots has nothing to do.
  bool moves(int64_t i) const {
    return pool.contains(src(i)) && pool.contains(dst(i)) && src(i) != dst(i);
  }
  uint8_t* first(int32_t slot) const { return pool.at(slot, first_bytes); }
  uint8_t* second(int32_t slot) const {
    return pool.at(slot, second_bytes(), pool.page_size * first_bytes);
  }
  int64_t second_bytes() const { return row_bytes - first_bytes; }
};

template <bool kTwoRegions>
void read_tokens(const MoveContext& context, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    if (!context.moves(i)) continue;
    uint8_t* const token = context.tokens + i * context.row_bytes;
    const int32_t slot = context.src(i);
    if constexpr (kTwoRegions) {
      std::memcpy(token, context.first(slot), static_cast<size_t>(context.first_bytes));
      std::memcpy(token + context.first_bytes, context.second(slot),
                  static_cast<size_t>(context.second_bytes()));
    } else {
      std::memcpy(token, context.pool.record(slot, context.row_bytes),
                  static_cast<size_t>(context.row_bytes));
    }
  }
}

template <bool kTwoRegions>
void write_tokens(const MoveContext& context, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    if (!context.moves(i)) continue;
    const uint8_t* const token = context.tokens + i * context.row_bytes;
    const int32_t slot = context.dst(i);
    if constexpr (kTwoRegions) {
      std::memcpy(context.first(slot), token, static_cast<size_t>(context.first_bytes));
      std::memcpy(context.second(slot), token + context.first_bytes,
                  static_cast<size_t>(context.second_bytes()));
    } else {
      std::memcpy(context.pool.record(slot, context.row_bytes), token,
                  static_cast<size_t>(context.row_bytes));
    }
  }
}

template <bool kTwoRegions>
void move_rows(const MoveContext& context) {
  const int64_t num_rows = context.src.shape[0];
  // ParallelFor returns when all pieces are done: no write overtakes a read.
  ParallelFor(num_rows, kRowsPerPiece, [&](int64_t begin, int64_t end, int) {
    read_tokens<kTwoRegions>(context, begin, end);
  });
  ParallelFor(num_rows, kRowsPerPiece, [&](int64_t begin, int64_t end, int) {
    write_tokens<kTwoRegions>(context, begin, end);
  });
}

}  // namespace

void move_rows_cpu(const MoveRowsProblem& problem, const Device& device,
                   const MoveRowsTensors& tensors, Workspace workspace) {
  const MoveContext context{paged_rows<uint8_t>(tensors.pool, problem.page_size),
                            access<const int32_t, 1>(tensors.src_slots),
                            access<const int32_t, 1>(tensors.dst_slots),
                            first_region_bytes(problem.row_format, problem.width),
                            row_bytes(problem.row_format, problem.width),
                            static_cast<uint8_t*>(workspace.data)};
  const ThreadScope threads(device.num_threads);
  if (context.first_bytes > 0) {
    move_rows<true>(context);
  } else {
    move_rows<false>(context);
  }
}

}  // namespace fovea::internal
