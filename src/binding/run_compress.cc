// Calls by name: the operators of the room compress.

#include <optional>

#include "fovea/v4_compress.h"
#include "src/binding/bindings.h"
#include "src/binding/shared_bindings.h"

namespace fovea::internal {

void run_v4_compress(NamedCall& call) {
  V4CompressProblem problem;
  V4CompressTensors tensors;
  problem.ratio = call.integer("ratio");
  problem.row_format = call.choice<RowFormat>(
      "row_format",
      {{"v4", RowFormat::kV4}, {"i132", RowFormat::kI132}, {"bf16", RowFormat::kBf16}});
  const bool is_required = problem.row_format == RowFormat::kI132;
  problem.scale_mode =
      bind_scale_mode(call, is_required ? std::nullopt : std::optional(ScaleMode::kFp32));
  problem.page_size = call.integer("page_size");
  problem.form = call.choice<CompressorForm>(
      "form", {{"stored", CompressorForm::kStored}, {"online", CompressorForm::kOnline}},
      CompressorForm::kStored);
  problem.eps = call.number("eps", 1e-6f);
  problem.rows_per_request = call.integer("rows_per_request", 0);
  tensors.norm_weight = call.in("norm_weight", "f32 [d]");
  tensors.kv_gate = call.in("kv_gate", "f32 [T, ?]");
  tensors.ape = call.in("ape", "f32 [r, ?]");
  tensors.positions = call.in("positions", "i32 [T]");
  tensors.row_to_request = call.in("row_to_request", "i32 [T]");
  tensors.cos_sin = call.in("cos_sin", "f32 [max_pos, 64]");
  tensors.state_slot = call.in("state_slot", "i32 [R]");
  tensors.page_table = call.in("page_table", "i32 [R, max_pages]");
  tensors.state =
      call.update("state", problem.form == CompressorForm::kStored ? "f32 [states, S, 2, ?]"
                                                                   : "f32 [states, 3, d]");
  tensors.pool = call.update("pool", "u8 [pages, page_bytes]");
  problem.max_rows = call.extent("T");
  problem.max_requests = call.extent("R");
  problem.head_dim = call.extent("d");
  const V4Compress plan = call.plan<V4Compress>(problem);
  tensors.emitted = call.out("emitted", "i32 [T]");
  call.run(plan, tensors);
}

}  // namespace fovea::internal
