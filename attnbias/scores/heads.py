"""Terms and scores of some of the heads that they were given for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from .additive import AdditiveScore, Score
from .terms import KernelTerm, Sizes, Term


@dataclass(frozen=True, eq=False)
class _Heads(KernelTerm):
    """A kernel term of the heads from ``first`` on, which is given for ``total`` heads."""

    term: KernelTerm
    first: int
    total: int

    @property
    def part(self) -> str:  # type: ignore[override]
        """That of the term."""
        return self.term.part

    @property
    def edges(self) -> int | None:  # type: ignore[override]
        """Those of the term."""
        return self.term.edges

    def value(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """See :class:`Term`."""
        return self.term.value(b, h + self.first, q, k)

    def check(self, sizes: Sizes) -> None:
        """See :class:`KernelTerm`."""
        self.term.check(sizes._replace(heads=self.total))

    def make_part(self, sizes: Sizes) -> Tensor:
        """See :class:`KernelTerm`; every part has its heads in dimension 1."""
        made = self.term.make_part(sizes._replace(heads=self.total))
        return made.narrow(1, self.first, sizes.heads) if made.shape[1] == self.total > 1 else made

    @property
    def shape(self) -> tuple[int, ...] | None:
        """That of a grid."""
        return getattr(self.term, "shape", None)

    def codes(self, sizes: Sizes) -> tuple[Tensor, Tensor] | None:
        """See :class:`KernelTerm`."""
        return self.term.codes(sizes)


@dataclass(frozen=True, eq=False)
class _Defined:
    """A term that has only a definition, of heads from ``first`` on."""

    term: Term
    first: int

    def value(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """See :class:`Term`."""
        return self.term.value(b, h + self.first, q, k)


def terms_of_heads(terms: Sequence[Term], first: int, total: int) -> list[Term]:
    """Return the terms of the heads from ``first`` on, where they are given for ``total`` heads."""
    return [
        _Heads(term, first, total) if isinstance(term, KernelTerm) else _Defined(term, first)
        for term in terms
    ]


def score_of_heads(score: Score | None, heads: slice) -> Score | None:
    """Return the score of some of the heads."""
    if isinstance(score, AdditiveScore) and score.weight is not None:
        return replace(score, weight=score.weight[heads])
    return score
