"""Random relations and random problems; everything follows from the seed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import relations
from ..layouts.fill import Form
from ..relations import Relation
from ..relations.listing import count_edges
from ..scores.additive import AdditiveScore
from ..scores.buckets import linear_buckets, t5_buckets
from ..scores.terms import ALiBi, EdgeBias, GridBias, KernelTerm, KeyBias, PairBias, RelativeBias
from .inputs import make_inputs

Seed = int | random.Random | np.random.Generator | torch.Generator


def as_rng(rng: Seed) -> random.Random:
    """Return a ``random.Random`` made from a seed, or from a number drawn from any other generator.

    Example:
        >>> as_rng(7).random() == as_rng(7).random()
        True
    """
    if isinstance(rng, torch.Generator):
        rng = int(torch.randint(1 << 62, (), generator=rng))
    elif isinstance(rng, np.random.Generator):
        rng = int(rng.integers(1 << 62))
    return rng if isinstance(rng, random.Random) else random.Random(rng)


def random_relation(
    rng: Seed,
    depth: int = 2,
    *,
    q_len: int = 24,
    k_len: int = 24,
    batch: int = 1,
    heads: int = 1,
) -> Relation:
    """Draw an expression of the public relations; every one of them can occur.

    Args:
        rng: a seed or a generator.
        depth: how deep expressions may nest; 0 draws a single relation.
        q_len: query positions of relations that hold data.
        k_len: their keys.
        batch: batch size; above 1, relations may differ by batch element.
        heads: number of heads; above 1, relations may differ by head.

    Example:
        >>> relation = random_relation(3, depth=1)
        >>> relation.dense(24, 24).shape[-2:]
        torch.Size([24, 24])
    """
    rng = as_rng(rng)
    if depth == 0 or rng.random() < 0.15:
        return _random_leaf(rng, q_len, k_len, batch, heads)

    def deeper(q_len: int = q_len, k_len: int = k_len, batch: int = batch, heads: int = heads) -> Relation:
        return random_relation(rng, depth - 1, q_len=q_len, k_len=k_len, batch=batch, heads=heads)

    choices: list[Callable[[], Relation]] = [
        lambda: deeper() & deeper(),
        lambda: deeper() | deeper(),
        lambda: deeper() - deeper(),
        lambda: ~deeper(),
        lambda: deeper(k_len, q_len).T,
        lambda: deeper().shift(rng.randint(-3, 3)),
        lambda: _random_documents(rng, q_len, k_len, batch).each(_random_pattern(rng, q_len, k_len)),
    ]
    if q_len == k_len:
        choices.append(lambda: deeper().permute(rng.sample(range(q_len), q_len)))
    if heads > 1:
        choices.append(lambda: relations.PerHead([deeper(heads=1) for _ in range(heads)]))
    if batch > 1:
        choices.append(lambda: relations.PerBatch([deeper(batch=1) for _ in range(batch)]))
    return rng.choice(choices)()


def _random_documents(rng: random.Random, q_len: int, k_len: int, batch: int) -> relations.Documents:
    def ids(length: int) -> list[int]:
        if rng.random() < 0.5:
            return [rng.randint(-1, 3) for _ in range(length)]
        return sorted(rng.randint(0, 3) for _ in range(length))

    def some(length: int) -> Tensor:
        shape = (batch, length) if batch > 1 and rng.random() < 0.5 else (length,)
        rows = [ids(length) for _ in range(shape[0] if len(shape) == 2 else 1)]
        return torch.tensor(rows, dtype=torch.int64, device="cpu").view(shape)

    return relations.Documents(some(q_len), None if q_len == k_len else some(k_len))


def _random_pattern(rng: random.Random, q_len: int, k_len: int) -> Relation:
    """Draw a relation that compares positions and holds no data."""
    few = rng.randint
    patterns: list[Callable[[], Relation]] = [
        relations.Full,
        relations.Empty,
        relations.Causal,
        lambda: relations.Window(rng.choice([None, few(0, 9)]), rng.choice([None, few(0, 5)])),
        lambda: relations.Dilated(few(1, 4), few(0, 70), few(0, 3)),
        lambda: relations.Columns(few(1, 6)),
        lambda: relations.Chunks(few(1, 9)),
        lambda: relations.Prefix(few(0, k_len)),
        lambda: relations.Bipartite(few(0, max(q_len, k_len))),
        lambda: relations.Global([few(0, max(q_len, k_len)) for _ in range(few(0, 4))]),
        lambda: relations.RandomBlocks(few(1, 6), few(0, 4), seed=few(0, 99)),
    ]
    return rng.choice(patterns)()


def _random_leaf(rng: random.Random, q_len: int, k_len: int, batch: int, heads: int) -> Relation:
    """Draw a relation with no other inside."""

    def few(high: int, low: int = 0) -> int:
        return rng.randint(low, high)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        count = torch.Size(shape).numel()
        numbers = [few(high, low) for _ in range(count)]
        return torch.tensor(numbers, dtype=torch.int64, device="cpu").view(shape)

    def sizes() -> tuple[int, int]:
        return (batch if rng.random() < 0.3 else 1), (heads if rng.random() < 0.3 else 1)

    def neighborhood() -> Relation:
        border = rng.choice(["cut", "clamp"])
        if q_len != k_len or not q_len:
            return relations.Window(before=few(4))
        shape = next(((n, q_len // n) for n in (4, 3, 2) if q_len % n == 0), (q_len,))
        radius = 0 if border == "clamp" and min(shape) < 3 else 1
        offset = [few(2, -2) for _ in shape] if border == "cut" and rng.random() < 0.5 else 0
        return relations.Neighborhood(shape, radius, causal=rng.random() < 0.3, border=border, offset=offset)

    def graph() -> Relation:
        edges = few(3 * (q_len + 1)) if q_len and k_len else 0
        index = torch.stack((integers(0, max(k_len - 1, 0), edges), integers(0, max(q_len - 1, 0), edges)))
        return relations.Graph(index, size=(k_len, q_len))

    def ranges() -> Relation:
        shape = rng.choice([(q_len,), (q_len, few(3, 1)), (batch, q_len, 2), (*sizes(), q_len, 2)])
        start = integers(0, k_len, *shape)
        return relations.Ranges(start, (start + integers(0, 9, *shape)).clamp(max=k_len))

    def tree() -> Relation:
        if q_len != k_len:
            return relations.Causal()
        near = rng.choice([2, q_len + 1])  # chains, or wide trees
        parents = [max(-1, i - few(near, 1)) for i in range(q_len)]
        made = relations.Tree(torch.tensor(parents, dtype=torch.int64, device="cpu"))
        return made if rng.random() < 0.7 else made.each(relations.Window(few(3), rng.choice([None, 0])))

    def blocks() -> Relation:
        size = few(5, 1), few(5, 1)
        nq, nk = -(-q_len // size[0]), -(-k_len // size[1])
        if rng.random() < 0.5:
            return relations.Blocks(integers(0, 2, *sizes(), nq, nk) == 0, size)
        return relations.Blocks(integers(-1, nk - 1, *sizes(), nq, few(3, 1)), size)

    leaves: list[Callable[[], Relation]] = [
        *[lambda: _random_pattern(rng, q_len, k_len)] * 9,
        ranges,
        tree,
        blocks,
        lambda: _random_documents(rng, q_len, k_len, batch),
        lambda: relations.Padding(integers(0, k_len, batch)),
        lambda: relations.Padding.from_mask(integers(0, 1, batch, k_len).bool()),
        lambda: relations.Prefix(integers(0, k_len, batch)),
        neighborhood,
        graph,
        lambda: relations.Neighbors(integers(-1, k_len - 1, *sizes(), q_len, few(4, 1))),
        lambda: relations.Where(_every_third if rng.random() < 0.5 else _by_head),
        lambda: relations.Dense(integers(0, 2, *sizes(), q_len, k_len) == 0),
    ]
    return rng.choice(leaves)()


def _every_third(q: Tensor, k: Tensor) -> Tensor:
    return (q + 2 * k) % 3 == 0


def _by_head(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q + b + k) % (h + 2) == 0


class Drawn(NamedTuple):
    """A call of ``attention`` to compare; a random one follows from its seed."""

    seed: int
    inputs: tuple[Tensor, Tensor, Tensor]
    relation: Relation
    options: dict[str, Any]
    form: Form | None  # of the layout to pass; None: pass the relation itself

    def __str__(self) -> str:
        shapes = ", ".join(str(list(x.shape)) for x in self.inputs)
        given = f"a layout (form {self.form!r}) of " if self.form else ""
        return f"seed {self.seed}: {shapes} {self.inputs[0].dtype}, {given}{self.relation}, {self.options}"


class _Slope:
    """A score term that has only a definition, no kernel part."""

    def value(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return -0.1 * (h + b + 1) * (q - k).abs()


def _draw_terms(
    rng: random.Random, dtype: torch.dtype, batch: int, heads: int, first: int, q_len: int, k_len: int
) -> list[Any]:
    """Draw one to three of the library's terms, each with a tensor of its own in the dtype."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))

    def leaf(*shape: int) -> Tensor:
        x = torch.randn(shape, generator=generator).to(dtype)
        if rng.random() < 0.2:  # -inf removes the same pairs in every precision
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


def _draw_inputs(
    rng: random.Random, seed: int | torch.Generator, sizes: Sequence[int], D: list[int], E: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw query, key and value of the sizes B, H, Hk, Q, K and of one D and one E among those given."""
    B, H, Hk, Q, K = sizes
    return make_inputs(
        *(seed, B, H, Hk, Q, K, rng.choice(D), rng.choice(E)),
        rng.choice([torch.float32] * 4 + [torch.float16, torch.bfloat16]),
        order=rng.choice(["BHLD", "BLHD"]),
        strided=rng.random() < 0.3,
        requires_grad=True,
    )


def draw_problem(seed: int, *, plain: bool = False, small: bool = False) -> Drawn:
    """Draw a problem: ragged lengths, strides, groups, options.

    Args:
        seed: the problem follows from it.
        plain: leave the options out.
        small: draw few heads, queries and columns, for an interpreter or an emulator of a GPU.

    Returns:
        A problem; one in eight is a graph with options that only edges have: biases by edge, additive scores.
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
        start = 0  # relations hold no data for negative positions
    first = k_len - q_len if start == "end" else start
    relation = random_relation(
        rng, rng.randint(0, 3), q_len=first + q_len, k_len=k_len, batch=batch, heads=heads
    )
    D, E = ([1, 8, 16, 33], [4, 16, 20]) if small else ([1, 3, 8, 16, 33, 64, 100], [1, 4, 16, 20, 64])
    inputs = _draw_inputs(rng, rng.randrange(1 << 30), (batch, heads, key_heads, q_len, k_len), D, E)
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
    """Draw a graph, or neighbours, with options that only edges have."""
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
        relation = relations.Graph(torch.stack(ends), size=(k_len, first + q_len))
    else:
        shape = rng.choice([1, batch]), rng.choice([1, heads]), first + q_len, rng.choice([1, 4])
        relation = relations.Neighbors(torch.randint(-1, k_len, shape, generator=generator))
    if rng.random() < 0.3:
        relation = relation & rng.choice([relations.Causal(), relations.Window(before=9, after=4)])
    D, E = ([1, 1, 8, 16], [4, 16]) if small else ([1, 1, 3, 8, 16, 33], [1, 8, 16, 20])
    inputs = _draw_inputs(rng, generator, (batch, heads, key_heads, q_len, k_len), D, E)
    dtype, size = inputs[0].dtype, inputs[0].shape[3]

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
            weight = leaf(heads, size) if rng.random() < 0.7 else None
            options["score"] = AdditiveScore(weight, rng.choice([0.2, 0.0, -0.5]))
        for name, chosen in (("softcap", 3.0), ("sink", leaf(heads)), ("dropout_p", 0.3), ("scale", -0.5)):
            if rng.random() < 0.2:
                options[name] = chosen
    return Drawn(seed, inputs, relation, options, rng.choice([None, "edges"]))
