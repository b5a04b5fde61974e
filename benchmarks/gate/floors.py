"""The floors that speed must not fall below: ``make bench-gate``.

Only ratios are judged: both sides in one run, one thread, process CPU time, in turn. Floors are for x86 with
AVX2; ``--isa avx2`` holds both sides to it on a machine that has more. Those of :mod:`.pairs` are for
AVX512-BF16.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch

from ..cases.tokens import CASES, Case, causal, window
from ..measure import terminal
from ..measure.race import MATMUL, race, steps
from ..measure.timing import Spread, interleave, one_thread, sample
from . import density, graphs, level_costs, pairs, term_costs
from .lines import BUDGET, Line, at_least, at_most, summary


class Row(NamedTuple):
    """A case, a pass and a peer: the peer's time over ours (torch.mm: our share of its rate).

    A floor of 0 means none: the row is only reported.
    """

    case: str
    backward: bool
    peer: str
    floor: float
    goal: float


FORWARD, BOTH = False, True
ROWS = (
    *(Row(name, FORWARD, "Flex", 2.0, 3.0) for name in ("window@4096", "window@16384")),
    *(Row(name, FORWARD, "Flex 64", 2.0, 3.0) for name in ("window@4096", "window@16384")),
    *(Row(name, FORWARD, "Flex", 2.0, 2.8) for name in ("causal@2048", "causal@8192", "full@2048")),
    Row("documents@8192", FORWARD, "Flex", 2.5, 3.5),
    Row("causal@2048", FORWARD, "SDPA", 1.25, 1.6),
    Row("causal@2048", BOTH, "SDPA", 1.25, 1.7),
    Row("causal@8192", FORWARD, "SDPA", 1.1, 1.5),
    Row("causal@8192", BOTH, "SDPA", 1.1, 1.5),
    Row("full@2048", FORWARD, "SDPA", 1.05, 1.4),
    Row("full@2048", BOTH, "SDPA", 1.05, 1.4),
    Row("documents@8192", FORWARD, "SDPA, loop", 1.5, 2.4),
    Row("documents@8192", BOTH, "SDPA, loop", 1.7, 2.5),
    *(Row(name, FORWARD, "SDPA, chunks", 3.8, 5.5) for name in ("window@4096", "window@16384")),
    *(Row(name, BOTH, "SDPA, chunks", 2.6, 4.0) for name in ("window@4096", "window@16384")),
    *(
        Row(name, backward, "SDPA, chunks, mask kept", 0, 0)
        for name in ("window@4096", "window@16384")
        for backward in (FORWARD, BOTH)
    ),
    Row("window@4096", FORWARD, "SDPA, mask", 14, 24),
    Row("knn@16384", FORWARD, "gather", 55, 90),
    Row("knn@16384", BOTH, "gather", 28, 60),
    Row("knn@16384", FORWARD, "Flex", 40, 80),
    *(Row(name, FORWARD, MATMUL, 0.78, 1.0) for name in ("causal@2048", "causal@8192", "full@2048")),
    *(Row(name, FORWARD, MATMUL, 0.62, 0.85) for name in ("window@4096", "window@16384")),
    Row("bfloat16 causal@2048", FORWARD, "SDPA", 1.2, 1.6),
    Row("bfloat16 causal@2048", BOTH, "SDPA", 6, 9),
    *(
        Row(name, FORWARD, "SDPA", 1.15, 1.5)
        for name in (
            "D=32 causal@2048",
            "D=80 causal@2048",
            "D=128 causal@2048",
            "heads 8/2 causal@2048",
            "decoding@8192",
            "32 x causal@128",
        )
    ),
    Row("1 head causal@128", FORWARD, "SDPA", 1.0, 1.5),
)

# The time per token may grow by this factor from the first number of tokens to the last.
GROWTH, GROWTH_TOKENS = 1.15, (4096, 262144)
# torch.mm and attention in turn, on all threads, may take this factor of the sum of their own times.
ALTERNATING = 1.1


def hold_to(isa: str) -> None:
    """Hold torch and these kernels to an instruction set; restarts the program the first time.

    Raises:
        ValueError: if this machine has no such instruction set.
    """
    from attnbias.backends import cpu

    cpu.force_isa(isa)
    if isa != "avx2":
        return
    wanted = {
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
    }
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.environ.update(wanted)
        os.execv(sys.executable, sys.orig_argv)  # torch reads them once, when it starts
    import torch._inductor.config

    torch._inductor.config.cpp.simdlen = 256


def measure(rows: list[Row], rounds: int) -> Iterator[tuple[Row, Spread]]:
    """Measure each case and pass once, with all its peers in turn.

    FlexAttention's rows come last: once torch.compile is loaded, every Python call takes longer.
    """
    compiled = {row.case for row in rows if row.peer.startswith("Flex")}
    for name in sorted(dict.fromkeys(row.case for row in rows), key=lambda name: name in compiled):
        case = CASES[name]()
        for backward in (False, True):
            wanted = [row for row in rows if (row.case, row.backward) == (name, backward)]
            if not wanted:
                continue
            terminal.progress(f"{name}, {'forward and backward' if backward else 'forward'}")
            peers = [row.peer for row in wanted]
            result = race(case, peers, backward=backward, rounds=rounds, budget=BUDGET)
            for row in wanted:
                if row.peer in result.refused:
                    raise RuntimeError(f"{row.peer}, {name}: {result.refused[row.peer]}")
                yield row, result.ratios[row.peer]


def growth(rounds: int) -> Spread:
    """Measure the seconds per token at the last number of tokens, over those at the first."""
    few, many = (_forward(window(tokens)) for tokens in GROWTH_TOKENS)
    samples = zip(*interleave([few, many], rounds), strict=True)
    factor = GROWTH_TOKENS[0] / GROWTH_TOKENS[1]
    return Spread.of([long / short * factor for short, long in samples])


def alternating(rounds: int) -> Spread:
    """Measure torch.mm and attention in turn, over the sum of their own times, on all threads."""
    attend = _forward(causal(2048))
    square = torch.randn(1024, 1024)
    multiply = partial(torch.mm, square, square)

    def both() -> None:
        multiply()
        attend()

    ratios = []
    for _ in range(rounds):
        separate = sample(multiply) + sample(attend)
        ratios.append(sample(both) / separate)
    return Spread.of(ratios)


def _forward(case: Case) -> Callable[[], object]:
    return steps(case.attend, case.inputs(), backward=False)


def run(rounds: int, wanted: str) -> int:
    """Measure every row whose case or peer contains ``wanted``, print the table, return the exit code."""
    from attnbias.backends import cpu

    rows = [row for row in ROWS if wanted in row.case or wanted in row.peer]
    found: list[Line] = []
    with one_thread():
        for row, ratio in measure(rows, rounds):
            what = "forward + backward" if row.backward else "forward"
            found.append(at_least(row.case, what, row.peer, row.floor, ratio, row.goal))
        swept = density.lines(rounds) if not wanted or wanted in "density" else iter(())
        scored = level_costs.lines(rounds) if not wanted or wanted in "levels" else iter(())
        paired = pairs.lines(rounds) if not wanted or wanted in "pairs" else iter(())
        found += chain(graphs.lines(rounds, wanted), swept, scored, paired)
        if not wanted or wanted in "terms":
            terminal.progress("score terms")
            for name, cost in term_costs.costs(causal(2048), rounds).items():
                found.append(
                    at_most(f"causal@2048, {name} over plain", "forward", term_costs.LIMITS[name], cost)
                )
            ratio = term_costs.learnable(causal(2048), rounds)
            title = "learnable T5 table, causal@2048"
            found.append(
                at_least(title, "forward + backward", "SDPA, bias", term_costs.LEARNABLE_FLOOR, ratio)
            )
        if not wanted:
            terminal.progress("growth of a window, and turns with torch.mm")
            title = "window 256: time per token, 262,144 over 4,096"
            found.append(at_most(title, "forward", GROWTH, growth(rounds)))
    if not wanted:
        title = "torch.mm and causal in turn, over each by itself"
        found.append(at_most(title, "forward", ALTERNATING, alternating(rounds)))
    terminal.progress("")
    terminal.table(
        f"Floors, {cpu.isa()}, torch at {torch.backends.cpu.get_cpu_capability()}",
        ["case", "pass", "peer", "floor", "goal", "peer / attnbias", ""],
        [cells for cells, _ in found],
    )
    print(summary(found))
    return 0 if all(held for _, held in found) else 1
