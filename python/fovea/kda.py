"""Kimi Delta Attention: gate, prefill, decode, verify and commit of drafts, short convolution."""

from __future__ import annotations

from typing import Any, Optional

from ._call import Out, Tensor, call, call_by_name


def _layer(
    gate: str,
    lower_bound: float,
    beta_kind: str,
    allow_neg_eigval: bool,
    normalise: bool,
    scale: Optional[float],
    check: bool,
) -> dict[str, Any]:
    return {
        "gate": gate,
        "lower_bound": lower_bound,
        "beta_kind": beta_kind,
        "allow_neg_eigval": allow_neg_eigval,
        "normalise": normalise,
        "scale": scale,
        "check": check,
    }


def kda_gate(
    g: Tensor,
    gate: str,
    *,
    a_log: Optional[Tensor] = None,
    dt_bias: Optional[Tensor] = None,
    lower_bound: float = -5.0,
    impl: Optional[str] = None,
    out: Out = None,
    stream: Optional[int] = None,
) -> Tensor:
    """Log decay of a KDA layer from its raw gate.

    Args:
        g: bf16 or f32 [T, HV, K].
        gate: "softplus" (-exp(a_log) * softplus(g + dt_bias)), "lower_bound" (lower_bound * sigmoid(exp(a_log) * (g +
            dt_bias))) or "given" (g itself).
        a_log: f32 [HV]; softplus needs it.
        dt_bias: f32 [HV, K].
        lower_bound: in [-5, 0).

    Returns:
        log_decay f32 [T, HV, K], natural log.

    Raises:
        InvalidArgument: types, shapes, parameters outside their range.
    """
    tensors = {"g": g, "a_log": a_log, "dt_bias": dt_bias}
    params = {"gate": gate, "lower_bound": lower_bound}
    return call("kda_gate", ("log_decay",), tensors, params, out, impl, stream)


def kda_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    q_indptr: Tensor,
    gate: str,
    beta_kind: str,
    *,
    a_log: Optional[Tensor] = None,
    dt_bias: Optional[Tensor] = None,
    state: Optional[Tensor] = None,
    in_slot: Optional[Tensor] = None,
    out_slot: Optional[Tensor] = None,
    has_initial_state: Optional[Tensor] = None,
    snapshot_seq: Optional[Tensor] = None,
    snapshot_pos: Optional[Tensor] = None,
    snapshot_slot: Optional[Tensor] = None,
    lower_bound: float = -5.0,
    allow_neg_eigval: bool = False,
    normalise: bool = False,
    scale: Optional[float] = None,
    state_layout: str = "vk",
    chunk: Optional[int] = None,
    v_columns: Optional[int] = None,
    commit: str = "direct",
    check: bool = False,
    impl: Optional[str] = None,
    out: Out = None,
    stream: Optional[int] = None,
) -> Tensor:
    """The gated delta rule over packed sequences; final states go to ``state``, in place.

    Per token and value head: S <- diag(exp(g)) S, u = beta (v - S^T k), S <- S + k u^T, out = scale S^T q.

    Args:
        q, k: bf16 [T, H, K].
        v: bf16 [T, HV, V].
        g: bf16 or f32 [T, HV, K], raw gate or log decay.
        beta: bf16 or f32 [T, HV].
        q_indptr: i32 or i64 [N+1]: rows of each sequence.
        gate, a_log, dt_bias, lower_bound: as in :func:`kda_gate`.
        beta_kind: "prob" (beta itself) or "logit" (sigmoid of it; twice that with ``allow_neg_eigval``).
        state: f32 or bf16: a pool [slots, HV, V, K] with ``in_slot`` or ``out_slot`` i32 [N], else [N, HV, V, K]; updated.
        has_initial_state: bool or u8 [N]; 0: start at zero.
        snapshot_seq, snapshot_pos, snapshot_slot: i32 [M]: states after so many tokens into slots of the pool.
        normalise: divide q and k by their norm first.
        scale: None: K^-1/2.
        state_layout: "vk" or "kv" ([N, HV, K, V]).
        chunk: 16, 32 or 64; None: free.
        v_columns: 16, 32, 64 or 128: columns of V that one chain of a GPU takes; changes no bit. None: free.
        commit: "direct" or "staged" (whatever fails, the pool stays bit-identical).
        check: judge slots, snapshots and offsets before anything is written.

    Returns:
        out bf16 [T, HV, V]. Rows of no sequence are not written.

    Raises:
        InvalidArgument: types, shapes, parameters outside their range; with ``check`` a fault of the contents.
    """
    tensors = {
        "q": q,
        "k": k,
        "v": v,
        "g": g,
        "beta": beta,
        "q_indptr": q_indptr,
        "a_log": a_log,
        "dt_bias": dt_bias,
        "state": state,
        "in_slot": in_slot,
        "out_slot": out_slot,
        "has_initial_state": has_initial_state,
        "snapshot_seq": snapshot_seq,
        "snapshot_pos": snapshot_pos,
        "snapshot_slot": snapshot_slot,
    }
    params = _layer(gate, lower_bound, beta_kind, allow_neg_eigval, normalise, scale, check)
    params.update(state_layout=state_layout, chunk=chunk, v_columns=v_columns, commit=commit)
    return call("kda_prefill", ("out",), tensors, params, out, impl, stream)


def kda_decode(
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    gate: str,
    beta_kind: str,
    *,
    q: Optional[Tensor] = None,
    k: Optional[Tensor] = None,
    v: Optional[Tensor] = None,
    qkv: Optional[Tensor] = None,
    a_log: Optional[Tensor] = None,
    dt_bias: Optional[Tensor] = None,
    slot: Optional[Tensor] = None,
    has_initial_state: Optional[Tensor] = None,
    lower_bound: float = -5.0,
    allow_neg_eigval: bool = False,
    normalise: bool = False,
    scale: Optional[float] = None,
    check: bool = False,
    impl: Optional[str] = None,
    out: Out = None,
    stream: Optional[int] = None,
) -> Tensor:
    """One token of every sequence; ``state`` is updated in place.

    Args:
        g: bf16 or f32 [T, HV, K].
        beta: bf16 or f32 [T, HV].
        state: f32 or bf16 [slots, HV, V, K]; updated.
        q, k: bf16 [T, H, K]; v: bf16 [T, HV, V]; or instead of the three
        qkv: bf16 [T, 2*H*K + HV*V].
        slot: i32 [T]: state of each row; None: entry t; out of range: padding.
        has_initial_state: bool or u8 [T].
        gate, beta_kind, a_log, dt_bias, lower_bound, allow_neg_eigval, normalise, scale, check: as in
            :func:`kda_prefill`.

    Returns:
        out bf16 [T, HV, V].

    Raises:
        InvalidArgument: types, shapes, parameters outside their range; with ``check`` a fault of the contents.
    """
    tensors = {
        "q": q,
        "k": k,
        "v": v,
        "qkv": qkv,
        "g": g,
        "beta": beta,
        "state": state,
        "a_log": a_log,
        "dt_bias": dt_bias,
        "slot": slot,
        "has_initial_state": has_initial_state,
    }
    params = _layer(gate, lower_bound, beta_kind, allow_neg_eigval, normalise, scale, check)
    return call("kda_decode", ("out",), tensors, params, out, impl, stream)


def kda_verify(
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    gate: str,
    beta_kind: str,
    mode: str,
    rows_per_request: int,
    *,
    q: Optional[Tensor] = None,
    k: Optional[Tensor] = None,
    v: Optional[Tensor] = None,
    qkv: Optional[Tensor] = None,
    a_log: Optional[Tensor] = None,
    dt_bias: Optional[Tensor] = None,
    slot: Optional[Tensor] = None,
    has_initial_state: Optional[Tensor] = None,
    parent: Optional[Tensor] = None,
    lower_bound: float = -5.0,
    allow_neg_eigval: bool = False,
    normalise: bool = False,
    scale: Optional[float] = None,
    check: bool = False,
    impl: Optional[str] = None,
    out: Out = None,
    stream: Optional[int] = None,
) -> tuple[Tensor, Tensor]:
    """Drafted rows of every request from the committed state, which is only read.

    Args:
        g, beta, q, k, v, qkv: as in :func:`kda_decode`, with R * rows_per_request rows: row r * Td + t is draft t of
            request r.
        state: f32 or bf16 [slots, HV, V, K].
        mode: what the commit gets: "states" or "records".
        rows_per_request: Td.
        slot: i32 [R]; has_initial_state: bool or u8 [R].
        parent: i32 [Td]: the row before row t, -1 the committed state; None: t - 1.
        gate, beta_kind, a_log, dt_bias, lower_bound, allow_neg_eigval, normalise, scale, check: as in
            :func:`kda_prefill`.

    Returns:
        out bf16 [R*Td, HV, V] and scratch f32, [R, Td, HV, V, K] (states) or [R, Td, HV, 2K+V] (records).

    Raises:
        InvalidArgument: types, shapes, parameters outside their range; with ``check`` a fault of the contents.
    """
    tensors = {
        "q": q,
        "k": k,
        "v": v,
        "qkv": qkv,
        "g": g,
        "beta": beta,
        "state": state,
        "a_log": a_log,
        "dt_bias": dt_bias,
        "slot": slot,
        "has_initial_state": has_initial_state,
        "parent": parent,
    }
    params = _layer(gate, lower_bound, beta_kind, allow_neg_eigval, normalise, scale, check)
    params.update(mode=mode, rows_per_request=rows_per_request)
    return call("kda_verify", ("out", "scratch"), tensors, params, out, impl, stream)


def kda_commit(
    scratch: Tensor,
    accepted: Tensor,
    slot: Tensor,
    state: Tensor,
    mode: str,
    *,
    in_slot: Optional[Tensor] = None,
    has_initial_state: Optional[Tensor] = None,
    parent: Optional[Tensor] = None,
    track_slot: Optional[Tensor] = None,
    track_accepted: Optional[Tensor] = None,
    window_scratch: Optional[Tensor] = None,
    window_state: Optional[Tensor] = None,
    window_layout: str = "wd",
    check: bool = False,
    impl: Optional[str] = None,
    stream: Optional[int] = None,
) -> None:
    """Makes the accepted part of a verify the new state; ``state`` and ``window_state`` are updated in place.

    Args:
        scratch: f32, of :func:`kda_verify`.
        accepted, slot: i32 [R]: tokens that stay (0: nothing is committed), and the state of each request.
        state: f32 or bf16 [slots, HV, V, K]; updated.
        mode: "states" or "records", as in the verify.
        in_slot: i32 [R]: where the verify read (records); None: ``slot``.
        has_initial_state, parent: as in the verify.
        track_slot, track_accepted: i32 [R]: a second destination with its own count.
        window_scratch: bf16 [R, Td, 3, D] of :func:`causal_conv1d`, with
        window_state: bf16 [slots, 3, D] or [slots, D, 3]; updated.
        window_layout: "wd" or "dw".
        check: judge slots and counts before anything is written.

    Raises:
        InvalidArgument: types, shapes, parameters outside their range; with ``check`` a fault of the contents.
    """
    tensors = {
        "scratch": scratch,
        "accepted": accepted,
        "slot": slot,
        "state": state,
        "in_slot": in_slot,
        "has_initial_state": has_initial_state,
        "parent": parent,
        "track_slot": track_slot,
        "track_accepted": track_accepted,
        "window_scratch": window_scratch,
        "window_state": window_state,
    }
    params = {"mode": mode, "window_layout": window_layout, "check": check}
    call_by_name("kda_commit", tensors, params, None, impl, stream)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Optional[Tensor] = None,
    window_state: Optional[Tensor] = None,
    q_indptr: Optional[Tensor] = None,
    in_slot: Optional[Tensor] = None,
    out_slot: Optional[Tensor] = None,
    slot: Optional[Tensor] = None,
    has_initial_state: Optional[Tensor] = None,
    snapshot_seq: Optional[Tensor] = None,
    snapshot_pos: Optional[Tensor] = None,
    snapshot_slot: Optional[Tensor] = None,
    parent: Optional[Tensor] = None,
    mode: str = "prefill",
    rows_per_request: Optional[int] = None,
    activation: str = "silu",
    window_layout: str = "wd",
    check: bool = False,
    impl: Optional[str] = None,
    out: Out = None,
    stream: Optional[int] = None,
) -> Any:
    """Depthwise causal convolution of width 4; windows are updated in place, in mode "verify" only read.

    Args:
        x: bf16 [T, D].
        weight: bf16 or f32 [D, 4]; entry 3 belongs to the row itself.
        bias: bf16 or f32 [D].
        window_state: bf16 [slots, 3, D] (wd) or [slots, D, 3] (dw): the last three inputs of each sequence; updated.
        q_indptr: i32 or i64 [N+1] (prefill).
        in_slot, out_slot: i32 [N] (prefill).
        slot: i32 [T] (update), [R] (verify).
        has_initial_state: bool or u8 [N], [T] or [R].
        snapshot_seq, snapshot_pos, snapshot_slot: i32 [M] (prefill).
        parent: i32 [Td] (verify).
        mode: "prefill" (packed sequences), "update" (one row each) or "verify" (``rows_per_request`` drafts each).
        activation: "silu" or "none".
        window_layout: "wd" or "dw".
        check: judge slots, snapshots and offsets before anything is written.

    Returns:
        out bf16 [T, D]; verify: out and window_scratch bf16 [R, Td, 3, D].

    Raises:
        InvalidArgument: types, shapes, parameters outside their range; with ``check`` a fault of the contents.
    """
    tensors = {
        "x": x,
        "weight": weight,
        "bias": bias,
        "window_state": window_state,
        "q_indptr": q_indptr,
        "in_slot": in_slot,
        "out_slot": out_slot,
        "slot": slot,
        "has_initial_state": has_initial_state,
        "snapshot_seq": snapshot_seq,
        "snapshot_pos": snapshot_pos,
        "snapshot_slot": snapshot_slot,
        "parent": parent,
    }
    params = {
        "mode": mode,
        "rows_per_request": rows_per_request,
        "activation": activation,
        "window_layout": window_layout,
        "check": check,
    }
    results = ("out", "window_scratch") if mode == "verify" else ("out",)
    return call("causal_conv1d", results, tensors, params, out, impl, stream)
