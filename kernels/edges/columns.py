"""Attention over lists of edges: the column pass of backward, dK and dV from what the row pass hands over."""
# Types of kernels come from their arguments, at compile time:
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .items import EdgeLists
from .launch import NUMBERS, Launch, Score, alignment, strided
from .tile import (
    edges_of,
    first_line,
    heads_at,
    lines_at,
    load_nodes,
    load_weight,
    locate,
    pairs_at,
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
    additive,
    col_query,
    col_edge,
    first_place,
    items,
    item_count,
    slots,
    places,
    first_cell,
    cell_heads,
    heads_per_key,
    scale,
    SHAPE: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """dK = scale sum_e dS_e q_e and dV = sum_e p_e dO_e over the edges e of a key, for each query head.

    With an additive score dK = scale weight sum_e dS_e l_e, where l is the slope of the LeakyReLU at q_e + k.
    """
    D: tl.constexpr = SHAPE.D
    D_PAD: tl.constexpr = SHAPE.D_PAD
    E: tl.constexpr = SHAPE.E
    E_PAD: tl.constexpr = SHAPE.E_PAD
    place = locate(items, item_count, first_cell, cell_heads, SHAPE)
    if additive is not None:
        keys = heads_at(k, place.b, place.h // heads_per_key, ALIGN)
        kept = load_nodes(keys, k, place.row, D, D_PAD, ALIGN).to(tl.float32)  # [L, H, D]
    queries = heads_at(q, place.b, place.h, ALIGN)
    d_outs = heads_at(grad_out, place.b, place.h, ALIGN)

    to_k, start_k, part_k = grad_k  # before the loop: Triton 3.6 loses constants two records deep in one
    to_v, start_v, part_v = grad_v
    acc_k = tl.full([SHAPE.LANES, SHAPE.HEADS, D_PAD], 0.0, tl.float32)
    acc_v = tl.full([SHAPE.LANES, SHAPE.HEADS, E_PAD], 0.0, tl.float32)
    origin = first_line(first_place, places, place)
    e, last = edges_of(place, SHAPE.STEP)  # [S, L]
    query = tl.load(col_query + tl.minimum(e, last))
    edge = tl.load(col_edge + tl.minimum(e, last))
    for _ in range(0, tl.max(place.end - place.begin, 0), SHAPE.STEP):
        if grad_k.part is not None:
            qq = load_nodes(queries, q, query, D, D_PAD, ALIGN)  # [S, L, H, D]
        if grad_v.part is not None:
            d_out = load_nodes(d_outs, grad_out, query, E, E_PAD, ALIGN)  # [S, L, H, E]
        is_edge = (e < place.end[None, :])[:, :, None] & (place.h >= 0)[None]
        both = pairs_at(hand, lines_at(origin, edge, place, SHAPE))
        p, ds = tl.split(tl.load(both, mask=is_edge[:, :, :, None], other=0.0))
        e += SHAPE.STEP
        query = tl.load(col_query + tl.minimum(e, last))
        edge = tl.load(col_edge + tl.minimum(e, last))
        if grad_k.part is not None:
            if additive is None:
                acc_k += tl.sum(ds[:, :, :, None] * qq.to(tl.float32), 0)
            else:
                acc_k += tl.sum(ds[:, :, :, None] * steepness(kept[None] + qq.to(tl.float32), additive), 0)
        if grad_v.part is not None:
            acc_v += tl.sum(p[:, :, :, None] * d_out.to(tl.float32), 0)

    if grad_k.part is not None:
        acc_k *= scale
        if additive is not None:
            acc_k *= load_weight(additive, place.h, D, D_PAD)
        store_sum(acc_k, to_k, start_k, part_k, place, slots, D, D_PAD, SHAPE, ALIGN)
    if grad_v.part is not None:
        store_sum(acc_v, to_v, start_v, part_v, place, slots, E, E_PAD, SHAPE, ALIGN)


def columns_backward(
    query: Tensor,
    key: Tensor,
    lists: EdgeLists,
    grad_out: Tensor,
    hand: Tensor,
    grads: Sequence[Tensor | None],
    starts: Sequence[Tensor | None],
    how: Score,
) -> None:
    """Run the column pass; heads that share a key head are added up afterwards, in their order."""
    H, Hk = query.shape[1], key.shape[1]
    by_head, added = grads, starts
    if Hk != H:
        by_head = [
            None if x is None else x.new_empty((x.shape[0], H, *x.shape[2:]), dtype=torch.float32)
            for x in grads
        ]
        added = None, None
    launch = Launch.of(lists, lists.by_key, query, grad_out)
    read = None if how.additive is None else key
    align = alignment(query, read, grad_out, *by_head)
    results = [launch.result(x, start, align) for x, start in zip(by_head, added, strict=True)]
    launch.run(
        edge_columns,
        q=strided(query, align),
        k=strided(read, align),
        grad_out=strided(grad_out, align),
        grad_k=results[0],
        grad_v=results[1],
        hand=hand,
        additive=how.additive,
        scale=how.scale,
        col_query=lists.col_query,
        col_edge=lists.col_edge,
        first_place=lists.first_place,
        places=lists.places,
        heads_per_key=H // Hk,
        ALIGN=align,
    )
    for grad, x, start, result in zip(grads, by_head, starts, results, strict=True):
        launch.merge(result, align)
        if grad is not None and x is not None and x is not grad:
            total = x.unflatten(1, (Hk, H // Hk)).sum(2)
            grad.copy_(total if start is None else total + start)
