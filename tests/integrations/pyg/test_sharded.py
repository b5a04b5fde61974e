"""The layers on a shard in place of ``edge_index`` equal those on the whole graph."""

from __future__ import annotations

import pytest
import torch
from cases.processes import pool
from cases.pyg import OPTIONS
from cases.sharded_graphs import draw_graph
from cases.sharded_layers import compare_layer

import attnbias as ab
from attnbias.integrations.pyg import GATConv


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("with_weights", [False, True])
def test_layers_equal_those_on_the_whole_graph(name, with_weights):
    for number, options in enumerate(OPTIONS[name]):
        pair = (None, (43, 21), (17, 50))[number % 3]
        wrong = pool(2).run(compare_layer, name, options, pair, with_weights)
        assert not any(wrong), wrong[0]


@pytest.mark.parametrize(
    ("name", "options"),
    [("GATConv", {}), ("GATv2Conv", {}), ("GATConv", {"edge_dim": 4}), ("TransformerConv", {})],
)
def test_layers_drop_the_same_pairs(name, options):
    wrong = pool(2).run(compare_layer, name, {**options, "dropout": 0.4})
    assert not any(wrong), wrong[0]


def test_layers_that_run_with_rows_of_the_whole_say_what_to_do():
    layer = GATConv(3, 2, edge_dim=4)
    shard = ab.Graph([[0, 1, 2], [1, 2, 3]], num_nodes=4).shard(2, [0, 0, 1, 1], rank=1)
    with pytest.raises(ValueError, match="x: wanted 2 sources and 2 targets, those of rank 1, got 4 and 4"):
        layer(torch.zeros(4, 3), shard)
    with pytest.raises(ValueError, match=r"edge_attr: wanted \[shard.edges, edge_dim\] = \[2, edge_dim\]"):
        layer(torch.zeros(2, 3), shard, torch.zeros(3, 4))
    with pytest.raises(TypeError, match="relation: wanted the shard of a Graph, got that of Causal"):
        layer(torch.zeros(4, 3), ab.shard(ab.Causal(), 4, 1))


def test_one_rank_is_the_graph_itself():
    graph, points = draw_graph(4)
    x, attr = torch.randn(len(points), 3), torch.randn(graph.edge_index.shape[1], 4)
    layer = GATConv(3, 2, edge_dim=4)
    assert torch.equal(layer(x, graph.shard(1), attr), layer(x, graph, attr))
