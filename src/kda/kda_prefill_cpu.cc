#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kda/kda_prefill_cpu.cc"
#include "src/core/simd.h"
// These need the helpers of simd.h.
#include "src/kda/kda_chunk_simd.h"
#include "src/kda/kda_state_simd.h"

#include <algorithm>

#include "src/core/parallel.h"
#include "src/kda/kda_inputs.h"
#include "src/kda/kda_math.h"
#include "src/kda/kda_prefill_impl.h"
#include "src/kda/kda_prefill_work.h"

HWY_BEFORE_NAMESPACE();
namespace fovea::internal::HWY_NAMESPACE {
namespace {

// One call.
struct Call {
  const KdaPrefillProblem& problem;
  const KdaPrefillTensors& tensors;
  const KdaInputs inputs;
  const PrefillStates& states;
  const KdaPrefillWork& work;
  const Accessor<bf16_t, 3> out;
  const StateAccess chunk_states;
};

// State rows of one value head of one sequence, on its way through the sequence.
template <int kC>
class Piece {
 public:
  Piece(const Call& call, const KdaSequence& sequence, const StateRows& rows,
        const KdaChunkScratch& scratch)
      : call_(call),
        layer_(call.problem.layer),
        sequence_(sequence),
        rows_(rows),
        s_(scratch),
        key_head_(rows.head / (layer_.num_value_heads / layer_.num_heads)),
        gate_(gate_head(layer_.gate, call.inputs.rate_of(rows.head),
                        call.inputs.bias_of(rows.head))) {
    std::fill_n(s_.bias, s_.padded_k, 0.0f);
    if (gate_.dt_bias != nullptr) std::copy_n(gate_.dt_bias, layer_.head_dim_k, s_.bias);
  }

  void run() {
    const int64_t length = sequence_.rows.length();
    const int64_t interval = snapshot_interval(call_.problem.chunk);
    const StateTarget last = call_.states.final_target(sequence_.index, length);
    KdaPrefillWork::Snapshots snapshots(call_.work, sequence_.index);
    load_state(call_.states.states(), call_.states.start(sequence_.index), rows_, layer_.head_dim_k,
               s_.padded_k, s_.stride_k, s_.state);
    for (int64_t p = 0;; p += kC) {
      p = std::min(p, length);
      snapshots.at(p, [&](int32_t m) {
        store(call_.states.snapshot_target(m, sequence_.index, length, p));
      });
      if (p == length) break;
      if (p % interval == 0) keep_chunk_state(p / interval);
      advance(p, std::min<int64_t>(kC, length - p));
    }
    store(last);
  }

 private:
  void store(const StateTarget& target) const {
    store_state(target.access, target.entry, rows_, layer_.head_dim_k, s_.stride_k, s_.state);
  }

  void keep_chunk_state(int64_t chunk) const {
    const int64_t entry = sequence_.first_chunk + chunk;
    if (entry < call_.chunk_states.entries) store({call_.chunk_states, entry});
  }

  // Keys, queries, decays of the chunk's rows.
  void load_keys(int64_t first, int64_t count) const {
    const F32 d;
    const float scale = static_cast<float>(kda_scale(layer_));
    const int64_t k = layer_.head_dim_k, padded = s_.padded_k;
    const auto lanes = static_cast<int64_t>(hn::Lanes(d));
    std::fill_n(s_.g_sum, padded, 0.0f);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t t = first + i, at = i * s_.stride_k;
      load_row(call_.inputs.k.row(t, key_head_), k, padded, s_.key + at);
      load_row(call_.inputs.q.row(t, key_head_), k, padded, s_.query + at);
      scale_row(layer_.normalise, 1.0f, padded, s_.key + at);
      scale_row(layer_.normalise, scale, padded, s_.query + at);
      float* const decay = s_.decay + at;
      if (call_.inputs.g.is_bf16)
        load_row(call_.inputs.g.bf16(t, rows_.head), k, padded, decay);
      else
        load_row(call_.inputs.g.f32(t, rows_.head), k, padded, decay);
      log_decay_row(gate_, s_.bias, padded, decay);
      for (int64_t c = 0; c < padded; c += lanes) {
        const auto g = hn::LoadU(d, decay + c);
        hn::StoreU(hn::Add(hn::LoadU(d, s_.g_sum + c), g), d, s_.g_sum + c);
        hn::StoreU(exp_f32(d, g), d, decay + c);
      }
    }
    for (int64_t i = count; i < kC; ++i) {
      for (float* row : {s_.key, s_.query, s_.decay})
        std::fill_n(row + i * s_.stride_k, padded, 0.0f);
    }
    for (int64_t c = 0; c < padded; c += lanes)
      hn::StoreU(exp_f32(d, hn::LoadU(d, s_.g_sum + c)), d, s_.chunk_decay + c);
  }

  void load_values_and_beta(int64_t first, int64_t count) const {
    const int64_t padded_rows = (rows_.count + 7) / 8 * 8;
    for (int64_t i = 0; i < count; ++i) {
      load_row(call_.inputs.v.row(first + i, rows_.head) + rows_.first, rows_.count, padded_rows,
               s_.rows + i * s_.stride_v);
      s_.beta[i] = call_.inputs.beta.value(first + i, rows_.head);
    }
    for (int64_t i = count; i < kC; ++i) std::fill_n(s_.rows + i * s_.stride_v, padded_rows, 0.0f);
    std::fill_n(s_.beta + count, kda_padded(kC) - count, 0.0f);
    activate_beta(layer_, kda_padded(kC), s_.beta);
    std::fill_n(s_.beta + count, kC - count, 0.0f);
    for (int64_t v = 0; v < padded_rows; v += 8) {
      for (int64_t i = 0; i < kC; i += 8)
        transpose_8x8(s_.rows + i * s_.stride_v + v, s_.stride_v, s_.value_t + v * kC + i, kC);
    }
  }

  void write_out(int64_t first, int64_t count) const {
    for (int64_t v = 0; v < rows_.count; v += 8) {
      for (int64_t i = 0; i < kC; i += 8)
        transpose_8x8(s_.out_t + v * kC + i, kC, s_.rows + i * s_.stride_v + v, s_.stride_v);
    }
    for (int64_t i = 0; i < count; ++i) {
      store_row(s_.rows + i * s_.stride_v, rows_.count,
                call_.out.row(first + i, rows_.head) + rows_.first);
    }
  }

  // Asks for the rows of one token of the next chunk in the L1 cache: rows of one head lie too far
  // apart for hardware prefetchers.
  HWY_INLINE void prefetch(int64_t t) const {
    prefetch_lines(call_.inputs.k.row(t, key_head_), layer_.head_dim_k * 2);
    prefetch_lines(call_.inputs.q.row(t, key_head_), layer_.head_dim_k * 2);
    prefetch_lines(call_.inputs.v.row(t, rows_.head) + rows_.first, rows_.count * 2);
    if (call_.inputs.g.is_bf16)
      prefetch_lines(call_.inputs.g.bf16(t, rows_.head), layer_.head_dim_k * 2);
    else
      prefetch_lines(call_.inputs.g.f32(t, rows_.head), layer_.head_dim_k * 4);
  }

  void advance(int64_t p, int64_t count) const {
    const int64_t first = sequence_.rows.begin + p;
    load_keys(first, count);
    load_values_and_beta(first, count);
    const KdaChunk<kC> chunk{s_, count};
    chunk.prepare();
    const int64_t next_end = std::min(first + 2 * kC, sequence_.rows.end);
    chunk.advance(
        rows_.count, [&](int64_t group) __attribute__((always_inline)) {
          if (first + kC + group < next_end) prefetch(first + kC + group);
          if (group < count)
            prefetch_lines(call_.out.row(first + group, rows_.head) + rows_.first, rows_.count * 2);
        });
    write_out(first, count);
  }

  const Call& call_;
  const KdaLayer& layer_;
  const KdaSequence& sequence_;
  const StateRows rows_;
  const KdaChunkScratch& s_;
  const int64_t key_head_;
  const GateHead gate_;
};

template <int kC>
void run_pieces(const Call& call, const Device& device, char* worker_memory) {
  const KdaLayer& layer = call.problem.layer;
  const int64_t heads = layer.num_value_heads;
  const int64_t heads_in_all = call.work.num_sequences() * heads;
  const int64_t rows = kda_rows_per_piece(layer.head_dim_v, heads_in_all, device.num_threads);
  const int64_t cuts = (layer.head_dim_v + rows - 1) / rows;
  WorkspaceCutter measure({});
  KdaChunkScratch(measure, kC, layer.head_dim_k, layer.head_dim_v);
  const auto worker_bytes = static_cast<int64_t>(measure.used_bytes());
  const ThreadScope threads(device.num_threads);
  ParallelFor(heads_in_all * cuts, 1, [&](int64_t begin, int64_t end, int worker) {
    WorkspaceCutter mine({worker_memory + worker * worker_bytes, 0});
    const KdaChunkScratch scratch(mine, kC, layer.head_dim_k, layer.head_dim_v);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i % cuts * rows;
      const StateRows mine_rows{i / cuts % heads, first, std::min(rows, layer.head_dim_v - first)};
      Piece<kC>(call, call.work.sequence(i / (cuts * heads)), mine_rows, scratch).run();
    }
  });
}

void kda_prefill(const KdaPrefillProblem& problem, const Device& device,
                 const KdaPrefillTensors& tensors, Workspace workspace) {
  WorkspaceCutter cutter(workspace);
  judge_kda_prefill(problem, tensors, cutter.take<int64_t>(kda_prefill_check_elements(problem)));
  const PrefillStates states(problem, tensors,
                             cutter.take<char>(kda_prefill_staging_bytes(problem)));
  KdaPrefillWork work(cutter, problem);
  work.fill(problem, tensors);
  const Call call{problem,
                  tensors,
                  KdaInputs(rows_of(tensors)),
                  states,
                  work,
                  access<bf16_t, 3>(tensors.out),
                  StateAccess(tensors.chunk_states, problem.state_layout)};
  char* const worker_memory = static_cast<char*>(workspace.data) + cutter.used_bytes();
  switch (kda_chunk_of(problem)) {
    case 16:
      run_pieces<16>(call, device, worker_memory);
      break;
    case 32:
      run_pieces<32>(call, device, worker_memory);
      break;
    default:
      run_pieces<64>(call, device, worker_memory);
      break;
  }
  states.commit();
}

}  // namespace
}  // namespace fovea::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fovea::internal {

HWY_EXPORT(kda_prefill);

size_t kda_prefill_cpu_workspace(const KdaPrefillProblem& problem, const Device& device) {
  WorkspaceCutter cutter({});
  cutter.take<int64_t>(kda_prefill_check_elements(problem));
  cutter.take<char>(kda_prefill_staging_bytes(problem));
  KdaPrefillWork(cutter, problem);
  for (int worker = 0; worker < device.num_threads; ++worker) {
    KdaChunkScratch(cutter, kda_chunk_of(problem), problem.layer.head_dim_k,
                    problem.layer.head_dim_v);
  }
  return cutter.used_bytes();
}

void kda_prefill_cpu(const KdaPrefillProblem& problem, const Device& device,
                     const KdaPrefillTensors& tensors, Workspace workspace) {
  current_cpu_isa();  // applies FOVEA_CPU_ISA before the first dispatch
  HWY_DYNAMIC_DISPATCH(kda_prefill)(problem, device, tensors, workspace);
}

}  // namespace fovea::internal
#endif
