"""How the functions of the package reach the operators of the library."""

from __future__ import annotations

import warnings
from typing import Any, Mapping, Optional, Sequence, Union

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


def call_by_name(
    op: str,
    tensors: Mapping[str, Optional[Tensor]],
    params: Mapping[str, Any],
    out: Optional[Mapping[str, Tensor]],
    impl: Optional[str],
    stream: Optional[int],
) -> dict[str, Tensor]:
    """The results by name."""
    found, notes, _ = _native.call(op, tensors, params, _given(op, (), out), (), impl, stream)
    for note in notes:
        warnings.warn(note, stacklevel=3)
    return found


def call(
    op: str,
    results: Sequence[str],
    tensors: Mapping[str, Optional[Tensor]],
    params: Mapping[str, Any],
    out: Out,
    impl: Optional[str],
    stream: Optional[int],
    unwanted: Sequence[str] = (),
) -> Any:
    """The result, or the results as a tuple in the order of `results`."""
    found, notes, _ = _native.call(op, tensors, params, _given(op, results, out), unwanted, impl, stream)
    for note in notes:
        warnings.warn(note, stacklevel=3)
    if len(results) == 1:
        return found[results[0]]
    return tuple(found.get(name) for name in results)
