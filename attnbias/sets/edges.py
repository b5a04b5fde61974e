"""Exact sets of pairs as lists: the keys of each row, one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from .intervals import Index, Intervals, Ints, Rows, count_groups, pointer
from .sort import sort_edges

_ROWS_AT_ONCE = 4096


@dataclass(frozen=True, eq=False)
class Edges(Rows):
    """For each row its keys in increasing order, with the caller's number of each edge.

    A pair may occur more than once (a graph's duplicate edges count twice); unions and complements work
    on :meth:`distinct` edges.
    """

    key: Index  # [E], increasing within a row
    id: Index  # [E], the caller's edge number
    entries = ("key", "id")

    @classmethod
    def from_pairs(
        cls, q_len: int, k_len: int, group: Ints, row: Ints, key: Ints, edge_id: Ints | None = None
    ) -> Edges:
        """Sort pairs (row, key), given in any order, keeping duplicates and their numbers."""
        groups = count_groups(group)
        lists = sort_edges(row, key, groups, q_len, k_len)
        if lists is not None:
            number: Index = lists.edge_id if edge_id is None else edge_id[lists.edge_id]
            made = cls(q_len, k_len, group, lists.edge_ptr, lists.edge_key, number)
            made.__dict__["turned"] = cls(k_len, q_len, group, *lists[3:])  # sorted in the same pass
            return made
        rows = q_len * groups
        bits = k_len.bit_length()
        order, place = sort_places((row << bits) | key, rows.bit_length() + bits)
        if place is not None:
            row, key = order >> bits, order & ((1 << bits) - 1)
            edge_id = place if edge_id is None else edge_id[place]
        elif edge_id is None:
            edge_id = np.arange(len(row))
        return cls(q_len, k_len, group, pointer(np.bincount(row, minlength=rows)), key, edge_id)

    @cached_property
    def repeated(self) -> NDArray[np.bool_]:
        """True where an edge repeats the pair before it, [E]."""
        same = np.zeros(len(self.key), bool)
        np.equal(self.key[1:], self.key[:-1], out=same[1:])
        begins = self.ptr[:-1]
        same[begins[begins < len(same)]] = False
        return same

    def distinct(self) -> Edges:
        """Return each pair once: the first of its edges."""
        return self.filter(~self.repeated) if self.repeated.any() else self

    def filter(self, kept: NDArray[np.bool_]) -> Edges:
        """Return the edges where ``kept`` [E] is true."""
        return self.pick(pointer(kept)[self.ptr], kept)

    def in_steps(self) -> Iterator[tuple[slice, Ints, Index]]:
        """Yield some edges at a time, in order: their places, rows and keys."""
        for first in range(0, self.rows, _ROWS_AT_ONCE):
            ptr = self.ptr[first : min(first + _ROWS_AT_ONCE, self.rows) + 1]
            part = slice(ptr[0], ptr[-1])
            yield part, np.repeat(np.arange(first, first + len(ptr) - 1), np.diff(ptr)), self.key[part]

    def counts(self) -> Ints:
        """Return the number of edges in each row, [rows]."""
        return np.diff(self.ptr)

    def shift(self, distance: int, k_len: int) -> Edges:
        """Move every key by ``distance``; drop what leaves ``[0, k_len)``."""
        moved = self.key.astype(np.int64) + distance
        return replace(self, k_len=k_len, key=moved).filter((moved >= 0) & (moved < k_len))

    def contains(self, row: Ints, key: Ints) -> NDArray[np.bool_]:
        """Return whether each pair (row, key) is an edge."""
        return self.count_of(row, key) > 0

    def count_of(self, row: Ints, key: Ints) -> Ints:
        """Return how many edges each pair (row, key) has."""
        own, near = self.near(row)
        mine = own * self.k_len + self.key[near]
        asked = row * self.k_len + key
        return np.searchsorted(mine, asked, side="right") - np.searchsorted(mine, asked)

    def intervals(self) -> Intervals:
        """Return the same set of pairs as ranges."""
        form = Intervals.empty(self.q_len, self.k_len, self.group)
        key = self.key.astype(np.int64, copy=False)
        return form.from_ranges(self.row, key, key + 1)

    @cached_property
    def turned(self) -> Edges:
        """The transpose: rows become keys; the number of an edge is its place in this order."""
        groups = count_groups(self.group)
        query, column = self.row, self.key
        if groups > 1:
            g, query = np.divmod(query, max(self.q_len, 1))
            column = column + g * self.k_len
        column, place = sort_places(column, (groups * self.k_len).bit_length())
        if place is None:
            place = np.arange(len(column))
        ptr = pointer(np.bincount(column, minlength=groups * self.k_len))
        return Edges(self.k_len, self.q_len, self.group, ptr, query[place], place)


def sort_places(order: Ints, width: int) -> tuple[Ints, Ints | None]:
    """Sort numbers of ``width`` bits; return them and their places before, None if they were sorted.

    Number and place are packed into one word where they fit: numpy sorts plain integers several times
    faster than it sorts indices.
    """
    if not (order[1:] < order[:-1]).any():
        return order, None
    order, bits = order.astype(np.int64, copy=False), len(order).bit_length()
    if width + bits < 63:
        packed = np.sort((order << bits) | np.arange(len(order)))
        return packed >> bits, packed & ((1 << bits) - 1)
    place = np.argsort(order, kind="stable")
    return order[place], place
