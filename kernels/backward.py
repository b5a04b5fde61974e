"""The backward pass over a layout's tiles: by query for dq; backward_key.py by key for dk and dv. No atomics.

With P = exp(score - lse), Z = 1 or what dropout multiplies P by, dP = Z * (dout v^T) and
delta = rowsum(out * dout) - dlse:
dS = P * (dP - delta), dq = scale * dS k, dk = scale * dS^T q, dv = (Z * P)^T dout.
"""
# Triton gives kernels their types, from the arguments of a launch.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .bias import PLAIN, Diagonals, Extras, add_terms, keep_tile, store_diagonals, store_pairs
from .config import Spec, Target
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
    mask_half,
    place,
    score,
    store_rows,
    walk,
)


@triton.jit
def _walk_keys(
    dq,
    q,
    grad,
    lse2,
    delta,
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
    d_terms,
    line,
    q_len,
    levels,
    own,
    share,
    LOOP: tl.constexpr,
    SPEC: tl.constexpr,
):
    """Add the key tiles of one class, full or partial, to dq of a query tile."""
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
        # k before v: ptxas keeps the order of the loads.
        if SPEC.has_levels:
            walked = K, j * COLS, k_row, cols, k_len
            if MASKED:
                s, depths = score_mixed(own, walked, (first + levels[1], j * COLS), levels, inner, SPEC)
            else:
                s, k = score_full(q, *walked, inner, LOOP, SPEC)
        else:
            k = fetch(K, b, h, j, k_row, cols, k_len, COLS, SPEC.d, SPEC.d_columns, MASKED, SPEC)
        v = fetch(V, b, h, j, v_row, cols, k_len, COLS, SPEC.e, SPEC.e_columns, MASKED, SPEC)
        if not SPEC.has_levels:
            s = score(q, k, inner, SPEC)
        x = s * c
        if SPEC.has_terms:
            row, col = (first + rows)[:, None], (j * COLS + cols)[None, :]
            x = add_terms(x, terms, b, head, row, col, q_len, k_len)
        p = tl.math.exp2(x - lse2[:, None])
        if MASKED and not SPEC.half:
            p = mask(p, patterns, marks, t, rows, cols, 0.0, COLS, SPEC)
        dp = tl.dot(grad, v.T, input_precision=SPEC.precision)
        if SPEC.has_dropout:
            dp = tl.where(keep_tile(drop, b, head, first + rows, j * COLS, COLS), dp * drop[3], 0.0)
        if SPEC.per_pair and not MASKED and not SPEC.has_terms:  # whose gradients are not multiplied by share
            ds = p * (dp * share - (delta * share)[:, None])
        else:
            ds = p * (dp - delta[:, None])
        if d_terms[0] is not None:
            store_pairs(ds, d_terms[0], line, row, col, q_len, k_len)
        if d_terms[1] is not None:
            store_diagonals(ds, d_terms[1], line, t, first // SPEC.rows, j, q_len, SPEC)
        if SPEC.is_capped:
            ds = ds * (1.0 - s * s)
        if SPEC.per_pair and MASKED:
            ds = multiply_shares(ds, own, walked, (first + levels[1], j * COLS), depths, levels)
        elif SPEC.per_pair and SPEC.has_terms:
            ds = ds * share
        if SPEC.has_levels and MASKED:
            dq = add_mixed(dq, ds, own, walked, (first + levels[1], j * COLS), depths, levels, SPEC)
        elif SPEC.has_levels:
            dq = add_full(dq, ds, k, LOOP, SPEC)
        else:
            ds = ds.to(k.dtype)
            if MASKED and SPEC.half:
                ds = mask_half(ds, patterns, marks, t, rows, cols, COLS, SPEC)
            dq = tl.dot(ds, k, dq, input_precision=SPEC.precision)
        if SPEC.ahead:
            j = following
    return dq


@triton.jit(do_not_specialize=[*NUMBERS, "share"])
def backward_query_kernel(
    Q,
    K,
    V,
    GRAD_OUT,
    LSE2,
    DELTA,
    DQ,
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
    dq_strides,
    heads,
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
    D_TERMS,
    SPEC: tl.constexpr,
):
    """dq = scale * dS k. A program has one query tile of one head."""
    ROWS: tl.constexpr = SPEC.rows
    D_COLUMNS: tl.constexpr = SPEC.d_columns
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
        q = load_rows(*own, SPEC.d, D_COLUMNS, True, SPEC)
        if SPEC.is_negated:
            q = -q
    grad = head_of(GRAD_OUT, b, h, grad_strides)
    grad = load_rows(grad, i * ROWS, grad_strides[2], rows, q_len, SPEC.e, SPEC.e_columns, True, SPEC)
    at = (b * heads + h).to(tl.int64) * (tl.cdiv(q_len, PADDING) * PADDING) + i * ROWS + rows
    lse2, delta = tl.load(LSE2 + at), tl.load(DELTA + at)
    patterns += (i % (SPEC.tile // ROWS)) * (ROWS * SPEC.tile // 32)
    drop = (tl.load(SEED), drop_above, q_start, regrow) if SPEC.has_dropout else None
    dq = zero_chunks(ROWS, SPEC) if SPEC.has_levels else tl.zeros([ROWS, D_COLUMNS], tl.float32)
    sides = grad, lse2, delta, K, V, b, kh, tiles, marks, patterns
    if SPEC.has_levels:
        for PART in tl.static_range(len(SPEC.loops)):
            for depth in tl.range(SPEC.loops[PART][1], SPEC.loops[PART][2]):
                low, high = class_bounds(
                    *(group, group_b, group_h, ptr, b, h, listed, list_tiles, i * ROWS < q_len),
                    depth,
                    PART,
                    SPEC.cols,
                    SPEC,
                )
                part, by, within, prefix = factors(LEVELS, depth, c, inner, PART, SPEC)
                dq = _walk_keys(
                    *(dq, own_prefix(q, own, prefix, PART, SPEC)),
                    *sides,
                    *(low, high, k_row, v_row, k_len, by, within, h, i * ROWS),
                    drop,
                    TERMS,
                    D_TERMS,
                    *(b * heads + h, q_len, LEVELS, own, part),
                    PART,
                    SPEC,
                )
                # Depths go up: what is behind a prefix was zero.
                dq = sums_prefix(dq, zero_chunks(ROWS, SPEC), prefix, PART, SPEC)
    else:
        for PART in tl.static_range(len(SPEC.loops)):
            low, high = middle if PART else begin, end if PART else middle
            dq = _walk_keys(
                *(dq, q),
                *sides,
                *(low, high, k_row, v_row, k_len, c, inner, h, i * ROWS),
                drop,
                TERMS,
                D_TERMS,
                *(b * heads + h, q_len),
                LEVELS,
                None,
                1.0,
                PART,
                SPEC,
            )
    base = head_of(DQ, b, h, dq_strides)
    if SPEC.has_levels:
        store_chunks(base, i * ROWS, dq_strides[2], rows, q_len, dq, scale, SPEC)
    else:
        store_rows(base, i * ROWS, dq_strides[2], rows, q_len, dq * scale, SPEC.d, D_COLUMNS, SPEC)


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
    levels: Levels = NO_LEVELS,
    d_pairs: Tensor | None = None,
    needs_relative: bool = False,
) -> Tensor | None:
    """Write dq [B, H, Q, D] of the pairs in a layout's tiles, which are given by query.

    ``delta`` and ``lse2`` come from ``row_sums``; the rest is as in ``tiles_forward``.
    The gradients of the terms of all pairs go to ``d_pairs``, float32 [B, H, Q, K], zeros before, if given.

    Returns:
        The gradient of the part ``relative``, float32 [B, H, Q + K - 1], if needed.
    """
    B, H, Q, _ = q.shape
    Hk, K = k.shape[1:3]
    numbers = Numbers.of(scale, softcap)
    diagonals: list[Diagonals] = []

    def arguments(spec: Spec, keys: Any, values: Any) -> tuple[Any, ...]:
        if needs_relative:
            diagonals[:] = [Diagonals(lists, spec, B, H, Q, K)]
        return q, keys, values, *others, (d_pairs, diagonals[0].arguments() if diagonals else None)

    others = (
        *(grad_out, lse2, delta, dq),
        *lists.arguments(),
        *(x.stride()[:3] for x in (q, k, v, grad_out, dq)),
        *(H, H // Hk, Q, K, numbers.c, numbers.inner, scale),
        *extras.arguments(),
        levels.arguments(),
    )
    launch(
        backward_query_kernel,
        "backward_query",
        target,
        B * H,
        lists,
        Walked(k, v, (q, grad_out, dq)),
        arguments,
        **numbers.present,
        **extras.present,
        **levels.present,
    )
    return diagonals[0].add_up() if diagonals else None
