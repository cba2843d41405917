#pragma once

#include "fovea/row_codec.h"

/// What pack_rows and unpack_rows check alike.
namespace fovea::internal {

/// Problem against the table of the header.
void check_codec_problem(const char* op, const RowCodecProblem& problem);

/// The pool: u8 [pages, >= page_bytes], or bf16 [S, width] for kBf16.
void check_codec_pool(const char* op, const RowCodecProblem& problem, const ConstTensorView& pool);

/// `inv_scale` bf16 or f32 [pages * page_size, 1] of r512 rows, absent with any other format.
void check_codec_scales(const char* op, const RowCodecProblem& problem, const ConstTensorView& pool,
                        const ConstTensorView& inv_scale);

/// `slots` i32 [N] and `rows` (named `rows_name`) bf16 [N, row_elements], N <= max_rows.
void check_codec_rows(const char* op, const RowCodecProblem& problem, const ConstTensorView& slots,
                      const char* rows_name, const ConstTensorView& rows, int64_t row_elements);

/// A tensor that is written: the rows of axis 0 take `row_elements` each and must not overlap.
void check_no_overlap(const char* op, const char* name, const ConstTensorView& tensor,
                      int64_t row_elements);

}  // namespace fovea::internal
