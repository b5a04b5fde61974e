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

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .bias import NO_DROPOUT, Dropout, keep_pairs
from .edge_items import STEP, EdgeLists, Side
from .edge_tile import (
    columns_of,
    finish,
    heads_at,
    lines_of_pieces,
    load_columns,
    load_nodes,
    locate,
    score,
    store_columns,
    store_nodes,
)
from .tile import LN2, LOG2E

MOST_CELLS = 65535  # where the second axis of a grid ends
# Run-time arguments that compile nothing anew, whatever their value: all that follow from lengths and counts.
STRIDED = ("q", "k", "v", "out", "start", "start_k", "start_v", "grad_out", "grad_q", "grad_k", "grad_v")
NUMBERS = (
    *("item_count", "cut_count", "pieces", "places", "first_cell", "cell_heads", "share"),
    *("lse_b", "lse_h", "grad_lse_b", "grad_lse_h", "grad_lse_q", "bias_b", "bias_e", "bias_h"),
    *("drop_above", "q_start"),
    *(f"{name}_{letter}" for name in STRIDED for letter in "bh"),
)
OPTIONS = {"num_warps": 1, "num_stages": 1, "enable_fp_fusion": True}


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
    kept = load_nodes(heads_at(q, q_b, q_h, b, h, ALIGN), q_at, row, D, D_PAD, ALIGN)
    kept = kept.to(tl.float32) * inner  # [L, H, D]
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
            kept_pair = keep_pairs(
                drop, b[None, :, None], h[None], row[None, :, None], key[:, :, None]
            )  # [S, L, H]
        is_edge = e < end[None, :]
        e += STEP
        key = tl.load(edge_key + tl.minimum(e, last))
        s, _slope = score(kept, kk, outer, bias, bias_b, bias_e, bias_h, number, b, h, CAPPED)
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


@triton.jit(do_not_specialize=NUMBERS)
def edge_merge(
    part,
    part_lse,
    out,
    lse,
    start,
    lse_start,
    sink,
    cuts,
    cut_count,
    pieces,
    first_cell,
    cell_heads,
    out_b,
    out_h,
    out_at,
    start_b,
    start_h,
    start_at,
    lse_b,
    lse_h,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCKS: tl.constexpr,
    STEP: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Join the pieces of a row to start, in their order: weighted by lse if there is one, else added."""
    place = locate(cuts, cut_count, first_cell, cell_heads, HEADS, BLOCKS, 1)
    _, row, begin, end, _, exists, b, h, inner_b, inner_h = place
    acc = tl.zeros([1, HEADS, PADDED], tl.float32)
    m = tl.full([1, HEADS], -float("inf"), tl.float32)
    total = tl.zeros([1, HEADS], tl.float32)
    if part_lse is not None:
        lse_place = b.to(tl.int64)[:, None] * lse_b + h.to(tl.int64) * lse_h + row[:, None]
    if start is not None:
        acc = load_nodes(heads_at(start, start_b, start_h, b, h, 1), start_at, row, SIZE, PADDED, 1)
        if part_lse is not None:
            m = tl.load(lse_start + lse_place) * LOG2E
            total = tl.where(m == -float("inf"), 0.0, 1.0)
            acc = tl.where(total[:, :, None] > 0, acc, 0.0)
    first = tl.sum(begin, 0)
    stop = tl.sum(end, 0)
    for c in range(first, stop, STEP):
        slot = c + tl.arange(0, STEP)
        is_piece = slot < stop
        line = lines_of_pieces(pieces, tl.minimum(slot, stop - 1), inner_b, inner_h, HEADS * BLOCKS)  # [S, H]
        x = load_columns(columns_of(part, line, SIZE, PADDED), SIZE, PADDED)  # [S, H, SIZE]
        if part_lse is not None:
            s = tl.where(is_piece[:, None], tl.load(part_lse + line), -float("inf"))
            top = tl.maximum(m, tl.max(s, 0)[None])
            safe = tl.where(top == -float("inf"), 0.0, top)
            p = tl.math.exp2(s - safe)
            fade = tl.math.exp2(m - safe)
            total = total * fade + tl.sum(p, 0)[None]
            acc = acc * fade[:, :, None] + tl.sum(p[:, :, None] * x, 0)[None]
            m = top
        else:
            acc += tl.sum(tl.where(is_piece[:, None, None], x, 0.0), 0)[None]
    if part_lse is not None:
        acc, lse2 = finish(m, total, acc, sink, h, exists)
        tl.store(lse + lse_place, lse2 * LN2, mask=exists[:, None] & (h >= 0))
    store_nodes(heads_at(out, out_b, out_h, b, h, ALIGN), out_at, row, acc, exists, SIZE, PADDED, ALIGN)


class Shape(NamedTuple):
    """How a kernel divides heads and columns: its compile-time sizes."""

    D: int
    E: int
    D_PAD: int
    E_PAD: int
    HEADS: int  # heads of a program
    BLOCKS: int  # programs of a cell's heads
    LANES: int  # items of a program
    STEP: int = STEP  # edges of an item at once


def choose_shape(heads: int, D: int, E: int, item_size: int) -> Shape:
    """Divide the heads of a cell, D and E columns of item_size bytes, over programs of one warp.

    A lane reads 16 bytes of an edge's row at a time, and 32 where more heads fit in: the keys and
    softmax steps are then shared by more heads. H without a factor of two goes head by head.

    Example:
        >>> choose_shape(8, 64, 64, 2)
        Shape(D=64, E=64, D_PAD=64, E_PAD=64, HEADS=8, BLOCKS=1, LANES=1, STEP=4)
        >>> choose_shape(3, 20, 20, 2)[4:]
        (1, 3, 8, 4)
    """
    padded = triton.next_power_of_2(D), triton.next_power_of_2(E)
    width, lane = max(padded), 16 // item_size  # elements of a head, and of a lane's 16 bytes
    together = 1
    while heads % (2 * together) == 0 and 2 * together * width <= 64 * lane:
        together *= 2
    lanes = min(32, max(1, 32 * lane // (together * width)))
    return Shape(D, E, *padded, together, heads // together, lanes)


def registers(shape: Shape, dtype: torch.dtype) -> int:
    """Return the most registers for a plain forward loop.

    As many as it needs, so that enough warps have gathers on their way; left alone, the compiler takes a
    quarter more than that for what comes before and after the loop.
    """
    is_wide = shape.HEADS * max(shape.D_PAD, shape.E_PAD) * dtype.itemsize > 512
    return 112 if is_wide else 80  # 32 bytes a lane, or 16


def strides(x: Tensor | None, align: int, constant: bool) -> tuple[Any, ...]:
    """Return strides for a kernel: batch, head, (node, column), all but the last divided by align.

    The node stride is a constant where it follows from heads and sizes ([B, H, N, D], [B, N, H, D] and
    parts of a packed projection), and a run-time number otherwise: lengths and views compile nothing.
    """
    if x is None:
        return 0, 0, None
    batch, head, node, column = x.stride()
    _, heads, _, size = x.shape
    fixed = constant and node % size == 0 and node <= 3 * heads * size
    step = tl.constexpr(node // align) if fixed else node // align
    return batch // align, head // align, (step, known_one(column))


def known_one(x: int) -> Any:
    """Return 1 as a constant, so that it is compiled in, and any other number as it is."""
    return tl.constexpr(1) if x == 1 else x


def alignment(*tensors: Tensor | None) -> int:
    """Return the power of two, at most 16 bytes, in elements, that divides all strides between rows."""
    align = 16
    for x in tensors:
        if x is not None:
            align = min(align, 16 // x.element_size())
            while any(stride % align for stride in x.stride()[:3]):
                align //= 2
    return align


class Launch(NamedTuple):
    """What the kernels of one pass have in common."""

    side: Side
    shape: Shape
    cell_heads: int  # heads of the layout: 1 or H
    cells: int  # batches and head blocks inside one cell: the second axis of the grid

    @classmethod
    def of(cls, lists: EdgeLists, side: Side, query: Tensor, value: Tensor) -> Launch:
        """Plan a pass over one side of the lists."""
        B, H, _, D = query.shape
        batch, heads = lists.group.shape
        shape = choose_shape(H if heads == 1 else 1, D, value.shape[3], query.element_size())
        return cls(side, shape, heads, (B if batch == 1 else 1) * shape.BLOCKS)

    def pieces(self, like: Tensor, *size: int) -> Tensor:
        """Allocate room for the pieces' results, float32 [batches, pieces, heads, *size]."""
        lines = self.cells * self.shape.HEADS * self.side.pieces
        return torch.empty((lines, *size), dtype=torch.float32, device=like.device)

    def grids(self, count: int, lanes: int) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yield (first cell, grid) of each launch."""
        for first in range(0, self.cells, MOST_CELLS):
            yield first, (triton.cdiv(count, lanes), min(MOST_CELLS, self.cells - first))

    def merge(
        self,
        part: Tensor,
        out: Tensor,
        start: Tensor | None,
        part_lse: Tensor | None = None,
        lse: Tensor | None = None,
        lse_start: Tensor | None = None,
        sink: Tensor | None = None,
    ) -> None:
        """Join the pieces of every row that was cut."""
        size = out.shape[3]
        padded = triton.next_power_of_2(size)
        align = alignment(out)
        count = self.side.cuts.row.shape[0]
        for first, grid in self.grids(count, 1):
            edge_merge[grid](
                part,
                part_lse,
                out,
                lse,
                start,
                lse_start,
                sink,
                tuple(self.side.cuts),
                count,
                self.side.pieces,
                first,
                known_one(self.cell_heads),
                *strides(out, align, constant=False),
                *strides(start, 1, constant=False),
                *((0, 0) if lse is None else lse.stride()[:2]),
                SIZE=size,
                PADDED=padded,
                HEADS=self.shape.HEADS,
                BLOCKS=self.shape.BLOCKS,
                STEP=max(1, min(32, 1024 // (self.shape.HEADS * padded))),
                ALIGN=align,
                **OPTIONS,
            )


def factors(scale: float, softcap: float) -> tuple[float, float]:
    """Return what ``score`` multiplies q and the capped score by."""
    log2e: float = LOG2E.value
    return (scale / softcap, softcap * log2e) if softcap else (scale * log2e, 1.0)


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
    inner, outer = factors(scale, softcap)
    count = launch.side.items.row.shape[0]
    is_bare = bias is None and dropout.seed is None and start is None and not softcap
    is_plain = is_bare and shape[:2] == shape[2:4]
    most = {"maxnreg": registers(shape, query.dtype)} if is_plain else {}
    for first, grid in launch.grids(count, shape.LANES):
        edge_forward[grid](
            query,
            key,
            value,
            out,
            lse,
            out_start,
            lse_start,
            part,
            part_lse,
            bias,
            sink,
            lists.edge_key,
            None if is_listed(bias) else lists.edge_id,
            tuple(launch.side.items),
            count,
            launch.side.pieces,
            first,
            known_one(launch.cell_heads),
            known_one(query.shape[1] // key.shape[1]),
            inner,
            outer,
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


def is_listed(bias: Tensor | None) -> bool:
    """Whether a bias is in the order of the lists, [B, H, edges], and not in the caller's."""
    return bias is not None and bias.dim() == 3


def bias_strides(bias: Tensor | None) -> tuple[int | None, int, int]:
    """Return the strides (batch, edge, head) of a bias; 0 for one number for all, None: no argument."""
    if bias is None:
        return None, 0, 0
    if is_listed(bias):
        return bias.stride(0), bias.stride(2), bias.stride(1)
    return 0, bias.stride(0), bias.stride(1) if bias.dim() == 2 else 0
