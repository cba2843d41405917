"""Wrong calls of every kind end in an exception that names the operator, never in a crash; memory stays flat."""

import ctypes
import gc
import pathlib
import resource
import unittest
import warnings

import numpy as np

import dsa_backend_test
import fovea
import kda_backend_test
import msa_backend_test
import v4_backend_test
from calls import i32, legal_calls
from support import BF16, Case, Elsewhere

TYPES = [np.float32, np.float64, np.float16, np.int32, np.int64, np.uint8, np.int8, np.uint16, np.bool_, BF16]
NUMBERS = [-(2**63), -(2**31), -1, 0, 1, 3, 7, 64, 1000, 2**40, 2**63 - 1, 2**63, 2**90, 0.5, -0.0, 1e300, float("nan"),
           float("inf")]  # fmt: skip
THINGS = ["", "bf16", "v32", "paged", "cpu", b"", [], {}, object(), 1j, True, slice(1), np.dtype("f4"), range(3)]


# Their contents say how large results are: any content would ask for any amount of memory.
SIZES = {"build_swa_indices": ("q_indptr",), "index_gather": ("kv_indptr",), "metadata_refresh": ("seq_len", "ext_len")}


def changed_tensor(rng, tensor, is_size):
    """The same tensor made wrong, or only strange."""
    kind = rng.integers(16)
    if is_size and kind in (12, 13):
        return rng.integers(-9, 99, tensor.shape).astype(np.int32)
    if kind == 0:
        return tensor.astype(TYPES[rng.integers(len(TYPES))])
    if kind == 1:
        return tensor[..., ::2] if tensor.ndim else tensor
    if kind == 2:
        return tensor[:0]
    if kind == 3:
        return tensor[None]
    if kind == 4:
        return tensor.reshape(-1)
    if kind == 5:
        return np.concatenate([tensor, tensor])
    if kind == 6:
        return tensor[:-1]
    if kind == 7:
        return tensor[..., :0]
    if kind == 8:
        return tensor[::-1]
    if kind == 9:
        return Elsewhere(tensor.view(np.uint16) if tensor.dtype == BF16 else tensor, (int(rng.integers(1, 4)), 0))
    if kind == 10:
        frozen = tensor.copy()
        frozen.flags.writeable = False
        return frozen
    if kind == 11:  # as many rows as 64 bits of bytes hold, all of them the first
        shape = (int(rng.choice([2**31, 2**33, 2**40])),) + tensor.shape[1:]
        return np.lib.stride_tricks.as_strided(tensor, shape, (0,) + tensor.strides[1:])
    if kind == 12:  # any content
        noise = rng.integers(0, 256, tensor.nbytes, dtype=np.uint8)
        return noise.view(tensor.dtype).reshape(tensor.shape)
    if kind == 13 and tensor.dtype == np.int32:
        return rng.choice([-(2**31), -1, 0, 5, 2**20, 2**31 - 1], tensor.shape).astype(np.int32)
    if kind == 14:
        return None
    return THINGS[rng.integers(len(THINGS))]


def changed(rng, value, is_size=False):
    if isinstance(value, np.ndarray):
        return changed_tensor(rng, value, is_size)
    pool = NUMBERS if rng.integers(2) else THINGS
    return pool[rng.integers(len(pool))]


class HostileTest(Case):
    def call(self, op, arguments):
        try:
            getattr(fovea, op)(**arguments)
            return "done"
        except fovea.Error as error:
            self.assertIn(f"{op}: ", str(error))
            self.assertIsInstance(error, (fovea.InvalidArgument, fovea.Unsupported, fovea.OutOfMemory))
            return "refused"
        except (TypeError, MemoryError):
            return "refused by Python"

    def run_calls(self, count, seed):
        rng, legal = np.random.default_rng(seed), legal_calls(seed)
        outcomes = {"done": 0, "refused": 0, "refused by Python": 0}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            while sum(outcomes.values()) < count:
                for op in legal:
                    arguments = dict(legal[op])
                    for name in rng.choice(list(arguments), rng.integers(1, 3), replace=False):
                        arguments[name] = changed(rng, arguments[name], name in SIZES.get(op, ()))
                    if rng.integers(8) == 0:
                        arguments["out"] = changed(rng, np.zeros((3, 5), np.int32))
                    outcomes[self.call(op, arguments)] += 1
        return outcomes

    def test_legal_calls_run(self):
        calls = legal_calls()
        self.assertEqual(set(calls), set(fovea.operators()))
        for op, arguments in calls.items():
            self.assertEqual(self.call(op, arguments), "done", op)

    def test_ten_thousand_wrong_calls(self):
        outcomes = self.run_calls(10000, seed=1)
        self.assertGreater(outcomes["done"], 500, outcomes)
        self.assertGreater(outcomes["refused"], 3000, outcomes)


def backend_calls():
    """Class -> a configured case of its tests, the arguments of a constructor, of begin_step and of a forward."""
    calls = {}
    for name, kind in (("DsaBackend", dsa_backend_test.DsaTest), ("KdaBackend", kda_backend_test.KdaTest),
                       ("MsaBackend", msa_backend_test.MsaTest), ("V4Backend", v4_backend_test.V4Test)):  # fmt: skip
        case = kind()
        case.setUp()
        step, rows = case.batch.step("decode", [5, 6], [1, 1]), case.rows(2)
        config = {"num_heads": 2, "max_requests": 2, "max_rows": 16, "table_width": 16, "page_size": 4}
        if name == "DsaBackend":
            call = {**rows, **case.layer, "kv_pool": case.kv_pool.numpy(), "index_pool": case.index_pool.numpy(),
                    "softmax_scale": 0.1, "logit_cap": 0.0, "save_kv": True}  # fmt: skip
            forward = case.backend.forward
        elif name == "KdaBackend":
            step["in_slot"], step["out_slot"] = i32([0, 1]), i32([2, 3])
            config["num_value_heads"] = 2
            call = {**rows, **case.weights, "state": case.pool.state(0).numpy(), "window": case.pool.window(0).numpy(),
                    "layer": 1}  # fmt: skip
            forward = case.backend.forward_kda
        elif name == "MsaBackend":
            config.update(num_kv_heads=2, block_size=4)
            call, forward = {**rows, **case.pools}, case.backend.forward
        else:
            step["in_slot"] = i32([0, 1])
            config.update(hca=False, window_storage="token_pages")
            pools = {key: np.asarray(pool) for key, pool in case.pools.items()}
            call = {**rows, **case.weights, **pools, "window_pool": case.window_pool.layer().numpy(), "ratio": 4}
            forward = case.backend.forward
        calls[name] = {"config": config, "begin_step": step, "forward": call}, getattr(fovea, name), case.backend.begin_step, forward
    return calls


class BackendHostileTest(Case):
    """Wrong configurations, batches and tensors of a layer: named errors; the backend serves the next step."""

    def attempt(self, call, arguments):
        try:
            call(**arguments)
            return "done"
        except fovea.Error as error:
            self.assertIsInstance(error, (fovea.InvalidArgument, fovea.Unsupported, fovea.OutOfMemory), error)
            self.assertIn(": ", str(error))
            return "refused"
        except (TypeError, MemoryError):
            return "refused by Python"

    def changed(self, rng, arguments):
        arguments = dict(arguments)
        for name in rng.choice(list(arguments), rng.integers(1, 3), replace=False):
            arguments[name] = changed(rng, arguments[name])
        return arguments

    def run_calls(self, count, seed):
        rng, outcomes = np.random.default_rng(seed), {"done": 0, "refused": 0, "refused by Python": 0}
        calls = backend_calls()
        while sum(outcomes.values()) < count:
            for legal, build, begin, forward in calls.values():
                outcomes[self.attempt(build, self.changed(rng, legal["config"]))] += 1
                outcomes[self.attempt(begin, self.changed(rng, legal["begin_step"]))] += 1
                self.assertEqual(self.attempt(begin, legal["begin_step"]), "done")
                outcomes[self.attempt(forward, self.changed(rng, legal["forward"]))] += 1
                self.assertEqual(self.attempt(forward, legal["forward"]), "done")
        return outcomes

    def test_wrong_steps(self):
        outcomes = self.run_calls(600, seed=2)
        self.assertGreater(outcomes["done"], 30, outcomes)
        self.assertGreater(outcomes["refused"], 200, outcomes)


class FullBackendHostileTest(BackendHostileTest):
    def test_wrong_steps(self):
        outcomes = self.run_calls(10000, seed=3)
        self.assertGreater(outcomes["refused"], 3000, outcomes)


class Heap(ctypes.Structure):
    """mallinfo2 of glibc."""

    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
    )]  # fmt: skip


def heap_kib():
    """What the library and numpy hold: free blocks between them come and go and do not count."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Heap
    info = mallinfo2()
    return (info.uordblks + info.hblkhd) // 1024


def resident_kib():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 1024


class FullMemoryTest(Case):
    def test_a_hundred_thousand_calls_keep_the_memory_flat(self):
        legal = legal_calls()
        wrong = {op: {**arguments, "impl": "none"} for op, arguments in legal.items() if op != "context_split"}

        def calls(count):
            while count > 0:
                for op, arguments in legal.items():
                    getattr(fovea, op)(**arguments)
                for op, arguments in wrong.items():
                    try:
                        getattr(fovea, op)(**arguments)
                    except fovea.InvalidArgument:
                        pass
                count -= len(legal) + len(wrong)
            gc.collect()

        steps = backend_calls()

        def backend_steps(count):
            for _ in range(count):
                for legal, _, begin, forward in steps.values():
                    begin(**legal["begin_step"])
                    forward(**legal["forward"])
                    try:
                        forward(**{**legal["forward"], "out": (None,) * 5})
                    except fovea.InvalidArgument:
                        pass
            gc.collect()

        backend_steps(50)
        heap, resident = heap_kib(), resident_kib()
        backend_steps(1000)
        self.assertLess(heap_kib() - heap, 64)
        self.assertLess(resident_kib() - resident, 8192)
        calls(10000)
        heap, resident = heap_kib(), resident_kib()
        calls(100000)
        self.assertLess(heap_kib() - heap, 64)  # less than a byte a call
        self.assertLess(resident_kib() - resident, 8192)


if __name__ == "__main__":
    unittest.main()
