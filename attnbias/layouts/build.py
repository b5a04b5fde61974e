"""From a bound relation to a layout: choose tile size and form by counted work, then list."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from .bound import Bound
from .costs import Costs, costs_of
from .device import lay_out
from .edges import Edges
from .intervals import Intervals, Ints, count_groups, pointer
from .layout import SIZES, Form, Layout, empty_layout, field_shapes
from .levels import add_levels
from .native import lay_out_ranges
from .predicate import Predicate
from .tiles import (
    Tiling,
    mark_edges,
    mark_intervals,
    no_tiles,
    tile_edges,
    tile_intervals,
    tile_rows,
    transpose_words,
)

if TYPE_CHECKING:
    from ..multilevel import MultiLevel
    from ..relations.relation import Relation

ExactForm = Intervals | Edges | Predicate


# Ranges and predicates become edges only in rows that are short: a list takes 20 bytes a pair, tiles do not.
KEYS_LISTED = 256

TILES = (128, 64)  # sizes to try; the larger is taken when both are the same work


def build_layout(
    relation: Relation,
    q_len: int,
    k_len: int,
    *,
    q_start: int | Literal["end"],
    device: torch.device | str,
    form: Form,
    tile: int | None,
    batch: int | None,
    heads: int | None,
    score: MultiLevel | None = None,
) -> Layout:
    """See :meth:`Layout.build`."""
    if form not in ("auto", "tiles", "edges"):
        raise ValueError(f"form: wanted 'auto', 'tiles' or 'edges', got {form!r}")
    if tile not in (None, 64, 128):
        raise ValueError(f"tile: wanted 64, 128 or None, got {tile!r}")
    if not hasattr(relation, "bind"):
        raise TypeError(
            f"relation: wanted a relation, got {type(relation).__name__}; wrap a mask in ab.Dense, "
            "a function in ab.Where"
        )
    device = torch.device(device)
    start = k_len - q_len if q_start == "end" else q_start
    if score is not None:
        if form == "edges":
            raise ValueError("form: wanted 'tiles' or 'auto' with a multi-level score, got 'edges'")
        form = "tiles"
    if score is None and device.type != "cpu":
        pairs = relation.list_pairs(q_len, k_len, start, batch, heads)
        if pairs is not None:
            made = lay_out(pairs, q_len, k_len, q_start=start, form=form, tile=tile, costs=costs_of(device))
            return made.trust().to(device)
    bound = relation.bind(q_len, k_len, start, batch=batch, heads=heads, device=str(device))
    if form == "tiles" and bound.edges is not None:
        bound = _without_edges(relation, bound, start)
    layout = _lay_out(bound, form, tile, costs_of(device), start)
    if score is not None:
        layout = add_levels(layout, score.bind(q_len, k_len, start))
    return layout.trust().to(device)


def _lay_out(bound: Bound, form: Form, tile: int | None, costs: Costs, q_start: int) -> Layout:
    """Choose, then list: ranges in C++ where the library is there, all else with NumPy."""
    if isinstance(bound.solid, Intervals) and bound.edges is None:
        sizes = (tile,) if tile else TILES
        made = lay_out_ranges(
            bound.solid, q_start=q_start, form=form, sizes=sizes, costs=costs, most_listed=KEYS_LISTED
        )
        if made is not None:
            return made
    return lay_out_with_numpy(bound, form, tile, costs, q_start)


def lay_out_with_numpy(bound: Bound, form: Form, tile: int | None, costs: Costs, q_start: int) -> Layout:
    """Build the layout of any bound relation; the specification of :func:`lay_out_ranges`."""
    tiling, edges = _choose(bound, form, tile, costs)
    return _assemble(tiling, edges, bound.group, q_start)


def _without_edges(relation: Relation, bound: Bound, q_start: int) -> Bound:
    """The same pairs as one solid form, for callers who want tiles alone."""
    assert bound.edges is not None
    if bound.edges.repeated.any():
        raise ValueError("form='tiles': duplicate edges count twice, which only edges can hold")
    listed = bound.edges.intervals()
    if bound.solid is None:
        return Bound(listed, None)
    if isinstance(bound.solid, Intervals):
        return Bound(bound.solid | listed, None)
    solid = bound.solid
    return Bound(Predicate(solid.bound | listed, relation.related, q_start, device=solid.device), None)


def _choose(bound: Bound, form: Form, tile: int | None, costs: Costs) -> tuple[Tiling, Edges]:
    """The tiles and the edges of a layout: for each query tile whichever is less work."""
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
        listed = [np.concatenate(both) for both in zip(listed, _listed(bound.edges), strict=True)]
    q_len, k_len = bound.solid.q_len, bound.solid.k_len
    return chosen, Edges.from_pairs(q_len, k_len, bound.group, *listed)


def _may_pay(edges: Edges, tile: int | None, costs: Costs) -> bool:
    """Whether some tile row holds so many edges that even a single tile could be less work.

    Of most graphs none does, and what is asked here costs tile rows, not edges.
    """
    for size in (tile,) if tile else costs.tile:
        pairs = _sum_ranges(edges.ptr, edges, size)
        if (pairs * costs.edge >= _areas(edges, size) * costs.tile[size]).any():
            return True
    return False


def _areas(form: ExactForm, tile: int) -> Ints:
    """Pairs in a tile of each tile row."""
    # A tile at the end has only the rows that exist, and never more keys than there are.
    height = np.minimum(form.q_len - np.arange(0, form.q_len, tile), tile)
    areas: Ints = np.tile(height, count_groups(form.group)) * min(tile, form.k_len)
    return areas


def _lighter(
    form: ExactForm, wanted: Form, tile: int | None, costs: Costs
) -> tuple[Tiling, NDArray[np.bool_]]:
    """The better tile size, and which tile rows are less work as tiles than as edges."""
    best: tuple[float, Tiling, NDArray[np.bool_], float] | None = None
    # A predicate is evaluated pair by pair, so only one size is tried.
    sizes = (tile,) if tile else (128,) if isinstance(form, Predicate) else TILES
    for size in sizes:
        if best is not None and best[0] <= best[3] * costs.tile[size]:
            break  # not even tiles without waste would be less work
        area = _areas(form, size)
        rows = area // max(1, min(size, form.k_len))
        pairs = _pairs_in_rows(form, size)
        as_edges = pairs * costs.edge
        unlisted = np.zeros(len(area), bool)
        tiled = form
        if wanted == "auto" and isinstance(form, Edges):
            # Where not even one tile would pay, there is no need to know which there are.
            unlisted = (as_edges < area * costs.tile[size]) & (pairs > 0)
            tiled = form.filter(np.repeat(~_per_row(form, unlisted, size), form.counts()))
        tiling = _tile(tiled, size)
        full, partial = tiling.counts()
        work = (full + partial) * area
        if costs.run is not None and not isinstance(tiled, Predicate):
            skipping = pairs + costs.run * _runs_in_rows(tiled, size) + costs.partial * partial * rows
            work = np.minimum(work, skipping)
        as_tiles = np.where(unlisted, np.inf, work * costs.tile[size])
        kept = as_tiles <= as_edges if wanted == "auto" else np.full(len(area), wanted == "tiles")
        if wanted == "auto" and not isinstance(form, Edges):
            kept |= pairs > KEYS_LISTED * rows
        if isinstance(form, Edges):
            kept[tile_rows(form.row[form.repeated], form.q_len, size)] = False
        # Whole numbers are summed, so that rounding does not choose between sizes that are the same work.
        total = float(work[kept].sum()) * costs.tile[size] + int(pairs[~kept].sum()) * costs.edge
        if best is None or total < best[0]:
            best = total, tiling, kept, float(pairs.sum())
    assert best is not None
    return best[1], best[2]


def _pairs_in_rows(form: ExactForm, tile: int) -> Ints:
    """Related pairs in each tile row, an edge counting as often as it occurs."""
    if isinstance(form, Predicate):
        return form.tiling(tile).pairs()
    return _sum_rows(form, form.counts(), tile)


def _runs_in_rows(form: Intervals | Edges, tile: int) -> Ints:
    """Runs of consecutive keys in each tile row."""
    if isinstance(form, Intervals):
        return _sum_rows(form, np.diff(form.ptr), tile)
    fresh = np.ones(len(form.key), bool)
    fresh[1:] = (form.key[1:] - form.key[:-1] != 1) | (form.row[1:] != form.row[:-1])
    return _sum_rows(form, np.bincount(form.row[fresh], minlength=form.rows), tile)


def _sum_rows(form: Intervals | Edges, numbers: Ints, tile: int) -> Ints:
    """Sums of a number per row over the rows of each tile row."""
    return _sum_ranges(pointer(numbers), form, tile)


def _sum_ranges(total: NDArray[Any], form: Intervals | Edges, tile: int) -> Ints:
    """The same from running sums, [rows + 1]."""
    first = np.arange(count_groups(form.group))[:, None] * form.q_len + np.arange(0, form.q_len, tile)
    last = np.minimum(first + tile, first[:, :1] + form.q_len)
    sums: Ints = (total[last] - total[first]).reshape(-1)
    return sums


def _tile(form: ExactForm, tile: int) -> Tiling:
    if isinstance(form, Predicate):
        return form.tiling(tile)
    return tile_intervals(form, tile) if isinstance(form, Intervals) else tile_edges(form, tile)


def _per_row(form: Intervals | Edges, of_tile_row: NDArray[Any], tile: int) -> NDArray[Any]:
    """What holds for each tile row, for each of its rows."""
    spread: NDArray[Any] = of_tile_row[tile_rows(np.arange(form.rows), form.q_len, tile)]
    return spread


def _pairs(form: Intervals | Predicate, tiling: Tiling) -> list[Ints]:
    """Row, key and number of every pair in the tile rows that ``tiling`` keeps."""
    if isinstance(form, Intervals):
        kept = np.zeros(tiling.covered.rows, bool)
        kept[tiling.row] = kept[tiling.covered.row] = True
        rows = np.flatnonzero(kept[tile_rows(np.arange(form.rows), form.q_len, tiling.tile)])
        local, key = form.take_rows(rows, len(rows)).pairs()
        row = rows[local]
    else:
        row, key = tiling.decode()
    return [row, key, np.arange(len(row))]


def _listed(edges: Edges) -> list[Ints]:
    return [edges.row, edges.key, edges.id]


def _assemble(tiling: Tiling, edges: Edges, group: Ints, q_start: int) -> Layout:
    """Lay the lists out in one buffer."""
    tile, q_len, k_len = tiling.tile, tiling.q_len, tiling.k_len
    by_query, by_key = _sides(tiling)
    turned = edges.turned
    # A pattern of tiles that became edges is not needed any more.
    marks = np.concatenate((by_query.mark, by_key.mark))
    used = np.unique(marks) if len(marks) else marks
    words = tiling.book.words()[used]
    by_query, by_key = (replace(side, mark=np.searchsorted(used, side.mark)) for side in (by_query, by_key))
    layout = empty_layout(
        q_len=q_len,
        k_len=k_len,
        q_start=q_start,
        batch=group.shape[0],
        heads=group.shape[1],
        groups=count_groups(group),
        tile=tile,
        tiles=by_query.tiles,
        patterns_count=len(words),
        edges=len(edges.key),
    )
    buffer, offsets = layout.buffer.numpy(), layout.where.tolist()[len(SIZES) :]
    view = {
        name: buffer[offset : offset + math.prod(shape)].reshape(shape)
        for (name, shape), offset in zip(field_shapes(layout.sizes).items(), offsets, strict=True)
    }
    view["group"][:] = group
    for side, name in ((by_query, "q"), (by_key, "k")):
        if by_query.tiles:
            side.fill(view[f"{name}_ptr"], view[f"{name}_tile"], view[f"{name}_mark"])
        work = side.full.counts() + np.diff(side.partial)
        view[f"{name}_order"][:] = np.argsort(-work, kind="stable")
    if len(words):
        view["patterns"][:] = words.view(np.int32)
        view["patterns_t"][:] = transpose_words(words).view(np.int32)
    if len(edges.key):
        for name, array in (
            ("edge_ptr", edges.ptr),
            ("edge_key", edges.key),
            ("edge_id", edges.id),
            ("col_ptr", turned.ptr),
            ("col_query", turned.key),
            ("col_edge", turned.id),
        ):
            view[name][:] = array
    return layout


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
        """No tiles at all."""
        none = np.zeros(0, np.int64)
        return cls(full, full.ptr, none, none)

    @property
    def tiles(self) -> int:
        return int((self.full.stop - self.full.start).sum()) + len(self.col)

    def fill(self, ptr: NDArray[np.int32], tile: NDArray[np.int32], mark: NDArray[np.int32]) -> None:
        """Write the bounds and lists: in each row first the full tiles, then the partial ones."""
        full, partial = self.full.counts(), np.diff(self.partial)
        begin = pointer(full + partial)[:-1]
        ptr.reshape(-1, 3)[:] = np.stack((begin, begin + full, begin + full + partial), 1)
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


def _sides(tiling: Tiling) -> tuple[_Side, _Side]:
    """The tile lists by query and by key (see :class:`Layout` on ragged ends)."""
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
