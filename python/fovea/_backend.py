"""Serving backends: what an engine calls once per step, with the lengths of a batch, and once per layer.

``begin_step`` takes the batch, a forward per layer its tensors. Pools, slots and tables are the caller's, for example
:class:`fovea.KvPool` and :class:`fovea.StatePool`; tensors of a batch stay as they are until the step's last forward and
are kept alive until the next step begins. Modes, rows, slots and padding: docs/concepts.md.

A step in a plan (``make_step_plan``) has buffers of its own at fixed addresses, so that a GPU can capture and replay it.
One backend serves one stream of steps: a call while another thread is in one is an :class:`InvalidArgument`. The GIL is
released while a call works. What can be judged on the host is refused before anything is written.
"""

from __future__ import annotations

from typing import Any, Mapping, NamedTuple, Optional, Sequence, Union

from ._call import keywords, outputs
from ._errors import InvalidArgument
from ._native import TensorView

HostLengths = Union[Sequence[int], Any, None]
"""A host copy of lengths: a sequence of integers, an array of numpy or a tensor of torch on the CPU."""


class OperatorCall(NamedTuple):
    """One operator call of a profile."""

    name: str
    implementation: str
    elapsed_ms: float
    flops: float
    bytes: float


class StepPlan:
    """The arrays of one step at fixed addresses, made by a backend's ``make_step_plan``; keeps the backend alive."""

    def __init__(self, native: Any, mode: str, num_requests: int, rows_per_request: int) -> None:
        """
        Args:
            native: what the module made.
            mode, num_requests, rows_per_request: the bucket.
        """
        self._native = native
        self.mode = mode
        self.num_requests = num_requests
        self.rows_per_request = rows_per_request

    def metadata(self) -> dict[str, TensorView]:
        """The i32 arrays of the step that the plan holds, by the names of :func:`fovea.metadata_refresh`."""
        return self._native.metadata()


def _host(call: str, name: str, lengths: HostLengths) -> list[int]:
    if lengths is None:
        return []
    try:
        values = lengths.tolist() if hasattr(lengths, "tolist") else list(lengths)
        if all(isinstance(value, int) and -(2**31) <= value < 2**31 for value in values):
            return values
    except Exception as error:  # whatever the object does
        raise InvalidArgument(f"{call}: {name} is no sequence of integers: {error}") from None
    raise InvalidArgument(f"{call}: {name} has entries that are no integers of 32 bits")


def plan_of(call: str, plan: Optional[StepPlan]) -> Any:
    if plan is None or isinstance(plan, StepPlan):
        return plan and plan._native
    raise InvalidArgument(f"{call}: plan is of type {type(plan).__name__}, expected a StepPlan")


def plan_of_verify(call: str, plan: Optional[StepPlan]) -> Any:
    if plan is None:
        raise InvalidArgument(f"{call}: plan is None, expected that of the verify")
    return plan_of(call, plan)


class Backend:
    _name: str
    _native: Any

    def _call(self, method: str, plan: Optional[StepPlan], *arguments: Any) -> Any:
        # A plan of another class of backends fits no overload.
        try:
            return getattr(self._native, method)(*arguments)
        except TypeError as error:
            if plan is None:
                raise
            raise InvalidArgument(f"{self._name}.{method}: the step plan belongs to another backend") from error

    def _begin(self, function: Any, arguments: Mapping[str, Any]) -> None:
        call, plan = f"{self._name}.begin_step", arguments["plan"]
        tensors, params = keywords(function, arguments)
        split = arguments.get("context_split")
        if split is not None:
            try:
                params["ranks"], params["rank"], params["scheme"] = split
            except (TypeError, ValueError):
                raise InvalidArgument(f"{call}: context_split = {split!r}, expected (ranks, rank, scheme)") from None
        lengths = (_host(call, name, arguments[name]) for name in ("host_seq_len", "host_ext_len"))
        self._call("begin_step", plan, params, tensors, *lengths, plan_of(call, plan), arguments["stream"])

    def _forward(
        self,
        function: Any,
        arguments: Mapping[str, Any],
        results: tuple[str, ...],
        native: tuple[Any, ...] = (),
        **optional: bool,
    ) -> tuple[Any, ...]:
        """Runs a forward on the `arguments` of `function`, which are its locals(): its results, then the wanted ones of
        the `optional`. `native`: method of the module and its first argument, where these are not name and parameters.
        """
        call, plan = f"{self._name}.{function.__name__}", arguments["plan"]
        tensors, params = keywords(function, arguments)
        method, first = native or (function.__name__, params)
        unwanted: tuple[str, ...] = ()
        for name, wanted in optional.items():
            if wanted:
                results += (name,)
            else:
                unwanted += (name,)
        where, given = plan_of(call, plan), outputs(call, results, arguments["out"])
        others = (unwanted, where) if optional else (where,)
        found = self._call(method, plan, first, tensors, given, *others, arguments["stream"])
        return tuple(map(found.get, results))

    def make_step_plan(self, mode: str, num_requests: int, rows_per_request: int = 1) -> StepPlan:
        """Buffers for the steps of one bucket; they begin with a step of padded requests, which stores nothing.

        Args:
            mode: every forward mode but "extend" and "mixed".
            num_requests: R, padded requests included.
            rows_per_request: N; decode and idle: 1.

        Raises:
            InvalidArgument: a bucket outside the configuration's bounds. OutOfMemory.
        """
        bucket = {"mode": mode, "num_requests": num_requests, "rows_per_request": rows_per_request}
        return StepPlan(self._native.make_step_plan(bucket), mode, num_requests, rows_per_request)

    def metadata(self) -> dict[str, TensorView]:
        """The i32 arrays of the current step, by the names of :func:`fovea.metadata_refresh`, where they are."""
        return self._native.metadata()

    def start_profile(self) -> None:
        """Records every operator call from now on."""
        self._native.start_profile()

    def stop_profile(self) -> list[OperatorCall]:
        """The calls since ``start_profile``. Waits for those of a GPU; nothing that is captured is recorded."""
        return [OperatorCall(*call) for call in self._native.stop_profile()]
