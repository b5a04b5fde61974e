"""Lists that are cut into parts: where each leaves its result, and joining these in the list's order."""
# Triton gives kernels their types, from the arguments of a launch.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..launch.config import Target
from ..launch.launch import columns
from ..launch.plans import launch_with, scratch
from ..launch.split import Lengths, Split, choose_split
from ..records import Lists, Pieces, Strided
from .tile import LN2, LOG2E, head_of, join, max_or_nan
from .walk import Rows, list_tile

NUMBERS = ("is_ordered", "cut_tiles", "parts", "blocks", "heads", "length")


@triton.jit
def uncut(own, part):
    """Return the own rows, of which none exist if the tile's list is cut: nothing is stored."""
    length = own.length
    if part is not None:
        length = tl.where(part.is_cut, 0, length)
    return Rows(own.base, own.first, own.stride, own.rows, length, own.start)


@triton.jit
def piece_of(piece, own, part, COUNT: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the own rows in a piece [COUNT, COLUMNS] of this part, none of which exist if no list is cut."""
    base = piece + (part.slot * COUNT - own.first) * COLUMNS
    return Rows(base, own.first, COLUMNS, own.rows, tl.where(part.is_cut, own.length, 0), own.start)


@triton.jit
def locate_rows(
    order, is_ordered, cut_tiles, blocks, BLOCK: tl.constexpr, COUNT: tl.constexpr, STEPS: tl.constexpr
):
    """Return the line of BLOCK rows of a cut tile, their numbers in both, and the place of the tile."""
    inside = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    cut = tl.program_id(0) // blocks  # over lines and the cut tiles of each
    at = cut % cut_tiles
    i = list_tile(order, at, is_ordered, STEPS) * STEPS + at % STEPS
    return cut // cut_tiles, i * COUNT + inside, inside, cut.to(tl.int64)


@triton.jit
def load_pieces(piece, at, is_piece, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """Load rows ``at`` [STEP, BLOCK] of some pieces: [STEP, BLOCK, COLUMNS]; 0 where there is no piece."""
    cols = tl.arange(0, COLUMNS)[None, None, :]
    return tl.load(piece + at[:, :, None] * SIZE + cols, mask=is_piece[:, :, None] & (cols < SIZE), other=0.0)


@triton.jit
def store_joined(out, x, line, heads, row, length, SIZE: tl.constexpr):
    """Store x [1, BLOCK, COLUMNS], the rows of a line of a Strided."""
    cols = tl.arange(0, x.shape[2])[None, None, :]
    to = head_of(out, line // heads, line % heads) + row.to(tl.int64)[None, :, None] * out.at + cols
    tl.store(to, x.to(out.ptr.dtype.element_ty), mask=(row < length)[None, :, None] & (cols < SIZE))


@triton.jit(do_not_specialize=NUMBERS)
def merge_kernel(
    out,
    lse,
    row_max,
    sink,
    pieces,
    order,
    is_ordered,
    cut_tiles,
    parts,
    blocks,
    heads,
    length,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
    STEPS: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write rows of out, lse and row_max from their pieces, weighted by lse, and then from the sink."""
    line, row, inside, cut = locate_rows(order, is_ordered, cut_tiles, blocks, BLOCK, COUNT, STEPS)
    m = tl.full([1, BLOCK], -float("inf"), tl.float32)
    highest = m
    total = tl.full([1, BLOCK], 0.0, tl.float32)
    acc = tl.full([1, BLOCK, COLUMNS], 0.0, tl.float32)
    for first in range(0, parts, STEP):
        number = (first + tl.arange(0, STEP))[:, None]
        is_piece = (number < parts) & (row < length)[None, :]
        at = (cut * parts + number) * COUNT + inside[None, :]
        s = tl.load(pieces.lse2 + at, mask=is_piece, other=-float("inf"))
        if row_max is not None:
            tops = tl.load(pieces.row_max + at, mask=is_piece, other=-float("inf"))
            highest = tl.maximum(highest, tl.max(tops, 0)[None])
        x = load_pieces(pieces.e, at, is_piece, SIZE, COLUMNS)
        m, total, acc = join(m, total, acc, s, x)
    exists = (row < length)[None, :]
    to = (line.to(tl.int64) * length + row)[None, :]
    if row_max is not None:
        tl.store(row_max + to, max_or_nan(highest, total), mask=exists)
    if sink is not None:
        extra = tl.zeros([1, BLOCK], tl.float32) + tl.load(sink + line % heads) * LOG2E
        m, total, acc = join(m, total, acc, extra, tl.zeros([1, BLOCK, COLUMNS], tl.float32))
    is_empty = total == 0
    total = tl.where(is_empty, 1.0, total)
    log_sum = tl.where(is_empty, -float("inf"), (m + tl.math.log2(total)) * LN2)
    tl.store(lse + to, log_sum, mask=exists)
    store_joined(out, acc / total[:, :, None], line, heads, row, length, SIZE)


@triton.jit(do_not_specialize=NUMBERS)
def add_up_kernel(
    out,
    piece,
    order,
    is_ordered,
    cut_tiles,
    parts,
    blocks,
    heads,
    length,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
    STEPS: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write rows of a gradient: the sums of their pieces."""
    line, row, inside, cut = locate_rows(order, is_ordered, cut_tiles, blocks, BLOCK, COUNT, STEPS)
    acc = tl.full([1, BLOCK, COLUMNS], 0.0, tl.float32)
    for first in range(0, parts, STEP):
        number = (first + tl.arange(0, STEP))[:, None]
        at = (cut * parts + number) * COUNT + inside[None, :]
        is_piece = (number < parts) & (row < length)[None, :]
        acc += tl.sum(load_pieces(piece, at, is_piece, SIZE, COLUMNS), 0)[None]
    store_joined(out, acc, line, heads, row, length, SIZE)


NOT_CUT: dict[str, Any] = {"cut_tiles": None, "parts": None, "pieces": None}


class Cut:
    """The lists of a launch that are cut, once its configuration is known, and the pieces of its results."""

    def __init__(
        self,
        lists: Lists,
        lengths: Lengths | None,
        target: Target,
        shape: tuple[int, ...],
        sizes: dict[str, tuple[int, ...]],
        turns: int = 1,
    ) -> None:
        """Note what is cut.

        Args:
            lists: the lists.
            lengths: how long they are; None: none is cut.
            target: the device.
            shape: [B, H, L, ...] of the own side.
            sizes: what a row of each of the Pieces holds; () for a number.
            turns: heads for which a program walks its lists.
        """
        self.lists, self.lengths, self.target, self.sizes, self.turns = lists, lengths, target, sizes, turns
        self.lines, self.heads, self.length = shape[0] * shape[1], shape[1], shape[2]
        self.own = 0
        self.split: Split | None = None
        self.pieces: Pieces | None = None

    @property
    def is_possible(self) -> bool:
        """Whether a configuration may cut a list: the one with the fewest programs does."""
        return self._choose(self.lists.size) is not None

    def arguments(self, own: int) -> dict[str, Any]:
        """Choose for own tiles of this many rows, and return what a kernel takes."""
        self.own, self.split = own, self._choose(own)
        if self.split is None:
            return NOT_CUT
        lines = self.lines * self.split.tiles * self.split.parts, own
        new = self.lists.ptr
        self.pieces = Pieces(**{name: scratch(new, (*lines, *size)) for name, size in self.sizes.items()})
        return {"cut_tiles": self.split.tiles, "parts": self.split.parts, "pieces": self.pieces}

    def more(self, own: int) -> int:
        """Return the programs of a head besides one for each own tile of this many rows."""
        split = self._choose(own)
        return 0 if split is None else split.more

    def _choose(self, own: int) -> Split | None:
        if self.lengths is None:
            return None
        return choose_split(
            self.lengths,
            lines=self.lines,
            size=self.lists.size,
            own=own,
            length=self.length,
            processors=self.target.processors,
            turns=self.turns,
        )

    def merge(self, out: Tensor, lse: Tensor, sink: Tensor | None, row_max: Tensor | None) -> None:
        """Write the rows of the cut tiles, if there are any."""
        self._run(merge_kernel, out, lse=lse, sink=sink, row_max=row_max, pieces=self.pieces)

    def add_up(self, name: str, grad: Tensor) -> None:
        """Write the rows of the cut tiles of a gradient, if there are any."""
        self._run(add_up_kernel, grad, piece=getattr(self.pieces, name, None))

    def _run(self, kernel: Any, out: Tensor, **arguments: Any) -> None:
        if self.split is None:
            return
        # One query has many pieces; the tiles of many queries have few, but rows enough for a program.
        step, block = (16, 1) if self.length == 1 else (4, 8)
        blocks = -(-min(self.own, self.length) // block)
        size = out.shape[3]
        launch_with(
            kernel,
            (self.lines * self.split.tiles * blocks,),
            {
                "is_ordered": self.lists.numbers["is_ordered"],
                "cut_tiles": self.split.tiles,
                "parts": self.split.parts,
                "blocks": blocks,
                "heads": self.heads,
                "length": self.length,
                "STEP": step,
                "BLOCK": block,
                "COUNT": self.own,
                "STEPS": self.lists.size // self.own,
                "SIZE": size,
                "COLUMNS": columns(size),
            },
            {"out": Strided.of(out), **arguments, "order": self.lists.order},
        )
