"""What this build and machine can do."""

from __future__ import annotations

from typing import Any, NamedTuple

from . import _native


class Implementation(NamedTuple):
    """One implementation of an operator."""

    name: str
    device: str
    available: bool
    reason: str


def operators() -> list[str]:
    """Names of the operators that the package calls, sorted."""
    return _native.callable_operators()


def implementations(op: str) -> list[Implementation]:
    """Implementations of the operator ``op``, best first, ``ref`` last.

    ``device`` is "cpu" or "cuda", ``reason`` says why one that is not ``available`` cannot run here. Empty for an
    operator that does not exist, and for a function of host values, which has no implementations to choose from.
    """
    return [Implementation(*entry) for entry in _native.implementations(op)]


# The operators that a serving backend runs.
_BACKENDS = {
    "DsaBackend": ("metadata_refresh", "index_quantize", "pack_rows", "index_store", "index_select", "sparse_mla"),
    "KdaBackend": ("metadata_refresh", "causal_conv1d", "kda_prefill", "kda_verify", "kda_commit", "pack_rows", "dense_mla"),
    "MsaBackend": ("metadata_refresh", "pack_rows", "msa_score_select", "msa_attend"),
    "V4Backend": ("metadata_refresh", "build_swa_indices", "pack_rows", "v4_compress", "index_select", "sparse_mla"),
}


def available(op: str, device: Any = "cpu") -> tuple[bool, str]:
    """Whether ``op``, an operator or a backend ("DsaBackend"), can run on ``device``, and if not, why.

    ``device`` is "cpu", "cuda", "cuda:1" or a torch.device. Never raises.
    """
    try:
        name, where = str(op), str(device)
        if name in _BACKENDS:
            missing = [reason for answer, reason in (available(part, where) for part in _BACKENDS[name]) if not answer]
            return not missing, missing[0] if missing else ""
        if name not in _native.callable_operators():
            return False, f"there is no operator or backend '{name}'"
        _native.check_device(where)
        kind = where.split(":")[0]
        entries = implementations(name)
        if not entries and kind == "cpu":
            return True, ""
        on_device = [entry for entry in entries if entry.device == kind]
        if any(entry.available for entry in on_device):
            return True, ""
        return False, next((entry.reason for entry in on_device), f"{name} has no implementation for {kind}")
    except Exception as error:  # an unknown device, or whatever str() of an argument does
        return False, str(error)


def clear_caches() -> None:
    """Forgets the plans of earlier calls, and gives back the workspaces that are kept for later ones.

    A call that differs from one of the latest 512 only in the addresses and contents of its tensors is not planned again;
    its workspace, up to 32 MiB, is kept for the next call of the same stream, at most 16 of them.
    """
    _native.clear_caches()


def set_num_threads(threads: int) -> None:
    """Bounds the threads of every later call on the CPU; 0: every hardware thread. Changes no result."""
    _native.set_num_threads(threads)


def get_num_threads() -> int:
    """What :func:`set_num_threads` was given; 0 at first."""
    return _native.num_threads()
