"""The specification: attention in plain PyTorch.

``formula`` computes every pair. ``edges`` adds up the biases of a pair's edges. No optimised code imports it.
"""

from .formula import attend, name, row_max, weights, why_not

__all__ = ["attend", "name", "row_max", "weights", "why_not"]
