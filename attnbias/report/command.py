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
from .runner import Run, Say, Section, exit_code, start_process, supervise, work
from .store import Store
from .summary import MOST_LINES, summarise
from .words import why_no_gpu

SECTIONS: tuple[Section, ...] = (
    *(machine.steps, smoke.steps, bisection.steps, table.steps, costs.steps),
    *(times.steps, tuning.steps, calibration.steps),
)
EPILOG = """\
exit codes: 0 all right; 1 a result is wrong; 2 the arguments are; 3 a step raised; 4 the CUDA context or the
process died in a step. With several, the largest. What needs more memory than there is, or is not installed,
is noted and changes no code.

The file has no names of hosts, users or folders. A report that was ended goes on where it was; --fresh starts
anew. A step that kills its process is noted, and a new process goes on behind it.
"""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def add_report(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``attnbias report``."""
    parser.description = "Check and time everything on a device, in one file and at most 60 lines to paste."
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, or cpu to try it (cuda)")
    parser.add_argument("--backend", default=None, help="check this backend (the device's kernels)")
    parser.add_argument("--quick", action="store_true", help="about 2 minutes in place of 15")
    parser.add_argument(
        "--tune", action="store_true", help="also measure other configurations, and keep the fastest"
    )
    parser.add_argument("--fresh", action="store_true", help="start anew instead of going on")
    parser.add_argument("--out", metavar="FILE", help="the file (results/<GPU>.json.gz)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)  # a process of the report


def add_tune(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``attnbias tune``."""
    parser.description = (
        "Measure configurations of the kernels on this GPU; later calls take the fastest that is right."
    )
    parser.add_argument("--device", default="cuda", help="cuda or cuda:1 (cuda)")
    parser.add_argument("--dtype", nargs="+", choices=sorted(DTYPES), default=["bf16"], help="(bf16)")
    parser.add_argument("--dim", nargs="+", type=int, default=[64, 128], help="head sizes (64 128)")
    parser.add_argument("--tile", nargs="+", type=int, choices=(64, 128), default=[128, 64], help="(128 64)")
    parser.add_argument("--tokens", type=int, default=4096, help="(4096)")
    parser.add_argument("--json", action="store_true", help="print all times as JSON instead")


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
