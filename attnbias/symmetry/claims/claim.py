"""A claim: a statement of the paper, and how it is checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ...relations import Relation

Attend = Callable[..., Tensor]  # (query, key, value, relation, **options of attention or run=) -> out
Check = Callable[[Attend, Relation], list[str]]


class Reading(NamedTuple):
    """One sense in which a sentence of the paper can be taken, and whether the sentence is true in it."""

    number: int
    words: str
    is_true: bool


@dataclass(frozen=True)
class Claim:
    """A statement, the relation it is about, and a check that lists what contradicts it.

    The check attends with the relation that it is given. With the claim's own it finds nothing; with each
    wrong one it must find something, or it would be no check.
    """

    number: str  # the paper's
    title: str  # the paper's, where it has one
    statement: str
    relation: Relation
    wrong: tuple[Relation, ...]
    check: Check
    condition: str = ""  # the claim does not hold without it
    reading: Reading | None = None

    @property
    def name(self) -> str:
        """The number, with that of the reading."""
        return f"{self.number}, reading {self.reading.number}" if self.reading else self.number

    def faults(self, attend: Attend, relation: Relation | None = None) -> list[str]:
        """List what contradicts the claim when a backend attends with this relation; None is its own."""
        return self.check(attend, self.relation if relation is None else relation)


class Claims(list[Claim]):
    """Claims in their order; ``@claims.add(number, title, ...)`` makes a function the check of the next."""

    def add(
        self,
        number: str,
        title: str,
        statement: str,
        relation: Relation,
        wrong: tuple[Relation, ...],
        condition: str = "",
        reading: Reading | None = None,
    ) -> Callable[[Check], Check]:
        """Make a function the check of a claim with these fields."""

        def append(check: Check) -> Check:
            self.append(Claim(number, title, statement, relation, wrong, check, condition, reading))
            return check

        return append
