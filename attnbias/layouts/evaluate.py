"""Predicates tile by tile: which tiles are empty, full or partial, and the bits of the partial ones."""

from __future__ import annotations

import numpy as np

from ..sets.intervals import Intervals, Ints
from ..sets.predicate import PAIRS_AT_ONCE, Predicate
from .tiles import PatternBook, Tiling, Words, coarsen, interval_words, pack_bits


def tile_predicate(form: Predicate, tile: int) -> Tiling:
    """Evaluate every tile that the predicate's bound touches."""
    touched, _ = coarsen(form.extent, tile)
    covered = coarsen(form.bound, tile)[1]
    row, col = touched.pairs()
    full, partial = np.zeros((2, len(row)), bool)
    mark = np.zeros(len(row), np.int64)
    book, bits = PatternBook(tile), _Bits(form, tile)
    step = max(1, PAIRS_AT_ONCE // tile**2)
    q_tiles = -(-form.q_len // tile)
    for first in range(0, len(row), step):
        part = slice(first, first + step)
        valid = book.valid_words(form.q_len, form.k_len, row[part] % q_tiles, col[part])
        words = bits.of(row[part], col[part]) & _bound_bits(form, tile, row[part], col[part], covered)
        if form.also is not None:
            words |= interval_words(form.also, tile, row[part], col[part])
        words &= valid
        empty = ~words.any(axis=(1, 2))
        full[part] = (words == valid).all(axis=(1, 2))
        partial[part] = ~full[part] & ~empty
        mark[part][partial[part]] = book.add(words[partial[part]])
    solid = touched.from_ranges(row[full], col[full], col[full] + 1)
    return Tiling(tile, form.q_len, form.k_len, solid, row[partial], col[partial], mark[partial], book)


def _bound_bits(form: Predicate, tile: int, row: Ints, col: Ints, covered: Intervals) -> Words:
    """Return the bits of the predicate's bound in each tile; all ones where it covers the whole tile."""
    words = np.full((len(row), tile, tile // 32), 0xFFFFFFFF, np.uint32)
    edge = ~covered.contains(row, col)
    if edge.any():
        words[edge] = interval_words(form.bound, tile, row[edge], col[edge])
    return words


class _Bits:
    """The bits of a predicate's rule in tiles of one size, whatever its bound."""

    def __init__(self, form: Predicate, tile: int) -> None:
        self.form, self.tile = form, tile
        self.parts = [None if part is None else _Bits(part, tile) for part in form.parts]
        self.diagonals: dict[int, Words] = {}  # of a rule on q - k: by the distance of the first pair

    def of(self, row: Ints, col: Ints) -> Words:
        """Return the bits in each tile; ``row`` numbers tile rows."""
        form, tile = self.form, self.tile
        g, query_tile = np.divmod(row, max(-(-form.q_len // tile), 1))
        if form.source is not None:
            return self._of_parts(form.source[g], query_tile, col)
        if form.stationary:
            return self._of_diagonals(form.query_at(query_tile * tile) - form.key_at(col * tile))
        inside = np.arange(tile)
        query = query_tile[:, None, None] * tile + inside[:, None]
        key = col[:, None, None] * tile + inside
        # Positions past the end are never valid: keep the rule's own look-ups in range.
        query = np.minimum(query, form.q_len - 1)
        return pack_bits(form.evaluate(g[:, None, None], query, np.minimum(key, form.k_len - 1)))

    def _of_parts(self, source: Ints, query_tile: Ints, col: Ints) -> Words:
        """Return the bits by the rule of the part that each tile's group comes from."""
        words = np.full((len(col), self.tile, self.tile // 32), 0xFFFFFFFF, np.uint32)
        q_tiles = -(-self.form.q_len // self.tile)
        for number, part in enumerate(self.parts):
            mine = source[:, 0] == number
            if part is not None and mine.any():
                words[mine] = part.of(source[mine, 1] * q_tiles + query_tile[mine], col[mine])
        return words

    def _of_diagonals(self, distance: Ints) -> Words:
        """Return the bits of a rule on q - k: each distance of tiles is tested once."""
        inside, group = np.arange(self.tile), np.zeros((1, 1), np.int64)
        distinct, which = np.unique(distance, return_inverse=True)
        for each in distinct.tolist():
            if each not in self.diagonals:
                # Only the difference counts, so the key tile may be at 0 and the query before it.
                self.diagonals[each] = pack_bits(self.form.test(group, each + inside[:, None], inside))
        return np.stack([self.diagonals[each] for each in distinct.tolist()])[which.reshape(-1)]
