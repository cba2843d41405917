"""Sparse decode of DeepSeek-V3.2 and a step of Kimi Delta Attention with tensors of torch, against torch itself.

    python examples/python/torch_decode.py               # needs torch; a GPU is used if there is one
"""

import torch

import fovea
import fovea.torch_ops  # torch.ops.fovea: the same operators, for torch.compile and torch.export

DEVICE = "cuda" if fovea.available("sparse_mla", "cuda")[0] and torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


def bf16(*shape):
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


def differs(actual, expected):
    return ((actual.float() - expected).norm() / expected.norm()).item()


# Sparse decode: 4 requests of 500 tokens in one bf16 cache, 64 slots picked for each. Results are tensors of torch, the
# call is on torch's current stream.
requests, tokens, heads, topk, scale = 4, 500, 16, 64, 192**-0.5
cache, q = bf16(requests * tokens, 576), bf16(requests, heads, 576)
picked = torch.stack([torch.randperm(tokens, device=DEVICE)[:topk] for _ in range(requests)]).int()
slots = picked + torch.arange(requests, device=DEVICE, dtype=torch.int32)[:, None] * tokens
out, lse = fovea.sparse_mla(q, cache, slots, scale)
keys = cache[slots.long()].float()
weights = (torch.einsum("thd,tkd->thk", q.float(), keys) * scale).softmax(-1)
error = differs(out, torch.einsum("thk,tkd->thd", weights, keys[..., :512]))
print(f"sparse decode on {DEVICE}: out differs by {error:.1e} of its norm, lse {lse.min():.2f}..{lse.max():.2f}")
assert error < 1e-2


# The same call inside a compiled function: the graph is whole, the operator a node of it.
@torch.compile(fullgraph=True, backend="aot_eager")
def attend(q, cache, slots):
    return torch.ops.fovea.sparse_mla(q, cache, slots, 192**-0.5)[0] * 2


assert torch.equal(attend(q, cache, slots), out * 2)

# KDA: a prompt of 100 tokens by sequence, then 8 tokens one by one; the state is updated in place.
sequences, length, more, width = 2, 100, 8, 64
parts = [bf16(sequences, length + more, heads, width) for _ in range(3)]
decay = -torch.rand(sequences, length + more, heads, width, device=DEVICE)
beta = torch.rand(sequences, length + more, heads, device=DEVICE)
state = torch.zeros(sequences, heads, width, width, device=DEVICE)
layer = {"gate": "given", "beta_kind": "prob", "normalise": True}


def rows(tensor, begin, end):
    return tensor[:, begin:end].flatten(0, 1)


indptr = torch.arange(0, sequences * length + 1, length, dtype=torch.int32, device=DEVICE)
out = [fovea.kda_prefill(*(rows(x, 0, length) for x in (*parts, decay, beta)), indptr, state=state, **layer)]
out = [out[0].view(sequences, length, heads, width)]
for t in range(length, length + more):
    q, k, v = (part[:, t] for part in parts)
    out.append(fovea.kda_decode(decay[:, t], beta[:, t], state, q=q, k=k, v=v, **layer)[:, None])
out = torch.cat(out, 1)

s = torch.zeros_like(state)  # [V, K]
q, k = (part.float() / (part.float().square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in parts[:2])
expected = []
for t in range(length + more):
    s = s * decay[:, t, :, None].exp()
    u = beta[:, t, :, None] * (parts[2][:, t].float() - torch.einsum("nhvk,nhk->nhv", s, k[:, t]))
    s = s + u[..., None] * k[:, t, :, None]
    expected.append(torch.einsum("nhvk,nhk->nhv", s, q[:, t]) * width**-0.5)
error = differs(out, torch.stack(expected, 1))
print(f"KDA, {length} tokens at once and {more} one by one: out differs by {error:.1e}, state by {differs(state, s):.1e}")
assert error < 1e-2 and differs(state, s) < 1e-2
