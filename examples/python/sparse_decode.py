"""Sparse decode of DeepSeek-V3.2 over a paged fp8 cache, compared with attention over every key.

    python examples/python/sparse_decode.py
"""

import ml_dtypes
import numpy as np

import fovea

BF16 = ml_dtypes.bfloat16
REQUESTS, TOKENS, PAGE, HEADS, INDEX_HEADS, TOPK = 2, 600, 64, 16, 8, 128
SCALE = 192**-0.5  # of the expanded form: a width does not say it
rng = np.random.default_rng(0)


def bf16(*shape):
    return rng.standard_normal(shape).astype(BF16)


def i32(values):
    return np.asarray(values, np.int32)


# Caches: pages of a request anywhere in the pool; page 0 belongs to padding.
pages = -(-TOKENS // PAGE)
table = i32(1 + rng.permutation(REQUESTS * pages).reshape(REQUESTS, pages))
positions = np.arange(TOKENS)
slots = i32(table[:, positions // PAGE] * PAGE + positions % PAGE).ravel()
latent = bf16(REQUESTS * TOKENS, 576)
pool = np.zeros((REQUESTS * pages + 1, PAGE * 656), np.uint8)
fovea.pack_rows(latent, slots, pool, "v32", page_size=PAGE)

# Index keys and queries: LayerNorm, rope, Hadamard, fp8.
angles = np.arange(1024)[:, None] / 10000 ** (np.arange(32) / 32)
cos_sin = np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32)


def quantise(rows, positions):
    return fovea.index_quantize(
        bf16(rows, INDEX_HEADS, 128), bf16(rows, 128), np.ones(128, np.float32), np.zeros(128, np.float32),
        rng.random((rows, INDEX_HEADS)).astype(np.float32), i32(positions), cos_sin, "half_split", "fp32", hadamard=True,
    )  # fmt: skip


keys = quantise(REQUESTS * TOKENS, np.tile(positions, REQUESTS))
index_pool = np.zeros((len(pool), PAGE * 132), np.uint8)
fovea.index_store(keys.k_fp8, keys.k_scale, slots, index_pool, PAGE)

# One step: a query row per request selects its best keys, as slots, and attends over them.
query = quantise(REQUESTS, [TOKENS - 1] * REQUESTS)
rows = {"page_table": table, "row_to_request": i32([0, 1]), "row_len": i32([TOKENS] * REQUESTS), "page_size": PAGE}
indices = fovea.index_select(
    query.q_fp8, query.head_weight, "paged", TOPK, index_pool=index_pool, transform="paged", **rows
)
q = bf16(REQUESTS, HEADS, 576)
out, lse = fovea.sparse_mla(q, pool, indices, SCALE, row_format="v32", page_size=PAGE)
print(f"selected {indices.shape[1]} of {TOKENS} keys, out {out.shape} {out.dtype}, lse {lse.min():.2f}..{lse.max():.2f}")

# With every key listed it is dense attention over the same cache.
every, every_lse = fovea.sparse_mla(q, pool, slots.reshape(REQUESTS, TOKENS), SCALE, row_format="v32", page_size=PAGE)
lengths = {"kv_len": i32([TOKENS] * REQUESTS), "q_indptr": i32([0, 1, 2])}
dense, dense_lse = fovea.dense_mla(q, pool, table, softmax_scale=SCALE, row_format="v32", page_size=PAGE, **lengths)
difference = np.abs(every.astype(np.float32) - dense.astype(np.float32)).max()
print(f"all keys, sparse against dense: out differs by {difference:.1e}, lse by {np.abs(every_lse - dense_lse).max():.1e}")
assert difference < 2e-2 and (lse < dense_lse).all()
