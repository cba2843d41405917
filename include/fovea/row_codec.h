#pragma once

#include <cstdint>

#include "fovea/dtype.h"
#include "fovea/export.h"
#include "fovea/plan.h"
#include "fovea/tensor.h"

namespace fovea {

/// Bytes that `page_size` tokens of a format take in a page; a pool's page may be longer, the
/// surplus is never touched. `width` is the number of channels: required for kBf16 (576, 512 or 128
/// in models), fixed for kV32 (576) and kI132 (128).
FOVEA_API int64_t page_bytes(RowFormat format, int64_t page_size, int64_t width);

/// Problem of pack_rows and unpack_rows.
struct RowCodecProblem {
  int64_t max_rows = 0;  ///< Upper bound of N.
  RowFormat row_format = RowFormat::kBf16;
  int64_t page_size = 0;                    ///< Tokens per page, 1..256.
  int64_t width = 0;                        ///< Channels D of a row; 576 for kV32, 128 for kI132.
  ScaleMode scale_mode = ScaleMode::kFp32;  ///< kV32, kI132; ignored by kBf16.
};

struct PackRowsTensors {
  ConstTensorView src;  ///< bf16 [N, D]
  ConstTensorView
      slots;  ///< i32 [N]; page * page_size + offset; out of range (e.g. -1): the row is skipped
  TensorView pool;  ///< u8 [pages, page_bytes]; kBf16 also as bf16 [S, D]
};

/// Scatters bf16 rows into the slots of a packed pool, quantising as the format says.
///
/// Rows whose slot is outside the pool are skipped; all other bytes of the pool keep their value. A
/// slot that occurs twice is a caller error (either row may win). Non-finite elements and scales:
/// docs/formats.md. The bytes are equal on every backend. Source of the layouts: DeepSeek-V3.2's
/// published cache formats, restated in docs/formats.md.
class FOVEA_API PackRows : public OperatorPlan<RowCodecProblem, PackRowsTensors> {
 public:
  /// Throws Error(kInvalidArgument) for a page size outside 1..256 or a width the format does not
  /// have.
  static PackRows plan(const RowCodecProblem& problem, const Device& device,
                       const Options& options = {});

 private:
  using OperatorPlan::OperatorPlan;
};

struct UnpackRowsTensors {
  ConstTensorView pool;   ///< as in PackRowsTensors
  ConstTensorView slots;  ///< i32 [N]; repeats are fine; out of range: the row is zeros
  TensorView out;         ///< bf16 [N, D]: bf16(code * scale), the product in fp32, one rounding
};

/// Gathers rows of a packed pool as bf16.
class FOVEA_API UnpackRows : public OperatorPlan<RowCodecProblem, UnpackRowsTensors> {
 public:
  static UnpackRows plan(const RowCodecProblem& problem, const Device& device,
                         const Options& options = {});

 private:
  using OperatorPlan::OperatorPlan;
};

}  // namespace fovea
