"""Attention along graphs: equal to PyG on real and awkward graphs, relabelled nodes, extreme scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import attnbias as ab
from attnbias.backends import cpu
from attnbias.benchmarks.cases import drawn as generators
from attnbias.benchmarks.cases import stored as graphs
from attnbias.benchmarks.cases.graphs import GraphCase, message_passing
from attnbias.benchmarks.cases.stored import GraphData
from attnbias.benchmarks.peers.registry import PEERS
from attnbias.testing import assert_no_worse, magnitudes

needs_library = pytest.mark.skipif(cpu.missing() is not None, reason=str(cpu.missing()))
BACKENDS = ["reference", "rows", pytest.param("cpu", marks=needs_library)]
NAMES = ("out", "query", "key", "value")


def draw(nodes: int, heads: int, size: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Draw q, k, v and the gradient of out, [1, H, N, D], stored as [N, H, D]."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, nodes, heads, size)
    return [torch.randn(shape, generator=generator).to(dtype).transpose(1, 2) for _ in range(4)]


def results(attend: Any, inputs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return out and the gradients of q, k and v."""
    leaves = [x.to(dtype).requires_grad_() for x in inputs[:3]]
    out = attend(*leaves)
    return [out, *torch.autograd.grad(out, leaves, inputs[3].to(dtype))]


def assert_all(got: list[Tensor], same: list[Tensor], exact: list[Tensor], inputs: list[Tensor]) -> None:
    sizes = magnitudes(*inputs, torch.zeros(1), inputs[0].shape[3] ** -0.5)  # type: ignore[call-arg]
    for name, mine, theirs, truth in zip(NAMES, got, same, exact, strict=True):
        assert_no_worse(name, mine, theirs, truth, 2.0 if name == "out" else 3.0, magnitude=sizes[name])


def find(name: str) -> GraphData:
    try:
        return graphs.load(name)
    except graphs.MissingGraphError as error:
        pytest.skip(str(error))


def make_awkward(graph: GraphData) -> GraphData:
    """Draw isolated nodes, self-loops, duplicates, one-way edges and a hub, in random order."""
    rng = np.random.default_rng(0)
    nodes = graph.num_nodes
    kept = graph.edge_index[:, rng.random(graph.edges) < 0.8]
    twice = kept[:, rng.integers(0, kept.shape[1], 50)]
    loops = np.repeat(rng.integers(0, nodes, (1, 40)), 2, 0)
    spokes = rng.permutation(nodes)[:2000]
    hub = np.stack((spokes, np.full(len(spokes), nodes // 2)))
    edges = np.concatenate((kept, twice, twice[:, :9], loops, hub, hub[::-1]), 1)
    return GraphData(graph.name, edges[:, rng.permutation(edges.shape[1])], nodes + 7)


@pytest.mark.parametrize("awkward", [False, True], ids=["as is", "awkward"])
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.slow if x == "pubmed" else ()) for x in graphs.NAMES]
)
def test_equals_pyg_on_real_graphs(name: str, awkward: bool) -> None:
    """float64 agrees up to rounding; float32 is as near float64 as PyG's own."""
    pytest.importorskip("torch_geometric")
    graph = make_awkward(find(name)) if awkward else find(name)
    case = GraphCase.of(graph, heads=4, size=16)
    inputs = draw(graph.num_nodes, 4, 16)
    propagate = PEERS["PyG"](case)

    def pyg(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return propagate(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)

    exact = results(pyg, inputs, torch.float64)
    assert_all(results(case.attend, inputs, torch.float64), exact, exact, inputs)
    assert_all(
        results(case.attend, inputs, torch.float32), results(pyg, inputs, torch.float32), exact, inputs
    )


@pytest.mark.parametrize("heads", [1, 3])
def test_torch_sparse_computes_the_same(heads: int) -> None:
    case = GraphCase.of(generators.rmat(200, 3000), heads, 16)
    inputs = draw(200, heads, 16)
    source, target = case.edge_index

    def by_edge(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return message_passing(q, k, v, source, target)

    q, k, v, _ = (x.contiguous() for x in inputs)
    out = PEERS["torch.sparse"](case)(q, k, v)
    assert_no_worse("out", out, by_edge(q, k, v), by_edge(q.double(), k.double(), v.double()))


# -- relabelled nodes -------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_relabelling_the_nodes_relabels_the_result(backend: str) -> None:
    graph = make_awkward(generators.rmat(400, 2000))
    relation = graph.relation()
    order = torch.from_numpy(np.random.default_rng(1).permutation(graph.num_nodes))
    inputs = draw(graph.num_nodes, 2, 16)
    moved = [x[:, :, order] for x in inputs]

    def attend(which: ab.Relation) -> Any:
        return lambda q, k, v: ab.attention(q, k, v, which, backend=backend)

    straight = results(attend(relation), inputs, torch.float32)
    back = []
    for x in results(attend(relation.permute(order)), moved, torch.float32):
        back.append(torch.empty_like(x))
        back[-1][:, :, order] = x
    exact = results(lambda q, k, v: ab.attention(q, k, v, relation), inputs, torch.float64)
    assert_all(back, straight, exact, inputs)


def test_relabelling_is_exact_on_the_reference() -> None:
    """Weights are 0 or 1/2 and values are integers, so nothing is rounded and every bit must agree."""
    nodes, linked = 70, 64  # six are isolated
    step = np.arange(1, 5)
    target = np.repeat(np.arange(linked), 4)
    source = (target + np.tile(step, linked)) % linked
    colour = torch.arange(nodes) % 2  # two of four neighbours have the node's own
    q = 32.0 * torch.nn.functional.one_hot(colour).float()
    k = q - 32  # q . k is 0 where colours agree, else -1024
    rng = torch.Generator().manual_seed(0)
    v, d_out = (torch.randint(-8, 9, (nodes, 2), generator=rng).float() for _ in range(2))
    inputs = [x[None, None] for x in (q, k, v, d_out)]
    graph = ab.Graph(np.stack((source, target)), num_nodes=nodes)  # type: ignore[arg-type]
    order = torch.randperm(nodes, generator=rng)

    def run(relation: ab.Relation, tensors: list[Tensor]) -> list[Tensor]:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return ab.attention(q, k, v, relation, scale=1.0, backend="reference")

        return results(attend, tensors, torch.float32)

    straight = run(graph, inputs)
    moved = run(graph.permute(order), [x[:, :, order] for x in inputs])
    for name, one, other in zip(NAMES, straight, moved, strict=True):
        assert torch.equal(one[:, :, order], other), name
    out = straight[0][0, 0]
    assert torch.equal(out[0], (v[2] + v[4]) / 2) and (out[linked:] == 0).all()
    assert all(x.abs().max() > 0 for x in straight[:1] + straight[3:])


# -- extreme scores and rows ------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 4, 8])
@pytest.mark.parametrize("score", [0.0, -1e4, 1e4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_zero_and_very_negative_scores_keep_their_meaning(backend: str, score: float, heads: int) -> None:
    """Equal scores of any size give equal weights; only a row without an edge is empty."""
    graph = make_awkward(generators.rmat(400, 2000))
    source, target = torch.from_numpy(graph.edge_index)
    nodes, size = graph.num_nodes, 16
    q = torch.zeros(1, heads, nodes, size)
    k = torch.zeros(1, heads, nodes, size)
    q[..., 0], k[..., 0] = 100.0, score / 100
    v = draw(nodes, heads, size)[2]
    out, lse = ab.attention(q, k, v, graph.relation(), scale=1.0, return_lse=True, backend=backend)
    degree = torch.bincount(target, minlength=nodes)

    def mean(dtype: torch.dtype) -> Tensor:
        total = torch.zeros(1, heads, nodes, size, dtype=dtype)
        return total.index_add(2, target, v.to(dtype)[:, :, source]) / degree.clamp(min=1)[:, None].to(dtype)

    full = magnitudes(q, k, v, v, torch.zeros(1), 1.0)
    empty = (degree == 0)[:, None]
    assert empty.any()
    assert_no_worse("out", out, mean(torch.float32), mean(torch.float64), empty=empty, magnitude=full["out"])
    wanted = (score + degree.double().log()).expand(1, heads, nodes)
    assert_no_worse("lse", lse, wanted.float(), wanted, magnitude=full["lse"])


@needs_library
@pytest.mark.parametrize(
    "shape",
    [(1, 16), (3, 5), *(pytest.param(x, marks=pytest.mark.slow) for x in ((4, 32), (8, 16)))],
    ids=str,
)
def test_a_row_and_a_column_of_100_000(shape: tuple[int, int]) -> None:
    graph = generators.star(100_000)
    case = GraphCase.of(graph, *shape)
    inputs = draw(graph.num_nodes, *shape)
    source, target = case.edge_index

    def by_edge(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return message_passing(q, k, v, source, target)

    got = results(lambda *x: ab.attention(*x, case.layout, backend="cpu"), inputs, torch.float32)
    same, exact = results(by_edge, inputs, torch.float32), results(by_edge, inputs, torch.float64)
    assert_all(got, same, exact, inputs)


@needs_library
def test_a_batch_of_features_on_one_graph() -> None:
    graph = make_awkward(generators.rmat(400, 2000))
    many = torch.randn(3, 2, graph.num_nodes, 8, generator=torch.Generator().manual_seed(0))
    relation = graph.relation()
    out = ab.attention(many, many, many, relation, backend="cpu")
    for x, y in zip(many, out, strict=True):
        assert torch.equal(ab.attention(x[None], x[None], x[None], relation, backend="cpu")[0], y)


def test_batched_molecules_equal_single_molecules() -> None:
    graph = find("mol1024")
    assert graph.ptr is not None
    parts = []
    for first, last in zip(graph.ptr[:40].tolist(), graph.ptr[1:41].tolist(), strict=True):
        inside = (graph.edge_index[1] >= first) & (graph.edge_index[1] < last)
        parts.append(ab.Graph(graph.edge_index[:, inside] - first, num_nodes=last - first))  # type: ignore[arg-type]
    joined = ab.Graph.batch(parts)
    nodes = int(graph.ptr[40])
    assert joined.num_nodes == nodes
    q, k, v, _ = draw(nodes, 2, 16)
    together = ab.attention(q, k, v, joined)
    alone = [
        ab.attention(*(x[:, :, first:last] for x in (q, k, v)), part)
        for part, first, last in zip(parts, graph.ptr[:40].tolist(), graph.ptr[1:41].tolist(), strict=True)
    ]
    exact = ab.attention(q.double(), k.double(), v.double(), joined)
    assert_no_worse("out", together, torch.cat(alone, 2), exact)
