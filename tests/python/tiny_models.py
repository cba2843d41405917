"""Tiny models with random weights, one of every family that fovea.transformers serves."""

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, DeepseekV32Config, DeepseekV32ForCausalLM
from transformers import KimiLinearConfig, KimiLinearForCausalLM
from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import (
    MiniMaxM3VLConfig,
    MiniMaxM3VLTextConfig,
    MiniMaxM3VLVisionConfig,
)
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import (
    MiniMaxM3SparseForConditionalGeneration,
    MiniMaxM3VLForCausalLM,
)

VOCABULARY = 128
COMMON = {"vocab_size": VOCABULARY, "hidden_size": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
          "initializer_range": 0.06, "num_experts_per_tok": 2}  # fmt: skip
# Every expert is chosen, so that rounding changes no route; weights three times the usual make attention peaked.


def minimax_m3_config(selected=4, **more):
    return MiniMaxM3VLTextConfig(**COMMON, **{
        "num_hidden_layers": 3, "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse", "dense"], "num_local_experts": 2, "intermediate_size": 64,
        "dense_intermediate_size": 128, "shared_intermediate_size": 64, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 64, "rotary_dim": 32, "index_n_heads": 2, "index_head_dim": 32,
        "index_block_size": 8, "index_topk_blocks": selected, **more})  # fmt: skip


def minimax_m3(selected=4, **more):
    return MiniMaxM3VLForCausalLM(minimax_m3_config(selected, **more))


def minimax_m3_with_vision():
    """The same text model with a vision tower of one layer: an image is token 127."""
    vision = MiniMaxM3VLVisionConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
                                     image_size=16, patch_size=4)  # fmt: skip
    return MiniMaxM3SparseForConditionalGeneration(MiniMaxM3VLConfig(
        text_config=minimax_m3_config(64).to_dict(), vision_config=vision.to_dict(), projector_hidden_size=128,
        image_token_index=VOCABULARY - 1, video_token_index=VOCABULARY - 2))  # fmt: skip


def deepseek_v4(selected=4, **more):
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**COMMON, **{
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        "mlp_layer_types": ["hash_moe", "moe", "moe"], "n_routed_experts": 2, "moe_intermediate_size": 64,
        "num_attention_heads": 4, "q_lora_rank": 64, "sliding_window": 16, "o_groups": 2, "o_lora_rank": 32,
        "index_n_heads": 4, "index_topk": selected, "hc_mult": 2, **more}))  # fmt: skip
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    return model


def kimi_linear(selected=None, **more):
    return KimiLinearForCausalLM(KimiLinearConfig(**COMMON, **{
        "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 2, "intermediate_size": 128, "moe_intermediate_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 4, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
        "linear_head_dim": 32, "linear_num_heads": 4, **more}))  # fmt: skip


def deepseek_v32(selected=8, **more):
    return DeepseekV32ForCausalLM(DeepseekV32Config(**COMMON, **{
        "num_hidden_layers": 2, "first_k_dense_replace": 1, "n_routed_experts": 2, "n_group": 1, "topk_group": 1,
        "intermediate_size": 128, "moe_intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4,
        "q_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 32, "index_n_heads": 4, "index_topk": selected,
        **more}))  # fmt: skip


FAMILIES = {
    "minimax_m3_vl_text": minimax_m3,
    "deepseek_v4": deepseek_v4,
    "kimi_linear": kimi_linear,
    "deepseek_v32": deepseek_v32,
}
"""Model type -> what makes a model. `selected`: blocks, compressed entries or tokens that a row's index chooses."""
