"""DeepSeek-V3.2: sparse attention on absorbed weights, over a cache of latent rows."""

from __future__ import annotations

from typing import Any, Optional

import torch

import fovea

from ._common import by_configuration, check_call, require, restore


def _absorbed(module: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """What expands a latent row into keys [H, nope, 512] and values [H, v, 512], as views of one weight."""
    projection = module.kv_b_proj
    require(
        type(projection) is torch.nn.Linear and projection.bias is None and projection.weight.dtype == torch.bfloat16,
        f"kv_b_proj of {type(module).__name__} is a {type(projection).__name__} of {projection.weight.dtype}, expected a "
        "torch.nn.Linear of torch.bfloat16 without bias",
    )
    weight = projection.weight.view(module.num_heads, -1, module.kv_lora_rank)
    return weight.split([module.qk_nope_head_dim, module.v_head_dim], dim=1)


def forward(
    module: torch.nn.Module,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: Optional[torch.Tensor],
    past_key_values: Any = None,
    position_ids: Optional[torch.Tensor] = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The forward of DeepseekV32Attention; the cache gets latent rows of 576 as keys, and values without width."""
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import apply_rotary_pos_emb_interleave

    name = type(module).__name__
    latent, rope = module.kv_lora_rank, module.qk_rope_head_dim
    require(
        (latent, rope) == (512, 64),
        f"{name} has kv_lora_rank {latent} and qk_rope_head_dim {rope}, expected 512 and 64",
    )
    require(
        attention_mask is not None and attention_mask.ndim == 4,
        f"{name} got no mask: call fovea.transformers.register(), which registers the mask function too",
    )
    dropout = module.attention_dropout if module.training else 0.0
    check_call(module, hidden_states, module.o_proj.weight, dropout=dropout, **options)

    batch, length = hidden_states.shape[:2]
    cos, sin = position_embeddings
    expand_key, expand_value = _absorbed(module)
    q_resid = module.q_a_layernorm(module.q_a_proj(hidden_states))
    q = module.q_b_proj(q_resid).view(batch, length, module.num_heads, module.qk_head_dim)
    q_nope, q_rope = q.split([module.qk_nope_head_dim, rope], dim=-1)
    kv, k_rope = module.kv_a_proj_with_mqa(hidden_states).split([latent, rope], dim=-1)
    q_rope, k_rope = apply_rotary_pos_emb_interleave(q_rope, k_rope.unsqueeze(2), cos, sin, unsqueeze_dim=2)

    # [B, 1, S, 576], as every cache layer takes it.
    cache = torch.cat([module.kv_a_layernorm(kv), k_rope.squeeze(2)], dim=-1).unsqueeze(1)
    if past_key_values is not None:
        cache, _ = past_key_values.update(cache, cache[..., :0], module.layer_idx)
    tokens = cache.shape[2]
    allowed = attention_mask[:, 0]
    chosen = module.indexer(
        hidden_states, q_resid, position_embeddings, allowed, position_ids, past_key_values=past_key_values
    )
    # Where fewer keys are allowed than chosen, the rest of a list is keys of the future or padding.
    seen = allowed.expand(batch, -1, -1).gather(-1, chosen.long())
    seen = seen if seen.dtype == torch.bool else seen == 0
    first = torch.arange(batch, dtype=torch.int32, device=cache.device)[:, None, None] * tokens
    slots = torch.where(seen, chosen + first, -1).view(batch * length, -1)

    rows = batch * length
    q_latent = torch.einsum("thd,hdc->thc", q_nope.reshape(rows, module.num_heads, -1), expand_key)
    q = fovea.concat_absorbed_q(q_latent, q_rope.reshape(rows, module.num_heads, rope))
    out, _ = fovea.sparse_mla(q, cache.reshape(batch * tokens, latent + rope), slots, module.scaling)
    out = torch.einsum("thc,hdc->thd", out, expand_value)
    return module.o_proj(out.reshape(batch, length, -1)), None


def _owner() -> type:
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Attention

    return DeepseekV32Attention


def install() -> None:
    owner = _owner()
    if not hasattr(owner.forward, "fovea_original"):
        owner.forward = by_configuration(owner, forward, lambda module: module.config)


def uninstall() -> None:
    restore(_owner())
