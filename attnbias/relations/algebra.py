"""Combinations of relations: ``& | ~``, transposes, shifts, relabellings, and one per head or batch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor

from ..layouts.bound import Bound, Place, complement, intersect, join_edges, unite
from ..layouts.edges import Edges
from ..layouts.intervals import Ints, count_groups
from ..layouts.predicate import Predicate
from .fields import show
from .patterns import Causal, Empty, Full, Window, window_of
from .relation import Relation, as_count, as_indices


def conjunction(*parts: Relation) -> Relation:
    """``a & b``, kept small: no doubles, no Full, windows merged into one."""
    if any(isinstance(part, Empty) for part in parts):
        return Empty()
    return _combine(And, Full, min, parts)


def disjunction(*parts: Relation) -> Relation:
    """``a | b``, kept small: no doubles, no Empty, windows merged into one."""
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
    """Whether two parts are one: both windows, or equal without a look at their data."""
    if type(a) in _WINDOWS:
        # Windows all hold the diagonal, so their union is one window as well.
        return type(b) in _WINDOWS
    data = zip(a.recipe.data, b.recipe.data, strict=False)
    return a.recipe.text == b.recipe.text and all(x is y for x, y in data)


class Wrapper(Relation):
    """What relations made of relations share."""

    def inner(self) -> tuple[Relation, ...]:
        """The relations inside."""
        raise NotImplementedError

    @property
    def batch_size(self) -> int | None:
        return common_size("batch", [part.batch_size for part in self.inner()])

    @property
    def head_count(self) -> int | None:
        return common_size("heads", [part.head_count for part in self.inner()])

    @property
    def lengths(self) -> tuple[int | None, int | None]:
        known = [part.lengths for part in self.inner()]
        queries = next((q for q, _ in known if q is not None), None)
        return queries, next((k for _, k in known if k is not None), None)

    @property
    def stationary(self) -> bool:
        return all(part.stationary for part in self.inner())

    def check(
        self,
        q_len: int,
        k_len: int,
        q_start: int = 0,
        batch: int | None = None,
        heads: int | None = None,
    ) -> None:
        for part in self.inner():
            part.check(q_len, k_len, q_start, batch, heads)

    @property
    def repeats(self) -> bool:  # type: ignore[override]
        return any(part.repeats for part in self.inner())

    @property
    def _device(self) -> torch.device | str:
        places = [part._device for part in self.inner()]
        return next((place for place in places if str(place) != "cpu"), "cpu")

    def _numbers(self) -> int:
        return 0


def common_size(what: str, sizes: Sequence[int | None]) -> int | None:
    """The one size, beside 1 and None (any), that parts have; raises where there are two."""
    known = {size for size in sizes if size not in (1, None)}
    if len(known) > 1:
        raise ValueError(f"relation: parts for {what} {sorted(known)} do not combine")
    if known:
        return known.pop()
    return None if None in sizes else 1


class _Many(Wrapper):
    parts: tuple[Relation, ...]
    symbol: ClassVar[str]

    def inner(self) -> tuple[Relation, ...]:
        return self.parts

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.batch_size, self.head_count  # parts that do not combine are told now

    def _content(self) -> Hashable:
        return type(self), frozenset(part._content() for part in self.parts)

    def __repr__(self) -> str:
        return f"({f' {self.symbol} '.join(repr(part) for part in self.parts)})"

    @property
    def T(self) -> Relation:
        return type(self)(tuple(part.T for part in self.parts))

    def _fold(self, join: Callable[[Tensor, Tensor], Tensor], *at: Tensor | None) -> Tensor:
        first, *rest = (part.related(*at) for part in self.parts)  # type: ignore[arg-type]
        for each in rest:
            first = join(first, each)
        return first


class And(_Many):
    """Pairs that every part relates; written ``a & b``.

    Duplicate edges of a graph stay duplicate; a pair of two graphs counts as often as in the one that has
    it more often.
    """

    parts: tuple[Relation, ...]
    symbol = "&"

    @property
    def listed(self) -> bool:  # type: ignore[override]
        return any(part.listed for part in self.parts)

    @property
    def least_keys(self) -> int:  # type: ignore[override]
        return max(part.least_keys for part in self.parts)

    def related(self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        return self._fold(torch.logical_and, q, k, b, h)

    def multiplicity(
        self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None
    ) -> Tensor | None:
        counts = [each for part in self.parts if (each := part.multiplicity(q, k, b, h)) is not None]
        return reduce(torch.maximum, counts) * self.related(q, k, b, h) if counts else None

    def _bind(self, at: Place) -> Bound:
        # A graph first: its edges keep their numbers where another part lists the same pairs.
        parts = sorted(self.parts, key=lambda part: not part.listed)
        bound, *rest = (part._bind(at) for part in parts)
        for each in rest:
            bound = intersect(bound, each)
        return bound

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

    parts: tuple[Relation, ...]
    symbol = "|"

    repeats = False  # a set

    def related(self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        return self._fold(torch.logical_or, q, k, b, h)

    def _bind(self, at: Place) -> Bound:
        return unite([part._bind(at) for part in self.parts], self.related, self.stationary)


class _One(Wrapper):
    relation: Relation

    def inner(self) -> tuple[Relation, ...]:
        return (self.relation,)


class Not(_One):
    """Pairs that the relation does not relate; written ``~a``."""

    relation: Relation
    repeats = False  # a set

    def related(self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        return ~self.relation.related(q, k, b, h)

    def _bind(self, at: Place) -> Bound:
        return complement(self.relation._bind(at), at, self.related, self.stationary)

    def __invert__(self) -> Relation:
        return self.relation

    @property
    def T(self) -> Relation:
        return Not(self.relation.T)

    def __repr__(self) -> str:
        return f"(~{self.relation!r})"


class Transposed(_One):
    """The reverse relation; written ``a.T``."""

    relation: Relation

    def related(self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        return self.relation.related(k, q, b, h)

    def multiplicity(
        self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None
    ) -> Tensor | None:
        return self.relation.multiplicity(k, q, b, h)

    @property
    def lengths(self) -> tuple[int | None, int | None]:
        queries, keys = self.relation.lengths
        return keys, queries

    def check(
        self,
        q_len: int,
        k_len: int,
        q_start: int = 0,
        batch: int | None = None,
        heads: int | None = None,
    ) -> None:
        Relation.check(self, q_len, k_len, q_start, batch, heads)

    def _bind(self, at: Place) -> Bound:
        if at.q_start < 0 and not self.relation.listed:
            return super()._bind(at)  # keys before the first: only the definition knows them
        length = self.lengths[0]
        if length is None:
            length = max(at.q_start + at.q_len, self.relation.least_keys)
        inner = self.relation._bind(replace(at, q_len=at.k_len, k_len=length, q_start=0))
        if isinstance(inner.solid, Predicate):
            return super()._bind(at)
        rows = at.positions
        solid = None if inner.solid is None else _rows(inner.solid.transpose(), rows)
        edges = None
        if inner.edges is not None:
            turned = inner.edges.turned
            edges = _rows(replace(turned, id=inner.edges.id[turned.id]), rows)
        return Bound(solid, edges)

    @property
    def T(self) -> Relation:
        return self.relation

    def __repr__(self) -> str:
        return f"{self.relation!r}.T"


def _rows(form: Any, positions: Ints) -> Any:
    """The rows of a form at the given positions, in every group; where it has none, empty ones."""
    rows = np.arange(count_groups(form.group))[:, None] * form.q_len + positions
    exists = (positions >= 0) & (positions < form.q_len)
    rows = np.where(exists, rows, form.rows).reshape(-1)
    one_more = replace(form, ptr=np.append(form.ptr, form.ptr[-1]))
    return one_more.take_rows(rows, len(positions))


def shifted(relation: Relation, distance: int) -> Relation:
    """Move every key; several shifts become one."""
    distance = as_count("distance", distance, least=-(2**62))
    if isinstance(relation, Shifted):
        return shifted(relation.relation, relation.distance + distance)
    return relation if distance == 0 else Shifted(relation, distance)


class Shifted(_One):
    """The relation with every key moved; written ``a.shift(n)``."""

    relation: Relation
    distance: int

    def related(self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        related = self.relation.related(q, k - self.distance, b, h)
        return related if self.lengths[1] is None else related & self._has(k)

    def _has(self, k: Tensor) -> Tensor:
        """Whether the key's data came from somewhere: beyond the ends of data nothing is related."""
        return (k >= self.distance) & (k - self.distance < cast(int, self.lengths[1]))

    def multiplicity(
        self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None
    ) -> Tensor | None:
        counts = self.relation.multiplicity(q, k - self.distance, b, h)
        return counts if counts is None or self.lengths[1] is None else counts * self._has(k)

    def _bind(self, at: Place) -> Bound:
        if self.stationary:
            inner = self.relation._bind(replace(at, q_start=at.q_start + self.distance))
            return super()._bind(at) if isinstance(inner.solid, Predicate) else inner
        keys = self.lengths[1]
        if keys is None:
            if self.distance > 0 and not self.relation.listed:
                return super()._bind(at)  # keys before the first: only the definition knows them
            keys = max(at.k_len, at.k_len - self.distance, self.relation.least_keys)
        inner = self.relation._bind(replace(at, k_len=keys))
        if isinstance(inner.solid, Predicate):
            return super()._bind(at)
        moved = [
            None if form is None else form.shift(self.distance, at.k_len)
            for form in (inner.solid, inner.edges)
        ]
        return Bound(*moved)  # type: ignore[arg-type]

    @property
    def T(self) -> Relation:
        return Transposed(self)

    def __repr__(self) -> str:
        return f"{self.relation!r}.shift({self.distance})"


class Permuted(_One):
    """The relation among relabelled tokens; written ``a.permute(order)``."""

    relation: Relation
    order: Tensor  # [L]

    def __post_init__(self) -> None:
        object.__setattr__(self, "order", as_indices("order", self.order, (1,)))
        length = len(self.order)
        if not torch.equal(self.order.sort()[0].cpu(), torch.arange(length, device="cpu")):
            raise ValueError(f"order: wanted each of 0..{length - 1} once, got something else")
        super().__post_init__()

    @property
    def lengths(self) -> tuple[int | None, int | None]:
        return len(self.order), len(self.order)

    @property
    def stationary(self) -> bool:
        return False

    def _old(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """The old position, and whether there is one."""
        exists = (position >= 0) & (position < len(self.order))
        order = self.order.to(position.device)
        if not len(order):
            return position, exists
        return order[position.clamp(0, len(order) - 1)], exists

    def related(self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        (old_q, in_q), (old_k, in_k) = self._old(q), self._old(k)
        return self.relation.related(old_q, old_k, b, h) & in_q & in_k

    def multiplicity(
        self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None
    ) -> Tensor | None:
        (old_q, in_q), (old_k, in_k) = self._old(q), self._old(k)
        counts = self.relation.multiplicity(old_q, old_k, b, h)
        return None if counts is None else counts * (in_q & in_k)

    def check(
        self,
        q_len: int,
        k_len: int,
        q_start: int = 0,
        batch: int | None = None,
        heads: int | None = None,
    ) -> None:
        Relation.check(self, q_len, k_len, q_start, batch, heads)
        self.relation.check(len(self.order), len(self.order), 0, batch, heads)

    def _bind(self, at: Place) -> Bound:
        length = len(self.order)
        inner = self.relation._bind(replace(at, q_len=length, k_len=length, q_start=0))
        if isinstance(inner.solid, Predicate):
            return super()._bind(at)
        listed = [] if inner.edges is None else [inner.edges]
        if inner.solid is not None:
            if int(inner.solid.counts().sum()) > _PAIRS_PER_ROW * max(inner.solid.rows, 1):
                return super()._bind(at)  # scattered pairs are too many to list
            row, key = inner.solid.pairs()
            listed.append(Edges.from_pairs(length, length, inner.group, row, key))
        order = self.order.cpu().numpy()
        new = np.argsort(order)
        edges = [
            Edges.from_pairs(
                length,
                length,
                form.group,
                form.row // length * length + new[form.row % length],
                new[form.key],
                form.id,
            )
            for form in listed
        ]
        return Bound(None, join_edges([_rows(form, at.positions) for form in edges]))

    @property
    def T(self) -> Relation:
        return Permuted(self.relation.T, self.order)

    def _numbers(self) -> int:
        return len(self.order)

    def __repr__(self) -> str:
        return f"{self.relation!r}.permute({show(self.order)})"


_PAIRS_PER_ROW = 64
