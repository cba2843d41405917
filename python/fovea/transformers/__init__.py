"""Models of Hugging Face transformers on fovea: ``attn_implementation="fovea"``.

::

    import fovea.transformers
    fovea.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="fovea")
    # or, of a model that is there: model.set_attn_implementation("fovea")

Prefill, chunks and decode run on the operators of fovea, over the caches of transformers, on the CPU or a GPU
(docs/python.md: which layers, what is refused). Needs torch and transformers; ``import fovea`` needs neither.
"""

from __future__ import annotations

from .._errors import Unsupported

try:
    import torch as _torch  # noqa: F401
    import transformers as _transformers
    from transformers import AttentionInterface, AttentionMaskInterface
except ImportError as error:
    raise ImportError(
        f"fovea.transformers needs torch and transformers >= 5.17 ({error}): pip install torch 'transformers>=5.17'"
    ) from error

from . import _kda, _mla
from ._attention import attention
from ._common import NAME
from ._mask import FAMILIES, mask

__all__ = ["FAMILIES", "NAME", "register", "unregister"]


def register() -> tuple[str, ...]:
    """Makes ``attn_implementation="fovea"`` known to transformers: the attention and its mask, always together.

    A mask function has to be known by the same name, because transformers gives no mask at all to an implementation
    without one, and causality would be lost. The attention of DeepSeek-V3.2 and the linear attention of Kimi, which do
    not go through the table of implementations, get a forward that asks the model's configuration; with any other
    implementation they run as before. Calling it again changes nothing.

    Returns:
        The model types that it serves, those of :data:`FAMILIES`.

    Raises:
        Unsupported: the installed transformers lacks one of the families.
    """
    for install in (_mla.install, _kda.install):
        try:
            install()
        except ImportError as error:
            raise Unsupported(
                f"fovea.transformers: transformers {_transformers.__version__} lacks {error.name}; 5.17 has it"
            ) from error
    AttentionMaskInterface.register(NAME, mask)
    AttentionInterface.register(NAME, attention)
    return FAMILIES


def unregister() -> None:
    """Undoes :func:`register`. Models whose implementation is "fovea" need another one first."""
    AttentionInterface._global_mapping.pop(NAME, None)
    AttentionMaskInterface._global_mapping.pop(NAME, None)
    _mla.uninstall()
    _kda.uninstall()
