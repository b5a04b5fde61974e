"""Multi-level scores: a pair at depth l reads the first prefix(l) dims of both sides.

A full tile has one depth. The dims are cut into chunks at up to four prefixes, rounded up to 16, and there is
a loop over full tiles for each cut (see chunks). Tiles whose pairs differ in depth are listed with the
partial ones. Their scores are made level by level, of what is read from memory again for each, so that code
and registers do not grow with the number of levels. Queries come divided by the ranks.
"""
# Triton gives kernels their types, from the arguments of a launch.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, misc"
# ruff: noqa: RUF005 - Triton adds tuples, and does not unpack them in others

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch.config import Chunk, Loop
from ..records import round_up
from .chunks import keep_dims, load_chunk, load_dims
from .tile import cap
from .walk import FIELDS

MOST_CUTS = 4  # loops over full tiles
NARROW = 16  # columns that tl.dot takes at least
WIDEST = 1 << 30  # all positions are nearer to 0


class Levels(NamedTuple):
    """The levels of a call's score; none for a plain one."""

    table: Tensor | None = None  # int32 [L + 1, FIELDS], on the device
    prefixes: tuple[int, ...] = ()
    per_pair: bool = False
    shares_first: bool = False  # all pairs do the first level


NO_LEVELS = Levels()


def table(widths: Sequence[int], prefixes: Sequence[int], q_start: int, device: torch.device) -> Tensor:
    """Return what kernels read of the levels at run time, by depth: int32 [L + 1, FIELDS].

    The fields are: twice an offset, a multiple of the width, that makes positions non-negative; multiplier
    and shift for a division by the width that is exact below 2^31; the first dim, and the end of the dims.
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
    """Return where the dims are cut, the end included: at prefixes rounded up to NARROW.

    Of more than MOST_CUTS it keeps those for which tiles read the fewest dims, if half of the remaining tiles
    are at each depth, as with halving widths.

    Example:
        >>> cuts((8, 16, 24, 64)), cuts(range(16, 129, 16))
        ((16, 32, 64), (16, 32, 64, 128))
    """
    padded = [round_up(prefix, NARROW) for prefix in prefixes]
    inner = sorted(set(padded[:-1]) - {padded[-1]})

    def cost(chosen: tuple[int, ...]) -> float:
        return sum(min(c for c in chosen if c >= dims) / 2.0**i for i, dims in enumerate(padded))

    count = min(len(inner), MOST_CUTS - 1)
    return min(((*some, padded[-1]) for some in combinations(inner, count)), key=cost)


@functools.cache
def plan(prefixes: tuple[int, ...], shares_first: bool) -> tuple[tuple[Chunk, ...], tuple[Loop, ...]]:
    """Cut the dims into chunks and the depths into loops, the partial tiles last.

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
        loops.append(Loop(len(chunks), depth, stop, whole=whole))
        depth = stop
    partial = Loop(len(chunks), depth, depth + 1, is_partial=True, whole=len(chunks))
    return tuple(chunks), (*loops, partial)


@triton.jit
def block(position, level):
    """Return the blocks of a level that positions are in, which may be negative."""
    before, factor, shift = tl.load(level), tl.load(level + 1), tl.load(level + 2)
    return tl.umulhi((2 * position + before).to(tl.uint32), factor.to(tl.uint32)).to(tl.int32) >> shift


@triton.jit
def share_level(level, own, walked):
    """Say which pairs of own and walked rows are in the same block of a level."""
    own_block = block(own.first + own.start + own.rows, level)
    return own_block[:, None] == block(walked.first + walked.start + walked.rows, level)[None, :]


@triton.jit
def extent(table, own, walked, SPEC: tl.constexpr):
    """Return the depth that all pairs of a tile have at least, and the one that none of them passes."""
    own_at, at = own.first + own.start, walked.first + walked.start
    shallow, deep = own_at * 0, own_at * 0
    for depth in tl.range(1, SPEC.has.levels + 1):
        level = table + depth * FIELDS
        own_first, own_last = block(own_at, level), block(own_at + own.rows.shape[0] - 1, level)
        first, last = block(at, level), block(at + walked.rows.shape[0] - 1, level)
        shallow = tl.where((own_first == last) & (first == own_last), depth, shallow)
        deep = tl.where((own_first <= last) & (first <= own_last), depth, deep)
    return shallow, deep


@triton.jit
def add_level(s, own, walked, low, high, SPEC: tl.constexpr):
    """Return s + x y^T over the dims from low to high of both sides, which are read from memory."""
    COLUMNS: tl.constexpr = 16  # NARROW
    for n in tl.range(low // COLUMNS, tl.cdiv(high, COLUMNS)):
        x = load_dims(own, n * COLUMNS, COLUMNS, True, SPEC)
        y = load_dims(walked, n * COLUMNS, COLUMNS, True, SPEC)
        s = tl.dot(keep_dims(x, n * COLUMNS, low, high), y.T, s, input_precision=SPEC.precision)
    return s


@triton.jit
def score_mixed(own, walked, table, inner, SPEC: tl.constexpr):
    """Score a partial tile, given by its Rows: each pair over the levels that it shares.

    Levels that some pairs share come first, from the deepest up: pairs that do not share one, and so none
    below it, are set back to zero. Then come those that all pairs share.

    Returns the scores and the extent.
    """
    shallow, deep = extent(table, own, walked, SPEC)
    s = tl.zeros([own.rows.shape[0], walked.rows.shape[0]], tl.float32)
    for above in tl.range(0, deep - shallow):
        level = table + (deep - above) * FIELDS
        s = add_level(s, own, walked, tl.load(level + 3), tl.load(level + 4), SPEC)
        s = tl.where(share_level(level, own, walked), s, 0.0)
    s = add_level(s, own, walked, 0, tl.load(table + shallow * FIELDS + 4), SPEC)
    if SPEC.has.per_pair:
        s = divide_by_depths(s, own, walked, (shallow, deep), table)
    if SPEC.has.softcap:
        s = cap(s, inner, SPEC.ptx and own.base.dtype.element_ty != tl.float32)
    return s, (shallow, deep)


@triton.jit
def divide_by_depths(x, own, walked, extent, table):
    """Return x of a partial tile, divided by the number of levels that each pair shares.

    Computed again wherever it is needed: the numbers would fill as many registers as x.
    """
    shallow, deep = extent
    depth_factor = tl.zeros(x.shape, tl.float32) + 1.0 / tl.maximum(shallow, 1).to(tl.float32)
    for depth in tl.range(shallow + 1, deep + 1):
        level = table + depth * FIELDS
        depth_factor = tl.where(share_level(level, own, walked), 1.0 / depth, depth_factor)
    return x * depth_factor


@triton.jit
def add_dims(sums, ds, walked, low, high, SPEC: tl.constexpr):
    """Return sums + ds y over the dims from low to high of the walked side, which is read from memory."""
    out = ()
    for i in tl.static_range(len(SPEC.chunks)):
        y = keep_dims(load_chunk(walked, i, True, SPEC), SPEC.chunks[i].first, low, high)
        out = out + (tl.dot(ds.to(y.dtype), y, sums[i], input_precision=SPEC.precision),)
    return out


@triton.jit
def add_mixed(sums, ds, own, walked, extent, table, SPEC: tl.constexpr):
    """Return sums + ds y of a partial tile: each level gets what the pairs that share it give."""
    shallow, deep = extent
    sums = add_dims(sums, ds, walked, 0, tl.load(table + shallow * FIELDS + 4), SPEC)
    for depth in tl.range(shallow + 1, deep + 1):
        level = table + depth * FIELDS
        kept = tl.where(share_level(level, own, walked), ds, 0.0)
        sums = add_dims(sums, kept, walked, tl.load(level + 3), tl.load(level + 4), SPEC)
    return sums
