#pragma once

#include <cstdint>

#include "fovea/dtype.h"
#include "fovea/export.h"
#include "fovea/plan.h"
#include "fovea/tensor.h"

namespace fovea {

/// Bytes that `page_size` tokens of a format take in a page: page_size * 2 * width (kBf16),
/// page_size * 656 (kV32), page_size * (width + 4) (kI132), page_size * 584 rounded up to a
/// multiple of 576 (kV4; the operators take pages without that padding too), page_size * 512
/// (kR512: the codes alone), page_size * 576 (kF576). A pool's page may be longer, the surplus is
/// never touched. `width` is the number of channels: 576 for kV32 and kF576, 512 for kV4 and kR512,
/// 128 in models for kI132, any for kBf16 (576 or 512 in models). Throws Error(kInvalidArgument)
/// for page_size outside 1..256 or a width the format does not have.
FOVEA_API int64_t page_bytes(RowFormat format, int64_t page_size, int64_t width);

/// Problem of pack_rows and unpack_rows.
struct RowCodecProblem {
  int64_t max_rows = 0;  ///< Upper bound of N.
  RowFormat row_format = RowFormat::kBf16;
  int64_t page_size = 0;  ///< Tokens per page, 1..256; 0 for a pool given as bf16 [S, D].
  int64_t width = 0;      ///< Channels D of a row; 576 for kV32 and kF576, 512 for kV4 and kR512.
  ScaleMode scale_mode = ScaleMode::kFp32;  ///< kV32, kI132; others and unpack_rows ignore it.
  float k_scale = 1;  ///< kF576: the scale of the whole cache, finite and > 0; others ignore it.
};

struct PackRowsTensors {
  ConstTensorView src;        ///< bf16 [N, D]; with `rope` bf16 [N, D - 64], the latent part
  ConstTensorView slots;      ///< i32 [N]; page * page_size + offset; outside the pool: skipped
  TensorView pool;            ///< u8 [pages, >= page_bytes]; kBf16 also as bf16 [S, D]
  ConstTensorView rope = {};  ///< optional: bf16 [N, 64], the last 64 channels
  /// kR512 only: bf16 or f32 [pages * page_size, 1], the scale of every slot; written for the slots
  /// of the call.
  TensorView inv_scale = {};
};

/// Scatters bf16 rows into the slots of a paged pool, quantising as the format says:
///
///   kBf16   the bits of src
///   kV32    per tile of 128 of the first 512 channels: scale and e4m3(x / scale); the last 64 as
///           they are
///   kI132   one tile over all D channels: scale and e4m3(x / scale)
///   kV4     per tile of 64 of the first 448 channels: a power-of-two scale, whatever scale_mode
///           says, and e4m3(x / scale); the last 64 as they are
///   kR512   one scale over all 512 channels, max(amax, 1e-12) / 448 rounded to the type of
///           inv_scale, and e4m3(x / scale) with that rounded scale
///   kF576   e4m3(x / k_scale) of all 576 channels, saturating at +-448; no scale is stored
///
/// With `rope` a row is src[i] | rope[i], each where the model left it: the bytes are those of
/// packing the concatenation. For rows of 576 channels (kBf16, kV32, kF576).
///
/// Codes and scales follow from IEEE fp32 divisions and the scale rules of docs/formats.md, so that
/// the bytes are equal on every backend. NaN becomes the code 0x7F, infinities saturate, neither
/// enters a scale.
///
/// Rows whose slot is outside the pool (e.g. -1) are skipped; all other bytes of the pool keep
/// their value. The content of a slot that occurs twice in one call is unspecified. N = 0: nothing
/// happens.
///
/// Same inputs: the same bytes, for any number of threads. plan() throws Error(kInvalidArgument)
/// for a page size, width or k_scale outside the table; run() compares the tensors with the plan,
/// and refuses a pool whose pages or rows overlap. Thread-safe while no slot is written by two runs
/// at once. Source of the layouts: the published cache formats of DeepSeek-V3.2 and
/// DeepSeek-V4, restated in docs/formats.md.
class FOVEA_API PackRows : public OperatorPlan<RowCodecProblem, PackRowsTensors> {
 public:
  static PackRows plan(const RowCodecProblem& problem, const Device& device,
                       const Options& options = {});

 private:
  using OperatorPlan::OperatorPlan;
};

struct UnpackRowsTensors {
  ConstTensorView pool;   ///< as in PackRowsTensors
  ConstTensorView slots;  ///< i32 [N]; repeats are fine; outside the pool: the row is zeros
  TensorView out;         ///< bf16 [N, D]
  ConstTensorView inv_scale = {};  ///< kR512 only: as in PackRowsTensors
};

/// Gathers rows of a paged pool as bf16: bf16(code * scale), the product in fp32, one rounding;
/// bf16 parts as they are. The scale of kF576 is k_scale. Only the bytes of the listed slots are
/// read. Any finite scale is taken as it is; a NaN product (NaN code, scale not finite) is the bf16
/// 0x7FC0.
///
/// Same inputs: the same bits, for any number of threads and every implementation. Errors as for
/// PackRows. Thread-safe.
class FOVEA_API UnpackRows : public OperatorPlan<RowCodecProblem, UnpackRowsTensors> {
 public:
  static UnpackRows plan(const RowCodecProblem& problem, const Device& device,
                         const Options& options = {});

 private:
  using OperatorPlan::OperatorPlan;
};

}  // namespace fovea
