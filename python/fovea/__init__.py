"""Sparse and linear attention operators over numpy and torch tensors.

Functions take any tensor with the buffer protocol or DLPack, on the CPU or a GPU, without a copy; every stride but the
last axis's is honoured. Results are new arrays of numpy, or tensors of torch where any given tensor is one, or are
written to ``out``. What an operator updates (a cache, a state) it updates in place. The GIL is released while an
operator runs; on a GPU it is submitted to torch's current stream and not waited for.

Types: bfloat16 is torch's or ml_dtypes', or its bits as uint16; e4m3 codes and packed rows are uint8 (float8_e4m3fn is
taken as its codes); flags are bool or uint8; indices and lengths int32.

Arguments of every function:

``out``     where results go: a tensor, a tuple in the order of the results (None: a new one) or a dictionary by name.
            A result must not share memory with another argument. New results start as zeros.
``impl``    an implementation by name (``implementations(op)`` lists them); None: the best one.
``stream``  a CUDA stream as an integer; None: torch's current one, without torch the default stream.

Errors: :class:`Error`; wrong arguments :class:`InvalidArgument` (also a ValueError), what no implementation does
:class:`Unsupported` (also a NotImplementedError). They are raised before anything is written.
"""

from __future__ import annotations

from . import _native
from ._backend import OperatorCall, StepPlan
from ._errors import DeviceError, Error, InternalError, InvalidArgument, Mismatch, OutOfMemory, Unsupported
from ._info import available, clear_caches, get_num_threads, implementations, operators, set_num_threads
from .batch import context_split, metadata_check, metadata_refresh, paged_schedule, split_schedule
from .cache import move_rows, pack_rows, unpack_rows
from .compress import v4_compress
from .dsa_backend import ContextSplit, DraftStep, DsaBackend
from .index import (
    QuantizedIndex,
    index_gather,
    index_logits,
    index_quantize,
    index_select,
    index_store,
    topk_select,
)
from .kda import (
    StageGate,
    StageInter,
    StageIntra,
    causal_conv1d,
    kda_commit,
    kda_decode,
    kda_gate,
    kda_prefill,
    kda_stage_gate,
    kda_stage_inter,
    kda_stage_intra,
    kda_stage_output,
    kda_verify,
)
from .kda_backend import KdaBackend
from .memory import set_memory_resource, use_torch_memory
from .mla import (
    build_swa_indices,
    concat_absorbed_q,
    dense_mla,
    merge_lse,
    mha_varlen,
    mla_rope_quantize,
    sparse_mla,
    swa_decode,
)
from .msa import build_page_table, msa_attend, msa_block_scores, msa_score_select, msa_select_blocks
from .msa_backend import MsaBackend
from .pools import KvPool, StatePool, TensorView
from .v4_backend import V4Backend

__version__: str = _native.version()

__all__ = [
    "ContextSplit",
    "DeviceError",
    "DraftStep",
    "DsaBackend",
    "Error",
    "InternalError",
    "InvalidArgument",
    "KdaBackend",
    "KvPool",
    "Mismatch",
    "MsaBackend",
    "OperatorCall",
    "OutOfMemory",
    "QuantizedIndex",
    "StageGate",
    "StageInter",
    "StageIntra",
    "StatePool",
    "StepPlan",
    "TensorView",
    "Unsupported",
    "V4Backend",
    "__version__",
    "available",
    "build_page_table",
    "build_swa_indices",
    "causal_conv1d",
    "clear_caches",
    "concat_absorbed_q",
    "context_split",
    "dense_mla",
    "get_num_threads",
    "implementations",
    "index_gather",
    "index_logits",
    "index_quantize",
    "index_select",
    "index_store",
    "kda_commit",
    "kda_decode",
    "kda_gate",
    "kda_prefill",
    "kda_stage_gate",
    "kda_stage_inter",
    "kda_stage_intra",
    "kda_stage_output",
    "kda_verify",
    "merge_lse",
    "metadata_check",
    "metadata_refresh",
    "mha_varlen",
    "mla_rope_quantize",
    "move_rows",
    "msa_attend",
    "msa_block_scores",
    "msa_score_select",
    "msa_select_blocks",
    "operators",
    "pack_rows",
    "paged_schedule",
    "set_memory_resource",
    "set_num_threads",
    "sparse_mla",
    "split_schedule",
    "swa_decode",
    "topk_select",
    "unpack_rows",
    "use_torch_memory",
    "v4_compress",
]
