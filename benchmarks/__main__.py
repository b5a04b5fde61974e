"""``attnbias bench``: attention beside its peers on this machine, and what layouts cost."""

import argparse
from collections.abc import Iterable
from pathlib import Path

import torch

from . import cases, costs, gate, layouts, report
from .attention import MATMUL, OURS, Result, race, scaling
from .peers import PEERS
from .timing import one_thread

WHAT = ("all", "attention", "layouts", "gate", "costs", "threads")


def attention_rows(names: Iterable[str], rounds: int, peers: list[str]) -> list[Result]:
    """Time each case forward, and forward with backward, beside the peers that can run it."""
    results = []
    for name in names:
        case = cases.CASES[name]()
        for backward in (False, True):
            report.progress(f"{name}, {'forward and backward' if backward else 'forward'}")
            results.append(race(case, peers, backward=backward, rounds=rounds))
    return results


def print_attention(results: list[Result]) -> None:
    """Print what was timed, one line a case and pass."""
    rows = [
        [
            f"{result.case.name}, {result.case.tokens:,}",
            "forward + backward" if result.backward else "forward",
            report.times(result.times[OURS]),
            f"{result.rate / 1e9:.0f}",
            f"{result.ratios[MATMUL].median:.0%}",
            ", ".join(
                f"{name} {report.ratio(ratio)}" for name, ratio in result.ratios.items() if name != MATMUL
            ),
        ]
        for result in results
    ]
    header = ["keys of a query, tokens", "pass", "time", "GFLOP/s", "of torch.mm", "peer / attnbias"]
    report.table("Attention, one thread: useful work alone is counted", header, rows)


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


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="attnbias bench", description=__doc__)
    parser.add_argument("what", nargs="?", default="all", choices=WHAT, help="what to measure (all)")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--case", default="", help="gate and attention: only cases that hold these words")
    parser.add_argument("--level", help="gate: hold both sides to an instruction level, such as avx2")
    parser.add_argument("--flex", action="store_true", help="attention: FlexAttention too, which compiles")
    parser.add_argument("--rounds", type=int, default=5, help="samples of each time (5)")
    parser.add_argument("--results", type=Path, default=Path("results"), help="where plots go")
    args = parser.parse_args(argv)
    if args.level:
        gate.hold_to(args.level)
    print(report.machine())
    if args.what == "gate":
        return gate.run(args.rounds, args.case)
    if args.what == "costs":
        return costs.run(args.rounds)
    if args.what == "threads":
        print_scaling([name for name in cases.CASES if args.case in name], args.rounds)
    if args.what in ("all", "attention"):
        names = [name for name in (cases.CASES if args.case else cases.QUICK) if args.case in name]
        skipped = () if args.flex else ("Flex", "Flex 64")
        peers = [MATMUL, *(name for name in PEERS if name not in skipped)]
        with one_thread():
            results = attention_rows(names[:2] if args.quick else names, args.rounds, peers)
        report.progress("")
        print_attention(results)
    if args.what in ("all", "layouts"):
        powers = range(11, 14) if args.quick else range(14, 21)
        layouts.run([2**power for power in powers], args.rounds, args.results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
