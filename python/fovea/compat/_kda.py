"""Kimi Delta Attention under the names of sglang's kernels, on kda_prefill."""

from __future__ import annotations

from typing import Any, Optional

from .._errors import InvalidArgument
from ..kda import kda_prefill
from ._common import even_starts, expect, int32, only, torch_module, view_of

Tensor = Any

_CHUNK = 64
_SAFE_LOWER_BOUND = -5.0


def l2norm_fwd(x: Tensor, eps: float = 1e-6, output_dtype: Any = None) -> Tensor:
    """x / sqrt(sum x^2 + eps) over the last axis, computed in f32, in the type of ``x`` or in ``output_dtype``."""
    values = x.float()
    return (values * (values.square().sum(-1, keepdim=True) + eps).rsqrt()).to(output_dtype or x.dtype)


def _gate(lower_bound: Optional[float]) -> dict[str, Any]:
    return {"gate": "softplus"} if lower_bound is None else {"gate": "lower_bound", "lower_bound": float(lower_bound)}


def _parameters(op: str, A_log: Optional[Tensor], dt_bias: Optional[Tensor], heads: int, width: int) -> dict[str, Any]:
    """Parameters of a gate in any float type and any shape of as many elements."""
    found: dict[str, Any] = {"a_log": None, "dt_bias": None}
    for name, given, tensor, shape in (("a_log", "A_log", A_log, (heads,)), ("dt_bias", "dt_bias", dt_bias, (heads, width))):
        if tensor is None:
            continue
        flat = tensor.detach().reshape(-1).float()
        size = heads if len(shape) == 1 else heads * width
        if flat.shape[0] != size:
            raise InvalidArgument(f"{op}: {given} has shape {list(tensor.shape)}, expected {size} elements")
        found[name] = flat.view(*shape)
    return found


def chunk_kda_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: Optional[float] = None,
    initial_state: Optional[Tensor] = None,
    output_final_state: bool = False,
    cu_seqlens: Optional[Tensor] = None,
    chunk_indices: Optional[Tensor] = None,
    chunk_size: int = _CHUNK,
    safe_gate: bool = False,
    lower_bound: Optional[float] = None,
    use_gate_in_kernel: bool = False,
    A_log: Optional[Tensor] = None,
    dt_bias: Optional[Tensor] = None,
) -> tuple[Tensor, Optional[Tensor]]:
    """The gated delta rule over sequences of one length, or with ``cu_seqlens`` over packed ones.

    Args:
        q, k: bf16 [B, T, H, K], normalised before.
        v: bf16 [B, T, HV, V].
        g: bf16 or f32 [B, T, HV, K]: with ``use_gate_in_kernel`` raw, otherwise the log decay of each token.
        beta: bf16 or f32 [B, T, HV], probabilities.
        scale: None: K^-1/2.
        initial_state: f32 [N, HV, K, V], only read; None: zeros. N is B, or the sequences of ``cu_seqlens``.
        output_final_state: give the final states.
        cu_seqlens: [N+1], integers; B is 1 then.
        chunk_indices, chunk_size: change nothing.
        safe_gate: the gate has a lower bound; -5 where ``lower_bound`` is None.
        lower_bound: in [-5, 0): lower_bound * sigmoid(exp(A_log) * (g + dt_bias)); None: -exp(A_log) * softplus(g + dt_bias).
        A_log: HV elements; dt_bias: HV * K elements; any float type and shape.

    Returns:
        o bf16 [B, T, HV, V], and the final states f32 [N, HV, K, V] or None.

    Raises:
        InvalidArgument: shapes that do not fit one another, a lower bound out of range.
    """
    op = "chunk_kda_fwd"
    torch = torch_module()
    expect(op, "q", q, "B", "T", "H", "K")
    batch, tokens, heads, width = q.shape
    expect(op, "k", k, batch, tokens, heads, width)
    expect(op, "v", v, batch, tokens, "HV", "V")
    value_heads, value_width = v.shape[2:]
    expect(op, "g", g, batch, tokens, value_heads, width)
    expect(op, "beta", beta, batch, tokens, value_heads)
    if not use_gate_in_kernel:
        only(op, A_log=(A_log, None), dt_bias=(dt_bias, None), lower_bound=(lower_bound, None))
    elif safe_gate and lower_bound is None:
        lower_bound = _SAFE_LOWER_BOUND
    indptr = even_starts(batch, tokens, q.device)
    if cu_seqlens is not None:
        expect(op, "cu_seqlens", cu_seqlens, "N+1")
        if batch != 1:
            raise InvalidArgument(f"{op}: q has shape {list(q.shape)}, expected [1, T, H, K] with cu_seqlens")
        indptr = int32(cu_seqlens)
    states = (indptr.shape[0] - 1, value_heads, width, value_width)
    state = None
    if initial_state is not None:
        expect(op, "initial_state", initial_state, *states)
        state = initial_state.float().clone(memory_format=torch.contiguous_format)
    elif output_final_state:
        state = torch.zeros(states, dtype=torch.float32, device=q.device)
    out = kda_prefill(
        *(tensor.flatten(0, 1) for tensor in (q, k, v, g, beta)),
        indptr,
        beta_kind="prob",
        state=state,
        scale=scale,
        state_layout="kv",
        **(_gate(lower_bound) if use_gate_in_kernel else {"gate": "given"}),
        **_parameters(op, A_log, dt_bias, value_heads, width),
    )
    return out.view(batch, tokens, value_heads, value_width), state if output_final_state else None


def kda_extend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    ssm_states: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    A_log: Optional[Tensor] = None,
    dt_bias: Optional[Tensor] = None,
    lower_bound: Optional[float] = None,
    return_intermediate_states: bool = False,
    **kwargs: Any,
) -> Any:
    """A prefill of packed sequences over a pool of states, in place.

    Args:
        q, k: bf16 [1, T, H, K]; normalised here.
        v: bf16 [1, T, HV, V].
        g: bf16 or f32 [1, T, HV * K] or [1, T, HV, K], raw.
        beta: bf16 or f32 [1, T, HV], probabilities.
        ssm_states: f32 or bf16 [slots, HV, V, K]; updated.
        cache_indices: [N], integers: the state of each sequence; outside the pool: it starts at zero and is not stored.
        query_start_loc: [N+1], integers.
        A_log, dt_bias, lower_bound: as in :func:`chunk_kda_fwd`.
        return_intermediate_states: give h.
        kwargs: ``extend_seq_lens_cpu``: the lengths on the host, which say how large h is (without them the device is
            read); ``track_ssm_h_src``: an empty tensor asks for no entry of h. Others change nothing.

    Returns:
        out bf16 [1, T, HV, V]; with ``return_intermediate_states`` also h [1, E, HV, V, K] in the type of the pool: the
        state before every 64 rows of each sequence, E = sum of ceil(length / 64).

    Raises:
        InvalidArgument: shapes that do not fit one another; before anything is written.
    """
    op = "kda_extend"
    expect(op, "q", q, 1, "T", "H", "K")
    tokens, heads, width = q.shape[1:]
    expect(op, "k", k, 1, tokens, heads, width)
    expect(op, "v", v, 1, tokens, "HV", "V")
    value_heads = v.shape[2]
    if g.dim() == 3:
        expect(op, "g", g, 1, tokens, value_heads * width)
        g = view_of(op, "g", g, 1, tokens, value_heads, width)
    expect(op, "g", g, 1, tokens, value_heads, width)
    expect(op, "beta", beta, 1, tokens, value_heads)
    expect(op, "ssm_states", ssm_states, "slots", value_heads, v.shape[3], width)
    expect(op, "cache_indices", cache_indices, "N")
    expect(op, "query_start_loc", query_start_loc, cache_indices.shape[0] + 1)
    results: dict[str, Tensor] = {}
    if return_intermediate_states:
        entries = _chunks(kwargs, query_start_loc)
        results["chunk_states"] = ssm_states.new_zeros(entries, *ssm_states.shape[1:])
    slots = int32(cache_indices)
    out = kda_prefill(
        *(tensor[0] for tensor in (q, k, v, g, beta)),
        int32(query_start_loc),
        beta_kind="prob",
        state=ssm_states,
        in_slot=slots,
        out_slot=slots,
        normalise=True,
        out=results or None,
        **_gate(lower_bound),
        **_parameters(op, A_log, dt_bias, value_heads, width),
    ).unsqueeze(0)
    return (out, results["chunk_states"].unsqueeze(0)) if return_intermediate_states else out


def _chunks(kwargs: dict[str, Any], query_start_loc: Tensor) -> int:
    tracked = kwargs.get("track_ssm_h_src")
    if tracked is not None and tracked.numel() == 0:
        return 0
    lengths = kwargs.get("extend_seq_lens_cpu")
    lengths = query_start_loc.diff().tolist() if lengths is None else lengths
    return sum(-(-max(int(length), 0) // _CHUNK) for length in lengths)
