"""Real graphs are found in their folders, and drawn ones have the stated properties."""

from __future__ import annotations

import pickle
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attnbias.benchmarks.cases import drawn as generators
from attnbias.benchmarks.cases import stored as graphs
from attnbias.benchmarks.cases.stored import GraphData

pytest.importorskip("scipy")

SIZES = {
    "cora": (2_708, 10_556),
    "citeseer": (3_327, 9_104),
    "pubmed": (19_717, 88_648),
    "airfoil": (4_253, 24_578),
    "minnesota": (2_642, 6_606),
    "mol1024": (15_663, 31_944),
}


def codes(graph: GraphData) -> np.ndarray[Any, Any]:
    source, target = graph.edge_index
    assert graph.edge_index.dtype == np.int64
    assert graph.edges == 0 or 0 <= graph.edge_index.min() <= graph.edge_index.max() < graph.num_nodes
    return target * graph.num_nodes + source


def is_simple(graph: GraphData) -> bool:
    source, target = graph.edge_index
    return len(np.unique(codes(graph))) == graph.edges and bool((source != target).all())


def is_undirected(graph: GraphData) -> bool:
    source, target = graph.edge_index
    return np.array_equal(np.sort(codes(graph)), np.sort(source * graph.num_nodes + target))


@pytest.mark.parametrize("name", graphs.NAMES)
def test_real_graphs(name: str) -> None:
    try:
        graph = graphs.load(name)
    except graphs.MissingGraphError as error:
        assert name not in graphs.SHIPPED
        pytest.skip(str(error))
    assert (graph.num_nodes, graph.edges) == SIZES[name]
    assert is_simple(graph) and is_undirected(graph)
    if name == "mol1024":
        assert graph.ptr is not None and len(graph.ptr) == 1025
        part = np.searchsorted(graph.ptr, graph.edge_index, side="right")
        assert (part[0] == part[1]).all()


@pytest.mark.parametrize("name", ["cora", "citeseer"])
def test_nodes_of_real_graphs(name: str) -> None:
    try:
        nodes = graphs.load_nodes(name)
    except graphs.MissingGraphError as error:
        pytest.skip(str(error))
    count, classes = SIZES[name][0], nodes.label.max() + 1
    assert len(nodes.feature_ptr) == count + 1 and nodes.feature_ptr[-1] == len(nodes.feature_index)
    assert nodes.feature_index.max() < nodes.num_features and (nodes.feature_value == 1).all()
    assert (len(nodes.train), len(nodes.val), len(nodes.test)) == (20 * classes, 500, 1000)
    assert (np.bincount(nodes.label[nodes.train]) == 20).all()


# -- folders that are searched ----------------------------------------------------------------------


def test_given_folder_is_the_only_one_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, named = tmp_path / "given", tmp_path / "named"
    for folder, nodes in ((given, 3), (named, 4)):
        folder.mkdir()
        np.savez(folder / "airfoil.npz", edge_index=np.array([[0], [1]], np.int32), num_nodes=nodes)
    monkeypatch.setenv(graphs.VARIABLE, str(named))
    assert graphs.load("airfoil", given).num_nodes == 3
    assert graphs.load("airfoil").num_nodes == 4
    assert graphs.load("airfoil", given).relation().num_nodes == 3
    with pytest.raises(graphs.MissingGraphError, match=r"minnesota: no folder has minnesota.npz; searched"):
        graphs.load("minnesota", given)  # the package has it, but is not searched


def test_missing_graph_names_its_files_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "HERE", tmp_path / "a" / "b")
    monkeypatch.delenv(graphs.VARIABLE, raising=False)
    with pytest.raises(graphs.MissingGraphError) as caught:
        graphs.load("cora", tmp_path)
    for words in ("cora.npz or Planetoid's files (ind.cora.graph", str(tmp_path), "ATTNBIAS_GRAPHS"):
        assert words in str(caught.value)
    with pytest.raises(graphs.MissingGraphError, match=r"no folder has pubmed_nodes.npz or Planetoid's"):
        graphs.load_nodes("pubmed")
    with pytest.raises(graphs.MissingGraphError, match=r"airfoil: no folder has airfoil.npz; searched"):
        graphs.load("airfoil")
    with pytest.raises(ValueError, match=r"name: wanted one of cora, citeseer, .*, got 'reddit'"):
        graphs.load("reddit")


def write_planetoid(raw: Path) -> None:
    """Write a small CiteSeer: 510 known nodes, test nodes 512, 510 and 513 in that order, 511 in no file."""
    from scipy.sparse import csr_matrix

    raw.mkdir(parents=True)
    rng = np.random.default_rng(0)
    neighbours = defaultdict(list, {i: [int(j) for j in rng.integers(0, 514, 3)] for i in range(514)})
    for i, each in [(i, list(each)) for i, each in neighbours.items()]:
        for j in each:
            neighbours[j].append(i)
    one_hot = np.eye(3, dtype=np.int32)
    parts = {
        "x": csr_matrix(rng.random((2, 4)) < 0.5, dtype=np.float32),
        "allx": csr_matrix(rng.random((510, 4)) < 0.5, dtype=np.float32),
        "tx": csr_matrix(rng.random((3, 4)) < 0.5, dtype=np.float32),
        "y": one_hot[[0, 1]],
        "ally": one_hot[np.arange(510) % 3],
        "ty": one_hot[[2, 0, 1]],
        "graph": neighbours,
    }
    for part, value in parts.items():
        (raw / f"ind.citeseer.{part}").write_bytes(pickle.dumps(value, protocol=2))
    (raw / "ind.citeseer.test.index").write_text("512\n510\n513\n")


@pytest.mark.parametrize("inside", ["", "raw", "CiteSeer/raw"])
def test_planetoid_files(tmp_path: Path, inside: str) -> None:
    write_planetoid(tmp_path / "data" / inside)
    graph = graphs.load("citeseer", tmp_path / "data")
    nodes = graphs.load_nodes("citeseer", tmp_path / "data")
    assert is_simple(graph) and is_undirected(graph) and graph.num_nodes == 514
    assert nodes.label[:4].tolist() == [0, 1, 2, 0] and nodes.label[510:].tolist() == [0, -1, 2, 1]
    assert nodes.test.tolist() == [510, 512, 513] and nodes.train.tolist() == [0, 1]
    assert nodes.feature_ptr[512] == nodes.feature_ptr[511]  # the node in no file


def test_planetoid_files_as_pyg_reads_them(tmp_path: Path) -> None:
    reader = pytest.importorskip("torch_geometric.io.planetoid")
    write_planetoid(tmp_path / "raw")
    theirs = reader.read_planetoid_data(str(tmp_path / "raw"), "citeseer")
    graph, nodes = graphs.load("citeseer", tmp_path), graphs.load_nodes("citeseer", tmp_path)
    pairs = {tuple(pair) for pair in theirs.edge_index.T.tolist()}
    assert {tuple(pair) for pair in graph.edge_index.T.tolist()} == pairs and len(pairs) == graph.edges
    features = torch.zeros(graph.num_nodes, nodes.num_features)
    row = np.repeat(np.arange(graph.num_nodes), np.diff(nodes.feature_ptr))
    features[row, nodes.feature_index] = torch.from_numpy(nodes.feature_value)
    # PyG gives the node in no file features of zero and class 0; here it has no label.
    assert torch.equal(features, theirs.x)
    has_label = nodes.label >= 0
    assert np.array_equal(nodes.label[has_label], theirs.y.numpy()[has_label])
    assert np.array_equal(nodes.test, theirs.test_mask.nonzero().view(-1).numpy())
    assert np.array_equal(nodes.train, theirs.train_mask.nonzero().view(-1).numpy())


def test_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ind.cora.graph").write_bytes(pickle.dumps(Path(".")))
    with pytest.raises(pickle.UnpicklingError, match=r"pathlib.*: wanted only arrays, lists and dicts"):
        graphs.load("cora", tmp_path)


# -- generators -------------------------------------------------------------------------------------

DRAWN = {
    "sbm": lambda seed: generators.sbm(2000, 16_000, communities=10, seed=seed),
    "sbm batch": lambda seed: generators.sbm_batch(3, seed=seed),
    "rmat": lambda seed: generators.rmat(1500, 9000, seed=seed),
    "knn": lambda seed: generators.knn_cloud(500, 5, seed=seed),
    "delaunay": lambda seed: generators.delaunay(400, seed=seed),
    "expander": lambda seed: generators.expander(300, 6, seed=seed),
}


@pytest.mark.parametrize("name", DRAWN)
def test_generators_are_seeded_and_simple(name: str) -> None:
    graph, same, other = (DRAWN[name](seed) for seed in (0, 0, 1))
    assert np.array_equal(graph.edge_index, same.edge_index)
    assert not np.array_equal(graph.edge_index, other.edge_index)
    assert is_simple(graph)
    assert is_undirected(graph) != (name == "knn")


def degrees(graph: GraphData) -> np.ndarray[Any, Any]:
    return np.bincount(graph.edge_index[1], minlength=graph.num_nodes)


def test_sizes_and_shapes_of_drawn_graphs() -> None:
    graph = generators.sbm(4000, 40_000, communities=10, mixing=0.2, by_community=True)
    assert graph.num_nodes == 4000 and 0.9 * 40_000 < graph.edges <= 40_000
    near = np.abs(graph.edge_index[0] - graph.edge_index[1]) < 800  # communities have about 400 nodes
    assert near.mean() > 0.7
    hubs = degrees(generators.rmat(4000, 40_000))
    assert hubs.max() > 20 * hubs.mean()
    batch = generators.sbm_batch(20)
    assert batch.ptr is not None and len(batch.ptr) == 21
    assert 45 < degrees(batch).mean() < 53
    part = np.searchsorted(batch.ptr, batch.edge_index, side="right")
    assert (part[0] == part[1]).all()
    assert (degrees(generators.knn_cloud(300, 7)) == 7).all()
    assert 5.5 < degrees(generators.delaunay(1000)).mean() < 6
    assert degrees(generators.expander(1000, 6)).mean() > 5.9
    with pytest.raises(ValueError, match="degree: wanted an even number, got 5"):
        generators.expander(10, 5)
    star = generators.star(50)
    assert degrees(star).tolist() == [50] + [1] * 50


@pytest.mark.parametrize("make", [generators.knn_cloud, generators.delaunay])
def test_morton_order_brings_neighbours_near(make: Any) -> None:
    args = (600, 6) if make is generators.knn_cloud else (600,)
    spread = [
        np.abs(np.subtract(*make(*args, order=order).edge_index)).mean() for order in ("random", "morton")
    ]
    assert spread[1] < 0.4 * spread[0]
    graph = make(*args, order="morton")
    assert graph.points is not None
    distance = np.linalg.norm(np.subtract(*graph.points[graph.edge_index]), axis=1)
    assert distance.mean() < 0.2  # the points moved with their nodes


@pytest.mark.parametrize("refinement", [0, 1, 3])
def test_icosphere(refinement: int) -> None:
    graph = generators.icosphere(refinement)
    assert graph.num_nodes == 10 * 4**refinement + 2
    assert graph.edges == 60 * 4**refinement
    assert is_simple(graph) and is_undirected(graph)
    assert sorted(set(degrees(graph).tolist())) == ([5] if refinement == 0 else [5, 6])
    assert graph.points is not None
    assert np.ptp(np.linalg.norm(graph.points, axis=1)) < 1e-9 or refinement == 0


def test_hops() -> None:
    path = GraphData("path", generators.both_ways(np.arange(5), np.arange(1, 6), 6), 6)
    reached = generators.hops(path, 2)
    wanted = {(i, j) for i in range(6) for j in range(6) if 0 < abs(i - j) <= 2}
    assert {tuple(pair) for pair in reached.edge_index.T.tolist()} == wanted
    assert is_simple(reached)
    far = generators.hops(generators.icosphere(3), 4)
    assert np.bincount(degrees(far)).argmax() == 60  # 6 + 12 + 18 + 24
