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
from .tile import head_of


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
def read(at, SPEC: tl.constexpr):
    """Load float32 numbers by pointers, in the layout of whoever uses them.

    tl.load would take neighbours in one thread and bring them to the layout of a product through shared memory.
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
def keep_tile(drop, b, h, rows, start, first, COLS: tl.constexpr):
    """Say which pairs of rows [R] and the COLS keys from ``first`` on survive dropout: bool [R, COLS].

    The rows stand at position ``rows + start``, and ``first`` is a position. Four keys share the words of
    one Philox block.
    """
    blocks = first // 4 + tl.arange(0, COLS // 4)
    h, b = _counted(drop, h, b)
    w0, w1, w2, w3 = tl.philox(drop.seed, blocks[None, :], (rows + start)[:, None], h, b, n_rounds=7)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [R, COLS / 4, 2, 2]
    return tl.reshape(words, [rows.shape[0], COLS]) > drop.above.to(tl.uint32)


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
