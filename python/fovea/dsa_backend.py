"""Serving backend of DeepSeek sparse attention (V3.2, GLM-5)."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Sequence

from . import _native
from ._backend import Backend, HostLengths, StepPlan, plan_of
from ._call import Out, Tensor, keywords
from ._errors import InvalidArgument


class ContextSplit(NamedTuple):
    """The part of a prefill that one rank of context parallelism computes; ``scheme`` "round_robin" or "zigzag"."""

    ranks: int
    rank: int
    scheme: str = "round_robin"


class DraftStep(NamedTuple):
    """One forward of a draft model in a chain: step j drafts the token after position seq_len + j.

    ``positions`` and ``out_cache_loc`` are i32 [R]; ``kv_len_delta`` None: j + 1.
    """

    plan: StepPlan
    positions: Tensor
    out_cache_loc: Tensor
    kv_len_delta: Optional[int] = None


class DsaBackend(Backend):
    """Attention of DeepSeek-V3.2 and GLM-5 over paged caches: metadata, indexer, selection, sparse attention.

    ``DsaBackend`` of the C++ library: modes, dispatch and every option in docs/dsa_backend.md.
    """

    _name = "DsaBackend"

    def __init__(
        self,
        *,
        num_heads: int,
        max_requests: int,
        max_rows: int,
        table_width: int,
        index_heads: int = 64,
        index_dim: int = 128,
        rope_dim: int = 64,
        topk: int = 2048,
        page_size: int = 64,
        row_format: str = "v32",
        kv_scale_mode: str = "fp32",
        index_scale_mode: str = "fp32",
        index_rope_style: str = "half_split",
        hadamard: bool = True,
        rows_per_request: int = 1,
        draft_topk: int = 1,
        deterministic: bool = True,
        force_absorbed: bool = False,
        context_parallel: bool = False,
        extend_kv_source: str = "cache",
        mha_chunk_capacity: int = 131072,
        logits_budget_bytes: int = 512 << 20,
        implementation: str = "",
        prefill_implementation: str = "auto",
        decode_implementation: str = "auto",
        contiguous_kv_ratio: float = 0.0,
        split_parts: int = 0,
        strict: bool = False,
        fuse_transform: bool = True,
        fuse_rope: bool = False,
        rope_style: str = "interleaved",
        verify_metadata: bool = False,
        check: bool = False,
        cache_slots: int = 0,
        device: str = "cpu",
    ) -> None:
        """
        Args:
            num_heads: H, local query heads.
            max_requests, max_rows, table_width: bounds of R, of rows, and W of req_to_token.
            index_heads, index_dim, rope_dim: Hi, Di, R of the indexer.
            topk: width of a selection.
            page_size: tokens per page.
            row_format: of the latent cache: "bf16", "v32" or "f576".
            kv_scale_mode, index_scale_mode: "fp32" or "pow2".
            index_rope_style, rope_style: "half_split" or "interleaved"; the second with ``fuse_rope``.
            hadamard: rotate index queries and keys.
            rows_per_request: N of target_verify and the draft-extend modes.
            draft_topk: branches of a draft; a tree (> 1) is refused.
            deterministic: a row's bits depend on its own request alone.
            force_absorbed: one-shot off.
            context_parallel: batches may carry a context split.
            extend_kv_source: "cache" or "fresh".
            mha_chunk_capacity: bound of the summed KV length of a one-shot or contiguous batch.
            logits_budget_bytes: of the selection.
            implementation: forces one implementation where it exists.
            prefill_implementation, decode_implementation: "auto", "cache_direct", "contiguous_bf16" or an engine's name.
            contiguous_kv_ratio: when "auto" unpacks the batch; 0: never.
            split_parts: parts of the split plan of sparse decode; 0: none.
            strict: a failed operator is an error, never followed by another implementation.
            fuse_transform: selections are slots; off: positions, mapped later.
            fuse_rope: f576: q and k arrive in parts, before rope.
            verify_metadata: compare every refresh with the reference builder.
            check, cache_slots: report device contents that were masked; slots of the pools.
            device: "cpu", "cuda" or "cuda:N".

        Raises:
            InvalidArgument, Unsupported: a configuration that no operator supports, naming the field. OutOfMemory.
        """
        _, params = keywords(DsaBackend.__init__, locals())
        self._native = _native.DsaBackend(params, str(device))

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
        num_rows: Optional[int] = None,
        padded_rows: int = 0,
        host_seq_len: HostLengths = None,
        host_ext_len: HostLengths = None,
        mha_inputs: bool = False,
        context_split: Optional[ContextSplit] = None,
        store_positions: Optional[Tensor] = None,
        plan: Optional[StepPlan] = None,
        stream: Optional[int] = None,
    ) -> None:
        """Begins a step: checks, metadata, dispatch.

        Args:
            mode: "extend", "decode", "idle", "target_verify", "draft_extend", "draft_extend_v2" or "mixed".
            seq_len: i32 [R]; what it includes differs by mode.
            pool_row: i32 [R]: row of ``req_to_token``.
            req_to_token: i32 [rows, W]: slot of each position.
            positions: i32 [T], global position of each row.
            out_cache_loc: i32 [T], slot of each row's new token; -1 in padding.
            ext_len: i32 [R]: new rows (extend, mixed, draft_extend).
            num_rows: E; None: the rows of ``positions``.
            padded_rows: T; 0: E.
            host_seq_len, host_ext_len: host copies of the lengths, for one-shot and to skip selections.
            mha_inputs: the caller can supply q_mha, k_mha and v_mha.
            context_split: the rank's part of the batch; needs both host lengths.
            store_positions: i32 [tokens], with ``context_split``.
            plan: begin the step in this plan.
            stream: a CUDA stream as an integer; None: torch's current one.

        Raises:
            InvalidArgument, Unsupported: naming the tensor; the previous step stays current.
            Mismatch: with ``verify_metadata``; the arrays are the refreshed ones.
        """
        self._begin(DsaBackend.begin_step, locals())

    def begin_draft_steps(
        self,
        seq_len: Tensor,
        pool_row: Tensor,
        req_to_token: Tensor,
        steps: Sequence[DraftStep],
        *,
        num_rows: Optional[int] = None,
        padded_rows: int = 0,
        stream: Optional[int] = None,
    ) -> None:
        """Begins up to eight decode steps of a chain of drafts with one refresh.

        Args:
            seq_len: i32 [R], the committed length before the chain.
            pool_row, req_to_token, num_rows, padded_rows, stream: as in ``begin_step``.
            steps: one :class:`DraftStep` each, with plans of their own.

        Raises:
            InvalidArgument: as ``begin_step``, and for two steps of one plan.
        """
        call = "DsaBackend.begin_draft_steps"
        try:
            chain = [(plan_of(call, step[0]), *step[1:3], step[3] if len(step) > 3 else None) for step in steps]
        except (TypeError, IndexError) as error:
            raise InvalidArgument(f"{call}: steps holds what is no DraftStep: {error}") from None
        if any(step[0] is None for step in chain):
            raise InvalidArgument(f"{call}: a step has no plan")
        tensors = {"seq_len": seq_len, "pool_row": pool_row, "req_to_token": req_to_token}
        params = {"num_rows": num_rows, "padded_rows": padded_rows}
        self._native.begin_draft_steps(params, tensors, chain, stream)

    def forward(
        self,
        kv_pool: Tensor,
        index_pool: Tensor,
        softmax_scale: float,
        *,
        q: Optional[Tensor] = None,
        q_nope: Optional[Tensor] = None,
        q_rope: Optional[Tensor] = None,
        k: Optional[Tensor] = None,
        k_latent: Optional[Tensor] = None,
        k_rope: Optional[Tensor] = None,
        index_q: Optional[Tensor] = None,
        index_k: Optional[Tensor] = None,
        norm_weight: Optional[Tensor] = None,
        norm_bias: Optional[Tensor] = None,
        head_gate: Optional[Tensor] = None,
        cos_sin: Optional[Tensor] = None,
        mla_cos_sin: Optional[Tensor] = None,
        topk_indices: Optional[Tensor] = None,
        q_mha: Optional[Tensor] = None,
        k_mha: Optional[Tensor] = None,
        v_mha: Optional[Tensor] = None,
        save_kv: bool = True,
        layer: int = 0,
        logit_cap: float = 0.0,
        q_scale: float = 1.0,
        k_scale: float = 1.0,
        return_indices: bool = False,
        plan: Optional[StepPlan] = None,
        out: Out = None,
        stream: Optional[int] = None,
    ) -> tuple[Tensor, ...]:
        """One layer: stores the new rows, selects, attends.

        Args:
            kv_pool, index_pool: u8 [pages, page_bytes] of the layer, latent rows and index keys; updated.
            softmax_scale: of the MHA form, > 0.
            q: bf16 [T, H, 576], absorbed; or ``q_nope`` bf16 [T, H, 512] and ``q_rope`` bf16 [T, H, 64].
            k: bf16 [T, 576], or ``k_latent`` bf16 [T, 512] and ``k_rope`` bf16 [T, 64]; None: the rows are in the pool.
            index_q, head_gate: bf16 [T, Hi, Di] before rope, f32 [T, Hi].
            index_k, norm_weight, norm_bias: bf16 [T, Di] before the LayerNorm, f32 [Di].
            cos_sin, mla_cos_sin: f32 [max_pos, rope_dim], and f32 [max_pos, 64] with fuse_rope.
            topk_indices: i32 [T, topk]: a selection made elsewhere.
            q_mha, k_mha, v_mha: one-shot: bf16 [T, H, 192], [S, H, 192], [S, H, 128].
            save_kv: False: nothing is stored.
            layer: its number, for messages.
            logit_cap: cap * tanh(s / cap); 0: none.
            q_scale, k_scale: of f576 caches.
            return_indices: give the selection too.
            plan, stream: as in ``begin_step``.
            out: as everywhere: a tuple of results, or a mapping.

        Returns:
            out bf16 [T, H, 512] (one-shot: [T, H, 128] of the MHA form), lse f32 [T, H], and with ``return_indices``
            indices i32 [T, topk]. Rows of padding: 0, -infinity, -1.

        Raises:
            InvalidArgument: before anything is written.
        """
        return self._forward(DsaBackend.forward, locals(), ("out", "lse"), indices=return_indices)

    def dispatch(self, plan: Optional[StepPlan] = None) -> dict[str, Any]:
        """What runs in the current step, or in that of ``plan``: kernel, one_shot, skip_selection, transform, reasons."""
        return self._call("dispatch", plan, plan_of("DsaBackend.dispatch", plan))

    def report(self, plan: Optional[StepPlan] = None) -> str:
        """With ``check``: the fault that the last begin_step (of ``plan``) found in the device contents; "" for none. Waits."""
        return self._call("report", plan, plan_of("DsaBackend.report", plan))
