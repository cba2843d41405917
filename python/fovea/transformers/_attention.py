"""The attention function: one for all families whose layers go through the table of implementations."""

from __future__ import annotations

import functools
import logging
from typing import Any, Optional

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import fovea

from ._common import check_call, require, rows

_LOG = logging.getLogger("fovea.transformers")
_MAX_BLOCKS = 1024  # the longest list that every implementation of msa_attend on a GPU takes


def _ranges(module: torch.nn.Module, mask: Optional[torch.Tensor]) -> torch.Tensor:
    require(
        mask is not None and mask.ndim == 2 and mask.dtype == torch.int32,
        f"{type(module).__name__} got no mask of fovea's mask function: call fovea.transformers.register(), and give "
        "attention_mask as [batch, tokens]",
    )
    return mask


def _pages(states: torch.Tensor, size: int) -> torch.Tensor:
    """[B, H, L, D] as pages [n, H, size, D]: page j of request b is number b * H * pages + j.

    The memory stays head-major, so that most pages begin inside another head's row of pages; n counts all of them.
    """
    batch, heads, length, width = states.shape
    pages = -(-length // size)
    if length != pages * size or not states.is_contiguous():
        states = torch.nn.functional.pad(states, (0, 0, 0, pages * size - length)).contiguous()
    page = size * width
    shape = ((batch - 1) * heads * pages + pages, heads, size, width)
    return states.as_strided(shape, (page, pages * page, width, 1))


def _block_sparse(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Optional[torch.Tensor],
    scaling: float,
    block_indices: Optional[torch.Tensor] = None,
    **options: Any,
) -> torch.Tensor:
    """MiniMax-M3: the blocks that the indexer chose, in a layer without one every block."""
    batch, _, length, _ = query.shape
    heads, tokens = key.shape[1:3]
    device = query.device
    if block_indices is None:
        size = 128
        while -(-tokens // size) > _MAX_BLOCKS:
            size *= 2
        every = torch.arange(-(-tokens // size), dtype=torch.int32, device=device)
        blocks = every.expand(heads, batch * length, -1)
    else:
        require(
            block_indices.shape[1] == heads,
            f"{type(module).__name__} has {block_indices.shape[1]} index heads and {heads} KV heads, expected as many",
        )
        size = module.indexer.block_size
        blocks = block_indices.to(torch.int32).permute(1, 0, 2, 3).reshape(heads, batch * length, -1)
    pages = -(-tokens // size)
    first = torch.arange(batch, dtype=torch.int32, device=device)[:, None] * (heads * pages)
    out, _ = fovea.msa_attend(
        rows(query),
        _pages(key, size),
        _pages(value, size),
        first + torch.arange(pages, dtype=torch.int32, device=device),
        _ranges(module, mask)[:, 1].contiguous(),
        torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=device),
        blocks,
        size,
        softmax_scale=scaling,
    )
    return out


def _slots_of(mask: torch.Tensor, width: int) -> torch.Tensor:
    """The slots that each row may see, oldest first, then -1: i32 [B * S, width]; slot j of request b is b * L + j."""
    batch, _, length, tokens = mask.shape
    at = torch.arange(tokens, dtype=torch.int32, device=mask.device)
    first = torch.arange(batch, dtype=torch.int32, device=mask.device)[:, None, None] * tokens
    result = torch.empty(batch, length, width, dtype=torch.int32, device=mask.device)
    step = max(1, 2**24 // (batch * tokens))  # bounds the memory of a long prefill
    for begin in range(0, length, step):
        part = slice(begin, begin + step)
        seen = torch.where(mask[:, 0, part] == 0, at, tokens)
        seen = seen.topk(width, dim=-1, largest=False).values
        result[:, part] = torch.where(seen < tokens, seen + first, -1)
    return result.view(batch * length, width)


def _window(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Optional[torch.Tensor],
    scaling: float,
    s_aux: Optional[torch.Tensor] = None,
    **options: Any,
) -> torch.Tensor:
    """DeepSeek-V4: a window of rows that are key and value, behind them compressed entries, one softmax with a sink."""
    name = type(module).__name__
    tokens = key.shape[2]
    heads, channels = key.shape[1], key.shape[3]
    require((heads, channels) == (1, 512), f"{name} has {heads} KV heads of width {channels}, expected one of 512")
    shared = key.data_ptr() == value.data_ptr() and key.stride() == value.stride()
    require(shared, f"{name} has values other than its keys")
    require(
        mask is not None and mask.is_floating_point() and mask.ndim == 4 and mask.shape[-1] == tokens,
        f"{name} got no mask of fovea's mask function: call fovea.transformers.register(), and give attention_mask as "
        "[batch, tokens]",
    )
    mask = mask.expand(key.shape[0], 1, query.shape[2], tokens)
    width = tokens
    if module.layer_type == "sliding_attention":
        width = min(tokens, module.sliding_window)
    elif module.layer_type == "compressed_sparse_attention":
        width = min(tokens, module.sliding_window + module.compressor.indexer.index_topk)
    elif query.shape[2] > 1:
        width = max(1, int((mask == 0).sum(-1).max()))  # how many entries there are is known to the device alone
    sink = None if s_aux is None else s_aux.detach().float()
    out, _ = fovea.sparse_mla(rows(query), key.reshape(-1, 512), _slots_of(mask, width), scaling, sink=sink)
    return out


def _dense(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Optional[torch.Tensor],
    scaling: float,
    **options: Any,
) -> torch.Tensor:
    """Kimi's full attention: every key of the request, with keys and values of each head."""
    batch, _, length, _ = query.shape
    tokens = key.shape[2]
    heads = query.shape[1]
    require(key.shape[1] == heads, f"{type(module).__name__} has {key.shape[1]} KV heads, expected {heads}")
    first, end = _ranges(module, mask).unbind(1)
    # Three requests a row of the batch: padding on the left, the tokens, slots behind them (of a static cache).
    keys = torch.stack([first, end - first, tokens - end], 1).flatten()
    padded = (first - (end - length)).clamp(0, length)
    queries = torch.stack([padded, length - padded, torch.zeros_like(padded)], 1).flatten()
    begins = [torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0)) for counts in (queries, keys)]
    out, _ = fovea.mha_varlen(rows(query), rows(key), rows(value), *begins, scaling)
    return out


@functools.cache
def _log_once(text: str) -> None:
    _LOG.warning(text)


_LAYERS = {"MiniMaxM3VLAttention": _block_sparse, "DeepseekV4Attention": _window, "KimiLinearAttention": _dense}


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Optional[torch.Tensor],
    scaling: Optional[float] = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The attention of one layer, as transformers calls it: out [B, S, H, D], and no attention weights."""
    name = type(module).__name__
    if name == "MiniMaxM3VLVisionAttention":
        _log_once(f"{name} is dense and sees both sides: it runs on torch's scaled_dot_product_attention")
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
    require(name in _LAYERS, f"no attention for {name}; there is one for {', '.join(_LAYERS)}, DeepseekV32Attention")
    check_call(module, query, key, value, dropout=dropout, **options)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = _LAYERS[name](module, query, key, value, attention_mask, scale, **options)
    return out.view(query.shape[0], query.shape[2], query.shape[1], -1), None
