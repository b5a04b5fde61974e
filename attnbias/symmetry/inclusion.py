"""The order of relations and of mechanisms by inclusion; ``Relation.within`` decides a pair of relations."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..relations import Bipartite, Causal, Full, Relation, Window

FEW = 3  # tokens of which every relation is listed: 2^9
is_within = Relation.within


@dataclass(frozen=True)
class Hierarchy:
    """Relations by inclusion; print it to see it, the largest first.

    Relations with the same pairs share a class; ``covers`` holds (smaller, larger) pairs of classes with none
    between them.

    Example:
        >>> import attnbias as ab
        >>> from attnbias.symmetry import hierarchy
        >>> print(hierarchy({"all": ab.Full(), "before": ab.Causal()}, 4))
        all
        before  <  all
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


def hierarchy(relations: Mapping[str, Relation], q_len: int, k_len: int | None = None) -> Hierarchy:
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
    return order(sizes, lambda a, b: relations[a].within(relations[b], q_len, k_len))


def order(sizes: Mapping[str, int], is_inside: Callable[[str, str], bool]) -> Hierarchy:
    """Order named sets by inclusion; one inside another of the same size is the same."""
    classes: list[list[str]] = []
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        for known in classes:
            if sizes[name] == sizes[known[0]] and is_inside(name, known[0]):
                known.append(name)
                break
        else:
            classes.append([name])
    numbers = range(len(classes))
    below = {(i, j) for i, j in itertools.permutations(numbers, 2) if is_inside(classes[i][0], classes[j][0])}
    covers = [
        (i, j) for i, j in sorted(below) if not any((i, m) in below and (m, j) in below for m in numbers)
    ]
    return Hierarchy(tuple(map(tuple, classes)), tuple(covers))


def families() -> Hierarchy:
    """Order mechanisms by what they can relate, among ``FEW`` tokens: is each layer of one one of the other?

    A mechanism is the set of its choices of a relation for each of two instances. Graph attention has any two
    relations, sparse attention any one for both; the others have that of self-attention, masked attention,
    each window of strided attention, each split of encoder-decoder attention.

    Example:
        >>> print(families())
        graph
        sparse  <  graph
        strided  <  sparse
        encoder-decoder  <  sparse
        self  <  sparse
        masked  <  strided
    """

    def table(relation: Relation) -> int:  # its pairs, as bits
        return sum(1 << i for i, is_pair in enumerate(relation.dense(FEW, FEW).flatten().tolist()) if is_pair)

    every = range(1 << FEW * FEW)
    choices: dict[str, set[tuple[int, int]]] = {
        "graph": set(itertools.product(every, every)),
        "sparse": {(one, one) for one in every},
    }
    for name, relations in (
        ("strided", [Window(before=p) for p in range(FEW)]),
        ("encoder-decoder", [Bipartite(split) for split in range(1, FEW)]),
        ("self", [Full()]),
        ("masked", [Causal()]),
    ):
        choices[name] = {(table(relation), table(relation)) for relation in relations}
    sizes = {name: len(chosen) for name, chosen in choices.items()}
    return order(sizes, lambda a, b: choices[a] <= choices[b])
