"""Queries of a relation in another order, some left out, some more than once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..arguments import as_indices
from ..sets.bound import Bound, Place
from ..sets.intervals import count_groups
from ..sets.predicate import Predicate
from .algebra import Moved
from .relation import Relation
from .value import kept


class Picked(Moved):
    """Some queries of a relation, each pair once: query i is its query ``query[i]``.

    Args:
        relation: relates the queries that are picked.
        query: [n], their numbers; -1 is a query without keys.
        first: position of query number 0.

    Example:
        >>> import attnbias as ab
        >>> from attnbias.relations.picked import Picked
        >>> print(Picked(ab.Causal(), [2, 0, 0, -1, 1]).picture(5, 3))
        ###
        #..
        #..
        ...
        ##.
    """

    query: Tensor
    first: int = 0
    stationary = False
    repeats = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "query", as_indices("query", self.query, (1,)))
        super().__post_init__()

    @property
    def lengths(self) -> tuple[int, int | None]:
        return len(self.query), self.relation.lengths[1]

    @kept
    def _reach(self) -> tuple[int, int]:
        """The least number that is picked, and how many there are from it to the greatest."""
        there = self.query[self.query >= 0]
        if not len(there):
            return 0, 0
        first = int(there.min())
        return first, int(there.max()) + 1 - first

    def _check(self, at: Place) -> None:
        Relation._check(self, at)
        least, count = self._reach
        self.relation._check(at._replace(q_start=self.first + least, q_len=count))

    def multiplicity(self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None) -> None:
        return None

    def _source(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        query = self.query.to(q.device)
        if not len(query):
            return q, k, q < 0
        number = query[q.clamp(0, len(query) - 1)]
        exists = (q >= 0) & (q < len(query)) & (number >= 0)
        return torch.where(exists, number, self._reach[0]) + self.first, k, exists

    def _move(self, at: Place) -> Bound | None:
        least, count = self._reach
        inner = self.relation._bind(at._replace(q_start=self.first + least, q_len=count))
        if isinstance(inner.solid, Predicate):
            return None
        picked = self.query.cpu().numpy()[at.q_start : at.q_start + at.q_len]
        edges = None if inner.edges is None else inner.edges.distinct()

        def take(form: Any) -> Any:
            if form is None:
                return None
            rows = np.arange(count_groups(form.group))[:, None] * count + (picked - least)
            rows = np.where(picked >= 0, rows, form.rows).reshape(-1)
            return form.with_empty_row().take_rows(rows, at.q_len)

        edges = take(edges)
        return Bound(take(inner.solid), edges and replace(edges, id=np.arange(len(edges.key))))
