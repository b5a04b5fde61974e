"""Products over the dims of a head, which kernels hold in chunks: a tuple of tiles, of one for plain scores.

A multi-level score (see levels) cuts the dims, and each loop reads the dims up to its cut. Dims beyond the
prefix of a depth are zeroed outside of the loop over its tiles: in the own side before, in the sums after.
"""
# Triton gives kernels their types, from the arguments of a launch.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, misc"
# ruff: noqa: RUF005 - Triton adds tuples, and does not unpack them in others

import triton
import triton.language as tl

from .tile import cap, load_rows, store_rows
from .walk import tile_of


@triton.jit
def load_dims(x, dim, COLUMNS: tl.constexpr, CHECKED: tl.constexpr, SPEC: tl.constexpr):
    """Load COLUMNS dims from ``dim`` on; see load_rows."""
    return load_rows(x, dim, COLUMNS, SPEC.d, SPEC.d == SPEC.d_columns, CHECKED, SPEC)


@triton.jit
def load_chunk(x, CHUNK: tl.constexpr, CHECKED: tl.constexpr, SPEC: tl.constexpr):
    """Load one chunk."""
    return load_dims(x, SPEC.chunks[CHUNK].first, SPEC.chunks[CHUNK].columns, CHECKED, SPEC)


@triton.jit
def fetch(side, j, rows, LOOP: tl.constexpr, SPEC: tl.constexpr):
    """Load the chunks of tile j that a loop reads: by descriptor (plain scores only), or by pointer."""
    COUNT: tl.constexpr = SPEC.loops[LOOP].walked
    CHUNKS: tl.constexpr = SPEC.loops[LOOP].chunks
    CHECKED: tl.constexpr = SPEC.loops[LOOP].is_partial
    y = ()
    if SPEC.tma:
        y = (side.base.load([side.b, side.h, j * COUNT, 0]).reshape(COUNT, SPEC.d_columns),)
    else:
        for i in tl.static_range(CHUNKS):
            y = y + (load_chunk(tile_of(side, j, rows, side.start), i, CHECKED, SPEC),)
    return y


@triton.jit
def keep_dims(x, dim, low, high):
    """Return x [rows, columns], of the dims from ``dim`` on, with zeros outside low to high.

    Not in the load, which copies 16 bytes at once: a prefix may end anywhere in them.
    """
    dims = dim + tl.arange(0, x.shape[1])
    return tl.where(((dims >= low) & (dims < high))[None, :], x, 0.0)


@triton.jit
def load_own(own, SPEC: tl.constexpr):
    """Load all chunks of the own side."""
    x = ()
    for i in tl.static_range(len(SPEC.chunks)):
        x = x + (load_chunk(own, i, True, SPEC),)
    return x


@triton.jit
def own_prefix(x, own, prefix, LOOP: tl.constexpr, SPEC: tl.constexpr):
    """Return x, the chunks of the own side, with zeros from the prefix of a depth on.

    Chunks that it cuts are read again: there are no registers for both.
    """
    CHUNKS: tl.constexpr = SPEC.loops[LOOP].chunks
    y = ()
    for i in tl.static_range(CHUNKS):
        z = x[i]
        if i >= SPEC.loops[LOOP].whole:
            z = keep_dims(load_chunk(own, i, True, SPEC), SPEC.chunks[i].first, 0, prefix)
        y = y + (z,)
    return y


@triton.jit
def score(x, y, inner, LOOP: tl.constexpr, SPEC: tl.constexpr):
    """Score each row of x with each row of y, chunks of both: the product, or tanh(inner * product).

    Whoever calls it multiplies by c > 0: scale * log2(e), x or y coming negated for a negative scale; or
    softcap * log2(e), inner being scale / softcap. The slope by the product is scale, or scale * (1 - s * s).
    """
    CHUNKS: tl.constexpr = SPEC.loops[LOOP].chunks
    s = tl.dot(x[0], y[0].T, input_precision=SPEC.precision)
    for i in tl.static_range(1, CHUNKS):
        s = tl.dot(x[i], y[i].T, s, input_precision=SPEC.precision)
    if SPEC.has.softcap:
        s = cap(s, inner, SPEC.ptx and x[0].dtype != tl.float32)
    return s


@triton.jit
def zero_chunk(COUNT: tl.constexpr, CHUNK: tl.constexpr, SPEC: tl.constexpr):
    """Return zeros for one chunk of COUNT rows."""
    COLUMNS: tl.constexpr = SPEC.chunks[CHUNK].columns
    return tl.zeros([COUNT, COLUMNS], tl.float32)


@triton.jit
def zero_sums(COUNT: tl.constexpr, SPEC: tl.constexpr):
    """Return zeros for all chunks of COUNT rows."""
    sums = ()
    for i in tl.static_range(len(SPEC.chunks)):
        sums = sums + (zero_chunk(COUNT, i, SPEC),)
    return sums


@triton.jit
def add_products(sums, ds, y, LOOP: tl.constexpr, SPEC: tl.constexpr):
    """Return sums + ds y, for all chunks; ds has the type of y."""
    out = ()
    for i in tl.static_range(len(SPEC.chunks)):
        total = sums[i]
        if i < SPEC.loops[LOOP].chunks:
            total = tl.dot(ds, y[i], total, input_precision=SPEC.precision)
        out = out + (total,)
    return out


@triton.jit
def sums_prefix(sums, before, prefix, LOOP: tl.constexpr, SPEC: tl.constexpr):
    """Return the sums up to the prefix of a depth, and what they were before its tiles from there on."""
    out = ()
    for i in tl.static_range(len(SPEC.chunks)):
        total = sums[i]
        if i >= SPEC.loops[LOOP].whole and i < SPEC.loops[LOOP].chunks:
            dims = SPEC.chunks[i].first + tl.arange(0, SPEC.chunks[i].columns)
            total = tl.where((dims < prefix)[None, :], total, before[i])
        out = out + (total,)
    return out


@triton.jit
def store_sums(x, sums, scale, SPEC: tl.constexpr):
    """Store all chunks of the rows that exist, times scale."""
    for i in tl.static_range(len(SPEC.chunks)):
        store_rows(x, sums[i] * scale, SPEC.chunks[i].first, SPEC.d, SPEC)
