"""Terms and scores of some of the heads and batches that they were given for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from .additive import AdditiveScore, Score
from .terms import KernelTerm, Sizes, Term

Axis = Literal["batch", "heads"]


@dataclass(frozen=True, eq=False)
class _Some(KernelTerm):
    """A kernel term of the heads or batches from ``first`` on, which is given for ``total`` of them."""

    term: KernelTerm
    axis: Axis
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
        return self.term.value(*_in_whole(self, b, h), q, k)

    def check(self, sizes: Sizes) -> None:
        """See :class:`KernelTerm`."""
        self.term.check(self._whole(sizes))

    def make_part(self, sizes: Sizes) -> Tensor:
        """See :class:`KernelTerm`; parts have batches in dimension 0, if at all, and heads in dimension 1."""
        return self._narrow(self.term.make_part(self._whole(sizes)), sizes)

    def make_slopes(self, sizes: Sizes) -> Tensor | None:
        """See :class:`KernelTerm`."""
        made = self.term.make_slopes(self._whole(sizes))
        return None if made is None else self._narrow(made, sizes)

    def _narrow(self, made: Tensor, sizes: Sizes) -> Tensor:
        """Return its own batches or heads."""
        dim = 1 if self.axis == "heads" else 0
        if made.shape[dim] == 1 or (dim == 0 and self.part == "edge"):
            return made
        return made.narrow(dim, self.first, getattr(sizes, self.axis))

    def _whole(self, sizes: Sizes) -> Sizes:
        """Return the sizes that the term is given for."""
        is_heads = self.axis == "heads"
        return sizes._replace(heads=self.total) if is_heads else sizes._replace(batch=self.total)

    @property
    def shape(self) -> tuple[int, ...] | None:
        """That of a grid."""
        return getattr(self.term, "shape", None)

    def codes(self, sizes: Sizes) -> tuple[Tensor, Tensor] | None:
        """See :class:`KernelTerm`."""
        return self.term.codes(sizes)


@dataclass(frozen=True, eq=False)
class _Defined:
    """A term that has only a definition, of the heads or batches from ``first`` on."""

    term: Term
    axis: Axis
    first: int

    def value(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """See :class:`Term`."""
        return self.term.value(*_in_whole(self, b, h), q, k)


def _in_whole(some: _Some | _Defined, b: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers of batches and heads in what the term was given for."""
    return (b, h + some.first) if some.axis == "heads" else (b + some.first, h)


def change_inner(term: KernelTerm, change: Callable[[KernelTerm], KernelTerm]) -> KernelTerm:
    """Return a term with the one changed that it takes some heads and batches of, if it does."""
    return replace(term, term=change_inner(term.term, change)) if isinstance(term, _Some) else change(term)


def terms_of_heads(terms: Sequence[Term], first: int, total: int) -> list[Term]:
    """Return the terms of the heads from ``first`` on, where they are given for ``total`` heads."""
    return _take("heads", terms, first, total)


def terms_of_batches(terms: Sequence[Term], first: int, total: int) -> list[Term]:
    """Return the terms of the batches from ``first`` on, where they are given for ``total`` batches."""
    return _take("batch", terms, first, total)


def _take(axis: Axis, terms: Sequence[Term], first: int, total: int) -> list[Term]:
    return [
        _Some(term, axis, first, total) if isinstance(term, KernelTerm) else _Defined(term, axis, first)
        for term in terms
    ]


def score_of_heads(score: Score | None, heads: slice) -> Score | None:
    """Return the score of some of the heads."""
    if isinstance(score, AdditiveScore) and score.weight is not None:
        return replace(score, weight=score.weight[heads])
    return score
