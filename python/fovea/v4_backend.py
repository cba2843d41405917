"""Serving backend of DeepSeek-V4: a window and compressed entries."""

from __future__ import annotations

from typing import Optional

from . import _native
from ._backend import Backend, HostLengths, StepPlan, plan_of_verify
from ._call import Out, Tensor, declaration, keywords, outputs
from ._errors import InvalidArgument


class V4Backend(Backend):
    """Attention of DeepSeek-V4: a window, and in layers of ratio 4 or 128 one compressed entry per so many tokens.

    ``V4Backend`` of the C++ library: pages, states, drafts and every option in docs/v4_backend.md.
    """

    _name = "V4Backend"

    def __init__(
        self,
        *,
        num_heads: int,
        max_requests: int,
        max_rows: int,
        table_width: int,
        softmax_scale: float = 512**-0.5,
        window: int = 128,
        window_storage: str = "token_pages",
        window_page_size: int = 0,
        max_request_rows: int = 0,
        window_format: str = "v4",
        compressed_format: str = "v4",
        csa: bool = True,
        hca: bool = True,
        csa_state_tokens: int = 8,
        hca_state_tokens: int = 128,
        hca_form: str = "stored",
        index_heads: int = 64,
        topk: int = 512,
        index_scale_mode: str = "fp32",
        eps: float = 1e-6,
        page_size: int = 256,
        rows_per_request: int = 1,
        logits_budget_bytes: int = 512 << 20,
        deterministic: bool = True,
        strict: bool = False,
        implementation: str = "",
        device: str = "cpu",
    ) -> None:
        """
        Args:
            num_heads: H, local query heads.
            max_requests, max_rows, table_width: bounds of R, of rows, and columns of req_to_token.
            softmax_scale: finite, > 0.
            window: tokens that a row sees, its own included.
            window_storage, window_page_size: "token_pages", "paged" or "ring"; rows of a page or ring of it.
            max_request_rows: most rows of one request in one step; 0: max_rows.
            window_format, compressed_format: "v4" or "bf16".
            csa, hca: layers of ratio 4, of ratio 128 exist.
            csa_state_tokens, hca_state_tokens, hca_form: lengths of the states; "stored" or "online".
            index_heads, topk, index_scale_mode: the indexer of ratio 4.
            eps: of the compressors' RMSNorm.
            page_size: tokens of a page.
            rows_per_request: N of target_verify and draft_extend_v2.
            logits_budget_bytes: of the selection.
            deterministic: no fallback: a row always has the same bits.
            strict: a failed operator is an error, never followed by another implementation.
            implementation: forces one implementation where it exists.
            device: "cpu", "cuda" or "cuda:N".

        Raises:
            InvalidArgument, Unsupported: naming the field. OutOfMemory.
        """
        _, params = keywords(V4Backend.__init__, locals())
        self._native = _native.V4Backend(params, str(device))

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
        window_table: Optional[Tensor] = None,
        in_slot: Optional[Tensor] = None,
        out_slot: Optional[Tensor] = None,
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
        """Begins a step: lengths, windows, numbers of entries.

        Args:
            mode: any forward mode; layers of ratio > 0 refuse drafts' extensions.
            seq_len, pool_row, req_to_token, positions, out_cache_loc, ext_len: as in :meth:`DsaBackend.begin_step`.
            num_rows, padded_rows, host_seq_len, host_ext_len, plan, stream: as there.
            window_table: i32 [R, columns] (paged) or [R, 1] (ring): pages of the window rows; -1: freed.
            in_slot, out_slot: i32 [R]: compressor states that are read, and written; None: ``in_slot``.
            snapshot_seq, snapshot_pos, snapshot_slot: i32 [M]: states of ratio 4 behind a row into slots.
            kv_len_delta: added to seq_len (decode).

        Raises:
            InvalidArgument, Unsupported: naming the tensor; the previous step stays current.
        """
        self._begin(V4Backend.begin_step, locals())

    def forward(
        self,
        ratio: int,
        q: Tensor,
        cos_sin: Tensor,
        window_pool: Tensor,
        *,
        kv: Optional[Tensor] = None,
        sink: Optional[Tensor] = None,
        compressor_kv_gate: Optional[Tensor] = None,
        compressor_ape: Optional[Tensor] = None,
        compressor_norm_weight: Optional[Tensor] = None,
        compressor_state: Optional[Tensor] = None,
        compressor_pool: Optional[Tensor] = None,
        indexer_kv_gate: Optional[Tensor] = None,
        indexer_ape: Optional[Tensor] = None,
        indexer_norm_weight: Optional[Tensor] = None,
        indexer_state: Optional[Tensor] = None,
        indexer_pool: Optional[Tensor] = None,
        index_q: Optional[Tensor] = None,
        head_gate: Optional[Tensor] = None,
        return_indices: bool = False,
        plan: Optional[StepPlan] = None,
        out: Out = None,
        stream: Optional[int] = None,
    ) -> tuple[Tensor, ...]:
        """One layer: stores window rows, runs the compressors, selects, attends, turns the output back.

        Args:
            ratio: 0, 4 or 128.
            q: bf16 [T, H, 512], rotated.
            cos_sin: f32 [max_pos, 64], the layer's table.
            window_pool: u8 [pages, page_bytes]; updated.
            kv: bf16 [T, 512], rotated; None: the rows are in the pool.
            sink: f32 [H].
            compressor_kv_gate, compressor_ape, compressor_norm_weight: f32 [T, 2*c*512], [ratio, c*512], [512];
                c is 2 for ratio 4, else 1 (ratio > 0).
            compressor_state, compressor_pool: f32 [states, S, 2, c*512], online [states, 3, 512], and
                u8 [pages, page_bytes]; updated.
            indexer_kv_gate, indexer_ape, indexer_norm_weight, indexer_state, indexer_pool: the same with 128 channels,
                rows of i132 (ratio 4).
            index_q, head_gate: bf16 [T, Hi, 128], rotated, and f32 [T, Hi] (ratio 4).
            return_indices: give the selection of ratio 4 too.
            plan, out, stream: as everywhere.

        Returns:
            out bf16 [T, H, 512], lse f32 [T, H], and with ``return_indices`` indices i32 [T, topk].

        Raises:
            InvalidArgument, Unsupported: before anything is written.
        """
        return self._forward(V4Backend.forward, locals(), ("out", "lse"), indices=return_indices)

    def commit(
        self,
        plan: StepPlan,
        ratio: int,
        accepted: Tensor,
        out: tuple[Tensor, ...],
        *,
        stream: Optional[int] = None,
        **tensors: Optional[Tensor],
    ) -> None:
        """Makes the first accepted rows of a verify the requests' states.

        Args:
            plan: of the verify.
            ratio: of the layer.
            accepted: i32 [R], the first row included.
            out: the results of the layer's ``forward``; they are not changed.
            stream: as everywhere.
            tensors: those of the layer's ``forward``.

        Raises:
            InvalidArgument: also when the plan holds no verify.
        """
        call = "V4Backend.commit"
        unknown = set(tensors) - set(declaration(V4Backend.forward)[0])
        if unknown:
            raise InvalidArgument(f"{call}: unknown tensor '{min(unknown)}'; it takes those of forward")
        where, given = plan_of_verify(call, plan), outputs(call, ("out", "lse"), tuple(out)[:2])
        self._call("commit", plan, where, {"ratio": ratio}, {**tensors, "accepted": accepted}, given, stream)

    def routes(self) -> dict[str, int]:
        """How many forwards took which way (docs/v4_backend.md)."""
        return self._native.routes()
