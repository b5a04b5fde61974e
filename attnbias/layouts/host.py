"""Layouts built with NumPy, of any bound relation; the specification of what ``native.py`` does in C++."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..sets.bound import Bound
from ..sets.intervals import Intervals, Ints, count_groups, pointer
from .choose import choose
from .costs import Costs
from .fill import EdgeLists, Form, Side, fill
from .header import Header
from .record import Record
from .tiles import Tiling, transpose_words


def lay_out_with_numpy(bound: Bound, form: Form, tile: int | None, costs: Costs, q_start: int) -> Record:
    """Choose tiles and edges, then list them."""
    tiling, edges = choose(bound, form, tile, costs)
    by_query, by_key = _sides(tiling)
    # A pattern of tiles that became edges is not needed any more.
    marks = np.concatenate((by_query.mark, by_key.mark))
    used = np.unique(marks) if len(marks) else marks
    words = tiling.book.words()[used]
    by_query, by_key = (replace(side, mark=np.searchsorted(used, side.mark)) for side in (by_query, by_key))
    counts = {"tiles": by_query.tiles, "patterns_count": len(words), "edges": len(edges.key)}
    header = Header.of(
        tiling.q_len, tiling.k_len, q_start, bound.group, count_groups(bound.group), tiling.tile, **counts
    )
    turned = edges.turned
    return fill(
        header,
        bound.group,
        by_query.listed(),
        by_key.listed(),
        (words.view(np.int32), transpose_words(words).view(np.int32)),
        EdgeLists(edges.ptr, edges.key, edges.id, turned.ptr, turned.key, turned.id),
    )


_TILES_AT_ONCE = 1 << 22  # bounds the memory of one step over a long list


@dataclass(frozen=True)
class _Side:
    """Tile lists of one side: ranges of full tiles, and partial tiles sorted by row."""

    full: Intervals
    partial: Ints  # [rows + 1] offsets into col and mark
    col: Ints
    mark: Ints

    @classmethod
    def empty(cls, full: Intervals) -> _Side:
        """Return a side without tiles."""
        none = np.zeros(0, np.int64)
        return cls(full, full.ptr, none, none)

    @property
    def tiles(self) -> int:
        return int((self.full.stop - self.full.start).sum()) + len(self.col)

    def listed(self) -> Side:
        """Return the bounds and lists: in each row first the full tiles, then the partial ones."""
        full, partial = self.full.counts(), np.diff(self.partial)
        ptr = pointer(full + partial)
        if not ptr[-1]:
            return Side(np.zeros((len(full), 3), np.int64), self.col, self.mark, np.arange(len(full)))
        begin = ptr[:-1]
        tile, mark = np.zeros((2, ptr[-1]), np.int32)
        place = np.arange(len(self.col)) + np.repeat(begin + full - self.partial[:-1], partial)
        tile[place], mark[place] = self.col, self.mark
        size = self.full.stop - self.full.start
        # A range starts where its row does, after the row's earlier ranges.
        earlier = np.cumsum(size) - size
        place = begin[self.full.row] + earlier - earlier[self.full.ptr[self.full.row]]
        steps = np.searchsorted(earlier, np.arange(0, size.sum(), _TILES_AT_ONCE)).tolist()
        for part in map(slice, steps, [*steps[1:], None]):
            offset = np.cumsum(size[part]) - size[part]
            run = np.arange(size[part].sum())
            tile[run + np.repeat(place[part] - offset, size[part])] = run + np.repeat(
                self.full.start[part] - offset, size[part]
            )
        order = np.argsort(-(full + partial), kind="stable")
        return Side(np.stack((begin, begin + full, ptr[1:]), 1), tile, mark, order)


def _sides(tiling: Tiling) -> tuple[_Side, _Side]:
    """Return the tile lists by query and by key (see :class:`attnbias.Layout` on ragged ends)."""
    tile, covered = tiling.tile, tiling.covered
    q_tiles, k_tiles = covered.q_len, covered.k_len
    if not len(covered.start) and not len(tiling.row):
        return _Side.empty(covered), _Side.empty(Intervals.empty(k_tiles, q_tiles, covered.group))
    whole_q, whole_k = tiling.q_len // tile, tiling.k_len // tile
    keep = covered.row % max(q_tiles, 1) < whole_q
    full_by_query = covered.from_ranges(covered.row, covered.start, np.minimum(covered.stop, whole_k))
    full_by_key = covered.from_ranges(covered.row[keep], covered.start[keep], covered.stop[keep]).transpose()
    # Tiles at a ragged end: related throughout, but with pairs that do not exist.
    row, col = (covered - full_by_query).pairs()
    last_row, last_col = covered.from_ranges(
        covered.row[~keep], covered.start[~keep], np.minimum(covered.stop[~keep], whole_k)
    ).pairs()
    rows = [np.concatenate((tiling.row, row)), np.concatenate((tiling.row, row, last_row))]
    cols = [np.concatenate((tiling.col, col)), np.concatenate((tiling.col, col, last_col))]
    ragged_row = np.concatenate((row, last_row))
    ragged_col = np.concatenate((col, last_col))
    ragged = tiling.book.add(
        tiling.book.valid_words(tiling.q_len, tiling.k_len, ragged_row % max(q_tiles, 1), ragged_col)
    )
    mark = np.concatenate((tiling.mark, ragged))
    at_row_end = rows[1] % max(q_tiles, 1) >= whole_q
    in_key_partial = np.concatenate((np.ones(len(tiling.row), bool), at_row_end[len(tiling.row) :]))
    by_query = _side(full_by_query, rows[0], cols[0], mark[: len(rows[0])])
    g, query_tile = np.divmod(rows[1][in_key_partial], max(q_tiles, 1))
    by_key = _side(full_by_key, g * k_tiles + cols[1][in_key_partial], query_tile, mark[in_key_partial])
    return by_query, by_key


def _side(full: Intervals, row: Ints, col: Ints, mark: Ints) -> _Side:
    order = np.argsort(row * (full.k_len + 1) + col, kind="stable")
    partial = pointer(np.bincount(row, minlength=full.rows))
    return _Side(full, partial, col[order], mark[order])
