#include "fovea/row_codec.h"
#include "src/cache/pack_rows_impl.h"
#include "src/cache/row_codec.h"
#include "src/core/implementation_list.h"
#include "src/core/row_layout.h"

namespace fovea {
namespace {

constexpr char kOp[] = "pack_rows";

constexpr internal::Implementation<RowCodecProblem, PackRowsTensors> kImplementations[] = {
    {"cpu", DeviceKind::kCpu, nullptr, nullptr, nullptr, internal::pack_rows_cpu},
    {"ref", DeviceKind::kCpu, nullptr, nullptr, nullptr, internal::pack_rows_ref},
};

const internal::OperatorRegistration kRegistration("cache", kOp, [] {
  return internal::list_implementations(kImplementations);
});

void check_tensors(const RowCodecProblem& problem, const PackRowsTensors& tensors) {
  internal::check_codec_pool(kOp, problem, tensors.pool);
  internal::check_codec_rows(kOp, problem, tensors.slots, "src", tensors.src);
  const int64_t page_elements =
      tensors.pool.dtype == DType::kBf16
          ? problem.width
          : problem.page_size * internal::row_bytes(problem.row_format, problem.width);
  internal::check_no_overlap(kOp, "pool", tensors.pool, page_elements);
}

}  // namespace

PackRows PackRows::plan(const RowCodecProblem& problem, const Device& device,
                        const Options& options) {
  internal::check_codec_problem(kOp, problem);
  return PackRows(
      internal::make_plan(kOp, kImplementations, problem, device, options, check_tensors));
}

}  // namespace fovea
