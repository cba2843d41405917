#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kda/kda_stages_cpu.cc"
#include "src/core/simd.h"
// These need the helpers of simd.h, in this order.
#include "src/core/simd_math.h"
#include "src/kda/kda_row_simd.h"

#include <algorithm>

#include "src/core/parallel.h"
#include "src/core/workspace.h"
#include "src/kda/kda_inputs.h"
#include "src/kda/kda_math.h"
#include "src/kda/kda_stages_impl.h"
#include "src/kda/kda_stages_work.h"

// The stages in fp32. Sums over channels run lane by lane, two vectors alternating, then across
// lanes; sums over rows run in the order of the rows.
HWY_BEFORE_NAMESPACE();
namespace fovea::internal::HWY_NAMESPACE {
namespace {

constexpr int64_t kMostChannels = 256;  // K, V
constexpr int64_t kBlock = 16;  // rows whose decays among one another are taken pair by pair

HWY_INLINE hn::Vec<F32> exp2_f32(F32 d, hn::Vec<F32> x) {
  return exp_f32(d, hn::Mul(x, hn::Set(d, 0.693147180559945f)));
}

/// Reads row (t, head) into `to`, zeros behind it.
HWY_INLINE void read_row(const FloatRows& rows, int64_t t, int64_t head, int64_t count, float* to) {
  if (rows.is_bf16) {
    load_row(rows.bf16(t, head), count, kda_padded(count), to);
  } else {
    load_row(rows.f32(t, head), count, kda_padded(count), to);
  }
}

/// Row (t, head) of an output of either type.
HWY_INLINE void write_row(const TensorView& view, int64_t t, int64_t head, int64_t count,
                          const float* from) {
  const int64_t at = t * view.stride[0] + head * view.stride[1];
  if (view.dtype == DType::kBf16) {
    store_row(from, count, static_cast<bf16_t*>(view.data) + at);
  } else {
    store_row(from, count, static_cast<float*>(view.data) + at);
  }
}

HWY_INLINE float dot(const float* HWY_RESTRICT a, const float* HWY_RESTRICT b, int64_t padded) {
  const F32 d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  auto even = hn::Zero(d), odd = hn::Zero(d);
  for (int64_t c = 0; c < padded; c += 2 * lanes) {
    even = hn::MulAdd(hn::LoadU(d, a + c), hn::LoadU(d, b + c), even);
    odd = hn::MulAdd(hn::LoadU(d, a + c + lanes), hn::LoadU(d, b + c + lanes), odd);
  }
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(even, odd)));
}

/// to += factor * row
HWY_INLINE void add_scaled(float factor, const float* HWY_RESTRICT row, int64_t padded,
                           float* HWY_RESTRICT to) {
  const F32 d;
  const auto f = hn::Set(d, factor);
  for (int64_t c = 0; c < padded; c += static_cast<int64_t>(hn::Lanes(d))) {
    hn::StoreU(hn::MulAdd(f, hn::LoadU(d, row + c), hn::LoadU(d, to + c)), d, to + c);
  }
}

/// to = row * exp2(left - right); `right` may be null: 0.
HWY_INLINE void decay_row(const float* row, const float* left, const float* right, int64_t padded,
                          float* to) {
  const F32 d;
  for (int64_t c = 0; c < padded; c += static_cast<int64_t>(hn::Lanes(d))) {
    auto exponent = hn::LoadU(d, left + c);
    if (right != nullptr) exponent = hn::Sub(exponent, hn::LoadU(d, right + c));
    hn::StoreU(hn::Mul(hn::LoadU(d, row + c), exp2_f32(d, exponent)), d, to + c);
  }
}

// ---- K1

void gate_chunk(const KdaStageProblem& problem, const KdaStageGateTensors& t, const FloatRows& g,
                const StageChunk& chunk, int64_t head) {
  const F32 d;
  const int64_t channels = problem.layer.head_dim_k, padded = kda_padded(channels);
  const auto a_log = access<const float, 1>(t.a_log);
  const auto dt_bias = access<const float, 2>(t.dt_bias);
  const GateHead gate = gate_head(problem.layer.gate, a_log ? &a_log(head) : nullptr,
                                  dt_bias ? dt_bias.row(head) : nullptr);
  HWY_ALIGN float raw[kMostChannels], bias[kMostChannels], sum[kMostChannels], rest[kMostChannels];
  for (float* row : {bias, sum, rest}) std::fill_n(row, padded, 0.0f);
  if (gate.dt_bias != nullptr) std::copy_n(gate.dt_bias, channels, bias);
  for (int64_t i = chunk.first; i < chunk.first + chunk.count; ++i) {
    read_row(g, i, head, channels, raw);
    log_decay_row(gate, bias, padded, raw);
    for (int64_t c = 0; c < padded; c += static_cast<int64_t>(hn::Lanes(d))) {
      const auto log2_decay =
          hn::Mul(hn::LoadU(d, raw + c), hn::Set(d, static_cast<float>(kLog2E)));
      const auto least = hn::Set(d, kKdaLeastLog2Decay);
      const auto term = hn::IfThenElse(hn::Lt(log2_decay, least), least, log2_decay);
      // The sum to twice the precision: what a closed channel's large terms would round off of
      // the small ones stays in `rest`.
      const auto old = hn::LoadU(d, sum + c);
      const auto added = hn::Add(term, hn::LoadU(d, rest + c));
      const auto total = hn::Add(old, added);
      hn::StoreU(total, d, sum + c);
      hn::StoreU(hn::Sub(added, hn::Sub(total, old)), d, rest + c);
    }
    write_row(t.g_sum, i, head, channels, sum);
  }
}

void normalise_chunk(const KdaStageProblem& problem, const ConstTensorView& from,
                     const TensorView& to, const StageChunk& chunk, int64_t head) {
  const int64_t channels = problem.layer.head_dim_k;
  HWY_ALIGN float row[kMostChannels];
  const FloatRows rows(from);
  for (int64_t i = chunk.first; i < chunk.first + chunk.count; ++i) {
    read_row(rows, i, head, channels, row);
    scale_row(problem.layer.normalise, 1.0f, kda_padded(channels), row);
    write_row(to, i, head, channels, row);
  }
}

void stage_gate(const KdaStageProblem& problem, const Device& device, const KdaStageGateTensors& t,
                Workspace workspace) {
  WorkspaceCutter cutter(workspace);
  const StageChunkList chunks(problem, PackedOffsets(t.q_indptr, t.q.shape[0]), &cutter);
  const KdaLayer& layer = problem.layer;
  const int64_t group = layer.num_value_heads / layer.num_heads;
  const FloatRows g(t.g);
  const ThreadScope threads(device.num_threads);
  ParallelFor(chunks.count() * layer.num_value_heads, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const StageChunk& chunk = chunks[i / layer.num_value_heads];
      const int64_t head = i % layer.num_value_heads;
      gate_chunk(problem, t, g, chunk, head);
      if (head % group != 0) continue;
      normalise_chunk(problem, t.q, t.q_hat, chunk, head / group);
      normalise_chunk(problem, t.k, t.k_hat, chunk, head / group);
    }
  });
}

// ---- K2

class Intra {
 public:
  Intra(const KdaStageProblem& problem, const KdaStageIntraTensors& t,
        const StageIntraScratch& scratch)
      : problem_(problem),
        t_(t),
        s_(scratch),
        c_(problem.chunk),
        dim_k_(problem.layer.head_dim_k),
        dim_v_(problem.layer.head_dim_v),
        padded_k_(kda_padded(dim_k_)),
        padded_v_(kda_padded(dim_v_)) {}

  void run(const StageChunk& chunk, int64_t head) const {
    load(chunk, head);
    std::fill_n(s_.a, c_ * c_, 0.0f);
    std::fill_n(s_.p, c_ * c_, 0.0f);
    for (int64_t b0 = 0; b0 < chunk.count; b0 += kBlock) {
      const int64_t b1 = std::min(chunk.count, b0 + kBlock);
      earlier_blocks(b0, b1);
      for (int64_t i = b0; i < b1; ++i) within_block(b0, i);
    }
    invert(chunk.count);
    for (int64_t i = 0; i < chunk.count; ++i) write(chunk, head, i);
  }

 private:
  float* key(int64_t i) const { return s_.key + i * padded_k_; }
  float* query(int64_t i) const { return s_.query + i * padded_k_; }
  float* sum(int64_t i) const { return s_.g_sum + i * padded_k_; }

  void load(const StageChunk& chunk, int64_t head) const {
    const int64_t key_head = head / (problem_.layer.num_value_heads / problem_.layer.num_heads);
    const FloatRows q(t_.q_hat), k(t_.k_hat), g(t_.g_sum), v(t_.v), beta(t_.beta);
    std::fill_n(s_.beta, kda_padded(c_), 0.0f);
    for (int64_t i = 0; i < chunk.count; ++i) {
      const int64_t t = chunk.first + i;
      read_row(q, t, key_head, dim_k_, query(i));
      read_row(k, t, key_head, dim_k_, key(i));
      read_row(g, t, head, dim_k_, sum(i));
      read_row(v, t, head, dim_v_, s_.value + i * padded_v_);
      s_.beta[i] = beta.value(t, head);
    }
    activate_beta(problem_.layer, kda_padded(c_), s_.beta);
  }

  // Rows [b0, b1) against the columns before b0, both decayed to and from the anchor, which is G of
  // row b0: both factors are at most 1.
  void earlier_blocks(int64_t b0, int64_t b1) const {
    for (int64_t j = 0; j < b0; ++j) {
      decay_row(key(j), sum(b0), sum(j), padded_k_, s_.column + j * padded_k_);
    }
    for (int64_t i = b0; i < b1 && b0 > 0; ++i) {
      decay_row(key(i), sum(i), sum(b0), padded_k_, s_.row_key);
      decay_row(query(i), sum(i), sum(b0), padded_k_, s_.row_query);
      for (int64_t j = 0; j < b0; ++j) {
        const float* column = s_.column + j * padded_k_;
        s_.a[i * c_ + j] = s_.beta[i] * dot(s_.row_key, column, padded_k_);
        s_.p[i * c_ + j] = dot(s_.row_query, column, padded_k_);
      }
    }
  }

  void within_block(int64_t b0, int64_t i) const {
    for (int64_t j = b0; j < i; ++j) {
      decay_row(key(j), sum(i), sum(j), padded_k_, s_.row_key);
      s_.a[i * c_ + j] = s_.beta[i] * dot(key(i), s_.row_key, padded_k_);
      s_.p[i * c_ + j] = dot(query(i), s_.row_key, padded_k_);
    }
    s_.p[i * c_ + i] = dot(query(i), key(i), padded_k_);
  }

  // X_i = e_i - sum_{j<i} A_ij X_j
  void invert(int64_t count) const {
    const int64_t padded = kda_padded(c_);
    std::fill_n(s_.x, c_ * padded, 0.0f);
    for (int64_t i = 0; i < count; ++i) {
      float* row = s_.x + i * padded;
      for (int64_t j = 0; j < i; ++j) {
        add_scaled(-s_.a[i * c_ + j], s_.x + j * padded, padded, row);
      }
      row[i] = 1.0f;
    }
  }

  void write(const StageChunk& chunk, int64_t head, int64_t i) const {
    const int64_t t = chunk.first + i;
    const float* x = s_.x + i * kda_padded(c_);
    write_row(t_.x, t, head, c_, x);
    write_row(t_.p, t, head, c_, s_.p + i * c_);
    // Rows of Kd replace the column factors one by one: row i is the first to need its own.
    decay_row(key(i), sum(i), nullptr, padded_k_, s_.column + i * padded_k_);
    std::fill_n(s_.row_key, padded_k_, 0.0f);
    std::fill_n(s_.row_value, padded_v_, 0.0f);
    for (int64_t j = 0; j <= i; ++j) {
      const float factor = x[j] * s_.beta[j];
      add_scaled(factor, s_.column + j * padded_k_, padded_k_, s_.row_key);
      add_scaled(factor, s_.value + j * padded_v_, padded_v_, s_.row_value);
    }
    write_row(t_.w, t, head, dim_k_, s_.row_key);
    write_row(t_.u0, t, head, dim_v_, s_.row_value);
    decay_row(key(i), sum(chunk.count - 1), sum(i), padded_k_, s_.row_key);
    write_row(t_.kr, t, head, dim_k_, s_.row_key);
  }

  const KdaStageProblem& problem_;
  const KdaStageIntraTensors& t_;
  const StageIntraScratch& s_;
  const int64_t c_, dim_k_, dim_v_, padded_k_, padded_v_;
};

void stage_intra(const KdaStageProblem& problem, const Device& device,
                 const KdaStageIntraTensors& t, Workspace workspace) {
  WorkspaceCutter cutter(workspace);
  const StageChunkList chunks(problem, PackedOffsets(t.q_indptr, t.v.shape[0]), &cutter);
  const StageWorkers<StageIntraScratch> workers(problem, workspace, cutter);
  const int64_t heads = problem.layer.num_value_heads;
  const ThreadScope threads(device.num_threads);
  ParallelFor(chunks.count() * heads, 1, [&](int64_t begin, int64_t end, int worker) {
    const StageIntraScratch scratch = workers.scratch(worker);
    const Intra stage(problem, t, scratch);
    for (int64_t i = begin; i < end; ++i) stage.run(chunks[i / heads], i % heads);
  });
}

// ---- K3

class Inter {
 public:
  Inter(const KdaStageProblem& problem, const KdaStageInterTensors& t,
        const StageInterScratch& scratch)
      : t_(t),
        s_(scratch),
        c_(problem.chunk),
        dim_k_(problem.layer.head_dim_k),
        padded_k_(kda_padded(dim_k_)),
        w_(t.w),
        kr_(t.kr),
        u0_(t.u0),
        g_sum_(t.g_sum) {}

  // Columns [v0, v0 + count) of V of one value head through one sequence.
  void run(int64_t n, const SequenceRows& rows, int64_t first_chunk, int64_t head, int64_t v0,
           int64_t count) const {
    for (int64_t v = 0; v < count; ++v) {
      float* row = s_.state + v * padded_k_;
      std::fill_n(row, padded_k_, 0.0f);
      if (t_.initial_state.defined()) {
        std::copy_n(state_row(t_.initial_state, n, head, v0 + v), dim_k_, row);
      }
    }
    int64_t entry = first_chunk;
    for (int64_t first = rows.begin; first < rows.end; first += c_, ++entry) {
      if (entry < t_.chunk_states.shape[0]) keep(t_.chunk_states, entry, head, v0, count);
      advance(first, std::min(c_, rows.end - first), head, v0, count);
    }
    if (t_.final_state.defined()) keep(t_.final_state, n, head, v0, count);
  }

 private:
  static float* state_row(const ConstTensorView& view, int64_t entry, int64_t head, int64_t v) {
    return static_cast<float*>(const_cast<void*>(view.data)) + entry * view.stride[0] +
           head * view.stride[1] + v * view.stride[2];
  }

  void keep(const TensorView& view, int64_t entry, int64_t head, int64_t v0, int64_t count) const {
    for (int64_t v = 0; v < count; ++v) {
      std::copy_n(s_.state + v * padded_k_, dim_k_, state_row(view, entry, head, v0 + v));
    }
  }

  void advance(int64_t first, int64_t rows, int64_t head, int64_t v0, int64_t count) const {
    const F32 d;
    for (int64_t i = 0; i < rows; ++i) {
      read_row(w_, first + i, head, dim_k_, s_.w + i * padded_k_);
      read_row(kr_, first + i, head, dim_k_, s_.kr + i * padded_k_);
      float* u = s_.u + i * kStageStateRows;
      if (u0_.is_bf16) {
        load_row(u0_.bf16(first + i, head) + v0, count, kStageStateRows, u);
      } else {
        load_row(u0_.f32(first + i, head) + v0, count, kStageStateRows, u);
      }
      for (int64_t v = 0; v < count; ++v) {
        u[v] -= dot(s_.w + i * padded_k_, s_.state + v * padded_k_, padded_k_);
      }
      TensorView columns = t_.u;  // from column v0 on
      columns.data =
          static_cast<char*>(columns.data) + v0 * static_cast<int64_t>(size_of(columns.dtype));
      write_row(columns, first + i, head, count, u);
    }
    read_row(g_sum_, first + rows - 1, head, dim_k_, s_.decay);
    for (int64_t c = 0; c < padded_k_; c += static_cast<int64_t>(hn::Lanes(d))) {
      hn::StoreU(exp2_f32(d, hn::LoadU(d, s_.decay + c)), d, s_.decay + c);
    }
    for (int64_t v = 0; v < count; ++v) {
      float* row = s_.state + v * padded_k_;
      for (int64_t c = 0; c < padded_k_; c += static_cast<int64_t>(hn::Lanes(d))) {
        hn::StoreU(hn::Mul(hn::LoadU(d, row + c), hn::LoadU(d, s_.decay + c)), d, row + c);
      }
      for (int64_t i = 0; i < rows; ++i) {
        add_scaled(s_.u[i * kStageStateRows + v], s_.kr + i * padded_k_, padded_k_, row);
      }
    }
  }

  const KdaStageInterTensors& t_;
  const StageInterScratch& s_;
  const int64_t c_, dim_k_, padded_k_;
  const FloatRows w_, kr_, u0_, g_sum_;
};

void stage_inter(const KdaStageProblem& problem, const Device& device,
                 const KdaStageInterTensors& t, Workspace workspace) {
  WorkspaceCutter cutter(workspace);
  const PackedOffsets offsets(t.q_indptr, t.w.shape[0]);
  const StageSequenceList sequences(problem, offsets, &cutter);
  const StageWorkers<StageInterScratch> workers(problem, workspace, cutter);
  const int64_t heads = problem.layer.num_value_heads, dim_v = problem.layer.head_dim_v;
  const int64_t cuts = (dim_v + kStageStateRows - 1) / kStageStateRows;
  const ThreadScope threads(device.num_threads);
  ParallelFor(offsets.sequences * heads * cuts, 1, [&](int64_t begin, int64_t end, int worker) {
    const StageInterScratch scratch = workers.scratch(worker);
    const Inter stage(problem, t, scratch);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t n = i / (heads * cuts), v0 = i % cuts * kStageStateRows;
      stage.run(n, sequences[n].rows, sequences[n].first_chunk, i / cuts % heads, v0,
                std::min(kStageStateRows, dim_v - v0));
    }
  });
}

// ---- K4

void output_chunk(const KdaStageProblem& problem, const KdaStageOutputTensors& t,
                  const StageOutputScratch& s, const StageChunk& chunk, int64_t head) {
  const KdaLayer& layer = problem.layer;
  const int64_t dim_k = layer.head_dim_k, dim_v = layer.head_dim_v, c = problem.chunk;
  const int64_t padded_k = kda_padded(dim_k), padded_v = kda_padded(dim_v);
  const int64_t key_head = head / (layer.num_value_heads / layer.num_heads);
  const auto scale = static_cast<float>(kda_scale(layer));
  const FloatRows q(t.q_hat), g(t.g_sum), p(t.p), u(t.u);
  for (int64_t i = 0; i < chunk.count; ++i) {
    float* query = s.query + i * padded_k;
    read_row(q, chunk.first + i, key_head, dim_k, query);
    read_row(g, chunk.first + i, head, dim_k, s.row);
    decay_row(query, s.row, nullptr, padded_k, query);
    read_row(u, chunk.first + i, head, dim_v, s.u + i * padded_v);
  }
  std::fill_n(s.out, c * padded_v, 0.0f);
  for (int64_t v = 0; v < dim_v; ++v) {
    const ConstTensorView& states = t.chunk_states;
    load_row(static_cast<const float*>(states.data) + chunk.index * states.stride[0] +
                 head * states.stride[1] + v * states.stride[2],
             dim_k, padded_k, s.row);
    for (int64_t i = 0; i < chunk.count; ++i) {
      s.out[i * padded_v + v] = dot(s.query + i * padded_k, s.row, padded_k);
    }
  }
  for (int64_t i = 0; i < chunk.count; ++i) {
    float* out = s.out + i * padded_v;
    read_row(p, chunk.first + i, head, i + 1, s.row);  // columns past the diagonal are not read
    for (int64_t j = 0; j <= i; ++j) add_scaled(s.row[j], s.u + j * padded_v, padded_v, out);
    scale_row(false, scale, padded_v, out);
    write_row(t.out, chunk.first + i, head, dim_v, out);
  }
}

void stage_output(const KdaStageProblem& problem, const Device& device,
                  const KdaStageOutputTensors& t, Workspace workspace) {
  WorkspaceCutter cutter(workspace);
  const StageChunkList chunks(problem, PackedOffsets(t.q_indptr, t.u.shape[0]), &cutter);
  const StageWorkers<StageOutputScratch> workers(problem, workspace, cutter);
  const int64_t heads = problem.layer.num_value_heads;
  const int64_t count = std::min(chunks.count(), t.chunk_states.shape[0]);
  const ThreadScope threads(device.num_threads);
  ParallelFor(count * heads, 1, [&](int64_t begin, int64_t end, int worker) {
    const StageOutputScratch scratch = workers.scratch(worker);
    for (int64_t i = begin; i < end; ++i) {
      output_chunk(problem, t, scratch, chunks[i / heads], i % heads);
    }
  });
}

}  // namespace
}  // namespace fovea::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fovea::internal {

HWY_EXPORT(stage_gate);
HWY_EXPORT(stage_intra);
HWY_EXPORT(stage_inter);
HWY_EXPORT(stage_output);

size_t kda_stage_gate_cpu_workspace(const KdaStageProblem& problem, const Device&) {
  WorkspaceCutter cutter({});
  StageChunkList::take(problem, &cutter);
  return cutter.used_bytes();
}
void kda_stage_gate_cpu(const KdaStageProblem& problem, const Device& device,
                        const KdaStageGateTensors& tensors, Workspace workspace) {
  current_cpu_isa();  // applies FOVEA_CPU_ISA before the first dispatch
  HWY_DYNAMIC_DISPATCH(stage_gate)(problem, device, tensors, workspace);
}

size_t kda_stage_intra_cpu_workspace(const KdaStageProblem& problem, const Device& device) {
  WorkspaceCutter cutter({});
  StageChunkList::take(problem, &cutter);
  return cutter.used_bytes() +
         static_cast<size_t>(device.num_threads *
                             StageWorkers<StageIntraScratch>::bytes_each(problem));
}
void kda_stage_intra_cpu(const KdaStageProblem& problem, const Device& device,
                         const KdaStageIntraTensors& tensors, Workspace workspace) {
  current_cpu_isa();  // applies FOVEA_CPU_ISA before the first dispatch
  HWY_DYNAMIC_DISPATCH(stage_intra)(problem, device, tensors, workspace);
}

size_t kda_stage_inter_cpu_workspace(const KdaStageProblem& problem, const Device& device) {
  WorkspaceCutter cutter({});
  StageSequenceList::take(problem, &cutter);
  return cutter.used_bytes() +
         static_cast<size_t>(device.num_threads *
                             StageWorkers<StageInterScratch>::bytes_each(problem));
}
void kda_stage_inter_cpu(const KdaStageProblem& problem, const Device& device,
                         const KdaStageInterTensors& tensors, Workspace workspace) {
  current_cpu_isa();  // applies FOVEA_CPU_ISA before the first dispatch
  HWY_DYNAMIC_DISPATCH(stage_inter)(problem, device, tensors, workspace);
}

size_t kda_stage_output_cpu_workspace(const KdaStageProblem& problem, const Device& device) {
  WorkspaceCutter cutter({});
  StageChunkList::take(problem, &cutter);
  return cutter.used_bytes() +
         static_cast<size_t>(device.num_threads *
                             StageWorkers<StageOutputScratch>::bytes_each(problem));
}
void kda_stage_output_cpu(const KdaStageProblem& problem, const Device& device,
                          const KdaStageOutputTensors& tensors, Workspace workspace) {
  current_cpu_isa();  // applies FOVEA_CPU_ISA before the first dispatch
  HWY_DYNAMIC_DISPATCH(stage_output)(problem, device, tensors, workspace);
}

}  // namespace fovea::internal
#endif
