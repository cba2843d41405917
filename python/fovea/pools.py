"""Memory of serving backends: paged caches and pools of recurrent states, owned by the library."""

from __future__ import annotations

import sys
from typing import Any, Optional

from . import _native
from ._call import keywords
from ._errors import InvalidArgument
from ._native import TensorView


def _current_stream(device: str, stream: Optional[int]) -> Optional[int]:
    torch: Any = sys.modules.get("torch")
    if stream is None and torch is not None and device.startswith("cuda"):
        return torch.cuda.current_stream(device).cuda_stream
    return stream


class KvPool:
    """The paged cache of every layer of one kind; all bytes are zero at first.

    On the CPU pages take physical memory only once they are touched. The pool lives as long as any view of it.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        row_format: str = "bf16",
        width: int = 576,
        num_layers: int = 1,
        device: str = "cpu",
    ) -> None:
        """
        Args:
            num_pages: the dummy page 0, which padded requests use, included.
            page_size: tokens per page, 1..256.
            row_format: "bf16", "v32", "v4", "f576", or "i132" for index keys (docs/formats.md).
            width: channels of a row: any for bf16, 128 for i132, 512 for v4, otherwise 576.
            num_layers: layers.
            device: "cpu", "cuda" or "cuda:N".

        Raises:
            InvalidArgument, Unsupported, OutOfMemory: the last one names the bytes asked and free.
        """
        _, params = keywords(KvPool.__init__, locals())
        self._native = _native.KvPool(params, str(device))

    def layer(self, layer: int = 0) -> TensorView:
        """u8 [num_pages, page_bytes] of one ``layer``."""
        return self._native.layer(layer)

    @property
    def bytes(self) -> int:
        """Of all layers together."""
        return self._native.bytes


class StatePool:
    """The recurrent states of every linear-attention layer and the windows of their convolutions, zero at first.

    Slot s of a layer is its state [HV, V, K] and its window. A reused slot keeps what it held: ``clear`` it, or start
    with ``has_initial_state`` 0. Snapshots are slots like any other. The pool lives as long as any view of it.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        num_value_heads: int,
        head_dim_k: int = 128,
        head_dim_v: int = 128,
        num_layers: int = 1,
        state_dtype: str = "f32",
        window_shape: Optional[tuple[int, int]] = None,
        device: str = "cpu",
    ) -> None:
        """
        Args:
            num_slots: slots; padding is -1, never one of them.
            num_value_heads, head_dim_k, head_dim_v: HV, K, V.
            num_layers: layers.
            state_dtype: "f32" or "bf16".
            window_shape: (3, D) or (D, 3), as the convolution's layout says; None: no windows.
            device: "cpu", "cuda" or "cuda:N".

        Raises:
            InvalidArgument, Unsupported, OutOfMemory: the last one names the bytes asked and free.
        """
        _, params = keywords(StatePool.__init__, locals())
        shape = params.pop("window_shape", None)
        try:
            params["window_rows"], params["window_columns"] = (0, 0) if shape is None else shape
        except (TypeError, ValueError):
            raise InvalidArgument(f"StatePool: window_shape = {shape!r}, expected two extents") from None
        self._native = _native.StatePool(params, str(device))
        self._device = str(device)

    def state(self, layer: int = 0) -> TensorView:
        """f32 or bf16 [slots, HV, V, K] of one ``layer``."""
        return self._native.state(layer)

    def window(self, layer: int = 0) -> Optional[TensorView]:
        """bf16 [slots, 3, D] or [slots, D, 3] of one ``layer``; None without windows."""
        return self._native.window(layer)

    def states(self) -> TensorView:
        """[layers, slots, HV, V, K]."""
        return self._native.states()

    def windows(self) -> Optional[TensorView]:
        """The windows of all layers, [layers, slots, ...]; None without windows."""
        return self._native.windows()

    def copy(self, from_slot: int, to_slot: int, *, stream: Optional[int] = None) -> None:
        """Slot ``to_slot`` of every layer becomes a copy of slot ``from_slot``."""
        self._native.copy(from_slot, to_slot, _current_stream(self._device, stream))

    def clear(self, slot: int, *, stream: Optional[int] = None) -> None:
        """The ``slot`` becomes zeros in every layer."""
        self._native.clear(slot, _current_stream(self._device, stream))

    @property
    def bytes(self) -> int:
        """Of all layers together."""
        return self._native.bytes
