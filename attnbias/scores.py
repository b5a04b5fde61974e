"""Scores other than the dot product: what ``attention(..., score=)`` takes.

A score is written once, as a function of queries and keys; the reference and the attention weights call it.
Through the op it goes as the first word of ``spec``, its name and numbers, with its tensors before those of
the terms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from .multilevel import MultiLevel
from .terms import KernelTerm, Sizes, why_not_parts

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


Score: TypeAlias = AdditiveScore | MultiLevel


def read_score(spec: str, terms: Sequence[Tensor]) -> tuple[Score | None, int]:
    """The score that ``spec`` begins with, None = the dot product, and how many tensors are its own."""
    name, is_score, numbers = spec.partition(" ")[0].partition("=")
    if not is_score:
        return None, 0
    if name == "levels":
        return MultiLevel.from_key(numbers), 0
    return AdditiveScore(terms[0], float(numbers)), 1


def why_not_terms(terms: Sequence[Term], score: Score | None) -> list[str]:
    """Say, a sentence each, what of the terms has no form that kernels know, alone or with the score."""
    reasons = why_not_parts(terms)
    by_edge = any(isinstance(term, KernelTerm) and term.part == "edge" for term in terms)
    if by_edge and isinstance(score, MultiLevel):
        reasons.append("score: a MultiLevel is computed on tiles, the numbers of an EdgeBias on edges")
    return reasons
