"""What processes of a group compute in tests of graphs: a call or a layer, whole and sharded."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import attnbias as ab
from attnbias.testing import assert_no_worse
from cases.sharded import difference

NODES = (1, 3, 97, 127, 128, 129, 300)
SPLITS = ("rcm", "morton", "parts", "first only")
CALLS = ("plain", "bias", "additive", "dropout", "gqa")


def draw_graph(seed: int) -> tuple[ab.Graph, Tensor]:
    """Draw points, and a graph of near ones with far edges, duplicates, loops and nodes without an edge."""
    generator = torch.Generator().manual_seed(seed)
    nodes = random.Random(seed).choice(NODES)
    points = torch.rand(nodes, 2, generator=generator)
    near = ab.knn_graph(points, 4).edge_index
    far = torch.randint(0, nodes, (2, nodes), generator=generator)
    index = torch.cat([near, far, near[:, ::5], torch.arange(0, nodes, 3).expand(2, -1)], 1)
    index = index[:, index[1] % 7 != 5]  # these have no edge
    return ab.Graph(index[:, torch.randperm(index.shape[1], generator=generator)], num_nodes=nodes), points


def shard_of(graph: ab.Graph, points: Tensor, split: str, ranks: int, mesh: Any = None) -> ab.Shard:
    """Shard a graph in one of the ways."""
    if split == "rcm":
        return graph.shard(mesh)
    if split == "morton":
        return graph.shard(mesh, points=points)
    if split == "first only":  # all others are empty
        return graph.shard(mesh, torch.zeros(len(points), dtype=torch.int64))
    generator = torch.Generator().manual_seed(len(points))
    return graph.shard(mesh, torch.randint(0, ranks, (len(points),), generator=generator))


def leaves_of(kind: str, graph: ab.Graph, seed: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Return query, key and value, and what else has a gradient: a number per edge, weights of a score."""
    generator = torch.Generator().manual_seed(seed)
    nodes, H, Hk, D, E = graph.lengths[0], 4, 2 if kind == "gqa" else 4, 6, 5

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    tensors = [leaf(1, H, nodes, D), leaf(1, Hk, nodes, D), leaf(1, Hk, nodes, E)]
    return tensors, [leaf(graph.edge_index.shape[1], H), leaf(H, D)]


def options_of(kind: str, bias: Tensor, weight: Tensor) -> dict[str, Any]:
    """Return the options of a kind of call."""
    if kind == "bias":
        return {"terms": [ab.EdgeBias(bias)], "dropout_p": 0.3}
    if kind == "additive":
        return {"score": ab.AdditiveScore(weight), "terms": [ab.EdgeBias(bias)]}
    return {"dropout_p": 0.3} if kind == "dropout" else {}


def grads_of(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Return gradients, zeros where there are none."""
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True)]


def sum_ranks(x: Tensor) -> Tensor:
    """Return the sum over ranks."""
    total = x.detach().clone()
    dist.all_reduce(total)
    return total


def whole_edges(shard: ab.Shard, mine: Tensor, count: int) -> Tensor:
    """Return numbers of all edges, each from the one rank that has it."""
    return sum_ranks(mine.new_zeros(count, *mine.shape[1:]).index_add(0, shard.edges, mine.detach()))


def compare_call(rank: int, size: int, seed: int, split: str, kind: str) -> list[str]:
    """Attend over a graph in float64, whole and sharded with each rank's biases; return what differs."""
    graph, points = draw_graph(seed)
    (q, k, v), (bias, weight) = leaves_of(kind, graph, seed, torch.float64)
    torch.manual_seed(3)
    out = ab.attention(q, k, v, graph, **options_of(kind, bias, weight))
    slope = torch.linspace(-1, 1, out.shape[3], dtype=torch.float64)
    whole = [out, *grads_of((out * slope).sum(), [q, k, v, bias, weight])]

    shard = shard_of(graph, points, split, size)
    mine = [shard.scatter(x.detach(), 2).requires_grad_() for x in (q, k, v)]
    some = bias.detach()[shard.edges].requires_grad_()
    torch.manual_seed(3)
    part = ab.attention(*mine, shard, **options_of(kind, some, weight))
    *grads, d_bias, d_weight = grads_of((part * slope).sum(), [*mine, some, weight])
    sharded = [shard.gather(x.detach(), 2) for x in (part, *grads)]
    sharded += [whole_edges(shard, d_bias, len(bias)), sum_ranks(d_weight)]
    names = ("out", "dq", "dk", "dv", "dbias", "dweight")
    errors = [difference(a.detach(), b) for a, b in zip(whole, sharded, strict=True)]
    return [f"{name} differs by {error}" for name, error in zip(names, errors, strict=True) if error > 1e-12]


def compare_fetched(rank: int, size: int, seed: int) -> bool:
    """Return whether fetching keys and values, then attending, has the bits of one call."""
    graph, points = draw_graph(seed)
    shard = shard_of(graph, points, "parts", size)
    tensors, _ = leaves_of("gqa", graph, seed, torch.float32)
    found = []
    for is_fetched in (False, True):
        q, k, v = (shard.scatter(x.detach(), 2).requires_grad_() for x in tensors)
        pair = (shard.fetch(k, 2), shard.fetch(v, 2)) if is_fetched else (k, v)
        out = ab.attention(q, *pair, shard.fetched if is_fetched else shard)
        found.append([out.detach(), *grads_of((out**2).sum(), [q, k, v])])
    return all(map(torch.equal, *found))


def attend_million(rank: int, size: int, nodes: int, near: int, sampled: int) -> int:
    """Attend over a kNN graph in float32 and compare sampled rows with float64; return this rank's edges."""
    generator = torch.Generator().manual_seed(0)
    graph = ab.knn_graph(torch.rand(nodes, 3, generator=generator), near)
    shard = graph.shard()
    q, k, v = torch.randn(3, 1, 4, nodes, 16, generator=generator).unbind()
    bias = torch.randn(graph.edge_index.shape[1], 4, generator=generator)
    mine = [shard.scatter(x, 2) for x in (q, k, v)]
    out = ab.attention(*mine, shard, terms=[ab.EdgeBias(bias[shard.edges])])
    rows = torch.randperm(len(shard.positions), generator=generator)[:sampled]
    node = shard.positions[rows]
    source = graph.edge_index[0].view(nodes, near)[node]  # the edges of a point stand together

    def plain(dtype: torch.dtype) -> Tensor:
        query, key, value = (x[0].to(dtype) for x in (q, k, v))
        scores = torch.einsum("hnd,hnkd->hnk", query[:, node], key[:, source]) * 16**-0.5
        scores = scores + bias.view(nodes, near, 4)[node].permute(2, 0, 1).to(dtype)
        return torch.einsum("hnk,hnke->hne", scores.softmax(-1), value[:, source])

    assert_no_worse("out", out[0][:, rows], plain(torch.float32), plain(torch.float64))
    return len(shard.edges)
