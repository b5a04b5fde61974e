"""The lines to paste: what the machine is, what is right, how fast it was, what to look at."""

from __future__ import annotations

from collections import Counter
from typing import Any

from . import bisection
from .machine import title
from .runner import Run, Status, exit_code

MOST_LINES = 60
MOST_WIDTH = 200
MOST_FAULTS, MOST_TIMES = 14, 16
MEANING = {0: "all right", 1: "something is wrong", 3: "something raised", 4: "the CUDA context died"}


def summarise(run: Run) -> list[str]:
    """Return at most 60 lines."""
    steps = run.store.steps
    machine = next((x.get("data") for name, x in steps.items() if name.startswith("machine")), None)
    counts = Counter(x["status"] for x in steps.values())
    code = exit_code(run.store)
    kind = " (quick)" if run.quick else ""
    lines = [
        f"attnbias report{kind}: {title(machine) if machine else 'the machine could not be read'}",
        f"exit code {code}: {MEANING[code]}; {_checked(run)}; steps: "
        + ", ".join(f"{n} {status}" for status, n in counts.items()),
    ]
    lines += _defaults(machine)
    lines += _faults(steps)
    lines += [f"bisection: {line}" for line in bisection.verdicts(run)]
    lines += _times(run)
    lines += _host(run)
    lines += _look_at(run)
    lines = [line if len(line) <= MOST_WIDTH else line[: MOST_WIDTH - 4] + " ..." for line in lines]
    if not run.store.data["is_whole"]:
        lines.insert(1, "not finished: the same command goes on where this one ended")
    return lines[:MOST_LINES]


def _checked(run: Run) -> str:
    found = [*run.found("smoke").values(), *run.found("table").values()]
    ran = [x for x in found if x["status"] not in (Status.SKIPPED.value, Status.NO_ROOM.value)]
    by = Counter(x["status"] for x in ran)
    unsteady = sum("other bits" in x["words"] or "second run is right" in x["words"] for x in ran)
    failed = by[Status.RAISED.value] + by[Status.DEAD.value]
    return (
        f"{by[Status.RIGHT.value]} of {len(ran)} checks right, {by[Status.WRONG.value]} wrong, "
        f"{failed} raised, {unsteady} not deterministic"
    )


def _defaults(machine: dict[str, Any] | None) -> list[str]:
    found = (machine or {}).get("defaults", {})
    words = [f"{name} runs on {x.get('backend', x.get('error'))}" for name, x in found.items()]
    return [f"by default {'; '.join(words)}"] if words else []


def _faults(steps: dict[str, dict[str, Any]]) -> list[str]:
    bad = (Status.WRONG.value, Status.RAISED.value, Status.DEAD.value)
    found = [
        f"{x['status'].upper()} {name}: {x['words']}"
        for name, x in steps.items()
        if x["status"] in bad and not name.startswith("bisect:")
    ]
    more = [f"... and {len(found) - MOST_FAULTS} more in the file"] if len(found) > MOST_FAULTS else []
    return found[:MOST_FAULTS] + more


def _times(run: Run) -> list[str]:
    lines = []
    for name, step in run.found("time").items():
        for which, each in step.get("data", {}).get("passes", {}).items():
            best = each.get("best_peer")
            beside = "no peer ran"
            if best:
                theirs = each["peers"][best]["device"]
                beside = f"{best} {theirs * 1e3:.3f} ms ({theirs / each['device']:.2f} of ours)"
            lines.append(
                f"{name.removeprefix('time: ')}, {which}: {each['device'] * 1e3:.3f} ms on the device, "
                f"{each['eager'] * 1e3:.3f} eager, {each['teraflops_useful']:.1f} TFLOPS useful; {beside}"
            )
    more = [f"... and {len(lines) - MOST_TIMES} more times in the file"] if len(lines) > MOST_TIMES else []
    return lines[:MOST_TIMES] + more


def _host(run: Run) -> list[str]:
    return [f"{name}: {x['words']}" for name, x in run.found("host").items() if x["words"]]


def _look_at(run: Run) -> list[str]:
    """Point at what is odd: a slower case than a peer, time lost to Python, spills, waits."""
    slow, lost = [], []
    for name, step in run.found("time").items():
        for which, each in step.get("data", {}).get("passes", {}).items():
            best, case = each.get("best_peer"), f"{name.removeprefix('time: ')} {which}"
            if best:
                slow.append((each["device"] / each["peers"][best]["device"], f"{case} ({best})"))
            lost.append((each["eager"] / each["device"], case))
    lines = []
    if slow and max(slow)[0] > 1:
        lines.append(f"look at: slowest beside a peer, {max(slow)[0]:.2f} times its time: {max(slow)[1]}")
    if lost and max(lost)[0] > 1.5:
        lines.append(
            f"look at: most time outside the device, {max(lost)[0]:.1f} times its time: {max(lost)[1]}"
        )
    spilled = [
        f"{kernel['which']} {kernel['config']} D {kernel['d']} ({kernel['spills']})"
        for step in run.found("smoke").values()
        for kernel in (step.get("data") or {}).get("kernels", [])
        if isinstance(kernel, dict) and kernel["spills"] > 0
    ]
    if spilled:
        lines.append(f"look at: the driver reports spills in {', '.join(dict.fromkeys(spilled))}")
    return lines
