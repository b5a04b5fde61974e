"""A relation bound to lengths, and the set algebra on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .edges import Edges
from .intervals import Intervals, Ints, align, count_groups, make_groups, pointer
from .predicate import Predicate, Related

# Limits on the memory that an exact form takes; a larger set is left to a test of each pair.
MOST_PER_ROW = 64  # ranges, or scattered pairs, in a row on average
MANY_RANGES = 1 << 22  # fewer in all are never too many

_ROWS_AT_ONCE = 4096


class Place(NamedTuple):
    """The place where a relation is bound: lengths, the first query's position, and the sizes around it."""

    q_len: int
    k_len: int
    q_start: int = 0
    batch: int | None = None
    heads: int | None = None
    device: str = "cpu"
    most_listed: float = 1.0  # share of pairs up to which scattered ones are listed; set by a builder
    k_start: int = 0  # position of the first key; other than 0 inside of shifts and transposes
    is_moved: bool = False  # inside of those, data beyond the keys is left out, not refused

    @property
    def positions(self) -> Ints:
        """Positions of the queries among the keys, [q_len]."""
        return np.arange(self.q_start, self.q_start + self.q_len)

    @property
    def k_stop(self) -> int:
        """One more than the last key's position."""
        return self.k_start + self.k_len

    def rule(self, related: Related) -> Related:
        """Return a rule on positions as one on query positions and key numbers."""
        first = self.k_start
        return (lambda q, k, b, h: related(q, k + first, b, h)) if first else related

    def everywhere(self, batch: int = 1, heads: int = 1) -> Intervals:
        """Return all pairs, with a group for every batch and head."""
        form = Intervals.full(self.q_len, self.k_len)
        return form.take_groups(make_groups(batch, heads), np.zeros(batch * heads, np.int64))

    def in_steps(self, bind: Callable[[Place], Bound]) -> Bound:
        """Bind some queries at a time, which bounds the memory on the way; for one group and one form."""
        if self.q_len <= _ROWS_AT_ONCE:
            return bind(self)
        firsts = range(0, self.q_len, _ROWS_AT_ONCE)
        sizes = [min(_ROWS_AT_ONCE, self.q_len - first) for first in firsts]
        places = zip(firsts, sizes, strict=True)
        parts = [bind(self._replace(q_start=self.q_start + i, q_len=n)) for i, n in places]
        lists = [part.edges for part in parts if part.edges is not None]
        if lists:
            edges = Edges.stack(lists, make_groups())
            return Bound(None, replace(edges, q_len=self.q_len, id=np.arange(len(edges.key))))
        ranges = [part.solid for part in parts if isinstance(part.solid, Intervals)]
        return Bound(replace(Intervals.stack(ranges, make_groups()), q_len=self.q_len))

    def bind_ranges(self, row: Ints, start: Ints, stop: Ints, group: Ints | None = None) -> Bound:
        """Return ranges of key positions, any number in a row and in any order, cut to the keys."""
        start, stop = (np.clip(x - self.k_start, 0, self.k_len) for x in (start, stop))
        form = Intervals.empty(self.q_len, self.k_len, make_groups() if group is None else group)
        return Bound(form.from_ranges(row, start, stop))

    def bind_pairs(
        self, row: Ints, key: Ints, group: Ints | None = None, number: Ints | None = None
    ) -> Bound:
        """Return pairs of rows and key positions in any order, with the caller's numbers."""
        group = make_groups() if group is None else group
        if self.is_moved:
            key = key - self.k_start
            inside = (key >= 0) & (key < self.k_len)
            number = np.flatnonzero(inside) if number is None else number[inside]
            row, key = row[inside], key[inside]
        return Bound(None, Edges.from_pairs(self.q_len, self.k_len, group, row, key, number))


@dataclass(frozen=True)
class Bound:
    """Related pairs as a ``solid`` form (ranges or a predicate) and ``edges``; no pair is in both.

    Two parts because a union such as ``Window | Graph`` is small only as two.
    """

    solid: Intervals | Predicate | None
    edges: Edges | None = None

    @property
    def forms(self) -> list[Intervals | Predicate | Edges]:
        """The one or two that are there."""
        return [form for form in (self.solid, self.edges) if form is not None]

    @property
    def group(self) -> Ints:
        """Map [batch, heads] -> g, the same for both parts."""
        form = self.edges if self.solid is None else self.solid
        assert form is not None
        return form.group

    def take_groups(self, group: Ints, which: Ints) -> Bound:
        """Return the same set under another map of groups."""
        solid = None if self.solid is None else self.solid.take_groups(group, which)
        edges = None if self.edges is None else self.edges.take_groups(group, which)
        return Bound(solid, edges)

    def narrow(self, first_batch: int, batches: int, first_head: int, heads: int) -> Bound:
        """Return the same set for some batches and heads, where it tells them apart."""
        first_batch, batches = (first_batch, batches) if self.group.shape[0] > 1 else (0, 1)
        first_head, heads = (first_head, heads) if self.group.shape[1] > 1 else (0, 1)
        some = self.group[first_batch : first_batch + batches, first_head : first_head + heads]
        if some.shape == self.group.shape:
            return self
        used, group = np.unique(some, return_inverse=True)
        taken = self.take_groups(group.reshape(some.shape), used)
        if isinstance(taken.solid, Predicate):  # its rule knows batches and heads by their numbers
            rule = taken.solid.related
            moved: Related = lambda q, k, b, h: rule(q, k, b + first_batch, h + first_head)  # noqa: E731
            taken = replace(taken, solid=replace(taken.solid, related=moved))
        return taken

    @property
    def no_edges(self) -> Edges:
        """An empty list of edges of the same sizes."""
        form = self.forms[0]
        return Edges.empty(form.q_len, form.k_len, form.group)

    def contains(self, row: Ints, key: Ints) -> NDArray[np.bool_]:
        """Return whether each pair (row, key) is related."""
        return reduce(or_, [form.contains(row, key) for form in self.forms])

    def count(self) -> int:
        """Return the number of related pairs over all batches and heads, a pair counting once."""
        once = replace(self, edges=None if self.edges is None else self.edges.distinct())
        counts = np.sum([form.counts() for form in once.forms], 0)  # [rows]
        return int(counts.reshape(count_groups(self.group), -1).sum(1)[self.group].sum())


def intersect(a: Bound, b: Bound, related: Related) -> Bound:
    """Return the pairs in both. Edges are filtered, so a graph costs as much as it has edges.

    ``related`` is the intersection's own definition. Duplicate edges stay: a pair listed by both has the
    edges of the one that has more, ``a`` if as many.
    """
    a, b = align(a, b)
    listed = []
    for mine, other in ((a, b), (b, a)):
        if mine.edges is None:
            continue
        kept = np.zeros(len(mine.edges.key), bool)
        for part, row, key in mine.edges.in_steps():
            if other.solid is not None:
                kept[part] = other.solid.contains(row, key)
            if other.edges is not None:
                often, theirs = mine.edges.count_of(row, key), other.edges.count_of(row, key)
                kept[part] |= (theirs > 0) & ((often >= theirs) if mine is a else (often > theirs))
        if mine is a or kept.any():
            listed.append(mine.edges.filter(kept))
    edges, solid = join_edges(listed), None
    if a.solid is not None and b.solid is not None:
        solid = _intersect_solid(a.solid, b.solid, related)
        if isinstance(solid, Predicate) and solid.related is related and edges is not None:
            # The rule is the whole definition, so it holds for the edges as well: they count once.
            solid = replace(solid, bound=solid.bound - edges.intervals())
    elif edges is None:
        edges = a.no_edges
    return Bound(solid, edges)


def _intersect_solid(
    a: Intervals | Predicate, b: Intervals | Predicate, related: Related
) -> Intervals | Predicate:
    if isinstance(a, Intervals):
        return a & b if isinstance(b, Intervals) else b.intersect(a)
    if isinstance(b, Intervals):
        return a.intersect(b)
    if a.also is not None or b.also is not None:
        return a.with_rule(a.extent & b.extent, related, False)
    both: Related = lambda q, k, b_, h: a.related(q, k, b_, h) & b.related(q, k, b_, h)  # noqa: E731
    joined = a.with_rule(a.bound & b.bound, both, a.stationary and b.stationary)
    return replace(joined, is_implied=a.is_implied and b.is_implied)


def unite(parts: Sequence[Bound], related: Related, stationary: bool) -> Bound:
    """Return the pairs in any of the parts, each once; ``related`` is the union's own definition."""
    parts = align(*parts)
    solids = [part.solid for part in parts if part.solid is not None]
    edges = join_edges([part.edges for part in parts if part.edges is not None])
    if edges is not None:
        edges = edges.distinct()
    if not solids:
        return Bound(None, edges)
    solid = _unite_solid(solids, related, stationary)
    if edges is not None:
        kept = np.zeros(len(edges.key), bool)
        for part, row, key in edges.in_steps():
            kept[part] = ~solid.contains(row, key)
        edges = edges.filter(kept)
    return Bound(solid, edges)


def _unite_solid(
    solids: Sequence[Intervals | Predicate], related: Related, stationary: bool
) -> Intervals | Predicate:
    rules = [form for form in solids if isinstance(form, Predicate)]
    ranges = [form for form in solids if isinstance(form, Intervals)]
    if not rules:
        return reduce(or_, ranges)
    first = rules[0]
    if len(rules) > 1 and all(rule.stationary and rule.is_implied for rule in rules):
        tests = [rule.related for rule in rules]
        either: Related = lambda q, k, b, h: reduce(or_, [test(q, k, b, h) for test in tests])  # noqa: E731
        everywhere = reduce(or_, [rule.bound for rule in rules])
        first = replace(first.with_rule(everywhere, either, True), is_implied=True)
    elif len(rules) > 1 or not first.stationary:  # what ranges hold a rule would have to test as well
        return first.with_rule(reduce(or_, [form.extent for form in solids]), related, stationary)
    return first.unite(reduce(or_, ranges)) if ranges else first


def complement(part: Bound, place: Place, related: Related, stationary: bool) -> Bound:
    """Return the pairs not in the part; ``related`` is the complement's own definition."""
    if isinstance(part.solid, Predicate) and part.solid.stationary and part.edges is None:
        return Bound(part.solid.invert())
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
    """Return another part for each batch and head; ``pick`` [batch, heads] numbers them."""
    shape = np.broadcast_shapes(pick.shape, *(part.group.shape for part in parts))
    pick = np.broadcast_to(pick, shape)
    first = pointer(np.array([count_groups(part.group) for part in parts]))
    maps = np.stack([np.broadcast_to(part.group, shape) for part in parts])
    everyone = np.take_along_axis(maps, pick[None], 0)[0] + first[pick]
    used, group = np.unique(everyone, return_inverse=True)  # a part's own groups may go unused
    group = group.reshape(shape)
    edges = None
    if any(part.edges is not None for part in parts):
        lists = [part.edges or part.no_edges for part in parts]
        edges = Edges.stack(lists, everyone).take_groups(group, used)
    if all(part.solid is None for part in parts):
        return Bound(None, edges)
    solids = [part.solid or Intervals.empty(place.q_len, place.k_len, part.group) for part in parts]
    rules = tuple(form if isinstance(form, Predicate) else None for form in solids)
    bounds = [form.bound if isinstance(form, Predicate) else form for form in solids]
    bound = Intervals.stack(bounds, everyone).take_groups(group, used)
    if not any(rules):
        return Bound(bound, edges)
    also = None
    if any(rule is not None and rule.also is not None for rule in rules):
        none = [Intervals.empty(place.q_len, place.k_len, part.group) for part in parts]
        listed = [(rule and rule.also) or empty for rule, empty in zip(rules, none, strict=True)]
        also = Intervals.stack(listed, everyone).take_groups(group, used)
    part_of = np.searchsorted(first, used, side="right") - 1
    source = np.stack((part_of, used - first[part_of]), 1)
    solid = Predicate(bound, related, place.q_start, False, place.device, rules, source, also)
    return Bound(solid, edges)


def join_edges(listed: Sequence[Edges]) -> Edges | None:
    """Return one list of edges for several over the same groups; None for none."""
    if len(listed) < 2:
        return listed[0] if listed else None
    first = listed[0]
    row, key, edge_id = (
        np.concatenate([getattr(each, name) for each in listed]) for name in ("row", "key", "id")
    )
    return Edges.from_pairs(first.q_len, first.k_len, first.group, row, key, edge_id)
