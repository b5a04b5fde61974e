"""The backward pass over a layout's tiles by key, for dk and dv; see backward.py for the formulas."""
# Triton gives kernels their types, from the arguments of a launch.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from .bias import PLAIN, Extras, add_terms, keep_tile
from .config import Target
from .launch import Lists, Numbers, Walked, launch
from .levels import PLAIN as NO_LEVELS
from .levels import (
    Levels,
    add_full,
    add_mixed,
    class_bounds,
    factors,
    load_own,
    multiply_shares,
    own_prefix,
    score_full,
    score_mixed,
    store_chunks,
    sums_prefix,
    zero_chunks,
)
from .row_sums import PADDING
from .tile import (
    NUMBERS,
    bounds,
    fetch,
    head_of,
    load_rows,
    mask,
    place,
    score,
    store_rows,
    walk,
)


@triton.jit
def _walk_queries(
    dk,
    dv,
    k,
    v,
    Q,
    GRAD_OUT,
    LSE2,
    DELTA,
    b,
    h,
    tiles,
    marks,
    patterns,
    begin,
    end,
    q_row,
    grad_row,
    q_len,
    c,
    inner,
    first,
    drop,
    d_key_bias,
    terms,
    k_len,
    levels,
    own,
    share,
    LOOP: tl.constexpr,
    SPEC: tl.constexpr,
):
    """Add the query tiles of one class, full or partial, to dk and dv of a key tile."""
    MASKED: tl.constexpr = SPEC.loops[LOOP][3]
    ROWS: tl.constexpr = SPEC.mixed if SPEC.has_levels and MASKED else SPEC.rows
    STEPS: tl.constexpr = SPEC.tile // ROWS
    rows, cols = tl.arange(0, ROWS), tl.arange(0, SPEC.cols)
    j = walk(tiles, begin, STEPS)
    for t in tl.range(begin, end, disallow_acc_multi_buffer=SPEC.one_buffer):
        if SPEC.ahead:
            following = walk(tiles, t + 1, STEPS)
        else:
            j = walk(tiles, t, STEPS)
        # s is [cols, rows]: transposed, as the patterns are. Levels come first: their loops hold less then.
        if SPEC.has_levels:
            walked = Q, j * ROWS, q_row, rows, q_len
            if MASKED:
                s, depths = score_mixed(own, walked, (first, j * ROWS + levels[1]), levels, inner, SPEC)
            else:
                s, q = score_full(k, *walked, inner, LOOP, SPEC)
        else:
            q = fetch(Q, b, h, j, q_row, rows, q_len, ROWS, SPEC.d, SPEC.d_columns, MASKED, SPEC)
        grad = fetch(GRAD_OUT, b, h, j, grad_row, rows, q_len, ROWS, SPEC.e, SPEC.e_columns, MASKED, SPEC)
        lse2, delta = tl.load(LSE2 + j * ROWS + rows), tl.load(DELTA + j * ROWS + rows)
        if not SPEC.has_levels:
            s = score(k, q, inner, SPEC)
        x = s * c
        if SPEC.has_terms:
            row, col = (j * ROWS + rows)[None, :], (first + cols)[:, None]
            x = add_terms(x, terms, b, h, row, col, q_len, k_len)
        p = tl.math.exp2(x - lse2[None, :])
        if MASKED:
            p = mask(p, patterns, marks, t, cols, rows, 0.0, ROWS, SPEC)
        if SPEC.has_dropout:
            kept = tl.trans(keep_tile(drop, b, h, j * ROWS + rows, first, SPEC.cols))
        if SPEC.needs_v:
            dropped = tl.where(kept, p, 0.0) if SPEC.has_dropout else p
            dv = tl.dot(dropped.to(grad.dtype), grad, dv, input_precision=SPEC.precision)
        if SPEC.needs_k or SPEC.needs_key_bias:
            dp = tl.dot(v, grad.T, input_precision=SPEC.precision)
            if SPEC.has_dropout:
                dp = tl.where(kept, dp * drop[3], 0.0)
            if SPEC.per_pair and not MASKED and not SPEC.has_terms:
                ds = p * (dp * share - (delta * share)[None, :])
            else:
                ds = p * (dp - delta[None, :])
            if SPEC.needs_key_bias:
                d_key_bias += tl.sum(ds, 1)
            if SPEC.is_capped:
                ds = ds * (1.0 - s * s)
            if SPEC.per_pair and MASKED:
                ds = multiply_shares(ds, own, walked, (first, j * ROWS + levels[1]), depths, levels)
            elif SPEC.per_pair and SPEC.has_terms:
                ds = ds * share
            if SPEC.needs_k and SPEC.has_levels and MASKED:
                dk = add_mixed(dk, ds, own, walked, (first, j * ROWS + levels[1]), depths, levels, SPEC)
            elif SPEC.needs_k and SPEC.has_levels:
                dk = add_full(dk, ds, q, LOOP, SPEC)
            elif SPEC.needs_k:
                dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=SPEC.precision)
        if SPEC.ahead:
            j = following
    return dk, dv, d_key_bias


@triton.jit(
    do_not_specialize=NUMBERS,
    do_not_specialize_on_alignment=["share"],  # but 1 is worth a kernel without the loop over heads
)
def backward_key_kernel(
    Q,
    K,
    V,
    GRAD_OUT,
    LSE2,
    DELTA,
    DK,
    DV,
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
    grad_strides,
    dk_strides,
    dv_strides,
    key_heads,
    share,
    q_len,
    k_len,
    c,
    inner,
    scale,
    SEED,
    drop_above,
    q_start,
    regrow,
    TERMS,
    LEVELS,
    D_KEY_BIAS,
    SPEC: tl.constexpr,
):
    """dk = scale * dS^T q and dv = P^T dout, summed over the query heads of a key head.

    A program has one key tile of one key head.
    """
    COLS: tl.constexpr = SPEC.cols
    D_COLUMNS: tl.constexpr = SPEC.d_columns
    E_COLUMNS: tl.constexpr = SPEC.e_columns
    STEPS: tl.constexpr = SPEC.tile // SPEC.rows
    listed, i, kh, b = place(order, is_ordered, list_tiles, key_heads, COLS, SPEC)
    cols = tl.arange(0, COLS)
    k = head_of(K, b, kh, k_strides)
    own = k, i * COLS, k_strides[2], cols, k_len
    if SPEC.has_levels:
        k = load_own(own, SPEC)
    else:
        k = load_rows(*own, SPEC.d, D_COLUMNS, True, SPEC)
        if SPEC.is_negated:
            k = -k
    v = head_of(V, b, kh, v_strides)
    v = load_rows(v, i * COLS, v_strides[2], cols, k_len, SPEC.e, E_COLUMNS, True, SPEC)
    q_row = SPEC.row_strides[0] if SPEC.row_strides[0] else q_strides[2]
    grad_row = SPEC.row_strides[1] if SPEC.row_strides[1] else grad_strides[2]
    patterns += (i % (SPEC.tile // COLS)) * (COLS * SPEC.tile // 32)
    drop = (tl.load(SEED), drop_above, q_start, regrow) if SPEC.has_dropout else None
    dk = zero_chunks(COLS, SPEC) if SPEC.has_levels else tl.zeros([COLS, D_COLUMNS], tl.float32)
    dv = tl.zeros([COLS, E_COLUMNS], tl.float32)
    for number in tl.range(0, share):
        h = kh * share + number
        if not SPEC.has_levels:
            begin, middle, end = bounds(
                group, group_b, group_h, ptr, b, h, listed, list_tiles, i * COLS < k_len, STEPS
            )
        at = (b * (key_heads * share) + h).to(tl.int64) * (tl.cdiv(q_len, PADDING) * PADDING)
        d_key_bias = tl.zeros([COLS], tl.float32)
        queries = Q if SPEC.tma else head_of(Q, b, h, q_strides)
        grads = GRAD_OUT if SPEC.tma else head_of(GRAD_OUT, b, h, grad_strides)
        sides = v, queries, grads, LSE2 + at, DELTA + at, b, h, tiles, marks, patterns
        if SPEC.has_levels:
            for PART in tl.static_range(len(SPEC.loops)):
                for depth in tl.range(SPEC.loops[PART][1], SPEC.loops[PART][2]):
                    low, high = class_bounds(
                        *(group, group_b, group_h, ptr, b, h, listed, list_tiles, i * COLS < k_len),
                        depth,
                        PART,
                        SPEC.rows,
                        SPEC,
                    )
                    part, by, within, prefix = factors(LEVELS, depth, c, inner, PART, SPEC)
                    # With one head, depths go up: what is behind a prefix is zero.
                    before = dk if SPEC.is_grouped else zero_chunks(COLS, SPEC)
                    dk, dv, d_key_bias = _walk_queries(
                        *(dk, dv, own_prefix(k, own, prefix, PART, SPEC)),
                        *sides,
                        *(low, high, q_row, grad_row, q_len, by, within, i * COLS),
                        drop,
                        d_key_bias,
                        TERMS,
                        *(k_len, LEVELS, own, part),
                        PART,
                        SPEC,
                    )
                    dk = sums_prefix(dk, before, prefix, PART, SPEC)
        else:
            for PART in tl.static_range(len(SPEC.loops)):
                low, high = middle if PART else begin, end if PART else middle
                dk, dv, d_key_bias = _walk_queries(
                    *(dk, dv, k),
                    *sides,
                    *(low, high, q_row, grad_row, q_len, c, inner, i * COLS),
                    drop,
                    d_key_bias,
                    TERMS,
                    k_len,
                    LEVELS,
                    None,
                    1.0,
                    PART,
                    SPEC,
                )
        if SPEC.needs_key_bias:
            at = (b * (key_heads * share) + h).to(tl.int64) * k_len + i * COLS + cols
            tl.store(D_KEY_BIAS + at, d_key_bias, mask=i * COLS + cols < k_len)
    if SPEC.needs_k:
        base = head_of(DK, b, kh, dk_strides)
        if SPEC.has_levels:
            store_chunks(base, i * COLS, dk_strides[2], cols, k_len, dk, scale, SPEC)
        else:
            store_rows(base, i * COLS, dk_strides[2], cols, k_len, dk * scale, SPEC.d, D_COLUMNS, SPEC)
    if SPEC.needs_v:
        if SPEC.has_dropout:
            dv = dv * regrow
        base = head_of(DV, b, kh, dv_strides)
        store_rows(base, i * COLS, dv_strides[2], cols, k_len, dv, SPEC.e, E_COLUMNS, SPEC)


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
    levels: Levels = NO_LEVELS,
    d_key_bias: Tensor | None = None,
) -> None:
    """Write dk [B, Hk, K, D] and dv [B, Hk, K, E], where given, of a layout's tiles, given by key.

    The gradient of the part ``key`` goes to ``d_key_bias``, float32 [B, H, K], if given. ``delta`` and
    ``lse2`` come from ``row_sums``; the rest is as in ``tiles_forward``.
    """
    B, H, Q, _ = q.shape
    Hk, K = k.shape[1:3]
    numbers = Numbers.of(scale, softcap)
    # In the place of a gradient that is not wanted, and so is not written, stands the input.
    written = (k if dk is None else dk), (v if dv is None else dv)
    others = (
        *(lse2, delta, *written),
        *lists.arguments(),
        *(x.stride()[:3] for x in (q, k, v, grad_out, *written)),
        *(Hk, H // Hk, Q, K, numbers.c, numbers.inner, scale),
        *extras.arguments(),
        levels.arguments(),
        d_key_bias,
    )
    launch(
        backward_key_kernel,
        "backward_key",
        target,
        B * Hk,
        lists,
        Walked(q, grad_out, (k, v, *written)),
        lambda _, queries, grads: (queries, k, v, grads, *others),
        needs_k=dk is not None,
        needs_v=dv is not None,
        needs_key_bias=d_key_bias is not None,
        is_grouped=Hk < H,
        **numbers.present,
        **extras.present,
        **levels.present,
    )
