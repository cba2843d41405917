"""Rows of paged caches: store, read, move."""

from __future__ import annotations

from typing import Optional

from ._call import Out, Tensor, call, operator


@operator()
def pack_rows(
    src: Tensor,
    slots: Tensor,
    pool: Tensor,
    row_format: str,
    *,
    rope: Optional[Tensor] = None,
    inv_scale: Optional[Tensor] = None,
    page_size: Optional[int] = None,
    scale_mode: Optional[str] = None,
    k_scale: float = 1.0,
    impl: Optional[str] = None,
    stream: Optional[int] = None,
) -> None:
    """Scatters bf16 rows into the slots of a paged cache, in place, quantised as the row format says.

    Row i of ``src`` goes to slot ``slots[i]`` = page * page_size + offset; a slot outside the pool is skipped. Other
    bytes of the pool keep their value.

    Args:
        src: bf16 [N, D]; D is 576 for v32 and f576, 512 for v4 and r512, any width for bf16 and i132.
        slots: i32 [N].
        pool: u8 [pages, page_bytes], or for ``bf16`` rows also bf16 [S, D]; updated.
        row_format: "bf16", "v32", "i132", "v4", "r512" or "f576" (docs/formats.md).
        rope: bf16 [N, 64]: the last 64 channels; ``src`` then has the first 512 (bf16, v32, f576).
        inv_scale: bf16 or f32 [S, 1], the scale of every slot (r512); updated.
        page_size: tokens per page, 1..256; needed for a u8 pool.
        scale_mode: "fp32" or "pow2": the scale of a v32 (default fp32) or i132 tile (required).
        k_scale: the scale of an f576 cache, > 0.

    Raises:
        InvalidArgument: types, shapes, a page too short for its rows, parameters outside their range.
    """
    call(pack_rows, locals())


@operator("out")
def unpack_rows(
    pool: Tensor,
    slots: Tensor,
    row_format: str,
    *,
    inv_scale: Optional[Tensor] = None,
    page_size: Optional[int] = None,
    width: Optional[int] = None,
    k_scale: float = 1.0,
    impl: Optional[str] = None,
    out: Out = None,
    stream: Optional[int] = None,
) -> Tensor:
    """Reads rows of a paged cache: bf16 of code times scale, the product in fp32.

    Args:
        pool: u8 [pages, page_bytes], or for ``bf16`` rows also bf16 [S, D].
        slots: i32 [N]; outside the pool: a row of zeros.
        row_format: "bf16", "v32", "i132", "v4", "r512" or "f576".
        inv_scale: bf16 or f32 [S, 1] (r512).
        page_size: tokens per page; needed for a u8 pool.
        width: channels of a row; required for bf16 rows in a u8 pool, elsewhere the format's own.
        k_scale: the scale of an f576 cache.

    Returns:
        bf16 [N, width].

    Raises:
        InvalidArgument: types, shapes, parameters outside their range.
    """
    return call(unpack_rows, locals())


@operator()
def move_rows(
    src_slots: Tensor,
    dst_slots: Tensor,
    pool: Tensor,
    row_format: str,
    *,
    page_size: Optional[int] = None,
    width: Optional[int] = None,
    impl: Optional[str] = None,
    stream: Optional[int] = None,
) -> None:
    """Copies stored rows to other slots of the same pool, bytes unchanged, in place.

    Every source is read before any destination is written. A pair with a slot outside the pool is skipped.

    Args:
        src_slots, dst_slots: i32 [N].
        pool: u8 [pages, page_bytes], or for ``bf16`` rows also bf16 [S, D]; updated.
        row_format: "bf16", "v32", "i132", "v4" or "f576".
        page_size: tokens per page; needed for a u8 pool.
        width: channels of a row; required for bf16 rows in a u8 pool.

    Raises:
        InvalidArgument: types, shapes, parameters outside their range.
    """
    call(move_rows, locals())
