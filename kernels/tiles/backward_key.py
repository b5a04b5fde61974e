"""The backward pass over a layout's tiles by key, for dk and dv; see backward_query.py for the formulas."""
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
from .terms import Dropout, add_slope, add_terms, drop_pairs, inside, keep_words, slope_of
from .tile import LOG2E, head_of, load_values, mask, store_rows
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
def _walk_queries(
    dk, dv, d_key_bias, k, v, lse2, delta, walk, stretch, LOOP: tl.constexpr, SPEC: tl.constexpr
):
    """Add a stretch of query tiles to dk and dv of a key tile; ``lse2`` and ``delta`` are pointers."""
    PARTIAL: tl.constexpr = SPEC.loops[LOOP].is_partial
    MIXED: tl.constexpr = PARTIAL and SPEC.has.levels > 0
    ROWS: tl.constexpr = SPEC.loops[LOOP].walked
    own, queries, rows = walk.own, walk.d_side, tl.arange(0, ROWS)
    j = find_tile(walk.lists, stretch.begin, ROWS, SPEC)
    for t in tl.range(stretch.begin, stretch.end, disallow_acc_multi_buffer=SPEC.one_buffer):
        if SPEC.ahead:
            following = find_tile(walk.lists, t + 1, ROWS, SPEC)
        else:
            j = find_tile(walk.lists, t, ROWS, SPEC)
        start = start_of(walk.positions, queries.start, j * ROWS, queries.length)
        if SPEC.has.dropout:
            at = j * ROWS + rows, start, own.first + own.start, j
            kept = keep_words(walk.drop, queries.b, walk.h, *at, SPEC.cols, SPEC)
        # s is [cols, rows]: transposed, as the patterns are. Levels score first: their loops hold less then.
        if MIXED:
            tile = tile_of(queries, j, rows, start)
            s, depths = score_mixed(own, tile, walk.table, stretch.inner, SPEC)
        else:
            q = fetch(queries, j, rows, LOOP, SPEC)
        if SPEC.has.levels and not MIXED:
            s = score(k, q, stretch.inner, LOOP, SPEC)
        grad = fetch_values(walk.e_side, j, rows, PARTIAL, SPEC)
        tile_lse2, tile_delta = tl.load(lse2 + j * ROWS + rows), tl.load(delta + j * ROWS + rows)
        if not SPEC.has.levels:
            s = score(k, q, stretch.inner, LOOP, SPEC)
        x = s
        if SPEC.has.terms:
            near = (inside(j * ROWS, rows, queries.length) if PARTIAL else rows)[None, :]
            cols = inside(own.first, own.rows, own.length)[:, None]
            shift = distance_shift(walk.positions, walk.whole, start, own.start, queries.length)
            pairs = j * ROWS, near, own.first, cols, queries.length, shift
            x = add_terms(s, LOG2E / stretch.c, walk.terms, queries.b, walk.h, *pairs, SPEC)
        if walk.slope is not None:
            x = add_slope(x, walk.slope * (LOG2E / stretch.c), own, j * ROWS + start, SPEC)
        p = tl.math.exp2(x * stretch.c - tile_lse2[None, :])
        if PARTIAL:
            p = mask(p, walk.lists, t, own.rows, rows, 0.0, ROWS, SPEC)
        if SPEC.has.dv:
            dropped = drop_pairs(p, kept, own.rows[:, None], 1, 0, SPEC) if SPEC.has.dropout else p
            dv = tl.dot(dropped.to(grad.dtype), grad, dv, input_precision=SPEC.precision)
        if SPEC.has.dk or SPEC.has.d_key_bias:
            dp = tl.dot(v, grad.T, input_precision=SPEC.precision)
            if SPEC.has.dropout:
                dp = drop_pairs(dp, kept, own.rows[:, None], 1, 0, SPEC) * walk.drop.regrow
            if SPEC.has.per_pair and not PARTIAL and not SPEC.has.terms:
                ds = p * (dp * stretch.depth_factor - (tile_delta * stretch.depth_factor)[None, :])
            else:
                ds = p * (dp - tile_delta[None, :])
            if SPEC.has.d_key_bias:
                d_key_bias += tl.sum(ds, 1)
            if SPEC.has.softcap:
                ds = ds * (1.0 - s * s)
            if SPEC.has.per_pair and PARTIAL:
                ds = divide_by_depths(ds, own, tile, depths, walk.table)
            elif SPEC.has.per_pair and SPEC.has.terms:
                ds = ds * stretch.depth_factor
            if SPEC.has.dk and MIXED:
                dk = add_mixed(dk, ds, own, tile, depths, walk.table, SPEC)
            elif SPEC.has.dk:
                dk = add_products(dk, ds.to(grad.dtype), q, LOOP, SPEC)
        if SPEC.ahead:
            j = following
    return dk, dv, d_key_bias


@triton.jit(
    do_not_specialize=NUMBERS,
    do_not_specialize_on_alignment=["heads_per_key"],  # but 1 is worth a kernel without the loop over heads
)
def backward_key_kernel(
    d_tiles,  # descriptors come first: on sm_100 that saves instructions in the loops
    e_tiles,
    q,
    k,
    v,
    grad_out,
    dk,
    dv,
    lse2,
    delta,
    d_key_bias,
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
    """Write dk = scale * dS^T q and dv = P^T dout, summed over the query heads of a key head.

    A program has one key tile of one key head, or a part of its list.
    """
    COLS: tl.constexpr = SPEC.cols
    E_COLUMNS: tl.constexpr = SPEC.e_columns
    part = None
    if parts is not None:
        part = find_part(list_tiles, cut_tiles, parts, COLS, SPEC)
    listed, i, kh, b = place(lists, part, list_tiles, is_ordered, heads, COLS, SPEC)
    exists = i * COLS < k_len
    cols = tl.arange(0, COLS)
    own = Rows(head_of(k, b, kh), i * COLS, k.at, cols, k_len, start_of(k_positions, 0, i * COLS, k_len))
    keys = load_own(own, SPEC)
    values = load_values(same_rows(v, b, kh, own), True, SPEC)
    drop = None
    if SPEC.has.dropout:
        drop = Dropout(tl.load(seed), drop_above, q_start, regrow, first_batch, first_head)
    dk_sums = zero_sums(COLS, SPEC)
    dv_sums = tl.zeros([COLS, E_COLUMNS], tl.float32)
    for number in tl.range(0, heads_per_key):
        h = kh * heads_per_key + number
        line = (b * (heads * heads_per_key) + h).to(tl.int64)
        bounds = find_bounds(lists, b, h, group_b, group_h, listed, list_tiles, exists, SPEC)
        at = line * (tl.cdiv(q_len, PADDING) * PADDING)
        d_bias = tl.zeros([COLS], tl.float32)
        walk = Walk(
            own=own,
            d_side=walked_side(q, d_tiles, b, h, q_len, q_start, 0, SPEC),
            e_side=walked_side(grad_out, e_tiles, b, h, q_len, q_start, 1, SPEC),
            positions=q_positions,
            lists=own_patterns(lists, i, COLS, SPEC),
            h=h,
            whole=Whole(q_start, whole_rows),
            drop=drop,
            terms=terms,
            slope=slope_of(terms, b, h, SPEC),
            table=table,
        )
        for LOOP in tl.static_range(len(SPEC.loops)):
            for depth in tl.range(SPEC.loops[LOOP].first, SPEC.loops[LOOP].stop):
                stretch = find_stretch(bounds, exists, part, depth, table, c, inner, LOOP, SPEC)
                x = own_prefix(keys, own, stretch.prefix, LOOP, SPEC)
                # With one head, depths go up: what is after a prefix is zero.
                before = dk_sums if SPEC.has.grouping else zero_sums(COLS, SPEC)
                dk_sums, dv_sums, d_bias = _walk_queries(
                    dk_sums, dv_sums, d_bias, x, values, lse2 + at, delta + at, walk, stretch, LOOP, SPEC
                )
                dk_sums = sums_prefix(dk_sums, before, stretch.prefix, LOOP, SPEC)
        if SPEC.has.d_key_bias:
            tl.store(d_key_bias + line * k_len + i * COLS + cols, d_bias, mask=i * COLS + cols < k_len)
    if SPEC.has.dk:
        store_sums(uncut(same_rows(dk, b, kh, own), part), dk_sums, scale, SPEC)
        if part is not None:
            store_sums(piece_of(pieces.d, own, part, COLS, SPEC.d), dk_sums, scale, SPEC)
    if SPEC.has.dv:
        if SPEC.has.dropout:
            dv_sums = dv_sums * regrow
        store_rows(uncut(same_rows(dv, b, kh, own), part), dv_sums, 0, SPEC.e, SPEC)
        if part is not None:
            store_rows(piece_of(pieces.e, own, part, COLS, SPEC.e), dv_sums, 0, SPEC.e, SPEC)


def tiles_backward_key(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    delta: Tensor,
    lse2: Tensor,
    dk: Tensor | None,
    dv: Tensor | None,
    lists: Lists,
    target: Target,
    *,
    scale: float,
    softcap: float = 0.0,
    extras: Extras = PLAIN,
    d_key_bias: Tensor | None = None,
) -> None:
    """Write dk [B, Hk, K, D] and dv [B, Hk, K, E], where given, of a layout's tiles, given by key.

    The gradient of the part ``key`` goes to ``d_key_bias``, float32 [B, H, K], if given. ``delta`` and
    ``lse2`` come from ``row_sums``; the rest is as in ``tiles_forward``.
    """
    # In the place of a gradient that is not wanted, and so is not written, stands the input.
    tensors = {"dk": k if dk is None else dk, "dv": v if dv is None else dv}
    # The gradient of the part ``key`` has no pieces.
    lengths = extras.work.by_key if extras.work is not None and d_key_bias is None else None
    wanted = {name: x for name, x in (("d", dk), ("e", dv)) if x is not None}
    sizes: dict[str, tuple[int, ...]] = {name: (x.shape[3],) for name, x in wanted.items()}
    cut = Cut(lists, lengths, target, k.shape, sizes, q.shape[1] // k.shape[1])
    launch(
        backward_key_kernel,
        "backward_key",
        target,
        lists,
        {"q": q, "k": k, "v": v, "grad_out": grad_out, **tensors},
        extras.present(
            softcap,
            dk=dk is not None,
            dv=dv is not None,
            d_key_bias=d_key_bias is not None,
            grouping=k.shape[1] < q.shape[1],
        ),
        by_spec=(lambda spec: cut.arguments(spec.cols)) if cut.is_possible else None,
        more=cut.more,
        lse2=lse2,
        delta=delta,
        d_key_bias=d_key_bias,
        scale=scale,
        **extras.arguments(scale, softcap),
        **NOT_CUT,
    )
    for name, x in wanted.items():
        cut.add_up(name, x)
