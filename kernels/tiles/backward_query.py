"""The backward pass over a layout's tiles: by query for dq; backward_key.py by key for dk and dv. No atomics.

With P = exp(score - lse), Z = 1 or what dropout multiplies P by, dP = Z * (dout v^T) and
delta = rowsum(out * dout) - dlse:
dS = P * (dP - delta), dq = scale * dS k, dk = scale * dS^T q, dv = (Z * P)^T dout.
"""
# Triton gives kernels their types, from the arguments of a launch.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from ..launch.config import Target
from ..launch.launch import launch
from ..records import Lists
from .chunks import add_products, fetch, load_own, own_prefix, score, store_sums, sums_prefix, zero_sums
from .extras import PLAIN, Extras
from .levels import add_mixed, divide_by_depths, score_mixed
from .pieces import NOT_CUT, Cut, piece_of, uncut
from .row_sums import PADDING
from .term_grads import NO_ROOM, TermGrads, store_diagonals, store_pairs, store_tile
from .terms import Dropout, add_slope, add_terms, drop_pairs, inside, keep_words, slope_of
from .tile import LOG2E, head_of, load_values, mask, mask_half
from .walk import (
    NUMBERS,
    Rows,
    Walk,
    Whole,
    distance_shift,
    fetch_values,
    find_bounds,
    find_part,
    find_stretch,
    find_tile,
    own_patterns,
    place,
    same_rows,
    start_of,
    tile_of,
    walked_side,
)


@triton.jit
def _walk_keys(dq, q, grad, lse2, delta, walk, stretch, room, line, LOOP: tl.constexpr, SPEC: tl.constexpr):
    """Add a stretch of key tiles to dq of a query tile."""
    PARTIAL: tl.constexpr = SPEC.loops[LOOP].is_partial
    MIXED: tl.constexpr = PARTIAL and SPEC.has.levels > 0
    COLS: tl.constexpr = SPEC.loops[LOOP].walked
    own, keys, cols = walk.own, walk.d_side, tl.arange(0, COLS)
    j = find_tile(walk.lists, stretch.begin, COLS, SPEC)
    for t in tl.range(stretch.begin, stretch.end, disallow_acc_multi_buffer=SPEC.one_buffer):
        if SPEC.ahead:
            following = find_tile(walk.lists, t + 1, COLS, SPEC)
        else:
            j = find_tile(walk.lists, t, COLS, SPEC)
        start = start_of(walk.positions, keys.start, j * COLS, keys.length)
        if SPEC.has.dropout:
            at = own.first + own.rows, own.start, j * COLS + start, j
            kept = keep_words(walk.drop, keys.b, walk.h, *at, COLS, SPEC)
        # k before v: ptxas keeps the order of the loads. Levels score first: their loops hold less then.
        if MIXED:
            tile = tile_of(keys, j, cols, start)
            s, depths = score_mixed(own, tile, walk.table, stretch.inner, SPEC)
        else:
            k = fetch(keys, j, cols, LOOP, SPEC)
        if SPEC.has.levels and not MIXED:
            s = score(q, k, stretch.inner, LOOP, SPEC)
        v = fetch_values(walk.e_side, j, cols, PARTIAL, SPEC)
        if not SPEC.has.levels:
            s = score(q, k, stretch.inner, LOOP, SPEC)
        x = s
        if SPEC.has.terms:
            rows = inside(own.first, own.rows, own.length)[:, None]
            near = (inside(j * COLS, cols, keys.length) if PARTIAL else cols)[None, :]
            shift = distance_shift(walk.positions, walk.whole, own.start, start, own.length)
            pairs = own.first, rows, j * COLS, near, own.length, shift
            x = add_terms(s, LOG2E / stretch.c, walk.terms, keys.b, walk.h, *pairs, SPEC)
        if walk.slope is not None:
            x = add_slope(x, walk.slope * (LOG2E / stretch.c), own, j * COLS + start, SPEC)
        p = tl.math.exp2(x * stretch.c - lse2[:, None])
        if PARTIAL and not SPEC.half:
            p = mask(p, walk.lists, t, own.rows, cols, 0.0, COLS, SPEC)
        dp = tl.dot(grad, v.T, input_precision=SPEC.precision)
        if SPEC.has.dropout:
            dp = drop_pairs(dp, kept, cols[None, :], 0, SPEC.shift, SPEC) * walk.drop.regrow
        # The gradients of terms are without the factor of the depth.
        if SPEC.has.per_pair and not PARTIAL and not SPEC.has.terms:
            ds = p * (dp * stretch.depth_factor - (delta * stretch.depth_factor)[:, None])
        else:
            ds = p * (dp - delta[:, None])
        if room.pairs is not None:
            row, col = (own.first + own.rows)[:, None], (j * COLS + cols)[None, :]
            store_pairs(ds, room.pairs, line, row, col, own.length, keys.length)
        if room.tiles is not None:
            store_tile(ds, room, line, t, own.first // SPEC.rows, SPEC)
        if room.sums is not None:
            i, col_tile, q_len = own.first // SPEC.rows, j, own.length
            if walk.positions is not None:
                i = (own.first + own.start - walk.whole.start) // SPEC.rows
                col_tile, q_len = (j * COLS + start) // COLS, walk.whole.rows
            store_diagonals(ds, room, line, t, i, col_tile, q_len, SPEC)
        if SPEC.has.softcap:
            ds = ds * (1.0 - s * s)
        if SPEC.has.per_pair and PARTIAL:
            ds = divide_by_depths(ds, own, tile, depths, walk.table)
        elif SPEC.has.per_pair and SPEC.has.terms:
            ds = ds * stretch.depth_factor
        if MIXED:
            dq = add_mixed(dq, ds, own, tile, depths, walk.table, SPEC)
        else:
            ds = ds.to(v.dtype)
            if PARTIAL and SPEC.half:
                ds = mask_half(ds, walk.lists, t, own.rows, cols, COLS, SPEC)
            dq = add_products(dq, ds, k, LOOP, SPEC)
        if SPEC.ahead:
            j = following
    return dq


@triton.jit(do_not_specialize=[*NUMBERS, "heads_per_key", "first_line"])
def backward_query_kernel(
    d_tiles,  # descriptors come first: on sm_100 that saves instructions in the loops
    e_tiles,
    q,
    k,
    v,
    grad_out,
    dq,
    lse2,
    delta,
    room,
    first_line,
    lists,
    group_b,
    group_h,
    list_tiles,
    is_ordered,
    cut_tiles,
    parts,
    pieces,
    heads,
    heads_per_key,
    q_len,
    k_len,
    c,
    inner,
    scale,
    seed,
    drop_above,
    regrow,
    q_start,
    first_batch,
    first_head,
    q_positions,
    k_positions,
    whole_rows,
    terms,
    table,
    SPEC: tl.constexpr,
):
    """Write dq = scale * dS k. A program has one query tile of one head, or a part of its list."""
    ROWS: tl.constexpr = SPEC.rows
    part = None
    if parts is not None:
        part = find_part(list_tiles, cut_tiles, parts, ROWS, SPEC)
    listed, i, h, b = place(lists, part, list_tiles, is_ordered, heads, ROWS, SPEC)
    line = b * heads + h  # of those that have room
    if first_line is not None:
        h, b = (line + first_line) % heads, (line + first_line) // heads
    exists = i * ROWS < q_len
    bounds = find_bounds(lists, b, h, group_b, group_h, listed, list_tiles, exists, SPEC)
    kh = h // heads_per_key
    rows = tl.arange(0, ROWS)
    start = start_of(q_positions, q_start, i * ROWS, q_len)
    own = Rows(head_of(q, b, h), i * ROWS, q.at, rows, q_len, start)
    drop = None
    if SPEC.has.dropout:
        drop = Dropout(tl.load(seed), drop_above, q_start, regrow, first_batch, first_head)
    walk = Walk(
        own=own,
        d_side=walked_side(k, d_tiles, b, kh, k_len, 0, 0, SPEC),
        e_side=walked_side(v, e_tiles, b, kh, k_len, 0, 1, SPEC),
        positions=k_positions,
        lists=own_patterns(lists, i, ROWS, SPEC),
        h=h,
        whole=Whole(q_start, whole_rows),
        drop=drop,
        terms=terms,
        slope=slope_of(terms, b, h, SPEC),
        table=table,
    )
    queries = load_own(own, SPEC)
    grad = load_values(same_rows(grad_out, b, h, own), True, SPEC)
    at = (b * heads + h).to(tl.int64) * (tl.cdiv(q_len, PADDING) * PADDING) + i * ROWS + rows
    own_lse2, own_delta = tl.load(lse2 + at), tl.load(delta + at)
    sums = zero_sums(ROWS, SPEC)
    for LOOP in tl.static_range(len(SPEC.loops)):
        for depth in tl.range(SPEC.loops[LOOP].first, SPEC.loops[LOOP].stop):
            stretch = find_stretch(bounds, exists, part, depth, table, c, inner, LOOP, SPEC)
            x = own_prefix(queries, own, stretch.prefix, LOOP, SPEC)
            sums = _walk_keys(sums, x, grad, own_lse2, own_delta, walk, stretch, room, line, LOOP, SPEC)
            # Depths go up: what is after a prefix was zero.
            sums = sums_prefix(sums, zero_sums(ROWS, SPEC), stretch.prefix, LOOP, SPEC)
    store_sums(uncut(same_rows(dq, b, h, own), part), sums, scale, SPEC)
    if part is not None:
        store_sums(piece_of(pieces.d, own, part, ROWS, SPEC.d), sums, scale, SPEC)


def tiles_backward_query(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    delta: Tensor,
    lse2: Tensor,
    dq: Tensor,
    lists: Lists,
    target: Target,
    *,
    scale: float,
    softcap: float = 0.0,
    extras: Extras = PLAIN,
    grads: TermGrads | None = None,
) -> None:
    """Write dq [B, H, Q, D] of the pairs in a layout's tiles, which are given by query.

    ``delta`` and ``lse2`` come from ``row_sums``; the rest is as in ``tiles_forward``. The gradients of score
    terms are added to those in ``grads``.
    """
    arguments = {"lse2": lse2, "delta": delta, "scale": scale, **extras.arguments(scale, softcap), **NOT_CUT}
    given = lists, {"q": q, "k": k, "v": v, "grad_out": grad_out, "dq": dq}, extras.present(softcap)
    if grads is None:
        cut = Cut(lists, extras.work and extras.work.by_query, target, q.shape, {"d": (q.shape[3],)})
        launch(
            *(backward_query_kernel, "backward_query", target, *given),
            by_spec=(lambda spec: cut.arguments(spec.rows)) if cut.is_possible else None,
            more=cut.more,
            room=NO_ROOM,
            first_line=None,
            **arguments,
        )
        cut.add_up("d", dq)
        return
    # What is stored of the gradients of terms is of whole lists.
    for lines in grads.rounds():
        launch(
            *(backward_query_kernel, "backward_query", target, *given),
            by_spec=grads.make_room,
            lines=lines,
            **arguments,
        )
