"""What processes of a group compute in tests: a random problem whole and sharded, and the difference."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import attnbias as ab
from attnbias.testing import assert_no_worse, random_relation

LENGTHS = (1, 97, 127, 128, 129, 300, 700)
NAMES = ("out", "lse", "dq", "dk", "dv")
KINDS = ("plain", "sink", "terms", "dropout", "levels", "edges")


class Problem(NamedTuple):
    """A call of attention on whole tensors, the same on every rank."""

    tensors: list[Tensor]  # query, key, value
    relation: ab.Relation
    shard: dict[str, Any]  # arguments of ab.shard
    options: dict[str, Any]
    leaves: list[Tensor]  # of the options

    @property
    def lengths(self) -> tuple[int, int]:
        """Queries and keys."""
        return self.tensors[0].shape[2], self.tensors[1].shape[2]


def draw(seed: int, size: int, kind: str = "plain", dtype: torch.dtype = torch.float64) -> Problem:
    """Draw a relation, lengths, groups of heads and a split, with options of a kind."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    q_len = rng.choice(LENGTHS)
    k_len = rng.choice((q_len, q_len, q_len, rng.choice(LENGTHS)))
    batch, Hk = rng.choice((1, 2)), rng.choice((1, 2, 3))
    heads, D, E, first = (
        Hk * rng.choice((1, 2)),
        rng.choice((4, 6)),
        rng.choice((3, 5)),
        rng.choice((0, 0, 5)),
    )
    sizes = {"batch": batch, "heads": heads}
    splits = ["auto", "even", "zigzag", "work"]
    if kind in ("plain", "sink", "edges"):
        splits.append(torch.tensor([rng.randrange(size) for _ in range(q_len)]))  # type: ignore[arg-type]

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    if kind == "edges":
        first, index = 0, torch.randint(0, min(q_len, k_len), (2, 3 * q_len), generator=generator)
        relation: ab.Relation = ab.Graph(index, size=(k_len, q_len))
    else:
        relation = random_relation(rng, rng.randint(0, 3), q_len=first + q_len, k_len=k_len, **sizes)
        if kind == "levels" and relation.repeats:
            relation = ab.Causal()  # tiles hold no duplicate edges
    tensors = [leaf(batch, heads, q_len, D), leaf(batch, Hk, k_len, D), leaf(batch, Hk, k_len, E)]
    given = {**sizes, "q_start": first, "split": rng.choice(splits)}
    options: dict[str, Any] = {}
    leaves: list[Tensor] = []
    if kind == "sink":
        options = {"sink": leaf(heads), "softcap": 2.0, "scale": -0.3}
        leaves = [options["sink"]]
    elif kind == "terms":
        reach = max(first + q_len, k_len)
        rows = -(-reach // 7)
        leaves = [leaf(heads), leaf(heads, 8), leaf(batch, k_len), leaf(heads, (2 * rows - 1) * 13)]
        options["terms"] = [
            ab.ALiBi(leaves[0]),
            ab.RelativeBias(leaves[1], ab.t5_buckets(True, 64)),
            ab.KeyBias(leaves[2]),
            ab.GridBias(leaves[3], (rows, 7)),
            ab.PairBias(leaf(1, heads, q_len, k_len).detach(), first),
        ]
    elif kind == "dropout":
        options = {"dropout_p": 0.3}
    elif kind == "levels":
        options = {"score": ab.MultiLevel([2, D - 2])}
        given["whole_tiles"] = True
    elif kind == "edges":
        leaves = [leaf(3 * q_len, heads), leaf(heads, D)]
        options = {"terms": [ab.EdgeBias(leaves[0])], "score": ab.AdditiveScore(leaves[1]), "dropout_p": 0.2}
    return Problem(tensors, relation, given, options, leaves)


def grads_of(results: tuple[Tensor, ...], weights: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    """Return the gradients of a sum of the results, -inf of empty rows left out."""
    loss = torch.zeros((), dtype=results[0].dtype)
    for x, weight in zip(results, weights, strict=True):
        loss = loss + (x.nan_to_num(neginf=0.0) * weight).sum().to(loss)
    if not loss.requires_grad:
        return [torch.zeros_like(x) for x in leaves]
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True)]


def run_whole(problem: Problem, **more: Any) -> list[Tensor]:
    """Return out, lse, and the gradients of query, key, value and the options' leaves."""
    q, k, v = problem.tensors
    torch.manual_seed(5)
    first = problem.shard["q_start"]
    options = {**problem.options, **more}
    results = ab.attention(q, k, v, problem.relation, q_start=first, return_lse=True, **options)
    weights = weights_of(problem)
    return [x.detach() for x in (*results, *grads_of(results, weights, [q, k, v, *problem.leaves]))]


def weights_of(problem: Problem) -> list[Tensor]:
    """Return the weights of out and lse in the loss."""
    q, _, v = problem.tensors
    return [torch.linspace(-1, 1, n).to(q.dtype) for n in (v.shape[3], q.shape[2])]


def run_sharded(problem: Problem, options: dict[str, Any] | None = None, **more: Any) -> list[Tensor]:
    """Do the same on a shard, and gather; ``more`` are arguments of ``ab.shard``."""
    q, k, v = problem.tensors
    shard = ab.shard(problem.relation, problem.lengths, **problem.shard, **more)
    mine = [shard.scatter(q.detach(), 2), *(shard.scatter(x.detach(), 2, of="keys") for x in (k, v))]
    mine = [x.requires_grad_() for x in mine]
    torch.manual_seed(5)
    out, lse = ab.attention(*mine, shard, return_lse=True, **problem.options, **(options or {}))
    weights = weights_of(problem)
    grads = grads_of((out, lse), [weights[0], shard.scatter(weights[1], 0)], [*mine, *problem.leaves])
    found = [shard.gather(x, 2) for x in (out.detach(), lse.detach(), grads[0])]
    found += [shard.gather(x, 2, of="keys") for x in grads[1:3]]
    sums = [x.clone() for x in grads[3:]]
    for total in sums:  # leaves are the same on all ranks: their gradients are summed
        torch.distributed.all_reduce(total)
    return found + sums


def difference(a: Tensor, b: Tensor) -> float:
    """Return the largest difference, of the largest number if that is above 1; inf where only one is."""
    if a.shape != b.shape or not torch.equal(a.isinf(), b.isinf()):
        return float("inf")
    finite = a.isfinite()
    if not finite.any():
        return 0.0
    return float((a - b)[finite].abs().max() / a[finite].abs().max().clamp(min=1))


def compare_random(rank: int, size: int, seeds: Sequence[int], kind: str, more: dict[str, Any]) -> list[str]:
    """Compute random problems in float64; return a line for each result that differs from the whole's."""
    wrong = []
    for seed in seeds:
        problem = draw(seed, size, kind)
        sharded = run_sharded(problem, **more)
        if rank:
            continue  # all ranks have gathered the same
        whole = run_whole(problem)
        for number, (a, b) in enumerate(zip(whole, sharded, strict=True)):
            error = difference(a, b)
            if error > 1e-12:
                name = NAMES[number] if number < len(NAMES) else f"leaf {number - len(NAMES)}"
                told = f"{problem.relation} {problem.shard} {problem.lengths}"
                wrong.append(f"seed {seed}: {name} differs by {error}: {told}")
    return wrong


def compare_float32(rank: int, size: int, seeds: Sequence[int], dtype: torch.dtype) -> None:
    """Compare with float64 by the tolerance rule, against eager PyTorch of the same dtype."""
    for seed in seeds:
        exact = draw(seed, size)
        rounded = [x.detach().to(dtype).requires_grad_() for x in exact.tensors]
        mine = run_sharded(exact._replace(tensors=rounded))
        if rank:
            continue
        true = run_whole(exact._replace(tensors=[x.detach().double().requires_grad_() for x in rounded]))
        eager = run_whole(exact._replace(tensors=rounded), backend="reference")
        for number, name in enumerate(NAMES):
            if true[number].numel():
                factor = 2.0 if number < 2 else 3.0
                assert_no_worse(name, mine[number], eager[number], true[number], factor)


def run_twice(rank: int, size: int, dtype: torch.dtype) -> dict[str, bool]:
    """Return whether two runs have the same bits, and whether out and lse have those of one process."""
    same: dict[str, bool] = {}
    relations = {
        "window": ab.Window(before=300),
        "causal": ab.Causal(),
        "documents": ab.Documents.from_lengths([100, 700, 9, 391]) & ab.Causal(),
        "prefix": ab.Causal() | ab.Prefix(400),
        "short window": ab.Window(before=9),
    }
    generator = torch.Generator().manual_seed(0)
    for name, relation in relations.items():
        tensors = [torch.randn(1, h, 1200, 16, generator=generator).to(dtype) for h in (4, 2, 2)]
        problem = Problem([x.requires_grad_() for x in tensors], relation, {"q_start": 0}, {}, [])
        first, again = (run_sharded(problem, {"backend": "cpu"}) for _ in range(2))
        whole = run_whole(problem, backend="cpu")
        same[f"{name}: twice"] = all(map(torch.equal, first, again))
        same[f"{name}: as one"] = all(map(torch.equal, first[:2], whole[:2]))
    return same


def count_bytes(
    rank: int, size: int, relation: ab.Relation, length: int, options: dict[str, Any]
) -> list[Any]:
    """Return the bytes that collectives of a training step were handed, and those that were counted."""
    from torch.utils._python_dispatch import TorchDispatchMode

    received: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if func is torch.ops._c10d_functional.all_to_all_single.default:
                own = args[1][rank] * (out[0].nbytes if len(out) else 0)
                received.append(out.nbytes - own)
            return out

    shard = ab.shard(relation, length, **options)
    q, k, v = (
        torch.randn(2, h, len(shard.positions), d, dtype=torch.bfloat16, requires_grad=True)
        for h, d in ((4, 8), (2, 8), (2, 16))
    )
    out = ab.attention(q, k, v, shard)
    with Watch():  # routes and layouts are there now
        ab.attention(q, k, v, shard)
        forward = sum(received)
        received.clear()
        out.float().sum().backward()
    report = shard.explain(4, 2, (8, 16), torch.bfloat16, 2)
    way = next(way for way in report.ways if way.name == shard.by)
    return [forward, sum(received), int(way.traffic.forward[rank]), int(way.traffic.backward[rank])]


class _Model(torch.nn.Module):
    """Attention between two projections."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.out = torch.nn.Linear(32, 3 * 32), torch.nn.Linear(32, 32)

    def forward(self, x: Tensor, shard: ab.Shard, **options: Any) -> Tensor:
        q, k, v = self.into(x).view(1, -1, 3, 4, 8).permute(2, 0, 3, 1, 4)
        return self.out(ab.attention(q, k, v, shard, **options).transpose(1, 2).flatten(2))


def compile_whole(rank: int, size: int, backend: str) -> dict[str, Any]:
    """Compile a model with a shard as one graph, run it for new documents, and compare with eager."""
    model = _Model()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    terms = [ab.ALiBi(torch.rand(4))]
    found: dict[str, Any] = {"wrong": []}
    torch._dynamo.reset()
    lengths = ([300, 212, 88], [200, 200, 200], [17, 283, 300], [129, 300, 171])
    for number, each in enumerate(lengths):
        relation = ab.Documents.from_lengths(each) & ab.Causal()
        shard = ab.shard(relation, 600, split="even").prepare()
        x = shard.scatter(torch.randn(1, 600, 32, generator=torch.Generator().manual_seed(number)), 1)
        results = []
        for run in (model, compiled):
            model.zero_grad()
            out = run(x, shard, terms=terms)
            out.square().sum().backward()
            results.append([out.detach(), *(p.grad.clone() for p in model.parameters())])
        if any(difference(a, b) > 1e-5 for a, b in zip(*results, strict=True)):
            found["wrong"].append(each)
        if number == 1:  # sizes that have changed once are symbols
            found["graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    found["more"] = torch._dynamo.utils.counters["stats"]["unique_graphs"] - found["graphs"]
    for name, new, options in (
        ("unprepared", ab.shard(ab.Causal(), 600), {}),
        ("form", ab.shard(ab.Causal(), 600).prepare(), {"score": ab.AdditiveScore()}),
        ("heads", ab.shard(ab.Causal(), 600, by="heads").prepare(), {}),
    ):
        try:
            compiled(new.scatter(torch.randn(1, 600, 32), 1), new, **options)
        except Exception as error:
            found[name] = str(error)
    return found


def differ(rank: int, size: int, what: str) -> str:
    """Let rank 1 hold something else, and return what ``check`` says."""
    odd = rank == 1
    relation = ab.Window(before=200 + (odd and what == "relation"))
    length = 600 + (odd and what == "length")
    options: dict[str, Any] = {"stages": 1 + (odd and what == "stages"), "split": "even"}
    if odd and what == "split":
        options["split"] = "zigzag"
    try:
        shard = ab.shard(relation, length, check=True, **options)
        dtype = torch.float64 if odd and what == "dtype" else torch.float32
        heads = 4 if odd and what == "heads" else 2
        x = torch.zeros(1, heads, len(shard.positions), 8, dtype=dtype)
        ab.attention(x, x, x, shard)
        ab.attention(x, x, x, shard)  # compared once
    except ValueError as error:
        return str(error)
    return "equal"


def fail_on_one(rank: int, size: int, how: str) -> float:
    """Raise or die on rank 1 in the middle of a step; return how long another rank waited for it."""
    import os
    import time

    shard = ab.shard(ab.Window(before=200), 600)
    x = torch.zeros(1, 2, len(shard.positions), 8, requires_grad=True)
    out = ab.attention(x, x, x, shard)
    if rank == 1:
        if how == "die":
            os._exit(1)
        raise RuntimeError("bad data")
    began = time.monotonic()
    try:
        out.sum().backward()
        ab.attention(x, x, x, shard)
    except RuntimeError:
        return time.monotonic() - began
    return -1.0


def misuse(rank: int, size: int, what: str) -> str:
    """Return the error of a wrong call on a shard."""
    shard = ab.shard(ab.Window(before=200), 600)
    rows = len(shard.positions)
    x = torch.zeros(1, 2, rows, 8)
    torn = ab.shard(ab.Window(before=200), 600, split=torch.arange(600) % size)
    graph = ab.shard(ab.Graph(torch.randint(0, 600, (2, 900)), num_nodes=600), 600)
    calls = {
        "whole": lambda: ab.attention(torch.zeros(1, 2, 600, 8), x, x, shard),
        "keys": lambda: ab.attention(x, x[:, :, 1:], x, shard),
        "values": lambda: ab.attention(x, x, x[:, :, 1:], shard),
        "list": lambda: ab.attention([], x, x, shard),
        "q_start": lambda: ab.attention(x, x, x, shard, q_start=3),
        "option": lambda: ab.attention(x, x, x, shard, dropout=1),
        "dtype": lambda: ab.attention(x, x.double(), x, shard),
        "stages": lambda: ab.attention(x, x, x, ab.shard(ab.Causal(), 600, split="even", stages=3)),
        "both": lambda: ab.attention(x, x, x, ab.shard([ab.Causal(), ab.Full()], 600)),
        "torn": lambda: ab.attention(*[torch.zeros(1, 2, len(torn.positions), 8)] * 3, torn, dropout_p=0.5),
        "levels": lambda: ab.attention(
            *[torch.zeros(1, 2, len(graph.positions), 8)] * 3, graph, score=ab.MultiLevel([4, 4])
        ),
        "scatter": lambda: shard.scatter(torch.zeros(599), 0),
        "gather": lambda: shard.gather(torch.zeros(rows + 1), 0),
        "side": lambda: shard.scatter(torch.zeros(600), 0, of="values"),
        "on": lambda: ab.shard(ab.Causal(), 600, size + 1).on(),
        "mesh": lambda: ab.shard(ab.Causal(), 600, "cp"),
        "rank": lambda: ab.shard(ab.Causal(), 600, rank=0),
        "dims": lambda: ab.shard(ab.Causal(), 600, torch.distributed.init_device_mesh("cpu", (1, size))),
        "names": lambda: ab.shard(
            ab.Causal(),
            600,
            torch.distributed.init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "cp")),
        ),
        "batch": lambda: ab.attention(
            x, x, x, ab.shard(ab.Documents(torch.zeros(3, 600).long()), 600, split="even")
        ),
    }
    try:
        calls[what]()
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def use_whole_tensors(rank: int, size: int) -> dict[str, Any]:
    """Scatter, gather and shard several relations; return facts to look at."""
    shard = ab.shard([ab.Causal(), ab.Window(before=99)], 700, split="zigzag", weights=[1, 3])
    whole = torch.arange(700.0).view(1, 700, 1)
    part = shard.scatter(whole, 1).requires_grad_()
    back = shard.gather(part, 1)
    (back * torch.arange(700.0).view(1, 700, 1) * (rank + 1)).sum().backward()
    facts = {
        "same": torch.equal(back, whole),
        "positions": torch.equal(shard.positions, part[0, :, 0].long()),
        "grad": torch.equal(part.grad, part.detach() * (size * (size + 1) // 2)),  # over all ranks
        "relations": [each.relation for each in shard],
    }
    x = shard.scatter(torch.randn(2, 700, 8, generator=torch.Generator().manual_seed(0)), 1)
    same = []
    for each, relation in zip(shard, facts["relations"], strict=True):
        out = shard.gather(ab.attention(x, x, x, each), 1)  # without a batch
        all_x = shard.gather(x, 1)
        same.append(difference(out, ab.attention(all_x, all_x, all_x, relation)) < 1e-5)
    facts["attention"] = same
    mesh = torch.distributed.init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "cp"))
    loaded = ab.shard(ab.Causal(), 700, size, rank=rank).on(mesh["cp"])
    y = loaded.scatter(all_x, 1)
    out, row_max = ab.attention(y, y, y, loaded, return_max=True)
    facts["max"] = difference(
        loaded.gather(row_max, 1), ab.attention(all_x, all_x, all_x, ab.Causal(), return_max=True)[1]
    )
    facts["max_logit"] = difference(ab.max_logit(y, y, loaded), ab.max_logit(all_x, all_x, ab.Causal()))
    halves = y.bfloat16()
    facts["half"] = ab.attention(halves, halves, halves, loaded).dtype
    return facts
