"""The floors of graphs; ``make bench-gate ARGS="--case graph"`` checks only these."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch

import attnbias as ab

from ..cases import drawn
from ..cases.graphs import GRAPHS, SHAPES, GraphCase
from ..cases.stored import MissingGraphError
from ..measure import graph_memory, terminal
from ..measure.race import OURS, Result, race, steps
from ..measure.timing import Spread, interleave
from .lines import BUDGET, Line, at_least, at_most


class Floor(NamedTuple):
    """Floor and goal of the peer's time over ours for the worst shape; for PyG also with backward."""

    pyg: tuple[float, float]
    pyg_backward: tuple[float, float]
    sparse: tuple[float, float]


CITATIONS = Floor((6, 20), (4, 12), (1.8, 3))
SMALL = Floor((4, 12), (2.5, 8), (2, 4))
DENSE = Floor((40, 100), (20, 40), (3, 5))
LARGE = Floor((12, 25), (6, 12), (1.6, 2.5))
FLOORS = {
    **dict.fromkeys(("cora", "citeseer", "pubmed"), CITATIONS),
    **dict.fromkeys(("mol1024", "airfoil"), SMALL),
    **dict.fromkeys(("SBM batch", "8-hop icosphere"), DENSE),
    "kNN-16 Morton": Floor((40, 80), (20, 50), (2.5, 5)),
    **dict.fromkeys(("R-MAT 170k", "SBM 170k"), LARGE),
}
# Making a graph of 1,024 molecules and its layout may take this share of a forward pass.
BUILDING = 1.0
MEMORY = (("pubmed", 8, 16), ("kNN-16 Morton", 4, 32), ("R-MAT 170k", 8, 16))
HUGE_NODES, HUGE_EDGES = 400_000, 20_000_000


def lines(rounds: int, wanted: str) -> Iterator[Line]:
    """Yield a line for each graph whose name contains ``wanted``, or for all if it is "graph"."""

    def asked(name: str) -> bool:
        return wanted in name or wanted in f"graph {name}"

    for name in filter(asked, FLOORS):
        try:
            graph = GRAPHS[name]()
        except MissingGraphError as error:
            terminal.progress(f"left out: {error}")
            continue
        cases = {f"{heads}x{size}": GraphCase.of(graph, heads, size) for heads, size in SHAPES}
        for backward in (False, True):
            terminal.progress(f"{name}, {'forward and backward' if backward else 'forward'}")
            peers = ["PyG"] if backward else ["PyG", "torch.sparse"]
            results = {
                shape: race(case, peers, backward=backward, rounds=rounds, budget=BUDGET)
                for shape, case in cases.items()
            }
            yield from (_worst(name, peer, results) for peer in peers)
    if asked("layout"):
        yield at_most("layout of mol1024 over its forward pass, 1x64", "forward", BUILDING, building(rounds))
    if asked("order"):
        yield at_least("kNN-16, random over Morton order, 1x64", "forward", "", 0, ordering(rounds))
    if asked("memory"):
        yield from map(_memory, *zip(*MEMORY, strict=True))
    if wanted == "huge":
        yield huge(), True


def _worst(name: str, peer: str, results: dict[str, Result]) -> Line:
    """Return the line of the shape at which the peer comes closest."""
    backward = next(iter(results.values())).backward
    what = "forward + backward" if backward else "forward"
    refused = [result.refused[peer] for result in results.values() if peer in result.refused]
    if refused:
        return [name, what, peer, "", "", refused[0], "left out"], True
    shape = min(results, key=lambda shape: results[shape].ratios[peer].median)
    ratio = results[shape].ratios[peer]
    floors = FLOORS[name]
    floor, goal = floors.sparse if peer != "PyG" else floors.pyg_backward if backward else floors.pyg
    mine = terminal.times(results[shape].times[OURS])
    return at_least(f"{name}, {shape}: {mine}", what, peer, floor, ratio, goal)


def building(rounds: int) -> Spread:
    """Measure making a graph and its layout, over the forward pass that uses it."""
    graph = GRAPHS["mol1024"]()
    edge_index, nodes = torch.from_numpy(graph.edge_index), graph.num_nodes

    def build() -> ab.Layout:
        return ab.Graph(edge_index, num_nodes=nodes).layout(nodes, nodes)

    case = GraphCase.of(graph, 1, 64)
    q, k, v, _ = case.inputs()
    forward = partial(ab.attention, q, k, v, case.relation)
    pairs = zip(*interleave([build, forward], rounds), strict=True)
    return Spread.of([mine / other for mine, other in pairs])


def ordering(rounds: int) -> Spread:
    """Measure a cloud in random order over the same cloud in Morton order."""
    cases = (GraphCase.of(GRAPHS[name](), 1, 64) for name in ("kNN-16 random", "kNN-16 Morton"))
    functions = [steps(case.attend, case.inputs(), backward=False) for case in cases]
    return Spread.of([slow / fast for slow, fast in zip(*interleave(functions, rounds), strict=True)])


def _memory(name: str, heads: int, size: int) -> Line:
    title = f"extra memory, {name}, {heads}x{size}"
    terminal.progress(title)
    try:
        graph = GRAPHS[name]()
        used = graph_memory.measure(name, heads, size)
    except MissingGraphError as error:
        return [title, "forward + backward", "", "", "", str(error), "left out"], True
    if used is None:
        return [title, "forward + backward", "", "", "", "not reported by the system", "left out"], True
    most = graph_memory.limit(graph.edges, graph.num_nodes, heads, size)
    held = used <= most
    cells = [f"<= {most / 2**20:.0f} MB", "", f"{used / 2**20:.0f} MB", "ok" if held else "above limit"]
    return [title, "forward + backward", "", *cells], held


def huge() -> list[str]:
    """Check and time a forward and backward pass over a graph of 20 million edges."""
    case = GraphCase.of(drawn.sbm(HUGE_NODES, HUGE_EDGES), 1, 64)
    assert case.graph is not None
    if case.fault:
        raise AssertionError(case.fault)
    (seconds,) = interleave([steps(case.attend, case.inputs(), backward=True)], 1)
    title = f"SBM of {case.tokens:,} nodes, {case.graph.edges:,} edges, 1x64"
    return [title, "forward + backward", "", "", "", terminal.times(Spread.of(seconds)), "reported"]
