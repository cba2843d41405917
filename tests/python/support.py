"""Helpers of the Python tests: inputs, batches, formulas in fp64, tensors of a GPU that is not there."""

import ctypes
import threading
import unittest

import ml_dtypes
import numpy as np

import fovea

try:
    import torch
except ImportError:
    torch = None

GPU = "cuda:0"


def reason_without_gpu():
    """Why no test can run on a GPU here; empty when tests can."""
    if torch is None:
        return "torch is not installed"
    there, reason = fovea.available("topk_select", "cuda")
    if not there:
        return reason
    return "" if torch.cuda.is_available() else "torch sees no GPU"


BF16 = ml_dtypes.bfloat16
E4M3 = ml_dtypes.float8_e4m3fn


def i32(values):
    return np.array(values, np.int32)


def bf16(rng, *shape, scale=1.0):
    return (rng.standard_normal(shape) * scale).astype(BF16)


def f64(array):
    """Of numpy or torch, wherever it is."""
    return np.asarray(array.cpu() if hasattr(array, "cpu") else array).astype(np.float64)


def e4m3_values(codes):
    return codes.view(E4M3).astype(np.float64)


def attend(scores, values):
    """out and lse of one softmax over the last axis: scores [n], values [n, d]."""
    if len(scores) == 0:
        return np.zeros(values.shape[-1]), -np.inf
    top = scores.max()
    weights = np.exp(scores - top)
    return weights @ values / weights.sum(), top + np.log(weights.sum())


def run_threads(count, work):
    """work(0) .. work(count - 1), each in a thread of its own."""
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Batch:
    """Requests whose tokens live in pages of random order: the arguments of begin_step."""

    def __init__(self, rng, requests, pages, page_size):
        self.page_size = page_size
        order = 1 + rng.permutation(requests * pages).astype(np.int32)  # page 0 is the dummy
        slots = (order[:, None] * page_size + np.arange(page_size)).reshape(requests, -1)
        self.req_to_token = np.concatenate([np.zeros((1, slots.shape[1])), slots]).astype(np.int32)
        self.pool_row = np.arange(1, requests + 1, dtype=np.int32)
        self.num_pages = requests * pages + 1

    def step(self, mode, lengths, rows, includes_rows=True):
        """Lengths before the rows of this step, and how many rows each request has."""
        positions = np.concatenate([np.arange(length, length + n) for length, n in zip(lengths, rows)]).astype(np.int32)
        request = np.repeat(np.arange(len(rows)), rows)
        step = {
            "mode": mode,
            "seq_len": i32(np.add(lengths, rows) if includes_rows else lengths),
            "pool_row": self.pool_row,
            "req_to_token": self.req_to_token,
            "positions": positions,
            "out_cache_loc": self.req_to_token[self.pool_row[request], positions],
        }
        if mode in ("extend", "mixed"):
            step.update(ext_len=i32(rows), host_seq_len=step["seq_len"], host_ext_len=i32(rows))
        return step

    def row_to_request(self, rows):
        return np.repeat(np.arange(len(rows)), rows).astype(np.int32)

    def page_table(self):
        return np.ascontiguousarray(self.req_to_token[1:, :: self.page_size] // self.page_size)


def pick(rows, chosen):
    return {name: value[chosen] for name, value in rows.items()}


class Case(unittest.TestCase):
    def assert_close(self, actual, expected, tolerance):
        actual, expected = f64(actual), f64(expected)
        self.assertEqual(actual.shape, expected.shape)
        finite = np.isfinite(expected)
        np.testing.assert_array_equal(actual[~finite], expected[~finite])
        error = np.abs(actual[finite] - expected[finite]) / np.maximum(1, np.abs(expected[finite]))
        self.assertLessEqual(error.max(initial=0), tolerance)

    def assert_same(self, actual, expected):
        self.assertEqual(np.asarray(actual).dtype, np.asarray(expected).dtype)
        np.testing.assert_array_equal(np.asarray(actual), np.asarray(expected))


class _DlTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _DlManagedTensor(ctypes.Structure):
    _fields_ = [("tensor", _DlTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

CODES = {"f": 2, "i": 0, "u": 1}


class Elsewhere:
    """A DLPack exporter of memory that it says is on another device (2: CUDA). It keeps what it handed out."""

    def __init__(self, array, device=(2, 0), strides=None, name=b"dltensor", lanes=1):
        self.array, self.device, self.name = array, device, name
        rank = array.ndim
        self.shape = (ctypes.c_int64 * max(rank, 1))(*array.shape)
        steps = strides or [step // array.itemsize for step in array.strides]
        self.strides = (ctypes.c_int64 * max(rank, 1))(*steps)
        self.managed = _DlManagedTensor()
        tensor = self.managed.tensor
        tensor.data = array.ctypes.data
        tensor.device_type, tensor.device_id = device
        tensor.ndim = rank
        tensor.code, tensor.bits, tensor.lanes = CODES[array.dtype.kind], array.itemsize * 8, lanes
        tensor.shape, tensor.strides = self.shape, self.strides

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, *, stream=None):
        return _new_capsule(ctypes.addressof(self.managed), self.name, None)
