"""Attention over lists of edges: the column pass of backward, dK and dV from what the row pass hands over."""
# Types of kernels come from their arguments, at compile time:
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .edge_items import EdgeLists
from .edge_launch import NUMBERS, OPTIONS, Additive, Launch, alignment, known_one, strides
from .edge_tile import (
    first_line,
    heads_at,
    lines_at,
    load_nodes,
    load_weight,
    locate,
    steepness,
    store_sum,
)


@triton.jit(do_not_specialize=NUMBERS)
def edge_columns(
    q,
    k,
    grad_out,
    hand,
    grad_k,
    grad_v,
    grad_k_start,
    grad_v_start,
    part_k,
    part_v,
    additive,
    col_query,
    col_edge,
    first_place,
    items,
    item_count,
    pieces,
    places,
    first_cell,
    cell_heads,
    share,
    scale,
    q_b,
    q_h,
    q_at,
    k_b,
    k_h,
    k_at,
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
    """dK = scale sum_e dS_e q_e and dV = sum_e p_e dO_e over the edges e of a key, for each query head.

    With an additive score dK = scale weight sum_e dS_e l_e, where l is the slope of the LeakyReLU at q_e + k.
    """
    CELL: tl.constexpr = HEADS * BLOCKS
    place = locate(items, item_count, first_cell, cell_heads, HEADS, BLOCKS, LANES)
    cell, row, begin, end, _, _, b, h, inner_b, inner_h = place
    if additive is not None:
        kept = load_nodes(heads_at(k, k_b, k_h, b, h // share, ALIGN), k_at, row, D, D_PAD, ALIGN)
        kept = kept.to(tl.float32)  # [L, H, D]
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
            if additive is None:
                acc_k += tl.sum(ds[:, :, :, None] * qq.to(tl.float32), 0)
            else:
                acc_k += tl.sum(ds[:, :, :, None] * steepness(kept[None] + qq.to(tl.float32), additive), 0)
        if grad_v is not None:
            acc_v += tl.sum(p[:, :, :, None] * d_out.to(tl.float32), 0)

    if grad_k is not None:
        acc_k *= scale
        if additive is not None:
            acc_k *= load_weight(additive, h, D, D_PAD)
        target = grad_k, grad_k_b, grad_k_h, grad_k_at, grad_k_start, start_k_b, start_k_h, start_k_at
        store_sum(acc_k, place, *target, part_k, pieces, D, D_PAD, CELL, ALIGN)
    if grad_v is not None:
        target = grad_v, grad_v_b, grad_v_h, grad_v_at, grad_v_start, start_v_b, start_v_h, start_v_at
        store_sum(acc_v, place, *target, part_v, pieces, E, E_PAD, CELL, ALIGN)


def columns_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lists: EdgeLists,
    grad_out: Tensor,
    hand: Tensor,
    grads: Sequence[Tensor | None],
    starts: Sequence[Tensor | None],
    scale: float,
    additive: Additive | None,
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
    read = None if additive is None else key
    align = alignment(query, read, grad_out, grad_key, grad_value)
    for first, grid in launch.grids(count, shape.LANES):
        edge_columns[grid](
            *(query, read, grad_out, hand, grad_key, grad_value, *added, part_key, part_value, additive),
            *(lists.col_query, lists.col_edge, lists.first_place),
            *(tuple(launch.side.items), count, launch.side.pieces, lists.places, first),
            *(known_one(launch.cell_heads), None if read is None else known_one(H // Hk), scale),
            *strides(query, align, constant=True),
            *((None, None, None) if read is None else strides(read, align, constant=True)),
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
