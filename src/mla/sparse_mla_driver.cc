#include "src/mla/sparse_mla_driver.h"

#include <algorithm>
#include <limits>

#include "src/core/parallel.h"
#include "src/core/workspace.h"
#include "src/mla/sparse_mla_schedule.h"

namespace fovea::internal {

HeadState cut_head_state(int64_t heads, WorkspaceCutter& cutter) {
  HeadState state;
  state.max = cutter.take<float>(heads);
  state.sum = cutter.take<float>(heads);
  state.out = cutter.take<float>(heads * kLatentDim);
  return state;
}

SparseMlaScratch cut_scratch(const SparseMlaKernel& kernel, int64_t head_dim_qk, bool has_codes,
                             int64_t heads, WorkspaceCutter& cutter) {
  SparseMlaScratch scratch;
  scratch.query = cutter.take<char>(static_cast<int64_t>(kernel.query_bytes(head_dim_qk, heads)));
  scratch.codes = cutter.take<bf16_t>(has_codes ? heads * kF576Width : 0);
  scratch.tile = cutter.take<char>(static_cast<int64_t>(kernel.tile_bytes()));
  scratch.logits = cutter.take<float>(kTileKeys * 32);
  scratch.weights = cutter.take<float>(kTileKeys * heads);
  scratch.alpha = cutter.take<float>(heads);
  scratch.part = cut_head_state(heads, cutter);
  scratch.run = cut_head_state(heads, cutter);
  scratch.loaded_row = -1;
  scratch.loaded_head = -1;
  return scratch;
}

namespace {

// Partial results that split rows may take in the workspace, per thread.
constexpr int64_t kPartialBytesPerThread = int64_t{4} << 20;
// More rows than this per thread keep all threads busy without splitting any.
constexpr int64_t kSplitRowsPerThread = 4;
// Tasks per thread below which head groups are halved, and the smallest group: every group decodes
// the keys again, which costs a tenth of the arithmetic of 32 heads.
constexpr int64_t kTasksPerThread = 3;
constexpr int64_t kMinGroupHeads = 32;

int64_t group_capacity(const SparseMlaProblem& problem) {
  return padded_heads(std::min(problem.num_heads, kMaxGroupHeads));
}

// Rows that are split into parts at most; with more rows the threads share out whole ones. With a
// split plan it says what is shared out.
int64_t max_split_rows(const SparseMlaProblem& problem, const Device& device) {
  if (device.num_threads <= 1 || problem.split_parts > 0 || max_parts(problem) <= 1) return 0;
  const int64_t row_bytes =
      max_parts(problem) * padded_heads(problem.num_heads) * (kLatentDim + 2) * 4;
  return std::min({problem.max_rows, device.num_threads * kSplitRowsPerThread,
                   device.num_threads * kPartialBytesPerThread / row_bytes});
}

// The results of the parts of split rows: [row, part] of HeadState over all heads. With a split
// plan: of its pieces, [piece, 1].
struct Partials {
  int64_t heads = 0;
  int64_t parts = 0;
  float* max = nullptr;
  float* sum = nullptr;
  float* out = nullptr;
  int32_t* used = nullptr;  // [row, part, heads / 8]: whether the group that starts there has keys

  HeadState state(int64_t row, int64_t part) const {
    const int64_t begin = (row * parts + part) * heads;
    return HeadState{max, sum, out}.from_head(begin);
  }
  int32_t& used_flag(int64_t row, int64_t part, int64_t first_head) const {
    return used[(row * parts + part) * (heads / kHeadPadding) + first_head / kHeadPadding];
  }
};

struct Layout {
  SparseMlaScratch* workers;  // [num_threads]
  Partials partials;
  SplitWalk walk;
};

Layout cut(const SparseMlaKernel& kernel, const SparseMlaProblem& problem, const Device& device,
           WorkspaceCutter& cutter) {
  Layout layout;
  const int num_threads = std::max(1, device.num_threads);
  layout.workers = cutter.take<SparseMlaScratch>(num_threads);
  for (int worker = 0; worker < num_threads; ++worker) {
    const SparseMlaScratch scratch =
        cut_scratch(kernel, problem.head_dim_qk, problem.row_format == RowFormat::kF576,
                    group_capacity(problem), cutter);
    if (layout.workers != nullptr) layout.workers[worker] = scratch;
  }
  const bool planned = problem.split_parts > 0;
  if (planned) layout.walk.cut(problem, cutter);
  const int64_t rows = planned ? max_split_pieces(problem) : max_split_rows(problem, device);
  Partials& partials = layout.partials;
  partials.heads = padded_heads(problem.num_heads);
  partials.parts = planned ? 1 : max_parts(problem);
  const int64_t states = rows * partials.parts * partials.heads;
  partials.max = cutter.take<float>(states);
  partials.sum = cutter.take<float>(states);
  partials.out = cutter.take<float>(states * kLatentDim);
  partials.used = cutter.take<int32_t>(states / kHeadPadding);
  return layout;
}

// One run(): tensors, tasks and their arithmetic.
class Run {
 public:
  Run(const SparseMlaKernel& kernel, const SparseMlaProblem& problem, const Device& device,
      const SparseMlaTensors& tensors, Workspace workspace)
      : kernel_(kernel),
        problem_(problem),
        num_threads_(std::max(1, device.num_threads)),
        segments_{primary_segment(problem, tensors), extra_segment(problem, tensors)},
        num_rows_(tensors.q.shape[0]),
        q_is_fp8_(tensors.q.dtype == DType::kU8),
        q_(access<const bf16_t, 3>(q_is_fp8_ ? ConstTensorView{} : tensors.q)),
        q_codes_(access<const uint8_t, 3>(q_is_fp8_ ? tensors.q : ConstTensorView{})),
        sink_(access<const float, 1>(tensors.sink)),
        out_(access<bf16_t, 3>(tensors.out)),
        lse_(access<float, 2>(tensors.lse)),
        max_logits_(access<float, 2>(tensors.max_logits)),
        rotations_(tensors) {
    WorkspaceCutter cutter(workspace);
    layout_ = cut(kernel, problem, device, cutter);
    follows_ = problem.split_parts > 0 &&
               layout_.walk.read(access<const int32_t, 2>(tensors.split_schedule), segments_[0],
                                 num_rows_);
    split_ = num_rows_ <= max_split_rows(problem, device);
    group_heads_ = choose_group();
    num_groups_ = (problem.num_heads + group_heads_ - 1) / group_heads_;
  }

  void run() {
    const int64_t units = num_rows_ * num_groups_;
    const ThreadScope threads(num_threads_);
    if (follows_) {
      follow_plan();
      return;
    }
    if (!split_) {
      ParallelFor(units, 1, [&](int64_t begin, int64_t, int worker) {
        attend_whole(begin / num_groups_, begin % num_groups_, layout_.workers[worker]);
      });
      return;
    }
    const int64_t parts = layout_.partials.parts;
    ParallelFor(units * parts, 1, [&](int64_t begin, int64_t, int worker) {
      const int64_t unit = begin / parts;
      attend_part(unit / num_groups_, unit % num_groups_, begin % parts, layout_.workers[worker]);
    });
    const int64_t octets = layout_.partials.heads / kHeadPadding;
    ParallelFor(num_rows_ * octets, 1, [&](int64_t begin, int64_t, int worker) {
      fold_parts(begin / octets, begin % octets * kHeadPadding, layout_.workers[worker]);
    });
  }

 private:
  void follow_plan() const {
    const SplitWalk& walk = layout_.walk;
    ParallelFor(walk.num_parts() * num_groups_, 1, [&](int64_t begin, int64_t, int worker) {
      walk_part(walk.part(begin / num_groups_), begin % num_groups_, layout_.workers[worker]);
    });
    const int64_t octets = layout_.partials.heads / kHeadPadding;
    ParallelFor(walk.num_split_rows() * octets, 1, [&](int64_t begin, int64_t, int worker) {
      fold_pieces(walk.split_row(begin / octets), begin % octets * kHeadPadding,
                  layout_.workers[worker]);
    });
  }

  // The largest group that still gives every thread its share of tasks.
  int64_t choose_group() const {
    int64_t heads = std::min(problem_.num_heads, kMaxGroupHeads);
    const int64_t per_group =
        follows_ ? layout_.walk.num_parts() : num_rows_ * (split_ ? layout_.partials.parts : 1);
    const auto tasks = [&] { return (problem_.num_heads + heads - 1) / heads * per_group; };
    while (num_threads_ > 1 && heads > kMinGroupHeads && tasks() < kTasksPerThread * num_threads_) {
      heads = std::max(kMinGroupHeads, padded_heads((heads + 1) / 2));
    }
    return heads;
  }

  GroupShape shape_of(int64_t group) const {
    GroupShape shape;
    shape.head_dim_qk = problem_.head_dim_qk;
    shape.num_heads = std::min(group_heads_, problem_.num_heads - group * group_heads_);
    shape.padded_heads = padded_heads(shape.num_heads);
    shape.row_format = problem_.row_format;
    shape.extra_row_format = *problem_.extra_row_format;
    shape.logit_scale = static_cast<float>(logit_scale(problem_));
    shape.logit_cap = problem_.logit_cap;
    return shape;
  }

  RowParts parts_of(int64_t t) const {
    return RowParts(segments_[0].length(t), segments_[1].length(t), problem_.fixed_splits);
  }

  void load_query(int64_t t, int64_t group, const GroupShape& shape,
                  SparseMlaScratch& scratch) const {
    const int64_t head = group * group_heads_;
    if (scratch.loaded_row == t && scratch.loaded_head == head) return;
    const bf16_t* heads[kMaxGroupHeads] = {};
    for (int64_t h = 0; h < shape.num_heads; ++h) {
      if (q_is_fp8_) {
        bf16_t* const decoded = scratch.codes + h * kF576Width;
        kernel_.unpack_row(RowFormat::kF576, {q_codes_.row(t, head + h)}, kF576Width, decoded);
        heads[h] = decoded;
      } else {
        heads[h] = q_.row(t, head + h);
      }
    }
    kernel_.load_query(shape, heads, scratch.query);
    scratch.loaded_row = t;
    scratch.loaded_head = head;
  }

  // Attends to the parts of the reader one after the other and calls done() after each. `beyond`
  // yields the tile that this worker probably meets after the last one.
  template <class Done>
  void attend(const GroupShape& shape, TileReader& reader, TileReader& beyond,
              const SparseMlaScratch& scratch, const HeadState& state, Done done) const {
    KeyTile tiles[2];
    KeyTile* tile = &tiles[0];
    KeyTile* upcoming = &tiles[1];
    bool first = true;
    for (bool more = reader.next(tile); more;) {
      more = reader.next(upcoming);
      if (!more) beyond.next(upcoming);
      kernel_.attend_tile(kernel_, shape, *tile, *upcoming, first, scratch, state);
      first = !more || upcoming->part != tile->part;
      if (first) done();
      std::swap(tile, upcoming);
    }
  }

  // Nobody has asked for the rows of a task's first tile yet, unless the worker guessed right.
  void fetch_first_tile(const GroupShape& shape, TileReader reader) const {
    KeyTile tile;
    if (reader.next(&tile)) Prefetcher(shape, tile, 1).finish();
  }

  // All parts of a row or piece into `run`; false when there is no key. `beyond` as in attend().
  bool attend_parts(const GroupShape& shape, int64_t t, const RowParts& parts, TileReader& beyond,
                    const SparseMlaScratch& scratch, const HeadState& run) const {
    TileReader reader(segments_, t, parts, 0, parts.num_parts);
    bool empty = true;
    if (parts.num_parts == 1) {
      attend(shape, reader, beyond, scratch, run, [&] { empty = false; });
      return !empty;
    }
    attend(shape, reader, beyond, scratch, scratch.part, [&] {
      kernel_.fold(shape.padded_heads, empty, scratch.part, run);
      empty = false;
    });
    return !empty;
  }

  void finish_group(int64_t t, int64_t group, const GroupShape& shape, bool empty,
                    const HeadState& run) const {
    for (int64_t i = 0; i < shape.num_heads; ++i)
      finish(t, group * group_heads_ + i, empty, run.from_head(i));
  }

  void attend_whole(int64_t t, int64_t group, SparseMlaScratch& scratch) const {
    const GroupShape shape = shape_of(group);
    const RowParts parts = parts_of(t);
    TileReader beyond(segments_, t, parts, 0, 0);
    fetch_first_tile(shape, TileReader(segments_, t, parts, 0, parts.num_parts));
    load_query(t, group, shape, scratch);
    const bool any = attend_parts(shape, t, parts, beyond, scratch, scratch.run);
    finish_group(t, group, shape, !any, scratch.run);
  }

  // What part `walked` of the plan has of row t.
  RowParts piece_of(const WalkedPart& walked, int64_t t) const {
    const RowParts row = parts_of(t);
    const int64_t begin = t == walked.first_row ? walked.first_block : 0;
    const bool is_cut = t == walked.last_row && !walked.ends_row;
    return row.piece(begin, is_cut ? walked.end_block : row.num_blocks);
  }

  // The rows of a part of the plan: whole ones to the outputs, pieces to the workspace.
  void walk_part(const WalkedPart& walked, int64_t group, SparseMlaScratch& scratch) const {
    const GroupShape shape = shape_of(group);
    const int64_t head = group * group_heads_;
    int64_t piece = walked.first_piece;
    RowParts parts = piece_of(walked, walked.first_row);
    fetch_first_tile(shape, TileReader(segments_, walked.first_row, parts, 0, parts.num_parts));
    for (int64_t t = walked.first_row; t <= walked.last_row; ++t) {
      const int64_t next = std::min<int64_t>(t + 1, walked.last_row);
      const RowParts next_parts = piece_of(walked, next);
      TileReader beyond(segments_, next, next_parts, 0, next == t ? 0 : next_parts.num_parts);
      load_query(t, group, shape, scratch);
      if (walked.is_piece(t)) {
        const HeadState state = layout_.partials.state(piece, 0).from_head(head);
        const bool any = attend_parts(shape, t, parts, beyond, scratch, state);
        layout_.partials.used_flag(piece, 0, head) = any ? 1 : 0;
        ++piece;
      } else {
        const bool any = attend_parts(shape, t, parts, beyond, scratch, scratch.run);
        finish_group(t, group, shape, !any, scratch.run);
      }
      parts = next_parts;
    }
  }

  // The pieces of 8 heads of a split row, in their order.
  void fold_pieces(const SplitRow& split, int64_t first_head,
                   const SparseMlaScratch& scratch) const {
    const int64_t group_head = first_head / group_heads_ * group_heads_;
    bool empty = true;
    for (int64_t i = 0; i < split.num_pieces; ++i) {
      const int64_t piece = split.first_piece + i;
      if (layout_.partials.used_flag(piece, 0, group_head) == 0) continue;
      kernel_.fold(kHeadPadding, empty, layout_.partials.state(piece, 0).from_head(first_head),
                   scratch.run);
      empty = false;
    }
    finish_octet(split.row, first_head, empty, scratch.run);
  }

  void finish_octet(int64_t t, int64_t first_head, bool empty, const HeadState& run) const {
    const int64_t end_head = std::min(first_head + kHeadPadding, problem_.num_heads);
    for (int64_t h = first_head; h < end_head; ++h)
      finish(t, h, empty, run.from_head(h - first_head));
  }

  void attend_part(int64_t t, int64_t group, int64_t part, SparseMlaScratch& scratch) const {
    const int64_t head = group * group_heads_;
    const RowParts parts = parts_of(t);
    int32_t& used = layout_.partials.used_flag(t, part, head);
    used = 0;
    if (part >= parts.num_parts) return;
    const GroupShape shape = shape_of(group);
    TileReader reader(segments_, t, parts, part, part + 1);
    TileReader beyond(segments_, t, parts, part + 1, std::min(part + 2, parts.num_parts));
    fetch_first_tile(shape, reader);
    load_query(t, group, shape, scratch);
    attend(shape, reader, beyond, scratch, layout_.partials.state(t, part).from_head(head),
           [&] { used = 1; });
  }

  // Folds the parts of 8 heads.
  void fold_parts(int64_t t, int64_t first_head, const SparseMlaScratch& scratch) const {
    const int64_t group_head = first_head / group_heads_ * group_heads_;
    bool first = true;
    for (int64_t part = 0; part < layout_.partials.parts; ++part) {
      if (layout_.partials.used_flag(t, part, group_head) == 0) continue;
      kernel_.fold(kHeadPadding, first, layout_.partials.state(t, part).from_head(first_head),
                   scratch.run);
      first = false;
    }
    finish_octet(t, first_head, first, scratch.run);
  }

  void finish(int64_t t, int64_t h, bool empty, const HeadState& state) const {
    constexpr float kNegInf = -std::numeric_limits<float>::infinity();
    constexpr float kNoSum = 0;
    HeadOutput output;
    output.out = out_.row(t, h);
    output.lse = &lse_(t, h);
    output.max_logit = max_logits_ ? &max_logits_(t, h) : nullptr;
    output.sink = sink_ ? &sink_(h) : nullptr;
    output.value_scale = problem_.k_scale;
    output.empty_lse = problem_.empty_lse;
    output.rotation = rotations_.row(t);
    output.rope_dim = problem_.inverse_rope_dim;
    if (empty)
      kernel_.finish(&kNegInf, &kNoSum, nullptr, output);
    else
      kernel_.finish(state.max, state.sum, state.out, output);
  }

  const SparseMlaKernel& kernel_;
  const SparseMlaProblem& problem_;
  int num_threads_;
  SparseMlaSegment segments_[2];
  int64_t num_rows_;
  bool q_is_fp8_;
  Accessor<const bf16_t, 3> q_;
  Accessor<const uint8_t, 3> q_codes_;
  Accessor<const float, 1> sink_;
  Accessor<bf16_t, 3> out_;
  Accessor<float, 2> lse_;
  Accessor<float, 2> max_logits_;
  InverseRotations rotations_;
  Layout layout_;
  bool split_ = false;
  bool follows_ = false;  // a split plan that fits these lengths
  int64_t group_heads_ = 0;
  int64_t num_groups_ = 0;
};

}  // namespace

size_t sparse_mla_workspace(const SparseMlaKernel& kernel, const SparseMlaProblem& problem,
                            const Device& device) {
  WorkspaceCutter cutter(Workspace{});
  cut(kernel, problem, device, cutter);
  return cutter.used_bytes();
}

void run_sparse_mla(const SparseMlaKernel& kernel, const SparseMlaProblem& problem,
                    const Device& device, const SparseMlaTensors& tensors, Workspace workspace) {
  Run(kernel, problem, device, tensors, workspace).run();
}

}  // namespace fovea::internal
