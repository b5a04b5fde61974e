"""Measure what the host does: microseconds of a call, launches, waits, and the time to make a layout."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from .. import relations
from ..attention import attention
from ..benchmarks.measure.layouts_anew import layouts_anew
from .runner import Outcome, Run, Step

CALLS = 50
# By name: lengths at which kernels take less than Python.
RELATIONS: dict[str, Callable[[int], relations.Relation]] = {
    "tiles": lambda n: relations.Window(before=63),
    "edges": lambda n: relations.Neighbors((torch.arange(n)[:, None] * 7 + torch.tensor([0, 91])) % n),
}
TOKENS = 256


def steps(run: Run) -> Iterator[Step]:
    """Yield a step for each form of call, and one for layouts."""
    for name in RELATIONS:
        yield Step(f"host: a call over {name}", partial(_call, run, name))
    yield Step("host: layouts", partial(_layouts, run))


def _call(run: Run, name: str) -> Outcome:
    relation = RELATIONS[name](TOKENS)
    layout = relation.layout(TOKENS, TOKENS, heads=4, device=run.device)
    q, k, v = (
        torch.randn(1, 4, TOKENS, 64, dtype=torch.bfloat16, device=run.device).requires_grad_()
        for _ in range(3)
    )
    grad = torch.randn_like(q)

    def forward() -> object:
        with torch.no_grad():
            return attention(q, k, v, layout, backend=run.backend)

    def both() -> object:
        out = attention(q, k, v, layout, backend=run.backend)
        return torch.autograd.grad(out, (q, k, v), grad)

    found: dict[str, Any] = {}
    for what, function in (("forward", forward), ("forward and backward", both)):
        found[what] = {
            "microseconds": round(host_seconds(function, run.device) * 1e6, 1),
            "launches": launches(function, run.device),
            "waits": waits(function, run.device),
        }
    return Outcome(words="; ".join(_words(what, x) for what, x in found.items()), data=found)


def _words(what: str, found: dict[str, Any]) -> str:
    counts = "" if found["launches"] is None else f", {found['launches']} launches, {found['waits']} waits"
    return f"{what} {found['microseconds']:.0f} us{counts}"


def host_seconds(function: Callable[[], object], device: torch.device, calls: int = CALLS) -> float:
    """Return the best of five means over calls that do not wait for the device."""
    function()
    best = float("inf")
    for _ in range(5):
        _wait(device)
        start = time.perf_counter()
        for _ in range(calls // 5):
            function()
        best = min(best, (time.perf_counter() - start) / (calls // 5))
    _wait(device)
    return best


def launches(function: Callable[[], object], device: torch.device) -> int | None:
    """Count the kernels that a call starts; None on a CPU."""
    if device.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    function()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        function()
        _wait(device)
    names = [event.key for event in profiled.events() if str(event.device_type).endswith("CUDA")]
    return len([name for name in names if not name.startswith(("Mem", "Activity"))])


def waits(function: Callable[[], object], device: torch.device) -> int | None:
    """Count how often a call makes the host wait for the device, as torch notices it; None on a CPU."""
    if device.type != "cuda":
        return None
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            function()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return sum("synchroniz" in str(each.message) for each in caught)


def _layouts(run: Run) -> Outcome:
    tokens = 2048 if run.quick or run.device.type == "cpu" else 32768
    found = layouts_anew(run.device, tokens)
    words = ", ".join(f"{name} {ms:.1f} ms" for name, ms in found["milliseconds"].items())
    return Outcome(words=f"{tokens} tokens: {words}", data=found)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
