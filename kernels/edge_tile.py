"""What an edge kernel does with its items: find them, load and store rows, score edges. The only copy.

L are the items of a program, H its heads, S the edges of a step.
"""
# Types of kernels come from their arguments, at compile time:
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from .tile import LOG2E, tanh


@triton.jit
def locate(items, count, first_cell, heads, HEADS: tl.constexpr, BLOCKS: tl.constexpr, LANES: tl.constexpr):
    """Find the items of this program, and what one is: where it stands, and whose.

    Returns cell [L], row [L] (a valid one also where there is no item), range begin and end [L], slot [L],
    whether there is an item [L], batch [L], head [L, H], and (batch, head) inside a cell: a number and [H].
    """
    item = tl.program_id(0) * LANES + tl.arange(0, LANES)
    exists = item < count
    item = tl.minimum(item, count - 1)
    cell = tl.load(items[0] + item)
    row = tl.load(items[1] + item)
    begin = tl.load(items[2] + item)
    end = tl.load(items[3] + item)
    slot = tl.load(items[4] + item) if len(items) == 5 else begin
    exists = exists & (row >= 0)
    end = tl.where(exists, end, begin)
    y = first_cell + tl.program_id(1)
    inner_b = y // BLOCKS
    inner_h = (y % BLOCKS) * HEADS + tl.arange(0, HEADS)
    b = cell // heads + inner_b
    h = (cell % heads)[:, None] + inner_h[None, :]
    return cell, tl.maximum(row, 0), begin, end, slot, exists, b, h, inner_b, inner_h


@triton.jit
def heads_at(x, x_b, x_h, b, h, ALIGN: tl.constexpr):
    """Point to batch b [L] and head h [L, H] of x.

    Strides of batch, head and node come divided by ALIGN, so that the compiler knows what divides them.
    """
    return x + (b.to(tl.int64)[:, None] * x_b + h.to(tl.int64) * x_h) * ALIGN


@triton.jit
def nodes_at(base, at, node, SIZE: tl.constexpr, ALIGN: tl.constexpr):
    """Point to nodes [..., L] of base [L, H]: [..., L, H, SIZE]; in int64, which N * H * D may need."""
    columns = base[:, :, None] + (tl.arange(0, SIZE) * at[1])[None, None, :]
    offset = node.to(tl.int64) * at[0] * ALIGN
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
def load_nodes(base, at, node, SIZE: tl.constexpr, PADDED: tl.constexpr, ALIGN: tl.constexpr):
    """Load nodes [..., L] of base [L, H]: [..., L, H, PADDED]."""
    return load_columns(nodes_at(base, at, node, PADDED, ALIGN), SIZE, PADDED)


@triton.jit
def store_nodes(base, at, node, x, keep, SIZE: tl.constexpr, PADDED: tl.constexpr, ALIGN: tl.constexpr):
    """Store x [L, H, PADDED] as nodes [L] of base [L, H], where keep [L]."""
    store_columns(nodes_at(base, at, node, PADDED, ALIGN), x, keep, SIZE, PADDED)


@triton.jit
def lines_of_pieces(pieces, slot, inner_b, inner_h, CELL: tl.constexpr):
    """Return where the results of pieces in slot [L] stand in [batches, pieces, heads of a cell]: [L, H]."""
    return (inner_b.to(tl.int64) * pieces + slot[:, None]) * CELL + inner_h[None, :]


@triton.jit
def columns_of(x, line, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Point to the columns of dense lines [L, H]: [L, H, PADDED]."""
    return x + (line * SIZE)[:, :, None] + tl.arange(0, PADDED)[None, None, :]


@triton.jit
def steepness(x, additive):
    """Slope of an additive score's LeakyReLU at x."""
    return tl.where(x > 0, 1.0, additive[1])


@triton.jit
def load_weight(additive, h, D: tl.constexpr, D_PAD: tl.constexpr):
    """Load the weight [L, H, D_PAD] of heads [L, H]; ``additive`` is (weight [H, D], slope below zero)."""
    return load_columns(additive[0] + (h * D)[:, :, None] + tl.arange(0, D_PAD)[None, None, :], D, D_PAD)


@triton.jit
def load_query(
    q, q_b, q_h, q_at, b, h, row, inner, additive, D: tl.constexpr, D_PAD: tl.constexpr, ALIGN: tl.constexpr
):
    """Load queries [L, H, D_PAD] as ``score`` wants them."""
    kept = load_nodes(heads_at(q, q_b, q_h, b, h, ALIGN), q_at, row, D, D_PAD, ALIGN).to(tl.float32)
    return kept * inner if additive is None else kept


@triton.jit
def score(
    q, k, additive, weight, inner, outer, bias, bias_b, bias_e, bias_h, number, b, h, CAPPED: tl.constexpr
):
    """Score edges [S, L, H] times log2(e), and the slope by scale times q.k, or what stands for it.

    The factor inner is scale * log2(e), or scale / softcap, with outer = softcap * log2(e). The q of a dot
    product come with it. With ``additive`` it is sum_d weight_d LeakyReLU(q_d + k_d) instead.
    """
    if additive is None:
        s = tl.sum(q[None] * k.to(tl.float32), 3)
    else:
        x = q[None] + k.to(tl.float32)
        s = tl.sum(weight[None] * (x * steepness(x, additive)), 3) * inner
    slope = 1.0
    if CAPPED:
        t = tanh(s)
        s = t * outer
        slope = 1.0 - t * t
    if bias is not None:
        head = b.to(tl.int64)[:, None] * bias_b + h.to(tl.int64) * bias_h  # [L, H]
        at = number.to(tl.int64)[:, :, None] * bias_e + head[None]
        s += tl.load(bias + at).to(tl.float32) * LOG2E
    return s, slope


@triton.jit
def load_sums(delta, lse, lse_b, lse_h, grad_lse, grad_lse_b, grad_lse_h, grad_lse_q, b, h, row):
    """Return dO.O - dlse and lse * log2(e) of rows [L, H]; both are 0 where the lse is -inf.

    Such a row, whose every bias is -inf, has weights of exactly 0, and an lse that is a constant.
    """
    lse2 = tl.load(lse + (b.to(tl.int64)[:, None] * lse_b + h.to(tl.int64) * lse_h + row[:, None])) * LOG2E
    if grad_lse is not None:
        at = b.to(tl.int64)[:, None] * grad_lse_b + h.to(tl.int64) * grad_lse_h
        delta -= tl.load(grad_lse + at + (row.to(tl.int64) * grad_lse_q)[:, None]).to(tl.float32)
    delta = tl.where(lse2 == -float("inf"), 0.0, delta)
    return delta, tl.where(lse2 == -float("inf"), 0.0, lse2)


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
def first_line(first_place, places, cell, inner_b):
    """Return the line [L] of edge 0 of each cell in what is handed over, [batches, places]."""
    return inner_b.to(tl.int64) * places + tl.load(first_place + cell)


@triton.jit
def lines_at(origin, edge, inner_h, CELL: tl.constexpr):
    """Return the places [S, L, H] of edges [S, L] in [lines, CELL]."""
    return (origin[None, :] + edge)[:, :, None] * CELL + inner_h[None, None, :]


@triton.jit
def store_sum(
    x,
    place,
    out,
    out_b,
    out_h,
    out_at,
    start,
    start_b,
    start_h,
    start_at,
    part,
    pieces,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    CELL: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Write x [L, H, PADDED]: a whole row added to start, if given, a piece of a row to its slot."""
    _, row, begin, end, slot, exists, b, h, inner_b, inner_h = place
    # A lane group without edges has seen those of another row: nothing of them may stay.
    x = tl.where((end > begin)[:, None, None], x, 0.0)
    if tl.max(slot, 0) >= 0:  # in few programs, the first ones
        line = lines_of_pieces(pieces, slot, inner_b, inner_h, CELL)
        store_columns(columns_of(part, line, SIZE, PADDED), x, exists & (slot >= 0), SIZE, PADDED)
    if start is not None:
        x += load_nodes(heads_at(start, start_b, start_h, b, h, 1), start_at, row, SIZE, PADDED, 1)
    rows = heads_at(out, out_b, out_h, b, h, ALIGN)
    store_nodes(rows, out_at, row, x, exists & (slot < 0), SIZE, PADDED, ALIGN)
