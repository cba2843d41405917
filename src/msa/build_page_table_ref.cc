#include "src/msa/build_page_table_impl.h"

namespace fovea::internal {

void build_page_table_ref(const BuildPageTableProblem& problem, const Device&,
                          const BuildPageTableTensors& tensors, Workspace) {
  const PageTableSource source = page_table_source(problem, tensors);
  const auto table = access<int32_t, 2>(tensors.page_table);
  const auto packed = access<int32_t, 1>(tensors.kv_indices);
  const auto indptr = access<int32_t, 1>(tensors.kv_page_indptr);
  int64_t before = 0;
  for (int64_t r = 0; r < table.shape[0]; ++r) {
    if (indptr) indptr(r) = static_cast<int32_t>(before);
    for (int64_t p = 0; p < table.shape[1]; ++p) {
      const bool exists = p < source.page_count(r);
      table(r, p) = exists ? source.page(r, p) : 0;
      if (exists && packed) packed(before++) = table(r, p);
    }
  }
  if (indptr) indptr(table.shape[0]) = static_cast<int32_t>(before);
  for (int64_t i = before; i < packed.shape[0]; ++i) packed(i) = 0;
}

}  // namespace fovea::internal
