"""Helpers of the command line tests: standard library only, independent of the code under test."""

import json
import os
import pathlib
import struct
import subprocess
import tempfile
import unittest

FOVEA = os.environ.get("FOVEA_BINARY", "fovea")
SIZES = {"U8": 1, "F8_E4M3": 1, "BF16": 2, "I32": 4, "F32": 4, "I64": 8}
CODES = {"U8": "B", "F8_E4M3": "B", "I32": "i", "F32": "f", "I64": "q"}


def bf16_from_float(value):
    """Round to nearest even, for finite values."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def bf16_to_float(bits):
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]


def count(shape):
    product = 1
    for extent in shape:
        product *= extent
    return product


class Tensor:
    """dtype as in safetensors; values flat, BF16 as floats."""

    def __init__(self, dtype, shape, values=None):
        self.dtype, self.shape = dtype, list(shape)
        self.values = [0] * count(shape) if values is None else list(values)
        assert len(self.values) == count(shape), (shape, len(self.values))

    def to_bytes(self):
        if self.dtype == "BF16":
            return struct.pack(f"<{len(self.values)}H", *(bf16_from_float(v) for v in self.values))
        return struct.pack(f"<{len(self.values)}{CODES[self.dtype]}", *self.values)

    @staticmethod
    def from_bytes(dtype, shape, data):
        if dtype == "BF16":
            values = [bf16_to_float(b) for b in struct.unpack(f"<{len(data) // 2}H", data)]
        else:
            values = struct.unpack(f"<{len(data) // SIZES[dtype]}{CODES[dtype]}", data)
        return Tensor(dtype, shape, values)


def pack(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def write_file(path, tensors, params=None):
    header, data = {}, b""
    if params is not None:
        header["__metadata__"] = {"params": params if isinstance(params, str) else json.dumps(params)}
    for name, tensor in tensors.items():
        blob = tensor.to_bytes()
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [len(data), len(data) + len(blob)]}
        data += blob
    pathlib.Path(path).write_bytes(pack(header, data))


def read_file(path):
    blob = pathlib.Path(path).read_bytes()
    (length,) = struct.unpack_from("<Q", blob)
    header = json.loads(blob[8 : 8 + length])
    header.pop("__metadata__", None)
    data = blob[8 + length :]
    return {
        name: Tensor.from_bytes(entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])])
        for name, entry in header.items()
    }


class Result:
    def __init__(self, code, stdout, stderr):
        self.code, self.stdout, self.stderr = code, stdout, stderr


class CommandLineTest(unittest.TestCase):
    """Each test has a folder of its own and no FOVEA_* variable but those it sets."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="fovea-cli-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def fovea(self, *arguments, timeout=600, **environment):
        env = {key: value for key, value in os.environ.items() if not key.startswith("FOVEA_")}
        env.update(environment)
        done = subprocess.run(
            [FOVEA, *map(str, arguments)], capture_output=True, text=True, env=env, cwd=self.folder, timeout=timeout
        )
        return Result(done.returncode, done.stdout, done.stderr)

    def expect(self, result, code, *fragments):
        """Exit code and texts of stderr (of stdout for code 0 and 1)."""
        talk = result.stdout if code in (0, 1) else result.stderr
        self.assertEqual(result.code, code, result.stdout + result.stderr)
        for fragment in fragments:
            self.assertIn(fragment, talk)
        if code in (2, 3):
            self.assertEqual(result.stdout, "")

    def run_operator(self, op, tensors, params=None, arguments=(), **environment):
        """Result and, on success, the output tensors; on refusal no file may exist."""
        source, target = self.folder / "in.safetensors", self.folder / "out.safetensors"
        target.unlink(missing_ok=True)
        write_file(source, tensors, params)
        result = self.fovea("run", op, source, target, *arguments, **environment)
        if result.code != 0:
            self.assertFalse(target.exists())
            self.assertEqual([entry.name for entry in self.folder.iterdir() if "partial" in entry.name], [])
            return result, None
        return result, read_file(target)

    def expect_refused(self, op, tensors, params, *fragments):
        result, _ = self.run_operator(op, tensors, params)
        self.expect(result, 3, *fragments)
        self.assertTrue("invalid_argument" in result.stderr or "unsupported" in result.stderr, result.stderr)
