"""The parts that passes over edges share: arguments, the division of work, and merging pieces of rows."""
# Types of kernels come from their arguments, at compile time:
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch.plans import launch_with, scratch
from ..records import Strided
from ..tiles.terms import NO_DROPOUT, Dropout
from ..tiles.tile import LN2, LOG2E, join
from .items import STEP, EdgeLists, Items, Side
from .tile import (
    columns_of,
    finish,
    lines_of_pieces,
    load_columns,
    load_rows,
    load_start,
    locate,
    rows_at,
    store_max,
    store_rows,
)

MOST_CELLS = 65535  # where the second axis of a grid ends
# Numbers that follow from lengths and counts: no value of theirs causes a recompilation.
NUMBERS = (
    *("item_count", "slots", "places", "first_cell", "drop_above", "q_start"),
    *("first_batch", "first_head"),
)
OPTIONS = {"num_warps": 1, "num_stages": 1, "enable_fp_fusion": True}
# Fields of None, and not None itself: Triton 3.6 compares no record with None that has constants in it.
NO_TENSOR = Strided._make((None,) * 4)


@triton.jit(do_not_specialize=NUMBERS)
def edge_merge(
    out,
    lse,
    row_max,
    sink,
    items,
    item_count,
    slots,
    first_cell,
    cell_heads,
    SHAPE: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Join the pieces of a row to the start, in their order: weighted by lse if there is one, else added."""
    SIZE: tl.constexpr = SHAPE.D
    PADDED: tl.constexpr = SHAPE.D_PAD
    place = locate(items, item_count, first_cell, cell_heads, SHAPE)
    # Before the loop: Triton 3.6 loses constants two records deep in one.
    to, to_lse, to_max = out.rows, lse.rows, row_max.rows
    acc = tl.full([1, SHAPE.HEADS, PADDED], 0.0, tl.float32)
    m = tl.full([1, SHAPE.HEADS], -float("inf"), tl.float32)
    total = tl.full([1, SHAPE.HEADS], 0.0, tl.float32)
    highest = m
    if out.start.ptr is not None:
        if lse.part is not None:
            m, total, acc = load_start(out, lse, place, place.exists, SIZE, PADDED)
        else:
            acc = load_rows(out.start, place, SIZE, PADDED, 1)
    first = tl.sum(place.begin, 0)
    stop = tl.sum(place.end, 0)
    for c in range(first, stop, SHAPE.STEP):
        slot = c + tl.arange(0, SHAPE.STEP)
        is_piece = slot < stop
        line = lines_of_pieces(slots, tl.minimum(slot, stop - 1), place, SHAPE)  # [S, H]
        x = load_columns(columns_of(out.part, line, SIZE, PADDED), SIZE, PADDED)  # [S, H, SIZE]
        if lse.part is not None:
            s = tl.where(is_piece[:, None], tl.load(lse.part + line), -float("inf"))
            if row_max.part is not None:
                tops = tl.where(is_piece[:, None], tl.load(row_max.part + line), -float("inf"))
                highest = tl.maximum(highest, tl.max(tops, 0)[None])
            m, total, acc = join(m, total, acc, s, x)
        else:
            acc += tl.sum(tl.where(is_piece[:, None, None], x, 0.0), 0)[None]
    if lse.part is not None:
        acc, lse2 = finish(m, total, acc, sink, place.h, place.exists)
        tl.store(rows_at(to_lse, place), lse2 * LN2, mask=place.exists[:, None] & (place.h >= 0))
        if row_max.part is not None:
            store_max(to_max, out.start, place, highest, lse2, place.exists)
    store_rows(to, place, acc, place.exists, SIZE, PADDED, ALIGN)


class Additive(NamedTuple):
    """The score sum_d weight[h, d] * LeakyReLU(q_d + k_d) in place of the dot product."""

    weight: Tensor  # float32 [H, D], dense
    negative_slope: float


class Factors(NamedTuple):
    """The numbers by which scores are multiplied."""

    inner: float  # of q.k: scale * log2(e), or scale / softcap
    outer: float | None  # of the capped score: softcap * log2(e); None without a softcap
    scale: float  # of gradients


class Score(NamedTuple):
    """The score of edges, and the dropout of their weights."""

    scale: float  # factor of the dot products
    softcap: float = 0.0  # c of c * tanh(score / c); 0 is off
    additive: Additive | None = None  # None: the dot product
    bias: Tensor | None = (
        None  # of each edge: [edges] or [edges, H] as the caller's, [B, H, edges] as the lists'
    )
    dropout: Dropout = NO_DROPOUT

    @property
    def is_listed(self) -> bool:
        """Whether the bias is in the order of the lists, and not in the caller's."""
        return self.bias is not None and self.bias.dim() == 3

    @property
    def is_plain(self) -> bool:
        """Whether a score is a scaled dot product, and no weight is dropped."""
        extras = self.additive, self.bias, self.dropout.seed
        return not self.softcap and all(x is None for x in extras)

    def arguments(self, lists: EdgeLists) -> dict[str, Any]:
        """Return the arguments of a kernel that scores the edges by query."""
        scale, softcap, log2e = self.scale, self.softcap, LOG2E.value
        inner, outer = (scale / softcap, softcap * log2e) if softcap else (scale * log2e, None)
        dropout = self.dropout
        return {
            "additive": self.additive,
            "bias": _strided_bias(self.bias),
            "factors": Factors(inner, outer, scale),
            "seed": dropout.seed,
            "drop_above": dropout.above,
            "q_start": dropout.q_start,
            "regrow": dropout.regrow,
            "first_batch": dropout.first_batch,
            "first_head": dropout.first_head,
            "q_positions": dropout.queries,
            "k_positions": dropout.keys,
            "edge_key": lists.edge_key,
            "edge_id": None if self.is_listed else lists.edge_id,
        }


class Shape(NamedTuple):
    """The compile-time sizes of a kernel: how it divides heads and columns."""

    D: int
    E: int
    D_PAD: int
    E_PAD: int
    HEADS: int  # heads of a program
    BLOCKS: int  # programs of a cell's heads
    LANES: int  # items of a program
    STEP: int = STEP  # edges of an item at once


@functools.lru_cache(maxsize=1024)
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


def strided(x: Tensor | None, align: int = 1) -> Strided:
    """Return a tensor [B, H, N, D] or [B, H, N] with its strides, its last dimension being dense.

    All are divided by ``align``, by which the kernel multiplies: so the compiler knows what divides them.
    Those of batch and head are then multiplied by 16, because lengths must not compile anything: Triton
    compiles numbers in a record by whether they are 1 or divisible by 16.
    The node stride is a constant where it follows from heads and sizes ([B, H, N, D], [B, N, H, D] and
    parts of a packed projection), and a run-time number otherwise.
    """
    if x is None:
        return NO_TENSOR
    _, heads, _, *size = x.shape
    return _in_sixteenths(x, x.stride()[:3], align, heads, *size)


def _in_sixteenths(x: Tensor, strides: tuple[int, ...], align: int, heads: int, size: int = 1) -> Strided:
    return Strided(x, *_steps(strides, align, heads, size))


@functools.lru_cache(maxsize=1024)
def _steps(strides: tuple[int, ...], align: int, heads: int, size: int) -> tuple[Any, ...]:
    batch, head, node = strides
    is_fixed = node % size == 0 and node <= 3 * heads * size
    step = tl.constexpr(node // align) if is_fixed else node // align
    return batch // align * 16, head // align * 16, step


def _strided_bias(bias: Tensor | None) -> Strided:
    """Return a bias with its strides of batch, head and edge; 0 for one number for all."""
    if bias is None:
        return NO_TENSOR
    strides = bias.stride()
    if bias.dim() < 3:
        strides = 0, strides[1] if bias.dim() == 2 else 0, strides[0]
    return _in_sixteenths(bias, strides, 1, heads=bias.shape[1] if bias.dim() > 1 else 1)


def alignment(*tensors: Tensor | None) -> int:
    """Return the greatest power of two up to 16 that divides all strides between rows."""
    every = 16
    for x in tensors:
        if x is not None:
            for stride in x.stride()[:3]:
                every |= stride
    return every & -every


class Result(NamedTuple):
    """The results of a pass: whole rows, and pieces of rows to be merged."""

    rows: Strided
    start: Strided  # float32, what rows are added to or go on from
    part: Tensor | None  # float32 [batches * slots * heads of a cell, *size]; None: nothing is written


NO_RESULT = Result(NO_TENSOR, NO_TENSOR, None)


class Launch(NamedTuple):
    """The arguments that the kernels of one pass share."""

    items: Items
    cuts: Items
    slots: int
    shape: Shape
    cell_heads: int  # heads of the layout: 1 or H
    cells: int  # batches and head blocks inside one cell: the second axis of the grid

    @classmethod
    def of(cls, lists: EdgeLists, side: Side, query: Tensor, value: Tensor) -> Launch:
        """Plan a pass over one side of the lists."""
        B, H, _, D = query.shape
        batch, heads = lists.group.shape
        shape = choose_shape(H if heads == 1 else 1, D, value.shape[3], query.element_size())
        return cls(*side, shape, heads, (B if batch == 1 else 1) * shape.BLOCKS)

    def result(self, x: Tensor | None, start: Tensor | None, align: int = 1) -> Result:
        """Prepare x [B, H, N, D] or [B, H, N] to be written, with room for the pieces of its rows."""
        if x is None:
            return NO_RESULT
        lines = self.cells * self.shape.HEADS * self.slots
        part = scratch(x, (lines, *x.shape[3:]))
        return Result(strided(x, align), strided(start), part)

    def run(self, kernel: Any, maxnreg: int | None = None, **arguments: Any) -> None:
        """Launch a kernel over the items, as often as its grid has not enough places for the cells."""
        count = self.items.row.shape[0]
        programs = triton.cdiv(count, self.shape.LANES)
        arguments["items"] = self.items
        numbers = {
            "item_count": count,
            "slots": self.slots,
            "first_cell": 0,
            "cell_heads": self.cell_heads,
            "SHAPE": self.shape,
        }
        for first in range(0, self.cells, MOST_CELLS):
            numbers["first_cell"] = first
            launch_with(
                kernel,
                (programs, min(MOST_CELLS, self.cells - first)),
                numbers.copy(),
                arguments,
                **OPTIONS,
                **({} if maxnreg is None else {"maxnreg": maxnreg}),
            )

    def merge(
        self,
        out: Result,
        align: int,
        lse: Result = NO_RESULT,
        sink: Tensor | None = None,
        row_max: Result = NO_RESULT,
    ) -> None:
        """Join the pieces of every row that was cut."""
        if out.part is None or not self.slots:
            return
        size = out.part.shape[1]
        padded = triton.next_power_of_2(size)
        step = max(1, min(32, 1024 // (self.shape.HEADS * padded)))
        shape = Shape(size, size, padded, padded, self.shape.HEADS, self.shape.BLOCKS, 1, step)
        by_cut = self._replace(items=self.cuts, shape=shape)
        by_cut.run(edge_merge, out=out, lse=lse, row_max=row_max, sink=sink, ALIGN=align)
