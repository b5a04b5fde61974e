"""Graphs as users have them: every constructor gives the same edges, and bad input a clear error."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import attnbias as ab

# Asymmetric, with a self-loop, a duplicate and an isolated node.
EDGES = torch.tensor([[0, 2, 3, 1, 1, 2], [1, 0, 3, 0, 0, 3]])
GRAPH = ab.Graph(EDGES, num_nodes=5)


def dense(graph: ab.Graph) -> torch.Tensor:
    """Count each pair [query, key] in the edge list."""
    sources, targets = graph.size or (graph.num_nodes, graph.num_nodes)
    counts = torch.zeros(targets, sources, dtype=torch.int64)
    counts.index_put_((graph.edge_index[1], graph.edge_index[0]), torch.tensor(1), accumulate=True)
    return counts


def test_a_dense_adjacency_has_queries_as_rows() -> None:
    matrix = torch.tensor([[0, 1, 1], [0.5, 0, 0]])
    for given in (matrix, matrix.numpy(), matrix.tolist(), matrix != 0):
        graph = ab.Graph.from_adjacency(given)
        assert graph == ab.Graph([[1, 2, 0], [0, 0, 1]], size=(3, 2))
        assert torch.equal(graph.dense(2, 3), matrix != 0)
    assert ab.Graph.from_adjacency(torch.eye(3)) == ab.Graph([[0, 1, 2]] * 2, num_nodes=3)


@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "scipy coo", "scipy csr", "scipy array"])
def test_a_sparse_adjacency_keeps_stored_entries(layout: str) -> None:
    """A stored zero is an edge of weight zero, and an entry stored twice counts twice."""
    index, values = torch.tensor([[1, 0, 1], [2, 1, 0]]), torch.tensor([3.0, 0.0, 2.0])
    matrix: Any = torch.sparse_coo_tensor(index, values, (2, 3))
    if layout.startswith("scipy"):
        sparse = pytest.importorskip("scipy.sparse")
        made = {
            "scipy coo": sparse.coo_matrix,
            "scipy csr": sparse.csr_matrix,
            "scipy array": sparse.coo_array,
        }
        matrix = made[layout]((values.numpy(), index.numpy()), shape=(2, 3))
    elif layout == "csr":
        matrix = torch.sparse_csr_tensor([0, 1, 3], [1, 0, 2], [0.0, 2.0, 3.0], (2, 3))
    elif layout == "csc":
        matrix = torch.sparse_csc_tensor([0, 1, 2, 3], [1, 0, 1], [2.0, 0.0, 3.0], (2, 3))
    graph = ab.Graph.from_adjacency(matrix)
    assert graph.size == (3, 2)
    assert dense(graph).tolist() == [[0, 1, 0], [1, 0, 1]]
    if layout in ("coo", "scipy coo", "scipy array"):  # in the given order
        assert graph.edge_index.tolist() == [[2, 1, 0], [1, 0, 1]]


def test_reversed_array_is_copied() -> None:
    assert ab.Graph(EDGES.numpy()[::-1], num_nodes=5) == GRAPH.T  # type: ignore[arg-type]


def test_entries_of_a_coo_matrix_that_repeat_count_twice() -> None:
    matrix = torch.sparse_coo_tensor([[0, 0], [1, 1]], [1.0, 1.0], (2, 2))
    assert dense(ab.Graph.from_adjacency(matrix)).tolist() == [[0, 2], [0, 0]]


def test_a_sparse_tensor_of_torch_sparse() -> None:
    row, column = torch.tensor([0, 1]), torch.tensor([2, 0])
    matrix = SimpleNamespace(coo=lambda: (row, column, None), sparse_sizes=lambda: (2, 3))
    assert ab.Graph.from_adjacency(matrix) == ab.Graph([[2, 0], [0, 1]], size=(3, 2))


def test_sources_and_targets_as_two_tensors() -> None:
    source, target = torch.tensor([[0, 1, 2], [1, 2, 0]])
    assert ab.Graph((source, target), num_nodes=3) == ab.Graph([[0, 1, 2], [1, 2, 0]], num_nodes=3)


def test_points_of_any_dtype() -> None:
    points = torch.tensor([[0.0], [1.0], [3.0]])
    for dtype in (torch.bfloat16, torch.float16, torch.int32):
        assert ab.knn_graph(points.to(dtype), 1) == ab.knn_graph(points, 1)


def test_from_csr() -> None:
    order = EDGES[1].argsort(stable=True)
    ptr = torch.searchsorted(EDGES[1][order], torch.arange(6))
    graph = ab.Graph.from_csr(ptr, EDGES[0][order])
    assert graph == ab.Graph(EDGES[:, order], num_nodes=5)
    assert ab.Graph.from_csr([0, 1], [6], num_keys=7).size == (7, 1)
    assert ab.Graph.from_csr([0], []).num_nodes == 0
    assert ab.Graph.from_csr(np.zeros(4, np.int32), np.zeros(0, np.int32)).count(3, 3) == 0


def test_from_batch() -> None:
    graph = ab.Graph.from_batch([[0, 1, 3], [1, 0, 2]], [0, 0, 1, 1, 2])
    assert graph == ab.Graph([[0, 1, 3], [1, 0, 2]], num_nodes=5)
    assert ab.Graph.from_batch(torch.zeros(2, 0).long(), torch.zeros(0).long()).num_nodes == 0


def test_batches_are_block_diagonal() -> None:
    parts = [GRAPH, ab.Graph(torch.zeros(2, 0).long(), num_nodes=2), ab.Graph([[0], [0]], num_nodes=1), GRAPH]
    joined = ab.Graph.batch(parts)
    assert joined.num_nodes == 13
    assert torch.equal(dense(joined), torch.block_diag(*map(dense, parts)))
    number = torch.cat([part.edge_index for part in parts], 1)
    assert torch.equal(joined.edge_index[:, :6], number[:, :6])  # edges keep the given order
    wide = ab.Graph([[2], [0]], size=(3, 1))
    assert ab.Graph.batch([wide, GRAPH, wide]).size == (11, 7)
    assert ab.Graph.batch([wide, GRAPH]).edge_index[:, :2].tolist() == [[2, 3], [0, 2]]
    assert ab.Graph.batch([]).num_nodes == 0


def test_self_loops() -> None:
    looped = GRAPH.add_self_loops()
    assert torch.equal(dense(looped), dense(GRAPH) + torch.eye(5, dtype=torch.int64))
    assert torch.equal(looped.edge_index[:, :6], EDGES)  # so that edge terms only need appending to
    assert looped.edge_index[:, 6:].tolist() == [[0, 1, 2, 3, 4]] * 2
    bare = GRAPH.remove_self_loops()
    assert torch.equal(bare.edge_index, EDGES[:, [0, 1, 3, 4, 5]])
    assert bare.remove_self_loops() == bare
    wide = ab.Graph([[0, 2], [0, 1]], size=(3, 2))
    assert wide.add_self_loops() == ab.Graph([[0, 2, 0, 1], [0, 1, 0, 1]], size=(3, 2))


@pytest.mark.parametrize("nodes", [0, 4])
def test_a_graph_without_edges(nodes: int) -> None:
    graph = ab.Graph(torch.zeros(2, 0).long(), num_nodes=nodes)
    for made in (graph, graph.T, ab.Graph.batch([graph]), graph.remove_self_loops(), graph.reorder("rcm")[1]):
        x = torch.randn(1, 2, nodes, 8, requires_grad=True)
        out, lse = ab.attention(x, x, x, made, return_lse=True)
        assert (out == 0).all() and (lse == -torch.inf).all()
        assert (torch.autograd.grad(out.sum(), x)[0] == 0).all()
    assert graph.add_self_loops().count(nodes, nodes) == nodes


# -- PyG --------------------------------------------------------------------------------------------


def test_data_and_batch_of_pyg() -> None:
    data = pytest.importorskip("torch_geometric.data")
    one = data.Data(edge_index=EDGES, num_nodes=5)
    assert ab.Graph(one) == GRAPH
    assert ab.Graph(data.Batch.from_data_list([one, one])) == ab.Graph.batch([GRAPH, GRAPH])
    assert ab.Graph(one, num_nodes=7).num_nodes == 7
    matrix = torch.sparse_csr_tensor([0, 1, 2], [2, 0], [1.0, 1.0], (2, 3))
    assert ab.Graph(data.Data(adj_t=matrix)) == ab.Graph([[2, 0], [0, 1]], size=(3, 2))
    with pytest.raises(ValueError, match="edge_index: this Data has neither edge_index nor adj_t"):
        ab.Graph(data.Data(num_nodes=3))
    both = data.HeteroData({"a": {"num_nodes": 3}, "b": {"num_nodes": 4}})
    both["a", "to", "b"].edge_index = torch.tensor([[2], [3]])
    assert ab.Graph(both["a", "to", "b"]) == ab.Graph([[2], [3]], size=(3, 4))
    with pytest.raises(TypeError, match=r"edge_index: a HeteroData has several kinds of edges; wanted one"):
        ab.Graph(both)


def test_pygs_edge_index_is_not_a_matrix() -> None:
    pyg = pytest.importorskip("torch_geometric")
    with pytest.raises(TypeError, match=r"adjacency: wanted a matrix, got EdgeIndex"):
        ab.Graph.from_adjacency(pyg.EdgeIndex(EDGES, sparse_size=(5, 5)))


def test_edge_index_of_pyg() -> None:
    made = pytest.importorskip("torch_geometric.edge_index").EdgeIndex
    known = made(EDGES, sparse_size=(5, 5))
    assert ab.Graph(known) == GRAPH
    assert type(ab.Graph(known).edge_index) is torch.Tensor
    assert ab.Graph(made([[2], [0]], sparse_size=(3, 1))).size == (3, 1)
    assert ab.Graph(made(EDGES), num_nodes=5) == GRAPH
    with pytest.raises(ValueError, match="num_nodes: wanted either num_nodes or size"):
        ab.Graph(made(EDGES))


# -- nearest neighbours -----------------------------------------------------------------------------


def test_knn_graph_finds_the_nearest_others() -> None:
    pytest.importorskip("scipy")
    points = torch.randn(60, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    distance = torch.cdist(points, points)
    near = distance.argsort(1)
    source, target = ab.knn_graph(points, 4).edge_index
    assert torch.equal(target, torch.arange(60).repeat_interleave(4))
    assert torch.equal(source.view(60, 4), near[:, 1:5])
    source, _ = ab.knn_graph(points, 4, loop=True).edge_index
    assert torch.equal(source.view(60, 4), near[:, :4])


def test_knn_graph_searches_only_the_same_graph() -> None:
    pytest.importorskip("scipy")
    points = np.random.default_rng(0).random((40, 2))
    batch = np.random.default_rng(1).integers(0, 3, 40)
    graph = ab.knn_graph(points, 3, batch)
    source, target = graph.edge_index
    assert torch.equal(target, torch.arange(40).repeat_interleave(3))
    assert (batch[source] == batch[target]).all()
    for b in range(3):
        member = np.flatnonzero(batch == b)
        alone = ab.knn_graph(points[member], 3).edge_index
        inside = torch.from_numpy(batch[target] == b)
        assert torch.equal(graph.edge_index[:, inside], torch.from_numpy(member)[alone])


def test_knn_graph_with_few_points_or_points_in_one_place() -> None:
    pytest.importorskip("scipy")
    assert ab.knn_graph([[0.0], [1.0]], 5).edge_index.tolist() == [[1, 0], [0, 1]]
    assert ab.knn_graph([[0.0]], 5).edge_index.shape == (2, 0)
    assert ab.knn_graph(torch.zeros(0, 3), 2).num_nodes == 0
    same = ab.knn_graph(np.zeros((6, 2)), 2).edge_index
    assert same.shape == (2, 12) and (same[0] != same[1]).all()
    # Three graphs, one of a single point: it has no neighbour.
    assert ab.knn_graph([[0.0], [5.0], [1.0], [6.0], [9.0]], 1, [0, 1, 0, 1, 2]).edge_index.tolist() == [
        [2, 3, 0, 1],
        [0, 1, 2, 3],
    ]


# -- orders -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["rcm", "morton"])
@pytest.mark.parametrize("kind", ["graph", "neighbors"])
def test_reorder(method: Any, kind: str) -> None:
    """The order is a permutation, the pairs are the same, and neighbours come nearer."""
    pytest.importorskip("scipy")
    points = torch.rand(300, 2, generator=torch.Generator().manual_seed(0))
    graph = ab.knn_graph(points, 4)
    relation: Any = graph
    if kind == "neighbors":
        relation = ab.Neighbors(torch.where(torch.arange(4) < 3, graph.edge_index[0].view(300, 4), -1))
    order, ordered = relation.reorder(method, points if method == "morton" else None)
    assert torch.equal(order.sort().values, torch.arange(300))
    before, after = (x.dense(300, 300) for x in (relation, ordered))
    assert torch.equal(after, before[order][:, order])
    assert type(ordered) is type(relation)
    if kind == "graph":
        assert torch.equal(order[ordered.edge_index], graph.edge_index)  # edges keep their order
        distance = (ordered.edge_index[0] - ordered.edge_index[1]).abs().float()
        assert distance.mean() < 0.3 * (graph.edge_index[0] - graph.edge_index[1]).abs().float().mean()


def test_morton_order_by_hand() -> None:
    """The first axis is the lowest bit, as in a Z; cells are squares whatever the extents."""
    corners = [[1.0, 1.0], [0.0, 1.0], [1.0, 0.0], [0.0, 0.0]]
    graph = ab.Graph([[0], [1]], num_nodes=4)
    order, ordered = graph.reorder("morton", corners)
    assert order.tolist() == [3, 2, 1, 0]
    assert ordered.edge_index.tolist() == [[3], [2]]
    flat = [[0.0, 0.0], [0.0, 1.0], [7.0, 0.0], [3.0, 1.0]]
    assert graph.reorder("morton", flat)[0].tolist() == [0, 1, 3, 2]
    assert graph.reorder("morton", [[2.0, 2.0]] * 4)[0].tolist() == [0, 1, 2, 3]


def test_permuting_a_graph_gives_a_graph() -> None:
    order = [3, 1, 4, 0, 2]
    moved = GRAPH.permute(order)
    assert isinstance(moved, ab.Graph)
    assert torch.equal(dense(moved), dense(GRAPH)[order][:, order])
    assert torch.equal(torch.tensor(order)[moved.edge_index], GRAPH.edge_index)


# -- errors -----------------------------------------------------------------------------------------

BAD = [
    (lambda: ab.Graph(EDGES, num_nodes=3), ValueError, "edge_index: num_nodes = 3 but a source is 3"),
    (lambda: ab.Graph([[0], [-4]], num_nodes=3), ValueError, "edge_index: num_nodes = 3 but a target is -4"),
    (
        lambda: ab.Graph([[2], [1]], size=(2, 5)),
        ValueError,
        r"edge_index: size = \(2, 5\) but a source is 2",
    ),
    (lambda: ab.Graph(EDGES.T, num_nodes=5), ValueError, r"edge_index: wanted shape \[2, E\], got \[6, 2\]"),
    (
        lambda: ab.Graph(EDGES.float(), num_nodes=5),
        TypeError,
        "edge_index: wanted integers, got torch.float32",
    ),
    (lambda: ab.Graph(EDGES > 0, num_nodes=5), TypeError, "edge_index: wanted integers, got torch.bool"),
    (lambda: ab.Graph({}), ValueError, "edge_index: this dict has neither edge_index nor adj_t"),
    (
        lambda: ab.Graph.from_adjacency(torch.zeros(2, 3, 4)),
        ValueError,
        r"adjacency: wanted a matrix \[queries, keys\], got shape \[2, 3, 4\]",
    ),
    (
        lambda: ab.Graph.from_adjacency(torch.eye(4).to_sparse_bsr(2)),
        TypeError,
        "adjacency: wanted a dense, COO, CSR or CSC tensor, got torch.sparse_bsr",
    ),
    (
        lambda: ab.Graph.from_adjacency(torch.sparse_coo_tensor([[0]], [[1.0, 2.0]], (2, 2))),
        ValueError,
        "adjacency: wanted 2 sparse dimensions, got 1",
    ),
    (
        lambda: ab.Graph.from_adjacency(SimpleNamespace(edge_index=EDGES)),
        TypeError,
        r"adjacency: wanted a matrix, got SimpleNamespace; Graph\(\.\.\.\) takes it",
    ),
    *(
        (
            lambda given=given: ab.Graph.from_adjacency(given),
            TypeError,
            rf"adjacency: wanted a matrix \[queries, keys\], got {type(given).__name__}$",
        )
        for given in (None, "matrix", [[0, 1], [1]])
    ),
    (lambda: ab.Graph.batch([EDGES]), TypeError, r"graphs\[0\]: wanted a Graph, got Tensor"),
    (lambda: ab.Graph.from_csr([], []), ValueError, r"ptr: wanted \[queries \+ 1\] offsets, got none"),
    (
        lambda: ab.Graph.from_csr([0, 3], [0, 0]),
        ValueError,
        r"ptr: wanted offsets that rise from 0 to len\(key\) = 2, got 0 to 3",
    ),
    (
        lambda: ab.Graph.from_csr([0, 2, 1, 2], [0, 0]),
        ValueError,
        r"ptr: wanted offsets that rise from 0 to len\(key\) = 2, got a step of -1",
    ),
    (lambda: ab.Graph.from_csr([0, 1], [1]), ValueError, "edge_index: num_nodes = 1 but a source is 1"),
    (lambda: ab.Graph.from_csr([0, 1], [0.5]), TypeError, "key: wanted integers, got torch.float32"),
    (
        lambda: ab.Graph.from_batch([[0, 1], [1, 2]], [0, 0, 3]),
        ValueError,
        "edge_index: wanted edges within a graph, got edge 1 from graph 0 to 3",
    ),
    (
        lambda: ab.Graph.from_batch([[0], [2]], [0, 0]),
        ValueError,
        "edge_index: num_nodes = 2 but a target is 2",
    ),
    (
        lambda: ab.knn_graph([1.0, 2.0], 1),
        ValueError,
        r"points: wanted coordinates \[N, d\], got shape \[2\]",
    ),
    (
        lambda: ab.knn_graph([[float("nan")]], 1),
        ValueError,
        "points: wanted finite coordinates, got NaN or infinity",
    ),
    *(
        (
            lambda given=given: ab.Graph(given, num_nodes=3),
            TypeError,
            f"edge_index: wanted integers in a tensor, .* lists of equal length, got {type(given).__name__}$",
        )
        for given in (
            None,
            "edges",
            [[0, 1], [1]],
            (torch.tensor([0]), torch.tensor([0, 1])),
            np.array([["0"], ["1"]]),
        )
    ),
    (
        lambda: ab.Graph(torch.ones(2, 2, dtype=torch.int64).to_sparse(), num_nodes=3),
        TypeError,
        r"edge_index: wanted \[2, E\], got a sparse matrix; Graph.from_adjacency takes it, row = query",
    ),
    (
        lambda: ab.Graph.from_batch([[0], [1]], None),
        TypeError,
        "batch: wanted integers in a tensor, an array",
    ),
    (lambda: ab.Neighbors(None), TypeError, "index: wanted integers in a tensor, an array or lists"),
    (lambda: ab.knn_graph("points", 1), TypeError, r"points: wanted coordinates \[N, d\], got str"),
    (lambda: ab.knn_graph([[1.0]], 0), ValueError, "k: wanted at least 1, got 0"),
    (
        lambda: ab.knn_graph([[1.0]], 1, [0, 0]),
        ValueError,
        "batch: wanted 1 numbers, one for each point, got 2",
    ),
    (
        lambda: GRAPH.reorder("metis"),  # type: ignore[arg-type]
        ValueError,
        "method: wanted 'rcm' or 'morton', got 'metis'",
    ),
    (
        lambda: GRAPH.reorder("morton"),
        ValueError,
        r"points: wanted coordinates \[N, d\] for 'morton', got None",
    ),
    (
        lambda: GRAPH.reorder("rcm", [[0.0]]),
        ValueError,
        "points: wanted None with 'rcm', got list",
    ),
    (
        lambda: GRAPH.reorder("morton", [[0.0]]),
        ValueError,
        "points: wanted 5, one for each node, got 1",
    ),
    (
        lambda: GRAPH.reorder("morton", torch.zeros(5, 64)),
        ValueError,
        "points: wanted at most 63 coordinates, got 64",
    ),
    (
        lambda: ab.Graph([[0], [0]], size=(2, 3)).reorder("rcm"),
        ValueError,
        "size: wanted as many sources as targets, got 2 and 3",
    ),
    (
        lambda: ab.Neighbors([[0], [7]]).reorder("rcm"),
        ValueError,
        "index: wanted keys among the 2 queries, got 7: only nodes that are both",
    ),
]


@pytest.mark.parametrize(("make", "kind", "words"), BAD, ids=[words for _, _, words in BAD])
def test_bad_input_raises_a_clear_error(make: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("make", [lambda: ab.knn_graph([[0.0]], 1), lambda: GRAPH.reorder("rcm")])
def test_missing_scipy_is_named(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("scipy.sparse", "scipy.sparse.csgraph", "scipy.spatial"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(ImportError, match="needs scipy, which is not installed"):
        make()


NESTED = [
    lambda x: torch.nested.nested_tensor(list(x)),
    lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged),
]
DENSE_WANTED = {
    "edge_index": lambda f: ab.Graph(f(torch.tensor([[0, 1], [1, 0]])), num_nodes=2),
    "index": lambda f: ab.Neighbors(f(torch.tensor([[0, 1], [1, 0]]))),
    "adjacency": lambda f: ab.Graph.from_adjacency(f(torch.eye(2))),
    "mask": lambda f: ab.Dense(f(torch.eye(2) > 0)),
    "ids": lambda f: ab.Documents(f(torch.tensor([[0, 1], [1, 0]]))),
}


@pytest.mark.parametrize("change", NESTED)
@pytest.mark.parametrize("name", DENSE_WANTED)
def test_nested_tensors_raise_a_clear_error(name, change) -> None:
    """They failed with "NestedTensorImpl doesn't support sizes. Please file an issue"."""
    with pytest.raises(TypeError, match=f"^{name}: wanted a dense tensor, got a nested one$"):
        DENSE_WANTED[name](change)


@pytest.mark.parametrize("make", [ab.Dense, ab.Padding.from_mask])
def test_sparse_masks_raise_a_clear_error(make) -> None:
    """They failed with "Cannot access data pointer of Tensor that doesn't have storage"."""
    with pytest.raises(TypeError, match=r"^mask: wanted a dense tensor, got torch.sparse_coo$"):
        make((torch.eye(2) > 0).to_sparse())
