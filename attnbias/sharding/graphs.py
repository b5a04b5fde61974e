"""Graphs over ranks: nodes to ranks by their edges, the edges of a rank, and the rows of its halo."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..arguments import as_indices
from ..op.library import is_traced
from ..relations.graph import Graph
from ..sets.intervals import Ints
from .attend import attend, check_group
from .exchange import start
from .ranks import find_ranks

if TYPE_CHECKING:
    from .shard import Shard


def give_nodes(graph: Graph, mesh: Any, parts: Any, points: Any, rank: int | None) -> Ints:
    """Return the rank of each node: the caller's, or runs of about equal weight in an order that is local.

    Raises:
        TypeError: if an argument is of the wrong kind.
        ValueError: if one does not fit the graph or the ranks.
    """
    sources, targets = graph._sizes
    if sources != targets:
        raise ValueError(
            f"size: wanted as many sources as targets, got {sources} and {targets}; "
            f"use ab.shard(graph, ({targets}, {sources}), mesh), which splits both evenly"
        )
    ranks = find_ranks(mesh, rank).size
    if parts is None:
        order, _ = graph.reorder("rcm" if points is None else "morton", points)
        degree = np.bincount(graph.edge_index[1].cpu().numpy(), minlength=targets)
        return cut_order(order.cpu().numpy(), degree, ranks)
    if points is not None:
        raise ValueError("points: wanted None beside parts, which say where each node goes, got both")
    given: Ints = as_indices("parts", parts, (1,)).cpu().numpy()
    if len(given) != targets:
        raise ValueError(f"parts: wanted a rank for each of the {targets} nodes, got {len(given)}")
    wrong = np.flatnonzero((given < 0) | (given >= ranks))
    if len(wrong):
        got = f"{given[wrong[0]]} for node {wrong[0]}"
        raise ValueError(f"parts: wanted ranks from 0 to {ranks - 1}, got {got}")
    return given


def cut_order(order: Ints, degree: Ints, ranks: int) -> Ints:
    """Cut an order of nodes into a run for each rank; return the rank of each node.

    A node weighs its edges and the mean of them, so that no rank has more than about twice its share of the
    edges, which attention goes by, or of the nodes, which all else goes by.
    """
    weight = degree[order] + max(float(degree.mean()) if len(degree) else 0.0, 1.0)
    middle = np.cumsum(weight) - weight / 2
    owner = np.empty(len(order), np.int64)
    owner[order] = np.minimum(middle * ranks / weight.sum(), ranks - 1).astype(np.int64)
    return owner


def fetch(shard: Shard, rows: Tensor, dim: int) -> Tensor:
    """Return the rows of all keys that this rank's queries need, by position; differentiable."""
    mine, total = shard.held("keys")
    if rows.shape[dim] != mine:
        hint = "; use shard.scatter(..., of='keys')" if rows.shape[dim] == total else ""
        raise ValueError(
            f"rows: wanted this rank's {mine} keys along dimension {dim}, got {list(rows.shape)}{hint}"
        )
    if shard.ranks.size == 1:
        return rows
    check_group(shard)
    if is_traced(rows):
        raise NotImplementedError("rows: fetch does not run in traced programs; use ab.attention there")
    first = rows.movedim(dim, 0)
    flat = first.reshape(1, 1, mine, prod(first.shape[1:]))
    route = shard.route(rows.device)
    came, _ = start(flat, flat[..., :0], route, shard.ranks.group.group_name).land()
    return came.reshape(route.needed, *first.shape[1:]).movedim(0, dim)


@dataclass(frozen=True, eq=False)
class Fetched:
    """A shard whose keys are at hand: ``attention`` takes it with fetched keys and values, and sends none."""

    shard: Shard

    def attend_sharded(self, query: Tensor, key: Tensor, value: Tensor, /, **given: Any) -> Any:
        """Run ``attention``, which passes this its arguments."""
        return attend(self.shard, query, key, value, is_fetched=True, **given)


def local_graph(shard: Shard) -> Graph:
    """Return the edges into this rank's nodes, from fetched sources to own targets, as ``shard.edges`` are.

    Raises:
        TypeError: if the relation is no graph.
    """
    graph, plan = shard.relation, shard.plan
    if not isinstance(graph, Graph):
        raise TypeError(f"relation: wanted the shard of a Graph, got that of {type(graph).__name__}")
    if shard.ranks.size == 1:
        return graph
    source, target = graph.edge_index[:, shard.edges.to(graph.edge_index.device)].cpu().numpy()
    part = shard.part
    index = np.stack((plan.selection(part).number[source], plan.queries.slot[target]))
    made = torch.from_numpy(index).to(graph.edge_index.device)
    return Graph(made, size=(len(part.keys), len(part.queries)))
