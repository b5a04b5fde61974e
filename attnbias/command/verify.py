"""``attnbias verify``."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..arguments import device_of
from ..op import dispatch
from ..testing import checklist, soak
from ..testing.checklist import Line
from .watch import Watch


@dataclass
class Counts:
    """How many checks of a relation passed and failed on a backend."""

    passed: int = 0
    failed: int = 0

    def __str__(self) -> str:
        if self.failed:
            return f"{self.failed} of {self.passed + self.failed} WRONG"
        return f"{self.passed} ok" if self.passed else "-"


@dataclass
class Found:
    """Results of the checks so far."""

    lines: list[Line] = field(default_factory=list)

    @property
    def failures(self) -> list[Line]:
        """The lines that say what is wrong."""
        return [line for line in self.lines if line.fault]

    def by_relation(self) -> dict[str, dict[str, Counts]]:
        """Return the counts by relation, then by backend."""
        backends = list(dict.fromkeys(line.backend for line in self.lines))
        counts: dict[str, dict[str, Counts]] = {}
        for line in self.lines:
            row = counts.setdefault(line.relation, {name: Counts() for name in backends})
            mine = row[line.backend]
            mine.passed, mine.failed = mine.passed + (not line.fault), mine.failed + bool(line.fault)
        return counts

    def __str__(self) -> str:
        rows = self.by_relation()
        head = ["", *next(iter(rows.values()))]
        table = [head, *([name, *map(str, row.values())] for name, row in rows.items())]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        return "\n".join(
            "  ".join(
                [row[0].ljust(widths[0]), *(x.rjust(w) for x, w in zip(row[1:], widths[1:], strict=True))]
            )
            for row in table
        )


def verify(given: argparse.Namespace) -> int:
    """Run the checks; print a row per relation and what fails; return 1 if anything does."""
    device = device_of(given.device)
    if given.backend is not None:
        dispatch.check_name(given.backend, "--backend")
    if given.backend == "triton":
        import triton  # noqa: F401  # the backend looks at it for an interpreter or a driver
    if given.random is not None:
        return _verify_random(given, device)
    started, backend = time.monotonic(), given.backend
    lines = (
        checklist.long_lines(device, backend) if given.long else checklist.lines(device, backend, given.case)
    )
    found = _collect(lines, given)
    if not found.lines:
        raise ValueError(_why_nothing(given.case, backend, device))
    seconds, failed = time.monotonic() - started, len(found.failures)
    idle = {} if backend or given.long else _idle(found, device)
    if given.json:
        shown = found.lines if given.verbose else found.failures
        counts = {name: {of: vars(x) for of, x in row.items()} for name, row in found.by_relation().items()}
        result = {"device": device, "passed": len(found.lines) - failed, "failed": failed, "seconds": seconds}
        checks = [line._asdict() for line in shown]
        print(json.dumps({**result, "relations": counts, "checks": checks, "not_run": idle}))
        return 1 if failed else 0
    print(found)
    for name, why in idle.items():
        print(f"{name}: {why}")
    print(f"{len(found.lines) - failed} passed, {failed} failed on {device}, {seconds:.0f} s")
    return 1 if failed else 0


def _collect(lines: Iterable[Line], given: argparse.Namespace) -> Found:
    """Run the checks; print failures as they come, and every line if asked for."""
    found, watch = Found(), Watch()
    for line in lines:
        found.lines.append(line)
        if not given.json and (given.verbose or line.fault):
            watch.clear()
            print(line, flush=True)
        watch(f"{len(found.lines)} checks, {len(found.failures)} failed; {line.backend}: {line.relation}")
    watch.clear()
    return found


def _idle(found: Found, device: str) -> dict[str, str]:
    """Return the backends that ran no check, and why."""
    ran = {line.backend for line in found.lines}
    why = checklist.backends_of(device)
    return {name: why[name] or "refuses all of these checks" for name in why if name not in ran}


def _why_nothing(case: str, backend: str | None, device: str) -> str:
    if case and not any(case in str(check) for check in checklist.checks()):
        names = ", ".join(checklist.RELATIONS)
        return (
            f"--case: wanted part of a check's line, got {case!r}; the relations are {names}; "
            "`attnbias verify --verbose` prints all lines"
        )
    if backend is None:
        return f"nothing to verify: every backend refuses these checks on {device}"
    return f"nothing to verify: {backend} refuses all of these checks on {device}"


def _verify_random(given: argparse.Namespace, device: str) -> int:
    if given.random < 1:
        raise ValueError(f"--random: wanted at least 1 problem, got {given.random}")
    refused = bare = 0
    failures: list[dict[str, object]] = []
    started, watch = time.monotonic(), Watch()
    for number in range(given.random):
        seed = given.seed + number
        watch(f"{number} of {given.random} problems, {len(failures)} failed")
        try:
            drawn, faults, is_plain = soak.check(seed, given.backend, small=given.small, device=device)
        except NotImplementedError:
            refused += 1
            continue
        except Exception as error:  # the remaining problems are still worth checking
            failures.append({"seed": seed, "problem": None, "faults": [checklist.words_of(error)]})
            _tell(given, watch, f"FAILED seed {seed}: {checklist.words_of(error)}")
            continue
        bare += is_plain
        if faults:
            failures.append({"seed": seed, "problem": str(drawn), "faults": faults})
            _tell(given, watch, "\n  ".join([f"FAILED {drawn}", *faults]))
    watch.clear()
    seconds, failed = time.monotonic() - started, len(failures)
    passed, seeds = given.random - refused - failed, [given.seed, given.seed + given.random - 1]
    if given.json:
        counts = {"passed": passed, "failed": failed, "refused": refused, "without_options": bare}
        print(
            json.dumps({"device": device, **counts, "seconds": seconds, "seeds": seeds, "failures": failures})
        )
    else:
        print(
            f"{passed} passed, {failed} failed, "
            f"{refused} refused by {given.backend or 'the chosen backends'}, "
            f"{bare} run without the options that it refuses, {seconds:.0f} s, seeds {seeds[0]}..{seeds[1]}"
        )
    return 1 if failed or refused == given.random else 0


def _tell(given: argparse.Namespace, watch: Watch, text: str) -> None:
    if not given.json:
        watch.clear()
        print(text, flush=True)
