"""
Native part of fovea: operators by name. Use the functions of the package.
"""

from collections.abc import Sequence


def version() -> str:
    """major.minor.patch"""

def register_errors(classes: dict, base: object) -> None:
    """
    Sets the exception classes by error code, and the class of every other code.
    """

def call(op: str, tensors: dict, params: dict, out: dict, unwanted: Sequence, impl: object | None, stream: object | None) -> tuple:
    """Runs an operator: (results by name, notes, implementation)."""

def callable_operators() -> list[str]:
    """Names that call() knows."""

def implementations(op: str) -> list:
    """
    Implementations of an operator, best first: (name, device, available, reason).
    """

def check_device(device: str) -> None:
    """Raises, saying why, for a device that this build or machine lacks."""

def set_num_threads(threads: int) -> None:
    """Threads of calls on the CPU; 0: every hardware thread."""

def num_threads() -> int:
    """What set_num_threads() was given."""
