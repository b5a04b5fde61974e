"""What a call adds to scores and drops from weights: score terms and dropout. The only copy.

Terms come as parts (see attnbias.terms), each a tuple of a pointer and what it takes to read it, or
None. Kernels are compiled without what is absent.
"""
# Triton gives kernels their types, from the arguments of a launch.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .config import Spec
from .launch import Lists
from .tile import LOG2E, head_of


@triton.jit
def add_terms(s, terms, b, h, row, col, q_len, k_len):
    """Add the terms of a tile of pairs to its scores, both in units in which exp2 is the exponential.

    ``row`` and ``col`` broadcast to s; what is past the ends reads another pair's number, and is masked.
    """
    relative, key, pair, grid = terms
    row = tl.minimum(row, q_len - 1)
    col = tl.minimum(col, k_len - 1)
    if relative is not None:
        s += tl.load(head_of(relative[0], b, h, relative[1]) + (col - row + (q_len - 1))) * LOG2E
    if key is not None:
        s += tl.load(head_of(key[0], b, h, key[1]) + col) * LOG2E
    if pair is not None:
        at = row.to(tl.int64) * pair[1][2] + col.to(tl.int64) * pair[1][3]
        s += tl.load(head_of(pair[0], b, h, pair[1]) + at) * LOG2E
    if grid is not None:
        at = tl.load(grid[2] + row) - tl.load(grid[3] + col)
        s += tl.load(head_of(grid[0], b, h, grid[1]) + at) * LOG2E
    return s


@triton.jit
def store_pairs(ds, d_pairs, line, row, col, q_len, k_len):
    """Store the gradients of a tile's scores in [lines, q_len, k_len]."""
    at = (line.to(tl.int64) * q_len + row) * k_len + col
    tl.store(d_pairs + at, ds, mask=(row < q_len) & (col < k_len))


@triton.jit
def store_diagonals(ds, diagonals, line, t, i, j, q_len, SPEC: tl.constexpr):
    """Store the sums of a tile's diagonals, and where they belong, in a slot of the tile's own.

    Row r is shifted left by r, around the end: column c then holds distance c less COLS for each time the
    row went around it.
    """
    ROWS: tl.constexpr = SPEC.rows
    COLS: tl.constexpr = SPEC.cols
    STEPS: tl.constexpr = SPEC.tile // ROWS
    AROUND: tl.constexpr = ROWS // COLS if ROWS > COLS else 1
    BLOCK: tl.constexpr = ROWS if ROWS < COLS else COLS
    sums, places, first, blocks = diagonals
    cols = tl.arange(0, COLS)
    source = tl.arange(0, ROWS)[:, None] + cols[None, :]
    shifted = tl.gather(ds, source % COLS, 1)
    slot = (tl.load(first + line) * (SPEC.tile // COLS) + t) * STEPS + i % STEPS
    for n in tl.static_range(AROUND + 1):
        diagonal = tl.sum(tl.where(source // COLS == n, shifted, 0.0), 0)
        tl.store(sums + (slot * (AROUND + 1) + (AROUND - n)) * COLS + cols, diagonal)
    block = (j * COLS - i * ROWS + tl.cdiv(q_len, ROWS) * ROWS) // BLOCK
    tl.store(places + slot, line.to(tl.int64) * blocks + block)


@triton.jit
def keep_tile(drop, b, h, rows, first, COLS: tl.constexpr):
    """Say which pairs of rows [R] and the COLS keys from ``first`` on survive dropout: bool [R, COLS].

    Four keys share the words of one Philox block; ``drop`` is (seed, threshold - 1, q_start, regrow).
    """
    seed, above, q_start, _ = drop
    blocks = first // 4 + tl.arange(0, COLS // 4)
    w0, w1, w2, w3 = tl.philox(seed, blocks[None, :], (rows + q_start)[:, None], h, b, n_rounds=7)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [R, COLS / 4, 2, 2]
    return tl.reshape(words, [rows.shape[0], COLS]) > above.to(tl.uint32)


@triton.jit
def keep_pairs(drop, b, h, row, key):
    """Say which pairs survive dropout, given by index: tensors that broadcast."""
    seed, above, q_start, _ = drop
    w0, w1, w2, w3 = tl.philox(seed, key >> 2, row + q_start, h, b, n_rounds=7)
    lane = key & 3
    word = tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3))
    return word > above.to(tl.uint32)


class Dropout(NamedTuple):
    """Dropout as the kernels want it."""

    seed: Tensor | None = None  # int64 [1], read on the device
    above: int | None = None  # threshold - 1 as a signed 32-bit number: greater words are kept
    q_start: int | None = None  # position of the first row
    regrow: float | None = None  # factor of what is kept

    @classmethod
    def of(cls, dropout_p: float, seed: Tensor | None, q_start: int) -> Dropout:
        """Without dropout, and where its threshold is 0, all are None."""
        threshold = math.floor(dropout_p * 2**32)
        if not threshold:
            return cls()
        above = threshold - 1
        kept = 1 - dropout_p
        return cls(seed, above - 2**32 if above >= 2**31 else above, q_start, 1 / kept if kept else 1.0)


NO_DROPOUT = Dropout()


class Extras(NamedTuple):
    """What a call has besides queries, keys and values.

    ``terms`` are (relative, key, pair, grid), each None or (float32 tensor, strides), a grid with the codes
    of queries and keys behind; None: no terms.
    """

    dropout: Dropout = NO_DROPOUT
    terms: tuple[Any, ...] | None = None

    def arguments(self) -> tuple[Any, ...]:
        """What every kernel over tiles takes, in its order."""
        return *self.dropout, self.terms

    @property
    def present(self) -> dict[str, bool]:
        """Of Spec."""
        return {"has_dropout": self.dropout.seed is not None, "has_terms": self.terms is not None}


PLAIN = Extras()


class Diagonals:
    """Slots for the diagonal sums of every listed tile, which are added up in one order afterwards."""

    def __init__(self, lists: Lists, spec: Spec, batch: int, heads: int, q_len: int, k_len: int) -> None:
        self.shape = batch, heads, q_len, k_len
        self.block = min(spec.rows, spec.cols)  # tiles start at multiples of it
        self.cols = spec.cols
        self.width = (max(spec.rows // spec.cols, 1) + 1) * spec.cols  # of a slot
        self.before = -(-q_len // spec.rows) * spec.rows  # distances from -before on
        keys = -(-k_len // lists.size) * lists.size  # listed tiles are walked to their ends
        self.blocks = (self.before + keys + self.width) // self.block  # of one head
        device, starts = lists.ptr.device, lists.ptr[:, 0, 0].long()  # [G]
        group = lists.group.expand(batch, heads).reshape(-1).long()
        count = (lists.ptr[:, -1, -1].long() - starts)[group]
        self.first = count.cumsum(0) - count - starts[group]  # [B * H]
        one = lists.ptr.shape[0] == 1
        # Several groups differ in their numbers of tiles: this waits for the device.
        total = batch * heads * (lists.tile.shape[0] - 1) if one else int(count.sum())
        slots = total * (lists.size // spec.cols) * (lists.size // spec.rows)
        self.sums = torch.zeros((slots, self.width), device=device)
        self.places = torch.zeros(slots, dtype=torch.int64, device=device)

    def arguments(self) -> tuple[Any, ...]:
        """What ``store_diagonals`` takes."""
        return self.sums, self.places, self.first, self.blocks

    def add_up(self) -> Tensor:
        """Return the gradient of the part ``relative``, [B, H, Q + K - 1]."""
        batch, heads, q_len, k_len = self.shape
        total = self.sums.new_zeros((batch * heads * self.blocks, self.block))
        step = torch.arange(self.width // self.block, device=total.device)
        index = (self.places[:, None] + step).reshape(-1)
        # Sorted by torch before it adds on a GPU: one order.
        total.index_put_((index,), self.sums.view(-1, self.block), accumulate=True)
        # A slot begins AROUND * COLS distances before its tile's corner.
        begin = self.before + self.width - self.cols - (q_len - 1)
        return total.view(batch, heads, -1)[:, :, begin : begin + q_len + k_len - 1].contiguous()
