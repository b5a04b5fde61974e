"""Keys up to a length of their own in each batch: prefixes and padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..arguments import as_count, as_indices, check_dense
from ..layouts.outline import Fault, Grid, Outline, outline_key_mask, outline_keys_before
from ..sets.bound import MOST_PER_ROW, Bound, Place
from ..sets.intervals import Intervals
from .patterns import ranges
from .relation import Relation
from .tables import distinct_rows, look_up
from .value import show


class Prefix(Relation):
    """Keys before ``length``, for every query.

    Args:
        length: an integer, or one per batch [B].

    Example:
        >>> import attnbias as ab
        >>> print((Prefix(2) | ab.Causal()).picture(4))
        ##..
        ##..
        ###.
        ####
    """

    length: int | Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "length", as_lengths("length", self.length))
        super().__post_init__()

    @property
    def batch_size(self) -> int:
        return 1 if isinstance(self.length, int) else len(self.length)

    def related(self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        return _are_before(self.length, q, k, b)

    def _bind(self, at: Place) -> Bound:
        return (
            ranges(at, at.k_start, self.length)
            if isinstance(self.length, int)
            else _key_ranges(at, self.length)
        )

    def _outline(self, at: Place, tile: int) -> Outline | None:
        if isinstance(self.length, int):
            return super()._outline(at, tile)
        return _outline_before("length", self.length, Grid.of(at, tile))


class Padding(Relation):
    """Keys before each batch's length: what a padded batch may attend to.

    Args:
        lengths: number of real keys in each batch, [B].

    Example:
        >>> print(Padding([2, 4]).picture(1, 4, batch=0))
        ##..
    """

    lengths_: Tensor | None = None
    mask: Tensor | None = None

    def __init__(self, lengths: Sequence[int] | Tensor, *, mask: Tensor | None = None) -> None:
        if mask is None and isinstance(lengths, int | np.integer):
            raise TypeError(f"lengths: wanted one per batch, got {lengths!r}")
        object.__setattr__(self, "lengths_", as_lengths("lengths", lengths) if mask is None else None)
        object.__setattr__(self, "mask", mask)
        self.__post_init__()

    @classmethod
    def from_mask(cls, mask: Tensor) -> Padding:
        """Make it from booleans [B, K], True at real keys, which may stand anywhere (left padding too)."""
        mask = mask if isinstance(mask, Tensor) else torch.as_tensor(mask, device="cpu")
        check_dense("mask", mask)
        if mask.dtype != torch.bool or mask.dim() != 2:
            raise ValueError(f"mask: wanted booleans [batch, keys], got {mask.dtype} {list(mask.shape)}")
        return cls((), mask=mask.detach().clone())

    @property
    def batch_size(self) -> int:
        return next(len(data) for data in (self.lengths_, self.mask) if data is not None)

    @property
    def lengths(self) -> tuple[None, int | None]:
        return None, None if self.mask is None else self.mask.shape[1]

    def related(self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        if self.mask is not None:
            return (look_up(self.mask.long(), k, b, 0) > 0) & torch.ones_like(q, dtype=torch.bool)
        assert self.lengths_ is not None
        return _are_before(self.lengths_, q, k, b)

    def _bind(self, at: Place) -> Bound:
        if self.lengths_ is not None:
            return _key_ranges(at, self.lengths_)
        assert self.mask is not None
        # Every query sees the same keys: the runs of real keys, once per batch.
        host, group = distinct_rows(self.mask.long())
        runs = Intervals.from_dense(host > 0, 1, group[:, None], MOST_PER_ROW)
        if runs is None:
            return super()._bind(at)
        return Bound(runs.take_rows(np.repeat(np.arange(len(host)), at.q_len), at.q_len))

    def _outline(self, at: Place, tile: int) -> Outline:
        grid = Grid.of(at, tile)
        if self.lengths_ is not None:
            return _outline_before("lengths", self.lengths_, grid)
        assert self.mask is not None
        return outline_key_mask(self.mask.to(grid.device), grid)

    def __repr__(self) -> str:
        return super().__repr__() if self.mask is None else f"Padding.from_mask({show(self.mask)})"


def as_lengths(name: str, length: Any) -> int | Tensor:
    """Return a length, or a private tensor of one per batch."""
    if isinstance(length, int | np.integer):
        return as_count(name, length)
    lengths = as_indices(name, length, (1,))
    if not len(lengths):
        raise ValueError(f"{name}: wanted at least one length, got none")
    if lengths.device.type == "cpu" and not torch.compiler.is_compiling():  # else when they are laid out
        _check_lengths(name, int(lengths.min()))
    return lengths


def _check_lengths(name: str, least: int) -> None:
    if least < 0:
        raise ValueError(f"{name}: wanted 0 or more, got {least}")


def _are_before(length: int | Tensor, q: Tensor, k: Tensor, b: Tensor | None) -> Tensor:
    """Return whether keys come before the length of their batch."""
    if isinstance(length, Tensor):
        length = length.to(q.device)
        length = length[0] if b is None else length[b.clamp(max=len(length) - 1)]
    return k < length + torch.zeros_like(q)


def _outline_before(name: str, length: Tensor, grid: Grid) -> Outline:
    """Return the tiles of the keys below a length per batch."""
    length = length.to(grid.device)
    fault = Fault((length < 0).any(), f"{name}: wanted 0 or more, got less")
    return outline_keys_before(length, grid)._replace(faults=(fault,))


def _key_ranges(at: Place, length: Tensor) -> Bound:
    """Return the keys below a length per batch; equal lengths are held once."""
    host, group = np.unique(length.cpu().numpy(), return_inverse=True)
    _check_lengths("lengths", int(host.min()))
    stop = np.repeat(host[:, None] - at.k_start, at.q_len, 1)
    form = Intervals.one_per_row(at.q_len, at.k_len, np.zeros_like(stop), stop)
    return Bound(replace(form, group=group[:, None]))
