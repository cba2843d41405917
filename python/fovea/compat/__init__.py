"""Names of other packages, on fovea: code that imports them runs unchanged.

    import fovea.compat
    fovea.compat.install()
    from fmha_sm100 import fmha_sm100, fmha_sm100_plan            # block-sparse attention of MiniMax-M3
    from sgl_kernel.flash_mla import flash_mla_with_kvcache       # sparse attention of DeepSeek-V3.2

:func:`install` enters modules into ``sys.modules`` and leaves installed packages alone unless it is told otherwise;
:func:`uninstall` takes them out again. Every name is here, too: ``fovea.compat.flash_mla_with_kvcache``. They take and
give tensors of torch, on the CPU or a GPU, and copy no cache. Which names there are, where they are imported from, and
what is different: docs/compat/README.md.
"""

from __future__ import annotations

from ._batch import (
    can_nsa_prefill_cp_round_robin_split,
    compute_cu_seqlens,
    compute_nsa_seqlens,
    fused_metadata_copy_cuda,
    fused_metadata_copy_multi_cuda,
    is_nsa_enable_prefill_cp,
    nsa_cp_round_robin_split_data,
    nsa_cp_round_robin_split_q_seqs,
    pad_nsa_cache_seqlens,
    set_context_parallel,
)
from ._cache import (
    concat_mla_absorb_q_general,
    dequantize_k_cache_paged,
    mla_quantize_and_rope_for_fp8,
    quantize_k_cache,
)
from ._index import (
    fast_topk_transform_fused,
    fast_topk_transform_ragged_fused,
    fast_topk_v2,
    fp8_mqa_logits,
    fp8_paged_mqa_logits,
    get_num_sms,
    get_paged_mqa_logits_metadata,
    transform_index_page_table_decode,
    transform_index_page_table_prefill,
)
from ._install import install, installed, uninstall
from ._kda import chunk_kda_fwd, kda_extend, l2norm_fwd
from ._latent import (
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
    get_mla_metadata,
    mla_decode_fwd,
    native_swa_decode_attention,
    tilelang_sparse_fwd,
    trtllm_batch_decode_with_kv_cache_mla,
    trtllm_ragged_attention_deepseek,
)
from ._msa import fmha_sm100, fmha_sm100_plan

__all__ = [
    "can_nsa_prefill_cp_round_robin_split",
    "chunk_kda_fwd",
    "compute_cu_seqlens",
    "compute_nsa_seqlens",
    "concat_mla_absorb_q_general",
    "dequantize_k_cache_paged",
    "fast_topk_transform_fused",
    "fast_topk_transform_ragged_fused",
    "fast_topk_v2",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "fmha_sm100",
    "fmha_sm100_plan",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "fused_metadata_copy_cuda",
    "fused_metadata_copy_multi_cuda",
    "get_mla_metadata",
    "get_num_sms",
    "get_paged_mqa_logits_metadata",
    "install",
    "installed",
    "is_nsa_enable_prefill_cp",
    "kda_extend",
    "l2norm_fwd",
    "mla_decode_fwd",
    "mla_quantize_and_rope_for_fp8",
    "native_swa_decode_attention",
    "nsa_cp_round_robin_split_data",
    "nsa_cp_round_robin_split_q_seqs",
    "pad_nsa_cache_seqlens",
    "quantize_k_cache",
    "set_context_parallel",
    "tilelang_sparse_fwd",
    "transform_index_page_table_decode",
    "transform_index_page_table_prefill",
    "trtllm_batch_decode_with_kv_cache_mla",
    "trtllm_ragged_attention_deepseek",
    "uninstall",
]
