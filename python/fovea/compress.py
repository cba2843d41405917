"""The key-value compressor of DeepSeek-V4."""

from __future__ import annotations

from typing import Optional

from ._call import Out, Tensor, call, operator


@operator("emitted")
def v4_compress(
    kv_gate: Tensor,
    ape: Tensor,
    norm_weight: Tensor,
    positions: Tensor,
    row_to_request: Tensor,
    cos_sin: Tensor,
    state: Tensor,
    state_slot: Tensor,
    page_table: Tensor,
    pool: Tensor,
    ratio: int,
    row_format: str,
    page_size: int,
    *,
    scale_mode: Optional[str] = None,
    form: str = "stored",
    eps: float = 1e-6,
    rows_per_request: int = 0,
    impl: Optional[str] = None,
    out: Out = None,
    stream: Optional[int] = None,
) -> Tensor:
    """Turns every ``ratio`` tokens into one cached row: softmax over tokens, RMSNorm, rope, packing.

    Rows of one request stand together with consecutive positions. ``state`` and ``pool`` are updated in place.

    Args:
        kv_gate: f32 [T, 2*c*d]: values, then logits; c is 2 for ratio 4 and 1 for ratio 128.
        ape: f32 [ratio, c*d], added to the logits.
        norm_weight: f32 [d].
        positions, row_to_request: i32 [T]; a negative position or a request outside [0, R) is padding.
        cos_sin: f32 [max_pos, 64]: 32 cosines, then the sines.
        state: f32 [states, S, 2, c*d], online [states, 3, d]; updated.
        state_slot: i32 [R]: state of each request.
        page_table: i32 [R, max_pages]: pages of the compressed rows.
        pool: u8 [pages, page_bytes]; updated.
        ratio: 4 or 128.
        row_format: "v4" (d 512), "i132" (d 128) or "bf16".
        page_size: rows per page.
        scale_mode: "fp32" or "pow2" (i132: required).
        form: "stored" or "online" (ratio 128).
        eps: of the RMSNorm.
        rows_per_request: n > 0: a verify of n rows, for which the state must be long enough.

    Returns:
        emitted i32 [T]: slot of the row that the token completed, else -1.

    Raises:
        InvalidArgument: types, shapes, parameters outside their range, a state that is too short.
    """
    return call(v4_compress, locals())
