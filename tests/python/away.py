"""Runs the calls of a test on copies of its tensors in the memory of another device.

``Package`` stands in for the module ``fovea``: what a call gets, arrays of numpy and tensors of torch on the CPU, is laid
out on the device with the same strides and the same overlaps, and afterwards copied back whole, whether the call was
refused or not. So one test serves both devices, and what a call writes beside its results shows.
"""

import contextlib
import ctypes

import numpy as np
import torch

import fovea
from support import BF16, E4M3


class HostView:
    """A view of the library's memory on the device: read where a test asks for an array, an argument as it is."""

    def __init__(self, view):
        self.view, self.shape, self.dtype = view, view.shape, view.dtype

    @property
    def __array_interface__(self):
        return {"data": (torch.from_dlpack(self.view).data_ptr(), False)}  # only where it is

    def numpy(self):
        return to_numpy(torch.from_dlpack(self.view).cpu())


def to_numpy(tensor):
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(BF16)
    return tensor.numpy()


TYPES = {np.dtype(kind): getattr(torch, np.dtype(kind).name) for kind in (
    np.float16, np.float32, np.float64, np.int8, np.int32, np.int64, np.uint8, np.uint16, np.bool_, BF16, E4M3
)}  # fmt: skip


class Copies:
    """Tensors of one call: a copy on the device of every piece of memory, and views of it."""

    def __init__(self, device):
        self.device = device
        self.pieces = {}  # address of a piece -> its bytes on the host and on the device
        self.read_only = set()
        self.own = []  # (tensor on the device, the caller's object)

    def piece(self, begin, size, owner, writable):
        """The copy of `size` bytes at an address."""
        if begin not in self.pieces:
            memory = (ctypes.c_uint8 * size).from_address(begin)
            memory.owner = owner  # alive as long as the bytes
            host = torch.frombuffer(memory, dtype=torch.uint8)
            there = torch.zeros(-(-size // 8) * 8, dtype=torch.uint8, device=self.device)
            there[:size].copy_(host)
            self.pieces[begin] = host, there
        if not writable:
            self.read_only.add(begin)
        return self.pieces[begin][1]

    def put_array(self, array):
        kind = TYPES.get(array.dtype)
        if kind is None:
            return array  # a type that torch has not
        root = array
        while isinstance(root.base, np.ndarray):
            root = root.base
        begin, end = np.lib.array_utils.byte_bounds(root)
        low, high = np.lib.array_utils.byte_bounds(array)
        size = array.itemsize
        strides = [stride // size for stride in array.strides]
        is_plain = array.size > 0 and all(s >= 0 and b % size == 0 for s, b in zip(strides, array.strides))
        if not is_plain or low < begin or high > end or (low - begin) % size:
            # Negative strides and the like, which torch has not: the elements in some other place.
            copied = np.array(array, order="C")
            piece = self.piece(copied.ctypes.data, max(copied.nbytes, 1), copied, False)
            return self.remember(torch.as_strided(piece.view(kind), copied.shape, [s // size for s in copied.strides]), array)
        piece = self.piece(begin, end - begin, root, array.flags.writeable)
        return self.remember(torch.as_strided(piece.view(kind), array.shape, strides, (low - begin) // size), array)

    def put_tensor(self, tensor):
        if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.device.type != "cpu":
            return tensor
        if tensor.requires_grad or not tensor.untyped_storage().nbytes():
            return self.remember(tensor.to(self.device), tensor)
        storage = tensor.untyped_storage()
        piece = self.piece(storage.data_ptr(), storage.nbytes(), storage, True)
        moved = torch.empty(0, dtype=tensor.dtype, device=self.device)
        moved.set_(piece.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
        return self.remember(moved, tensor)

    def remember(self, moved, own):
        self.own.append((moved, own))
        return moved

    def put(self, value):
        if isinstance(value, HostView):
            return value.view
        if isinstance(value, fovea.TensorView) and value.device == "cpu":
            value = value.numpy()
        if isinstance(value, np.ndarray):
            return self.put_array(value)
        if isinstance(value, torch.Tensor):
            return self.put_tensor(value)
        if type(value) in (list, tuple):
            return type(value)(self.put(entry) for entry in value)
        if isinstance(value, fovea.DraftStep):
            return fovea.DraftStep(*(self.put(entry) for entry in value))
        if type(value) is dict:
            return {name: self.put(entry) for name, entry in value.items()}
        return value

    def copy_back(self):
        for begin, (host, there) in self.pieces.items():
            if begin not in self.read_only:
                host.copy_(there[: len(host)])

    def get(self, value, as_numpy):
        if isinstance(value, torch.Tensor):
            for moved, own in self.own:
                if moved is value:
                    return own
            value = value.to("cpu", copy=True)
            return to_numpy(value) if as_numpy else value
        if isinstance(value, fovea.TensorView):
            return HostView(value)
        if isinstance(value, tuple):
            entries = [self.get(entry, as_numpy) for entry in value]
            return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
        if type(value) is list:
            return [self.get(entry, as_numpy) for entry in value]
        if type(value) is dict:
            return {name: self.get(entry, as_numpy) for name, entry in value.items()}
        return value


HOST_VALUES = "no call waits for a GPU"


class Package:
    """The module fovea, its calls run on `device`.

    A call that forces an implementation of the CPU runs there; so does one whose results are sized by contents.
    """

    def __init__(self, device, module=fovea):
        self._device, self._module = device, module
        self._stream = torch.cuda.Stream() if device.startswith("cuda") else None

    def __getattr__(self, name):
        value = getattr(self._module, name)
        if name == "compat":
            return Package(self._device, value)
        if isinstance(value, type):
            return self._backend(value) if issubclass(value, fovea._backend.Backend) else value
        is_call = name in fovea.operators() or (self._module is not fovea and callable(value))
        return self._wrapped(value) if is_call else value

    def _wrapped(self, function):
        def call(*arguments, **keywords):
            if keywords.get("impl") is not None:
                return function(*arguments, **keywords)
            try:
                return self._run(function, arguments, keywords)
            except fovea.Unsupported as error:
                if HOST_VALUES not in str(error):
                    raise
            return function(*arguments, **keywords)

        return call

    def _run(self, function, arguments, keywords):
        copies = Copies(self._device)
        as_numpy = not any(isinstance(value, torch.Tensor) for value in flat([arguments, keywords]))
        with torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext():
            try:
                result = function(*copies.put(arguments), **copies.put(keywords))
            finally:
                copies.copy_back()
            return copies.get(result, as_numpy)

    def _backend(self, kind):
        package = self

        class Away(kind):
            def __init__(self, **config):
                super().__init__(**{"device": package._device, **config})

            def __getattribute__(self, name):
                value = super().__getattribute__(name)
                if name.startswith("_") or not callable(value):
                    return value

                def call(*arguments, **keywords):
                    result = package._run(value, arguments, keywords)
                    if isinstance(result, fovea._backend.StepPlan):
                        plan = result
                        plan.metadata = lambda: Copies(package._device).get(type(plan).metadata(plan), True)
                    return result

                return call

        return Away


def flat(value):
    if isinstance(value, (list, tuple)):
        return [leaf for entry in value for leaf in flat(entry)]
    if isinstance(value, dict):
        return [leaf for entry in value.values() for leaf in flat(entry)]
    return [value]
