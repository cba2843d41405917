#pragma once

#include "fovea/msa_attend.h"
#include "fovea/numeric.h"
#include "src/core/implementation_list.h"
#include "src/msa/msa_checks.h"

/// The implementations of msa_attend.
namespace fovea::internal {

size_t msa_attend_ref_workspace(const MsaAttendProblem& problem, const Device& device);
void msa_attend_ref(const MsaAttendProblem& problem, const Device& device,
                    const MsaAttendTensors& tensors, Workspace workspace);

Refusal msa_attend_cpu_supports(const MsaAttendProblem& problem);
size_t msa_attend_cpu_workspace(const MsaAttendProblem& problem, const Device& device);
void msa_attend_cpu(const MsaAttendProblem& problem, const Device& device,
                    const MsaAttendTensors& tensors, Workspace workspace);

Refusal msa_attend_cuda_supports(const MsaAttendProblem& problem);
size_t msa_attend_cuda_workspace(const MsaAttendProblem& problem, const Device& device);
void msa_attend_cuda_portable(const MsaAttendProblem& problem, const Device& device,
                              const MsaAttendTensors& tensors, Workspace workspace, Stream stream);

Refusal msa_attend_cuda_sm90_supports(const MsaAttendProblem& problem);
Refusal msa_attend_cuda_sm90_preferred(const MsaAttendProblem& problem);
size_t msa_attend_cuda_sm90_workspace(const MsaAttendProblem& problem, const Device& device);
void msa_attend_cuda_sm90(const MsaAttendProblem& problem, const Device& device,
                          const MsaAttendTensors& tensors, Workspace workspace, Stream stream);

Refusal msa_attend_cuda_sm90_decode_supports(const MsaAttendProblem& problem);
Refusal msa_attend_cuda_sm90_decode_preferred(const MsaAttendProblem& problem);
size_t msa_attend_cuda_sm90_decode_workspace(const MsaAttendProblem& problem, const Device& device);
void msa_attend_cuda_sm90_decode(const MsaAttendProblem& problem, const Device& device,
                                 const MsaAttendTensors& tensors, Workspace workspace,
                                 Stream stream);

/// Channels that share a scale in kQ8Kv4.
inline constexpr int64_t kMsaKv4Group = 16;

/// A value of kQ8Kv4 before the global scale: e4m3(e2m1 * scale), saturating.
FOVEA_HOST_DEVICE inline float msa_kv4_value(uint8_t code, uint8_t scale) {
  return e4m3_to_float(e4m3_from_float(e2m1_to_float(code) * e4m3_to_float(scale)));
}

/// A pool in either form, as pages of heads of tokens. Strides count elements.
struct MsaPool {
  const void* data = nullptr;
  int64_t num_pages = 0;
  int64_t page_stride = 0, head_stride = 0, token_stride = 0;

  /// Elements before the row of a token.
  FOVEA_HOST_DEVICE int64_t offset(int64_t page, int64_t head, int64_t token) const {
    return page * page_stride + head * head_stride + token * token_stride;
  }
};

inline MsaPool msa_pool(const ConstTensorView& pool, int64_t block_size) {
  if (pool.rank == 4)
    return {pool.data, pool.shape[0], pool.stride[0], pool.stride[1], pool.stride[2]};
  return {pool.data, pool.shape[0] / block_size, block_size * pool.stride[0], pool.stride[1],
          pool.stride[0]};
}

/// A scale of the fp32 kinds: nothing, [1], [Hkv] or [rows, Hkv], where rows are query rows or
/// slots.
struct MsaScale {
  const float* data = nullptr;
  int64_t row_stride = 0, head_stride = 0;

  FOVEA_HOST_DEVICE bool per_row() const { return row_stride != 0; }
  FOVEA_HOST_DEVICE float at(int64_t row, int64_t head) const {
    return data != nullptr ? data[row * row_stride + head * head_stride] : 1.0f;
  }
};

inline MsaScale msa_scale(const ConstTensorView& scale) {
  if (!scale.defined()) return {};
  const auto* data = static_cast<const float*>(scale.data);
  if (scale.rank == 2) return {data, scale.stride[0], scale.shape[1] > 1 ? scale.stride[1] : 0};
  return {data, 0, scale.shape[0] > 1 ? scale.stride[0] : 0};
}

/// Everything that a run reads and writes; for every backend.
struct MsaAttendInputs {
  MsaPool k, v;
  MsaPool k_codes_scale, v_codes_scale;  ///< kQ8Kv4: the pools of scales
  MsaScale q_scale, k_scale, v_scale;    ///< kQ8Kv4: k_scale and v_scale are the global ones
  Accessor<const int32_t, 2> page_table;
  Accessor<const int32_t, 3> lists;  ///< [Hkv][T][K]
  Accessor<const float, 1> sink;
  Accessor<bf16_t, 3> out;
  Accessor<float, 2> lse;

  /// The page of block n of the row when the row sees a part of it; otherwise -1.
  FOVEA_HOST_DEVICE int64_t page_of(const MsaRow& row, int64_t n, int64_t block_size,
                                    bool causal) const {
    if (n < 0 || n >= page_table.shape[1]) return -1;
    if (msa_visible_tokens(row, n, block_size, causal) == 0) return -1;
    const int64_t page = page_table(row.request, n);
    return page >= 0 && page < k.num_pages ? page : -1;
  }
};

inline MsaAttendInputs msa_attend_inputs(const MsaAttendProblem& problem,
                                         const MsaAttendTensors& tensors) {
  const bool is_kv4 = problem.kv_mode == MsaKvMode::kQ8Kv4;
  MsaAttendInputs inputs;
  inputs.k = msa_pool(tensors.k_pool, problem.block_size);
  inputs.v = msa_pool(tensors.v_pool, problem.block_size);
  if (is_kv4) {
    inputs.k_codes_scale = msa_pool(tensors.k_scale, problem.block_size);
    inputs.v_codes_scale = msa_pool(tensors.v_scale, problem.block_size);
  }
  inputs.q_scale = msa_scale(tensors.q_scale);
  inputs.k_scale = msa_scale(is_kv4 ? tensors.k_global_scale : tensors.k_scale);
  inputs.v_scale = msa_scale(is_kv4 ? tensors.v_global_scale : tensors.v_scale);
  inputs.page_table = access<const int32_t, 2>(tensors.page_table);
  inputs.lists = access_blocks<const int32_t>(tensors.blocks, problem.blocks_layout);
  inputs.sink = access<const float, 1>(tensors.sink);
  inputs.out = access<bf16_t, 3>(tensors.out);
  inputs.lse = access<float, 2>(tensors.lse);
  return inputs;
}

}  // namespace fovea::internal
