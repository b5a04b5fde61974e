"""Work items of the edge kernels: whole rows, and pieces of rows with many edges.

A program of an edge kernel takes LANES items, each an edge range of one row, and runs as long as its
longest item. So long rows are cut into pieces of at most ``PIECE`` edges, whose results are merged in
order, and items of about one length stand next to each other. All of it is arithmetic on the device:
sizes that only the device knows are replaced by bounds, and what exceeds them is an item without a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

PIECE = 256  # edges; a piece costs one float32 row written and read, 1 % of what its gathers move
STEP = 4  # edges of an item that a program takes at once: it runs as many steps as its longest item


class Items(NamedTuple):
    """The items of one side, by query or by key, in the order in which programs take them.

    A cell is a place of the layout's ``group [batch, heads]``; ``row`` is -1 where there is no item.
    """

    cell: Tensor  # int32 [items]
    row: Tensor  # int32 [items]
    begin: Tensor  # int32 [items]: edges begin:end of the side's list
    end: Tensor  # int32 [items]
    slot: Tensor | None = None  # int32 [items]: place among the pieces, -1 for a whole row


class Side(NamedTuple):
    """The work items of a pass over the rows of one side."""

    items: Items
    cuts: Items  # the rows that were cut, each with its range of slots
    slots: int  # of pieces, to keep room for; 0 = no row is that long


@dataclass(frozen=True, eq=False)
class EdgeLists:
    """The edge lists of a layout (whose docstring describes them) and what is derived from them.

    Keep one per layout: the derived lists are made at the first use.
    """

    group: Tensor  # int32 [batch, heads]
    edge_ptr: Tensor  # int32 [groups * Q + 1]
    edge_key: Tensor  # int32 [edges]
    edge_id: Tensor  # int32 [edges]
    col_ptr: Tensor  # int32 [groups * K + 1]
    col_query: Tensor  # int32 [edges]
    col_edge: Tensor  # int32 [edges]
    groups: int
    longest: tuple[int, int]  # the most edges of a query and of a key; more is allowed

    @property
    def edges(self) -> int:
        """Edges in the lists."""
        return self.edge_key.shape[0]

    @cached_property
    def places(self) -> int:
        """Edges of all cells together, equal lists counted as often as they are used."""
        cells = self.group.numel()
        if self.groups in (1, cells):
            return self.edges * (cells if self.groups == 1 else 1)
        return int(self._edges_of_cells.sum())  # waits for the device, once in a layout's life

    @cached_property
    def first_place(self) -> Tensor:
        """Int64 [cells]: edge e of a cell's list has place ``first_place[cell] + e``."""
        count = self._edges_of_cells
        start = self.edge_ptr[self.group.reshape(-1).long() * self._length(self.edge_ptr)]
        return count.cumsum(0) - count - start

    @cached_property
    def place_cell(self) -> Tensor:
        """Int64 [places]: the cell of each place."""
        cells = torch.arange(self.group.numel(), device=self.group.device)
        return cells.repeat_interleave(self._edges_of_cells, output_size=self.places)

    @cached_property
    def place_id(self) -> Tensor:
        """Int64 [places]: the caller's number of the edge at each place."""
        if self.group.numel() == 1:
            return self.edge_id.long()
        place = torch.arange(self.places, device=self.group.device)
        return self.edge_id[place - self.first_place[self.place_cell]].long()

    @cached_property
    def by_query(self) -> Side:
        """Items over (cell, query)."""
        length = self._length(self.edge_ptr)
        return cut_rows(self.edge_ptr, self.group, length, self.places, self.longest[0])

    @cached_property
    def by_key(self) -> Side:
        """Items over (cell, key)."""
        length = self._length(self.col_ptr)
        return cut_rows(self.col_ptr, self.group, length, self.places, self.longest[1])

    @cached_property
    def _edges_of_cells(self) -> Tensor:
        bounds = self.edge_ptr[:: max(self._length(self.edge_ptr), 1)].long()  # [groups + 1]
        return (bounds[1:] - bounds[:-1])[self.group.reshape(-1).long()]

    def _length(self, ptr: Tensor) -> int:
        return (ptr.shape[0] - 1) // self.groups


def cut_rows(ptr: Tensor, group: Tensor, length: int, places: int, longest: int, piece: int = PIECE) -> Side:
    """List the items of all cells, those of most steps first, and the rows that were cut.

    Args:
        ptr: edges of row ``g * length + i``, int32 [groups * length + 1].
        group: int32 [batch, heads].
        length: rows of a group.
        places: edges of all cells together.
        longest: the most edges of a row, or more.
        piece: edges of an item, at most.

    Example:
        >>> ptr = torch.tensor([0, 1, 1, 8], dtype=torch.int32)
        >>> items, cuts, pieces = cut_rows(ptr, torch.zeros(1, 1, dtype=torch.int32), 3, 8, 7, piece=5)
        >>> items.row.tolist(), items.begin.tolist(), items.end.tolist(), items.slot.tolist()
        ([2, 0, 2, 1], [1, 0, 6, 1], [6, 1, 8, 1], [0, -1, 1, -1])
        >>> cuts.row.tolist(), cuts.begin.tolist(), cuts.end.tolist()
        ([2], [0], [2])
    """
    cells, device = group.numel(), ptr.device
    inside = torch.arange(length, device=device)
    at = (group.reshape(-1, 1).long() * length + inside).reshape(-1)  # [cells * length]
    begin, end = ptr[at], ptr[at + 1]
    cell = torch.arange(cells, device=device).repeat_interleave(length, output_size=cells * length)
    row = inside.repeat(cells)
    many = places // (piece + 1) if longest > piece else 0  # rows of more than a piece, at most
    if not many:
        slot = torch.full_like(row, -1)
        return Side(Items(*_in_order(cell, row, begin, end, slot)), Items(*(row[:0].int(),) * 4), 0)

    count = ((end - begin + piece - 1) // piece).clamp(min=1)  # items of each row
    stop = count.cumsum(0)
    number = torch.arange(cells * length + places // piece, device=device)
    source = torch.searchsorted(stop, number, right=True)
    exists = source < cells * length
    source.clamp_(max=cells * length - 1)
    part = number - (stop - count)[source]
    is_cut = count > 1
    pieces = count * is_cut
    first = pieces.cumsum(0) - pieces  # slot of a row's first piece
    item_begin = (begin[source] + part * piece) * exists
    item_end = torch.minimum(item_begin + piece, end[source]) * exists
    items = _in_order(
        cell[source],
        row[source].masked_fill(~exists, -1),
        item_begin,
        item_end,
        (first[source] + part).masked_fill(~(exists & is_cut[source]), -1),
    )
    # The rows that were cut, packed: those that were not go to a place past the end.
    place = torch.where(is_cut, is_cut.cumsum(0) - 1, many)
    cuts = [
        torch.full((many + 1,), empty, dtype=torch.int32, device=device).scatter_(0, place, x.int())[:-1]
        for x, empty in ((cell, 0), (row, -1), (first, 0), (first + pieces, 0))
    ]
    return Side(Items(*items), Items(*cuts), places // piece + many)


def _in_order(cell: Tensor, row: Tensor, begin: Tensor, end: Tensor, slot: Tensor) -> list[Tensor]:
    """Sort by steps and otherwise not at all: neighbours in a good order of nodes stay together."""
    steps = (end - begin + STEP - 1) // STEP
    order = torch.argsort(torch.where(row < 0, -1, steps), descending=True, stable=True)
    return [x[order].int() for x in (cell, row, begin, end, slot)]
