"""The mask function: what the attention functions of each family need to know of padding and length."""

from __future__ import annotations

from typing import Any, Optional, Union

import torch
from transformers.masking_utils import causal_mask_function, eager_mask

from ._common import require

RANGES = ("minimax_m3_vl_text", "kimi_linear")
"""Model types whose layers see a range of keys: their mask is i32 [B, 2], the first key and the end of each request."""

SETS = ("deepseek_v4", "deepseek_v32")
"""Model types whose layers see any set of keys: their mask is that of eager, [B, 1, S, L] of zeros and minima."""

FAMILIES = RANGES + SETS
"""Model types that are served."""


def _first_key(padding: torch.Tensor, model_type: str) -> torch.Tensor:
    """The first key of each request, [B]; `padding` [B, L] is True at tokens, which must follow one another."""
    tokens = padding.sum(-1)
    first = torch.where(tokens > 0, padding.int().argmax(-1), 0)
    at = torch.arange(padding.shape[-1], device=padding.device)
    together = (padding == ((at >= first[:, None]) & (at < (first + tokens)[:, None]))).all()
    # One look at the device for both answers; transformers takes one as well where a mask is given.
    together, left = torch.stack([together, (first > 0).any()]).tolist()
    require(together, f"a padding mask with tokens on both sides of padding, which {model_type} cannot take here")
    require(
        not left or model_type != "minimax_m3_vl_text",
        "left padding: blocks of MiniMax-M3 count from the first slot, so that padding on the left changes what is "
        "selected; pad on the right",
    )
    return first


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Union[int, torch.Tensor] = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Optional[torch.Tensor] = None,
    config: Any = None,
    device: Union[torch.device, str] = "cpu",
    **options: Any,
) -> torch.Tensor:
    """The mask of one forward, in the form that the attention of the model's family takes; never None."""
    model_type = getattr(config, "model_type", None)
    require(
        model_type in FAMILIES, f"no attention for model type {model_type!r}; there is one for {', '.join(FAMILIES)}"
    )
    if model_type in SETS:
        return eager_mask(
            batch_size,
            q_length,
            kv_length,
            q_offset,
            kv_offset,
            mask_function,
            attention_mask,
            device=device,
            **options,
        )
    require(mask_function is causal_mask_function, f"{model_type} with packed sequences or a mask function of its own")
    end = q_offset + q_length
    first = 0
    if attention_mask is not None:
        require(
            attention_mask.shape[1] >= end,
            f"attention_mask of {attention_mask.shape[1]} tokens, expected {int(end)}: those of the cache count too",
        )
        first = _first_key(attention_mask[:, :end], model_type)
    result = torch.empty(batch_size, 2, dtype=torch.int32, device=device)
    result[:, 0] = first
    result[:, 1] = end
    return result
