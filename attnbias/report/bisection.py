"""Repeat what failed in the smoke steps with one thing changed: the change that helps names the cause."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from ..kernels.launch.config import VARIABLE, target_of
from ..relations import Causal, Full, Relation, Window
from ..testing.shipped import Problem, Verdict
from . import smoke
from .runner import Outcome, Run, Status, Step

FLAGS = ("T", "N", "A", "P", "E2", "H", "F", "C64", "C128", "W")
# Changes of ATTNBIAS_TRITON, by what they switch off; the flags one by one, then more at once.
CHANGES = {
    "without TMA": "without T",
    **{f"without flag {letter}": f"without {letter}" for letter in FLAGS[1:]},
    "without any flag": f"without {' '.join(FLAGS)}",
    "in one stage": f"s1 without {' '.join(FLAGS)}",
    "in tiles of 16": "16x16 w4 s1",
}
# Other problems with the same kernels.
PROBLEMS: dict[str, Callable[[Problem], Problem]] = {
    "with list tiles of 64": lambda x: x._replace(tile=64),
    "full tiles only": lambda x: _with(x, Full(), 256),
    "masked tiles only": lambda x: _with(x, Window(before=31), 256),
    "float16": lambda x: x._replace(dtype=torch.float16),
}
FAILED = (Status.WRONG.value, Status.RAISED.value, Status.DEAD.value)


def _with(problem: Problem, relation: Relation, length: int) -> Problem:
    return problem._replace(relation=relation, length=length)


def failed(run: Run) -> list[tuple[int, int]]:
    """Return the head size and length of the first smoke step of each head size that failed."""
    found = run.found("smoke")
    first: dict[int, int] = {}
    for size in smoke.SIZES:
        for length in smoke.LENGTHS:
            if found.get(smoke.name_of(size, length), {}).get("status") in FAILED:
                first.setdefault(size, length)
    return list(first.items())


def steps(run: Run) -> Iterator[Step]:
    """Yield a step for every change, if a smoke step failed; none otherwise."""
    for size, length in failed(run):
        problem = Problem(Causal(), torch.bfloat16, size, length=length)
        start = f"bisect: D {size}, {length} tokens"
        yield Step(f"{start}, unchanged", partial(_check, run, problem, ""))
        if not isinstance(target_of(run.device), str):  # else there are no configurations to change
            for words, change in CHANGES.items():
                yield Step(f"{start}, {words}", partial(_check, run, problem, change))
        for words, other in PROBLEMS.items():
            yield Step(f"{start}, {words}", partial(_check, run, other(problem), ""))
        if run.device.type == "cuda":
            yield Step(f"{start}, launches that block", partial(_blocking, run, problem))


def _check(run: Run, problem: Problem, change: str) -> Outcome:
    with _changed(change):
        verdict: Verdict = problem.check(run.backend, run.device)
    return smoke.outcome_of(verdict)


def _changed(change: str) -> AbstractContextManager[None]:
    if not change:
        return nullcontext()
    from ..kernels.launch.tune import changed

    before = os.environ.get(VARIABLE, "")
    found: AbstractContextManager[None] = changed(f"{before}; {change}" if before else change)
    return found


def _blocking(run: Run, problem: Problem) -> Outcome:
    """Run the same check in a process whose launches wait, so that an error names its kernel."""
    given = ["verify", "--device", str(run.device), "--case", problem.name]
    done = subprocess.run(
        [sys.executable, "-m", "attnbias", *given, *(["--backend", run.backend] if run.backend else [])],
        env=os.environ | {"CUDA_LAUNCH_BLOCKING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    last = " | ".join((done.stdout + done.stderr).strip().splitlines()[-4:])
    status = Status.RIGHT if done.returncode == 0 else Status.WRONG if done.returncode == 1 else Status.RAISED
    return Outcome(status, last)


def verdicts(run: Run) -> list[str]:
    """Say in words which changes made a failing call right."""
    lines = []
    found = run.found("bisect")
    for size, length in failed(run):
        start = f"bisect: D {size}, {length} tokens, "
        mine = {name.removeprefix(start): x["status"] for name, x in found.items() if name.startswith(start)}
        if mine.get("unchanged") == Status.RIGHT.value:
            lines.append(f"D {size}: a second try was right: it fails by chance, which is a race")
            continue
        helped = [name for name, status in mine.items() if status == Status.RIGHT.value]
        lines.append(f"D {size}: right {', '.join(helped) if helped else 'in no way that was tried'}")
    return lines
