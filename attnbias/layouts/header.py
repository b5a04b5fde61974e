"""The header of a layout: its sizes, and where each field lies in the buffer.

No other Python file computes an offset; ``ab_where`` in csrc/layout/layout.h repeats the order of the fields.

To add a field, in the same place of the order each time:

1. here: :class:`Fields`, :attr:`Header.shapes`, and a new ``VERSION`` (saved layouts become unreadable);
2. ``record.Record``, and the table of ``layout.Layout``;
3. the builders: ``fill.fill`` and its callers in ``host.py``, ``device.py`` and ``levels.py``; for C++
   ``ab_where`` (csrc/layout/layout.h) and ``Plan::fill`` (csrc/layout/layout.cpp);
4. ``ab_layout`` in csrc/attnbias.h, before ``levels``, whether or not a kernel reads it, with a new
   ``AB_ABI_VERSION`` there and ``ABI_VERSION`` in ``attnbias/native.py``;
5. ``validate.py``, with a row in ``DAMAGES`` of tests/layouts/test_storage.py. The tests that compare the
   builders read the names of the fields from here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..sets.intervals import Ints
from ..sets.levels import Levels

VERSION = 1
MOST_ENTRIES = 1 << 31  # of a buffer; offsets and pointers are int32
_ALIGNMENT = 4  # int32 entries: every field starts at a multiple of 16 bytes

T = TypeVar("T")
S = TypeVar("S")
Buffer = TypeVar("Buffer", Tensor, NDArray[np.int32])


@dataclass
class Fields(Generic[T]):
    """One value per field, in the order of the buffer; see :class:`attnbias.Layout` for what each holds."""

    group: T
    q_ptr: T
    q_tile: T
    q_mark: T
    k_ptr: T
    k_tile: T
    k_mark: T
    patterns: T
    patterns_t: T
    q_order: T
    k_order: T
    edge_ptr: T
    edge_key: T
    edge_id: T
    col_ptr: T
    col_query: T
    col_edge: T

    def __iter__(self) -> Iterator[T]:
        return iter(self.__dict__.values())

    def map(self, function: Callable[[T], S]) -> Fields[S]:
        """Return what a function makes of each value."""
        return Fields(*map(function, self))


FIELDS: tuple[str, ...] = tuple(Fields.__dataclass_fields__)


@dataclass  # not frozen: that takes longer to make, and one is made for every new graph
class Header:
    """The sizes of a layout, in the order of ``where``; after them ``where`` holds an offset per field."""

    version: int
    q_len: int
    k_len: int
    q_start: int
    batch: int
    heads: int
    groups: int
    tile: int
    classes: int  # of tiles: 2, or one more than the depths of a multi-level score
    tiles: int
    patterns_count: int
    edges: int
    tail: tuple[int, ...] = ()  # widths and prefixes of the levels, which end ``where``

    def check(self, q_len: int, k_len: int, batch: int, heads: int) -> None:
        """Raise ValueError unless the layout fits tensors of these sizes."""
        if self.q_len != q_len or self.k_len != k_len:
            raise ValueError(
                f"relation: this layout is for {self.q_len} queries and {self.k_len} keys, "
                f"query and key have {q_len} and {k_len}"
            )
        for name, own, theirs in (("batch", self.batch, batch), ("heads", self.heads, heads)):
            if own not in (1, theirs):
                raise ValueError(f"relation: this layout has {name} {own}, query has {theirs}")

    @classmethod
    def read(cls, where: Tensor) -> Header:
        """Read ``where``; nothing is checked."""
        numbers = where.tolist()
        return cls(**dict(zip(SIZES, numbers, strict=False)), tail=tuple(numbers[FIXED:]))

    @classmethod
    def of(
        cls,
        q_len: int,
        k_len: int,
        q_start: int,
        group: Tensor | Ints,
        groups: int,
        tile: int,
        *,
        tiles: int,
        patterns_count: int,
        edges: int,
    ) -> Header:
        """Return the header of a layout of two classes; raise ValueError if its buffer is too large."""
        sizes = (*group.shape, groups, tile, 2, tiles, patterns_count, edges)
        header = cls(VERSION, q_len, k_len, q_start, *sizes)
        if header.length >= MOST_ENTRIES:
            raise ValueError(
                f"relation: a layout of {header.length} entries at {q_len} x {k_len}; "
                "fewer than 2^31 are possible"
            )
        return header

    def write(self) -> Tensor:
        """Return ``where``."""
        return torch.from_numpy(np.array([*self.sizes.values(), *self.offsets, *self.tail], np.int64))

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes by name, in the order of ``where``."""
        return {name: getattr(self, name) for name in SIZES}

    @property
    def levels(self) -> Levels | None:
        """The levels of the multi-level score that the layout is for."""
        if self.classes == 2:
            return None
        count = self.classes - 2
        return Levels(self.tail[:count], self.tail[count:])

    @property
    def q_tiles(self) -> int:
        """Query tiles in a group."""
        return -(-self.q_len // self.tile)

    @property
    def k_tiles(self) -> int:
        """Key tiles in a group."""
        return -(-self.k_len // self.tile)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every field, in the order of the buffer."""
        groups, tile, bounds = self.groups, self.tile, self.classes + 1
        listed, words = (self.tiles + 1,), (self.patterns_count, tile, tile // 32)
        edges, some = (self.edges,), 1 if self.edges else 0
        return {
            "group": (self.batch, self.heads),
            "q_ptr": (groups, self.q_tiles, bounds),
            "q_tile": listed,
            "q_mark": listed,
            "k_ptr": (groups, self.k_tiles, bounds),
            "k_tile": listed,
            "k_mark": listed,
            "patterns": words,
            "patterns_t": words,
            "q_order": (groups * self.q_tiles,),
            "k_order": (groups * self.k_tiles,),
            "edge_ptr": (some * (groups * self.q_len + 1),),
            "edge_key": edges,
            "edge_id": edges,
            "col_ptr": (some * (groups * self.k_len + 1),),
            "col_query": edges,
            "col_edge": edges,
        }

    @cached_property
    def _ends(self) -> list[int]:
        """The first offset, 0, and the aligned end of each field."""
        ends = [0]
        for shape in self.shapes.values():
            ends.append(ends[-1] + -(-math.prod(shape) // _ALIGNMENT) * _ALIGNMENT)
        return ends

    @property
    def offsets(self) -> list[int]:
        """The first entry of each field in the buffer."""
        return self._ends[:-1]

    @property
    def length(self) -> int:
        """Entries of the buffer."""
        return self._ends[-1]

    def view(self, buffer: Buffer) -> Fields[Buffer]:
        """Return the fields of a buffer, as views."""
        places = zip(self.offsets, self.shapes.values(), strict=True)
        return Fields(*[buffer[at : at + math.prod(shape)].reshape(shape) for at, shape in places])


SIZES = tuple(Header.__dataclass_fields__)[:-1]
FIXED = len(SIZES) + len(FIELDS)  # entries of ``where`` in every layout: sizes and offsets


def tile_lengths(length: int, tile: int) -> Ints:
    """Return how many tokens each tile of a side has: only the last may be short.

    Example:
        >>> tile_lengths(130, 64)
        array([64, 64,  2])
    """
    return np.diff(np.append(np.arange(0, length, tile), length))
