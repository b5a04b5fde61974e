"""The gradients of score terms, by query: where the kernel stores them, and how they are added up.

The kernel adds nothing up across tiles, so that sums have one order. It stores what each tile gives in room
of its own, and the host adds that up. A line is a head of a batch; lines of one group have the same tiles,
and are computed some at a time, so that the room is bounded.
"""
# Triton gives kernels their types, from the arguments of a launch.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch.config import Spec
from ..records import Lists, round_up

ROOM = 1 << 28  # bytes for what the kernel stores at once, where a single line does not need more
_ROWS = 32  # of most kernels that have terms; to guess the bytes before the configuration is known
_PAIRS_AT_ONCE = 1 << 22  # that a table's gradient is added up of


class Room(NamedTuple):
    """Where the kernel stores gradients of terms; None where none are wanted.

    The listed tiles of line n have the slots ``first[n] + t``, t their place in the list.
    """

    first: Tensor | None = None  # int64 [lines]
    pairs: Tensor | None = None  # float32 [lines, Q, K]
    tiles: Tensor | None = None  # float32 [slots, tile, tile]
    sums: Tensor | None = None  # float32 [slots of kernel tiles, width]: their diagonals
    places: Tensor | None = None  # int64 [slots of kernel tiles]: the block of distances where sums begin
    blocks: Tensor | None = None  # int64 [lines]: the first block of a line


NO_ROOM = Room()


@triton.jit
def store_pairs(ds, pairs, line, row, col, q_len, k_len):
    """Store the gradients of a tile's scores in [lines, q_len, k_len]."""
    at = (line.to(tl.int64) * q_len + row) * k_len + col
    tl.store(pairs + at, ds, mask=(row < q_len) & (col < k_len))


@triton.jit
def store_tile(ds, room, line, t, i, SPEC: tl.constexpr):
    """Store the gradients of a tile's scores in the slot of its listed tile; those of no pair are 0."""
    ROWS: tl.constexpr = SPEC.rows
    COLS: tl.constexpr = SPEC.cols
    SIZE: tl.constexpr = SPEC.tile
    STEPS: tl.constexpr = SIZE // COLS
    slot = tl.load(room.first + line) + t // STEPS
    row = i % (SIZE // ROWS) * ROWS + tl.arange(0, ROWS)[:, None]
    col = t % STEPS * COLS + tl.arange(0, COLS)[None, :]
    tl.store(room.tiles + slot * (SIZE * SIZE) + row * SIZE + col, ds)


@triton.jit
def store_diagonals(ds, room, line, t, i, j, q_len, SPEC: tl.constexpr):
    """Store the sums of a tile's diagonals, and where they belong, in a slot of the tile's own.

    Row r is rotated left by r columns: column c then holds distance c, less COLS for each time that the row
    went around.
    """
    ROWS: tl.constexpr = SPEC.rows
    COLS: tl.constexpr = SPEC.cols
    STEPS: tl.constexpr = SPEC.tile // ROWS
    AROUND: tl.constexpr = ROWS // COLS if ROWS > COLS else 1
    BLOCK: tl.constexpr = ROWS if ROWS < COLS else COLS
    cols = tl.arange(0, COLS)
    source = tl.arange(0, ROWS)[:, None] + cols[None, :]
    shifted = tl.gather(ds, source % COLS, 1)
    slot = (tl.load(room.first + line) * (SPEC.tile // COLS) + t) * STEPS + i % STEPS
    for n in tl.static_range(AROUND + 1):
        diagonal = tl.sum(tl.where(source // COLS == n, shifted, 0.0), 0)
        tl.store(room.sums + (slot * (AROUND + 1) + (AROUND - n)) * COLS + cols, diagonal)
    block = (j * COLS - i * ROWS + tl.cdiv(q_len, ROWS) * ROWS) // BLOCK
    tl.store(room.places + slot, tl.load(room.blocks + line) + block)


class _Slots(NamedTuple):
    """The listed tiles of some lines, one after another."""

    lists: Lists
    first: Tensor  # int64 [lines]: the slot of a line's listed tile t is first + t
    begin: Tensor  # int64 [lines]: the slot of a line's first tile
    total: int

    @classmethod
    def of(cls, lists: Lists, shape: tuple[int, int], lines: slice, count: int) -> _Slots:
        """Number the tiles of some of the lines [B, H]; there are at most ``count``."""
        if lists.ptr.shape[0] == 1:  # as many for each line, some of them perhaps spare room
            first = torch.arange(lines.start, lines.stop, device=lists.ptr.device) - lines.start
            first *= count // (lines.stop - lines.start)
            return cls(lists, first, first, count)
        starts = lists.ptr[:, 0, 0].long()  # [G]
        group = lists.group.expand(shape).reshape(-1)[lines].long()
        counts = (lists.ptr[:, -1, -1].long() - starts)[group]
        begin = counts.cumsum(0) - counts
        return cls(lists, begin - starts[group], begin, count)

    def find(self, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return line, first row and first key of the tiles in slots; past the last one, any that exist."""
        lists = self.lists
        line = torch.searchsorted(self.begin, slots, right=True) - 1
        t = (slots - self.first[line]).clamp(max=lists.tile.shape[0] - 1)
        ends = lists.ptr[:, :, -1].long().flatten().contiguous()
        row = torch.searchsorted(ends, t, right=True) % lists.ptr.shape[1]
        return line, row * lists.size, lists.tile[t].long() * lists.size


class Diagonals:
    """Room for the diagonal sums of the listed tiles of some lines, which are added up in one order."""

    def __init__(self, slots: _Slots, spec: Spec, q_len: int, k_len: int) -> None:
        lists, lines, device = slots.lists, len(slots.first), slots.first.device
        self.lines, self.q_len, self.k_len = lines, q_len, k_len
        self.block = min(spec.rows, spec.cols)  # tiles start at multiples of it
        self.cols = spec.cols
        self.width = (max(spec.rows // spec.cols, 1) + 1) * spec.cols  # of a slot
        self.before = round_up(q_len, spec.rows)  # distances from -before on
        keys = round_up(k_len, lists.size)  # listed tiles are walked to their ends
        self.of_line = (self.before + keys + self.width) // self.block
        count = slots.total * (lists.size // spec.cols) * (lists.size // spec.rows)
        self.sums = torch.zeros((count, self.width), device=device)
        self.places = torch.zeros(count, dtype=torch.int64, device=device)
        self.blocks = torch.arange(lines, device=device) * self.of_line

    def add_up(self) -> Tensor:
        """Return the gradient of the part ``relative``, [lines, Q + K - 1]."""
        total = self.sums.new_zeros((self.lines * self.of_line, self.block))
        step = torch.arange(self.width // self.block, device=total.device)
        index = (self.places[:, None] + step).reshape(-1)
        # Sorted by torch before it adds on a GPU: one order.
        total.index_put_((index,), self.sums.view(-1, self.block), accumulate=True)
        # A slot begins AROUND * COLS distances before its tile's corner.
        begin = self.before + self.width - self.cols - (self.q_len - 1)
        return total.view(self.lines, -1)[:, begin : begin + self.q_len + self.k_len - 1]


class TermGrads:
    """The gradients of the parts that tiles read by query, while the kernel makes them.

    Args:
        lists: the tiles by query.
        shape: B, H, Q and K.
        listed: the tiles of all lines, at least.
        relative: zeros [B, H, Q + K - 1], of the whole in a part of a larger problem; None: not wanted.
        whole: Q and K of the whole.
        pair: zeros [B or 1, H or 1, Q, K]; it gets the sum over what has size 1.
        grid: zeros [B, H, n].
        codes: of the grid, [Q] and [K].
    """

    def __init__(
        self,
        lists: Lists,
        shape: tuple[int, int, int, int],
        listed: int,
        *,
        relative: Tensor | None = None,
        whole: tuple[int, int] | None = None,
        pair: Tensor | None = None,
        grid: Tensor | None = None,
        codes: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self.lists, self.shape, self.listed = lists, shape, listed
        self.relative, self.pair, self.grid, self.codes = relative, pair, grid, codes
        self.whole = shape[2:] if whole is None else whole
        self.lines = slice(0, 0)  # which the kernel computes now
        self.room = NO_ROOM
        self.slots: _Slots | None = None
        self.diagonals: Diagonals | None = None

    def rounds(self) -> Iterator[int]:
        """Yield how many lines the kernel computes next; they are added up when it goes on."""
        lines, at_once = self.shape[0] * self.shape[1], self._lines_at_once()
        for first in range(0, lines, at_once):
            self.lines = slice(first, min(first + at_once, lines))
            yield self.lines.stop - first
            self._add_up()
            self.room, self.slots, self.diagonals = NO_ROOM, None, None  # free before the next

    def _lines_at_once(self) -> int:
        batch, heads, q_len, k_len = self.shape
        lines = batch * heads
        if self.lists.ptr.shape[0] > 1:  # only the device knows how many tiles each line has
            return lines
        square = 4 * self.lists.size**2
        taken = (self.relative is not None) * 2 * square // _ROWS + (self.grid is not None) * square
        of_line = self.listed // lines * taken
        if self._sums_pairs:
            of_line += 4 * q_len * k_len
        return min(max(ROOM // max(of_line, 1), 1), lines)

    @property
    def _sums_pairs(self) -> bool:
        """Whether the kernel stores pairs elsewhere than in their gradient."""
        return self.pair is not None and self.pair.shape[:2] != self.shape[:2]

    def make_room(self, spec: Spec) -> dict[str, Any]:
        """Return the arguments of a launch over the lines."""
        q_len, k_len = self.shape[2:]
        count, pairs, slots = self.lines.stop - self.lines.start, None, None
        if self.pair is not None:
            pairs = self.pair.flatten(0, 1)[self.lines]
            if self._sums_pairs:
                pairs = self.pair.new_zeros((count, q_len, k_len))
        if self.relative is not None or self.grid is not None:
            listed = self.listed // (self.shape[0] * self.shape[1]) * count
            is_all = count == self.shape[0] * self.shape[1]
            slots = _Slots.of(self.lists, self.shape[:2], self.lines, self.listed if is_all else listed)
        self.slots, self.room = slots, Room(None if slots is None else slots.first, pairs)
        if self.relative is not None:
            assert slots is not None
            made = self.diagonals = Diagonals(slots, spec, *self.whole)
            self.room = self.room._replace(sums=made.sums, places=made.places, blocks=made.blocks)
        if self.grid is not None:
            assert slots is not None
            size = self.lists.size
            self.room = self.room._replace(tiles=self.grid.new_zeros((slots.total, size, size)))
        return {"room": self.room, "first_line": self.lines.start}

    def _add_up(self) -> None:
        """Add what the kernel stored to the gradients."""
        heads = self.shape[1]
        if self.diagonals is not None:
            assert self.relative is not None
            self.relative.flatten(0, 1)[self.lines] = self.diagonals.add_up()
        if self._sums_pairs:
            assert self.pair is not None and self.room.pairs is not None
            for line, x in zip(range(self.lines.start, self.lines.stop), self.room.pairs, strict=True):
                b, h = line // heads, line % heads
                self.pair[b % self.pair.shape[0], h % self.pair.shape[1]] += x
        if self.grid is not None:
            self.grid.flatten(0, 1)[self.lines] = self._sum_grid(self.grid.shape[2])

    def _sum_grid(self, size: int) -> Tensor:
        """Return the sums of pairs by their place in the table, [lines, size]."""
        assert self.slots is not None and self.room.tiles is not None and self.codes is not None
        query_code, key_code = (x.long() for x in self.codes)
        tile, lines = self.lists.size, self.lines.stop - self.lines.start
        inside = torch.arange(tile, device=query_code.device)
        # Lines of one group have the same tiles: their sums are the columns of one.
        columns = lines if self.lists.ptr.shape[0] == 1 else 1
        stored = self.room.tiles.view(columns, -1, tile * tile)
        total = stored.new_zeros((size * lines // columns, columns))
        step = max(_PAIRS_AT_ONCE // (columns * tile * tile), 1)
        for begin in range(0, stored.shape[1], step):
            some = stored[:, begin : begin + step]
            slots = torch.arange(begin, begin + some.shape[1], device=inside.device)
            line, row, key = self.slots.find(slots)
            # What is stored past the ends is 0, and goes to where the last pair does.
            rows = (row[:, None] + inside).clamp(max=len(query_code) - 1)
            keys = (key[:, None] + inside).clamp(max=len(key_code) - 1)
            place = query_code[rows][:, :, None] - key_code[keys][:, None]
            if columns == 1:
                place += line[:, None, None] * size
            # Sorted by torch before it adds on a GPU: one order.
            total.index_put_((place.flatten(),), some.flatten(1).t(), accumulate=True)
        return total.t().reshape(lines, size)
