#include "python/src/serving.h"

namespace nb = nanobind;

namespace fovea::python {

const Fields::Words<ForwardMode>& forward_modes() {
  static const Fields::Words<ForwardMode> words = {
      {"extend", ForwardMode::kExtend},
      {"decode", ForwardMode::kDecode},
      {"idle", ForwardMode::kIdle},
      {"target_verify", ForwardMode::kTargetVerify},
      {"draft_extend", ForwardMode::kDraftExtend},
      {"draft_extend_v2", ForwardMode::kDraftExtendV2},
      {"mixed", ForwardMode::kMixed},
  };
  return words;
}

ForwardBatch read_forward_batch(const Fields& read, Step* step) {
  ForwardBatch batch;
  const PythonCallTensors& tensors = *step->tensors;
  read("mode", &batch.mode, forward_modes());
  batch.seq_len = tensors.find("seq_len");
  batch.pool_row = tensors.find("pool_row");
  batch.ext_len = tensors.find("ext_len");
  batch.req_to_token = tensors.find("req_to_token");
  batch.positions = tensors.find("positions");
  batch.out_cache_loc = tensors.find("out_cache_loc");
  batch.store_positions = tensors.find("store_positions");
  if (batch.positions.rank > 0) batch.num_rows = batch.positions.shape[0];
  read("num_rows", &batch.num_rows);
  read("padded_rows", &batch.padded_rows);
  read("mha_inputs", &batch.mha_inputs);
  batch.host_seq_len = step->host_seq_len;
  batch.host_ext_len = step->host_ext_len;
  return batch;
}

nb::dict export_metadata(const MetadataFields& fields, const Device& device, nb::object owner) {
  const std::pair<const char*, const TensorView*> arrays[] = {
      {"kv_len", &fields.kv_len},
      {"kv_indptr", &fields.kv_indptr},
      {"max_kv_len", &fields.max_kv_len},
      {"q_indptr", &fields.q_indptr},
      {"max_q_len", &fields.max_q_len},
      {"page_table", &fields.page_table},
      {"row_to_request", &fields.row_to_request},
      {"row_len", &fields.row_len},
      {"topk_length", &fields.topk_length},
      {"topk_indptr", &fields.topk_indptr},
      {"ext_len", &fields.ext_len},
      {"k_start", &fields.k_start},
      {"k_end", &fields.k_end},
      {"row_offset", &fields.row_offset},
      {"schedule", &fields.schedule},
      {"split_schedule", &fields.split_schedule},
      {"split_indptr", &fields.split_indptr},
  };
  nb::dict result;
  for (const auto& [name, view] : arrays) {
    if (view->defined()) result[name] = ExportedTensor(*view, device, owner);
  }
  return result;
}

nb::list export_profile(const std::vector<OperatorCall>& calls) {
  nb::list result;
  for (const OperatorCall& call : calls) {
    result.append(
        nb::make_tuple(call.name, call.implementation, call.elapsed_ms, call.flops, call.bytes));
  }
  return result;
}

}  // namespace fovea::python
