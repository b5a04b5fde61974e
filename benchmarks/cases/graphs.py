"""Graphs that are timed: real ones where available, and drawn ones of the usual kinds and sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from attnbias.testing.compare import compare_rows

from . import drawn
from .stored import GraphData, load
from .tokens import CHECKED_ROWS, Case

SHAPES = ((1, 64), (4, 32), (8, 16))  # heads and their size


@dataclass(frozen=True, eq=False)
class GraphCase(Case):
    """Attention along the edges of a graph; q, k, v lie in memory as [N, H, D]."""

    graph: GraphData | None = None

    @classmethod
    def of(cls, graph: GraphData, heads: int, size: int, device: str = "cpu") -> GraphCase:
        name = f"{graph.name}, {heads} x {size}"
        relation = graph.relation()
        return cls(name, relation, graph.num_nodes, heads=heads, size=size, device=device, graph=graph)

    @property
    def edge_index(self) -> Tensor:
        """Return the edges, [2, E]."""
        assert self.graph is not None
        return torch.from_numpy(self.graph.edge_index)

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See :class:`Case`."""
        generator = torch.Generator().manual_seed(0)
        shape = (1, self.tokens, self.heads, self.size)
        drawn = (torch.randn(shape, generator=generator).to(self.device, self.dtype) for _ in range(4))
        q, k, v, d_out = (x.transpose(1, 2) for x in drawn)
        return q, k, v, d_out

    @cached_property
    def fault(self) -> str:
        """Compare results and gradients of some rows with float64; return what is wrong, or ""."""
        query, key, value, _ = self.inputs()
        rows = torch.linspace(0, self.tokens - 1, min(self.tokens, CHECKED_ROWS)).long()
        return "\n".join(compare_rows(self.attend, self._by_edge, (query, key, value), rows))

    def _by_edge(self, q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
        """Compute some query rows edge by edge: all pairs of a large graph would take too long."""
        edges, count = self.edge_index.to(rows.device), torch.arange(len(rows), device=rows.device)
        place = torch.full((self.tokens,), -1, device=rows.device).index_copy_(0, rows, count)
        source, target = edges[:, place[edges[1]] >= 0]
        return message_passing(q, k, v, source, place[target])


def message_passing(q: Tensor, k: Tensor, v: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """Compute attention along edges as graph libraries do: one message per edge, a softmax per target.

    Args:
        q: [1, H, Q, D].
        k: [1, H, K, D].
        v: [1, H, K, D].
        source: [E], keys.
        target: [E], queries.
    """
    heads, queries, size = q.shape[1:]
    scores = (q[0][:, target] * k[0][:, source]).sum(-1) * size**-0.5  # [H, E]
    at = target.expand(heads, -1)
    most = scores.new_full((heads, queries), -torch.inf).scatter_reduce(1, at, scores.detach(), "amax")
    weights = torch.exp(scores - most[:, target])
    total = scores.new_zeros(heads, queries).index_add(1, target, weights)
    messages: Tensor = (weights / total[:, target]).unsqueeze(-1) * v[0][:, source]  # [H, E, D]
    return messages.new_zeros(heads, queries, size).index_add(1, target, messages)[None]


def named(name: str, graph: GraphData) -> GraphData:
    return GraphData(name, graph.edge_index, graph.num_nodes, graph.ptr, graph.points)


NODES, EDGES = 169_343, 2_315_598  # as many as ogbn-arxiv has, in both directions
GRAPHS: dict[str, Callable[[], GraphData]] = {
    **{name: partial(load, name) for name in ("cora", "citeseer", "pubmed", "mol1024", "airfoil")},
    "SBM batch": lambda: drawn.sbm_batch(256),
    "8-hop icosphere": lambda: named("8-hop icosphere", drawn.hops(drawn.icosphere(5), 8)),
    "kNN-16 Morton": lambda: drawn.knn_cloud(100_000, 16, order="morton"),
    "kNN-16 random": lambda: drawn.knn_cloud(100_000, 16),
    "R-MAT 170k": lambda: drawn.rmat(NODES, EDGES),
    "SBM 170k": lambda: drawn.sbm(NODES, EDGES),
}
