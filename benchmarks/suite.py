"""The cases of ``attnbias bench`` under pytest-benchmark: one group per case, one test per side."""

from __future__ import annotations

import time
from functools import lru_cache

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from .cases.catalog import cases_of, is_graph
from .cases.tokens import Case
from .measure.race import OURS, peer_step, steps
from .measure.timing import CPU, LEAST
from .peers.registry import PEERS, CannotRunError

ROUNDS = 5
SIDES = (OURS, *(name for name in PEERS if name != "SDPA, all pairs"))
_chosen = torch.device("cpu")


def choose(device: str) -> None:
    """Choose the device to time."""
    global _chosen  # noqa: PLW0603 - pytest's options are known only after this module is
    _chosen = torch.device(device)


def clock() -> float:
    """Return the CPU time of the process, or wall time if a GPU does the work."""
    return time.process_time() if _chosen.type == "cpu" else time.perf_counter()


def names(*, graphs: bool) -> list[str]:
    """Return the quick cases, either graphs and lists of neighbours or the others."""
    return [name for name in cases_of(str(_chosen), is_quick=True) if graphs == is_graph(name)]


@lru_cache(maxsize=1)
def _case(name: str, device: str) -> Case:
    """Return a case; the last one is kept, because its sides come one after the other."""
    return cases_of(device, is_quick=True)[name]()


def run(benchmark: BenchmarkFixture, name: str, side: str, *, backward: bool) -> None:
    """Check a case, then time one side of it; skip a side that cannot run it, with the reason."""
    case = _case(name, str(_chosen))
    if case.fault:
        pytest.fail(f"{name}: wrong results, which are not timed\n{case.fault}")
    inputs = case.inputs()
    if side == OURS:
        step = steps(case.attend, inputs, backward=backward)
    else:
        try:
            step = peer_step(case, side, inputs, backward=backward)
        except CannotRunError as reason:
            pytest.skip(f"{side} {reason}")

    def whole() -> None:
        step()
        if _chosen.type == "cuda":
            torch.cuda.synchronize(_chosen)

    whole()
    calls = max(1, round(LEAST / max(CPU.sample(whole), 1e-6)))
    benchmark.group = f"{name}, {'forward and backward' if backward else 'forward'}"
    benchmark.extra_info.update(side=side, case=name, density=case.density, pairs=case.pairs)
    benchmark.pedantic(whole, rounds=ROUNDS, iterations=calls)
    if benchmark.stats is not None:  # None with --benchmark-disable
        benchmark.extra_info["gflops"] = case.flops(backward=backward) / benchmark.stats.stats.median / 1e9
