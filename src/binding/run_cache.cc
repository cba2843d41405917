// Calls by name: the operators of the room cache.

#include <optional>

#include "fovea/move_rows.h"
#include "fovea/row_codec.h"
#include "src/binding/bindings.h"
#include "src/binding/shared_bindings.h"

namespace fovea::internal {
namespace {

RowFormat bind_row_format(NamedCall& call) {
  return call.choice<RowFormat>("row_format", {{"bf16", RowFormat::kBf16},
                                               {"v32", RowFormat::kV32},
                                               {"i132", RowFormat::kI132},
                                               {"v4", RowFormat::kV4},
                                               {"r512", RowFormat::kR512},
                                               {"f576", RowFormat::kF576}});
}

constexpr char kInvScale[] = "bf16|f32 [S, 1]";

bool is_bf16_pool(NamedCall& call, RowFormat format) {
  return format == RowFormat::kBf16 && call.dtype_of("pool") == DType::kBf16;
}

// Channels of the rows of a u8 pool.
int64_t bind_width(NamedCall& call, RowFormat format) {
  if (format == RowFormat::kBf16) return call.integer("width");
  const bool is_512 = format == RowFormat::kV4 || format == RowFormat::kR512;
  return call.integer("width", format == RowFormat::kI132 ? 128 : is_512 ? 512 : 576);
}

constexpr char kRowsPool[] = "bf16 [S, D]";
constexpr char kBytePool[] = "u8 [pages, page_bytes]";

}  // namespace

void run_pack_rows(NamedCall& call) {
  RowCodecProblem problem;
  problem.row_format = bind_row_format(call);
  // Required where it changes bytes and the format has no default of its own.
  const bool is_required = problem.row_format == RowFormat::kI132;
  problem.scale_mode =
      bind_scale_mode(call, is_required ? std::nullopt : std::optional(ScaleMode::kFp32));
  problem.k_scale = call.number("k_scale", 1.0f);
  PackRowsTensors tensors;
  tensors.src = call.in("src", "bf16 [N, D]");
  tensors.rope = call.opt("rope", "bf16 [N, 64]");
  tensors.slots = call.in("slots", "i32 [N]");
  if (is_bf16_pool(call, problem.row_format)) {
    call.integer("page_size", 0);  // a name of the table, without meaning here
    tensors.pool = call.update("pool", tensors.rope.defined() ? "bf16 [S, 576]" : kRowsPool);
  } else {
    problem.page_size = call.integer("page_size");
    tensors.pool = call.update("pool", kBytePool);
    if (problem.row_format == RowFormat::kR512)
      tensors.inv_scale = call.update("inv_scale", kInvScale);
  }
  problem.max_rows = call.extent("N");
  problem.width = call.extent("D") + (tensors.rope.defined() ? 64 : 0);
  const PackRows plan = call.plan<PackRows>(problem);
  call.run(plan, tensors);
}

void run_unpack_rows(NamedCall& call) {
  RowCodecProblem problem;
  problem.row_format = bind_row_format(call);
  problem.scale_mode =
      bind_scale_mode(call, ScaleMode::kFp32);  // readers take the scale that is stored
  problem.k_scale = call.number("k_scale", 1.0f);
  UnpackRowsTensors tensors;
  tensors.slots = call.in("slots", "i32 [N]");
  if (is_bf16_pool(call, problem.row_format)) {
    call.integer("page_size", 0);
    tensors.pool = call.in("pool", kRowsPool);
    problem.width = call.integer("width", call.extent("D"));
  } else {
    problem.page_size = call.integer("page_size");
    tensors.pool = call.in("pool", kBytePool);
    if (problem.row_format == RowFormat::kR512) tensors.inv_scale = call.in("inv_scale", kInvScale);
    problem.width = bind_width(call, problem.row_format);
  }
  call.set_extent("width", problem.width, "params.width", {"D"});
  problem.max_rows = call.extent("N");
  const UnpackRows plan = call.plan<UnpackRows>(problem);
  tensors.out = call.out("out", "bf16 [N, width]");
  call.run(plan, tensors);
}

void run_move_rows(NamedCall& call) {
  MoveRowsProblem problem;
  problem.row_format = bind_row_format(call);
  MoveRowsTensors tensors;
  tensors.src_slots = call.in("src_slots", "i32 [N]");
  tensors.dst_slots = call.in("dst_slots", "i32 [N]");
  if (is_bf16_pool(call, problem.row_format)) {
    call.integer("page_size", 0);
    tensors.pool = call.update("pool", kRowsPool);
    problem.width = call.integer("width", call.extent("D"));
  } else {
    problem.page_size = call.integer("page_size");
    tensors.pool = call.update("pool", kBytePool);
    problem.width = bind_width(call, problem.row_format);
  }
  problem.max_rows = call.extent("N");
  const MoveRows plan = call.plan<MoveRows>(problem);
  call.run(plan, tensors);
}

}  // namespace fovea::internal
