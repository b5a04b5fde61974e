"""Measure configurations on the GPU at hand, and keep the fastest in the user's cache.

Nothing here runs unless it is called: kernels take their table's configuration at the first call. The command
``attnbias tune`` calls it.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from triton.testing import do_bench

from . import launch
from .config import (
    _FLAGS,
    VARIABLE,
    Config,
    Pass,
    Target,
    candidates,
    key_of,
    parse_changes,
    tuned,
    tuned_path,
)

ARCHITECTURES = (80, 86, 90, 100, 120)  # those with entries of their own
_VERSIONS = ((3, 7), (3, 9))  # of Triton, likewise


class Tuned(NamedTuple):
    """What measuring one pass found."""

    best: Config
    table: Config  # what would run otherwise
    times: dict[Config, float]  # of those that ran
    failed: dict[Config, str]  # why the others did not


def choices(which: Pass, target: Target, dtype: torch.dtype, d: int, e: int, tile: int) -> list[Config]:
    """List what is worth measuring: the entries of every architecture, and ours with each flag turned.

    Flags for which the device has no instructions are off, and tiles divide the lists'.
    """
    mine = candidates(target, which, dtype, d, e, tile)[0]
    found = [mine, mine._replace(stages=mine.stages % 3 + 1), mine._replace(warps=12 - mine.warps)]
    for name, on in _FLAGS.values():
        turned: dict[str, Any] = {name: type(on)(0) if getattr(mine, name) else on}
        found.append(mine._replace(**turned))
    for arch, version, size in itertools.product(ARCHITECTURES, _VERSIONS, (64, 128, 256)):
        there = Target(arch, version, target.is_interpreted)
        found.append(candidates(there, which, dtype, size, size, tile)[0])
    return list(dict.fromkeys(_without_absent(config, which, target, dtype, d) for config in found))


def _without_absent(config: Config, which: Pass, target: Target, dtype: torch.dtype, d: int) -> Config:
    """Turn off the flags that a pass or a device does not have."""
    is_tcgen05 = 100 <= target.arch < 120
    tma = config.tma and target.arch >= 90
    off: dict[str, Any] = {
        "tma": tma,
        "one_buffer": config.one_buffer and is_tcgen05,
        # A whole row in a thread.
        "packed": config.packed and is_tcgen05 and config.warps == 4 and which == "forward",
        # Only the rounding of bfloat16 hides the polynomial's error.
        "by_fma": config.by_fma if dtype == torch.bfloat16 and which == "forward" else 0,
        "half": config.half and dtype != torch.float32 and which == "backward_query",
        "chunk": config.chunk if d > config.chunk else 0,
        "specialised": config.specialised and is_tcgen05 and which == "forward" and tma,
    }
    if off["specialised"]:  # their loop takes neither
        off |= {"ahead": False, "packed": False}
    return config._replace(**off)


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
    check: Callable[[], str] = lambda: "",
    say: Callable[[str], object] = lambda line: None,
) -> Tuned:
    """Measure a pass in each configuration, store the fastest that is right, and use it from now on.

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
        check: says what is wrong with the results of the configuration in use; "" for nothing.
        say: takes a line about each configuration.

    Raises:
        RuntimeError: if no configuration runs, or none is right.
    """
    key = key_of(target, which, dtype, d, e, tile)
    before = tuned().get(key)
    _take(key, None)
    table = candidates(target, which, dtype, d, e, tile)[0]
    times: dict[Config, float] = {}
    failed: dict[Config, str] = {}
    wanted = choices(which, target, dtype, d, e, tile) if among is None else among
    for config in dict.fromkeys((table, *wanted)):
        _take(key, config)
        try:
            times[config] = measure(run)
            say(f"{which} {config}: {times[config] * 1e3:.1f} us")
        except Exception as error:  # it does not fit, or the compiler fails: another one may do
            failed[config] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            say(f"{which} {config}: {failed[config]}")
    for config in sorted(times, key=lambda config: times[config]):
        _take(key, config)
        fault = check()
        if not fault:
            _store()
            return Tuned(config, table, times, failed)
        failed[config] = fault
        say(f"{which} {config}: {fault}")
    _take(key, before)
    first = next(iter(failed.values()))
    raise RuntimeError(f"{key}: none of {len(failed)} configurations ran and was right; the first: {first}")


def _store() -> None:
    path = tuned_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({name: str(x) for name, x in sorted(tuned().items())}, indent=1))


def _take(key: str, config: Config | None) -> None:
    """Use a configuration from now on; None for the table's."""
    if config is None:
        tuned().pop(key, None)
    else:
        tuned()[key] = config
    launch.forget()


@contextmanager
def changed(text: str) -> Iterator[None]:
    """Run kernels inside the block with the changes of ``ATTNBIAS_TRITON`` that a text says.

    Raises:
        ValueError: if the text cannot be read.
    """
    parse_changes(text)
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = text
    launch.forget()
    try:
        yield
    finally:
        os.environ.pop(VARIABLE)
        if before is not None:
            os.environ[VARIABLE] = before
        launch.forget()
