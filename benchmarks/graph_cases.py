"""Graphs that are timed: real ones where they are at hand, and drawn ones of the usual kinds and sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from attnbias.testing import assert_no_worse, magnitudes

from . import generators
from .cases import CHECKED_ROWS, Attend, Case
from .graphs import GraphData, load

SHAPES = ((1, 64), (4, 32), (8, 16))  # heads and their size


@dataclass(frozen=True, eq=False)
class GraphCase(Case):
    """Attention along the edges of a graph; q, k, v lie in memory as [N, H, D]."""

    graph: GraphData | None = None

    @classmethod
    def of(cls, graph: GraphData, heads: int, size: int) -> GraphCase:
        name = f"{graph.name}, {heads} x {size}"
        return cls(name, graph.relation(), graph.num_nodes, heads=heads, size=size, graph=graph)

    @property
    def edge_index(self) -> Tensor:
        """[2, E]."""
        assert self.graph is not None
        return torch.from_numpy(self.graph.edge_index)

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See :class:`Case`."""
        generator = torch.Generator().manual_seed(0)
        shape = (1, self.tokens, self.heads, self.size)
        q, k, v, d_out = (torch.randn(shape, generator=generator).transpose(1, 2) for _ in range(4))
        return q, k, v, d_out

    @cached_property
    def fault(self) -> str:
        """What is wrong with results and gradients of some rows against float64; empty = nothing."""
        q, k, v, d_out = self.inputs()
        rows = torch.linspace(0, self.tokens - 1, min(self.tokens, CHECKED_ROWS)).long()
        chosen = torch.full((self.tokens,), -1).index_copy_(0, rows, torch.arange(len(rows)))
        edge_index = self.edge_index[:, chosen[self.edge_index[1]] >= 0]
        source, place = edge_index[0], chosen[edge_index[1]]

        def results(attend: Attend, dtype: torch.dtype) -> list[Tensor]:
            leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
            out = attend(*leaves)
            return [out, *torch.autograd.grad(out, leaves, d_out[:, :, rows].to(dtype))]

        def by_edge(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return message_passing(q[:, :, rows], k, v, source, place)

        got = results(lambda q, k, v: self.attend(q, k, v)[:, :, rows], torch.float32)
        same, exact = results(by_edge, torch.float32), results(by_edge, torch.float64)
        sizes = magnitudes(q[:, :, rows], k, v, d_out[:, :, rows], torch.zeros(1), self.size**-0.5)
        try:
            names = ("out", "query", "key", "value")
            for name, mine, theirs, truth in zip(names, got, same, exact, strict=True):
                factor = 2.0 if name == "out" else 3.0
                assert_no_worse(name, mine, theirs, truth, factor, magnitude=sizes[name])
        except AssertionError as error:
            return str(error)
        return ""


def message_passing(q: Tensor, k: Tensor, v: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """Attention along edges as graph libraries do it: a message per edge, softmax over each target's.

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
    "SBM batch": lambda: generators.sbm_batch(256),
    "8-hop icosphere": lambda: named("8-hop icosphere", generators.hops(generators.icosphere(5), 8)),
    "kNN-16 Morton": lambda: generators.knn_cloud(100_000, 16, order="morton"),
    "kNN-16 random": lambda: generators.knn_cloud(100_000, 16),
    "R-MAT 170k": lambda: generators.rmat(NODES, EDGES),
    "SBM 170k": lambda: generators.sbm(NODES, EDGES),
}
