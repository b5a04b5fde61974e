"""The score of graph attention networks, and which scores and terms kernels know together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from .multilevel import MultiLevel
from .terms import KernelTerm, Sizes, check_tensor, why_not_parts

if TYPE_CHECKING:
    from .terms import Term


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
        """Return the scores of queries and keys [..., D], which broadcast; ``h`` [...] are their heads."""
        lifted = torch.nn.functional.leaky_relu(query + key, self.negative_slope)
        return lifted.sum(-1) if self.weight is None else (lifted * self.weight.to(lifted)[h]).sum(-1)

    def check(self, sizes: Sizes, size: int) -> None:
        """Raise, naming what does not fit, unless the score is for these sizes and head size."""
        slope = self.negative_slope
        if isinstance(slope, bool) or not isinstance(slope, (int, float)) or not math.isfinite(slope):
            raise ValueError(f"score: AdditiveScore.negative_slope: wanted a finite number, got {slope!r}")
        if self.weight is not None:
            check_tensor("score: AdditiveScore.weight", self.weight, sizes, "H D", D=size)

    def make_weight(self, sizes: Sizes, size: int) -> Tensor:
        """Return the weight as kernels read it, [H, D]."""
        weight = torch.ones((), device=sizes.device) if self.weight is None else self.weight
        return weight.to(sizes.dtype).expand(sizes.heads, size)


Score: TypeAlias = AdditiveScore | MultiLevel


def why_not_terms(terms: Sequence[Term], score: Score | None) -> list[str]:
    """Return a sentence for each reason why kernels do not know the terms, or not with this score."""
    reasons = why_not_parts(terms)
    by_edge = any(isinstance(term, KernelTerm) and term.part == "edge" for term in terms)
    if by_edge and isinstance(score, MultiLevel):
        reasons.append("score: a MultiLevel is computed on tiles, the numbers of an EdgeBias on edges")
    return reasons
