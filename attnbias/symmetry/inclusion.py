"""Which relation holds which: inclusion decided on ranges and edges, and the order it makes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..layouts.bound import Bound, aligned
from ..layouts.intervals import Intervals, align
from ..relations import Relation


def is_within(
    a: Relation,
    b: Relation,
    q_len: int,
    k_len: int,
    q_start: int | Literal["end"] = 0,
    *,
    batch: int | None = None,
    heads: int | None = None,
) -> bool:
    """Whether every pair of ``a`` is one of ``b``; written ``a.within(b, q_len, k_len)``."""
    first, second = (each.bind(q_len, k_len, q_start, batch=batch, heads=heads) for each in (a, b))
    known = _bound_within(*aligned((first, second)))
    if known is None:  # without exact forms each pair is tested, tile by tile
        return (a - b).count(q_len, k_len, q_start, batch=batch, heads=heads) == 0
    return known


def _bound_within(a: Bound, b: Bound) -> bool | None:
    """Whether one exact set holds another, over the same groups; None where one is a predicate."""
    if not (isinstance(a.solid, Intervals | None) and isinstance(b.solid, Intervals | None)):
        return None
    if a.edges is not None and not b.contains(a.edges.row, a.edges.key).all():
        return False
    if a.solid is None:
        return True
    if b.edges is None:
        assert b.solid is not None
        return _ranges_within(a.solid, b.solid)
    rest = a.solid if b.solid is None else a.solid - b.solid
    if int(rest.counts().sum()) > len(b.edges.key):
        return False
    return bool(b.edges.contains(*rest.pairs()).all())


def _ranges_within(a: Intervals, b: Intervals) -> bool:
    a, b = align(a, b)
    if a.single and b.single:
        (a_start, a_stop), (b_start, b_stop) = a.single, b.single
        return bool((((a_start >= b_start) & (a_stop <= b_stop)) | (a_start == a_stop)).all())
    # A range lies in the one that begins last before it, or in none: touching ones are joined.
    span = a.k_len + 1
    at = np.searchsorted(b.row * span + b.start, a.row * span + a.start, side="right") - 1
    reach = np.append(b.row * span + b.stop, -1)[at]
    return bool((a.row * span + a.stop <= reach).all())


@dataclass(frozen=True)
class Hierarchy:
    """Relations by inclusion; print it to see it, the largest first.

    Relations with the same pairs share a class; ``covers`` holds (smaller, larger) pairs of classes with none
    between them.
    """

    classes: tuple[tuple[str, ...], ...]  # names, by number of pairs, largest first
    covers: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        def name(number: int) -> str:
            return " = ".join(self.classes[number])

        lines = []
        for number in range(len(self.classes)):
            above = [name(larger) for smaller, larger in self.covers if smaller == number]
            lines.append(f"{name(number)}{'  <  ' if above else ''}{', '.join(above)}")
        return "\n".join(lines)


def hierarchy(relations: Mapping[str, Relation], q_len: int, k_len: int) -> Hierarchy:
    """Order relations by inclusion at these lengths.

    Example:
        >>> import attnbias as ab
        >>> mechanisms = {"self": ab.Full(), "masked": ab.Causal(), "strided": ab.Window(before=2)}
        >>> print(hierarchy(mechanisms, 8, 8))
        self
        masked  <  self
        strided  <  masked
    """
    sizes = {name: relation.count(q_len, k_len) for name, relation in relations.items()}
    classes: list[list[str]] = []
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        for known in classes:
            if relations[name].equivalent(relations[known[0]], q_len, k_len):
                known.append(name)
                break
        else:
            classes.append([name])
    numbers = range(len(classes))
    below = {
        (i, j)
        for i, j in itertools.permutations(numbers, 2)
        if relations[classes[i][0]].within(relations[classes[j][0]], q_len, k_len)
    }
    covers = [
        (i, j) for i, j in sorted(below) if not any((i, m) in below and (m, j) in below for m in numbers)
    ]
    return Hierarchy(tuple(map(tuple, classes)), tuple(covers))
