"""Kimi-Linear: the delta attention layers."""

from __future__ import annotations

import functools
from typing import Any, Optional

import torch

import fovea

from ._common import by_configuration, check_call, require, restore

_CONFIG = "fovea_config"
"""Attribute of a layer: the configuration of its model, which these layers do not keep themselves."""


def _convolve(module: torch.nn.Module, x: torch.Tensor, cache: Any, decode: bool, indptr: torch.Tensor) -> torch.Tensor:
    """The short convolution of rows [B, S, D]; the cache keeps the last inputs of each request, [B, D, 4]."""
    batch, length, width = x.shape
    bias = module.conv1d.bias
    weight = {
        "weight": module.conv1d.weight.detach().squeeze(1),
        "bias": None if bias is None else bias.detach(),
        "window_layout": "dw",
    }
    flat = x.reshape(batch * length, width)
    if decode:
        inputs = cache.layers[module.layer_idx].conv_states[0]
        inputs[..., 0] = inputs[..., 1]
        return fovea.causal_conv1d(flat, window_state=inputs[..., 1:], mode="update", **weight)
    window = None
    if cache is not None:
        if cache.has_previous_state(module.layer_idx):
            window = cache.layers[module.layer_idx].conv_states[0][..., 1:].clone()
        cache.update_conv_state(x.transpose(1, 2), module.layer_idx, conv_kernel_size=module.conv_kernel_size)
    return fovea.causal_conv1d(flat, window_state=window, q_indptr=indptr, **weight)


def forward(
    module: torch.nn.Module,
    hidden_states: torch.Tensor,
    cache_params: Any = None,
    attention_mask: Optional[torch.Tensor] = None,
    **options: Any,
) -> torch.Tensor:
    """The forward of KimiLinearDeltaAttention.

    The cache's states are [B, H, K, V] as transformers has them, in memory with K contiguous, as the operators want it;
    states in another order (after a beam search, or from another implementation) are copied.
    """
    name = type(module).__name__
    require(module.conv_kernel_size == 4, f"{name} has a convolution of width {module.conv_kernel_size}, expected 4")
    require(module.activation == "silu", f"{name} has the activation {module.activation!r}, expected 'silu'")
    check_call(module, hidden_states, module.o_proj.weight, **options)

    if attention_mask is not None:
        hidden_states = hidden_states * attention_mask[:, :, None].to(hidden_states.dtype)
    batch, length = hidden_states.shape[:2]
    heads, width = module.num_heads, module.head_dim
    indptr = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=hidden_states.device)
    continued = cache_params is not None and cache_params.has_previous_state(module.layer_idx)
    decode = continued and length == 1
    qkv = torch.cat([project(hidden_states) for project in (module.q_proj, module.k_proj, module.v_proj)], dim=-1)
    qkv = _convolve(module, qkv, cache_params, decode, indptr)

    gate = module.forget_gate
    layer = {
        "g": gate.f_b_proj(gate.f_a_proj(hidden_states)).view(-1, heads, width),
        "beta": module.b_proj(hidden_states).view(-1, heads),
        "gate": "softplus",
        "beta_kind": "logit",
        "a_log": gate.A_log.detach().float().flatten(),
        "dt_bias": gate.dt_bias.detach().float().view(heads, width),
        "normalise": True,
    }
    stored = cache_params.layers[module.layer_idx].recurrent_states[0] if continued else None
    state = None
    if continued:
        state = stored.transpose(-1, -2).contiguous()
    elif cache_params is not None:
        state = torch.zeros(batch, heads, width, width, dtype=torch.float32, device=hidden_states.device)
    if decode:
        out = fovea.kda_decode(qkv=qkv, state=state, **layer)
    else:
        q, k, v = (part.view(-1, heads, width) for part in qkv.split(heads * width, dim=-1))
        out = fovea.kda_prefill(q, k, v, q_indptr=indptr, state=state, **layer)
    if state is not None and (stored is None or state.data_ptr() != stored.data_ptr()):
        cache_params.update_recurrent_state(state.transpose(-1, -2), module.layer_idx)

    gate = module.g_b_proj(module.g_a_proj(hidden_states)).view(batch, length, heads, width)
    out = module.o_norm(out.view(batch, length, heads, width), gate)
    return module.o_proj(out.reshape(batch, length, -1))


def _modeling() -> Any:
    from transformers.models.kimi_linear import modeling_kimi_linear

    return modeling_kimi_linear


def _telling(original: Any) -> Any:
    """The model's forward, which tells its layers whose they are."""

    @functools.wraps(original)
    def forward(model: torch.nn.Module, *arguments: Any, **options: Any) -> Any:
        for layer in model.layers:
            setattr(layer.self_attn, _CONFIG, model.config)
        return original(model, *arguments, **options)

    forward.fovea_original = original
    return forward


def install() -> None:
    modeling = _modeling()
    owner = modeling.KimiLinearDeltaAttention
    if not hasattr(owner.forward, "fovea_original"):
        owner.forward = by_configuration(owner, forward, lambda module: getattr(module, _CONFIG, None))
        modeling.KimiLinearModel.forward = _telling(modeling.KimiLinearModel.forward)


def uninstall() -> None:
    modeling = _modeling()
    restore(modeling.KimiLinearDeltaAttention)
    restore(modeling.KimiLinearModel)
