#include "src/serving/kda_extend_dense.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "fovea/kda_prefill.h"
#include "src/core/access.h"
#include "src/core/check.h"
#include "src/core/log.h"
#include "src/core/parallel.h"
#include "src/kda/kda_math.h"
#include "src/kda/kda_state.h"

namespace fovea {
namespace internal {
namespace {

KdaGateActivation gate_plan(const KdaLayer& layer, int64_t max_rows, const Device& device) {
  KdaGateProblem problem;
  problem.max_rows = std::min(max_rows, kMaxExtendLength);
  problem.num_value_heads = layer.num_value_heads;
  problem.head_dim_k = layer.head_dim_k;
  problem.gate = layer.gate;
  return KdaGateActivation::plan(problem, device);
}

compat::KdaDenseBounds bounds_of(const compat::KdaExtendProblem& problem, const KdaLayer& layer,
                                 const Device& device) {
  compat::KdaDenseBounds bounds{.layer = layer, .device = device};
  bounds.layer.gate = {.kind = GateKind::kGiven, .dtype = DType::kF32};
  bounds.layer.beta_dtype = bounds.layer.state_dtype = DType::kF32;
  bounds.layer.scale = static_cast<float>(kda_scale(layer));
  bounds.max_rows = std::min(problem.max_sequences, kMaxGroupRows);
  bounds.max_bucket = extend_bucket(problem.max_rows);
  return bounds;
}

}  // namespace

int64_t extend_bucket(int64_t length) {
  for (const int64_t bucket : kExtendBuckets) {
    if (bucket >= length) return bucket;
  }
  return kMaxExtendLength;
}

ExtendGroups::ExtendGroups(const compat::KdaExtendProblem& problem, const KdaLayer& layer,
                           const Device& device)
    : layer_(layer),
      device_(device),
      max_sequences_(problem.max_sequences),
      bounds_(bounds_of(problem, layer, device)),
      gate_(gate_plan(layer, problem.max_rows, device)),
      dense_(problem.dense(bounds_)) {
  if (dense_ == nullptr) invalid(kExtendOp, "dense made no implementation; leave it empty instead");
  WorkspaceCutter cutter({});
  cut(&cutter);
  workspace_bytes_ = cutter.used_bytes();
}

ExtendGroups::Staging ExtendGroups::cut(WorkspaceCutter* cutter) const {
  const int64_t rows = bounds_.max_rows * bounds_.max_bucket;
  const int64_t heads = layer_.num_heads, value_heads = layer_.num_value_heads;
  const int64_t dim_k = layer_.head_dim_k, dim_v = layer_.head_dim_v;
  const int64_t state = value_heads * dim_k * dim_v;
  Staging staging;
  staging.q = cutter->take<bf16_t>(rows * heads * dim_k);
  staging.k = cutter->take<bf16_t>(rows * heads * dim_k);
  staging.v = cutter->take<bf16_t>(rows * value_heads * dim_v);
  staging.out = cutter->take<bf16_t>(rows * value_heads * dim_v);
  staging.g = cutter->take<float>(rows * value_heads * dim_k);
  staging.beta = cutter->take<float>(rows * value_heads);
  staging.initial = cutter->take<float>(bounds_.max_rows * state);
  staging.finals = cutter->take<float>(max_sequences_ * state);
  const auto part = [&](size_t bytes) {
    return Workspace{cutter->take<char>(static_cast<int64_t>(bytes)), bytes};
  };
  staging.gate = part(gate_.workspace_bytes());
  staging.dense = part(dense_->workspace_bytes());
  return staging;
}

void ExtendGroups::stage_rows(const ExtendCall& call, const Group& group,
                              const Staging& staging) const {
  const auto q = access<const bf16_t, 3>(call.q), k = access<const bf16_t, 3>(call.k);
  const auto v = access<const bf16_t, 3>(call.v);
  const auto beta = access<const float, 2>(call.beta);
  const int64_t heads = layer_.num_heads, value_heads = layer_.num_value_heads;
  const int64_t dim_k = layer_.head_dim_k, dim_v = layer_.head_dim_v;
  const auto put = [](const auto& from, int64_t token, int64_t count, int64_t dim, bf16_t* to) {
    for (int64_t h = 0; h < count; ++h, to += dim) {
      if (token < 0) {
        std::fill_n(to, dim, bf16_t{});
      } else {
        std::copy_n(from.row(token, h), dim, to);
      }
    }
  };
  ParallelFor(group.rows * group.bucket, 64, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / group.bucket, t = i % group.bucket;
      const int64_t token = t < group.length[row] ? group.begin[row] + t : -1;
      put(q, token, heads, dim_k, staging.q + i * heads * dim_k);
      put(k, token, heads, dim_k, staging.k + i * heads * dim_k);
      put(v, token, value_heads, dim_v, staging.v + i * value_heads * dim_v);
      float* const strengths = staging.beta + i * value_heads;
      for (int64_t h = 0; h < value_heads; ++h) strengths[h] = token < 0 ? 0 : beta(token, h);
      if (token < 0) std::fill_n(staging.g + i * value_heads * dim_k, value_heads * dim_k, 0.0f);
    }
  });
}

void ExtendGroups::activate(const ExtendCall& call, const Group& group,
                            const Staging& staging) const {
  const int64_t value_heads = layer_.num_value_heads, dim_k = layer_.head_dim_k;
  for (int64_t row = 0; row < group.rows; ++row) {
    const int64_t begin = group.begin[row], length = group.length[row];
    KdaGateTensors gate;
    gate.g = slice_rows(call.g, begin, begin + length);
    gate.a_log = call.a_log;
    gate.dt_bias = call.dt_bias;
    gate.log_decay =
        make_tensor(static_cast<void*>(staging.g + row * group.bucket * value_heads * dim_k),
                    DType::kF32, {length, value_heads, dim_k});
    gate_.run(gate, staging.gate);
  }
}

void ExtendGroups::gather(const ExtendCall& call, const Group& group,
                          const Staging& staging) const {
  const StateAccess pool(call.states, StateLayout::kVk);
  const int64_t heads = layer_.num_value_heads;
  const int64_t dim_k = layer_.head_dim_k, dim_v = layer_.head_dim_v;
  ParallelFor(group.rows * heads, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t slot = call.slots[static_cast<size_t>(group.first + i / heads)];
      const bool stored = slot >= 0 && slot < pool.entries;
      float* const to = staging.initial + i * dim_k * dim_v;
      for (int64_t c = 0; c < dim_k; ++c) {
        for (int64_t j = 0; j < dim_v; ++j) {
          to[c * dim_v + j] = stored ? pool.load(slot, i % heads, j, c) : 0.0f;
        }
      }
    }
  });
}

void ExtendGroups::unpack(const ExtendCall& call, const Group& group,
                          const Staging& staging) const {
  const auto out = access<bf16_t, 3>(call.out);
  const int64_t heads = layer_.num_value_heads, dim_v = layer_.head_dim_v;
  ParallelFor(group.rows * group.bucket, 64, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / group.bucket, t = i % group.bucket;
      if (t >= group.length[row]) continue;
      for (int64_t h = 0; h < heads; ++h) {
        std::copy_n(staging.out + (i * heads + h) * dim_v, dim_v, out.row(group.begin[row] + t, h));
      }
    }
  });
}

void ExtendGroups::commit(const ExtendCall& call, const Staging& staging) const {
  const StateAccess pool(call.states, StateLayout::kVk);
  const int64_t heads = layer_.num_value_heads;
  const int64_t dim_k = layer_.head_dim_k, dim_v = layer_.head_dim_v;
  const auto num_sequences = static_cast<int64_t>(call.slots.size());
  const auto num_finals = static_cast<int64_t>(call.final_seq.size());
  ParallelFor((num_sequences + num_finals) * heads, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t n = i / heads;
      const auto at = static_cast<size_t>(n < num_sequences ? n : n - num_sequences);
      const int64_t seq = n < num_sequences ? n : call.final_seq[at];
      const int64_t slot = n < num_sequences ? call.slots[at] : call.final_slot[at];
      if (seq < 0 || seq >= num_sequences || slot < 0 || slot >= pool.entries) continue;
      const float* const from = staging.finals + (seq * heads + i % heads) * dim_k * dim_v;
      for (int64_t j = 0; j < dim_v; ++j) {
        for (int64_t c = 0; c < dim_k; ++c) pool.store(slot, i % heads, j, c, from[c * dim_v + j]);
      }
    }
  });
}

void ExtendGroups::run(const ExtendCall& call, Workspace workspace, int64_t* groups) const {
  const ThreadScope scope(device_.num_threads);
  WorkspaceCutter cutter(workspace);
  const Staging staging = cut(&cutter);
  const int64_t heads = layer_.num_heads, value_heads = layer_.num_value_heads;
  const int64_t dim_k = layer_.head_dim_k, dim_v = layer_.head_dim_v;
  const auto num_sequences = static_cast<int64_t>(call.slots.size());
  int64_t token = 0;
  for (int64_t first = 0; first < num_sequences; first += kMaxGroupRows) {
    Group group{.first = first, .rows = std::min(kMaxGroupRows, num_sequences - first)};
    for (int64_t row = 0; row < group.rows; ++row) {
      group.begin[row] = token;
      group.length[row] = call.lengths[static_cast<size_t>(first + row)];
      token += group.length[row];
    }
    const int64_t rows = group.rows;
    const int64_t longest = *std::max_element(group.length, group.length + rows);
    const int64_t bucket = group.bucket = extend_bucket(longest);
    begin_launch(kExtendOp);
    log_once(LogLevel::kDispatch, std::string(kExtendOp) + ": " + std::string(dense_->name()) +
                                      " runs groups of " + std::to_string(rows) + " sequences of " +
                                      std::to_string(bucket) + " rows");
    stage_rows(call, group, staging);
    activate(call, group, staging);
    gather(call, group, staging);
    const auto view = [&](auto* data, DType type, int64_t count, int64_t dim) {
      return make_tensor(static_cast<void*>(data), type, {rows, bucket, count, dim});
    };
    compat::KdaDenseGroup dense;
    dense.q = view(staging.q, DType::kBf16, heads, dim_k);
    dense.k = view(staging.k, DType::kBf16, heads, dim_k);
    dense.v = view(staging.v, DType::kBf16, value_heads, dim_v);
    dense.g = view(staging.g, DType::kF32, value_heads, dim_k);
    dense.out = view(staging.out, DType::kBf16, value_heads, dim_v);
    dense.beta =
        make_tensor(static_cast<void*>(staging.beta), DType::kF32, {rows, bucket, value_heads});
    const auto states = [&](float* data) {
      return make_tensor(static_cast<void*>(data), DType::kF32, {rows, value_heads, dim_k, dim_v});
    };
    dense.initial_state = states(staging.initial);
    dense.final_state = states(staging.finals + first * value_heads * dim_k * dim_v);
    dense.scale = bounds_.layer.scale;
    dense_->run(dense, staging.dense);
    unpack(call, group, staging);
    ++*groups;
  }
  begin_launch(kExtendOp);
  commit(call, staging);
}

}  // namespace internal

namespace compat {
namespace {

class DensePrefill final : public KdaDense {
 public:
  explicit DensePrefill(const KdaDenseBounds& bounds)
      : max_rows_(bounds.max_rows), plan_(plan_of(bounds)) {}

  std::string_view name() const noexcept override { return "kda_prefill"; }
  size_t workspace_bytes() const noexcept override {
    internal::WorkspaceCutter cutter({});
    cutter.take<int64_t>(max_rows_ + 1);
    cutter.take<char>(static_cast<int64_t>(plan_.workspace_bytes()));
    return cutter.used_bytes();
  }
  void run(const KdaDenseGroup& group, Workspace workspace) const override;

 private:
  static KdaPrefill plan_of(const KdaDenseBounds& bounds) {
    KdaPrefillProblem problem;
    problem.layer = bounds.layer;
    problem.max_rows = bounds.max_rows * bounds.max_bucket;
    problem.max_sequences = bounds.max_rows;
    problem.state_layout = StateLayout::kKv;
    return KdaPrefill::plan(problem, bounds.device);
  }

  int64_t max_rows_;
  KdaPrefill plan_;
};

void DensePrefill::run(const KdaDenseGroup& group, Workspace workspace) const {
  const int64_t rows = group.q.shape[0], bucket = group.q.shape[1];
  internal::WorkspaceCutter cutter(workspace);
  auto* const offsets = cutter.take<int64_t>(max_rows_ + 1);
  for (int64_t row = 0; row <= rows; ++row) offsets[row] = row * bucket;
  // [B, T, ..] packed is [B * T, ..].
  const auto packed = [&](auto view) {
    for (int axis = 1; axis < view.rank; ++axis) {
      const auto at = static_cast<size_t>(axis);
      view.shape[at - 1] = axis == 1 ? rows * bucket : view.shape[at];
      view.stride[at - 1] = view.stride[at];
    }
    --view.rank;
    return view;
  };
  KdaPrefillTensors tensors;
  tensors.q = packed(group.q);
  tensors.k = packed(group.k);
  tensors.v = packed(group.v);
  tensors.g = packed(group.g);
  tensors.beta = packed(group.beta);
  tensors.out = packed(group.out);
  tensors.q_indptr = make_tensor(static_cast<const void*>(offsets), DType::kI64, {rows + 1});
  // kda_prefill updates its contiguous states in place.
  const auto* const initial = static_cast<const float*>(group.initial_state.data);
  std::copy_n(initial, group.initial_state.num_elements(),
              static_cast<float*>(group.final_state.data));
  tensors.state = group.final_state;
  plan_.run(tensors, {cutter.take<char>(static_cast<int64_t>(plan_.workspace_bytes())),
                      plan_.workspace_bytes()});
}

}  // namespace

KdaDense::~KdaDense() = default;

std::unique_ptr<const KdaDense> kda_dense_prefill(const KdaDenseBounds& bounds) {
  return std::make_unique<DensePrefill>(bounds);
}

}  // namespace compat
}  // namespace fovea
