#include <cstring>

#include "src/cache/move_rows_impl.h"
#include "src/core/access.h"
#include "src/core/parallel.h"
#include "src/core/row_layout.h"

namespace fovea::internal {
namespace {

// A token is a few cache lines; 64 of them (8 to 74 KB) are worth a task.
constexpr int64_t kRowsPerPiece = 64;

// What one call works on. Codes and scale of i132 lie side by side in `tokens`.
struct MoveContext {
  PagedRows<uint8_t> pool;
  Accessor<const int32_t, 1> src;
  Accessor<const int32_t, 1> dst;
  int64_t width;
  int64_t row_bytes;
  uint8_t* tokens;

  // A pair with equal slots has nothing to do.
  bool moves(int64_t i) const {
    return pool.contains(src(i)) && pool.contains(dst(i)) && src(i) != dst(i);
  }
};

template <bool kI132>
void read_tokens(const MoveContext& context, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    if (!context.moves(i)) continue;
    uint8_t* const token = context.tokens + i * context.row_bytes;
    const int32_t slot = context.src(i);
    if constexpr (kI132) {
      std::memcpy(token, context.pool.i132_codes(slot, context.width),
                  static_cast<size_t>(context.width));
      std::memcpy(token + context.width, context.pool.i132_scale(slot, context.width),
                  sizeof(float));
    } else {
      std::memcpy(token, context.pool.record(slot, context.row_bytes),
                  static_cast<size_t>(context.row_bytes));
    }
  }
}

template <bool kI132>
void write_tokens(const MoveContext& context, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    if (!context.moves(i)) continue;
    const uint8_t* const token = context.tokens + i * context.row_bytes;
    const int32_t slot = context.dst(i);
    if constexpr (kI132) {
      std::memcpy(context.pool.i132_codes(slot, context.width), token,
                  static_cast<size_t>(context.width));
      std::memcpy(context.pool.i132_scale(slot, context.width), token + context.width,
                  sizeof(float));
    } else {
      std::memcpy(context.pool.record(slot, context.row_bytes), token,
                  static_cast<size_t>(context.row_bytes));
    }
  }
}

template <bool kI132>
void move_rows(const MoveContext& context) {
  const int64_t num_rows = context.src.shape[0];
  // ParallelFor returns when all pieces are done: no write overtakes a read.
  ParallelFor(num_rows, kRowsPerPiece,
              [&](int64_t begin, int64_t end, int) { read_tokens<kI132>(context, begin, end); });
  ParallelFor(num_rows, kRowsPerPiece,
              [&](int64_t begin, int64_t end, int) { write_tokens<kI132>(context, begin, end); });
}

}  // namespace

void move_rows_cpu(const MoveRowsProblem& problem, const Device& device,
                   const MoveRowsTensors& tensors, Workspace workspace) {
  const MoveContext context{paged_rows<uint8_t>(tensors.pool, problem.page_size),
                            access<const int32_t, 1>(tensors.src_slots),
                            access<const int32_t, 1>(tensors.dst_slots),
                            problem.width,
                            row_bytes(problem.row_format, problem.width),
                            static_cast<uint8_t*>(workspace.data)};
  const ThreadScope threads(device.num_threads);
  if (problem.row_format == RowFormat::kI132) {
    move_rows<true>(context);
  } else {
    move_rows<false>(context);
  }
}

}  // namespace fovea::internal
