#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kda/kda_commit_cpu.cc"
#include "src/core/simd.h"

#include <algorithm>

#include "src/core/parallel.h"
#include "src/core/simd_math.h"
#include "src/core/workspace.h"
#include "src/kda/kda_commit_work.h"
#include "src/kda/kda_row_simd.h"
#include "src/kda/kda_state_simd.h"
#include "src/kda/window_simd.h"

HWY_BEFORE_NAMESPACE();
namespace fovea::internal::HWY_NAMESPACE {
namespace {

// Channels of a window that make a task.
constexpr int64_t kWindowBlock = 4096;

struct CommitCall {
  const KdaCommitProblem& problem;
  const KdaCommitTensors& tensors;
  CommitLists lists;
  int64_t requests;
};

// One value head of one request and layer.
struct CommitHead {
  const CommitCall& call;
  const CommitLayer& layer;
  int64_t request;
  int64_t head;

  const KdaCommitProblem& problem() const { return call.problem; }
};

void copy_state(const CommitHead& at, const CommitTarget& target) {
  const KdaCommitProblem& problem = at.problem();
  store_state(at.layer.states, target.slot, {at.head, 0, problem.head_dim_v}, problem.head_dim_k,
              at.layer.kept.v_stride, at.layer.kept.at(at.request, target.node, at.head));
}

// The path from `node` to the committed state: for its i-th node the decayed key in
// keys[i] and u in values[i]; the decay of the committed state in `decay`. Returns its length.
int64_t read_path(const CommitHead& at, const CommitWork& work, int64_t node,
                  const CommitPath& path) {
  const int64_t dim_k = at.problem().head_dim_k, padded = work.padded;
  const F32 d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  std::fill_n(work.log_sum, padded, 0.0f);
  std::fill_n(path.decay, padded, 1.0f);
  int64_t length = 0;
  for (int64_t j = node; j >= 0; j = parent_row(at.call.lists.parent, j), ++length) {
    const float* const record = at.layer.kept.at(at.request, j, at.head);
    float* const key = path.keys + length * padded;
    load_row(record, dim_k, padded, key);
    load_row(record + dim_k, dim_k, padded, work.log_decay);
    path.values[length] = record + 2 * dim_k;
    // exp(G_m - G_j) is formed from the sum of the decays behind j: a difference of sums would lose
    // the bits of open channels behind a closed one.
    for (int64_t i = 0; i < padded; i += lanes) {
      const auto decay = hn::LoadU(d, path.decay + i);
      hn::StoreU(hn::Mul(hn::LoadU(d, key + i), decay), d, key + i);
      const auto sum = hn::Add(hn::LoadU(d, work.log_sum + i), hn::LoadU(d, work.log_decay + i));
      hn::StoreU(sum, d, work.log_sum + i);
      hn::StoreU(exp_f32(d, sum), d, path.decay + i);
    }
  }
  return length;
}

// rows[r] of S = diag(decay) start[r] + sum over the path of keys[i] * values[i][first + r], in the
// order of the path from its last node on.
template <int kRows>
HWY_INLINE void rebuild_rows(const CommitWork& work, const CommitPath& path, int64_t length,
                             int64_t first, const float* start, float* rows) {
  const F32 d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t k = 0; k < work.padded; k += lanes) {
    const auto decay = hn::LoadU(d, path.decay + k);
    hn::Vec<F32> sum[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      sum[r] = hn::Mul(hn::LoadU(d, start + r * work.padded + k), decay);
    }
    for (int64_t i = 0; i < length; ++i) {
      const auto key = hn::LoadU(d, path.keys + i * work.padded + k);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        sum[r] = hn::MulAdd(hn::Set(d, path.values[i][first + r]), key, sum[r]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) hn::StoreU(sum[r], d, rows + r * work.padded + k);
  }
}

template <int kRows>
void rebuild_group(const CommitHead& at, const CommitWork& work,
                   const std::array<CommitTarget, 2>& targets,
                   const std::array<int64_t, 2>& lengths, int64_t first) {
  const int64_t dim_k = at.problem().head_dim_k;
  // The rows that are read may be the ones that are written: both results come from this copy.
  load_state(at.layer.states, at.call.lists.start(at.request), {at.head, first, kRows}, dim_k,
             work.padded, work.padded, work.start);
  for (size_t which = 0; which < targets.size(); ++which) {
    if (targets[which].slot < 0) continue;
    rebuild_rows<kRows>(work, work.paths[which], lengths[which], first, work.start, work.rows);
    store_state(at.layer.states, targets[which].slot, {at.head, first, kRows}, dim_k, work.padded,
                work.rows);
  }
}

void commit_head(const CommitHead& at, const CommitWork& work) {
  const std::array<CommitTarget, 2> targets{at.call.lists.target(at.request, 0),
                                            at.call.lists.target(at.request, 1)};
  if (at.problem().mode == VerifyMode::kStates) {
    for (const CommitTarget& target : targets) {
      if (target.slot >= 0) copy_state(at, target);
    }
    return;
  }
  std::array<int64_t, 2> lengths{};
  if (targets[0].slot < 0 && targets[1].slot < 0) return;
  for (size_t which = 0; which < targets.size(); ++which) {
    if (targets[which].slot < 0) continue;
    lengths[which] = read_path(at, work, targets[which].node, work.paths[which]);
  }
  const int64_t dim_v = at.problem().head_dim_v;
  int64_t row = 0;
  for (; row + kCommitRows <= dim_v; row += kCommitRows) {
    rebuild_group<kCommitRows>(at, work, targets, lengths, row);
  }
  for (; row < dim_v; ++row) rebuild_group<1>(at, work, targets, lengths, row);
}

void commit_window(const CommitCall& call, const CommitLayer& layer, int64_t request,
                   const ChannelRange& channels) {
  for (const int which : {0, 1}) {
    const CommitTarget target = call.lists.target(request, which);
    if (target.slot < 0) continue;
    Window window;
    for (int64_t row = 0; row < kConvHistory; ++row) {
      window[static_cast<size_t>(row)] =
          layer.windows.row(request, target.node, row) + channels.first;
    }
    store_window(layer.window_pool, target.slot, channels, window);
  }
}

void kda_commit(const KdaCommitProblem& problem, const Device& device,
                const KdaCommitTensors& tensors, Workspace workspace) {
  WorkspaceCutter cutter(workspace);
  judge_kda_commit(problem, tensors, cutter.take<int64_t>(kda_commit_check_elements(problem)));
  const size_t first_bytes = cutter.used_bytes();
  CommitWork(problem, &cutter);
  const size_t worker_bytes = cutter.used_bytes() - first_bytes;
  const CommitCall call{problem, tensors, CommitLists(problem, tensors), tensors.accepted.shape[0]};
  const int64_t layers = std::max<int64_t>(problem.num_layers, 1);
  const int64_t heads = problem.num_value_heads;
  const ThreadScope threads(device.num_threads);
  ParallelFor(layers * call.requests * heads, 1, [&](int64_t begin, int64_t end, int worker) {
    WorkspaceCutter own({static_cast<char*>(workspace.data) + first_bytes +
                             static_cast<size_t>(worker) * worker_bytes,
                         worker_bytes});
    const CommitWork work(problem, &own);
    for (int64_t i = begin; i < end; ++i) {
      const CommitLayer layer(problem, tensors, i / heads / call.requests);
      commit_head({call, layer, i / heads % call.requests, i % heads}, work);
    }
  });
  if (!tensors.window_scratch.defined()) return;
  const int64_t channels = tensors.window_scratch.shape[problem.num_layers > 0 ? 4 : 3];
  const int64_t blocks = (channels + kWindowBlock - 1) / kWindowBlock;
  ParallelFor(layers * call.requests * blocks, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const CommitLayer layer(problem, tensors, i / blocks / call.requests);
      const int64_t first = i % blocks * kWindowBlock;
      commit_window(call, layer, i / blocks % call.requests,
                    {first, std::min(kWindowBlock, channels - first)});
    }
  });
}

}  // namespace
}  // namespace fovea::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fovea::internal {

HWY_EXPORT(kda_commit);

size_t kda_commit_cpu_workspace(const KdaCommitProblem& problem, const Device& device) {
  WorkspaceCutter worker({});
  CommitWork(problem, &worker);
  WorkspaceCutter first({});
  first.take<int64_t>(kda_commit_check_elements(problem));
  return first.used_bytes() + static_cast<size_t>(device.num_threads) * worker.used_bytes();
}

void kda_commit_cpu(const KdaCommitProblem& problem, const Device& device,
                    const KdaCommitTensors& tensors, Workspace workspace) {
  current_cpu_isa();  // applies FOVEA_CPU_ISA before the first dispatch
  HWY_DYNAMIC_DISPATCH(kda_commit)(problem, device, tensors, workspace);
}

}  // namespace fovea::internal
#endif
