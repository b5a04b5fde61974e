"""Layouts built on the device of the pairs: the same as the host's, with almost nothing read back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cases.reads import Reads, refuse_transfers
from torch import Tensor

import attnbias as ab
from attnbias.layouts import build
from attnbias.layouts.costs import GPU_COSTS, Costs
from attnbias.layouts.device import lay_out
from attnbias.layouts.header import FIELDS
from attnbias.relations.listing import Listed
from attnbias.sets.bound import Place
from attnbias.sets.pairs import Pairs


def random_graph(n_src: int, n_dst: int, edges: int, seed: int = 0) -> ab.Graph:
    """Draw a graph without duplicates."""
    pairs = np.random.default_rng(seed).permutation(n_src * n_dst)[:edges]
    return ab.Graph(np.stack((pairs % n_src, pairs // n_src)), size=(n_src, n_dst))


def blocks(*counts: int) -> ab.Graph:
    """Make complete graphs in a row: full tiles, ragged tiles and, between large ones, edges."""
    graphs = [ab.Graph.from_adjacency(np.ones((n, n))) for n in counts]
    return ab.Graph.batch(graphs)


def shuffled(graph: ab.Graph, repeats: int = 0) -> ab.Graph:
    order = np.random.default_rng(1).permutation(graph.edge_index.shape[1])
    return ab.Graph(graph.edge_index[:, np.append(order, order[:repeats])], graph.num_nodes, graph.size)


def neighbours(batch: int, heads: int, queries: int, n: int, keys: int) -> ab.Neighbors:
    return ab.Neighbors(np.random.default_rng(2).integers(-1, keys, (batch, heads, queries, n)))


CASES: dict[str, tuple[Callable[[], Listed], int, int, int]] = {
    "sparse": (lambda: random_graph(300, 300, 500), 300, 300, 0),
    "denser": (lambda: random_graph(300, 200, 9000), 200, 300, 0),
    "ragged blocks": (lambda: shuffled(blocks(200, 7, 130, 1, 64, 128)), 530, 530, 0),
    "equal blocks": (lambda: blocks(100, 28, 100, 28), 256, 256, 0),
    "duplicates": (lambda: shuffled(blocks(200, 130, 3), 40), 333, 333, 0),
    "one row": (lambda: random_graph(2000, 1, 1500), 1, 2000, 0),
    "some rows": (lambda: shuffled(blocks(200, 130, 3)), 150, 333, 100),
    "lists": (lambda: neighbours(2, 3, 70, 5, 90), 70, 90, 0),
    "long lists": (lambda: neighbours(1, 2, 150, 90, 100), 150, 100, 0),
    "some lists": (lambda: neighbours(2, 1, 70, 40, 90), 33, 90, 20),
    "no lists": (lambda: ab.Neighbors(np.full((4, 2), -1)), 4, 9, 0),
    "no edges": (lambda: ab.Graph(np.zeros((2, 0), int), num_nodes=5), 5, 5, 0),
    "no nodes": (lambda: ab.Graph(np.zeros((2, 0), int), num_nodes=0), 0, 0, 0),
}


def build_here(relation: Listed, q_len: int, k_len: int, q_start: int, costs: Costs, **how: Any) -> ab.Layout:
    options = {"form": "auto", "tile": None, **how}
    pairs = relation._offer(Place(q_len, k_len, q_start))
    made = lay_out(pairs, q_len, k_len, q_start=q_start, costs=costs, **options)
    return ab.Layout(made.buffer, made.where)


def bits_of_tiles(layout: ab.Layout, side: str) -> Tensor:
    """Return the pattern of each partial tile, in order; patterns may be numbered in any order."""
    ptr = getattr(layout, f"{side}_ptr").reshape(-1, 3).long()
    marks = getattr(layout, f"{side}_mark").long()
    partial = torch.cat([torch.arange(int(b), int(c)) for _, b, c in ptr] or [torch.arange(0)])
    return (layout.patterns if side == "q" else layout.patterns_t)[marks[partial]]


def assert_same(mine: ab.Layout, theirs: ab.Layout) -> None:
    assert mine.header == theirs.header
    mine.validate()
    for name in FIELDS:
        if name not in ("q_mark", "k_mark", "patterns", "patterns_t"):
            assert torch.equal(getattr(mine, name), getattr(theirs, name)), name
    for side in "qk":
        assert torch.equal(bits_of_tiles(mine, side), bits_of_tiles(theirs, side)), side


@pytest.mark.parametrize(("tile", "arch"), [(None, 80), (None, 100), (64, 80), (128, 80)])
@pytest.mark.parametrize("form", ["auto", "edges", "tiles"])
@pytest.mark.parametrize("name", CASES)
def test_the_same_layout_as_on_the_host(
    name: str, form: Any, tile: int | None, arch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, q_len, k_len, q_start = CASES[name]
    relation, costs = make(), GPU_COSTS[arch]
    monkeypatch.setattr(build, "costs_of", lambda device: costs)
    how = {"form": form, "tile": tile}
    if form == "tiles" and name in ("duplicates", "lists", "long lists", "some lists"):
        with pytest.raises(ValueError, match="form='tiles': duplicate edges count twice"):
            build_here(relation, q_len, k_len, q_start, costs, **how)
        return
    theirs = ab.Layout.build(relation, q_len, k_len, q_start=q_start, **how)
    assert_same(build_here(relation, q_len, k_len, q_start, costs, **how), theirs)


def test_cases_hold_tiles_and_edges() -> None:
    """The cases above are not all of one kind."""
    sizes = {name: build_here(make(), *at, GPU_COSTS[80]).stats() for name, (make, *at) in CASES.items()}
    assert sizes["sparse"].tiles_full == sizes["sparse"].tiles_partial == 0 < sizes["sparse"].edges
    blocks = sizes["ragged blocks"]
    assert min(blocks.tiles_full, blocks.tiles_partial, blocks.patterns) > 0
    mixed = sizes["duplicates"]
    assert min(mixed.tiles_full + mixed.tiles_partial, mixed.edges) > 0
    assert sizes["equal blocks"].patterns < sizes["equal blocks"].tiles_partial


def offered(relation: Listed, q_len: int, k_len: int, q_start: int = 0) -> Pairs:
    """Return the pairs that a relation on a device offers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Listed, "_device", "cuda")
        pairs = relation.list_pairs(q_len, k_len, q_start, None, None)
    assert pairs is not None
    return pairs


@pytest.mark.parametrize("name", ["sparse", "lists", "no lists", "no edges"])
@pytest.mark.parametrize("form", ["auto", "edges"])
def test_the_host_reads_once_where_no_tile_can_pay(
    name: str, form: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, q_len, k_len, q_start = CASES[name]
    relation = make()
    theirs = ab.Layout.build(relation, q_len, k_len, q_start=q_start, form=form)
    refuse_transfers(monkeypatch)
    with Reads() as reads:
        pairs = offered(relation, q_len, k_len, q_start)
        costs = Costs(tile={128: 1.0, 64: 1.02}, edge=2.7, run=None)
        made = lay_out(pairs, q_len, k_len, q_start=q_start, form=form, tile=None, costs=costs)
    assert (reads.numbers, reads.lists) == (0, 1)
    monkeypatch.undo()
    assert made.tiles == 0 and theirs.tiles == 0
    assert_same(ab.Layout(made.buffer, made.where), theirs)


def test_the_host_reads_a_few_numbers_where_tiles_may_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes of what is found distinct are known one after the other: they cannot be read at once."""
    refuse_transfers(monkeypatch)
    for n in (100, 1000):
        graph = shuffled(blocks(n, 200, 130, 64), 50)
        with Reads() as reads:
            pairs = offered(graph, n + 394, n + 394)
            lay_out(pairs, n + 394, n + 394, q_start=0, form="auto", tile=None, costs=GPU_COSTS[80])
        assert reads.lists == 1 and 3 < reads.numbers <= 8, reads.numbers


@pytest.mark.parametrize(
    ("relation", "message"),
    [
        (ab.Graph([[0, 5, 1], [1, 2, 0]], num_nodes=6), "num_nodes = 3 but a source is 5"),
        (ab.Graph([[0, 2, 1], [1, 7, 0]], num_nodes=8), "num_nodes = 3 but a target is 7"),
        (ab.Neighbors([[0, 3], [1, -1], [9, 0]]), "wanted keys from -1 .none. to 2, got 9"),
    ],
)
def test_wrong_numbers_are_found_by_the_same_read(relation: Listed, message: str) -> None:
    if isinstance(relation, ab.Graph):  # whose numbers are checked at once on the host
        object.__setattr__(relation, "num_nodes", 3)
    with Reads() as reads, pytest.raises(ValueError, match=message):
        pairs = offered(relation, 3, 3)
        lay_out(pairs, 3, 3, q_start=0, form="auto", tile=None, costs=GPU_COSTS[80])
    assert (reads.numbers, reads.lists) == (0, 1)


def test_a_graph_on_a_device_is_laid_out_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """No such device is needed: the data claims to be on one, and the layout goes to another."""
    graph = shuffled(blocks(200, 130, 3), 40)
    expected = build_here(graph, 333, 333, 0, build.costs_of(torch.device("meta")))
    made = []
    monkeypatch.setattr(Listed, "_device", "cuda")
    monkeypatch.setattr(build, "lay_out", lambda *args, **how: made.append(lay_out(*args, **how)) or made[0])
    layout = ab.Layout.build(graph, 333, 333, device="meta")
    assert layout.header == expected.header and layout.device.type == "meta"
    assert ab.Layout(made[0].buffer, made[0].where) == expected
    with pytest.raises(ValueError, match="is for 333 queries, got q_len = 400"):
        ab.Layout.build(graph, 400, 333, device="meta")
