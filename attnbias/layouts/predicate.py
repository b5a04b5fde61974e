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
    """Pairs inside ``bound`` for which ``related(q, k, b, h)`` holds."""

    bound: Intervals  # no pair outside of it is related; its map of groups is this form's
    related: Related
    q_start: int
    stationary: bool = False  # depends on q - k alone: one tile per diagonal is evaluated
    device: str = "cpu"
    _tilings: dict[int, Tiling] = field(default_factory=dict, repr=False)

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
        return replace(self, bound=self.bound.take_groups(group, which), _tilings={})

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
        if self.stationary:
            words_of, which = self._diagonals(tile, row % q_tiles, col, step)
        for first in range(0, len(row), step):
            part = slice(first, first + step)
            words = words_of[which[part]] if self.stationary else self._words(tile, row[part], col[part])
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
        inside = np.arange(tile)
        query = query_tile[:, None, None] * tile + inside[:, None]
        key = col[:, None, None] * tile + inside
        # Positions past the end are never valid: keep the predicate's own look-ups in range.
        query = np.minimum(query, self.q_len - 1) + self.q_start
        return pack_bits(self._evaluate(g[:, None, None], query, np.minimum(key, self.k_len - 1)))

    def _diagonals(
        self, tile: int, query_tile: Ints, col: Ints, step: int
    ) -> tuple[NDArray[np.uint32], Ints]:
        """Words of one tile per distance between query and key tile, and each tile's place there."""
        distance, which = np.unique(query_tile - col, return_inverse=True)
        inside = np.arange(tile)
        words = np.empty((len(distance), tile, tile // 32), np.uint32)
        for first in range(0, len(distance), step):
            part = slice(first, first + step)
            # Only the difference counts, so the key tile may stand at 0 and the query before it.
            query = distance[part, None, None] * tile + inside[:, None] + self.q_start
            words[part] = pack_bits(self._evaluate(np.zeros((1, 1, 1), np.int64), query, inside))
        return words, which

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
