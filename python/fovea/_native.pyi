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

def result_shapes(op: str, tensors: dict, params: dict, unwanted: Sequence) -> tuple:
    """
    Results that an operator has for tensors given as (type, shape), None for absent: ([(name, type, shape, origins)], names of the tensors that it updates). An origin says what decides an extent: (tensor, axis, added), or [(tensor, axis)] beside the parameters.
    """

def callable_operators() -> list[str]:
    """Names that OperatorFunction takes."""

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

class OperatorFunction:
    """One function of the package."""

    def __init__(self, function: object, tensors: tuple, params: tuple, results: tuple, made: object | None, by_name: bool) -> None: ...

    def call(self, arguments: dict) -> object:
        """Runs the operator on the locals() of the function."""

def outputs(op: str, results: tuple, out: object | None) -> dict:
    """
    Where results go, by name. Without `results` only a mapping says which is meant.
    """

def clear_caches() -> None:
    """Forgets the plans of earlier calls and gives back their workspaces."""

def cache_info() -> tuple[int, int, int]:
    """Plans of calls: (hits, misses, entries)."""

def set_memory_resource(device: str, allocate: object | None, release: object | None) -> None:
    """Where the memory of a device comes from; None: the library's own."""

class TensorView:
    """
    Memory of the library, used where it is: torch.from_dlpack(view), view.numpy(), or as an argument. Keeps its owner alive.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents of the axes."""

    @property
    def dtype(self) -> str:
        """"u8", "i32", "i64", "f32" or "bf16"."""

    @property
    def device(self) -> str:
        """"cpu" or "cuda:N"."""

    def numpy(self) -> object:
        """The same memory as an array of numpy; bf16 as ml_dtypes.bfloat16."""

    def __dlpack__(self, *, stream: object | None = None, max_version: object | None = None, dl_device: object | None = None, copy: object | None = None) -> object: ...

    def __dlpack_device__(self) -> tuple: ...

    @property
    def __array_interface__(self) -> dict: ...

class KvPool:
    """See the class of the package."""

    def __init__(self, config: dict, device: str) -> None: ...

    @property
    def bytes(self) -> int:
        """Of all layers."""

    def layer(self, layer: int) -> TensorView:
        """u8 [num_pages, page_bytes] of one layer."""

class StatePool:
    """See the class of the package."""

    def __init__(self, config: dict, device: str) -> None: ...

    @property
    def bytes(self) -> int:
        """Of all layers."""

    def state(self, layer: int) -> TensorView:
        """[slots, HV, V, K] of one layer."""

    def states(self) -> TensorView:
        """[layers, slots, HV, V, K]."""

    def window(self, layer: int) -> object:
        """Windows of one layer, or None."""

    def windows(self) -> object:
        """Windows of all layers, or None."""

    def copy(self, from_slot: int, to_slot: int, stream: object | None = None) -> None:
        """One slot becomes a copy of another, in every layer."""

    def clear(self, slot: int, stream: object | None = None) -> None:
        """The slot becomes zeros in every layer."""

class DsaBackendPlan:
    """The arrays of one step, at fixed addresses."""

    def metadata(self) -> dict:
        """Arrays of the step by name."""

class DsaBackend:
    """See the class of the package."""

    def __init__(self, config: dict, device: str) -> None: ...

    def make_step_plan(self, bucket: dict) -> DsaBackendPlan:
        """Buffers for the steps of one bucket."""

    def begin_step(self, params: dict, tensors: dict, host_seq_len: Sequence[int], host_ext_len: Sequence[int], plan: DsaBackendPlan | None, stream: object | None) -> None:
        """Begins a step."""

    def metadata(self) -> dict:
        """Arrays of the current step by name."""

    def start_profile(self) -> None:
        """Records every operator call from now on."""

    def stop_profile(self) -> list:
        """The calls: (operator, implementation, milliseconds, flops, bytes)."""

    def begin_draft_steps(self, params: dict, tensors: dict, steps: list, stream: object | None) -> None:
        """Begins the steps of a chain of drafts."""

    def forward(self, params: dict, tensors: dict, out: dict, unwanted: tuple, plan: DsaBackendPlan | None, stream: object | None) -> dict:
        """One layer: results by name."""

    def dispatch(self, plan: DsaBackendPlan | None) -> dict:
        """What runs in the step, and why."""

    def report(self, plan: DsaBackendPlan | None) -> str:
        """What the last begin_step found in the device contents."""

class KdaBackendPlan:
    """The arrays of one step, at fixed addresses."""

    def metadata(self) -> dict:
        """Arrays of the step by name."""

class KdaBackend:
    """See the class of the package."""

    def __init__(self, config: dict, device: str) -> None: ...

    def make_step_plan(self, bucket: dict) -> KdaBackendPlan:
        """Buffers for the steps of one bucket."""

    def begin_step(self, params: dict, tensors: dict, host_seq_len: Sequence[int], host_ext_len: Sequence[int], plan: KdaBackendPlan | None, stream: object | None) -> None:
        """Begins a step."""

    def metadata(self) -> dict:
        """Arrays of the current step by name."""

    def start_profile(self) -> None:
        """Records every operator call from now on."""

    def stop_profile(self) -> list:
        """The calls: (operator, implementation, milliseconds, flops, bytes)."""

    def forward_kda(self, params: dict, tensors: dict, out: dict, plan: KdaBackendPlan | None, stream: object | None) -> dict:
        """One KDA layer: results by name."""

    def forward_mla(self, params: dict, tensors: dict, out: dict, plan: KdaBackendPlan | None, stream: object | None) -> dict:
        """One full-attention layer: results by name."""

    def commit(self, plan: KdaBackendPlan, tensors: dict, stream: object | None) -> None:
        """Makes the accepted rows of a verify the states."""

    def routes(self) -> dict:
        """How many forwards took which way."""

class MsaBackendPlan:
    """The arrays of one step, at fixed addresses."""

    def metadata(self) -> dict:
        """Arrays of the step by name."""

class MsaBackend:
    """See the class of the package."""

    def __init__(self, config: dict, device: str) -> None: ...

    def make_step_plan(self, bucket: dict) -> MsaBackendPlan:
        """Buffers for the steps of one bucket."""

    def begin_step(self, params: dict, tensors: dict, host_seq_len: Sequence[int], host_ext_len: Sequence[int], plan: MsaBackendPlan | None, stream: object | None) -> None:
        """Begins a step."""

    def metadata(self) -> dict:
        """Arrays of the current step by name."""

    def start_profile(self) -> None:
        """Records every operator call from now on."""

    def stop_profile(self) -> list:
        """The calls: (operator, implementation, milliseconds, flops, bytes)."""

    def forward(self, dense: bool, tensors: dict, out: dict, unwanted: tuple, plan: MsaBackendPlan | None, stream: object | None) -> dict:
        """One layer: results by name."""

    def list_width(self) -> int:
        """Columns of the lists."""

    def routes(self) -> dict:
        """How many forwards took which way."""

class V4BackendPlan:
    """The arrays of one step, at fixed addresses."""

    def metadata(self) -> dict:
        """Arrays of the step by name."""

class V4Backend:
    """See the class of the package."""

    def __init__(self, config: dict, device: str) -> None: ...

    def make_step_plan(self, bucket: dict) -> V4BackendPlan:
        """Buffers for the steps of one bucket."""

    def begin_step(self, params: dict, tensors: dict, host_seq_len: Sequence[int], host_ext_len: Sequence[int], plan: V4BackendPlan | None, stream: object | None) -> None:
        """Begins a step."""

    def metadata(self) -> dict:
        """Arrays of the current step by name."""

    def start_profile(self) -> None:
        """Records every operator call from now on."""

    def stop_profile(self) -> list:
        """The calls: (operator, implementation, milliseconds, flops, bytes)."""

    def forward(self, params: dict, tensors: dict, out: dict, unwanted: tuple, plan: V4BackendPlan | None, stream: object | None) -> dict:
        """One layer: results by name."""

    def commit(self, plan: V4BackendPlan, params: dict, tensors: dict, out: dict, stream: object | None) -> None:
        """Makes the accepted rows of a verify the states."""

    def routes(self) -> dict:
        """How many forwards took which way."""
