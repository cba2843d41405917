#include "src/serving/dsa_profile.h"

#include <algorithm>
#include <bit>

#include "src/core/access.h"
#include "src/serving/dsa_shapes.h"

namespace fovea::internal {
namespace {

double as_double(int64_t value) { return static_cast<double>(value); }

// Calls fn(request, first row, end row, kv length).
template <class Fn>
void for_each_request(const MetadataFields& fields, Fn fn) {
  const auto q_indptr = access<const int32_t, 1>(fields.q_indptr);
  const auto kv_len = access<const int32_t, 1>(fields.kv_len);
  for (int64_t r = 0; r < kv_len.shape[0]; ++r) {
    fn(int64_t{q_indptr(r)}, int64_t{q_indptr(r + 1)}, int64_t{kv_len(r)});
  }
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

int64_t latent_row_bytes(const DsaConfig& config) {
  return page_bytes(config.row_format, 1, kLatentWidth);
}

// Each needed page entry is read once and written once; the rest is the arrays themselves.
OperatorWork metadata_work(const DsaConfig& config, const MetadataFields& fields) {
  int64_t entries = 5 * fields.kv_len.shape[0] + 6 * fields.topk_length.shape[0];
  for_each_request(fields, [&](int64_t, int64_t, int64_t len) {
    entries += 2 * ceil_div(len, config.page_size);
  });
  return {0, 4 * as_double(entries)};
}

OperatorWork pack_rows_work(const DsaConfig& config, int64_t rows) {
  return {0, as_double(rows * (2 * kLatentWidth + latent_row_bytes(config)))};
}

OperatorWork index_quantize_work(const DsaConfig& config, int64_t rows, bool with_queries,
                                 bool with_keys) {
  const int64_t vectors = (with_queries ? config.index_heads : 0) + (with_keys ? 1 : 0);
  // In: bf16; out: codes and one fp32 scale. A query head also reads its gate and writes its
  // weight.
  int64_t bytes = vectors * (3 * config.index_dim + 4);
  if (with_queries) bytes += 8 * config.index_heads;
  // The butterflies of the Hadamard rotation are the only product of note.
  const auto stages =
      config.hadamard ? std::bit_width(static_cast<uint64_t>(config.index_dim)) - 1 : 0;
  return {as_double(rows * vectors * config.index_dim * stages), as_double(rows * bytes)};
}

OperatorWork index_store_work(const DsaConfig& config, int64_t rows) {
  return {0, as_double(rows * 2 * (config.index_dim + 4))};
}

// A row that fits topk selects everything and is not scored. 2 Hi Di per (row, key) and one relu
// FMA per head; each page of a request that has a scored row once; q and weights of a scored row;
// logits written, then read by the selection; the selection of every row.
OperatorWork index_select_work(const DsaConfig& config, const MetadataFields& fields) {
  const auto row_len = access<const int32_t, 1>(fields.row_len);
  const int64_t token_bytes = config.index_dim + 4;
  int64_t pairs = 0;
  double bytes = 4 * as_double(row_len.shape[0] * config.topk);
  for_each_request(fields, [&](int64_t begin, int64_t end, int64_t len) {
    int64_t scored_rows = 0;
    for (int64_t t = begin; t < end; ++t) {
      if (row_len(t) <= config.topk) continue;
      ++scored_rows;
      pairs += row_len(t);
    }
    bytes += as_double(scored_rows * config.index_heads * token_bytes);
    if (scored_rows > 0) {
      bytes += as_double(ceil_div(len, config.page_size) * config.page_size * token_bytes);
    }
  });
  bytes += 8 * as_double(pairs);
  return {as_double(pairs) * as_double(2 * config.index_heads * (config.index_dim + 1)), bytes};
}

OperatorWork map_selection_work(const DsaConfig& config, int64_t rows) {
  return {0, 8 * as_double(rows * config.topk)};
}

OperatorWork mask_slots_work(int64_t rows) { return {0, 12 * as_double(rows)}; }

// A page entry per token read at most once a page; every slot written.
OperatorWork list_slots_work(const DsaConfig& config, int64_t tokens) {
  return {0, 4 * as_double(tokens + ceil_div(tokens, config.page_size))};
}

OperatorWork clear_padding_work(const DsaConfig& config, int64_t rows) {
  return {0, as_double(rows * config.num_heads * (2 * kMhaWidthV + 4))};
}

OperatorWork unpack_rows_work(const DsaConfig& config, const MetadataFields& fields) {
  int64_t tokens = 0;
  for_each_request(fields, [&](int64_t, int64_t, int64_t len) { tokens += len; });
  return {0, as_double(tokens * (2 * kLatentWidth + latent_row_bytes(config)))};
}

// 2 H (576 + 512) per selected slot; each token of a request at most once (the rows of a request
// may share theirs), q and out.
OperatorWork sparse_mla_work(const DsaConfig& config, const MetadataFields& fields,
                             int64_t row_bytes, int64_t first_row, int64_t end_row) {
  const auto topk_length = access<const int32_t, 1>(fields.topk_length);
  int64_t slots = 0;
  int64_t unique_tokens = 0;
  int64_t rows = 0;
  for_each_request(fields, [&](int64_t begin, int64_t end, int64_t len) {
    begin = std::max(begin, first_row);
    end = std::max(begin, std::min(end, end_row));
    int64_t selected = 0;
    for (int64_t t = begin; t < end; ++t) selected += topk_length(t);
    slots += selected;
    unique_tokens += std::min(selected, len);
    rows += end - begin;
  });
  const int64_t q_and_out = rows * config.num_heads * 2 * (kLatentWidth + kLatentDim);
  return {2 * as_double(config.num_heads * slots) * as_double(kLatentWidth + kLatentDim),
          as_double(unique_tokens * row_bytes + q_and_out)};
}

OperatorWork join_work(int64_t rows, int64_t element_bytes) {
  return {0, as_double(rows * kLatentWidth * (2 + element_bytes))};
}

OperatorWork mha_varlen_work(const DsaConfig& config, const MetadataFields& fields) {
  const auto row_len = access<const int32_t, 1>(fields.row_len);
  int64_t pairs = 0, keys = 0, rows = 0;
  for_each_request(fields, [&](int64_t begin, int64_t end, int64_t len) {
    for (int64_t t = begin; t < end; ++t) pairs += std::max(row_len(t), 0);
    keys += len;
    rows += end - begin;
  });
  const int64_t width = kMhaWidthQk + kMhaWidthV;
  return {2 * as_double(config.num_heads * pairs) * as_double(width),
          2 * as_double((keys + rows) * config.num_heads * width)};
}

}  // namespace fovea::internal
