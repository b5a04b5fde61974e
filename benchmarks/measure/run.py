"""One run of ``attnbias bench``: every case checked, then timed; then the sweeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from attnbias.testing.checklist import words_of

from ..cases.catalog import cases_of
from ..cases.stored import MissingGraphError
from ..cases.tokens import GPU_BASE, Case
from ..peers.registry import COMPILED, PEERS, SLOW
from . import sweep, terminal
from .clocks import clocks, raise_clocks
from .layouts_anew import layouts_anew
from .race import DEFAULT, MATMUL, race
from .record import Entry, Results, describe_machine, entry_of, fill, picture_of, start
from .timing import Spread, Timer, timer_of, using_threads

# A quick run times peers that compile for ten seconds per case only in these.
QUICK_COMPILED = ("causal@", "window@", "documents@")
LEFT_OUT = "SDPA, chunks, mask kept", "SDPA, all pairs", "Flex 64", *SLOW  # of quick runs
# Rows of the yardstick's matrices. On a GPU so many that it is the tensor cores' time, not the launch's.
QUICK_MATMUL = {"cpu": 1024, "cuda": 8192}
FULL_MATMUL = {"cpu": 2048, "cuda": 8192}
ANEW = 32768  # tokens of a layout made in every step
LENGTHS = {"cpu": (512, 1024, 2048, 4096, 8192), "cuda": (1024, 2048, 4096, 8192, 16384, 32768, 65536)}
FULL_LENGTHS = {"cpu": (*LENGTHS["cpu"], 16384, 32768), "cuda": (*LENGTHS["cuda"], 131072)}
MOST_DENSE = {"cpu": 8192, "cuda": 65536}  # tokens up to which the plot of lengths shows SDPA
SWEPT = {"cpu": 2048, "cuda": 8192}  # tokens
PASSES = {False: "forward", True: "forward and backward"}


@dataclass(frozen=True)
class Plan:
    """The cases to measure, and how to measure them."""

    device: str
    is_quick: bool = True
    wanted: str = ""  # part of the names of cases
    backend: str | None = None
    threads: int = 1
    rounds: int = 3

    @property
    def kind(self) -> str:
        """Return the type of the device."""
        return torch.device(self.device).type

    def names(self) -> list[str]:
        """Return the cases; ``wanted`` may name any of them, in a quick run too."""
        known = cases_of(self.device, is_quick=self.is_quick and not self.wanted)
        return [name for name in known if self.wanted in name]

    def peers(self, name: str) -> list[str]:
        """Return the peers of a case, matrix products included."""
        names = [MATMUL, *([DEFAULT] if self.kind == "cuda" else []), *PEERS]
        if self.is_quick:
            known = any(name.startswith(words) for words in QUICK_COMPILED)
            compiles = known and (self.kind == "cpu" or name.endswith(GPU_BASE))
            names = [peer for peer in names if peer not in LEFT_OUT]
            names = [peer for peer in names if compiles or peer not in COMPILED]
        return names

    def curves(self) -> list[tuple[str, bool, float]]:
        """Yield structure, pass and density of each point of the sweep; none if cases are named."""
        if self.wanted or self.backend:
            return []
        if self.is_quick:
            return [
                (name, False, density)
                for name in ("random pairs", "window")
                for density in sweep.QUICK_DENSITIES
            ]
        return [
            (name, backward, density)
            for name in sweep.STRUCTURES
            for backward in (False, True)
            for density in sweep.DENSITIES
        ]

    def lengths(self) -> list[int]:
        """Return the lengths of the plot of time against length; none if cases are named."""
        if self.wanted or self.backend:
            return []
        return list((LENGTHS if self.is_quick else FULL_LENGTHS)[self.kind])


def begin(plan: Plan) -> Results:
    """Return an empty record of this machine."""
    clock = "time on the device" if plan.kind == "cuda" else "CPU time" if plan.threads == 1 else "wall time"
    return start(describe_machine(torch.device(plan.device), plan.threads, clock))


def measure(plan: Plan, results: Results, keep: Callable[[], None]) -> None:
    """Measure and add to ``results`` as it goes, so that an interrupted run leaves what is done.

    An exception is recorded and the run goes on. ``keep`` is called after each case and point.
    """
    names, points, lengths = plan.names(), plan.curves(), plan.lengths()
    timer = timer_of(torch.device(plan.device), plan.threads)
    on_gpu = plan.kind == "cuda" and not (plan.wanted or plan.backend)
    count = 2 * len(names) + len(points) + len(lengths) + on_gpu
    with using_threads(plan.threads), terminal.steps(count) as step:
        raise_clocks(torch.device(plan.device))
        for name in names:
            with _noting(results, name):
                _case(plan, name, results, timer, step)
            keep()
        if on_gpu:
            step("layouts made in every step")
            with _noting(results, "layouts made in every step"):
                results["layouts_anew"] = layouts_anew(torch.device(plan.device), ANEW)
            keep()
        sizes = _sizes(plan)
        for structure, backward, density in points:
            what = f"{structure}, {density:.1%}"
            step(what)
            with _noting(results, f"{what}, {PASSES[backward]}"):
                point = sweep.measure_density(
                    structure,
                    density,
                    SWEPT[plan.kind],
                    backward=backward,
                    rounds=plan.rounds,
                    timer=timer,
                    **sizes,  # type: ignore[arg-type]
                )
                results["sweep"].append(point)
            keep()
        for tokens in lengths:
            what = f"{tokens:,} tokens"
            step(what)
            with _noting(results, what):
                results["lengths"] += sweep.measure_lengths(
                    tokens,
                    rounds=plan.rounds,
                    timer=timer,
                    with_dense=tokens <= MOST_DENSE[plan.kind],
                    **sizes,  # type: ignore[arg-type]
                )
            keep()
    results["is_whole"] = True
    keep()


@contextmanager
def _noting(results: Results, what: str) -> Iterator[None]:
    """Record an exception that the block raises, and go on."""
    try:
        yield
    except Exception as error:
        results["raised"][what] = words_of(error)
        terminal.progress(f"{what}: raised {words_of(error)}")


def _sizes(plan: Plan) -> dict[str, object]:
    half = plan.kind == "cuda"
    return {
        "device": plan.device,
        "dtype": torch.bfloat16 if half else torch.float32,
        "heads": 16 if half else 4,
    }


def _case(plan: Plan, name: str, results: Results, timer: Timer, step: terminal.Step) -> None:
    """Check one case and time both passes; record a wrong result or an exception without a time."""
    try:
        case = replace(cases_of(plan.device, is_quick=False)[name](), backend=plan.backend)
    except MissingGraphError as error:
        step(f"{name} is left out: {error}")
        step("")
        return
    build = Spread.of([timer.sample(case.build) for _ in range(plan.rounds)])
    for backward in (False, True):
        step(f"{name}, {PASSES[backward]}")
        entry = entry_of(name, case, backward=backward, build=build)
        with _noting(results, f"{name}, {PASSES[backward]}"):
            _time(plan, case, entry, timer)
        results["entries"].append(entry)
    if case.name not in results["pictures"] and (drawn := picture_of(case)):
        results["pictures"][case.name] = drawn


def _time(plan: Plan, case: Case, entry: Entry, timer: Timer) -> None:
    entry["fault"] = case.fault
    if case.fault:
        return
    device = torch.device(plan.device)
    entry["clocks"] = [clocks(device)]
    result = race(
        case,
        plan.peers(entry["case"]),
        backward=entry["backward"],
        rounds=plan.rounds,
        timer=timer,
        square=(QUICK_MATMUL if plan.is_quick else FULL_MATMUL)[plan.kind],
        with_memory=True,
    )
    entry["clocks"].append(clocks(device))
    fill(entry, result)
