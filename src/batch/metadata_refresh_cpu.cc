#include <bit>

#include "src/batch/metadata_refresh_impl.h"
#include "src/batch/paged_schedule_impl.h"
#include "src/batch/split_schedule_impl.h"
#include "src/core/access.h"
#include "src/core/parallel.h"

namespace fovea::internal {
namespace {

// Scan, then fill: the cumulative sums of a step are one pass over its requests (a few
// microseconds for 256 of them), everything else is filled per request, bounded by its length. The
// pages of a request are gathered once, for its longest step: the other steps hold a prefix.
struct StepFill {
  const MetadataProblem& problem;
  const MetadataTensors& tensors;
  const MetadataFields& fields;
  int64_t length_addend;  // from seq_len to L

  StepFill(const MetadataProblem& problem_in, const MetadataTensors& tensors_in, size_t step)
      : problem(problem_in),
        tensors(tensors_in),
        fields(tensors_in.steps[step]),
        length_addend(problem_in.mode == ForwardMode::kTargetVerify
                          ? problem_in.rows_per_request
                          : tensors_in.kv_len_delta[step]) {}

  int64_t num_requests() const { return tensors.seq_len.shape[0]; }

  // Rows that the request asks for, before the cut to the capacity.
  int64_t wanted_rows(int64_t request) const {
    if (reads_ext_len(problem.mode)) {
      return std::max<int64_t>(0, static_cast<const int32_t*>(tensors.ext_len.data)[request]);
    }
    return is_decode(problem.mode) ? 1 : problem.rows_per_request;
  }

  void scan_requests() const {
    const auto seq_len = access<const int32_t, 1>(tensors.seq_len);
    const auto kv_len = access<int32_t, 1>(fields.kv_len);
    const auto kv_indptr = access<int32_t, 1>(fields.kv_indptr);
    const auto q_indptr = access<int32_t, 1>(fields.q_indptr);
    const auto ext_len = access<int32_t, 1>(fields.ext_len);
    const int64_t longest_kv = kv_capacity(problem, fields);
    const int64_t most_rows = row_capacity(problem, tensors, fields);
    int64_t tokens = 0, rows = 0;
    int32_t max_kv_len = 0;
    int32_t max_q_len = num_requests() == 0 && is_extend(problem.mode) ? 1 : 0;
    for (int64_t r = 0; r < num_requests(); ++r) {
      kv_indptr(r) = saturate_i32(tokens);
      q_indptr(r) = static_cast<int32_t>(rows);
      const auto len =
          static_cast<int32_t>(std::clamp<int64_t>(seq_len(r) + length_addend, 0, longest_kv));
      const auto live_rows = static_cast<int32_t>(std::min(wanted_rows(r), most_rows - rows));
      kv_len(r) = len;
      ext_len(r) = live_rows;
      max_kv_len = std::max(max_kv_len, len);
      max_q_len = std::max(max_q_len, live_rows);
      tokens += len;
      rows += live_rows;
    }
    kv_indptr(num_requests()) = saturate_i32(tokens);
    q_indptr(num_requests()) = static_cast<int32_t>(rows);
    *static_cast<int32_t*>(fields.max_kv_len.data) = max_kv_len;
    *static_cast<int32_t*>(fields.max_q_len.data) = max_q_len;
  }

  // Pages and rows of the step, once it is scanned.
  int64_t work() const {
    const auto last = [&](const TensorView& indptr) {
      return int64_t{static_cast<const int32_t*>(indptr.data)[num_requests()]};
    };
    return last(fields.kv_indptr) / problem.page_size + last(fields.q_indptr);
  }

  int64_t num_pages(int64_t request) const {
    const int64_t len = static_cast<const int32_t*>(fields.kv_len.data)[request];
    return (len + problem.page_size - 1) / problem.page_size;
  }

  int32_t* page_row(int64_t request) const {
    return access<int32_t, 2>(fields.page_table).row(request);
  }

  void gather_pages(int64_t request) const {
    const auto req_to_token = access<const int32_t, 2>(tensors.req_to_token);
    const int64_t pages = num_pages(request);
    const int64_t row = static_cast<const int32_t*>(tensors.pool_row.data)[request];
    int32_t* const to = page_row(request);
    if (row < 0 || row >= req_to_token.shape[0]) {
      std::fill_n(to, pages, -1);
      return;
    }
    const int32_t* const from = req_to_token.row(row);
    const auto page_size = static_cast<uint32_t>(problem.page_size);
    if (std::has_single_bit(page_size)) {
      // An arithmetic shift keeps a negative slot negative.
      const int shift = std::countr_zero(page_size);
      for (int64_t j = 0; j < pages; ++j) to[j] = std::max(from[j << shift] >> shift, -1);
    } else {
      for (int64_t j = 0; j < pages; ++j) {
        const int32_t slot = from[j * problem.page_size];
        to[j] = slot < 0 ? -1 : static_cast<int32_t>(static_cast<uint32_t>(slot) / page_size);
      }
    }
  }

  void fill_rows(int64_t request) const {
    const int64_t first = static_cast<const int32_t*>(fields.q_indptr.data)[request];
    const int64_t count = static_cast<const int32_t*>(fields.ext_len.data)[request];
    const int64_t len = static_cast<const int32_t*>(fields.kv_len.data)[request];
    const int64_t start = static_cast<const int32_t*>(fields.kv_indptr.data)[request];
    const int64_t first_len = len - wanted_rows(request) + 1;
    const auto at = [&](const TensorView& field) {
      return static_cast<int32_t*>(field.data) + first;
    };
    int32_t* const row_len = at(fields.row_len);
    int32_t* const topk_length = at(fields.topk_length);
    std::fill_n(at(fields.row_to_request), count, static_cast<int32_t>(request));
    for (int64_t i = 0; i < count; ++i) {
      row_len[i] = static_cast<int32_t>(first_len + i);
      topk_length[i] = static_cast<int32_t>(std::clamp<int64_t>(first_len + i, 0, problem.topk));
    }
    if (!is_extend(problem.mode)) return;
    int32_t* const k_end = at(fields.k_end);
    std::fill_n(at(fields.k_start), count, static_cast<int32_t>(start));
    for (int64_t i = 0; i < count; ++i) k_end[i] = saturate_i32(start + first_len + i);
    if (has_row_offset(problem)) {
      std::fill_n(at(fields.row_offset), count, static_cast<int32_t>(start));
    }
  }

  void fill_tail(const TensorView& field, int64_t live_rows, int32_t value) const {
    auto* const data = static_cast<int32_t*>(field.data);
    std::fill(data + live_rows, data + written_rows(tensors, field.shape[0]), value);
  }

  // What needs the rows of every request: padding, the sum over rows, the schedule.
  void finish() const {
    const int64_t rows = static_cast<const int32_t*>(fields.q_indptr.data)[num_requests()];
    fill_tail(fields.row_to_request, rows, -1);
    fill_tail(fields.row_len, rows, 0);
    fill_tail(fields.topk_length, rows, 0);
    const auto topk_length = access<const int32_t, 1>(fields.topk_length);
    const auto topk_indptr = access<int32_t, 1>(fields.topk_indptr);
    int64_t entries = 0;
    topk_indptr(0) = 0;
    for (int64_t t = 0; t < written_rows(tensors, topk_indptr.shape[0] - 1); ++t) {
      if (t < rows) entries += topk_length(t);
      topk_indptr(t + 1) = saturate_i32(entries);
    }
    if (problem.split_parts > 0) fill_split();
    if (is_extend(problem.mode)) {
      fill_tail(fields.k_start, rows, 0);
      fill_tail(fields.k_end, rows, 0);
      if (has_row_offset(problem)) fill_tail(fields.row_offset, rows, 0);
      return;
    }
    ConstTensorView row_len = fields.row_len;
    row_len.shape[0] = rows;
    paged_schedule_cpu({problem.max_rows, problem.workers, 1}, {}, {row_len, fields.schedule}, {});
  }

  void fill_split() const {
    const int64_t rows = split_rows(tensors, fields);
    ConstTensorView topk_length = fields.topk_length;
    topk_length.shape[0] = rows;
    split_schedule_cpu({rows, problem.split_parts}, {},
                       {topk_length, fields.split_schedule, fields.split_indptr}, {});
    fill_tail_of_indptr(fields.split_indptr, rows);
  }

  // Rows past the last one that counts have no entry.
  void fill_tail_of_indptr(const TensorView& field, int64_t rows) const {
    const auto indptr = access<int32_t, 1>(field);
    std::fill(indptr.data + rows + 1, indptr.data + 1 + written_rows(tensors, indptr.shape[0] - 1),
              indptr(rows));
  }
};

// Pages and rows that are worth a task of their own: some twenty microseconds. Smaller pieces cost
// more in waking a second thread than they gain.
constexpr int64_t kPieceWork = 8192;

void fill_request(const MetadataProblem& problem, const MetadataTensors& tensors, int64_t request) {
  const auto step_fill = [&](int step) {
    return StepFill(problem, tensors, static_cast<size_t>(step));
  };
  int longest = 0;
  for (int step = 1; step < tensors.num_steps; ++step) {
    if (step_fill(step).num_pages(request) > step_fill(longest).num_pages(request)) longest = step;
  }
  step_fill(longest).gather_pages(request);
  const int32_t* const gathered = step_fill(longest).page_row(request);
  for (int step = 0; step < tensors.num_steps; ++step) {
    const StepFill fill = step_fill(step);
    if (step != longest) std::copy_n(gathered, fill.num_pages(request), fill.page_row(request));
    fill.fill_rows(request);
  }
}

}  // namespace

void metadata_refresh_cpu(const MetadataProblem& problem, const Device& device,
                          const MetadataTensors& tensors, Workspace) {
  const int64_t num_requests = tensors.seq_len.shape[0];
  const ThreadScope threads(device.num_threads);
  int64_t work = 0, rows = 0;
  for (int step = 0; step < tensors.num_steps; ++step) {
    const StepFill fill(problem, tensors, static_cast<size_t>(step));
    fill.scan_requests();
    work += fill.work();
    rows += written_rows(tensors, fill.fields.topk_length.shape[0]);
  }
  const int64_t pieces = std::clamp<int64_t>(work / kPieceWork, 1, num_requests + 1);
  const int64_t grain = (num_requests + pieces - 1) / pieces;
  ParallelFor(num_requests, std::max<int64_t>(1, grain), [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) fill_request(problem, tensors, r);
  });
  const int64_t steps_per_piece = rows < kPieceWork ? tensors.num_steps : 1;
  ParallelFor(tensors.num_steps, steps_per_piece, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      StepFill(problem, tensors, static_cast<size_t>(i)).finish();
    }
  });
}

}  // namespace fovea::internal
