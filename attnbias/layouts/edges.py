"""Exact sets of pairs as lists: the keys of each row, one by one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .intervals import Intervals, Ints, count_groups, gather_ranges, pointer
from .sort import sort_edges

Index = NDArray[np.signedinteger[Any]]  # int32 from the library's sort, else int64


@dataclass(frozen=True, eq=False)
class Edges:
    """For each row its keys in increasing order, with the caller's number of each edge.

    A pair may occur more than once (a graph's duplicate edges count twice); unions and complements work
    on :meth:`distinct` edges. Rows and ``group`` are those of :class:`Intervals`.
    """

    q_len: int
    k_len: int
    group: Ints  # [batch, heads] -> g
    ptr: Index  # [rows + 1]
    key: Index  # [E], increasing within a row
    id: Index  # [E], the caller's edge number

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
            made.__dict__["turned"] = cls(k_len, q_len, group, *lists[3:])
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

    @property
    def rows(self) -> int:
        """Rows of all groups."""
        return len(self.ptr) - 1

    @cached_property
    def row(self) -> Ints:
        """The row of each edge, [E]."""
        return np.repeat(np.arange(self.rows), np.diff(self.ptr))

    @cached_property
    def repeated(self) -> NDArray[np.bool_]:
        """True where an edge repeats the pair before it, [E]."""
        same = np.zeros(len(self.key), bool)
        same[1:] = (self.key[1:] == self.key[:-1]) & (self.row[1:] == self.row[:-1])
        return same

    def distinct(self) -> Edges:
        """Each pair once (the first of its edges)."""
        return self.filter(~self.repeated) if self.repeated.any() else self

    def filter(self, kept: NDArray[np.bool_]) -> Edges:
        """The edges where ``kept`` [E] is true."""
        ptr = pointer(kept)[self.ptr]
        return replace(self, ptr=ptr, key=self.key[kept], id=self.id[kept])

    def counts(self) -> Ints:
        """Edges in each row, [rows]."""
        return np.diff(self.ptr)

    def take_rows(self, rows: Ints, q_len: int) -> Edges:
        """Row ``j`` of the result is row ``rows[j]`` of this one."""
        ptr, picked = gather_ranges(self.ptr, rows)
        return replace(self, q_len=q_len, ptr=ptr, key=self.key[picked], id=self.id[picked])

    def take_groups(self, group: Ints, which: Ints) -> Edges:
        """The same sets under another map: group ``g`` is group ``which[g]`` of this one."""
        rows = (which[:, None] * self.q_len + np.arange(self.q_len)).reshape(-1)
        return replace(self.take_rows(rows, self.q_len), group=group)

    def shift(self, distance: int, k_len: int) -> Edges:
        """Every key moved by ``distance``; what leaves ``[0, k_len)`` is dropped."""
        moved = self.key.astype(np.int64) + distance
        return replace(self, k_len=k_len, key=moved).filter((moved >= 0) & (moved < k_len))

    def contains(self, row: Ints, key: Ints) -> NDArray[np.bool_]:
        """Whether each pair (row, key) is an edge."""
        mine = self.row * self.k_len + self.key
        asked = row * self.k_len + key
        at = np.searchsorted(mine, asked)
        found: NDArray[np.bool_] = np.append(mine, -1)[at] == asked
        return found

    def count_of(self, row: Ints, key: Ints) -> Ints:
        """How many edges each pair (row, key) has."""
        mine = self.row * self.k_len + self.key
        asked = row * self.k_len + key
        return np.searchsorted(mine, asked, side="right") - np.searchsorted(mine, asked)

    def intervals(self) -> Intervals:
        """The same set of pairs as ranges."""
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
    """Sort numbers of ``width`` bits; with the place each came from, or None when they were sorted.

    Number and place are packed into one word where they fit: numpy sorts plain integers several times
    faster than it sorts indices.
    """
    if not (order[1:] < order[:-1]).any():
        return order, None
    bits = len(order).bit_length()
    if width + bits < 63:
        packed = np.sort((order << bits) | np.arange(len(order)))
        return packed >> bits, packed & ((1 << bits) - 1)
    place = np.argsort(order, kind="stable")
    return order[place], place
