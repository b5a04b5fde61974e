"""Score terms and dropout: what is added to scores and dropped from weights. The only copy.

Terms come as parts (see attnbias.scores.terms). Kernels are compiled without what is absent, which is None.
"""
# Triton gives kernels their types, from the arguments of a launch.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..records import NO_PLACES, Places, Strided
from .tile import head_of, select


class PairPart(NamedTuple):
    """A number per pair, float32 [B or 1, H or 1, Q, K]; the stride of a size of 1 is 0."""

    ptr: Any
    b: int
    h: int
    q: int
    k: int


class GridPart(NamedTuple):
    """A number per difference of codes, float32 [B or 1, H or 1, differences]; int32 codes [Q] and [K]."""

    ptr: Any
    b: int
    h: int
    query_code: Any
    key_code: Any


class Terms(NamedTuple):
    """The parts of a call, as kernels read them."""

    relative: Strided | None = None  # by k - q, the first being 1 - Q
    slope: Strided | None = None  # in place of it: float32 [B or 1, H], subtracted times abs(k - q)
    key: Strided | None = None
    pair: PairPart | None = None
    grid: GridPart | None = None


@triton.jit
def add_terms(s, rate, terms, b, h, row, rows, col, cols, q_len, shift, SPEC: tl.constexpr):
    """Add the terms of a tile of pairs, times ``rate``, to its scores.

    The pairs are of rows ``row + rows`` and keys ``col + cols``; row and col are one number each. Kept apart,
    they leave addresses that differ by constants from register to register. A pair past the ends gets the
    number of another one, and is masked: see ``inside``. ``shift`` comes from ``walk.distance_shift``.
    """
    if terms.relative is not None:
        at = head_of(terms.relative, b, h) + (col - row + (q_len - 1) + shift)
        s += read(at - rows + cols, SPEC) * rate
    if terms.key is not None:
        s += tl.load(head_of(terms.key, b, h) + col + cols) * rate
    if terms.pair is not None:
        at = (row + rows).to(tl.int64) * terms.pair.q + (col + cols).to(tl.int64) * terms.pair.k
        s += tl.load(head_of(terms.pair, b, h) + at) * rate
    if terms.grid is not None:
        at = tl.load(terms.grid.query_code + row + rows) - tl.load(terms.grid.key_code + col + cols)
        s += tl.load(head_of(terms.grid, b, h) + at) * rate
    return s


@triton.jit
def slope_of(terms, b, h, SPEC: tl.constexpr):
    """Return the slope of a head; None without."""
    slope = None
    # Triton 3.6 cannot ask whether a record is None that has one in it.
    if SPEC.has.terms:  # noqa: SIM102 - `and` would look into terms that are not there
        if terms.slope is not None:
            slope = tl.load(head_of(terms.slope, b, h))
    return slope


@triton.jit
def add_slope(s, steep, own, first, SPEC: tl.constexpr):
    """Subtract ``steep`` times the distance from scores [own, walked]; the walked side is from ``first`` on.

    The distance is a whole number, exact up to 2^24, so that only its product rounds. It has two parts: what
    all registers of a thread have in common, and a constant of each register. In an mma fragment bits 1 and 2
    of the column and most bits of the row are the thread's, so that registers 8 rows and 8 columns apart
    share a distance.
    """
    OF_REGISTER: tl.constexpr = 72 if SPEC.shift else 0  # bits of the row
    rows, cols = own.rows[:, None], tl.arange(0, s.shape[1])[None, :]
    apart = first - own.first - own.start
    of_thread = apart + (cols & SPEC.shift) - (rows & (127 - OF_REGISTER))
    of_register = (cols & (127 - SPEC.shift)) - (rows & OF_REGISTER)
    return s - tl.abs(of_thread.to(tl.float32) + of_register.to(tl.float32)) * steep


@triton.jit
def read(at, SPEC: tl.constexpr):
    """Load float32 numbers by pointers, in the layout of whoever uses them.

    tl.load would take neighbours in one thread, then bring them to that layout through shared memory.
    """
    if SPEC.ptx:
        x = tl.inline_asm_elementwise(
            "ld.global.f32 $0, [$1];", "=f,l", [at.to(tl.int64)], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        x = tl.load(at)
    return x


@triton.jit
def inside(first, rows, length):
    """Return rows, those past the length replaced by the last one, if ``first + rows`` are their numbers."""
    return tl.minimum(rows, length - 1 - first)


@triton.jit
def keep_words(drop, b, h, rows, start, first, j, COLS: tl.constexpr, SPEC: tl.constexpr):
    """Say which pairs of rows [R] and the COLS keys from ``first`` on survive dropout: a bit for each.

    The rows stand at position ``rows + start``, and ``first`` is a position, of the walked tile j. Four keys
    share the words of one Philox block. One thread computes the blocks of a word: words are few enough to be
    brought to the layout of a product.

    Returns:
        A tuple of words [R], int32: key c has bit c % 32 of the word at c // 32.
    """
    R: tl.constexpr = rows.shape[0]
    WIDTH: tl.constexpr = 32 if COLS > 32 else COLS
    groups = (tl.arange(0, COLS // WIDTH) * (WIDTH // 4))[None, None, :]
    start, first = _changing(start, j, SPEC), _changing(first, j, SPEC)
    row = (rows + start)[None, :, None]
    h, b = _counted(drop, h, b)
    bits = row * 0 + groups * 0
    if SPEC.ptx:
        for n in tl.static_range(WIDTH // 4):
            w0, w1, w2, w3 = _encrypt(drop.seed, first // 4 + groups + n, row, h, b)
            bits = _add_bit(bits, w0, drop.above, 1 << (4 * n))
            bits = _add_bit(bits, w1, drop.above, 2 << (4 * n))
            bits = _add_bit(bits, w2, drop.above, 4 << (4 * n))
            bits = _add_bit(bits, w3, drop.above, 8 << (4 * n) if n < 7 else -(1 << 31))
    else:  # the interpreter's time goes by operations, not by the numbers in them
        n = tl.arange(0, WIDTH // 4)[:, None, None]
        words = _encrypt(drop.seed, first // 4 + groups + n, row, h, b)
        for lane in tl.static_range(4):
            bits |= (words[lane] > drop.above.to(tl.uint32)).to(tl.int32) << (4 * n + lane)
    # A sum of one number each. Triton cannot infer a layout for it from that of the product; it would repeat
    # all of the above in every thread that reads a word.
    words = tl.sum(bits, 0)
    if COLS == 64:
        parts = tl.split(words)
    elif COLS <= 32:
        parts = (tl.reshape(words, [R]),)
    else:
        even, odd = tl.split(tl.reshape(words, [R, 2, 2]))
        w0, w2 = tl.split(even)
        w1, w3 = tl.split(odd)
        parts = (w0, w1, w2, w3)
    return parts


@triton.jit
def _encrypt(seed, c0, c1, c2, c3):
    """Encrypt a counter by Philox4x32-7: four uint32 of shapes that broadcast.

    tl.philox takes two instructions for the halves of a product.
    """
    k0, k1 = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c0, c1 = c0.to(tl.uint32, bitcast=True), c1.to(tl.uint32, bitcast=True)
    c2, c3 = c2.to(tl.uint32), c3.to(tl.uint32)
    for _ in tl.static_range(7):
        left, right = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0, c2 = (right >> 32).to(tl.uint32) ^ c1 ^ k0, (left >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = right.to(tl.uint32), left.to(tl.uint32)
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def _changing(x, j, SPEC: tl.constexpr):
    """Return the number x, which does not depend on the j of a loop, as if it did.

    What follows from x stays in the loop then. Moved out of it, it takes more registers than there are.
    """
    if SPEC.ptx:
        x = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r,r", [x, j], dtype=tl.int32, is_pure=True, pack=1
        )
    return x


@triton.jit
def _add_bit(bits, word, above, BIT: tl.constexpr):
    """Return bits, BIT among them where a word is greater than ``above``."""
    return tl.inline_asm_elementwise(
        "{.reg .pred p; .reg .b32 t; mov.b32 t, $1; setp.gt.u32 p, $2, $3; @p or.b32 t, t, $4;"
        "mov.b32 $0, t;}",
        "=r,r,r,r,r",
        [bits, word, above, BIT],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def drop_pairs(x, words, keys, AXIS: tl.constexpr, SHIFT: tl.constexpr, SPEC: tl.constexpr):
    """Return x of the pairs that are kept, and 0 elsewhere.

    ``words`` come from keep_words, ``keys`` are the numbers of the keys in the tile, [1, COLS] or [COLS, 1]
    as they lie in x, whose rows are along the other axis, AXIS; SHIFT is as in ``tile.pattern_words``.
    """
    at = keys & SHIFT
    w = tl.expand_dims(words[0], 1 - AXIS) >> at
    for group in tl.static_range(1, len(words)):
        w = tl.where(keys < 32 * group, w, tl.expand_dims(words[group], 1 - AXIS) >> at)
    bit = tl.broadcast_to(1 << (keys & (31 - SHIFT)), x.shape)
    return select(x, tl.broadcast_to(w, x.shape), bit, 0.0, SPEC)


@triton.jit
def keep_pairs(drop, b, h, row, key):
    """Say which pairs survive dropout, given by number: tensors that broadcast."""
    if drop.keys is not None:
        position, key = tl.load(drop.queries + row), tl.load(drop.keys + key)
    else:
        position = row + drop.q_start
    h, b = _counted(drop, h, b)
    w0, w1, w2, w3 = tl.philox(drop.seed, key >> 2, position, h, b, n_rounds=7)
    lane = key & 3
    word = tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3))
    return word > drop.above.to(tl.uint32)


@triton.jit
def _counted(drop, h, b):
    """Return head and batch as dropout counts them, in the whole of which the call is a part."""
    if drop.first_head is not None:
        h, b = h + drop.first_head, b + drop.first_batch
    return h, b


class Dropout(NamedTuple):
    """Dropout as kernels take it."""

    seed: Tensor | None = None  # int64 [1], read on the device
    above: int | None = None  # threshold - 1 as a signed 32-bit number: greater words are kept
    q_start: int | None = None  # position of the first row
    regrow: float | None = None  # factor of what is kept
    # In a part of a larger problem: numbers of its first batch and head, and, for edges, all positions.
    first_batch: int | None = None
    first_head: int | None = None
    queries: Tensor | None = None  # int32 [Q]
    keys: Tensor | None = None  # int32 [K]

    @classmethod
    def of(cls, dropout_p: float, seed: Tensor | None, q_start: int, places: Places = NO_PLACES) -> Dropout:
        """Return the numbers of a probability; all None without dropout or with a threshold of 0."""
        threshold = math.floor(dropout_p * 2**32)
        if not threshold:
            return cls()
        above = threshold - 1
        kept = 1 - dropout_p
        signed = above - 2**32 if above >= 2**31 else above
        regrow = 1 / kept if kept else 1.0
        firsts = places.first_batch, places.first_head
        return cls(seed, signed, q_start, regrow, *firsts, places.queries, places.keys)


NO_DROPOUT = Dropout()
