"""How the functions of the package reach the operators of the library."""

from __future__ import annotations

import functools
import warnings
from typing import Any, Callable, Mapping, Optional, Sequence, Union

from . import _native
from ._errors import InvalidArgument

Tensor = Any
"""A tensor: anything with the buffer protocol or ``__dlpack__``, such as a numpy array or a torch tensor."""

Out = Union[Tensor, Sequence[Optional[Tensor]], Mapping[str, Tensor], None]
"""Where results go: the tensor, a sequence in the order of the results (None: a new one), or a mapping by name."""


def _given(op: str, results: Sequence[str], out: Out) -> dict[str, Tensor]:
    """`results` is empty where only a mapping says which result is meant."""
    if out is None:
        return {}
    if isinstance(out, Mapping):
        return dict(out)
    if not results:
        raise InvalidArgument(f"{op}: out is of type {type(out).__name__}, expected a mapping of tensors by name")
    if isinstance(out, (tuple, list)):
        if len(out) != len(results):
            raise InvalidArgument(f"{op}: out has {len(out)} entries, expected {len(results)}: {', '.join(results)}")
        return dict(zip(results, out))
    if len(results) != 1:
        raise InvalidArgument(f"{op}: out is one tensor, expected a tuple of {', '.join(results)} or a mapping by name")
    return {results[0]: out}


@functools.cache
def _declaration(function: Callable[..., Any]) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """What a function's signature declares: the operator, which is its name, its tensors and its parameters."""
    tensors, params = [], []
    for name, annotation in function.__annotations__.items():
        if name not in ("impl", "out", "stream", "return") and not name.startswith("return_"):
            (tensors if "Tensor" in annotation else params).append(name)
    return function.__name__, tuple(tensors), tuple(params)


def call(
    function: Callable[..., Any], arguments: Mapping[str, Any], results: Sequence[str] = (), unwanted: Sequence[str] = ()
) -> Any:
    """Runs the operator that `function` declares on its `arguments`, which are its locals().

    The result, or the results as a tuple in the order of `results`; without `results` all of them by name.
    """
    op, tensors, params = _declaration(function)
    found, notes, _ = _native.call(
        op,
        {name: arguments[name] for name in tensors},
        {name: arguments[name] for name in params},
        _given(op, results, arguments.get("out")),
        unwanted,
        arguments.get("impl"),
        arguments.get("stream"),
    )
    for note in notes:
        warnings.warn(note, stacklevel=3)
    if not results:
        return found
    if len(results) == 1:
        return found[results[0]]
    return tuple(found.get(name) for name in results)
