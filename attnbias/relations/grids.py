"""Neighbourhoods on 1-, 2- and 3-dimensional grids of tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from torch import Tensor

from ..arguments import as_count
from ..sets.bound import Bound, Place
from ..sets.intervals import Ints, ceil_div
from .relation import Relation


class Neighborhood(Relation):
    """Tokens of a grid attend to those near them, axis by axis; tokens are numbered row by row.

    Args:
        shape: size of each axis, one to three of them.
        radius: reach along each axis (or one for all): 2 * radius + 1 tokens.
        dilation: step between them.
        causal: along a causal axis only the tokens up to the query's own: radius + 1 of them.
        border: "cut" drops what lies outside the grid; "clamp" moves the window inside, so that every
            query has as many keys (NATTEN's rule, see :meth:`from_kernel`; causal axes are always cut).
        offset: from the query to the middle of its neighbours along each axis (or one for all); with radius 0
            it is one tap of a convolution. It must be 0 where the border is "clamp".

    Example:
        >>> import attnbias as ab
        >>> print(ab.Neighborhood((2, 3), radius=(0, 1)).picture(6, 6))
        ##....
        ###...
        .##...
        ...##.
        ...###
        ....##
        >>> print(ab.Neighborhood((2, 3), radius=0, offset=(0, 1)).picture(6, 6))
        .#....
        ..#...
        ......
        ....#.
        .....#
        ......
    """

    shape: Sequence[int]
    radius: int | Sequence[int]
    dilation: int | Sequence[int] = 1
    causal: bool | Sequence[bool] = False
    border: str = "cut"
    offset: int | Sequence[int] = 0

    def __post_init__(self) -> None:
        shape = self.shape if isinstance(self.shape, Sequence) else (self.shape,)
        if not 1 <= len(shape) <= 3:
            raise ValueError(f"shape: wanted one to three axes, got {self.shape!r}")
        axes = len(shape)
        object.__setattr__(self, "shape", tuple(as_count("shape", n, 1) for n in shape))
        for name, least in (("radius", 0), ("dilation", 1), ("offset", -(2**31))):
            each = tuple(as_count(name, n, least) for n in _per_axis(name, getattr(self, name), axes))
            object.__setattr__(self, name, each)
        if not any(self._offsets):
            object.__setattr__(self, "offset", 0)  # as if it was not given
        causal = tuple(bool(c) for c in _per_axis("causal", self.causal, axes))
        object.__setattr__(self, "causal", causal)
        if self.border not in ("cut", "clamp"):
            raise ValueError(f"border: wanted 'cut' or 'clamp', got {self.border!r}")
        as_count("shape", self.lengths[0])
        if self.border == "clamp" and self.offset != 0:
            raise ValueError(f"offset: wanted 0 with border='clamp', got {self.offset!r}")
        for n, r, d, c, _ in self._axes():
            if self.border == "clamp" and not c and (2 * r + 1) * d > n:
                raise ValueError(
                    f"radius: border='clamp' wants (2 * radius + 1) * dilation <= {n} tokens "
                    f"of the axis, got {(2 * r + 1) * d}"
                )
        super().__post_init__()

    @classmethod
    def from_kernel(
        cls,
        shape: Sequence[int],
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        dilation: int | Sequence[int] = 1,
        is_causal: bool | Sequence[bool] = False,
    ) -> Neighborhood:
        """Make the neighbourhood of NATTEN's arguments.

        Args:
            shape: size of each axis.
            kernel_size: tokens of the window along each axis, the query's own included; odd along axes that
                are not causal.
            stride: must be 1.
            dilation: step between them.
            is_causal: along a causal axis the window ends at the query.

        Raises:
            ValueError: for an even window around its query, and for windows that queries share (stride).

        Example:
            >>> import attnbias as ab
            >>> ab.Neighborhood.from_kernel((8, 9), kernel_size=(4, 3), is_causal=(True, False))
            Neighborhood(shape=[8, 9], radius=[3, 1], dilation=[1, 1], causal=[True, False], border='clamp')
        """
        axes = len(shape) if isinstance(shape, Sequence) else 1
        if any(step != 1 for step in _per_axis("stride", stride, axes)):
            raise ValueError(f"stride: wanted 1, windows that queries share are not offered, got {stride!r}")
        sizes = [as_count("kernel_size", n, 1) for n in _per_axis("kernel_size", kernel_size, axes)]
        causal = _per_axis("is_causal", is_causal, axes)
        if any(n % 2 == 0 and not c for n, c in zip(sizes, causal, strict=True)):
            raise ValueError(
                f"kernel_size: wanted odd numbers along axes that are not causal, got {kernel_size!r}"
            )
        radius = [n - 1 if c else n // 2 for n, c in zip(sizes, causal, strict=True)]
        return cls(shape, radius, dilation, causal, "clamp")

    @property
    def _offsets(self) -> tuple[int, ...]:
        return _per_axis("offset", self.offset, len(self.shape))

    def _axes(self) -> list[tuple[int, int, int, bool, int]]:
        each: Any = (self.shape, self.radius, self.dilation, self.causal, self._offsets)
        return list(zip(*each, strict=True))

    @property
    def lengths(self) -> tuple[int, int]:
        tokens = math.prod(self.shape)
        return tokens, tokens

    def _first_step(self, x: Any, n: int, r: int, d: int, causal: bool) -> Any:
        """Return the place of the first token around x among those of x's own dilation class, ``x % d``."""
        first = x // d - r
        if self.border == "clamp" and not causal:
            last = ceil_div(n - x % d, d) - (2 * r + 1)
            first = first.clip(0)
            first = first - (first - last).clip(0)  # the smaller one, of arrays and of tensors
        return first

    def related(self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        tokens = self.lengths[0]
        near = (q >= 0) & (q < tokens) & (k >= 0) & (k < tokens)
        block = tokens
        for n, r, d, causal, offset in self._axes():
            block //= n
            x, y = q // block % n, k // block % n
            middle = x + offset
            step = y // d - self._first_step(middle, n, r, d, causal)
            near = near & (y % d == middle % d) & (step >= 0) & (step <= 2 * r)
            if causal:
                near = near & (y <= x)
        return near

    def _axis_table(self, n: int, r: int, d: int, causal: bool, offset: int) -> Ints:
        """Return the related coordinates of each coordinate, [n, at most 2 r + 1], -1 where there is none."""
        x = np.arange(n)[:, None]
        middle = x + offset
        first = self._first_step(middle, n, r, d, causal)
        begin, end = first.clip(0), (first + 2 * r).clip(max=(n - 1 - middle % d) // d) + 1  # on the axis
        steps = begin + np.arange(max(int((end - begin).max()), 1))
        y = steps * d + middle % d
        exists = (steps < end) & ((y <= x) | (not causal))
        return np.where(exists, y, -1)

    def _bind(self, at: Place) -> Bound:
        return at.in_steps(self._bind_some)

    def _bind_some(self, at: Place) -> Bound:
        *outer, last = self._axes()
        lead = np.zeros((at.q_len, 1), np.int64)  # number of the grid's line, per outer neighbour
        alive = np.ones((at.q_len, 1), bool)
        block = self.lengths[0]
        for axis in outer:
            block //= axis[0]
            near = self._axis_table(*axis)[at.positions // block % axis[0]]  # [q_len, w]
            width = lead.shape[1] * near.shape[1]
            lead = (lead[:, :, None] * axis[0] + near[:, None, :]).reshape(at.q_len, width)
            alive = (alive[:, :, None] & (near >= 0)[:, None, :]).reshape(at.q_len, width)
        n = last[0]
        near = self._axis_table(*last)[at.positions % n]  # [q_len, w]
        row = np.broadcast_to(np.arange(at.q_len)[:, None], lead.shape)[alive]
        lead = lead[alive]
        if last[2] == 1:  # a run of neighbours along the last axis is a range
            exists = near >= 0
            start = np.where(exists, near, n).min(1)
            stop = np.where(exists, near, -1).max(1) + 1
            some = start[row] < stop[row]
            row, lead = row[some], lead[some]
            return at.bind_ranges(row, lead * n + start[row], lead * n + stop[row])
        key = lead[:, None] * n + near[row]
        exists = near[row] >= 0
        return at.bind_pairs(np.broadcast_to(row[:, None], key.shape)[exists], key[exists])

    @property
    def _symmetric(self) -> bool:
        return self._turns_with_offset and self.offset == 0

    @property
    def _turns_with_offset(self) -> bool:
        """Whether the reverse relation is the one of the opposite offset."""
        return self.border == "cut" and not any(cast(Sequence[bool], self.causal))

    @property
    def T(self) -> Relation:
        if self._symmetric or not self._turns_with_offset:
            return super().T
        back = tuple(-each for each in self._offsets)
        return Neighborhood(self.shape, self.radius, self.dilation, self.causal, self.border, back)


def _per_axis(name: str, given: Any, axes: int) -> tuple[Any, ...]:
    each = tuple(given) if isinstance(given, Sequence) else (given,) * axes
    if len(each) != axes:
        raise ValueError(f"{name}: wanted one for each of {axes} axes, got {given!r}")
    return each
