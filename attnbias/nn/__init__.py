"""Layers: one for each mechanism, thin ones over ``attnbias.attention``."""

from .structured import (
    BilinearBTTAttention,
    BilinearMLRAttention,
    MLRAttention,
    parameter_groups,
)

__all__ = [
    "BilinearBTTAttention",
    "BilinearMLRAttention",
    "MLRAttention",
    "parameter_groups",
]
