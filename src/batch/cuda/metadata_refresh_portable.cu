#include <algorithm>

#include "src/batch/cuda/schedules.cuh"
#include "src/batch/metadata_refresh_impl.h"
#include "src/batch/split_schedule_impl.h"
#include "src/core/cuda/launch.cuh"
#include "src/core/workspace.h"

// One launch. The first block of each step computes all that needs the whole batch (sums over
// requests and over rows, both schedules); the other blocks fill page tables, which depend on one
// request each, meanwhile. Nothing in the launch depends on a length.
namespace fovea::internal {
namespace {

using cuda::block_max;
using cuda::block_scan;
using cuda::count_up_to;

constexpr int kThreads = cuda::kScheduleThreads;
constexpr int64_t kColumnsPerBlock = 4 * kThreads;  // of a page table

struct StepParams {
  // Inputs, shared by the steps.
  const int32_t* seq_len;
  const int32_t* pool_row;
  const int32_t* req_to_token;
  const int32_t* wanted_rows;  // ext_len, or null: rows_per_request
  int64_t token_rows;
  int64_t token_stride;
  int64_t requests;
  int64_t rows_per_request;
  int64_t length_addend;
  int64_t kv_capacity;
  int64_t row_capacity;
  int64_t topk;
  int64_t page_size;
  bool extend;
  // Outputs.
  int32_t *kv_len, *kv_indptr, *max_kv_len, *q_indptr, *max_q_len, *ext_len;
  int32_t* page_table;
  int64_t table_stride;
  int32_t *row_to_request, *row_len, *topk_length, *topk_indptr, *k_start, *k_end, *row_offset;
  int64_t row_to_request_rows, row_len_rows, topk_length_rows, topk_indptr_rows, k_start_rows,
      k_end_rows, row_offset_rows;  // entries written
  cuda::PagedScheduleOut paged;     // schedule null: none
  cuda::SplitScheduleOut split;
  int64_t split_rows, split_indptr_rows;  // cut, and written
  int64_t* work;                          // [work_rows + 1]
};

struct RefreshParams {
  StepParams steps[kMaxRefreshSteps];
  int num_steps;
  int64_t column_blocks;  // per request
};

__device__ int32_t saturate(int64_t value) {
  return static_cast<int32_t>(value < INT32_MAX ? value : INT32_MAX);
}

__device__ int32_t kv_length(const StepParams& step, int64_t request) {
  const int64_t len = step.seq_len[request] + step.length_addend;
  return static_cast<int32_t>(len < 0 ? 0 : len > step.kv_capacity ? step.kv_capacity : len);
}

__device__ int64_t rows_wanted(const StepParams& step, int64_t request) {
  if (step.wanted_rows == nullptr) return step.rows_per_request;
  return step.wanted_rows[request] > 0 ? step.wanted_rows[request] : 0;
}

// kv_len, ext_len, their sums and maxima.
__device__ void fill_requests(const StepParams& step, int64_t* shared) {
  int64_t longest = 0, most_rows = 0;
  const auto cut = [&](int64_t rows) {
    return rows < step.row_capacity ? rows : step.row_capacity;
  };
  if (threadIdx.x == 0) step.kv_indptr[0] = step.q_indptr[0] = 0;
  block_scan<int64_t>(
      step.requests, shared, [&](int64_t r) { return int64_t{kv_length(step, r)}; },
      [&](int64_t r, int64_t before, int64_t upto) {
        step.kv_len[r] = static_cast<int32_t>(upto - before);
        step.kv_indptr[r + 1] = saturate(upto);
        longest = longest > upto - before ? longest : upto - before;
      });
  block_scan<int64_t>(
      step.requests, shared, [&](int64_t r) { return rows_wanted(step, r); },
      [&](int64_t r, int64_t before, int64_t upto) {
        const int64_t live = cut(upto) - cut(before);
        step.ext_len[r] = static_cast<int32_t>(live);
        step.q_indptr[r + 1] = static_cast<int32_t>(cut(upto));
        most_rows = most_rows > live ? most_rows : live;
      });
  longest = block_max(longest, shared);
  most_rows = block_max(most_rows, shared);
  if (threadIdx.x == 0) {
    *step.max_kv_len = static_cast<int32_t>(longest);
    *step.max_q_len = static_cast<int32_t>(step.requests == 0 && step.extend ? 1 : most_rows);
  }
  __syncthreads();
}

struct Row {
  int64_t request;  // -1: padding
  int64_t len;
};

__device__ Row row_at(const StepParams& step, int64_t t, int64_t rows) {
  if (t >= rows) return {-1, 0};
  const auto row = static_cast<int32_t>(t);
  const int64_t r =
      count_up_to([&](int64_t i) { return step.q_indptr[i]; }, step.requests + 1, row) - 1;
  const int64_t first_len = step.kv_len[r] - rows_wanted(step, r) + 1;
  return {r, first_len + (t - step.q_indptr[r])};
}

__device__ int64_t clipped(const StepParams& step, int64_t len) {
  return len < 0 ? 0 : len > step.topk ? step.topk : len;
}

__device__ void fill_rows(const StepParams& step, int64_t rows, int64_t* shared) {
  int64_t most = step.row_to_request_rows;
  for (const int64_t extent : {step.row_len_rows, step.topk_length_rows, step.topk_indptr_rows,
                               step.k_start_rows, step.k_end_rows, step.row_offset_rows}) {
    most = extent > most ? extent : most;
  }
  for (int64_t t = threadIdx.x; t < most; t += blockDim.x) {
    const Row row = row_at(step, t, rows);
    const int64_t start = row.request < 0 ? 0 : step.kv_indptr[row.request];
    if (t < step.row_to_request_rows) step.row_to_request[t] = static_cast<int32_t>(row.request);
    if (t < step.row_len_rows) step.row_len[t] = static_cast<int32_t>(row.len);
    if (t < step.topk_length_rows) {
      step.topk_length[t] = static_cast<int32_t>(clipped(step, row.len));
    }
    if (t < step.k_start_rows) step.k_start[t] = static_cast<int32_t>(start);
    if (t < step.k_end_rows) step.k_end[t] = saturate(start + row.len);
    if (t < step.row_offset_rows) step.row_offset[t] = static_cast<int32_t>(start);
  }
  if (threadIdx.x == 0) step.topk_indptr[0] = 0;
  block_scan<int64_t>(
      step.topk_indptr_rows, shared,
      [&](int64_t t) { return clipped(step, row_at(step, t, rows).len); },
      [&](int64_t t, int64_t, int64_t upto) { step.topk_indptr[t + 1] = saturate(upto); });
}

__device__ void fill_schedules(const StepParams& step, int64_t rows, int64_t* shared) {
  if (step.paged.schedule != nullptr) {
    if (threadIdx.x == 0) step.work[0] = 0;
    block_scan<int64_t>(
        rows, shared,
        [&](int64_t t) {
          const int64_t len = row_at(step, t, rows).len;
          return len <= 0 ? 0 : (len + kScheduleTokens - 1) / kScheduleTokens;
        },
        [&](int64_t t, int64_t, int64_t upto) { step.work[t + 1] = upto; });
    cuda::write_paged_schedule(step.work, rows, step.paged);
    __syncthreads();
  }
  if (step.split.schedule != nullptr) {
    if (threadIdx.x == 0) step.work[0] = 0;
    block_scan<int64_t>(
        rows, shared,
        [&](int64_t t) {
          const int64_t len = clipped(step, row_at(step, t, rows).len);
          const int64_t blocks = (len + kSplitBlockSlots - 1) / kSplitBlockSlots;
          return (blocks > 1 ? blocks : 1) + kSplitOverheadBlocks;
        },
        [&](int64_t t, int64_t, int64_t upto) { step.work[t + 1] = upto; });
    cuda::write_split_schedule({step.work, rows}, step.split_rows, step.split);
    __syncthreads();
    for (int64_t t = step.split_rows + threadIdx.x; t < step.split_indptr_rows; t += blockDim.x) {
      step.split.indptr[t + 1] = step.split.indptr[step.split_rows];
    }
  }
}

__device__ void fill_pages(const StepParams& step, int64_t request, int64_t first_column) {
  const int64_t len = kv_length(step, request);
  const int64_t pages = (len + step.page_size - 1) / step.page_size;
  const int64_t pool_row = step.pool_row[request];
  const bool known = pool_row >= 0 && pool_row < step.token_rows;
  const int32_t* const from = step.req_to_token + (known ? pool_row * step.token_stride : 0);
  int32_t* const to = step.page_table + request * step.table_stride;
  const int64_t end =
      pages < first_column + kColumnsPerBlock ? pages : first_column + kColumnsPerBlock;
  for (int64_t j = first_column + threadIdx.x; j < end; j += blockDim.x) {
    const int32_t slot = known ? from[j * step.page_size] : -1;
    to[j] = slot < 0 ? -1 : slot / static_cast<int32_t>(step.page_size);
  }
}

__global__ void __launch_bounds__(kThreads) refresh(const __grid_constant__ RefreshParams params) {
  __shared__ int64_t shared[cuda::kWarpThreads + 1];
  if (static_cast<int>(blockIdx.x) < params.num_steps) {
    const StepParams& step = params.steps[blockIdx.x];
    fill_requests(step, shared);
    const int64_t rows = step.q_indptr[step.requests];
    fill_rows(step, rows, shared);
    fill_schedules(step, rows, shared);
    return;
  }
  const int64_t block = blockIdx.x - params.num_steps;
  const int64_t per_step = params.steps[0].requests * params.column_blocks;
  const StepParams& step = params.steps[block / per_step];
  const int64_t piece = block % per_step;
  fill_pages(step, piece / params.column_blocks, piece % params.column_blocks * kColumnsPerBlock);
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
  step.pool_row = static_cast<const int32_t*>(tensors.pool_row.data);
  step.req_to_token = static_cast<const int32_t*>(tensors.req_to_token.data);
  step.token_rows = tensors.req_to_token.shape[0];
  step.token_stride = tensors.req_to_token.stride[0];
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
  step.page_size = problem.page_size;
  step.extend = is_extend(problem.mode);
  step.kv_len = i32(fields.kv_len);
  step.kv_indptr = i32(fields.kv_indptr);
  step.max_kv_len = i32(fields.max_kv_len);
  step.q_indptr = i32(fields.q_indptr);
  step.max_q_len = i32(fields.max_q_len);
  step.ext_len = i32(fields.ext_len);
  step.page_table = i32(fields.page_table);
  step.table_stride = fields.page_table.stride[0];
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

}  // namespace

size_t metadata_refresh_cuda_workspace(const MetadataProblem& problem, const Device&) {
  WorkspaceCutter cutter({});
  for (int step = 0; step < kMaxRefreshSteps; ++step) cutter.take<int64_t>(problem.max_rows + 1);
  return cutter.used_bytes();
}

void metadata_refresh_cuda_portable(const MetadataProblem& problem, const Device& device,
                                    const MetadataTensors& tensors, Workspace workspace,
                                    Stream stream) {
  const cuda::DeviceScope scope(device.ordinal);
  WorkspaceCutter cutter(workspace);
  RefreshParams params{};
  params.num_steps = tensors.num_steps;
  int64_t columns = 0;
  for (int i = 0; i < tensors.num_steps; ++i) {
    const auto step = static_cast<size_t>(i);
    params.steps[step] = step_params(problem, tensors, step);
    params.steps[step].work = cutter.take<int64_t>(problem.max_rows + 1);
    columns = std::max(columns, tensors.steps[step].page_table.shape[1]);
  }
  params.column_blocks = (columns + kColumnsPerBlock - 1) / kColumnsPerBlock;
  const int64_t page_blocks = params.num_steps * tensors.seq_len.shape[0] * params.column_blocks;
  cuda::launch("metadata_refresh", refresh,
               {dim3(static_cast<unsigned>(params.num_steps + page_blocks)), dim3(kThreads)},
               stream, params);
}

}  // namespace fovea::internal
