"""Relations made of relations: ``& | ~``, transposes, shifts and relabellings."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import reduce
from typing import cast

import numpy as np
import torch
from torch import Tensor

from ..arguments import as_count, as_indices
from ..layouts import outline
from ..layouts.outline import Outline
from ..sets.bound import MANY_RANGES, MOST_PER_ROW, Bound, Place, complement, intersect, unite
from ..sets.edges import Edges
from ..sets.permute import permute
from ..sets.predicate import Predicate
from .patterns import Causal, Empty, Full, Window, window_of
from .ranges import ranges_of
from .relation import Algebra, Relation
from .value import show


def conjunction(*parts: Relation) -> Relation:
    """Return ``a & b``, kept small: no doubles, no Full, windows merged into one."""
    if any(isinstance(part, Empty) for part in parts):
        return Empty()
    return _combine(And, Full, min, parts)


def disjunction(*parts: Relation) -> Relation:
    """Return ``a | b``, kept small: no doubles, no Empty, windows merged into one."""
    if any(isinstance(part, Full) for part in parts):
        return Full()
    return _combine(Or, Empty, max, parts)


def _combine(
    kind: type[And] | type[Or],
    neutral: type[Relation],
    pick: Callable[[float, float], float],
    parts: Sequence[Relation],
) -> Relation:
    kept: list[Relation] = []
    for part in parts:
        for each in part.parts if isinstance(part, kind) else (part,):
            place = next((i for i, other in enumerate(kept) if _are_one(each, other)), None)
            if place is None:
                kept.append(each)
            elif type(each) in _WINDOWS:
                both = zip(cast(Window, kept[place]).band, cast(Window, each).band, strict=True)
                kept[place] = window_of(*(pick(mine, other) for mine, other in both))
    kept = [each for each in kept if not isinstance(each, neutral)]
    if not kept:
        return neutral()
    return kept[0] if len(kept) == 1 else kind(tuple(kept))


_WINDOWS = (Causal, Window)  # themselves: a subclass may relate other pairs


def _are_one(a: Relation, b: Relation) -> bool:
    """Return whether two parts are one: both windows, or equal without a look at their data."""
    if type(a) in _WINDOWS:
        # Windows all hold the diagonal, so their union is one window as well.
        return type(b) in _WINDOWS
    data = zip(a.recipe.data, b.recipe.data, strict=False)
    return a.recipe.text == b.recipe.text and all(x is y for x, y in data)


class Compound(Relation):
    """A relation made of others: it fits where all of them fit."""

    @property
    def inner(self) -> Sequence[Relation]:
        """The relations inside."""
        raise NotImplementedError

    @property
    def batch_size(self) -> int | None:
        return _common_size("batch", [part.batch_size for part in self.inner])

    @property
    def head_count(self) -> int | None:
        return _common_size("heads", [part.head_count for part in self.inner])

    @property
    def lengths(self) -> tuple[int | None, int | None]:
        known = [part.lengths for part in self.inner]
        queries = next((q for q, _ in known if q is not None), None)
        return queries, next((k for _, k in known if k is not None), None)

    @property
    def stationary(self) -> bool:
        return all(part.stationary for part in self.inner)

    @property
    def repeats(self) -> bool:
        return any(part.repeats for part in self.inner)

    def _check(self, at: Place) -> None:
        for part in self.inner:
            part._check(at)

    @property
    def _device(self) -> torch.device | str:
        return next((part._device for part in self.inner if str(part._device) != "cpu"), "cpu")

    def _numbers(self) -> int:
        return 0  # the parts abbreviate themselves


def _common_size(what: str, sizes: Sequence[int | None]) -> int | None:
    """Return the one size other than 1 and None (any) that parts have; raise where there are two."""
    known = {size for size in sizes if size not in (1, None)}
    if len(known) > 1:
        raise ValueError(f"relation: parts for {what} {sorted(known)} do not combine")
    if known:
        return known.pop()
    return None if None in sizes else 1


class _Many(Compound):
    parts: tuple[Relation, ...]
    symbol = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.batch_size, self.head_count  # raises if the parts do not combine

    @property
    def inner(self) -> tuple[Relation, ...]:
        return self.parts

    @property
    def _content(self) -> Hashable:
        return type(self), frozenset(part._content for part in self.parts)

    def __repr__(self) -> str:
        return f"({f' {self.symbol} '.join(repr(part) for part in self.parts)})"

    def _outline_parts(
        self, at: Place, tile: int, join: Callable[[Sequence[Outline]], Outline]
    ) -> Outline | None:
        parts = [part._outline(at, tile) for part in self.parts]
        known = [part for part in parts if part is not None]
        return join(known) if len(known) == len(parts) else None

    @property
    def T(self) -> Relation:
        return type(self)(tuple(part.T for part in self.parts))


class And(_Many):
    """Pairs that every part relates; written ``a & b``.

    Duplicate edges of a graph stay duplicate; a pair of two graphs counts as often as in the one that has
    it more often.
    """

    symbol = "&"

    @property
    def listed(self) -> bool:
        return any(part.listed for part in self.parts)

    def related(self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        return reduce(torch.logical_and, [part.related(q, k, b, h) for part in self.parts])

    def multiplicity(
        self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None
    ) -> Tensor | None:
        counts = [each for part in self.parts if (each := part.multiplicity(q, k, b, h)) is not None]
        return reduce(torch.maximum, counts) * self.related(q, k, b, h) if counts else None

    def _bind(self, at: Place) -> Bound:
        # A graph first: its edges keep their numbers where another part lists the same pairs.
        parts = sorted(self.parts, key=lambda part: not part.listed)
        rule = at.rule(self.related)
        return reduce(lambda a, b: intersect(a, b, rule), [part._bind(at) for part in parts])

    def _outline(self, at: Place, tile: int) -> Outline | None:
        return self._outline_parts(at, tile, outline.intersect)

    # Moved and relabelled part by part where a graph is among them, which stays a list of edges then.

    def shift(self, distance: int) -> Relation:
        if not self.repeats:
            return super().shift(distance)
        return conjunction(*(part.shift(distance) for part in self.parts))

    def permute(self, order: Tensor | Sequence[int]) -> Relation:
        if not self.repeats:
            return super().permute(order)
        return conjunction(*(part.permute(order) for part in self.parts))


class Or(_Many):
    """Pairs that some part relates; written ``a | b``."""

    symbol = "|"
    repeats = False  # a set

    def related(self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        return reduce(torch.logical_or, [part.related(q, k, b, h) for part in self.parts])

    def _bind(self, at: Place) -> Bound:
        return unite([part._bind(at) for part in self.parts], at.rule(self.related), self.stationary)

    def _outline(self, at: Place, tile: int) -> Outline | None:
        return self._outline_parts(at, tile, outline.unite)


class _One(Compound):
    relation: Relation

    @property
    def inner(self) -> tuple[Relation, ...]:
        return (self.relation,)


class Not(_One):
    """Pairs that the relation does not relate; written ``~a``."""

    repeats = False  # a set

    def related(self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        return ~self.relation.related(q, k, b, h)

    def _bind(self, at: Place) -> Bound:
        return complement(self.relation._bind(at), at, at.rule(self.related), self.stationary)

    def _outline(self, at: Place, tile: int) -> Outline | None:
        inner = self.relation._outline(at, tile)
        return None if inner is None else inner.invert()

    def __invert__(self) -> Relation:
        return self.relation

    @property
    def T(self) -> Relation:
        return Not(self.relation.T)

    def __repr__(self) -> str:
        return f"(~{self.relation!r})"


class Moved(_One):
    """Pairs that the relation relates at other positions, which a subclass gives as a rule and exactly."""

    def _source(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the positions of pairs in the relation, and which exist there (None: all)."""
        raise NotImplementedError

    def related(self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        q, k, exists = self._source(q, k)
        related = self.relation.related(q, k, b, h)
        return related if exists is None else related & exists

    def multiplicity(
        self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None
    ) -> Tensor | None:
        q, k, exists = self._source(q, k)
        counts = self.relation.multiplicity(q, k, b, h)
        return counts if counts is None or exists is None else counts * exists

    def _bind(self, at: Place) -> Bound:
        moved = self._move(at)
        return super()._bind(at) if moved is None else moved

    def _move(self, at: Place) -> Bound | None:
        """Return the exact pairs; None where the relation has none, or only the definition knows them."""
        raise NotImplementedError


class Transposed(Moved):
    """The reverse relation; written ``a.T``."""

    @property
    def lengths(self) -> tuple[int | None, int | None]:
        queries, keys = self.relation.lengths
        return keys, queries

    def _check(self, at: Place) -> None:
        Relation._check(self, at)

    def _source(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        return k, q, None

    def _move(self, at: Place) -> Bound | None:
        length, first = self.lengths[0], at.q_start
        turned = at._replace(q_len=at.k_len, q_start=at.k_start, is_moved=True)
        if length is None:
            inner = self.relation._bind(turned._replace(k_len=at.q_len, k_start=first))
            first = 0
        else:  # data for so many keys, of which some are asked for
            inner = self.relation._bind(turned._replace(k_len=length, k_start=0))
        if isinstance(inner.solid, Predicate):
            return None
        edges = None
        if inner.edges is not None:
            edges = inner.edges.turned
            edges = replace(edges, id=inner.edges.id[edges.id]).take_queries(first, at.q_len)
        solid = None if inner.solid is None else inner.solid.transpose().take_queries(first, at.q_len)
        return Bound(solid, edges)

    def _outline(self, at: Place, tile: int) -> Outline | None:
        turned = at._replace(
            q_len=at.k_len, k_len=at.q_len, q_start=at.k_start, k_start=at.q_start, is_moved=True
        )
        inner = self.relation._outline(turned, tile)
        return super()._outline(at, tile) if inner is None else inner.turn()

    @property
    def T(self) -> Relation:
        return self.relation

    def __repr__(self) -> str:
        return f"{self.relation!r}.T"


def shifted(relation: Relation, distance: int) -> Relation:
    """Move every key; several shifts become one."""
    distance = as_count("distance", distance, least=-(2**62))
    if isinstance(relation, Shifted):
        return shifted(relation.relation, relation.distance + distance)
    return relation if distance == 0 else Shifted(relation, distance)


class Shifted(Moved):
    """The relation with every key moved; written ``a.shift(n)``."""

    distance: int

    def _check(self, at: Place) -> None:
        super()._check(at._replace(k_start=at.k_start - self.distance))

    def _source(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        keys = self.lengths[1]  # beyond the ends of data nothing is related
        exists = None if keys is None else (k >= self.distance) & (k - self.distance < keys)
        return q, k - self.distance, exists

    def _move(self, at: Place) -> Bound | None:
        keys, distance = self.lengths[1], self.distance - at.k_start
        if keys is None:
            return self.relation._bind(at._replace(k_start=-distance, is_moved=True))
        inner = self.relation._bind(at._replace(k_len=keys, k_start=0, is_moved=True))
        if isinstance(inner.solid, Predicate):
            return None
        solid = None if inner.solid is None else inner.solid.shift(distance, at.k_len)
        edges = None if inner.edges is None else inner.edges.shift(distance, at.k_len)
        return Bound(solid, edges)

    def _outline(self, at: Place, tile: int) -> Outline | None:
        inner = self.relation._outline(at._replace(k_start=at.k_start - self.distance, is_moved=True), tile)
        if inner is None:
            return super()._outline(at, tile)
        keys = self.lengths[1]
        if keys is None:
            return inner
        return outline.intersect((inner, outline.outline_keys(self.distance, self.distance + keys, at, tile)))

    def __repr__(self) -> str:
        return f"{self.relation!r}.shift({self.distance})"


class Permuted(Moved):
    """The relation among relabelled tokens; written ``a.permute(order)``."""

    order: Tensor  # [L]
    stationary = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "order", as_indices("order", self.order, (1,)))
        length = len(self.order)
        if not torch.equal(self.order.sort()[0].cpu(), torch.arange(length, device="cpu")):
            raise ValueError(f"order: wanted each of 0..{length - 1} once, got {show(self.order)}")
        super().__post_init__()

    @property
    def lengths(self) -> tuple[int, int]:
        return len(self.order), len(self.order)

    def _check(self, at: Place) -> None:
        Relation._check(self, at)
        self.relation._check(Place(*self.lengths, 0, at.batch, at.heads))

    def _old(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Return the old position, and whether there is one."""
        exists = (position >= 0) & (position < len(self.order))
        order = self.order.to(position.device)
        if not len(order):
            return position, exists
        return order[position.clamp(0, len(order) - 1)], exists

    def _source(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        (old_q, in_q), (old_k, in_k) = self._old(q), self._old(k)
        return old_q, old_k, in_q & in_k

    def _move(self, at: Place) -> Bound | None:
        length = len(self.order)
        inner = self.relation._bind(at._replace(q_len=length, k_len=length, q_start=0))
        if isinstance(inner.solid, Predicate):
            return None
        order, solid, edges = self.order.cpu().numpy(), None, None
        if inner.solid is not None:
            solid = permute(inner.solid, order, max(MOST_PER_ROW * inner.solid.rows, MANY_RANGES))
            if solid is None:
                return None  # scattered: as many ranges as tests
            solid = solid.take_queries(at.q_start, at.q_len)
        if inner.edges is not None:
            new = np.argsort(order)
            row, key = inner.edges.row, new[inner.edges.key]
            row = row // length * length + new[row % length]
            edges = Edges.from_pairs(length, length, inner.group, row, key, inner.edges.id)
            edges = edges.take_queries(at.q_start, at.q_len)
        return Bound(solid, edges)

    @property
    def T(self) -> Relation:
        return Permuted(self.relation.T, self.order)

    def __repr__(self) -> str:
        return f"{self.relation!r}.permute({show(self.order)})"


Relation._algebra = Algebra(conjunction, disjunction, Not, Transposed, shifted, Permuted, ranges_of)
