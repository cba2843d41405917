"""Hugging Face transformers on fovea: one tiny model of each family with random weights, against eager attention.

    python examples/python/transformers_models.py        # needs torch and transformers >= 5.17; a GPU is used if there is one
"""

import torch
import transformers
from transformers import DeepseekV4Config, DeepseekV32Config, KimiLinearConfig
from transformers.models.minimax_m3_vl import MiniMaxM3VLTextConfig
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLForCausalLM

import fovea
import fovea.transformers

DEVICE = "cuda" if fovea.available("sparse_mla", "cuda")[0] and torch.cuda.is_available() else "cpu"
PROMPT, GENERATED = 48, 32
transformers.logging.set_verbosity_error()
torch.manual_seed(0)
fovea.transformers.register()  # "fovea" is now an attn_implementation, and its mask function is known

# Small everywhere but where the operators want the released widths: latent rows of 512 + 64 or 512.
common = {"vocab_size": 256, "hidden_size": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
experts = {"num_experts_per_tok": 2, "n_routed_experts": 2, "moe_intermediate_size": 64}
models = {
    # Blocks of 8 tokens: a layer over every block, two whose indexer picks 3.
    "MiniMax-M3": MiniMaxM3VLForCausalLM(MiniMaxM3VLTextConfig(
        **common, num_hidden_layers=3, layer_types=["full_attention"] + ["minimax_m3_sparse"] * 2,
        num_attention_heads=8, num_key_value_heads=2, head_dim=64, rotary_dim=32, num_local_experts=2,
        num_experts_per_tok=2, intermediate_size=64, dense_intermediate_size=64, shared_intermediate_size=64,
        index_n_heads=2, index_head_dim=32, index_block_size=8, index_topk_blocks=3)),
    # A window of 16, alone and with compressed entries behind it, of which the indexer picks 8.
    "DeepSeek-V4": transformers.DeepseekV4ForCausalLM(DeepseekV4Config(
        **common, **experts, num_hidden_layers=3, num_attention_heads=4, q_lora_rank=64, sliding_window=16,
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        index_n_heads=4, index_topk=8, o_groups=2, o_lora_rank=32, hc_mult=2)),
    # Two layers of delta attention, whose state replaces the cache, and one of latent attention.
    "Kimi-Linear": transformers.KimiLinearForCausalLM(KimiLinearConfig(
        **common, num_hidden_layers=3, layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_attention_heads=4, num_key_value_heads=4, linear_head_dim=32, linear_num_heads=4, num_local_experts=2,
        num_experts_per_tok=2, intermediate_size=64, moe_intermediate_size=64)),
    # The indexer picks 16 tokens a row; weights are absorbed, the cache holds latent rows.
    "DeepSeek-V3.2": transformers.DeepseekV32ForCausalLM(DeepseekV32Config(
        **common, **experts, num_hidden_layers=2, n_group=1, topk_group=1, intermediate_size=64,
        num_attention_heads=4, num_key_value_heads=4, q_lora_rank=64, index_n_heads=4, index_topk=16)),
}  # fmt: skip

for name, model in models.items():
    model = model.eval().to(DEVICE, torch.bfloat16)  # the operators compute on bf16
    prompt = torch.randint(3, 256, (2, PROMPT), device=DEVICE)
    with torch.no_grad():
        model.set_attn_implementation("fovea")  # or attn_implementation="fovea" in from_pretrained
        tokens = model.generate(prompt, max_new_tokens=GENERATED, min_new_tokens=GENERATED, do_sample=False)
        logits = model(tokens).logits.float()
        model.set_attn_implementation("eager")
        expected = model(tokens).logits.float()
    error = (logits - expected).norm(dim=-1) / expected.norm(dim=-1)
    print(f"{name}: {GENERATED} tokens generated on {DEVICE}, a row of logits differs by {error.median():.1e} of their norm")
    assert tokens.shape == (2, PROMPT + GENERATED) and error.median() < 2.5e-2
