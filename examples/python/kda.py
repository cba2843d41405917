"""Kimi Delta Attention: a prompt in two chunks, then decode, against the whole sequence in one call.

    python examples/python/kda.py
"""

import ml_dtypes
import numpy as np

import fovea

BF16 = ml_dtypes.bfloat16
TOKENS, CHUNK, DECODED, HEADS, DIM, SLOTS = 300, 128, 12, 4, 64, 8
rng = np.random.default_rng(0)
layer = {
    "gate": "lower_bound",  # raw gate -> log decay in [-5, 0]
    "beta_kind": "logit",
    "normalise": True,
    "a_log": rng.standard_normal(HEADS).astype(np.float32),
    "dt_bias": rng.standard_normal((HEADS, DIM)).astype(np.float32),
}
q, k, v, g = (rng.standard_normal((TOKENS, HEADS, DIM)).astype(BF16) for _ in range(4))
beta = rng.standard_normal((TOKENS, HEADS)).astype(BF16)


def i32(*values):
    return np.array(values, np.int32)


def prefill(begin, end, state, slot, **more):
    rows = slice(begin, end)
    arguments = (tensor[rows] for tensor in (q, k, v, g, beta))
    return fovea.kda_prefill(
        *arguments, i32(0, end - begin), state=state, in_slot=i32(slot), out_slot=i32(slot), **layer, **more
    )


# One state of DIM x DIM numbers per head takes the place of a cache; slot 5 is this sequence's.
state = np.zeros((SLOTS, HEADS, DIM, DIM), np.float32)
parts = [prefill(begin, min(begin + CHUNK, TOKENS - DECODED), state, 5) for begin in range(0, TOKENS - DECODED, CHUNK)]
for t in range(TOKENS - DECODED, TOKENS):
    row = slice(t, t + 1)
    parts.append(fovea.kda_decode(g[row], beta[row], state, q=q[row], k=k[row], v=v[row], slot=i32(5), **layer))
out = np.concatenate(parts)

whole_state = np.zeros_like(state)
whole = prefill(0, TOKENS, whole_state, 0)
difference = np.abs(out.astype(np.float32) - whole.astype(np.float32)).max()
drift = np.abs(state[5] - whole_state[0]).max()
print(f"{len(parts) - DECODED} chunks and {DECODED} decoded tokens against one call: out differs by {difference:.1e}, state by {drift:.1e}")
assert difference < 2e-2 and drift < 1e-3
assert (np.delete(state, 5, 0) == 0).all()  # nobody else's state was touched
