"""The forward pass over a layout's tiles."""
# Triton gives kernels their types, from the arguments of a launch.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from ..launch.config import Target
from ..launch.launch import launch
from ..records import Lists
from .chunks import fetch, load_own, own_prefix, score
from .extras import PLAIN, Extras, least_score
from .levels import score_mixed
from .pieces import NOT_CUT, Cut, piece_of, uncut
from .terms import Dropout, add_slope, add_terms, drop_pairs, inside, keep_words, slope_of
from .tile import (
    LN2,
    LOG2E,
    add_pairs,
    exp2,
    fma_pairs,
    head_of,
    mask,
    max_or_nan,
    multiply_pairs,
    store_rows,
)
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
def _accumulate(acc, m, total, s, v, cols, c, kept, SPEC: tl.constexpr):
    """Add a tile of scores and values to a softmax: sum of weights * v, maximum, sum of weights.

    Dropout does not change the sum of weights; ``kept`` comes from ``keep_words``.
    """
    top = tl.maximum(m, tl.max(s, 1))
    shrink = tl.math.exp2((m - top) * c)  # not m * c - top * c: fused, that is not 0 when m == top
    if SPEC.packed:
        factor = tl.full([1, 1], 0.0, tl.float32) + c
        p = exp2(fma_pairs(s, factor, tl.broadcast_to((0.0 - top * c)[:, None], s.shape)), cols, SPEC.by_fma)
        halves = tl.permute(tl.reshape(p, [SPEC.rows, 2, p.shape[1] // 2]), [0, 2, 1])
        left, right = tl.split(halves)
        total = total * shrink + tl.sum(add_pairs(left, right), 1)
        acc = multiply_pairs(acc, tl.broadcast_to(shrink[:, None], acc.shape))
    else:
        p = exp2(s * c - (top * c)[:, None], cols, SPEC.by_fma)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
    if SPEC.has.dropout:
        p = drop_pairs(p, kept, cols[None, :], 0, SPEC.shift, SPEC)
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=SPEC.precision)
    return acc, top, total


@triton.jit
def _walk_keys(acc, m, total, q, walk, stretch, LOOP: tl.constexpr, SPEC: tl.constexpr):
    """Add a stretch of key tiles to the softmax of a query tile."""
    PARTIAL: tl.constexpr = SPEC.loops[LOOP].is_partial
    MIXED: tl.constexpr = PARTIAL and SPEC.has.levels > 0
    COLS: tl.constexpr = SPEC.loops[LOOP].walked
    own, keys, cols = walk.own, walk.d_side, tl.arange(0, COLS)
    j = find_tile(walk.lists, stretch.begin, COLS, SPEC)
    for t in tl.range(
        stretch.begin,
        stretch.end,
        disallow_acc_multi_buffer=SPEC.one_buffer,
        warp_specialize=SPEC.specialised,
    ):
        if SPEC.ahead:
            following = find_tile(walk.lists, t + 1, COLS, SPEC)
        else:
            j = find_tile(walk.lists, t, COLS, SPEC)
        start = start_of(walk.positions, keys.start, j * COLS, keys.length)
        kept = ()
        if SPEC.has.dropout:
            at = own.first + own.rows, own.start, j * COLS + start, j
            kept = keep_words(walk.drop, keys.b, walk.h, *at, COLS, SPEC)
        if MIXED:
            s, _ = score_mixed(own, tile_of(keys, j, cols, start), walk.table, stretch.inner, SPEC)
        else:
            s = score(q, fetch(keys, j, cols, LOOP, SPEC), stretch.inner, LOOP, SPEC)
        v = fetch_values(walk.e_side, j, cols, PARTIAL, SPEC)
        c = stretch.c
        if SPEC.has.terms:
            rows = inside(own.first, own.rows, own.length)[:, None]
            near = (inside(j * COLS, cols, keys.length) if PARTIAL else cols)[None, :]
            shift = distance_shift(walk.positions, walk.whole, own.start, start, own.length)
            pairs = own.first, rows, j * COLS, near, own.length, shift
            s = add_terms(s, LOG2E / c, walk.terms, keys.b, walk.h, *pairs, SPEC)
        if walk.slope is not None:
            s = add_slope(s, walk.slope * (LOG2E / c), own, j * COLS + start, SPEC)
        if PARTIAL:
            s = mask(s, walk.lists, t, own.rows, cols, -float("inf"), COLS, SPEC)
        acc, m, total = _accumulate(acc, m, total, s, v, cols, c, kept, SPEC)
        if SPEC.ahead:
            j = following
    return acc, m, total


@triton.jit(do_not_specialize=[*NUMBERS, "heads_per_key"])
def forward_kernel(
    d_tiles,  # descriptors come first: on sm_100 that saves instructions in the loops
    e_tiles,
    q,
    k,
    v,
    out,
    lse,
    row_max,
    sink,
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
    least,
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
    """Write out = softmax(score) v and lse = log(sum(exp(score))); 0 and -inf for empty rows.

    A program has one query tile of one head, or a part of its list, of which it leaves ``pieces``. A sink is
    one more score, without a value, that row_max, the largest score, does not count; row_max is None where it
    is not wanted.
    """
    ROWS: tl.constexpr = SPEC.rows
    E_COLUMNS: tl.constexpr = SPEC.e_columns
    part = None
    if parts is not None:
        part = find_part(list_tiles, cut_tiles, parts, ROWS, SPEC)
    listed, i, h, b = place(lists, part, list_tiles, is_ordered, heads, ROWS, SPEC)
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
    m = tl.full([ROWS], 0.0, tl.float32) + least
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, E_COLUMNS], tl.float32)
    # The maximum is of scores that are yet to be multiplied by c, which depends on the depth.
    if SPEC.has.levels:
        m = m * c
    for LOOP in tl.static_range(len(SPEC.loops)):
        for depth in tl.range(SPEC.loops[LOOP].first, SPEC.loops[LOOP].stop):
            stretch = find_stretch(bounds, exists, part, depth, table, c, inner, LOOP, SPEC)
            x = own_prefix(queries, own, stretch.prefix, LOOP, SPEC)
            if SPEC.has.levels:
                m = m / stretch.c
            acc, m, total = _walk_keys(acc, m, total, x, walk, stretch, LOOP, SPEC)
            if SPEC.has.levels:
                m = m * stretch.c
    if not SPEC.has.levels:
        m = m * c
    at = (b * heads + h).to(tl.int64) * q_len + i * ROWS + rows
    length = q_len
    if part is not None:
        to_piece = piece_of(pieces.e, own, part, ROWS, SPEC.e)
        length = tl.where(part.is_cut, 0, q_len)
        piece_at = part.slot * ROWS + rows
    if row_max is not None:
        highest = tl.where(total == 0, -float("inf"), max_or_nan(m * LN2, total))
        tl.store(row_max + at, highest, mask=i * ROWS + rows < length)
        if part is not None:
            tl.store(pieces.row_max + piece_at, highest, mask=i * ROWS + rows < to_piece.length)
    shrink = tl.full([ROWS], 1.0, tl.float32)
    if SPEC.has.sink:
        sink_score = tl.load(sink + h) * LOG2E
        if part is not None:  # the sink is a score of the whole row
            sink_score = tl.where(part.is_cut, -float("inf"), sink_score)
        top = tl.maximum(m, sink_score)
        shrink = tl.math.exp2(m - top)
        total = total * shrink + tl.math.exp2(sink_score - top)
        m = top
    is_empty = total == 0
    total = tl.where(is_empty, 1.0, total)
    log_sum = tl.where(is_empty, -float("inf"), (m + tl.math.log2(total)) * LN2)
    tl.store(lse + at, log_sum, mask=i * ROWS + rows < length)
    if SPEC.has.dropout:
        shrink = shrink * regrow
    store_rows(uncut(same_rows(out, b, h, own), part), acc * (shrink / total)[:, None], 0, SPEC.e, SPEC)
    if part is not None:
        lse2 = tl.where(is_empty, -float("inf"), m + tl.math.log2(total))
        tl.store(pieces.lse2 + piece_at, lse2, mask=i * ROWS + rows < to_piece.length)
        store_rows(to_piece, acc * (shrink / total)[:, None], 0, SPEC.e, SPEC)


def tiles_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    lists: Lists,
    target: Target,
    *,
    scale: float,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    extras: Extras = PLAIN,
    row_max: Tensor | None = None,
) -> None:
    """Write out and lse of the pairs in a layout's tiles.

    Args:
        q: [B, H, Q, D], the last dimension dense, as in all of these.
        k: [B, Hk, K, D].
        v: [B, Hk, K, E].
        out: [B, H, Q, E], written; the inputs' dtype or float32.
        lse: float32 [B, H, Q], dense, written.
        lists: the tiles by query.
        target: what to compile for.
        scale: factor of the products; without softcap not negative: negate q.
        softcap: 0 is off.
        sink: float32 [H].
        extras: dropout, score terms and levels.
        row_max: float32 [B, H, Q], dense, written: the largest score of each row; None = not wanted.
    """
    arguments = extras.arguments(scale, softcap)
    sizes: dict[str, tuple[int, ...]] = {"e": (v.shape[3],), "lse2": ()}
    if row_max is not None:
        sizes["row_max"] = ()
    cut = Cut(lists, extras.work and extras.work.by_query, target, q.shape, sizes)
    launch(
        forward_kernel,
        "forward",
        target,
        lists,
        {"q": q, "k": k, "v": v, "out": out},
        extras.present(softcap, sink=sink is not None),
        by_spec=(lambda spec: cut.arguments(spec.rows)) if cut.is_possible else None,
        more=cut.more,
        lse=lse,
        row_max=row_max,
        sink=sink,
        least=least_score(arguments["c"]),
        **arguments,
        **NOT_CUT,
    )
    cut.merge(out, lse, sink, row_max)
