"""Building blocks of the edge kernels: find items, load and store rows, score edges. The only copy.

L are the items of a program, H its heads, S the edges of a step. ``launch.strided`` says in which unit a
tensor's strides come.
"""
# Types of kernels come from their arguments, at compile time:
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..tiles.terms import keep_pairs
from ..tiles.tile import LN2, LOG2E, cap, max_or_nan


class Place(NamedTuple):
    """The items of a program, and where each belongs."""

    cell: Any  # [L]
    row: Any  # [L], a valid one also where there is no item
    begin: Any  # [L], edges begin:end of the list
    end: Any  # [L]
    slot: Any  # [L], place among the pieces, -1 for a whole row
    exists: Any  # [L]
    b: Any  # [L]
    h: Any  # [L, H]
    inner_b: Any  # batch inside of a cell, a number
    inner_h: Any  # [H], heads inside of a cell


@triton.jit
def locate(items, item_count, first_cell, cell_heads, SHAPE: tl.constexpr):
    """Find the items of this program: a Place."""
    item = tl.program_id(0) * SHAPE.LANES + tl.arange(0, SHAPE.LANES)
    exists = item < item_count
    item = tl.minimum(item, item_count - 1)
    cell = tl.load(items.cell + item)
    row = tl.load(items.row + item)
    begin = tl.load(items.begin + item)
    end = tl.load(items.end + item)
    slot = begin if items.slot is None else tl.load(items.slot + item)
    exists = exists & (row >= 0)
    end = tl.where(exists, end, begin)
    y = first_cell + tl.program_id(1)
    inner_b = y // SHAPE.BLOCKS
    inner_h = (y % SHAPE.BLOCKS) * SHAPE.HEADS + tl.arange(0, SHAPE.HEADS)
    b = cell // cell_heads + inner_b
    h = (cell % cell_heads)[:, None] + inner_h[None, :]
    return Place(cell, tl.maximum(row, 0), begin, end, slot, exists, b, h, inner_b, inner_h)


@triton.jit
def edges_of(place, STEP: tl.constexpr):
    """Return the first STEP edges [S, L] of each item, and its last one [1, L], which every step may read."""
    return place.begin[None, :] + tl.arange(0, STEP)[:, None], tl.maximum(place.end - 1, 0)[None, :]


@triton.jit
def offset_of(x, b, h):
    """Return where batch b [L] and head h [L, H] of x begin, in sixteenths of ALIGN elements: [L, H]."""
    return b.to(tl.int64)[:, None] * x.b + h.to(tl.int64) * x.h


@triton.jit
def heads_at(x, b, h, ALIGN: tl.constexpr):
    """Point to batch b [L] and head h [L, H] of x."""
    offset = offset_of(x, b, h)
    return x.ptr + (offset if ALIGN == 16 else (offset >> 4) * ALIGN)


@triton.jit
def rows_at(x, place):
    """Point to the rows [L, H] of x [B, H, L]."""
    return heads_at(x, place.b, place.h, 1) + (place.row.to(tl.int64) * x.at)[:, None]


@triton.jit
def nodes_at(base, x, node, PADDED: tl.constexpr, ALIGN: tl.constexpr):
    """Point to nodes [..., L] of x, whose heads are at base [L, H]: [..., L, H, PADDED].

    Offsets are int64, which N * H * D may need.
    """
    columns = base[:, :, None] + tl.arange(0, PADDED)[None, None, :]
    offset = node.to(tl.int64) * x.at * ALIGN
    return columns + tl.expand_dims(tl.expand_dims(offset, -1), -1)


@triton.jit
def load_columns(at, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Load [..., PADDED] with zeros from SIZE on."""
    if SIZE == PADDED:
        x = tl.load(at)
    else:
        inside = tl.arange(0, PADDED) < SIZE
        for _ in tl.static_range(len(at.shape) - 1):
            inside = tl.expand_dims(inside, 0)
        x = tl.load(at, mask=inside, other=0.0)
    return x


@triton.jit
def store_columns(at, x, keep, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Store x [L, H, PADDED], of the SIZE columns that exist, where keep [L]."""
    mask = keep[:, None, None] & (tl.arange(0, PADDED) < SIZE)[None, None, :]
    tl.store(at, x.to(at.dtype.scalar.element_ty), mask=mask)


@triton.jit
def load_nodes(base, x, node, SIZE: tl.constexpr, PADDED: tl.constexpr, ALIGN: tl.constexpr):
    """Load nodes [..., L] of x, whose heads are at base [L, H]: [..., L, H, PADDED]."""
    return load_columns(nodes_at(base, x, node, PADDED, ALIGN), SIZE, PADDED)


@triton.jit
def load_rows(x, place, SIZE: tl.constexpr, PADDED: tl.constexpr, ALIGN: tl.constexpr):
    """Load the items' rows of x: [L, H, PADDED]."""
    # Idle where ALIGN is 16, but without the shift the row pass of 4 x 32 takes 107 registers, not 103
    # (sm_100, Triton 3.9).
    base = x.ptr + (offset_of(x, place.b, place.h) >> 4) * ALIGN
    return load_nodes(base, x, place.row, SIZE, PADDED, ALIGN)


@triton.jit
def store_rows(x, place, rows, keep, SIZE: tl.constexpr, PADDED: tl.constexpr, ALIGN: tl.constexpr):
    """Store rows [L, H, PADDED] as the items' rows of x, where keep [L]."""
    base = heads_at(x, place.b, place.h, ALIGN)
    store_columns(nodes_at(base, x, place.row, PADDED, ALIGN), rows, keep, SIZE, PADDED)


@triton.jit
def lines_of_pieces(slots, slot, place, SHAPE: tl.constexpr):
    """Return where the results of pieces in slot [L] stand in [batches, slots, heads of a cell]: [L, H]."""
    line = place.inner_b.to(tl.int64) * slots + slot[:, None]
    return line * (SHAPE.HEADS * SHAPE.BLOCKS) + place.inner_h[None, :]


@triton.jit
def columns_of(x, line, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Point to the columns of dense lines [L, H]: [L, H, PADDED]."""
    return x + (line * SIZE)[:, :, None] + tl.arange(0, PADDED)[None, None, :]


@triton.jit
def steepness(x, additive):
    """Return the slope of an additive score's LeakyReLU at x."""
    return tl.where(x > 0, 1.0, additive.negative_slope)


@triton.jit
def load_weight(additive, h, D: tl.constexpr, D_PAD: tl.constexpr):
    """Load the weight [L, H, D_PAD] of heads [L, H] of an additive score."""
    return load_columns(additive.weight + (h * D)[:, :, None] + tl.arange(0, D_PAD)[None, None, :], D, D_PAD)


@triton.jit
def load_query(q, place, additive, factors, SHAPE: tl.constexpr, ALIGN: tl.constexpr):
    """Load queries [L, H, D_PAD] as ``score`` wants them."""
    kept = load_rows(q, place, SHAPE.D, SHAPE.D_PAD, ALIGN).to(tl.float32)
    return kept * factors.inner if additive is None else kept


@triton.jit
def score(q, k, weight, additive, factors):
    """Score edges [S, L, H] times log2(e); return the slope by scale times q.k, or what stands for it, too.

    ``launch.Factors`` says what multiplies what. With ``additive`` the score is
    sum_d weight_d LeakyReLU(q_d + k_d), and not q.k.
    """
    if additive is None:
        s = tl.sum(q[None] * k.to(tl.float32), 3)
    else:
        x = q[None] + k.to(tl.float32)
        s = tl.sum(weight[None] * (x * steepness(x, additive)), 3) * factors.inner
    slope = 1.0
    if factors.outer is not None:
        t = cap(s, 1.0)  # s comes with the inner factor
        s = t * factors.outer
        slope = 1.0 - t * t
    return s, slope


@triton.jit
def load_bias(bias, base, number):
    """Load the bias of edges number [S, L], times log2(e): [S, L, H]; its heads are at base [L, H]."""
    at = base[None] + (number.to(tl.int64) * bias.at)[:, :, None]
    return tl.load(at).to(tl.float32) * LOG2E


@triton.jit
def keep_edges(drop, place, key):
    """Say which edges from the items' rows to key [S, L] survive dropout: [S, L, H]."""
    row = place.row[None, :, None]
    return keep_pairs(drop, place.b[None, :, None], place.h[None], row, key[:, :, None])


@triton.jit
def load_sums(delta, lse, grad_lse, place):
    """Return dO.O - dlse and lse * log2(e) of rows [L, H]; both are 0 where the lse is -inf.

    Such a row, whose every bias is -inf, has weights of exactly 0, and an lse that is a constant.
    """
    lse2 = tl.load(rows_at(lse, place)) * LOG2E
    if grad_lse.ptr is not None:
        delta -= tl.load(rows_at(grad_lse, place)).to(tl.float32)
    delta = tl.where(lse2 == -float("inf"), 0.0, delta)
    return delta, tl.where(lse2 == -float("inf"), 0.0, lse2)


@triton.jit
def load_start(out, lse, place, keep, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Load the maximum, total [L, H] and sum [L, H, PADDED] that a softmax goes on from, where keep [L]."""
    is_kept = keep[:, None] & (place.h >= 0)
    m = tl.load(rows_at(lse.start, place), mask=is_kept, other=-float("inf")) * LOG2E
    total = tl.where(m == -float("inf"), 0.0, 1.0)
    acc = load_rows(out.start, place, SIZE, PADDED, 1)
    return m, total, tl.where(total[:, :, None] > 0, acc, 0.0)


@triton.jit
def store_max(to, start, place, highest, lse, keep):
    """Store the largest scores [L, H], which come times log2(e), where keep [L]; NaN where lse is.

    Where there is a start, of out, ``to`` holds those of the other keys.
    """
    is_kept = keep[:, None] & (place.h >= 0)
    at = rows_at(to, place)
    highest = highest * LN2
    if start.ptr is not None:
        highest = tl.maximum(highest, tl.load(at, mask=is_kept, other=-float("inf")))
    tl.store(at, max_or_nan(highest, lse), mask=is_kept)


@triton.jit
def finish(m, total, acc, sink, h, is_row):
    """Return out [L, H, E] and lse * log2(e) [L, H] of a softmax; whole rows get the sink, if any."""
    if sink is not None:
        extra = tl.where(is_row[:, None], tl.load(sink + h) * LOG2E, -float("inf"))
        top = tl.maximum(m, extra)
        safe = tl.where(top == -float("inf"), 0.0, top)
        fade = tl.math.exp2(m - safe)
        total = total * fade + tl.math.exp2(extra - safe)
        acc = acc * fade[:, :, None]
        m = top
    some = total > 0
    divisor = tl.where(some, total, 1.0)
    out = tl.where(some[:, :, None], acc / divisor[:, :, None], 0.0)
    return out, tl.where(some, m + tl.math.log2(divisor), -float("inf"))


@triton.jit
def first_line(first_place, places, place):
    """Return the line [L] of edge 0 of each item's cell in what is handed over, [batches, places]."""
    return place.inner_b.to(tl.int64) * places + tl.load(first_place + place.cell)


@triton.jit
def lines_at(origin, edge, place, SHAPE: tl.constexpr):
    """Return where edges [S, L] stand in [lines, heads of a cell]: [S, L, H]."""
    line = (origin[None, :] + edge)[:, :, None]
    return line * (SHAPE.HEADS * SHAPE.BLOCKS) + place.inner_h[None, None, :]


@triton.jit
def pairs_at(hand, line):
    """Point to the (p, dS) that are handed over at line [S, L, H]: [S, L, H, 2]."""
    return hand + tl.expand_dims(line * 2, 3) + tl.arange(0, 2)


@triton.jit
def store_sum(
    x,
    to,
    start,
    part,
    place,
    slots,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    SHAPE: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Write x [L, H, PADDED]: a whole row added to start, if given, a piece of a row to its slot in part."""
    # A lane group without edges has seen those of another row: nothing of them may stay.
    x = tl.where((place.end > place.begin)[:, None, None], x, 0.0)
    slot = place.slot
    if tl.max(slot, 0) >= 0:  # in few programs, the first ones
        line = lines_of_pieces(slots, slot, place, SHAPE)
        store_columns(columns_of(part, line, SIZE, PADDED), x, place.exists & (slot >= 0), SIZE, PADDED)
    if start.ptr is not None:
        x += load_rows(start, place, SIZE, PADDED, 1)
    store_rows(to, place, x, place.exists & (slot < 0), SIZE, PADDED, ALIGN)
