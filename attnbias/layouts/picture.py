"""Layouts drawn: tiles as characters, and the cells that ``html`` and ``plot`` colour."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..sets.intervals import Ints
from .header import tile_lengths
from .record import Record

# The kinds of cells of a picture, by number; the last is a relation's own, whose layout does not matter.
KINDS = ("empty", "partial tile", "full tile", "edges", "edges and tile", "related")
MOST_PAIRS = 128  # tokens along a side up to which a picture has a cell for each pair
_CHARACTERS = ".+#e*"
MOST_TILES = 4096  # tiles along a side that are still worth drawing
_AT_ONCE = 4096  # patterns whose bits are counted at once


class Cells(NamedTuple):
    """A picture: squares of pairs, what they are, and how many of their pairs are related."""

    kinds: Ints  # [rows, columns], indices into KINDS
    share: NDArray[np.float64]  # [rows, columns], from 0 to 1
    size: int  # tokens along the side of a cell
    lengths: tuple[int, int]  # queries and keys


def draw(layout: Record, group: int) -> str:
    """See :meth:`Layout.picture`."""
    kinds = _kinds(*_count(layout, group, layout.tile))
    return "\n".join("".join(_CHARACTERS[kind] for kind in row) for row in kinds.tolist())


def cells_of(layout: Record, group: int) -> Cells:
    """Return the picture of a group: a cell per pair up to 128 tokens, else at most 128 x 128 cells."""
    q_len, k_len = layout.q_len, layout.k_len
    size = cell_size(q_len, k_len)
    fine = min(size, layout.tile)
    full, partial, edges = (_sum(x, size // fine) for x in _count(layout, group, fine))
    area = np.multiply.outer(tile_lengths(q_len, size), tile_lengths(k_len, size))
    share = np.minimum((full + partial + edges) / area, 1.0)  # duplicate edges count twice
    return Cells(_kinds(full, partial, edges), share, size, (q_len, k_len))


def cell_size(q_len: int, k_len: int) -> int:
    """Return the least power of two that makes at most 128 cells of the longer side.

    Example:
        >>> cell_size(100, 128), cell_size(100, 129), cell_size(5000, 1)
        (1, 2, 64)
    """
    size = 1
    while max(q_len, k_len) > MOST_PAIRS * size:
        size *= 2
    return size


def _kinds(full: Ints, partial: Ints, edges: Ints) -> Ints:
    tiles = np.where(partial > 0, 1, np.where(full > 0, 2, 0))
    return np.where(edges > 0, np.where(tiles > 0, 4, 3), tiles)


def _count(layout: Record, group: int, fine: int) -> tuple[Ints, Ints, Ints]:
    """Count the pairs of a group in full tiles, in partial ones and as edges.

    Args:
        layout: what holds them.
        group: its number.
        fine: tokens along the side of a cell, a divisor of the tile.

    Returns:
        [ceil(q_len / fine), ceil(k_len / fine)] each.
    """
    if not 0 <= group < layout.groups:
        raise ValueError(f"group: wanted 0..{layout.groups - 1}, got {group}")
    tile, parts = layout.tile, layout.tile // fine
    rows, columns = (-(-length // tile) for length in (layout.q_len, layout.k_len))
    if max(rows, columns) > MOST_TILES:
        raise ValueError(f"picture: {rows} x {columns} tiles are too many to draw")
    full, partial = np.zeros((2, rows, parts, columns, parts), np.int64)
    listed, marks = (x.cpu().numpy() for x in (layout.q_tile, layout.q_mark))
    bits = _count_bits(layout, fine)  # [patterns, parts, parts]
    for t, (begin, *_, middle, end) in enumerate(layout.q_ptr[group].tolist()):
        full[t][:, listed[begin:middle]] = fine**2
        partial[t][:, listed[middle:end]] = bits[marks[middle:end]].transpose(1, 0, 2)
    heights, widths = tile_lengths(layout.q_len, fine), tile_lengths(layout.k_len, fine)
    shape = len(heights), len(widths)
    full, partial = (
        x.reshape(rows * parts, columns * parts)[: shape[0], : shape[1]] for x in (full, partial)
    )
    edges = np.zeros(shape, np.int64)
    if layout.edges:
        first = group * layout.q_len
        ptr = layout.edge_ptr[first : first + layout.q_len + 1].cpu().numpy()
        key = layout.edge_key[int(ptr[0]) : int(ptr[-1])].cpu().numpy()
        np.add.at(edges, (np.repeat(np.arange(layout.q_len), np.diff(ptr)) // fine, key // fine), 1)
    return np.minimum(full, np.multiply.outer(heights, widths)), partial, edges


def _count_bits(layout: Record, fine: int) -> Ints:
    """Return the number of pairs in each cell of each pattern, [patterns, tile / fine, tile / fine]."""
    parts = layout.tile // fine
    words = np.ascontiguousarray(layout.patterns.cpu().numpy())
    counted = [np.zeros((0, parts, parts), np.int64)]
    for first in range(0, len(words), _AT_ONCE):
        some = words[first : first + _AT_ONCE]
        bits = np.unpackbits(some.view(np.uint8).reshape(-1), bitorder="little")
        counted.append(bits.reshape(len(some), parts, fine, parts, fine).sum((2, 4), dtype=np.int64))
    return np.concatenate(counted)


def _sum(counts: Ints, step: int) -> Ints:
    """Add up squares of ``step`` x ``step`` cells."""
    for axis in (0, 1):
        starts = np.arange(0, counts.shape[axis], step)
        counts = np.add.reduceat(counts, starts, axis) if len(starts) else counts
    return counts
