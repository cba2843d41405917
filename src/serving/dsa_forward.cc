#include "src/serving/dsa_forward.h"

#include <algorithm>

#include "src/core/workspace.h"
#include "src/serving/dsa_checks.h"
#include "src/serving/dsa_dispatch.h"
#include "src/serving/dsa_shapes.h"
#include "src/serving/selection_map.h"
#include "src/serving/step_memory.h"
#include "src/serving/step_rows.h"

namespace fovea::internal {

ForwardScratch::ForwardScratch(const DsaConfig& config, const StepHome& home) {
  size_t bytes = 0;
  cut(config, {}, &bytes);
  reserve_memory("the scratch arrays of a forward", home, bytes, &memory_);
  cut(config, memory_.workspace(), &bytes);
}

void ForwardScratch::cut(const DsaConfig& config, Workspace memory, size_t* bytes) {
  WorkspaceCutter cutter(memory);
  const auto array = [&](DType dtype, std::initializer_list<int64_t> shape) {
    TensorView view = make_tensor(static_cast<void*>(nullptr), dtype, shape);
    view.data = cutter.take<uint8_t>(view.num_elements() * static_cast<int64_t>(size_of(dtype)));
    return view;
  };
  const int64_t rows = config.max_rows;
  q_fp8 = array(DType::kU8, {rows, config.index_heads, config.index_dim});
  q_scale = array(DType::kF32, {rows, config.index_heads});
  head_weight = array(DType::kF32, {rows, config.index_heads});
  k_fp8 = array(DType::kU8, {rows, config.index_dim});
  k_scale = array(DType::kF32, {rows});
  selection = array(DType::kI32, {rows, config.topk});
  if (!config.fuse_transform) slots = array(DType::kI32, {rows, config.topk});
  if (may_run_contiguous(config)) {
    contiguous_slots = array(DType::kI32, {config.mha_chunk_capacity});
    contiguous_rows = array(DType::kBf16, {config.mha_chunk_capacity, kLatentWidth});
  }
  const int64_t chunk = std::min(rows, kQueryChunk);
  if (config.fuse_rope) {
    q_codes = array(DType::kU8, {chunk, config.num_heads, kLatentWidth});
    k_codes = array(DType::kU8, {rows, kLatentWidth});
  } else {
    joined_q = array(DType::kBf16, {chunk, config.num_heads, kLatentWidth});
  }
  if (may_run_fresh(config)) joined_k = array(DType::kBf16, {rows, kLatentWidth});
  *bytes = cutter.used_bytes();
}

namespace {

// [N, W] as [N, 1, W].
template <class View>
View with_one_head(const View& rows) {
  View view = rows;
  view.rank = 3;
  view.shape[2] = rows.shape[1];
  view.stride[2] = 1;
  view.shape[1] = 1;
  view.stride[1] = rows.shape[1];
  return view;
}

bool are_one_array(const ConstTensorView& a, const ConstTensorView& b) {
  return a.data == b.data && a.shape[0] == b.shape[0] && a.stride[0] == b.stride[0];
}

// u8 [N, 576] as bf16 [N, 288].
ConstTensorView as_bf16_rows(const ConstTensorView& records) {
  return make_tensor(records.data, DType::kBf16, {records.shape[0], kLatentWidth / 2});
}

}  // namespace

void DsaForward::run(const DsaForwardTensors& tensors) {
  quantize_index(tensors);
  const ConstTensorView keys = whole_keys(tensors);
  store_rows(tensors, keys);
  ConstTensorView indices;
  if (!step_.dispatch.one_shot || tensors.indices.defined()) indices = select_rows(tensors);
  if (step_.dispatch.one_shot)
    attend_one_shot(tensors);
  else
    attend(tensors, keys, indices);
}

// The new rows of which a whole is needed: bf16 [tokens, 576] as given or for attention to read, u8
// records with fuse_rope. Absent: parts that are stored from where they are, or nothing.
ConstTensorView DsaForward::whole_keys(const DsaForwardTensors& tensors) {
  if (tensors.k.defined()) return stored(tensors.k);
  if (!tensors.k_latent.defined()) return {};
  const int64_t tokens = step_.shape.num_tokens;
  if (config_.fuse_rope) {
    if (!tensors.save_kv) return {};
    MlaRopeQuantizeTensors in;
    in.k_nope = stored(tensors.k_latent);
    in.k_rope = stored(tensors.k_rope);
    in.positions = stored(step_.store_positions);
    in.cos_sin = tensors.mla_cos_sin;
    in.k_fp8 = stored(scratch_.k_codes);
    caller_.call("mla_rope_quantize", *layer_.rope_quantize, in,
                 [&] { return join_work(tokens, 1); });
    return in.k_fp8;
  }
  if (!step_.dispatch.fresh_kv) return {};
  const TensorView joined = stored(scratch_.joined_k);
  caller_.call("concat_absorbed_q", *shared_.join_k,
               {with_one_head(stored(tensors.k_latent)), with_one_head(stored(tensors.k_rope)),
                with_one_head(joined)},
               [&] { return join_work(tokens, 2); });
  return joined;
}

// Rows [begin, end) of the query: bf16 [rows, H, 576], with fuse_rope u8.
ConstTensorView DsaForward::joined_queries(const DsaForwardTensors& tensors, int64_t begin,
                                           int64_t end) {
  const auto rows = [&](const ConstTensorView& view) { return slice_rows(view, begin, end); };
  const int64_t vectors = (end - begin) * config_.num_heads;
  if (config_.fuse_rope) {
    MlaRopeQuantizeTensors in;
    in.q_nope = rows(tensors.q_nope);
    in.q_rope = rows(tensors.q_rope);
    in.positions = rows(step_.positions);
    in.cos_sin = tensors.mla_cos_sin;
    in.q_fp8 = slice_rows(scratch_.q_codes, 0, end - begin);
    caller_.call("mla_rope_quantize", *layer_.rope_quantize, in,
                 [&] { return join_work(vectors, 1); });
    return in.q_fp8;
  }
  const TensorView joined = slice_rows(scratch_.joined_q, 0, end - begin);
  caller_.call("concat_absorbed_q", shared_.join_q,
               {rows(tensors.q_nope), rows(tensors.q_rope), joined},
               [&] { return join_work(vectors, 2); });
  return joined;
}

void DsaForward::quantize_index(const DsaForwardTensors& tensors) {
  const bool queries = scores_rows(step_.dispatch, tensors);
  const bool keys = tensors.save_kv && tensors.index_k.defined();
  // Queries and keys of the same rows take one pass.
  if (queries && keys && !are_one_array(live(step_.positions), stored(step_.store_positions))) {
    quantize_index(tensors, true, false);
    quantize_index(tensors, false, true);
  } else if (queries || keys) {
    quantize_index(tensors, queries, keys);
  }
}

void DsaForward::quantize_index(const DsaForwardTensors& tensors, bool queries, bool keys) {
  IndexQuantizeTensors in;
  in.positions = queries ? live(step_.positions) : stored(step_.store_positions);
  in.cos_sin = tensors.cos_sin;
  if (queries) {
    in.q = live(tensors.index_q);
    in.head_gate = live(tensors.head_gate);
    in.q_fp8 = live(scratch_.q_fp8);
    in.q_scale = live(scratch_.q_scale);
    in.head_weight = live(scratch_.head_weight);
  }
  if (keys) {
    in.k = stored(tensors.index_k);
    in.norm_weight = tensors.norm_weight;
    in.norm_bias = tensors.norm_bias;
    in.k_fp8 = stored(scratch_.k_fp8);
    in.k_scale = stored(scratch_.k_scale);
  }
  const int64_t rows = in.positions.shape[0];
  caller_.call("index_quantize", shared_.quantize, in,
               [&] { return index_quantize_work(config_, rows, queries, keys); });
}

void DsaForward::store_rows(const DsaForwardTensors& tensors, const ConstTensorView& keys) {
  if (!tensors.save_kv) return;
  const ConstTensorView slots = stored(step_.out_cache_loc);
  const int64_t tokens = step_.shape.num_tokens;
  const auto pack = [&](const PackRows& plan, const PackRowsTensors& in) {
    caller_.call("pack_rows", plan, in, [&] { return pack_rows_work(config_, tokens); });
  };
  if (config_.fuse_rope && keys.defined()) {
    pack(*layer_.pack_records, {as_bf16_rows(keys), slots, tensors.kv_pool});
  } else if (keys.defined()) {
    pack(layer_.pack, {keys, slots, tensors.kv_pool});
  } else if (tensors.k_latent.defined()) {
    pack(layer_.pack, {stored(tensors.k_latent), slots, tensors.kv_pool, stored(tensors.k_rope)});
  }
  if (tensors.index_k.defined()) {
    caller_.call("index_store", shared_.store,
                 {stored(scratch_.k_fp8), stored(scratch_.k_scale), slots, tensors.index_pool},
                 [&] { return index_store_work(config_, tokens); });
  }
}

void DsaForward::map_rows(const ConstTensorView& positions, IndexTransform transform,
                          const TensorView& indices) {
  SelectionMap map;
  map.transform = transform;
  map.page_size = config_.page_size;
  map.positions = positions;
  map.row_len = step_.fields.row_len;
  map.page_table = step_.fields.page_table;
  map.row_to_request = step_.fields.row_to_request;
  map.row_offset = step_.fields.row_offset;
  map.indices = indices;
  caller_.call_own(
      "map_selection", [&] { map_selection(map, device_, caller_.stream()); },
      [&] { return map_selection_work(config_, step_.shape.num_rows); });
}

// The selection in the form that attention reads, [T, K].
ConstTensorView DsaForward::select_rows(const DsaForwardTensors& tensors) {
  const IndexTransform target = step_.dispatch.transform;
  const int64_t padded = step_.shape.padded_rows;
  const TensorView selection =
      tensors.indices.defined() ? tensors.indices : slice_rows(scratch_.selection, 0, padded);
  if (tensors.topk_indices.defined()) {
    if (config_.fuse_transform) return tensors.topk_indices;
    map_rows(tensors.topk_indices, target, slice_rows(scratch_.slots, 0, padded));
    return slice_rows(scratch_.slots, 0, padded);
  }
  const IndexTransform own = config_.fuse_transform ? target : IndexTransform::kLocal;
  if (step_.dispatch.skip_selection) {
    map_rows({}, own, selection);
  } else {
    IndexSelectTensors in;
    in.q_fp8 = live(scratch_.q_fp8);
    in.head_weight = live(scratch_.head_weight);
    in.index_pool = tensors.index_pool;
    in.page_table = step_.fields.page_table;
    in.row_to_request = live(step_.fields.row_to_request);
    in.row_len = step_.fields.row_len;
    if (own == IndexTransform::kRagged) in.row_offset = step_.fields.row_offset;
    in.schedule = step_.fields.schedule;
    in.indices = selection;  // rows of padding become -1
    caller_.call("index_select",
                 own == IndexTransform::kRagged ? *shared_.select_ragged : shared_.select, in,
                 [&] { return index_select_work(config_, host_fields()); });
  }
  if (config_.fuse_transform) return selection;
  map_rows(selection, target, slice_rows(scratch_.slots, 0, padded));
  return slice_rows(scratch_.slots, 0, padded);
}

// The batch's keys in bf16, requests in order.
ConstTensorView DsaForward::contiguous_keys(const DsaForwardTensors& tensors,
                                            const ConstTensorView& keys) {
  if (step_.dispatch.fresh_kv) return keys;
  const int64_t tokens = step_.shape.sum_kv_len;
  const TensorView slots = slice_rows(scratch_.contiguous_slots, 0, tokens);
  const TensorView rows = slice_rows(scratch_.contiguous_rows, 0, tokens);
  const SlotList list{step_.fields.page_table, step_.fields.kv_indptr, config_.page_size, slots};
  caller_.call_own(
      "list_slots", [&] { list_slots(list, device_, caller_.stream()); },
      [&] { return list_slots_work(config_, tokens); });
  caller_.call("unpack_rows", *layer_.unpack, {tensors.kv_pool, slots, rows},
               [&] { return unpack_rows_work(config_, host_fields()); });
  return rows;
}

void DsaForward::attend(const DsaForwardTensors& tensors, const ConstTensorView& keys,
                        const ConstTensorView& indices) {
  const bool contiguous = step_.dispatch.kernel == DsaKernel::kContiguousBf16;
  SparseMlaTensors in;
  in.kv = contiguous ? contiguous_keys(tensors, keys) : ConstTensorView(tensors.kv_pool);
  in.indices = indices;
  in.topk_length = step_.fields.topk_length;
  in.split_schedule = step_.fields.split_schedule;
  in.split_indptr = step_.fields.split_indptr;
  in.out = tensors.out;
  in.lse = tensors.lse;
  const int64_t rows = step_.shape.padded_rows;
  if (tensors.q.defined()) {
    in.q = tensors.q;
    attend_rows(in, 0, rows);
    return;
  }
  for (int64_t begin = 0; begin < rows; begin += kQueryChunk) {
    const int64_t end = std::min(rows, begin + kQueryChunk);
    in.q = joined_queries(tensors, begin, end);
    in.indices = slice_rows(indices, begin, end);
    in.topk_length = slice_rows(step_.fields.topk_length, begin, end);
    // A plan of all rows does not fit some of them, and is not followed then.
    if (in.split_indptr.defined()) {
      in.split_indptr = slice_rows(step_.fields.split_indptr, begin, end + 1);
    }
    in.out = slice_rows(tensors.out, begin, end);
    in.lse = slice_rows(tensors.lse, begin, end);
    attend_rows(in, begin, end);
  }
}

// `in` holds the rows [begin, end).
void DsaForward::attend_rows(const SparseMlaTensors& in, int64_t begin, int64_t end) {
  const bool contiguous = step_.dispatch.kernel == DsaKernel::kContiguousBf16;
  const int64_t row_bytes = contiguous ? 2 * kLatentWidth : latent_row_bytes(config_);
  caller_.call("sparse_mla", contiguous ? *layer_.contiguous : layer_.cache_direct, in,
               [&] { return sparse_mla_work(config_, host_fields(), row_bytes, begin, end); });
}

void DsaForward::attend_one_shot(const DsaForwardTensors& tensors) {
  MhaVarlenTensors in;
  in.q = tensors.q_mha;
  in.k = tensors.k_mha;
  in.v = tensors.v_mha;
  in.q_indptr = step_.fields.q_indptr;
  in.kv_indptr = step_.fields.kv_indptr;
  in.out = tensors.out_mha;
  in.lse = tensors.lse;
  caller_.call("mha_varlen", *layer_.one_shot, in,
               [&] { return mha_varlen_work(config_, host_fields()); });
  // The operator leaves rows without a request alone.
  const PaddingRows padding{step_.fields.q_indptr, tensors.out_mha, tensors.lse};
  caller_.call_own(
      "clear_padding", [&] { clear_padding(padding, device_, caller_.stream()); },
      [&] { return clear_padding_work(config_, step_.shape.padded_rows - step_.shape.num_rows); });
}

}  // namespace fovea::internal
