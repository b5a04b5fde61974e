"""Problems drawn at random, each compared with the textbook computation in float64."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from . import testing
from .buckets import linear_buckets, t5_buckets
from .layouts.layout import Form
from .ops import attention
from .relations import Causal, Graph, Neighbors, Relation, Window
from .relations.listing import count_edges, list_edges
from .scores import AdditiveScore
from .terms import ALiBi, EdgeBias, GridBias, KernelTerm, KeyBias, PairBias, RelativeBias

RESULTS = ("out", "lse", "query", "key", "value", "sink")


@dataclass(frozen=True)
class Drawn:
    """A random call of ``attention``: everything follows from its seed."""

    seed: int
    inputs: tuple[Tensor, Tensor, Tensor]
    relation: Relation
    options: dict[str, Any]
    form: Form | None  # of the layout that is given instead of the relation; None: the relation itself

    def __str__(self) -> str:
        shapes = ", ".join(str(list(x.shape)) for x in self.inputs)
        given = f"a layout (form {self.form!r}) of " if self.form else ""
        return f"seed {self.seed}: {shapes} {self.inputs[0].dtype}, {given}{self.relation}, {self.options}"


class _Slope:
    """A score term by its definition alone."""

    def value(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return -0.1 * (h + b + 1) * (q - k).abs()


@dataclass(frozen=True)
class _SumOfEdges:
    """A term that stands for an ``EdgeBias``: the logarithm of the summed exp(bias) of each pair's edges."""

    bias: Tensor  # [E, H or 1]
    relation: Relation
    sizes: tuple[int, int, int, int]  # batch, heads, queries, keys
    first: int  # position of the first query

    def value(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        batch, heads, q_len, k_len = self.sizes
        listing = list_edges(self.relation, "terms")
        inside = (listing.q >= self.first) & (listing.q < self.first + q_len) & (listing.k < k_len)
        number, batch_of, head_of, position, key = listing.keep(inside, self.bias.device)
        total = self.bias.new_zeros(self.sizes)
        for i, j in itertools.product(range(batch), range(heads)):
            mine = torch.ones_like(number, dtype=torch.bool)
            for index, here in ((batch_of, i), (head_of, j)):
                mine = mine if index is None else mine & (index == here)
            row, column = position[mine] - self.first, key[mine]
            place = torch.full_like(row, i), torch.full_like(row, j), row, column
            weight = self.bias[number[mine], j % self.bias.shape[1]].exp()
            total = total.index_put(place, weight, accumulate=True)
        return torch.where(total > 0, total.where(total > 0, 1).log(), -math.inf)


def _draw_terms(
    rng: random.Random, dtype: torch.dtype, batch: int, heads: int, first: int, q_len: int, k_len: int
) -> list[Any]:
    """One to three of the library's terms, each around a leaf of its own that the dtype can hold."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))

    def leaf(*shape: int) -> Tensor:
        x = torch.randn(shape, generator=generator).to(dtype)
        if rng.random() < 0.2:  # -inf removes a pair; the same ones in every precision
            x[torch.rand(shape, generator=generator) < 0.1] = -math.inf
        return x.requires_grad_()

    def one_or(n: int) -> int:
        return rng.choice([1, n])

    columns = rng.randint(1, 20)
    rows = max(1, -(-max(first + q_len, k_len) // columns))
    count = rng.choice([8, 16, 32])
    slopes = (heads,) if rng.random() < 0.5 else (batch, heads)
    makers: list[Callable[[], KernelTerm]] = [
        lambda: ALiBi((0.2 * torch.rand(slopes, generator=generator)).to(dtype).requires_grad_()),
        lambda: RelativeBias(leaf(heads, count), t5_buckets(rng.random() < 0.5, 64)),
        lambda: RelativeBias(leaf(heads, 9), linear_buckets(4)),
        lambda: GridBias(leaf(heads, (2 * rows - 1) * (2 * columns - 1)), (rows, columns)),
        lambda: KeyBias(
            leaf(one_or(batch), k_len) if rng.random() < 0.5 else leaf(batch, one_or(heads), k_len)
        ),
        lambda: PairBias(leaf(one_or(batch), one_or(heads), one_or(q_len), one_or(k_len)), first),
    ]
    return [make() for make in rng.sample(makers, rng.choice([1, 1, 2, 3]))]


def _leaf(term: KernelTerm) -> Tensor:
    """The tensor that a term is made of."""
    leaf = getattr(term, fields(term)[0].name)  # type: ignore[arg-type]
    assert isinstance(leaf, Tensor)
    return leaf


def _reach(terms: Sequence[Any], drawn: Drawn) -> tuple[float, list[float]]:
    """The largest sum of all terms, and what a pair's gradient is multiplied by on its way to each leaf."""
    query, key, _ = drawn.inputs
    farthest = query.shape[2] + key.shape[2] + 9.0
    total, factors = 0.0, []
    for term in terms:
        if isinstance(term, KernelTerm):
            leaf = _leaf(term).detach()
            sizes = leaf[leaf.isfinite()].abs()
            factors.append(farthest if isinstance(term, ALiBi) else 1.0)
            total += factors[-1] * float(sizes.max()) if sizes.numel() else 0.0
    return total, factors


def draw(seed: int, *, plain: bool = False, small: bool = False) -> Drawn:
    """Draw a problem: ragged lengths, strides, groups, options.

    Args:
        seed: all follows from it.
        plain: leave the options out.
        small: few heads, queries and columns, for an interpreter or an emulator of a GPU.

    Returns:
        One problem of eight is a graph with what edges alone have: numbers of their own, additive scores.
    """
    if seed % 8 == 7:
        return _draw_edges(seed, plain=plain, small=small)
    rng = random.Random(seed)
    batch, key_heads = rng.choice([1, 1, 2]), rng.choice([1, 2])
    heads = key_heads * rng.choice([1, 1, 2] if small else [1, 1, 2, 3])
    k_len = rng.choice([0, 1, 5, 17, 24, 65, 97] if small else [0, 1, 5, 17, 24, 63, 64, 65, 97, 130, 260])
    few, many = (min(k_len, 24), 24) if small else (k_len, 65)
    q_len = rng.choice([0, 1, 7, 24, few, few, few, many])
    start: Any = rng.choice([0, 0, "end", rng.randint(0, 9)])
    if start == "end" and q_len > k_len:
        start = 0  # a relation's data has no negative positions
    first = k_len - q_len if start == "end" else start
    relation = testing.random_relation(
        rng, rng.randint(0, 3), q_len=first + q_len, k_len=k_len, batch=batch, heads=heads
    )
    inputs = testing.make_inputs(
        rng.randrange(1 << 30),
        batch,
        heads,
        key_heads,
        q_len,
        k_len,
        rng.choice([1, 8, 16, 33] if small else [1, 3, 8, 16, 33, 64, 100]),
        rng.choice([4, 16, 20] if small else [1, 4, 16, 20, 64]),
        rng.choice([torch.float32] * 4 + [torch.float16, torch.bfloat16]),
        order=rng.choice(["BHLD", "BLHD"]),
        strided=rng.random() < 0.3,
        requires_grad=True,
    )
    options: dict[str, Any] = {"q_start": start}
    if rng.random() < 0.3:
        options["scale"] = rng.choice([0.0, -0.5, 1.0])
    if not plain:
        if rng.random() < 0.2:
            options["softcap"] = 3.0
        if rng.random() < 0.2:
            generator = torch.Generator().manual_seed(seed)
            options["sink"] = torch.randn(heads, generator=generator).to(inputs[0].dtype).requires_grad_()
        if rng.random() < 0.2:
            options["dropout_p"] = rng.choice([0.3, 1.0])
        chance = rng.random()
        if chance < 0.05:
            options["terms"] = [_Slope()]
        elif chance < 0.4:
            options["terms"] = _draw_terms(rng, inputs[0].dtype, batch, heads, first, q_len, k_len)
    by_value = any(isinstance(term, _Slope) for term in options.get("terms", ()))
    as_layout = not by_value and rng.random() < 0.5
    form: Form | None = rng.choice(["auto", "auto", "edges"]) if as_layout else None
    return Drawn(seed, inputs, relation, options, form)


def _draw_edges(seed: int, *, plain: bool, small: bool) -> Drawn:
    """Draw a graph, or neighbours, with what edges alone have."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    batch, key_heads = rng.choice([1, 1, 2]), rng.choice([1, 2])
    heads = key_heads * rng.choice([1, 1, 2] if small else [1, 1, 2, 4])
    k_len, q_len = rng.choice([1, 5, 17, 65]), rng.choice([1, 7, 17] if small else [1, 7, 24, 65, 97])
    first = rng.choice([0, 0, 3])
    sizes = heads, first, q_len, k_len
    relation: Relation
    if rng.random() < 0.5:
        count = rng.choice([0, 1, 20, 100, 400])
        ends = [torch.randint(0, n, (count,), generator=generator) for n in (k_len, first + q_len)]
        ends[1][: count // 3] = 0  # a row of many edges
        relation = Graph(torch.stack(ends), size=(k_len, first + q_len))
    else:
        shape = rng.choice([1, batch]), rng.choice([1, heads]), first + q_len, rng.choice([1, 4])
        relation = Neighbors(torch.randint(-1, k_len, shape, generator=generator))
    if rng.random() < 0.3:
        relation = relation & rng.choice([Causal(), Window(before=9, after=4)])
    inputs = testing.make_inputs(
        generator,
        *(batch, heads, key_heads, q_len, k_len),
        rng.choice([1, 1, 8, 16] if small else [1, 1, 3, 8, 16, 33]),
        rng.choice([4, 16] if small else [1, 8, 16, 20]),
        rng.choice([torch.float32] * 4 + [torch.float16, torch.bfloat16]),
        order=rng.choice(["BHLD", "BLHD"]),
        strided=rng.random() < 0.3,
        requires_grad=True,
    )
    dtype, D = inputs[0].dtype, inputs[0].shape[3]

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).requires_grad_()

    options: dict[str, Any] = {"q_start": first}
    if not plain:
        count = count_edges(relation, "terms")
        sizes_of_bias = rng.choice([(count,), (count, 1), (count, heads)])
        terms: list[Any] = [EdgeBias(leaf(*sizes_of_bias))] if rng.random() < 0.7 else []
        if rng.random() < 0.3:
            terms += _draw_terms(rng, dtype, batch, *sizes)
        options["terms"] = terms
        if rng.random() < 0.6:
            weight = leaf(heads, D) if rng.random() < 0.7 else None
            options["score"] = AdditiveScore(weight, rng.choice([0.2, 0.0, -0.5]))
        for name, chosen in (("softcap", 3.0), ("sink", leaf(heads)), ("dropout_p", 0.3), ("scale", -0.5)):
            if rng.random() < 0.2:
                options[name] = chosen
    return Drawn(seed, inputs, relation, options, rng.choice([None, "edges"]))


def check(
    seed: int, backend: str | None, *, small: bool = False, device: torch.device | str = "cpu"
) -> tuple[Drawn, list[str], bool]:
    """Draw a problem and compare; without its options if the backend refuses them.

    Returns:
        The problem, what is wrong (see ``compare``), and whether the options were left out.

    Raises:
        NotImplementedError: if the backend refuses the problem also without options.
    """
    drawn = draw(seed, small=small)
    try:
        return drawn, compare(drawn, backend, device), False
    except NotImplementedError:
        drawn = draw(seed, small=small, plain=True)
        return drawn, compare(drawn, backend, device), True


def compare(drawn: Drawn, backend: str | None = None, device: torch.device | str = "cpu") -> list[str]:
    """What is wrong with a backend's results and gradients, a line each; empty = nothing.

    The backend computes on ``device``, the textbook on the CPU.

    Raises:
        NotImplementedError: if the backend refuses the problem.
    """
    query, key, value = drawn.inputs
    options = drawn.options
    (batch, heads, q_len), k_len = query.shape[:3], key.shape[2]
    relation: Any = drawn.relation
    if drawn.form:
        sizes_given = {"q_start": options["q_start"], "batch": batch, "heads": heads}
        relation = relation.layout(q_len, k_len, form=drawn.form, device=device, **sizes_given)
    generator = torch.Generator().manual_seed(drawn.seed)
    wanted = (
        # Rounded first, so that every precision sees the same numbers.
        torch.randn(batch, heads, q_len, value.shape[3], generator=generator).to(query.dtype),
        torch.randn(batch, heads, q_len, generator=generator),
    )
    torch.manual_seed(drawn.seed)
    got = _results(
        lambda q, k, v, extra: attention(q, k, v, relation, return_lse=True, backend=backend, **extra),
        drawn.inputs,
        options,
        wanted,
        query.dtype,
        device,
    )
    torch.manual_seed(drawn.seed)  # the dropout seed is the call's first and only draw
    seed = torch.randint(0, 2**63 - 1, (1,), device=device).cpu() if options.get("dropout_p") else None
    counts = _counts(drawn, batch, heads, q_len, k_len)
    first = k_len - q_len if options["q_start"] == "end" else options["q_start"]

    has_numbers = any(isinstance(term, EdgeBias) for term in options.get("terms", ()))

    def textbook(q: Tensor, k: Tensor, v: Tensor, extra: dict[str, Any]) -> tuple[Tensor, Tensor]:
        places = drawn.relation, (batch, heads, q_len, k_len), first
        terms = [
            _SumOfEdges(x.bias if x.bias.dim() == 2 else x.bias[:, None], *places)
            if isinstance(x, EdgeBias)
            else x
            for x in extra["terms"]
        ]
        extra = {**extra, "q_start": first, "terms": terms}
        often = None if has_numbers else counts
        return testing.eager(q, k, v, counts > 0, counts=often, seed=seed, **extra)

    eager = _results(textbook, drawn.inputs, options, wanted, query.dtype)
    oracle = _results(textbook, drawn.inputs, options, wanted, torch.float64)
    sizes, factors = _sizes(drawn, wanted, oracle[0])
    # A pair of n edges is added n times, with the same error of half a step each time; eager adds it once.
    most = float(counts.max()) if counts.numel() else 1.0
    sizes = {name: size * max(1.0, most / 2) for name, size in sizes.items()}
    names = [*RESULTS[: 6 if "sink" in options else 5], *(f"term {i}" for i in range(len(factors)))]
    if "weight" in sizes:
        names.append("weight")
    faults = []
    for name, mine, same, exact in zip(names, got, eager, oracle, strict=True):
        try:
            factor = 2.0 if name in ("out", "lse") else 3.0
            testing.assert_no_worse(name, mine, same, exact, factor, magnitude=sizes[name])
        except AssertionError as error:
            faults.append(str(error))
    return faults


def _sizes(drawn: Drawn, wanted: tuple[Tensor, Tensor], out: Tensor) -> tuple[dict[str, float], list[float]]:
    """Size of the numbers rounded on the way to each result, and the factors of ``_reach``."""
    query, key, value = drawn.inputs
    options, heads = drawn.options, query.shape[1]
    scale, score = options.get("scale"), options.get("score")
    bias, factors = _reach(options.get("terms", ()), drawn)
    given = options.get("dropout_p", 0.0)
    if score is None:
        scale = query.shape[3] ** -0.5 if scale is None else scale
        sizes = testing.magnitudes(query, key, value, *wanted, scale, given, bias, out)
    else:
        weight = torch.ones(1, query.shape[3]) if score.weight is None else score.weight.detach().float()
        scale = (1.0 if scale is None else abs(scale)) * max(1.0, abs(score.negative_slope))
        nodes = sum(float(x.detach().float().norm(dim=-1).max()) for x in (query, key))
        bias += scale * float(weight.norm(dim=-1).max()) * nodes
        sizes = testing.magnitudes(query, key, value, *wanted, 0.0, given, bias, out)
        share = heads // key.shape[1]
        sizes["query"] = sizes["key"] = scale * float(weight.abs().max()) * sizes["sink"] * math.sqrt(share)
        if score.weight is not None:
            sizes["weight"] = scale * nodes * sizes["sink"]
    # A leaf's entry adds up pairs as a sink does, of all heads where these share it.
    for i, times in enumerate(factors):
        sizes[f"term {i}"] = sizes["sink"] * times * math.sqrt(heads)
    return sizes, factors


def _counts(drawn: Drawn, batch: int, heads: int, q_len: int, k_len: int) -> Tensor:
    """How often each pair counts, [batch, heads, Q, K], by the relation's pointwise definition."""
    start = drawn.options["q_start"]
    first = k_len - q_len if start == "end" else start
    b, h = torch.arange(batch).view(-1, 1, 1, 1), torch.arange(heads).view(-1, 1, 1)
    q, k = torch.arange(first, first + q_len).view(-1, 1), torch.arange(k_len)
    counts = drawn.relation.multiplicity(q, k, b, h)
    if counts is None:
        counts = drawn.relation.related(q, k, b, h).long()
    return counts.expand(batch, heads, q_len, k_len)


def _results(
    call: Any,
    inputs: tuple[Tensor, ...],
    options: dict[str, Any],
    wanted: tuple[Tensor, Tensor],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> list[Tensor]:
    """Results and gradients, on the CPU, of a call on copies of the inputs in the given dtype."""
    leaves = [x.detach().to(device, dtype).requires_grad_() for x in inputs]
    extra = dict(options)
    if "sink" in extra:
        extra["sink"] = extra["sink"].detach().to(device, dtype).requires_grad_()
        leaves.append(extra["sink"])
    terms = []
    for term in options.get("terms", ()):
        if isinstance(term, KernelTerm):
            leaves.append(_leaf(term).detach().to(device, dtype).requires_grad_())
            terms.append(replace(term, **{fields(term)[0].name: leaves[-1]}))  # type: ignore[type-var,arg-type]
        else:
            terms.append(term)
    extra["terms"] = terms
    score = options.get("score")
    if score is not None and score.weight is not None:
        leaves.append(score.weight.detach().to(device, dtype).requires_grad_())
        extra["score"] = replace(score, weight=leaves[-1])
    if dtype == inputs[0].dtype:  # keep strides and, on the CPU, the NaNs around
        leaves[:3] = [x.detach().to(device).requires_grad_() for x in inputs]
    out, lse = call(*leaves[:3], extra)
    exists = ~lse.detach().isinf()  # the gradient at an empty row's -inf has no meaning
    d_out, d_lse = wanted[0].to(out), wanted[1].to(lse)
    total = (out * d_out).sum() + (lse[exists] * d_lse[exists]).sum()
    grads = torch.autograd.grad(total, leaves, allow_unused=True)
    zero = [torch.zeros_like(x) for x in leaves]
    found = [out, lse, *(z if g is None else g for g, z in zip(grads, zero, strict=True))]
    return [x.cpu() for x in found]
