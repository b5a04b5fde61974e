"""Multi-level scores: a tile at depth l reads the first prefix(l) dims of the side that is walked.

Both sides are cut into chunks of 16, 16, 32, 64 and 128 dims, as many as the head has. A full tile has one
depth, its mark; tiles whose prefixes need the same chunks are one loop, which multiplies these chunks alone,
and the dims between a prefix and the end of its last chunk are read as zeros. In a partial tile each level is
multiplied by itself and added where the pair shares it. Queries come divided by the ranks of their levels.
"""
# Triton gives kernels their types, from the arguments of a launch.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"
# ruff: noqa: RUF005 - Triton adds tuples, and does not unpack them in others

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .tile import addresses, tanh

SMALLEST = 16  # columns that tl.dot takes at least


class Loop(NamedTuple):
    """Classes of a layout that one loop walks."""

    chunks: int
    first: int
    stop: int
    is_partial: bool


class Piece(NamedTuple):
    """What a chunk has of a level."""

    level: int
    chunk: int
    low: int  # dims
    high: int
    is_first: bool  # of its level


class Levels(NamedTuple):
    """The levels of a call's score."""

    widths: Tensor | None = None  # int32 [L], on the device; 0 = one block for all
    q_start: int = 0
    prefixes: tuple[int, ...] = ()
    per_pair: bool = False

    def arguments(self) -> tuple[Any, ...]:
        """What every kernel over tiles takes, last."""
        return self.widths, self.q_start

    @property
    def present(self) -> dict[str, Any]:
        """Of Spec."""
        if not self.prefixes:
            return {}
        chunks = cut(self.prefixes[-1])
        return {
            "has_levels": True,
            "prefixes": self.prefixes,
            "per_pair": self.per_pair,
            "chunks": chunks,
            "loops": loops(self.prefixes, chunks),
            "pieces": pieces(self.prefixes, chunks),
        }


PLAIN = Levels()


def cut(size: int) -> tuple[tuple[int, int], ...]:
    """First dim and columns of each chunk of a head.

    Example:
        >>> cut(40)
        ((0, 16), (16, 16), (32, 32))
    """
    chunks = [(0, SMALLEST)]
    while sum(chunks[-1]) < size:
        chunks.append((sum(chunks[-1]), sum(chunks[-1])))
    return tuple(chunks)


def loops(prefixes: tuple[int, ...], chunks: tuple[tuple[int, int], ...]) -> tuple[Loop, ...]:
    """Depths by the chunks that their prefixes need, then the partial tiles.

    Example:
        >>> [loop[:3] for loop in loops((8, 16, 24, 64), cut(64))]
        [(1, 0, 3), (2, 3, 4), (3, 4, 5), (3, 5, 6)]
    """
    needed = [1, *(sum(first < prefix for first, _ in chunks) for prefix in prefixes)]
    found = [
        Loop(count, needed.index(count), len(needed) - needed[::-1].index(count), False)
        for count in sorted(set(needed))
    ]
    return *found, Loop(len(chunks), len(needed), len(needed) + 1, True)


def pieces(prefixes: tuple[int, ...], chunks: tuple[tuple[int, int], ...]) -> tuple[Piece, ...]:
    """Each level cut by the chunks.

    Example:
        >>> [tuple(piece) for piece in pieces((8, 24), cut(24))]
        [(0, 0, 0, 8, True), (1, 0, 8, 16, True), (1, 1, 16, 24, False)]
    """
    found = []
    for level, (low, high) in enumerate(pairwise((0, *prefixes))):
        for i, (first, columns) in enumerate(chunks):
            piece = Piece(level, i, max(low, first), min(high, first + columns), first <= low)
            if piece.low < piece.high:
                found.append(piece)
    return tuple(found)


@triton.jit
def class_bounds(
    group,
    group_b,
    group_h,
    ptr,
    b,
    h,
    listed,
    list_tiles,
    exists,
    STEPS: tl.constexpr,
    LOOP: tl.constexpr,
    SPEC: tl.constexpr,
):
    """Where the tiles of a loop's classes begin and end, in kernel tiles; see tile.bounds."""
    g = tl.load(group + b * group_b + h * group_h)
    row = ptr + (g.to(tl.int64) * list_tiles + listed) * (len(SPEC.prefixes) + 3)
    begin = tl.load(row + LOOP[1]) * STEPS
    return begin, tl.where(exists, tl.load(row + LOOP[2]) * STEPS, begin)


@triton.jit
def load_chunk(
    base, first, row, rows, length, low, high, CHUNK: tl.constexpr, CHECKED: tl.constexpr, SPEC: tl.constexpr
):
    """Rows of one chunk; dims outside low to high, and with CHECKED rows past the length, are zeros."""
    at = addresses(base + CHUNK[0], first, row, rows, CHUNK[1], SPEC.is_wide)
    dims = CHUNK[0] + tl.arange(0, CHUNK[1])
    exists = ((dims >= low) & (dims < high))[None, :]
    if CHECKED:
        exists = exists & (first + rows < length)[:, None]
    return tl.load(at, mask=exists, other=0.0)


@triton.jit
def load_chunks(
    base, first, row, rows, length, high, COUNT: tl.constexpr, CHECKED: tl.constexpr, SPEC: tl.constexpr
):
    """Rows of the first COUNT chunks, a tuple."""
    chunks = ()
    for i in tl.static_range(COUNT):
        x = load_chunk(base, first, row, rows, length, 0, high, SPEC.chunks[i], CHECKED, SPEC)
        chunks = chunks + (x,)
    return chunks


@triton.jit
def load_piece(base, first, row, rows, length, PIECE: tl.constexpr, SPEC: tl.constexpr):
    """Rows of one piece of a level, with zeros up to its chunk."""
    CHUNK: tl.constexpr = SPEC.chunks[PIECE[1]]
    return load_chunk(base, first, row, rows, length, PIECE[2], PIECE[3], CHUNK, True, SPEC)


@triton.jit
def load_own(base, first, row, rows, length, SPEC: tl.constexpr):
    """Rows of all chunks of the side that is not walked, negated for a negative scale."""
    chunks = ()
    for i in tl.static_range(len(SPEC.chunks)):
        x = load_chunk(base, first, row, rows, length, 0, SPEC.d, SPEC.chunks[i], True, SPEC)
        chunks = chunks + (-x if SPEC.is_negated else x,)
    return chunks


@triton.jit
def prefix_of(depth, SPEC: tl.constexpr):
    """The dims that a tile of this depth reads."""
    prefix = depth * 0
    for level in tl.static_range(len(SPEC.prefixes)):
        prefix = tl.where(depth > level, SPEC.prefixes[level], prefix)
    return prefix


@triton.jit
def block(position, width):
    """The block of positions, which may be negative; a width of 0 is one block for all."""
    by = tl.maximum(width, 1)
    found = tl.where(position >= 0, position // by, -1 - (-1 - position) // by)
    return tl.where(width == 0, 0, found)


@triton.jit
def shares_level(levels, LEVEL: tl.constexpr, q, k):
    """Whether pairs of positions, which broadcast, are in the same block of a level."""
    width = tl.load(levels[0] + LEVEL)
    return block(q, width) == block(k, width)


@triton.jit
def score_mixed(x, base, first, row, rows, length, levels, q, k, SPEC: tl.constexpr):
    """Products of each pair over the levels that it shares, and their number."""
    s, depth = (q + k) * 0.0, (q + k) * 0
    for n in tl.static_range(len(SPEC.pieces)):
        y = load_piece(base, first, row, rows, length, SPEC.pieces[n], SPEC)
        part = tl.dot(x[SPEC.pieces[n][1]], y.T, input_precision=SPEC.precision)
        shared = shares_level(levels, SPEC.pieces[n][0], q, k)
        s = tl.where(shared, s + part, s)
        if SPEC.pieces[n][4]:
            depth += shared.to(tl.int32)
    return s, depth


@triton.jit
def score_levels(
    x, base, first, row, rows, length, mark, levels, q, k, inner, LOOP: tl.constexpr, SPEC: tl.constexpr
):
    """Score x, the chunks of the own side, with the walked tile of rows from ``first`` on; see tile.score.

    Returns the scores, what a pair's products were multiplied by, and the walked chunks of a full tile.
    """
    COUNT: tl.constexpr = LOOP[0]
    if LOOP[3]:
        y = ()
        s, depth = score_mixed(x, base, first, row, rows, length, levels, q, k, SPEC)
    else:
        depth = tl.load(mark)
        y = load_chunks(base, first, row, rows, length, prefix_of(depth, SPEC), COUNT, False, SPEC)
        s = tl.dot(x[0], y[0].T, input_precision=SPEC.precision)
        for i in tl.static_range(1, COUNT):
            s = tl.dot(x[i], y[i].T, s, input_precision=SPEC.precision)
    share = 1.0 / tl.maximum(depth, 1).to(tl.float32) if SPEC.per_pair else 1.0
    if SPEC.per_pair:
        s = s * share
    if SPEC.is_capped:
        s = tanh(s * inner)
    return s, share, y


@triton.jit
def add_levels(
    sums, ds, share, y, base, first, row, rows, length, levels, q, k, LOOP: tl.constexpr, SPEC: tl.constexpr
):
    """sums + ds y, a tuple of all chunks: each level gets what the pairs that share it give."""
    if SPEC.per_pair:
        ds = ds * share
    out = ()
    for i in tl.static_range(len(SPEC.chunks)):
        total = sums[i]
        if LOOP[3]:
            for n in tl.static_range(len(SPEC.pieces)):
                if SPEC.pieces[n][1] == i:
                    z = load_piece(base, first, row, rows, length, SPEC.pieces[n], SPEC)
                    kept = tl.where(shares_level(levels, SPEC.pieces[n][0], q, k), ds, 0.0).to(z.dtype)
                    total = tl.dot(kept, z, total, input_precision=SPEC.precision)
        elif i < LOOP[0]:
            total = tl.dot(ds.to(y[i].dtype), y[i], total, input_precision=SPEC.precision)
        out = out + (total,)
    return out


@triton.jit
def zero_chunk(COUNT: tl.constexpr, CHUNK: tl.constexpr):
    """Sums of one chunk for COUNT rows."""
    COLUMNS: tl.constexpr = CHUNK[1]
    return tl.zeros([COUNT, COLUMNS], tl.float32)


@triton.jit
def zero_chunks(COUNT: tl.constexpr, SPEC: tl.constexpr):
    """Sums of all chunks for COUNT rows."""
    out = ()
    for i in tl.static_range(len(SPEC.chunks)):
        out = out + (zero_chunk(COUNT, SPEC.chunks[i]),)
    return out


@triton.jit
def store_chunks(base, first, row, rows, length, x, scale, SPEC: tl.constexpr):
    """Store the rows that exist of all chunks, times scale."""
    for i in tl.static_range(len(SPEC.chunks)):
        at = addresses(base + SPEC.chunks[i][0], first, row, rows, SPEC.chunks[i][1], SPEC.is_wide)
        dims = SPEC.chunks[i][0] + tl.arange(0, SPEC.chunks[i][1])
        exists = (first + rows < length)[:, None] & (dims < SPEC.d)[None, :]
        tl.store(at, (x[i] * scale).to(base.dtype.element_ty), mask=exists)
