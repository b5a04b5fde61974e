"""What processes compute in tests of models: the same model in one process and over several."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import attnbias as ab
from attnbias.nn import (
    BilinearBTTAttention,
    BilinearMLRAttention,
    Block,
    GraphAttention,
    MLRAttention,
    RelationalAttention,
    Rotary,
)
from cases.dtensors import mesh_of
from cases.sharded import difference

SIZE = 24
RELATION = ab.Causal() & ab.Window(before=150)


def make_layer(relation: ab.Relation | None = None) -> RelationalAttention:
    """Make a layer with grouped heads of a size that is not d_model / heads."""
    torch.manual_seed(0)
    options = {"head_size": 6, "key_heads": 2, "rotary": Rotary(6), "bias": True, "dtype": torch.float64}
    return RelationalAttention(SIZE, 4, relation, **options)  # type: ignore[arg-type]


def tokens(length: int, batch: int = 2) -> Tensor:
    """Return the same tokens on every rank."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, length, SIZE, generator=generator, dtype=torch.float64)


def whole_of(x: Tensor) -> Tensor:
    """Return a DTensor as a plain tensor."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def compare(names: list[str], found: list[Tensor], wanted: list[Tensor]) -> list[str]:
    """Return a line for each that differs."""
    errors = [difference(a, b) for a, b in zip(wanted, found, strict=True)]
    return [f"{name} differs by {error}" for name, error in zip(names, errors, strict=True) if error > 1e-12]


def tensor_parallel(rank: int, size: int, local: bool, length: int) -> list[str]:
    """Run a layer by a plan of tensor parallelism, whose projections give local tensors or DTensors."""
    relation = ab.Causal() & ab.Window(before=40)
    one = make_layer(relation)
    many = copy.deepcopy(one)
    column = ColwiseParallel() if local else ColwiseParallel(use_local_output=False)
    plan = {"query": column, "key": column, "value": column, "out": RowwiseParallel()}
    parallelize_module(many, mesh_of(size), plan)
    x, y = (tokens(length).requires_grad_() for _ in range(2))
    one(x).square().sum().backward()
    out = many(y)
    out.square().sum().backward()
    names = ["out", "dx", *(name for name, _ in one.named_parameters())]
    wanted = [one(x), x.grad, *(p.grad for p in one.parameters())]
    found = [out, y.grad, *(whole_of(p.grad) for p in many.parameters())]
    return compare(names, found, wanted)


def fully_sharded(rank: int, size: int, length: int) -> list[str]:
    """Train a model of two blocks, weights by FSDP2 and tokens by a shard, beside one process."""
    relation = ab.Causal() & ab.Window(before=70)
    one = nn.ModuleList([Block(make_layer(relation), SIZE) for _ in range(2)]).double()
    many = copy.deepcopy(one)
    for block in many:
        fully_shard(block, mesh=mesh_of(size))
    shard = ab.shard(relation, length, mesh_of(size))
    whole, wanted = tokens(length), tokens(length).flip(1)
    steps = [torch.optim.AdamW(model.parameters(), 0.01) for model in (one, many)]
    losses: list[list[Tensor]] = [[], []]
    for _ in range(2):
        for number, (model, step) in enumerate(zip((one, many), steps, strict=True)):
            x, y = (whole, wanted) if number == 0 else (shard.scatter(z, 1) for z in (whole, wanted))
            for block in model:
                x = block(x, relation=shard if number else None)
            # FSDP averages gradients over ranks: each has its share of the mean, times their number.
            loss = (x - y).square().sum() * (size if number else 1) / whole.numel()
            loss.backward()
            step.step()
            step.zero_grad()
            total = loss.detach().clone()
            if number:
                torch.distributed.all_reduce(total)
            losses[number].append(total / (size if number else 1))
    names = ["loss 0", "loss 1", *(name for name, _ in one.named_parameters())]
    found = [*losses[1], *(whole_of(p.detach()) for p in many.parameters())]
    return compare(names, found, [*losses[0], *(p.detach() for p in one.parameters())])


def structured_on_shards(rank: int, size: int, length: int) -> list[str]:
    """Run layers with structured scores on a shard and on a mesh, beside one process."""
    torch.manual_seed(0)
    layers = [
        MLRAttention(SIZE, 4, [3, 2, 1], RELATION, widths=[None, 96, 16], dtype=torch.float64),
        BilinearMLRAttention(SIZE, 4, [2, 4], RELATION, dtype=torch.float64),
        BilinearBTTAttention(SIZE, 4, RELATION, dtype=torch.float64),
    ]
    for layer in layers:
        nn.init.normal_(layer.output.weight)
    return [line for layer in layers for line in _beside_one(layer, size, length)]


def _beside_one(one: nn.Module, size: int, length: int) -> list[str]:
    """Run a layer with ``RELATION`` over processes, and compare it with itself in one."""
    x, wrong = tokens(length).requires_grad_(), []
    out = one(x)
    out.square().sum().backward()
    wanted = [out.detach(), x.grad, *(p.grad for p in one.parameters())]
    zigzag = ab.shard(RELATION, length, mesh_of(size), split="zigzag")
    even = ab.shard(RELATION, length, mesh_of(size), split="even")
    for shard, options in ((zigzag, {"relation": zigzag}), (even, {"mesh": mesh_of(size), "length": length})):
        many = copy.deepcopy(one)
        many.zero_grad()
        mine = shard.scatter(x.detach(), 1).requires_grad_()
        part = many(mine, **options)
        part.square().sum().backward()
        found = [shard.gather(part.detach(), 1), shard.gather(mine.grad, 1)]
        for parameter in many.parameters():
            torch.distributed.all_reduce(parameter.grad)
            found.append(parameter.grad)
        wrong += compare(["out", "dx", *(name for name, _ in one.named_parameters())], found, wanted)
    return wrong


def layers_on_shards(rank: int, size: int, length: int) -> list[str]:
    """Run layers on a shard and on a mesh, beside one process."""
    wrong = _beside_one(make_layer(RELATION), size, length)
    x = tokens(length)
    graph = ab.Graph([[0, 3, length - 1], [length - 1, 0, 2]], num_nodes=length)
    layer = GraphAttention(SIZE, 2, dtype=torch.float64)
    for parameter in layer.parameters():
        torch.distributed.broadcast(parameter.data, 0)
    even = ab.shard(graph, length, mesh_of(size), split="even")
    part = layer(even.scatter(x, 1), graph, mesh=mesh_of(size), length=length)
    return wrong + compare(["graph"], [even.gather(part, 1)], [layer(x, graph)])
