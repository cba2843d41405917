"""Serving backend of block-sparse attention (MiniMax-M3)."""

from __future__ import annotations

from typing import Optional

from . import _native
from ._backend import Backend, HostLengths, StepPlan
from ._call import Out, Tensor, keywords


class MsaBackend(Backend):
    """Models with block-sparse attention over a paged cache (MiniMax-M3).

    ``MsaBackend`` of the C++ library: layers, options and what a cache holds in docs/msa_backend.md.
    """

    _name = "MsaBackend"

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        max_requests: int,
        max_rows: int,
        table_width: int,
        head_dim: int = 128,
        index_heads: int = 0,
        index_dim: int = 128,
        block_size: int = 128,
        page_size: int = 0,
        topk: int = 16,
        init_blocks: int = 0,
        local_blocks: int = 1,
        score: str = "max",
        index_reduce: str = "per_group",
        index_scale: float = 1.0,
        softmax_scale: float = 0.0,
        dense_layers: bool = False,
        rows_per_request: int = 1,
        deterministic: bool = True,
        strict: bool = False,
        implementation: str = "",
        device: str = "cpu",
    ) -> None:
        """
        Args:
            num_heads, num_kv_heads, head_dim: Hq, Hkv, D.
            max_requests, max_rows, table_width: bounds of R, of rows, and W of req_to_token.
            index_heads, index_dim: Hi (0: Hkv) and Di of the index branch.
            block_size, page_size: tokens of a block, which is a page; 0: the same.
            topk, init_blocks, local_blocks: blocks of a list, and those that are always in it.
            score: "max" or "lse".
            index_reduce: "per_group", "max_all" or "union".
            index_scale, softmax_scale: the second 0: D^-1/2.
            dense_layers: ``forward_dense`` may be called.
            rows_per_request: N of target_verify and the draft-extend modes.
            deterministic: a row's bits depend on its own request alone.
            strict: a failed operator is an error, never followed by another implementation.
            implementation: forces one implementation where it exists.
            device: "cpu", "cuda" or "cuda:N".

        Raises:
            InvalidArgument, Unsupported: naming the field. OutOfMemory.
        """
        _, params = keywords(MsaBackend.__init__, locals())
        self._native = _native.MsaBackend(params, str(device))

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
        kv_len_delta: int = 0,
        host_seq_len: HostLengths = None,
        host_ext_len: HostLengths = None,
        plan: Optional[StepPlan] = None,
        stream: Optional[int] = None,
    ) -> None:
        """Begins a step: lengths and page table.

        Args:
            mode: "extend", "decode", "idle", "target_verify", "draft_extend", "draft_extend_v2" or "mixed".
            seq_len, pool_row, req_to_token, positions, out_cache_loc, ext_len: as in :meth:`DsaBackend.begin_step`.
            num_rows, padded_rows, host_seq_len, host_ext_len, plan, stream: as there.
            kv_len_delta: added to seq_len (decode).

        Raises:
            InvalidArgument, Unsupported: naming the tensor; the previous step stays current.
        """
        self._begin(MsaBackend.begin_step, locals())

    def forward(
        self,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        *,
        index_pool: Optional[Tensor] = None,
        k: Optional[Tensor] = None,
        v: Optional[Tensor] = None,
        index_q: Optional[Tensor] = None,
        index_k: Optional[Tensor] = None,
        topk_blocks: Optional[Tensor] = None,
        return_blocks: bool = False,
        plan: Optional[StepPlan] = None,
        out: Out = None,
        stream: Optional[int] = None,
    ) -> tuple[Tensor, ...]:
        """A sparse layer: stores the new rows, scores and selects blocks, attends.

        Args:
            q: bf16 [T, Hq, D].
            k_pool, v_pool: bf16 [slots, Hkv, D], equal strides; updated.
            index_pool: bf16 [slots, 1, Di]; updated.
            k, v: bf16 [T, Hkv, D]; None, with ``index_k``: the rows are in the pools.
            index_q, index_k: bf16 [T, Hi, Di], bf16 [T, Di].
            topk_blocks: i32 [Hkv, T, K]: a selection made elsewhere; the index branch is skipped.
            return_blocks: give the selection too.
            plan, out, stream: as everywhere.

        Returns:
            out bf16 [T, Hq, D], lse f32 [T, Hq], and with ``return_blocks`` blocks i32 [Hkv, T, K].

        Raises:
            InvalidArgument: before anything is written.
        """
        return self._forward(MsaBackend.forward, locals(), ("out", "lse"), ("forward", False), blocks=return_blocks)

    def forward_dense(
        self,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        *,
        k: Optional[Tensor] = None,
        v: Optional[Tensor] = None,
        plan: Optional[StepPlan] = None,
        out: Out = None,
        stream: Optional[int] = None,
    ) -> tuple[Tensor, ...]:
        """A dense layer: attends to every block.

        Args:
            q, k_pool, v_pool, k, v, plan, out, stream: as in :meth:`forward`.

        Returns:
            out bf16 [T, Hq, D] and lse f32 [T, Hq].

        Raises:
            InvalidArgument: before anything is written.
        """
        return self._forward(MsaBackend.forward_dense, locals(), ("out", "lse"), ("forward", True), blocks=False)

    def list_width(self) -> int:
        """Columns of the lists: K, with index_reduce "union" Hi / Hkv * K."""
        return self._native.list_width()

    def routes(self) -> dict[str, int]:
        """How many forwards took which way (docs/msa_backend.md)."""
        return self._native.routes()
