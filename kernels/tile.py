"""What a kernel does with one tile: find it, load it, score it, mask it. The only copy.

A kernel's tile divides the square tile of the lists (64 or 128) and walks it in steps. The lists
keep two promises: tiles that stick out past the end of the side that is walked are partial, with zero
bits there, so the loop over full tiles has no bounds to check; and every list has one spare entry at
its end, so the next tile's number can be read ahead.

Scores are kept in units in which exp2 is the exponential: a weight is exp2(score * c - maximum * c)
with c > 0, one multiply-add, because the maximum is taken of scores that are not scaled yet.
"""
# Triton gives kernels their types, from the arguments of a launch.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# Run-time arguments that compile nothing anew, whatever their value.
NUMBERS = (
    *("group_b", "group_h", "list_tiles", "is_ordered", "heads", "key_heads", "q_len", "k_len"),
    *("drop_above", "q_start"),
)


@triton.jit
def place(order, is_ordered, list_tiles, heads, COUNT: tl.constexpr, SPEC: tl.constexpr):
    """Find this program's list tile, its own tile of COUNT rows, head and batch; the longest lists first.

    Tiles of one head are neighbours, so that they find its other side in the cache.
    """
    STEPS: tl.constexpr = SPEC.tile // COUNT
    tiles = list_tiles * STEPS
    head = tl.program_id(0) // tiles
    at = tl.program_id(0) % tiles
    # The order is one over all groups: with a single group it is the order of the tiles.
    listed = tl.load(order + at // STEPS, mask=is_ordered != 0, other=at // STEPS)
    return listed, listed * STEPS + at % STEPS, head % heads, head // heads


@triton.jit
def bounds(group, group_b, group_h, ptr, b, h, listed, list_tiles, exists, STEPS: tl.constexpr):
    """Return where the full tiles start, the partial ones start and both end, in kernel tiles.

    A kernel tile in which nothing exists, at the end of the last list tile, gets no work.
    """
    g = tl.load(group + b * group_b + h * group_h)
    row = ptr + (g.to(tl.int64) * list_tiles + listed) * 3
    begin = tl.load(row) * STEPS
    middle = tl.where(exists, tl.load(row + 1) * STEPS, begin)
    return begin, middle, tl.where(exists, tl.load(row + 2) * STEPS, begin)


@triton.jit
def addresses(base, first, row, rows, COLUMNS: tl.constexpr, WIDE: tl.constexpr):
    """Return pointers to rows first + rows of a matrix; WIDE: their offsets may pass 2^31."""
    inside = (rows.to(tl.int64) if WIDE else rows)[:, None] * row + tl.arange(0, COLUMNS)[None, :]
    return base + first.to(tl.int64) * row + inside


@triton.jit
def load_rows(
    base,
    first,
    row,
    rows,
    length,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHECKED: tl.constexpr,
    SPEC: tl.constexpr,
):
    """Load rows first + rows of a [length, SIZE] matrix, with zeros up to COLUMNS.

    CHECKED: rows past the length are zeros, too, instead of not being there.
    """
    at = addresses(base, first, row, rows, COLUMNS, SPEC.is_wide)
    exists = (tl.arange(0, COLUMNS) < SIZE)[None, :]
    if CHECKED:
        x = tl.load(at, mask=(first + rows < length)[:, None] & exists, other=0.0)
    elif SIZE == COLUMNS:
        x = tl.load(at)
    else:
        x = tl.load(at, mask=exists, other=0.0)
    return x


@triton.jit
def fetch(
    base,
    b,
    h,
    j,
    row,
    rows,
    length,
    COUNT: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHECKED: tl.constexpr,
    SPEC: tl.constexpr,
):
    """Load tile j of COUNT rows inside a loop: by descriptor, or by pointer to batch b and head h."""
    if SPEC.tma:
        x = base.load([b, h, j * COUNT, 0]).reshape(COUNT, COLUMNS)
    else:
        x = load_rows(base, j * COUNT, row, rows, length, SIZE, COLUMNS, CHECKED, SPEC)
    return x


@triton.jit
def store_rows(
    base, first, row, rows, length, x, SIZE: tl.constexpr, COLUMNS: tl.constexpr, SPEC: tl.constexpr
):
    """Store the rows that exist, in the element type of the destination."""
    at = addresses(base, first, row, rows, COLUMNS, SPEC.is_wide)
    exists = (first + rows < length)[:, None] & (tl.arange(0, COLUMNS) < SIZE)[None, :]
    tl.store(at, x.to(base.dtype.element_ty), mask=exists)


@triton.jit
def walk(tiles, t, STEPS: tl.constexpr):
    """Return the kernel tile at place t of a list that is walked in STEPS each."""
    return tl.load(tiles + t // STEPS) * STEPS + t % STEPS


@triton.jit
def head_of(base, b, h, strides):
    """Return the pointer to one batch and head; products are in int64."""
    return base + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]


@triton.jit
def tanh(x):
    """tanh in about two float32 roundings: a polynomial near 0, where 1 - exp(-2x) would cancel."""
    a = tl.abs(x)
    e = tl.math.exp2(a * (-2.0 * LOG2E))
    z = a * a
    near = a + a * z * ((((-0.00619708 * z + 0.02101907) * z - 0.05384004) * z + 0.13332474) * z - 0.33333314)
    y = tl.where(a < 0.55, near, (1.0 - e) / (1.0 + e))
    return tl.where(x < 0, -y, y)


@triton.jit
def score(x, y, inner, SPEC: tl.constexpr):
    """Score each row of x with each row of y: the product, or tanh(inner * product) under a softcap.

    Whoever calls it multiplies by c > 0: |scale| * log2(e), x being negated for a negative scale; or
    softcap * log2(e), inner being scale / softcap. The slope by the product is scale, or scale * (1 - s * s).
    """
    s = tl.dot(x, y.T, input_precision=SPEC.precision)
    if SPEC.is_capped:
        s = tanh(s * inner)
    return s


@triton.jit
def pattern_words(
    patterns, marks, t, rows, cols, COLS: tl.constexpr, SHIFT: tl.constexpr, SPEC: tl.constexpr
):
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
    pattern = patterns + first + tl.load(marks + t // STEPS).to(tl.int64) * (SPEC.tile * SPEC.tile // 32)
    word = pattern + rows * (SPEC.tile // 32)
    w = tl.load(word)[:, None] >> by
    if COLS >= 64:
        w = tl.where((cols < 32)[None, :], w, tl.load(word + 1)[:, None] >> by)
    if COLS == 128:
        u = tl.where((cols < 96)[None, :], tl.load(word + 2)[:, None] >> by, tl.load(word + 3)[:, None] >> by)
        w = tl.where((cols < 64)[None, :], w, u)
    return w


@triton.jit
def mask(x, patterns, marks, t, rows, cols, other, COLS: tl.constexpr, SPEC: tl.constexpr):
    """Return float32 x [rows, cols] where the pattern has a bit, and ``other`` elsewhere.

    LLVM packs the booleans of the plain way into words and unpacks them again, 2.5 times the
    instructions; PTX keeps it from that. The plain way is the interpreter's.
    """
    w = pattern_words(patterns, marks, t, rows, cols, COLS, SPEC.shift, SPEC)
    bit = tl.broadcast_to((1 << (cols & (31 - SPEC.shift)))[None, :], x.shape)
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
def mask_half(x, patterns, marks, t, rows, cols, COLS: tl.constexpr, SPEC: tl.constexpr):
    """Return 16-bit x where the pattern has a bit and +0 elsewhere, whatever x is there, NaN too.

    PRMT copies the sign of a byte over 16 bits and one AND serves a pair of columns (8k + 2c, 8k + 2c + 1):
    their bits are moved to the top of byte k.
    """
    w = pattern_words(patterns, marks, t, rows, cols, COLS, 6, SPEC) << (7 - (cols & 1))[None, :]
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
    """x * y + z, two float32 an instruction (sm_100 and newer)."""
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
    """x * y, two float32 an instruction."""
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
    """x + y, two float32 an instruction."""
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
    """2**x for x <= 0, BY_FMA of every 8 columns off the special-function unit.

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
