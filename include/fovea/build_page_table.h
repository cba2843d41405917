#pragma once

#include <cstdint>

#include "fovea/export.h"
#include "fovea/plan.h"
#include "fovea/tensor.h"

namespace fovea {

struct BuildPageTableProblem {
  int64_t max_requests = 0;  ///< Upper bound of R.
  int64_t max_pages = 0;     ///< Upper bound of the table's columns.
  int64_t page_size = 0;     ///< P >= 1, tokens per page.
  int64_t delta = 0;  ///< Added to every length > 0: room for tokens that follow (speculation). May
                      ///< be negative.
};

struct BuildPageTableTensors {
  ConstTensorView req_to_token{};  ///< i32 [rows, W]: slot of every token of a pool row
  ConstTensorView pool_row{};      ///< i32 [R]: row of req_to_token of a request
  ConstTensorView kv_len{};        ///< i32 [R]
  TensorView page_table{};         ///< i32 [R, max_pages]
  TensorView kv_indices{};  ///< optional i32 [>= R * max_pages], with kv_page_indptr: the packed
                            ///< form
  TensorView kv_page_indptr{};  ///< optional i32 [R+1]
};

/// Page tables from the server's map of tokens to slots.
///
/// With count(r) = min(ceil((kv_len[r] + delta) / P), max_pages, ceil(W / P)) for kv_len[r] > 0 and
/// a pool_row[r] inside the map, otherwise 0:
///   page_table[r, p] = req_to_token[pool_row[r], p * P] / P   for p < count(r), -1 where that map
///                      entry is negative (it must not turn into page 0)
///   page_table[r, p] = 0                                      for p >= count(r)
/// Valid only if the map hands out P-aligned, P-contiguous slots: one slot per page is read.
///
/// The packed form lists the same pages without the zeros, request after request:
///   kv_page_indptr[r] = sum of count(s) over s < r,  kv_indices[kv_page_indptr[r] + p] =
///   page_table[r, p];  the rest of kv_indices becomes 0.
///
/// Every element of the outputs is written in every run, so that a buffer that a recorded graph
/// reads can be rebuilt in place: no entry of an earlier, longer request survives. Lengths and rows
/// are device contents: out of range they are cut, or give a row of zeros, and are never an error.
///
/// plan() throws Error(kInvalidArgument) for a bound out of range; run() throws it, before it
/// writes, for tensors that contradict the plan. run() neither allocates nor synchronises.
/// Deterministic for any number of threads. Thread-safe: see OperatorPlan.
///
/// Source: paged caches of block-sparse attention backends; docs/build_page_table.md.
class FOVEA_API BuildPageTable : public OperatorPlan<BuildPageTableProblem, BuildPageTableTensors> {
 public:
  static BuildPageTable plan(const BuildPageTableProblem& problem, const Device& device,
                             const Options& options = {});

 private:
  using OperatorPlan::OperatorPlan;
};

}  // namespace fovea
