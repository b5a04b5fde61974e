"""Mini-batches of PyG's loaders: our layers give the numbers of PyG's on every batch."""

import importlib.util

import pytest
import torch

from attnbias.testing import assert_no_worse

geometric = pytest.importorskip("torch_geometric", reason="PyG is not installed")
from torch_geometric.data import Data  # noqa: E402
from torch_geometric.loader import DataLoader, NeighborLoader, RandomNodeLoader  # noqa: E402

from attnbias.integrations import pyg  # noqa: E402

HAS_SAMPLER = any(importlib.util.find_spec(name) for name in ("pyg_lib", "torch_sparse"))
LAYERS = ["GATConv", "GATv2Conv", "TransformerConv"]


def make_graph(nodes, edges, seed):
    """Return a graph with nodes that have no neighbours."""
    rng = torch.Generator().manual_seed(seed)
    edge_index = torch.randint(0, nodes - 2, (2, edges), generator=rng)
    return Data(x=torch.randn(nodes, 8, generator=rng), edge_index=edge_index, num_nodes=nodes)


def sample(data, seeds, count, hops):
    """Return a batch as NeighborLoader makes it: seeds first, and at most ``count`` edges into each node."""
    known, frontier, edges = list(seeds), list(seeds), []
    for _ in range(hops):
        found = []
        for node in frontier:
            into = (data.edge_index[1] == node).nonzero().flatten()[:count].tolist()
            edges += into
            found += [source for source in data.edge_index[0, into].tolist() if source not in known + found]
        known, frontier = known + found, found
    place = torch.full((data.num_nodes,), -1)
    place[known] = torch.arange(len(known))
    return Data(x=data.x[known], edge_index=place[data.edge_index[:, edges]], batch_size=len(seeds))


def batches_of(kind):
    graph = make_graph(31, 150, 0)
    if kind == "DataLoader":
        return DataLoader([make_graph(n, 3 * n, n) for n in (3, 9, 17, 5, 30)], batch_size=2)
    if kind == "RandomNodeLoader":
        return RandomNodeLoader(graph, num_parts=3)
    if kind == "NeighborLoader":
        if not HAS_SAMPLER:
            pytest.skip("NeighborLoader needs pyg-lib or torch-sparse")
        return NeighborLoader(graph, [4, 4], batch_size=8)
    return [sample(graph, range(first, min(first + 8, 31)), 4, 2) for first in range(0, 31, 8)]


@pytest.mark.parametrize("kind", ["DataLoader", "RandomNodeLoader", "NeighborLoader", "neighbours by hand"])
@pytest.mark.parametrize("layer", LAYERS)
def test_every_batch_gives_the_numbers_of_pyg(kind, layer):
    torch.manual_seed(0)
    theirs = [getattr(geometric.nn, layer)(8, 4, heads=2) for _ in range(2)]
    ours = [getattr(pyg, layer)(8, 4, heads=2) for _ in range(2)]
    for mine, other in zip(ours, theirs, strict=True):
        mine.load_state_dict(other.state_dict())

    def run(layers, batch, dtype):
        x, parameters = batch.x.to(dtype), [p for each in layers for p in each.to(dtype).parameters()]
        for each in layers:
            x = each(x, batch.edge_index).tanh()
        x = x[: getattr(batch, "batch_size", len(x)) if kind.lower().startswith("neigh") else len(x)]
        grads = torch.autograd.grad((x * torch.arange(x.numel()).view(x.shape).cos()).sum(), parameters)
        return x, torch.cat([grad.flatten() for grad in grads])

    count = 0
    for batch in batches_of(kind):
        got, eager = (run(each, batch, torch.float32) for each in (ours, theirs))
        exact = run(theirs, batch, torch.float64)
        assert_no_worse("out", got[0], eager[0], exact[0])
        assert_no_worse("gradients", got[1], eager[1], exact[1], 3)
        count += 1
    assert count >= 3


def test_a_graph_in_a_batch_gives_the_numbers_it_gives_alone():
    torch.manual_seed(0)
    layer, graphs = pyg.GATConv(8, 4, heads=2), [make_graph(n, 3 * n, n) for n in (3, 9, 17)]
    batch = next(iter(DataLoader(graphs, batch_size=3)))
    whole = layer(batch.x, batch.edge_index)
    alone = [layer(each.x, each.edge_index) for each in graphs]
    exact = [layer.double()(each.x.double(), each.edge_index) for each in graphs]
    assert_no_worse("out", whole, torch.cat(alone), torch.cat(exact))
