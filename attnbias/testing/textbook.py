"""Attention the textbook way: every pair, in plain PyTorch.

It shares no code with what it checks, the reference included.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from copy import copy
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..backends.philox import keep_mask
from ..relations.listing import list_edges
from ..scores.additive import AdditiveScore
from ..scores.multilevel import MultiLevel
from ..scores.terms import EdgeBias, KernelTerm, Term

if TYPE_CHECKING:
    from ..op.problem import Problem
    from ..relations import Relation

Leaves = dict[str, Tensor]  # the tensors with gradients, by name

_OPTIONS = ("score", "scale", "softcap", "sink", "dropout_p", "seed")  # of ``eager``, fields of a problem


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

    In float64 it is the oracle, in any other dtype the measure of what that dtype can do.

    Args:
        query: [B, H, Q, D].
        key: [B, Hk, K, D]; query head h reads key head h // (H // Hk).
        value: [B, Hk, K, E].
        mask: bool, broadcasts to [B, H, Q, K]; True = may attend.
        counts: how often each pair counts, broadcasts to the same shape; 0 = unrelated.
        terms: objects whose ``value(b, h, q, k)`` is added to the score.
        score: replaces the dot product.
        scale: factor of the scores; None is D**-0.5 for the dot product and 1 for a ``score``.
        softcap: bound c of the scaled scores, c * tanh(score / c); 0 is off.
        sink: [H], one more logit per head, without a value.
        dropout_p: share of the pairs dropped after the softmax.
        seed: int64 of one element, for dropout.
        q_start: position of the first query row.

    Returns:
        out [B, H, Q, E] and lse [B, H, Q] (float32, or float64 for float64 inputs).

    Raises:
        ValueError: if ``dropout_p`` is set and ``seed`` is not.

    Example:
        >>> import torch
        >>> q = torch.zeros(1, 1, 2, 4)
        >>> out, lse = eager(q, q, torch.eye(2)[None, None], torch.ones(2, 2).tril().bool())
        >>> out[0, 0]
        tensor([[1.0000, 0.0000],
                [0.5000, 0.5000]])
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
            raise ValueError("seed: wanted an int64 tensor because dropout_p is set, got None")
        weights = weights * keep_mask(seed, dropout_p, b, h, q, k)
        total = total * (1 - dropout_p if dropout_p < 1 else 1)
    return _product(weights, value) / total, lse.squeeze(-1)


def _product(x: Tensor, y: Tensor) -> Tensor:
    """Multiply matrices; half precision is summed in float32 and rounded once, as in every backend."""
    # Not torch's own product of bfloat16: it is slow on many CPUs, and it kills the process where AMX is
    # announced but not allowed, as in some virtual machines.
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return (x.to(wide) @ y.to(wide)).to(x.dtype)


def leaves_of(problem: Problem) -> Leaves:
    """Return the tensors that can have gradients: inputs, sink, one per term, the weight of a score."""
    leaves = {"query": problem.query, "key": problem.key, "value": problem.value}
    if problem.sink is not None:
        leaves["sink"] = problem.sink
    for i, term in enumerate(problem.terms):
        if isinstance(term, KernelTerm):
            leaves[f"term {i}"] = getattr(term, _field(term))
    if isinstance(problem.score, AdditiveScore) and problem.score.weight is not None:
        leaves["weight"] = problem.score.weight
    return leaves


def with_leaves(problem: Problem, leaves: Leaves) -> Problem:
    """Return the problem with these tensors in the place of its own; terms that are not named stay."""
    changed = copy(problem)
    changed.query, changed.key, changed.value = leaves["query"], leaves["key"], leaves["value"]
    changed.sink = leaves.get("sink")
    changed.terms = tuple(
        replace(term, **{_field(term): leaves[name]}) if (name := f"term {i}") in leaves else term  # type: ignore[type-var]
        for i, term in enumerate(problem.terms)
    )
    if "weight" in leaves:
        assert isinstance(problem.score, AdditiveScore)
        changed.score = replace(problem.score, weight=leaves["weight"])
    return changed


def _field(term: Term) -> str:
    """Return the name of the field that holds a term's tensor: always its first."""
    return fields(term)[0].name  # type: ignore[arg-type]


def attend_rows(problem: Problem, rows: Tensor, leaves: Leaves) -> tuple[Tensor, Tensor]:
    """Compute consecutive query rows of a problem; the query among the leaves holds only these."""
    here = with_leaves(problem, leaves)
    counts = count_pairs(problem, rows)
    first = problem.q_start + (int(rows[0]) if len(rows) else 0)
    sizes = (*here.query.shape[:3], here.key.shape[2])
    terms, relation = list(here.terms), problem.relation
    for i, term in enumerate(terms):
        if isinstance(term, EdgeBias) and relation is not None:
            bias = term.bias if term.bias.dim() == 2 else term.bias[:, None]
            terms[i] = _SumOfEdges(bias, relation, sizes, first)
    has_sums = any(isinstance(term, _SumOfEdges) for term in terms)  # these already count duplicate edges
    options: dict[str, Any] = {name: getattr(here, name) for name in _OPTIONS}
    often = None if has_sums else counts
    inputs = here.query, here.key, here.value
    return eager(*inputs, counts > 0, counts=often, terms=terms, q_start=first, **options)


def count_pairs(problem: Problem, rows: Tensor) -> Tensor:
    """Return how often each pair of consecutive query rows counts, broadcasting to [B, H, rows, K].

    The numbers come from the relation's pointwise definition, or from the layout if that was passed.
    """
    if problem.layout is not None:
        start = int(rows[0]) if len(rows) else 0
        return problem.layout.rows(start, start + len(rows))
    assert problem.relation is not None
    (B, H), K, device = problem.query.shape[:2], problem.key.shape[2], rows.device
    at = (
        (problem.q_start + rows)[:, None],
        torch.arange(K, device=device),
        torch.arange(B, device=device)[:, None, None, None],
        torch.arange(H, device=device)[:, None, None],
    )
    counts = problem.relation.multiplicity(*at)
    return problem.relation.related(*at).long() if counts is None else counts


class _SumOfEdges(NamedTuple):
    """A term that replaces an ``EdgeBias``: the log of the sum of exp(bias) over each pair's edges."""

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
