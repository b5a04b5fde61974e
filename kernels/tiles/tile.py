"""Load one tile, mask it, store it; the arithmetic of scores. The only copy. (``walk`` says which tile.)

Scores are kept in units in which exp2 is the exponential: a weight is exp2(score * c - maximum * c)
with c > 0, one multiply-add, because the maximum is taken of scores that are not scaled yet.
"""
# Triton gives kernels their types, from the arguments of a launch.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def addresses(x, dim, COLUMNS: tl.constexpr, WIDE: tl.constexpr):
    """Return pointers to COLUMNS columns from ``dim`` on; WIDE: their offsets may pass 2^31."""
    inside = (x.rows.to(tl.int64) if WIDE else x.rows)[:, None] * x.stride + tl.arange(0, COLUMNS)[None, :]
    return x.base + dim + x.first.to(tl.int64) * x.stride + inside


@triton.jit
def load_rows(
    x,
    dim,
    COLUMNS: tl.constexpr,
    SIZE: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    CHECKED: tl.constexpr,
    SPEC: tl.constexpr,
):
    """Load COLUMNS columns from ``dim`` on, with zeros past SIZE, unless all are there (IS_WHOLE).

    CHECKED: some rows may be past the length; they are zeros, too.
    """
    at = addresses(x, dim, COLUMNS, SPEC.is_wide)
    exists = (x.first + x.rows < x.length)[:, None]
    inside = (dim + tl.arange(0, COLUMNS) < SIZE)[None, :]
    if CHECKED:
        y = tl.load(at, mask=exists if IS_WHOLE else exists & inside, other=0.0)
    elif IS_WHOLE:
        y = tl.load(at)
    else:
        y = tl.load(at, mask=inside, other=0.0)
    return y


@triton.jit
def load_values(x, CHECKED: tl.constexpr, SPEC: tl.constexpr):
    """Load all E columns; see load_rows."""
    return load_rows(x, 0, SPEC.e_columns, SPEC.e, SPEC.e == SPEC.e_columns, CHECKED, SPEC)


@triton.jit
def store_rows(x, y, dim, SIZE: tl.constexpr, SPEC: tl.constexpr):
    """Store the columns from ``dim`` on of the rows that exist, in the element type of the destination."""
    COLUMNS: tl.constexpr = y.shape[1]
    at = addresses(x, dim, COLUMNS, SPEC.is_wide)
    exists = (x.first + x.rows < x.length)[:, None] & (dim + tl.arange(0, COLUMNS) < SIZE)[None, :]
    tl.store(at, y.to(x.base.dtype.element_ty), mask=exists)


@triton.jit
def head_of(x, b, h):
    """Return the pointer to one batch and head of a Strided; products are in int64."""
    return x.ptr + b.to(tl.int64) * x.b + h.to(tl.int64) * x.h


@triton.jit
def tanh(x):
    """Return tanh(x) within about two float32 roundings: a polynomial near 0, where 1 - exp(-2x) cancels."""
    a = tl.abs(x)
    e = tl.math.exp2(a * (-2.0 * LOG2E))
    z = a * a
    near = a + a * z * ((((-0.00619708 * z + 0.02101907) * z - 0.05384004) * z + 0.13332474) * z - 0.33333314)
    y = tl.where(a < 0.55, near, (1.0 - e) / (1.0 + e))
    return tl.where(x < 0, -y, y)


@triton.jit
def cap(s, inner, FAST: tl.constexpr = False):
    """Return tanh(inner * s), what a softcap makes of a product; its slope is inner * (1 - tanh^2).

    FAST: by one instruction, whose relative error of at most 2^-11 is that of one rounding to float16.
    """
    x = s * inner
    if FAST:
        y = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        y = tanh(x)
    return y


@triton.jit
def max_or_nan(highest, total):
    """Return the largest scores, or NaN if one was: maxima may lose it, a sum and its logarithm do not."""
    is_nan = total != total  # noqa: PLR0124 - Triton has no isnan
    return tl.where(is_nan & (highest != float("inf")), float("nan"), highest)


@triton.jit
def join(m, total, acc, s, x):
    """Add pieces of a softmax, logarithms s [S, H] to base 2 and values x [S, H, E], to those before.

    That is the maximum m and the sum [1, H] of the weights, and the sum acc [1, H, E] of weights * values.
    """
    top = tl.maximum(m, tl.max(s, 0)[None])
    safe = tl.where(top == -float("inf"), 0.0, top)
    p = tl.math.exp2(s - safe)
    fade = tl.math.exp2(m - safe)
    total = total * fade + tl.sum(p, 0)[None]
    acc = acc * fade[:, :, None] + tl.sum(p[:, :, None] * x, 0)[None]
    return top, total, acc


@triton.jit
def pattern_words(lists, t, rows, cols, COLS: tl.constexpr, SHIFT: tl.constexpr, SPEC: tl.constexpr):
    """Return 32-bit words [rows, cols] that hold each pair's bit at position cols & (31 - SHIFT).

    The pattern is the one at place t of a list that is walked in steps of COLS columns. SHIFT is 6 where a
    thread owns column pairs of an mma fragment: bits 1 and 2 of the column are then the lane's, and shifting
    by them first leaves a position that is a constant per register.
    """
    STEPS: tl.constexpr = SPEC.tile // COLS
    by = (cols & SHIFT)[None, :]
    if COLS >= 32:
        first = (t % STEPS) * (COLS // 32)
    else:
        first = (t % STEPS) // (32 // COLS)
        by += (t % (32 // COLS)) * COLS
    # A pattern's words after those of the step: in another order of the sums sm_80 spills.
    mark = tl.load(lists.mark + t // STEPS).to(tl.int64)
    word = lists.patterns + first + mark * (SPEC.tile * SPEC.tile // 32) + rows * (SPEC.tile // 32)
    w = tl.load(word)[:, None] >> by
    if COLS >= 64:
        w = tl.where((cols < 32)[None, :], w, tl.load(word + 1)[:, None] >> by)
    if COLS == 128:
        u = tl.where((cols < 96)[None, :], tl.load(word + 2)[:, None] >> by, tl.load(word + 3)[:, None] >> by)
        w = tl.where((cols < 64)[None, :], w, u)
    return w


@triton.jit
def mask(x, lists, t, rows, cols, other, COLS: tl.constexpr, SPEC: tl.constexpr):
    """Return float32 x [rows, cols] where the pattern has a bit, and ``other`` elsewhere."""
    w = pattern_words(lists, t, rows, cols, COLS, SPEC.shift, SPEC)
    bit = tl.broadcast_to((1 << (cols & (31 - SPEC.shift)))[None, :], x.shape)
    return select(x, w, bit, other, SPEC)


@triton.jit
def select(x, w, bit, other, SPEC: tl.constexpr):
    """Return float32 x where the word w has the bit, and ``other`` elsewhere.

    From tl.where LLVM makes 2.5 times the instructions: it packs the booleans into words and unpacks them.
    PTX prevents that; the interpreter has no PTX.
    """
    if SPEC.ptx:
        y = tl.inline_asm_elementwise(
            "{.reg .pred p; .reg .b32 t; and.b32 t, $2, $3; setp.ne.b32 p, t, 0; selp.f32 $0, $1, $4, p;}",
            "=f,f,r,r,f",
            [x, w, bit, other],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        y = tl.where((w & bit) != 0, x, other)
    return y


@triton.jit
def mask_half(x, lists, t, rows, cols, COLS: tl.constexpr, SPEC: tl.constexpr):
    """Return 16-bit x where the pattern has a bit and +0 elsewhere, whatever x is there, NaN too.

    PRMT copies the sign of a byte over 16 bits and one AND serves a pair of columns (8k + 2c, 8k + 2c + 1):
    their bits are moved to the top of byte k.
    """
    w = pattern_words(lists, t, rows, cols, COLS, 6, SPEC) << (7 - (cols & 1))[None, :]
    byte = (cols >> 3) & 3
    select = tl.broadcast_to(((8 + byte) * 0x11 + (12 + byte) * 0x1100)[None, :], x.shape)
    return tl.inline_asm_elementwise(
        "{.reg .b32 t; prmt.b32 t, $2, $3, $4; and.b32 $0, $1, t;}",
        "=r,r,r,r,r,r",
        [x, w, select],
        dtype=x.dtype,
        is_pure=True,
        pack=2,
    )


@triton.jit
def fma_pairs(x, y, z):
    """Return x * y + z, two float32 an instruction (sm_100 and newer)."""
    return tl.inline_asm_elementwise(
        "{.reg .b64 a, b, c, d; mov.b64 a, {$2, $3}; mov.b64 b, {$4, $5}; mov.b64 c, {$6, $7};"
        "fma.rn.f32x2 d, a, b, c; mov.b64 {$0, $1}, d;}",
        "=f,=f,f,f,f,f,f,f",
        [x, y, z],
        dtype=tl.float32,
        is_pure=True,
        pack=2,
    )


@triton.jit
def multiply_pairs(x, y):
    """Return x * y, two float32 an instruction."""
    return tl.inline_asm_elementwise(
        "{.reg .b64 a, b, c; mov.b64 a, {$2, $3}; mov.b64 b, {$4, $5};"
        "mul.rn.f32x2 c, a, b; mov.b64 {$0, $1}, c;}",
        "=f,=f,f,f,f,f",
        [x, y],
        dtype=tl.float32,
        is_pure=True,
        pack=2,
    )


@triton.jit
def add_pairs(x, y):
    """Return x + y, two float32 an instruction."""
    return tl.inline_asm_elementwise(
        "{.reg .b64 a, b, c; mov.b64 a, {$2, $3}; mov.b64 b, {$4, $5};"
        "add.rn.f32x2 c, a, b; mov.b64 {$0, $1}, c;}",
        "=f,=f,f,f,f,f",
        [x, y],
        dtype=tl.float32,
        is_pure=True,
        pack=2,
    )


@triton.jit
def exp2(x, cols, BY_FMA: tl.constexpr):
    """Return 2**x for x <= 0; BY_FMA of every 8 columns do not use the special-function unit.

    Those are 2**round(x) times a cubic that is 1 at 0 (1e-4 off at most); -127 and below give exactly 0.
    """
    y = tl.math.exp2(x)
    if BY_FMA:
        x = tl.maximum(x, -127.0)
        n = x + 12582912.0  # 1.5 * 2**23: the low bits of n hold round(x)
        f = x - (n - 12582912.0)
        z = ((0.0550091 * f + 0.2422110) * f + 0.6932829) * f + 1.0
        z = (z.to(tl.int32, bitcast=True) + (n.to(tl.int32, bitcast=True) << 23)).to(tl.float32, bitcast=True)
        y = tl.where((cols % 8 < BY_FMA)[None, :], z, y)
    return y
