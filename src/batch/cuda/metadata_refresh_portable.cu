#include <algorithm>

#include "src/batch/cuda/schedules.cuh"
#include "src/batch/metadata_refresh_impl.h"
#include "src/batch/split_schedule_impl.h"
#include "src/core/cuda/cached_copy.cuh"
#include "src/core/cuda/launch.cuh"

// One launch. Every step has a block for each of its sums over the whole batch: the rows, the paged
// schedule and the split schedule. Each of these reads the lengths of the requests itself, so that
// none waits for another. The other blocks fill page tables, which depend on one request each; a
// page is looked up once for all steps. Nothing in the launch depends on a length.
namespace fovea::internal {
namespace {

using cuda::block_inclusive_sum;
using cuda::block_max;
using cuda::block_scan;
using cuda::count_up_to;

constexpr int kThreads = cuda::kScheduleThreads;
// Scratch of a block up to this size is shared memory; the page blocks of the launch keep room on
// the multiprocessors. Larger batches use the workspace.
constexpr int64_t kMaxSharedBytes = 48 << 10;

// What a block of sums does. The longest comes first, so that it starts first.
enum Part : int { kSplit, kRows, kPaged, kNumParts };

struct StepParams {
  // Inputs, shared by the steps.
  const int32_t* seq_len;
  const int32_t* wanted_rows;  // ext_len, or null: rows_per_request
  int64_t requests;
  int64_t rows_per_request;
  int64_t length_addend;
  int64_t kv_capacity;
  int64_t row_capacity;
  int64_t topk;
  bool extend;
  // Outputs.
  int32_t *kv_len, *kv_indptr, *max_kv_len, *q_indptr, *max_q_len, *ext_len;
  int32_t *row_to_request, *row_len, *topk_length, *topk_indptr, *k_start, *k_end, *row_offset;
  int64_t row_to_request_rows, row_len_rows, topk_length_rows, topk_indptr_rows, k_start_rows,
      k_end_rows, row_offset_rows;  // entries written
  cuda::PagedScheduleOut paged;     // schedule null: none
  cuda::SplitScheduleOut split;
  int64_t split_rows, split_indptr_rows;  // cut, and written
};

// Scratch of one block.
struct Batch {
  int64_t* before;        // [max_rows + 1], of the rows of one schedule
  cuda::SplitWork split;  // of split_parts parts
  int32_t* q_indptr;      // [max_requests + 1]
  int32_t* kv_indptr;     // [max_requests + 1]
  int32_t* first_len;     // [max_requests], row_len of the first row
};

struct BatchSizes {
  int64_t rows, parts, requests;
  int64_t reached;  // entries of the split schedule's table

  FOVEA_HOST_DEVICE Batch cut(char* from) const {
    Batch batch{};
    batch.split.starts = reinterpret_cast<cuda::SplitStart*>(from);
    batch.before = reinterpret_cast<int64_t*>(batch.split.starts + parts + 1);
    batch.q_indptr = reinterpret_cast<int32_t*>(batch.before + rows + 1);
    batch.kv_indptr = batch.q_indptr + requests + 1;
    batch.first_len = batch.kv_indptr + requests + 1;
    batch.split.reached = reinterpret_cast<uint16_t*>(batch.first_len + requests);
    batch.split.reached_size = reached;
    return batch;
  }
  FOVEA_HOST_DEVICE int64_t bytes() const {
    const int64_t all = 16 * (parts + 1) + 8 * (rows + 1) + 4 * (3 * requests + 2) + 2 * reached;
    return (all + 63) / 64 * 64;
  }
};

// What page tables need, side by side: a line of constants that is not cached yet stalls a warp for
// as long as one of the table.
struct PageParams {
  const int32_t* seq_len;
  const int32_t* pool_row;
  const int32_t* req_to_token;
  int64_t token_rows;
  int64_t token_stride;
  int32_t page_size;
  int32_t num_steps;
  uint32_t column_blocks;  // per request
  struct Step {
    int64_t length_addend;
    int64_t kv_capacity;
    int32_t* page_table;
    int64_t table_stride;
  } steps[kMaxRefreshSteps];
};

struct RefreshParams {
  PageParams pages;
  BatchSizes sizes;
  char* work;  // null: shared memory holds a Batch
  StepParams steps[kMaxRefreshSteps];
};

__device__ int32_t saturate(int64_t value) {
  return static_cast<int32_t>(value < INT32_MAX ? value : INT32_MAX);
}

__device__ int32_t kv_length(int64_t seq_len, int64_t length_addend, int64_t kv_capacity) {
  const int64_t len = seq_len + length_addend;
  return static_cast<int32_t>(len < 0 ? 0 : len > kv_capacity ? kv_capacity : len);
}

__device__ int64_t rows_wanted(const StepParams& step, int64_t request) {
  if (step.wanted_rows == nullptr) return step.rows_per_request;
  return step.wanted_rows[request] > 0 ? step.wanted_rows[request] : 0;
}

// q_indptr and first_len; returns the rows. `done` sees the request, its length, its rows and those
// of the requests before it.
template <class Done>
__device__ int64_t read_requests(const StepParams& step, const Batch& batch, int64_t* shared,
                                 Done done) {
  const auto cut = [&](int64_t rows) {
    return rows < step.row_capacity ? rows : step.row_capacity;
  };
  if (threadIdx.x == 0) batch.q_indptr[0] = 0;
  int64_t carried = 0;
  for (int64_t base = 0; base < step.requests; base += blockDim.x) {
    const int64_t r = base + threadIdx.x;
    const bool live = r < step.requests;
    const int64_t len = live ? kv_length(step.seq_len[r], step.length_addend, step.kv_capacity) : 0;
    const int64_t wanted = live ? rows_wanted(step, r) : 0;
    int64_t upto = (live ? r + 1 : step.requests) * step.rows_per_request;
    if (step.wanted_rows != nullptr) {
      int64_t total;
      upto = carried + block_inclusive_sum(wanted, shared, &total);
      carried += total;
    }
    if (live) {
      batch.q_indptr[r + 1] = static_cast<int32_t>(cut(upto));
      batch.first_len[r] = static_cast<int32_t>(len - wanted + 1);
    }
    done(r, len, cut(upto - wanted), cut(upto));
  }
  __syncthreads();
  return batch.q_indptr[step.requests];
}

// kv_len, ext_len, their sums and maxima; returns the rows.
__device__ int64_t fill_requests(const StepParams& step, const Batch& batch, int64_t* shared) {
  int64_t carried = 0;
  int32_t longest = 0, most_rows = 0;
  if (threadIdx.x == 0) step.kv_indptr[0] = step.q_indptr[0] = batch.kv_indptr[0] = 0;
  const int64_t rows = read_requests(
      step, batch, shared, [&](int64_t r, int64_t len, int64_t first_row, int64_t end_row) {
        int64_t total;
        const int64_t upto = carried + block_inclusive_sum(len, shared, &total);
        carried += total;
        longest = max(longest, static_cast<int32_t>(len));
        most_rows = max(most_rows, static_cast<int32_t>(end_row - first_row));
        if (r >= step.requests) return;
        step.kv_len[r] = static_cast<int32_t>(len);
        step.kv_indptr[r + 1] = batch.kv_indptr[r + 1] = saturate(upto);
        step.ext_len[r] = static_cast<int32_t>(end_row - first_row);
        step.q_indptr[r + 1] = static_cast<int32_t>(end_row);
      });
  auto* const maxima = reinterpret_cast<int32_t*>(shared);
  longest = block_max(longest, maxima);
  most_rows = block_max(most_rows, maxima);
  if (threadIdx.x == 0) {
    *step.max_kv_len = longest;
    *step.max_q_len = step.requests == 0 && step.extend ? 1 : most_rows;
  }
  return rows;
}

struct Row {
  int64_t request;  // -1: padding
  int64_t len;
};

__device__ Row row_at(const StepParams& step, const Batch& batch, int64_t t, int64_t rows) {
  if (t >= rows) return {-1, 0};
  const auto row = static_cast<int32_t>(t);
  const int64_t r =
      step.wanted_rows == nullptr
          ? static_cast<uint32_t>(row) / static_cast<uint32_t>(step.rows_per_request)
          : count_up_to([&](int64_t i) { return batch.q_indptr[i]; }, step.requests + 1, row) - 1;
  return {r, int64_t{batch.first_len[r]} + (t - batch.q_indptr[r])};
}

__device__ int64_t clipped(const StepParams& step, int64_t len) {
  return len < 0 ? 0 : len > step.topk ? step.topk : len;
}

__device__ void fill_rows(const StepParams& step, const Batch& batch, int64_t rows,
                          int64_t* shared) {
  int64_t most = step.row_to_request_rows;
  for (const int64_t extent : {step.row_len_rows, step.topk_length_rows, step.topk_indptr_rows,
                               step.k_start_rows, step.k_end_rows, step.row_offset_rows}) {
    most = extent > most ? extent : most;
  }
  if (threadIdx.x == 0) step.topk_indptr[0] = 0;
  block_scan<int64_t>(
      most, shared,
      [&](int64_t t) {
        const Row row = row_at(step, batch, t, rows);
        const int64_t start = row.request < 0 ? 0 : batch.kv_indptr[row.request];
        const int64_t selected = clipped(step, row.len);
        if (t < step.row_to_request_rows) {
          step.row_to_request[t] = static_cast<int32_t>(row.request);
        }
        if (t < step.row_len_rows) step.row_len[t] = static_cast<int32_t>(row.len);
        if (t < step.topk_length_rows) step.topk_length[t] = static_cast<int32_t>(selected);
        if (t < step.k_start_rows) step.k_start[t] = static_cast<int32_t>(start);
        if (t < step.k_end_rows) step.k_end[t] = saturate(start + row.len);
        if (t < step.row_offset_rows) step.row_offset[t] = static_cast<int32_t>(start);
        return selected;
      },
      [&](int64_t t, int64_t, int64_t upto) {
        if (t < step.topk_indptr_rows) step.topk_indptr[t + 1] = saturate(upto);
      });
}

// batch.before, of what work(row_len) gives for each row.
template <class Work>
__device__ void sum_rows(const StepParams& step, const Batch& batch, int64_t rows, int64_t* shared,
                         Work work) {
  if (threadIdx.x == 0) batch.before[0] = 0;
  block_scan<int64_t>(
      rows, shared, [&](int64_t t) { return work(row_at(step, batch, t, rows).len); },
      [&](int64_t t, int64_t, int64_t upto) { batch.before[t + 1] = upto; });
}

__device__ void fill_paged_schedule(const StepParams& step, const Batch& batch, int64_t rows,
                                    int64_t* shared) {
  sum_rows(step, batch, rows, shared, [](int64_t len) {
    return len <= 0 ? 0 : (len + kScheduleTokens - 1) / kScheduleTokens;
  });
  cuda::write_paged_schedule(batch.before, rows, step.paged);
}

__device__ void fill_split_schedule(const StepParams& step, const Batch& batch, int64_t rows,
                                    int64_t* shared) {
  sum_rows(step, batch, rows, shared, [&](int64_t len) {
    const int64_t blocks = (clipped(step, len) + kSplitBlockSlots - 1) / kSplitBlockSlots;
    return (blocks > 1 ? blocks : 1) + kSplitOverheadBlocks;
  });
  cuda::write_split_schedule({batch.before, rows}, step.split_rows, step.split, batch.split);
  __syncthreads();
  for (int64_t t = step.split_rows + threadIdx.x; t < step.split_indptr_rows; t += blockDim.x) {
    step.split.indptr[t + 1] = step.split.indptr[step.split_rows];
  }
}

__device__ void fill_sums(const StepParams& step, const Batch& batch, int part) {
  __shared__ int64_t shared[cuda::kWarpThreads + 1];
  if (part == kRows) {
    fill_rows(step, batch, fill_requests(step, batch, shared), shared);
    return;
  }
  const bool is_split = part == kSplit;
  if ((is_split ? step.split.schedule : step.paged.schedule) == nullptr) return;
  const int64_t rows = read_requests(step, batch, shared, [](auto...) {});
  if (is_split) {
    fill_split_schedule(step, batch, rows, shared);
  } else {
    fill_paged_schedule(step, batch, rows, shared);
  }
}

// One column of the page tables of a request.
__device__ void fill_page(const PageParams& pages, int64_t request, int64_t column) {
  const int64_t pool_row = pages.pool_row[request];
  const int64_t seq_len = pages.seq_len[request];
  const bool known = pool_row >= 0 && pool_row < pages.token_rows;
  constexpr int32_t kUnread = INT32_MIN;  // no page
  int32_t page = kUnread;
  for (int i = 0; i < pages.num_steps; ++i) {
    const PageParams::Step& step = pages.steps[i];
    const int64_t first_token = column * pages.page_size;
    if (first_token >= kv_length(seq_len, step.length_addend, step.kv_capacity)) continue;
    if (page == kUnread) {
      const int32_t* const from = pages.req_to_token + pool_row * pages.token_stride + first_token;
      const int32_t slot = known ? cuda::load_word(from, cuda::cache_policy_once()) : -1;
      page = slot < 0 ? -1 : slot / pages.page_size;
    }
    step.page_table[request * step.table_stride + column] = page;
  }
}

__global__ void __launch_bounds__(kThreads, 3)
    refresh(const __grid_constant__ RefreshParams params) {
  extern __shared__ int4 dynamic[];
  const auto num_steps = static_cast<uint32_t>(params.pages.num_steps);
  const uint32_t sums = num_steps * kNumParts;
  if (blockIdx.x < sums) {
    char* const scratch = params.work != nullptr ? params.work + blockIdx.x * params.sizes.bytes()
                                                 : reinterpret_cast<char*>(dynamic);
    // No division: the compiler has to see that all threads go the same way.
    int part = 0;
    uint32_t step = blockIdx.x;
    for (; step >= num_steps; step -= num_steps) ++part;
    fill_sums(params.steps[step], params.sizes.cut(scratch), part);
    return;
  }
  const uint32_t piece = blockIdx.x - sums;
  fill_page(params.pages, piece / params.pages.column_blocks,
            int64_t{piece % params.pages.column_blocks} * kThreads + threadIdx.x);
}

template <class View>
int32_t* i32(const View& view) {
  return static_cast<int32_t*>(view.data);
}

StepParams step_params(const MetadataProblem& problem, const MetadataTensors& tensors,
                       size_t index) {
  const MetadataFields& fields = tensors.steps[index];
  const auto extent = [&](const TensorView& field, int64_t less = 0) {
    return field.defined() ? written_rows(tensors, field.shape[0] - less) : 0;
  };
  StepParams step{};
  step.seq_len = static_cast<const int32_t*>(tensors.seq_len.data);
  step.requests = tensors.seq_len.shape[0];
  if (reads_ext_len(problem.mode)) {
    step.wanted_rows = static_cast<const int32_t*>(tensors.ext_len.data);
  }
  step.rows_per_request = is_decode(problem.mode) ? 1 : problem.rows_per_request;
  step.length_addend = problem.mode == ForwardMode::kTargetVerify ? problem.rows_per_request
                                                                  : tensors.kv_len_delta[index];
  step.kv_capacity = kv_capacity(problem, fields);
  step.row_capacity = row_capacity(problem, tensors, fields);
  step.topk = problem.topk;
  step.extend = is_extend(problem.mode);
  step.kv_len = i32(fields.kv_len);
  step.kv_indptr = i32(fields.kv_indptr);
  step.max_kv_len = i32(fields.max_kv_len);
  step.q_indptr = i32(fields.q_indptr);
  step.max_q_len = i32(fields.max_q_len);
  step.ext_len = i32(fields.ext_len);
  step.row_to_request = i32(fields.row_to_request);
  step.row_to_request_rows = extent(fields.row_to_request);
  step.row_len = i32(fields.row_len);
  step.row_len_rows = extent(fields.row_len);
  step.topk_length = i32(fields.topk_length);
  step.topk_length_rows = extent(fields.topk_length);
  step.topk_indptr = i32(fields.topk_indptr);
  step.topk_indptr_rows = extent(fields.topk_indptr, 1);
  if (step.extend) {
    step.k_start = i32(fields.k_start);
    step.k_start_rows = extent(fields.k_start);
    step.k_end = i32(fields.k_end);
    step.k_end_rows = extent(fields.k_end);
    if (has_row_offset(problem)) {
      step.row_offset = i32(fields.row_offset);
      step.row_offset_rows = extent(fields.row_offset);
    }
  } else {
    step.paged = {i32(fields.schedule), fields.schedule.stride[0], problem.workers};
  }
  if (problem.split_parts > 0) {
    step.split = {i32(fields.split_schedule), fields.split_schedule.stride[0],
                  i32(fields.split_indptr), problem.split_parts};
    step.split_rows = split_rows(tensors, fields);
    step.split_indptr_rows = extent(fields.split_indptr, 1);
  }
  return step;
}

// Of the steps that step_params() gave.
PageParams page_params(const MetadataProblem& problem, const MetadataTensors& tensors,
                       const StepParams (&steps)[kMaxRefreshSteps]) {
  PageParams pages{};
  pages.seq_len = static_cast<const int32_t*>(tensors.seq_len.data);
  pages.pool_row = static_cast<const int32_t*>(tensors.pool_row.data);
  pages.req_to_token = static_cast<const int32_t*>(tensors.req_to_token.data);
  pages.token_rows = tensors.req_to_token.shape[0];
  pages.token_stride = tensors.req_to_token.stride[0];
  pages.page_size = static_cast<int32_t>(problem.page_size);
  pages.num_steps = tensors.num_steps;
  int64_t columns = 0;
  for (int i = 0; i < tensors.num_steps; ++i) {
    const TensorView& table = tensors.steps[static_cast<size_t>(i)].page_table;
    pages.steps[i] = {steps[i].length_addend, steps[i].kv_capacity, i32(table), table.stride[0]};
    columns = std::max(columns, table.shape[1]);
  }
  pages.column_blocks = cuda::grid_blocks(columns, kThreads);
  return pages;
}

BatchSizes sizes_of(const MetadataProblem& problem) {
  BatchSizes sizes{problem.max_rows, problem.split_parts, problem.max_requests, 0};
  if (problem.split_parts == 0) return sizes;
  const int64_t row_blocks = (problem.topk + kSplitBlockSlots - 1) / kSplitBlockSlots;
  sizes.reached = problem.max_rows * (row_blocks + kSplitOverheadBlocks) + 1;
  if (sizes.reached > cuda::kMaxReached || sizes.bytes() > kMaxSharedBytes) sizes.reached = 0;
  return sizes;
}

}  // namespace

size_t metadata_refresh_cuda_workspace(const MetadataProblem& problem, const Device&) {
  const int64_t bytes = sizes_of(problem).bytes();
  return bytes <= kMaxSharedBytes ? 0 : static_cast<size_t>(bytes * kNumParts * kMaxRefreshSteps);
}

void metadata_refresh_cuda_portable(const MetadataProblem& problem, const Device& device,
                                    const MetadataTensors& tensors, Workspace workspace,
                                    Stream stream) {
  const cuda::DeviceScope scope(device.ordinal);
  RefreshParams params{};
  for (int i = 0; i < tensors.num_steps; ++i) {
    params.steps[i] = step_params(problem, tensors, static_cast<size_t>(i));
  }
  params.pages = page_params(problem, tensors, params.steps);
  params.sizes = sizes_of(problem);
  int64_t shared_bytes = params.sizes.bytes();
  if (shared_bytes > kMaxSharedBytes) {
    params.work = static_cast<char*>(workspace.data);
    shared_bytes = 0;
  }
  const int64_t blocks =
      tensors.num_steps * kNumParts + tensors.seq_len.shape[0] * params.pages.column_blocks;
  cuda::launch(
      "metadata_refresh", refresh,
      {dim3(static_cast<unsigned>(blocks)), dim3(kThreads), static_cast<size_t>(shared_bytes)},
      stream, params);
}

}  // namespace fovea::internal
