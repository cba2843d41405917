"""Arrays of a batch under the names of sglang: lengths, the split over ranks, copies into captured buffers."""

from __future__ import annotations

import importlib
import sys
from typing import Any, NamedTuple, Optional, Sequence, Union

import numpy

from .._errors import InvalidArgument
from ..batch import context_split
from ._common import expect, starts, torch_module

Tensor = Any

# Ranks of context parallelism and this one, as set_context_parallel() gave them.
_context_parallel: Optional[tuple[int, int]] = None

_DECODE, _TARGET_VERIFY, _DRAFT_EXTEND = 0, 1, 2


def set_context_parallel(size: Optional[int], rank: int = 0) -> None:
    """How many ranks share a prefill, and which one this is; None: as an installed sglang says, without one 1.

    Raises:
        InvalidArgument: a rank that does not exist.
    """
    global _context_parallel
    if size is not None and not 0 <= rank < size:
        raise InvalidArgument(f"set_context_parallel: rank = {rank}, expected 0 .. {size - 1}")
    _context_parallel = None if size is None else (int(size), int(rank))


def _ranks() -> tuple[int, int]:
    if _context_parallel is not None:
        return _context_parallel
    name = "sglang.srt.layers.dp_attention"
    if name not in sys.modules:  # an engine has imported it long before
        return 1, 0
    engine = importlib.import_module(name)
    kind = "cp" if hasattr(engine, "get_attention_cp_size") else "tp"
    return getattr(engine, f"get_attention_{kind}_size")(), getattr(engine, f"get_attention_{kind}_rank")()


def compute_cu_seqlens(seqlens: Tensor) -> Tensor:
    """i32 [n+1]: [0, x0, x0 + x1, ...] of lengths [n]."""
    expect("compute_cu_seqlens", "seqlens", seqlens, "n")
    return starts(seqlens)


def compute_nsa_seqlens(original_seq_lens: Tensor, nsa_index_topk: int) -> Tensor:
    """Lengths cut to what a selection holds: at most ``nsa_index_topk``, at least 0."""
    if nsa_index_topk < 1:
        raise InvalidArgument(f"compute_nsa_seqlens: nsa_index_topk = {nsa_index_topk}, expected >= 1")
    return original_seq_lens.clamp(0, nsa_index_topk)


def is_nsa_enable_prefill_cp() -> bool:
    """Whether ranks share prefills (:func:`set_context_parallel`)."""
    return _ranks()[0] > 1


def can_nsa_prefill_cp_round_robin_split(forward_batch: Any) -> bool:
    """Whether the rows of this batch are dealt to the ranks: a prefill with rows, and more ranks than one."""
    lengths = getattr(forward_batch, "extend_seq_lens_cpu", None)
    mode = getattr(forward_batch, "forward_mode", None)
    is_prefill = mode is None or mode.is_context_parallel_extend()
    return is_nsa_enable_prefill_cp() and is_prefill and lengths is not None and sum(lengths) > 0


def pad_nsa_cache_seqlens(forward_batch: Any, nsa_cache_seqlens: Tensor) -> Tensor:
    """Lengths followed by 0 for the rows that pad this rank's part.

    Rows of a batch: the most of ``forward_batch.global_num_tokens_cpu`` where that is given, each rounded up to the
    ranks; with a split otherwise those of ``extend_seq_lens_cpu``. A split leaves every rank its share, rounded up.
    """
    size, _ = _ranks()
    is_split = can_nsa_prefill_cp_round_robin_split(forward_batch)
    tokens = getattr(forward_batch, "global_num_tokens_cpu", None)
    if tokens is None and not is_split:
        return nsa_cache_seqlens
    tokens = [sum(forward_batch.extend_seq_lens_cpu)] if tokens is None else tokens
    rows = max((-(-int(count) // size) * size for count in tokens), default=0)
    missing = (rows // size if is_split else rows) - nsa_cache_seqlens.shape[0]
    if missing <= 0:
        return nsa_cache_seqlens
    return torch_module().cat([nsa_cache_seqlens, nsa_cache_seqlens.new_zeros(missing, *nsa_cache_seqlens.shape[1:])])


def nsa_cp_round_robin_split_data(input_: Union[Tensor, Sequence[Any]]) -> Any:
    """Entries rank, rank + ranks, ... of a tensor (a copy) or a list."""
    size, rank = _ranks()
    part = input_[rank::size]
    return part.contiguous() if hasattr(part, "contiguous") else part


def nsa_cp_round_robin_split_q_seqs(
    extend_seqs_cpu: Sequence[int], extend_seqs: Tensor
) -> tuple[list[int], Tensor, list[int], Tensor]:
    """The rows of every request that this rank has when rows are dealt one by one.

    Args:
        extend_seqs_cpu: rows of each request.
        extend_seqs: the same as a tensor, whose device and type the results take.

    Returns:
        Rows of the requests of which this rank has any, as a list and as a tensor, and which requests these are, as a
        list and as an i32 tensor.

    Raises:
        InvalidArgument: lists of different lengths, negative lengths.
    """
    op = "nsa_cp_round_robin_split_q_seqs"
    torch = torch_module()
    expect(op, "extend_seqs", extend_seqs, len(extend_seqs_cpu))
    size, rank = _ranks()
    lengths = numpy.array(extend_seqs_cpu, dtype=numpy.int32)
    split = context_split(lengths, lengths, size, rank, "round_robin")
    rows, requests = split["ext_len"].tolist(), split["selected"].tolist()
    as_tensor = torch.tensor(rows, dtype=extend_seqs.dtype).to(extend_seqs.device)
    return rows, as_tensor, requests, torch.tensor(requests, dtype=torch.int32).to(extend_seqs.device)


class _Step(NamedTuple):
    """The arrays of one step; ``place`` ends the names of the arguments that hold them."""

    place: str
    cache_seqlens: Tensor
    cu_seqlens_k: Tensor
    table: Tensor
    nsa_cache_seqlens: Tensor
    seqlens_expanded: Optional[Tensor]
    nsa_cu_seqlens_k: Tensor
    real_page_table: Optional[Tensor]
    flashmla_num_splits: Optional[Tensor]
    flashmla_metadata: Optional[Tensor]

    def label(self, name: str) -> str:
        argument = name if name != "table" else "page_indices" if self.place == "src" else "page_table_1"
        return f"{argument}_{self.place}"


def _copy_pair(op: str, name: str, source: _Step, target: _Step, extents: Sequence[Optional[int]]) -> tuple[Any, Any]:
    """What is written of one array, and with what; an extent of None is the source's own."""
    have, want = getattr(source, name), getattr(target, name)
    for step, array in ((source, have), (target, want)):
        expect(op, step.label(name), array, *("n" for _ in extents))
    shape = [own if extent is None else extent for own, extent in zip(have.shape, extents)]
    for step, array in ((source, have), (target, want)):
        if any(extent < needed for extent, needed in zip(array.shape, shape)):
            raise InvalidArgument(f"{op}: {step.label(name)} has shape {list(array.shape)}, expected at least {shape}")
    if have.dtype != want.dtype:
        raise InvalidArgument(f"{op}: {target.label(name)} is of type {want.dtype}, expected {have.dtype}")
    part = tuple(slice(0, extent) for extent in shape)
    return want[part], have[part]


def _copy_step(
    op: str, source: _Step, targets: Sequence[_Step], forward_mode: int, bs: int, columns: int, rows: int
) -> None:
    is_decode = forward_mode == _DECODE
    extents: dict[str, tuple[Optional[int], ...]] = {
        "cache_seqlens": (bs,),
        "cu_seqlens_k": (bs + 1,),
        "table": (None, columns),
        "nsa_cache_seqlens": (rows,),
        "nsa_cu_seqlens_k": (rows + 1,),
        "real_page_table": (None, None),
        "flashmla_num_splits": (rows + 1,),
        "flashmla_metadata": (None, None),
    }
    if not is_decode:  # in decode it is cache_seqlens
        extents["seqlens_expanded"] = (rows,)
    optional = ("real_page_table", "flashmla_num_splits", "flashmla_metadata")
    pairs = []
    for target in targets:
        for name, shape in extents.items():
            have, want = getattr(source, name), getattr(target, name)
            if name in optional and have is None and want is None:
                continue
            if have is None or want is None:
                raise InvalidArgument(f"{op}: {(source if have is None else target).label(name)} is missing")
            to, values = _copy_pair(op, name, source, target, shape)
            # Entry 0 of these is constant.
            pairs.append((to[1:], values[1:]) if name in ("cu_seqlens_k", "nsa_cu_seqlens_k") else (to, values))
    for to, values in pairs:
        to.copy_(values)
    for target in targets:
        # Rows behind the source's are padding, so that a smaller batch leaves no trace of a larger one.
        target.nsa_cache_seqlens[rows:].zero_()
        if not is_decode:
            target.seqlens_expanded[rows:].zero_()
        for offsets in (target.nsa_cu_seqlens_k, target.flashmla_num_splits):
            if offsets is not None:
                offsets[rows + 1 :] = offsets[rows]


def fused_metadata_copy_cuda(
    cache_seqlens_src: Tensor,
    cu_seqlens_k_src: Tensor,
    page_indices_src: Tensor,
    nsa_cache_seqlens_src: Tensor,
    seqlens_expanded_src: Optional[Tensor],
    nsa_cu_seqlens_k_src: Tensor,
    real_page_table_src: Optional[Tensor],
    flashmla_num_splits_src: Optional[Tensor],
    flashmla_metadata_src: Optional[Tensor],
    cache_seqlens_dst: Tensor,
    cu_seqlens_k_dst: Tensor,
    page_table_1_dst: Tensor,
    nsa_cache_seqlens_dst: Tensor,
    seqlens_expanded_dst: Optional[Tensor],
    nsa_cu_seqlens_k_dst: Tensor,
    real_page_table_dst: Optional[Tensor],
    flashmla_num_splits_dst: Optional[Tensor],
    flashmla_metadata_dst: Optional[Tensor],
    forward_mode: int,
    bs: int,
    max_len: int,
    max_seqlen_k: int,
    seqlens_expanded_size: int,
) -> None:
    """Copies the arrays of a step into those of a captured one; every array with its own strides.

    Entry 0 of a cumulative array is not written. Rows of the destination behind the source's become padding: length 0,
    offsets their last value.

    Args:
        *_src, *_dst: i32. Requests: ``cache_seqlens`` [bs], ``cu_seqlens_k`` [bs+1]. Rows: ``nsa_cache_seqlens``,
            ``seqlens_expanded`` (None in mode 0, where it is ``cache_seqlens``) [size], ``nsa_cu_seqlens_k`` [size+1].
            Slots: ``page_indices`` [rows, columns] into ``page_table_1``. In both or in none: ``real_page_table``
            [rows, pages], ``flashmla_num_splits`` [size+1], ``flashmla_metadata`` [parts, 8].
        forward_mode: 0 decode, 1 target verify, 2 draft extend.
        bs: requests.
        max_len, max_seqlen_k: columns of the slots: the first in mode 0, the second in the others.
        seqlens_expanded_size: rows.

    Raises:
        InvalidArgument: an array that is missing, present on one side only, too small or of another type; before
            anything is written.
    """
    op = "fused_metadata_copy_cuda"
    if forward_mode not in (_DECODE, _TARGET_VERIFY, _DRAFT_EXTEND):
        raise InvalidArgument(f"{op}: forward_mode = {forward_mode}, expected 0, 1 or 2")
    source = _Step(
        "src",
        cache_seqlens_src,
        cu_seqlens_k_src,
        page_indices_src,
        nsa_cache_seqlens_src,
        seqlens_expanded_src,
        nsa_cu_seqlens_k_src,
        real_page_table_src,
        flashmla_num_splits_src,
        flashmla_metadata_src,
    )
    target = _Step(
        "dst",
        cache_seqlens_dst,
        cu_seqlens_k_dst,
        page_table_1_dst,
        nsa_cache_seqlens_dst,
        seqlens_expanded_dst,
        nsa_cu_seqlens_k_dst,
        real_page_table_dst,
        flashmla_num_splits_dst,
        flashmla_metadata_dst,
    )
    columns = max_len if forward_mode == _DECODE else max_seqlen_k
    _copy_step(op, source, [target], forward_mode, bs, columns, seqlens_expanded_size)


def fused_metadata_copy_multi_cuda(
    cache_seqlens_src: Tensor,
    cu_seqlens_k_src: Tensor,
    page_indices_src: Tensor,
    nsa_cache_seqlens_src: Tensor,
    nsa_cu_seqlens_k_src: Tensor,
    real_page_table_src: Optional[Tensor],
    flashmla_num_splits_src: Optional[Tensor],
    flashmla_metadata_src: Optional[Tensor],
    cache_seqlens_dst0: Tensor,
    cu_seqlens_k_dst0: Tensor,
    page_table_1_dst0: Tensor,
    nsa_cache_seqlens_dst0: Tensor,
    nsa_cu_seqlens_k_dst0: Tensor,
    real_page_table_dst0: Optional[Tensor],
    flashmla_num_splits_dst0: Optional[Tensor],
    flashmla_metadata_dst0: Optional[Tensor],
    cache_seqlens_dst1: Tensor,
    cu_seqlens_k_dst1: Tensor,
    page_table_1_dst1: Tensor,
    nsa_cache_seqlens_dst1: Tensor,
    nsa_cu_seqlens_k_dst1: Tensor,
    real_page_table_dst1: Optional[Tensor],
    flashmla_num_splits_dst1: Optional[Tensor],
    flashmla_metadata_dst1: Optional[Tensor],
    cache_seqlens_dst2: Tensor,
    cu_seqlens_k_dst2: Tensor,
    page_table_1_dst2: Tensor,
    nsa_cache_seqlens_dst2: Tensor,
    nsa_cu_seqlens_k_dst2: Tensor,
    real_page_table_dst2: Optional[Tensor],
    flashmla_num_splits_dst2: Optional[Tensor],
    flashmla_metadata_dst2: Optional[Tensor],
    bs: int,
    max_len: int,
    seqlens_expanded_size: int,
) -> None:
    """:func:`fused_metadata_copy_cuda` in mode 0 into three destinations: all of them are checked before any is written.

    Args:
        *_src, *_dst0, *_dst1, *_dst2: as there, without ``seqlens_expanded``.
        bs, max_len, seqlens_expanded_size: as there.

    Raises:
        InvalidArgument: as there.
    """

    def step(place: str, lengths: Tensor, offsets: Tensor, table: Tensor, nsa: Tensor, *rest: Optional[Tensor]) -> _Step:
        return _Step(place, lengths, offsets, table, nsa, None, *rest)

    source = step(
        "src",
        cache_seqlens_src,
        cu_seqlens_k_src,
        page_indices_src,
        nsa_cache_seqlens_src,
        nsa_cu_seqlens_k_src,
        real_page_table_src,
        flashmla_num_splits_src,
        flashmla_metadata_src,
    )
    targets = [
        step(
            "dst0",
            cache_seqlens_dst0,
            cu_seqlens_k_dst0,
            page_table_1_dst0,
            nsa_cache_seqlens_dst0,
            nsa_cu_seqlens_k_dst0,
            real_page_table_dst0,
            flashmla_num_splits_dst0,
            flashmla_metadata_dst0,
        ),
        step(
            "dst1",
            cache_seqlens_dst1,
            cu_seqlens_k_dst1,
            page_table_1_dst1,
            nsa_cache_seqlens_dst1,
            nsa_cu_seqlens_k_dst1,
            real_page_table_dst1,
            flashmla_num_splits_dst1,
            flashmla_metadata_dst1,
        ),
        step(
            "dst2",
            cache_seqlens_dst2,
            cu_seqlens_k_dst2,
            page_table_1_dst2,
            nsa_cache_seqlens_dst2,
            nsa_cu_seqlens_k_dst2,
            real_page_table_dst2,
            flashmla_num_splits_dst2,
            flashmla_metadata_dst2,
        ),
    ]
    _copy_step("fused_metadata_copy_multi_cuda", source, targets, _DECODE, bs, max_len, seqlens_expanded_size)
