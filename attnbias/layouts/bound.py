"""A relation bound to lengths, and the set algebra on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .edges import Edges
from .intervals import Intervals, Ints, count_groups, join_groups, pointer
from .predicate import Predicate, Related


@dataclass(frozen=True)
class Place:
    """Where a relation is bound: lengths, the first query's position, and the sizes around it."""

    q_len: int
    k_len: int
    q_start: int = 0
    batch: int | None = None
    heads: int | None = None
    device: str = "cpu"

    @property
    def positions(self) -> Ints:
        """Positions of the queries among the keys, [q_len]."""
        return np.arange(self.q_start, self.q_start + self.q_len)

    def everywhere(self, batch: int = 1, heads: int = 1) -> Intervals:
        """All pairs, with a group for every batch and head."""
        group = np.arange(batch * heads).reshape(batch, heads)
        form = Intervals.full(self.q_len, self.k_len)
        return form.take_groups(group, np.zeros(batch * heads, np.int64))


@dataclass(frozen=True)
class Bound:
    """Related pairs as a ``solid`` form (ranges or a predicate) and ``edges``; no pair is in both.

    Two parts because a union such as ``Window | Graph`` is small only as two.
    """

    solid: Intervals | Predicate | None
    edges: Edges | None = None

    @property
    def group(self) -> Ints:
        """Map [batch, heads] -> g, the same for both parts."""
        form = self.solid if self.solid is not None else self.edges
        assert form is not None
        return form.group

    def take_groups(self, group: Ints, which: Ints) -> Bound:
        """The same set under another map of groups."""
        solid = None if self.solid is None else self.solid.take_groups(group, which)
        edges = None if self.edges is None else self.edges.take_groups(group, which)
        return Bound(solid, edges)

    def contains(self, row: Ints, key: Ints) -> NDArray[np.bool_]:
        """Whether each pair (row, key) is related."""
        found = np.zeros(len(row), bool)
        for form in (self.solid, self.edges):
            if form is not None:
                found |= form.contains(row, key)
        return found

    def count(self) -> int:
        """Number of related pairs over all batches and heads, a pair counting once."""
        groups = count_groups(self.group)
        per_group = np.zeros(groups, np.int64)
        if isinstance(self.solid, Intervals):
            per_group += self.solid.counts().reshape(groups, -1).sum(1)
        elif self.solid is not None:
            per_group += self.solid.tiling(128).pairs().reshape(groups, -1).sum(1)
        if self.edges is not None:
            per_group += self.edges.distinct().counts().reshape(groups, -1).sum(1)
        return int(per_group[self.group].sum())


def aligned(parts: Sequence[Bound]) -> list[Bound]:
    """Bring several to one map of groups."""
    if all(part.group.size == 1 for part in parts):
        return list(parts)
    group, which = join_groups(*(part.group for part in parts))
    return [part.take_groups(group, each) for part, each in zip(parts, which, strict=True)]


def intersect(a: Bound, b: Bound) -> Bound:
    """Pairs in both. Edges are filtered, so the cost of a graph stays that of its edges.

    Duplicate edges stay: a pair listed by both has the edges of the one that has more, ``a`` if as many.
    """
    a, b = aligned((a, b))
    listed = []
    for mine, other in ((a, b), (b, a)):
        if mine.edges is None:
            continue
        row, key = mine.edges.row, mine.edges.key
        kept = np.zeros(len(key), bool) if other.solid is None else other.solid.contains(row, key)
        if other.edges is not None:
            often, theirs = mine.edges.count_of(row, key), other.edges.count_of(row, key)
            kept |= (theirs > 0) & ((often >= theirs) if mine is a else (often > theirs))
        if mine is a or kept.any():
            listed.append(mine.edges.filter(kept))
    solid = None
    if a.solid is not None and b.solid is not None:
        solid = _intersect_solid(a.solid, b.solid)
    if solid is None and not listed:
        listed = [_no_edges(a)]
    return Bound(solid, join_edges(listed))


def _intersect_solid(a: Intervals | Predicate, b: Intervals | Predicate) -> Intervals | Predicate:
    if isinstance(a, Intervals):
        return a & b if isinstance(b, Intervals) else replace(b, bound=b.bound & a, _tilings={})
    if isinstance(b, Intervals):
        return replace(a, bound=a.bound & b, _tilings={})
    both: Related = lambda q, k, b_, h: a.related(q, k, b_, h) & b.related(q, k, b_, h)  # noqa: E731
    return a.with_rule(a.bound & b.bound, both, a.stationary and b.stationary)


def unite(parts: Sequence[Bound], related: Related, stationary: bool) -> Bound:
    """Pairs in any of the parts, each once; ``related`` is the union's own definition."""
    parts = aligned(parts)
    solids = [part.solid for part in parts if part.solid is not None]
    listed = [part.edges.distinct() for part in parts if part.edges is not None]
    edges = join_edges(listed)
    if edges is not None:
        edges = edges.distinct()
    if not solids:
        return Bound(None, edges)
    bound = solids[0].bound if isinstance(solids[0], Predicate) else solids[0]
    for form in solids[1:]:
        bound = bound | (form.bound if isinstance(form, Predicate) else form)
    solid: Intervals | Predicate = bound
    for form in solids:
        if isinstance(form, Predicate):
            solid = form.with_rule(bound, related, stationary)
    if edges is not None:
        edges = edges.filter(~solid.contains(edges.row, edges.key))
    return Bound(solid, edges)


def complement(part: Bound, place: Place, related: Related, stationary: bool) -> Bound:
    """Pairs not in the part; ``related`` is the complement's own definition."""
    if isinstance(part.solid, Predicate):
        everything = ~Intervals.empty(place.q_len, place.k_len, part.group)
        return Bound(part.solid.with_rule(everything, related, stationary))
    form = part.solid
    if part.edges is not None:
        listed = part.edges.intervals()
        form = listed if form is None else form | listed
    assert form is not None
    return Bound(~form)


def stack(parts: Sequence[Bound], pick: Ints, place: Place, related: Related) -> Bound:
    """Another part for each batch and head: ``pick`` [batch, heads] numbers them."""
    shape = np.broadcast_shapes(pick.shape, *(part.group.shape for part in parts))
    pick = np.broadcast_to(pick, shape)
    first = pointer(np.array([count_groups(part.group) for part in parts]))
    maps = np.stack([np.broadcast_to(part.group, shape) for part in parts])
    everyone = np.take_along_axis(maps, pick[None], 0)[0] + first[pick]
    used, group = np.unique(everyone, return_inverse=True)  # a part's own groups may go unused
    group = group.reshape(shape)
    edges = None
    if any(part.edges is not None for part in parts):
        pieces = [_no_edges(part) if part.edges is None else part.edges for part in parts]
        edges = Edges(
            place.q_len,
            place.k_len,
            everyone,
            _stack_ptr([piece.ptr for piece in pieces]),
            np.concatenate([piece.key for piece in pieces]),
            np.concatenate([piece.id for piece in pieces]),
        ).take_groups(group, used)
    if all(part.solid is None for part in parts):
        return Bound(None, edges)
    ranges = [_ranges(part, place) for part in parts]
    bound = Intervals(
        place.q_len,
        place.k_len,
        everyone,
        _stack_ptr([piece.ptr for piece in ranges]),
        np.concatenate([piece.start for piece in ranges]),
        np.concatenate([piece.stop for piece in ranges]),
    ).take_groups(group, used)
    rules = tuple(part.solid if isinstance(part.solid, Predicate) else None for part in parts)
    if not any(rules):
        return Bound(bound, edges)
    part_of = np.searchsorted(first, used, side="right") - 1
    source = np.stack((part_of, used - first[part_of]), 1)
    solid = Predicate(bound, related, place.q_start, device=place.device, parts=rules, source=source)
    return Bound(solid, edges)


def _ranges(part: Bound, place: Place) -> Intervals:
    """The ranges that a part's solid form keeps to."""
    if part.solid is None:
        return Intervals.empty(place.q_len, place.k_len, part.group)
    return part.solid.bound if isinstance(part.solid, Predicate) else part.solid


def _stack_ptr(ptrs: Sequence[Ints]) -> Ints:
    lengths = np.concatenate([np.diff(ptr) for ptr in ptrs])
    return pointer(lengths)


def _no_edges(part: Bound) -> Edges:
    form = part.solid if part.solid is not None else part.edges
    assert form is not None
    none = np.zeros(0, np.int64)
    return Edges.from_pairs(form.q_len, form.k_len, part.group, none, none, none)


def join_edges(listed: Sequence[Edges]) -> Edges | None:
    """One list of edges for several over the same groups."""
    if len(listed) < 2:
        return listed[0] if listed else None
    first = listed[0]
    row, key, edge_id = (
        np.concatenate([getattr(each, name) for each in listed]) for name in ("row", "key", "id")
    )
    return Edges.from_pairs(first.q_len, first.k_len, first.group, row, key, edge_id)
