"""fovea.KvPool and fovea.StatePool: their memory in numpy, copies, refusals."""

import gc
import unittest

import numpy as np

import fovea
from support import BF16, Case, f64


class PoolTest(Case):
    def test_views_share_memory_and_outlive_the_pool(self):
        pool = fovea.KvPool(num_pages=5, page_size=4, row_format="v32", num_layers=2)
        view = pool.layer(1)
        self.assertEqual((view.shape, view.dtype, view.device), ((5, 4 * 656), "u8", "cpu"))
        self.assertGreaterEqual(pool.bytes, 2 * 5 * 4 * 656)
        array, other = view.numpy(), np.from_dlpack(view)
        array[1, 3] = 7
        self.assertEqual(other[1, 3], 7)
        self.assertFalse(pool.layer(0).numpy().any())
        del pool, view
        gc.collect()
        array[2] = 1
        self.assertEqual(int(other.sum()), 7 + 4 * 656)

    def test_slots_are_copied_and_cleared_in_every_layer(self):
        pool = fovea.StatePool(num_slots=3, num_value_heads=1, head_dim_k=4, head_dim_v=2, num_layers=2, window_shape=(3, 5))
        pool.states().numpy()[:, 1], pool.windows().numpy()[:, 1] = 2, 3
        pool.copy(1, 2)
        pool.clear(1)
        self.assertEqual(pool.states().numpy().sum(axis=(0, 2, 3, 4)).tolist(), [0, 0, 32])
        self.assertEqual(f64(pool.window(1).numpy()).sum(axis=(1, 2)).tolist(), [0, 0, 45])
        self.assertEqual(pool.window(0).numpy().dtype, BF16)
        self.assertEqual(np.asarray(pool.window(0)).dtype, np.uint16)
        self.assertIsNone(fovea.StatePool(num_slots=1, num_value_heads=1).windows())

    def test_refusals(self):
        for arguments in ({"num_pages": -1}, {"num_pages": 2**62}, {"page_size": 0}, {"row_format": "v99"}, {"width": "wide"},
                          {"num_layers": [1]}, {"num_pages": 1.5}):  # fmt: skip
            with self.subTest(arguments), self.assertRaises(fovea.Error):
                fovea.KvPool(**{"num_pages": 2, "page_size": 4, **arguments})
        with self.assertRaisesRegex(fovea.InvalidArgument, "tpu"):
            fovea.KvPool(num_pages=1, page_size=1, device="tpu")
        pool = fovea.StatePool(num_slots=2, num_value_heads=1)
        for call in (lambda: pool.copy(0, 2), lambda: pool.clear(-1), lambda: pool.state(1)):
            self.assertRaises(fovea.InvalidArgument, call)
        with self.assertRaisesRegex(fovea.InvalidArgument, "window_shape"):
            fovea.StatePool(num_slots=2, num_value_heads=1, window_shape=(1, 2, 3))


if __name__ == "__main__":
    unittest.main()
