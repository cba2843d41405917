"""What the attention functions of all families share: checks, rows, forwards that ask the configuration."""

from __future__ import annotations

import functools
from typing import Any, Callable, Optional

import torch

from .._errors import InvalidArgument, Unsupported

NAME = "fovea"
"""The word for ``attn_implementation``."""


def require(condition: bool, text: str) -> None:
    if not condition:
        raise Unsupported(f"fovea.transformers: {text}")


def check_call(module: torch.nn.Module, *tensors: Optional[torch.Tensor], dropout: float = 0.0, **options: Any) -> None:
    """Refuses what no operator does: other types than bf16, gradients, dropout, attention weights."""
    name = type(module).__name__
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.dtype != torch.bfloat16:
            raise InvalidArgument(
                f"fovea.transformers: {name} computes in {tensor.dtype}, expected torch.bfloat16; load the model with "
                "dtype=torch.bfloat16"
            )
        require(
            not (torch.is_grad_enabled() and tensor.requires_grad),
            f"{name} needs gradients, which fovea does not have; run it under torch.no_grad() or choose another "
            "attn_implementation",
        )
    require(dropout == 0, f"{name} asks for dropout {dropout}, expected 0; call model.eval()")
    require(not options.get("output_attentions"), f"{name} cannot give output_attentions; use 'eager' for that")


def rows(states: torch.Tensor) -> torch.Tensor:
    """[B, H, S, D] as rows [B * S, H, D]."""
    batch, heads, length, width = states.shape
    return states.transpose(1, 2).reshape(batch * length, heads, width)


def by_configuration(
    owner: type, forward: Callable[..., Any], configuration: Callable[[torch.nn.Module], Any]
) -> Callable[..., Any]:
    """A forward for `owner` that is `forward` where the model's implementation is fovea, else the one it has."""
    original = owner.forward

    @functools.wraps(original)
    def chosen(module: torch.nn.Module, *arguments: Any, **options: Any) -> Any:
        config = configuration(module)
        if config is not None and config._attn_implementation == NAME:
            return forward(module, *arguments, **options)
        return original(module, *arguments, **options)

    chosen.fovea_original = original
    return chosen


def restore(owner: type) -> None:
    """Takes back what :func:`by_configuration` put in place of `owner`'s forward."""
    original = getattr(owner.forward, "fovea_original", None)
    if original is not None:
        owner.forward = original
