"""Where the library's memory comes from: its own pools, or those of the caller."""

from __future__ import annotations

from typing import Any, Callable, Optional

from . import _native
from ._errors import InvalidArgument

Allocate = Callable[[int, int], int]
"""(bytes, stream) -> address; 0 or an exception where there is not enough."""

Release = Callable[[int, int, int], None]
"""(address, bytes, stream)."""


def set_memory_resource(device: Any, allocate: Optional[Allocate], release: Optional[Release]) -> None:
    """Replaces the source of all later memory on ``device``: of workspaces and backends, on a GPU of pools too.

    Memory that exists goes back to where it came from. The functions may be called from any thread.

    Args:
        device: "cpu", "cuda", "cuda:1" or a torch.device.
        allocate: (bytes, stream) -> address of memory that work submitted to the stream (an integer) from now on may use,
            aligned to 256 bytes (CPU: 64); 0 or an exception where there is not enough. None: the library's own pool.
        release: (address, bytes, stream): takes it back once the work submitted to the stream so far is done.

    Raises:
        InvalidArgument: one function without the other, what cannot be called. Unsupported: a device that is not there.
    """
    if (allocate is None) != (release is None):
        raise InvalidArgument("set_memory_resource: allocate and release are given together, or both are None")
    for name, function in (("allocate", allocate), ("release", release)):
        if function is not None and not callable(function):
            raise InvalidArgument(f"set_memory_resource: {name} is of type {type(function).__name__}, expected a function")
    _native.set_memory_resource(str(device), allocate, release)


def use_torch_memory(device: Any = "cuda") -> None:
    """Lets torch's caching allocator serve the memory of a GPU, which then counts as torch's own.

    ``set_memory_resource(device, None, None)`` ends it.

    Args:
        device: "cuda", "cuda:1" or a torch.device.

    Raises:
        InvalidArgument: a device that is no GPU. Unsupported: one that is not there.
    """
    import torch

    where = torch.device(device)
    if where.type != "cuda":
        raise InvalidArgument(f"use_torch_memory: device = {device}, expected a GPU")
    ordinal = where.index or 0

    def allocate(size: int, stream: int) -> int:
        return torch.cuda.caching_allocator_alloc(size, ordinal, stream)

    def release(address: int, size: int, stream: int) -> None:
        torch.cuda.caching_allocator_delete(address)

    set_memory_resource(f"cuda:{ordinal}", allocate, release)
