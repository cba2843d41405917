#include <algorithm>

#include "src/batch/metadata_check_impl.h"
#include "src/core/cuda/launch.cuh"
#include "src/core/cuda/scan.cuh"
#include "src/core/workspace.h"

// Two launches. The first, one block, looks at the requests: lengths, rows and where the rows of
// each one end. The second looks at slots and indices; its last block to finish writes the report.
// Of each kind of fault the smallest (request, position) and the number are kept: a minimum and a
// sum of integers, the same in any order. Value and limit follow from the place.
namespace fovea::internal {
namespace {

constexpr int kRequestThreads = 1024;
constexpr int kThreads = 256;
constexpr int kRowsPerBlock = kThreads / cuda::kWarpThreads;  // of topk_indices
constexpr int kChunk = 4 * kThreads;                          // slots of a piece of work
constexpr int kFaults = static_cast<int>(MetadataFault::kIndexRange) + 1;
constexpr int kBlocksPerSm = 8;

using Word = unsigned long long;  // what 64-bit atomics take

// The faults of every kind; a kind without any has the largest place.
struct Tallies {
  Word place[kFaults];  // request << 32 | position
  Word count[kFaults];

  __device__ void clear(int fault) {
    place[fault] = ~Word{0};
    count[fault] = 0;
  }
  // Of a tally in shared memory, or of one that other blocks merge into.
  __device__ void add(MetadataFault fault, int64_t request, int64_t position) {
    merge(static_cast<int>(fault), static_cast<Word>(request) << 32 | static_cast<Word>(position),
          1);
  }
  __device__ void merge(int fault, Word at, Word number) {
    atomicMin(&place[fault], at);
    atomicAdd(&count[fault], number);
  }
};

struct CheckState {
  Tallies tallies;
  unsigned int blocks_done;
};

struct CheckParams {
  const int32_t* seq_len;
  const int32_t* pool_row;
  Accessor<const int32_t, 2> req_to_token;
  const int32_t* ext_len;  // null in modes that do not read it
  const int32_t* out_cache_loc;
  int64_t stores;
  Accessor<const int32_t, 2> topk_indices;
  int64_t requests;
  int64_t rows_per_request;
  bool one_token_for_all_rows;  // of a padded request
  int64_t delta;                // to what may not be negative
  int64_t verify_rows;          // and from there to L
  int64_t width;
  int64_t page_size;
  int64_t capacity;
  int64_t row_capacity;
  int32_t* error_word;
  CheckState* state;
  int64_t* row_end;  // [R], cumulative
  uint32_t chunks;   // of a row of req_to_token
  int64_t store_work, index_work;

  __device__ int64_t given_len(int64_t r) const { return int64_t{seq_len[r]} + delta; }
  __device__ int64_t kv_len(int64_t r) const { return given_len(r) + verify_rows; }
  __device__ int64_t used_len(int64_t r) const {
    const int64_t len = kv_len(r);
    return len < 0 ? 0 : len > width ? width : len;
  }
  __device__ int64_t num_rows(int64_t r) const {
    if (ext_len == nullptr) return rows_per_request;
    return ext_len[r] > 0 ? ext_len[r] : 0;
  }
  __device__ bool is_pool_row(int64_t row) const { return row >= 0 && row < req_to_token.shape[0]; }
  __device__ bool is_slot(int32_t slot) const { return slot >= 0 && slot < capacity; }
  __device__ bool is_padded(int64_t r) const { return pool_row[r] == kPaddedPoolRow; }
  __device__ bool has_keys_for_rows(int64_t r) const {
    const bool is_one_token =
        one_token_for_all_rows && is_padded(r) && given_len(r) == kPaddedSeqLen;
    return is_one_token || num_rows(r) <= kv_len(r);
  }
  // Slots of a padded request may repeat inside the dummy page.
  __device__ bool is_in_place(const int32_t* slots, int64_t row, int64_t position) const {
    const int64_t expected = expected_slot(slots, position);
    const int64_t slot = slots[position];
    const bool is_dummy = expected >= 0 && expected < page_size && slot >= 0 && slot < page_size;
    return slot == expected || (is_dummy && row == kPaddedPoolRow);
  }
  // Where the slot of a position belongs, by the first one of its page.
  __device__ int64_t expected_slot(const int32_t* slots, int64_t position) const {
    const auto size = static_cast<int32_t>(page_size);
    const auto at = static_cast<int32_t>(position);
    const int32_t first = at / size * size;
    return int64_t{slots[first] / size} * size + (at - first);
  }
};

__device__ void check_request(const CheckParams& params, int64_t r, int64_t row_end,
                              Tallies& tallies) {
  const int64_t len = params.kv_len(r), rows = params.num_rows(r);
  const auto add_if = [&](bool is_faulty, MetadataFault fault) {
    if (is_faulty) tallies.add(fault, r, 0);
  };
  add_if(params.given_len(r) < 0, MetadataFault::kNegativeLength);
  add_if(!params.has_keys_for_rows(r), MetadataFault::kRowsOverLength);
  add_if(len > params.width, MetadataFault::kLengthOverWidth);
  if (params.ext_len != nullptr) {
    add_if(params.ext_len[r] < 0, MetadataFault::kNegativeRows);
    add_if(rows > 0 && row_end > params.row_capacity, MetadataFault::kRowCount);
  }
  add_if(params.used_len(r) > 0 && !params.is_pool_row(params.pool_row[r]),
         MetadataFault::kPoolRow);
}

__global__ void __launch_bounds__(kRequestThreads)
    check_requests(const __grid_constant__ CheckParams params) {
  __shared__ int64_t sums[cuda::kWarpThreads + 1];
  __shared__ Tallies tallies;
  if (threadIdx.x < kFaults) tallies.clear(threadIdx.x);
  __syncthreads();
  cuda::block_scan(
      params.requests, sums, [&](int64_t r) { return params.num_rows(r); },
      [&](int64_t r, int64_t, int64_t row_end) {
        params.row_end[r] = row_end;
        check_request(params, r, row_end, tallies);
      });
  if (threadIdx.x < kFaults) {
    params.state->tallies.place[threadIdx.x] = tallies.place[threadIdx.x];
    params.state->tallies.count[threadIdx.x] = tallies.count[threadIdx.x];
  }
  if (threadIdx.x == 0) params.state->blocks_done = 0;
}

__device__ void check_slots(const CheckParams& params, int64_t r, int64_t first, Tallies& tallies) {
  const int64_t used = params.used_len(r);
  if (first >= used) return;
  const int64_t row = params.pool_row[r];
  if (!params.is_pool_row(row)) return;
  const int32_t* const slots = params.req_to_token.row(row);
  const int64_t end = used - first < kChunk ? used : first + kChunk;
  for (int64_t p = first + threadIdx.x; p < end; p += kThreads) {
    if (!params.is_slot(slots[p])) {
      tallies.add(MetadataFault::kSlotRange, r, p);
    } else if (!params.is_in_place(slots, row, p)) {
      tallies.add(MetadataFault::kSlotLayout, r, p);
    }
  }
}

__device__ void check_stores(const CheckParams& params, int64_t first, Tallies& tallies) {
  const int64_t end = params.stores - first < kChunk ? params.stores : first + kChunk;
  for (int64_t t = first + threadIdx.x; t < end; t += kThreads) {
    const int32_t slot = params.out_cache_loc[t];
    if (slot != -1 && !params.is_slot(slot)) tallies.add(MetadataFault::kStoreSlot, t, 0);
  }
}

// A row of topk_indices, by a warp.
__device__ void check_indices(const CheckParams& params, int64_t t, Tallies& tallies) {
  if (t >= params.topk_indices.shape[0]) return;
  const int64_t r =
      cuda::count_up_to([&](int64_t i) { return params.row_end[i]; }, params.requests, t);
  if (r == params.requests) return;
  const int64_t row_len = params.used_len(r) - params.row_end[r] + 1 + t;
  const int64_t used =
      row_len < params.topk_indices.shape[1] ? row_len : params.topk_indices.shape[1];
  const int32_t* const indices = params.topk_indices.row(t);
  for (int64_t c = threadIdx.x % cuda::kWarpThreads; c < used; c += cuda::kWarpThreads) {
    if (indices[c] != -1 && !params.is_slot(indices[c])) {
      tallies.add(MetadataFault::kIndexRange, t, c);
    }
  }
}

__device__ int32_t saturate(int64_t value) {
  return static_cast<int32_t>(value < INT32_MIN   ? INT32_MIN
                              : value > INT32_MAX ? INT32_MAX
                                                  : value);
}

__device__ void write_report(const CheckParams& params) {
  const volatile Tallies& tallies = params.state->tallies;
  int found = 1;
  while (found < kFaults && tallies.count[found] == 0) ++found;
  for (int i = 0; i < 8; ++i) params.error_word[i] = 0;
  if (found == kFaults) return;
  const Word place = tallies.place[found], count = tallies.count[found];
  const auto at = static_cast<int64_t>(place >> 32);
  const auto position = static_cast<int64_t>(place & 0xFFFFFFFF);
  int64_t value = 0, limit = 0;
  switch (static_cast<MetadataFault>(found)) {
    case MetadataFault::kNone:
      break;
    case MetadataFault::kNegativeLength:
      value = params.given_len(at);
      break;
    case MetadataFault::kRowsOverLength:
      value = params.num_rows(at);
      limit = params.kv_len(at);
      break;
    case MetadataFault::kLengthOverWidth:
      value = params.kv_len(at);
      limit = params.width;
      break;
    case MetadataFault::kNegativeRows:
      value = params.ext_len[at];
      break;
    case MetadataFault::kRowCount:
      value = params.row_end[at];
      limit = params.row_capacity;
      break;
    case MetadataFault::kPoolRow:
      value = params.pool_row[at];
      limit = params.req_to_token.shape[0];
      break;
    case MetadataFault::kSlotRange:
      value = params.req_to_token(params.pool_row[at], position);
      limit = params.capacity;
      break;
    case MetadataFault::kSlotLayout:
      value = params.req_to_token(params.pool_row[at], position);
      limit = params.expected_slot(params.req_to_token.row(params.pool_row[at]), position);
      break;
    case MetadataFault::kStoreSlot:
      value = params.out_cache_loc[at];
      limit = params.capacity;
      break;
    case MetadataFault::kIndexRange:
      value = params.topk_indices(at, position);
      limit = params.capacity;
      break;
  }
  params.error_word[0] = found;
  params.error_word[1] = saturate(at);
  params.error_word[2] = saturate(position);
  params.error_word[3] = saturate(value);
  params.error_word[4] = saturate(limit);
  params.error_word[5] = count < INT32_MAX ? static_cast<int32_t>(count) : INT32_MAX;
}

__global__ void __launch_bounds__(kThreads)
    check_contents(const __grid_constant__ CheckParams params) {
  __shared__ Tallies tallies;
  if (threadIdx.x < kFaults) tallies.clear(threadIdx.x);
  __syncthreads();
  // Chunk c of request r, stepping over the grid without 64-bit divisions.
  const uint32_t step = gridDim.x;
  uint32_t chunk = blockIdx.x % params.chunks;
  int64_t r = blockIdx.x / params.chunks;
  while (r < params.requests) {
    check_slots(params, r, int64_t{chunk} * kChunk, tallies);
    chunk += step % params.chunks;
    r += step / params.chunks;
    if (chunk >= params.chunks) {
      chunk -= params.chunks;
      ++r;
    }
  }
  for (int64_t i = blockIdx.x; i < params.store_work; i += step) {
    check_stores(params, i * kChunk, tallies);
  }
  for (int64_t i = blockIdx.x; i < params.index_work; i += step) {
    check_indices(params, i * kRowsPerBlock + threadIdx.x / cuda::kWarpThreads, tallies);
  }
  __syncthreads();
  if (threadIdx.x < kFaults && tallies.count[threadIdx.x] != 0) {
    params.state->tallies.merge(threadIdx.x, tallies.place[threadIdx.x],
                                tallies.count[threadIdx.x]);
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (atomicAdd(&params.state->blocks_done, 1u) + 1 != gridDim.x) return;
  __threadfence();
  write_report(params);
}

struct CheckMemory {
  CheckState* state;
  int64_t* row_end;

  CheckMemory(WorkspaceCutter& cutter, const MetadataCheckProblem& problem)
      : state(cutter.take<CheckState>(1)), row_end(cutter.take<int64_t>(problem.max_requests)) {}
};

int64_t pieces(int64_t count, int64_t size) { return (count + size - 1) / size; }

}  // namespace

size_t metadata_check_cuda_workspace(const MetadataCheckProblem& problem, const Device&) {
  WorkspaceCutter cutter({});
  CheckMemory(cutter, problem);
  return cutter.used_bytes();
}

void metadata_check_cuda_portable(const MetadataCheckProblem& problem, const Device& device,
                                  const MetadataCheckTensors& tensors, Workspace workspace,
                                  Stream stream) {
  const cuda::DeviceScope scope(device.ordinal);
  const CheckedBatch batch{problem, tensors};
  WorkspaceCutter cutter(workspace);
  const CheckMemory memory(cutter, problem);
  CheckParams params{};
  params.seq_len = static_cast<const int32_t*>(tensors.seq_len.data);
  params.pool_row = static_cast<const int32_t*>(tensors.pool_row.data);
  params.req_to_token = access<const int32_t, 2>(tensors.req_to_token);
  if (reads_ext_len(problem.mode)) {
    params.ext_len = static_cast<const int32_t*>(tensors.ext_len.data);
  }
  params.out_cache_loc = static_cast<const int32_t*>(tensors.out_cache_loc.data);
  params.stores = tensors.out_cache_loc.defined() ? tensors.out_cache_loc.shape[0] : 0;
  params.topk_indices = access<const int32_t, 2>(tensors.topk_indices);
  params.requests = batch.num_requests();
  params.one_token_for_all_rows = problem.mode == ForwardMode::kDraftExtendV2;
  params.rows_per_request = is_decode(problem.mode) ? 1 : problem.rows_per_request;
  params.delta = tensors.kv_len_delta;
  params.verify_rows = problem.mode == ForwardMode::kTargetVerify ? problem.rows_per_request : 0;
  params.width = problem.table_width;
  params.page_size = problem.page_size;
  params.capacity = problem.capacity;
  params.row_capacity = batch.row_capacity();
  params.error_word = static_cast<int32_t*>(tensors.error_word.data);
  params.state = memory.state;
  params.row_end = memory.row_end;
  params.chunks = static_cast<uint32_t>(pieces(problem.table_width, kChunk));
  params.store_work = pieces(params.stores, kChunk);
  const int64_t index_rows = tensors.topk_indices.defined() ? params.topk_indices.shape[0] : 0;
  params.index_work = pieces(index_rows, kRowsPerBlock);
  const int64_t work =
      std::max({int64_t{1}, params.requests * params.chunks, params.store_work, params.index_work});
  const int64_t most = int64_t{kBlocksPerSm} * cuda::device_facts(device.ordinal).num_sms;
  cuda::launch("metadata_check", check_requests, {dim3(1), dim3(kRequestThreads)}, stream, params);
  cuda::launch("metadata_check", check_contents,
               {dim3(static_cast<unsigned>(std::min(work, most))), dim3(kThreads)}, stream, params);
}

}  // namespace fovea::internal
