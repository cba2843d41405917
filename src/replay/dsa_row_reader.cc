#include "src/replay/dsa_row_reader.h"

#include "fovea/sparse_mla.h"
#include "src/core/access.h"
#include "src/core/parallel.h"
#include "src/replay/digest.h"

namespace fovea::internal {

DsaRowReader::DsaRowReader(int64_t num_pages, int64_t page_size, int num_workers)
    : page_size_(page_size), maps_(static_cast<size_t>(num_workers)) {
  for (PageMap& map : maps_) map.index_of_page.assign(static_cast<size_t>(num_pages + 1), -1);
}

void DsaRowReader::load(const DsaLayerRows& layer, const StepEntry& entry, PageMap* map) const {
  for (const int32_t page : map->loaded) map->index_of_page[static_cast<size_t>(page)] = -1;
  map->loaded.clear();
  const auto table = access<const int32_t, 2>(layer.req_to_token);
  for (int64_t begin = 0; begin < entry.end; begin += page_size_) {
    const int32_t page = table(entry.pool_row, begin) / static_cast<int32_t>(page_size_);
    map->index_of_page[static_cast<size_t>(page)] = static_cast<int32_t>(begin / page_size_);
    map->loaded.push_back(page);
  }
  map->request = entry.request;
}

void DsaRowReader::read_positions(const DsaLayerRows& layer, int64_t row, PageMap* map,
                                  std::vector<int32_t>* positions) const {
  const auto indices = access<const int32_t, 2>(layer.indices);
  const auto page_size = static_cast<int32_t>(page_size_);
  int64_t count = indices.shape[1];
  const int32_t* const slots = indices.row(row);
  while (count > 0 && slots[count - 1] < 0) --count;
  positions->resize(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    const int32_t page = slots[i] < 0 ? 0 : slots[i] / page_size;
    const int32_t index = page < static_cast<int32_t>(map->index_of_page.size())
                              ? map->index_of_page[static_cast<size_t>(page)]
                              : -1;
    (*positions)[static_cast<size_t>(i)] =
        index < 0 ? -1 : index * page_size + slots[i] % page_size;
  }
}

Digest DsaRowReader::digest(const DsaLayerRows& layer, const RowFilter& filter,
                            const Workload& workload) {
  const auto out = access<const bf16_t, 3>(layer.out);
  const auto row_elements = static_cast<size_t>(out.shape[1] * kLatentDim);
  std::vector<Digest> sums(maps_.size());
  for (PageMap& map : maps_) map.request = -1;  // pages change from step to step
  ParallelFor(
      static_cast<int64_t>(layer.rows.size()), 16, [&](int64_t begin, int64_t end, int worker) {
        PageMap& map = maps_[static_cast<size_t>(worker)];
        std::vector<int32_t> positions;
        for (int64_t t = begin; t < end; ++t) {
          const StepRow& row = layer.rows[static_cast<size_t>(t)];
          const StepEntry& entry = layer.batch->entries[static_cast<size_t>(row.entry)];
          if (!filter.enters_digest(entry, row.position)) continue;
          if (map.request != entry.request) load(layer, entry, &map);
          read_positions(layer, t, &map, &positions);
          const DigestRow name{workload.request(entry.request).trace_row, row.position,
                               layer.layer};
          sums[static_cast<size_t>(worker)] +=
              {digest_selection(name, positions),
               digest_output(name, std::span<const bf16_t>(out.row(t, 0), row_elements)), 1};
        }
      });
  Digest total;
  for (const Digest& sum : sums) total += sum;
  return total;
}

void DsaRowReader::take_samples(const DsaLayerRows& layer, const RowFilter& filter,
                                std::vector<DsaSample>* samples) {
  const auto out = access<const bf16_t, 3>(layer.out);
  const auto lse = access<const float, 2>(layer.lse);
  PageMap& map = maps_.front();
  for (size_t t = 0; t < layer.rows.size(); ++t) {
    const StepRow& row = layer.rows[t];
    const StepEntry& entry = layer.batch->entries[static_cast<size_t>(row.entry)];
    const CheckRow* const wanted = filter.sampled(entry, row.position, layer.layer_index);
    if (wanted == nullptr) continue;
    const auto index = static_cast<int64_t>(t);
    DsaSample sample;
    sample.row = *wanted;
    load(layer, entry, &map);
    read_positions(layer, index, &map, &sample.positions);
    sample.output.assign(out.row(index, 0), out.row(index, 0) + out.shape[1] * kLatentDim);
    sample.lse.assign(lse.row(index), lse.row(index) + lse.shape[1]);
    samples->push_back(std::move(sample));
  }
}

}  // namespace fovea::internal
