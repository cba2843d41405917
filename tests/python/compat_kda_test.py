"""fovea.compat for Kimi Delta Attention: the definition, and an engine's prefill kernel over it, unchanged (peers.py)."""

import logging
import sys
import types
import unittest

import numpy as np

import fovea
import fovea.compat
import peers
from support import GPU, Case

try:
    import torch
except ImportError:
    torch = None

DIM, HEADS, SLOTS = 128, 2, 14


def values(tensor):
    return tensor.double().cpu().numpy()


def normalised(rows, rounded):
    rows = values(rows)
    rows = rows / np.sqrt((rows * rows).sum(-1, keepdims=True) + 1e-6)
    return values(torch.from_numpy(rows).to(torch.bfloat16)) if rounded else rows


def log_decay(g, a_log, dt_bias, lower_bound):
    x = values(g) + values(dt_bias)
    a = np.exp(values(a_log))[:, None]
    if lower_bound is None:
        return -a * np.logaddexp(0, x)
    return lower_bound / (1 + np.exp(-a * x))


def recurrence(q, k, v, decay, beta, state, scale):
    """out [T, HV, V] and the states before each token and after the last, of one sequence; state [HV, K, V]."""
    out, states = np.zeros(v.shape), [state.copy()]
    for t in range(len(q)):
        state = state * np.exp(decay[t])[:, :, None]
        rest = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t][:, :, None] * rest[:, None, :]
        out[t] = scale * np.einsum("hkv,hk->hv", state, q[t])
        states.append(state.copy())
    return out, states


class Batch:
    """Packed sequences over a pool of states, as an engine has them."""

    def __init__(self, lengths, seed=3, lower_bound=None, device="cpu"):
        rng = np.random.default_rng(seed)

        def random(*shape, scale=1.0):
            return torch.from_numpy((rng.standard_normal(shape) * scale).astype(np.float32)).to(device)

        tokens = sum(lengths)
        self.lengths, self.lower_bound = lengths, lower_bound
        self.q, self.k, self.v = (random(1, tokens, HEADS, DIM).to(torch.bfloat16) for _ in range(3))
        self.g = random(1, tokens, HEADS * DIM).to(torch.bfloat16)
        self.beta = torch.sigmoid(random(1, tokens, HEADS)).to(torch.bfloat16).float()
        self.a_log, self.dt_bias = random(1, 1, HEADS, 1, scale=0.3), random(HEADS * DIM, scale=0.3)
        self.states = random(SLOTS, HEADS, DIM, DIM, scale=0.1)
        self.slots = torch.from_numpy(rng.permutation(SLOTS - 1)[: len(lengths)].astype(np.int32)).to(device)
        self.starts = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device=device)

    def arguments(self, states):
        return ((self.q, self.k, self.v, self.g, self.beta),
                {"ssm_states": states, "cache_indices": self.slots, "query_start_loc": self.starts, "A_log": self.a_log,
                 "dt_bias": self.dt_bias, "lower_bound": self.lower_bound})  # fmt: skip

    def expected(self, rounded=False):
        """out, pool afterwards, and the states before every 64 rows, in the layout of the pool."""
        pool, outs, inner = values(self.states), [], []
        for index, length in enumerate(self.lengths):
            part = slice(int(self.starts[index]), int(self.starts[index]) + length)
            g = self.g[0, part].view(length, HEADS, DIM)
            decay = log_decay(g, self.a_log.view(HEADS), self.dt_bias.view(HEADS, DIM), self.lower_bound)
            q, k = (normalised(tensor[0, part], rounded) for tensor in (self.q, self.k))
            slot = int(self.slots[index])
            out, states = recurrence(
                q, k, values(self.v[0, part]), decay, values(self.beta[0, part]), pool[slot].transpose(0, 2, 1), DIM**-0.5
            )
            outs.append(out)
            pool[slot] = states[-1].transpose(0, 2, 1)
            inner += [state.transpose(0, 2, 1) for state in states[:length:64]]
        return np.concatenate(outs)[None], pool, np.stack(inner)[None]


@unittest.skipIf(torch is None, "torch is not installed")
class KdaTest(Case):
    def test_l2norm_fwd(self):
        x = torch.randn(5, 3, DIM).to(torch.bfloat16)
        found = fovea.compat.l2norm_fwd(x)
        self.assertEqual(found.dtype, torch.bfloat16)
        self.assert_close(found.float(), normalised(x, False), 4e-3)
        self.assertEqual(fovea.compat.l2norm_fwd(x, output_dtype=torch.float32).dtype, torch.float32)
        self.assertTrue((fovea.compat.l2norm_fwd(torch.zeros(1, 4)) == 0).all())

    def test_extend(self):
        for lower_bound in (None, -5.0):
            with self.subTest(lower_bound=lower_bound):
                batch = Batch([70, 1, 129], lower_bound=lower_bound)
                states = batch.states.clone()
                tensors, arguments = batch.arguments(states)
                out, inner = fovea.compat.kda_extend(*tensors, return_intermediate_states=True, **arguments)
                expected, pool, expected_inner = batch.expected()
                self.assert_close(out.float(), expected, 1e-2)
                self.assert_close(states, pool, 1e-3)
                self.assertEqual(list(inner.shape), [1, 2 + 1 + 3, HEADS, DIM, DIM])
                self.assert_close(inner, expected_inner, 1e-3)
                again = batch.states.clone()
                tensors, arguments = batch.arguments(again)
                same, none = fovea.compat.kda_extend(
                    *tensors, return_intermediate_states=True, extend_seq_lens_cpu=[70, 1, 129],
                    track_ssm_h_src=torch.empty(0), is_spec_decode=False, **arguments,
                )  # fmt: skip
                self.assertTrue(torch.equal(same, out) and torch.equal(again, states))
                self.assertEqual(list(none.shape), [1, 0, HEADS, DIM, DIM])

    def test_extend_outside_the_pool(self):
        batch, fresh = Batch([3, 4]), Batch([3, 4])
        batch.slots, fresh.slots = (torch.tensor(slots, dtype=torch.int32) for slots in ([SLOTS, 5], [0, 5]))
        fresh.states[0] = 0
        outs, pools = [], []
        for each in (batch, fresh):
            pools.append(each.states.clone())
            tensors, arguments = each.arguments(pools[-1])
            outs.append(fovea.compat.kda_extend(*tensors, **arguments))
        self.assertTrue(torch.equal(*outs))
        others = [slot for slot in range(SLOTS) if slot != 5]
        self.assertTrue(torch.equal(pools[0][others], batch.states[others]))

    def test_chunk_fwd(self):
        batch = Batch([40, 40, 40], lower_bound=-5.0)
        dense = [tensor.view(3, 40, *tensor.shape[2:]) for tensor in (batch.q, batch.k, batch.v, batch.g, batch.beta)]
        dense[0], dense[1] = (fovea.compat.l2norm_fwd(tensor) for tensor in dense[:2])
        dense[3] = dense[3].view(3, 40, HEADS, DIM)
        initial = batch.states[batch.slots.long()].transpose(-1, -2).contiguous()
        kept = initial.clone()
        settings = {"scale": DIM**-0.5, "initial_state": initial, "output_final_state": True, "safe_gate": True,
                    "use_gate_in_kernel": True, "A_log": batch.a_log.reshape(-1), "dt_bias": batch.dt_bias}  # fmt: skip
        result = fovea.compat.chunk_kda_fwd(*dense, cu_seqlens=None, lower_bound=-5.0, **settings)
        self.assertIsInstance(result, tuple)
        expected, pool, _ = batch.expected(rounded=True)
        self.assert_close(result[0].reshape(1, 120, HEADS, DIM).float(), expected, 1e-2)
        self.assertEqual(result[1].dtype, torch.float32)
        self.assert_close(result[1].transpose(-1, -2), pool[batch.slots.long()], 1e-3)
        self.assertTrue(torch.equal(initial, kept))
        packed = [tensor.reshape(1, 120, *tensor.shape[2:]) for tensor in dense]
        same = fovea.compat.chunk_kda_fwd(*packed, cu_seqlens=batch.starts.long(), **settings)
        self.assertTrue(torch.equal(same[0].view_as(result[0]), result[0]) and torch.equal(same[1], result[1]))
        settings.update(initial_state=None, output_final_state=False)
        self.assertIsNone(fovea.compat.chunk_kda_fwd(*dense, **settings)[1])
        with self.assertRaisesRegex(fovea.InvalidArgument, r"chunk_kda_fwd: A_log has shape \[3\], expected 2 elements"):
            fovea.compat.chunk_kda_fwd(*dense, **(settings | {"A_log": torch.zeros(3)}))

    def test_chunk_fwd_of_log_decays(self):
        batch = Batch([40])
        g = batch.g.view(1, 40, HEADS, DIM)
        decay = log_decay(g[0], batch.a_log.view(HEADS), batch.dt_bias.view(HEADS, DIM), None)
        decay = torch.from_numpy(decay).float()[None]
        q, k = fovea.compat.l2norm_fwd(batch.q), fovea.compat.l2norm_fwd(batch.k)
        given = fovea.compat.chunk_kda_fwd(q, k, batch.v, decay, batch.beta)[0]
        settings = {"use_gate_in_kernel": True, "A_log": batch.a_log, "dt_bias": batch.dt_bias}
        self.assert_close(given.float(), fovea.compat.chunk_kda_fwd(q, k, batch.v, g, batch.beta, **settings)[0].float(), 1e-2)


@unittest.skipIf(torch is None, "torch is not installed")
@peers.needs("000")
class EngineTest(Case):
    """The engine's kernel, with stand-ins for the two classes of its own that it imports."""

    device = "cpu"
    KERNELS = "sglang.srt.layers.attention.linear.kernels"

    def setUp(self):
        self.addCleanup(fovea.compat.uninstall)
        fovea.compat.install(override=["sglang"])
        self.fallbacks = fallbacks = []

        class TritonKDAKernel:
            def extend(self, *args, **kwargs):
                fallbacks.append(kwargs["cache_indices"].numel())
                return fovea.compat.kda_extend(*args, **kwargs)

        before = {name: sys.modules.get(name) for name in self.names()}
        self.addCleanup(self.restore, before)
        for name in self.names():
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__path__ = []
        sys.modules[f"{self.KERNELS}.kda_triton"].TritonKDAKernel = TritonKDAKernel
        sys.modules[f"{self.KERNELS}.kernel_backend"].LinearAttnKernelBase = object
        self.engine = peers.execute("000")
        self.kernel = self.engine["NvidiaKDAKernel"]()
        logger = logging.getLogger(self.engine["__name__"])
        logger.disabled = True
        self.addCleanup(setattr, logger, "disabled", False)

    def names(self):
        linear = self.KERNELS.rpartition(".")[0]
        return [linear, self.KERNELS, f"{self.KERNELS}.kda_triton", f"{self.KERNELS}.kernel_backend"]

    def restore(self, before):
        for name, module in before.items():
            sys.modules.pop(name) if module is None else sys.modules.update({name: module})

    def extend(self, batch, states, **more):
        tensors, arguments = batch.arguments(states)
        return self.kernel.extend(*tensors, extend_seq_lens_cpu=batch.lengths, **arguments, **more)

    def native(self, batch):
        states = batch.states.clone()
        tensors, arguments = batch.arguments(states)
        return fovea.compat.kda_extend(*tensors, **arguments), states

    def test_several_sequences_run_on_the_dense_kernel(self):
        for lower_bound in (None, -5.0):
            with self.subTest(lower_bound=lower_bound):
                batch = Batch([70, 5, 33], lower_bound=lower_bound, device=self.device)
                states = batch.states.clone()
                out, inner = self.extend(batch, states, return_intermediate_states=True, track_ssm_h_src=torch.empty(0))
                expected, pool, _ = batch.expected(rounded=True)
                self.assert_close(out.float(), expected, 1e-2)
                self.assert_close(states, pool, 2e-3)
                self.assertEqual(list(inner.shape), [1, 0, HEADS, DIM, DIM])
        self.assertEqual(self.fallbacks, [])

    def test_other_batches_run_on_the_fallback(self):
        one, interior = Batch([40], device=self.device), Batch([70, 5], device=self.device)
        for batch, more in ((one, {}), (interior, {"is_spec_decode": True}),
                            (interior, {"return_intermediate_states": True, "track_ssm_h_src": torch.zeros(1)})):  # fmt: skip
            with self.subTest(more=sorted(more)):
                states = batch.states.clone()
                out = self.extend(batch, states, **more)
                expected, pool = self.native(batch)
                self.assertTrue(torch.equal(out[0] if isinstance(out, tuple) else out, expected))
                self.assertTrue(torch.equal(states, pool))
        self.assertEqual(self.fallbacks, [1, 2, 2])

    def test_a_failure_restores_the_states_and_falls_back(self):
        batch = Batch([2] * 9, device=self.device)  # two groups
        calls = []

        def failing(*args, **kwargs):
            calls.append(args[0].shape[0])
            if len(calls) == 2:
                raise RuntimeError("the second group")
            return fovea.compat.chunk_kda_fwd(*args, **kwargs)

        self.kernel._ensure_loaded()
        self.assertIs(self.kernel._fwd, fovea.compat.chunk_kda_fwd)
        self.kernel._fwd = failing
        states = batch.states.clone()
        out = self.extend(batch, states)
        expected, pool = self.native(batch)
        self.assertEqual((calls, self.fallbacks), ([8, 1], [9]))
        self.assertTrue(torch.equal(out, expected) and torch.equal(states, pool))


@peers.needs_gpu
class GpuEngineTest(EngineTest):
    device = GPU


if __name__ == "__main__":
    unittest.main()
