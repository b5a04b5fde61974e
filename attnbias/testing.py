"""What the library is tested with; use it to test code that calls the library."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from . import relations as ab_relations
from .multilevel import MultiLevel
from .philox import keep_mask
from .relations import Relation
from .scores import AdditiveScore
from .terms import Term

GUARD = 64  # elements of NaN on both sides of a tensor without strides


def lengths(tile: int = 64) -> list[int]:
    """List sequence lengths around a tile, for the ragged edge.

    Example:
        >>> lengths(64)
        [1, 63, 64, 65, 97]
    """
    return [1, tile - 1, tile, tile + 1, 97]


def assert_no_worse(
    name: str,
    got: Tensor,
    same_precision: Tensor,
    oracle: Tensor,
    factor: float = 2.0,
    *,
    empty: Tensor | None = None,
    magnitude: float = 0.0,
) -> None:
    """Fail unless ``got`` is about as near the float64 ``oracle`` as eager code of its dtype.

    The largest error may be ``factor`` times eager's, plus one rounding step of the largest value and one,
    in float32 or wider, of the numbers on the way to it: nothing is tuned. -inf must stand exactly where
    the oracle has it, all else be finite.

    Args:
        name: what is compared, for the message.
        got: the result to judge.
        same_precision: the result of plain PyTorch in the dtype of the inputs (see ``eager``).
        oracle: the result of plain PyTorch in float64.
        factor: 2 for results, 3 for gradients.
        empty: bool, broadcasts to ``got``: where it must be exactly 0, as in rows without a key.
        magnitude: size of the numbers rounded on the way (see ``magnitudes``).

    Raises:
        AssertionError: naming the elements and what is wrong with them.
    """

    def check(wrong: Tensor, words: str) -> None:
        if wrong.any():
            places = wrong.nonzero().tolist()
            more = f" and {len(places) - 3} more" if len(places) > 3 else ""
            raise AssertionError(f"{name}: {words} at {places[:3]}{more}")

    for other, what in ((got, "got"), (same_precision, "same_precision")):
        if other.shape != oracle.shape:
            shapes = f"{[*other.shape]}, the oracle's {[*oracle.shape]}"
            raise AssertionError(f"{name}: the shape of {what} is {shapes}")
    got, same_precision, oracle = got.detach(), same_precision.detach(), oracle.detach()
    gone = oracle == -torch.inf
    check((got == -torch.inf) != gone, "-inf or not, unlike the oracle,")
    check(~got.isfinite() & ~gone, "not finite")
    check(~same_precision.isfinite() & ~gone, "same_precision is no measure: not finite")
    if empty is not None:
        check((got != 0) & empty, "not exactly 0")
    if not gone.all():  # all of nothing: no elements
        truth = oracle.double().masked_fill(gone, 0)
        errors = (got.double() - truth).abs().masked_fill(gone, 0)
        baseline = (same_precision.double() - truth).abs().masked_fill(gone, 0).max().item()
        inside = torch.float64 if got.dtype == torch.float64 else torch.float32
        floor = torch.finfo(got.dtype).eps * truth.abs().max().item() + torch.finfo(inside).eps * magnitude
        bound = factor * baseline + floor
        worst = errors.max().item()
        words = f"error {worst:.3e} > {factor} x eager's {baseline:.3e} + {floor:.3e},"
        check(errors > bound, words)


def magnitudes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor,
    scale: float,
    dropout_p: float = 0.0,
    bias: float = 0.0,
    out: Tensor | None = None,
) -> dict[str, float]:
    """Size of the numbers that are rounded on the way to each result, for ``assert_no_worse``.

    A score is rounded at its own size, so a weight is off by that much of itself; the gradient of a
    score is p * (dP - delta), whose parts cancel wherever a row has one key or equal values; and n terms of
    random sign, as the queries of a key are, pass through sums of about sqrt(n) times one.

    A backward pass reads delta = dO . out from a result that was rounded to the dtype of the inputs, which
    eager code does not. In half precision that is the largest error by far wherever ``out`` is the sum of
    few large values; with ``out`` it counts: each number of it is off by a uniform error of half a step.

    Args:
        query: [B, H, Q, D].
        key: [B, Hk, K, D].
        value: [B, Hk, K, E].
        grad_out: [B, H, Q, E].
        grad_lse: [B, H, Q].
        scale: factor of the dot products.
        dropout_p: share of the pairs dropped; the others grow by 1 / (1 - dropout_p).
        bias: the largest sum of score terms.
        out: the exact result, [B, H, Q, E].
    """

    def longest(x: Tensor) -> float:
        return float(x.detach().double().norm(dim=-1).max()) if x.numel() else 0.0

    def largest(x: Tensor) -> float:
        return float(x.detach().double().abs().max()) if x.numel() else 0.0

    kept = 1 - dropout_p if dropout_p < 1 else 1.0
    score = 1 + abs(scale) * longest(query) * longest(key) + bias
    step = score * (longest(grad_out) * longest(value) / kept + longest(grad_lse[..., None]))
    batch, heads, q_len = query.shape[:3]
    share = max(heads // max(key.shape[1], 1), 1)
    sizes = {
        "out": score * largest(value) / kept,
        "lse": score,
        "query": abs(scale) * step * longest(key),
        "key": abs(scale) * step * longest(query),
        "value": score * largest(grad_out) / kept * math.sqrt(q_len * share),
        "sink": step * math.sqrt(batch * q_len),
    }
    if out is not None and out.numel() and query.dtype in (torch.float16, torch.bfloat16):
        half_step = torch.finfo(query.dtype).eps / 2 / torch.finfo(torch.float32).eps
        off = half_step * (grad_out.detach().double() * out.detach().double()).abs()  # [B, H, Q, E]
        variance = off.square().sum(-1) / 3  # [B, H, Q]
        most = torch.minimum(off.sum(-1), 5 * variance.sqrt()).max().item()
        by_key = variance.view(batch, -1, share * q_len).sum(-1).max().item()
        by_head = variance.sum((0, 2)).max().item()
        sizes["query"] += abs(scale) * most * largest(key)
        sizes["key"] += abs(scale) * 5 * math.sqrt(by_key) * largest(query)
        sizes["sink"] += 5 * math.sqrt(by_head)
    return sizes


def eager(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    counts: Tensor | None = None,
    terms: Sequence[Term] = (),
    score: AdditiveScore | MultiLevel | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    q_start: int = 0,
) -> tuple[Tensor, Tensor]:
    """Compute attention the textbook way: every pair, in the dtype of the inputs.

    In float64 it is the oracle, else the measure of what the dtype can do.

    Args:
        query: [B, H, Q, D].
        key: [B, Hk, K, D]; query head h reads key head h // (H // Hk).
        value: [B, Hk, K, E].
        mask: bool, broadcasts to [B, H, Q, K]; True = may attend.
        counts: how often each pair counts, broadcasts likewise; 0 = unrelated.
        terms: objects whose ``value(b, h, q, k)`` is added to the score.
        score: what takes the place of the dot product.
        scale: factor of the dot products, D**-0.5 when None; of a ``score`` 1.
        softcap: bound c of the scaled products, c * tanh(score / c); 0 is off.
        sink: [H], a further logit without a value.
        dropout_p: share of the pairs dropped after the softmax.
        seed: int64 of one element, for dropout.
        q_start: position of the first query row.

    Returns:
        out [B, H, Q, E] and lse [B, H, Q] (float32, or float64 for float64 inputs).

    Raises:
        ValueError: if ``dropout_p`` comes without a seed.
    """
    (B, H, Q, D), K, device = query.shape, key.shape[2], query.device
    key = key.repeat_interleave(H // key.shape[1], dim=1)  # [B, H, K, D]
    value = value.repeat_interleave(H // value.shape[1], dim=1)  # [B, H, K, E]
    b = torch.arange(B, device=device)[:, None, None, None]
    h = torch.arange(H, device=device)[None, :, None, None]
    q = torch.arange(q_start, q_start + Q, device=device)[None, None, :, None]
    k = torch.arange(K, device=device)[None, None, None, :]
    if score is None:
        scores = _product(query, key.mT)
    elif isinstance(score, MultiLevel):
        levels = score.bind(Q, K, q_start)
        scores = score.compare(levels, q, k, lambda dims: _product(query[..., dims], key[..., dims].mT))
    else:
        scores = score.pairs(h, query[:, :, :, None], key[:, :, None])
    usual = D**-0.5 if score is None else 1.0
    scores = scores * (usual if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    for term in terms:
        scores = scores + term.value(b, h, q, k).to(scores.dtype)
    if counts is not None:
        scores = scores + counts.to(scores.dtype).log()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if sink is None:
        sink = scores.new_full((H,), -torch.inf)
    last = sink.to(scores.dtype)[:, None, None].expand(B, H, Q, 1)
    scores = torch.cat([scores, last], dim=-1)  # [B, H, Q, K + 1]
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    scores = scores.masked_fill(empty, 0)
    wide = torch.float64 if scores.dtype == torch.float64 else torch.float32
    lse = scores.to(wide).logsumexp(-1, keepdim=True).masked_fill(empty, -torch.inf)
    weights = torch.exp(scores - scores.detach().amax(-1, keepdim=True))
    total = weights.sum(-1, keepdim=True)
    weights = weights[..., :K].masked_fill(empty, 0)
    if dropout_p:
        if seed is None:
            raise ValueError("seed: an int64 tensor is wanted with dropout_p, got None")
        weights = weights * keep_mask(seed, dropout_p, b, h, q, k)
        total = total * (1 - dropout_p if dropout_p < 1 else 1)
    return _product(weights, value) / total, lse.squeeze(-1)


def _product(x: Tensor, y: Tensor) -> Tensor:
    """Multiply matrices; half precision adds up in float32 and rounds once, as everywhere."""
    # Not torch's own product of bfloat16: it is slow on many CPUs, and where AMX is announced but
    # not allowed, as in some virtual machines, it ends the process.
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return (x.to(wide) @ y.to(wide)).to(x.dtype)


def make_inputs(
    rng: int | torch.Generator,
    B: int,
    H: int,
    Hk: int,
    Q: int,
    K: int,
    D: int,
    E: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    *,
    order: str = "BHLD",
    strided: bool = False,
    requires_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw query [B, H, Q, D], key [B, Hk, K, D] and value [B, Hk, K, E] between NaNs.

    Each lies in a larger buffer of NaN: who reads past an end sees it in the result.

    Args:
        rng: a seed, or a generator on the CPU.
        B: batch size.
        H: query heads.
        Hk: key heads.
        Q: query length.
        K: key length.
        D: head size.
        E: value size.
        dtype: of the three.
        device: of the three.
        order: how the dimensions lie in memory, outermost first; "BLHD" is a transposed
            [B, L, H, D].
        strided: also leave NaNs between the rows, so that no dimension is dense.
        requires_grad: make the three leaves that collect gradients.

    Raises:
        ValueError: if ``order`` is not an order of the letters BHLD.

    Example:
        >>> query, key, value = make_inputs(0, B=2, H=4, Hk=2, Q=5, K=7, D=8, E=3, order="BLHD")
        >>> query.shape, query.stride(), value.shape
        (torch.Size([2, 4, 5, 8]), (160, 8, 32, 1), torch.Size([2, 2, 7, 3]))
    """
    if sorted(order) != sorted("BHLD"):
        raise ValueError(f"order: an order of the letters BHLD is wanted, got {order!r}")
    if isinstance(rng, int):
        rng = torch.Generator().manual_seed(rng)
    made = []
    for shape in ((B, H, Q, D), (B, Hk, K, D), (B, Hk, K, E)):
        drawn = torch.randn(shape, generator=rng, dtype=torch.float64)
        stored = drawn.permute(["BHLD".index(letter) for letter in order])
        if strided:
            buffer = torch.full([n + 2 for n in stored.shape], torch.nan, dtype=dtype, device=device)
            inside = buffer[1:-1, 1:-1, 1:-1, 1:-1]
        else:
            buffer = torch.full([stored.numel() + 2 * GUARD], torch.nan, dtype=dtype, device=device)
            inside = buffer[GUARD:-GUARD].view(stored.shape)
        inside.copy_(stored)
        made.append(inside.permute([order.index(letter) for letter in "BHLD"]))
        made[-1].requires_grad_(requires_grad)
    return made[0], made[1], made[2]


Seed = int | random.Random | np.random.Generator | torch.Generator


def as_rng(rng: Seed) -> random.Random:
    """A generator of Python's random numbers from a seed, or drawn from any other generator."""
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
    """Draw a relation composed of every public one.

    Args:
        rng: a seed or a generator.
        depth: how deep expressions may nest; 0 draws a single relation.
        q_len: query positions that relations with data are made for.
        k_len: keys that they are made for.
        batch: relations that differ by batch are made for this size, when it is above 1.
        heads: relations that differ by head likewise.

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
        choices.append(lambda: ab_relations.PerHead([deeper(heads=1) for _ in range(heads)]))
    if batch > 1:
        choices.append(lambda: ab_relations.PerBatch([deeper(batch=1) for _ in range(batch)]))
    return rng.choice(choices)()


def _random_documents(rng: random.Random, q_len: int, k_len: int, batch: int) -> ab_relations.Documents:
    def ids(length: int) -> list[int]:
        if rng.random() < 0.5:
            return [rng.randint(-1, 3) for _ in range(length)]
        return sorted(rng.randint(0, 3) for _ in range(length))

    def some(length: int) -> Tensor:
        shape = (batch, length) if batch > 1 and rng.random() < 0.5 else (length,)
        rows = [ids(length) for _ in range(shape[0] if len(shape) == 2 else 1)]
        return torch.tensor(rows, dtype=torch.int64, device="cpu").view(shape)

    return ab_relations.Documents(some(q_len), None if q_len == k_len else some(k_len))


def _random_pattern(rng: random.Random, q_len: int, k_len: int) -> Relation:
    """A relation that compares positions, without data."""
    few = rng.randint
    patterns: list[Callable[[], Relation]] = [
        ab_relations.Full,
        ab_relations.Empty,
        ab_relations.Causal,
        lambda: ab_relations.Window(rng.choice([None, few(0, 9)]), rng.choice([None, few(0, 5)])),
        lambda: ab_relations.Dilated(few(1, 4), few(0, 70), few(0, 3)),
        lambda: ab_relations.Columns(few(1, 6)),
        lambda: ab_relations.Chunks(few(1, 9)),
        lambda: ab_relations.Prefix(few(0, k_len)),
        lambda: ab_relations.Bipartite(few(0, max(q_len, k_len))),
        lambda: ab_relations.Global([few(0, max(q_len, k_len)) for _ in range(few(0, 4))]),
        lambda: ab_relations.RandomBlocks(few(1, 6), few(0, 4), seed=few(0, 99)),
    ]
    return rng.choice(patterns)()


def _random_leaf(rng: random.Random, q_len: int, k_len: int, batch: int, heads: int) -> Relation:
    """One relation with no other inside."""

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
            return ab_relations.Window(before=few(4))
        shape = next(((n, q_len // n) for n in (4, 3, 2) if q_len % n == 0), (q_len,))
        radius = 0 if border == "clamp" and min(shape) < 3 else 1
        return ab_relations.Neighborhood(shape, radius, causal=rng.random() < 0.3, border=border)

    def graph() -> Relation:
        edges = few(3 * (q_len + 1)) if q_len and k_len else 0
        index = torch.stack((integers(0, max(k_len - 1, 0), edges), integers(0, max(q_len - 1, 0), edges)))
        return ab_relations.Graph(index, size=(k_len, q_len))

    leaves: list[Callable[[], Relation]] = [
        *[lambda: _random_pattern(rng, q_len, k_len)] * 9,
        lambda: _random_documents(rng, q_len, k_len, batch),
        lambda: ab_relations.Padding(integers(0, k_len, batch)),
        lambda: ab_relations.Padding.from_mask(integers(0, 1, batch, k_len).bool()),
        lambda: ab_relations.Prefix(integers(0, k_len, batch)),
        neighborhood,
        graph,
        lambda: ab_relations.Neighbors(integers(-1, k_len - 1, *sizes(), q_len, few(4, 1))),
        lambda: ab_relations.Where(_every_third if rng.random() < 0.5 else _by_head),
        lambda: ab_relations.Dense(integers(0, 2, *sizes(), q_len, k_len) == 0),
    ]
    return rng.choice(leaves)()


def _every_third(q: Tensor, k: Tensor) -> Tensor:
    return (q + 2 * k) % 3 == 0


def _by_head(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q + b + k) % (h + 2) == 0
