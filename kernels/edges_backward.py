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

from .bias import NO_DROPOUT, Dropout, keep_pairs
from .edge_columns import columns_backward
from .edge_items import EdgeLists
from .edge_launch import (
    NUMBERS,
    OPTIONS,
    Additive,
    Launch,
    alignment,
    bias_strides,
    factors,
    is_listed,
    known_one,
    strides,
)
from .edge_tile import (
    columns_of,
    first_line,
    heads_at,
    lines_at,
    lines_of_pieces,
    load_nodes,
    load_query,
    load_sums,
    load_weight,
    locate,
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
    grad_q_start,
    part,
    hand,
    grad_bias,
    grad_weight,
    additive,
    bias,
    edge_key,
    edge_id,
    first_place,
    items,
    item_count,
    pieces,
    places,
    first_cell,
    cell_heads,
    share,
    inner,
    outer,
    scale,
    q_b,
    q_h,
    q_at,
    k_b,
    k_h,
    k_at,
    v_b,
    v_h,
    v_at,
    out_b,
    out_h,
    out_at,
    grad_out_b,
    grad_out_h,
    grad_out_at,
    grad_q_b,
    grad_q_h,
    grad_q_at,
    start_b,
    start_h,
    start_at,
    lse_b,
    lse_h,
    grad_lse_b,
    grad_lse_h,
    grad_lse_q,
    bias_b,
    bias_e,
    bias_h,
    seed,
    drop_above,
    q_start,
    regrow,
    D: tl.constexpr,
    E: tl.constexpr,
    D_PAD: tl.constexpr,
    E_PAD: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCKS: tl.constexpr,
    LANES: tl.constexpr,
    STEP: tl.constexpr,
    ALIGN: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """dQ = scale sum_e dS_e k_e, dS = p (dO.v - delta) slope, delta = dO.O - dlse; hand over (p, dS).

    With an additive score dQ = scale weight sum_e dS_e l_e, and the weight's gradient is
    scale sum_e dS_e l_e (q + k_e), where l is the slope of the LeakyReLU: an item leaves its share of it.
    Dropout multiplies the weight p that is handed over, and dO.v, by 0 or by regrow.
    The gradient of an edge's bias is p (dO.v - delta): dS, unless there is a slope. It can be written apart.
    """
    CELL: tl.constexpr = HEADS * BLOCKS
    place = locate(items, item_count, first_cell, cell_heads, HEADS, BLOCKS, LANES)
    cell, row, begin, end, _, _, b, h, inner_b, inner_h = place
    kept = load_query(q, q_b, q_h, q_at, b, h, row, inner, additive, D, D_PAD, ALIGN)  # [L, H, D]
    weight = None if additive is None else load_weight(additive, h, D, D_PAD)
    d_outs = heads_at(grad_out, grad_out_b, grad_out_h, b, h, ALIGN)
    d_out = load_nodes(d_outs, grad_out_at, row, E, E_PAD, ALIGN).to(tl.float32)  # [L, H, E]
    kept_out = load_nodes(heads_at(out, out_b, out_h, b, h, ALIGN), out_at, row, E, E_PAD, ALIGN)
    delta = tl.sum(d_out * kept_out.to(tl.float32), 2)  # [L, H]
    sums = lse, lse_b, lse_h, grad_lse, grad_lse_b, grad_lse_h, grad_lse_q
    delta, lse2 = load_sums(delta, *sums, b, h, row)
    keys = heads_at(k, k_b, k_h, b, h // share, ALIGN)
    values = heads_at(v, v_b, v_h, b, h // share, ALIGN)

    drop = None if seed is None else (tl.load(seed), drop_above, q_start, regrow)
    acc = tl.zeros([LANES, HEADS, D_PAD], tl.float32)
    acc_weight = acc
    origin = first_line(first_place, places, cell, inner_b)
    e = begin[None, :] + tl.arange(0, STEP)[:, None]  # [S, L]
    last = tl.maximum(end - 1, 0)[None, :]
    key = tl.load(edge_key + tl.minimum(e, last))
    number = key
    for _ in range(0, tl.max(end - begin, 0), STEP):
        kk = load_nodes(keys, k_at, key, D, D_PAD, ALIGN).to(tl.float32)  # [S, L, H, D]
        vv = load_nodes(values, v_at, key, E, E_PAD, ALIGN)  # [S, L, H, E]
        if bias is not None:
            number = tl.minimum(e, last)
            if edge_id is not None:
                number = tl.load(edge_id + number)
        if seed is not None:
            kept_pair = keep_pairs(drop, b[None, :, None], h[None], row[None, :, None], key[:, :, None])
        key = tl.load(edge_key + tl.minimum(e + STEP, last))
        is_edge = (e < end[None, :])[:, :, None] & (h >= 0)[None]
        term = bias, bias_b, bias_e, bias_h, number, b, h
        s, slope = score(kept, kk, additive, weight, inner, outer, *term, CAPPED)
        p = tl.where(is_edge, tl.math.exp2(s - lse2[None]), 0.0)
        dp = tl.sum(d_out[None] * vv.to(tl.float32), 3)  # [S, L, H]
        if seed is not None:
            dp = tl.where(kept_pair, dp * regrow, 0.0)
        ds = p * (dp - delta[None])
        if grad_bias is not None:
            tl.store(grad_bias + lines_at(origin, e, inner_h, CELL), ds, mask=is_edge)
        ds = ds * slope
        if additive is None:
            if grad_q is not None:
                acc += tl.sum(ds[:, :, :, None] * kk, 0)
        else:
            x = kept[None] + kk
            pull = ds[:, :, :, None] * steepness(x, additive)
            acc += tl.sum(pull, 0)
            if grad_weight is not None:
                acc_weight += tl.sum(pull * x, 0)
        if seed is not None:
            p = tl.where(kept_pair, p * regrow, 0.0)
        if hand is not None:
            both = hand + tl.expand_dims(lines_at(origin, e, inner_h, CELL) * 2, 3) + tl.arange(0, 2)
            tl.store(both, tl.join(p, ds), mask=is_edge[:, :, :, None])
        e += STEP

    if grad_weight is not None:  # a line for each item: a lane group without edges has seen those of another
        item = tl.program_id(0) * LANES + tl.arange(0, LANES)
        acc_weight = tl.where((end > begin)[:, None, None], acc_weight * scale, 0.0)
        line = lines_of_pieces(item_count, item, inner_b, inner_h, CELL)
        store_columns(columns_of(grad_weight, line, D, D_PAD), acc_weight, item < item_count, D, D_PAD)
    if grad_q is not None:
        acc *= scale
        if additive is not None:
            acc *= weight
        target = grad_q, grad_q_b, grad_q_h, grad_q_at, grad_q_start, start_b, start_h, start_at
        store_sum(acc, place, *target, part, pieces, D, D_PAD, CELL, ALIGN)


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
    *,
    scale: float,
    softcap: float = 0.0,
    additive: Additive | None = None,
    needs_weight: bool = False,
    bias: Tensor | None = None,
    needs_bias: bool = False,
    dropout: Dropout = NO_DROPOUT,
    starts: Sequence[Tensor | None] = (None, None, None),
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of attention over the edges.

    Args:
        query: [B, H, Q, D].
        key: [B, Hk, K, D].
        value: [B, Hk, K, E].
        lists: the edges, at least one.
        out: [B, H, Q, E], of the whole row: edges, tiles and all.
        lse: float32 [B, H, Q], dense rows, likewise.
        grad_out: [B, H, Q, E].
        grad_lse: [B, H, Q] or None.
        grads: of query, key and value, written; None where not wanted.
        scale: factor of the dot products.
        softcap: c of ``c * tanh(score / c)``; 0 is off.
        additive: of the score, or None for the dot product.
        needs_weight: whether the gradient of its weight is wanted.
        bias: a number per edge in the caller's order, [edges] or [edges, H]; or in the lists', [B, H, edges].
        needs_bias: whether the gradient of bias is wanted.
        dropout: of the weights.
        starts: what to add to each gradient, float32 or None; it may be the gradient that is written.

    Returns:
        The gradients of bias and of the weight; None where not wanted.
    """
    grad_query, grad_key, grad_value = grads
    B, H = query.shape[:2]
    batch, heads = lists.group.shape
    lines = (B if batch == 1 else 1, lists.places, H if heads == 1 else 1)
    by_key = grad_key is not None or grad_value is not None
    hand = query.new_empty((*lines, 2), dtype=torch.float32) if by_key else None
    apart = needs_bias and (softcap != 0 or hand is None)
    grad_bias = query.new_empty(lines, dtype=torch.float32) if apart else None
    launch = Launch.of(lists, lists.by_query, query, value)
    shape, count = launch.shape, launch.side.items.row.shape[0]
    part = None if grad_query is None else launch.pieces(query, shape.D)
    by_item = None
    if needs_weight:
        by_item = query.new_empty((lines[0], count, lines[2], shape.D), dtype=torch.float32)
    align = alignment(query, key, value, out, grad_out, grad_query)
    for first, grid in launch.grids(count, shape.LANES):
        edge_rows[grid](
            *(query, key, value, out, lse, grad_out, grad_lse, grad_query, starts[0], part),
            *(hand, grad_bias, by_item, additive, bias),
            *(lists.edge_key, None if is_listed(bias) else lists.edge_id, lists.first_place),
            *(tuple(launch.side.items), count, launch.side.pieces, lists.places, first),
            *(known_one(launch.cell_heads), known_one(H // key.shape[1]), *factors(scale, softcap), scale),
            *strides(query, align, constant=True),
            *strides(key, align, constant=True),
            *strides(value, align, constant=True),
            *strides(out, align, constant=True),
            *strides(grad_out, align, constant=True),
            *strides(grad_query, align, constant=True),
            *strides(starts[0], 1, constant=False),
            *lse.stride()[:2],
            *((0, 0, 0) if grad_lse is None else grad_lse.stride()),
            *bias_strides(bias),
            *dropout,
            **shape._asdict(),
            ALIGN=align,
            CAPPED=softcap != 0,
            **OPTIONS,
        )
    if grad_query is not None and part is not None:
        launch.merge(part, grad_query, starts[0])
    if hand is not None:
        columns_backward(
            *(query, key, value, lists, grad_out, hand, (grad_key, grad_value), starts[1:], scale, additive)
        )
    d_weight = None if by_item is None else _sum_weight(by_item, lists)
    if bias is None or not needs_bias:
        return None, d_weight
    if grad_bias is None:
        assert hand is not None
        grad_bias = hand[..., 1]
    return _sum_bias(grad_bias, lists, bias), d_weight


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
    if is_listed(bias):
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
