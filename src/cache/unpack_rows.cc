#include "fovea/row_codec.h"
#include "src/cache/row_codec.h"
#include "src/cache/unpack_rows_impl.h"
#include "src/core/implementation_list.h"

namespace fovea {
namespace {

constexpr char kOp[] = "unpack_rows";

constexpr internal::Implementation<RowCodecProblem, UnpackRowsTensors> kImplementations[] = {
    {"cuda_portable", DeviceKind::kCuda, internal::cuda_available, nullptr, nullptr, nullptr,
     internal::unpack_rows_cuda_portable},
    {"cpu", DeviceKind::kCpu, nullptr, nullptr, nullptr, internal::unpack_rows_cpu},
    {"ref", DeviceKind::kCpu, nullptr, nullptr, nullptr, internal::unpack_rows_ref},
};

const internal::OperatorRegistration kRegistration("cache", kOp, [] {
  return internal::list_implementations(kImplementations);
});

void check_tensors(const RowCodecProblem& problem, const UnpackRowsTensors& tensors) {
  internal::check_codec_pool(kOp, problem, tensors.pool);
  internal::check_codec_scales(kOp, problem, tensors.pool, tensors.inv_scale);
  internal::check_codec_rows(kOp, problem, tensors.slots, "out", tensors.out, problem.width);
  internal::check_no_overlap(kOp, "out", tensors.out, problem.width);
}

}  // namespace

UnpackRows UnpackRows::plan(const RowCodecProblem& problem, const Device& device,
                            const Options& options) {
  internal::check_codec_problem(kOp, problem);
  return UnpackRows(
      internal::make_plan(kOp, kImplementations, problem, device, options, check_tensors));
}

}  // namespace fovea
