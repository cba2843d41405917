"""The lightning indexer: quantise, score, select."""

from __future__ import annotations

from typing import NamedTuple, Optional

from ._call import Out, Tensor, call, operator


class QuantizedIndex(NamedTuple):
    """Results of :func:`index_quantize`."""

    q_fp8: Tensor
    q_scale: Tensor
    k_fp8: Tensor
    k_scale: Tensor
    head_weight: Tensor


@operator(*QuantizedIndex._fields, made=QuantizedIndex)
def index_quantize(
    q: Tensor,
    k: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    head_gate: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    rope_style: str,
    scale_mode: str,
    *,
    hadamard: bool = False,
    impl: Optional[str] = None,
    out: Out = None,
    stream: Optional[int] = None,
) -> QuantizedIndex:
    """LayerNorm of the key, rope, optional Hadamard rotation and fp8 quantisation of the indexer's inputs.

    Args:
        q: bf16 [T, Hi, Di].
        k: bf16 [T, Di], before the LayerNorm.
        norm_weight, norm_bias: f32 [Di].
        head_gate: f32 [T, Hi].
        positions: i32 [T].
        cos_sin: f32 [max_pos, rope]: rope/2 cosines, then the sines.
        rope_style: "half_split" (DeepSeek-V3.2) or "interleaved".
        scale_mode: "fp32" or "pow2".
        hadamard: rotate queries and keys.

    Returns:
        q_fp8 u8 [T, Hi, Di] (e4m3), q_scale f32 [T, Hi], k_fp8 u8 [T, Di], k_scale f32 [T] and head_weight f32 [T, Hi]
        = head_gate * Hi^-1/2 * Di^-1/2 * q_scale.

    Raises:
        InvalidArgument: types, shapes, parameters outside their range.
    """
    return call(index_quantize, locals())


@operator()
def index_store(
    k_fp8: Tensor,
    k_scale: Tensor,
    slots: Tensor,
    index_pool: Tensor,
    page_size: int,
    *,
    impl: Optional[str] = None,
    stream: Optional[int] = None,
) -> None:
    """Scatters quantised index keys into the slots of the paged index cache, in place, as they are.

    Args:
        k_fp8: u8 [T, Di], e4m3.
        k_scale: f32 [T].
        slots: i32 or i64 [T]: page * page_size + offset; outside the pool: skipped.
        index_pool: u8 [pages, page_bytes], i132 rows; updated.
        page_size: tokens per page, 1..256.

    Raises:
        InvalidArgument: types, shapes, a page too short for its rows.
    """
    call(index_store, locals())


@operator("k_fp8", "k_scale")
def index_gather(
    index_pool: Tensor,
    page_table: Tensor,
    kv_indptr: Tensor,
    page_size: int,
    *,
    head_dim: int = 128,
    impl: Optional[str] = None,
    out: Out = None,
    stream: Optional[int] = None,
) -> tuple[Tensor, Tensor]:
    """Reads the index keys of a batch into contiguous arrays, requests in order.

    Args:
        index_pool: u8 [pages, page_bytes], i132 rows.
        page_table: i32 [R, max_pages].
        kv_indptr: i32 [R+1]: request r fills rows kv_indptr[r]..kv_indptr[r+1]-1; on the CPU, unless ``out`` is given.
        page_size: tokens per page, 1..256.
        head_dim: Di.

    Returns:
        k_fp8 u8 [S, Di] and k_scale f32 [S], S = kv_indptr[R]. A key whose page is outside table or pool: zeros.

    Raises:
        InvalidArgument: types, shapes, a page too short for its rows.
        Unsupported: ``kv_indptr`` on a GPU without ``out``.
    """
    return call(index_gather, locals())


@operator("logits")
def index_logits(
    q_fp8: Tensor,
    head_weight: Tensor,
    layout: str,
    *,
    k_fp8: Optional[Tensor] = None,
    k_scale: Optional[Tensor] = None,
    k_start: Optional[Tensor] = None,
    k_end: Optional[Tensor] = None,
    index_pool: Optional[Tensor] = None,
    page_table: Optional[Tensor] = None,
    row_to_request: Optional[Tensor] = None,
    row_len: Optional[Tensor] = None,
    schedule: Optional[Tensor] = None,
    page_size: Optional[int] = None,
    impl: Optional[str] = None,
    out: Out = None,
    stream: Optional[int] = None,
) -> Tensor:
    """Indexer logits: k_scale[j] * sum_h head_weight[t, h] * max(0, <q_fp8[t, h], k_fp8[j]>).

    Args:
        q_fp8: u8 [T, Hi, Di], e4m3.
        head_weight: f32 [T, Hi].
        layout: "ragged" (keys in one array) or "paged" (keys in the index cache).
        k_fp8, k_scale: u8 [S, Di], f32 [S] (ragged).
        k_start, k_end: i32 [T]: row t scores keys k_start..k_end-1 (ragged).
        index_pool: u8 [pages, page_bytes], i132 rows (paged).
        page_table: i32 [R, max_pages] (paged).
        row_to_request, row_len: i32 [T] (paged).
        schedule: i32 [workers+1, 2] of :func:`paged_schedule`; changes no result (paged).
        page_size: tokens per page, 1..256 (paged).

    Returns:
        f32 [T, W], column = position - k_start; columns outside a row are unspecified. Without ``out`` W is what a row
        can reach: S, or max_pages * page_size. In an ``out`` of another width longer rows are cut.

    Raises:
        InvalidArgument: types, shapes, parameters outside their range.
    """
    return call(index_logits, locals())


@operator("indices")
def topk_select(
    logits: Tensor,
    row_len: Tensor,
    topk: int,
    *,
    row_start: Optional[Tensor] = None,
    page_table: Optional[Tensor] = None,
    token_table: Optional[Tensor] = None,
    row_to_request: Optional[Tensor] = None,
    row_offset: Optional[Tensor] = None,
    transform: str = "local",
    page_size: Optional[int] = None,
    impl: Optional[str] = None,
    out: Out = None,
    stream: Optional[int] = None,
) -> Tensor:
    """The positions of the ``topk`` largest logits of every row: ascending, then -1; ties go to the smaller position.

    Exact for any bits: -0 equals +0, NaN ranks below -infinity. A row of at most ``topk`` columns selects all of them.

    Args:
        logits: f32 [T, W].
        row_len: i32 [T]: columns of each row, cut to W.
        topk: K >= 0.
        row_start: i32 [T]: first column of each row; positions count from it.
        page_table: i32 [R, max_pages] with ``page_size`` (paged).
        token_table: i32 [R, max_len], instead of ``page_table`` (paged).
        row_to_request: i32 [T] (paged; with ``token_table`` None means row t).
        row_offset: i32 [T] (ragged).
        transform: what an index is: "local" the position, "paged" its slot, "ragged" position + row_offset.
        page_size: tokens per page.

    Returns:
        i32 [T, topk].

    Raises:
        InvalidArgument: types, shapes, parameters outside their range.
    """
    return call(topk_select, locals())


@operator("indices")
def index_select(
    q_fp8: Tensor,
    head_weight: Tensor,
    layout: str,
    topk: int,
    *,
    k_fp8: Optional[Tensor] = None,
    k_scale: Optional[Tensor] = None,
    k_start: Optional[Tensor] = None,
    k_end: Optional[Tensor] = None,
    index_pool: Optional[Tensor] = None,
    page_table: Optional[Tensor] = None,
    token_table: Optional[Tensor] = None,
    row_to_request: Optional[Tensor] = None,
    row_len: Optional[Tensor] = None,
    row_offset: Optional[Tensor] = None,
    schedule: Optional[Tensor] = None,
    transform: str = "local",
    page_size: Optional[int] = None,
    impl: Optional[str] = None,
    out: Out = None,
    stream: Optional[int] = None,
) -> Tensor:
    """:func:`index_logits` and :func:`topk_select` in one, bit for bit, without the logits of the batch in memory.

    Arguments are those of the two; ``page_table``, ``row_to_request`` and ``page_size`` serve layout and transform. In
    the ragged layout a row has k_end - k_start keys, and ``row_len`` is left out.

    Returns:
        i32 [T, topk].

    Raises:
        InvalidArgument: types, shapes, parameters outside their range.
    """
    return call(index_select, locals())
