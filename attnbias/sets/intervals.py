"""Exact sets of keys as sorted half-open ranges per row, closed under ``& | ~ -``.

A row is one query of one group (see :class:`Rows`). No operation visits a key: each costs as much as there
are rows and ranges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

Ints = NDArray[np.int64]
Index = NDArray[np.signedinteger[Any]]  # int32 where the library sorted, else int64
Whole = TypeVar("Whole", int, Ints)

_ROWS_AT_ONCE = 4096  # bounds the memory of one step of an operation, and keeps it in the cache


@dataclass(frozen=True, eq=False)
class Rows:
    """A list of entries for each row, which subclasses hold as arrays [n].

    Rows are numbered ``g * q_len + i`` for query ``i`` of group ``g``; ``group`` [batch, heads] says which
    group serves which batch and head, so equal relations are held once.
    """

    q_len: int
    k_len: int
    group: Ints  # [batch, heads] -> g
    ptr: Index  # [rows + 1]: the entries of row r are ptr[r]:ptr[r + 1]
    entries: ClassVar[tuple[str, ...]]  # names of the arrays

    @classmethod
    def empty(cls, q_len: int, k_len: int, group: Ints) -> Self:
        """Return rows without entries."""
        ptr = np.zeros(q_len * count_groups(group) + 1, np.int64)
        none = np.zeros(0, np.int32)  # narrow, so that arrays joined with it keep their type
        return cls(q_len, k_len, group, ptr, *[none] * len(cls.entries))

    @classmethod
    def stack(cls, parts: Sequence[Self], group: Ints) -> Self:
        """Return the groups of all parts, numbered one after another, under a map of them."""
        ptr = pointer(np.concatenate([np.diff(part.ptr) for part in parts]))
        entries = [np.concatenate([getattr(part, name) for part in parts]) for name in cls.entries]
        return cls(parts[0].q_len, parts[0].k_len, group, ptr, *entries)

    @property
    def rows(self) -> int:
        """Rows of all groups."""
        return len(self.ptr) - 1

    @cached_property
    def row(self) -> Ints:
        """The row of each entry, [n]."""
        return np.repeat(np.arange(self.rows), np.diff(self.ptr))

    def near(self, rows: Ints) -> tuple[Ints, slice]:
        """Return the entries of all rows from the least to the greatest of some: rows of each, and where."""
        first, last = int(rows.min(initial=self.rows)), int(rows.max(initial=-1)) + 1
        ptr = self.ptr[min(first, last) : last + 1]
        return np.repeat(np.arange(last - len(ptr) + 1, last), np.diff(ptr)), slice(ptr[0], ptr[-1])

    def pick(self, ptr: Index, picked: NDArray[Any]) -> Self:
        """Return some of the entries, by their places or a mask, with the rows that they form."""
        return replace(self, ptr=ptr, **{name: getattr(self, name)[picked] for name in self.entries})

    def take_rows(self, rows: Ints, q_len: int) -> Self:
        """Return rows of which row ``j`` is row ``rows[j]`` of these."""
        return replace(self.pick(*gather_ranges(self.ptr, rows)), q_len=q_len)

    def take_queries(self, first: int, count: int) -> Self:
        """Return so many queries of every group from the first; those that do not exist have no entries."""
        if (first, count) == (0, self.q_len):
            return self
        queries = np.arange(first, first + count)
        rows = np.arange(count_groups(self.group))[:, None] * self.q_len + queries
        rows = np.where((queries >= 0) & (queries < self.q_len), rows, self.rows).reshape(-1)
        return self.with_empty_row().take_rows(rows, count)

    def with_empty_row(self) -> Self:
        """Return the same rows and an empty one after them, to take where there is none."""
        return replace(self, ptr=np.append(self.ptr, self.ptr[-1]))

    def take_groups(self, group: Ints, which: Ints) -> Self:
        """Return the same sets under another map, whose group ``g`` is group ``which[g]`` of these."""
        if len(which) * self.q_len == self.rows and (which == np.arange(len(which))).all():
            return replace(self, group=group)
        rows = (which[:, None] * self.q_len + np.arange(self.q_len)).reshape(-1)
        return replace(self.take_rows(rows, self.q_len), group=group)


@dataclass(frozen=True, eq=False)
class Intervals(Rows):
    """For each row the keys it relates to, as disjoint, non-touching, increasing ranges."""

    start: Index  # [n], int32
    stop: Index  # [n], int32
    entries = ("start", "stop")

    @classmethod
    def one_per_row(cls, q_len: int, k_len: int, start: Ints, stop: Ints) -> Intervals:
        """Build from at most one range per row, ``start, stop`` [groups, q_len], cut to the keys."""
        groups = start.size // q_len if q_len else 1
        low, high = (np.clip(x.reshape(-1), 0, k_len).astype(np.int32) for x in (start, stop))
        kept = low < high
        if kept.all():
            ptr = np.arange(len(low) + 1)
        else:
            ptr = pointer(kept)
            low, high = low[kept], high[kept]
        return cls(q_len, k_len, np.arange(groups)[:, None], ptr, low, high)

    @classmethod
    def full(cls, q_len: int, k_len: int) -> Intervals:
        """Return every key in every row."""
        return cls.one_per_row(q_len, k_len, np.zeros(q_len, np.int64), np.full(q_len, k_len, np.int64))

    @classmethod
    def from_dense(
        cls, related: NDArray[np.bool_], q_len: int, group: Ints, most_per_row: int
    ) -> Intervals | None:
        """Build from booleans [rows, k_len]: a range for each run of True; None if they are too many."""
        rows, k_len = related.shape
        begins, ends = related.copy(), related.copy()
        begins[:, 1:] &= ~related[:, :-1]
        ends[:, :-1] &= ~related[:, 1:]
        start, stop = np.flatnonzero(begins), np.flatnonzero(ends) + 1  # counted through all rows
        if len(start) > most_per_row * max(rows, 1):
            return None
        row = start // max(k_len, 1)
        ptr = pointer(np.bincount(row, minlength=rows))
        start, stop = ((x - row * k_len).astype(np.int32) for x in (start, stop))
        return cls(q_len, k_len, group, ptr, start, stop)

    @property
    def extent(self) -> Intervals:
        """The ranges outside of which no pair is related, as :class:`Predicate` has them: these."""
        return self

    @cached_property
    def single(self) -> tuple[Ints, Ints] | None:
        """``start, stop`` [rows] when no row has two ranges (0, 0 in an empty row), else None."""
        if len(self.start) == self.rows and (np.diff(self.ptr) == 1).all():
            return self.start, self.stop
        if len(self.start) > self.rows or (np.diff(self.ptr) > 1).any():
            return None
        start, stop = np.zeros((2, self.rows), np.int64)
        start[self.row], stop[self.row] = self.start, self.stop
        return start, stop

    def counts(self) -> Ints:
        """Return the number of related keys in each row, [rows]."""
        total = np.concatenate(([0], np.cumsum(self.stop - self.start)))
        return total[self.ptr[1:]] - total[self.ptr[:-1]]

    def contains(self, row: Ints, key: Ints) -> NDArray[np.bool_]:
        """Return whether each pair (row, key) is related."""
        span, (own, near) = self.k_len + 1, self.near(row)
        base = own * span
        at = np.searchsorted(base + self.start[near], row * span + key, side="right") - 1
        reach = np.append(base + self.stop[near], -1)  # at = -1 finds no range
        return row * span + key < reach[at]

    def shift(self, distance: int, k_len: int) -> Intervals:
        """Move every key by ``distance``; drop what leaves ``[0, k_len)``."""
        start, stop = (np.clip(x.astype(np.int64) + distance, 0, k_len) for x in (self.start, self.stop))
        return replace(self, k_len=k_len).from_ranges(self.row, start, stop)

    def from_ranges(self, row: Ints, start: Index, stop: Index) -> Intervals:
        """Return the union of the given ranges, in rows like these."""
        if self.rows <= _ROWS_AT_ONCE or (row[1:] < row[:-1]).any():
            return replace(self, **merge(self.rows, self.k_len, row, start, stop)._asdict())
        cuts = np.searchsorted(row, np.arange(0, self.rows, _ROWS_AT_ONCE)).tolist()

        def step(first: int, last: int) -> Ranges:
            part = slice(cuts[first // _ROWS_AT_ONCE], [*cuts, None][first // _ROWS_AT_ONCE + 1])
            return merge(last - first, self.k_len, row[part] - first, start[part], stop[part])

        return self._in_steps(len(row), step)

    def _in_steps(self, most: int, step: Callable[[int, int], Ranges]) -> Intervals:
        """Return rows like these, made by a function of some of them at a time: ``most`` ranges in all."""
        start, stop = np.empty(most, np.int32), np.empty(most, np.int32)
        ptr, end = np.zeros(self.rows + 1, np.int64), 0
        for first in range(0, self.rows, _ROWS_AT_ONCE):
            last = min(first + _ROWS_AT_ONCE, self.rows)
            some = step(first, last)
            start[end : end + len(some.start)], stop[end : end + len(some.start)] = some.start, some.stop
            ptr[first + 1 : last + 1] = some.ptr[1:] + end
            end += len(some.start)
        for array in (start, stop):
            array.resize(end, refcheck=False)  # in place
        return replace(self, ptr=ptr, start=start, stop=stop)

    def _some(self, first: int, last: int) -> Ranges:
        """Return the ranges of some rows."""
        begin, end = self.ptr[first], self.ptr[last]
        return Ranges(self.ptr[first : last + 1] - begin, self.start[begin:end], self.stop[begin:end])

    def __invert__(self) -> Intervals:
        k_len = self.k_len
        return self._in_steps(
            len(self.start) + self.rows, lambda first, last: self._some(first, last).invert(k_len)
        )

    def __and__(self, other: Intervals) -> Intervals:
        a, b = align(self, other)
        if a.single and b.single:
            start = np.maximum(a.single[0], b.single[0])
            stop = np.minimum(a.single[1], b.single[1])
            return replace(a.one_per_row(a.q_len, a.k_len, start, stop), group=a.group)
        return a._with(b, lambda x, y: x.invert(a.k_len).unite(y.invert(a.k_len), a.k_len).invert(a.k_len))

    def __or__(self, other: Intervals) -> Intervals:
        a, b = align(self, other)
        return a._with(b, lambda x, y: x.unite(y, a.k_len))

    def __sub__(self, other: Intervals) -> Intervals:
        a, b = align(self, other)
        return a._with(b, lambda x, y: x.invert(a.k_len).unite(y, a.k_len).invert(a.k_len))

    def _with(self, other: Intervals, combine: Callable[[Ranges, Ranges], Ranges]) -> Intervals:
        """Combine rows with those of another set, which leaves at most as many ranges as both have."""
        return self._in_steps(
            len(self.start) + len(other.start),
            lambda first, last: combine(self._some(first, last), other._some(first, last)),
        )

    def transpose(self) -> Intervals:
        """Return for each key of each group the ranges of queries related to it."""
        groups = count_groups(self.group)
        # A run of queries begins at a key where a row has it and the row above has not, and ends
        # where the row above has it and this one has not; one empty row closes each group.
        padded = self._padded(groups, below=True)
        above = self._padded(groups, below=False)
        key, begin = (padded - above)._by_key(groups, self.k_len)
        ptr = np.searchsorted(key, np.arange(groups * self.k_len + 1))
        del key
        _, end = (above - padded)._by_key(groups, self.k_len)
        return Intervals(self.k_len, self.q_len, self.group, ptr, begin, end)

    def _padded(self, groups: int, *, below: bool) -> Intervals:
        """Return each group with one empty row below (or above) its rows."""
        lengths = np.diff(self.ptr).reshape(groups, self.q_len)
        lengths = np.pad(lengths, ((0, 0), (0, 1) if below else (1, 0)))
        return replace(self, q_len=self.q_len + 1, ptr=pointer(lengths.reshape(-1)))

    def _by_key(self, groups: int, k_len: int) -> tuple[Ints, Ints]:
        """Return all pairs as (g * k_len + key, query), sorted."""
        query, key = self.pairs()
        if groups > 1:
            g, query = np.divmod(query, self.q_len)
            key += g * k_len
        order = np.argsort(key, kind="stable")
        key = key[order]
        return key, query[order].astype(np.int32)

    def dense(self) -> NDArray[np.bool_]:
        """Return the set as booleans, [rows, k_len]."""
        change = np.zeros((self.rows, self.k_len + 1), np.int8)
        change[self.row, self.start] = 1
        change[self.row, self.stop] = -1  # ranges do not touch, so no start is overwritten
        return np.cumsum(change[:, :-1], 1, np.int8).view(bool)

    def pairs(self) -> tuple[Ints, Ints]:
        """Return every pair as (row, key): as many elements as there are pairs."""
        size = self.stop - self.start
        total = pointer(size)
        key = np.arange(total[-1])
        key += np.repeat(self.start - total[:-1], size)
        row = np.repeat(np.repeat(np.arange(self.rows), np.diff(self.ptr)), size)
        return row, key


class Ranges(NamedTuple):
    """Ranges of some rows, as :class:`Intervals` has them."""

    ptr: Index
    start: Index
    stop: Index

    def invert(self, k_len: int) -> Ranges:
        """Return the keys that are in none."""
        rows, count = len(self.ptr) - 1, len(self.start)
        start = np.zeros(count + rows, np.int32)
        stop = np.full(count + rows, k_len, np.int32)
        gap = np.arange(count) + np.repeat(np.arange(rows), np.diff(self.ptr))
        stop[gap] = self.start
        start[gap + 1] = self.stop
        kept = start < stop
        return Ranges(pointer(kept)[self.ptr + np.arange(rows + 1)], start[kept], stop[kept])

    def unite(self, other: Ranges, k_len: int) -> Ranges:
        """Return the keys that are in one or the other."""
        rows = len(self.ptr) - 1
        row = np.concatenate([np.repeat(np.arange(rows), np.diff(each.ptr)) for each in (self, other)])
        start, stop = (np.concatenate(both) for both in zip(self[1:], other[1:], strict=True))
        return merge(rows, k_len, row, start, stop)


def ceil_div(a: Whole, b: int) -> Whole:
    """Return ``a / b``, rounded up."""
    return -(-a // b)


def make_groups(batch: int = 1, heads: int = 1) -> Ints:
    """Return a map of groups that has one for every batch and head."""
    return np.arange(batch * heads).reshape(batch, heads)


def count_groups(group: Ints) -> int:
    """Return how many groups a map [batch, heads] names."""
    return int(group.max(initial=0)) + 1


def pointer(lengths: NDArray[np.generic]) -> Ints:
    """Return the offsets [n + 1] of consecutive runs of the given lengths."""
    ptr = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=ptr[1:])
    return ptr


def gather_ranges(ptr: Index, rows: Ints) -> tuple[Ints, Ints]:
    """Return the offsets of the picked rows, and the places of their entries."""
    lengths = (ptr[1:] - ptr[:-1])[rows]
    new = pointer(lengths)
    return new, np.arange(new[-1]) + np.repeat(ptr[:-1][rows] - new[:-1], lengths)


def merge(rows: int, k_len: int, row: Ints, start: Index, stop: Index) -> Ranges:
    """Unite ranges in any order, joining touching ones."""
    kept = start < stop
    if not kept.all():
        row, start, stop = row[kept], start[kept], stop[kept]
    if not len(row):
        none = np.zeros(0, np.int32)
        return Ranges(np.zeros(rows + 1, np.int64), none, none)
    # One axis for all rows, with a gap of one between them so that no range joins the next row's.
    span = k_len + 1
    first, end = row * span + start, row * span + stop
    if (first[1:] < first[:-1]).any():
        bits = span.bit_length()
        if (rows * span).bit_length() + bits < 63:  # both in one word: no indices to sort and follow
            packed = np.sort((first << bits) | (end - first))
            first = packed >> bits
            end = first + (packed & ((1 << bits) - 1))
        else:
            order = np.argsort(first, kind="stable")
            first, end = first[order], end[order]
    reach = np.maximum.accumulate(end)
    fresh = np.concatenate(([True], first[1:] > reach[:-1]))
    last = np.concatenate((fresh[1:], [True]))
    row = first[fresh] // span
    ptr = pointer(np.bincount(row, minlength=rows))
    start, stop = ((x - row * span).astype(np.int32) for x in (first[fresh], reach[last]))
    return Ranges(ptr, start, stop)


class Grouped(Protocol):
    """A set with a map of groups, as of :class:`Rows`."""

    @property
    def group(self) -> Ints: ...  # noqa: D102

    def take_groups(self, group: Ints, which: Ints) -> Self: ...  # noqa: D102


G = TypeVar("G", bound=Grouped)


def align(*sets: G) -> Sequence[G]:
    """Bring sets to one map of groups, holding each combination of groups once."""
    if all(each.group.size == 1 for each in sets):
        return sets
    spread = np.broadcast_arrays(*(each.group for each in sets))  # [batch, heads] each
    code = np.zeros_like(spread[0])  # one number for a combination: np.unique of columns takes far longer
    for group in spread:
        code = code * count_groups(group) + group
    _, first, joined = np.unique(code, return_index=True, return_inverse=True)
    joined = joined.reshape(code.shape)
    return [each.take_groups(joined, g.reshape(-1)[first]) for each, g in zip(sets, spread, strict=True)]
