"""Attention over lists of edges: forward.

    out_i = sum_e p_e v_key(e),   p_e = softmax over the edges e of row i of score(q_i, k_key(e)) + bias_e

One warp a program. Its 32 lanes form LANES lane groups; a group owns one item (an edge range of a row,
see ``items``) and holds an edge's K or V row of HEADS heads, 16 or 32 bytes a lane. The edge tile is
[STEP, LANES, HEADS, D]: axis 0 lives in registers, so STEP gathers are in flight in every lane, axis 1 lies
over the lane groups, and in the loop only the sum over D crosses lanes. No shared memory, no barrier.

A step past the end of an item repeats the item's last edge, whose weight is then 0: no load is
predicated. The next keys are read one step ahead. Node strides are compile-time constants where they follow
from the heads and sizes: a run-time one takes 7 instructions a pointer instead of 1.
"""
# Types of kernels come from their arguments, at compile time:
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..tiles.terms import Dropout
from ..tiles.tile import LN2
from .items import EdgeLists
from .launch import NUMBERS, Launch, Score, alignment, registers, strided
from .tile import (
    columns_of,
    edges_of,
    finish,
    heads_at,
    keep_edges,
    lines_of_pieces,
    load_bias,
    load_nodes,
    load_query,
    load_start,
    load_weight,
    locate,
    rows_at,
    score,
    store_columns,
    store_max,
    store_rows,
)


@triton.jit(do_not_specialize=NUMBERS)
def edge_forward(
    q,
    k,
    v,
    out,
    lse,
    row_max,
    sink,
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
    items,
    item_count,
    slots,
    first_cell,
    cell_heads,
    heads_per_key,
    SHAPE: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """out = sum_e p_e v_e and lse = log sum_e exp(s_e) of each item, by an online softmax.

    Whole rows go on from the start of out and lse, if given; pieces of a row are left in their part. row_max,
    if it is wanted, gets the largest score: that of the start's keys stands in its rows.
    """
    D: tl.constexpr = SHAPE.D
    D_PAD: tl.constexpr = SHAPE.D_PAD
    E: tl.constexpr = SHAPE.E
    E_PAD: tl.constexpr = SHAPE.E_PAD
    place = locate(items, item_count, first_cell, cell_heads, SHAPE)
    is_row = place.exists & (place.slot < 0)
    to, to_max = out.rows, row_max.rows  # before the loop: Triton 3.6 loses constants two records deep in one
    kept = load_query(q, place, additive, factors, SHAPE, ALIGN)  # [L, H, D]
    weight = None if additive is None else load_weight(additive, place.h, D, D_PAD)
    keys = heads_at(k, place.b, place.h // heads_per_key, ALIGN)
    values = heads_at(v, place.b, place.h // heads_per_key, ALIGN)
    biases = None if bias.ptr is None else heads_at(bias, place.b, place.h, 1)
    drop = None
    if seed is not None:
        drop = Dropout(
            tl.load(seed), drop_above, q_start, regrow, first_batch, first_head, q_positions, k_positions
        )

    m = tl.full([SHAPE.LANES, SHAPE.HEADS], -float("inf"), tl.float32)
    highest = m
    total = tl.full([SHAPE.LANES, SHAPE.HEADS], 0.0, tl.float32)
    acc = tl.full([SHAPE.LANES, SHAPE.HEADS, E_PAD], 0.0, tl.float32)
    to_lse = rows_at(lse.rows, place)  # [L, H]
    if out.start.ptr is not None:
        # Nobody else's: another program may be writing it, in place.
        m, total, acc = load_start(out, lse, place, is_row, E, E_PAD)
    before = acc

    e, last = edges_of(place, SHAPE.STEP)  # [S, L]
    key = tl.load(edge_key + tl.minimum(e, last))
    number = key
    for _ in range(0, tl.max(place.end - place.begin, 0), SHAPE.STEP):
        kk = load_nodes(keys, k, key, D, D_PAD, ALIGN)  # [S, L, H, D]
        vv = load_nodes(values, v, key, E, E_PAD, ALIGN)  # [S, L, H, E]
        if bias.ptr is not None:
            number = tl.minimum(e, last)
            if edge_id is not None:
                number = tl.load(edge_id + number)
        if seed is not None:
            is_kept = keep_edges(drop, place, key)
        is_edge = e < place.end[None, :]
        e += SHAPE.STEP
        key = tl.load(edge_key + tl.minimum(e, last))
        s, _slope = score(kept, kk, weight, additive, factors)
        if bias.ptr is not None:
            s += load_bias(bias, biases, number)
        s = tl.where(is_edge[:, :, None], s, -float("inf"))
        if row_max.part is not None:  # m may start at an lse, which is no score
            highest = tl.maximum(highest, tl.max(s, 0))
        top = tl.maximum(m, tl.max(s, 0))
        safe = tl.where(top == -float("inf"), 0.0, top)
        p = tl.math.exp2(s - safe[None])
        fade = tl.math.exp2(m - safe)
        total = total * fade + tl.sum(p, 0)
        if seed is not None:
            p = tl.where(is_kept, p * regrow, 0.0)
        acc = acc * fade[:, :, None] + tl.sum(p[:, :, :, None] * vv.to(tl.float32), 0)
        m = top

    # A lane group without edges has seen those of another row: nothing of them may stay.
    acc = tl.where((place.end > place.begin)[:, None, None], acc, before)
    acc, lse2 = finish(m, total, acc, sink, place.h, is_row)
    store_rows(to, place, acc, is_row, E, E_PAD, ALIGN)
    tl.store(to_lse, lse2 * LN2, mask=is_row[:, None] & (place.h >= 0))
    if row_max.part is not None:
        store_max(to_max, out.start, place, highest, lse2, is_row)
    if tl.max(place.slot, 0) >= 0:  # in few programs, the first ones
        is_piece = place.exists & (place.slot >= 0)
        line = lines_of_pieces(slots, place.slot, place, SHAPE)
        store_columns(columns_of(out.part, line, E, E_PAD), acc, is_piece, E, E_PAD)
        tl.store(lse.part + line, lse2, mask=is_piece[:, None] & (line >= 0))
        if row_max.part is not None:
            tl.store(row_max.part + line, highest, mask=is_piece[:, None] & (line >= 0))


def edges_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lists: EdgeLists,
    out: Tensor,
    lse: Tensor,
    how: Score,
    *,
    sink: Tensor | None = None,
    start: tuple[Tensor, Tensor] | None = None,
    row_max: Tensor | None = None,
) -> None:
    """Attend over the edges, into ``out`` and ``lse``. The last dimension of every tensor is dense.

    Args:
        query: [B, H, Q, D].
        key: [B, Hk, K, D].
        value: [B, Hk, K, E].
        lists: the edges, at least one; so that there are queries and keys.
        out: [B, H, Q, E], written.
        lse: float32 [B, H, Q], written.
        how: how edges are scored.
        sink: one more logit per head, without a value, float32 [H].
        start: (out, lse) of other keys to go on from, both float32; they may be the tensors that are written.
        row_max: float32 [B, H, Q], written: the largest score of each row; with a start it holds those of the
            other keys. None = not wanted.
    """
    launch = Launch.of(lists, lists.by_query, query, value)
    out_start, lse_start = start if start is not None else (None, None)
    align = alignment(query, key, value, out)
    to, to_lse = launch.result(out, out_start, align), launch.result(lse, lse_start)
    to_max = launch.result(row_max, None)
    shape = launch.shape
    is_plain = how.is_plain and start is None and row_max is None and shape[:2] == shape[2:4]
    launch.run(
        edge_forward,
        registers(shape, query.dtype) if is_plain else None,
        q=strided(query, align),
        k=strided(key, align),
        v=strided(value, align),
        out=to,
        lse=to_lse,
        row_max=to_max,
        sink=sink,
        heads_per_key=query.shape[1] // key.shape[1],
        ALIGN=align,
        **how.arguments(lists),
    )
    launch.merge(to, align, to_lse, sink, to_max)
