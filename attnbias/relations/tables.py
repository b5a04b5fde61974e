"""Data for each batch, or for each batch and head: reading it at positions, holding equal rows once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..sets.intervals import Ints
from .relation import Relation


class Tabled(Relation):
    """A relation of one tensor [..., Q, n], whose leading dimensions are batches and heads."""

    _field = ""  # its name

    @property
    def _table(self) -> Tensor:
        """The data as [B, H, Q, n]."""
        given: Tensor = getattr(self, self._field)
        return given[(None,) * (4 - given.dim())]

    @property
    def batch_size(self) -> int:
        return self._table.shape[0]

    @property
    def head_count(self) -> int:
        return self._table.shape[1]


def look_up(table: Tensor, position: Tensor, b: Tensor | None, outside: int) -> Tensor:
    """Return ``table[b, position]`` of a table [L] or [B, L]; ``outside`` where there is no such position."""
    table = table.to(position.device)
    exists = (position >= 0) & (position < table.shape[-1])
    if table.shape[-1] == 0:
        return torch.full_like(position, outside)
    index = position.clamp(0, table.shape[-1] - 1)
    if table.dim() == 1 or len(table) == 1:
        found = table.reshape(-1)[index]
    else:
        batch = torch.zeros((), dtype=torch.int64, device=table.device) if b is None else b
        found = table[batch.clamp(max=len(table) - 1), index]
    return torch.where(exists, found, outside)


def find_rows(shape: Sequence[int], q: Tensor, b: Tensor | None, h: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the row ``(b * heads + h) * queries + q`` in a table of that shape, and whether there is one.

    Args:
        shape: batches, heads and queries of the table; the number of a size 1 is 0.
        q: queries.
        b: batches (None = 0).
        h: heads (None = 0).
    """
    batch, heads, queries = shape
    group = torch.zeros((), dtype=torch.int64, device=q.device)
    for index, size in ((b, batch), (h, heads)):
        group = group * size + (0 if index is None or size == 1 else index)
    return group * queries + q.clamp(0, max(queries - 1, 0)), (q >= 0) & (q < queries)


def distinct_rows(*tables: Tensor) -> tuple[Ints, Ints]:
    """Join tables [L] or [B, L] row by row on the host; return distinct rows, and the row of each batch."""
    host = [np.atleast_2d(table.cpu().numpy()) for table in tables]
    batch = max(len(table) for table in host) if all(map(len, host)) else 0
    if batch == 0:
        return np.full((1, sum(x.shape[1] for x in host)), -1, np.int64), np.zeros(1, np.int64)
    if batch == 1:
        return np.concatenate(host, 1), np.zeros(1, np.int64)
    joined = np.concatenate([np.broadcast_to(x, (batch, x.shape[1])) for x in host], 1)
    first: dict[bytes, int] = {}  # np.unique(axis=0) takes a hundred times as long
    group = np.array([first.setdefault(row.tobytes(), len(first)) for row in joined])
    return joined[np.unique(group, return_index=True)[1]], group
