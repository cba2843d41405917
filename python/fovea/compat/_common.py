"""What the functions of fovea.compat share: checks with names, views of caches, offsets."""

from __future__ import annotations

from typing import Any, Optional, Union

from .._errors import InvalidArgument, Unsupported

Tensor = Any


def torch_module() -> Any:
    import torch

    return torch


def _text(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return repr(value) if shape is None else f"a tensor {list(shape)}"


def only(op: str, **arguments: tuple[Any, Any]) -> None:
    """Refuses arguments, each a pair of the value and the one value that is offered."""
    for name, (value, offered) in arguments.items():
        if value is offered:
            continue
        if getattr(value, "shape", None) is None:
            plain = tuple(value) if isinstance(value, (list, tuple)) else value
            if plain == offered:
                continue
        raise Unsupported(f"{op}: {name} = {_text(value)} is not offered; pass {offered!r}")


def expect(op: str, name: str, tensor: Tensor, *axes: Union[int, str]) -> None:
    """Refuses another shape; an axis is its extent, or the name of one that is free."""
    if not isinstance(tensor, torch_module().Tensor):
        raise InvalidArgument(f"{op}: {name} is of type {type(tensor).__name__}, expected a tensor of torch")
    fits = tensor.dim() == len(axes) and all(
        isinstance(axis, str) or axis == extent for axis, extent in zip(axes, tensor.shape)
    )
    if not fits:
        wanted = ", ".join(str(axis) for axis in axes)
        raise InvalidArgument(f"{op}: {name} has shape {list(tensor.shape)}, expected [{wanted}]")


def codes(tensor: Tensor) -> Tensor:
    """The bytes of one-byte elements, as uint8."""
    torch = torch_module()
    is_code = tensor.element_size() == 1 and tensor.dtype != torch.uint8
    return tensor.view(torch.uint8) if is_code else tensor


def int32(tensor: Tensor) -> Tensor:
    """Integers as int32; the tensor itself where they are."""
    return tensor.to(torch_module().int32)


def view_of(op: str, name: str, tensor: Tensor, *shape: int) -> Tensor:
    """The same memory in another shape, or an error: a cache is never copied."""
    try:
        return tensor.view(*shape)
    except RuntimeError:
        raise InvalidArgument(
            f"{op}: {name} has shape {list(tensor.shape)} and strides {list(tensor.stride())}, which is no view as "
            f"{list(shape)}; the tokens must lie at one distance"
        ) from None


def rows_of(op: str, name: str, cache: Tensor) -> Tensor:
    """A cache [..., D] as [tokens, D]."""
    return view_of(op, name, cache, cache.numel() // max(cache.shape[-1], 1), cache.shape[-1])


def pool_of(op: str, name: str, cache: Tensor) -> Tensor:
    """A cache of codes [pages, ...] as u8 [pages, page_bytes], any distance of pages."""
    cache = codes(cache)
    pages = cache.shape[0]
    return view_of(op, name, cache, pages, cache.numel() // max(pages, 1))


def starts(lengths: Tensor) -> Tensor:
    """[0, x0, x0 + x1, ...] of lengths [n], i32."""
    torch = torch_module()
    zero = torch.zeros(1, dtype=torch.int32, device=lengths.device)
    return torch.cat([zero, lengths.cumsum(0, dtype=torch.int32)])


def even_starts(count: int, step: int, device: Any) -> Tensor:
    """[0, step, 2 step, ..., count step], i32."""
    torch = torch_module()
    return torch.arange(0, count + 1, dtype=torch.int32, device=device) * step


def unpacked_lists(packed: Tensor, indptr: Tensor) -> Tensor:
    """Lists that lie one after the other as rows: i32 [n, longest list], -1 past a list's end.

    How long the longest list is is read from the device, as planning a step does.
    """
    torch = torch_module()
    start, count = indptr[:-1].long(), indptr.diff().long().clamp_min(0)
    columns = int(count.max().item()) if count.numel() else 0
    column = torch.arange(columns, device=start.device)
    place = start[:, None] + column
    held = (column < count[:, None]) & (place >= 0) & (place < packed.numel())
    if packed.numel() == 0:
        return torch.full(held.shape, -1, dtype=torch.int32, device=start.device)
    entries = int32(packed)[place.clamp(0, packed.numel() - 1)]
    return torch.where(held, entries, torch.full_like(entries, -1))


def finite_scale(op: str, name: str, value: Any) -> float:
    """A scale as a number; one on a GPU would have to be waited for."""
    if getattr(value, "is_cuda", False):
        raise Unsupported(f"{op}: {name} is a tensor on a GPU, expected a number: no call waits for a GPU")
    return float(value)


def default_scale(value: Optional[float], width: int) -> float:
    return width**-0.5 if value is None else float(value)
