"""Exceptions of fovea: one class per error code of the library."""

from __future__ import annotations

from . import _native


class Error(RuntimeError):
    """What fovea raises. The text names operator, argument, found and expected value.

    Every error is raised before anything is written. ``code`` is the library's word for the reason.
    """

    code = "error"


class InvalidArgument(Error, ValueError):
    """A type, shape, parameter or option is outside its documented domain."""

    code = "invalid_argument"


class Unsupported(Error, NotImplementedError):
    """Legal, but no implementation (or not the one asked for) does it on this device."""

    code = "unsupported"


class OutOfMemory(Error, MemoryError):
    """A workspace, pool or result is larger than the memory; the text names the bytes."""

    code = "out_of_memory"


class DeviceError(Error):
    """The device or its driver failed."""

    code = "device"


class Mismatch(Error):
    """A verification that was asked for (``verify_metadata``) found a difference; the text names the first one."""

    code = "mismatch"


class InternalError(Error):
    """A broken invariant of the library itself: please report it."""

    code = "internal"


_native.register_errors(
    {
        kind.code: kind
        for kind in (InvalidArgument, Unsupported, OutOfMemory, DeviceError, Mismatch, InternalError)
    },
    Error,
)
