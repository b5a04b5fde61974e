"""Measure the table's configurations against others: ``attnbias tune``, and a section of the report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, get_args

import torch

from ..attention import attention
from ..kernels.launch.config import Pass, target_of
from ..layouts.layout import Layout
from ..relations import Causal
from ..testing.shipped import Problem
from .runner import Outcome, Run, Say, Status, Step

SIZES = (64, 128)
TILES = (128, 64)
PASSES: tuple[Pass, ...] = get_args(Pass)
MOST_RIVALS = 7  # in a report, for each pass and head size


class Wanted(NamedTuple):
    """What to tune: one pass for one dtype, head size and list tile."""

    which: Pass
    dtype: torch.dtype
    size: int
    tile: int

    def __str__(self) -> str:
        return f"{self.which} {str(self.dtype).removeprefix('torch.')} D {self.size}, tile {self.tile}"


def tune_one(
    wanted: Wanted,
    device: torch.device,
    say: Say,
    *,
    tokens: int = 4096,
    heads: int = 16,
    most: int | None = None,
    measure: Callable[[Callable[[], object]], Any] | None = None,
) -> dict[str, Any]:
    """Measure one pass over causal attention, store the fastest configuration that is right, and say it.

    Args:
        wanted: the pass.
        device: a GPU.
        say: takes a line about each configuration.
        tokens: queries and keys.
        heads: of a batch of one.
        most: configurations besides the table's; None for all.
        measure: gives the milliseconds of a function; None for Triton's timer.

    Raises:
        NotImplementedError: if there is nothing to tune on the device.
    """
    target = target_of(device)
    if isinstance(target, str):
        raise NotImplementedError(f"nothing to tune: {target}")
    from ..kernels.launch import tune

    which, dtype, size, tile = wanted
    layout = Layout.build(Causal(), tokens, tokens, form="tiles", tile=tile, heads=heads, device=device)
    q, k, v = (torch.randn(1, heads, tokens, size, dtype=dtype, device=device) for _ in range(3))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attention(q, k, v, layout, backend="triton")
    grad = torch.randn_like(out)

    def forward() -> object:
        with torch.no_grad():
            return attention(q, k, v, layout, backend="triton")

    needed = leaves[:1] if which == "backward_query" else leaves[1:]

    def backward() -> object:
        return torch.autograd.grad(out, needed, grad, retain_graph=True)

    def check() -> str:
        small = Problem(Causal(), dtype, size, tile, length=300)
        return "; ".join(small.check("triton", device).faults.values())

    among = tune.choices(which, target, dtype, size, size, tile)
    found = tune.tune(
        forward if which == "forward" else backward,
        which,
        target,
        dtype,
        size,
        size,
        tile,
        among=among if most is None else among[: most + 1],
        measure=measure or tune.do_bench,
        check=check,
        say=say,
    )
    return {
        "best": str(found.best),
        "table": str(found.table),
        "milliseconds": {str(config): ms for config, ms in found.times.items()},
        "failed": {str(config): words for config, words in found.failed.items()},
    }


def words_of_tuned(found: dict[str, Any]) -> str:
    """Say what won, and over what."""
    times = found["milliseconds"]
    best, table = found["best"], found["table"]
    if best == table:
        return f"{table} (the table's) is the fastest of {len(times)}: {times[table] * 1e3:.0f} us"
    beside = f"{times[table] * 1e3:.0f} us" if table in times else "does not run"
    return f"{best} is the fastest of {len(times)}: {times[best] * 1e3:.0f} us; the table's {table} {beside}"


def every(
    sizes: tuple[int, ...], dtypes: tuple[torch.dtype, ...], tiles: tuple[int, ...]
) -> Iterator[Wanted]:
    """Yield every pass for these sizes."""
    for dtype in dtypes:
        for size in sizes:
            for tile in tiles:
                for which in PASSES:
                    yield Wanted(which, dtype, size, tile)


def steps(run: Run) -> Iterator[Step]:
    """Yield a step for each pass and head size, if tuning was asked for."""
    if not run.tunes:
        return
    for wanted in every(SIZES, (torch.bfloat16,), TILES[:1]):
        yield Step(f"tune: {wanted}", partial(_tune, run, wanted))


def _tune(run: Run, wanted: Wanted) -> Outcome:
    found = tune_one(wanted, run.device, lambda line: run.say(f"    {line}"), most=MOST_RIVALS)
    return Outcome(Status.RIGHT, words_of_tuned(found), found)
