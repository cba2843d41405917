"""A serving backend of DeepSeek-V3.2: a prompt in chunks, a verified draft, a decode; compared with one prefill.

    python examples/python/serving.py
"""

import ml_dtypes
import numpy as np

import fovea

BF16 = ml_dtypes.bfloat16
TOKENS, PAGE, HEADS, INDEX_HEADS, TOPK = 90, 16, 8, 8, 32
SCALE = 192**-0.5
rng = np.random.default_rng(0)


def bf16(*shape):
    return rng.standard_normal(shape).astype(BF16)


def i32(values):
    return np.asarray(values, np.int32)


# What the model gives for every token of one request, and the weights of the layer.
tokens = {
    "q": bf16(TOKENS, HEADS, 576),
    "k": bf16(TOKENS, 576),
    "index_q": bf16(TOKENS, INDEX_HEADS, 128),
    "index_k": bf16(TOKENS, 128),
    "head_gate": rng.random((TOKENS, INDEX_HEADS)).astype(np.float32),
}
angles = np.arange(128)[:, None] / 10000 ** (np.arange(32) / 32)
layer = {
    "norm_weight": np.ones(128, np.float32),
    "norm_bias": np.zeros(128, np.float32),
    "cos_sin": np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32),
}

# Row 0 of the table and page 0 belong to padding; the request has row 1 and pages in any order.
pages = 1 + rng.permutation(-(-TOKENS // PAGE))
slots = (pages[:, None] * PAGE + np.arange(PAGE)).ravel()
req_to_token = i32([np.zeros_like(slots), slots])


class Server:
    """A cache of one layer and its backend."""

    def __init__(self):
        config = {"num_pages": len(pages) + 1, "page_size": PAGE}
        self.kv_pool = fovea.KvPool(**config, row_format="v32").layer()
        self.index_pool = fovea.KvPool(**config, row_format="i132", width=128).layer()
        self.backend = fovea.DsaBackend(
            num_heads=HEADS, index_heads=INDEX_HEADS, topk=TOPK, page_size=PAGE, max_requests=1, max_rows=TOKENS,
            table_width=req_to_token.shape[1], rows_per_request=3,
        )  # fmt: skip

    def step(self, mode, begin, end, plan=None):
        """Rows begin..end-1 of the request; out and lse."""
        rows = range(begin, end)
        lengths = {"extend": {"ext_len": i32([end - begin])}}.get(mode, {})
        seq_len = begin if mode == "target_verify" else end  # a verify counts its rows itself
        self.backend.begin_step(
            mode, i32([seq_len]), i32([1]), req_to_token, i32(rows), i32(slots[begin:end]), **lengths, plan=plan
        )
        part = {name: tensor[begin:end] for name, tensor in tokens.items()}
        return self.backend.forward(self.kv_pool, self.index_pool, SCALE, **part, **layer, plan=plan)


whole, whole_lse = Server().step("extend", 0, TOKENS)

server = Server()
plan = server.backend.make_step_plan("target_verify", 1, 3)  # buffers at fixed addresses, as a graph needs them
results = [server.step("extend", 0, 40), server.step("extend", 40, 80)]
verified = server.step("target_verify", 80, 83, plan)
results.append(tuple(part[:2] for part in verified))  # the last draft is rejected: it needs no undoing
results += [server.step("decode", token, token + 1) for token in range(82, TOKENS)]
out, lse = (np.concatenate(parts) for parts in zip(*results))
difference = np.abs(out.astype(np.float32) - whole.astype(np.float32)).max()
print(f"{TOKENS} rows in {len(results)} steps: out differs by {difference:.1e}, lse by {np.abs(lse - whole_lse).max():.1e}")
assert difference == 0 and (lse == whole_lse).all()  # a row's bits do not depend on how it was computed
