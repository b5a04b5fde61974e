"""What each rank's queries need: counted work, and the keys to fetch, from ranges and edges alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..layouts.costs import CPU_COSTS
from ..layouts.tiles import tile_rows
from ..sets.bound import Bound
from ..sets.edges import Edges
from ..sets.intervals import Intervals, Ints, ceil_div, count_groups, gather_ranges, pointer
from .balance import Weights
from .split import TILE, Split, tile_sizes


@dataclass(frozen=True, eq=False)
class Work:
    """Counted work of a bound relation, over all batch entries and heads that it tells apart."""

    touched: Intervals | None  # key tiles of each tile of queries, in each group; None: no ranges
    pairs: Ints  # [q_len], related keys of each query; of a predicate, those that are tested
    executed: NDArray[np.float64]  # [q_tiles], pairs that kernels compute
    first: Ints  # [q_tiles], the first tile of keys that a tile needs
    stop: Ints  # [q_tiles], one more than the last

    @property
    def weights(self) -> Weights:
        """What a split looks at."""
        return Weights(self.executed, self.first, self.stop)


def count_work(bound: Bound) -> Work:
    """Count the pairs that kernels compute: whole tiles where pairs lie together, edges where they do not.

    An edge counts as many as it costs on a CPU; on GPUs it costs more, but hardly ever differs by rank.
    """
    form = bound.forms[0]
    q_len, k_len, q_tiles = form.q_len, form.k_len, ceil_div(form.q_len, TILE)
    groups = count_groups(bound.group)
    uses = np.bincount(bound.group.reshape(-1), minlength=groups)  # batch entries and heads
    pairs = np.zeros(q_len, np.int64)
    executed = np.zeros(q_tiles)
    first, stop = np.full(q_tiles, ceil_div(k_len, TILE)), np.zeros(q_tiles, np.int64)
    touched = None
    if bound.solid is not None:
        extent = bound.solid.extent
        touched = coarsen(extent)
        counts = extent.counts().reshape(groups, q_len)
        pairs += uses @ counts
        listed = CPU_COSTS.edge * _sum_tiles(counts)
        area = touched.counts().reshape(groups, q_tiles) * (tile_sizes(q_len) * TILE)
        executed += uses @ np.minimum(area, listed)
        _widen(first, stop, touched.row, touched.start, touched.stop)
    if bound.edges is not None:
        counts = bound.edges.counts().reshape(groups, q_len)
        pairs += uses @ counts
        executed += CPU_COSTS.edge * (uses @ _sum_tiles(counts))
        key = bound.edges.key // TILE
        _widen(first, stop, tile_rows(bound.edges.row, q_len, TILE), key, key + 1)
    return Work(touched, pairs, executed, np.minimum(first, stop), stop)


def coarsen(form: Intervals) -> Intervals:
    """Return the key tiles that some row of each tile of queries touches."""
    blank = Intervals.empty(ceil_div(form.q_len, TILE), ceil_div(form.k_len, TILE), form.group)
    return blank.from_ranges(
        tile_rows(form.row, form.q_len, TILE), form.start // TILE, ceil_div(form.stop, TILE)
    )


def _sum_tiles(counts: Ints) -> Ints:
    """Return the sums [groups, tiles] of numbers per row [groups, rows]."""
    starts = np.arange(0, counts.shape[1], TILE)
    return np.add.reduceat(counts, starts, axis=1) if len(starts) else counts


def _widen(first: Ints, stop: Ints, row: Ints, low: Ints, high: Ints) -> None:
    """Widen the hull of each tile of queries by ranges of its rows in any group."""
    if len(row):
        row = row % len(first)
        np.minimum.at(first, row, low)
        np.maximum.at(stop, row, high)


class Needs(NamedTuple):
    """The keys that the queries of each rank are related to: whole tiles or, of graphs, single ones."""

    tiles: NDArray[np.bool_]  # [ranks, k_tiles]; none if there are single keys
    ptr: Ints  # [ranks + 1], offsets into key
    key: Ints  # [n], single keys of each rank, increasing

    def singles(self, rank: int) -> Ints:
        """Return the single keys of a rank."""
        return self.key[self.ptr[rank] : self.ptr[rank + 1]]


def find_needs(bound: Bound, work: Work, queries: Split, keys: Split, *, whole_tiles: bool) -> Needs:
    """Find the keys of each rank: tiles for ranges, single rows for edges, whichever group has them."""
    ranks, k_len = queries.ranks, keys.length
    tiles = np.zeros((ranks, ceil_div(k_len, TILE)), bool)
    singles: list[Ints] = []  # rank * k_len + key
    if bound.solid is not None:
        extent = bound.solid.extent
        if keys.tile_owner is None:
            singles.append(_keys_of_ranges(extent, queries))
        else:
            tiles |= _tiles_of_ranges(extent, work, queries)
    if bound.edges is not None:
        rank, key = _owner(bound.edges, queries), bound.edges.key
        # Beside ranges, edges take whole tiles, too: in between, single keys would shift the tiles' keys.
        if (whole_tiles or bound.solid is not None) and keys.tile_owner is not None:
            tiles[rank, key // TILE] = True
        else:
            singles.append(rank * k_len + key)
    if not singles:
        return Needs(tiles, np.zeros(ranks + 1, np.int64), np.zeros(0, np.int64))
    rank, key = np.divmod(np.unique(np.concatenate(singles)), max(k_len, 1))
    return Needs(tiles, pointer(np.bincount(rank, minlength=ranks)), key)


def _owner(form: Intervals | Edges, queries: Split) -> Ints:
    """Return the rank that holds the row of each entry."""
    row = form.row
    return queries.owner[row if count_groups(form.group) == 1 else row % max(form.q_len, 1)]


def _tiles_of_ranges(form: Intervals, work: Work, queries: Split) -> NDArray[np.bool_]:
    """Return the key tiles that each rank's rows touch, [ranks, k_tiles]."""
    k_tiles = ceil_div(form.k_len, TILE)
    if queries.tile_owner is not None and work.touched is not None:
        touched = work.touched
        rank = queries.tile_owner[touched.row % max(touched.q_len, 1)]
        start, stop = touched.start, touched.stop
    else:
        rank, start, stop = _owner(form, queries), form.start // TILE, ceil_div(form.stop, TILE)
    size = queries.ranks * (k_tiles + 1)
    change = np.bincount(rank * (k_tiles + 1) + start, minlength=size)
    change -= np.bincount(rank * (k_tiles + 1) + stop, minlength=size)
    return np.cumsum(change.reshape(queries.ranks, -1), 1)[:, :-1] > 0


def _keys_of_ranges(form: Intervals, queries: Split) -> Ints:
    """Return rank * k_len + key of all keys that each rank's rows are related to."""
    blank = Intervals.empty(queries.ranks, form.k_len, np.zeros((1, 1), np.int64))
    rank, key = blank.from_ranges(_owner(form, queries), form.start, form.stop).pairs()
    return rank * form.k_len + key


def expand_tiles(tile: Ints, length: int) -> Ints:
    """Return the tokens of some tiles, one after another."""
    return gather_ranges(np.minimum(np.arange(0, length + TILE, TILE), length), tile)[1]
