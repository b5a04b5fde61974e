"""Neighbour lists of equal length, and the nearest neighbours of points."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..arguments import as_flag
from ..layouts.bound import Place
from ..layouts.device import Pairs
from .graph import Graph
from .orders import as_points
from .pairs import Listed, worst
from .relation import as_count, as_indices


class Neighbors(Listed):
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
        is_known = index.device.type == "cpu" and not torch.compiler.is_compiling()
        if is_known and index.numel() and int(index.min()) < -1:
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

    def _list(self, at: Place) -> Pairs:
        wrong = worst(self._table, -1, at.k_len)
        if wrong is not None:
            raise ValueError(f"index: wanted keys from -1 (none) to {at.k_len - 1}, got {wrong}")
        rows = slice(at.q_start, at.q_start + at.q_len)
        table, device = self._table[:, :, rows], self.index.device
        number = torch.arange(self.index.numel(), device=device).view(self._table.shape)[:, :, rows]
        batch, heads, queries, n = table.shape
        row = torch.arange(batch * heads * queries, device=device).repeat_interleave(n).view(table.shape)
        real = table >= 0
        group = np.arange(batch * heads).reshape(batch, heads)
        return Pairs(group, row[real], table[real], number[real])

    def _nodes(self) -> int:
        queries = self._table.shape[2]
        if self.least_keys > queries:
            raise ValueError(
                f"index: wanted keys among the {queries} queries, got {self.least_keys - 1}: "
                "only nodes that are both can be put in another order"
            )
        return queries

    def _pairs(self) -> tuple[Tensor, Tensor]:
        real = self._table >= 0
        query = torch.arange(self._table.shape[2], device=self.index.device)[:, None].expand(
            self._table.shape
        )
        return query[real], self._table[real]

    def _relabel(self, order: Tensor, new: Tensor) -> Neighbors:
        moved = self.index[..., order, :]
        return Neighbors(torch.where(moved >= 0, new[moved.clamp(min=0)], -1) if len(new) else moved)


def knn_graph(points: Any, k: int, batch: Any = None, *, loop: bool = False) -> Graph:
    """The k nearest other points of each point, by scipy's k-d tree, as PyG's ``knn_graph`` has them.

    Each point is the target of k edges, nearest first, which stand together: edge ``i * k + j`` comes from
    the j-th neighbour of point i. Where there are fewer than k others, it has as many as there are.

    Args:
        points: [N, d] coordinates, finite.
        k: neighbours of each point.
        batch: [N], the graph of each point, as in PyG; neighbours are sought in the same graph alone.
        loop: count a point among its own neighbours.

    Example:
        >>> import attnbias as ab
        >>> print(ab.knn_graph([[0.0], [1.0], [3.0]], k=1).picture(3, 3))
        .#.
        #..
        .#.
    """
    try:
        from scipy.spatial import cKDTree
    except ImportError:
        raise ImportError("knn_graph: needs scipy, which is not installed") from None
    array = as_points("points", points)
    k, loop, nodes = as_count("k", k, least=1), as_flag("loop", loop), len(array)
    device = points.device if isinstance(points, Tensor) else "cpu"
    if batch is None:
        members = [np.arange(nodes)]
    else:
        graph_of = as_indices("batch", batch, (1,)).cpu().numpy()
        if len(graph_of) != nodes:
            raise ValueError(f"batch: wanted {nodes} numbers, one for each point, got {len(graph_of)}")
        by_graph = np.argsort(graph_of, kind="stable")
        members = np.split(by_graph, np.flatnonzero(np.diff(graph_of[by_graph])) + 1)
    sources, targets = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for member in members:
        wanted = min(k + (not loop), len(member))
        if wanted == 0:
            continue
        near = cKDTree(array[member]).query(array[member], np.arange(1, wanted + 1))[1]  # [n, wanted]
        if not loop:
            # Of points in one place the point itself need not be the first, nor among them at all.
            itself = near == np.arange(len(member))[:, None]
            itself[~itself.any(1), -1] = True
            near = near[~itself].reshape(len(member), wanted - 1)
        sources.append(member[near.reshape(-1)])
        targets.append(np.repeat(member, near.shape[1]))
    edges = np.stack((np.concatenate(sources), np.concatenate(targets)))
    if len(members) > 1:
        edges = edges[:, np.argsort(edges[1], kind="stable")]
    return Graph(torch.from_numpy(edges).to(device), num_nodes=nodes)
