"""The rule of every comparison: as exact as plain PyTorch of the same dtype, with no tuned tolerance."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class WorseError(AssertionError):
    """A result that is not exact enough; ``wrong`` marks its elements, if its shape is right."""

    def __init__(self, words: str, wrong: Tensor | None = None) -> None:
        super().__init__(words)
        self.wrong = wrong


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
    """Fail unless ``got`` is about as close to the float64 ``oracle`` as eager code of its dtype.

    The largest error may be ``factor`` times eager's, plus two rounding steps: one of the largest value, and
    one, in float32 or wider, of the intermediate numbers. Nothing is tuned. ``got`` must be -inf exactly
    where the oracle is, and finite everywhere else.

    Args:
        name: what is compared, for the message.
        got: the result to judge.
        same_precision: the result of plain PyTorch in the dtype of the inputs (see ``eager``).
        oracle: the result of plain PyTorch in float64.
        factor: 2 for results, 3 for gradients.
        empty: bool, broadcasts to ``got``: where it must be exactly 0, as in rows without a key.
        magnitude: size of the intermediate numbers that are rounded (see ``magnitudes``).

    Raises:
        WorseError: an AssertionError that names the elements and what is wrong with them.

    Example:
        >>> import torch
        >>> third = torch.tensor([1 / 3])
        >>> assert_no_worse("out", third, third, torch.tensor([1 / 3], dtype=torch.float64))
    """

    def check(wrong: Tensor, words: str) -> None:
        if wrong.any():
            places = wrong.nonzero().tolist()
            more = f" and {len(places) - 3} more" if len(places) > 3 else ""
            raise WorseError(f"{name}: {words} at {places[:3]}{more}", wrong)

    for other, what in ((got, "got"), (same_precision, "same_precision")):
        if other.shape != oracle.shape:
            shapes = f"{[*other.shape]}, the oracle {[*oracle.shape]}"
            raise WorseError(f"{name}: {what} has the shape {shapes}")
    got, same_precision, oracle = got.detach(), same_precision.detach(), oracle.detach()
    gone = oracle == -torch.inf
    check((got == -torch.inf) != gone, "-inf does not match the oracle's")
    check(~got.isfinite() & ~gone, "not finite")
    check(~same_precision.isfinite() & ~gone, "same_precision is not finite and so no measure")
    if empty is not None:
        check((got != 0) & empty, "not exactly 0")
    if not gone.all():  # also skips a tensor without elements
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
    """Return the size of the intermediate numbers rounded for each result, for ``assert_no_worse``.

    A score is rounded at its own size, so its weight is off by that much of itself. The gradient of a score
    is p * (dP - delta), whose two parts cancel wherever a row has one key or equal values. A sum of n terms
    of random sign, such as the queries of a key, reaches about sqrt(n) times the size of one.

    A backward pass reads delta = dO . out from a result that was rounded to the dtype of the inputs, which
    eager code does not. In half precision this is by far the largest error wherever ``out`` is the sum of
    few large values. Pass ``out`` to account for it: each of its numbers is off by a uniform error of half
    a step.

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

    Example:
        >>> import torch
        >>> q = torch.ones(1, 1, 2, 4)
        >>> sorted(magnitudes(q, q, q, q, torch.ones(1, 1, 2), 0.5))
        ['key', 'lse', 'out', 'query', 'sink', 'value']
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
