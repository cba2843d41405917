#include <algorithm>

#include "src/core/cuda/launch.cuh"
#include "src/index/cuda/index_logits_sm90/kernel.cuh"

namespace fovea::internal {
namespace {

using namespace index_sm90;

template <bool kPaged, bool kWide, class Shape>
void launch_score(Params params, int64_t group_rows, int64_t width, const Device& device,
                  Stream stream) {
  params.group_rows = static_cast<int32_t>(group_rows);
  params.num_groups = (params.q_fp8.shape[0] + group_rows - 1) / group_rows;
  // No more blocks than the bounds allow tiles.
  const int64_t blocks = int64_t{Shape::kBlocksPerSm} * cuda::device_facts(device.ordinal).num_sms;
  const int64_t tiles_each = (width + kKeys - 1) / kKeys;
  params.num_blocks =
      params.num_groups >= blocks ? blocks : std::min(blocks, params.num_groups * tiles_each);
  params.share = 1 / static_cast<double>(params.num_blocks);
  cuda::launch("index_logits", score<kPaged, kWide, Shape>,
               {dim3(static_cast<unsigned>(params.num_blocks)), dim3(Shape::kThreads),
                sizeof(SharedMemory<Shape>)},
               stream, params);
}

}  // namespace

void index_logits_cuda_sm90(const IndexLogitsProblem& problem, const Device& device,
                            const IndexLogitsTensors& tensors, Workspace, Stream stream) {
  const cuda::DeviceScope scope(device.ordinal);
  Params params(problem, tensors);
  const bool paged = problem.layout == IndexLayout::kPaged;
  int64_t width = params.logits.shape[1];
  if (!paged) width = std::min(width, params.k_fp8.shape[0]);
  const int64_t rows = params.q_fp8.shape[0];
  if (rows == 0 || width == 0) return;
  // The number of rows of a block, and with it the kernel, changes no bit.
  const bool wide = problem.head_dim == kDim && index_rows::address_unit(problem, params) == 16 &&
                    (paged ? params.page_shift >= 4 && params.pages.num_pages > 0 &&
                                 params.pages.page_stride_bytes <= UINT32_MAX
                           : params.k_fp8.stride[0] == kDim);
  if (!paged) {
    if (wide) return launch_score<false, true, Config<4, 2>>(params, 8, width, device, stream);
    return launch_score<false, false, Config<1, 1>>(params, 1, width, device, stream);
  }
  if (!wide) return launch_score<true, false, Config<1, 1>>(params, 1, width, device, stream);
  const int64_t each = std::min<int64_t>(index_rows::rows_per_request(params), 8);
  if (each == 1) return launch_score<true, true, Config<1, 1>>(params, 1, width, device, stream);
  if (each <= 4) {
    const IndexPages<const uint8_t>& pages = params.pages;
    params.codes_of_pages = cuda::make_panel_map(
        "index_logits", pages.data, pages.page_size, pages.num_pages, pages.page_stride_bytes,
        static_cast<int>(std::min<int64_t>(pages.page_size, kKeys)));
  }
  if (each == 2) return launch_score<true, true, Config<2, 1>>(params, 2, width, device, stream);
  if (each <= 4) return launch_score<true, true, Config<4, 1>>(params, each, width, device, stream);
  return launch_score<true, true, Config<4, 2>>(params, each, width, device, stream);
}

}  // namespace fovea::internal
