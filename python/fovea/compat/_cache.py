"""Rows of latent caches and the inputs of absorbed attention under the names of sglang."""

from __future__ import annotations

from typing import Any

from ..cache import pack_rows, unpack_rows
from ..mla import concat_absorbed_q, mla_rope_quantize
from ._common import expect, int32, only, pool_of, rows_of, torch_module, view_of

Tensor = Any

_LATENT = 512
_ROPE = 64
_V32_BYTES = 656


def concat_mla_absorb_q_general(q_nope: Tensor, q_rope: Tensor) -> Tensor:
    """The two parts of a query side by side: [T, H, 512] and [T, H, 64] of bf16 by the operator, others by torch."""
    torch = torch_module()
    is_absorbed = q_nope.dim() == 3 and q_nope.shape[-1] == _LATENT and q_rope.shape[-1] == _ROPE
    if is_absorbed and q_nope.dtype == q_rope.dtype == torch.bfloat16:
        return concat_absorbed_q(q_nope, q_rope)
    return torch.cat([q_nope, q_rope], dim=-1)


def mla_quantize_and_rope_for_fp8(
    q_nope: Tensor,
    q_rope: Tensor,
    k_nope: Tensor,
    k_rope: Tensor,
    pos_ids: Tensor,
    cos_sin_cache: Tensor,
    is_neox: bool,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rope, then e4m3 codes at scale 1.

    Args:
        q_nope, q_rope: bf16 [T, H, 512], [T, H, 64].
        k_nope, k_rope: bf16 [T, 512], [T, 64], or with an axis of one head in between.
        pos_ids: [T], integers.
        cos_sin_cache: [max_pos, 64]: cosines, then sines; brought to f32.
        is_neox: pairs (i, i + 32) instead of (2i, 2i + 1).
        kv_lora_rank, qk_rope_head_dim: 512, 64.

    Returns:
        e4m3 [T, H, 576], and views of e4m3 codes in the shapes of ``k_nope`` and ``k_rope``.

    Raises:
        InvalidArgument: shapes that do not fit one another.
    """
    op = "mla_quantize_and_rope_for_fp8"
    torch = torch_module()
    only(op, kv_lora_rank=(kv_lora_rank, _LATENT), qk_rope_head_dim=(qk_rope_head_dim, _ROPE))
    expect(op, "q_nope", q_nope, "T", "H", _LATENT)
    rows = q_nope.shape[0]
    one_head = (1,) if k_nope.dim() == 3 else ()
    expect(op, "k_nope", k_nope, rows, *one_head, _LATENT)
    expect(op, "k_rope", k_rope, rows, *one_head, _ROPE)
    q_codes, k_codes = mla_rope_quantize(
        int32(pos_ids),
        cos_sin_cache.float(),
        "half_split" if is_neox else "interleaved",
        q_nope=q_nope,
        q_rope=q_rope,
        k_nope=view_of(op, "k_nope", k_nope, rows, _LATENT),
        k_rope=view_of(op, "k_rope", k_rope, rows, _ROPE),
    )
    q_codes, k_codes = q_codes.view(torch.float8_e4m3fn), k_codes.view(torch.float8_e4m3fn)
    return q_codes, k_codes[:, :_LATENT].view(k_nope.shape), k_codes[:, _LATENT:].view(k_rope.shape)


def quantize_k_cache(cache_k: Tensor) -> Tensor:
    """A bf16 cache in rows of 656 bytes.

    Args:
        cache_k: bf16 [pages, page_size, 1, 576] or [tokens, 1, 576].

    Returns:
        e4m3 in the same shape with 656 in place of 576: 512 codes, 4 scales amax / 448 (1 for zeros), 64 bf16 values.

    Raises:
        InvalidArgument: another shape.
    """
    op = "quantize_k_cache"
    torch = torch_module()
    tokens = ("pages", "page_size") if cache_k.dim() == 4 else ("tokens",)
    expect(op, "cache_k", cache_k, *tokens, 1, _LATENT + _ROPE)
    rows = rows_of(op, "cache_k", cache_k)
    pool = torch.zeros((*cache_k.shape[:-1], _V32_BYTES), dtype=torch.uint8, device=cache_k.device)
    slots = torch.arange(rows.shape[0], dtype=torch.int32, device=cache_k.device)
    pack_rows(rows, slots, pool.view(rows.shape[0], _V32_BYTES), "v32", page_size=1)
    return pool.view(torch.float8_e4m3fn)


def dequantize_k_cache_paged(quant_k_cache: Tensor, page_table_1_flattened: Tensor, group_size: int = 128) -> Tensor:
    """Rows of 656 bytes as bf16.

    Args:
        quant_k_cache: e4m3 or uint8 [tokens, 1, 656] or [pages, page_size, 1, 656].
        page_table_1_flattened: i32 [N]: slots, in any order; outside the cache: a row of zeros.
        group_size: 128.

    Returns:
        bf16 [N, 1, 576].

    Raises:
        InvalidArgument: another shape.
    """
    op = "dequantize_k_cache_paged"
    only(op, group_size=(group_size, 128))
    is_paged = quant_k_cache.dim() == 4
    expect(op, "quant_k_cache", quant_k_cache, *(("pages", "page_size") if is_paged else ("tokens",)), 1, _V32_BYTES)
    expect(op, "page_table_1_flattened", page_table_1_flattened, "N")
    pool, page_size = pool_of(op, "quant_k_cache", quant_k_cache), quant_k_cache.shape[1] if is_paged else 1
    return unpack_rows(pool, int32(page_table_1_flattened), "v32", page_size=page_size).unsqueeze(1)
