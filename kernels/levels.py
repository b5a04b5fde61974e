"""Multi-level scores: a tile at depth l reads the first prefix(l) dims of the side that is walked.

The dims are cut at up to four prefixes, rounded up to 16. A full tile has one depth. Tiles of the depths
between two cuts are one loop, which multiplies the chunks up to its cut alone. What a depth has not of these
dims is cut off outside its loop over tiles: from the own side before, from the sums after. Tiles whose pairs
differ in depth are with the partial ones: first come the levels that all pairs of a tile share, for the
others a loop asks which pairs do. It reads both sides from memory, so that code and registers do not grow
with the number of levels. Queries come divided by the ranks.
"""
# Triton gives kernels their types, from the arguments of a launch.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, misc"
# ruff: noqa: RUF005 - Triton adds tuples, and does not unpack them in others

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import combinations
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tile import addresses, tanh

MOST_CUTS = 4  # loops over full tiles
NARROW = 16  # columns that tl.dot takes at least
FIELDS = tl.constexpr(5)  # of a level in the table
WIDEST = 1 << 30  # all positions are nearer to 0


class Loop(NamedTuple):
    """The depths, or the partial tiles, that one loop walks."""

    chunks: int  # that it multiplies
    first: int
    stop: int
    is_partial: bool
    whole: int  # chunks of which every depth reads all dims; all for partial tiles, where it is by pair


class Chunk(NamedTuple):
    """Some columns of both sides: a power of 2, inside the dims of one loop."""

    first: int
    columns: int


class Levels(NamedTuple):
    """The levels of a call's score."""

    table: Tensor | None = None  # int32 [L + 1, FIELDS], on the device
    q_start: int = 0
    prefixes: tuple[int, ...] = ()
    per_pair: bool = False
    shares_first: bool = False  # all pairs do the first level

    def arguments(self) -> tuple[Any, ...]:
        """What every kernel over tiles takes, last."""
        return self.table, self.q_start

    @property
    def present(self) -> dict[str, Any]:
        """Of Spec."""
        if not self.prefixes:
            return {}
        chunks, loops = plan(self.prefixes, self.shares_first)
        return {
            "has_levels": True,
            "depths": len(self.prefixes),
            "per_pair": self.per_pair,
            "chunks": chunks,
            "loops": loops,
        }


PLAIN = Levels()


def table(widths: Sequence[int], prefixes: Sequence[int], q_start: int, device: torch.device) -> Tensor:
    """Write down what kernels read of a level at run time, by depth: int32 [L + 1, FIELDS].

    Twice what makes positions positive, a multiple of the width; the factor and the shift that divide by the
    width, rounded up so that they do to the bit below 2^31; the first dim and the one behind the last.
    """
    rows = [[0] * FIELDS.value]
    for given, low, high in zip(widths, (0, *prefixes), prefixes, strict=False):
        width = min(given, WIDEST)
        shift = max(width - 1, 0).bit_length()
        factor = -(-(1 << 31 + shift) // width) if width else 0  # one block for all is number 0
        before = -(min(q_start, 0) // width) * width if width else 0
        rows.append([2 * before, factor, shift, low, high])
    signed = [[x - (1 << 32) if x >= 1 << 31 else x for x in row] for row in rows]
    return torch.tensor(signed, dtype=torch.int32, device=device)


def cuts(prefixes: Sequence[int]) -> tuple[int, ...]:
    """Where the dims are cut, the end included: at prefixes rounded up to what tensor cores take at once.

    Of more than MOST_CUTS those are kept for which the tiles read the fewest dims, if each depth has half of
    those that the one before leaves, as halving widths do.

    Example:
        >>> cuts((8, 16, 24, 64)), cuts(range(16, 129, 16))
        ((16, 32, 64), (16, 32, 64, 128))
    """
    padded = [-(-prefix // NARROW) * NARROW for prefix in prefixes]
    inner = sorted(set(padded[:-1]) - {padded[-1]})

    def cost(chosen: tuple[int, ...]) -> float:
        return sum(min(c for c in chosen if c >= dims) / 2.0**i for i, dims in enumerate(padded))

    count = min(len(inner), MOST_CUTS - 1)
    return min(((*some, padded[-1]) for some in combinations(inner, count)), key=cost)


@functools.cache
def plan(prefixes: tuple[int, ...], shares_first: bool) -> tuple[tuple[Chunk, ...], tuple[Loop, ...]]:
    """Cut the dims into chunks, and depths into loops, the partial tiles last.

    Example:
        >>> chunks, loops = plan((8, 16, 24, 64), True)
        >>> [tuple(chunk) for chunk in chunks], [loop[:3] for loop in loops]
        ([(0, 16), (16, 16), (32, 32)], [(1, 1, 3), (2, 3, 4), (3, 4, 5), (3, 5, 6)])
    """
    chunks: list[Chunk] = []
    loops: list[Loop] = []
    size, depth, at = prefixes[-1], int(shares_first), 0
    for cut in cuts(prefixes):
        while at < cut:
            columns = 1 << (cut - at).bit_length() - 1
            chunks.append(Chunk(at, columns))
            at += columns
        stop = 1 + sum(prefix <= cut for prefix in prefixes)
        whole = sum(min(chunk.first + chunk.columns, size) <= (0, *prefixes)[depth] for chunk in chunks)
        loops.append(Loop(len(chunks), depth, stop, False, whole))
        depth = stop
    return tuple(chunks), (*loops, Loop(len(chunks), depth, depth + 1, True, len(chunks)))


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
    depth,
    LOOP: tl.constexpr,
    COUNT: tl.constexpr,
    SPEC: tl.constexpr,
):
    """Where the tiles of a depth begin and end, in kernel tiles of COUNT rows; see tile.bounds."""
    STEPS: tl.constexpr = SPEC.tile // (SPEC.mixed if SPEC.loops[LOOP][3] else COUNT)
    g = tl.load(group + b * group_b + h * group_h)
    row = ptr + (g.to(tl.int64) * list_tiles + listed) * (SPEC.depths + 3) + depth
    begin = tl.load(row) * STEPS
    return begin, tl.where(exists, tl.load(row + 1) * STEPS, begin)


@triton.jit
def factors(levels, depth, c, inner, LOOP: tl.constexpr, SPEC: tl.constexpr):
    """What a full tile of this depth multiplies its products by, c and inner with it, and its prefix."""
    share = 1.0
    if SPEC.per_pair and not SPEC.loops[LOOP][3]:
        share = 1.0 / tl.maximum(depth, 1).to(tl.float32)
    prefix = tl.load(levels[0] + depth * FIELDS + 4) if SPEC.loops[LOOP][4] < SPEC.loops[LOOP][0] else 0
    if SPEC.is_capped:
        inner = inner * share
    else:
        c = c * share
    return share, c, inner, prefix


@triton.jit
def load_columns(
    base,
    first,
    row,
    rows,
    length,
    dim,
    COLUMNS: tl.constexpr,
    CHECKED: tl.constexpr,
    SPEC: tl.constexpr,
):
    """Rows of the COLUMNS dims from ``dim`` on, zeros past the head, and with CHECKED past the length."""
    IN_HEAD: tl.constexpr = SPEC.chunks[-1][0] + SPEC.chunks[-1][1] == SPEC.d
    at = addresses(base + dim, first, row, rows, COLUMNS, SPEC.is_wide)
    exists = (first + rows < length)[:, None]
    inside = (dim + tl.arange(0, COLUMNS) < SPEC.d)[None, :]
    if CHECKED:
        x = tl.load(at, mask=exists if IN_HEAD else exists & inside, other=0.0)
    elif IN_HEAD:
        x = tl.load(at)
    else:
        x = tl.load(at, mask=inside, other=0.0)
    return x


@triton.jit
def load_chunk(
    base, first, row, rows, length, CHUNK: tl.constexpr, CHECKED: tl.constexpr, SPEC: tl.constexpr
):
    """Rows of one chunk, given by its number."""
    DIM: tl.constexpr = SPEC.chunks[CHUNK][0]
    COLUMNS: tl.constexpr = SPEC.chunks[CHUNK][1]
    return load_columns(base, first, row, rows, length, DIM, COLUMNS, CHECKED, SPEC)


@triton.jit
def keep_dims(x, dim, low, high):
    """x [rows, columns], of the dims from ``dim`` on, with zeros outside low to high.

    Not in the load, which copies 16 bytes at once: a prefix may end anywhere in them.
    """
    dims = dim + tl.arange(0, x.shape[1])
    return tl.where(((dims >= low) & (dims < high))[None, :], x, 0.0)


@triton.jit
def own_chunk(own, CHUNK: tl.constexpr, SPEC: tl.constexpr):
    """One chunk of the side that is not walked, (base, first, row, rows, length), its sign the scale's."""
    x = load_chunk(*own, CHUNK, True, SPEC)
    return -x if SPEC.is_negated else x


@triton.jit
def load_own(own, SPEC: tl.constexpr):
    """All chunks of the side that is not walked."""
    chunks = ()
    for i in tl.static_range(len(SPEC.chunks)):
        chunks = chunks + (own_chunk(own, i, SPEC),)
    return chunks


@triton.jit
def own_prefix(x, own, prefix, LOOP: tl.constexpr, SPEC: tl.constexpr):
    """x, the chunks of the own side, with zeros from the prefix of a depth on.

    Chunks that it cuts are read again: there are no registers for both.
    """
    out = ()
    for i in tl.static_range(len(SPEC.chunks)):
        y = x[i]
        if i >= SPEC.loops[LOOP][4] and i < SPEC.loops[LOOP][0]:
            y = keep_dims(own_chunk(own, i, SPEC), SPEC.chunks[i][0], 0, prefix)
        out = out + (y,)
    return out


@triton.jit
def sums_prefix(sums, before, prefix, LOOP: tl.constexpr, SPEC: tl.constexpr):
    """The chunks of sums up to the prefix of a depth, then what they were before its tiles."""
    out = ()
    for i in tl.static_range(len(SPEC.chunks)):
        total = sums[i]
        if i >= SPEC.loops[LOOP][4] and i < SPEC.loops[LOOP][0]:
            dims = SPEC.chunks[i][0] + tl.arange(0, SPEC.chunks[i][1])
            total = tl.where((dims < prefix)[None, :], total, before[i])
        out = out + (total,)
    return out


@triton.jit
def score_full(x, base, first, row, rows, length, inner, LOOP: tl.constexpr, SPEC: tl.constexpr):
    """Score x, chunks of the own side, with a full tile of rows from ``first`` on; see tile.score.

    Returns the scores, and the chunks of the tile.
    """
    COUNT: tl.constexpr = SPEC.loops[LOOP][0]
    y = ()
    for i in tl.static_range(COUNT):
        y = y + (load_chunk(base, first, row, rows, length, i, False, SPEC),)
    s = tl.dot(x[0], y[0].T, input_precision=SPEC.precision)
    for i in tl.static_range(1, COUNT):
        s = tl.dot(x[i], y[i].T, s, input_precision=SPEC.precision)
    if SPEC.is_capped:
        s = tanh(s * inner)
    return s, y


@triton.jit
def block(position, level):
    """The blocks of a level that positions are in, which may be negative."""
    before, factor, shift = tl.load(level), tl.load(level + 1), tl.load(level + 2)
    return tl.umulhi((2 * position + before).to(tl.uint32), factor.to(tl.uint32)).to(tl.int32) >> shift


@triton.jit
def shares_level(level, own_at, own, at, rows):
    """Whether pairs of own and walked positions, given by the first and offsets, are in the same block."""
    return block(own_at + own, level)[:, None] == block(at + rows, level)[None, :]


@triton.jit
def extent(levels, own_at, own, at, rows, SPEC: tl.constexpr):
    """The depth that all pairs of a tile have at least, and that none of them passes."""
    shallow, deep = own_at * 0, own_at * 0
    for depth in tl.range(1, SPEC.depths + 1):
        level = levels[0] + depth * FIELDS
        own_first, own_last = block(own_at, level), block(own_at + own.shape[0] - 1, level)
        first, last = block(at, level), block(at + rows.shape[0] - 1, level)
        shallow = tl.where((own_first == last) & (first == own_last), depth, shallow)
        deep = tl.where((own_first <= last) & (first <= own_last), depth, deep)
    return shallow, deep


@triton.jit
def add_products(s, own, walked, low, high, SPEC: tl.constexpr):
    """s + x y^T over the dims from low to high of both sides, which are read from memory."""
    COLUMNS: tl.constexpr = 16  # NARROW
    for n in tl.range(low // COLUMNS, tl.cdiv(high, COLUMNS)):
        x = load_columns(*own, n * COLUMNS, COLUMNS, True, SPEC)
        y = load_columns(*walked, n * COLUMNS, COLUMNS, True, SPEC)
        s = tl.dot(keep_dims(x, n * COLUMNS, low, high), y.T, s, input_precision=SPEC.precision)
    return s


@triton.jit
def score_mixed(own, walked, pair_at, levels, inner, SPEC: tl.constexpr):
    """Score a partial tile: each pair over the levels that it shares.

    ``own`` and ``walked`` are (base, first, row, rows, length) of both sides, ``pair_at`` the positions of
    their first rows. Levels that some pairs share come first, from the deepest up: pairs that do not share
    one, and so none below it, are set back to zero. Then come those that all pairs share.

    Returns the scores and the extent.
    """
    shallow, deep = extent(levels, pair_at[0], own[3], pair_at[1], walked[3], SPEC)
    s = tl.zeros([own[3].shape[0], walked[3].shape[0]], tl.float32)
    for above in tl.range(0, deep - shallow):
        level = levels[0] + (deep - above) * FIELDS
        s = add_products(s, own, walked, tl.load(level + 3), tl.load(level + 4), SPEC)
        s = tl.where(shares_level(level, pair_at[0], own[3], pair_at[1], walked[3]), s, 0.0)
    s = add_products(s, own, walked, 0, tl.load(levels[0] + shallow * FIELDS + 4), SPEC)
    if SPEC.is_negated:
        s = -s
    if SPEC.per_pair:
        s = multiply_shares(s, own, walked, pair_at, (shallow, deep), levels)
    if SPEC.is_capped:
        s = tanh(s * inner)
    return s, (shallow, deep)


@triton.jit
def multiply_shares(x, own, walked, pair_at, extent, levels):
    """x of a partial tile, divided by the number of levels that each pair shares.

    Found anew wherever it is needed: kept in between, these numbers would fill as many registers as x.
    """
    shallow, deep = extent
    share = tl.zeros(x.shape, tl.float32) + 1.0 / tl.maximum(shallow, 1).to(tl.float32)
    for depth in tl.range(shallow + 1, deep + 1):
        level = levels[0] + depth * FIELDS
        shared = shares_level(level, pair_at[0], own[3], pair_at[1], walked[3])
        share = tl.where(shared, 1.0 / depth, share)
    return x * share


@triton.jit
def add_full(sums, ds, y, LOOP: tl.constexpr, SPEC: tl.constexpr):
    """sums + ds y, a tuple of all chunks."""
    out = ()
    for i in tl.static_range(len(SPEC.chunks)):
        total = sums[i]
        if i < SPEC.loops[LOOP][0]:
            total = tl.dot(ds.to(y[i].dtype), y[i], total, input_precision=SPEC.precision)
        out = out + (total,)
    return out


@triton.jit
def add_dims(sums, ds, walked, low, high, SPEC: tl.constexpr):
    """sums + ds y, all chunks, of the dims from low to high of the walked side, which is read from memory."""
    out = ()
    for i in tl.static_range(len(SPEC.chunks)):
        y = keep_dims(load_chunk(*walked, i, True, SPEC), SPEC.chunks[i][0], low, high)
        out = out + (tl.dot(ds.to(y.dtype), y, sums[i], input_precision=SPEC.precision),)
    return out


@triton.jit
def add_mixed(sums, ds, own, walked, pair_at, extent, levels, SPEC: tl.constexpr):
    """sums + ds y of a partial tile: each level gets what the pairs that share it give."""
    shallow, deep = extent
    sums = add_dims(sums, ds, walked, 0, tl.load(levels[0] + shallow * FIELDS + 4), SPEC)
    for depth in tl.range(shallow + 1, deep + 1):
        level = levels[0] + depth * FIELDS
        kept = tl.where(shares_level(level, pair_at[0], own[3], pair_at[1], walked[3]), ds, 0.0)
        sums = add_dims(sums, kept, walked, tl.load(level + 3), tl.load(level + 4), SPEC)
    return sums


@triton.jit
def zero_chunk(COUNT: tl.constexpr, CHUNK: tl.constexpr, SPEC: tl.constexpr):
    """Sums of one chunk for COUNT rows."""
    COLUMNS: tl.constexpr = SPEC.chunks[CHUNK][1]
    return tl.zeros([COUNT, COLUMNS], tl.float32)


@triton.jit
def zero_chunks(COUNT: tl.constexpr, SPEC: tl.constexpr):
    """Sums of all chunks for COUNT rows."""
    out = ()
    for i in tl.static_range(len(SPEC.chunks)):
        out = out + (zero_chunk(COUNT, i, SPEC),)
    return out


@triton.jit
def store_chunks(base, first, row, rows, length, x, scale, SPEC: tl.constexpr):
    """Store the rows that exist of all chunks, times scale."""
    for i in tl.static_range(len(SPEC.chunks)):
        at = addresses(base + SPEC.chunks[i][0], first, row, rows, SPEC.chunks[i][1], SPEC.is_wide)
        dims = SPEC.chunks[i][0] + tl.arange(0, SPEC.chunks[i][1])
        exists = (first + rows < length)[:, None] & (dims < SPEC.d)[None, :]
        tl.store(at, (x[i] * scale).to(base.dtype.element_ty), mask=exists)
