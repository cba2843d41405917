#include <cmath>
#include <limits>

#include "fovea/numeric.h"
#include "src/core/access.h"
#include "src/core/sink.h"
#include "src/core/workspace.h"
#include "src/mla/sparse_mla_cache.h"
#include "src/mla/sparse_mla_impl.h"

namespace fovea::internal {
namespace {

constexpr double kNegInf = -std::numeric_limits<double>::infinity();

// The scratch of one query row, reused from row to row.
struct Scratch {
  float* keys;     // [topk + extra_topk, Dqk], the decoded rows of the valid slots, in slot order
  double* logits;  // [topk + extra_topk]
};

Scratch cut(const SparseMlaProblem& problem, WorkspaceCutter& cutter) {
  const int64_t max_keys = problem.topk + problem.extra_topk;
  Scratch scratch;
  scratch.keys = cutter.take<float>(max_keys * problem.head_dim_qk);
  scratch.logits = cutter.take<double>(max_keys);
  return scratch;
}

// Decodes the valid slots of query row t; returns how many there are now.
int64_t append_keys(const SparseMlaSegment& segment, int64_t t, int64_t head_dim_qk, float* keys,
                    int64_t count) {
  for (int64_t slot = 0; slot < segment.length(t); ++slot) {
    const LatentKey key = segment.key(t, slot);
    if (key.row == nullptr) continue;
    for (int64_t d = 0; d < head_dim_qk; ++d) {
      keys[count * head_dim_qk + d] = decode_channel(segment.format, key.row, d, key.scales);
    }
    ++count;
  }
  return count;
}

struct Head {
  double max_logit;
  double sum;  // of exp(s_j - max_logit)
};

// Fills logits[j] = cap(scale * dot(q, k_j)); `q_at(d)` is channel d of the query.
template <class Query>
Head compute_logits(const SparseMlaProblem& problem, const Query& q_at, const float* keys,
                    int64_t num_keys, double* logits) {
  const double scale = logit_scale(problem);
  Head head{kNegInf, 0};
  for (int64_t j = 0; j < num_keys; ++j) {
    double dot = 0;
    for (int64_t d = 0; d < problem.head_dim_qk; ++d) {
      dot += static_cast<double>(q_at(d)) * keys[j * problem.head_dim_qk + d];
    }
    double logit = scale * dot;
    const double cap = problem.logit_cap;
    if (cap > 0) logit = cap * std::tanh(logit / cap);
    logits[j] = logit;
    // A NaN becomes the maximum and stays it, since nothing compares above it.
    if (std::isnan(logit) || logit > head.max_logit) head.max_logit = logit;
  }
  if (head.max_logit == kNegInf) return head;  // no key has any weight
  for (int64_t j = 0; j < num_keys; ++j) head.sum += std::exp(logits[j] - head.max_logit);
  return head;
}

// Turns the pairs of the last rope_dim channels by minus the angles of a position; `rotation` holds
// their cosines, then their sines.
void turn_back(const float* rotation, int64_t rope_dim, double* values) {
  double* const pairs = values + kLatentDim - rope_dim;
  for (int64_t i = 0; i < rope_dim / 2; ++i) {
    const double cosine = rotation[i], sine = rotation[rope_dim / 2 + i];
    const double x = pairs[2 * i], y = pairs[2 * i + 1];
    pairs[2 * i] = x * cosine + y * sine;
    pairs[2 * i + 1] = y * cosine - x * sine;
  }
}

// Where the results of one (row, head) go, and what shapes them besides the keys.
struct HeadTarget {
  bf16_t* out;
  float* lse;
  float* max_logit;       // may be null
  const float* sink;      // may be null
  const float* rotation;  // may be null
};

// One (row, head): out, lse and max_logits from the decoded keys of the row.
template <class Query>
void attend(const SparseMlaProblem& problem, const Query& q_at, const Scratch& scratch,
            int64_t num_keys, const HeadTarget& target) {
  const Head head = compute_logits(problem, q_at, scratch.keys, num_keys, scratch.logits);
  const bool empty = head.max_logit == kNegInf;
  // A +inf logit makes the sum NaN (inf - inf), and with it everything that this head reports.
  const double log_sum = empty ? kNegInf : head.max_logit + std::log(head.sum);
  // V is the latent part of K, hence of the same scale.
  const double factor =
      problem.k_scale * (target.sink != nullptr ? sink_factor(*target.sink, log_sum) : 1.0);
  double values[kLatentDim] = {};
  for (int64_t j = 0; j < num_keys && !empty; ++j) {
    const double weight = std::exp(scratch.logits[j] - log_sum);
    const float* value = scratch.keys + j * problem.head_dim_qk;
    for (int64_t d = 0; d < kLatentDim; ++d) values[d] += weight * value[d];
  }
  for (int64_t d = 0; d < kLatentDim; ++d) values[d] *= factor;
  if (target.rotation != nullptr) turn_back(target.rotation, problem.inverse_rope_dim, values);
  for (int64_t d = 0; d < kLatentDim; ++d) {
    target.out[d] = bf16_from_float(empty ? 0.0f : static_cast<float>(values[d]));
  }
  const double empty_lse = problem.empty_lse == EmptyLse::kPosInf ? -kNegInf : kNegInf;
  *target.lse = static_cast<float>(empty ? empty_lse : log_sum);
  if (target.max_logit != nullptr)
    *target.max_logit = static_cast<float>(std::isnan(log_sum) ? log_sum : head.max_logit);
}

}  // namespace

size_t sparse_mla_ref_workspace(const SparseMlaProblem& problem, const Device&) {
  WorkspaceCutter cutter(Workspace{});
  cut(problem, cutter);
  return cutter.used_bytes();
}

void sparse_mla_ref(const SparseMlaProblem& problem, const Device&, const SparseMlaTensors& tensors,
                    Workspace workspace) {
  WorkspaceCutter cutter(workspace);
  const Scratch scratch = cut(problem, cutter);
  const SparseMlaSegment primary = primary_segment(problem, tensors);
  const SparseMlaSegment extra = extra_segment(problem, tensors);
  const bool q_is_fp8 = tensors.q.dtype == DType::kU8;
  const auto q = access<const bf16_t, 3>(q_is_fp8 ? ConstTensorView{} : tensors.q);
  const auto q_codes = access<const uint8_t, 3>(q_is_fp8 ? tensors.q : ConstTensorView{});
  const auto sink = access<const float, 1>(tensors.sink);
  const auto out = access<bf16_t, 3>(tensors.out);
  const auto lse = access<float, 2>(tensors.lse);
  const auto max_logits = access<float, 2>(tensors.max_logits);
  const InverseRotations rotations(tensors);
  for (int64_t t = 0; t < tensors.q.shape[0]; ++t) {
    int64_t num_keys = append_keys(primary, t, problem.head_dim_qk, scratch.keys, 0);
    num_keys = append_keys(extra, t, problem.head_dim_qk, scratch.keys, num_keys);
    for (int64_t h = 0; h < problem.num_heads; ++h) {
      const auto q_at = [&](int64_t d) {
        return q_is_fp8 ? e4m3_to_float(q_codes(t, h, d)) : bf16_to_float(q(t, h, d));
      };
      attend(problem, q_at, scratch, num_keys,
             {out.row(t, h), &lse(t, h), max_logits ? &max_logits(t, h) : nullptr,
              sink ? &sink(h) : nullptr, rotations.row(t)});
    }
  }
}

}  // namespace fovea::internal
