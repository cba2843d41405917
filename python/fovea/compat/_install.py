"""Modules of other packages' names in sys.modules."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from typing import Any, Callable, Collection, Union

from .._errors import InvalidArgument
from . import _batch, _cache, _index, _kda, _latent, _msa

_NSA = "sglang.srt.layers.attention.nsa"

MODULES: dict[str, tuple[Callable[..., Any], ...]] = {
    "aiter.mla": (_latent.mla_decode_fwd,),
    "cutedsl.native_swa_decode": (_latent.native_swa_decode_attention,),
    "deep_gemm": (
        _index.fp8_mqa_logits,
        _index.fp8_paged_mqa_logits,
        _index.get_num_sms,
        _index.get_paged_mqa_logits_metadata,
    ),
    "flashinfer.decode": (_latent.trtllm_batch_decode_with_kv_cache_mla,),
    "flashinfer.prefill": (_latent.trtllm_ragged_attention_deepseek,),
    "fmha_sm100": (_msa.fmha_sm100, _msa.fmha_sm100_plan),
    "sgl_kernel": (
        _index.fast_topk_transform_fused,
        _index.fast_topk_transform_ragged_fused,
        _index.fast_topk_v2,
    ),
    "sgl_kernel.flash_attn": (_latent.flash_attn_varlen_func, _latent.flash_attn_with_kvcache),
    "sgl_kernel.flash_mla": (
        _latent.flash_mla_sparse_fwd,
        _latent.flash_mla_with_kvcache,
        _latent.get_mla_metadata,
    ),
    "sglang.jit_kernel.fused_metadata_copy": (
        _batch.fused_metadata_copy_cuda,
        _batch.fused_metadata_copy_multi_cuda,
    ),
    "sglang.kernels.ops.attention.fla.l2norm": (_kda.l2norm_fwd,),
    "sglang.kernels.ops.attention.linear.kda_nvidia_prefill": (_kda.chunk_kda_fwd,),
    "sglang.srt.layers.attention.utils": (_cache.concat_mla_absorb_q_general, _cache.mla_quantize_and_rope_for_fp8),
    f"{_NSA}.dequant_k_cache": (_cache.dequantize_k_cache_paged,),
    f"{_NSA}.nsa_backend_mtp_precompute": (_batch.compute_cu_seqlens,),
    f"{_NSA}.quant_k_cache": (_cache.quantize_k_cache,),
    f"{_NSA}.tilelang_kernel": (_latent.tilelang_sparse_fwd,),
    f"{_NSA}.transform_index": (
        _index.transform_index_page_table_decode,
        _index.transform_index_page_table_prefill,
    ),
    f"{_NSA}.utils": (
        _batch.can_nsa_prefill_cp_round_robin_split,
        _batch.compute_nsa_seqlens,
        _batch.is_nsa_enable_prefill_cp,
        _batch.nsa_cp_round_robin_split_data,
        _batch.nsa_cp_round_robin_split_q_seqs,
        _batch.pad_nsa_cache_seqlens,
    ),
}

# What undoes install(), last first.
_undo: list[Callable[[], None]] = []


def _enter(module: types.ModuleType, name: str, value: Any) -> None:
    missing = object()
    before = getattr(module, name, missing)
    setattr(module, name, value)
    _undo.append(lambda: delattr(module, name) if before is missing else setattr(module, name, before))


def _add_module(name: str) -> types.ModuleType:
    """An empty module, below its parents, which are made where they are missing."""
    module = types.ModuleType(name, "Stands for the package of this name, on fovea.")
    module.__path__ = []  # so that modules below it can be imported
    before = sys.modules.get(name)
    sys.modules[name] = module
    _undo.append(lambda: sys.modules.pop(name, None) if before is None else sys.modules.update({name: before}))
    parent, _, own = name.rpartition(".")
    if parent:
        _enter(sys.modules.get(parent) or _add_module(parent), own, module)
    return module


def _is_installed(package: str) -> bool:
    """Whether there is a package of this name that is not ours."""
    if package in sys.modules:
        return True
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def _installed_module(name: str) -> Union[types.ModuleType, None]:
    try:
        return importlib.import_module(name)
    except Exception:  # whatever the import of a package for another machine raises
        return None


def install(override: Union[bool, Collection[str]] = False) -> list[str]:
    """Makes the modules of docs/compat/README.md importable.

    Packages that are installed stay as they are and none of their modules is entered, unless ``override`` is True or
    holds the package's name ("sgl_kernel"): then the names of fovea take the place of the package's own in its modules.
    Modules that imported a name before keep what they have. A second call adds to the first.

    Returns:
        Names of the modules that are on fovea now, sorted.

    Raises:
        InvalidArgument: ``override`` holds a name of which fovea has nothing.
    """
    packages = {name.partition(".")[0] for name in MODULES}
    wanted = packages if override is True else set(override or ())
    if wanted - packages:
        raise InvalidArgument(f"install: override has {sorted(wanted - packages)}, expected names of {sorted(packages)}")
    ours = {name.partition(".")[0] for name in installed()}
    foreign = {name for name in packages - ours if _is_installed(name)}
    for name, functions in MODULES.items():
        package = name.partition(".")[0]
        if name in _on_fovea or (package in foreign and package not in wanted):
            continue
        module = (_installed_module(name) if package in foreign else sys.modules.get(name)) or _add_module(name)
        for function in functions:
            _enter(module, function.__name__, function)
        _on_fovea.add(name)
    return installed()


# Modules that install() has entered or changed.
_on_fovea: set[str] = set()


def installed() -> list[str]:
    """Names of the modules that are on fovea now, sorted."""
    return sorted(_on_fovea)


def uninstall() -> None:
    """Undoes :func:`install`."""
    while _undo:
        _undo.pop()()
    _on_fovea.clear()
