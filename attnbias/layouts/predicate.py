"""Sets of pairs known only by a test on each pair: evaluated tile by tile, never as a whole square."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .intervals import Intervals, Ints
from .tiles import PatternBook, Tiling, coarsen, interval_words, pack_bits

Related = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

_PAIRS_AT_ONCE = 1 << 22  # bounds the memory of one evaluation: a bool per pair, a few int64 on the way


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
    stationary: bool = False  # depends on q - k alone: one tile per diagonal is evaluated
    device: str = "cpu"
    parts: tuple[Predicate | None, ...] = ()
    source: Ints | None = None
    _tilings: dict[int, Tiling] = field(default_factory=dict, repr=False)
    _diagonals: dict[tuple[int, int], NDArray[np.uint32]] = field(default_factory=dict, repr=False)

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
        """The same set under another map of groups."""
        source = None if self.source is None else self.source[which]
        return replace(self, bound=self.bound.take_groups(group, which), source=source, _tilings={})

    def with_rule(self, bound: Intervals, related: Related, stationary: bool) -> Predicate:
        """Another set: all pairs inside the bound for which the rule holds."""
        return Predicate(bound, related, self.q_start, stationary, self.device)

    def contains(self, row: Ints, key: Ints) -> NDArray[np.bool_]:
        """Whether each pair (row, key) is related."""
        g, query = np.divmod(row, max(self.q_len, 1))
        return self._evaluate(g, query + self.q_start, key) & self.bound.contains(row, key)

    def tiling(self, tile: int) -> Tiling:
        """Evaluate every tile that ``bound`` touches, once per tile size."""
        if tile not in self._tilings:
            self._tilings[tile] = self._tile(tile)
        return self._tilings[tile]

    def _tile(self, tile: int) -> Tiling:
        touched, covered = coarsen(self.bound, tile)
        row, col = touched.pairs()
        partial = np.zeros(len(row), bool)
        mark = np.zeros(len(row), np.int64)
        full = np.zeros(len(row), bool)
        book = PatternBook(tile)
        step = max(1, _PAIRS_AT_ONCE // tile**2)
        q_tiles = -(-self.q_len // tile)
        for first in range(0, len(row), step):
            part = slice(first, first + step)
            words = self._words(tile, row[part], col[part])
            valid = book.valid_words(self.q_len, self.k_len, row[part] % q_tiles, col[part])
            words = words & valid & self._bound_words(tile, row[part], col[part], covered)
            empty = ~words.any(axis=(1, 2))
            full[part] = (words == valid).all(axis=(1, 2))
            partial[part] = ~full[part] & ~empty
            mark[part][partial[part]] = book.add(words[partial[part]])
        solid = touched.from_ranges(row[full], col[full], col[full] + 1)
        return Tiling(tile, self.q_len, self.k_len, solid, row[partial], col[partial], mark[partial], book)

    def _bound_words(self, tile: int, row: Ints, col: Ints, covered: Intervals) -> NDArray[np.uint32]:
        """Bits of ``bound`` in each tile; all ones where it covers the whole tile."""
        words = np.full((len(row), tile, tile // 32), 0xFFFFFFFF, np.uint32)
        edge = ~covered.contains(row, col)
        if edge.any():
            words[edge] = interval_words(self.bound, tile, row[edge], col[edge])
        return words

    def _words(self, tile: int, row: Ints, col: Ints) -> NDArray[np.uint32]:
        """Bits of the predicate in each tile (rows are tile rows), unbounded."""
        g, query_tile = np.divmod(row, max(-(-self.q_len // tile), 1))
        if self.source is not None:
            return self._words_of_parts(tile, self.source[g], query_tile, col)
        if self.stationary:
            return self._words_of_diagonals(tile, query_tile - col)
        inside = np.arange(tile)
        query = query_tile[:, None, None] * tile + inside[:, None]
        key = col[:, None, None] * tile + inside
        # Positions past the end are never valid: keep the predicate's own look-ups in range.
        query = np.minimum(query, self.q_len - 1) + self.q_start
        return pack_bits(self._evaluate(g[:, None, None], query, np.minimum(key, self.k_len - 1)))

    def _words_of_parts(self, tile: int, source: Ints, query_tile: Ints, col: Ints) -> NDArray[np.uint32]:
        """Bits by the rule of the part that each tile's group comes from."""
        words = np.full((len(col), tile, tile // 32), 0xFFFFFFFF, np.uint32)
        q_tiles = -(-self.q_len // tile)
        for number, part in enumerate(self.parts):
            mine = source[:, 0] == number
            if part is not None and mine.any():
                row = source[mine, 1] * q_tiles + query_tile[mine]
                words[mine] = part._words(tile, row, col[mine])
        return words

    def _words_of_diagonals(self, tile: int, distance: Ints) -> NDArray[np.uint32]:
        """Bits of a rule on q - k alone: each distance between query and key tile is tested once."""
        inside = np.arange(tile)
        group = np.zeros((1, 1), np.int64)
        distinct, which = np.unique(distance, return_inverse=True)
        for each in distinct.tolist():
            if (tile, each) not in self._diagonals:
                # Only the difference counts, so the key tile may stand at 0 and the query before it.
                query = each * tile + inside[:, None] + self.q_start
                self._diagonals[tile, each] = pack_bits(self._evaluate(group, query, inside))
        return np.stack([self._diagonals[tile, each] for each in distinct.tolist()])[which.reshape(-1)]

    def _evaluate(self, g: Ints, query: Ints, key: Ints) -> NDArray[np.bool_]:
        batch, head = self._example()
        q, k, b, h = (torch.as_tensor(x, device=self.device) for x in (query, key, batch[g], head[g]))
        value = torch.broadcast_to(
            self.related(q, k, b, h), np.broadcast_shapes(g.shape, query.shape, key.shape)
        )
        return value.cpu().numpy()

    def _example(self) -> tuple[Ints, Ints]:
        """One (batch, head) of each group."""
        _, first = np.unique(self.group, return_index=True)
        batch, head = np.unravel_index(first, self.group.shape)
        return batch.astype(np.int64), head.astype(np.int64)
