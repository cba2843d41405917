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


def outputs(op: str, results: Sequence[str], out: Out) -> dict[str, Tensor]:
    """Where results go, by name. `results` is empty where only a mapping says which result is meant."""
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


# Arguments that are neither tensors nor parameters of an operator.
_OTHERS = {"impl", "out", "stream", "return", "plan", "device", "host_seq_len", "host_ext_len", "context_split"}


@functools.cache
def declaration(function: Callable[..., Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The tensors and the parameters that a function's signature declares."""
    tensors, params = [], []
    for name, annotation in function.__annotations__.items():
        if name not in _OTHERS and not name.startswith("return_"):
            (tensors if "Tensor" in annotation else params).append(name)
    return tuple(tensors), tuple(params)


def keywords(
    function: Callable[..., Any], arguments: Mapping[str, Any]
) -> tuple[dict[str, Optional[Tensor]], dict[str, Any]]:
    """The tensors and the parameters among the `arguments` of a function, which are its locals()."""
    tensors, params = declaration(function)
    return {name: arguments[name] for name in tensors}, {name: arguments[name] for name in params}


def call(
    function: Callable[..., Any], arguments: Mapping[str, Any], results: Sequence[str] = (), unwanted: Sequence[str] = ()
) -> Any:
    """Runs the operator of `function`'s name on the function's `arguments`, which are its locals().

    The result, or the results as a tuple in the order of `results`; without `results` all of them by name.
    """
    op = function.__name__
    tensors, params = keywords(function, arguments)
    out = outputs(op, results, arguments.get("out"))
    found, notes, _ = _native.call(op, tensors, params, out, unwanted, arguments.get("impl"), arguments.get("stream"))
    for note in notes:
        warnings.warn(note, stacklevel=3)
    if not results:
        return found
    if len(results) == 1:
        return found[results[0]]
    return tuple(found.get(name) for name in results)
