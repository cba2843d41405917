"""Custom operators of torch: ``import fovea.torch_ops`` defines ``torch.ops.fovea.<operator>``.

Every operator of the package whose results have a shape that does not depend on the contents of a tensor, with the
arguments of the function (``impl`` too, without ``out`` and ``stream``). They run on the CPU and on CUDA, on the current
stream, and have fake kernels, so that torch.compile and torch.export take them into their graphs, with dynamic
sizes too: what a symbolic size decides stays symbolic. What an operator updates (a cache, a state) is declared as mutated. No operator has a gradient.

Results are those of the function: nothing, a tensor or a tuple of tensors. ``sparse_mla`` always gives ``max_logits``
too; where the number of results depends on the arguments (:data:`LISTS`) they are a list.
"""

from __future__ import annotations

import inspect
from typing import Any, Callable, Mapping, Sequence

import torch

import fovea
from . import _native
from ._call import keywords

MUTATED = {
    "pack_rows": ("pool", "inv_scale"),
    "move_rows": ("pool",),
    "index_store": ("index_pool",),
    "v4_compress": ("state", "pool"),
    "kda_prefill": ("state",),
    "kda_decode": ("state",),
    "kda_commit": ("state", "window_state"),
    "causal_conv1d": ("window_state",),
}
"""What operators update, in place."""

LISTS = ("causal_conv1d", "mla_rope_quantize")
"""Operators whose results are a list: how many there are depends on the arguments."""

WITHOUT = ("metadata_refresh", "context_split", "build_swa_indices", "index_gather")
"""Operators that are none of torch.ops.fovea: contents decide how large their results are."""

_RESULTS = {
    "index_quantize": 5,
    "sparse_mla": 3,
    "dense_mla": 2,
    "mha_varlen": 2,
    "merge_lse": 2,
    "swa_decode": 2,
    "msa_attend": 2,
    "split_schedule": 2,
    "kda_verify": 2,
    "kda_stage_gate": 3,
    "kda_stage_intra": 5,
    "kda_stage_inter": 3,
    "pack_rows": 0,
    "move_rows": 0,
    "index_store": 0,
    "kda_commit": 0,
}

_TYPES = {
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "i32": torch.int32,
    "i64": torch.int64,
    "u8": torch.uint8,
}
_WORDS = {dtype: word for word, dtype in _TYPES.items()}
_WORDS.update({torch.bool: "u8", torch.float8_e4m3fn: "u8"})


def _default(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _schema(op: str, function: Callable[..., Any]) -> str:
    arguments, starred = [], False
    mutated = MUTATED.get(op, ())
    for name, argument in inspect.signature(function).parameters.items():
        if name in ("out", "stream") or name.startswith("return_"):
            continue
        if argument.kind is inspect.Parameter.KEYWORD_ONLY and not starred:
            arguments.append("*")
            starred = True
        kind = str(argument.annotation)
        optional = kind.startswith("Optional[")
        kind = kind.removeprefix("Optional[").removesuffix("]")
        if name in mutated:
            kind += f"({chr(ord('a') + mutated.index(name))}!)"
        text = f"{kind}{'?' if optional else ''} {name}"
        arguments.append(text if argument.default is argument.empty else f"{text}={_default(argument.default)}")
    count = _RESULTS.get(op, 1)
    results = "Tensor[]" if op in LISTS else "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"
    return f"{op}({', '.join(arguments)}) -> {results}"


def _as_declared(op: str, results: Sequence[Any]) -> Any:
    if op in LISTS:
        return [result for result in results if result is not None]
    if len(results) == 1:
        return results[0]
    return tuple(results) or None


def _kernel(op: str, function: Callable[..., Any]) -> Callable[..., Any]:
    extra = {"return_max_logits": True} if op == "sparse_mla" else {}

    def run(*arguments: Any, **options: Any) -> Any:
        results = function(*arguments, **options, **extra)
        if results is None:
            return None
        return _as_declared(op, results if isinstance(results, tuple) else (results,))

    return run


def _example(extent: Any) -> int:
    """What a size is now: of a symbolic one the value that it was traced with, which is not fixed by that."""
    hint = getattr(extent, "node", None) and extent.node.hint
    return int(extent) if hint is None else int(hint)


def _fake(op: str, function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)

    def shape_of(tensor: Any) -> Any:
        return _WORDS.get(tensor.dtype, str(tensor.dtype)), tuple(_example(extent) for extent in tensor.shape)

    def extent_of(value: int, origin: Any, tensors: Mapping[str, Any]) -> Any:
        if isinstance(origin, tuple):
            name, axis, added = origin
            return tensors[name].shape[axis] + added
        for name, axis in origin:
            int(tensors[name].shape[axis])  # fixes the size: the value is that of this one
        return value

    def infer(*arguments: Any, **options: Any) -> Any:
        bound = signature.bind(*arguments, **options)
        bound.apply_defaults()
        tensors, params = keywords(function, bound.arguments)
        device = next(iter(tensors.values())).device
        shapes = {name: shape_of(tensor) for name, tensor in tensors.items()}
        results, _ = _native.result_shapes(op, shapes, params, ())
        empty = [
            torch.empty([extent_of(*entry, tensors) for entry in zip(shape, origins)], dtype=_TYPES[word], device=device)
            for _, word, shape, origins in results
        ]
        return _as_declared(op, empty)

    return infer


def _define() -> torch.library.Library:
    library = torch.library.Library("fovea", "DEF")
    for op in fovea.operators():
        if op in WITHOUT:
            continue
        function = getattr(fovea, op)
        library.define(_schema(op, function))
        for key in ("CPU", "CUDA"):
            library.impl(op, _kernel(op, function), key)
        torch.library.register_fake(f"fovea::{op}", _fake(op, function), lib=library)
    return library


_LIBRARY = _define()  # the definitions live as long as it does
