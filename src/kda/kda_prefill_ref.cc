#include "src/core/workspace.h"
#include "src/kda/kda_prefill_impl.h"
#include "src/kda/kda_ref.h"

namespace fovea::internal {
namespace {

struct Scratch {
  int64_t* check;
  RefToken token;
  double* state;  // [V][K]
  double* out;    // [V]
  char* staging;

  Scratch(const KdaPrefillProblem& problem, WorkspaceCutter* cutter)
      : check(cutter->take<int64_t>(kda_prefill_check_elements(problem))),
        token(RefToken::take(problem.layer, cutter)),
        state(cutter->take<double>(problem.layer.head_dim_v * problem.layer.head_dim_k)),
        out(cutter->take<double>(problem.layer.head_dim_v)),
        staging(cutter->take<char>(kda_prefill_staging_bytes(problem))) {}
};

// One sequence of the call.
struct Sequence {
  int64_t n;
  SequenceRows rows;
  int64_t first_chunk;  // its first entry of chunk_states
};

// Runs one value head of one sequence: S through all its rows, kept where someone asked for it.
void run_head(const KdaPrefillProblem& problem, const KdaPrefillTensors& tensors,
              const PrefillStates& states, const RefInputs& inputs, const Sequence& sequence,
              int64_t head, Scratch* scratch) {
  const KdaLayer& layer = problem.layer;
  const int64_t interval = snapshot_interval(problem.chunk);
  const StateAccess chunk_states(tensors.chunk_states, problem.state_layout);
  const auto out = access<bf16_t, 3>(tensors.out);
  const int64_t length = sequence.rows.length();
  ref_load(layer, states.states(), states.start(sequence.n), head, scratch->state);
  for (int64_t p = 0; p <= length; ++p) {
    for (int64_t m = 0; m < states.num_snapshots(); ++m) {
      const StateTarget target = states.snapshot_target(m, sequence.n, length, p);
      ref_store(layer, target.access, target.entry, head, scratch->state);
    }
    if (p == length) break;
    const int64_t chunk = sequence.first_chunk + p / interval;
    if (p % interval == 0 && chunk < chunk_states.entries) {
      ref_store(layer, chunk_states, chunk, head, scratch->state);
    }
    const int64_t t = sequence.rows.begin + p;
    inputs.read(t, head, &scratch->token);
    ref_step(layer, scratch->token, scratch->state, scratch->out);
    for (int64_t d = 0; d < layer.head_dim_v; ++d) {
      out(t, head, d) = bf16_from_float(static_cast<float>(scratch->out[d]));
    }
  }
  const StateTarget target = states.final_target(sequence.n, length);
  ref_store(layer, target.access, target.entry, head, scratch->state);
}

}  // namespace

size_t kda_prefill_ref_workspace(const KdaPrefillProblem& problem, const Device&) {
  WorkspaceCutter cutter({});
  Scratch(problem, &cutter);
  return cutter.used_bytes();
}

void kda_prefill_ref(const KdaPrefillProblem& problem, const Device&,
                     const KdaPrefillTensors& tensors, Workspace workspace) {
  WorkspaceCutter cutter(workspace);
  Scratch scratch(problem, &cutter);
  judge_kda_prefill(problem, tensors, scratch.check);
  const PrefillStates states(problem, tensors, scratch.staging);
  const RefInputs inputs(problem.layer, rows_of(tensors));
  const PackedOffsets offsets(tensors.q_indptr, tensors.q.shape[0]);
  const int64_t interval = snapshot_interval(problem.chunk);
  SequenceReader reader(offsets);
  int64_t chunks = 0;
  for (int64_t n = 0; n < offsets.sequences; ++n) {
    const Sequence sequence{n, reader.next(), chunks};
    for (int64_t h = 0; h < problem.layer.num_value_heads; ++h) {
      run_head(problem, tensors, states, inputs, sequence, h, &scratch);
    }
    chunks += (sequence.rows.length() + interval - 1) / interval;
  }
  states.commit();
}

}  // namespace fovea::internal
