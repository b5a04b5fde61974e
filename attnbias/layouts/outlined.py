"""Layouts of outlines: made on the device of the data, with a fixed capacity if one is given.

The lists have room for as many tiles as the capacity says, and their bounds tell how many there are. Without
a capacity the host reads the counts once. A layout that does not fit is left empty, and ``overflow`` tells.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..sets.bound import Place
from . import overflow
from .costs import Costs
from .fill import Side, fill
from .header import Header
from .outline import ALL, NONE, SOME, Grid, Outline
from .record import Record

MOST_CELLS = 1 << 28  # tiles of all groups, related or not: each takes some bytes on the way
_TILES_AT_ONCE = 128  # whose pairs are tested together
DEFAULT_TILE = 128  # with a capacity, where no count chooses

Related = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Outliner = Callable[[Place, int], Outline | None]


class Capacity(NamedTuple):
    """Room in a layout."""

    tiles: int
    partial: int  # of them partial ones, which hold a bit per pair


class _Patterns(NamedTuple):
    """The tiles whose pairs were tested one by one."""

    cell: Tensor  # [n], g * q_tiles * k_tiles + query tile * k_tiles + key tile; -1 = none
    related: Tensor  # [n], how many pairs are
    words: Tensor  # [n, tile, tile / 32], by query
    words_t: Tensor  # [n, tile, tile / 32], by key


def lay_out_outlined(
    outline: Outliner,
    related: Related,
    at: Place,
    *,
    tile: int | None,
    capacity: Capacity | None,
    costs: Costs,
) -> Record | None:
    """Return the tiles of a relation; None if only the host can outline it, or it has too many tiles.

    Args:
        outline: outlines the relation at a place, in tiles of a size.
        related: its definition.
        at: the lengths, and the device.
        tile: 64 or 128; None chooses by counted work, or takes 128 where a capacity is given.
        capacity: room for tiles; None reads the counts.
        costs: by which the size is chosen.
    """
    sizes = costs.sizes(tile) if capacity is None else (tile or DEFAULT_TILE,)
    tried = []
    for size in sizes:
        grid, found = Grid.of(at, size), outline(at, size)
        if found is None or found.kind.numel() > MOST_CELLS:
            return None
        tried.append((grid, found._replace(kind=_test_ragged_ends(found.kind, grid))))
    if capacity is None:
        place, capacity = _read(tried, costs)
    else:
        place = 0
        overflow.report(_counts(tried[0][1]), capacity, tried[0][1].faults)
    grid, found = tried[place]
    most = found.kind.numel()
    room = Capacity(min(capacity.tiles, most), min(capacity.partial, most))  # more would only take time
    return _assemble(grid, found, related, room)


def _test_ragged_ends(kind: Tensor, grid: Grid) -> Tensor:
    """Mark whole tiles that the last query or key cuts short as SOME: they need bits on one side."""
    kind = kind.clone()
    for axis, length in ((2, grid.q_len), (3, grid.k_len)):
        if length % grid.tile:
            kind.select(axis, length // grid.tile).clamp_(max=SOME)
    return kind


def _counts(found: Outline) -> Tensor:
    """Count the tiles that may hold a pair, and those whose pairs must be tested, [2]."""
    return torch.stack(((found.kind != NONE).sum(), (found.kind == SOME).sum()))


def _read(tried: list[tuple[Grid, Outline]], costs: Costs) -> tuple[int, Capacity]:
    """Choose the tile size of the least work, and return its room; all numbers are read at once."""
    faults = tried[0][1].faults
    counts = [_counts(found) for _, found in tried]
    flags = [fault.is_there.reshape(1).long() for fault in faults]
    numbers = torch.cat((*counts, *flags)).tolist()
    for fault, is_there in zip(faults, numbers[2 * len(tried) :], strict=True):
        if is_there:
            raise ValueError(fault.text)
    rooms = [Capacity(*numbers[2 * i : 2 * i + 2]) for i in range(len(tried))]
    work = [
        room.tiles * grid.tile**2 * costs.tile[grid.tile]
        for room, (grid, _) in zip(rooms, tried, strict=True)
    ]
    place = work.index(min(work))
    return place, rooms[place]


def _assemble(grid: Grid, found: Outline, related: Related, capacity: Capacity) -> Record:
    batch, heads = found.kind.shape[:2]
    groups = max(batch * heads, 1)
    group = torch.arange(batch * heads, device=grid.device).view(batch, heads)
    shape = (groups, grid.q_tiles, grid.k_tiles)
    kind = (found.kind if batch * heads else found.kind.new_zeros(shape)).reshape(-1)
    tested = _test(grid, kind, heads, related, capacity.partial)
    header = Header.of(
        *(grid.q_len, grid.k_len, grid.q_start, group, groups, grid.tile),
        tiles=capacity.tiles,
        patterns_count=capacity.partial,
        edges=0,
    )
    # What was tested turned out to be none, some or all; entry -1 is for the places without a tile.
    area = grid.areas.reshape(-1)
    cell, mark = (
        torch.nn.functional.pad(x, (0, 1)) for x in (kind, torch.zeros_like(kind, dtype=torch.int64))
    )
    exact = (tested.related > 0).to(kind.dtype)
    if len(area):
        exact += (tested.related == area[tested.cell.clamp(min=0) % len(area)]).to(kind.dtype) * exact
    cell[tested.cell] = exact
    mark[tested.cell] = torch.arange(len(tested.cell), device=grid.device)
    kind, mark = cell[:-1].view(shape), mark[:-1].view(shape)
    tiles, partial = _counts(found)
    fits = (tiles <= capacity.tiles) & (partial <= capacity.partial)
    for fault in found.faults:
        fits = fits & ~fault.is_there
    kind = torch.where(fits, kind, NONE)
    # Whole tiles at a ragged end are partial in one list and full in the other.
    by_query, by_key = kind == ALL, kind == ALL
    by_query[:, :, grid.k_len // grid.tile :] = False
    by_key[:, grid.q_len // grid.tile :] = False
    return fill(
        header,
        group,
        _list(kind != NONE, by_query, mark, capacity.tiles),
        _list((kind != NONE).mT, by_key.mT, mark.mT, capacity.tiles),
        (tested.words, tested.words_t),
    )


def _test(grid: Grid, kind: Tensor, heads: int, related: Related, room: int) -> _Patterns:
    """Test every pair of the tiles marked SOME, some tiles at a time."""
    cells = torch.nonzero_static(kind == SOME, size=room, fill_value=-1).reshape(-1)
    tile, inside = grid.tile, torch.arange(grid.tile, device=grid.device)
    counts, words, words_t = [], [], []
    for some in cells.split(_TILES_AT_ONCE):
        place = some.clamp(min=0).view(-1, 1, 1)
        g, cell = place // max(grid.q_tiles * grid.k_tiles, 1), place % max(grid.q_tiles * grid.k_tiles, 1)
        row = cell // max(grid.k_tiles, 1) * tile + inside[:, None]  # [n, tile, 1]
        key = cell % max(grid.k_tiles, 1) * tile + inside  # [n, 1, tile]
        exists = (row < grid.q_len) & (key < grid.k_len) & (some >= 0).view(-1, 1, 1)
        hit = related(row + grid.q_start, key, g // max(heads, 1), g % max(heads, 1)) & exists
        counts.append(hit.sum((1, 2)))
        words.append(_pack(hit))
        words_t.append(_pack(hit.transpose(1, 2)))
    return _Patterns(cells, torch.cat(counts), torch.cat(words), torch.cat(words_t))


def _pack(bits: Tensor) -> Tensor:
    """Return booleans [n, tile, tile] as words [n, tile, tile / 32]."""
    bit = torch.arange(32, device=bits.device, dtype=torch.int32)
    ones = bits.unflatten(-1, (bits.shape[-1] // 32, 32)).int() << bit
    words: Tensor = ones.sum(-1, dtype=torch.int32)  # different bits, so that their sum sets them all
    return words


def _list(is_there: Tensor, is_full: Tensor, mark: Tensor, room: int) -> Side:
    """Return the tiles of one side, [groups, rows, columns]: in each row first the full ones."""
    columns = is_there.shape[2]
    full, partial = is_full.flatten(0, 1), (is_there & ~is_full).flatten(0, 1)  # [rows, columns]
    counts = torch.stack((full.sum(1), partial.sum(1)), 1)
    ends = torch.nn.functional.pad(counts.reshape(-1).cumsum(0), (1, 0))
    bounds = torch.stack((ends[:-1:2], ends[1::2], ends[2::2]), 1)
    # Where each tile goes; those that are not there, or have no room, go to a last entry that is dropped.
    place = torch.where(full, bounds[:, :1] + full.cumsum(1), bounds[:, 1:2] + partial.cumsum(1)) - 1
    place = torch.where(full | partial, place, room).clamp(max=room).reshape(-1)
    column = torch.arange(columns, device=mark.device).expand(len(full), columns).reshape(-1)
    marks = torch.where(partial, mark.flatten(0, 1), 0).reshape(-1)
    into = torch.zeros(2, room + 1, dtype=torch.int64, device=mark.device)
    listed, named = (row.scatter(0, place, x)[:room] for row, x in zip(into, (column, marks), strict=True))
    return Side(bounds, listed, named, torch.argsort(-counts.sum(1), stable=True))
