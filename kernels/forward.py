"""The forward pass over a layout's tiles."""
# Triton gives kernels their types, from the arguments of a launch.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from .bias import PLAIN, Extras, add_terms, keep_tile
from .config import Target
from .launch import Lists, Numbers, Walked, launch
from .levels import PLAIN as NO_LEVELS
from .levels import Levels, class_bounds, factors, load_own, own_prefix, score_full, score_mixed
from .tile import (
    LN2,
    LOG2E,
    NUMBERS,
    add_pairs,
    bounds,
    exp2,
    fetch,
    fma_pairs,
    head_of,
    load_rows,
    mask,
    multiply_pairs,
    place,
    score,
    store_rows,
    walk,
)


@triton.jit
def _accumulate(acc, m, total, s, v, cols, c, drop, b, h, rows, first, SPEC: tl.constexpr):
    """Add a tile of scores and values to a softmax: sum of weights * v, maximum, sum of weights.

    Dropout, of rows and of keys from ``first`` on, spares the sum of weights.
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
    if SPEC.has_dropout:
        p = tl.where(keep_tile(drop, b, h, rows, first, p.shape[1]), p, 0.0)
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=SPEC.precision)
    return acc, top, total


@triton.jit
def _walk_keys(
    acc,
    m,
    total,
    q,
    K,
    V,
    b,
    h,
    tiles,
    marks,
    patterns,
    begin,
    end,
    k_row,
    v_row,
    k_len,
    c,
    inner,
    head,
    first,
    drop,
    terms,
    q_len,
    levels,
    own,
    LOOP: tl.constexpr,
    SPEC: tl.constexpr,
):
    """Add the key tiles of one class, full or partial, to the softmax of a query tile."""
    MASKED: tl.constexpr = SPEC.loops[LOOP][3]
    COLS: tl.constexpr = SPEC.mixed if SPEC.has_levels and MASKED else SPEC.cols
    STEPS: tl.constexpr = SPEC.tile // COLS
    rows, cols = tl.arange(0, SPEC.rows), tl.arange(0, COLS)
    j = walk(tiles, begin, STEPS)
    for t in tl.range(begin, end, disallow_acc_multi_buffer=SPEC.one_buffer):
        if SPEC.ahead:
            following = walk(tiles, t + 1, STEPS)
        else:
            j = walk(tiles, t, STEPS)
        if SPEC.has_levels and MASKED:
            walked = K, j * COLS, k_row, cols, k_len
            s, _ = score_mixed(own, walked, (first + levels[1], j * COLS), levels, inner, SPEC)
        elif SPEC.has_levels:
            s, _ = score_full(q, K, j * COLS, k_row, cols, k_len, inner, LOOP, SPEC)
        else:
            k = fetch(K, b, h, j, k_row, cols, k_len, COLS, SPEC.d, SPEC.d_columns, MASKED, SPEC)
            s = score(q, k, inner, SPEC)
        v = fetch(V, b, h, j, v_row, cols, k_len, COLS, SPEC.e, SPEC.e_columns, MASKED, SPEC)
        if SPEC.has_terms:
            row, col = (first + rows)[:, None], (j * COLS + cols)[None, :]
            s = add_terms(s * c, terms, b, head, row, col, q_len, k_len)
        if MASKED:
            s = mask(s, patterns, marks, t, rows, cols, -float("inf"), COLS, SPEC)
        factor = 1.0 if SPEC.has_terms else c
        acc, m, total = _accumulate(
            acc, m, total, s, v, cols, factor, drop, b, head, first + rows, j * COLS, SPEC
        )
        if SPEC.ahead:
            j = following
    return acc, m, total


@triton.jit(do_not_specialize=[*NUMBERS, "share"])
def forward_kernel(
    Q,
    K,
    V,
    OUT,
    LSE,
    SINK,
    group,
    ptr,
    tiles,
    marks,
    patterns,
    order,
    group_b,
    group_h,
    list_tiles,
    is_ordered,
    q_strides,
    k_strides,
    v_strides,
    out_strides,
    heads,
    share,
    q_len,
    k_len,
    c,
    inner,
    start,
    SEED,
    drop_above,
    q_start,
    regrow,
    TERMS,
    LEVELS,
    SPEC: tl.constexpr,
):
    """out = softmax(score) v and lse = log(sum(exp(score))) over the listed tiles; 0 and -inf for empty rows.

    A program has one query tile of one head. A sink is one more score, without a value.
    """
    ROWS: tl.constexpr = SPEC.rows
    E_COLUMNS: tl.constexpr = SPEC.e_columns
    STEPS: tl.constexpr = SPEC.tile // SPEC.cols
    listed, i, h, b = place(order, is_ordered, list_tiles, heads, ROWS, SPEC)
    if not SPEC.has_levels:
        begin, middle, end = bounds(
            group, group_b, group_h, ptr, b, h, listed, list_tiles, i * ROWS < q_len, STEPS
        )
    rows = tl.arange(0, ROWS)
    kh = h // share
    if not SPEC.tma:
        K = head_of(K, b, kh, k_strides)
        V = head_of(V, b, kh, v_strides)
    k_row = SPEC.row_strides[0] if SPEC.row_strides[0] else k_strides[2]
    v_row = SPEC.row_strides[1] if SPEC.row_strides[1] else v_strides[2]
    q = head_of(Q, b, h, q_strides)
    own = q, i * ROWS, q_strides[2], rows, q_len
    if SPEC.has_levels:
        q = load_own(own, SPEC)
    else:
        q = load_rows(*own, SPEC.d, SPEC.d_columns, True, SPEC)
        if SPEC.is_negated:  # the maximum is of scores that are yet to be multiplied by c > 0
            q = -q
    patterns += (i % (SPEC.tile // ROWS)) * (ROWS * SPEC.tile // 32)
    drop = (tl.load(SEED), drop_above, q_start, regrow) if SPEC.has_dropout else None
    m = tl.full([ROWS], 0.0, tl.float32) + start
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, E_COLUMNS], tl.float32)
    sides = K, V, b, kh, tiles, marks, patterns
    if SPEC.has_levels:
        m = m if SPEC.has_terms else m * c
        for PART in tl.static_range(len(SPEC.loops)):
            for depth in tl.range(SPEC.loops[PART][1], SPEC.loops[PART][2]):
                low, high = class_bounds(
                    *(group, group_b, group_h, ptr, b, h, listed, list_tiles, i * ROWS < q_len),
                    depth,
                    PART,
                    SPEC.cols,
                    SPEC,
                )
                _, by, within, prefix = factors(LEVELS, depth, c, inner, PART, SPEC)
                unit = 1.0 if SPEC.has_terms else by
                acc, m, total = _walk_keys(
                    *(acc, m / unit, total, own_prefix(q, own, prefix, PART, SPEC)),
                    *sides,
                    *(low, high, k_row, v_row, k_len, by, within, h, i * ROWS),
                    drop,
                    TERMS,
                    *(q_len, LEVELS, own),
                    PART,
                    SPEC,
                )
                m = m * unit
    else:
        for PART in tl.static_range(len(SPEC.loops)):
            low, high = middle if PART else begin, end if PART else middle
            acc, m, total = _walk_keys(
                *(acc, m, total, q),
                *sides,
                *(low, high, k_row, v_row, k_len, c, inner, h, i * ROWS),
                drop,
                TERMS,
                q_len,
                LEVELS,
                None,
                PART,
                SPEC,
            )
        if not SPEC.has_terms:
            m = m * c
    shrink = tl.full([ROWS], 1.0, tl.float32)
    if SPEC.has_sink:
        sink = tl.load(SINK + h) * LOG2E
        top = tl.maximum(m, sink)
        shrink = tl.math.exp2(m - top)
        total = total * shrink + tl.math.exp2(sink - top)
        m = top
    is_empty = total == 0
    total = tl.where(is_empty, 1.0, total)
    lse = tl.where(is_empty, -float("inf"), (m + tl.math.log2(total)) * LN2)
    at = (b * heads + h).to(tl.int64) * q_len + i * ROWS + rows
    tl.store(LSE + at, lse, mask=i * ROWS + rows < q_len)
    if SPEC.has_dropout:
        shrink = shrink * regrow
    out = acc * (shrink / total)[:, None]
    base = head_of(OUT, b, h, out_strides)
    store_rows(base, i * ROWS, out_strides[2], rows, q_len, out, SPEC.e, E_COLUMNS, SPEC)


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
    levels: Levels = NO_LEVELS,
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
        scale: factor of the products.
        softcap: 0 is off.
        sink: float32 [H].
        extras: dropout and score terms.
        levels: of a multi-level score, for which q is divided by the ranks.
    """
    B, H, Q, _ = q.shape
    Hk, K = k.shape[1:3]
    numbers = Numbers.of(scale, softcap)
    # Terms are added to what is multiplied by c already.
    start = numbers.start if extras.terms is None else -3e38
    others = (
        *lists.arguments(),
        *(x.stride()[:3] for x in (q, k, v, out)),
        *(H, H // Hk, Q, K, numbers.c, numbers.inner, start),
        *extras.arguments(),
        levels.arguments(),
    )
    launch(
        forward_kernel,
        "forward",
        target,
        B * H,
        lists,
        Walked(k, v, (q, out)),
        lambda _, keys, values: (q, keys, values, out, lse, sink, *others),
        has_sink=sink is not None,
        **numbers.present,
        **extras.present,
        **levels.present,
    )
