"""Measure configurations on the GPU at hand, and keep the fastest in the user's cache.

Nothing here runs unless it is called: kernels take their table's configuration at the first call.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from triton.runtime.errors import OutOfResources
from triton.testing import do_bench

from . import launch
from .config import Config, Pass, Target, candidates, key_of, tuned, tuned_path

_SHAPES = (
    "128x128 w8",
    "128x64 w4",
    "128x64 w8",
    "128x32 w4",
    "64x128 w4",
    "64x128 w8",
    "64x64 w4",
    "64x32 w4",
    "32x128 w4",
    "32x64 w4",
)


def choices(tile: int, arch: int) -> list[Config]:
    """List what is worth measuring: tiles that divide the lists', 2 or 3 stages, TMA from sm_90 on."""
    found = []
    for shape in _SHAPES:
        for stages in (2, 3):
            for flags in ("", " N", *((" T N",) if arch >= 90 else ())):
                config = Config.parse(f"{shape} s{stages}{flags}")
                if tile % config.rows == 0 and tile % config.cols == 0:
                    found.append(config)
    return found


def tune(
    run: Callable[[], object],
    which: Pass,
    target: Target,
    dtype: torch.dtype,
    d: int,
    e: int,
    tile: int,
    *,
    among: Sequence[Config] | None = None,
    measure: Callable[[Callable[[], object]], Any] = do_bench,
) -> Config:
    """Measure a pass in each configuration, store the fastest, and use it from now on.

    Args:
        run: runs the pass once, such as ``lambda: attention(q, k, v, layout)``.
        which: the pass whose configuration is varied.
        target: from ``config.target_of``.
        dtype: of the inputs.
        d: head size.
        e: value size.
        tile: of the layout.
        among: the configurations to compare with the table's; None for ``choices``.
        measure: gives the time of a function.

    Returns:
        The fastest.
    """
    table = candidates(target, which, dtype, d, e, tile)
    key = key_of(target, which, dtype, d, e, tile)
    times: dict[Config, float] = {}
    for config in dict.fromkeys((table[0], *(choices(tile, target.arch) if among is None else among))):
        _take(key, config)
        try:
            times[config] = measure(run)
        except OutOfResources:
            continue
    best = min(times, key=lambda config: times[config])
    _take(key, best)
    path = tuned_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({name: str(x) for name, x in sorted(tuned().items())}, indent=1))
    return best


def _take(key: str, config: Config) -> None:
    """Use a configuration from now on."""
    tuned()[key] = config
    candidates.cache_clear()
    launch._fitting.clear()
