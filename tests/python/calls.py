"""One small legal call of every operator: name -> keyword arguments."""

import numpy as np

from support import bf16, i32


def cos_sin(rope, rows=16):
    angles = np.arange(rows)[:, None] / np.arange(1, rope // 2 + 1)
    return np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32)


def legal_calls(seed=0):
    rng = np.random.default_rng(seed)

    def f32(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    def codes(*shape):
        return rng.integers(0, 120, shape).astype(np.uint8)

    batch = {"seq_len": i32([5, 3]), "pool_row": i32([0, 1]), "req_to_token": i32([range(8), range(8, 16)])}
    indices = rng.integers(-1, 16, (3, 8)).astype(np.int32)
    calls = {
        "pack_rows": {"src": bf16(rng, 3, 576), "slots": i32([0, 5, -1]), "pool": codes(2, 4 * 656),
                      "row_format": "v32", "page_size": 4},
        "unpack_rows": {"pool": codes(2, 4 * 132), "slots": i32([0, 5, 99]), "row_format": "i132", "page_size": 4},
        "move_rows": {"src_slots": i32([0, 1]), "dst_slots": i32([1, 0]), "pool": codes(2, 4 * 656),
                      "row_format": "v32", "page_size": 4},
        "metadata_refresh": {**batch, "mode": "extend", "topk": 4, "page_size": 4, "ext_len": i32([2, 3])},
        "metadata_check": {**batch, "mode": "decode", "page_size": 4, "capacity": 16},
        "paged_schedule": {"row_len": i32([1000, 300, 700]), "workers": 4},
        "split_schedule": {"topk_length": i32([2048, 0, 64]), "parts": 4},
        "context_split": {"seq_len": i32([1, 1, 3]), "ext_len": i32([1, 1, 3]), "ranks": 4, "rank": 0,
                          "scheme": "round_robin"},
        "index_quantize": {"q": bf16(rng, 3, 2, 128), "k": bf16(rng, 3, 128), "norm_weight": f32(128),
                           "norm_bias": f32(128), "head_gate": f32(3, 2), "positions": i32([0, 5, 9]),
                           "cos_sin": cos_sin(64), "rope_style": "half_split", "scale_mode": "fp32"},
        "index_store": {"k_fp8": codes(3, 128), "k_scale": f32(3), "slots": i32([5, -1, 2]),
                        "index_pool": codes(4, 4 * 132), "page_size": 4},
        "index_gather": {"index_pool": codes(4, 4 * 132), "page_table": i32([[1, 2], [3, 0]]),
                         "kv_indptr": i32([0, 7, 8]), "page_size": 4},
        "index_logits": {"q_fp8": codes(3, 2, 128), "head_weight": f32(3, 2), "layout": "paged",
                         "index_pool": codes(4, 4 * 132), "page_table": i32([[1, 2], [3, 0]]),
                         "row_to_request": i32([0, 0, 1]), "row_len": i32([7, 8, 3]), "page_size": 4},
        "topk_select": {"logits": f32(3, 20), "row_len": i32([20, 3, 0]), "topk": 5},
        "index_select": {"q_fp8": codes(3, 2, 128), "head_weight": f32(3, 2), "layout": "ragged", "topk": 4,
                         "k_fp8": codes(9, 128), "k_scale": f32(9), "k_start": i32([0, 0, 4]),
                         "k_end": i32([9, 2, 8])},
        "sparse_mla": {"q": bf16(rng, 3, 2, 576), "kv": bf16(rng, 16, 576), "indices": indices, "softmax_scale": 0.1,
                       "topk_length": i32([8, 3, 0]), "sink": f32(2)},
        "dense_mla": {"q": bf16(rng, 3, 2, 576), "kv": bf16(rng, 3, 4, 1, 576), "page_table": i32([[1, 2], [0, 9]]),
                      "kv_len": i32([7, 2]), "q_indptr": i32([0, 2, 3]), "softmax_scale": 0.1},
        "mha_varlen": {"q": bf16(rng, 3, 2, 192), "k": bf16(rng, 5, 2, 192), "v": bf16(rng, 5, 2, 128),
                       "q_indptr": i32([0, 2, 3]), "kv_indptr": i32([0, 3, 5]), "softmax_scale": 0.1},
        "merge_lse": {"out_parts": f32(2, 3, 2, 8), "lse_parts": f32(2, 3, 2)},
        "concat_absorbed_q": {"q_nope": bf16(rng, 3, 2, 512), "q_rope": bf16(rng, 3, 2, 64)},
        "mla_rope_quantize": {"positions": i32([0, 5, 9]), "cos_sin": cos_sin(64), "rope_style": "interleaved",
                              "q_nope": bf16(rng, 3, 2, 512), "q_rope": bf16(rng, 3, 2, 64),
                              "k_nope": bf16(rng, 3, 512), "k_rope": bf16(rng, 3, 64)},
        "swa_decode": {"q": bf16(rng, 3, 2, 512), "kv": bf16(rng, 16, 512), "swa_indices": indices,
                       "swa_lens": i32([8, 3, 0]), "softmax_scale": 0.1, "window": 6},
        "build_swa_indices": {"q_indptr": i32([0, 2, 3]), "kv_len": i32([5, 1]), "page_table": i32([[4, 2], [7, 0]]),
                              "window": 3, "page_size": 4},
    }  # fmt: skip
    calls.update(recurrent_calls(rng))
    calls.update(block_calls(rng))
    compressed = {"kv_gate": f32(6, 2048), "ape": f32(4, 1024), "norm_weight": f32(512),
                  "positions": i32([0, 1, 2, 3, 4, 5]), "row_to_request": i32([0] * 6), "cos_sin": cos_sin(64),
                  "state": f32(2, 8, 2, 1024), "state_slot": i32([1]), "page_table": i32([[1]]),
                  "pool": codes(2, 4 * 584), "ratio": 4, "row_format": "v4", "page_size": 4}  # fmt: skip
    return {**calls, "v4_compress": compressed}


def recurrent_calls(rng):
    """KDA: two sequences of three and two rows, two heads, states of 16 by 8."""

    def f32(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    def layer(rows):
        return {"g": f32(rows, 2, 16), "beta": f32(rows, 2), "gate": "lower_bound", "beta_kind": "logit",
                "a_log": f32(2), "dt_bias": f32(2, 16)}  # fmt: skip

    def qkv(rows):
        return {"q": bf16(rng, rows, 2, 16), "k": bf16(rng, rows, 2, 16), "v": bf16(rng, rows, 2, 8)}

    falling = -np.abs(f32(5, 4, 16)).cumsum(0, dtype=np.float32)
    return {
        "kda_gate": {"g": f32(5, 2, 16), "gate": "softplus", "a_log": f32(2), "dt_bias": f32(2, 16)},
        "kda_prefill": {**layer(5), **qkv(5), "q_indptr": i32([0, 3, 5]), "state": f32(4, 2, 8, 16),
                        "in_slot": i32([0, 2]), "out_slot": i32([1, 2]), "normalise": True},
        "kda_stage_gate": {"q": bf16(rng, 5, 2, 16), "k": bf16(rng, 5, 2, 16), "g": f32(5, 2, 16), "gate": "softplus",
                           "q_indptr": i32([0, 3, 5]), "a_log": f32(2), "chunk": 16, "normalise": True},
        "kda_stage_intra": {"q_hat": f32(5, 2, 16), "k_hat": f32(5, 2, 16), "g_sum": falling, "v": bf16(rng, 5, 4, 8),
                            "beta": f32(5, 4), "q_indptr": i32([0, 3, 5]), "beta_kind": "logit", "chunk": 16},
        "kda_stage_inter": {"w": f32(5, 4, 16), "kr": f32(5, 4, 16), "u0": f32(5, 4, 8), "g_sum": falling,
                            "q_indptr": i32([0, 3, 5]), "initial_state": f32(2, 4, 8, 16), "chunk": 16},
        "kda_stage_output": {"q_hat": f32(5, 2, 16), "g_sum": falling, "p": f32(5, 4, 16), "u": f32(5, 4, 8),
                             "chunk_states": f32(2, 4, 8, 16), "q_indptr": i32([0, 3, 5])},
        "kda_decode": {**layer(3), **qkv(3), "state": f32(4, 2, 8, 16), "slot": i32([3, 0, -1])},
        "kda_verify": {**layer(4), **qkv(4), "state": f32(4, 2, 8, 16), "slot": i32([3, 0]), "mode": "records",
                       "rows_per_request": 2},
        "kda_commit": {"scratch": f32(2, 3, 2, 8, 16), "accepted": i32([2, 0]), "slot": i32([3, 0]),
                       "state": f32(4, 2, 8, 16), "mode": "states"},
        "causal_conv1d": {"x": bf16(rng, 5, 24), "weight": f32(24, 4), "bias": f32(24), "q_indptr": i32([0, 3, 5]),
                          "window_state": bf16(rng, 4, 3, 24), "in_slot": i32([0, 2]), "out_slot": i32([1, 2])},
    }  # fmt: skip


def block_calls(rng):
    """MSA: two requests of two and one rows, blocks of 16 tokens, four query heads over two."""
    batch = {"kv_len": i32([40, 17]), "q_indptr": i32([0, 2, 3]), "block_size": 16}
    table = {"page_table": i32([[3, 1, 2, 0], [4, 0, 0, 0]])}
    keys = {"iq": bf16(rng, 3, 2, 32), "index_k": bf16(rng, 80, 1, 32), **table, **batch}
    tokens = np.arange(128, dtype=np.int32).reshape(2, 64)
    return {
        "build_page_table": {"req_to_token": tokens, "pool_row": i32([1, 0]), "kv_len": i32([40, 17]), "page_size": 16},
        "msa_block_scores": dict(keys),
        "msa_select_blocks": {"scores": rng.standard_normal((2, 3, 4)).astype(np.float32), **batch, "topk": 2},
        "msa_score_select": {**keys, "topk": 2},
        "msa_attend": {"q": bf16(rng, 3, 4, 32), "k_pool": bf16(rng, 80, 2, 32), "v_pool": bf16(rng, 80, 2, 32),
                       **table, **batch, "blocks": i32([[[0, 2], [2, 1], [0, 1]]] * 2)},
    }  # fmt: skip
