"""The shipped kernels against float64, and what only hardware can break."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

from ..testing import shipped
from .runner import Outcome, Run, Status, Step
from .smoke import outcome_of

TOOLS = ("memcheck", "racecheck")  # of compute-sanitizer


def steps(run: Run) -> Iterator[Step]:
    """Yield the checks of ``attnbias verify --device cuda`` that come first there."""
    for check in shipped.checks(run.backend, run.device, quick=run.quick):
        yield Step(f"table: {check.name}", partial(_check, check))
    command = shutil.which("compute-sanitizer")
    if run.device.type == "cuda" and command and not run.quick:
        for tool in TOOLS:
            yield Step(f"table: compute-sanitizer {tool}", partial(_sanitize, run, command, tool))


def _check(check: shipped.Check) -> Outcome:
    return outcome_of(check.run())


def _sanitize(run: Run, command: str, tool: str) -> Outcome:
    """Run a small check under a tool that watches every access."""
    check = [
        "verify",
        "--device",
        str(run.device),
        "--backend",
        "triton",
        "--case",
        "two runs have equal bits",
    ]
    given = [command, "--tool", tool, "--error-exitcode", "9", sys.executable, "-m", "attnbias", *check]
    done = subprocess.run(given, capture_output=True, text=True, timeout=500, check=False)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("=========")]
    return Outcome(Status.RIGHT if done.returncode == 0 else Status.WRONG, " | ".join(lines[:6]))
