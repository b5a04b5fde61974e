"""Neighbour lists of equal length, and the nearest neighbours of points."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..arguments import as_count, as_flag, as_indices
from ..sets.bound import Place
from ..sets.intervals import make_groups
from ..sets.pairs import Pairs
from .graph import Graph
from .listing import Listed, new_numbers, outside
from .orders import as_points
from .tables import Tabled


class Neighbors(Tabled, Listed):
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
    _field = "index"

    def __post_init__(self) -> None:
        index = as_indices("index", self.index, (2, 3, 4))
        object.__setattr__(self, "index", index)
        is_known = index.device.type == "cpu" and not torch.compiler.is_compiling()
        if is_known and index.numel() and int(index.min()) < -1:
            raise ValueError(f"index: wanted -1 (none) or more, got {int(index.min())}")
        super().__post_init__()

    @property
    def _least_keys(self) -> int:
        return int(self.index.max()) + 1 if self.index.numel() else 0

    @property
    def lengths(self) -> tuple[int, None]:
        return self._table.shape[2], None

    @property
    def _edge_count(self) -> int:
        return self.index.numel()

    def _targets(self) -> Tensor:
        queries = torch.arange(self.index.shape[-2], device=self.index.device)
        return queries[:, None].expand(self.index.shape).reshape(-1)

    def _offer(self, at: Place) -> Pairs:
        batch, heads, queries, n = self._table.shape
        table = self._table[:, :, at.q_start : at.q_start + at.q_len]
        key, lists, number = table.reshape(-1), table.shape[2], None
        row = torch.arange(batch * heads * lists, device=key.device)
        if lists != at.q_len:  # rows past the end of the table have no keys
            row = row // max(lists, 1) * at.q_len + row % max(lists, 1)
        if lists != queries:
            first = torch.arange(batch * heads, device=key.device)[:, None] * queries + at.q_start
            places = torch.arange(lists * n, device=key.device)
            number = (first * n + places).reshape(-1)
        row = row[:, None].expand(-1, n).reshape(-1)
        return Pairs(make_groups(batch, heads), row, key, number, key >= 0)

    def _extremes(self) -> Tensor | None:
        return torch.stack(self.index.aminmax()) if self.index.numel() else None

    def _check_extremes(self, extremes: Sequence[int], keys: int) -> None:
        wrong = outside(extremes, -1, keys)
        if wrong is not None:
            raise ValueError(f"index: wanted keys from -1 (none) to {keys - 1}, got {wrong}")

    def _nodes(self) -> int:
        queries = self.lengths[0]
        if self._least_keys > queries:
            raise ValueError(
                f"index: wanted keys among the {queries} queries, got {self._least_keys - 1}: "
                "only nodes that are both can be put in another order"
            )
        return queries

    def _relabel(self, order: Tensor) -> Neighbors:
        moved, new = self.index[..., order, :], new_numbers(order)
        return Neighbors(torch.where(moved >= 0, new[moved.clamp(min=0)], -1) if len(new) else moved)


def knn_graph(points: Any, k: int, batch: Any = None, *, loop: bool = False) -> Graph:
    """Find the k nearest other points of each point, by scipy's k-d tree, as PyG's ``knn_graph`` has them.

    Each point is the target of k edges, nearest first, which stand together: edge ``i * k + j`` comes from
    the j-th neighbour of point i. Where there are fewer than k others, it has as many as there are.

    Args:
        points: [N, d] coordinates, finite.
        k: neighbours of each point.
        batch: [N], the graph of each point, as in PyG; neighbours are sought in the same graph.
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
            # Among coincident points, a point need not be its own first neighbour, nor one at all.
            itself = near == np.arange(len(member))[:, None]
            itself[~itself.any(1), -1] = True
            near = near[~itself].reshape(len(member), wanted - 1)
        sources.append(member[near.reshape(-1)])
        targets.append(np.repeat(member, near.shape[1]))
    edges = np.stack((np.concatenate(sources), np.concatenate(targets)))
    if len(members) > 1:
        edges = edges[:, np.argsort(edges[1], kind="stable")]
    return Graph(torch.from_numpy(edges).to(device), num_nodes=nodes)
