"""Some batches and heads of a relation that is made for more."""

from __future__ import annotations

import torch
from torch import Tensor

from ..sets.bound import Bound, Place
from .algebra import Compound
from .relation import Relation
from .value import integer


class Portion(Compound):
    """The batches and heads from a first one on: what one rank of a mesh computes. Use :func:`portion_of`."""

    whole: Relation
    first_batch: int = integer()
    batches: int = integer()
    first_head: int = integer()
    heads: int = integer()

    @property
    def inner(self) -> tuple[Relation]:
        return (self.whole,)

    @property
    def batch_size(self) -> int:
        return 1 if self.whole.batch_size == 1 else self.batches

    @property
    def head_count(self) -> int:
        return 1 if self.whole.head_count == 1 else self.heads

    @property
    def listed(self) -> bool:
        return self.whole.listed

    def related(self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        return self.whole.related(q, k, *self._in_whole(q, b, h))

    def multiplicity(
        self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None
    ) -> Tensor | None:
        return self.whole.multiplicity(q, k, *self._in_whole(q, b, h))

    def _in_whole(self, q: Tensor, b: Tensor | None, h: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the numbers of batches and heads in the whole."""
        none = torch.zeros((), dtype=torch.int64, device=q.device)
        b, h = none if b is None else b, none if h is None else h
        firsts = self._firsts
        return b + firsts[0], h + firsts[1]

    @property
    def _firsts(self) -> tuple[int, int]:
        batch = 0 if self.whole.batch_size == 1 else self.first_batch
        return batch, 0 if self.whole.head_count == 1 else self.first_head

    def _check(self, at: Place) -> None:
        Relation._check(self, at)
        self.whole._check(at._replace(batch=None, heads=None))

    def _bind(self, at: Place) -> Bound:
        batch, heads = (
            stop if size is None else size
            for size, stop in (
                (self.whole.batch_size, self.first_batch + self.batches),
                (self.whole.head_count, self.first_head + self.heads),
            )
        )
        bound = self.whole._bind(at._replace(batch=batch, heads=heads))
        return bound.narrow(self.first_batch, self.batches, self.first_head, self.heads)


def portion_of(whole: Relation, first_batch: int, batches: int, first_head: int, heads: int) -> Relation:
    """Return some batches and heads of a relation; itself where it tells none apart.

    It is made once for each relation, so that its layouts are kept.
    """
    if whole.batch_size == 1 and whole.head_count == 1:
        return whole
    made: dict[tuple[int, ...], Relation] = whole.__dict__.setdefault("_portions_", {})
    key = first_batch, batches, first_head, heads
    if key not in made:
        made[key] = Portion(whole, *key)
    return made[key]
