"""Attention over lists of edges: forward.

    out_i = sum_e p_e v_key(e),   p_e = softmax over the edges e of row i of score(q_i, k_key(e)) + bias_e

One warp a program. Its 32 lanes form LANES lane groups; a group owns one item (an edge range of a row,
see ``edge_items``) and holds an edge's K or V row of HEADS heads, 16 or 32 bytes a lane. The edge tile is
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

from .bias import NO_DROPOUT, Dropout, keep_pairs
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
    registers,
    strides,
)
from .edge_tile import (
    columns_of,
    finish,
    heads_at,
    lines_of_pieces,
    load_nodes,
    load_query,
    load_weight,
    locate,
    score,
    store_columns,
    store_nodes,
)
from .tile import LN2, LOG2E


@triton.jit(do_not_specialize=NUMBERS)
def edge_forward(
    q,
    k,
    v,
    out,
    lse,
    out_start,
    lse_start,
    part,
    part_lse,
    additive,
    bias,
    sink,
    edge_key,
    edge_id,
    items,
    item_count,
    pieces,
    first_cell,
    cell_heads,
    share,
    inner,
    outer,
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
    start_b,
    start_h,
    start_at,
    lse_b,
    lse_h,
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
    """out = sum_e p_e v_e and lse = log sum_e exp(s_e) of each item, by an online softmax.

    Whole rows go on from out_start and lse_start, if given; pieces of a row are left in part and part_lse.
    """
    place = locate(items, item_count, first_cell, cell_heads, HEADS, BLOCKS, LANES)
    _, row, begin, end, slot, exists, b, h, inner_b, inner_h = place
    kept = load_query(q, q_b, q_h, q_at, b, h, row, inner, additive, D, D_PAD, ALIGN)  # [L, H, D]
    weight = None if additive is None else load_weight(additive, h, D, D_PAD)
    keys = heads_at(k, k_b, k_h, b, h // share, ALIGN)
    values = heads_at(v, v_b, v_h, b, h // share, ALIGN)

    m = tl.full([LANES, HEADS], -float("inf"), tl.float32)
    total = tl.zeros([LANES, HEADS], tl.float32)
    acc = tl.zeros([LANES, HEADS, E_PAD], tl.float32)
    lse_place = b.to(tl.int64)[:, None] * lse_b + h.to(tl.int64) * lse_h + row[:, None]  # [L, H]
    if out_start is not None:
        # Nobody else's: another program may be writing it, in place.
        is_mine = (exists & (slot < 0))[:, None] & (h >= 0)
        m = tl.load(lse_start + lse_place, mask=is_mine, other=-float("inf")) * LOG2E
        total = tl.where(m == -float("inf"), 0.0, 1.0)
        acc = load_nodes(heads_at(out_start, start_b, start_h, b, h, 1), start_at, row, E, E_PAD, 1)
        acc = tl.where(total[:, :, None] > 0, acc, 0.0)
    before = acc
    drop = None if seed is None else (tl.load(seed), drop_above, q_start, regrow)

    e = begin[None, :] + tl.arange(0, STEP)[:, None]  # [S, L]
    last = tl.maximum(end - 1, 0)[None, :]
    key = tl.load(edge_key + tl.minimum(e, last))
    number = key
    for _ in range(0, tl.max(end - begin, 0), STEP):
        kk = load_nodes(keys, k_at, key, D, D_PAD, ALIGN)  # [S, L, H, D]
        vv = load_nodes(values, v_at, key, E, E_PAD, ALIGN)  # [S, L, H, E]
        if bias is not None:
            number = tl.minimum(e, last)
            if edge_id is not None:
                number = tl.load(edge_id + number)
        if seed is not None:
            kept_pair = keep_pairs(drop, b[None, :, None], h[None], row[None, :, None], key[:, :, None])
        is_edge = e < end[None, :]
        e += STEP
        key = tl.load(edge_key + tl.minimum(e, last))
        term = bias, bias_b, bias_e, bias_h, number, b, h
        s, _slope = score(kept, kk, additive, weight, inner, outer, *term, CAPPED)
        s = tl.where(is_edge[:, :, None], s, -float("inf"))
        top = tl.maximum(m, tl.max(s, 0))
        safe = tl.where(top == -float("inf"), 0.0, top)
        p = tl.math.exp2(s - safe[None])
        fade = tl.math.exp2(m - safe)
        total = total * fade + tl.sum(p, 0)
        if seed is not None:
            p = tl.where(kept_pair, p * regrow, 0.0)
        acc = acc * fade[:, :, None] + tl.sum(p[:, :, :, None] * vv.to(tl.float32), 0)
        m = top

    # A lane group without edges has seen those of another row: nothing of them may stay.
    acc = tl.where((end > begin)[:, None, None], acc, before)
    is_row = exists & (slot < 0)
    acc, lse2 = finish(m, total, acc, sink, h, is_row)
    store_nodes(heads_at(out, out_b, out_h, b, h, ALIGN), out_at, row, acc, is_row, E, E_PAD, ALIGN)
    tl.store(lse + lse_place, lse2 * LN2, mask=is_row[:, None] & (h >= 0))
    if tl.max(slot, 0) >= 0:  # in few programs, the first ones
        is_piece = exists & (slot >= 0)
        line = lines_of_pieces(pieces, slot, inner_b, inner_h, HEADS * BLOCKS)
        store_columns(columns_of(part, line, E, E_PAD), acc, is_piece, E, E_PAD)
        tl.store(part_lse + line, lse2, mask=is_piece[:, None] & (line >= 0))


def edges_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lists: EdgeLists,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    additive: Additive | None = None,
    bias: Tensor | None = None,
    dropout: Dropout = NO_DROPOUT,
    sink: Tensor | None = None,
    start: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Attend over the edges, into ``out`` and ``lse``.

    Args:
        query: [B, H, Q, D].
        key: [B, Hk, K, D].
        value: [B, Hk, K, E].
        lists: the edges, at least one; so that there are queries and keys.
        out: [B, H, Q, E], written.
        lse: float32 [B, H, Q], dense rows, written.
        scale: factor of the dot products.
        softcap: c of ``c * tanh(score / c)``; 0 is off.
        additive: of the score, or None for the dot product.
        bias: a number per edge in the caller's order, [edges] or [edges, H]; or in the lists', [B, H, edges].
        dropout: of the weights.
        sink: one more logit per head, without a value, float32 [H].
        start: (out, lse) of other keys to go on from, both float32; they may be the tensors that are written.
    """
    launch = Launch.of(lists, lists.by_query, query, value)
    shape = launch.shape
    part, part_lse = launch.pieces(query, shape.E), launch.pieces(query)
    out_start, lse_start = start if start is not None else (None, None)
    align = alignment(query, key, value, out)
    count = launch.side.items.row.shape[0]
    is_bare = additive is None and bias is None and dropout.seed is None and start is None and not softcap
    is_plain = is_bare and shape[:2] == shape[2:4]
    most = {"maxnreg": registers(shape, query.dtype)} if is_plain else {}
    for first, grid in launch.grids(count, shape.LANES):
        edge_forward[grid](
            *(query, key, value, out, lse, out_start, lse_start, part, part_lse, additive, bias, sink),
            *(lists.edge_key, None if is_listed(bias) else lists.edge_id),
            *(tuple(launch.side.items), count, launch.side.pieces, first),
            *(known_one(launch.cell_heads), known_one(query.shape[1] // key.shape[1])),
            *factors(scale, softcap),
            *strides(query, align, constant=True),
            *strides(key, align, constant=True),
            *strides(value, align, constant=True),
            *strides(out, align, constant=True),
            *strides(out_start, 1, constant=False),
            *lse.stride()[:2],
            *bias_strides(bias),
            *dropout,
            **shape._asdict(),
            ALIGN=align,
            CAPPED=softcap != 0,
            **OPTIONS,
            **most,
        )
    launch.merge(part, out, out_start, part_lse, lse, lse_start, sink)
