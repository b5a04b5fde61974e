"""Scores other than the dot product: what ``attention(..., score=)`` takes.

A score is written once, as a function of queries and keys that broadcast; the reference and the attention
weights call it. A backend behind the op finds its name and number in the first word of the call's ``spec``,
and its tensors before those of the terms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .terms import Sizes


@dataclass(frozen=True, eq=False)
class AdditiveScore:
    """The score of graph attention networks: ``sum_d weight[h, d] * LeakyReLU(query_d + key_d)``.

    GAT has D = 1, where query and key are ``a_t . x_i`` and ``a_s . x_j``, and no weight. GATv2 has the
    projected features and its vector ``a`` as the weight. It is not scaled unless ``scale`` is given. Kernels
    compute it for edges, so the relation is laid out as such.

    Args:
        weight: [H, D], learnable; None is all ones.
        negative_slope: slope of the LeakyReLU below zero.

    Example:
        >>> import torch
        >>> import attnbias as ab
        >>> ring = ab.Graph([[0, 1, 2], [1, 2, 0]], num_nodes=3)
        >>> to, by = torch.randn(2, 1, 4, 3, 1)  # [B, H, N, 1]
        >>> ab.attention(to, by, torch.randn(1, 4, 3, 16), ring, score=ab.AdditiveScore()).shape
        torch.Size([1, 4, 3, 16])
    """

    weight: Tensor | None = None
    negative_slope: float = 0.2

    def pairs(self, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """The scores of queries and keys [..., D], which broadcast together; ``h`` [...] are their heads."""
        lifted = torch.nn.functional.leaky_relu(query + key, self.negative_slope)
        return lifted.sum(-1) if self.weight is None else (lifted * self.weight.to(lifted)[h]).sum(-1)

    def check(self, sizes: Sizes, size: int) -> None:
        """Raise, naming what does not fit, unless the score is for these sizes and head size."""
        slope, weight = self.negative_slope, self.weight
        if isinstance(slope, bool) or not isinstance(slope, (int, float)) or not math.isfinite(slope):
            raise ValueError(f"score: AdditiveScore.negative_slope: wanted a finite number, got {slope!r}")
        if weight is None:
            return
        wanted = f"a floating-point tensor [H, D] = [{sizes.heads}, {size}]"
        if not isinstance(weight, Tensor) or not weight.is_floating_point():
            got = weight.dtype if isinstance(weight, Tensor) else f"{type(weight).__name__} {weight!r}"
            raise TypeError(f"score: AdditiveScore.weight: wanted {wanted}, got {got}")
        if weight.shape != (sizes.heads, size):
            raise ValueError(f"score: AdditiveScore.weight: wanted {wanted}, got {list(weight.shape)}")
        if weight.device != sizes.device:
            raise ValueError(
                f"score: AdditiveScore.weight: wanted the query's device, {sizes.device}, got {weight.device}"
            )

    def make(self, sizes: Sizes, size: int) -> tuple[str, list[Tensor]]:
        """The word for ``spec``, and the tensors."""
        weight = torch.ones((), device=sizes.device) if self.weight is None else self.weight
        return f"additive={float(self.negative_slope)!r}", [weight.to(sizes.dtype).expand(sizes.heads, size)]


@dataclass(frozen=True)
class MadeScore:
    """Stands for a score whose word was made while a call was traced; a backend is chosen by it."""

    word: str
