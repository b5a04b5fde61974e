"""What processes of a group compute in tests: a random problem whole and sharded, and the difference."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import attnbias as ab
from attnbias.testing import random_relation

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
        whole, sharded = run_whole(problem), run_sharded(problem, **more)
        for number, (a, b) in enumerate(zip(whole, sharded, strict=True)):
            error = difference(a, b)
            if error > 1e-12:
                name = NAMES[number] if number < len(NAMES) else f"leaf {number - len(NAMES)}"
                told = f"{problem.relation} {problem.shard} {problem.lengths}"
                wrong.append(f"seed {seed}: {name} differs by {error}: {told}")
    return wrong
