"""Relations given as lists: the edges of a graph, and neighbour indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..layouts.bound import Bound, Place
from ..layouts.edges import Edges
from .relation import Relation, as_count, as_indices, value


class _Listed(Relation):
    """Pairs held one by one: looked up in the sorted list of their codes."""

    listed = True

    def _code_parts(self) -> tuple[Tensor, int]:
        """Codes ``(row * keys + key)`` of all pairs, unsorted, and the number of keys."""
        raise NotImplementedError

    def _row(self, q: Tensor, b: Tensor | None, h: Tensor | None) -> tuple[Tensor, Tensor]:
        """The row of each query, and whether it has one."""
        raise NotImplementedError

    def _codes(self, device: torch.device) -> tuple[Tensor, int]:
        cached = self.__dict__.get("_codes_")
        if cached is None:
            codes, keys = self._code_parts()
            cached = codes.sort().values, keys
            object.__setattr__(self, "_codes_", cached)
        return cached[0].to(device), cached[1]

    def multiplicity(self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        codes, keys = self._codes(q.device)
        row, exists = self._row(q, b, h)
        asked = (row * keys + k.clamp(0, max(keys - 1, 0))).contiguous()
        count = torch.searchsorted(codes, asked, right=True) - torch.searchsorted(codes, asked)
        return torch.where(exists & (k >= 0) & (k < keys), count, 0)

    def related(self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        return self.multiplicity(q, k, b, h) > 0


@value
class Graph(_Listed):
    """The edges of a graph, as PyG has them: a target attends to its sources.

    Duplicate edges count twice in attention; ``& | ~`` see the graph as a set, unless they change nothing
    (``graph & Full()`` is the graph). Self-loops are never added.

    Args:
        edge_index: [2, E], sources (keys) in row 0, targets (queries) in row 1.
        num_nodes: nodes of the graph.
        size: (number of sources, number of targets) of a bipartite graph, in place of ``num_nodes``.

    Example:
        >>> import attnbias as ab
        >>> print(ab.Graph([[0, 1, 2], [1, 2, 0]], num_nodes=3).picture(3, 3))
        ..#
        #..
        .#.
    """

    edge_index: Tensor
    num_nodes: int | None = None
    size: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        edge_index = as_indices("edge_index", self.edge_index, (2,))
        if edge_index.shape[0] != 2:
            raise ValueError(f"edge_index: wanted shape [2, E], got {list(edge_index.shape)}")
        object.__setattr__(self, "edge_index", edge_index)
        if (self.num_nodes is None) == (self.size is None):
            raise ValueError("num_nodes: wanted either num_nodes or size=(num_src, num_dst)")
        if self.num_nodes is not None:
            object.__setattr__(self, "num_nodes", as_count("num_nodes", self.num_nodes))
        if self.size is not None:
            if not isinstance(self.size, Sequence) or len(self.size) != 2:
                raise ValueError(f"size: wanted (num_src, num_dst), got {self.size!r}")
            object.__setattr__(self, "size", tuple(as_count("size", n) for n in self.size))
        if edge_index.device.type == "cpu":
            self._check_range(edge_index.numpy())
        super().__post_init__()

    @classmethod
    def batch(cls, graphs: Sequence[Graph]) -> Graph:
        """Several graphs side by side as one block-diagonal graph, edges in the order given."""
        graphs = list(graphs)
        sizes = np.array([graph._sizes for graph in graphs], np.int64).reshape(-1, 2)
        first = np.cumsum(sizes, 0) - sizes
        device = graphs[0].edge_index.device if graphs else torch.device("cpu")
        shifts = torch.as_tensor(first, device=device)
        edges = [g.edge_index + shift[:, None] for g, shift in zip(graphs, shifts, strict=True)]
        none = torch.zeros(2, 0, dtype=torch.int64, device=device)
        total = tuple(sizes.sum(0).tolist())
        return cls(torch.cat([none, *edges], 1), size=total)

    @property
    def _sizes(self) -> tuple[int, int]:
        if self.size is not None:
            return self.size
        assert self.num_nodes is not None
        return self.num_nodes, self.num_nodes

    @property
    def lengths(self) -> tuple[int, int]:
        sources, targets = self._sizes
        return targets, sources

    def _check_range(self, edge_index: Any) -> None:
        for name, index, count in zip(("source", "target"), edge_index, self._sizes, strict=True):
            if len(index) and not (index.min() >= 0 and index.max() < count):
                worst = int(index.min()) if index.min() < 0 else int(index.max())
                what = f"size = {self.size}" if self.size is not None else f"num_nodes = {self.num_nodes}"
                raise ValueError(f"edge_index: {what} but a {name} is {worst}")

    def _code_parts(self) -> tuple[Tensor, int]:
        keys = self._sizes[0]
        return self.edge_index[1] * keys + self.edge_index[0], keys

    def _row(self, q: Tensor, b: Tensor | None, h: Tensor | None) -> tuple[Tensor, Tensor]:
        return q, (q >= 0) & (q < self._sizes[1])

    def _bind(self, at: Place) -> Bound:
        source, target = self.edge_index.cpu().numpy()
        if self.edge_index.device.type != "cpu":
            self._check_range((source, target))
        number = None
        if (at.q_start, at.q_len) != (0, self._sizes[1]):
            number = np.flatnonzero((target >= at.q_start) & (target < at.q_start + at.q_len))
            source, target = source[number], target[number] - at.q_start
        group = np.zeros((1, 1), np.int64)
        return Bound(None, Edges.from_pairs(at.q_len, at.k_len, group, target, source, number))

    @property
    def T(self) -> Relation:
        size = None if self.size is None else (self.size[1], self.size[0])
        return Graph(self.edge_index.flip(0), self.num_nodes, size)


@value
class Neighbors(_Listed):
    """Each query's keys by number: kNN, top-k selections.

    Args:
        index: keys of each query, [Q, n], [H, Q, n] or [B, H, Q, n] (sizes 1 broadcast); -1 = none.

    Example:
        >>> import attnbias as ab
        >>> print(ab.Neighbors([[0, 2], [1, -1]]).picture(2, 3))
        #.#
        .#.
    """

    index: Tensor

    def __post_init__(self) -> None:
        index = as_indices("index", self.index, (2, 3, 4))
        object.__setattr__(self, "index", index)
        if index.device.type == "cpu" and index.numel() and int(index.min()) < -1:
            raise ValueError(f"index: wanted -1 (none) or more, got {int(index.min())}")
        super().__post_init__()

    @property
    def least_keys(self) -> int:  # type: ignore[override]
        return int(self.index.max()) + 1 if self.index.numel() else 0

    @property
    def _table(self) -> Tensor:
        return self.index[(None,) * (4 - self.index.dim())]  # [B, H, Q, n]

    @property
    def batch_size(self) -> int:
        return self._table.shape[0]

    @property
    def head_count(self) -> int:
        return self._table.shape[1]

    @property
    def lengths(self) -> tuple[int, None]:
        return self._table.shape[2], None

    def _code_parts(self) -> tuple[Tensor, int]:
        table = self._table
        keys = int(table.max()) + 1 if table.numel() else 1
        rows = torch.arange(table.shape[:3].numel(), device=table.device)
        keys = max(keys, 1)
        codes = rows.view(table.shape[:3])[..., None] * keys + table
        return codes[table >= 0], keys

    def _row(self, q: Tensor, b: Tensor | None, h: Tensor | None) -> tuple[Tensor, Tensor]:
        batch, heads, queries, _ = self._table.shape
        row = torch.zeros((), dtype=torch.int64, device=q.device)
        for index, size in ((b, batch), (h, heads)):
            row = row * size + (0 if index is None or size == 1 else index)
        return row * queries + q.clamp(0, max(queries - 1, 0)), (q >= 0) & (q < queries)

    def _bind(self, at: Place) -> Bound:
        table = self._table.cpu().numpy()
        if table.size and not (table.min() >= -1 and table.max() < at.k_len):
            worst = int(table.min()) if table.min() < -1 else int(table.max())
            raise ValueError(f"index: wanted keys from -1 (none) to {at.k_len - 1}, got {worst}")
        number = np.arange(table.size).reshape(table.shape)
        rows = slice(at.q_start, at.q_start + at.q_len)
        table, number = table[:, :, rows], number[:, :, rows]
        batch, heads = table.shape[:2]
        row = np.broadcast_to(np.arange(batch * heads * at.q_len).reshape(batch, heads, -1, 1), table.shape)
        real = table >= 0
        group = np.arange(batch * heads).reshape(batch, heads)
        return Bound(
            None,
            Edges.from_pairs(at.q_len, at.k_len, group, row[real], table[real], number[real]),
        )
