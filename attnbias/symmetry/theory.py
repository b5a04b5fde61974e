"""The report of ``attnbias theory``: the paper's claims checked on every backend, and its tables."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..attention import attention
from ..op import dispatch
from ..relations import Relation, Window
from .claims import PARTS, Attend, Claim
from .claims.measure import TOKENS, words_of
from .inclusion import FEW, Hierarchy, families, hierarchy
from .tables import SLIPS, TABLE_1, TABLE_2, Mechanism

PAPER = '"Relational inductive biases on attention mechanisms" (Mijangos et al.)'
_WIDTH, _INDENT = 110, " " * 7


@dataclass
class Verdict:
    """How a claim fared on each backend, with its own relation and with wrong ones."""

    claim: Claim
    held: list[str] = field(default_factory=list)  # backends
    failed: dict[str, list[str]] = field(default_factory=dict)  # backend: what contradicts the claim
    refused: dict[str, str] = field(default_factory=dict)  # backend: why it cannot run the check
    refuted: dict[Relation, list[str]] = field(default_factory=dict)  # wrong relation: where the check failed
    missed: dict[Relation, list[str]] = field(default_factory=dict)  # wrong relation: where it passed

    @property
    def holds(self) -> bool:
        """Whether it held wherever it could run, and every wrong relation was told apart there."""
        told_apart = all(relation in self.refuted for relation in self.claim.wrong)
        return bool(self.held) and told_apart and not self.failed and not self.missed

    def __str__(self) -> str:
        claim = self.claim
        words = claim.statement
        if claim.reading:
            truth = "true" if claim.reading.is_true else "false"
            words = f'read as {claim.reading.words}, "equivariant to translations" is {truth}: {words}'
        wrong = [*map(words_of, self.refuted)]
        lines = [
            f"{'holds' if self.holds else 'FAILS'}  {claim.name}, {claim.title}",
            words,
            f"only if: {claim.condition}" if claim.condition else "",
            _sentences(
                ("on", self.held),
                ("not on", [f"{name} ({'; '.join(faults)})" for name, faults in self.failed.items()]),
                ("not run by", list(self.refused)),
            ),
            f"fails for {', '.join(wrong)}" if wrong else "",
            *(
                f"DOES NOT FAIL for {words_of(relation)} on {', '.join(names)}"
                for relation, names in self.missed.items()
            ),
        ]
        return "\n".join([lines[0], *(_wrapped(line) for line in lines[1:] if line)])

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as JSON can hold it."""
        claim = self.claim
        return {
            "number": claim.number,
            "title": claim.title,
            "reading": claim.reading and claim.reading._asdict(),
            "statement": claim.statement,
            "condition": claim.condition,
            "relation": repr(claim.relation),
            "holds": self.holds,
            "held_on": self.held,
            "failed_on": self.failed,
            "not_run_by": self.refused,
            "fails_for": {repr(relation): names for relation, names in self.refuted.items()},
            "does_not_fail_for": {repr(relation): names for relation, names in self.missed.items()},
        }


@dataclass(frozen=True)
class Theory:
    """Everything that the command prints: ``str`` is the text, ``as_dict`` the same for machines."""

    parts: dict[str, list[Verdict]]

    @property
    def holds(self) -> bool:
        """Whether every claim held wherever it could run."""
        return all(verdict.holds for verdicts in self.parts.values() for verdict in verdicts)

    @cached_property
    def relations(self) -> Hierarchy:
        """The relations of Table 1 by inclusion, with masked attention as a case of strided."""
        named = {each.name: each.relation for each in TABLE_1}
        named[f"strided, p = {TOKENS - 1}"] = Window(before=TOKENS - 1)
        return hierarchy(named, TOKENS, TOKENS)

    @cached_property
    def mechanisms(self) -> Hierarchy:
        """The mechanisms of Table 1 by what they can relate."""
        return families()

    def __str__(self) -> str:
        lines = [
            f"{PAPER}, checked on attention of {TOKENS} tokens",
            "",
            "Definitions 1, 2 and 3 say what an inductive bias, a relational one and an equivariant function "
            "are: there is nothing to check.",
        ]
        for title, verdicts in self.parts.items():
            lines += ["", title, "", *map(str, verdicts)]
        lines += ["", "Table 1, the classification of attention mechanisms", ""]
        lines += ["mechanism: relations; symmetry group; data type", ""]
        for mechanism in TABLE_1:
            lines += _row(mechanism)
        lines += ["", f"Mechanisms by what they can relate (any two instances of {FEW} tokens)", ""]
        lines += [
            str(self.mechanisms),
            "",
            f"Relations by inclusion (the examples above, {TOKENS} tokens)",
            "",
        ]
        lines += [str(self.relations), "", "Table 2, attention-based models", ""]
        for model in TABLE_2:
            lines += [
                f"{model.name}: {model.attention} attention",
                _wrapped(model.uses),
                _wrapped(model.here),
            ]
        lines += ["", "Where the paper slips", ""]
        for slip in SLIPS:
            checked = f" (checked by {slip.claim})" if slip.claim else ""
            lines += [f"{slip.place}: {slip.printed}", _wrapped(slip.holds + checked)]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as JSON can hold it."""
        verdicts = [verdict for each in self.parts.values() for verdict in each]
        return {
            "paper": PAPER,
            "tokens": TOKENS,
            "holds": self.holds,
            "claims": [verdict.as_dict() for verdict in verdicts],
            "table_1": [_cells(mechanism) for mechanism in TABLE_1],
            "mechanisms": _edges(self.mechanisms),
            "relations": _edges(self.relations),
            "table_2": [model._asdict() for model in TABLE_2],
            "slips": [slip._asdict() for slip in SLIPS],
        }


def examine(watch: Callable[[str], object] = str) -> Theory:
    """Check every claim on every backend; ``watch`` hears the name of each before."""

    def check(claim: Claim) -> Verdict:
        watch(f"{claim.name}, {claim.title}")
        return _try(claim)

    return Theory({title: [check(claim) for claim in part] for title, part in PARTS.items()})


def backends() -> dict[str, Attend]:
    """Return attention on each backend, by name; ``run`` is a function to run there in its place."""

    def named(name: str) -> Attend:
        def attend(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            relation: Relation,
            run: Callable[..., Tensor] = attention,
            **options: Any,
        ) -> Tensor:
            place = "cuda" if dispatch.KERNELS["cuda"] == name and torch.cuda.is_available() else "cpu"
            q, k, v = query.to(place), key.to(place), value.to(place)
            with dispatch.use_backend(name):
                return run(q, k, v, relation, **options).cpu()

        return attend

    return {name: named(name) for name in dispatch.BACKENDS}


def _try(claim: Claim) -> Verdict:
    """Check a claim on every backend that can run it, with its own relation and with the wrong ones."""
    verdict = Verdict(claim)
    for name, attend in backends().items():
        try:
            faults = claim.faults(attend)
        except NotImplementedError as error:
            verdict.refused[name] = str(error)
            continue
        if faults:
            verdict.failed[name] = faults
        else:
            verdict.held.append(name)
        for relation, told_apart in _tell_apart(claim, attend):
            (verdict.refuted if told_apart else verdict.missed).setdefault(relation, []).append(name)
    return verdict


def _tell_apart(claim: Claim, attend: Attend) -> Iterator[tuple[Relation, bool]]:
    """Yield each wrong relation that the backend can run, and whether the check fails with it."""
    for relation in claim.wrong:
        try:
            yield relation, bool(claim.faults(attend, relation))
        except NotImplementedError:
            continue


def _row(mechanism: Mechanism) -> list[str]:
    """Return the lines of a row of Table 1."""
    group = mechanism.group
    name = group.name + (f", order {group.order}" if "_" in group.name else "")
    integers = "; of all integers: translations" if mechanism.is_of_translations else ""
    return [
        f"{mechanism.name}: {mechanism.relations}; {mechanism.symmetry}; {mechanism.data}",
        _wrapped(f"computed for {mechanism.example}"),
        _wrapped(f"properties: {mechanism.properties}"),
        _wrapped(f"symmetries of {TOKENS} tokens: {name}{integers}"),
    ]


def _cells(mechanism: Mechanism) -> dict[str, Any]:
    """Return a row of Table 1 for JSON."""
    return {
        "mechanism": mechanism.name,
        "relations": mechanism.relations,
        "symmetry_group": mechanism.symmetry,
        "data_type": mechanism.data,
        "example": repr(mechanism.relation),
        "properties": [name for name, held in vars(mechanism.properties).items() if held],
        "group": mechanism.group.name,
        "group_order": mechanism.group.order,
        "orbits": mechanism.group.orbits,
        "translations_on_integers": mechanism.is_of_translations,
    }


def _edges(found: Hierarchy) -> dict[str, Any]:
    covers = [(found.classes[smaller], found.classes[larger]) for smaller, larger in found.covers]
    return {"classes": found.classes, "smaller_larger": covers}


def _wrapped(text: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT)


def _sentences(*parts: tuple[str, list[str]]) -> str:
    return "; ".join(f"{what} {', '.join(names)}" for what, names in parts if names)
