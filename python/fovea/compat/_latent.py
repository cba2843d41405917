"""Latent attention under the names of flash_mla, flash_attn, flashinfer, tilelang and aiter, on three operators."""

from __future__ import annotations

from typing import Any, Optional, Sequence, Union

from .._errors import InvalidArgument, Unsupported
from ..batch import split_schedule
from ..mla import concat_absorbed_q, dense_mla, mha_varlen, sparse_mla, swa_decode
from ._common import (
    codes,
    default_scale,
    even_starts,
    expect,
    finite_scale,
    int32,
    only,
    pool_of,
    rows_of,
    torch_module,
    unpacked_lists,
    view_of,
)

Tensor = Any

_LATENT = 512
_ROPE = 64
_LOG2_E = 1.4426950408889634
_TILE_FIELDS = 8
_CPU_PARTS = 64
_HEADS_PER_TILE = 64

# Bytes of a token to the row format.
_ROW_FORMATS = {656: "v32", 584: "v4", 576: "f576"}


def get_mla_metadata(
    cache_seqlens: Tensor,
    num_q_tokens_per_head_k: int,
    num_heads_k: int,
    num_heads_q: Optional[int] = None,
    is_fp8_kvcache: bool = False,
    topk: Optional[int] = None,
) -> tuple[Tensor, Tensor]:
    """The plan of a decode step.

    The tile table's shape follows from the device and the head counts, so that it can be copied whole into a buffer
    that was made for other lengths, and leading entries of ``num_splits`` are the plan of fewer requests.

    Args:
        cache_seqlens: i32 [b].
        num_q_tokens_per_head_k: rows of a request times query heads over KV heads.
        num_heads_k: KV heads.
        num_heads_q, is_fp8_kvcache: change nothing.
        topk: entries of a sparse list, which bound the lengths; None: dense.

    Returns:
        tile_scheduler_metadata i32 [parts, 8] and num_splits i32 [b+1], prefix sums (docs/split_schedule.md).

    Raises:
        InvalidArgument: another shape, a count below 1.
    """
    op = "get_mla_metadata"
    torch = torch_module()
    expect(op, "cache_seqlens", cache_seqlens, "b")
    counts = {"num_q_tokens_per_head_k": num_q_tokens_per_head_k, "num_heads_k": num_heads_k}
    if topk is not None:
        counts["topk"] = topk
    for name, value in counts.items():
        if value < 1:
            raise InvalidArgument(f"{op}: {name} = {value}, expected >= 1")
    parts = _CPU_PARTS
    if cache_seqlens.is_cuda:
        tiles = -(-num_q_tokens_per_head_k // _HEADS_PER_TILE)
        multiprocessors = torch.cuda.get_device_properties(cache_seqlens.device).multi_processor_count
        parts = max(1, multiprocessors // num_heads_k // tiles)
    return split_schedule(int32(cache_seqlens.clamp(0, topk)), parts)


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: Optional[Tensor],
    num_splits: Optional[Tensor],
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    descale_q: Optional[Tensor] = None,
    descale_k: Optional[Tensor] = None,
    is_fp8_kvcache: bool = False,
    indices: Optional[Tensor] = None,
) -> tuple[Tensor, Tensor]:
    """Decode over a paged latent cache: every key of a request, or with ``indices`` those of a list.

    Args:
        q: bf16 [b, s, H, 576], or [b, s, H, 512] over rows of 584 bytes.
        k_cache: bf16 [pages, page_size, 1, 576], or with ``is_fp8_kvcache`` rows of 656 or 584 bytes (e4m3 or uint8),
            any distance of pages.
        block_table: i32 [b, pages of the longest]; not looked at with ``indices``, where it may be empty.
        cache_seqlens: i32 [b]; not looked at with ``indices``.
        head_dim_v: 512.
        tile_scheduler_metadata, num_splits: of :func:`get_mla_metadata`; they change no result.
        softmax_scale: None: width of q ^-1/2.
        causal: dense only: the last row of a request sees every key, the one before one less.
        indices: i32 [b, s, K]: page * page_size + offset; -1 or beyond the cache: unused.

    Returns:
        out bf16 [b, s, H, 512], and the view [b, H, s] of lse f32, natural log. A row without a key: 0 and +infinity.

    Raises:
        InvalidArgument: shapes that do not fit one another.
        Unsupported: descale tensors.
    """
    op = "flash_mla_with_kvcache"
    torch = torch_module()
    expect(op, "q", q, "b", "s", "H", "D")
    batch, rows, heads, width = q.shape
    expect(op, "k_cache", k_cache, "pages", "page_size", 1, "D")
    expect(op, "cache_seqlens", cache_seqlens, batch)
    only(op, head_dim_v=(head_dim_v, _LATENT), descale_q=(descale_q, None), descale_k=(descale_k, None))
    if tile_scheduler_metadata is not None:
        expect(op, "tile_scheduler_metadata", tile_scheduler_metadata, "parts", _TILE_FIELDS)
        expect(op, "num_splits", num_splits, batch + 1)
    if is_fp8_kvcache != (k_cache.element_size() == 1):
        raise InvalidArgument(f"{op}: is_fp8_kvcache = {is_fp8_kvcache}, but k_cache is of type {k_cache.dtype}")
    scale = default_scale(softmax_scale, width)
    flat = view_of(op, "q", q, batch * rows, heads, width)
    rows_format = {"row_format": "bf16"}
    if is_fp8_kvcache:
        rows_format = {"row_format": _packed_format(op, k_cache), "page_size": k_cache.shape[1]}
    if indices is not None:
        if causal:
            raise InvalidArgument(f"{op}: causal = True with indices; the list says what a row sees")
        expect(op, "indices", indices, batch, rows, "K")
        kv = pool_of(op, "k_cache", k_cache) if is_fp8_kvcache else rows_of(op, "k_cache", k_cache)
        lists = view_of(op, "indices", indices, batch * rows, indices.shape[2])
        out, lse = sparse_mla(flat, kv, int32(lists), scale, empty_lse="pos_inf", **rows_format)
    else:
        expect(op, "block_table", block_table, batch, "max_pages")
        kv = pool_of(op, "k_cache", k_cache) if is_fp8_kvcache else k_cache
        indptr = even_starts(batch, rows, q.device)
        out, lse = dense_mla(flat, kv, int32(block_table), int32(cache_seqlens), indptr, scale, causal=causal, **rows_format)
        lse.masked_fill_(lse == -torch.inf, torch.inf)
    return out.view(batch, rows, heads, _LATENT), lse.view(batch, rows, heads).transpose(1, 2)


def _packed_format(op: str, cache: Tensor) -> str:
    if cache.shape[-1] not in _ROW_FORMATS:
        known = ", ".join(str(size) for size in _ROW_FORMATS)
        raise InvalidArgument(f"{op}: a token of the cache has {cache.shape[-1]} bytes, expected one of {known}")
    return _ROW_FORMATS[cache.shape[-1]]


def flash_mla_sparse_fwd(
    q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float, d_v: int = 512
) -> tuple[Tensor, Tensor, Tensor]:
    """Sparse attention of rows over bf16 tokens.

    Args:
        q: bf16 [T, H, 576]; any number of heads.
        kv: bf16 [S, 1, 576].
        indices: i32 [T, 1, K]; -1 or >= S: unused.
        sm_scale: scale of the logits.
        d_v: 512.

    Returns:
        out bf16 [T, H, 512]; max_logits and lse f32 [T, H] in units of base 2: log2 of the sum. A row without a token:
        0, -infinity, -infinity.

    Raises:
        InvalidArgument: shapes that do not fit one another.
    """
    op = "flash_mla_sparse_fwd"
    out, lse, max_logits = _sparse_rows(op, q, kv, indices, sm_scale, d_v)
    return out, max_logits.mul_(_LOG2_E), lse.mul_(_LOG2_E)


def tilelang_sparse_fwd(q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float, d_v: int = 512) -> Tensor:
    """:func:`flash_mla_sparse_fwd` with its first result alone, as bf16 [1, T, H, 512]."""
    return _sparse_rows("tilelang_sparse_fwd", q, kv, indices, sm_scale, d_v)[0].unsqueeze(0)


def _sparse_rows(op: str, q: Tensor, kv: Tensor, indices: Tensor, scale: float, d_v: int) -> tuple[Tensor, ...]:
    expect(op, "q", q, "T", "H", "D")
    expect(op, "kv", kv, "S", 1, q.shape[2])
    expect(op, "indices", indices, q.shape[0], 1, "K")
    only(op, d_v=(d_v, _LATENT))
    return sparse_mla(q, kv[:, 0], int32(indices[:, 0]), float(scale), return_max_logits=True)


def _joined_rows(op: str, rope: Tensor, latent: Tensor) -> Tensor:
    """One cache [pages, page_size, 1, 576] from views of its last 64 and first 512 channels."""
    expect(op, "v_cache", latent, "pages", "page_size", 1, _LATENT)
    expect(op, "k_cache", rope, *latent.shape[:3], _ROPE)
    same_steps = all(rope.stride(axis) == latent.stride(axis) for axis in (0, 1) if latent.shape[axis] > 1)
    distance = rope.data_ptr() - latent.data_ptr()
    if latent.numel() and (rope.dtype != latent.dtype or not same_steps or distance != _LATENT * latent.element_size()):
        raise Unsupported(
            f"{op}: k_cache and v_cache are not the last {_ROPE} and first {_LATENT} channels of the same rows; pass "
            "both as views of one latent cache"
        )
    steps = (latent.stride(0), latent.stride(1), _LATENT + _ROPE, 1)
    return latent.as_strided((*latent.shape[:3], _LATENT + _ROPE), steps)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Optional[Tensor] = None,
    v: Optional[Tensor] = None,
    qv: Optional[Tensor] = None,
    rotary_cos: Optional[Tensor] = None,
    rotary_sin: Optional[Tensor] = None,
    cache_seqlens: Union[int, Tensor, None] = None,
    cache_batch_idx: Optional[Tensor] = None,
    cache_leftpad: Optional[Tensor] = None,
    page_table: Optional[Tensor] = None,
    cu_seqlens_q: Optional[Tensor] = None,
    cu_seqlens_k_new: Optional[Tensor] = None,
    max_seqlen_q: Optional[int] = None,
    rotary_seqlens: Optional[Tensor] = None,
    q_descale: Optional[Tensor] = None,
    k_descale: Optional[Tensor] = None,
    v_descale: Optional[Tensor] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: Optional[int] = None,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Optional[Tensor] = None,
    num_splits: int = 0,
    pack_gqa: Optional[bool] = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    sinks: Optional[Tensor] = None,
    score_mod: Any = None,
    aux_tensors: Any = None,
    ver: int = 3,
) -> Any:
    """Attention over a paged latent cache in its absorbed form: ``qv`` is given.

    Pages of one token and one row a request are a list of slots: entries outside the cache, such as -1, are skipped
    wherever they stand, and nothing past ``cache_seqlens`` is read.

    Args:
        q: bf16 [T, H, 64] with ``cu_seqlens_q``, or [b, s, H, 64]: the rope part.
        k_cache, v_cache: bf16 [pages, page_size, 1, 64] and [pages, page_size, 1, 512]: views of one cache, whose
            first 512 channels are v.
        qv: bf16 [T, H, 512] or [b, s, H, 512].
        cache_seqlens: i32 [b], or one number for every request.
        page_table: i32 [b, max_pages].
        cu_seqlens_q: i32 [b+1].
        cu_seqlens_k_new, max_seqlen_q, scheduler_metadata, pack_gqa, sm_margin, ver: change nothing.
        softmax_scale: None: 576 ^-1/2.
        causal: the last row of a request sees every key, the one before one less.
        softcap: cap * tanh(s / cap), for lists of slots; 0: none.
        num_splits: for lists of slots: cuts of every row; 0: as the operator likes.

    Returns:
        out bf16 in the shape of ``qv``; with ``return_softmax_lse`` also lse f32 [H, T] or [b, H, s], natural log. A
        row without a key: 0 and -infinity.

    Raises:
        InvalidArgument: shapes that do not fit one another.
        Unsupported: other arguments than these, caches that are not views of one.
    """
    op = "flash_attn_with_kvcache"
    torch = torch_module()
    nothing = {"k": k, "v": v, "rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "cache_batch_idx": cache_batch_idx}
    nothing.update(cache_leftpad=cache_leftpad, rotary_seqlens=rotary_seqlens, attention_chunk=attention_chunk)
    nothing.update(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, sinks=sinks)
    nothing.update(score_mod=score_mod, aux_tensors=aux_tensors)
    only(op, window_size=(window_size, (-1, -1)), **{name: (value, None) for name, value in nothing.items()})
    if qv is None or page_table is None or cache_seqlens is None:
        name = "qv" if qv is None else "page_table" if page_table is None else "cache_seqlens"
        raise Unsupported(f"{op}: {name} is missing; attention is offered over paged latent caches in the absorbed form")
    batched = cu_seqlens_q is None
    expect(op, "qv", qv, *(("b", "s", "H") if batched else ("T", "H")), _LATENT)
    expect(op, "q", q, *qv.shape[:-1], _ROPE)
    requests = qv.shape[0] if batched else cu_seqlens_q.shape[0] - 1
    expect(op, "page_table", page_table, requests, "max_pages")
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((requests,), cache_seqlens, dtype=torch.int32, device=q.device)
    expect(op, "cache_seqlens", cache_seqlens, requests)
    heads = qv.shape[-2]
    rows = qv.numel() // (heads * _LATENT) if heads else 0
    parts = (view_of(op, "qv", qv, rows, heads, _LATENT), view_of(op, "q", q, rows, heads, _ROPE))
    scale = default_scale(softmax_scale, _LATENT + _ROPE)
    cache = _joined_rows(op, k_cache, v_cache)
    query, table, lengths = concat_absorbed_q(*parts), int32(page_table), int32(cache_seqlens)
    if cache.shape[1] == 1 and rows == requests:
        kv = rows_of(op, "v_cache", cache)
        cuts = {"logit_cap": softcap, "fixed_splits": num_splits}
        out, lse = sparse_mla(query, kv, table, scale, topk_length=lengths, **cuts)
    else:
        only(op, softcap=(softcap, 0.0))
        indptr = even_starts(requests, qv.shape[1], q.device) if batched else int32(cu_seqlens_q)
        out, lse = dense_mla(query, cache, table, lengths, indptr, scale, causal=causal)
    out = out.view(qv.shape)
    if not return_softmax_lse:
        return out
    return out, (lse.view(qv.shape[:-1]).transpose(1, 2) if batched else lse.t()).contiguous()


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Optional[int] = None,
    max_seqlen_k: Optional[int] = None,
    seqused_q: Optional[Tensor] = None,
    seqused_k: Optional[Tensor] = None,
    page_table: Optional[Tensor] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    qv: Optional[Tensor] = None,
    q_descale: Optional[Tensor] = None,
    k_descale: Optional[Tensor] = None,
    v_descale: Optional[Tensor] = None,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: Optional[bool] = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    sinks: Optional[Tensor] = None,
    score_mod: Any = None,
    aux_tensors: Any = None,
    ver: int = 3,
) -> Any:
    """Dense attention over requests of different lengths, one KV head for each query head.

    Args:
        q: bf16 [T, H, D]; k: bf16 [S, H, D]; v: bf16 [S, H, Dv].
        cu_seqlens_q, cu_seqlens_k: i32 [b+1].
        max_seqlen_q, max_seqlen_k, num_splits, pack_gqa, sm_margin, ver: change nothing.
        softmax_scale: None: D^-1/2.
        causal: row i of n sees keys j <= m - n + i of its request's m.

    Returns:
        out bf16 [T, H, Dv]; with ``return_softmax_lse`` also lse f32 [H, T], natural log. A row without a key: 0 and
        -infinity.

    Raises:
        InvalidArgument: shapes that do not fit one another.
        Unsupported: other arguments than these.
    """
    op = "flash_attn_varlen_func"
    nothing = {"seqused_q": seqused_q, "seqused_k": seqused_k, "page_table": page_table, "qv": qv, "sinks": sinks}
    nothing.update(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    nothing.update(score_mod=score_mod, aux_tensors=aux_tensors)
    only(op, window_size=(window_size, (-1, -1)), attention_chunk=(attention_chunk, 0), softcap=(softcap, 0.0))
    only(op, **{name: (value, None) for name, value in nothing.items()})
    out, lse = _dense_heads(op, ("q", "k", "v"), (q, k, v), (cu_seqlens_q, cu_seqlens_k), softmax_scale, causal, None)
    return (out, lse.t().contiguous()) if return_softmax_lse else out


def _dense_heads(
    op: str,
    names: Sequence[str],
    tensors: Sequence[Tensor],
    indptr: Sequence[Tensor],
    scale: Optional[float],
    causal: bool,
    out: Optional[tuple[Optional[Tensor], Optional[Tensor]]],
) -> tuple[Tensor, Tensor]:
    q, k, v = tensors
    expect(op, names[0], q, "T", "H", "D")
    heads, width = q.shape[1:]
    if k.dim() == 3 and k.shape[1] != heads:
        raise Unsupported(f"{op}: {names[1]} has {k.shape[1]} heads and {names[0]} {heads}; only equal numbers are offered")
    expect(op, names[1], k, "S", heads, width)
    expect(op, names[2], v, k.shape[0], heads, "Dv")
    expect(op, "cumulative lengths of the queries", indptr[0], "b+1")
    expect(op, "cumulative lengths of the keys", indptr[1], indptr[0].shape[0])
    scale = default_scale(scale, width)
    return mha_varlen(q, k, v, int32(indptr[0]), int32(indptr[1]), scale, causal=causal, out=out)


def trtllm_ragged_attention_deepseek(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    workspace_buffer: Optional[Tensor],
    seq_lens: Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: Any,
    bmm2_scale: Any,
    o_sf_scale: float,
    batch_size: int,
    window_left: int,
    cum_seq_lens_q: Tensor,
    cum_seq_lens_kv: Tensor,
    enable_pdl: bool,
    is_causal: bool,
    return_lse: bool,
    attention_sinks: Optional[Tensor] = None,
    skip_softmax_threshold_scale_factor: Optional[float] = None,
    out: Optional[Tensor] = None,
    lse: Optional[Tensor] = None,
) -> Any:
    """:func:`flash_attn_varlen_func` with the arguments of flashinfer; no workspace is used.

    Args:
        query: bf16 [T, H, 192]; key: bf16 [S, H, 192]; value: bf16 [S, H, 128].
        workspace_buffer, seq_lens, max_q_len, max_kv_len, o_sf_scale, enable_pdl: change nothing.
        bmm1_scale: scale of the logits, a number; bmm2_scale: 1.
        cum_seq_lens_q, cum_seq_lens_kv: i32 [batch_size+1].
        out: bf16 [T, H, 128]; lse: f32 [T, H].

    Returns:
        out; with ``return_lse`` also lse f32 [T, H], natural log. A row without a key: 0 and -infinity.

    Raises:
        InvalidArgument: shapes that do not fit one another.
        Unsupported: other arguments than these.
    """
    op = "trtllm_ragged_attention_deepseek"
    only(op, window_left=(window_left, -1), attention_sinks=(attention_sinks, None))
    only(op, skip_softmax_threshold_scale_factor=(skip_softmax_threshold_scale_factor, None))
    only(op, bmm2_scale=(finite_scale(op, "bmm2_scale", bmm2_scale), 1.0))
    expect(op, "cum_seq_lens_q", cum_seq_lens_q, batch_size + 1)
    tensors, indptr = (query, key, value), (cum_seq_lens_q, cum_seq_lens_kv)
    scale = finite_scale(op, "bmm1_scale", bmm1_scale)
    result = _dense_heads(op, ("query", "key", "value"), tensors, indptr, scale, is_causal, (out, lse))
    return result if return_lse else result[0]


def trtllm_batch_decode_with_kv_cache_mla(
    query: Tensor,
    kv_cache: Tensor,
    workspace_buffer: Optional[Tensor],
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    sparse_mla_top_k: int = 0,
    out: Optional[Tensor] = None,
    bmm1_scale: Any = 1.0,
    bmm2_scale: Any = 1.0,
    sinks: Optional[Sequence[Tensor]] = None,
    skip_softmax_threshold_scale_factor: Optional[float] = None,
    enable_pdl: Optional[bool] = None,
    backend: str = "auto",
) -> Tensor:
    """Decode over a paged latent cache of bf16 or of codes with one scale; no workspace is used.

    Args:
        query: bf16 or e4m3 [b, q_len, H, 576].
        kv_cache: bf16 or e4m3 [pages, 1, page_size, 576].
        kv_lora_rank, qk_rope_head_dim: 512, 64.
        block_tables: i32 [b, q_len, K] slots with ``sparse_mla_top_k`` > 0, otherwise [b, max_pages].
        seq_lens: i32 [b]: keys of a request; sparse: leading entries of its lists.
        workspace_buffer, qk_nope_head_dim, max_seq_len, enable_pdl, backend: change nothing.
        out: bf16 [b, q_len, H, 512].
        bmm1_scale: scale of the logits, with those of codes; bmm2_scale: of the values; numbers. bmm2_scale is 1 over
            a cache of bf16.
        sinks: f32 [H], sparse only.

    Returns:
        bf16 [b, q_len, H, 512]. A row without a key: 0.

    Raises:
        InvalidArgument: shapes that do not fit one another.
        Unsupported: other arguments than these.
    """
    op = "trtllm_batch_decode_with_kv_cache_mla"
    expect(op, "query", query, "b", "q_len", "H", _LATENT + _ROPE)
    batch, rows, heads, width = query.shape
    expect(op, "kv_cache", kv_cache, "pages", 1, "page_size", width)
    expect(op, "seq_lens", seq_lens, batch)
    only(op, kv_lora_rank=(kv_lora_rank, _LATENT), qk_rope_head_dim=(qk_rope_head_dim, _ROPE))
    only(op, skip_softmax_threshold_scale_factor=(skip_softmax_threshold_scale_factor, None))
    scale, value_scale = (finite_scale(op, *entry) for entry in (("bmm1_scale", bmm1_scale), ("bmm2_scale", bmm2_scale)))
    is_packed = kv_cache.element_size() == 1
    rows_format: dict[str, Any] = {"row_format": "bf16"}
    if is_packed:
        # k_scale multiplies logits and values.
        rows_format = {"row_format": "f576", "page_size": kv_cache.shape[2], "k_scale": value_scale}
        scale /= value_scale
    else:
        only(op, bmm2_scale=(value_scale, 1.0))
    flat = codes(view_of(op, "query", query, batch * rows, heads, width))
    target = None
    if out is not None:
        expect(op, "out", out, batch, rows, heads, _LATENT)
        target = (view_of(op, "out", out, batch * rows, heads, _LATENT), None)
    if sparse_mla_top_k > 0:
        expect(op, "block_tables", block_tables, batch, rows, sparse_mla_top_k)
        kv = pool_of(op, "kv_cache", kv_cache) if is_packed else rows_of(op, "kv_cache", kv_cache)
        lists = view_of(op, "block_tables", block_tables, batch * rows, sparse_mla_top_k)
        lengths = int32(seq_lens).repeat_interleave(rows) if rows != 1 else int32(seq_lens)
        sink = sinks[0] if isinstance(sinks, (list, tuple)) and sinks else sinks
        options = {"topk_length": lengths, "sink": sink, **rows_format}
        result, _ = sparse_mla(flat, kv, int32(lists), scale, out=target, **options)
    else:
        only(op, sinks=(sinks, None))
        expect(op, "block_tables", block_tables, batch, "max_pages")
        kv = pool_of(op, "kv_cache", kv_cache) if is_packed else kv_cache.transpose(1, 2)
        indptr = even_starts(batch, rows, query.device)
        result, _ = dense_mla(flat, kv, int32(block_tables), int32(seq_lens), indptr, scale, out=target, **rows_format)
    return result.view(batch, rows, heads, _LATENT) if out is None else out


def mla_decode_fwd(
    q: Tensor,
    kv_buffer: Tensor,
    o: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_lens: Tensor,
    max_seqlen_q: int,
    sm_scale: Optional[float] = None,
    logit_cap: float = 0.0,
    num_kv_splits: Optional[int] = None,
) -> tuple[Tensor, Tensor]:
    """Decode over lists of slots that lie one after the other.

    Args:
        q: bf16 [T, H, 576].
        kv_buffer: bf16 [S, 1, 1, 576].
        o: bf16 [T, H, 512]; written.
        qo_indptr: i32 [b+1]; kv_indptr: i32 [>= b+1]; entries past request b are not looked at.
        kv_indices: i32: slots; outside the cache: unused.
        kv_last_page_lens, num_kv_splits: change nothing.
        max_seqlen_q: rows of a request; 1: row t is request t.
        sm_scale: None: 576 ^-1/2.
        logit_cap: for one row a request; 0: none.

    Returns:
        o, and lse f32 [T, H], natural log. A row without a key: 0 and -infinity.

    Raises:
        InvalidArgument: shapes that do not fit one another.
    """
    op = "mla_decode_fwd"
    expect(op, "q", q, "T", "H", _LATENT + _ROPE)
    expect(op, "kv_buffer", kv_buffer, "S", 1, 1, q.shape[2])
    expect(op, "o", o, *q.shape[:2], _LATENT)
    expect(op, "qo_indptr", qo_indptr, "b+1")
    expect(op, "kv_indices", kv_indices, "slots")
    requests = qo_indptr.shape[0] - 1
    if kv_indptr.dim() != 1 or kv_indptr.shape[0] <= requests:
        raise InvalidArgument(f"{op}: kv_indptr has shape {list(kv_indptr.shape)}, expected [>= {requests + 1}]")
    indptr = kv_indptr[: requests + 1]
    table, lengths = unpacked_lists(kv_indices, indptr), int32(indptr.diff())
    scale = default_scale(sm_scale, q.shape[2])
    if max_seqlen_q == 1:
        if requests != q.shape[0]:
            raise InvalidArgument(f"{op}: max_seqlen_q = 1 with {q.shape[0]} rows of {requests} requests")
        kv = rows_of(op, "kv_buffer", kv_buffer)
        return sparse_mla(q, kv, table, scale, topk_length=lengths, logit_cap=logit_cap, out=(o, None))
    only(op, logit_cap=(logit_cap, 0.0))
    return dense_mla(q, kv_buffer, table, lengths, int32(qo_indptr), scale, out=(o, None))


def native_swa_decode_attention(
    q: Tensor,
    swa_kv_cache: Tensor,
    swa_inv_scale: Tensor,
    swa_indices: Tensor,
    swa_lens: Tensor,
    block_size: int,
    scale: float,
    window_size: int = 128,
) -> Tensor:
    """One decode step of sliding-window attention over an fp8 cache (docs/compat/swa-decode.md).

    Args:
        q: bf16 [T, H, 512].
        swa_kv_cache: e4m3 or uint8 [pages, block_size, 512], any distance of pages.
        swa_inv_scale: bf16 or f32 [slots, 1].
        swa_indices: i32 or i64 [>= T, W] or [1, >= T, W].
        swa_lens: i32 or i64 [>= T].
        block_size: that of the cache.
        scale: scale of the logits.
        window_size: columns that a row looks at, at most.

    Returns:
        bf16 [T, H, 512]. A row without a key: 0.

    Raises:
        InvalidArgument: shapes that do not fit one another.
    """
    op = "native_swa_decode_attention"
    expect(op, "swa_kv_cache", swa_kv_cache, "pages", int(block_size), _LATENT)
    pool = pool_of(op, "swa_kv_cache", swa_kv_cache)
    options = {"inv_scale": swa_inv_scale, "row_format": "r512", "page_size": int(block_size)}
    return swa_decode(q, pool, swa_indices, swa_lens, float(scale), int(window_size), **options)[0]
