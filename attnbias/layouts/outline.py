"""Outlines: which tiles of a relation hold pairs, found on the device of its data.

No shape here depends on what the data holds, so that nothing waits for a device: a CUDA graph may capture all
of it. Relations with data outline themselves (``Relation._outline``), and ``&``, ``|`` and ``~`` of relations
are the minimum, the maximum and the complement of their outlines. ``outlined`` lists the tiles of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from ..sets.bound import Place
from ..sets.intervals import ceil_div
from .record import Record

NONE, SOME, ALL = range(3)  # of a tile's pairs are related; SOME may turn out to be none or all
_FAR = 2**62  # more than any number in a table


class Grid(NamedTuple):
    """The queries and keys of a layout, cut into tiles."""

    q_len: int
    k_len: int
    q_start: int  # position of the first query
    k_start: int  # position of the first key
    tile: int
    device: torch.device

    @classmethod
    def of(cls, at: Place, tile: int) -> Grid:
        """Return the grid of a place where a relation is bound."""
        return cls(at.q_len, at.k_len, at.q_start, at.k_start, tile, torch.device(at.device))

    @property
    def q_tiles(self) -> int:
        """Query tiles."""
        return ceil_div(self.q_len, self.tile)

    @property
    def k_tiles(self) -> int:
        """Key tiles."""
        return ceil_div(self.k_len, self.tile)

    @property
    def queries(self) -> Side:
        """The queries as one side."""
        return Side(self.q_start, self.q_len, self.tile, self.device)

    @property
    def keys(self) -> Side:
        """The keys as one side."""
        return Side(self.k_start, self.k_len, self.tile, self.device)

    @property
    def areas(self) -> Tensor:
        """The pairs that exist in each tile, [q_tiles, k_tiles]."""
        return self.queries.sizes[:, None] * self.keys.sizes


class Side(NamedTuple):
    """Positions from ``first`` on, cut into tiles."""

    first: int
    length: int
    tile: int
    device: torch.device

    @property
    def tiles(self) -> int:
        """Tiles, the last of which may be cut short."""
        return ceil_div(self.length, self.tile)

    @property
    def begins(self) -> Tensor:
        """The first position of each tile, [tiles]."""
        return torch.arange(self.tiles, device=self.device) * self.tile + self.first

    @property
    def sizes(self) -> Tensor:
        """The positions in each tile, [tiles]."""
        return (self.first + self.length - self.begins).clamp(max=self.tile)

    def cut(self, table: Tensor, outside: int) -> tuple[Tensor, Tensor]:
        """Return a table [B, L] at the positions of each tile, [B, tiles, tile], and which positions exist.

        ``outside`` is for positions that the table does not have.
        """
        place = torch.arange(self.tiles * self.tile, device=self.device)
        position = place + self.first
        in_table = (position >= 0) & (position < table.shape[1])
        if table.shape[1]:
            values = torch.where(in_table, table[:, position.clamp(0, table.shape[1] - 1)], outside)
        else:
            values = torch.full((len(table), len(position)), outside, device=self.device)
        shape = (self.tiles, self.tile)
        return values.reshape(-1, *shape), (place < self.length).reshape(shape)


class Fault(NamedTuple):
    """Something wrong in data on a device, known there only."""

    is_there: Tensor  # bool []
    text: str


class Outline(NamedTuple):
    """How many of the pairs in each tile are related."""

    kind: Tensor  # int8 [B or 1, H or 1, q_tiles, k_tiles]: NONE, SOME or ALL
    faults: tuple[Fault, ...] = ()

    def invert(self) -> Outline:
        """Return that of the unrelated pairs."""
        return self._replace(kind=ALL - self.kind)

    def turn(self) -> Outline:
        """Return that of the reverse relation."""
        return self._replace(kind=self.kind.transpose(2, 3))

    def blur(self) -> Outline:
        """Return that of an unknown part of the pairs."""
        return self._replace(kind=self.kind.clamp(max=SOME))


def intersect(outlines: Sequence[Outline]) -> Outline:
    """Return the outline of the pairs in all of them."""
    return Outline(reduce(torch.minimum, [each.kind for each in outlines]), _faults(outlines))


def unite(outlines: Sequence[Outline]) -> Outline:
    """Return the outline of the pairs in any of them."""
    return Outline(reduce(torch.maximum, [each.kind for each in outlines]), _faults(outlines))


def choose(outlines: Sequence[Outline], axis: int) -> Outline:
    """Return the first outline for the first batch (axis 0) or head (axis 1), the second for the second."""
    own = [each.kind.select(axis, min(i, each.kind.shape[axis] - 1)) for i, each in enumerate(outlines)]
    return Outline(torch.stack(torch.broadcast_tensors(*own), axis), _faults(outlines))


def _faults(outlines: Sequence[Outline]) -> tuple[Fault, ...]:
    return tuple(fault for each in outlines for fault in each.faults)


def _kind(some: Tensor, all_: Tensor) -> Tensor:
    """Return the kind of tiles from whether they may hold a pair, and whether they hold all."""
    return some.to(torch.int8) + (some & all_).to(torch.int8)


# -- what relations outline themselves with ---------------------------------------------------------------


def outline_counts(pairs: Tensor, areas: Tensor) -> Outline:
    """Return the outline of tiles [..., q_tiles, k_tiles] with so many related pairs of so many."""
    return Outline(_kind(pairs > 0, pairs >= areas))


def outline_ranges(start: Tensor, stop: Tensor, grid: Grid) -> Outline:
    """Return the outline of key ranges [B, H, q_len, n] of each query; they may overlap."""
    low, high = ((x - grid.k_start).clamp(0, grid.k_len) for x in (start, stop))
    low, order = low.sort(-1)
    high = torch.maximum(low, high.gather(-1, order))
    reach = torch.nn.functional.pad(high.cummax(-1).values[..., :-1], (1, 0))  # of the ranges before
    low, high = torch.maximum(low, reach), torch.maximum(high, reach)  # disjoint now
    batch, heads, q_len, _ = low.shape
    rows = torch.arange(batch * heads * grid.q_tiles, device=grid.device).view(batch, heads, -1, 1, 1)
    tile_row = rows.expand(-1, -1, -1, grid.tile, 1).reshape(batch, heads, -1, 1)[:, :, :q_len]
    # The keys from x on are, tile by tile: none, those of its own tile that follow it, then whole tiles.
    wide = grid.k_tiles + 2
    change = torch.zeros(batch * heads * grid.q_tiles * wide, dtype=torch.int64, device=grid.device)
    for x, sign in ((low, 1), (high, -1)):
        at, inside = tile_row * wide + x // grid.tile, x % grid.tile
        change.index_add_(0, at.reshape(-1), (sign * (grid.tile - inside)).reshape(-1))
        change.index_add_(0, at.reshape(-1) + 1, (sign * inside).reshape(-1))
    pairs = change.view(batch, heads, grid.q_tiles, wide).cumsum(-1)[..., : grid.k_tiles]
    return outline_counts(pairs, grid.areas)


def outline_keys_before(length: Tensor, grid: Grid) -> Outline:
    """Return the outline of the keys before a length of each batch, [B]."""
    before = length[:, None] - grid.keys.begins
    return _of_keys(_kind(before > 0, before >= grid.keys.sizes), grid)


def outline_keys(first: int, stop: int, at: Place, tile: int) -> Outline:
    """Return the outline of the keys at positions from ``first`` up to ``stop``, for every query."""
    grid = Grid.of(at, tile)
    begins = grid.keys.begins
    ends = begins + grid.keys.sizes
    some = (begins < stop) & (ends > first)
    return _of_keys(_kind(some, (begins >= first) & (ends <= stop))[None], grid)


def outline_key_mask(mask: Tensor, grid: Grid) -> Outline:
    """Return the outline of the keys that a mask [B, K] holds, for every query."""
    real, exists = grid.keys.cut(mask.long(), 0)
    counts = (real * exists).sum(-1)
    return _of_keys(_kind(counts > 0, counts >= grid.keys.sizes), grid)


def _of_keys(kind: Tensor, grid: Grid) -> Outline:
    """Return the same tiles [B, k_tiles] for every query tile."""
    return Outline(kind[:, None, None].expand(-1, 1, grid.q_tiles, -1))


def outline_labels(of_queries: Tensor, of_keys: Tensor, grid: Grid) -> Outline:
    """Return the outline of pairs with equal labels, [B, Q] and [B, K]; -1 is related to nothing.

    It is exact where labels rise with the position, as those of documents that follow one another do.
    """
    least, most, is_whole = zip(
        *(_extremes(*side.cut(x, -1)) for side, x in ((grid.queries, of_queries), (grid.keys, of_keys))),
        strict=True,
    )
    low_q, high_q, whole_q = (x[0][:, :, None] for x in (least, most, is_whole))
    low_k, high_k, whole_k = (x[1][:, None] for x in (least, most, is_whole))
    some = (low_q <= high_k) & (low_k <= high_q)
    one = (low_q == high_q) & (low_k == high_k) & (low_q == low_k)
    return Outline(_kind(some, one & whole_q & whole_k)[:, None])


def _extremes(labels: Tensor, exists: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the least and the largest label of each tile, and whether each of its positions has one."""
    labelled = labels >= 0
    least = torch.where(labelled & exists, labels, _FAR).amin(-1)
    most = torch.where(labelled & exists, labels, -1).amax(-1)
    return least, most, (labelled | ~exists).all(-1)


def overlap(side: Side, size: int, blocks: int) -> Tensor:
    """Count the positions that each tile shares with each block of ``size``, float64 [tiles, blocks].

    In float64, which autocast leaves alone.
    """
    first = torch.arange(blocks, device=side.device) * size
    begins = side.begins[:, None]
    shared = torch.minimum(begins + side.sizes[:, None], first + size) - torch.maximum(begins, first)
    return shared.clamp(min=0).double()


def outline_of_record(made: Record, device: torch.device) -> Outline:
    """Return the outline of a layout of tiles that the host made."""
    header, fields = made.header, made.fields
    host = torch.device("cpu")  # whatever the default device is
    kind = torch.zeros(header.groups, header.q_tiles, header.k_tiles, dtype=torch.int8, device=host)
    bounds = fields.q_ptr.reshape(-1, 3).long()
    counts = bounds[:, 2] - bounds[:, 0]
    rows = torch.repeat_interleave(torch.arange(len(bounds), device=host), counts)
    is_full = torch.arange(len(rows), device=host) < bounds[rows, 1]
    kind.view(-1, max(header.k_tiles, 1))[rows, fields.q_tile[: len(rows)].long()] = _kind(
        torch.ones_like(is_full), is_full
    )
    return Outline(kind[fields.group.long()].to(device))
