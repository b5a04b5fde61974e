"""The definition of attention over a relation, in plain PyTorch.

It reads the relation's pointwise ``related`` and no tile, pattern or kernel, so it shares nothing
with what it checks. Autograd differentiates it, as often as asked.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...scores.multilevel import MultiLevel
from ...scores.terms import EdgeBias
from ..philox import keep_mask
from ..strides import empty_like_query
from .edges import add_up_edges

if TYPE_CHECKING:
    from ...op.problem import Problem

name = "reference"

# Scores alive at once: longer problems go strip by strip over the query rows.
STRIP_ELEMENTS = 2**24


class _Index(NamedTuple):
    """Positions of a strip's pairs; int64, one dimension each."""

    b: Tensor  # [B, 1, 1, 1]
    h: Tensor  # [1, H, 1, 1]
    q: Tensor  # [1, 1, rows, 1]: positions, q_start included
    k: Tensor  # [1, 1, 1, K]


def why_not(problem: Problem) -> list[str]:
    """Return the reasons why the reference cannot run this problem: none."""
    return []


def attend(problem: Problem, elements: int | None = None) -> tuple[Tensor, Tensor]:
    """Compute out [B, H, Q, E] and lse [B, H, Q].

    Args:
        problem: what to compute.
        elements: bound on the scores alive at once, ``STRIP_ELEMENTS`` when None; a strip has at
            least one row. A traced call (compile, export) is always one strip, so that its graph
            holds for other lengths.
    """
    query, key, value = problem.query, problem.key, problem.value
    B, H, Q, _ = query.shape
    elements = STRIP_ELEMENTS if elements is None else elements
    precision = torch.float64 if query.dtype == torch.float64 else torch.float32
    # Cast here and not by strip: the strips' gradients then add up before they are rounded.
    exact = (query.to(precision), key.to(precision), value.to(precision))
    row = B * H * key.shape[2]
    if problem.score is not None:
        row *= query.shape[3]  # its numbers are added after they are made
    if torch.compiler.is_compiling() or row * Q <= elements:
        out, lse = _strip(problem, *exact, 0, Q)
    else:
        run: Callable[..., tuple[Tensor, Tensor]] = _strip
        if torch.is_grad_enabled():  # backward computes a strip again instead of keeping it
            run = partial(checkpoint, _strip, use_reentrant=False, preserve_rng_state=False)
        rows = max(1, elements // row)
        starts = range(0, Q, rows)
        strips = [run(problem, *exact, start, min(start + rows, Q)) for start in starts]
        out = torch.cat([strip[0] for strip in strips], dim=2)
        lse = torch.cat([strip[1] for strip in strips], dim=2)
    return empty_like_query(query, value.shape[-1]).copy_(out), lse


def row_max(problem: Problem, elements: int | None = None) -> Tensor:
    """Return the largest score of each row, [B, H, Q], without a gradient; -inf for an empty row.

    Args:
        problem: what to compute.
        elements: as for :func:`attend`.
    """
    B, H, Q, D = problem.query.shape
    precision = torch.float64 if problem.query.dtype == torch.float64 else torch.float32
    query, key = (x.detach().to(precision) for x in (problem.query, problem.key))
    row = B * H * key.shape[2] * (1 if problem.score is None else D)
    rows = Q
    if not torch.compiler.is_compiling() and row * Q > (elements or STRIP_ELEMENTS):
        rows = max(1, (elements or STRIP_ELEMENTS) // row)
    with torch.no_grad(), _without_autocast(query.device.type):
        # One strip of no rows, too; one more score of -inf, because there may be none.
        strips = [
            torch.nn.functional.pad(
                _score(problem, query, key, start, min(start + rows, Q))[0], (0, 1), value=-torch.inf
            ).amax(-1)
            for start in (range(0, Q, rows) if rows < Q else (0,))
        ]
    return torch.cat(strips, dim=2)


def weights(problem: Problem) -> Tensor:
    """Return the probabilities before dropout, [B, H, Q, K], in float32 (float64 for float64)."""
    precision = torch.float64 if problem.query.dtype == torch.float64 else torch.float32
    query, key = problem.query.to(precision), problem.key.to(precision)
    with _without_autocast(query.device.type):
        return _weigh(problem, query, key, 0, query.shape[2])[0]


def _strip(
    problem: Problem, query: Tensor, key: Tensor, value: Tensor, start: int, stop: int
) -> tuple[Tensor, Tensor]:
    """Compute the query rows from start to stop."""
    with _without_autocast(query.device.type):
        probs, lse, index, heads = _weigh(problem, query, key, start, stop)
        if problem.dropout_p > 0:
            assert problem.seed is not None
            b, h, q, k = index
            if problem.places is not None:
                b, h = b + problem.places.first_batch, h + problem.places.first_head
            keep = keep_mask(problem.seed, problem.dropout_p, b, h, q, k)
            kept = 1 - problem.dropout_p
            probs = (probs / kept if kept else probs).masked_fill(~keep, 0)
        out = torch.einsum("bgrqk,bgke->bgrqe", torch.unflatten(probs, 1, heads), value)
        return out.flatten(1, 2), lse


def _weigh(
    problem: Problem, query: Tensor, key: Tensor, start: int, stop: int
) -> tuple[Tensor, Tensor, _Index, tuple[int, int]]:
    """Return probabilities [B, H, rows, K], lse [B, H, rows], their pairs, and the heads as (Hk, share)."""
    scores, often, index, heads = _score(problem, query, key, start, stop)
    probs, lse = _softmax(scores, often, problem.sink)
    return probs, lse, index, heads


def _score(
    problem: Problem, query: Tensor, key: Tensor, start: int, stop: int
) -> tuple[Tensor, Tensor | None, _Index, tuple[int, int]]:
    """Return scores [B, H, rows, K], -inf where unrelated, how often each counts, and as ``_weigh`` does."""
    (B, H, _, _), (_, Hk, K, _) = query.shape, key.shape
    index = _Index(
        b=torch.arange(B, device=query.device).view(-1, 1, 1, 1),
        h=torch.arange(H, device=query.device).view(1, -1, 1, 1),
        q=torch.arange(start, stop, device=query.device).view(1, 1, -1, 1) + problem.q_start,
        k=torch.arange(K, device=query.device).view(1, 1, 1, -1),
    )
    places = problem.places
    if places is not None and places.queries is not None and places.keys is not None:
        q, k = places.queries[start:stop].long(), places.keys.long()
        index = index._replace(q=q.view(1, 1, -1, 1), k=k.view(1, 1, 1, -1))
    heads = (Hk, H // Hk if Hk else 1)  # query heads by the key head they share
    rows = query[:, :, start:stop]

    def multiply(dims: slice) -> Tensor:
        grouped = torch.unflatten(rows[..., dims], 1, heads)
        return torch.einsum("bgrqd,bgkd->bgrqk", grouped, key[..., dims]).flatten(1, 2)

    if problem.score is None:
        scores = multiply(slice(None))
    elif isinstance(problem.score, MultiLevel):
        levels = problem.score.bind(problem.sizes.q_len, problem.sizes.k_len, problem.q_start)
        scores = problem.score.compare(levels, index.q, index.k, multiply)
    else:
        keys = key.repeat_interleave(heads[1], 1)
        scores = problem.score.pairs(index.h, rows[:, :, :, None], keys[:, :, None])
    scores = scores * problem.scale
    scores = _modify(problem, scores, index)
    scores, often = _restrict(problem, scores, index, start, stop)
    return scores, often, index, heads


def _without_autocast(device_type: str) -> AbstractContextManager[object]:
    """Compute in the dtypes given; meta tensors know no autocast."""
    # Not torch.amp.is_autocast_available: before torch 2.11 it breaks the graph of a compiled call.
    return nullcontext() if device_type == "meta" else torch.autocast(device_type, enabled=False)


def _modify(problem: Problem, scores: Tensor, index: _Index) -> Tensor:
    """Cap the scores, then add the terms."""
    if problem.softcap:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    for term in problem.terms:
        if not isinstance(term, EdgeBias):
            scores = scores + term.value(*index).to(scores.dtype)
    return scores  # [B, H, rows, K]


def _restrict(
    problem: Problem, scores: Tensor, index: _Index, start: int, stop: int
) -> tuple[Tensor, Tensor | None]:
    """Set unrelated pairs to -inf; return them and how often each counts (n edges: n times; None: once)."""
    b, h, q, k = index
    count: Tensor | None
    if problem.layout is not None:
        count = problem.layout.rows(start, stop)  # [batch, heads, rows, K]
        related = count > 0
    else:
        assert problem.relation is not None
        count = problem.relation.multiplicity(q, k, b, h)
        related = problem.relation.related(q, k, b, h)
    often = None if count is None else count.to(scores.dtype)
    if any(isinstance(term, EdgeBias) for term in problem.terms):
        bias, often = add_up_edges(problem, start, stop, scores.dtype)
        scores = scores + bias
    return scores.masked_fill(~related, -torch.inf), often


def _softmax(scores: Tensor, often: Tensor | None, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the probabilities [B, H, rows, K] and lse [B, H, rows]; 0 and -inf in empty rows."""
    # The sink is one more key, without a value; where there is none it is an unrelated key.
    extra = scores.new_full((), -torch.inf) if sink is None else sink.to(scores.dtype)
    extra = extra.view(-1, 1, 1).expand(*scores.shape[:-1], 1)
    scores = torch.cat([scores, extra], dim=-1)  # [B, H, rows, K + 1]
    # Finite, so that an empty row is exp(-inf - 0) = 0 and its gradients are 0, not NaN.
    top = scores.detach().amax(-1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0)
    weights = torch.exp(scores - top)
    if often is not None:
        weights = weights * torch.nn.functional.pad(often, (0, 1), value=1.0)  # the sink once
    total = weights.sum(-1, keepdim=True)
    empty = total == 0
    total = total.masked_fill(empty, 1)
    lse = (top + total.log()).masked_fill(empty, -torch.inf)
    return weights[..., :-1] / total, lse.squeeze(-1)
