#include "fovea/row_codec.h"

#include <string>

#include "src/cache/pack_rows_impl.h"
#include "src/cache/row_codec.h"
#include "src/core/check.h"
#include "src/core/implementation_list.h"
#include "src/core/row_layout.h"

namespace fovea {
namespace {

constexpr char kOp[] = "pack_rows";

constexpr internal::Implementation<RowCodecProblem, PackRowsTensors> kImplementations[] = {
    {"cuda_portable", DeviceKind::kCuda, internal::cuda_available, nullptr, nullptr, nullptr,
     internal::pack_rows_cuda_portable},
    {"cpu", DeviceKind::kCpu, nullptr, nullptr, nullptr, internal::pack_rows_cpu},
    {"ref", DeviceKind::kCpu, nullptr, nullptr, nullptr, internal::pack_rows_ref},
};

const internal::OperatorRegistration kRegistration("cache", kOp, [] {
  return internal::list_implementations(kImplementations);
});

// Whether the rows come in two parts, latent and rope.
bool has_rope(const RowCodecProblem& problem, const PackRowsTensors& tensors) {
  if (!tensors.rope.defined()) return false;
  if (problem.row_format == RowFormat::kI132 || problem.width != internal::kV32Width) {
    internal::invalid(kOp, "rope = " + to_string(tensors.rope) +
                               " with row_format = " + std::string(to_string(problem.row_format)) +
                               ", width = " + std::to_string(problem.width) +
                               ", expected none: only rows of 576 channels in bf16, v32 or f576 "
                               "have a rope part; pass whole rows as src");
  }
  return true;
}

void check_tensors(const RowCodecProblem& problem, const PackRowsTensors& tensors) {
  const int64_t rope_dim = has_rope(problem, tensors) ? internal::kV32RopeDim : 0;
  internal::check_codec_pool(kOp, problem, tensors.pool);
  internal::check_codec_rows(kOp, problem, tensors.slots, "src", tensors.src,
                             problem.width - rope_dim);
  internal::check_optional(kOp, "rope", tensors.rope, DType::kBf16,
                           {tensors.slots.shape[0], rope_dim});
  const int64_t page_elements =
      tensors.pool.dtype == DType::kBf16
          ? problem.width
          : problem.page_size * internal::row_bytes(problem.row_format, problem.width);
  internal::check_no_overlap(kOp, "pool", tensors.pool, page_elements);
  internal::check_codec_scales(kOp, problem, tensors.pool, tensors.inv_scale);
  if (tensors.inv_scale.defined())
    internal::check_no_overlap(kOp, "inv_scale", tensors.inv_scale, 1);
}

}  // namespace

PackRows PackRows::plan(const RowCodecProblem& problem, const Device& device,
                        const Options& options) {
  internal::check_codec_problem(kOp, problem);
  return PackRows(
      internal::make_plan(kOp, kImplementations, problem, device, options, check_tensors));
}

}  // namespace fovea
