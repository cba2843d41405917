#include <algorithm>

#include "src/core/workspace.h"
#include "src/kda/kda_ref.h"
#include "src/kda/kda_stages_impl.h"

namespace fovea::internal {
namespace {

// Writes element (t, h, c) of a row tensor of either type.
class RowWriter {
 public:
  explicit RowWriter(const TensorView& view)
      : data_(view.data),
        is_bf16_(view.dtype == DType::kBf16),
        row_stride_(view.stride[0]),
        head_stride_(view.stride[1]) {}

  void operator()(int64_t t, int64_t h, int64_t c, double value) const {
    const int64_t at = t * row_stride_ + h * head_stride_ + c;
    if (is_bf16_) {
      static_cast<bf16_t*>(data_)[at] = bf16_from_float(static_cast<float>(value));
    } else {
      static_cast<float*>(data_)[at] = static_cast<float>(value);
    }
  }

 private:
  void* data_;
  bool is_bf16_;
  int64_t row_stride_, head_stride_;
};

int64_t key_head(const KdaLayer& layer, int64_t value_head) {
  return value_head / (layer.num_value_heads / layer.num_heads);
}

void write_key(const KdaLayer& layer, const RowReader& in, const RowWriter& out, int64_t t,
               int64_t head) {
  double sum = 0;
  for (int64_t c = 0; c < layer.head_dim_k; ++c) {
    sum += static_cast<double>(in(t, head, c)) * static_cast<double>(in(t, head, c));
  }
  const double factor = layer.normalise ? kda_inverse_norm(sum) : 1.0;
  for (int64_t c = 0; c < layer.head_dim_k; ++c) {
    out(t, head, c, factor * static_cast<double>(in(t, head, c)));
  }
}

// sum_c a_ic b_jc exp2(G_ic - G_jc)
double decayed_product(const KdaLayer& layer, const RowReader& a, const RowReader& b,
                       const RowReader& g_sum, int64_t i, int64_t j, int64_t value_head) {
  const int64_t head = key_head(layer, value_head);
  double sum = 0;
  for (int64_t c = 0; c < layer.head_dim_k; ++c) {
    sum += static_cast<double>(a(i, head, c)) * static_cast<double>(b(j, head, c)) *
           std::exp2(static_cast<double>(g_sum(i, value_head, c)) -
                     static_cast<double>(g_sum(j, value_head, c)));
  }
  return sum;
}

// X = (I + A)^-1, unit lower triangular: row i is e_i - sum_{j<i} A_ij X_j.
void invert(const double* a, double* x, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t l = 0; l < count; ++l) {
      double value = l == i ? 1.0 : 0.0;
      for (int64_t j = l; j < i; ++j) value -= a[i * count + j] * x[j * count + l];
      x[i * count + l] = l > i ? 0.0 : value;
    }
  }
}

}  // namespace

void kda_stage_gate_ref(const KdaStageProblem& problem, const Device&,
                        const KdaStageGateTensors& tensors, Workspace) {
  const KdaLayer& layer = problem.layer;
  const RowReader q(tensors.q), k(tensors.k), g(tensors.g);
  const RowWriter q_hat(tensors.q_hat), k_hat(tensors.k_hat), g_sum(tensors.g_sum);
  const auto a_log = access<const float, 1>(tensors.a_log);
  const auto dt_bias = access<const float, 2>(tensors.dt_bias);
  const PackedOffsets offsets(tensors.q_indptr, tensors.q.shape[0]);
  for_each_chunk(offsets, problem.chunk, [&](const StageChunk& chunk) {
    for (int64_t h = 0; h < layer.num_value_heads; ++h) {
      const double rate = a_log ? std::exp(static_cast<double>(a_log(h))) : 1.0;
      for (int64_t c = 0; c < layer.head_dim_k; ++c) {
        double sum = 0;
        for (int64_t t = chunk.first; t < chunk.first + chunk.count; ++t) {
          const double log2_decay =
              kLog2E * ref_log_decay(layer.gate, g(t, h, c), dt_bias ? dt_bias(h, c) : 0, rate);
          constexpr auto kLeast = static_cast<double>(kKdaLeastLog2Decay);
          sum += log2_decay < kLeast ? kLeast : log2_decay;
          g_sum(t, h, c, sum);
        }
      }
    }
    for (int64_t t = chunk.first; t < chunk.first + chunk.count; ++t) {
      for (int64_t h = 0; h < layer.num_heads; ++h) {
        write_key(layer, q, q_hat, t, h);
        write_key(layer, k, k_hat, t, h);
      }
    }
  });
}

namespace {

struct IntraScratch {
  double* a;  // [C][C]
  double* x;  // [C][C]
  IntraScratch(const KdaStageProblem& problem, WorkspaceCutter* cutter)
      : a(cutter->take<double>(problem.chunk * problem.chunk)),
        x(cutter->take<double>(problem.chunk * problem.chunk)) {}
};

class IntraRef {
 public:
  IntraRef(const KdaStageProblem& problem, const KdaStageIntraTensors& t, Workspace workspace)
      : problem_(problem),
        cutter_(workspace),
        scratch_(problem, &cutter_),
        q_(t.q_hat),
        k_(t.k_hat),
        g_sum_(t.g_sum),
        v_(t.v),
        beta_(t.beta),
        p_(t.p),
        x_(t.x),
        w_(t.w),
        u0_(t.u0),
        kr_(t.kr) {}

  void run(const StageChunk& chunk, int64_t h) const {
    const KdaLayer& layer = problem_.layer;
    for (int64_t i = 0; i < chunk.count; ++i) {
      const double beta = beta_of(chunk.first + i, h);
      for (int64_t j = 0; j < chunk.count; ++j) {
        const int64_t row = chunk.first + i, column = chunk.first + j;
        scratch_.a[i * chunk.count + j] =
            j < i ? beta * decayed_product(layer, k_, k_, g_sum_, row, column, h) : 0.0;
        p_(row, h, j, j <= i ? decayed_product(layer, q_, k_, g_sum_, row, column, h) : 0.0);
      }
      for (int64_t j = chunk.count; j < problem_.chunk; ++j) p_(chunk.first + i, h, j, 0);
    }
    invert(scratch_.a, scratch_.x, chunk.count);
    for (int64_t i = 0; i < chunk.count; ++i) write_row(chunk, h, i);
  }

 private:
  double beta_of(int64_t t, int64_t h) const {
    return kda_beta(problem_.layer.beta_kind, problem_.layer.allow_neg_eigval,
                    static_cast<double>(beta_(t, 0, h)));
  }
  double g_sum(int64_t t, int64_t h, int64_t c) const {
    return static_cast<double>(g_sum_(t, h, c));
  }

  void write_row(const StageChunk& chunk, int64_t h, int64_t i) const {
    const int64_t head = key_head(problem_.layer, h);
    const int64_t t = chunk.first + i, last = chunk.first + chunk.count - 1;
    const double* x = scratch_.x + i * chunk.count;
    for (int64_t j = 0; j < problem_.chunk; ++j) x_(t, h, j, j < chunk.count ? x[j] : 0.0);
    for (int64_t c = 0; c < problem_.layer.head_dim_k; ++c) {
      double sum = 0;
      for (int64_t j = 0; j <= i; ++j) {
        const int64_t s = chunk.first + j;
        sum +=
            x[j] * beta_of(s, h) * static_cast<double>(k_(s, head, c)) * std::exp2(g_sum(s, h, c));
      }
      w_(t, h, c, sum);
      kr_(t, h, c,
          static_cast<double>(k_(t, head, c)) * std::exp2(g_sum(last, h, c) - g_sum(t, h, c)));
    }
    for (int64_t d = 0; d < problem_.layer.head_dim_v; ++d) {
      double sum = 0;
      for (int64_t j = 0; j <= i; ++j) {
        sum += x[j] * beta_of(chunk.first + j, h) * static_cast<double>(v_(chunk.first + j, h, d));
      }
      u0_(t, h, d, sum);
    }
  }

  const KdaStageProblem& problem_;
  WorkspaceCutter cutter_;
  IntraScratch scratch_;
  RowReader q_, k_, g_sum_, v_, beta_;
  RowWriter p_, x_, w_, u0_, kr_;
};

}  // namespace

size_t kda_stage_intra_ref_workspace(const KdaStageProblem& problem, const Device&) {
  WorkspaceCutter cutter({});
  IntraScratch(problem, &cutter);
  return cutter.used_bytes();
}

void kda_stage_intra_ref(const KdaStageProblem& problem, const Device&,
                         const KdaStageIntraTensors& tensors, Workspace workspace) {
  const IntraRef stage(problem, tensors, workspace);
  const PackedOffsets offsets(tensors.q_indptr, tensors.v.shape[0]);
  for_each_chunk(offsets, problem.chunk, [&](const StageChunk& chunk) {
    for (int64_t h = 0; h < problem.layer.num_value_heads; ++h) stage.run(chunk, h);
  });
}

namespace {

struct InterScratch {
  double* state;  // [V][K]
  double* next;   // [V][K]
  InterScratch(const KdaStageProblem& problem, WorkspaceCutter* cutter)
      : state(cutter->take<double>(problem.layer.head_dim_v * problem.layer.head_dim_k)),
        next(cutter->take<double>(problem.layer.head_dim_v * problem.layer.head_dim_k)) {}
};

}  // namespace

size_t kda_stage_inter_ref_workspace(const KdaStageProblem& problem, const Device&) {
  WorkspaceCutter cutter({});
  InterScratch(problem, &cutter);
  return cutter.used_bytes();
}

void kda_stage_inter_ref(const KdaStageProblem& problem, const Device&,
                         const KdaStageInterTensors& tensors, Workspace workspace) {
  const KdaLayer& layer = problem.layer;
  const int64_t dim_k = layer.head_dim_k, dim_v = layer.head_dim_v;
  WorkspaceCutter cutter(workspace);
  const InterScratch scratch(problem, &cutter);
  const RowReader w(tensors.w), kr(tensors.kr), u0(tensors.u0), g_sum(tensors.g_sum);
  const RowWriter u(tensors.u);
  const StateAccess initial(tensors.initial_state, StateLayout::kVk);
  const StateAccess chunk_states(tensors.chunk_states, StateLayout::kVk);
  const StateAccess final_state(tensors.final_state, StateLayout::kVk);
  const PackedOffsets offsets(tensors.q_indptr, tensors.w.shape[0]);

  const auto advance = [&](const StageChunk& chunk, int64_t h) {
    const int64_t last = chunk.first + chunk.count - 1;
    for (int64_t d = 0; d < dim_v; ++d) {
      const double* state = scratch.state + d * dim_k;
      double* next = scratch.next + d * dim_k;
      for (int64_t c = 0; c < dim_k; ++c) {
        next[c] = std::exp2(static_cast<double>(g_sum(last, h, c))) * state[c];
      }
      for (int64_t t = chunk.first; t <= last; ++t) {
        double correction = static_cast<double>(u0(t, h, d));
        for (int64_t c = 0; c < dim_k; ++c) {
          correction -= static_cast<double>(w(t, h, c)) * state[c];
        }
        u(t, h, d, correction);
        for (int64_t c = 0; c < dim_k; ++c) {
          next[c] += static_cast<double>(kr(t, h, c)) * correction;
        }
      }
    }
    std::copy_n(scratch.next, dim_v * dim_k, scratch.state);
  };

  SequenceReader reader(offsets);
  int64_t first_chunk = 0;
  for (int64_t n = 0; n < offsets.sequences; ++n) {
    const SequenceRows rows = reader.next();
    const int64_t chunks = (rows.length() + problem.chunk - 1) / problem.chunk;
    for (int64_t h = 0; h < layer.num_value_heads; ++h) {
      ref_load(layer, initial, initial.data != nullptr ? n : -1, h, scratch.state);
      for (int64_t i = 0; i < chunks; ++i) {
        const int64_t first = rows.begin + i * problem.chunk;
        const int64_t entry = first_chunk + i;
        ref_store(layer, chunk_states, entry < chunk_states.entries ? entry : -1, h, scratch.state);
        advance({n, entry, first, std::min(problem.chunk, rows.end - first)}, h);
      }
      ref_store(layer, final_state, final_state.data != nullptr ? n : -1, h, scratch.state);
    }
    first_chunk += chunks;
  }
}

void kda_stage_output_ref(const KdaStageProblem& problem, const Device&,
                          const KdaStageOutputTensors& tensors, Workspace) {
  const KdaLayer& layer = problem.layer;
  const RowReader q(tensors.q_hat), g_sum(tensors.g_sum), p(tensors.p), u(tensors.u);
  const RowWriter out(tensors.out);
  const StateAccess states(tensors.chunk_states, StateLayout::kVk);
  const PackedOffsets offsets(tensors.q_indptr, tensors.u.shape[0]);
  const double scale = kda_scale(layer);
  for_each_chunk(offsets, problem.chunk, [&](const StageChunk& chunk) {
    if (chunk.index >= states.entries) return;
    for (int64_t h = 0; h < layer.num_value_heads; ++h) {
      const int64_t head = key_head(layer, h);
      for (int64_t i = 0; i < chunk.count; ++i) {
        const int64_t t = chunk.first + i;
        for (int64_t d = 0; d < layer.head_dim_v; ++d) {
          double sum = 0;
          for (int64_t c = 0; c < layer.head_dim_k; ++c) {
            sum += static_cast<double>(q(t, head, c)) *
                   std::exp2(static_cast<double>(g_sum(t, h, c))) *
                   static_cast<double>(states.load(chunk.index, h, d, c));
          }
          for (int64_t j = 0; j <= i; ++j) {
            sum += static_cast<double>(p(t, h, j)) * static_cast<double>(u(chunk.first + j, h, d));
          }
          out(t, h, d, scale * sum);
        }
      }
    }
  });
}

}  // namespace fovea::internal
