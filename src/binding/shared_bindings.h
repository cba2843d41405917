#pragma once

#include <optional>
#include <string>

#include "fovea/dtype.h"
#include "src/binding/named_call.h"

/// What several operators take or give, bound in one place.
namespace fovea::internal {

/// Lengths of a paged batch and the rows of each request; they name R.
template <class Tensors>
void bind_lengths(NamedCall& call, Tensors* tensors) {
  tensors->kv_len = call.in("kv_len", "i32 [R]");
  tensors->q_indptr = call.in("q_indptr", "i32 [R+1]");
}

/// A pool of index keys with the page table of its requests; they name R and max_pages.
template <class Tensors>
void bind_index_pool(NamedCall& call, Tensors* tensors) {
  tensors->index_pool = call.in("index_pool", "u8 [pages, page_bytes]");
  tensors->page_table = call.in("page_table", "i32 [R, max_pages]");
}

inline RopeStyle bind_rope_style(NamedCall& call) {
  return call.choice<RopeStyle>("rope_style", {{"half_split", RopeStyle::kHalfSplit},
                                               {"interleaved", RopeStyle::kInterleaved}});
}

/// Without a default the parameter is required.
inline ScaleMode bind_scale_mode(NamedCall& call, std::optional<ScaleMode> otherwise) {
  return call.choice<ScaleMode>(
      "scale_mode", {{"fp32", ScaleMode::kFp32}, {"pow2", ScaleMode::kPow2}}, otherwise);
}

/// Runs an operator whose results are `out`, of that declaration, and `lse`.
template <class Op>
void run_attention(NamedCall& call, const Op& plan, const std::string& out,
                   typename Op::Tensors* tensors) {
  tensors->out = call.out("out", out);
  tensors->lse = call.out("lse", "f32 [T, H]");
  call.run(plan, *tensors);
}

}  // namespace fovea::internal
