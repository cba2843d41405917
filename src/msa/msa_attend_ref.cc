#include <algorithm>
#include <cmath>
#include <limits>

#include "src/core/sink.h"
#include "src/core/workspace.h"
#include "src/msa/msa_attend_impl.h"

namespace fovea::internal {
namespace {

constexpr double kNegInf = -std::numeric_limits<double>::infinity();

struct Scratch {
  MsaRow* rows;
  int32_t* list;    // [topk]
  double* scores;   // [topk * block_size]
  int64_t* pages;   // [topk * block_size]: of the token
  int32_t* tokens;  // [topk * block_size]: within its page
  double* query;    // [head_dim]

  Scratch(WorkspaceCutter& cutter, const MsaAttendProblem& problem)
      : rows(cutter.take<MsaRow>(problem.max_rows)),
        list(cutter.take<int32_t>(problem.topk)),
        scores(cutter.take<double>(keys(problem))),
        pages(cutter.take<int64_t>(keys(problem))),
        tokens(cutter.take<int32_t>(keys(problem))),
        query(cutter.take<double>(problem.head_dim)) {}

  // Distinct blocks of a list, at most those of the table.
  static int64_t keys(const MsaAttendProblem& problem) {
    return std::min(problem.topk, problem.max_pages) * problem.block_size;
  }
};

// Channel d of a stored key or value, with its scales.
double stored_value(const MsaAttendProblem& problem, const MsaPool& pool,
                    const MsaPool& group_scale, const MsaScale& scale, int64_t page, int64_t head,
                    int64_t token, int64_t d) {
  const int64_t row = pool.offset(page, head, token);
  const auto factor = static_cast<double>(scale.at(page * problem.block_size + token, head));
  if (problem.kv_mode == MsaKvMode::kBf16)
    return bf16_to_float(static_cast<const bf16_t*>(pool.data)[row + d]);
  const auto* bytes = static_cast<const uint8_t*>(pool.data);
  if (problem.kv_mode != MsaKvMode::kQ8Kv4)
    return factor * static_cast<double>(e4m3_to_float(bytes[row + d]));
  const uint8_t pair = bytes[row + d / 2];
  const auto code = static_cast<uint8_t>(d % 2 == 0 ? pair & 15 : pair >> 4);
  const uint8_t* scales = static_cast<const uint8_t*>(group_scale.data);
  return factor * static_cast<double>(msa_kv4_value(
                      code, scales[group_scale.offset(page, head, token) + d / kMsaKv4Group]));
}

class Reference {
 public:
  Reference(const MsaAttendProblem& problem, const MsaAttendTensors& tensors,
            const Scratch& scratch)
      : problem_(problem),
        tensors_(tensors),
        inputs_(msa_attend_inputs(problem, tensors)),
        scratch_(scratch),
        group_(problem.num_heads / problem.num_kv_heads) {}

  void run() {
    const int64_t rows = inputs_.out.shape[0];
    read_msa_rows(msa_batch(tensors_.kv_len, tensors_.q_indptr, tensors_.q_offset, rows,
                            inputs_.page_table.shape[1], problem_.block_size),
                  scratch_.rows);
    for (int64_t t = 0; t < rows; ++t) {
      for (int64_t g = 0; g < problem_.num_kv_heads; ++g) {
        const int64_t keys = list_keys(t, g);
        for (int64_t h = g * group_; h < (g + 1) * group_; ++h) attend(t, g, h, keys);
      }
    }
  }

 private:
  // The visible tokens of the blocks that the list names, each once.
  int64_t list_keys(int64_t t, int64_t g) {
    const MsaRow& row = scratch_.rows[t];
    if (row.is_empty()) return 0;
    int32_t* const list = scratch_.list;
    std::copy_n(inputs_.lists.row(g, t), problem_.topk, list);
    std::sort(list, list + problem_.topk);
    int64_t keys = 0;
    for (int64_t i = 0; i < problem_.topk; ++i) {
      const int64_t n = list[i];
      const int64_t page = inputs_.page_of(row, n, problem_.block_size, problem_.causal);
      if (page < 0 || (i > 0 && list[i - 1] == n)) continue;
      const int64_t seen = msa_visible_tokens(row, n, problem_.block_size, problem_.causal);
      for (int64_t token = 0; token < seen; ++token) {
        scratch_.pages[keys] = page;
        scratch_.tokens[keys++] = static_cast<int32_t>(token);
      }
    }
    return keys;
  }

  void load_query(int64_t t, int64_t g, int64_t h) {
    const int64_t row = t * tensors_.q.stride[0] + h * tensors_.q.stride[1];
    for (int64_t d = 0; d < problem_.head_dim; ++d) {
      scratch_.query[d] =
          tensors_.q.dtype == DType::kBf16
              ? static_cast<double>(
                    bf16_to_float(static_cast<const bf16_t*>(tensors_.q.data)[row + d]))
              : static_cast<double>(inputs_.q_scale.at(t, g)) *
                    static_cast<double>(
                        e4m3_to_float(static_cast<const uint8_t*>(tensors_.q.data)[row + d]));
    }
  }

  // lse = ln sum_j exp(x_j),  out = sum_j exp(x_j - lse) * v_j.
  void attend(int64_t t, int64_t g, int64_t h, int64_t keys) {
    load_query(t, g, h);
    double* const scores = scratch_.scores;
    double largest = kNegInf;
    for (int64_t j = 0; j < keys; ++j) {
      double sum = 0;
      for (int64_t d = 0; d < problem_.head_dim; ++d)
        sum += scratch_.query[d] * stored_value(problem_, inputs_.k, inputs_.k_codes_scale,
                                                inputs_.k_scale, scratch_.pages[j], g,
                                                scratch_.tokens[j], d);
      scores[j] = static_cast<double>(problem_.softmax_scale) * sum;
      if (!(scores[j] <= largest)) largest = scores[j];  // a NaN score becomes the largest
    }
    const bool empty = largest == kNegInf;
    double sum = 0;
    for (int64_t j = 0; j < keys && !empty; ++j) sum += std::exp(scores[j] - largest);
    const double lse = empty ? kNegInf : largest + std::log(sum);
    if (inputs_.lse) inputs_.lse(t, h) = static_cast<float>(lse);
    const double left = inputs_.sink ? sink_factor(inputs_.sink(h), lse) : 1.0;
    for (int64_t d = 0; d < problem_.head_dim; ++d) {
      double value = 0;
      for (int64_t j = 0; j < keys && !empty; ++j) {
        value += std::exp(scores[j] - lse) *
                 stored_value(problem_, inputs_.v, inputs_.v_codes_scale, inputs_.v_scale,
                              scratch_.pages[j], g, scratch_.tokens[j], d);
      }
      inputs_.out(t, h, d) = empty ? bf16_t{0} : bf16_from_float(static_cast<float>(left * value));
    }
  }

  const MsaAttendProblem& problem_;
  const MsaAttendTensors& tensors_;
  MsaAttendInputs inputs_;
  const Scratch& scratch_;
  int64_t group_;
};

}  // namespace

size_t msa_attend_ref_workspace(const MsaAttendProblem& problem, const Device&) {
  WorkspaceCutter cutter({});
  const Scratch scratch(cutter, problem);
  return cutter.used_bytes();
}

void msa_attend_ref(const MsaAttendProblem& problem, const Device&, const MsaAttendTensors& tensors,
                    Workspace workspace) {
  WorkspaceCutter cutter(workspace);
  const Scratch scratch(cutter, problem);
  Reference(problem, tensors, scratch).run();
}

}  // namespace fovea::internal
