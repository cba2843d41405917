"""``fmha_sm100``: block-sparse attention behind a plan, on msa_attend."""

from __future__ import annotations

from typing import Any, Optional

from .._errors import InvalidArgument
from ..msa import msa_attend
from ._common import starts, torch_module, unpacked_lists

Tensor = Any


class _Plan(tuple):
    """(number of query heads, number of KV heads, settings, tensors): lengths stay tensors that every call reads."""

    __slots__ = ()


def _place(torch: Any, device: Any, tensors: list[Tensor]) -> Any:
    if device is not None:
        return torch.device(device)
    return next((tensor.device for tensor in tensors if tensor.is_cuda), torch.device("cpu"))


def fmha_sm100_plan(
    qo_segment_lens: Tensor,
    kv_segment_lens: Tensor,
    num_qo_heads: int,
    *,
    num_kv_heads: int,
    page_size: int,
    kv_block_num: int,
    causal: bool = True,
    qo_offset: Optional[Tensor] = None,
    device: Any = None,
) -> tuple[Any, ...]:
    """The plan of a batch of B requests: a tuple whose entry 3 holds the tensors that :func:`fmha_sm100` reads.

    Nothing but the shapes of those tensors depends on B, so that a plan serves later steps of as many requests: write
    new values into ``plan[3]["kv_segment_lens"]`` [B], ``["kv_segment_offsets"]`` [B+1], ``["kv_page_indptr"]`` [B+1]
    and ``["qo_offset"]`` [B]. No value is looked at here; they are cut to what the caches hold when they are used.

    Args:
        qo_segment_lens, kv_segment_lens: integers [B], each on any device: rows and tokens of each request.
        num_qo_heads, num_kv_heads: heads of queries and cache.
        page_size: tokens per page, which is a block.
        kv_block_num: blocks of a list.
        causal: whether a row sees no token past its own position.
        qo_offset: [B]: position of a request's first row; None: tokens minus rows.
        device: of the plan's tensors; None: that of a given tensor on a GPU, else the CPU.

    Raises:
        InvalidArgument: lengths of different numbers of requests, a setting below 1.
    """
    torch = torch_module()
    for name, value in (("num_qo_heads", num_qo_heads), ("num_kv_heads", num_kv_heads), ("page_size", page_size)):
        if value < 1:
            raise InvalidArgument(f"fmha_sm100_plan: {name} = {value}, expected >= 1")
    given = [qo_segment_lens, kv_segment_lens] + ([] if qo_offset is None else [qo_offset])
    for name, tensor in zip(("qo_segment_lens", "kv_segment_lens", "qo_offset"), given):
        if tensor.dim() != 1 or tensor.shape != qo_segment_lens.shape:
            raise InvalidArgument(
                f"fmha_sm100_plan: {name} has shape {list(tensor.shape)}, expected [{qo_segment_lens.numel()}]"
            )
    where = _place(torch, device, given)
    rows, tokens = (tensor.to(where, torch.int32) for tensor in given[:2])
    offset = tokens - rows if qo_offset is None else qo_offset.to(where, torch.int32)
    tensors = {
        "qo_segment_lens": rows,
        "qo_segment_offsets": starts(rows),
        # Copies: they are written later, and the arguments may be anybody's.
        "kv_segment_lens": tokens.clone(),
        "kv_segment_offsets": starts(tokens),
        "kv_page_indptr": starts((tokens + (page_size - 1)).div(page_size, rounding_mode="floor")),
        "qo_offset": offset.clone(),
    }
    settings = {"page_size": int(page_size), "kv_block_num": int(kv_block_num), "causal": bool(causal)}
    return _Plan((int(num_qo_heads), int(num_kv_heads), settings, tensors))


def fmha_sm100(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: tuple[Any, ...],
    *,
    sm_scale: Optional[float] = None,
    kv_indices: Tensor,
    kv_block_indexes: Tensor,
    out: Optional[Tensor] = None,
) -> tuple[Tensor, Tensor]:
    """Attention of every row over the blocks of its list.

    Args:
        q: bf16 [T, num_qo_heads, D].
        k, v: bf16 [pages, num_kv_heads, page_size, D], any strides: a slot-major pool is seen as it is.
        plan: of :func:`fmha_sm100_plan`; its tensors are read now.
        sm_scale: None: D^-1/2.
        kv_indices: i32: pages of the requests, one after the other as ``kv_page_indptr`` says; a longer tail is ignored.
        kv_block_indexes: i32 [T, num_kv_heads, kv_block_num], in any order, -1 for none.
        out: bf16 [T, num_qo_heads, D] for the result.

    Returns:
        out bf16 [T, num_qo_heads, D] and lse f32 [T, num_qo_heads] (natural log). A row that sees nothing: 0, -infinity.

    Raises:
        InvalidArgument: tensors that do not fit the plan.
    """
    num_qo_heads, num_kv_heads, settings, tensors = plan
    expected = {"q": (q, 1, num_qo_heads), "k": (k, 1, num_kv_heads), "kv_block_indexes": (kv_block_indexes, 1, num_kv_heads)}
    for name, (tensor, axis, extent) in expected.items():
        if tensor.dim() <= axis or tensor.shape[axis] != extent:
            raise InvalidArgument(f"fmha_sm100: {name} has shape {list(tensor.shape)}, expected {extent} heads on axis {axis}")
    lengths = {name: tensor.to(q.device) for name, tensor in tensors.items()}
    return msa_attend(
        q,
        k,
        v,
        unpacked_lists(kv_indices, lengths["kv_page_indptr"]),
        lengths["kv_segment_lens"],
        lengths["qo_segment_offsets"],
        kv_block_indexes,
        settings["page_size"],
        q_offset=lengths["qo_offset"],
        softmax_scale=sm_scale,
        causal=settings["causal"],
        blocks_layout="row_major",
        topk=settings["kv_block_num"],
        out=None if out is None else (out, None),
    )
