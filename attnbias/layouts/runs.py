"""Ranges of keys read back from the tiles of a layout, for kernels that take ranges instead of tiles."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..sets.intervals import Index, Intervals, Ints, count_groups, merge
from .record import Record

_PATTERNS_AT_ONCE = 256  # bounds the memory of their bits


class _Runs(NamedTuple):
    """Runs of keys, one per entry."""

    row: Ints  # of a tile or of the layout
    start: Index
    stop: Index


def find_runs(layout: Record, most: int) -> Intervals | None:
    """Return the keys of every row as sorted ranges that do not touch; None if a row has more than ``most``.

    The lists are read on the host: one copy from a device for each field. The work is that of tiles times
    rows of a tile; no pair is visited but those of distinct patterns.

    Raises:
        ValueError: if the layout has edges, whose numbers and repetitions a range cannot hold.
    """
    header, fields = layout.header, layout.fields
    if header.edges:
        raise ValueError(f"layout: wanted tiles only, got {header.edges} edges")
    patterns = _find_in_patterns(fields.patterns.cpu().numpy(), most)
    if patterns is None:
        return None
    ptr = fields.q_ptr.cpu().numpy().astype(np.int64).reshape(-1, header.classes + 1)
    column = fields.q_tile.cpu().numpy().astype(np.int64)
    first_row = _first_rows(header.groups, header.q_len, header.tile)
    height = np.tile(np.minimum(header.q_len - first_row[: header.q_tiles], header.tile), header.groups)
    full = _find_full(ptr, column, header.tile, first_row, height)
    partial = _find_partial(ptr, column, fields.q_mark.cpu().numpy(), header.tile, first_row, patterns)
    row, start, stop = (np.concatenate(both) for both in zip(full, partial, strict=True))
    group = fields.group.cpu().numpy().astype(np.int64)
    assert count_groups(group) <= header.groups
    found = merge(header.groups * header.q_len, header.k_len, row, start, stop)
    if int(np.diff(found.ptr).max(initial=0)) > most:
        return None
    return Intervals(header.q_len, header.k_len, group, *found)


def _first_rows(groups: int, q_len: int, tile: int) -> Ints:
    """Return the first row of each tile row, [groups * q_tiles]."""
    return (np.arange(groups)[:, None] * q_len + np.arange(0, q_len, tile)).reshape(-1)


def _listed(begin: Ints, end: Ints) -> tuple[Ints, Ints]:
    """Return every place from ``begin`` up to ``end`` of each tile row, and the tile row that it is of."""
    count = end - begin
    owner = np.repeat(np.arange(len(count)), count)
    return owner, np.arange(len(owner)) + np.repeat(begin - np.cumsum(count) + count, count)


def _find_full(ptr: Ints, column: Ints, tile: int, first_row: Ints, height: Ints) -> _Runs:
    """Return full tiles as runs: neighbours join first, then every row of a tile row gets the same runs."""
    owner, place = _listed(ptr[:, 0], ptr[:, -2])
    column = column[place]
    begins = np.ones(len(owner) + 1, bool)
    begins[1:-1] = (owner[1:] != owner[:-1]) | (column[1:] != column[:-1] + 1)
    first, last = np.flatnonzero(begins[:-1]), np.flatnonzero(begins[1:])
    owner = owner[first]
    which, row = _listed(first_row[owner], first_row[owner] + height[owner])
    return _Runs(row, (column[first] * tile)[which], ((column[last] + 1) * tile)[which])


class _Patterns(NamedTuple):
    """The runs of all rows of each pattern: those of pattern p are ``ptr[p]:ptr[p + 1]``."""

    ptr: Ints
    runs: _Runs


def _find_in_patterns(patterns: NDArray[np.int32], most: int) -> _Patterns | None:
    """Return the runs of each pattern; None if a row has more than ``most``, which no neighbour can join."""
    number, row, start, stop = ([np.zeros(0, np.int64)] for _ in range(4))
    for first in range(0, len(patterns), _PATTERNS_AT_ONCE):
        some = patterns[first : first + _PATTERNS_AT_ONCE]
        begins, ends = _changes(some)
        counts = np.bincount(begins[0] * some.shape[1] + begins[1])
        if int(counts.max(initial=0)) > most:
            return None
        number.append(begins[0] + first)
        row.append(begins[1])
        start.append(begins[2])
        stop.append(ends[2])
    ptr = np.searchsorted(np.concatenate(number), np.arange(len(patterns) + 1))
    return _Patterns(ptr, _Runs(np.concatenate(row), np.concatenate(start), np.concatenate(stop)))


def _changes(patterns: NDArray[np.int32]) -> tuple[tuple[Ints, ...], tuple[Ints, ...]]:
    """Return pattern, row and key where runs begin, and the same where they end."""
    words = np.ascontiguousarray(patterns).view(np.uint8)
    bits = np.unpackbits(words, axis=-1, bitorder="little").astype(np.int8)  # [n, tile, tile]
    change = np.diff(np.pad(bits, ((0, 0), (0, 0), (1, 1))), axis=-1)
    return np.nonzero(change == 1), np.nonzero(change == -1)


def _find_partial(
    ptr: Ints, column: Ints, mark: NDArray[np.int32], tile: int, first_row: Ints, patterns: _Patterns
) -> _Runs:
    """Return the runs of partial tiles: those of their patterns, at their place."""
    owner, place = _listed(ptr[:, -2], ptr[:, -1])
    pattern = mark[place]
    which, run = _listed(patterns.ptr[pattern], patterns.ptr[pattern + 1])
    row, start, stop = (x[run] for x in patterns.runs)
    before = (column[place] * tile)[which]
    return _Runs(first_row[owner][which] + row, before + start, before + stop)
