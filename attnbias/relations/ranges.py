"""Ranges of keys as data: one or several for each query."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..arguments import as_count, as_indices
from ..layouts.outline import Fault, Grid, Outline, outline_ranges
from ..sets.bound import Bound, Place
from ..sets.intervals import Intervals, count_groups, make_groups
from ..sets.predicate import Predicate
from . import range_forms
from .relation import Relation
from .tables import find_rows


class Ranges(Relation):
    """Keys from ``start`` up to, not including, ``stop``, given for each query as data.

    A query with several ranges attends to their union: ranges may overlap, touch and stand in any order,
    and a key in two of them counts once. A range with ``start == stop`` is empty; fill up rows that have
    fewer ranges with those. Query row ``i`` is the query at position ``i``.

    Args:
        start: first key of each range, [Q], [Q, n], [B, Q, n] or [B, H, Q, n].
        stop: one more than its last key, of the same shape.

    Example:
        >>> import attnbias as ab
        >>> print(ab.Ranges([0, 0, 2, 4], [1, 3, 5, 4]).picture(4, 5))
        #....
        ###..
        ..###
        .....
    """

    start: Tensor
    stop: Tensor

    def __post_init__(self) -> None:
        for name in ("start", "stop"):
            object.__setattr__(self, name, as_indices(name, getattr(self, name), (1, 2, 3, 4)))
        if self.start.shape != self.stop.shape:
            raise ValueError(
                f"stop: wanted the shape of start, {list(self.start.shape)}, got {list(self.stop.shape)}"
            )
        object.__setattr__(self, "stop", self.stop.to(self.start.device))
        if self.start.device.type == "cpu" and not torch.compiler.is_compiling():  # else when they are bound
            _check_order(self.start, self.stop)
        super().__post_init__()

    # -- the forms of other libraries -------------------------------------------------------------

    @classmethod
    def from_cudnn(cls, endpoints: Any, batch: int = 1) -> Ranges:
        """Make it from the endpoints of cuDNN's ``flex_attention``.

        Args:
            endpoints: [n, Q] or [H, n, batch * Q], n odd. A query sees the keys before ``F[0]``, those from
                ``F[1]`` up to ``F[2]``, from ``F[3]`` up to ``F[4]``, and so on.
            batch: sequences that follow one another along the last dimension.

        Example:
            >>> import attnbias as ab
            >>> print(ab.Ranges.from_cudnn([[1, 1, 1], [1, 2, 3], [1, 3, 4]]).picture(3, 4))
            #...
            #.#.
            #..#
        """
        return cls(*range_forms.from_cudnn(endpoints, batch))

    def to_cudnn(self, k_len: int) -> Tensor:
        """Return the endpoints for cuDNN's ``flex_attention``, int32 [H, n, B * Q]."""
        return range_forms.to_cudnn(self._union(k_len))

    @classmethod
    def from_flashmask(
        cls, startend_row_indices: Any, causal: bool = True, q_len: int | None = None
    ) -> Relation:
        """Make the relation of FlashMask's ``startend_row_indices``.

        FlashMask names, for each key, the queries that do *not* see it. With ``causal`` those are the
        queries before the key, and those from the first number on (of 1) or up to the second (of 2).
        Otherwise they are those from the first number on and those before the second (of 2), or two
        ranges (of 4).

        Args:
            startend_row_indices: [K, 1 | 2 | 4], [B, K, ...] or [B, H, K, ...].
            causal: how to read it.
            q_len: number of queries (as many as keys).

        Returns:
            The transpose of a :class:`Ranges`, which holds the queries that see each key.

        Example:
            >>> import attnbias as ab
            >>> print(ab.Ranges.from_flashmask([[2], [2], [4], [4]]).picture(4, 4))
            #...
            ##..
            ..#.
            ..##
        """
        return cls(*range_forms.from_flashmask(startend_row_indices, causal, q_len)).T

    def to_flashmask(self, q_len: int) -> Tensor:
        """Return FlashMask's ``startend_row_indices`` of the transpose, int32 [B, H, K, 4], not causal.

        A row of these ranges is a key there: for a relation,
        ``relation.T.ranges(k_len, q_len).to_flashmask(q_len)``.

        Raises:
            ValueError: if the queries that do not see a key are more than two ranges.
        """
        return range_forms.to_flashmask(self._union(q_len))

    @classmethod
    def from_magi(cls, q_ranges: Any, k_ranges: Any, types: Any, q_len: int | None = None) -> Ranges:
        """Make it from MagiAttention's slices: rectangles of queries and keys, each of a type.

        Args:
            q_ranges: the first query of each slice, and one more than the last, [n, 2].
            k_ranges: the same for keys, [n, 2].
            types: [n]; 0 full, 1 causal (the last query sees up to the last key), 2 inverse causal (the
                first query sees from the first key on), 3 both.
            q_len: number of queries (up to the last one of a slice).

        Example:
            >>> import attnbias as ab
            >>> print(ab.Ranges.from_magi([[0, 2], [2, 4]], [[0, 2], [0, 4]], [1, 0]).picture(4, 4))
            #...
            ##..
            ####
            ####
        """
        return tabulate(range_forms.from_magi(q_ranges, k_ranges, types, q_len))

    def to_magi(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return MagiAttention's ``q_ranges`` [n, 2], ``k_ranges`` [n, 2] and ``types`` [n], int32.

        Neighbouring queries share a slice where each end of their range stays or moves on by one key.

        Raises:
            ValueError: if the ranges differ by batch or head.
        """
        batch, heads = self.batch_size, self.head_count
        if (batch, heads) != (1, 1):
            raise ValueError(f"ranges: wanted one sequence and head, got batch {batch}, heads {heads}")
        return range_forms.to_magi(self._union(int(self.stop.max()) if self.stop.numel() else 0))

    # -- the relation -----------------------------------------------------------------------------

    @property
    def _tables(self) -> tuple[Tensor, Tensor]:
        """Start and stop, [B, H, Q, n]."""
        start, stop = self.start, self.stop
        match start.dim():
            case 1:
                return start[None, None, :, None], stop[None, None, :, None]
            case 2:
                return start[None, None], stop[None, None]
            case 3:
                return start[:, None], stop[:, None]
        return start, stop

    @property
    def batch_size(self) -> int:
        return self._tables[0].shape[0]

    @property
    def head_count(self) -> int:
        return self._tables[0].shape[1]

    @property
    def lengths(self) -> tuple[int, None]:
        return self._tables[0].shape[2], None

    def related(self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        start, stop = (table.to(q.device) for table in self._tables)
        row, exists = find_rows(start.shape[:3], q, b, h)
        inside = torch.zeros_like(exists & (k >= 0))
        if not start.numel():
            return inside
        for low, high in zip(start.flatten(0, 2).unbind(1), stop.flatten(0, 2).unbind(1), strict=True):
            inside = inside | ((k >= low[row]) & (k < high[row]))
        return inside & exists

    def _bind(self, at: Place) -> Bound:
        start, stop = (x[:, :, at.q_start : at.q_start + at.q_len].cpu() for x in self._tables)
        if self.start.device.type != "cpu":
            _check_order(start, stop)
        if not at.is_moved and stop.numel() and int(stop.max()) > at.k_len:
            raise ValueError(f"stop: wanted at most k_len = {at.k_len}, got {int(stop.max())}")
        group = make_groups(self.batch_size, self.head_count)
        if not group.size:
            return Bound(Intervals.empty(at.q_len, at.k_len, group))
        if start.shape[3] == 1:
            low, high = (x.numpy().reshape(-1) - at.k_start for x in (start, stop))
            form = Intervals.one_per_row(at.q_len, at.k_len, low, high)
            return Bound(form.take_groups(group, np.arange(group.size)))
        row = np.repeat(np.arange(group.size * at.q_len), start.shape[3])
        return at.bind_ranges(row, start.reshape(-1).numpy(), stop.reshape(-1).numpy(), group)

    def _outline(self, at: Place, tile: int) -> Outline:
        grid = Grid.of(at, tile)
        start, stop = (x.to(grid.device) for x in self._tables)
        rows = torch.arange(at.q_start, at.q_start + at.q_len, device=grid.device)
        exists = ((rows >= 0) & (rows < start.shape[2]))[:, None]
        if not start.numel():
            start = stop = start.new_zeros(*start.shape[:2], 1, 1)
        rows = rows.clamp(0, start.shape[2] - 1)
        start, stop = (torch.where(exists, x[:, :, rows], 0) for x in (start, stop))
        text = "stop: wanted 0 <= start <= stop in every range, got another"
        faults = [Fault(((start < 0) | (start > stop)).any(), text)]
        if not at.is_moved:
            faults.append(
                Fault((stop > at.k_len).any(), f"stop: wanted at most k_len = {at.k_len}, got more")
            )
        return outline_ranges(start, stop, grid)._replace(faults=tuple(faults))

    def _union(self, k_len: int) -> Intervals:
        """Return the ranges of all queries: sorted, disjoint, not touching."""
        bound = self._bind(Place(self.lengths[0], as_count("k_len", k_len)))
        assert isinstance(bound.solid, Intervals)
        return bound.solid


def _check_order(start: Tensor, stop: Tensor) -> None:
    """Raise ValueError unless 0 <= start <= stop."""
    if start.numel() and int(start.min()) < 0:
        raise ValueError(f"start: wanted 0 or more, got {int(start.min())}")
    wrong = (start > stop).nonzero()
    if len(wrong):
        place = tuple(wrong[0].tolist())
        raise ValueError(
            f"stop: wanted at least start, which is {int(start[place])} at {list(place)}, "
            f"got {int(stop[place])}"
        )


def ranges_of(bound: Bound, name: str) -> Ranges:
    """Return a bound relation as ranges; raise ValueError, naming it, if its pairs are tested one by one."""
    if isinstance(bound.solid, Predicate):
        raise ValueError(f"ranges: wanted a relation made of ranges or edges, got {name}")
    listed = None if bound.edges is None else bound.edges.intervals()
    form = listed if bound.solid is None else bound.solid if listed is None else bound.solid | listed
    assert form is not None
    return tabulate(form)


def tabulate(form: Intervals) -> Ranges:
    """Return the relation of sorted ranges: [Q, n], or [B, H, Q, n] where batches or heads differ."""
    counts = np.diff(form.ptr)
    start, stop = np.zeros((2, form.rows, int(counts.max(initial=1))), np.int64)
    place = np.arange(len(form.row)) - form.ptr[form.row]
    start[form.row, place], stop[form.row, place] = form.start, form.stop
    tables = (
        torch.from_numpy(x.reshape(count_groups(form.group), form.q_len, x.shape[1])[form.group])
        for x in (start, stop)
    )
    return Ranges(*(x[0, 0] if form.group.size == 1 else x for x in tables))
