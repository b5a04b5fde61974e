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

__all__ = [
    "Block",
    "EncoderDecoderAttention",
    "GraphAttention",
    "MaskedAttention",
    "MultiheadAttention",
    "RelationalAttention",
    "Rotary",
    "SelfAttention",
    "SparseAttention",
    "StridedAttention",
]
