"""Latent attention: sparse, dense, windows, and what stands around it."""

from __future__ import annotations

from typing import Optional

from ._call import Out, Tensor, call, operator


@operator("out", "lse", ("max_logits", "return_max_logits", True))
def sparse_mla(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    softmax_scale: float,
    *,
    topk_length: Optional[Tensor] = None,
    sink: Optional[Tensor] = None,
    inv_scale: Optional[Tensor] = None,
    extra_kv: Optional[Tensor] = None,
    extra_indices: Optional[Tensor] = None,
    extra_topk_length: Optional[Tensor] = None,
    extra_page_table: Optional[Tensor] = None,
    extra_len: Optional[Tensor] = None,
    row_to_request: Optional[Tensor] = None,
    extra_inv_scale: Optional[Tensor] = None,
    inverse_rope: Optional[Tensor] = None,
    positions: Optional[Tensor] = None,
    row_format: str = "bf16",
    page_size: Optional[int] = None,
    extra_row_format: Optional[str] = None,
    extra_page_size: Optional[int] = None,
    empty_lse: str = "neg_inf",
    logit_cap: float = 0.0,
    q_scale: float = 1.0,
    k_scale: float = 1.0,
    fixed_splits: int = 0,
    return_max_logits: bool = False,
    impl: Optional[str] = None,
    out: Out = None,
    stream: Optional[int] = None,
) -> tuple[Tensor, ...]:
    """Multi-query latent attention of every row over the tokens that its index list names, in one cache or two.

    With s_j = softmax_scale * <q[t, h], k_j> over the valid slots j of ``indices[t]`` (and of the second cache):
    lse = ln sum_j exp(s_j), out = sum_j exp(s_j - lse) * k_j[0:512] / (1 + exp(sink[h] - lse)).

    Args:
        q: bf16 [T, H, Dqk], Dqk 576 or 512; with f576 also u8 [T, H, 576].
        kv: bf16 [S, Dqk] or u8 [pages, page_bytes].
        indices: i32 [T, K]: slots; outside the cache (such as -1): masked.
        softmax_scale: finite, > 0; never derived from a width.
        topk_length: i32 [T]: leading entries of ``indices`` to look at.
        sink: f32 [H], natural-log units.
        inv_scale: bf16 or f32 [slots, 1] (r512).
        extra_kv: a second cache, with ``extra_indices`` i32 [T, K2] and optional ``extra_topk_length`` i32 [T]; or with
            ``extra_page_table`` i32 [R, pages], ``extra_len`` and ``row_to_request`` i32 [T]: the first keys of the
            row's request.
        extra_inv_scale: as ``inv_scale``.
        inverse_rope: f32 [max_pos, rope]: turns the last channels of ``out`` back by the angle of ``positions`` i32 [T]
            (Dqk 512).
        row_format: "bf16", "v32", "v4", "r512" or "f576" (docs/formats.md); ``extra_row_format``: the same by default.
        page_size: tokens per page of a u8 pool; ``extra_page_size``: the same by default.
        empty_lse: "neg_inf" or "pos_inf": lse of a row without a valid slot, whose out is 0.
        logit_cap: cap * tanh(s / cap); 0: none.
        q_scale, k_scale: of u8 queries and f576 caches.
        fixed_splits: n: the slots of every row in n parts; changes rounding only.
        return_max_logits: give max_j s_j too.

    Returns:
        out bf16 [T, H, 512], lse f32 [T, H] (natural log, without the sink), and with ``return_max_logits``
        max_logits f32 [T, H].

    Raises:
        InvalidArgument: types, shapes, parameters outside their range.
        Unsupported: ``impl`` does not do this problem.
    """
    return call(sparse_mla, locals())


@operator("out", "lse")
def dense_mla(
    q: Tensor,
    kv: Tensor,
    page_table: Tensor,
    kv_len: Tensor,
    q_indptr: Tensor,
    softmax_scale: float,
    *,
    causal: bool = True,
    row_format: str = "bf16",
    page_size: Optional[int] = None,
    q_scale: float = 1.0,
    k_scale: float = 1.0,
    split_keys: int = 0,
    impl: Optional[str] = None,
    out: Out = None,
    stream: Optional[int] = None,
) -> tuple[Tensor, Tensor]:
    """Dense latent attention in its absorbed form over a paged cache: every key of the row's request.

    Args:
        q: bf16 [T, H, Dqk], Dqk 576 or 512; with f576 also u8 [T, H, 576].
        kv: bf16 [pages, page_size, h_kv, Dqk], bf16 [pages * page_size, Dqk] or u8 [pages, page_bytes].
        page_table: i32 [R, max_pages].
        kv_len: i32 [R].
        q_indptr: i32 [R+1]: rows q_indptr[r]..q_indptr[r+1]-1 are those of request r.
        softmax_scale: finite, > 0.
        causal: the last row of a request sees every key, the one before one less.
        row_format: "bf16", "v32" or "f576".
        page_size: tokens per page, where ``kv`` has two axes.
        q_scale, k_scale: of u8 queries and f576 caches.
        split_keys: keys per part, a multiple of 64; 0: by the number of keys.

    Returns:
        out bf16 [T, H, 512] and lse f32 [T, H] (natural log). A row without a visible key: 0 and -infinity. Rows of no
        request are not written.

    Raises:
        InvalidArgument: types, shapes, parameters outside their range.
        Unsupported: a row format that this build lacks.
    """
    return call(dense_mla, locals())


@operator("out", "lse")
def mha_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_indptr: Tensor,
    kv_indptr: Tensor,
    softmax_scale: float,
    *,
    causal: bool = True,
    impl: Optional[str] = None,
    out: Out = None,
    stream: Optional[int] = None,
) -> tuple[Tensor, Tensor]:
    """Dense multi-head attention over requests of different lengths.

    Args:
        q: bf16 [T, H, 192]; k: bf16 [S, H, 192]; v: bf16 [S, H, 128] (other widths too).
        q_indptr, kv_indptr: i32 [R+1]: rows and keys of each request.
        softmax_scale: finite, > 0.
        causal: row i of n sees keys j <= m - n + i of its request's m.

    Returns:
        out bf16 [T, H, 128] and lse f32 [T, H] (natural log). A row without a visible key: 0 and -infinity. Rows of no
        request are not written.

    Raises:
        InvalidArgument: types, shapes, parameters outside their range.
    """
    return call(mha_varlen, locals())


@operator("out", "lse")
def merge_lse(
    out_parts: Tensor,
    lse_parts: Tensor,
    *,
    sink: Optional[Tensor] = None,
    impl: Optional[str] = None,
    out: Out = None,
    stream: Optional[int] = None,
) -> tuple[Tensor, Tensor]:
    """Merges attention outputs over disjoint key sets into the attention over their union.

    lse = ln sum_p exp(lse_p), out = sum_p exp(lse_p - lse) * out_p / (1 + exp(sink[h] - lse)).

    Args:
        out_parts: bf16 or f32 [P, T, H, D].
        lse_parts: f32 [P, T, H], natural log; a part whose lse is not finite is not read.
        sink: f32 [H].

    Returns:
        out [T, H, D] of the type of ``out_parts`` and lse f32 [T, H].

    Raises:
        InvalidArgument: types, shapes.
    """
    return call(merge_lse, locals())


@operator("q")
def concat_absorbed_q(
    q_nope: Tensor,
    q_rope: Tensor,
    *,
    impl: Optional[str] = None,
    out: Out = None,
    stream: Optional[int] = None,
) -> Tensor:
    """Joins the two parts of an absorbed query.

    Args:
        q_nope: bf16 [T, H, 512].
        q_rope: bf16 [T, H, 64].

    Returns:
        bf16 [T, H, 576].

    Raises:
        InvalidArgument: types, shapes.
    """
    return call(concat_absorbed_q, locals())


@operator("q_fp8", "k_fp8")
def mla_rope_quantize(
    positions: Tensor,
    cos_sin: Tensor,
    rope_style: str,
    *,
    q_nope: Optional[Tensor] = None,
    q_rope: Optional[Tensor] = None,
    k_nope: Optional[Tensor] = None,
    k_rope: Optional[Tensor] = None,
    q_scale: float = 1.0,
    k_scale: float = 1.0,
    impl: Optional[str] = None,
    out: Out = None,
    stream: Optional[int] = None,
) -> tuple[Optional[Tensor], Optional[Tensor]]:
    """Rope and e4m3 quantisation of queries, keys or both, for f576 caches: e4m3(x / scale), x fp32 after rope.

    Args:
        positions: i32 [T].
        cos_sin: f32 [max_pos, 64]: 32 cosines, then the sines.
        rope_style: "half_split" or "interleaved".
        q_nope, q_rope: bf16 [T, H, 512], [T, H, 64].
        k_nope, k_rope: bf16 [T, 512], [T, 64].
        q_scale, k_scale: > 0.

    Returns:
        q_fp8 u8 [T, H, 576] and k_fp8 u8 [T, 576]; None for the one whose parts were not given.

    Raises:
        InvalidArgument: types, shapes, parameters outside their range.
    """
    return call(mla_rope_quantize, locals())


@operator("out", "lse")
def swa_decode(
    q: Tensor,
    kv: Tensor,
    swa_indices: Tensor,
    swa_lens: Tensor,
    softmax_scale: float,
    window: int,
    *,
    inv_scale: Optional[Tensor] = None,
    sink: Optional[Tensor] = None,
    row_format: str = "bf16",
    page_size: Optional[int] = None,
    impl: Optional[str] = None,
    out: Out = None,
    stream: Optional[int] = None,
) -> tuple[Tensor, Tensor]:
    """One decode step of sliding-window attention over a cache whose rows are keys and values (DeepSeek-V4).

    Args:
        q: bf16 [T, H, 512].
        kv: bf16 [S, 512] or u8 [pages, page_bytes].
        swa_indices: i32 or i64 [>= T, Wi], [1, >= T, Wi] or [>= T, 1, Wi]: slots.
        swa_lens: i32 or i64 [>= T]: leading columns to look at.
        softmax_scale: finite, > 0.
        window: at most this many columns.
        inv_scale: bf16 or f32 [slots, 1] (r512).
        sink: f32 [H].
        row_format: "bf16", "v4" or "r512".
        page_size: tokens per page of a u8 pool.

    Returns:
        out bf16 [T, H, 512] and lse f32 [T, H] (natural log, without the sink).

    Raises:
        InvalidArgument: types, shapes, parameters outside their range.
        Unsupported: a row format that no implementation has on this device.
    """
    return call(swa_decode, locals())


@operator("indices", "row_len")
def build_swa_indices(
    q_indptr: Tensor,
    kv_len: Tensor,
    page_table: Tensor,
    window: int,
    page_size: int,
    *,
    row_valid: Optional[Tensor] = None,
    width: Optional[int] = None,
    storage: str = "paged",
    pages: Optional[int] = None,
    impl: Optional[str] = None,
    out: Out = None,
    stream: Optional[int] = None,
) -> tuple[Tensor, Tensor]:
    """The slots that each row of a sliding window sees, oldest first, then -1.

    Args:
        q_indptr: i32 [R+1]: rows of each request. On a GPU ``row_valid`` must say how many rows there are.
        kv_len: i32 [R], tokens of this step included.
        page_table: i32 [R, max_pages]; ring: [R, 1].
        window: tokens that a row sees, its own included.
        page_size: tokens per page, or rows of a ring.
        row_valid: bool or u8 [T]; 0: padding.
        width: columns; at least and by default ``window``.
        storage: "paged" or "ring".
        pages: of the pool; None: only a negative page is outside.

    Returns:
        indices i32 [T, width] and row_len i32 [T].

    Raises:
        InvalidArgument: types, shapes, parameters outside their range.
        Unsupported: ``q_indptr`` on a GPU without ``row_valid``.
    """
    return call(build_swa_indices, locals())
