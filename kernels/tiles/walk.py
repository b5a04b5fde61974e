"""The tile that a program owns, and its walk over a list of tiles.

A kernel's tile divides the square tile of the lists (64 or 128) and walks it in steps. The lists
keep two promises: tiles that stick out past the end of the side that is walked are partial, with zero
bits there, so the loop over full tiles has no bounds to check; and every list has one spare entry at
its end, so the next tile's number can be read ahead.
"""
# Triton gives kernels their types, from the arguments of a launch.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..records import Lists
from .tile import head_of, load_values

# Arguments whose values never cause another compilation: they follow from lengths and counts.
NUMBERS = (
    *("group_b", "group_h", "list_tiles", "is_ordered", "cut_tiles", "parts", "heads", "q_len", "k_len"),
    *("drop_above", "q_start", "whole_rows", "first_batch", "first_head"),
)
FIELDS = tl.constexpr(5)  # of a depth in the table of levels


class Rows(NamedTuple):
    """Rows ``first + rows`` of a tensor, of one batch and head."""

    base: Any  # pointer to row 0
    first: Any
    stride: Any
    rows: Any  # [0, 1, 2, ...]
    length: Any  # rows that there are
    start: Any  # position of a row less its number; see start_of


class Side(NamedTuple):
    """A tensor whose tiles a loop fetches, of one batch and head."""

    base: Any  # pointer to row 0; or a descriptor of the whole tensor
    b: Any
    h: Any
    stride: Any
    length: Any
    start: Any  # position of row 0


class Whole(NamedTuple):
    """The queries of the problem that a call is a part of; read only where there are positions."""

    start: Any  # position of the first
    rows: Any


class Walk(NamedTuple):
    """The values that a loop reads, the same for all of its tiles."""

    own: Rows  # of the tensor with D columns: queries or keys
    d_side: Side  # the other one of these, which is walked
    e_side: Side  # what is walked with it and has E columns: values or gradients
    positions: Any  # int32, of their rows, in a part of a larger problem; None: start + row
    lists: Any  # records.Lists; patterns from the own rows on
    h: Any  # of the queries
    whole: Whole
    drop: Any  # terms.Dropout, its seed read; None without
    terms: Any  # terms.Terms or None
    slope: Any  # of the head, or None
    table: Any  # of levels


class Part(NamedTuple):
    """The share of its lists that a program walks."""

    number: Any
    count: Any  # of parts; 1 where the list is not cut
    is_cut: Any
    slot: Any  # of its result among the pieces, if the list is cut
    head: Any  # over batches and heads
    at: Any  # place of its own tile in the order


class Stretch(NamedTuple):
    """The tiles of a list that have one depth, and what their scores are multiplied by."""

    begin: Any  # in tiles of the kernel
    end: Any
    c: Any
    inner: Any
    depth_factor: Any  # of products: 1, or 1 / depth; c or inner includes it
    prefix: Any  # dims that are read, if the loop reads more; else 0


@triton.jit
def find_part(list_tiles, cut_tiles, parts, COUNT: tl.constexpr, SPEC: tl.constexpr):
    """Find this program's part of a list: the first ``cut_tiles`` of each head are cut into ``parts``."""
    of_head = list_tiles * (SPEC.tile // COUNT) + cut_tiles * (parts - 1)
    head = tl.program_id(0) // of_head
    at = tl.program_id(0) % of_head
    is_cut = at < cut_tiles * parts
    return Part(
        number=tl.where(is_cut, at % parts, 0),
        count=tl.where(is_cut, parts, 1),
        is_cut=is_cut,
        slot=head.to(tl.int64) * (cut_tiles * parts) + at,
        head=head,
        at=tl.where(is_cut, at // parts, at - cut_tiles * (parts - 1)),
    )


@triton.jit
def place(lists, part, list_tiles, is_ordered, heads, COUNT: tl.constexpr, SPEC: tl.constexpr):
    """Find this program's list tile, its own tile of COUNT rows, head and batch; the longest lists first.

    Tiles of one head are neighbours, so that they find its other side in the cache.
    """
    STEPS: tl.constexpr = SPEC.tile // COUNT
    if part is not None:
        head, at = part.head, part.at
    else:
        tiles = list_tiles * STEPS
        head = tl.program_id(0) // tiles
        at = tl.program_id(0) % tiles
    listed = list_tile(lists.order, at, is_ordered, STEPS)
    return listed, listed * STEPS + at % STEPS, head % heads, head // heads


@triton.jit
def list_tile(order, at, is_ordered, STEPS: tl.constexpr):
    """Return the list tile of the own tile, STEPS to a list tile, that is at a place of the order.

    The order is one over all groups: with a single group it is the order of the tiles.
    """
    return tl.load(order + at // STEPS, mask=is_ordered != 0, other=at // STEPS)


@triton.jit
def find_bounds(lists, b, h, group_b, group_h, listed, list_tiles, exists, SPEC: tl.constexpr):
    """Return where the tiles of each depth begin in a list, and where the last ones end.

    With levels that is a pointer. A plain score has two depths, full and partial, and their three bounds are
    read here: read before each loop, they cost ptxas registers inside. ``exists`` says whether the own tile
    has a row; if not, at the end of the last tile of the lists, there is nothing to walk.
    """
    STEPS: tl.constexpr = SPEC.tile // SPEC.loops[0].walked
    g = tl.load(lists.group + b * group_b + h * group_h)
    bounds = lists.ptr + (g.to(tl.int64) * list_tiles + listed) * (SPEC.has.levels + 3)
    if not SPEC.has.levels:
        begin = tl.load(bounds) * STEPS
        middle = tl.where(exists, tl.load(bounds + 1) * STEPS, begin)
        bounds = (begin, middle, tl.where(exists, tl.load(bounds + 2) * STEPS, begin))
    return bounds


@triton.jit
def find_stretch(bounds, exists, part, depth, table, c, inner, LOOP: tl.constexpr, SPEC: tl.constexpr):
    """Return the tiles of one depth, from what ``find_bounds`` returned; partial tiles are the last depth.

    Where the list is cut these are a part of them, as large as the others but for one.
    """
    STEPS: tl.constexpr = SPEC.tile // SPEC.loops[LOOP].walked
    if SPEC.has.levels:
        begin = tl.load(bounds + depth) * STEPS
        end = tl.where(exists, tl.load(bounds + depth + 1) * STEPS, begin)
    else:
        begin, end = bounds[LOOP], bounds[LOOP + 1]
    if part is not None:
        count = end - begin
        end = begin + count * (part.number + 1) // part.count
        begin += count * part.number // part.count
    depth_factor = 1.0
    if SPEC.has.per_pair and not SPEC.loops[LOOP].is_partial:
        depth_factor = 1.0 / tl.maximum(depth, 1).to(tl.float32)
        if SPEC.has.softcap:
            inner = inner * depth_factor
        else:
            c = c * depth_factor
    prefix = 0
    if SPEC.loops[LOOP].whole < SPEC.loops[LOOP].chunks:
        prefix = tl.load(table + depth * FIELDS + 4)
    return Stretch(begin, end, c, inner, depth_factor, prefix)


@triton.jit
def own_patterns(lists, i, COUNT: tl.constexpr, SPEC: tl.constexpr):
    """Return lists whose patterns begin at the rows of the own tile i, which has COUNT of them."""
    patterns = lists.patterns + (i % (SPEC.tile // COUNT)) * (COUNT * SPEC.tile // 32)
    return Lists(lists.group, lists.ptr, lists.tile, lists.mark, patterns, lists.order, lists.size)


@triton.jit
def find_tile(lists, t, COUNT: tl.constexpr, SPEC: tl.constexpr):
    """Return the tile at place t of a list that is walked in steps of COUNT rows."""
    STEPS: tl.constexpr = SPEC.tile // COUNT
    return tl.load(lists.tile + t // STEPS) * STEPS + t % STEPS


@triton.jit
def start_of(positions, start, first, length):
    """Return the position less the number of each row of a tile, which begins at row ``first``.

    With positions it is looked up: the rows of a tile follow each other. A tile past the end gets another's.
    """
    if positions is not None:
        row = tl.minimum(first, length - 1)
        start = tl.load(positions + row) - row
    return start


@triton.jit
def tile_of(side, j, rows, start):
    """Return tile j of a side, as many rows as are given, whose positions are ``start`` and their numbers."""
    return Rows(side.base, j * rows.shape[0], side.stride, rows, side.length, start)


@triton.jit
def distance_shift(positions, whole, query_start, key_start, q_len):
    """Return the place of a distance in the part ``relative``, less that by the numbers of row and key."""
    shift = 0
    if positions is not None:
        shift = key_start - query_start + whole.start + (whole.rows - q_len)
    return shift


@triton.jit
def walked_side(x, descriptor, b, h, length, start, NUMBER: tl.constexpr, SPEC: tl.constexpr):
    """Return a Strided as the side that a loop walks; NUMBER is its place in Spec.row_strides.

    It has no positions: Triton 3.6 cannot return None, not even in a record.
    """
    stride = SPEC.row_strides[NUMBER] if SPEC.row_strides[NUMBER] else x.at
    return Side(descriptor if SPEC.tma else head_of(x, b, h), b, h, stride, length, start)


@triton.jit
def same_rows(x, b, h, own):
    """Return the own rows, but of another Strided."""
    return Rows(head_of(x, b, h), own.first, x.at, own.rows, own.length, own.start)


@triton.jit
def fetch_values(side, j, rows, CHECKED: tl.constexpr, SPEC: tl.constexpr):
    """Load all E columns of tile j of a side."""
    COUNT: tl.constexpr = rows.shape[0]
    if SPEC.tma:
        x = side.base.load([side.b, side.h, j * COUNT, 0]).reshape(COUNT, SPEC.e_columns)
    else:
        x = load_values(tile_of(side, j, rows, side.start), CHECKED, SPEC)
    return x
