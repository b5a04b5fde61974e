"""From exact sets of keys to tiles: which are empty, full or partial, and the bits of the partial ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..sets.edges import Edges
from ..sets.intervals import Intervals, Ints, count_groups

Words = NDArray[np.uint32]  # [n, tile, tile / 32]: bit j of word w of row r is key 32 w + j


class PatternBook:
    """The distinct bit patterns of a layout: equal ones are stored once."""

    def __init__(self, tile: int) -> None:
        self.tile = tile
        self._places: dict[bytes, int] = {}

    def add(self, words: Words) -> Ints:
        """Store the patterns [n, tile, tile/32] that are new; the number of each, [n]."""
        if not len(words):
            return np.zeros(0, np.int64)
        flat = np.ascontiguousarray(words).reshape(len(words), -1)
        # Equal neighbours are common (a window repeats its three tiles): look each run up once.
        print_ = fingerprint(flat)
        _, first, inverse = np.unique(print_, return_index=True, return_inverse=True)
        if not (flat == flat[first[inverse]]).all():
            first = inverse = np.arange(len(flat))
        places = [self._places.setdefault(flat[i].tobytes(), len(self._places)) for i in first.tolist()]
        return np.array(places, np.int64)[inverse]

    def words(self) -> Words:
        """All patterns, in the order of their numbers."""
        flat = np.frombuffer(b"".join(self._places), np.uint32)
        return flat.reshape(-1, self.tile, self.tile // 32)

    def valid_words(self, q_len: int, k_len: int, query_tile: Ints, key_tile: Ints) -> Words:
        """Bits of the pairs that exist: all ones but in the tiles at the ends."""
        tile = self.tile
        words = np.full((len(query_tile), tile, tile // 32), 0xFFFFFFFF, np.uint32)
        ragged = (key_tile + 1) * tile > k_len
        if ragged.any():
            words[ragged] = bits_below(np.full(tile, k_len - (k_len // tile) * tile))
        ragged = (query_tile + 1) * tile > q_len
        if ragged.any():
            words[ragged, q_len - (q_len // tile) * tile :] = 0
        return words


@dataclass(frozen=True, eq=False)
class Tiling:
    """A set of pairs as tiles. Tile rows are numbered ``g * q_tiles + query tile``."""

    tile: int
    q_len: int
    k_len: int
    covered: Intervals  # tiles whose existing pairs are all related, as ranges of key tiles
    row: Ints  # [n] partial tiles in order of (row, col)
    col: Ints  # [n]
    mark: Ints  # [n], number in ``book``; empty until the patterns are made
    book: PatternBook

    def counts(self) -> tuple[Ints, Ints]:
        """Covered and partial tiles in each tile row."""
        return self.covered.counts(), np.bincount(self.row, minlength=self.covered.rows)

    def pairs(self) -> Ints:
        """Related pairs in each tile row; needs the patterns."""
        per_pattern = unpack_bits(self.book.words()).sum((1, 2))
        row, col = self.covered.pairs()
        q_tiles = max(self.covered.q_len, 1)
        height = np.minimum(self.q_len - row % q_tiles * self.tile, self.tile)
        area = height * np.minimum(self.k_len - col * self.tile, self.tile)
        rows = np.concatenate((row, self.row))
        weight = np.concatenate((area, per_pattern[self.mark]))
        return np.bincount(rows, weights=weight, minlength=self.covered.rows).astype(np.int64)

    def decode(self) -> tuple[Ints, Ints]:
        """Every pair as (row, key); needs the patterns."""
        row, col = self.covered.pairs()
        q_tiles = max(self.covered.q_len, 1)
        full = self.book.valid_words(self.q_len, self.k_len, row % q_tiles, col)
        words = np.concatenate((full, self.book.words()[self.mark]))
        row, col = np.concatenate((row, self.row)), np.concatenate((col, self.col))
        found = [
            (first + entry, inner, key)
            for first in range(0, len(words), 256)
            for entry, inner, key in [np.nonzero(unpack_bits(words[first : first + 256]))]
        ]
        entry, inner, key = map(np.concatenate, zip((row[:0],) * 3, *found, strict=True))
        g, query_tile = np.divmod(row[entry], q_tiles)
        return g * self.q_len + query_tile * self.tile + inner, col[entry] * self.tile + key

    def keep(self, rows: NDArray[np.bool_]) -> Tiling:
        """Only the tile rows where ``rows`` is true."""
        kept = rows[self.row]
        inside = rows[self.covered.row]
        covered = self.covered.from_ranges(
            self.covered.row[inside], self.covered.start[inside], self.covered.stop[inside]
        )
        mark = self.mark[kept] if len(self.mark) else self.mark
        return replace(self, covered=covered, row=self.row[kept], col=self.col[kept], mark=mark)


def coarsen(form: Intervals, tile: int) -> tuple[Intervals, Intervals]:
    """Tiles in which some pair is related, and tiles in which every existing pair is."""
    q_tiles, k_tiles = -(-form.q_len // tile), -(-form.k_len // tile)
    blank = Intervals.empty(q_tiles, k_tiles, form.group)
    touched = blank.from_ranges(
        tile_rows(form.row, form.q_len, tile), form.start // tile, -(-form.stop // tile)
    )
    # A key tile cut short by the last key is covered when its existing keys are.
    if form.single:
        low, high = -(-form.single[0] // tile), _last_tile(form.single[1], form.k_len, tile)
        first = np.arange(0, form.q_len, tile) + form.q_len * np.arange(count_groups(form.group))[:, None]
        low = np.maximum.reduceat(low, first.reshape(-1)) if form.rows else low
        high = np.minimum.reduceat(high, first.reshape(-1)) if form.rows else high
        covered = replace(Intervals.one_per_row(q_tiles, k_tiles, low, high), group=form.group)
        return touched, covered
    by_row = Intervals.empty(form.q_len, k_tiles, form.group).from_ranges(
        form.row, -(-form.start // tile), _last_tile(form.stop, form.k_len, tile)
    )
    spoilt = ~by_row
    spoilt = blank.from_ranges(tile_rows(spoilt.row, form.q_len, tile), spoilt.start, spoilt.stop)
    return touched, ~spoilt


def _last_tile(stop: Ints, k_len: int, tile: int) -> Ints:
    return np.where(stop == k_len, -(-k_len // tile), stop // tile)


def tile_rows(row: Ints, q_len: int, tile: int) -> Ints:
    """The tile row of each row."""
    if q_len % tile == 0:
        return row // tile
    g, query = np.divmod(row, max(q_len, 1))
    of_tile: Ints = g * -(-q_len // tile) + query // tile
    return of_tile


def tile_intervals(form: Intervals, tile: int) -> Tiling:
    """Tiles of a set of ranges; the patterns are left to :func:`mark_intervals`."""
    touched, covered = coarsen(form, tile)
    row, col = (touched - covered).pairs()
    return Tiling(tile, form.q_len, form.k_len, covered, row, col, row[:0], PatternBook(tile))


def tile_edges(form: Edges, tile: int) -> Tiling:
    """Tiles of a set of edges; the patterns are left to :func:`mark_edges`."""
    form = form.distinct()
    k_tiles = max(-(-form.k_len // tile), 1)
    q_tiles = max(-(-form.q_len // tile), 1)
    place = tile_rows(form.row, form.q_len, tile) * k_tiles + form.key // tile
    place, pairs = np.unique(place, return_counts=True)
    row, col = np.divmod(place, k_tiles)
    height = np.minimum(form.q_len - row % q_tiles * tile, tile)
    full = pairs == height * np.minimum(form.k_len - col * tile, tile)
    covered = Intervals.empty(-(-form.q_len // tile), -(-form.k_len // tile), form.group)
    covered = covered.from_ranges(row[full], col[full], col[full] + 1)
    row, col = row[~full], col[~full]
    return Tiling(tile, form.q_len, form.k_len, covered, row, col, row[:0], PatternBook(tile))


def no_tiles(tile: int, form: Edges) -> Tiling:
    """The tiling of a set of pairs that are all edges."""
    covered = Intervals.empty(-(-form.q_len // tile), -(-form.k_len // tile), form.group)
    none = np.zeros(0, np.int64)
    return Tiling(tile, form.q_len, form.k_len, covered, none, none, none, PatternBook(tile))


_ROWS_AT_ONCE = 1 << 19  # bounds the memory of one step over partial tiles and their rows


def mark_intervals(form: Intervals, tiling: Tiling) -> Tiling:
    """Number the patterns of the partial tiles of a set of ranges."""
    mark = np.empty(len(tiling.row), np.int64)
    step = max(1, _ROWS_AT_ONCE // tiling.tile)
    number = _mark if form.single is None else _mark_single
    for first in range(0, len(mark), step):
        part = slice(first, first + step)
        mark[part] = number(form, tiling, tiling.row[part], tiling.col[part])
    return replace(tiling, mark=mark)


def _mark(form: Intervals, tiling: Tiling, row: Ints, col: Ints) -> Ints:
    """Number patterns by their clipped ranges, so that only distinct ones become bits."""
    tile = tiling.tile
    cell, low, high = clipped_ranges(form, tile, row, col)
    begin = np.searchsorted(cell, np.arange(len(row)) * tile)
    place, of_range = cell % tile, low * (tile + 1) + high
    sums = [
        np.add.reduceat(ranges[of_range] * rows[place], begin)
        for ranges, rows in zip(*_hashes(tile), strict=True)
    ]
    example, which = _distinct(sums)
    return tiling.book.add(interval_words(form, tile, row[example], col[example]))[which]


def _mark_single(form: Intervals, tiling: Tiling, row: Ints, col: Ints) -> Ints:
    """Do the same for at most one range per row, with a cell for every row of a tile."""
    tile = tiling.tile
    assert form.single is not None
    q_tiles = max(-(-form.q_len // tile), 1)
    g, query_tile = np.divmod(row, q_tiles)
    query = query_tile[:, None] * tile + np.arange(tile)
    source = g[:, None] * form.q_len + np.minimum(query, form.q_len - 1)  # [n, tile]
    edge = (col * tile)[:, None]
    low = np.clip(form.single[0][source] - edge, 0, tile)
    high = np.clip(form.single[1][source] - edge, 0, tile)
    high[query >= form.q_len] = 0
    code = np.where(low < high, low * (tile + 1) + high, 0)
    sums = [(ranges[code] * rows).sum(1) for ranges, rows in zip(*_hashes(tile), strict=True)]
    example, which = _distinct(sums)
    offset = np.arange(0, tile, 32)
    words = _below(high[example, :, None] - offset) & ~_below(low[example, :, None] - offset)
    return tiling.book.add(words)[which]


def _distinct(sums: list[NDArray[np.uint64]]) -> tuple[Ints, Ints]:
    """One example of each pair of sums, and which of them each is."""
    _, example, which = np.unique(sums[0], return_index=True, return_inverse=True)
    if not np.array_equal(sums[1], sums[1][example][which]):
        _, example, which = np.unique(np.stack(sums, 1), axis=0, return_index=True, return_inverse=True)
    return example, which.reshape(-1)


@lru_cache
def _hashes(tile: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Random numbers for a range in a row, and odd ones for a row: twice each, for 128 bits in all."""
    draw = np.random.Generator(np.random.PCG64(tile)).integers
    ranges = draw(0, 1 << 64, (2, (tile + 1) ** 2), np.uint64)
    ranges[:, 0] = 0  # of a row without a range
    return ranges, draw(0, 1 << 64, (2, tile), np.uint64) | np.uint64(1)


def clipped_ranges(form: Intervals, tile: int, row: Ints, col: Ints) -> tuple[Ints, Ints, Ints]:
    """Ranges inside the given tiles: cell (tile number * tile + row), first and last + 1 key in it."""
    q_tiles = max(-(-form.q_len // tile), 1)
    g, query_tile = np.divmod(row, q_tiles)
    query = query_tile[:, None] * tile + np.arange(tile)  # [n, tile]
    cell = np.flatnonzero(query < form.q_len)
    rows = (g[:, None] * form.q_len + query).reshape(-1)[cell]
    edge = np.repeat(col * tile, tile)[cell]
    # Only the ranges of these rows: the tiles come in order, so a step stays linear in its size.
    near = slice(*form.ptr[[rows.min(initial=0), rows.max(initial=-1) + 1]])
    span = form.k_len + 1
    base = form.row[near] * span
    start, stop = form.start[near], form.stop[near]
    first = np.searchsorted(base + stop, rows * span + edge, side="right")
    last = np.searchsorted(base + start, rows * span + np.minimum(edge + tile, span - 1))
    size = np.maximum(last - first, 0)
    picked = np.arange(size.sum()) + np.repeat(first - (np.cumsum(size) - size), size)
    start, stop = start[picked], stop[picked]
    cell, edge = np.repeat(cell, size), np.repeat(edge, size)
    low, high = np.maximum(start - edge, 0), np.minimum(stop - edge, tile)
    inside = low < high
    return cell[inside], low[inside], high[inside]


def interval_words(form: Intervals, tile: int, row: Ints, col: Ints) -> Words:
    """Bits of a set of ranges in the given tiles."""
    cell, low, high = clipped_ranges(form, tile, row, col)
    return range_words(tile, len(row) * tile, cell, low, high).reshape(-1, tile, tile // 32)


def mark_edges(form: Edges, tiling: Tiling) -> Tiling:
    """Number the patterns of the partial tiles of a set of edges."""
    tile = tiling.tile
    k_tiles = max(-(-form.k_len // tile), 1)
    listed = tiling.row * k_tiles + tiling.col
    place = tile_rows(form.row, form.q_len, tile) * k_tiles + form.key // tile
    at = np.searchsorted(listed, place)
    inside = np.append(listed, -1)[at] == place
    cell = at[inside] * tile + form.row[inside] % form.q_len % tile
    key = form.key[inside] % tile
    words = range_words(tile, len(listed) * tile, cell, key, key + 1)
    return replace(tiling, mark=tiling.book.add(words.reshape(-1, tile, tile // 32)))


def bits_below(limit: Ints) -> Words:
    """Rows of tile/32 words whose first ``limit`` bits are set; the tile is ``len(limit)`` wide."""
    return _below(limit[:, None] - np.arange(0, len(limit), 32))


def _below(count: Ints) -> Words:
    """A word with its ``count`` lowest bits set, ``count`` being cut to 0..32."""
    count = np.clip(count, 0, 32)
    return ((np.int64(1) << count) - 1).astype(np.uint32)


def range_words(tile: int, cells: int, cell: Ints, low: Ints, high: Ints) -> Words:
    """Words [cells, tile/32] in which each cell has the bits of its ranges ``[low, high)`` set."""
    offset = np.arange(0, tile, 32)
    mask = _below(high[:, None] - offset) & ~_below(low[:, None] - offset)
    words = np.zeros((cells, tile // 32), np.uint32)
    np.bitwise_or.at(words, cell, mask)
    return words


def pack_bits(bits: NDArray[np.bool_]) -> Words:
    """Words of bits [n, rows, tile]."""
    packed = np.packbits(bits, axis=-1, bitorder="little")
    return np.ascontiguousarray(packed).view("<u4").astype(np.uint32, copy=False)


def unpack_bits(words: Words) -> NDArray[np.bool_]:
    """Bits [n, rows, tile] of words [n, rows, tile/32]."""
    packed = np.ascontiguousarray(words).astype("<u4", copy=False).view(np.uint8)
    return np.unpackbits(packed, axis=-1, bitorder="little").view(bool)


def transpose_words(words: Words) -> Words:
    """The same tiles with rows and columns exchanged."""
    out = np.empty_like(words)
    for first in range(0, len(words), 256):
        part = slice(first, first + 256)
        out[part] = pack_bits(unpack_bits(words[part]).transpose(0, 2, 1))
    return out


def fingerprint(rows: NDArray[np.generic]) -> NDArray[np.uint64]:
    """A 64-bit number per row of integers [n, m]; equal rows have equal numbers."""
    draw = np.random.Generator(np.random.PCG64(rows.shape[1])).integers
    number: NDArray[np.uint64] = rows.astype(np.uint64) @ (
        draw(0, 1 << 64, rows.shape[1], np.uint64) | np.uint64(1)
    )
    return number
