"""Floors of bfloat16 on CPUs that multiply pairs of it; ``make bench-gate ARGS="--case pairs"`` checks these.

They hold at the instruction set :data:`LEVEL`. At any other there are none: bfloat16 has the rate of float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from attnbias.backends import cpu

from ..cases.tokens import Case, Sizes, causal, full, window
from ..measure import terminal
from ..measure.race import race, steps
from ..measure.timing import Spread, interleave
from .lines import BUDGET, Line, at_least

LEVEL = "avx512bf16"
FLOAT32 = "float32"  # our own kernels as the peer


class Floor(NamedTuple):
    """A case, a pass and the floors and goals of a peer's time over ours, by peer."""

    case: Case
    backward: bool
    peers: dict[str, tuple[float, float]]


def floors() -> Iterator[Floor]:
    """Yield all floors."""
    own = {False: (1.5, 1.8), True: (1.4, 1.7)}  # with the backward pass or without
    sdpa = {"causal": {False: (2.0, 0), True: (1.6, 0)}, "full": {False: (1.6, 0), True: (1.3, 0)}}
    for size in (64, 128):
        sizes: Sizes = {"size": size, "dtype": torch.bfloat16}
        for case in (causal(2048, **sizes), full(2048, **sizes), window(4096, **sizes)):
            for backward in (False, True):
                theirs = {"SDPA": sdpa[case.name][backward]} if case.name in sdpa else {}
                yield Floor(case, backward, {FLOAT32: own[backward], **theirs})


def lines(rounds: int) -> Iterator[Line]:
    """Yield a line for each floor; none at another instruction set."""
    if cpu.isa() != LEVEL:
        return
    for case, backward, peers in floors():
        what = "forward + backward" if backward else "forward"
        title = f"bfloat16 {case.name}@{case.tokens}, D={case.size}"
        terminal.progress(f"{title}, {what}")
        others = [name for name in peers if name != FLOAT32]
        ratios = race(case, others, backward=backward, rounds=rounds, budget=BUDGET).ratios if others else {}
        ratios = {FLOAT32: over_float32(case, rounds, backward=backward), **ratios}
        for peer, (floor, goal) in peers.items():
            yield at_least(title, what, peer, floor, ratios[peer], goal)


def over_float32(case: Case, rounds: int, *, backward: bool) -> Spread:
    """Measure the time of the same case in float32 over its own, in turn."""
    both = [replace(case, dtype=torch.float32), case]
    functions = [steps(each.attend, each.inputs(), backward=backward) for each in both]
    return Spread.of([wide / mine for wide, mine in zip(*interleave(functions, rounds), strict=True)])
