"""Layers: thin ones over ``attnbias.attention``, with projections and parameters.

Modules: ``relational`` (the layer that all mechanisms are made of), ``mechanisms`` (one class per mechanism),
``appendix`` (the listings of the paper that names them; import it by name), ``multihead`` (a drop-in for
``torch.nn.MultiheadAttention``), ``structured`` (structured scores), ``cache`` (keys for decoding with them),
``rotary`` (rotary positions), ``block`` (a transformer block). A new mechanism is a subclass of
``RelationalAttention`` that fixes its relation; export it here.
"""

from .block import Block
from .cache import MultiLevelCache
from .mechanisms import (
    EncoderDecoderAttention,
    GraphAttention,
    MaskedAttention,
    SelfAttention,
    SparseAttention,
    StridedAttention,
)
from .multihead import MultiheadAttention
from .relational import RelationalAttention
from .rotary import Rotary
from .structured import (
    BilinearAttention,
    BilinearBTTAttention,
    BilinearMLRAttention,
    MLRAttention,
    parameter_groups,
)

__all__ = [
    "BilinearAttention",
    "BilinearBTTAttention",
    "BilinearMLRAttention",
    "Block",
    "EncoderDecoderAttention",
    "GraphAttention",
    "MLRAttention",
    "MaskedAttention",
    "MultiLevelCache",
    "MultiheadAttention",
    "RelationalAttention",
    "Rotary",
    "SelfAttention",
    "SparseAttention",
    "StridedAttention",
    "parameter_groups",
]
