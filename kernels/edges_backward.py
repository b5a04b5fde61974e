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
from .edge_items import EdgeLists
from .edge_tile import first_line, heads_at, lines_at, load_nodes, locate, score, store_sum
from .edges import NUMBERS, OPTIONS, Launch, alignment, bias_strides, factors, is_listed, known_one, strides
from .tile import LOG2E


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

    Dropout multiplies the weight p that is handed over, and dO.v, by 0 or by regrow.

    The gradient of an edge's bias is p (dO.v - delta): dS, unless there is a slope. It can be written apart.
    """
    CELL: tl.constexpr = HEADS * BLOCKS
    place = locate(items, item_count, first_cell, cell_heads, HEADS, BLOCKS, LANES)
    cell, row, begin, end, _, _, b, h, inner_b, inner_h = place
    kept = load_nodes(heads_at(q, q_b, q_h, b, h, ALIGN), q_at, row, D, D_PAD, ALIGN)
    kept = kept.to(tl.float32) * inner  # [L, H, D]
    d_outs = heads_at(grad_out, grad_out_b, grad_out_h, b, h, ALIGN)
    d_out = load_nodes(d_outs, grad_out_at, row, E, E_PAD, ALIGN).to(tl.float32)  # [L, H, E]
    kept_out = load_nodes(heads_at(out, out_b, out_h, b, h, ALIGN), out_at, row, E, E_PAD, ALIGN)
    delta = tl.sum(d_out * kept_out.to(tl.float32), 2)  # [L, H]
    lse2 = tl.load(lse + (b.to(tl.int64)[:, None] * lse_b + h.to(tl.int64) * lse_h + row[:, None])) * LOG2E
    if grad_lse is not None:
        at = b.to(tl.int64)[:, None] * grad_lse_b + h.to(tl.int64) * grad_lse_h
        delta -= tl.load(grad_lse + at + (row.to(tl.int64) * grad_lse_q)[:, None]).to(tl.float32)
    # A row whose every bias is -inf: weights of exactly 0, and an lse that is a constant.
    delta = tl.where(lse2 == -float("inf"), 0.0, delta)
    lse2 = tl.where(lse2 == -float("inf"), 0.0, lse2)
    keys = heads_at(k, k_b, k_h, b, h // share, ALIGN)
    values = heads_at(v, v_b, v_h, b, h // share, ALIGN)

    drop = None if seed is None else (tl.load(seed), drop_above, q_start, regrow)
    acc = tl.zeros([LANES, HEADS, D_PAD], tl.float32)
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
            kept_pair = keep_pairs(
                drop, b[None, :, None], h[None], row[None, :, None], key[:, :, None]
            )  # [S, L, H]
        key = tl.load(edge_key + tl.minimum(e + STEP, last))
        is_edge = (e < end[None, :])[:, :, None] & (h >= 0)[None]
        s, slope = score(kept, kk, outer, bias, bias_b, bias_e, bias_h, number, b, h, CAPPED)
        p = tl.where(is_edge, tl.math.exp2(s - lse2[None]), 0.0)
        dp = tl.sum(d_out[None] * vv.to(tl.float32), 3)  # [S, L, H]
        if seed is not None:
            dp = tl.where(kept_pair, dp * regrow, 0.0)
        ds = p * (dp - delta[None])
        if grad_bias is not None:
            tl.store(grad_bias + lines_at(origin, e, inner_h, CELL), ds, mask=is_edge)
        ds = ds * slope
        if grad_q is not None:
            acc += tl.sum(ds[:, :, :, None] * kk, 0)
        if seed is not None:
            p = tl.where(kept_pair, p * regrow, 0.0)
        if hand is not None:
            both = hand + tl.expand_dims(lines_at(origin, e, inner_h, CELL) * 2, 3) + tl.arange(0, 2)
            tl.store(both, tl.join(p, ds), mask=is_edge[:, :, :, None])
        e += STEP

    if grad_q is not None:
        acc *= scale
        store_sum(
            acc,
            place,
            grad_q,
            grad_q_b,
            grad_q_h,
            grad_q_at,
            grad_q_start,
            start_b,
            start_h,
            start_at,
            part,
            pieces,
            D,
            D_PAD,
            CELL,
            ALIGN,
        )


@triton.jit(do_not_specialize=NUMBERS)
def edge_columns(
    q,
    grad_out,
    hand,
    grad_k,
    grad_v,
    grad_k_start,
    grad_v_start,
    part_k,
    part_v,
    col_query,
    col_edge,
    first_place,
    items,
    item_count,
    pieces,
    places,
    first_cell,
    cell_heads,
    scale,
    q_b,
    q_h,
    q_at,
    grad_out_b,
    grad_out_h,
    grad_out_at,
    grad_k_b,
    grad_k_h,
    grad_k_at,
    grad_v_b,
    grad_v_h,
    grad_v_at,
    start_k_b,
    start_k_h,
    start_k_at,
    start_v_b,
    start_v_h,
    start_v_at,
    D: tl.constexpr,
    E: tl.constexpr,
    D_PAD: tl.constexpr,
    E_PAD: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCKS: tl.constexpr,
    LANES: tl.constexpr,
    STEP: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """dK = scale sum_e dS_e q_e and dV = sum_e p_e dO_e over the edges e of a key, for each query head."""
    CELL: tl.constexpr = HEADS * BLOCKS
    place = locate(items, item_count, first_cell, cell_heads, HEADS, BLOCKS, LANES)
    cell, _, begin, end, _, _, b, h, inner_b, inner_h = place
    queries = heads_at(q, q_b, q_h, b, h, ALIGN)
    d_outs = heads_at(grad_out, grad_out_b, grad_out_h, b, h, ALIGN)

    acc_k = tl.zeros([LANES, HEADS, D_PAD], tl.float32)
    acc_v = tl.zeros([LANES, HEADS, E_PAD], tl.float32)
    origin = first_line(first_place, places, cell, inner_b)
    e = begin[None, :] + tl.arange(0, STEP)[:, None]  # [S, L]
    last = tl.maximum(end - 1, 0)[None, :]
    query = tl.load(col_query + tl.minimum(e, last))
    edge = tl.load(col_edge + tl.minimum(e, last))
    for _ in range(0, tl.max(end - begin, 0), STEP):
        if grad_k is not None:
            qq = load_nodes(queries, q_at, query, D, D_PAD, ALIGN)  # [S, L, H, D]
        if grad_v is not None:
            d_out = load_nodes(d_outs, grad_out_at, query, E, E_PAD, ALIGN)  # [S, L, H, E]
        is_edge = (e < end[None, :])[:, :, None] & (h >= 0)[None]
        both = hand + tl.expand_dims(lines_at(origin, edge, inner_h, CELL) * 2, 3) + tl.arange(0, 2)
        p, ds = tl.split(tl.load(both, mask=is_edge[:, :, :, None], other=0.0))
        e += STEP
        query = tl.load(col_query + tl.minimum(e, last))
        edge = tl.load(col_edge + tl.minimum(e, last))
        if grad_k is not None:
            acc_k += tl.sum(ds[:, :, :, None] * qq.to(tl.float32), 0)
        if grad_v is not None:
            acc_v += tl.sum(p[:, :, :, None] * d_out.to(tl.float32), 0)

    if grad_k is not None:
        acc_k *= scale
        store_sum(
            acc_k,
            place,
            grad_k,
            grad_k_b,
            grad_k_h,
            grad_k_at,
            grad_k_start,
            start_k_b,
            start_k_h,
            start_k_at,
            part_k,
            pieces,
            D,
            D_PAD,
            CELL,
            ALIGN,
        )
    if grad_v is not None:
        store_sum(
            acc_v,
            place,
            grad_v,
            grad_v_b,
            grad_v_h,
            grad_v_at,
            grad_v_start,
            start_v_b,
            start_v_h,
            start_v_at,
            part_v,
            pieces,
            E,
            E_PAD,
            CELL,
            ALIGN,
        )


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
    bias: Tensor | None = None,
    needs_bias: bool = False,
    dropout: Dropout = NO_DROPOUT,
    starts: Sequence[Tensor | None] = (None, None, None),
) -> Tensor | None:
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
        bias: a number per edge in the caller's order, [edges] or [edges, H]; or in the lists', [B, H, edges].
        needs_bias: whether the gradient of bias is wanted.
        dropout: of the weights.
        starts: what to add to each gradient, float32 or None; it may be the gradient that is written.

    Returns:
        The gradient of bias, or None.
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
    align = alignment(query, key, value, out, grad_out, grad_query)
    for first, grid in launch.grids(count, shape.LANES):
        edge_rows[grid](
            query,
            key,
            value,
            out,
            lse,
            grad_out,
            grad_lse,
            grad_query,
            starts[0],
            part,
            hand,
            grad_bias,
            bias,
            lists.edge_key,
            None if is_listed(bias) else lists.edge_id,
            lists.first_place,
            tuple(launch.side.items),
            count,
            launch.side.pieces,
            lists.places,
            first,
            known_one(launch.cell_heads),
            known_one(H // key.shape[1]),
            *factors(scale, softcap),
            scale,
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
        _columns(query, value, lists, grad_out, hand, (grad_key, grad_value), starts[1:], scale)
    if bias is None or not needs_bias:
        return None
    if grad_bias is None:
        assert hand is not None
        grad_bias = hand[..., 1]
    return _sum_bias(grad_bias, lists, bias)


def _columns(
    query: Tensor,
    value: Tensor,
    lists: EdgeLists,
    grad_out: Tensor,
    hand: Tensor,
    grads: Sequence[Tensor | None],
    starts: Sequence[Tensor | None],
    scale: float,
) -> None:
    """Run the column pass; heads that share a key head are added up afterwards, in their order."""
    H, Hk = query.shape[1], value.shape[1]
    written, added = list(grads), list(starts)
    if Hk != H:
        written = [
            None if x is None else x.new_empty((x.shape[0], H, *x.shape[2:]), dtype=torch.float32)
            for x in grads
        ]
        added = [None, None]
    grad_key, grad_value = written
    launch = Launch.of(lists, lists.by_key, query, value)
    shape, count = launch.shape, launch.side.items.row.shape[0]
    part_key = None if grad_key is None else launch.pieces(query, shape.D)
    part_value = None if grad_value is None else launch.pieces(query, shape.E)
    align = alignment(query, grad_out, grad_key, grad_value)
    for first, grid in launch.grids(count, shape.LANES):
        edge_columns[grid](
            query,
            grad_out,
            hand,
            grad_key,
            grad_value,
            *added,
            part_key,
            part_value,
            lists.col_query,
            lists.col_edge,
            lists.first_place,
            tuple(launch.side.items),
            count,
            launch.side.pieces,
            lists.places,
            first,
            known_one(launch.cell_heads),
            scale,
            *strides(query, align, constant=True),
            *strides(grad_out, align, constant=True),
            *strides(grad_key, align, constant=False),
            *strides(grad_value, align, constant=False),
            *strides(added[0], 1, constant=False),
            *strides(added[1], 1, constant=False),
            **shape._asdict(),
            ALIGN=align,
            **OPTIONS,
        )
    for grad, by_head, part, start in zip(grads, written, (part_key, part_value), starts, strict=True):
        if grad is None or by_head is None or part is None:
            continue
        launch.merge(part, by_head, None if Hk != H else start)
        if by_head is not grad:
            total = by_head.unflatten(1, (Hk, H // Hk)).sum(2)
            grad.copy_(total if start is None else total + start)


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
