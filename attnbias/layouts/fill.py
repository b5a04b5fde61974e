"""The last step of ``host``, ``device`` and ``levels``: copy finished lists into a record."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from ..sets.intervals import Ints
from .header import Fields, Header
from .record import Record

Form = Literal["auto", "tiles", "edges"]
Numbers = Tensor | NDArray[Any]


class Side(NamedTuple):
    """The tiles by query or by key, sorted by row, then class, then column."""

    bounds: Numbers  # [rows, classes + 1], offsets into the lists
    tile: Numbers  # [n], column of each tile
    mark: Numbers  # [n], pattern of a partial tile, depth of a full one
    order: Numbers  # [rows], longest work first


class EdgeLists(NamedTuple):
    """The edges by row and by column; see :class:`attnbias.Layout`."""

    edge_ptr: Numbers
    edge_key: Numbers
    edge_id: Numbers
    col_ptr: Numbers
    col_query: Numbers
    col_edge: Numbers


def fill(
    header: Header,
    group: Tensor | Ints,
    by_query: Side,
    by_key: Side,
    patterns: tuple[Numbers, Numbers],
    edges: EdgeLists | None = None,
) -> Record:
    """Return the layout of these lists, on their device; ``patterns`` are by query and by key."""
    into: Fields[Any]
    if isinstance(by_query.tile, Tensor):
        record = Record.empty(header, by_query.tile.device)
        into = header.view(record.buffer)
        into.group.copy_(group if isinstance(group, Tensor) else torch.tensor(group, device="cpu"))
    else:  # array to array: torch takes several times as long for small lists
        record = Record.empty(header)
        into = header.view(record.buffer.numpy())
        into.group[...] = group
    for side, ptr, tile, mark, order in (
        (by_query, into.q_ptr, into.q_tile, into.q_mark, into.q_order),
        (by_key, into.k_ptr, into.k_tile, into.k_mark, into.k_order),
    ):
        _copy(order, side.order)
        if header.tiles:  # new graphs often have edges only, and each copy takes time
            _copy(ptr.reshape(-1, header.classes + 1), side.bounds)
            _copy(tile[:-1], side.tile)
            _copy(mark[:-1], side.mark)
    if header.patterns_count:
        _copy(into.patterns, patterns[0])
        _copy(into.patterns_t, patterns[1])
    if edges is not None and header.edges:
        for name, numbers in edges._asdict().items():
            _copy(getattr(into, name), numbers)
    return record


def _copy(into: Any, numbers: Numbers) -> None:
    if isinstance(into, Tensor):
        into.copy_(numbers)  # type: ignore[arg-type]  # a tensor, as all lists on a device are
    else:
        into[...] = numbers
