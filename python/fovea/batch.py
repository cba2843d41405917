"""Lengths of a batch to the arrays of a step, schedules, the split of a prefill over ranks."""

from __future__ import annotations

from typing import Mapping, Optional

from ._call import Out, Tensor, call, operator


@operator(by_name=True)
def metadata_refresh(
    seq_len: Tensor,
    pool_row: Tensor,
    req_to_token: Tensor,
    mode: str,
    topk: int,
    page_size: int,
    *,
    ext_len: Optional[Tensor] = None,
    prefix_len: Optional[Tensor] = None,
    rows_per_request: Optional[int] = None,
    padded_rows: int = 0,
    kv_len_delta: int = 0,
    transform: str = "paged",
    workers: int = 64,
    split_parts: int = 0,
    impl: Optional[str] = None,
    out: Optional[Mapping[str, Tensor]] = None,
    stream: Optional[int] = None,
) -> dict[str, Tensor]:
    """Builds the arrays of one step of sparse attention from the lengths of a batch and the request table.

    How many rows and pages there are follows from ``seq_len`` and ``ext_len``, so they are on the CPU. Formulas and
    meaning of every array: docs/metadata.md.

    Args:
        seq_len: i32 [R], tokens; new ones included in every mode but "target_verify".
        pool_row: i32 [R]: row of ``req_to_token``.
        req_to_token: i32 [rows, W]: slot of each position.
        mode: "extend", "decode", "idle", "target_verify", "draft_extend", "draft_extend_v2" or "mixed".
        topk: width of a selection.
        page_size: tokens per page, 1..256.
        ext_len: i32 [R]: new rows (extend, mixed, draft_extend).
        prefix_len: i32 [R]: accepted beside it; seq_len - ext_len by definition.
        rows_per_request: N of target_verify and draft_extend_v2.
        padded_rows: T; 0: no padding.
        kv_len_delta: added to every length (decode, idle).
        transform: "paged", "local" or "ragged" (gives ``row_offset``).
        workers: entries of ``schedule``.
        split_parts: entries of ``split_schedule``; 0: none.

    Returns:
        i32 arrays by name: ``kv_len`` [R], ``kv_indptr`` [R+1], ``max_kv_len`` [1], ``q_indptr`` [R+1], ``max_q_len``
        [1], ``page_table`` [R, pages], ``row_to_request`` [T], ``row_len`` [E], ``topk_length`` [T], ``topk_indptr``
        [T+1], ``ext_len`` [R]; extend and mixed: ``k_start``, ``k_end`` [E] and, ragged, ``row_offset`` [E]; other
        modes: ``schedule`` [workers+1, 2]; with ``split_parts``: ``split_schedule`` [split_parts, 8], ``split_indptr``
        [T+1].

    Raises:
        InvalidArgument: types, shapes, parameters outside their range.
        Unsupported: lengths on a GPU.
    """
    return call(metadata_refresh, locals())


@operator("error_word")
def metadata_check(
    seq_len: Tensor,
    pool_row: Tensor,
    req_to_token: Tensor,
    mode: str,
    page_size: int,
    capacity: int,
    *,
    ext_len: Optional[Tensor] = None,
    out_cache_loc: Optional[Tensor] = None,
    topk_indices: Optional[Tensor] = None,
    rows_per_request: Optional[int] = None,
    max_rows: Optional[int] = None,
    kv_len_delta: int = 0,
    impl: Optional[str] = None,
    out: Out = None,
    stream: Optional[int] = None,
) -> Tensor:
    """Looks at every length, table entry and slot that a step uses and reports the first fault.

    Args:
        seq_len, pool_row: i32 [R].
        req_to_token: i32 [rows, W].
        mode: as in :func:`metadata_refresh`.
        page_size: tokens per page, 1..256.
        capacity: slots of the pools, those of the dummy page included.
        ext_len: i32 [R] (extend, mixed, draft_extend).
        out_cache_loc: i32 [T]: slot of each new token.
        topk_indices: i32 [T, K]: selected slots.
        rows_per_request: N of target_verify and draft_extend_v2.
        max_rows: bound of the rows; None: no bound.
        kv_len_delta: added to every length (decode, idle).

    Returns:
        i32 [8]: fault (0: none), request, position, value, limit, count, 0, 0 (docs/metadata_check.md).

    Raises:
        InvalidArgument: types, shapes, parameters outside their range.
    """
    return call(metadata_check, locals())


@operator("schedule")
def paged_schedule(
    row_len: Tensor,
    workers: int = 64,
    *,
    rows_per_group: int = 1,
    impl: Optional[str] = None,
    out: Out = None,
    stream: Optional[int] = None,
) -> Tensor:
    """Deals the work of paged indexer logits evenly to workers.

    Args:
        row_len: i32 [T]: keys of each row.
        workers: how many.
        rows_per_group: rows that are scored together; divides T.

    Returns:
        i32 [workers+1, 2]: (group, segment of 256 tokens in it) where each worker starts; the last entry is the end.

    Raises:
        InvalidArgument: types, shapes, parameters outside their range.
    """
    return call(paged_schedule, locals())


@operator("split_schedule", "split_indptr")
def split_schedule(
    topk_length: Tensor,
    parts: int = 64,
    *,
    impl: Optional[str] = None,
    out: Out = None,
    stream: Optional[int] = None,
) -> tuple[Tensor, Tensor]:
    """Cuts the rows of sparse decode into contiguous parts of nearly equal cost.

    Args:
        topk_length: i32 [T]: slots of each row.
        parts: how many.

    Returns:
        split_schedule i32 [parts, 8] and split_indptr i32 [T+1] (docs/split_schedule.md).

    Raises:
        InvalidArgument: types, shapes, parameters outside their range.
    """
    return call(split_schedule, locals())


@operator(by_name=True)
def context_split(
    seq_len: Tensor,
    ext_len: Tensor,
    ranks: int,
    rank: int,
    scheme: str,
    *,
    prefix_len: Optional[Tensor] = None,
    extend_kv_source: str = "cache",
    out: Optional[Mapping[str, Tensor]] = None,
) -> dict[str, Tensor]:
    """The rows of a prefill that one rank of context parallelism computes. A function of host values.

    Args:
        seq_len, ext_len: i32 [R] on the CPU: KV length and new rows of each request.
        ranks, rank: how many ranks, and which one.
        scheme: "round_robin" or "zigzag".
        prefix_len: i32 [R]: must be seq_len - ext_len.
        extend_kv_source: "cache" or "fresh": what ``row_offset`` counts in.

    Returns:
        i32 arrays by name: ``rank_rows``, ``row_len``, ``kv_len``; round_robin: ``selected``, ``ext_len``,
        ``kv_indptr``, ``q_indptr``, ``k_start``, ``k_end``, ``row_to_request``, ``row_offset``; zigzag: ``block_len``
        (docs/context_split.md).

    Raises:
        InvalidArgument: wrong lengths, a rank that does not exist.
        Unsupported: lengths on a GPU.
    """
    return call(context_split, locals())
