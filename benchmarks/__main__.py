"""``attnbias bench``: attention beside its peers on this machine, as a table, JSON, plots and a page."""

import argparse
import sys
from collections.abc import Iterable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from attnbias import dispatch
from attnbias.__main__ import device_of

from . import cases, costs, gate, layouts, page, report, run, tables
from .attention import scaling
from .catalog import cases_of
from .results import exit_code, load, path_of, save

WHAT = ("attention", "layouts", "gate", "costs", "threads")


def print_scaling(names: Iterable[str], rounds: int) -> None:
    """Print how much faster all threads are than one."""
    threads, rows = torch.get_num_threads(), []
    for name in names:
        case = cases.CASES[name]()
        for backward in (False, True):
            report.progress(f"{name}, {threads} threads")
            ratio = scaling(case, backward=backward, rounds=rounds, threads=threads)
            rows.append([name, "forward + backward" if backward else "forward", report.ratio(ratio)])
    report.progress("")
    report.table(f"Wall time on 1 thread over {threads}", ["case", "pass", "ratio"], rows)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the arguments.

    Raises:
        ValueError: with a sentence, if one of them cannot be.
    """
    parser = argparse.ArgumentParser(prog="attnbias bench", description=__doc__)
    parser.add_argument(
        "what", nargs="?", default="attention", choices=WHAT, help="what to measure (attention)"
    )
    parser.add_argument("--full", action="store_true", help="every case, peer and density: takes much longer")
    parser.add_argument("--case", default="", help="only cases whose name holds these words")
    parser.add_argument("--backend", help="time this backend: " + ", ".join(dispatch.BACKENDS))
    parser.add_argument("--device", help="cpu, cuda or cuda:1; by default a GPU if there is one")
    parser.add_argument("--threads", type=int, default=1, help="1: CPU time; more: wall time (1)")
    parser.add_argument(
        "--compare", type=Path, metavar="JSON", help="also print this earlier result beside it"
    )
    parser.add_argument("--rounds", type=int, help="samples of each time (quick: 3, else 5)")
    parser.add_argument("--level", help="gate: hold both sides to an instruction level, such as avx2")
    parser.add_argument("--results", type=Path, default=Path("results"), help="where files go (results)")
    args = parser.parse_args(argv)
    for name in ("threads", "rounds"):
        given = getattr(args, name)
        if given is not None and given < 1:
            raise ValueError(f"--{name}: wanted at least 1, got {given}")
    if args.backend is not None:
        dispatch.check_name(args.backend, "--backend")
    args.device = device_of(args.device)
    args.then = load(args.compare) if args.compare else None
    known = cases.CASES if args.what in ("gate", "threads") else cases_of(args.device, is_quick=False)
    if args.case and args.what in ("attention", "threads") and not any(args.case in name for name in known):
        raise ValueError(f"--case: no case holds {args.case!r}; there are {', '.join(known)}")
    return args


def measure(args: argparse.Namespace) -> int:
    """Run, and leave table, JSON, plots and page, also of a run that was broken off."""
    plan = run.Plan(
        device=args.device,
        is_quick=not args.full,
        wanted=args.case,
        backend=args.backend,
        threads=args.threads,
        rounds=args.rounds or (5 if args.full else 3),
    )
    results = run.begin(plan)
    path = path_of(results, args.results)
    interrupted = False
    try:
        run.measure(plan, results, partial(save, results, path))
    except KeyboardInterrupt:
        interrupted = True
        print("\nbroken off: these are the results so far", file=sys.stderr)
    if not (results["entries"] or results["raised"]):
        return 130 if interrupted else 1
    tables.print_run(results)
    save(results, path)  # what an interrupted case had done
    written = [path]
    figures = {}
    if find_spec("matplotlib"):
        from . import plots

        figures = plots.draw_all(results)
        written += plots.save_png(figures, args.results, path.stem)
    else:
        print("no plots: matplotlib is not installed")
    written.append(page.write(results, figures, path.with_suffix(".html")))
    if args.then:
        tables.print_comparison(results, args.then)
    print("\n" + "\n".join(str(each) for each in written))
    return 130 if interrupted else exit_code(results)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; its exit code."""
    try:
        args = parse(argv)
        if args.level:
            gate.hold_to(args.level)
    except ValueError as error:
        print(f"attnbias bench: {error}", file=sys.stderr)
        return 2
    rounds = args.rounds or 5
    if args.what == "attention":
        return measure(args)
    print(report.machine())
    if args.what == "gate":
        return gate.run(rounds, args.case)
    if args.what == "costs":
        return costs.run(rounds)
    if args.what == "threads":
        print_scaling([name for name in cases.CASES if args.case in name], rounds)
    if args.what == "layouts":
        layouts.run([2**power for power in range(14, 21 if args.full else 18)], rounds, args.results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
