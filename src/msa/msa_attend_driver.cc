#include "src/msa/msa_attend_driver.h"

#include <array>
#include <cmath>
#include <limits>

#include "src/core/parallel.h"
#include "src/core/sink.h"
#include "src/msa/msa_scores_driver.h"

namespace fovea::internal {
namespace {

constexpr float kNegInf = -std::numeric_limits<float>::infinity();
// Fewer (row, KV head) pairs than this per thread are cut into parts.
constexpr int64_t kTasksPerThread = 4;

struct Shape {
  int64_t group;  // query heads of a KV head
  int64_t rows_per_panel;
  int64_t tile_rows;
  int64_t panels;
  int64_t part_blocks;
  int64_t max_parts;
  int64_t split_rows;  // rows that are cut at most

  Shape(const MsaAttendProblem& problem, const Device& device) {
    group = problem.num_heads / problem.num_kv_heads;
    rows_per_panel = kMsaPanelLanes / group;
    tile_rows = std::clamp<int64_t>(problem.max_rows, 1, kMsaTilePanels * rows_per_panel);
    panels = (tile_rows + rows_per_panel - 1) / rows_per_panel;
    part_blocks = std::max<int64_t>(1, kMsaPartTokens / problem.block_size);
    const int64_t blocks = std::min(problem.topk, problem.max_pages);
    max_parts = (blocks + part_blocks - 1) / part_blocks;
    const int64_t few = (kTasksPerThread * device.num_threads - 1) / problem.num_kv_heads;
    split_rows = device.num_threads > 1 ? std::min(problem.max_rows, few) : 0;
  }
};

MsaState cut_state(WorkspaceCutter& cutter, int64_t lanes, int64_t head_dim) {
  MsaState state;
  state.max = cutter.take<float>(lanes);
  state.sum = cutter.take<float>(lanes);
  state.out = cutter.take<float>(lanes * head_dim);
  return state;
}

// One row of a task.
struct TaskRow {
  int64_t t;
  const int32_t* list;  // visible blocks, ascending, each once
  int32_t length;
  int32_t cursor;
  int32_t end;       // of the walk
  int32_t part_end;  // of the current part
  bool folded;       // `run` holds something
  uint8_t fresh;     // the current part's `out` holds nothing

  int32_t block() const { return cursor < end ? list[cursor] : kNone; }
  // The row's first block past n, even of the part that comes after the walk: this worker, or one
  // that shares its caches, probably meets it next.
  int32_t block_after(int32_t n) const {
    const int32_t next = cursor < end && list[cursor] == n ? cursor + 1 : cursor;
    return next < length ? list[next] : kNone;
  }
  static constexpr int32_t kNone = std::numeric_limits<int32_t>::max();
};

// Memory of one worker.
struct Scratch {
  TaskRow* rows;
  int32_t* lists;    // [tile rows][topk]
  float* query;      // [panels][head_dim][lanes]
  float* scale;      // [panels][lanes]
  int32_t* visible;  // [panels][lanes]
  uint8_t* fresh;    // [panels][lanes], by row of the panel
  float* keys;
  float* values;
  float* key_scale;
  float* value_scale;
  float* logits;
  float* keep;
  MsaState part;
  MsaState run;

  Scratch(WorkspaceCutter& cutter, const MsaAttendProblem& problem, const Shape& shape) {
    const int64_t lanes = shape.panels * kMsaPanelLanes;
    constexpr int64_t kSpareKeys = 12;
    rows = cutter.take<TaskRow>(shape.tile_rows);
    lists = cutter.take<int32_t>(shape.tile_rows * problem.topk);
    query = cutter.take<float>(lanes * problem.head_dim);
    scale = cutter.take<float>(lanes);
    visible = cutter.take<int32_t>(lanes);
    fresh = cutter.take<uint8_t>(lanes);
    keys = cutter.take<float>((kMsaTileKeys + kSpareKeys) * msa_key_stride(problem.head_dim));
    values = cutter.take<float>(kMsaTileKeys * msa_key_stride(problem.head_dim));
    key_scale = cutter.take<float>(kMsaTileKeys);
    value_scale = cutter.take<float>(kMsaTileKeys);
    logits = cutter.take<float>((kMsaTileKeys + kSpareKeys) * kMsaPanelLanes);
    keep = cutter.take<float>(kMsaPanelLanes);
    part = cut_state(cutter, lanes, problem.head_dim);
    run = cut_state(cutter, lanes, problem.head_dim);
  }
};

// e4m3 codes as floats, for queries.
const std::array<float, 256>& e4m3_values() {
  static const std::array<float, 256> values = [] {
    std::array<float, 256> table{};
    for (size_t code = 0; code < table.size(); ++code)
      table[code] = e4m3_to_float(static_cast<uint8_t>(code));
    return table;
  }();
  return values;
}

class Run {
 public:
  Run(const MsaAttendKernel& kernel, const MsaAttendProblem& problem, const Device& device,
      const MsaAttendTensors& tensors, Workspace workspace)
      : kernel_(kernel),
        problem_(problem),
        tensors_(tensors),
        num_threads_(std::max(1, device.num_threads)),
        shape_(problem, device),
        inputs_(msa_attend_inputs(problem, tensors)),
        num_rows_(tensors.q.shape[0]),
        cutter_(workspace) {
    rows_ = cutter_.take<MsaRow>(problem.max_rows);
    tiles_ = cutter_.take<MsaRowTile>(problem.max_rows);
    partials_ = cut_state(cutter_, num_partial_lanes(), problem.head_dim);
    if (problem.kv_mode == MsaKvMode::kBf16) item_bytes_ = sizeof(bf16_t);
    row_bytes_ = problem.head_dim * item_bytes_;
    if (problem.kv_mode == MsaKvMode::kQ8Kv4) row_bytes_ /= 2;
  }

  size_t measure() {
    for (int worker = 0; worker < num_threads_; ++worker) Scratch(cutter_, problem_, shape_);
    return cutter_.used_bytes();
  }

  void run() {
    read_msa_rows(msa_batch(tensors_.kv_len, tensors_.q_indptr, tensors_.q_offset, num_rows_,
                            inputs_.page_table.shape[1], problem_.block_size),
                  rows_);
    const int64_t kv_heads = problem_.num_kv_heads;
    const ThreadScope threads(num_threads_);
    if (num_rows_ > 0 && num_rows_ <= shape_.split_rows && shape_.max_parts > 1) {
      const int64_t parts = shape_.max_parts;
      parallel(num_rows_ * kv_heads * parts, [&](int64_t unit, const Scratch& scratch) {
        attend_part(unit / parts / kv_heads, unit / parts % kv_heads, unit % parts, scratch);
      });
      parallel(num_rows_ * kv_heads, [&](int64_t unit, const Scratch& scratch) {
        fold_parts(unit / kv_heads, unit % kv_heads, scratch);
      });
      return;
    }
    const int64_t num_tiles = cut_msa_tiles(rows_, num_rows_, shape_.tile_rows, tiles_);
    parallel(num_tiles * kv_heads, [&](int64_t unit, const Scratch& scratch) {
      attend_tile(tiles_[unit / kv_heads], unit % kv_heads, scratch);
    });
  }

 private:
  int64_t num_partial_lanes() const {
    return shape_.split_rows * problem_.num_kv_heads * shape_.max_parts * shape_.group;
  }

  template <class Body>
  void parallel(int64_t count, Body body) const {
    ParallelFor(count, 1, [&](int64_t begin, int64_t end, int worker) {
      WorkspaceCutter rest = cutter_;
      for (int i = 0; i < worker; ++i) Scratch(rest, problem_, shape_);
      const Scratch scratch(rest, problem_, shape_);
      for (int64_t unit = begin; unit < end; ++unit) body(unit, scratch);
    });
  }

  // First lane of row i of a task.
  int64_t lane_of(int64_t i) const {
    return i / shape_.rows_per_panel * kMsaPanelLanes + i % shape_.rows_per_panel * shape_.group;
  }

  // The visible blocks of row t, ascending, each once; returns their number.
  int64_t read_list(int64_t t, int64_t g, int32_t* list) const {
    const MsaRow& row = rows_[t];
    if (row.is_empty()) return 0;
    const int32_t* from = inputs_.lists.row(g, t);
    int64_t count = 0;
    bool ascending = true;
    for (int64_t i = 0; i < problem_.topk; ++i) {
      if (inputs_.page_of(row, from[i], problem_.block_size, problem_.causal) < 0) continue;
      if (count > 0 && from[i] <= list[count - 1]) ascending = false;
      // More than the table's blocks are repeats, which the sort would remove.
      list[count++] = from[i];
    }
    if (ascending) return count;
    std::sort(list, list + count);
    return std::unique(list, list + count) - list;
  }

  void load_query(int64_t t, int64_t g, int64_t lane, const Scratch& scratch) const {
    const int64_t dim = problem_.head_dim;
    float* to =
        scratch.query + lane / kMsaPanelLanes * kMsaPanelLanes * dim + lane % kMsaPanelLanes;
    const float scale = problem_.softmax_scale * inputs_.q_scale.at(t, g) *
                        (inputs_.k_scale.per_row() ? 1.0f : inputs_.k_scale.at(0, g));
    for (int64_t i = 0; i < shape_.group; ++i, ++to) {
      const int64_t row = t * tensors_.q.stride[0] + (g * shape_.group + i) * tensors_.q.stride[1];
      scratch.scale[lane + i] = scale;
      if (tensors_.q.dtype == DType::kBf16) {
        const auto* from = static_cast<const bf16_t*>(tensors_.q.data) + row;
        for (int64_t d = 0; d < dim; ++d) to[d * kMsaPanelLanes] = bf16_to_float(from[d]);
      } else {
        const auto* from = static_cast<const uint8_t*>(tensors_.q.data) + row;
        for (int64_t d = 0; d < dim; ++d) to[d * kMsaPanelLanes] = e4m3_values()[from[d]];
      }
    }
  }

  // Prepares row i of a task for the part [first_part, end_part) of its list.
  void begin_row(int64_t i, int64_t t, int64_t g, int64_t first_part, int64_t end_part,
                 const Scratch& scratch) const {
    TaskRow& row = scratch.rows[i];
    int32_t* list = scratch.lists + i * problem_.topk;
    row.t = t;
    row.list = list;
    row.length = static_cast<int32_t>(read_list(t, g, list));
    row.cursor =
        static_cast<int32_t>(std::min<int64_t>(row.length, first_part * shape_.part_blocks));
    row.end = static_cast<int32_t>(std::min<int64_t>(row.length, end_part * shape_.part_blocks));
    row.folded = false;
    begin_part(i, scratch);
  }

  // Queries of the rows that begin_row() prepared. Nobody has asked for their
  // first block yet: it arrives meanwhile.
  void load_queries(int64_t num_rows, int64_t g, const Scratch& scratch) const {
    int32_t n = TaskRow::kNone;
    for (int64_t i = 0; i < num_rows; ++i) n = std::min(n, scratch.rows[i].block());
    prefetch_block(rows_[scratch.rows[0].t].request, g, n, 0).finish();
    for (int64_t i = 0; i < num_rows; ++i) {
      const TaskRow& row = scratch.rows[i];
      if (row.cursor < row.end) load_query(row.t, g, lane_of(i), scratch);
    }
  }

  void begin_part(int64_t i, const Scratch& scratch) const {
    TaskRow& row = scratch.rows[i];
    row.part_end =
        static_cast<int32_t>(std::min<int64_t>(row.end, row.cursor + shape_.part_blocks));
    row.fresh = 1;
    std::fill_n(scratch.part.max + lane_of(i), shape_.group, kNegInf);
    std::fill_n(scratch.part.sum + lane_of(i), shape_.group, 0.0f);
  }

  // Row address of a token in a pool.
  const char* token(const MsaPool& pool, int64_t page, int64_t g, int64_t offset) const {
    return static_cast<const char*>(pool.data) + pool.offset(page, g, offset) * item_bytes_;
  }
  const uint8_t* group_scales(const MsaPool& pool, int64_t page, int64_t g, int64_t offset) const {
    if (pool.data == nullptr) return nullptr;
    return static_cast<const uint8_t*>(pool.data) + pool.offset(page, g, offset);
  }

  // Keys and values of a block from token `first` on.
  std::array<MsaStoredRows, 2> stored_rows(int64_t page, int64_t g, int64_t first) const {
    return {stored_rows(inputs_.k, inputs_.k_codes_scale, page, g, first),
            stored_rows(inputs_.v, inputs_.v_codes_scale, page, g, first)};
  }
  MsaStoredRows stored_rows(const MsaPool& pool, const MsaPool& scales, int64_t page, int64_t g,
                            int64_t first) const {
    return {problem_.kv_mode, token(pool, page, g, first), pool.token_stride * item_bytes_,
            group_scales(scales, page, g, first), scales.token_stride};
  }

  void decode(const std::array<MsaStoredRows, 2>& stored, int64_t count,
              const Scratch& scratch) const {
    const int64_t stride = msa_key_stride(problem_.head_dim);
    kernel_.decode_rows(stored[0], problem_.head_dim, count, scratch.keys);
    kernel_.decode_rows(stored[1], problem_.head_dim, count, scratch.values);
    constexpr int64_t kStep = 12;
    const int64_t padded = (count + kStep - 1) / kStep * kStep;
    std::fill(scratch.keys + count * stride, scratch.keys + padded * stride, 0.0f);
  }

  void read_scales(int64_t page, int64_t g, int64_t first, int64_t count,
                   const Scratch& scratch) const {
    const int64_t slot = page * problem_.block_size + first;
    for (int64_t k = 0; k < count && inputs_.k_scale.per_row(); ++k)
      scratch.key_scale[k] = inputs_.k_scale.at(slot + k, g);
    for (int64_t k = 0; k < count && inputs_.v_scale.per_row(); ++k)
      scratch.value_scale[k] = inputs_.v_scale.at(slot + k, g);
  }

  // Lets `num_rows` rows attend to the blocks between their cursors and ends.
  // `done` is called for a row after each of its parts.
  template <class Done>
  void walk(int64_t num_rows, int64_t g, const Scratch& scratch, Done done) const {
    const int64_t request = rows_[scratch.rows[0].t].request;
    TaskRow* const rows = scratch.rows;
    while (true) {
      int32_t n = TaskRow::kNone;
      for (int64_t i = 0; i < num_rows; ++i) n = std::min(n, rows[i].block());
      if (n == TaskRow::kNone) return;
      int32_t next = TaskRow::kNone;
      for (int64_t i = 0; i < num_rows; ++i) next = std::min(next, rows[i].block_after(n));
      attend_block(num_rows, request, g, n, next, scratch);
      for (int64_t i = 0; i < num_rows; ++i) {
        if (rows[i].block() != n) continue;
        if (++rows[i].cursor < rows[i].part_end) continue;
        done(i);
        begin_part(i, scratch);
      }
    }
  }

  void attend_block(int64_t num_rows, int64_t request, int64_t g, int32_t n, int32_t next,
                    const Scratch& scratch) const {
    const int64_t page = inputs_.page_table(request, n);
    for (int64_t first = 0; first < problem_.block_size; first += kMsaTileKeys) {
      int64_t most = 0;
      for (int64_t i = 0; i < num_rows; ++i) {
        TaskRow& row = scratch.rows[i];
        int64_t seen = 0;
        if (row.block() == n) {
          const int64_t visible =
              msa_visible_tokens(rows_[row.t], n, problem_.block_size, problem_.causal);
          seen = std::clamp<int64_t>(visible - first, 0, kMsaTileKeys);
        }
        std::fill_n(scratch.visible + lane_of(i), shape_.group, static_cast<int32_t>(seen));
        most = std::max(most, seen);
      }
      if (most == 0) return;
      const std::array<MsaStoredRows, 2> stored = stored_rows(page, g, first);
      const bool one_panel = num_rows <= shape_.rows_per_panel;
      if (!one_panel) decode(stored, most, scratch);
      read_scales(page, g, first, most, scratch);
      const bool last = first + kMsaTileKeys >= problem_.block_size;
      MsaPrefetch prefetch = last ? prefetch_block(request, g, next, 0)
                                  : prefetch_block(request, g, n, first + kMsaTileKeys);
      attend_keys(num_rows, most, one_panel ? stored.data() : nullptr, prefetch, scratch);
    }
  }

  MsaPrefetch prefetch_block(int64_t request, int64_t g, int32_t n, int64_t first) const {
    if (n == TaskRow::kNone) return {};
    const int64_t page = inputs_.page_table(request, n);
    return {token(inputs_.k, page, g, first), token(inputs_.v, page, g, first),
            inputs_.k.token_stride * item_bytes_, row_bytes_,
            std::min(kMsaTileKeys, problem_.block_size - first)};
  }

  // The decoded tile, panel by panel, or a stored one for a panel alone.
  void attend_keys(int64_t num_rows, int64_t num_keys, const MsaStoredRows* stored,
                   MsaPrefetch& prefetch, const Scratch& scratch) const {
    const int64_t dim = problem_.head_dim;
    for (int64_t first = 0; first < num_rows; first += shape_.rows_per_panel) {
      const int64_t rows = std::min(shape_.rows_per_panel, num_rows - first);
      const int64_t lane = lane_of(first);
      int64_t most = 0;
      for (int64_t i = 0; i < rows; ++i) {
        const int64_t seen = scratch.visible[lane_of(first + i)];
        most = std::max(most, seen);
        scratch.fresh[lane + i] = scratch.rows[first + i].fresh;
        if (seen > 0) scratch.rows[first + i].fresh = 0;
      }
      if (most == 0) continue;
      std::fill(scratch.visible + lane + rows * shape_.group,
                scratch.visible + lane + kMsaPanelLanes, 0);
      MsaPanelTask task;
      task.query = scratch.query + lane * dim;
      task.keys = scratch.keys;
      task.values = scratch.values;
      task.stored = stored;
      task.head_dim = dim;
      task.num_keys = std::min(most, num_keys);
      task.num_rows = rows;
      task.lanes_per_row = shape_.group;
      task.visible = scratch.visible + lane;
      task.fresh = scratch.fresh + lane;
      task.scale = scratch.scale + lane;
      task.key_scale = inputs_.k_scale.per_row() ? scratch.key_scale : nullptr;
      task.value_scale = inputs_.v_scale.per_row() ? scratch.value_scale : nullptr;
      task.state = scratch.part.at(lane, dim);
      task.logits = scratch.logits;
      task.keep = scratch.keep;
      task.prefetch = &prefetch;
      kernel_.attend_panel(task);
    }
    prefetch.finish();
  }

  void attend_tile(const MsaRowTile& tile, int64_t g, const Scratch& scratch) const {
    const int64_t dim = problem_.head_dim;
    for (int64_t i = 0; i < tile.num_rows; ++i)
      begin_row(i, tile.first_row + i, g, 0, shape_.max_parts, scratch);
    load_queries(tile.num_rows, g, scratch);
    walk(tile.num_rows, g, scratch, [&](int64_t i) {
      TaskRow& row = scratch.rows[i];
      const int64_t lane = lane_of(i);
      kernel_.fold(shape_.group, dim, !row.folded, scratch.part.at(lane, dim),
                   scratch.run.at(lane, dim));
      row.folded = true;
    });
    for (int64_t i = 0; i < tile.num_rows; ++i) {
      finish(tile.first_row + i, g, scratch.rows[i].folded, scratch.run.at(lane_of(i), dim));
    }
  }

  MsaState partial(int64_t t, int64_t g, int64_t part) const {
    const int64_t unit = (t * problem_.num_kv_heads + g) * shape_.max_parts + part;
    return partials_.at(unit * shape_.group, problem_.head_dim);
  }

  void attend_part(int64_t t, int64_t g, int64_t part, const Scratch& scratch) const {
    begin_row(0, t, g, part, part + 1, scratch);
    load_queries(1, g, scratch);
    walk(1, g, scratch, [&](int64_t) {
      kernel_.fold(shape_.group, problem_.head_dim, true, scratch.part, partial(t, g, part));
    });
  }

  void fold_parts(int64_t t, int64_t g, const Scratch& scratch) const {
    const int64_t blocks = read_list(t, g, scratch.lists);
    const int64_t parts = (blocks + shape_.part_blocks - 1) / shape_.part_blocks;
    for (int64_t part = 0; part < parts; ++part) {
      kernel_.fold(shape_.group, problem_.head_dim, part == 0, partial(t, g, part), scratch.run);
    }
    finish(t, g, parts > 0, scratch.run);
  }

  // Output of the heads of one row. `any`: it has visible blocks.
  void finish(int64_t t, int64_t g, bool any, const MsaState& state) const {
    const int64_t dim = problem_.head_dim;
    for (int64_t i = 0; i < shape_.group; ++i) {
      const int64_t h = g * shape_.group + i;
      const float sum = any ? state.sum[i] : 0.0f;
      const float lse = sum == 0 ? kNegInf : state.max[i] + std::log(sum);
      if (inputs_.lse) inputs_.lse(t, h) = lse;
      bf16_t* out = inputs_.out.row(t, h);
      if (sum == 0) {
        std::fill_n(out, dim, bf16_t{0});
        continue;
      }
      float factor = 1.0f / sum;
      if (inputs_.sink) factor *= sink_factor(inputs_.sink(h), lse);
      if (!inputs_.v_scale.per_row()) factor *= inputs_.v_scale.at(0, g);
      kernel_.write_row(state.out + i * dim, factor, dim, out);
    }
  }

  const MsaAttendKernel& kernel_;
  const MsaAttendProblem& problem_;
  const MsaAttendTensors& tensors_;
  int num_threads_;
  Shape shape_;
  MsaAttendInputs inputs_;
  int64_t num_rows_;
  WorkspaceCutter cutter_;
  MsaRow* rows_ = nullptr;
  MsaRowTile* tiles_ = nullptr;
  MsaState partials_{};
  int64_t item_bytes_ = 1;
  int64_t row_bytes_ = 0;
};

}  // namespace

size_t msa_attend_workspace(const MsaAttendProblem& problem, const Device& device) {
  const MsaAttendTensors none;
  return Run({}, problem, device, none, {}).measure();
}

void run_msa_attend(const MsaAttendKernel& kernel, const MsaAttendProblem& problem,
                    const Device& device, const MsaAttendTensors& tensors, Workspace workspace) {
  Run(kernel, problem, device, tensors, workspace).run();
}

}  // namespace fovea::internal
