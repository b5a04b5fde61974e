"""Graphs over ranks: laws of plans on paper, and processes against one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases.processes import pool
from cases.sharded_graphs import (
    CALLS,
    SPLITS,
    attend_million,
    compare_call,
    compare_fetched,
    draw_graph,
    shard_of,
)

import attnbias as ab
from attnbias.benchmarks.cases.stored import load
from attnbias.sharding.graphs import cut_order

CPU = torch.device("cpu")


def on_rank(shard: ab.Shard, rank: int) -> ab.Shard:
    """Return the shard of another rank."""
    return ab.Shard(shard.plans, shard.ranks._replace(rank=rank), shard.by, shard.stages, False)


def fetched_share(shard: ab.Shard) -> float:
    """Return the rows that all ranks fetch, of those that an all-gather would send them."""
    counts = shard.plan.keys.counts
    return float(shard.plan.received.sum() / (counts.sum() - counts).sum())


# -- laws, without processes -------------------------------------------------------------------------------


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_every_node_and_edge_is_on_one_rank_in_the_caller_s_order(seed, split, ranks):
    graph, points = draw_graph(seed)
    first = shard_of(graph, points, split, ranks, ranks)
    shards = [on_rank(first, rank) for rank in range(ranks)]
    nodes, edges = (torch.cat([getattr(each, name) for each in shards]) for name in ("positions", "edges"))
    assert torch.equal(nodes.sort().values, torch.arange(len(points)))
    assert torch.equal(edges.sort().values, torch.arange(graph.edge_index.shape[1]))
    for shard in shards:
        source, target = graph.edge_index[:, shard.edges]
        assert torch.isin(target, shard.positions).all()
        assert (shard.edges.diff() > 0).all() and (shard.halo.diff() > 0).all()
        outside = source.unique()[~torch.isin(source.unique(), shard.positions)]
        assert torch.equal(shard.halo, outside)  # what it has not, and no more


@pytest.mark.parametrize("seed", range(8))
def test_the_layout_of_a_rank_numbers_its_own_edges(seed):
    graph, points = draw_graph(seed)
    for rank in range(3):
        shard = on_rank(shard_of(graph, points, "rcm", 3, 3), rank)
        layout = shard.layout(CPU, "edges")
        keys = torch.from_numpy(shard.part.keys)
        assert torch.equal(layout.edge_id.sort().values.long(), torch.arange(len(shard.edges)))
        number = shard.edges[layout.edge_id.long()]
        row = torch.repeat_interleave(torch.arange(layout.q_len), layout.edge_ptr.diff().long())
        found = torch.stack((keys[layout.edge_key.long()], shard.positions[row]))
        assert torch.equal(found, graph.edge_index[:, number])
        local = shard.graph.edge_index
        both = torch.stack((keys[local[0]], shard.positions[local[1]]))
        assert torch.equal(both, graph.edge_index[:, shard.edges])


def test_neighbours_and_intersections_number_all_places_of_a_rank():
    near = ab.Neighbors([[1, -1], [2, 0], [-1, -1], [0, 3]])
    shard = ab.shard(near, 4, 2, split=[0, 1, 0, 1], rank=1)
    assert shard.edges.tolist() == [2, 3, 6, 7]
    shard = ab.shard(near & ab.Causal(), 4, 2, split=[0, 1, 0, 1])
    assert shard.edges.tolist() == [0, 1, 4, 5]  # also those that Causal drops
    assert shard.layout(CPU, "edges").edges == 0


def test_a_cut_shares_nodes_and_edges():
    degree = np.array([100] * 10 + [1] * 990)  # hubs first
    order = np.random.default_rng(0).permutation(1000)
    owner = cut_order(order, degree[np.argsort(order)], 4)
    assert (np.diff(owner[order]) >= 0).all()
    assert np.array_equal(owner[order], cut_order(np.arange(1000), degree, 4))
    degree = degree[np.argsort(order)]
    nodes, edges = np.bincount(owner), np.bincount(owner, weights=degree)
    assert nodes.max() <= 2 * 250 + 1 and edges.max() <= 2 * degree.sum() / 4 + 100
    assert np.bincount(cut_order(np.arange(7), np.zeros(7, np.int64), 3)).tolist() == [2, 3, 2]
    assert len(cut_order(np.zeros(0, np.int64), np.zeros(0, np.int64), 3)) == 0


def shuffled_mesh(side: int) -> ab.Graph:
    """Return a square mesh in both directions, its nodes numbered at random."""
    grid = np.random.default_rng(0).permutation(side * side).reshape(side, side)
    pairs = [(grid[1:], grid[:-1]), (grid[:, 1:], grid[:, :-1])]
    pairs += [(b, a) for a, b in pairs]
    index = [np.concatenate([each[i].reshape(-1) for each in pairs]) for i in range(2)]
    return ab.Graph(torch.from_numpy(np.stack(index)), num_nodes=side * side)


def test_a_mesh_of_a_million_edges_fetches_less_than_half_of_an_all_gather():
    graph = shuffled_mesh(501)
    assert graph.edge_index.shape[1] == 1_002_000
    assert 0.5 < fetched_share(ab.shard(graph, 501**2, 4, split="even")) <= 1  # as it is numbered
    shard = graph.shard(4)
    nodes = shard.plan.queries.counts
    assert fetched_share(shard) <= 0.01 and nodes.max() <= 1.05 * nodes.mean()


@pytest.mark.parametrize("by_points", [False, True])
def test_near_points_fetch_less_than_half_of_an_all_gather(by_points):
    points = torch.rand(6000, 3, generator=torch.Generator().manual_seed(0))
    shard = ab.knn_graph(points, 16).shard(4, points=points if by_points else None)
    assert fetched_share(shard) <= 0.5


@pytest.mark.parametrize("name", ["airfoil", "minnesota"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_meshes_and_roads_fetch_less_than_a_fifth_of_an_all_gather(name, ranks):
    assert fetched_share(load(name).relation().shard(ranks)) <= 0.2


def test_another_relation_over_the_same_nodes_keeps_their_ranks():
    graph, _ = draw_graph(0)
    shard = graph.shard(3, rank=1)
    looped = shard.with_relation(graph.add_self_loops())
    assert torch.equal(looped.positions, shard.positions) and looped.ranks == shard.ranks
    assert torch.isin(looped.positions, torch.from_numpy(looped.part.keys)).all()


def test_a_report_has_the_nodes_of_each_halo():
    graph, _ = draw_graph(6)
    first = graph.shard(3)
    report = first.explain(heads=4, key_heads=4, dim=(6, 5), dtype=torch.float32)
    shards = [on_rank(first, rank) for rank in range(3)]
    assert report.fetched.tolist() == [len(each.halo) for each in shards]
    assert report.rows.tolist() == [len(each.positions) for each in shards]
    assert report.pairs.tolist() == [len(each.edges) for each in shards]
    assert report.ways[0].traffic.forward.tolist() == [len(each.halo) * 4 * 11 * 4 for each in shards]
    assert "\nfetched " in str(report) and report.as_dict()["fetched"] == report.fetched.tolist()


PATH = ab.Graph([[0, 1, 2], [1, 2, 3]], num_nodes=4)
PAPER = PATH.shard(2, [0, 0, 1, 1], rank=1)
HUNGRY = ab.Graph([[0, 1, 2], [2, 3, 3]], num_nodes=4).shard(2, [0, 0, 1, 1], rank=1)  # needs 0, 1 and 2
ROWS = torch.zeros(1, 1, 2, 4)
BAD = [
    (lambda: PATH.shard(2, [0, 1]), ValueError, "parts: wanted a rank for each of the 4 nodes, got 2"),
    (lambda: PATH.shard(2, [0, 1, 2, 0]), ValueError, "parts: wanted ranks from 0 to 1, got 2 for node 2"),
    (lambda: PATH.shard(2, [0, -1, 1, 0]), ValueError, "parts: wanted ranks from 0 to 1, got -1 for node 1"),
    (lambda: PATH.shard(2, [0.5] * 4), TypeError, "parts: wanted integers"),
    (lambda: PATH.shard(2, "metis"), TypeError, "parts: wanted"),
    (
        lambda: PATH.shard(2, [0] * 4, points=[[0.0]] * 4),
        ValueError,
        "points: wanted None beside parts, which say where each node goes, got both",
    ),
    (lambda: PATH.shard(2, points=[[0.0]] * 3), ValueError, "points: wanted 4, one for each node, got 3"),
    (lambda: PATH.shard(2, rank=2), ValueError, r"rank: wanted 0\.\.1, got 2"),
    (lambda: PATH.shard("ranks"), ValueError, "mesh: wanted an initialized torch.distributed"),
    (
        lambda: ab.Graph([[0], [1]], size=(3, 2)).shard(2),
        ValueError,
        r"size: wanted as many sources as targets, got 3 and 2; use ab.shard\(graph, \(2, 3\), mesh\)",
    ),
    (lambda: ab.shard(ab.Causal(), 4, 2).edges, ValueError, "edges: wanted a Graph or Neighbors"),
    (
        lambda: ab.shard(ab.Causal(), 4, 2).graph,
        TypeError,
        "relation: wanted the shard of a Graph, got that of",
    ),
    (lambda: PAPER.fetch(torch.zeros(2, 3)), ValueError, "relation: wanted a shard on a process group, got"),
    (
        lambda: PAPER.fetch(torch.zeros(4, 3)),
        ValueError,
        r"rows: wanted this rank's 2 keys along dimension 0, got \[4, 3\]; use shard.scatter",
    ),
    (
        lambda: ab.attention(ROWS, ROWS, ROWS, HUNGRY.fetched),
        ValueError,
        r"key: wanted the 3 fetched tokens of rank 1, got 2 in \[1, 1, 2, 4\]; use shard.fetch",
    ),
    (
        lambda: ab.attention(torch.zeros(1, 1, 4, 4), ROWS, ROWS, PAPER.fetched),
        ValueError,
        "query: wanted the 2 tokens of rank 1, of 4, got 4 .*; use shard.scatter",
    ),
    (lambda: PAPER.with_relation(3), TypeError, r"relation\[0\]: wanted a Relation, got int 3"),
]


@pytest.mark.parametrize(("make", "kind", "words"), BAD, ids=[words[:40] for _, _, words in BAD])
def test_bad_input_raises_a_clear_error(make, kind, words):
    with pytest.raises(kind, match=words):
        make()


# -- processes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("size", [2, 4])
def test_calls_with_the_biases_of_each_rank_equal_the_whole(size, kind):
    for seed in range(6):
        wrong = pool(size).run(compare_call, seed, SPLITS[seed % len(SPLITS)], kind)
        assert not any(wrong), f"seed {seed}: {wrong[0]}"


def test_fetched_keys_give_the_bits_of_one_call():
    for seed in range(4):
        assert all(pool(2).run(compare_fetched, seed))


@pytest.mark.slow
def test_a_million_edges_over_four_processes_are_right():
    counts = pool(4).run(attend_million, 62_500, 16, 500)
    assert sum(counts) == 1_000_000
