"""Global memory: the memory of this process, where a device address is a host address.

Nothing is copied. A launch maps the buffers it may touch; every access is checked for alignment and
against them before it happens.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from .values import RAW, Array


class OutOfBounds(IndexError):
    """An access outside the mapped buffers, or misaligned."""


class Elements(NamedTuple):
    """The only bytes of a buffer that may be touched: those of a strided tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes
    item: int  # bytes


class Buffer(NamedTuple):
    start: int
    stop: int
    owner: object  # kept alive
    elements: Elements | None


class Memory:
    """The buffers that may be touched."""

    def __init__(self) -> None:
        self._buffers: list[Buffer] = []
        self._arrays: dict[int, Array] = {}
        self._seen: Mapped | None = None

    def map(self, address: int, size: int, owner: object = None, elements: Elements | None = None) -> int:
        """Make ``size`` bytes accessible and return their address."""
        if size:
            self._buffers.append(Buffer(address, address + size, owner, elements))
            self._seen = None
        return address

    def put(self, array: Array) -> int:
        """Copy an array into a new buffer and return its address."""
        array = np.ascontiguousarray(array)
        room = np.zeros(array.nbytes + 512, np.uint8)
        start = -room.ctypes.data % 256
        copy = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        copy[...] = array
        self._arrays[copy.ctypes.data] = copy
        return self.map(copy.ctypes.data, max(array.nbytes, 1), room)

    def get(self, address: int) -> Array:
        """Return the array that was put there, as the kernel left it."""
        return self._arrays[address]

    @property
    def mapped(self) -> Mapped:
        """Return all buffers as one; rebuilt after a new one is mapped."""
        if self._seen is None:
            if not self._buffers:
                self.put(np.zeros(1, np.uint8))
            self._seen = Mapped(tuple(self._buffers))
        return self._seen


@dataclass(eq=False)
class Mapped:
    """One numpy view that spans all buffers and the gaps between them.

    It is only ever indexed with offsets that passed ``check``; no function that may copy an operand, such as
    ``ufunc.at``, may see it.
    """

    buffers: tuple[Buffer, ...]

    def __post_init__(self) -> None:
        spans: list[list[int]] = []
        for start, stop, _, _ in sorted(self.buffers, key=lambda buffer: buffer[:2]):
            if spans and start < spans[-1][1]:
                spans[-1][1] = max(stop, spans[-1][1])
            else:
                spans.append([start, stop])
        # On the page of a live byte, because inactive lanes read there.
        self.base = spans[0][0] & ~255
        self.starts = [start - self.base for start, _ in spans]
        self.stops = [stop - self.base for _, stop in spans]
        size = -(-self.stops[-1] // 256) * 256
        where = {"data": (self.base, False), "shape": (size,), "typestr": "|u1", "version": 3}
        whole = np.asarray(SimpleNamespace(__array_interface__=where))
        self.view: dict[int, Array] = {bits: whole.view(kind) for bits, kind in RAW.items() if bits > 1}

    @cached_property
    def allowed(self) -> Array | None:
        """Return whether each byte of the buffers, laid end to end, may be touched; None means all may."""
        if all(buffer.elements is None for buffer in self.buffers):
            return None
        allowed = np.zeros(self.size, bool)
        for start, stop, _, elements in self.buffers:
            shape, strides, item = elements or Elements((stop - start,), (1,), 1)
            part = allowed[int(self.number(np.array([start - self.base]))[0]) :]
            np.lib.stride_tricks.as_strided(part, (*shape, item), (*strides, 1))[...] = True
        return allowed

    @cached_property
    def _first_numbers(self) -> Array:
        sizes = [
            -(-stop // 8) * 8 - (start & ~7) for start, stop in zip(self.starts, self.stops, strict=True)
        ]
        return np.cumsum([0, *sizes])

    @property
    def size(self) -> int:
        """Return the bytes of all buffers together."""
        return int(self._first_numbers[-1])

    def number(self, offsets: Array) -> Array:
        """Return the number of the byte at each checked offset, with the buffers laid end to end."""
        starts = np.array(self.starts, np.int64)
        k = np.searchsorted(starts, offsets, "right") - 1
        return self._first_numbers[k] + offsets - (starts[k] & ~7)

    def check(self, offsets: Array, size: int | Array, alignment: int) -> None:
        """Raise unless ``size`` bytes at each offset from the base may be touched."""
        if offsets.size == 0:
            return
        crooked = offsets & (alignment - 1) != 0
        if crooked.any():
            where = int(offsets[crooked][0]) + self.base
            raise OutOfBounds(f"misaligned global access: {where:#x} needs {alignment}-byte alignment")
        stops = offsets + size
        k = bisect.bisect_right(self.starts, int(offsets.min())) - 1
        if k < 0 or int(stops.max()) > self.stops[k]:
            self._check_each(offsets, stops)
        if self.allowed is not None:
            first = self.number(offsets)
            bad = ~(self.allowed[first] & self.allowed[first + size - 1])
            if bad.any():
                words = "lies between the elements of a view"
                raise OutOfBounds(f"{self._say(offsets[bad], stops[bad])} {words}")

    def _check_each(self, offsets: Array, stops: Array) -> None:
        """Raise unless every access lies in some buffer; they may lie in different ones."""
        starts, ends = np.array(self.starts, np.int64), np.array(self.stops, np.int64)
        k = np.searchsorted(starts, offsets, "right") - 1
        bad = (k < 0) | (stops > ends[np.maximum(k, 0)])
        if bad.any():
            near = max(int(k[bad][0]), 0)
            beyond = int(offsets[bad][0]) - self.stops[near]
            span = f"{self.starts[near] + self.base:#x}..{self.stops[near] + self.base:#x}"
            words = f"nearest buffer {span}, {beyond:+d} bytes from its end"
            raise OutOfBounds(f"{self._say(offsets[bad], stops[bad])}; {words}")

    def _say(self, offsets: Array, stops: Array) -> str:
        size = int(stops[0] - offsets[0])
        where = int(offsets[0]) + self.base
        return f"global access out of bounds: {where:#x} size {size} ({len(offsets)} lanes)"
