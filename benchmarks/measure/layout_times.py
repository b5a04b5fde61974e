"""The time of building a layout, compared with peers and as it grows."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import attnbias as ab

from . import terminal
from .timing import Point, Spread, interleave, one_thread

DOCUMENTS = 1_000
NODES, EDGES = 100_000, 2_000_000


@dataclass(frozen=True)
class Case:
    """A relation as a function of the number of tokens."""

    name: str
    relation: Callable[[int], ab.Relation]

    def build(self, tokens: int) -> ab.Layout:
        """Make a new relation and its layout, so that nothing comes from a cache."""
        return ab.Layout.build(self.relation(tokens), tokens, tokens)

    def check(self, tokens: int) -> None:
        """Fail unless the layout holds exactly the pairs of the relation."""
        relation = self.relation(tokens)
        got = ab.Layout.build(relation, tokens, tokens).to_dense()
        if not (got == relation.dense(tokens, tokens)).all():
            raise AssertionError(
                f"{self.name}: the layout at {tokens} tokens has other pairs than the relation"
            )


def document_lengths(tokens: int) -> list[int]:
    """Cut ``tokens`` at random, the same way each time, into documents of at least one token."""
    generator = torch.Generator().manual_seed(0)
    cuts = torch.randperm(tokens - 1, generator=generator)[: DOCUMENTS - 1].sort().values + 1
    ends = torch.cat([torch.tensor([0]), cuts, torch.tensor([tokens])])
    lengths: list[int] = ends.diff().tolist()
    return lengths


def random_edges() -> Tensor:
    """Draw source and target of each edge at random, the same ones each time."""
    return torch.randint(NODES, (2, EDGES), generator=torch.Generator().manual_seed(0))


def build_graph(edges: Tensor) -> ab.Layout:
    """Make a new graph and its layout: edges by target and by source."""
    return ab.Layout.build(ab.Graph(edges, num_nodes=NODES), NODES, NODES)


def local(tokens: int) -> ab.Relation:
    return ab.Causal() & ab.Window(before=255)


def documents(tokens: int) -> ab.Relation:
    return ab.Documents.from_lengths(document_lengths(tokens)) & ab.Causal()


def with_global(tokens: int) -> ab.Relation:
    return ab.Window(before=255) | ab.Global(range(64))


LOCAL = Case("causal & window", local)
GROWTH = [
    LOCAL,
    Case("1,000 documents & causal", documents),
    Case("window | 64 global", with_global),
]


def block_mask(tokens: int) -> BlockMask:
    """Build FlexAttention's mask for ``Causal() & Window(before=255)``, by its default."""

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q - k <= 255)

    return create_block_mask(mask_mod, None, None, tokens, tokens, device="cpu")


def csr_both_ways(source: np.ndarray[Any, Any], target: np.ndarray[Any, Any]) -> tuple[Any, Any]:
    """Sort edges by target, then by source, with the edge's number as value.

    The transpose is taken from the first result, which is quicker than sorting the edges again.
    """
    from scipy.sparse import coo_matrix

    number = np.arange(len(source), dtype=np.int32)
    by_target = coo_matrix((number, (target, source)), shape=(NODES, NODES)).tocsr()
    return by_target, by_target.T.tocsr()


class Race(NamedTuple):
    """The same work done here and by a peer."""

    name: str
    ours: Callable[[], object]
    peer_name: str
    peer: Callable[[], object]


def races(tokens: int) -> list[Race]:
    """Return the comparisons with peers; the graph needs scipy."""
    local = Race(
        f"{LOCAL.name}, {tokens:,} tokens",
        partial(LOCAL.build, tokens),
        "create_block_mask",
        partial(block_mask, tokens),
    )
    if not find_spec("scipy"):
        print("no graph: scipy is not installed")
        return [local]
    edges = random_edges()
    graph = Race(
        f"graph, {EDGES:,} edges",
        partial(build_graph, edges),
        "scipy: CSR and its transpose",
        partial(csr_both_ways, *edges.numpy()),
    )
    return [local, graph]


def race_rows(race: Race, rounds: int) -> list[list[str]]:
    """Time both in turn, and compare them round by round."""
    terminal.progress(f"{race.name} and {race.peer_name}, {rounds} rounds")
    ours, peer = interleave([race.ours, race.peer], rounds)
    ratios = Spread.of([theirs / mine for mine, theirs in zip(ours, peer, strict=True)])
    return [
        [race.name, "attnbias", terminal.times(Spread.of(ours)), ""],
        ["", race.peer_name, terminal.times(Spread.of(peer)), terminal.ratio(ratios)],
    ]


def growth(case: Case, sizes: list[int], rounds: int) -> list[Point]:
    """Time one case at each number of tokens."""
    points = []
    for tokens in sizes:
        terminal.progress(f"{case.name}, {tokens:,} tokens, {rounds} rounds")
        (samples,) = interleave([partial(case.build, tokens)], rounds)
        points.append(Point(tokens, Spread.of(samples), case.build(tokens).stats().bytes))
    return points


def growth_rows(name: str, points: list[Point]) -> list[list[str]]:
    """Make one row per point, compared with the point at half its tokens."""
    rows = []
    for half, point in zip([None, *points], points, strict=False):
        rows.append(
            [
                name,
                f"{point.tokens:,}",
                terminal.times(point.time),
                f"{point.time.median / half.time.median:.2f}x" if half else "",
                f"{point.bytes:,}",
                f"{point.bytes / half.bytes:.2f}x" if half else "",
                f"{point.bytes / point.tokens:.1f}",
            ]
        )
    return rows


def run(tokens: list[int], rounds: int) -> dict[str, list[Point]]:
    """Measure and print both tables; return the growth of each case."""
    for case in GROWTH:
        case.check(2_000)
    with one_thread():
        raced = [row for race in races(tokens[0]) for row in race_rows(race, rounds)]
        curves = {case.name: growth(case, tokens, rounds) for case in GROWTH}
    terminal.progress("")
    terminal.table("Building a layout", ["", "by", "time", "times attnbias"], raced)
    terminal.table(
        "Growth of a layout",
        ["relation", "tokens", "time", "vs half", "bytes", "vs half", "a token"],
        [row for name, points in curves.items() for row in growth_rows(name, points)],
    )
    return curves
