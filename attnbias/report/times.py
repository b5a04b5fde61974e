"""Times on the device, apart from Python's, of our kernels and of every peer that is installed.

The clocks are those of ``attnbias bench``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch

from ..attention import attention
from ..benchmarks.cases import tokens as cases
from ..benchmarks.cases.tokens import Attend, Case
from ..benchmarks.measure.clocks import clocks
from ..benchmarks.measure.race import peer_step
from ..benchmarks.measure.race import steps as timed_steps
from ..benchmarks.measure.timing import Timer, timer_of
from ..benchmarks.peers.registry import DENSE, PEERS, SLOW, CannotRunError
from ..scores.terms import ALiBi
from ..testing.checklist import words_of
from .runner import Outcome, Run, Status, Step

ROUNDS = 3
HEADS = 16
HALF = torch.bfloat16
ALL = tuple(name for name in PEERS if name not in (DENSE, *SLOW))
QUICK = ("causal@8192 D=256", "causal@8192 D=64 fp32", "decoding@32768 D=64")
MORE = ("causal@8192 D=96", "knn@32768 D=64", "grid@128x128 D=64")


class Timed(NamedTuple):
    """One line of the times: a case, and options that only we are given."""

    name: str
    make: Callable[[], Case]
    options: Callable[[Case], dict[str, Any]] | None = None
    peers: tuple[str, ...] = ALL


def lines(device: str, quick: bool) -> Iterator[Timed]:
    """Yield what is timed: relations by size and length first, then one line for each option."""
    if torch.device(device).type == "cpu":  # to try the report where there is no GPU
        yield Timed("causal@256 D=64", partial(cases.causal, 256, size=64), peers=("SDPA",))
        yield Timed("window@1024 D=64", partial(cases.window, 1024, size=64), peers=("SDPA, mask",))
        return
    named = cases.gpu_cases(device)
    whole = f" {HEADS}/{HEADS}"
    for name, make in named.items():
        is_quick = "@8192" in name and name.startswith(("causal", "window", "documents"))
        if name.endswith(whole) and (is_quick or not quick):
            yield Timed(name, make)
    for name in QUICK if quick else (*QUICK, *MORE):
        yield Timed(name, named[name])
    if quick:
        return
    given: dict[str, Any] = {"heads": HEADS, "dtype": HALF, "device": device}
    causal = partial(cases.causal, 8192)
    yield Timed("causal@8192 D=128 fp32", partial(causal, size=128, **given | {"dtype": torch.float32}))
    yield Timed("causal@8192 D=128 16/2", partial(causal, size=128, key_heads=2, **given))
    options: dict[str, Callable[[Case], dict[str, Any]]] = {
        "softcap": lambda case: {"softcap": 30.0},
        "ALiBi": lambda case: {"terms": [ALiBi(torch.linspace(0.01, 0.5, HEADS, device=device))]},
        "dropout": lambda case: {"dropout_p": 0.1},
    }
    for name, make_options in options.items():
        yield Timed(f"causal@8192 D=64 {name}", partial(causal, **given), make_options, peers=())


def steps(run: Run) -> Iterator[Step]:
    """Yield a step for each line."""
    for line in lines(str(run.device), run.quick):
        yield Step(f"time: {line.name}", partial(_time, run, line))


def _time(run: Run, line: Timed) -> Outcome:
    case = line.make()
    before = clocks(run.device)
    found: dict[str, Any] = {"sizes": _sizes(case), "passes": {}}
    for backward in (False, True):
        name = "forward and backward" if backward else "forward"
        found["passes"][name] = _race(run, line, case, backward=backward)
    found["clocks"] = [before, clocks(run.device)]
    words = []
    for name, each in found["passes"].items():
        best = each.get("best_peer")
        beside = f", {best} {each['peers'][best]['device'] * 1e3:.3f} ms" if best else ""
        words.append(f"{name} {each['device'] * 1e3:.3f} ms{beside}")
    return Outcome(Status.RIGHT, "; ".join(words), found)


def _race(run: Run, line: Timed, case: Case, *, backward: bool) -> dict[str, Any]:
    """Time ourselves and the peers; what a peer raises is its reason."""
    inputs = case.inputs()
    options = line.options(case) if line.options else {}
    attend: Attend = partial(
        attention, relation=case.layout, q_start=case.layout.q_start, backend=run.backend, **options
    )
    ours = timed_steps(attend, inputs, backward=backward)
    executed = case.layout.stats().executed
    flops = case.flops(backward=backward)
    timer = run.kept.setdefault("timer", timer_of(run.device, torch.get_num_threads()))
    timer.settle()
    times = _times(timer, ours)
    seconds = times["device"]
    found: dict[str, Any] = times | {
        "teraflops_useful": flops / seconds / 1e12,
        "teraflops_executed": flops / seconds / 1e12 * executed / max(case.pairs, 1),
        "peers": {},
        "refused": {},
    }
    for name in line.peers:
        try:
            theirs = peer_step(case, name, inputs, backward=backward)
            found["peers"][name] = _times(timer, theirs)
        except CannotRunError as error:
            found["refused"][name] = str(error)
        except Exception as error:
            if run.device.type == "cuda":
                torch.cuda.synchronize(run.device)  # raises if the peer took the context with it
            found["refused"][name] = words_of(error)
    if found["peers"]:
        found["best_peer"] = min(found["peers"], key=lambda name: found["peers"][name]["device"])
    return found


def _times(timer: Timer, function: Callable[[], object]) -> dict[str, Any]:
    """Return the seconds of a call on the device, and with Python's part."""
    ready = timer.ready(function)
    clocks = {"device": ready.device, "eager": ready.eager}
    times: dict[str, Any] = {name: median(clock() for _ in range(ROUNDS)) for name, clock in clocks.items()}
    return times | {"note": ready.note} if ready.note else times


def _sizes(case: Case) -> dict[str, Any]:
    stats = case.layout.stats()
    return {
        "batch": case.batch,
        "heads": case.heads,
        "key_heads": case.key_heads or case.heads,
        "queries": case.q_len,
        "keys": case.tokens,
        "size": case.size,
        "dtype": str(case.dtype).removeprefix("torch."),
        "pairs": case.pairs,
        "executed": stats.executed,
        "tile": stats.tile,
        "full": stats.tiles_full,
        "partial": stats.tiles_partial,
        "edges": stats.edges,
    }
