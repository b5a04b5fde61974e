"""The command ``attnbias``: show a relation, verify a backend, check the theory, run the benchmark."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import torch

from . import __version__, checklist, dispatch, soak
from .backends import cpu
from .layouts import Layout
from .relations import parse

MOST_TILES = 64  # along a side that are drawn as text
OPTIONAL = {
    "triton": "the backend for GPUs",
    "matplotlib": "plots, show --png",
    "rich": "tables and progress of bench",
    "safetensors": "Layout.save and load",
    "scipy": "orders of nodes; a peer of bench",
    "torch_geometric": "integrations.pyg; a peer of bench",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code."""
    parser = argparse.ArgumentParser(prog="attnbias", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="draw a relation and its layout")
    show.add_argument("relation", help="an expression, such as 'Causal() & Window(before=3)'")
    show.add_argument("q_len", type=int, nargs="?", default=16)
    show.add_argument("k_len", type=int, nargs="?", default=None)
    show.add_argument("--q-start", default="0", help="a number, or 'end'")
    show.add_argument("--tile", type=int, choices=(64, 128), help="the size of tiles; chosen by default")
    show.add_argument("--form", default="auto", help="auto, tiles or edges")
    show.add_argument("--png", help="also draw the tiles into this file")
    verify = commands.add_parser("verify", help="compare every kernel that can run here with float64")
    verify.add_argument(
        "--device", default=None, help="cpu, cuda or cuda:1; by default a GPU if there is one"
    )
    verify.add_argument("--backend", default=None, help="its name; by default each that can run")
    verify.add_argument("--case", default="", help="only lines that hold these words")
    verify.add_argument("--random", type=int, metavar="N", help="draw so many problems instead")
    verify.add_argument("--seed", type=int, default=0, help="the first drawn problem's seed")
    verify.add_argument("--small", action="store_true", help="draw small ones, as for TRITON_INTERPRET=1")
    verify.add_argument("--long", action="store_true", help="compare rows of 65,536 tokens instead")
    commands.add_parser("info", help="versions, devices, backends and why each can or cannot run")
    commands.add_parser(
        "theory", help="the mechanisms' relations and symmetries, and each claim on every backend"
    )
    bench = commands.add_parser("bench", help="run the benchmark", add_help=False)
    given, rest = parser.parse_known_args(arguments)
    if rest and given.command != "bench":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        if given.command == "show":
            return _show(given)
        if given.command == "verify":
            return _verify(given)
        if given.command == "info":
            return _info()
        if given.command == "theory":
            return _theory()
        from .benchmarks.__main__ import main as run_benchmark

        bench.exit(run_benchmark(rest) or 0)
    except (ValueError, TypeError, NotImplementedError, ImportError) as error:
        print(f"attnbias: {error}", file=sys.stderr)
        return 2


def _show(given: argparse.Namespace) -> int:
    relation = parse(given.relation)
    k_len = given.q_len if given.k_len is None else given.k_len
    start = given.q_start if given.q_start == "end" else int(given.q_start)
    print(relation)
    if given.q_len * k_len <= 1 << 16:
        print(relation.picture(given.q_len, k_len, start))
    layout = Layout.build(relation, given.q_len, k_len, q_start=start, form=given.form, tile=given.tile)
    if layout.q_tile.numel() > 1 and max(given.q_len, k_len) <= MOST_TILES * layout.tile:
        print(f"tiles of {layout.tile}: # full, + partial, e edges, * both\n{layout.picture()}")
    print(layout.stats())
    if given.png:
        layout.picture(given.png)
        print(f"drawn in {given.png}")
    return 0


def _verify(given: argparse.Namespace) -> int:
    device = device_of(given.device)
    if given.backend is not None:
        dispatch.check_name(given.backend, "--backend")
    if given.backend == "triton":
        import triton  # noqa: F401  # as it interprets or has a driver for the host, so does the backend
    if given.random is not None:
        return _verify_random(given, device)
    started = time.monotonic()
    passed = failed = 0
    seen = set()
    if given.long:
        found = checklist.long_lines(device, given.backend)
    else:
        found = checklist.lines(device, given.backend, given.case)
    for line in found:
        print(line, flush=True)
        seen.add(line.backend)
        failed += bool(line.fault)
        passed += not line.fault
    if not (given.backend or given.long):
        for name, why in checklist.backends_of(device).items():
            if name not in seen:
                print(f"{name}: {why or 'refuses each of these'}")
    if not passed + failed:
        raise ValueError(f"nothing to verify: {given.backend or 'no backend'} runs no such check on {device}")
    print(f"{passed} passed, {failed} failed on {device}, {time.monotonic() - started:.0f} s")
    return 1 if failed else 0


def _verify_random(given: argparse.Namespace, device: str) -> int:
    if given.random < 1:
        raise ValueError(f"--random: wanted at least 1 problem, got {given.random}")
    failed = refused = bare = 0
    started = shown = time.monotonic()
    for number in range(given.random):
        seed = given.seed + number
        try:
            drawn, faults, is_plain = soak.check(seed, given.backend, small=given.small, device=device)
        except NotImplementedError:
            refused += 1
            continue
        except Exception as error:  # the problems that follow are still of use
            failed += 1
            print(f"FAILED seed {seed}: {checklist.words_of(error)}", flush=True)
            continue
        bare += is_plain
        if faults:
            failed += 1
            print(f"FAILED {drawn}", *faults, sep="\n  ")
        if time.monotonic() - shown > 10:
            shown = time.monotonic()
            print(f"{number + 1} of {given.random} problems, {failed} failed", file=sys.stderr)
    seconds = time.monotonic() - started
    print(
        f"{given.random - refused - failed} passed, {failed} failed, {refused} refused by "
        f"{given.backend or 'the backends chosen'}, {bare} run without options that it refuses, "
        f"{seconds:.0f} s, seeds {given.seed}..{given.seed + given.random - 1}"
    )
    return 1 if failed or refused == given.random else 0


def device_of(name: str | None) -> str:
    """A device that is there: a GPU where none is named and torch sees one.

    Raises:
        ValueError: if there is no such device.
    """
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device: wanted cpu, cuda or cuda:1, got {name!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device: wanted cpu or cuda, got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"--device: {name!r} is not there: torch sees {torch.cuda.device_count()} CUDA devices"
        )
    return name


def _info() -> int:
    print(f"attnbias {__version__}, torch {torch.__version__}, Python {sys.version.split()[0]}")
    level = cpu.missing() or f"kernels at {cpu.level()} (of {', '.join(cpu.levels())})"
    print(f"cpu: {platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads")
    print(f"     torch at {torch.backends.cpu.get_cpu_capability()}; {level}")
    devices = ["cpu"]
    for number in range(torch.cuda.device_count()):
        devices.append(f"cuda:{number}")
        major, minor = torch.cuda.get_device_capability(number)
        size = torch.cuda.get_device_properties(number).total_memory >> 30
        print(f"cuda:{number}: {torch.cuda.get_device_name(number)}, sm_{major}{minor}, {size} GiB")
    for device in devices:
        for name, why in checklist.backends_of(device).items():
            print(f"{device} {name}: {why or 'can run'}")
    for package, what in OPTIONAL.items():
        try:
            print(f"{package} {version(package)}: {what}")
        except PackageNotFoundError:
            print(f"{package} is not installed: {what}")
    return 0


def _theory() -> int:
    from .symmetry.theory import report

    text, held = report()
    print(text)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
