"""Heads for tokens (Ulysses): each rank computes some of the heads over the whole sequence.

Queries, keys and values travel in one all-to-all, results in another. Key heads go to every rank that has a
query head of theirs, so there may be fewer of them than ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..backends.places import Places
from ..op import dispatch
from ..op.problem import Problem
from ..op.run import attend as run
from ..sets.intervals import ceil_div
from .exchange import send, wait

if TYPE_CHECKING:
    from ..layouts.layout import Layout
    from ..relations.relation import Relation
    from .attend import Asked, Results
    from .shard import Shard


class Share(NamedTuple):
    """The heads of a rank."""

    first: int  # query heads
    stop: int
    key_first: int
    key_stop: int

    @property
    def queries(self) -> int:
        """Number of query heads."""
        return self.stop - self.first

    @property
    def keys(self) -> int:
        """Number of key heads."""
        return self.key_stop - self.key_first


def share_heads(heads: int, key_heads: int, ranks: int) -> list[Share]:
    """Cut the heads as evenly as they go; groups stay whole unless there are more ranks than key heads."""
    group = heads // key_heads
    if key_heads >= ranks:
        cuts = [group * (key_heads * rank // ranks) for rank in range(ranks + 1)]
    else:
        cuts = [heads * rank // ranks for rank in range(ranks + 1)]
    return [
        Share(low, high, low // group, ceil_div(high, group) if high > low else low // group)
        for low, high in pairwise(cuts)
    ]


def attend_by_heads(shard: Shard, query: Tensor, key: Tensor, value: Tensor, asked: Asked) -> Results:
    """Exchange heads for tokens, compute this rank's heads of all queries, and exchange back."""
    (B, H, _, D), (Hk, E) = query.shape, value.shape[1::2]
    ranks, plan = shard.ranks, shard.plan
    shares = share_heads(H, Hk, ranks.size)
    mine, group = shares[ranks.rank], ranks.group.group_name
    keys = [(each.key_first, each.keys) for each in shares]
    blocks = [
        torch.cat([x.reshape(-1) for x in rows])
        for rows in zip(
            query.split([each.queries for each in shares], 1),
            _Copies.apply(keys, key),  # type: ignore[no-untyped-call]
            _Copies.apply(keys, value),  # type: ignore[no-untyped-call]
            strict=True,
        )
    ]
    counts = [split.counts.tolist() for split in (plan.queries, plan.keys)]
    sizes = [
        (B * mine.queries * q * D, B * mine.keys * k * D, B * mine.keys * k * E)
        for q, k in zip(*counts, strict=True)
    ]
    came = _Blocks.apply(group, [sum(each) for each in sizes], *blocks)  # type: ignore[no-untyped-call]
    parts = [rows.split(each) for rows, each in zip(came, sizes, strict=True)]
    back = shard.orders(query.device)

    def whole(number: int, heads: int, size: int, side: int) -> Tensor:
        tokens = zip(parts, counts[side], strict=True)
        rows = [part[number].view(B, heads, count, size) for part, count in tokens]
        return torch.cat(rows, 2).index_select(2, back[side].restore)

    tensors = whole(0, mine.queries, D, 0), whole(1, mine.keys, D, 1), whole(2, mine.keys, E, 1)
    out, lse, row_max = _compute(shard, tensors, mine, H // Hk, asked.of_heads(mine.first, mine.queries, H))
    # What travels follows from what was asked for: a backend on another rank may have more, or less.
    results = out, lse if asked.return_lse else None, row_max if asked.return_max else None
    return _return(results, shares, counts[0], ranks.rank, group, back[0].gather)


def _compute(
    shard: Shard, tensors: tuple[Tensor, Tensor, Tensor], mine: Share, group: int, asked: Asked
) -> Results:
    """Compute some heads of all queries."""
    query, key, value = tensors
    B, heads, Q, _ = query.shape
    if not heads:  # as many results as others have, so that their gradients find a way back
        rows = query.sum(-1) + (key.sum() + value.sum())
        lse = rows.to(torch.promote_types(rows.dtype, torch.float32))
        return rows.unsqueeze(-1).expand(B, 0, Q, value.shape[3]), lse, lse.detach()
    if mine.keys > 1 and (mine.first % group or mine.stop % group):
        each = torch.arange(mine.first, mine.stop, device=query.device) // group - mine.key_first
        key, value = key.index_select(1, each), value.index_select(1, each)
    plan = shard.plan
    relation: Relation | Layout = plan.relation
    if plan.bound.group.shape[1] > 1:
        relation = shard.layout_of_heads(query, slice(mine.first, mine.stop), asked)
    places = Places(first_batch=asked.first_batch, first_head=asked.first_head + mine.first)
    problem = Problem(
        *(query, key, value, relation),
        return_lse=asked.return_lse,
        return_max=asked.return_max,
        q_start=plan.place.q_start,
        places=places if asked.options.get("dropout_p") else None,
        **asked.options,
    )
    problem.draw_seed()
    return run(problem, dispatch.asked_for(asked.backend))


def _return(
    results: Results, shares: Sequence[Share], counts: list[int], rank: int, group: str, order: Tensor
) -> Results:
    """Return results of this rank's tokens and all heads, from those of its heads and all tokens."""

    def exchange(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        blocks = [rows.reshape(-1) for rows in x.index_select(2, order).split(counts, 2)]
        shapes = [(x.shape[0], each.queries, counts[rank], *x.shape[3:]) for each in shares]
        sizes = [int(np.prod(shape)) for shape in shapes]
        came = _Blocks.apply(group, sizes, *blocks)  # type: ignore[no-untyped-call]
        return torch.cat([rows.view(shape) for rows, shape in zip(came, shapes, strict=True)], 1)

    out, lse, row_max = results
    returned = exchange(out)
    assert returned is not None
    return returned, exchange(lse), exchange(row_max)


class _Copies(torch.autograd.Function):
    """Runs of heads, which may overlap; their gradients are added by rank in float32."""

    @staticmethod
    def forward(ctx: Any, runs: Sequence[tuple[int, int]], x: Tensor) -> tuple[Tensor, ...]:
        """Cut."""
        ctx.runs, ctx.shape, ctx.dtype = runs, x.shape, x.dtype
        return tuple(x.narrow(1, first, size).clone() for first, size in runs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Add."""
        wide = torch.float64 if ctx.dtype == torch.float64 else torch.float32
        total = torch.zeros(ctx.shape, dtype=wide, device=grads[0].device)
        for (first, size), grad in zip(ctx.runs, grads, strict=True):
            total.narrow(1, first, size).add_(grad)
        return None, total.to(ctx.dtype)


class _Blocks(torch.autograd.Function):
    """An all-to-all of one flat block for each rank; its derivative is the reverse."""

    @staticmethod
    def forward(ctx: Any, group: str, sizes: list[int], *blocks: Tensor) -> tuple[Tensor, ...]:
        """Send; ``sizes`` are those of the blocks that come."""
        ctx.group, ctx.given = group, [block.numel() for block in blocks]
        return _exchange(blocks, sizes, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Send back."""
        return None, None, *_exchange(grads, ctx.given, ctx.group)


def _exchange(blocks: Sequence[Tensor], sizes: list[int], group: str) -> tuple[Tensor, ...]:
    flat = torch.cat([block.reshape(-1, 1) for block in blocks])
    came = wait(send(flat, [block.numel() for block in blocks], sizes, group))
    return tuple(rows.reshape(-1) for rows in came.split(sizes))
