"""``python -m attnbias.benchmarks``: what building a layout costs, beside peers and as it grows."""

import argparse
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from . import cases, peers, report
from .timing import Point, Spread, interleave, one_thread


class Race(NamedTuple):
    """The same work done here and by a peer."""

    name: str
    ours: Callable[[], object]
    peer_name: str
    peer: Callable[[], object]


def races(tokens: int) -> list[Race]:
    """What is timed beside a peer; the graph needs scipy."""
    local = Race(
        f"{cases.LOCAL.name}, {tokens:,} tokens",
        partial(cases.LOCAL.build, tokens),
        "create_block_mask",
        partial(peers.block_mask, tokens),
    )
    if not find_spec("scipy"):
        print("no graph: scipy is not installed")
        return [local]
    edges = cases.random_edges()
    graph = Race(
        f"graph, {cases.EDGES:,} edges",
        partial(cases.build_graph, edges),
        "scipy: CSR and its transpose",
        partial(peers.csr_both_ways, *edges.numpy()),
    )
    return [local, graph]


def race_rows(race: Race, rounds: int) -> list[list[str]]:
    """Time both in turn, and compare them round by round."""
    report.progress(f"{race.name} beside {race.peer_name}, {rounds} rounds")
    ours, peer = interleave([race.ours, race.peer], rounds)
    ratios = Spread.of([theirs / mine for mine, theirs in zip(ours, peer, strict=True)])
    return [
        [race.name, "attnbias", report.times(Spread.of(ours)), ""],
        ["", race.peer_name, report.times(Spread.of(peer)), report.ratio(ratios)],
    ]


def growth(case: cases.Case, sizes: list[int], rounds: int) -> list[Point]:
    """Time one case at each number of tokens."""
    points = []
    for tokens in sizes:
        report.progress(f"{case.name}, {tokens:,} tokens, {rounds} rounds")
        (samples,) = interleave([partial(case.build, tokens)], rounds)
        points.append(Point(tokens, Spread.of(samples), case.build(tokens).stats().bytes))
    return points


def growth_rows(name: str, points: list[Point]) -> list[list[str]]:
    """Write each point beside the one at half its tokens."""
    rows = []
    for half, point in zip([None, *points], points, strict=False):
        rows.append(
            [
                name,
                f"{point.tokens:,}",
                report.times(point.time),
                f"{point.time.median / half.time.median:.2f}x" if half else "",
                f"{point.bytes:,}",
                f"{point.bytes / half.bytes:.2f}x" if half else "",
                f"{point.bytes / point.tokens:.1f}",
            ]
        )
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="attnbias bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--rounds", type=int, default=5, help="samples of each time (5)")
    parser.add_argument("--results", type=Path, default=Path("results"), help="where plots go")
    args = parser.parse_args(argv)
    sizes = [2**power for power in (range(11, 14) if args.quick else range(14, 21))]

    print(report.machine())
    for case in cases.GROWTH:
        case.check(2_000)
    with one_thread():
        raced = [row for race in races(sizes[0]) for row in race_rows(race, args.rounds)]
        curves = {case.name: growth(case, sizes, args.rounds) for case in cases.GROWTH}
    report.progress("")
    report.table("Building a layout", ["", "by", "time", "times attnbias"], raced)
    report.table(
        "Growth of a layout",
        ["relation", "tokens", "time", "vs half", "bytes", "vs half", "a token"],
        [row for name, points in curves.items() for row in growth_rows(name, points)],
    )
    if find_spec("matplotlib"):
        path = args.results / "layout-growth.png"
        report.plot_growth(curves, path)
        print(f"plot: {path}")
    else:
        print("no plot: matplotlib is not installed")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
