"""Layers: one for each mechanism, thin ones over ``attnbias.attention``."""

from .block import Block
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
    BilinearBTTAttention,
    BilinearMLRAttention,
    MLRAttention,
    parameter_groups,
)

__all__ = [
    "BilinearBTTAttention",
    "BilinearMLRAttention",
    "Block",
    "EncoderDecoderAttention",
    "GraphAttention",
    "MLRAttention",
    "MaskedAttention",
    "MultiheadAttention",
    "RelationalAttention",
    "Rotary",
    "SelfAttention",
    "SparseAttention",
    "StridedAttention",
    "parameter_groups",
]
