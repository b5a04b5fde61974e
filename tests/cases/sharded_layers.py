"""What processes of a group compute in tests of PyG's layers: a layer on a graph, and on its shard."""

from __future__ import annotations

import random
import sys
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import attnbias as ab
from cases.sharded import difference
from cases.sharded_graphs import draw_graph, grads_of, sum_ranks, whole_edges


def draw_layer(name: str, options: dict[str, Any], pair: tuple[int, int] | None, seed: int) -> LayerCall:
    """Draw a layer and its inputs in float64; ``pair`` makes two kinds of nodes."""
    sys.modules.setdefault("torch_geometric", None)  # type: ignore[arg-type]  # seconds in each process
    from attnbias.integrations import pyg

    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    layer = getattr(pyg, name)(12, 5, heads=3, **options).double()
    if pair is None:
        graph, _ = draw_graph(seed)
    else:
        low = torch.randint(0, min(pair), (2, 150), generator=generator)
        graph = ab.Graph(torch.cat([low, low[:, :9], torch.arange(4).expand(2, -1)], 1), size=pair)
    targets, sources = graph.lengths
    counts = (sources,) if pair is None else (sources, targets)
    x = [torch.randn(n, 12, generator=generator, dtype=torch.float64) for n in counts]
    attr = torch.randn(graph.edge_index.shape[1], 4, generator=generator, dtype=torch.float64)
    return LayerCall(layer, graph, x, attr if "edge_dim" in options else None)


class LayerCall(NamedTuple):
    """A layer and its inputs."""

    layer: Any
    graph: ab.Graph
    x: list[Tensor]  # of nodes, or of sources and targets
    attr: Tensor | None  # [E, 4]

    def shard(self, size: int) -> ab.Shard:
        """Shard the graph: by its edges, or at random where there are two kinds of nodes."""
        q_len, k_len = self.graph.lengths
        if q_len == k_len:
            return self.graph.shard()
        rng = random.Random(q_len)
        return ab.shard(self.graph, (q_len, k_len), split=[rng.randrange(size) for _ in range(q_len)])

    def run(self, edges: Any, with_weights: bool) -> Answer:
        """Return results and gradients."""
        leaves = [x.detach().requires_grad_() for x in (*self.x, *([] if self.attr is None else [self.attr]))]
        x, attr = leaves[: len(self.x)], None if self.attr is None else leaves[-1]
        torch.manual_seed(7)
        given = {"return_attention_weights": True} if with_weights else {}
        answer = self.layer(x[0] if len(x) == 1 else tuple(x), edges, attr, **given)
        out, (index, weights) = answer if with_weights else (answer, (None, None))
        loss = (out * torch.linspace(-1, 1, out.shape[1], dtype=torch.float64)).sum()
        if weights is not None:
            loss = loss + (weights**2).sum()
        grads = grads_of(loss, [*leaves, *self.layer.parameters()])
        return Answer(out.detach(), index, weights, grads[: len(leaves)], grads[len(leaves) :])


class Answer(NamedTuple):
    """What a layer returned, and gradients."""

    out: Tensor
    index: Tensor | None  # edges [2, E]
    weights: Tensor | None  # [E, H]
    inputs: list[Tensor]  # gradients of x and edge_attr
    parameters: list[Tensor]  # gradients


def compare_layer(
    rank: int,
    size: int,
    name: str,
    options: dict[str, Any],
    pair: tuple[int, int] | None = None,
    with_weights: bool = False,
    seed: int = 5,
) -> list[str]:
    """Run a layer of ``attnbias.integrations.pyg`` on a graph and on its shard; return what differs."""
    call = draw_layer(name, options, pair, seed)
    whole, shard = call.run(call.graph, with_weights), call.shard(size)
    sides: list[Any] = ["keys", "queries"][: len(call.x)]
    x = [shard.scatter(each, 0, of=side) for each, side in zip(call.x, sides, strict=True)]
    attr = None if call.attr is None else call.attr[shard.edges]
    part = call._replace(x=x, attr=attr).run(shard, with_weights)
    gathered = [shard.gather(each, 0, of=side) for each, side in zip(part.inputs, sides, strict=False)]
    if call.attr is not None:
        gathered.append(whole_edges(shard, part.inputs[-1], len(call.attr)))
    pairs = [("out", whole.out, shard.gather(part.out, 0))]
    pairs += [(f"input {i}", *both) for i, both in enumerate(zip(whole.inputs, gathered, strict=True))]
    pairs += [
        (f"parameter {i}", a, sum_ranks(b))
        for i, (a, b) in enumerate(zip(whole.parameters, part.parameters, strict=True))
    ]
    if with_weights:
        pairs.append(("weights", by_pair(whole, shard), by_pair(gather_weights(part), shard)))
    return [
        f"{name} {options} {pair}: {what} differs by {difference(a, b)}"
        for what, a, b in pairs
        if difference(a, b) > 1e-12
    ]


def gather_weights(part: Answer) -> Answer:
    """Return the same with the weights and edges of all ranks."""
    assert part.weights is not None
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (part.index, part.weights.detach()))
    return part._replace(
        index=torch.cat([index for index, _ in everyone], 1), weights=torch.cat([w for _, w in everyone])
    )


def by_pair(answer: Answer, shard: ab.Shard) -> Tensor:
    """Return weights by target, source and number: duplicates have one order, as they are on one rank."""
    assert answer.index is not None and answer.weights is not None
    source, target = answer.index
    return answer.weights.detach()[torch.argsort(target * shard.held("keys")[1] + source, stable=True)]
