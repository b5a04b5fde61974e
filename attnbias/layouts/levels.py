"""Tiles by the depth of a multi-level score: full tiles of one depth become classes of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..sets.intervals import Ints, pointer
from ..sets.levels import Levels
from .fill import Side, fill
from .header import Header, tile_lengths
from .record import Record
from .tiles import PatternBook, transpose_words


class TileStarts(NamedTuple):
    """The positions at which tiles start: a layout over a part of a problem has them anywhere."""

    queries: Ints  # [q_tiles]
    keys: Ints  # [k_tiles]

    @classmethod
    def of(cls, header: Header) -> TileStarts:
        """Return those of a layout of consecutive queries and keys."""
        queries, keys = np.arange(header.q_tiles), np.arange(header.k_tiles)
        return cls(queries * header.tile + header.q_start, keys * header.tile)


def tile_depths(
    levels: Levels, header: Header, starts: TileStarts, query_tile: Ints, key_tile: Ints
) -> tuple[Ints, Ints]:
    """Return how many levels all pairs of each tile share, and how many some pair of it shares."""
    tile = header.tile
    first_q, first_k = starts.queries[query_tile], starts.keys[key_tile]
    last_q = first_q + np.minimum(tile, header.q_len - query_tile * tile) - 1
    last_k = first_k + np.minimum(tile, header.k_len - key_tile * tile) - 1
    shallow, deep = np.zeros((2, len(query_tile)), np.int64)
    for width in levels.widths:
        if not width:
            shallow, deep = shallow + 1, deep + 1
            continue
        a, b, c, d = (position // width for position in (first_q, last_q, first_k, last_k))
        shallow = shallow + ((a == b) & (c == d) & (a == c))
        deep = deep + ((a <= d) & (c <= b))
    return shallow, deep


def add_levels(layout: Record, levels: Levels, starts: TileStarts | None = None) -> Record:
    """Return the same tiles in classes 0 .. L by depth, which is also their mark, and the partial ones last.

    A full tile of mixed depth becomes a partial one with all its bits: kernels find the depths of the pairs
    of a partial tile from their positions.

    Args:
        layout: one of two classes.
        levels: those of the score, at the lengths of the whole if this is a part of it.
        starts: where tiles start; None: queries and keys are consecutive. ``stats`` does not know them.
    """
    header, fields = layout.header, layout.fields
    starts = TileStarts.of(header) if starts is None else starts
    book = PatternBook(header.tile)
    number = book.add(fields.patterns.numpy().view(np.uint32))  # of each old pattern

    classes = len(levels.widths) + 2

    def side(ptr: Tensor, tile: Tensor, mark: Tensor, order: Tensor, by_query: bool) -> Side:
        row, col, partial = _entries(ptr, tile)
        query_tile, key_tile = (row % header.q_tiles, col) if by_query else (col, row % header.k_tiles)
        shallow, deep = tile_depths(levels, header, starts, query_tile, key_tile)
        marks = shallow.copy()
        marks[partial] = number[mark[:-1].numpy()[partial]]
        mixed = ~partial & (shallow != deep)
        marks[mixed] = _whole(book, header, query_tile[mixed], key_tile[mixed])
        kind = np.where(partial | mixed, classes - 1, shallow)
        place = np.lexsort((col, kind, row))
        ends = pointer(np.bincount(row * classes + kind, minlength=len(order) * classes))
        bounds = np.append(ends[:-1].reshape(-1, classes), ends[classes::classes, None], 1)
        return Side(bounds, col[place], marks[place], order.numpy())

    by_query = side(fields.q_ptr, fields.q_tile, fields.q_mark, fields.q_order, True)
    by_key = side(fields.k_ptr, fields.k_tile, fields.k_mark, fields.k_order, False)
    words = book.words()
    made = replace(
        header,
        classes=classes,
        patterns_count=len(words),
        tail=levels.widths + levels.prefixes,
    )
    patterns = words.view(np.int32), transpose_words(words).view(np.int32)
    return fill(made, fields.group.numpy(), by_query, by_key, patterns)


def _entries(ptr: Tensor, tile: Tensor) -> tuple[Ints, Ints, NDArray[np.bool_]]:
    """Return row, column and whether it is partial, for each tile of one side."""
    bounds = ptr.cpu().numpy().astype(np.int64).reshape(-1, ptr.shape[-1])
    sizes = bounds[:, -1] - bounds[:, 0]
    row: Ints = np.repeat(np.arange(len(bounds)), sizes)
    col = tile[: len(row)].cpu().numpy().astype(np.int64)
    return row, col, np.arange(len(col)) >= np.repeat(bounds[:, -2], sizes)


def _whole(book: PatternBook, header: Header, query_tile: Ints, key_tile: Ints) -> Ints:
    """Return the pattern of each tile, all of its existing pairs being related."""
    # Four kinds at most: cut short by the last query or not, by the last key or not.
    kind = (query_tile >= header.q_len // header.tile) * 2 + (key_tile >= header.k_len // header.tile)
    _, example, which = np.unique(kind, return_index=True, return_inverse=True)
    words = book.valid_words(header.q_len, header.k_len, query_tile[example], key_tile[example])
    number: Ints = book.add(words)[which.reshape(-1)]
    return number


def count_macs(layout: Record, partial: Ints) -> int:
    """Count the multiply-adds of the scores; those of ``partial`` tiles count as their deepest pairs."""
    header, fields = layout.header, layout.fields
    levels = header.levels
    if levels is None:
        return 0
    row, col, _ = _entries(fields.q_ptr, fields.q_tile)
    mark = fields.q_mark[:-1].cpu().numpy().astype(np.int64)
    query_tile, key_tile = row[partial] % max(header.q_tiles, 1), col[partial]
    mark[partial] = tile_depths(levels, header, TileStarts.of(header), query_tile, key_tile)[1]
    height = tile_lengths(header.q_len, header.tile)[row % max(header.q_tiles, 1)]
    area = height * tile_lengths(header.k_len, header.tile)[col]
    return int((np.array((0, *levels.prefixes))[mark] * area).sum())
