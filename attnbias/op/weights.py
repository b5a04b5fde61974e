"""The attention weights themselves: dense, by edge, or as sparse rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..backends import reference
from ..relations.listing import count_edges
from ..scores.multilevel import MultiLevel
from ..scores.terms import EdgeBias
from .problem import Problem

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..layouts.layout import Layout
    from ..relations.relation import Relation
    from .problem import Options

PAIRS_AT_ONCE = 1 << 18  # whose queries and keys are gathered


class SparseRows(NamedTuple):
    """Weights of the heads of one group, those that share a relation, as sparse rows (CSR)."""

    ptr: Tensor  # [Q + 1], bounds of each query's keys
    key: Tensor  # [n], increasing in a row
    values: Tensor  # [members, n]
    batch: Tensor  # [members]
    head: Tensor  # [members]


@overload
def attention_weights(
    query: Tensor,
    key: Tensor,
    relation: Relation | Layout | None = ...,
    *,
    form: Literal["dense", "edges"] = ...,
    **options: Unpack[Options],
) -> Tensor: ...
@overload
def attention_weights(
    query: Tensor,
    key: Tensor,
    relation: Relation | Layout | None = ...,
    *,
    form: Literal["csr"],
    **options: Unpack[Options],
) -> list[SparseRows]: ...
def attention_weights(
    query: Tensor,
    key: Tensor,
    relation: Relation | Layout | None = None,
    *,
    form: Literal["dense", "edges", "csr"] = "dense",
    **options: Unpack[Options],
) -> Tensor | list[SparseRows]:
    """Return the weights that ``attention`` multiplies the values by, before dropout; differentiable.

    Each row with a key sums to 1 (less the share of a sink); unrelated pairs have none.

    Args:
        query: [B, H, Q, D].
        key: [B, Hk, K, D].
        relation: as for ``attention``; "edges" and "csr" want a relation.
        form: "dense" [B, H, Q, K]; "edges" [B, E, H], of a ``Graph`` or ``Neighbors``, in the caller's
            order, 0 where ``& other`` dropped an edge; "csr" a list of ``SparseRows``, one per group.
        **options: those of ``attention``.

    Raises:
        ValueError: if the form is unknown or does not fit the relation, or with dropout.

    Example:
        >>> import torch
        >>> import attnbias as ab
        >>> q, k = torch.zeros(2, 1, 1, 3, 4)
        >>> ab.attention_weights(q, k, ab.Causal())[0, 0]
        tensor([[1.0000, 0.0000, 0.0000],
                [0.5000, 0.5000, 0.0000],
                [0.3333, 0.3333, 0.3333]])
        >>> ring = ab.Graph([[0, 1, 2], [1, 2, 0]], num_nodes=3)
        >>> ab.attention_weights(q, k, ring, form="edges").shape
        torch.Size([1, 3, 1])
    """
    if form not in ("dense", "edges", "csr"):
        raise ValueError(f"form: wanted 'dense', 'edges' or 'csr', got {form!r}")
    if options.get("dropout_p"):
        raise ValueError(f"dropout_p: weights are those before dropout, wanted 0, got {options['dropout_p']}")
    nothing = key.detach()[..., :1] if isinstance(key, Tensor) else key  # a value that no weight depends on
    problem = Problem(query, key, nothing, relation, **options)
    if form == "dense":
        weights = reference.weights(problem)
        return weights.squeeze(0) if problem.squeeze else weights
    if problem.relation is None:
        raise ValueError(f"form: wanted a relation for {form!r}, got a layout")
    count = count_edges(problem.relation, "form") if form == "edges" else 0
    groups = _sparse_rows(problem)
    if form == "csr":
        return [rows for rows, _ in groups]
    B, H = problem.query.shape[:2]
    weights = problem.query.new_zeros(B, count, H, dtype=groups[0][0].values.dtype)
    for rows, number in groups:
        place = (rows.batch[:, None], number, rows.head[:, None])
        weights = weights.index_put(place, rows.values)
    return weights


def _sparse_rows(problem: Problem) -> list[tuple[SparseRows, Tensor]]:
    """Return the weights by group, and the caller's number of each edge [n]."""
    query, key, relation = problem.query, problem.key, problem.relation
    (B, H, Q, _), K = query.shape, key.shape[2]
    assert relation is not None
    layout = relation.layout(
        Q, K, q_start=problem.q_start, device=query.device, form="edges", batch=B, heads=H
    )
    members = layout.group.expand(B, H)
    groups = []
    for g in range(layout.groups):
        b, h = torch.nonzero(members == g, as_tuple=True)
        ptr = layout.edge_ptr[g * Q : (g + 1) * Q + 1].long() if layout.edges else members.new_zeros(Q + 1)
        first, last = int(ptr[0]), int(ptr[-1])
        keys, number = (x[first:last].long() for x in (layout.edge_key, layout.edge_id))
        row = torch.repeat_interleave(torch.arange(Q, device=query.device), ptr.diff())
        step = max(PAIRS_AT_ONCE // max(len(b), 1), 1)
        scores = [
            # Gathered again in backward: queries and keys of all pairs are never held.
            checkpoint(_score, problem, b, h, *part, use_reentrant=False, preserve_rng_state=False)
            for part in zip(row.split(step), keys.split(step), number.split(step), strict=True)
        ]
        sink = None if problem.sink is None else problem.sink[h, None].to(scores[0].dtype)
        values = softmax_by_row(torch.cat(scores, dim=1), row, Q, sink)
        rows = SparseRows(ptr - first, keys, values, b, h)
        groups.append((rows, number))
    return groups


def softmax_by_row(scores: Tensor, row: Tensor, rows: int, sink: Tensor | None = None) -> Tensor:
    """Return the softmax over the edges of each row.

    It subtracts the largest score of the row, not the ``lse`` of the kernels: that is rounded at the size of
    the scores, and large ones would leave weights that do not sum to 1.

    Args:
        scores: [m, n].
        row: [n], the row of each edge.
        rows: how many there are.
        sink: [m, 1], one more score for each row.
    """
    start = scores.new_full((len(scores), rows), -torch.inf) if sink is None else sink.expand(-1, rows)
    top = start.detach().scatter_reduce(1, row.expand_as(scores), scores.detach(), "amax")
    top = top.masked_fill(top == -torch.inf, 0)  # a row whose scores are all -inf has weights of 0
    weights = torch.exp(scores - top.index_select(1, row))
    total = torch.zeros_like(top) if sink is None else torch.exp(sink - top)
    total = total.index_add(1, row, weights)
    return weights / total.masked_fill(total == 0, 1).index_select(1, row)


def _score(problem: Problem, b: Tensor, h: Tensor, row: Tensor, keys: Tensor, number: Tensor) -> Tensor:
    """Return the scores of edges [n] for some heads [m]: [m, n]."""
    dtype = problem.sizes.dtype
    b, h = b[:, None], h[:, None]
    share = problem.query.shape[1] // problem.key.shape[1]
    query, key = problem.query[b, h, row].to(dtype), problem.key[b, h // share, keys].to(dtype)
    score = problem.score
    if isinstance(score, MultiLevel):
        levels = score.bind(problem.query.shape[2], problem.key.shape[2], problem.q_start)
        positions = row + problem.q_start, keys
        scores = score.compare(levels, *positions, lambda dims: (query[..., dims] * key[..., dims]).sum(-1))
    else:
        scores = (query * key).sum(-1) if score is None else score.pairs(h, query, key)
    scores = scores * problem.scale
    if problem.softcap:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    for term in problem.terms:
        if isinstance(term, EdgeBias):
            bias = term.make_part(problem.sizes)
            scores = scores + bias[number, h % bias.shape[1]]
        else:
            scores = scores + term.value(b, h, row + problem.q_start, keys).to(dtype)
    return scores


def edge_weights(query: Tensor, key: Tensor, relation: Relation, **options: Unpack[Options]) -> Tensor:
    """Return the weight of each edge of a ``Graph`` or ``Neighbors``, in the caller's order; differentiable.

    Args:
        query: [B, H, Q, D] or [H, Q, D].
        key: [B, Hk, K, D] or [Hk, K, D].
        relation: a graph or neighbours, or one of them ``& other``, which gives dropped edges 0.
        **options: those of ``attention`` (but ``backend``: they are computed in PyTorch).

    Returns:
        [B, E, H], or [E, H] when B is 1. Duplicate edges each have their own.

    Raises:
        ValueError: if the relation has no edges of the caller's, or with dropout.

    Example:
        >>> import torch
        >>> import attnbias as ab
        >>> twice = ab.Graph([[0, 1, 1], [0, 0, 0]], num_nodes=2)
        >>> q = k = torch.zeros(1, 2, 4)
        >>> ab.edge_weights(q, k, twice)
        tensor([[0.3333],
                [0.3333],
                [0.3333]])
    """
    weights = attention_weights(query, key, relation, form="edges", **options)
    return weights.squeeze(0) if weights.shape[0] == 1 else weights
