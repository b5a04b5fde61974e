"""The choice of tile size and form: for each query tile whichever of tiles and edges is less counted work."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..sets.bound import Bound
from ..sets.edges import Edges
from ..sets.intervals import Intervals, Ints, count_groups, pointer
from ..sets.predicate import Predicate
from .costs import Costs
from .evaluate import tile_predicate
from .fill import Form
from .tiles import (
    Tiling,
    mark_edges,
    mark_intervals,
    no_tiles,
    tile_edges,
    tile_intervals,
    tile_rows,
)

ExactForm = Intervals | Edges | Predicate

PREDICATE_TILE = 128  # evaluated pair by pair, so only one size is tried
DUPLICATES = "form='tiles': duplicate edges count twice, which only edges can hold"


def choose(bound: Bound, form: Form, tile: int | None, costs: Costs) -> tuple[Tiling, Edges]:
    """Return the tiles and the edges of a layout: for each query tile whichever is less work."""
    if bound.solid is None:
        assert bound.edges is not None
        edges = bound.edges
        if form == "edges" or (form == "auto" and not _may_pay(edges, tile, costs)):
            return no_tiles(tile or max(costs.tile), edges), edges
        tiling, kept = _lighter(edges, form, tile, costs)
        if not kept.any():
            return tiling.keep(kept), edges
        in_tiles = np.repeat(_per_row(edges, kept, tiling.tile), edges.counts())
        return mark_edges(edges, tiling.keep(kept)), edges.filter(~in_tiles)
    tiling, kept = _lighter(bound.solid, form, tile, costs)
    chosen = tiling.keep(kept)
    if isinstance(bound.solid, Intervals):
        chosen = mark_intervals(bound.solid, chosen)
    if kept.all() and bound.edges is not None:
        return chosen, bound.edges
    listed = _pairs(bound.solid, tiling.keep(~kept))
    if bound.edges is not None:
        more = (bound.edges.row, bound.edges.key, bound.edges.id)
        listed = [np.concatenate(both) for both in zip(listed, more, strict=True)]
    q_len, k_len = bound.solid.q_len, bound.solid.k_len
    return chosen, Edges.from_pairs(q_len, k_len, bound.group, *listed)


def choose_tile(bound: Bound, form: Form, costs: Costs) -> int:
    """Return the tile size that :func:`choose` takes, without the lists."""
    if bound.solid is not None:
        solid = bound.solid
        return PREDICATE_TILE if isinstance(solid, Predicate) else _lighter(solid, form, None, costs)[0].tile
    assert bound.edges is not None
    if form == "edges" or (form == "auto" and not _may_pay(bound.edges, None, costs)):
        return max(costs.tile)
    return _lighter(bound.edges, form, None, costs)[0].tile


def _may_pay(edges: Edges, tile: int | None, costs: Costs) -> bool:
    """Return whether some tile row holds so many edges that even a single tile could be less work.

    In most graphs none does, and the answer costs time by tile rows, not by edges.
    """
    for size in costs.sizes(tile):
        pairs = _sum_ranges(edges.ptr, edges, size)
        if (pairs * costs.edge >= _areas(edges, size) * costs.tile[size]).any():
            return True
    return False


def _areas(form: ExactForm, tile: int) -> Ints:
    """Return the pairs in a tile of each tile row."""
    # A tile at the end has only the rows that exist, and never more keys than there are.
    height = np.minimum(form.q_len - np.arange(0, form.q_len, tile), tile)
    areas: Ints = np.tile(height, count_groups(form.group)) * min(tile, form.k_len)
    return areas


def _lighter(
    form: ExactForm, wanted: Form, tile: int | None, costs: Costs
) -> tuple[Tiling, NDArray[np.bool_]]:
    """Return the better tile size, and which tile rows are less work as tiles than as edges."""
    best: tuple[float, Tiling, NDArray[np.bool_], float] | None = None
    for size in (tile or PREDICATE_TILE,) if isinstance(form, Predicate) else costs.sizes(tile):
        if best is not None and best[0] <= best[3] * costs.tile[size]:
            break  # not even tiles without waste would be less work
        area = _areas(form, size)
        rows = area // max(1, min(size, form.k_len))
        unlisted = np.zeros(len(area), bool)
        if isinstance(form, Predicate):
            tiling = tile_predicate(form, size)
            pairs = tiling.pairs()
            work = sum(tiling.counts()) * area
        else:
            pairs = _sum_rows(form, form.counts(), size)
            tiled = form
            if wanted == "auto" and isinstance(form, Edges):
                # Where not even one tile would pay, there is no need to know which there are.
                unlisted = (pairs * costs.edge < area * costs.tile[size]) & (pairs > 0)
                tiled = form.filter(np.repeat(~_per_row(form, unlisted, size), form.counts()))
            tiling = tile_intervals(tiled, size) if isinstance(tiled, Intervals) else tile_edges(tiled, size)
            full, partial = tiling.counts()
            work = (full + partial) * area
            if costs.run is not None:
                skipping = pairs + costs.run * _runs_in_rows(tiled, size) + costs.partial * partial * rows
                work = np.minimum(work, skipping)
        as_tiles = np.where(unlisted, np.inf, work * costs.tile[size])
        kept = as_tiles <= pairs * costs.edge if wanted == "auto" else np.full(len(area), wanted == "tiles")
        if isinstance(form, Edges):
            kept[tile_rows(form.row[form.repeated], form.q_len, size)] = False
        elif wanted == "auto":
            kept |= pairs > costs.keys_listed * rows
        # Whole numbers are summed, so that rounding does not choose between sizes that are the same work.
        total = float(work[kept].sum()) * costs.tile[size] + int(pairs[~kept].sum()) * costs.edge
        if best is None or total < best[0]:
            best = total, tiling, kept, float(pairs.sum())
    assert best is not None
    return best[1], best[2]


def _runs_in_rows(form: Intervals | Edges, tile: int) -> Ints:
    """Return the runs of consecutive keys in each tile row."""
    if isinstance(form, Intervals):
        return _sum_rows(form, np.diff(form.ptr), tile)
    fresh = np.ones(len(form.key), bool)
    fresh[1:] = (form.key[1:] - form.key[:-1] != 1) | (form.row[1:] != form.row[:-1])
    return _sum_rows(form, np.bincount(form.row[fresh], minlength=form.rows), tile)


def _sum_rows(form: Intervals | Edges, numbers: Ints, tile: int) -> Ints:
    """Return the sums of a number per row over the rows of each tile row."""
    return _sum_ranges(pointer(numbers), form, tile)


def _sum_ranges(total: NDArray[Any], form: Intervals | Edges, tile: int) -> Ints:
    """Return the same sums from running sums, [rows + 1]."""
    first = np.arange(count_groups(form.group))[:, None] * form.q_len + np.arange(0, form.q_len, tile)
    last = np.minimum(first + tile, first[:, :1] + form.q_len)
    sums: Ints = (total[last] - total[first]).reshape(-1)
    return sums


def _per_row(form: Intervals | Edges, of_tile_row: NDArray[Any], tile: int) -> NDArray[Any]:
    """Spread a value per tile row to its rows."""
    spread: NDArray[Any] = of_tile_row[tile_rows(np.arange(form.rows), form.q_len, tile)]
    return spread


def _pairs(form: Intervals | Predicate, tiling: Tiling) -> list[Ints]:
    """Return row, key and number of every pair in the tile rows that ``tiling`` keeps."""
    if isinstance(form, Intervals):
        kept = np.zeros(tiling.covered.rows, bool)
        kept[tiling.row] = kept[tiling.covered.row] = True
        rows = np.flatnonzero(kept[tile_rows(np.arange(form.rows), form.q_len, tiling.tile)])
        local, key = form.take_rows(rows, len(rows)).pairs()
        row = rows[local]
    else:
        row, key = tiling.decode()
    return [row, key, np.arange(len(row))]
