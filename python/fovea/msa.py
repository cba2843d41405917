"""Block-sparse attention (MiniMax-M3): page tables, block scores, selection, attention."""

from __future__ import annotations

from typing import Optional

from ._call import Out, Tensor, call, operator


@operator("page_table")
def build_page_table(
    req_to_token: Tensor,
    pool_row: Tensor,
    kv_len: Tensor,
    page_size: int,
    *,
    delta: int = 0,
    max_pages: Optional[int] = None,
    impl: Optional[str] = None,
    out: Out = None,
    stream: Optional[int] = None,
) -> Tensor:
    """Page tables from the server's map of tokens to slots.

    Args:
        req_to_token: i32 [rows, W]: slot of every token; the slots of a page follow one another.
        pool_row: i32 [R]: row of the map of each request.
        kv_len: i32 [R].
        page_size: tokens per page.
        delta: added to every length > 0.
        max_pages: columns; None: ceil(W / page_size).

    Returns:
        i32 [R, max_pages]; 0 past a request's pages, -1 where the map's entry is negative.

    Raises:
        InvalidArgument: types, shapes, parameters outside their range.
    """
    return call(build_page_table, locals())


@operator("scores")
def msa_block_scores(
    iq: Tensor,
    index_k: Tensor,
    page_table: Tensor,
    kv_len: Tensor,
    q_indptr: Tensor,
    block_size: int,
    *,
    q_offset: Optional[Tensor] = None,
    score: str = "max",
    index_scale: float = 1.0,
    page_size: Optional[int] = None,
    impl: Optional[str] = None,
    out: Out = None,
    stream: Optional[int] = None,
) -> Tensor:
    """Scores every block of a request for every row and index head: the largest logit, or their log-sum-exp.

    Args:
        iq: bf16 [T, Hi, Di].
        index_k: bf16 [slots, 1, Di].
        page_table: i32 [R, max_pages].
        kv_len: i32 [R], tokens of this call included.
        q_indptr: i32 [R+1]: rows of each request.
        block_size: tokens per block, which is a page.
        q_offset: i32 [R]: position of a request's first row; None: kv_len - rows.
        score: "max" or "lse".
        index_scale: of the logits.
        page_size: None or ``block_size``.

    Returns:
        f32 [Hi, T, max_pages]; -infinity where a row sees nothing of a block.

    Raises:
        InvalidArgument: types, shapes, parameters outside their range.
    """
    return call(msa_block_scores, locals())


@operator("blocks")
def msa_select_blocks(
    scores: Tensor,
    kv_len: Tensor,
    q_indptr: Tensor,
    block_size: int,
    topk: int,
    *,
    q_offset: Optional[Tensor] = None,
    init_blocks: int = 0,
    local_blocks: int = 1,
    num_kv_heads: Optional[int] = None,
    index_reduce: str = "per_group",
    blocks_layout: str = "head_major",
    page_size: Optional[int] = None,
    impl: Optional[str] = None,
    out: Out = None,
    stream: Optional[int] = None,
) -> Tensor:
    """The blocks of every row: the first ``init_blocks``, the last ``local_blocks``, then the best scores; ascending.

    Args:
        scores: f32 [Hi, T, max_pages].
        kv_len: i32 [R].
        q_indptr: i32 [R+1].
        block_size: tokens per block.
        topk: blocks of a list.
        q_offset: i32 [R]; None: kv_len - rows.
        init_blocks, local_blocks: chosen whatever their score.
        num_kv_heads: Hkv; None: Hi.
        index_reduce: "per_group" (Hi = Hkv), "max_all" or "union".
        blocks_layout: "head_major" or "row_major".
        page_size: None or ``block_size``.

    Returns:
        i32 [Hkv, T, topk] (head_major) or [T, Hkv, topk] (row_major), then -1; union: Hi / Hkv * topk columns.

    Raises:
        InvalidArgument: types, shapes, parameters outside their range.
    """
    return call(msa_select_blocks, locals())


@operator("blocks")
def msa_score_select(
    iq: Tensor,
    index_k: Tensor,
    page_table: Tensor,
    kv_len: Tensor,
    q_indptr: Tensor,
    block_size: int,
    topk: int,
    *,
    q_offset: Optional[Tensor] = None,
    score: str = "max",
    index_scale: float = 1.0,
    init_blocks: int = 0,
    local_blocks: int = 1,
    num_kv_heads: Optional[int] = None,
    index_reduce: str = "per_group",
    blocks_layout: str = "head_major",
    page_size: Optional[int] = None,
    impl: Optional[str] = None,
    out: Out = None,
    stream: Optional[int] = None,
) -> Tensor:
    """:func:`msa_block_scores` and :func:`msa_select_blocks` in one, without the scores in memory.

    Args:
        iq: bf16 [T, Hi, Di].
        index_k: bf16 [slots, 1, Di].
        page_table: i32 [R, max_pages].
        kv_len: i32 [R].
        q_indptr: i32 [R+1].
        block_size, topk: tokens per block, blocks of a list.
        q_offset, score, index_scale: as in :func:`msa_block_scores`.
        init_blocks, local_blocks, num_kv_heads, index_reduce, blocks_layout: as in :func:`msa_select_blocks`.
        page_size: None or ``block_size``.

    Returns:
        i32 [Hkv, T, topk] or [T, Hkv, topk].

    Raises:
        InvalidArgument: types, shapes, parameters outside their range.
    """
    return call(msa_score_select, locals())


@operator("out", "lse")
def msa_attend(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    page_table: Tensor,
    kv_len: Tensor,
    q_indptr: Tensor,
    blocks: Tensor,
    block_size: int,
    *,
    q_offset: Optional[Tensor] = None,
    sink: Optional[Tensor] = None,
    q_scale: Optional[Tensor] = None,
    k_scale: Optional[Tensor] = None,
    v_scale: Optional[Tensor] = None,
    k_global_scale: Optional[Tensor] = None,
    v_global_scale: Optional[Tensor] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = True,
    kv_mode: str = "bf16",
    blocks_layout: str = "head_major",
    topk: Optional[int] = None,
    page_size: Optional[int] = None,
    impl: Optional[str] = None,
    out: Out = None,
    stream: Optional[int] = None,
) -> tuple[Tensor, Tensor]:
    """Grouped-query attention of each row over the blocks of the cache that its list names.

    Args:
        q: bf16 [T, Hq, D]; q8 modes u8 (e4m3).
        k_pool, v_pool: bf16 or u8 [slots, Hkv, D] or [pages, Hkv, block_size, D], any strides, equal for both; q8kv4:
            u8 [pages, Hkv, block_size, D/2].
        page_table: i32 [R, max_pages].
        kv_len: i32 [R], tokens of this call included.
        q_indptr: i32 [R+1]: rows of each request.
        blocks: i32 [Hkv, T, K] or [T, Hkv, K]: a set; -1 and ids past the length are nothing.
        block_size: tokens per block, which is a page.
        q_offset: i32 [R]: position of a request's first row; None: kv_len - rows.
        sink: f32 [Hq].
        q_scale, k_scale, v_scale, k_global_scale, v_global_scale: of the mode (docs/msa_attend.md).
        softmax_scale: None: D^-1/2.
        causal: False drops the test that a token is not past its row.
        kv_mode: "bf16", "kv8", "q8kv8" or "q8kv4".
        blocks_layout: "head_major" or "row_major".
        topk: None or K.
        page_size: None or ``block_size``.

    Returns:
        out bf16 [T, Hq, D] and lse f32 [T, Hq] (natural log, without the sink). A row that sees nothing: 0, -infinity.

    Raises:
        InvalidArgument: types, shapes, parameters outside their range.
        Unsupported: ``impl`` does not do this problem.
    """
    return call(msa_attend, locals())
