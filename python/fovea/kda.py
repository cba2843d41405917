"""Kimi Delta Attention: gate, prefill, decode, verify and commit of drafts, short convolution."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

from ._call import Out, Tensor, call, operator


@operator("log_decay")
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
    return call(kda_gate, locals())


@operator("out")
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
        out: as a dictionary it may hold ``chunk_states`` [E, HV, V, K], of the type and layout of ``state``: the state
            before every chunk (of 64 rows without ``chunk``), sequences one after another; further entries are not
            written.

    Returns:
        out bf16 [T, HV, V]. Rows of no sequence are not written.

    Raises:
        InvalidArgument: types, shapes, parameters outside their range; with ``check`` a fault of the contents.
    """
    return call(kda_prefill, locals())


@operator("out")
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
    return call(kda_decode, locals())


@operator("out", "scratch")
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
    return call(kda_verify, locals())


@operator()
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
    call(kda_commit, locals())


@operator("out", ("window_scratch", "mode", "verify"))
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
    return call(causal_conv1d, locals())


class StageGate(NamedTuple):
    """Results of :func:`kda_stage_gate`."""

    g_sum: Tensor
    q_hat: Tensor
    k_hat: Tensor


@operator(*StageGate._fields, made=StageGate)
def kda_stage_gate(
    q: Tensor,
    k: Tensor,
    g: Tensor,
    q_indptr: Tensor,
    gate: str,
    *,
    a_log: Optional[Tensor] = None,
    dt_bias: Optional[Tensor] = None,
    lower_bound: float = -5.0,
    normalise: bool = False,
    chunk: int = 64,
    stage_dtype: str = "f32",
    impl: Optional[str] = None,
    out: Out = None,
    stream: Optional[int] = None,
) -> StageGate:
    """First stage of a chunked :func:`kda_prefill`: the gate's sums within each chunk, queries and keys normalised.

    Args:
        q, k: bf16 [T, H, K].
        g: bf16 or f32 [T, HV, K].
        q_indptr: i32 or i64 [N+1]: rows of each sequence; chunks start anew with every one.
        gate, a_log, dt_bias, lower_bound: as in :func:`kda_gate`.
        normalise: divide q and k by their norm.
        chunk: C, 16, 32 or 64 rows.
        stage_dtype: "f32" or "bf16": type of q_hat and k_hat.

    Returns:
        g_sum f32 [T, HV, K], the inclusive sum of the log decay in base 2, q_hat and k_hat [T, H, K].

    Raises:
        InvalidArgument: types, shapes, parameters outside their range.
    """
    return call(kda_stage_gate, locals())


class StageIntra(NamedTuple):
    """Results of :func:`kda_stage_intra`."""

    p: Tensor
    x: Tensor
    w: Tensor
    u0: Tensor
    kr: Tensor


@operator(*StageIntra._fields, made=StageIntra)
def kda_stage_intra(
    q_hat: Tensor,
    k_hat: Tensor,
    g_sum: Tensor,
    v: Tensor,
    beta: Tensor,
    q_indptr: Tensor,
    beta_kind: str,
    *,
    allow_neg_eigval: bool = False,
    chunk: int = 64,
    impl: Optional[str] = None,
    out: Out = None,
    stream: Optional[int] = None,
) -> StageIntra:
    """Second stage: what a chunk needs to know of itself (docs/kda_stages.md has the formulas).

    Args:
        q_hat, k_hat: f32 or bf16 [T, H, K], of :func:`kda_stage_gate`; their type is that of the results.
        g_sum: f32 [T, HV, K].
        v: bf16 [T, HV, V].
        beta: bf16 or f32 [T, HV].
        q_indptr: i32 or i64 [N+1].
        beta_kind, allow_neg_eigval: as in :func:`kda_prefill`.
        chunk: C, 16, 32 or 64 rows.

    Returns:
        p and x [T, HV, C], w [T, HV, K], u0 [T, HV, V] and kr [T, HV, K].

    Raises:
        InvalidArgument: types, shapes, parameters outside their range.
    """
    return call(kda_stage_intra, locals())


class StageInter(NamedTuple):
    """Results of :func:`kda_stage_inter`."""

    chunk_states: Tensor
    u: Tensor
    final_state: Tensor


@operator(*StageInter._fields, made=StageInter)
def kda_stage_inter(
    w: Tensor,
    kr: Tensor,
    u0: Tensor,
    g_sum: Tensor,
    q_indptr: Tensor,
    *,
    initial_state: Optional[Tensor] = None,
    chunk: int = 64,
    impl: Optional[str] = None,
    out: Out = None,
    stream: Optional[int] = None,
) -> StageInter:
    """Third stage: the chain over the chunks of each sequence.

    Args:
        w, kr: f32 or bf16 [T, HV, K]; u0: the same type, [T, HV, V].
        g_sum: f32 [T, HV, K].
        q_indptr: i32 or i64 [N+1].
        initial_state: f32 [N, HV, V, K]; None: zeros.
        chunk: C, 16, 32 or 64 rows.

    Returns:
        chunk_states f32 [E, HV, V, K], the state that enters each chunk, u [T, HV, V] and final_state f32 [N, HV, V, K].
        Chunks are counted sequence by sequence; E is the most that so many rows and sequences can have.

    Raises:
        InvalidArgument: types, shapes, parameters outside their range.
    """
    return call(kda_stage_inter, locals())


@operator("out")
def kda_stage_output(
    q_hat: Tensor,
    g_sum: Tensor,
    p: Tensor,
    u: Tensor,
    chunk_states: Tensor,
    q_indptr: Tensor,
    *,
    scale: Optional[float] = None,
    impl: Optional[str] = None,
    out: Out = None,
    stream: Optional[int] = None,
) -> Tensor:
    """Last stage: the outputs of every chunk, scale * ((q * 2^G) S + P U).

    Args:
        q_hat: f32 or bf16 [T, H, K]; p [T, HV, C] and u [T, HV, V]: the same type.
        g_sum: f32 [T, HV, K].
        chunk_states: f32 [E, HV, V, K], of :func:`kda_stage_inter`.
        q_indptr: i32 or i64 [N+1].
        scale: None: K^-1/2.

    Returns:
        out bf16 [T, HV, V]. Rows of no sequence are not written.

    Raises:
        InvalidArgument: types, shapes, parameters outside their range.
    """
    return call(kda_stage_output, locals())
