"""Sets of pairs known only by a test on each pair: evaluated piece by piece, never as a whole square."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .intervals import Intervals, Ints, pointer

Related = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

PAIRS_AT_ONCE = 1 << 22  # bounds the memory of one evaluation: a bool per pair, a few int64 on the way


class Positions(NamedTuple):
    """Where queries and keys stand that do not follow one another: some of a larger set."""

    query: Ints  # [q_len], increasing inside of each tile by 1
    key: Ints  # [k_len]


@dataclass(frozen=True, eq=False)
class Predicate:
    """Pairs inside ``bound`` for which ``related(q, k, b, h)`` holds, and those of ``also``.

    Where groups come from several relations, ``parts`` are their own predicates (None: the bound is exact)
    and ``source`` [groups, 2] gives the part of each group and its group there, so that no group is tested
    by another's rule.
    """

    bound: Intervals  # where the rule decides; its map of groups is this form's
    related: Related
    q_start: int
    stationary: bool = False  # depends only on q - k: each distance is evaluated once
    device: str = "cpu"
    parts: tuple[Predicate | None, ...] = ()
    source: Ints | None = None
    also: Intervals | None = None  # pairs outside of the bound that are related, whatever the rule says
    is_implied: bool = False  # the rule holds nowhere outside of the bound
    at: Positions | None = None  # None: query i stands at q_start + i, key j at j

    @property
    def extent(self) -> Intervals:
        """The pairs outside of which none is related."""
        return self.bound if self.also is None else self.bound | self.also

    def unite(self, more: Intervals) -> Predicate:
        """Return these pairs and more."""
        also = more if self.also is None else self.also | more
        return replace(self, bound=self.bound - more, also=also, is_implied=False)

    def intersect(self, form: Intervals) -> Predicate:
        """Return those of these pairs that are in another set."""
        also = None if self.also is None else self.also & form
        return replace(self, bound=self.bound & form, also=also, is_implied=False)

    def invert(self) -> Predicate:
        """Return all other pairs; the rule must depend on q - k only."""
        rule = self.related
        opposite: Related = lambda q, k, b, h: ~rule(q, k, b, h)  # noqa: E731
        return replace(self, related=opposite, also=~self.extent, is_implied=False)

    @property
    def q_len(self) -> int:
        """Queries in a group."""
        return self.bound.q_len

    @property
    def k_len(self) -> int:
        """Keys in a group."""
        return self.bound.k_len

    @property
    def group(self) -> Ints:
        """Map [batch, heads] -> g."""
        return self.bound.group

    def take_groups(self, group: Ints, which: Ints) -> Predicate:
        """Return the same set under another map of groups."""
        source = None if self.source is None else self.source[which]
        also = None if self.also is None else self.also.take_groups(group, which)
        return replace(self, bound=self.bound.take_groups(group, which), source=source, also=also)

    def with_rule(self, bound: Intervals, related: Related, stationary: bool) -> Predicate:
        """Return another set: all pairs inside the bound for which the rule holds."""
        return Predicate(bound, related, self.q_start, stationary, self.device, at=self.at)

    def contains(self, row: Ints, key: Ints) -> NDArray[np.bool_]:
        """Return whether each pair (row, key) is related."""
        g, query = np.divmod(row, max(self.q_len, 1))
        found = self.evaluate(g, query, key) & self.bound.contains(row, key)
        return found if self.also is None else found | self.also.contains(row, key)

    def counts(self) -> Ints:
        """Return the number of related keys in each row, [rows]."""
        counts = self._counts_by_distance() if self.stationary else self._counts_by_pair()
        return counts if self.also is None else counts + self.also.counts()

    def _counts_by_pair(self) -> Ints:
        bound, rows = self.bound, self.bound.rows
        counts = np.zeros(rows, np.int64)
        step = max(1, PAIRS_AT_ONCE // max(self.k_len, 1))
        for first in range(0, rows, step):
            row = np.arange(first, min(first + step, rows))
            g, query = np.divmod(row[:, None], self.q_len)
            found = self.evaluate(g, query, np.arange(self.k_len))
            counts[row] = (found & bound.take_rows(row, len(row)).dense()).sum(1)
        return counts

    def _counts_by_distance(self) -> Ints:
        """Count a rule on q - k: each distance is tested once, and ranges of keys are ranges of distances."""
        bound = self.bound
        position = self.query_at(bound.row % max(self.q_len, 1))
        low, high = position - self.key_at(bound.stop - 1), position - self.key_at(bound.start)
        least = int(low.min(initial=0))
        distance = np.arange(least, int(high.max(initial=-1)) + 1)
        group, key = np.zeros(1, np.int64), np.zeros(1, np.int64)
        below = pointer(self.test(group, distance, key))  # related distances below each
        inside = below[high + 1 - least] - below[low - least]
        return np.bincount(bound.row, weights=inside, minlength=bound.rows).astype(np.int64)

    def query_at(self, query: Ints) -> Ints:
        """Return the positions of queries by their numbers."""
        return query + self.q_start if self.at is None else self.at.query[query]

    def key_at(self, key: Ints) -> Ints:
        """Return the positions of keys by their numbers."""
        return key if self.at is None else self.at.key[key]

    def evaluate(self, g: Ints, query: Ints, key: Ints) -> NDArray[np.bool_]:
        """Return whether the rule holds for queries and keys by their numbers; the three broadcast."""
        return self.test(g, self.query_at(query), self.key_at(key))

    def test(self, g: Ints, query: Ints, key: Ints) -> NDArray[np.bool_]:
        """Return whether the rule holds at these positions; the three broadcast together."""
        batch, head = self._example()
        q, k, b, h = (torch.as_tensor(x, device=self.device) for x in (query, key, batch[g], head[g]))
        value = torch.broadcast_to(
            self.related(q, k, b, h), np.broadcast_shapes(g.shape, query.shape, key.shape)
        )
        return value.cpu().numpy()

    def _example(self) -> tuple[Ints, Ints]:
        """Return one batch and head of each group."""
        _, first = np.unique(self.group, return_index=True)
        batch, head = np.unravel_index(first, self.group.shape)
        return batch.astype(np.int64), head.astype(np.int64)
