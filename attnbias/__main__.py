"""The command ``attnbias``: show a relation, verify a backend, check the theory, run the benchmark."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import torch

from . import __version__, dispatch, soak
from .problem import Problem
from .relations import Full, parse


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code."""
    parser = argparse.ArgumentParser(prog="attnbias", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="draw a relation and its layout")
    show.add_argument("relation", help="an expression, such as 'Causal() & Window(before=3)'")
    show.add_argument("q_len", type=int, nargs="?", default=16)
    show.add_argument("k_len", type=int, nargs="?", default=None)
    show.add_argument("--q-start", default="0", help="a number, or 'end'")
    show.add_argument("--png", help="also draw the tiles into this file")
    verify = commands.add_parser("verify", help="compare a backend with float64 on random problems")
    verify.add_argument("--random", type=int, default=1000, metavar="N", help="problems to draw")
    verify.add_argument("--seed", type=int, default=0, help="the first problem's seed")
    verify.add_argument("--backend", default=None, help="its name; by default what each call chooses")
    verify.add_argument("--small", action="store_true", help="small problems, as for TRITON_INTERPRET=1")
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
    layout = relation.layout(given.q_len, k_len, q_start=start)
    print(layout.stats())
    if given.png:
        layout.picture(given.png)
        print(f"drawn in {given.png}")
    return 0


def _verify(given: argparse.Namespace) -> int:
    if given.random < 1:
        raise ValueError(f"--random: wanted at least 1 problem, got {given.random}")
    if given.backend is not None:
        dispatch.check_name(given.backend, "--backend")
    if given.backend == "triton":
        import triton  # noqa: F401  # as it interprets or has a driver for the host, so does the backend
    failed = refused = bare = 0
    started = shown = time.monotonic()
    for number in range(given.random):
        seed = given.seed + number
        try:
            drawn, faults, is_plain = soak.check(seed, given.backend, small=given.small)
        except NotImplementedError:
            refused += 1
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


def _info() -> int:
    print(f"attnbias {__version__}, torch {torch.__version__}, Python {sys.version.split()[0]}")
    print(f"threads: {torch.get_num_threads()}, CPU: {torch.backends.cpu.get_cpu_capability()}")
    devices = ["cpu"]
    for number in range(torch.cuda.device_count()):
        devices.append(f"cuda:{number}")
        major, minor = torch.cuda.get_device_capability(number)
        print(f"cuda:{number}: {torch.cuda.get_device_name(number)}, sm_{major}{minor}")
    for device in devices:
        tensor = torch.zeros(1, 1, 128, 64, device=device)
        problem = Problem(tensor, tensor, tensor, Full())
        for name, backend in dispatch.BACKENDS.items():
            reasons = backend.why_not(problem)
            print(f"{device} {name}: {'; '.join(reasons) or 'can run'}")
    return 0


def _theory() -> int:
    from .symmetry.theory import report

    text, held = report()
    print(text)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
