#include <algorithm>
#include <limits>

#include "src/core/parallel.h"
#include "src/core/workspace.h"
#include "src/mla/dense_mla_impl.h"
#include "src/mla/sparse_mla_driver.h"
#include "src/mla/sparse_mla_impl.h"

// The arithmetic is that of sparse_mla's kernels, which compute every (row, head) in the same way
// whatever runs beside it. A unit is some consecutive rows of a request with the query heads of one
// KV head, up to 128 (row, head) pairs together: blocks of 64 keys that all its rows see whole are
// decoded once for all pairs; from there on every row goes to its own end by itself, so that no key
// has to be masked. Threads share out units, or parts of units where there are few.
namespace fovea::internal {
namespace {

// Pairs per thread whose parts may lie in the workspace: 8 MiB.
constexpr int64_t kSplitPairsPerThread = 256;
// Units per thread below which units are halved, and the smallest one: each decodes the keys again,
// which costs a tenth of the arithmetic of 32 pairs.
constexpr int64_t kUnitsPerThread = 3;
constexpr int64_t kMinUnitPairs = 32;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Pairs are heads of sparse_mla's kernels; those of a row are padded to 8.
int64_t max_unit_pairs(const DenseMlaProblem& problem) {
  return std::min(kMaxGroupHeads,
                  std::max<int64_t>(problem.max_rows, 1) * padded_heads(heads_per_kv(problem)));
}

// Parts of a row at most.
int64_t max_parts(const DenseMlaProblem& problem) {
  const int64_t blocks = ceil_div(max_keys(problem), kBlockSlots);
  if (problem.split_keys > 0) return ceil_div(blocks, problem.split_keys / kBlockSlots);
  return std::min(kMaxParts, ceil_div(blocks, kPartBlocks));
}

// Pairs whose parts are computed by different threads at most; batches of more are shared out by
// units alone.
int64_t max_split_pairs(const DenseMlaProblem& problem, const Device& device) {
  const int64_t parts = max_parts(problem);
  if (device.num_threads <= 1 || parts <= 1) return 0;
  const int64_t pairs = problem.max_rows * problem.num_heads_kv *
                        (padded_heads(heads_per_kv(problem)) + kHeadPadding);
  return std::min(pairs, device.num_threads * kSplitPairsPerThread * kMaxParts / parts);
}

// How the rows of a batch become units.
struct UnitShape {
  int64_t rows = 1;         // of a unit
  int64_t heads = 0;        // of a row in a unit
  int64_t head_groups = 0;  // of a KV head
  int64_t row_pairs = 0;    // `heads`, padded
  int64_t pairs() const { return rows * row_pairs; }
};

// The results of parts: [unit, part, pair].
struct Partials {
  int64_t parts = 0;
  int64_t unit_pairs = 0;
  HeadState states{};
  int32_t* used = nullptr;  // [unit, part, octet of pairs]: whether its row has keys there

  HeadState state(int64_t unit, int64_t part) const {
    return states.from_head((unit * parts + part) * unit_pairs);
  }
  int32_t& used_flag(int64_t unit, int64_t part, int64_t pair) const {
    return used[((unit * parts + part) * unit_pairs + pair) / kHeadPadding];
  }
};

struct Layout {
  SparseMlaScratch* workers = nullptr;  // [num_threads]
  RequestRange* rows = nullptr;         // [R]
  int64_t* first_unit = nullptr;        // [R+1], of one head group
  Partials partials;
};

Layout cut(const SparseMlaKernel& kernel, const DenseMlaProblem& problem, const Device& device,
           WorkspaceCutter& cutter) {
  Layout layout;
  const int num_threads = std::max(1, device.num_threads);
  layout.workers = cutter.take<SparseMlaScratch>(num_threads);
  for (int worker = 0; worker < num_threads; ++worker) {
    const SparseMlaScratch scratch =
        cut_scratch(kernel, problem.head_dim_qk, problem.row_format == RowFormat::kF576,
                    max_unit_pairs(problem), cutter);
    if (layout.workers != nullptr) layout.workers[worker] = scratch;
  }
  layout.rows = cutter.take<RequestRange>(problem.max_requests);
  layout.first_unit = cutter.take<int64_t>(problem.max_requests + 1);
  const int64_t states = max_split_pairs(problem, device) * max_parts(problem);
  layout.partials.parts = max_parts(problem);
  layout.partials.states = cut_head_state(states, cutter);
  layout.partials.used = cutter.take<int32_t>(states / kHeadPadding);
  return layout;
}

// Some rows of a request with some heads of one KV head.
struct Unit {
  int64_t request = 0;
  int64_t kv_head = 0;
  int64_t first_head = 0;
  int64_t num_heads = 0;
  RequestRange rows;      // of the request
  int64_t first_row = 0;  // within the request
  int64_t num_rows = 0;
};

// A walk over the keys of some rows of a unit, block by block: where their sums go and what has
// been met so far.
struct Walk {
  GroupShape shape;
  HeadState part;  // of every part but part 0, which is `run` from the start
  HeadState run;
  int64_t blocks_per_part;
  bool part_has_keys = false;
  bool run_has_keys = false;

  // For the pairs from `pair` on.
  Walk from_pair(int64_t pair, int64_t count) const {
    Walk walk = *this;
    walk.shape.num_heads = walk.shape.padded_heads = count;
    walk.part = part.from_head(pair);
    walk.run = run.from_head(pair);
    return walk;
  }
};

// One run(): tensors, units and their arithmetic.
class Run {
 public:
  Run(const SparseMlaKernel& kernel, const DenseMlaProblem& problem, const Device& device,
      const DenseMlaTensors& tensors, Workspace workspace)
      : kernel_(kernel),
        problem_(problem),
        num_threads_(std::max(1, device.num_threads)),
        keys_(dense_mla_keys(problem, tensors)),
        q_is_fp8_(tensors.q.dtype == DType::kU8),
        q_(access<const bf16_t, 3>(q_is_fp8_ ? ConstTensorView{} : tensors.q)),
        q_codes_(access<const uint8_t, 3>(q_is_fp8_ ? tensors.q : ConstTensorView{})),
        out_(access<bf16_t, 3>(tensors.out)),
        lse_(access<float, 2>(tensors.lse)),
        num_requests_(tensors.page_table.shape[0]) {
    WorkspaceCutter cutter(workspace);
    layout_ = cut(kernel, problem, device, cutter);
    RequestRanges ranges(static_cast<const int32_t*>(tensors.q_indptr.data), out_.shape[0]);
    int64_t num_rows = 0;
    for (int64_t r = 0; r < num_requests_; ++r) {
      layout_.rows[r] = ranges.next();
      num_rows += layout_.rows[r].count();
      most_rows_ = std::max(most_rows_, layout_.rows[r].count());
    }
    const int64_t row_pairs = problem.num_heads_kv * padded_heads(heads_per_kv(problem));
    choose_units(num_rows * row_pairs <= max_split_pairs(problem, device) ? max_parts(problem) : 1);
    // Rows of a unit that is not full and heads of a group that is not count as well.
    split_ = num_units() * unit_.pairs() <= max_split_pairs(problem, device);
    layout_.partials.unit_pairs = unit_.pairs();
  }

  void run() {
    const ThreadScope threads(num_threads_);
    if (!split_) {
      ParallelFor(num_units(), 1, [&](int64_t begin, int64_t, int worker) {
        attend_whole(unit_at(begin), layout_.workers[worker]);
      });
      return;
    }
    const int64_t parts = layout_.partials.parts;
    ParallelFor(num_units() * parts, 1, [&](int64_t begin, int64_t, int worker) {
      attend_part(begin / parts, begin % parts, layout_.workers[worker]);
    });
    const int64_t octets = unit_.pairs() / kHeadPadding;
    ParallelFor(num_units() * octets, 1, [&](int64_t begin, int64_t, int worker) {
      fold_parts(begin / octets, begin % octets * kHeadPadding, layout_.workers[worker]);
    });
  }

 private:
  // Whole KV groups and as many rows as a unit takes; fewer while threads would be idle.
  void choose_units(int64_t parts) {
    const int64_t heads = heads_per_kv(problem_);
    set_unit(std::clamp<int64_t>(max_unit_pairs(problem_) / padded_heads(heads), 1, most_rows_),
             std::min(heads, kMaxGroupHeads));
    while (num_threads_ > 1 && unit_.pairs() > kMinUnitPairs &&
           num_units() * parts < kUnitsPerThread * num_threads_) {
      if (unit_.rows > 1) {
        set_unit((unit_.rows + 1) / 2, unit_.heads);
      } else {
        set_unit(1, std::max(kMinUnitPairs, padded_heads((unit_.heads + 1) / 2)));
      }
    }
  }

  void set_unit(int64_t rows, int64_t heads) {
    unit_.rows = rows;
    unit_.heads = heads;
    unit_.head_groups = ceil_div(heads_per_kv(problem_), heads);
    unit_.row_pairs = padded_heads(heads);
    layout_.first_unit[0] = 0;
    for (int64_t r = 0; r < num_requests_; ++r) {
      layout_.first_unit[r + 1] =
          layout_.first_unit[r] + ceil_div(layout_.rows[r].count(), unit_.rows);
    }
  }

  int64_t num_groups() const { return problem_.num_heads_kv * unit_.head_groups; }
  int64_t num_units() const { return layout_.first_unit[num_requests_] * num_groups(); }

  Unit unit_at(int64_t index) const {
    const int64_t within = index / num_groups();
    const int64_t group = index % num_groups();
    // The last request that starts at or before: requests without rows are passed over.
    const int64_t* next =
        std::upper_bound(layout_.first_unit, layout_.first_unit + num_requests_ + 1, within);
    Unit unit;
    unit.request = next - layout_.first_unit - 1;
    unit.kv_head = group / unit_.head_groups;
    const int64_t heads = heads_per_kv(problem_);
    const int64_t first = group % unit_.head_groups * unit_.heads;
    unit.first_head = unit.kv_head * heads + first;
    unit.num_heads = std::min(unit_.heads, heads - first);
    unit.rows = layout_.rows[unit.request];
    unit.first_row = (within - layout_.first_unit[unit.request]) * unit_.rows;
    unit.num_rows = std::min(unit_.rows, unit.rows.count() - unit.first_row);
    return unit;
  }

  // Keys that row i of a unit sees.
  int64_t keys_of(const Unit& unit, int64_t i) const {
    return visible_keys(problem_.causal, unit.first_row + i, unit.rows.count(),
                        keys_.length(unit.request));
  }

  GroupShape shape_of(int64_t num_rows) const {
    GroupShape shape;
    shape.head_dim_qk = problem_.head_dim_qk;
    shape.num_heads = shape.padded_heads = num_rows * unit_.row_pairs;
    shape.row_format = shape.extra_row_format = problem_.row_format;
    shape.logit_scale = static_cast<float>(logit_scale(problem_));
    shape.logit_cap = 0;
    return shape;
  }

  // Queries of rows [first, end) of a unit.
  void load_query(const Unit& unit, int64_t first, int64_t end,
                  const SparseMlaScratch& scratch) const {
    const bf16_t* pairs[kMaxGroupHeads] = {};
    for (int64_t i = first; i < end; ++i) {
      const int64_t t = unit.rows.begin + unit.first_row + i;
      for (int64_t h = 0; h < unit.num_heads; ++h) {
        const int64_t pair = (i - first) * unit_.row_pairs + h;
        if (q_is_fp8_) {
          bf16_t* const decoded = scratch.codes + pair * kF576Width;
          kernel_.unpack_row(RowFormat::kF576, {q_codes_.row(t, unit.first_head + h)}, kF576Width,
                             decoded);
          pairs[pair] = decoded;
        } else {
          pairs[pair] = q_.row(t, unit.first_head + h);
        }
      }
    }
    kernel_.load_query(shape_of(end - first), pairs, scratch.query);
  }

  // The keys of a block below `count`, as far as their pages are in the pool.
  void read_tile(const Unit& unit, int64_t block, int64_t count, KeyTile* tile) const {
    tile->num_keys = 0;
    const int64_t end = std::min((block + 1) * kBlockSlots, count);
    for (int64_t j = block * kBlockSlots; j < end; ++j) {
      const uint8_t* row = keys_.row(unit.request, unit.kv_head, j);
      if (row != nullptr) tile->rows[tile->num_keys++] = row;
    }
    tile->num_primary = tile->num_keys;
  }

  // Blocks [begin, end) of the first `count` keys; a part is folded when its last block has been
  // met, the last one at the end of the keys.
  void walk_blocks(const Unit& unit, int64_t begin, int64_t end, int64_t count,
                   const SparseMlaScratch& scratch, Walk* walk) const {
    KeyTile tiles[2];
    if (begin < end) read_tile(unit, begin, count, &tiles[begin % 2]);
    for (int64_t block = begin; block < end; ++block) {
      const KeyTile& tile = tiles[block % 2];
      KeyTile& upcoming = tiles[(block + 1) % 2];
      if (block + 1 < end) {
        read_tile(unit, block + 1, count, &upcoming);
      } else {
        upcoming.num_keys = upcoming.num_primary = 0;
      }
      const bool in_run = block < walk->blocks_per_part;
      if (tile.num_keys > 0) {
        kernel_.attend_tile(kernel_, walk->shape, tile, upcoming, !walk->part_has_keys, scratch,
                            in_run ? walk->run : walk->part);
        walk->part_has_keys = true;
      }
      if ((block + 1) % walk->blocks_per_part == 0) end_part(in_run, walk);
    }
  }

  void end_part(bool in_run, Walk* walk) const {
    if (walk->part_has_keys && !in_run)
      kernel_.fold(walk->shape.padded_heads, !walk->run_has_keys, walk->part, walk->run);
    walk->run_has_keys = walk->run_has_keys || walk->part_has_keys;
    walk->part_has_keys = false;
  }

  // Calls each(first, end, parts) for the runs of a unit's rows that are cut alike.
  template <class Each>
  void for_equal_parts(const Unit& unit, Each each) const {
    const auto parts_of = [&](int64_t i) {
      return KeyParts(keys_of(unit, i), problem_.split_keys);
    };
    for (int64_t first = 0; first < unit.num_rows;) {
      const KeyParts parts = parts_of(first);
      int64_t end = first + 1;
      while (end < unit.num_rows && parts_of(end).blocks_per_part == parts.blocks_per_part) ++end;
      each(first, end, parts);
      first = end;
    }
  }

  // Rows [first, end) of a unit over the blocks [begin_block, end_block): those that all rows see
  // whole together, the rest row by row. Calls done(row, walk) at the end of each row. Rows see
  // more and more keys.
  template <class Done>
  void attend_rows(const Unit& unit, int64_t first, int64_t end, int64_t begin_block,
                   int64_t end_block, Walk walk, const SparseMlaScratch& scratch, Done done) const {
    const int64_t fewest = keys_of(unit, first);
    const bool alike = fewest == keys_of(unit, end - 1);
    const int64_t together = std::clamp(
        alike ? ceil_div(fewest, kBlockSlots) : fewest / kBlockSlots, begin_block, end_block);
    if (together > begin_block) {
      load_query(unit, first, end, scratch);
      walk_blocks(unit, begin_block, together, fewest, scratch, &walk);
    }
    for (int64_t i = first; i < end; ++i) {
      const int64_t count = keys_of(unit, i);
      const int64_t last = std::min(ceil_div(count, kBlockSlots), end_block);
      Walk rest = walk.from_pair((i - first) * unit_.row_pairs, unit_.row_pairs);
      if (last > together) {
        load_query(unit, i, i + 1, scratch);
        walk_blocks(unit, together, last, count, scratch, &rest);
      }
      done(i, rest);
    }
  }

  void attend_whole(const Unit& unit, const SparseMlaScratch& scratch) const {
    for_equal_parts(unit, [&](int64_t first, int64_t end, const KeyParts& parts) {
      const Walk walk{shape_of(end - first), scratch.part, scratch.run, parts.blocks_per_part};
      const int64_t end_block = ceil_div(keys_of(unit, end - 1), kBlockSlots);
      attend_rows(unit, first, end, 0, end_block, walk, scratch, [&](int64_t i, Walk& rest) {
        // The part that the end of the keys has cut short.
        end_part(KeyParts(keys_of(unit, i), problem_.split_keys).num_parts() <= 1, &rest);
        for (int64_t h = 0; h < unit.num_heads; ++h)
          finish(unit, i, h, !rest.run_has_keys, rest.run.from_head(h));
      });
    });
  }

  void attend_part(int64_t unit_index, int64_t part, const SparseMlaScratch& scratch) const {
    const Unit unit = unit_at(unit_index);
    const HeadState state = layout_.partials.state(unit_index, part);
    for_equal_parts(unit, [&](int64_t first, int64_t end, const KeyParts& parts) {
      const int64_t begin_block = part * parts.blocks_per_part;
      const HeadState own = state.from_head(first * unit_.row_pairs);
      // One part, with nothing to fold it into: whatever its number, it is walked in place.
      const Walk walk{shape_of(end - first), own, own, std::numeric_limits<int64_t>::max()};
      attend_rows(unit, first, end, begin_block, begin_block + parts.blocks_per_part, walk, scratch,
                  [&](int64_t i, const Walk& rest) {
                    for (int64_t pair = 0; pair < unit_.row_pairs; pair += kHeadPadding) {
                      layout_.partials.used_flag(unit_index, part, i * unit_.row_pairs + pair) =
                          rest.part_has_keys ? 1 : 0;
                    }
                  });
    });
  }

  // The parts of 8 pairs, all of one row, in their order.
  void fold_parts(int64_t unit_index, int64_t first_pair, const SparseMlaScratch& scratch) const {
    const Unit unit = unit_at(unit_index);
    const int64_t i = first_pair / unit_.row_pairs;
    if (i >= unit.num_rows) return;
    bool empty = true;
    for (int64_t part = 0; part < layout_.partials.parts; ++part) {
      if (layout_.partials.used_flag(unit_index, part, first_pair) == 0) continue;
      kernel_.fold(kHeadPadding, empty,
                   layout_.partials.state(unit_index, part).from_head(first_pair), scratch.run);
      empty = false;
    }
    const int64_t first_head = first_pair % unit_.row_pairs;
    const int64_t end_head = std::min(first_head + kHeadPadding, unit.num_heads);
    for (int64_t h = first_head; h < end_head; ++h)
      finish(unit, i, h, empty, scratch.run.from_head(h - first_head));
  }

  void finish(const Unit& unit, int64_t i, int64_t h, bool empty, const HeadState& state) const {
    constexpr float kNegInf = -std::numeric_limits<float>::infinity();
    constexpr float kNoSum = 0;
    const int64_t t = unit.rows.begin + unit.first_row + i;
    HeadOutput output;
    output.out = out_.row(t, unit.first_head + h);
    output.lse = &lse_(t, unit.first_head + h);
    output.max_logit = nullptr;
    output.sink = nullptr;
    output.value_scale = problem_.k_scale;
    output.empty_lse = EmptyLse::kNegInf;
    if (empty)
      kernel_.finish(&kNegInf, &kNoSum, nullptr, output);
    else
      kernel_.finish(state.max, state.sum, state.out, output);
  }

  const SparseMlaKernel& kernel_;
  const DenseMlaProblem& problem_;
  int num_threads_;
  DenseMlaKeys keys_;
  bool q_is_fp8_;
  Accessor<const bf16_t, 3> q_;
  Accessor<const uint8_t, 3> q_codes_;
  Accessor<bf16_t, 3> out_;
  Accessor<float, 2> lse_;
  int64_t num_requests_;
  int64_t most_rows_ = 1;  // of a request
  Layout layout_;
  UnitShape unit_;
  bool split_ = false;
};

size_t workspace_of(const SparseMlaKernel& kernel, const DenseMlaProblem& problem,
                    const Device& device) {
  WorkspaceCutter cutter(Workspace{});
  cut(kernel, problem, device, cutter);
  return cutter.used_bytes();
}

}  // namespace

size_t dense_mla_cpu_workspace(const DenseMlaProblem& problem, const Device& device) {
  return workspace_of(sparse_mla_cpu_kernel(), problem, device);
}

void dense_mla_cpu(const DenseMlaProblem& problem, const Device& device,
                   const DenseMlaTensors& tensors, Workspace workspace) {
  Run(sparse_mla_cpu_kernel(), problem, device, tensors, workspace).run();
}

size_t dense_mla_cpu_avx512bf16_workspace(const DenseMlaProblem& problem, const Device& device) {
  return workspace_of(sparse_mla_cpu_avx512bf16_kernel(), problem, device);
}

void dense_mla_cpu_avx512bf16(const DenseMlaProblem& problem, const Device& device,
                              const DenseMlaTensors& tensors, Workspace workspace) {
  Run(sparse_mla_cpu_avx512bf16_kernel(), problem, device, tensors, workspace).run();
}

}  // namespace fovea::internal
