"""Sets of pairs known only by a test on each pair: evaluated piece by piece, never as a whole square."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .intervals import Intervals, Ints, pointer

Related = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

PAIRS_AT_ONCE = 1 << 22  # bounds the memory of one evaluation: a bool per pair, a few int64 on the way


@dataclass(frozen=True, eq=False)
class Predicate:
    """Pairs inside ``bound`` for which ``related(q, k, b, h)`` holds.

    Where groups come from several relations, ``parts`` are their own predicates (None: the bound is exact)
    and ``source`` [groups, 2] gives the part of each group and its group there, so that no group is tested
    by another's rule.
    """

    bound: Intervals  # no pair outside of it is related; its map of groups is this form's
    related: Related
    q_start: int
    stationary: bool = False  # depends only on q - k: each distance is evaluated once
    device: str = "cpu"
    parts: tuple[Predicate | None, ...] = ()
    source: Ints | None = None

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
        return replace(self, bound=self.bound.take_groups(group, which), source=source)

    def with_rule(self, bound: Intervals, related: Related, stationary: bool) -> Predicate:
        """Return another set: all pairs inside the bound for which the rule holds."""
        return Predicate(bound, related, self.q_start, stationary, self.device)

    def contains(self, row: Ints, key: Ints) -> NDArray[np.bool_]:
        """Return whether each pair (row, key) is related."""
        g, query = np.divmod(row, max(self.q_len, 1))
        return self.evaluate(g, query + self.q_start, key) & self.bound.contains(row, key)

    def counts(self) -> Ints:
        """Return the number of related keys in each row, [rows]."""
        bound, rows = self.bound, self.bound.rows
        if self.stationary:
            return self._counts_by_distance()
        counts = np.zeros(rows, np.int64)
        step = max(1, PAIRS_AT_ONCE // max(self.k_len, 1))
        for first in range(0, rows, step):
            row = np.arange(first, min(first + step, rows))
            g, query = np.divmod(row[:, None], self.q_len)
            found = self.evaluate(g, query + self.q_start, np.arange(self.k_len))
            counts[row] = (found & bound.take_rows(row, len(row)).dense()).sum(1)
        return counts

    def _counts_by_distance(self) -> Ints:
        """Count a rule on q - k: each distance is tested once, and ranges of keys are ranges of distances."""
        bound = self.bound
        least = self.q_start - self.k_len  # one below the smallest distance
        distance = np.arange(least + 1, self.q_start + self.q_len)
        group, key = np.zeros(1, np.int64), np.zeros(1, np.int64)
        below = pointer(self.evaluate(group, distance, key))  # related distances up to each
        position = bound.row % max(self.q_len, 1) + self.q_start
        inside = below[position - bound.start - least] - below[position - bound.stop - least]
        return np.bincount(bound.row, weights=inside, minlength=bound.rows).astype(np.int64)

    def evaluate(self, g: Ints, query: Ints, key: Ints) -> NDArray[np.bool_]:
        """Return whether the rule holds for queries at these positions; the three broadcast together."""
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
