"""The order of relations by inclusion; ``Relation.within`` decides a pair of them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from ..relations import Relation

is_within = Relation.within


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
