#include "src/mla/sparse_mla_driver.h"

#include <algorithm>
#include <limits>

#include "src/core/parallel.h"
#include "src/core/workspace.h"

namespace fovea::internal {
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

// Rows that are split into parts at most; with more rows the threads share out whole ones.
int64_t max_split_rows(const SparseMlaProblem& problem, const Device& device) {
  if (device.num_threads <= 1) return 0;
  const int64_t row_bytes =
      max_parts(problem) * padded_heads(problem.num_heads) * (kLatentDim + 2) * 4;
  if (row_bytes == 0) return 0;
  return std::min({problem.max_rows, device.num_threads * kSplitRowsPerThread,
                   device.num_threads * kPartialBytesPerThread / row_bytes});
}

// The results of the parts of split rows: [row, part] of HeadState over all heads.
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

HeadState cut_state(int64_t heads, WorkspaceCutter& cutter) {
  HeadState state;
  state.max = cutter.take<float>(heads);
  state.sum = cutter.take<float>(heads);
  state.out = cutter.take<float>(heads * kLatentDim);
  return state;
}

SparseMlaScratch cut_scratch(const SparseMlaKernel& kernel, const SparseMlaProblem& problem,
                             WorkspaceCutter& cutter) {
  const int64_t heads = group_capacity(problem);
  SparseMlaScratch scratch;
  scratch.query =
      cutter.take<char>(static_cast<int64_t>(kernel.query_bytes(problem.head_dim_qk, heads)));
  scratch.tile = cutter.take<char>(static_cast<int64_t>(kernel.tile_bytes()));
  scratch.logits = cutter.take<float>(kTileKeys * 32);
  scratch.weights = cutter.take<float>(kTileKeys * heads);
  scratch.alpha = cutter.take<float>(heads);
  scratch.part = cut_state(heads, cutter);
  scratch.run = cut_state(heads, cutter);
  scratch.loaded_row = -1;
  scratch.loaded_head = -1;
  return scratch;
}

struct Layout {
  SparseMlaScratch* workers;  // [num_threads]
  Partials partials;
};

Layout cut(const SparseMlaKernel& kernel, const SparseMlaProblem& problem, const Device& device,
           WorkspaceCutter& cutter) {
  Layout layout;
  const int num_threads = std::max(1, device.num_threads);
  layout.workers = cutter.take<SparseMlaScratch>(num_threads);
  for (int worker = 0; worker < num_threads; ++worker) {
    const SparseMlaScratch scratch = cut_scratch(kernel, problem, cutter);
    if (layout.workers != nullptr) layout.workers[worker] = scratch;
  }
  const int64_t rows = max_split_rows(problem, device);
  Partials& partials = layout.partials;
  partials.heads = padded_heads(problem.num_heads);
  partials.parts = max_parts(problem);
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
        q_(access<const bf16_t, 3>(tensors.q)),
        sink_(access<const float, 1>(tensors.sink)),
        out_(access<bf16_t, 3>(tensors.out)),
        lse_(access<float, 2>(tensors.lse)),
        max_logits_(access<float, 2>(tensors.max_logits)) {
    WorkspaceCutter cutter(workspace);
    layout_ = cut(kernel, problem, device, cutter);
    split_ = q_.shape[0] <= max_split_rows(problem, device);
    group_heads_ = choose_group();
    num_groups_ = (problem.num_heads + group_heads_ - 1) / group_heads_;
  }

  void run() {
    const int64_t units = q_.shape[0] * num_groups_;
    const ThreadScope threads(num_threads_);
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
    ParallelFor(units, 1, [&](int64_t begin, int64_t, int worker) {
      fold_parts(begin / num_groups_, begin % num_groups_, layout_.workers[worker]);
    });
  }

 private:
  // The largest group that still gives every thread its share of tasks.
  int64_t choose_group() const {
    int64_t heads = std::min(problem_.num_heads, kMaxGroupHeads);
    const int64_t per_group = q_.shape[0] * (split_ ? layout_.partials.parts : 1);
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
    shape.softmax_scale = problem_.softmax_scale;
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
    kernel_.load_query(shape, q_.row(t, head), q_.stride[1], scratch.query);
    scratch.loaded_row = t;
    scratch.loaded_head = head;
  }

  // Attends to the parts of the reader one after the other and calls done() after each.
  template <class Done>
  void attend(const GroupShape& shape, TileReader& reader, const SparseMlaScratch& scratch,
              const HeadState& state, Done done) const {
    KeyTile tiles[2];
    KeyTile* tile = &tiles[0];
    KeyTile* upcoming = &tiles[1];
    bool first = true;
    for (bool more = reader.next(tile); more;) {
      more = reader.next(upcoming);
      kernel_.attend_tile(kernel_, shape, *tile, *upcoming, first, scratch, state);
      first = !more || upcoming->part != tile->part;
      if (first) done();
      std::swap(tile, upcoming);
    }
  }

  void attend_whole(int64_t t, int64_t group, SparseMlaScratch& scratch) const {
    const GroupShape shape = shape_of(group);
    const RowParts parts = parts_of(t);
    TileReader reader(segments_, t, parts, 0, parts.num_parts);
    load_query(t, group, shape, scratch);
    bool first = true;
    attend(shape, reader, scratch, scratch.part, [&] {
      kernel_.fold(shape.padded_heads, first, scratch.part, scratch.run);
      first = false;
    });
    finish(t, group, shape, first, scratch.run);
  }

  void attend_part(int64_t t, int64_t group, int64_t part, SparseMlaScratch& scratch) const {
    const int64_t head = group * group_heads_;
    const RowParts parts = parts_of(t);
    int32_t& used = layout_.partials.used_flag(t, part, head);
    used = 0;
    if (part >= parts.num_parts) return;
    const GroupShape shape = shape_of(group);
    TileReader reader(segments_, t, parts, part, part + 1);
    load_query(t, group, shape, scratch);
    attend(shape, reader, scratch, layout_.partials.state(t, part).from_head(head),
           [&] { used = 1; });
  }

  void fold_parts(int64_t t, int64_t group, const SparseMlaScratch& scratch) const {
    const int64_t head = group * group_heads_;
    const GroupShape shape = shape_of(group);
    bool first = true;
    for (int64_t part = 0; part < layout_.partials.parts; ++part) {
      if (layout_.partials.used_flag(t, part, head) == 0) continue;
      kernel_.fold(shape.padded_heads, first, layout_.partials.state(t, part).from_head(head),
                   scratch.run);
      first = false;
    }
    finish(t, group, shape, first, scratch.run);
  }

  void finish(int64_t t, int64_t group, const GroupShape& shape, bool empty,
              const HeadState& state) const {
    constexpr float kNegInf = -std::numeric_limits<float>::infinity();
    const float zero = 0;
    for (int64_t i = 0; i < shape.num_heads; ++i) {
      const int64_t h = group * group_heads_ + i;
      HeadOutput output;
      output.out = out_.row(t, h);
      output.lse = &lse_(t, h);
      output.max_logit = max_logits_ ? &max_logits_(t, h) : nullptr;
      output.sink = sink_ ? &sink_(h) : nullptr;
      output.empty_lse = problem_.empty_lse;
      if (empty)
        kernel_.finish(&kNegInf, &zero, nullptr, output);
      else
        kernel_.finish(state.max + i, state.sum + i, state.out + i * kLatentDim, output);
    }
  }

  const SparseMlaKernel& kernel_;
  const SparseMlaProblem& problem_;
  int num_threads_;
  SparseMlaSegment segments_[2];
  Accessor<const bf16_t, 3> q_;
  Accessor<const float, 1> sink_;
  Accessor<bf16_t, 3> out_;
  Accessor<float, 2> lse_;
  Accessor<float, 2> max_logits_;
  Layout layout_;
  bool split_ = false;
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
