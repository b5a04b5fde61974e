"""What processes compute in tests of DTensors: a call whole, the same on DTensors, and the difference."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import attnbias as ab
from attnbias.testing import random_relation
from cases.sharded import Problem, difference, grads_of

KINDS = ("plain", "sink", "terms", "dropout", "edges", "batches", "plain", "batches")
LEAVES = ("plain", "replicated", "sharded")
_meshes: dict[tuple[int, ...], Any] = {}


def mesh_of(*shape: int) -> Any:
    """Return a mesh of all processes, made once."""
    if shape not in _meshes:
        names = ("a", "b", "c")[: len(shape)]
        _meshes[shape] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return _meshes[shape]


def draw_call(seed: int, kind: str, how: str) -> Problem:
    """Draw a call with batches and heads to shard; of whole tiles, where the sequence is sharded."""
    rng = random.Random(f"{seed} {how}")
    generator = torch.Generator().manual_seed(seed)
    batch = rng.choice((2, 3))
    groups = ((2, 2), (4, 1), (2, 3), (1, 4), (1, 3))
    Hk, group = rng.choice(groups[:3] if how == "heads" else groups)
    heads, D, E, first = Hk * group, 6, 5, rng.choice((0, 5))
    q_len, k_len = rng.choice((1, 97, 129)), rng.choice((97, 129))
    if "sequence" in how:
        q_len = k_len = q_len if kind in ("plain", "batches") else 256

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    sizes = {"batch": batch, "heads": heads}
    relation = random_relation(rng, rng.randint(0, 3), q_len=first + q_len, k_len=k_len, **sizes)
    options: dict[str, Any] = {}
    leaves: list[Tensor] = []
    if kind == "sink":
        leaves = [leaf(heads)]
        options = {"sink": leaves[0], "softcap": 2.0, "scale": -0.3}
    elif kind == "terms":
        leaves = [leaf(batch, heads), leaf(heads, 8), leaf(batch, k_len), leaf(batch, 1, q_len, k_len)]
        options["terms"] = [
            ab.ALiBi(leaves[0]),
            ab.RelativeBias(leaves[1], ab.t5_buckets(True, 64)),
            ab.KeyBias(leaves[2]),
            ab.PairBias(leaves[3], first),
        ]
    elif kind == "dropout":
        options = {"dropout_p": 0.3}
    elif kind == "edges":
        first, k_len = 0, q_len
        index = torch.randint(0, q_len, (2, 3 * q_len), generator=generator)
        relation = ab.Graph(index, num_nodes=q_len)
        leaves = [leaf(3 * q_len, heads), leaf(heads, D)]
        options = {"terms": [ab.EdgeBias(leaves[0])], "score": ab.AdditiveScore(leaves[1]), "dropout_p": 0.2}
    elif kind == "batches":
        # As a function of batch and head, and as data.
        rule = ab.Where(lambda q, k, b, h: (q + k + b) % (h + 2) != 0)
        lengths = torch.randint(0, k_len + 1, (batch,), generator=generator)
        per_head = ab.PerHead([ab.Window(before=3 * n, after=n) for n in range(heads)])
        relation = rng.choice((rule, ab.Padding(lengths) & per_head, rule | per_head))
    tensors = [leaf(batch, heads, q_len, D), leaf(batch, Hk, k_len, D), leaf(batch, Hk, k_len, E)]
    return Problem(tensors, relation, {"q_start": first}, options, leaves)


PLACEMENTS = {  # of a mesh of two dimensions: query, then key and value if they differ
    "batch": ([Shard(0), Replicate()],),
    "heads": ([Replicate(), Shard(1)],),
    "key heads replicated": ([Replicate(), Shard(1)], [Replicate(), Replicate()]),
    "batch and heads": ([Shard(0), Shard(1)], [Shard(0), Replicate()]),
    "batch over both": ([Shard(0), Shard(0)],),
    "sequence": ([Replicate(), Shard(2)],),
    "batch and sequence": ([Shard(0), Shard(2)],),
    "heads and sequence": ([Shard(1), Shard(2)], [Replicate(), Shard(2)]),
    "partial": ([Partial(), Shard(1)], [Partial(), Replicate()]),
}


def spread(x: Tensor, mesh: Any, placements: list[Any], *, leaf: bool = True) -> DTensor:
    """Return a tensor of all ranks as a DTensor, partial sums included."""
    x = x.detach()
    parts = [Replicate() if isinstance(p, Partial) else p for p in placements]
    local = distribute_tensor(x, mesh, parts, src_data_rank=None).to_local().clone()
    for number, place in enumerate(placements):
        if isinstance(place, Partial):
            local = local / mesh.size(number)
    made = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=x.shape, stride=x.contiguous().stride()
    )
    return made.requires_grad_(leaf)


def run_dtensors(
    problem: Problem, mesh: Any, placements: tuple[list[Any], ...], leaf_kind: str
) -> list[Tensor]:
    """Return out, lse, and gradients of query, key, value and the options' leaves, all whole."""
    of = [placements[0], placements[-1], placements[-1]]
    tensors = [spread(x, mesh, each) for x, each in zip(problem.tensors, of, strict=True)]
    leaves = [x.detach().clone().requires_grad_() for x in problem.leaves]
    if leaf_kind == "replicated":
        leaves = [spread(x, mesh, [Replicate()] * mesh.ndim) for x in leaves]
    elif leaf_kind == "sharded":
        leaves = [spread(x, mesh, [Shard(0), Replicate()]) for x in leaves]
    options = swap(problem.options, problem.leaves, leaves)
    torch.manual_seed(5)
    first = problem.shard["q_start"]
    out, lse = ab.attention(*tensors, problem.relation, q_start=first, return_lse=True, **options)
    settled = tuple(Replicate() if isinstance(p, Partial) else p for p in placements[0])
    assert out.placements == lse.placements == settled
    loss = torch.zeros((), dtype=torch.float64)
    for x, weight in zip((out, lse), weights_of(problem), strict=True):
        finite = x.full_tensor().nan_to_num(neginf=0.0)
        loss = loss + (finite * weight).sum()
    found = torch.autograd.grad(loss, [*tensors, *leaves], allow_unused=True)
    grads = [torch.zeros_like(x) if g is None else g for g, x in zip(found, [*tensors, *leaves], strict=True)]
    results = [x.full_tensor() if isinstance(x, DTensor) else x for x in (out, lse, *grads)]
    return [x.detach() for x in results]


def weights_of(problem: Problem) -> list[Tensor]:
    """Return the weights of out and lse in the loss."""
    q, _, v = problem.tensors
    return [torch.linspace(-1, 1, n).to(q.dtype) for n in (v.shape[3], q.shape[2])]


def swap(options: dict[str, Any], old: list[Tensor], new: list[Tensor]) -> dict[str, Any]:
    """Return options with other leaves in the places of the old ones."""
    by_id = {id(x): y for x, y in zip(old, new, strict=True)}

    def swapped(x: Any) -> Any:
        if isinstance(x, Tensor):
            return by_id.get(id(x), x)
        if isinstance(x, list):
            return [swapped(each) for each in x]
        if hasattr(x, "__dataclass_fields__"):
            return type(x)(*(swapped(getattr(x, name)) for name in x.__dataclass_fields__))
        return x

    return {name: swapped(x) for name, x in options.items()}


def run_whole(problem: Problem) -> list[Tensor]:
    """Return the same of one process."""
    torch.manual_seed(5)
    q, k, v = problem.tensors
    first = problem.shard["q_start"]
    results = ab.attention(q, k, v, problem.relation, q_start=first, return_lse=True, **problem.options)
    grads = grads_of(results, weights_of(problem), [q, k, v, *problem.leaves])
    return [x.detach() for x in (*results, *grads)]


def compare_dtensors(rank: int, size: int, shape: tuple[int, ...], how: str, seeds: range) -> list[str]:
    """Return a line for each result that differs from the whole's."""
    wrong = []
    mesh = mesh_of(*shape)
    for seed in seeds:
        kind, leaf_kind = KINDS[seed % len(KINDS)], LEAVES[seed % len(LEAVES)]
        problem = draw_call(seed, kind, how)
        whole = run_whole(problem)
        for number, (a, b) in enumerate(
            zip(whole, run_dtensors(problem, mesh, PLACEMENTS[how], leaf_kind), strict=True)
        ):
            error = difference(a, b)
            if error > 1e-12:
                sizes = [list(x.shape) for x in problem.tensors]
                wrong.append(f"{kind} {seed}: result {number} differs by {error}: {problem.relation} {sizes}")
    return wrong


def errors_of(rank: int, size: int) -> dict[str, str]:
    """Return the sentences with which calls are refused."""
    mesh = mesh_of(size)

    def sharded(*shape: int, dim: int = 1) -> DTensor:
        return spread(torch.ones(shape), mesh, [Shard(dim)])

    four, by_batch, by_row = sharded(2, 4, 9, 3), sharded(2, 4, 9, 3, dim=0), sharded(2, 4, 100, 3, dim=2)
    by_feature, flat, one = sharded(2, 4, 9, 4, dim=3), sharded(4, 4), sharded(2, 1, 9, 3)
    three = spread(torch.ones(2, 3, 9, 3), mesh, [Replicate()])
    tiled, short = sharded(2, 4, 256, 3, dim=2), sharded(2, 4, 97, 3, dim=2)
    heads = ab.PerHead([ab.Causal(), ab.Full(), ab.Causal(), ab.Window(before=2)])
    calls: dict[str, tuple[Any, ...]] = {
        "plain key": (four, torch.ones(2, 4, 9, 3), four),
        "mixed": (four, by_batch, by_batch),
        "features": (by_feature, by_feature, by_feature),
        "dimensions": (flat, flat, flat),
        "groups": (four, three, three),
        "few heads": (one, one, one),
        "key heads": (four, sharded(2, 1, 9, 3), sharded(2, 1, 9, 3)),
        "torn tiles": (by_row, by_row, by_row, None, {"dropout_p": 0.5}),
        "key length": (tiled, short, short),
        "layout": (tiled, tiled, tiled, ab.Causal().layout(256, 256)),
        "layout of heads": (four, four, four, heads.layout(9, 9)),
        "shard of heads": (four, four, four, ab.shard(heads, 18, mesh)),
        "batch size": (by_batch, by_batch, by_batch, ab.Padding([1, 2, 3])),
        "sink size": (four, four, four, None, {"sink": torch.ones(3)}),
    }
    sentences = {}
    for name, (query, key, value, *more) in calls.items():
        relation, options = (*more, None, {})[:2] if len(more) < 2 else more
        try:
            ab.attention(query, key, value, relation, **(options or {}))
        except (TypeError, ValueError) as error:
            sentences[name] = str(error)
    return sentences
