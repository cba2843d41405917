#include "src/serving/dsa_step.h"

#include "fovea/stream.h"
#include "src/batch/forward_modes.h"
#include "src/core/check.h"
#include "src/core/workspace.h"
#include "src/serving/dsa_checks.h"

namespace fovea::internal {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

StepArrays::StepArrays(const DsaConfig& config, int64_t max_requests, int64_t max_rows,
                       const StepHome& home) {
  size_t bytes = 0;
  cut(config, max_requests, max_rows, {}, &bytes);
  reserve_memory("the arrays of a step", home, bytes, &memory_);
  cut(config, max_requests, max_rows, memory_.workspace(), &bytes);
  fill_bytes(memory_.data(), home.device, 0, memory_.bytes(), home.stream);
}

void StepArrays::cut(const DsaConfig& config, int64_t max_requests, int64_t max_rows,
                     Workspace memory, size_t* bytes) {
  WorkspaceCutter cutter(memory);
  const auto array = [&](std::initializer_list<int64_t> shape) {
    TensorView view = make_tensor(static_cast<void*>(nullptr), DType::kI32, shape);
    view.data = cutter.take<int32_t>(view.num_elements());
    return view;
  };
  fields_.kv_len = array({max_requests});
  fields_.kv_indptr = array({max_requests + 1});
  fields_.max_kv_len = array({1});
  fields_.q_indptr = array({max_requests + 1});
  fields_.max_q_len = array({1});
  fields_.page_table = array({max_requests, ceil_div(config.table_width, config.page_size)});
  fields_.row_to_request = array({max_rows});
  fields_.row_len = array({max_rows});
  fields_.topk_length = array({max_rows});
  fields_.topk_indptr = array({max_rows + 1});
  fields_.ext_len = array({max_requests});
  fields_.k_start = array({max_rows});
  fields_.k_end = array({max_rows});
  fields_.row_offset = array({max_rows});
  fields_.schedule = array({MetadataProblem{}.workers + 1, 2});
  if (config.split_parts > 0) {
    fields_.split_schedule = array({config.split_parts, 8});
    fields_.split_indptr = array({max_rows + 1});
  }
  store_slots_ = array({max_rows});
  error_word_ = array({8});
  selected_.seq_len = array({max_requests});
  selected_.pool_row = array({max_requests});
  selected_.ext_len = array({max_requests});
  *bytes = cutter.used_bytes();
}

StepArrays::SelectedInputs StepArrays::selected_inputs(int64_t requests) const {
  return {slice_rows(selected_.seq_len, 0, requests), slice_rows(selected_.pool_row, 0, requests),
          slice_rows(selected_.ext_len, 0, requests)};
}

MetadataFields StepArrays::views(ForwardMode mode, int64_t requests, int64_t num_rows,
                                 int64_t padded_rows) const {
  MetadataFields views;
  views.kv_len = slice_rows(fields_.kv_len, 0, requests);
  views.kv_indptr = slice_rows(fields_.kv_indptr, 0, requests + 1);
  views.max_kv_len = fields_.max_kv_len;
  views.q_indptr = slice_rows(fields_.q_indptr, 0, requests + 1);
  views.max_q_len = fields_.max_q_len;
  views.page_table = slice_rows(fields_.page_table, 0, requests);
  views.row_to_request = slice_rows(fields_.row_to_request, 0, padded_rows);
  // One row per request: its length is the request's.
  views.row_len = is_decode(mode) ? views.kv_len : slice_rows(fields_.row_len, 0, num_rows);
  views.topk_length = slice_rows(fields_.topk_length, 0, padded_rows);
  views.topk_indptr = slice_rows(fields_.topk_indptr, 0, padded_rows + 1);
  views.ext_len = slice_rows(fields_.ext_len, 0, requests);
  if (fields_.split_schedule.defined()) {
    views.split_schedule = fields_.split_schedule;
    views.split_indptr = slice_rows(fields_.split_indptr, 0, padded_rows + 1);
  }
  if (is_extend(mode)) {
    views.k_start = slice_rows(fields_.k_start, 0, num_rows);
    views.k_end = slice_rows(fields_.k_end, 0, num_rows);
    views.row_offset = slice_rows(fields_.row_offset, 0, num_rows);
  } else {
    views.schedule = fields_.schedule;
  }
  return views;
}

MetadataReport report_of(const DsaStep& step) {
  if (is_capturing(step.device, step.stream)) {
    invalid(kDsaOp, "report() while the step is being captured; ask after a replay");
  }
  MetadataReport report{};
  copy_bytes(&report, Device::cpu(1), step.arrays.error_word().data, step.device, sizeof(report),
             step.stream);
  synchronize(step.device, step.stream);
  return report;
}

}  // namespace fovea::internal
