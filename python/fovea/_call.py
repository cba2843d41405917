"""How the functions of the package reach the operators of the library."""

from __future__ import annotations

import functools
from typing import Any, Callable, Mapping, Optional, Sequence, TypeVar, Union

from . import _native

Tensor = Any
"""A tensor: anything with the buffer protocol or ``__dlpack__``, such as a numpy array or a torch tensor."""

Out = Union[Tensor, Sequence[Optional[Tensor]], Mapping[str, Tensor], None]
"""Where results go: the tensor, a sequence in the order of the results (None: a new one), or a mapping by name."""


outputs = _native.outputs
"""Where results go, by name: outputs(op, names of the results, out). Without names only a mapping says which is meant."""

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
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the parameters among the `arguments` of a function, which are its locals(), without those that are None."""
    tensors, params = declaration(function)
    return (
        {name: value for name in tensors if (value := arguments[name]) is not None},
        {name: value for name in params if (value := arguments[name]) is not None},
    )


Function = TypeVar("Function", bound=Callable[..., Any])
_functions: dict[Callable[..., Any], Any] = {}


def operator(
    *results: Union[str, tuple[str, str, Any]],
    made: Optional[Callable[..., Any]] = None,
    by_name: bool = False,
) -> Callable[[Function], Function]:
    """Declares a function of the operator of its name, whose body is call(function, locals()).

    Args:
        results: names of the results in their order; (name, argument, value): there is that one where the argument is
            the value. One is given as it is, several as a tuple.
        made: what makes the function's result of several.
        by_name: the results are a dictionary of all of them.
    """

    def declare(function: Function) -> Function:
        _functions[function] = _native.OperatorFunction(function, *declaration(function), results, made, by_name)
        return function

    return declare


def call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Runs the operator that `function` declares on the function's `arguments`, which are its locals()."""
    return _functions[function].call(arguments)
