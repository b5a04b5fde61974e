"""Time attention and its peers; print tables, and write JSON, plots and a page."""

import argparse
import sys
from collections.abc import Iterable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from attnbias.arguments import device_of
from attnbias.op import dispatch

from .cases import tokens
from .cases.catalog import cases_of
from .gate import floors
from .measure import layout_times, pair_costs, recipe_times, run, terminal
from .measure.race import scaling
from .measure.record import exit_code, load, path_of, save
from .report import page, tables

WHAT = ("attention", "layouts", "gate", "costs", "threads")
EXAMPLES = """\
examples:
  attnbias bench                                   a quick run: a table, and files in results/
  attnbias bench --case window --compare results/earlier.json
  attnbias bench gate --isa avx2                   exit code 1: a speed floor is not held
"""


def print_scaling(names: Iterable[str], rounds: int) -> None:
    """Print how much faster all threads are than one."""
    threads, rows = torch.get_num_threads(), []
    for name in names:
        case = tokens.CASES[name]()
        for backward in (False, True):
            terminal.progress(f"{name}, {threads} threads")
            ratio = scaling(case, backward=backward, rounds=rounds, threads=threads)
            rows.append([name, "forward + backward" if backward else "forward", terminal.ratio(ratio)])
    terminal.progress("")
    terminal.table(f"Wall time on 1 thread over {threads}", ["case", "pass", "ratio"], rows)


def print_layouts(tokens: list[int], peer_tokens: int, rounds: int, results: Path) -> None:
    """Print the times of building layouts, and plot how they grow."""
    curves = layout_times.run(tokens, rounds)
    recipe_times.run(peer_tokens, rounds)
    if find_spec("matplotlib"):
        from .report import plots

        path = results / "layout-growth.png"
        plots.plot_growth(curves, path)
        print(f"plot: {path}")
    else:
        print("no plot: matplotlib is not installed")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the arguments.

    Raises:
        ValueError: if one of them is wrong.
    """
    parser = argparse.ArgumentParser(
        prog="attnbias bench",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "what", nargs="?", default="attention", choices=WHAT, help="what to measure (attention)"
    )
    parser.add_argument("--full", action="store_true", help="every case, peer and density; takes much longer")
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--backend", help="time this backend: " + ", ".join(dispatch.BACKENDS))
    parser.add_argument("--device", help="cpu, cuda or cuda:1; by default a GPU if there is one")
    parser.add_argument("--threads", type=int, default=1, help="1: CPU time; more: wall time (1)")
    parser.add_argument("--compare", type=Path, metavar="JSON", help="compare with this earlier result")
    parser.add_argument("--rounds", type=int, help="samples per time (quick: 3, else 5)")
    parser.add_argument("--isa", "--level", help="gate: hold both sides to an instruction set, such as avx2")
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder for files (results)")
    args = parser.parse_args(argv)
    for name in ("threads", "rounds"):
        given = getattr(args, name)
        if given is not None and given < 1:
            raise ValueError(f"--{name}: wanted at least 1, got {given}")
    if args.backend is not None:
        dispatch.check_name(args.backend, "--backend")
    args.device = device_of(args.device)
    args.then = load(args.compare) if args.compare else None
    known = tokens.CASES if args.what in ("gate", "threads") else cases_of(args.device, is_quick=False)
    if args.case and args.what in ("attention", "threads") and not any(args.case in name for name in known):
        raise ValueError(
            f"--case: wanted part of a case's name, got {args.case!r}; there are {', '.join(known)}"
        )
    return args


def measure(args: argparse.Namespace) -> int:
    """Run, print the table, write JSON, plots and page, even if the run is interrupted."""
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
        print("\ninterrupted: these are the results so far", file=sys.stderr)
    if not (results["entries"] or results["raised"]):
        return 130 if interrupted else 1
    tables.print_run(results)
    save(results, path)  # includes the finished part of an interrupted case
    written = [path]
    figures = {}
    if find_spec("matplotlib"):
        from .report import plots

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
    """Run the benchmark and return its exit code."""
    try:
        args = parse(argv)
        if args.isa:
            floors.hold_to(args.isa)
    except ValueError as error:
        print(f"attnbias bench: {error}", file=sys.stderr)
        return 2
    rounds = args.rounds or 5
    if args.what == "attention":
        return measure(args)
    print(terminal.machine())
    if args.what == "gate":
        return floors.run(rounds, args.case)
    if args.what == "costs":
        return pair_costs.run(rounds)
    if args.what == "threads":
        print_scaling([name for name in tokens.CASES if args.case in name], rounds)
    if args.what == "layouts":
        tokens_of = [2**power for power in range(14, 21 if args.full else 18)]
        print_layouts(tokens_of, recipe_times.peer_tokens(is_full=args.full), rounds, args.results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
