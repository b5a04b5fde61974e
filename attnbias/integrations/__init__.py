"""Bridges to other libraries, each loaded when it is asked for. ``import attnbias`` imports none of them.

Modules: ``flex`` (BlockMask to and from a layout or relation), ``sdpa`` and ``flash_attn`` (functions with
the names and arguments of torch's and flash-attn's), ``varlen`` (torch's ``varlen_attn``), ``huggingface``
(run a transformers model), ``torchtitan`` (a module for its models), ``pyg`` (PyG's attention layers),
``sequences`` (what the bridges for packed sequences share). A bridge may import anything in ``attnbias``;
nothing in ``attnbias`` imports a bridge.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import flash_attn as flash_attn
    from . import flex as flex
    from . import huggingface as huggingface
    from . import pyg as pyg
    from . import sdpa as sdpa
    from . import torchtitan as torchtitan
    from . import varlen as varlen
else:

    def __getattr__(name: str) -> Any:
        if name in ("flash_attn", "flex", "huggingface", "pyg", "sdpa", "torchtitan", "varlen"):
            return import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
