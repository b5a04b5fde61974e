"""What a call adds to scores and drops from weights: score terms and dropout. The only copy.

Terms come as parts (see attnbias.terms), each a tuple of a pointer and what it takes to read it, or
None. Kernels are compiled without what is absent.
"""
# Triton gives kernels their types, from the arguments of a launch.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def keep_tile(drop, b, h, rows, first, COLS: tl.constexpr):
    """Say which pairs of rows [R] and the COLS keys from ``first`` on survive dropout: bool [R, COLS].

    Four keys share the words of one Philox block; ``drop`` is (seed, threshold - 1, q_start).
    """
    seed, above, q_start = drop
    blocks = first // 4 + tl.arange(0, COLS // 4)
    w0, w1, w2, w3 = tl.philox(seed, blocks[None, :], (rows + q_start)[:, None], h, b, n_rounds=7)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [R, COLS / 4, 2, 2]
    return tl.reshape(words, [rows.shape[0], COLS]) > above.to(tl.uint32)


@triton.jit
def keep_pairs(drop, b, h, row, key):
    """Say which pairs survive dropout, given by index: tensors that broadcast."""
    seed, above, q_start = drop
    w0, w1, w2, w3 = tl.philox(seed, key >> 2, row + q_start, h, b, n_rounds=7)
    lane = key & 3
    word = tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3))
    return word > above.to(tl.uint32)


class Dropout(NamedTuple):
    """Dropout as the kernels want it."""

    seed: Tensor | None = None  # int64 [1], read on the device
    above: int | None = None  # threshold - 1 as a signed 32-bit number: greater words are kept
    q_start: int | None = None  # position of the first row
    regrow: float | None = None  # factor of what is kept

    @classmethod
    def of(cls, dropout_p: float, seed: Tensor | None, q_start: int) -> Dropout:
        """Without dropout, and where its threshold is 0, all are None."""
        threshold = math.floor(dropout_p * 2**32)
        if not threshold:
            return cls()
        above = threshold - 1
        kept = 1 - dropout_p
        return cls(seed, above - 2**32 if above >= 2**31 else above, q_start, 1 / kept if kept else 1.0)


NO_DROPOUT = Dropout()


class Extras(NamedTuple):
    """What a call has besides queries, keys and values."""

    dropout: Dropout = NO_DROPOUT

    def arguments(self) -> tuple[Any, ...]:
        """What every kernel over tiles takes, in its order."""
        return tuple(self.dropout)

    @property
    def present(self) -> dict[str, bool]:
        """Of Spec."""
        return {"has_dropout": self.dropout.seed is not None}


PLAIN = Extras()
