"""Names of other packages, on fovea: code that imports them runs unchanged.

    import fovea.compat
    fovea.compat.install()
    from fmha_sm100 import fmha_sm100, fmha_sm100_plan      # block-sparse attention of MiniMax-M3

:func:`install` enters modules into ``sys.modules``; :func:`uninstall` takes them out again. The names are here, too:
``fovea.compat.fmha_sm100``. They take and give tensors of torch, on the CPU or a GPU. What is offered and what is
different is said in docs/compat/.
"""

from __future__ import annotations

import sys
import types

from ._msa import fmha_sm100, fmha_sm100_plan

_MODULES = {"fmha_sm100": (fmha_sm100, fmha_sm100_plan)}

# What install() replaced, by name; None: nothing.
_replaced: dict[str, types.ModuleType | None] = {}


def install() -> list[str]:
    """Makes the modules importable, in place of packages of the same name; returns their names.

    Modules that imported such a package before keep what they have.
    """
    for name, functions in _MODULES.items():
        if name in _replaced:
            continue
        module = types.ModuleType(name, "Stands for the package of this name, on fovea.")
        for function in functions:
            setattr(module, function.__name__, function)
        module.__all__ = [function.__name__ for function in functions]  # type: ignore[attr-defined]
        _replaced[name] = sys.modules.get(name)
        sys.modules[name] = module
    return sorted(_MODULES)


def uninstall() -> None:
    """Undoes :func:`install`."""
    while _replaced:
        name, module = _replaced.popitem()
        if module is None:
            sys.modules.pop(name, None)
        else:
            sys.modules[name] = module


__all__ = ["fmha_sm100", "fmha_sm100_plan", "install", "uninstall"]
