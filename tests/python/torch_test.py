"""Tensors of torch: no copies, results of torch, the same bits as with numpy."""

import gc
import sys
import unittest
import weakref

import msa_backend_test
import numpy as np

import fovea
from calls import legal_calls
from support import BF16, Case

try:
    import torch
except ImportError:
    torch = None


def to_torch(value):
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype == BF16:
        return torch.from_numpy(value.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(value)


def to_numpy(value):
    return value.view(torch.int16).numpy().view(BF16) if value.dtype == torch.bfloat16 else value.numpy()


def results_of(value):
    if value is None:
        return []
    if isinstance(value, dict):
        return [value[name] for name in sorted(value)]
    return [entry for entry in value if entry is not None] if isinstance(value, tuple) else [value]


@unittest.skipIf(torch is None, "torch is not installed")
class TorchTest(Case):
    def test_every_operator_gives_the_bits_that_it_gives_with_numpy(self):
        for op, arguments in legal_calls().items():
            with self.subTest(op):
                tensors = {name: to_torch(value.copy() if isinstance(value, np.ndarray) else value)
                           for name, value in arguments.items()}  # fmt: skip
                actual = results_of(getattr(fovea, op)(**tensors))
                expected = results_of(getattr(fovea, op)(**arguments))
                self.assertEqual(len(actual), len(expected))
                for mine, other in zip(actual, expected):
                    self.assertIsInstance(mine, torch.Tensor)
                    self.assert_same(to_numpy(mine), other)
                for name in ("pool", "state", "window_state"):  # updated in place
                    if name in tensors:
                        self.assert_same(to_numpy(tensors[name]), arguments[name])

    def test_out_and_views(self):
        wide = torch.full((4, 8), 7, dtype=torch.int32)
        out = wide[::2, 2:4]
        logits = torch.tensor([[3.0, 1, 5, 4], [0, 9, 8, 7]])
        self.assertIs(fovea.topk_select(logits, torch.tensor([4, 3], dtype=torch.int32), 2, out=out), out)
        self.assertEqual(out.tolist(), [[2, 3], [1, 2]])
        self.assertEqual(wide[0].tolist(), [7, 7, 2, 3, 7, 7, 7, 7])

    def test_codes_of_e4m3(self):
        q = torch.ones(1, 1, 4).to(torch.float8_e4m3fn)
        zero = torch.zeros(1, dtype=torch.int32)
        logits = fovea.index_logits(
            q, torch.ones(1, 1), "ragged", k_fp8=q[0], k_scale=torch.ones(1), k_start=zero, k_end=zero + 1
        )
        self.assertEqual(logits.tolist(), [[4]])

    def test_tensors_that_need_a_gradient_are_refused(self):
        logits = torch.zeros(1, 4, requires_grad=True)
        with self.assertRaisesRegex(fovea.InvalidArgument, "topk_select: logits gives no DLPack tensor.*grad"):
            fovea.topk_select(logits, torch.ones(1, dtype=torch.int32), 2)


    def test_tensors_that_are_no_memory_are_refused(self):
        row_len, good = torch.ones(1, dtype=torch.int32), torch.zeros(1, 4)
        wrong = [good.to_sparse(), good.to("meta"), good.double(), good.to(torch.complex64), good.t()[:, ::2], good[:, ::2],
                 good.expand(3, 1, 1, 1, 1, 4)[None], torch.nn.Parameter(good)]  # fmt: skip
        for logits in wrong:
            with self.subTest(str(logits)), self.assertRaisesRegex(fovea.InvalidArgument, "topk_select: "):
                fovea.topk_select(logits, row_len, 2)
        frozen = torch.nn.Parameter(good, requires_grad=False)
        self.assertEqual(fovea.topk_select(frozen, row_len, 2).tolist(), [[0, -1]])

    def test_calls_keep_no_reference(self):
        logits, row_len = torch.zeros(1, 4), torch.ones(1, dtype=torch.int32)
        out = torch.zeros(1, 2, dtype=torch.int32)
        before = [sys.getrefcount(tensor) for tensor in (logits, row_len, out)]
        for _ in range(100):
            fovea.topk_select(logits, row_len, 2, out=out)
        self.assertEqual([sys.getrefcount(tensor) for tensor in (logits, row_len, out)], before)
        weak, storage = weakref.ref(logits), logits.untyped_storage()
        users = storage._use_count() if hasattr(storage, "_use_count") else None
        fovea.topk_select(logits, row_len, 2, out=out)
        self.assertEqual(storage._use_count() if users is not None else None, users)
        del logits
        gc.collect()
        self.assertIsNone(weak())


@unittest.skipIf(torch is None, "torch is not installed")
class TorchBackendTest(Case):
    def test_memory_of_pools_is_shared(self):
        pool = fovea.StatePool(num_slots=2, num_value_heads=1, head_dim_k=4, head_dim_v=2, window_shape=(3, 5))
        states, windows = torch.from_dlpack(pool.states()), torch.from_dlpack(pool.windows())
        self.assertEqual((states.dtype, windows.dtype), (torch.float32, torch.bfloat16))
        states.fill_(2)
        windows.fill_(3)
        del pool
        gc.collect()
        self.assertEqual((states.sum().item(), windows.sum().item()), (32, 90))

    def test_a_step_gives_the_bits_that_it_gives_with_numpy(self):
        case, other = msa_backend_test.MsaTest(), msa_backend_test.MsaTest()
        case.setUp()
        other.setUp()
        step, rows = case.batch.step("extend", [0, 0], [20, 5]), case.rows(25)
        case.backend.begin_step(**step)
        expected = case.backend.forward(**rows, **case.pools, return_blocks=True)
        tensors = {name: to_torch(value) for name, value in step.items()}
        other.backend.begin_step(**tensors)
        pools = {name: to_torch(pool) for name, pool in other.pools.items()}
        actual = other.backend.forward(**{name: to_torch(row) for name, row in rows.items()}, **pools, return_blocks=True)
        for mine, result in zip(actual, expected):
            self.assertIsInstance(mine, torch.Tensor)
            self.assert_same(to_numpy(mine), result)
        for name, pool in pools.items():
            self.assert_same(to_numpy(pool), case.pools[name])


if __name__ == "__main__":
    unittest.main()
