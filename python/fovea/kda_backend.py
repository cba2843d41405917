"""Serving backend of Kimi Delta Attention with full attention beside it."""

from __future__ import annotations

from typing import Optional

from . import _native
from ._backend import Backend, HostLengths, StepPlan, plan_of_verify
from ._call import Out, Tensor, keywords


class KdaBackend(Backend):
    """Models that mix Kimi Delta Attention with full attention over a latent cache (Kimi Linear).

    ``KdaBackend`` of the C++ library: routes and transactions in docs/kda_backend.md. A forward or a commit that raises
    leaves states, windows and snapshots as they were.
    """

    _name = "KdaBackend"

    def __init__(
        self,
        *,
        num_heads: int,
        num_value_heads: int,
        max_requests: int,
        max_rows: int,
        head_dim_k: int = 128,
        head_dim_v: int = 128,
        gate: str = "softplus",
        lower_bound: float = -5.0,
        gate_dtype: str = "bf16",
        beta_kind: str = "prob",
        allow_neg_eigval: bool = False,
        normalise: bool = False,
        scale: float = 0.0,
        beta_dtype: str = "f32",
        state_dtype: str = "f32",
        num_layers: int = 1,
        convolution: bool = True,
        window_layout: str = "wd",
        conv_weight_dtype: str = "bf16",
        conv_bias_dtype: str = "bf16",
        num_mla_heads: int = 0,
        page_size: int = 64,
        table_width: int = 1,
        rows_per_request: int = 1,
        max_snapshots: int = 0,
        verify_mode: str = "states",
        commit: str = "direct",
        deterministic: bool = True,
        strict: bool = False,
        check: bool = False,
        implementation: str = "",
        device: str = "cpu",
    ) -> None:
        """
        Args:
            num_heads, num_value_heads, head_dim_k, head_dim_v: H, HV, K, V of every KDA layer.
            max_requests, max_rows, table_width: bounds of R, of rows, and W of req_to_token.
            gate, lower_bound, gate_dtype: "softplus", "lower_bound" or "given"; "bf16" or "f32": type of g.
            beta_kind, allow_neg_eigval, beta_dtype: as in :func:`fovea.kda_prefill`; type of beta.
            normalise: divide q and k by their norm.
            scale: 0: K^-1/2.
            state_dtype: "f32" or "bf16".
            num_layers: KDA layers; a commit covers all of them.
            convolution: q|k|v pass a convolution with SiLU first.
            window_layout, conv_weight_dtype, conv_bias_dtype: "wd" or "dw"; "bf16" or "f32".
            num_mla_heads, page_size: heads of the full-attention layers (0: none) and tokens per page of their cache.
            rows_per_request: Td of target_verify.
            max_snapshots: bound of snapshots.
            verify_mode: "states" or "records".
            commit: "direct" or "staged", of prefills.
            deterministic: a decoded row has the bits of the same row verified; no fallback.
            strict: a failed operator is an error, never followed by another implementation.
            check: faults of slots, positions and counts are errors.
            implementation: forces one implementation where it exists.
            device: "cpu", "cuda" or "cuda:N".

        Raises:
            InvalidArgument, Unsupported: naming the field. OutOfMemory.
        """
        _, params = keywords(KdaBackend.__init__, locals())
        self._native = _native.KdaBackend(params, str(device))

    def begin_step(
        self,
        mode: str,
        seq_len: Tensor,
        pool_row: Tensor,
        req_to_token: Tensor,
        positions: Tensor,
        out_cache_loc: Tensor,
        *,
        ext_len: Optional[Tensor] = None,
        in_slot: Optional[Tensor] = None,
        out_slot: Optional[Tensor] = None,
        has_initial_state: Optional[Tensor] = None,
        snapshot_seq: Optional[Tensor] = None,
        snapshot_pos: Optional[Tensor] = None,
        snapshot_slot: Optional[Tensor] = None,
        num_rows: Optional[int] = None,
        padded_rows: int = 0,
        kv_len_delta: int = 0,
        host_seq_len: HostLengths = None,
        host_ext_len: HostLengths = None,
        plan: Optional[StepPlan] = None,
        stream: Optional[int] = None,
    ) -> None:
        """Begins a step: lengths, page table, slots.

        Args:
            mode: "extend", "decode", "idle", "target_verify" or "mixed"; KDA layers refuse drafts' extensions.
            seq_len, pool_row, req_to_token, positions, out_cache_loc, ext_len: as in :meth:`DsaBackend.begin_step`.
            num_rows, padded_rows, host_seq_len, host_ext_len, plan, stream: as there.
            in_slot: i32 [R]: state and window that each request starts from.
            out_slot: i32 [R]: where they go; None: ``in_slot``. In a verify: by the commit.
            has_initial_state: bool or u8 [R]; 0: starts at zero.
            snapshot_seq, snapshot_pos, snapshot_slot: i32 [M]: states after so many tokens into slots (extend, mixed).
            kv_len_delta: added to seq_len (decode).

        Raises:
            InvalidArgument, Unsupported: naming the tensor; the previous step stays current.
        """
        self._begin(KdaBackend.begin_step, locals())

    def forward_kda(
        self,
        layer: int,
        qkv: Tensor,
        g: Tensor,
        beta: Tensor,
        state: Tensor,
        *,
        a_log: Optional[Tensor] = None,
        dt_bias: Optional[Tensor] = None,
        window: Optional[Tensor] = None,
        conv_weight: Optional[Tensor] = None,
        conv_bias: Optional[Tensor] = None,
        plan: Optional[StepPlan] = None,
        out: Out = None,
        stream: Optional[int] = None,
    ) -> Tensor:
        """One KDA layer, D = 2*H*K + HV*V channels.

        Args:
            layer: 0..num_layers-1, which verifies keep apart.
            qkv: bf16 [T, D]; with ``convolution`` its raw inputs.
            g: bf16 or f32 [T, HV, K]; beta: bf16 or f32 [T, HV].
            state: f32 or bf16 [slots, HV, V, K]; updated, but for a verify.
            a_log, dt_bias: f32 [HV], f32 [HV, K].
            window: bf16 [slots, 3, D] or [slots, D, 3]; updated, but for a verify.
            conv_weight, conv_bias: [D, 4], [D].
            plan, out, stream: as everywhere.

        Returns:
            out bf16 [T, HV, V]; rows of padding are 0.

        Raises:
            InvalidArgument: before anything is written.
        """
        return self._forward(KdaBackend.forward_kda, locals(), ("out",))[0]

    def forward_mla(
        self,
        q: Tensor,
        kv_pool: Tensor,
        softmax_scale: float,
        *,
        k: Optional[Tensor] = None,
        plan: Optional[StepPlan] = None,
        out: Out = None,
        stream: Optional[int] = None,
    ) -> tuple[Tensor, Tensor]:
        """One full-attention layer: latent attention without rope over every token of the request.

        Args:
            q: bf16 [T, H, 576], absorbed.
            kv_pool: u8 [pages, page_bytes] of bf16 rows; updated.
            softmax_scale: finite, > 0.
            k: bf16 [T, 576]; None: the rows are in the pool.
            plan, out, stream: as everywhere.

        Returns:
            out bf16 [T, H, 512] and lse f32 [T, H]; rows of padding: 0, -infinity.

        Raises:
            InvalidArgument: before anything is written.
        """
        out, lse = self._forward(KdaBackend.forward_mla, locals(), ("out", "lse"))
        return out, lse

    def commit(
        self,
        plan: StepPlan,
        accepted: Tensor,
        state: Tensor,
        *,
        window: Optional[Tensor] = None,
        track_slot: Optional[Tensor] = None,
        track_accepted: Optional[Tensor] = None,
        stream: Optional[int] = None,
    ) -> None:
        """Makes the accepted rows of the plan's last verify the requests' states, in all layers at once.

        Args:
            plan: of the verify, every layer of which has run.
            accepted: i32 [R]: rows that stay, the first one included.
            state: [L, slots, HV, V, K]; updated.
            window: [L, slots, 3, D] or [L, slots, D, 3], with ``convolution``; updated.
            track_slot, track_accepted: i32 [R]: a second destination with its own count.
            stream: as everywhere.

        Raises:
            InvalidArgument: also when a layer has not been verified since begin_step.
        """
        tensors, _ = keywords(KdaBackend.commit, locals())
        self._call("commit", plan, plan_of_verify("KdaBackend.commit", plan), tensors, stream)

    def routes(self) -> dict[str, int]:
        """How many forwards took which way (docs/kda_backend.md)."""
        return self._native.routes()
