"""fovea.compat for sliding-window decode: the definition, and an engine's own fallback where that is right (peers.py)."""

import unittest

import numpy as np

import fovea
import fovea.compat
import peers
from support import GPU, Case, attend, f64

try:
    import torch
except ImportError:
    torch = None

ROWS, HEADS, DIM, PAGES, BLOCK, WINDOW = 5, 3, 512, 4, 16, 24
SCALE = 0.05


class Cache:
    """Rows of 512 codes, with a scale for each slot, and the windows of five rows."""

    def __init__(self, seed=11, device="cpu"):
        self.rng = np.random.default_rng(seed)
        whole = torch.zeros(PAGES, BLOCK + 3, DIM, dtype=torch.uint8)  # three rows of something else behind a page
        self.kv = whole[:, :BLOCK]
        codes = torch.from_numpy(self.rng.standard_normal((PAGES, BLOCK, DIM)).astype(np.float32) * 40)
        self.kv.copy_(codes.to(torch.float8_e4m3fn).view(torch.uint8))
        self.inv_scale = (torch.from_numpy(self.rng.random((PAGES * BLOCK, 1)).astype(np.float32)) * 0.05).to(torch.bfloat16)
        self.q = torch.from_numpy(self.rng.standard_normal((ROWS, HEADS, DIM)).astype(np.float32)).to(torch.bfloat16)
        slots = np.stack([self.rng.permutation(PAGES * BLOCK)[:WINDOW] for _ in range(ROWS)])
        self.indices = torch.from_numpy(slots.astype(np.int64))
        self.lens = torch.tensor([WINDOW, 7, 1, 16, 0])
        self.indices[0, 3] = -1  # a hole inside the window
        self.kv = whole.to(device)[:, :BLOCK]
        for name in ("inv_scale", "q", "indices", "lens"):
            setattr(self, name, getattr(self, name).to(device))

    def call(self, function, **changes):
        arguments = {"q": self.q, "swa_kv_cache": self.kv, "swa_inv_scale": self.inv_scale, "swa_indices": self.indices,
                     "swa_lens": self.lens, "block_size": BLOCK, "scale": SCALE, "window_size": WINDOW}  # fmt: skip
        return function(**(arguments | changes))

    def expected(self):
        rows = self.kv.contiguous().view(torch.float8_e4m3fn).float() * self.inv_scale.view(PAGES, BLOCK, 1).float()
        rows, q = f64(rows.to(torch.bfloat16).float()).reshape(-1, DIM), f64(self.q.float())
        out = np.zeros((ROWS, HEADS, DIM))
        for t in range(ROWS):
            seen = [slot for slot in self.indices[t, : int(self.lens[t])].tolist() if slot >= 0]
            for head in range(HEADS):
                out[t, head] = attend(rows[seen] @ q[t, head] * SCALE, rows[seen])[0]
        return out


@unittest.skipIf(torch is None, "torch is not installed")
class SwaTest(Case):
    def setUp(self):
        self.cache = Cache()

    def test_the_definition(self):
        function = fovea.compat.native_swa_decode_attention
        out = self.cache.call(function)
        self.assertEqual((list(out.shape), out.dtype), ([ROWS, HEADS, DIM], torch.bfloat16))
        self.assert_close(out.float(), self.cache.expected(), 2e-2)
        same = {"swa_kv_cache": self.cache.kv.contiguous().view(torch.float8_e4m3fn),
                "swa_indices": self.cache.indices.to(torch.int32).unsqueeze(0), "swa_lens": self.cache.lens.to(torch.int32)}
        for name, value in same.items():
            with self.subTest(name):
                self.assertTrue(torch.equal(self.cache.call(function, **{name: value}), out))

    def test_refusals(self):
        with self.assertRaisesRegex(fovea.InvalidArgument, r"swa_kv_cache has shape .*, expected \[pages, 8, 512\]"):
            self.cache.call(fovea.compat.native_swa_decode_attention, block_size=8)


@unittest.skipIf(torch is None, "torch is not installed")
@peers.needs("002")
class EngineTest(Case):
    device = "cpu"

    def test_the_fallback_of_the_engine_where_it_is_right(self):
        # It gives NaN for a row without a key, and needs lists as wide as the window.
        cache = Cache(device=self.device)
        right = cache.lens > 0
        fallback = cache.call(peers.execute("002")["_fallback_batched_sdp"])
        ours = cache.call(fovea.compat.native_swa_decode_attention)
        self.assert_close(ours[right].float(), fallback[right].float(), 3e-2)
        self.assert_close(ours.float(), cache.expected(), 2e-2)
        self.assertTrue((ours[~right] == 0).all())


@peers.needs_gpu
class GpuEngineTest(EngineTest):
    device = GPU


if __name__ == "__main__":
    unittest.main()
