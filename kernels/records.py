"""Records that kernels take as arguments: Triton passes a NamedTuple on field by field.

Two things do not go into a record, in Triton 3.6 to 3.9. A whole number that follows from lengths or counts:
``do_not_specialize`` does not reach into records, so that 1 and each multiple of 16 would compile a kernel
of their own. And a TMA descriptor: the launcher looks for them among the arguments only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class Strided(NamedTuple):
    """A tensor [B, H, L, D] whose last dimension is dense, and where a kernel finds its rows.

    A kernel reads row n of batch i and head j at ``ptr + i * b + j * h + n * at``.
    """

    ptr: Any  # the tensor; in a kernel its pointer
    b: int  # stride of the batch, in elements, as the others
    h: int  # of the head
    at: int  # of the position

    @classmethod
    def of(cls, x: Tensor) -> Strided:
        """Return a tensor with its strides."""
        b, h, at, _ = x.stride()
        return cls(x, b, h, at)


class Lists(NamedTuple):
    """The tiles of one side of a layout; see attnbias.Layout for the fields."""

    group: Tensor  # int32 [1 or B, 1 or H]
    ptr: Tensor  # int32 [G, tiles, 3]; with L levels [G, tiles, L + 3]
    tile: Tensor  # int32 [n + 1]
    mark: Tensor  # int32 [n + 1]
    patterns: Tensor  # int32 [P, size, size / 32]
    order: Tensor  # int32 [G * tiles]
    size: int  # of a tile

    @property
    def numbers(self) -> dict[str, int]:
        """Whole numbers that a kernel takes as well; their values do not cause a recompilation."""
        batch, heads = self.group.shape
        groups, tiles, _ = self.ptr.shape
        return {
            "group_b": heads if batch > 1 else 0,
            "group_h": 1 if heads > 1 else 0,
            "list_tiles": tiles,
            "is_ordered": int(groups == 1),
        }


class Pieces(NamedTuple):
    """The results of parts of lists, float32, a slot for each part of a list; None for what is not made."""

    d: Tensor | None = None  # [slots, rows of a tile, D]
    e: Tensor | None = None  # [slots, rows, E]
    lse2: Tensor | None = None  # [slots, rows]
    row_max: Tensor | None = None  # [slots, rows]


class Places(NamedTuple):
    """Where a call stands in a larger problem of which it is a part; all None without one."""

    queries: Tensor | None = None  # int32 [Q]: position of each row
    keys: Tensor | None = None  # int32 [K]: position of each key
    q_len: int | None = None  # lengths of the whole; with positions
    k_len: int | None = None
    first_batch: int | None = None  # numbers in the whole, which dropout counts
    first_head: int | None = None


NO_PLACES = Places()


def round_up(n: int, step: int) -> int:
    """Return the least multiple of step from n on. (``triton.cdiv`` takes microseconds.)"""
    return -(-n // step) * step
