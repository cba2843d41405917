#include "fovea/v4_compress.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "src/compress/v4_compress_impl.h"
#include "src/core/check.h"
#include "src/core/implementation_list.h"

namespace fovea {
namespace {

constexpr char kOp[] = "v4_compress";

constexpr internal::Implementation<V4CompressProblem, V4CompressTensors> kImplementations[] = {
    {"cuda_portable", DeviceKind::kCuda, internal::cuda_available, nullptr, nullptr, nullptr,
     internal::v4_compress_cuda_portable},
    {"cpu", DeviceKind::kCpu, nullptr, nullptr, nullptr, internal::v4_compress_cpu},
    {"ref", DeviceKind::kCpu, nullptr, nullptr, nullptr, internal::v4_compress_ref},
};

const internal::OperatorRegistration kRegistration("compress", kOp, [] {
  return internal::list_implementations(kImplementations);
});

void check_rows(const V4CompressProblem& problem) {
  const RowFormat format = problem.row_format;
  if (format != RowFormat::kBf16 && format != RowFormat::kI132 && format != RowFormat::kV4) {
    internal::invalid(
        kOp, "row_format = " + std::string(to_string(format)) + ", expected v4, i132 or bf16");
  }
  internal::check_range(kOp, "head_dim", problem.head_dim, internal::kCompressRopeDim,
                        internal::kMaxCompressDim);
  if (problem.head_dim % 16 != 0) {
    internal::invalid(
        kOp, "head_dim = " + std::to_string(problem.head_dim) + ", expected a multiple of 16");
  }
  if (format == RowFormat::kI132 && problem.head_dim != internal::kI132Width) {
    internal::invalid(kOp, "head_dim = " + std::to_string(problem.head_dim) +
                               ", but rows of i132 have 128 channels; use bf16");
  }
  if (format == RowFormat::kV4 && problem.head_dim != internal::kV4Width) {
    internal::invalid(kOp, "head_dim = " + std::to_string(problem.head_dim) +
                               ", but rows of v4 have 512 channels; use bf16");
  }
  internal::check_range(kOp, "page_size", problem.page_size, 1, 256);
}

void check_problem(const V4CompressProblem& problem) {
  internal::check_range(kOp, "max_rows", problem.max_rows, 0, internal::kMaxInt32);
  internal::check_range(kOp, "max_requests", problem.max_requests, 0, internal::kMaxInt32);
  internal::check_range(kOp, "rows_per_request", problem.rows_per_request, 0, internal::kMaxInt32);
  if (problem.ratio != 4 && problem.ratio != 128) {
    internal::invalid(kOp, "ratio = " + std::to_string(problem.ratio) + ", expected 4 or 128");
  }
  check_rows(problem);
  if (!std::isfinite(problem.eps) || problem.eps < 0) {
    internal::invalid(kOp, "eps = " + std::to_string(problem.eps) + ", expected finite and >= 0");
  }
  if (problem.form == CompressorForm::kStored) return;
  if (problem.ratio != 128) {
    internal::invalid(kOp, "form = online with ratio = " + std::to_string(problem.ratio) +
                               ", whose groups overlap; use form = stored");
  }
  if (problem.rows_per_request > 0) {
    internal::invalid(kOp, "rows_per_request = " + std::to_string(problem.rows_per_request) +
                               " with form = online, which keeps no tokens to go back to; use "
                               "form = stored");
  }
}

void check_state(const V4CompressProblem& problem, const TensorView& state) {
  using internal::kAnyExtent;
  const int64_t channels = internal::groups_of_row(problem.ratio) * problem.head_dim;
  if (problem.form == CompressorForm::kOnline) {
    internal::check_tensor(kOp, "state", state, DType::kF32, {kAnyExtent, 3, problem.head_dim});
    return;
  }
  internal::check_tensor(kOp, "state", state, DType::kF32, {kAnyExtent, kAnyExtent, 2, channels});
  const int64_t span = internal::groups_of_row(problem.ratio) * problem.ratio;
  int64_t needed = span;
  if (problem.rows_per_request > 0) needed = std::max(needed, span - 2 + problem.rows_per_request);
  if (state.shape[1] < needed) {
    internal::invalid(kOp, "state.shape[1] = " + std::to_string(state.shape[1]) +
                               " tokens, expected at least " + std::to_string(needed) + " (ratio " +
                               std::to_string(problem.ratio) + ", rows_per_request " +
                               std::to_string(problem.rows_per_request) + ")");
  }
}

void check_tensors(const V4CompressProblem& problem, const V4CompressTensors& tensors) {
  using internal::check_tensor;
  using internal::kAnyExtent;
  const int64_t channels = internal::groups_of_row(problem.ratio) * problem.head_dim;
  check_tensor(kOp, "kv_gate", tensors.kv_gate, DType::kF32, {kAnyExtent, 2 * channels});
  const int64_t rows = tensors.kv_gate.shape[0];
  internal::check_range(kOp, "kv_gate.shape[0]", rows, 0, problem.max_rows);
  check_tensor(kOp, "ape", tensors.ape, DType::kF32, {problem.ratio, channels});
  check_tensor(kOp, "norm_weight", tensors.norm_weight, DType::kF32, {problem.head_dim});
  check_tensor(kOp, "positions", tensors.positions, DType::kI32, {rows});
  check_tensor(kOp, "row_to_request", tensors.row_to_request, DType::kI32, {rows});
  check_tensor(kOp, "cos_sin", tensors.cos_sin, DType::kF32,
               {kAnyExtent, internal::kCompressRopeDim});
  internal::check_range(kOp, "cos_sin.shape[0]", tensors.cos_sin.shape[0], rows > 0 ? 1 : 0,
                        std::numeric_limits<int64_t>::max());
  check_state(problem, tensors.state);
  check_tensor(kOp, "state_slot", tensors.state_slot, DType::kI32, {kAnyExtent});
  const int64_t requests = tensors.state_slot.shape[0];
  internal::check_range(kOp, "state_slot.shape[0]", requests, 0, problem.max_requests);
  check_tensor(kOp, "page_table", tensors.page_table, DType::kI32, {requests, kAnyExtent});
  check_tensor(kOp, "pool", tensors.pool, DType::kU8, {kAnyExtent, kAnyExtent});
  const int64_t needed =
      problem.page_size * internal::row_bytes(problem.row_format, problem.head_dim);
  if (tensors.pool.shape[1] < needed) {
    internal::invalid(kOp, "pool.shape[1] = " + std::to_string(tensors.pool.shape[1]) +
                               " page bytes, expected at least " + std::to_string(needed));
  }
  check_tensor(kOp, "emitted", tensors.emitted, DType::kI32, {rows});
}

}  // namespace

namespace internal {

CompressView::CompressView(const V4CompressProblem& problem, const V4CompressTensors& tensors)
    : ratio(problem.ratio),
      groups(groups_of_row(problem.ratio)),
      dim(problem.head_dim),
      ring(problem.form == CompressorForm::kStored ? tensors.state.shape[1] : 0),
      num_rows(tensors.kv_gate.shape[0]),
      kv_gate(access<const float, 2>(tensors.kv_gate)),
      ape(access<const float, 2>(tensors.ape)),
      positions(access<const int32_t, 1>(tensors.positions)),
      row_to_request(access<const int32_t, 1>(tensors.row_to_request)),
      cos_sin(access<const float, 2>(tensors.cos_sin)),
      state_slot(access<const int32_t, 1>(tensors.state_slot)),
      page_table(access<const int32_t, 2>(tensors.page_table)),
      pool(paged_rows<uint8_t>(tensors.pool, problem.page_size)),
      emitted(access<int32_t, 1>(tensors.emitted)) {
  if (ring > 0)
    stored = access<float, 4>(tensors.state);
  else
    online = access<float, 3>(tensors.state);
}

}  // namespace internal

V4Compress V4Compress::plan(const V4CompressProblem& problem, const Device& device,
                            const Options& options) {
  check_problem(problem);
  return V4Compress(
      internal::make_plan(kOp, kImplementations, problem, device, options, check_tensors));
}

}  // namespace fovea
