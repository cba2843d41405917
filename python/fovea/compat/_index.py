"""The indexer under the names of sgl_kernel and deep_gemm, and sglang's mapping of positions to slots."""

from __future__ import annotations

from typing import Any, Optional, Sequence

from .._errors import InvalidArgument
from ..batch import paged_schedule
from ..index import index_logits, topk_select
from ._common import codes, expect, int32, only, pool_of, torch_module

Tensor = Any

_CPU_WORKERS = 64

# Logits that fp8_mqa_logits moves at once, so that its scratch does not grow with the batch.
_MOVED_AT_ONCE = 1 << 23


def fast_topk_v2(score: Tensor, lengths: Tensor, topk: int, row_starts: Optional[Tensor] = None) -> Tensor:
    """Positions of the ``topk`` largest logits of every row, ascending, then -1.

    Args:
        score: f32 [B, L].
        lengths: i32 [B].
        topk: any number; the original takes 2048.
        row_starts: i32 [B]: first column of each row; positions count from it.

    Returns:
        i32 [B, topk].

    Raises:
        InvalidArgument: shapes that do not fit one another.
    """
    _check_rows("fast_topk_v2", score, lengths=lengths, row_starts=row_starts)
    return topk_select(score, int32(lengths), topk, row_start=row_starts)


def fast_topk_transform_fused(
    score: Tensor,
    lengths: Tensor,
    page_table_size_1: Tensor,
    cu_seqlens_q: Tensor,
    topk: int,
    row_starts: Optional[Tensor] = None,
) -> Tensor:
    """:func:`fast_topk_v2` with the slot of each position: ``page_table_size_1`` [R, W] of the row's request.

    Rows ``cu_seqlens_q[r]`` .. ``cu_seqlens_q[r+1] - 1`` (i32 [R+1]) belong to request r; a row of none is all -1, and
    so is a position past the table.
    """
    op = "fast_topk_transform_fused"
    torch = torch_module()
    _check_rows(op, score, lengths=lengths, row_starts=row_starts)
    expect(op, "page_table_size_1", page_table_size_1, "R", "W")
    expect(op, "cu_seqlens_q", cu_seqlens_q, "R+1")
    rows = torch.arange(score.shape[0], dtype=cu_seqlens_q.dtype, device=score.device)
    request = torch.searchsorted(cu_seqlens_q, rows, right=True, out_int32=True) - 1
    # A row behind the last request finds no row of the table, even where the table has more rows.
    request = torch.where(request < cu_seqlens_q.shape[0] - 1, request, torch.full_like(request, -1))
    options = {"token_table": int32(page_table_size_1), "row_to_request": request}
    return topk_select(score, int32(lengths), topk, row_start=row_starts, transform="paged", **options)


def fast_topk_transform_ragged_fused(
    score: Tensor,
    lengths: Tensor,
    topk_indices_offset: Tensor,
    topk: int,
    row_starts: Optional[Tensor] = None,
) -> Tensor:
    """:func:`fast_topk_v2` plus ``topk_indices_offset`` i32 [B]; -1 stays."""
    op = "fast_topk_transform_ragged_fused"
    _check_rows(op, score, lengths=lengths, row_starts=row_starts, topk_indices_offset=topk_indices_offset)
    options = {"transform": "ragged", "row_offset": int32(topk_indices_offset)}
    return topk_select(score, int32(lengths), topk, row_start=row_starts, **options)


def _check_rows(op: str, score: Tensor, **per_row: Optional[Tensor]) -> None:
    expect(op, "score", score, "B", "L")
    for name, tensor in per_row.items():
        if tensor is not None:
            expect(op, name, tensor, score.shape[0])


def get_num_sms() -> int:
    """Multiprocessors of the current GPU; 64 without one."""
    torch = torch_module()
    if not torch.cuda.is_available():
        return _CPU_WORKERS
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


def get_paged_mqa_logits_metadata(context_lens: Tensor, block_kv: int, num_sms: int) -> Tensor:
    """The work of :func:`fp8_paged_mqa_logits` dealt to ``num_sms`` workers.

    Args:
        context_lens: i32 [B], or [B, n], whose last column is the longest.
        block_kv: changes nothing.
        num_sms: >= 1.

    Returns:
        i32 [num_sms+1, 2] (docs/paged_schedule.md).

    Raises:
        InvalidArgument: another shape.
    """
    op = "get_paged_mqa_logits_metadata"
    if context_lens.dim() == 2:
        expect(op, "context_lens", context_lens, "B", "n")
        context_lens = context_lens[:, -1].contiguous()
    expect(op, "context_lens", context_lens, "B")
    return paged_schedule(int32(context_lens), num_sms)


def fp8_mqa_logits(
    q: Tensor,
    kv: Sequence[Tensor],
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
) -> Tensor:
    """Logits of every row over keys ``cu_seq_len_k_start`` .. ``cu_seq_len_k_end - 1`` of one array.

    Args:
        q: e4m3 [T, H, D].
        kv: the pair of e4m3 [S, D] and f32 [S] (or [S, 1]).
        weights: f32 [T, H].
        cu_seq_len_k_start, cu_seq_len_k_end: i32 [T].
        clean_logits: columns outside a row become -infinity; they do in every case.
        max_seqlen_k: 0: column j is key j. Otherwise the columns of the result, which count from the row's first key;
            longer rows are cut.

    Returns:
        f32 [T, S] or [T, max_seqlen_k].

    Raises:
        InvalidArgument: shapes that do not fit one another.
    """
    op = "fp8_mqa_logits"
    torch = torch_module()
    if not isinstance(kv, (tuple, list)) or len(kv) != 2:
        raise InvalidArgument(f"{op}: kv is of type {type(kv).__name__}, expected the pair of codes and scales")
    k_fp8, k_scale = kv
    expect(op, "q", q, "T", "H", "D")
    rows, heads, width = q.shape
    expect(op, "kv[0]", k_fp8, "S", width)
    keys = k_fp8.shape[0]
    k_scale = k_scale[:, 0] if k_scale.dim() == 2 else k_scale
    expect(op, "kv[1]", k_scale, keys)
    expect(op, "weights", weights, rows, heads)
    expect(op, "cu_seq_len_k_start", cu_seq_len_k_start, rows)
    expect(op, "cu_seq_len_k_end", cu_seq_len_k_end, rows)
    start, end = (tensor.clamp(0, keys) for tensor in (int32(cu_seq_len_k_start), int32(cu_seq_len_k_end)))
    columns = max_seqlen_k if max_seqlen_k > 0 else keys
    result = torch.full((rows, columns), -torch.inf, dtype=torch.float32, device=q.device)
    column = torch.arange(columns, device=q.device)
    step = max(1, _MOVED_AT_ONCE // max(columns, 1))
    for first in range(0, rows, step):
        part = slice(first, first + step)
        scores = torch.zeros_like(result[part])
        options = {"k_start": start[part], "k_end": end[part], "out": scores}
        index_logits(codes(q[part]), weights[part], "ragged", k_fp8=codes(k_fp8), k_scale=k_scale, **options)
        # Scores count columns from the row's first key.
        place = column - (0 if max_seqlen_k > 0 else start[part, None].long())
        held = (place >= 0) & (place < (end - start)[part, None])
        if max_seqlen_k <= 0:
            scores = scores.gather(1, place.clamp(0, max(columns - 1, 0)))
        result[part] = torch.where(held, scores, result[part])
    return result


def fp8_paged_mqa_logits(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Optional[Tensor],
    max_context_len: int,
    clean_logits: bool = False,
) -> Tensor:
    """Logits of n rows of every request over its pages of the index cache.

    Args:
        q: e4m3 [B, n, H, D].
        kv_cache: uint8 [pages, page_size, 1, D+4]: the codes of a page, then its scales; any distance of pages.
        weights: f32 [B * n, H].
        context_lens: i32 [B]: keys of the last row, each row before it has one less; or [B, n], of each row.
        block_table: i32 [B, max_pages].
        schedule_meta: of :func:`get_paged_mqa_logits_metadata`; changes no result.
        max_context_len: columns; longer rows are cut.
        clean_logits: columns outside a row become -infinity.

    Returns:
        f32 [B * n, max_context_len], column = position.

    Raises:
        InvalidArgument: shapes that do not fit one another.
    """
    op = "fp8_paged_mqa_logits"
    torch = torch_module()
    expect(op, "q", q, "B", "n", "H", "D")
    batch, per_request, heads, width = q.shape
    rows = batch * per_request
    expect(op, "kv_cache", kv_cache, "pages", "page_size", 1, width + 4)
    expect(op, "weights", weights, rows, heads)
    expect(op, "block_table", block_table, batch, "max_pages")
    if schedule_meta is not None:
        expect(op, "schedule_meta", schedule_meta, "workers+1", 2)
    if context_lens.dim() == 2:
        expect(op, "context_lens", context_lens, batch, per_request)
        row_len = int32(context_lens).reshape(rows)
    else:
        expect(op, "context_lens", context_lens, batch)
        behind = torch.arange(per_request - 1, -1, -1, dtype=torch.int32, device=q.device)
        row_len = (int32(context_lens)[:, None] - behind).clamp_min(0).reshape(rows)
    request = torch.arange(batch, dtype=torch.int32, device=q.device).repeat_interleave(per_request)
    logits = torch.zeros(rows, max_context_len, dtype=torch.float32, device=q.device)
    index_logits(
        codes(q).reshape(rows, heads, width),
        weights,
        "paged",
        index_pool=pool_of(op, "kv_cache", kv_cache),
        page_table=int32(block_table),
        row_to_request=request,
        row_len=row_len,
        page_size=kv_cache.shape[1],
        out=logits,
    )
    if clean_logits:
        column = torch.arange(max_context_len, device=q.device)
        logits.masked_fill_(column >= row_len[:, None], -torch.inf)
    return logits


def transform_index_page_table_decode(
    page_table: Tensor, topk_indices: Tensor, result: Optional[Tensor] = None, page_size: int = 1
) -> Tensor:
    """Slots of positions: row t through row t of the table.

    Args:
        page_table: i32 [R, W], slot of every position.
        topk_indices: i32 [T, K], T >= R; negative, past the table or in a row past it: -1.
        result: i32 [T, K] for the slots.
        page_size: 1.

    Returns:
        i32 [T, K].

    Raises:
        InvalidArgument: shapes that do not fit one another.
    """
    op = "transform_index_page_table_decode"
    torch = torch_module()
    expect(op, "page_table", page_table, "R", "W")
    expect(op, "topk_indices", topk_indices, "T", "K")
    if page_table.shape[0] > topk_indices.shape[0]:
        raise InvalidArgument(
            f"{op}: page_table has {page_table.shape[0]} rows, expected at most the {topk_indices.shape[0]} of topk_indices"
        )
    row = torch.arange(topk_indices.shape[0], dtype=torch.int32, device=topk_indices.device)
    return _slots(op, page_table, topk_indices, row, result, page_size)


def transform_index_page_table_prefill(
    page_table: Tensor, topk_indices: Tensor, extend_lens_cpu: Sequence[int], page_size: int = 1
) -> Tensor:
    """Slots of positions: request r has ``extend_lens_cpu[r]`` rows and row r of the table; rows behind them: -1."""
    op = "transform_index_page_table_prefill"
    torch = torch_module()
    expect(op, "page_table", page_table, len(extend_lens_cpu), "W")
    expect(op, "topk_indices", topk_indices, "T", "K")
    rows, total = topk_indices.shape[0], sum(extend_lens_cpu)
    if total > rows or any(length < 0 for length in extend_lens_cpu):
        raise InvalidArgument(f"{op}: extend_lens_cpu has the sum {total}, expected lengths >= 0 of at most {rows} rows")
    owner = [request for request, length in enumerate(extend_lens_cpu) for _ in range(length)] + [-1] * (rows - total)
    row = torch.tensor(owner, dtype=torch.int32).to(topk_indices.device)
    return _slots(op, page_table, topk_indices, row, None, page_size)


def _slots(
    op: str, page_table: Tensor, positions: Tensor, row: Tensor, result: Optional[Tensor], page_size: int
) -> Tensor:
    only(op, page_size=(page_size, 1))
    torch = torch_module()
    tables, columns = page_table.shape
    known = (row >= 0) & (row < tables)
    held = known[:, None] & (positions >= 0) & (positions < columns)
    if tables == 0 or columns == 0:
        slots = torch.full(positions.shape, -1, dtype=torch.int32, device=positions.device)
    else:
        found = page_table[row.clamp(0, tables - 1).long()[:, None], positions.clamp(0, columns - 1).long()]
        slots = torch.where(held, int32(found), torch.full_like(positions, -1, dtype=torch.int32))
    if result is None:
        return slots
    expect(op, "result", result, *positions.shape)
    return result.copy_(slots)
