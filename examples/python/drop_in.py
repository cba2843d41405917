"""The drop-in: code written for another package's kernels runs on fovea, as it is.

    python examples/python/drop_in.py                    # needs torch; a GPU is used if there is one
"""

import torch

import fovea
import fovea.compat

fovea.compat.install()  # enters the modules that are not installed; installed ones stay, unless override names them

from sgl_kernel.flash_mla import flash_mla_with_kvcache, get_mla_metadata  # noqa: E402

DEVICE = "cuda" if fovea.available("sparse_mla", "cuda")[0] and torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

# From here on an engine's own code: one decode step of 3 requests, 576 channels a token, pages of 64 tokens.
lengths = torch.tensor([150, 64, 9], dtype=torch.int32, device=DEVICE)
pages = torch.randperm(9, device=DEVICE).int().view(3, 3)
cache = torch.randn(9, 64, 1, 576, device=DEVICE, dtype=torch.bfloat16)
q = torch.randn(3, 1, 16, 576, device=DEVICE, dtype=torch.bfloat16)
metadata, splits = get_mla_metadata(lengths, 16, 1)
out, lse = flash_mla_with_kvcache(q, cache, pages, lengths, 512, metadata, splits, softmax_scale=192**-0.5, causal=True)

for request, length in enumerate(lengths.tolist()):
    keys = cache[pages[request].long()].reshape(-1, 576)[:length].float()
    scores = q[request, 0].float() @ keys.T * 192**-0.5
    expected = scores.softmax(-1) @ keys[:, :512]
    error = ((out[request, 0].float() - expected).norm() / expected.norm()).item()
    print(f"request of {length} tokens: out differs by {error:.1e} of its norm")
    assert error < 1e-2
    assert torch.allclose(lse[request, :, 0], scores.logsumexp(-1), atol=1e-3)

fovea.compat.uninstall()
