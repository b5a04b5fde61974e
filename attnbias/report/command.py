"""The commands ``attnbias report`` and ``attnbias tune``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from ..kernels.launch.config import target_of
from ..op import dispatch
from . import bisection, calibration, costs, machine, smoke, table, times, tuning
from .options import DTYPES
from .runner import Run, Say, Section, exit_code, start_process, supervise, work
from .store import Store
from .summary import MOST_LINES, summarise
from .words import why_no_gpu

SECTIONS: tuple[Section, ...] = (
    *(machine.steps, smoke.steps, bisection.steps, table.steps, costs.steps),
    *(times.steps, tuning.steps, calibration.steps),
)


def report(given: argparse.Namespace, say: Say = print, sections: Sequence[Section] = SECTIONS) -> int:
    """Run the report, or go on with it; print the summary and return the exit code."""
    device = torch.device(given.device)
    backend = given.backend or dispatch.KERNELS.get(device.type)
    if backend is not None:
        dispatch.check_name(backend, "--backend")
    if device.type == "cuda" and (missing := why_no_gpu(device)):
        raise ValueError(missing)
    path = Path(given.out) if given.out else Path("results") / machine.file_name(device)
    if given.worker:
        run = Run(Store(path), device, backend, say, given.quick, given.tune)
        return work(run, sections)
    store = Store(path, fresh=given.fresh)
    done = len(store.steps)
    store.data["is_whole"] = False
    store.save()
    if done:
        say(f"going on after {done} steps in {path}; --fresh starts anew")
    flags = [f"--{name}" for name in ("quick", "tune") if getattr(given, name)]
    command = [
        sys.executable,
        "-u",
        "-m",
        "attnbias",
        "report",
        "--worker",
        "--device",
        given.device,
        "--out",
    ]
    command += [str(path), *flags, *(["--backend", given.backend] if given.backend else [])]
    try:
        supervise(path, lambda: start_process(command, path, say), say)
    finally:
        run = Run(Store(path), device, backend, say, given.quick, given.tune)
        say("\n" + "\n".join(summarise(run)))
    say(
        f"\nPlease open an issue with the lines above (at most {MOST_LINES}) and {path}: it has the GPU's "
        "model and versions, no name of a host, user or folder."
    )
    return exit_code(run.store)


def tune(given: argparse.Namespace, say: Say = print) -> int:
    """Tune each pass; print what won, or JSON; return 1 if any failed."""
    device = torch.device(given.device)
    if device.type == "cuda" and (missing := why_no_gpu(device)):
        raise ValueError(missing)
    if isinstance(target := target_of(device), str):
        raise ValueError(f"--device: {target}")
    found, failed = {}, {}
    dtypes = tuple(DTYPES[name] for name in given.dtype)
    quiet: Say = (lambda line: None) if given.json else say
    for wanted in tuning.every(tuple(given.dim), dtypes, tuple(given.tile)):
        quiet(f"{wanted} ...")
        try:
            found[str(wanted)] = tuning.tune_one(wanted, device, quiet, tokens=given.tokens)
        except Exception as error:  # the other passes are still worth it
            failed[str(wanted)] = f"{type(error).__name__}: {error}"
            quiet(f"    {failed[str(wanted)]}")
            continue
        quiet(f"    {tuning.words_of_tuned(found[str(wanted)])}")
    if given.json:
        say(json.dumps({"tuned": found, "failed": failed}, indent=1))
    else:
        from ..kernels.launch.config import tuned_path

        say(f"{len(found)} tuned, {len(failed)} failed; kept in {tuned_path()}, which later calls read")
    return 1 if failed else 0
