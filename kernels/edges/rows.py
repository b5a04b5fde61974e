"""Attention over lists of edges: backward.

Two passes. The row pass goes over the edges of each query as the forward does and computes dQ; on its
way it hands over, for each edge and head, the weight p and the gradient dS of the score. The column pass goes
over the transposed lists and computes dK and dV from these, so that nothing of the score is known there.
Every sum has one order: no atomics.
"""
# Types of kernels come from their arguments, at compile time:
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch.plans import scratch
from ..tiles.terms import Dropout
from .columns import columns_backward
from .items import EdgeLists
from .launch import NUMBERS, Launch, Score, alignment, strided
from .tile import (
    columns_of,
    edges_of,
    first_line,
    heads_at,
    keep_edges,
    lines_at,
    lines_of_pieces,
    load_bias,
    load_nodes,
    load_query,
    load_rows,
    load_sums,
    load_weight,
    locate,
    pairs_at,
    score,
    steepness,
    store_columns,
    store_sum,
)


@triton.jit(do_not_specialize=NUMBERS)
def edge_rows(
    q,
    k,
    v,
    out,
    lse,
    grad_out,
    grad_lse,
    grad_q,
    grad_bias,
    grad_weight,
    hand,
    additive,
    bias,
    factors,
    seed,
    drop_above,
    q_start,
    regrow,
    first_batch,
    first_head,
    q_positions,
    k_positions,
    edge_key,
    edge_id,
    first_place,
    places,
    items,
    item_count,
    slots,
    first_cell,
    cell_heads,
    heads_per_key,
    SHAPE: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """dQ = scale sum_e dS_e k_e, dS = p (dO.v - delta) slope, delta = dO.O - dlse; hand over (p, dS).

    With an additive score dQ = scale weight sum_e dS_e l_e, and the weight's gradient is
    scale sum_e dS_e l_e (q + k_e), where l is the slope of the LeakyReLU: an item leaves its part of it.
    Dropout multiplies the weight p that is handed over, and dO.v, by 0 or by regrow.
    The gradient of an edge's bias is p (dO.v - delta): dS, unless there is a slope. It can be written apart.
    """
    D: tl.constexpr = SHAPE.D
    D_PAD: tl.constexpr = SHAPE.D_PAD
    E: tl.constexpr = SHAPE.E
    E_PAD: tl.constexpr = SHAPE.E_PAD
    place = locate(items, item_count, first_cell, cell_heads, SHAPE)
    kept = load_query(q, place, additive, factors, SHAPE, ALIGN)  # [L, H, D]
    weight = None if additive is None else load_weight(additive, place.h, D, D_PAD)
    d_out = load_rows(grad_out, place, E, E_PAD, ALIGN).to(tl.float32)  # [L, H, E]
    delta = tl.sum(d_out * load_rows(out, place, E, E_PAD, ALIGN).to(tl.float32), 2)  # [L, H]
    delta, lse2 = load_sums(delta, lse, grad_lse, place)
    keys = heads_at(k, place.b, place.h // heads_per_key, ALIGN)
    values = heads_at(v, place.b, place.h // heads_per_key, ALIGN)
    biases = None if bias.ptr is None else heads_at(bias, place.b, place.h, 1)
    drop = None
    if seed is not None:
        drop = Dropout(
            tl.load(seed), drop_above, q_start, regrow, first_batch, first_head, q_positions, k_positions
        )

    to, start, part = grad_q  # before the loop: Triton 3.6 loses constants two records deep in one
    acc = tl.full([SHAPE.LANES, SHAPE.HEADS, D_PAD], 0.0, tl.float32)
    acc_weight = acc
    origin = first_line(first_place, places, place)
    e, last = edges_of(place, SHAPE.STEP)  # [S, L]
    key = tl.load(edge_key + tl.minimum(e, last))
    number = key
    for _ in range(0, tl.max(place.end - place.begin, 0), SHAPE.STEP):
        kk = load_nodes(keys, k, key, D, D_PAD, ALIGN).to(tl.float32)  # [S, L, H, D]
        vv = load_nodes(values, v, key, E, E_PAD, ALIGN)  # [S, L, H, E]
        if bias.ptr is not None:
            number = tl.minimum(e, last)
            if edge_id is not None:
                number = tl.load(edge_id + number)
        if seed is not None:
            is_kept = keep_edges(drop, place, key)
        key = tl.load(edge_key + tl.minimum(e + SHAPE.STEP, last))
        is_edge = (e < place.end[None, :])[:, :, None] & (place.h >= 0)[None]
        s, slope = score(kept, kk, weight, additive, factors)
        if bias.ptr is not None:
            s += load_bias(bias, biases, number)
        p = tl.where(is_edge, tl.math.exp2(s - lse2[None]), 0.0)
        dp = tl.sum(d_out[None] * vv.to(tl.float32), 3)  # [S, L, H]
        if seed is not None:
            dp = tl.where(is_kept, dp * regrow, 0.0)
        ds = p * (dp - delta[None])
        if grad_bias is not None:
            tl.store(grad_bias + lines_at(origin, e, place, SHAPE), ds, mask=is_edge)
        ds = ds * slope
        if additive is None:
            if grad_q.part is not None:
                acc += tl.sum(ds[:, :, :, None] * kk, 0)
        else:
            x = kept[None] + kk
            pull = ds[:, :, :, None] * steepness(x, additive)
            acc += tl.sum(pull, 0)
            if grad_weight is not None:
                acc_weight += tl.sum(pull * x, 0)
        if seed is not None:
            p = tl.where(is_kept, p * regrow, 0.0)
        if hand is not None:
            both = pairs_at(hand, lines_at(origin, e, place, SHAPE))
            tl.store(both, tl.join(p, ds), mask=is_edge[:, :, :, None])
        e += SHAPE.STEP

    if grad_weight is not None:  # a line for each item: a lane group without edges has seen those of another
        item = tl.program_id(0) * SHAPE.LANES + tl.arange(0, SHAPE.LANES)
        acc_weight = tl.where((place.end > place.begin)[:, None, None], acc_weight * factors.scale, 0.0)
        line = lines_of_pieces(item_count, item, place, SHAPE)
        store_columns(columns_of(grad_weight, line, D, D_PAD), acc_weight, item < item_count, D, D_PAD)
    if grad_q.part is not None:
        acc *= factors.scale
        if additive is not None:
            acc *= weight
        store_sum(acc, to, start, part, place, slots, D, D_PAD, SHAPE, ALIGN)


def edges_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lists: EdgeLists,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    grads: Sequence[Tensor | None],
    how: Score,
    *,
    needs_weight: bool = False,
    needs_bias: bool = False,
    starts: Sequence[Tensor | None] = (None, None, None),
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of attention over the edges. The last dimension of every tensor is dense.

    Args:
        query: [B, H, Q, D].
        key: [B, Hk, K, D].
        value: [B, Hk, K, E].
        lists: the edges, at least one.
        out: [B, H, Q, E], of the whole row: edges, tiles and all.
        lse: float32 [B, H, Q], likewise.
        grad_out: [B, H, Q, E].
        grad_lse: [B, H, Q] or None.
        grads: of query, key and value, written; None where not wanted.
        how: how edges are scored.
        needs_weight: whether the gradient of an additive score's weight is wanted.
        needs_bias: whether the gradient of the bias is wanted.
        starts: what to add to each gradient, float32 or None; it may be the gradient that is written.

    Returns:
        The gradients of bias and of the weight; None where not wanted.
    """
    grad_query, grad_key, grad_value = grads
    B, H = query.shape[:2]
    batch, heads = lists.group.shape
    lines = (B if batch == 1 else 1, lists.places, H if heads == 1 else 1)
    by_key = grad_key is not None or grad_value is not None
    hand = scratch(query, (*lines, 2)) if by_key else None
    apart = needs_bias and (how.softcap != 0 or hand is None)
    grad_bias = query.new_empty(lines, dtype=torch.float32) if apart else None
    launch = Launch.of(lists, lists.by_query, query, value)
    by_item = None
    if needs_weight:
        items = launch.items.row.shape[0]
        by_item = query.new_empty((lines[0], items, lines[2], query.shape[3]), dtype=torch.float32)
    align = alignment(query, key, value, out, grad_out, grad_query)
    to = launch.result(grad_query, starts[0], align)
    launch.run(
        edge_rows,
        q=strided(query, align),
        k=strided(key, align),
        v=strided(value, align),
        out=strided(out, align),
        lse=strided(lse),
        grad_out=strided(grad_out, align),
        grad_lse=strided(grad_lse),
        grad_q=to,
        grad_bias=grad_bias,
        grad_weight=by_item,
        hand=hand,
        first_place=lists.first_place,
        places=lists.places,
        heads_per_key=H // key.shape[1],
        ALIGN=align,
        **how.arguments(lists),
    )
    launch.merge(to, align)
    if hand is not None:
        columns_backward(query, key, lists, grad_out, hand, (grad_key, grad_value), starts[1:], how)
    d_weight = None if by_item is None else _sum_weight(by_item, lists)
    if how.bias is None or not needs_bias:
        return None, d_weight
    if grad_bias is None:
        assert hand is not None
        grad_bias = hand[..., 1]
    return _sum_bias(grad_bias, lists, how.bias), d_weight


def _sum_weight(by_item: Tensor, lists: EdgeLists) -> Tensor:
    """Add up the gradients [batches, items, heads of a cell, D] of an additive score's weight: [H, D]."""
    heads = lists.group.shape[1]
    if heads == 1:
        return by_item.sum((0, 1), dtype=torch.float64).float()
    head = lists.by_query.items.cell.long() % heads
    grad = by_item.new_zeros((heads, by_item.shape[3]), dtype=torch.float64)
    # Sorted by torch before it adds on a GPU: one order.
    return grad.index_put_((head,), by_item.sum((0, 2), dtype=torch.float64), accumulate=True).float()


def _sum_bias(by_place: Tensor, lists: EdgeLists, bias: Tensor) -> Tensor:
    """Add up the gradients [batches, places, heads of a cell] of each number of ``bias``, in its order."""
    grad = torch.zeros(bias.shape, dtype=torch.float32, device=bias.device)
    batch, heads = lists.group.shape
    if bias.dim() == 3:  # in the order of the lists
        cell = lists.place_cell
        edge = torch.arange(lists.places, device=bias.device) - lists.first_place[cell]
        by_cell = grad.view(batch, bias.shape[0] // batch, heads, bias.shape[1] // heads, -1)
        # Indices on both sides of a slice put theirs first: [places, batches, heads of a cell].
        by_cell[cell // heads, :, cell % heads, :, edge] = by_place.transpose(0, 1)
        return grad
    total = by_place.sum(0)  # [places, heads of a cell]
    index: tuple[Tensor, ...] = (lists.place_id,)
    if bias.dim() == 1:
        total = total.sum(1)
    elif heads > 1:
        index, total = (lists.place_id, lists.place_cell % heads), total.squeeze(1)
    # Sorted by torch before it adds on a GPU: one order.
    grad.index_put_(index, total, accumulate=batch * heads > 1)
    return grad.to(bias.dtype)
