"""What the passes over edges have in common: how work is divided, and how pieces of rows are joined."""
# Types of kernels come from their arguments, at compile time:
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .edge_items import STEP, EdgeLists, Side
from .edge_tile import (
    columns_of,
    finish,
    heads_at,
    lines_of_pieces,
    load_columns,
    load_nodes,
    locate,
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


class Additive(NamedTuple):
    """The score sum_d weight[h, d] * LeakyReLU(q_d + k_d) in place of the dot product."""

    weight: Tensor  # float32 [H, D], dense
    negative_slope: float


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
