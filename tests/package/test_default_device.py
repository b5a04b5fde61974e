"""Relations, layouts and layers made under a default device that holds no data."""

import pytest
import torch

import attnbias as ab
from attnbias import nn
from attnbias.structured import LowRank
from attnbias.testing import random_relation


@pytest.mark.parametrize("seed", range(60))
def test_relations_do_not_use_the_default_device(seed):
    """Under the default device "meta", lists became tensors without data, and kernels crashed."""
    sizes = {"batch": 2, "heads": 2}
    q, k, v = torch.randn(3, 2, 2, 24, 8, generator=torch.Generator().manual_seed(seed))
    wanted = random_relation(seed, **sizes)
    dense, out = wanted.dense(24, 24, **sizes), ab.attention(q, k, v, wanted)
    with torch.device("meta"):
        relation = random_relation(seed, **sizes)
        assert torch.equal(relation.dense(24, 24, **sizes), dense)
        assert torch.equal(ab.Layout.build(relation, 24, 24, **sizes).to_dense(), dense)
        assert torch.equal(ab.attention(q, k, v, relation), out)


MADE_ON_THE_HOST = [
    lambda: ab.Documents.from_lengths([2, 4]),
    lambda: ab.Documents.from_cu_seqlens([0, 2, 6]),
    lambda: ab.Padding.from_mask([[True] * 5 + [False]]),
    lambda: ab.Dense([[True, False, True] * 2] * 6),
    lambda: ab.Graph.from_adjacency([[1, 0, 0] * 2] * 6),
    lambda: ab.Graph.from_csr([0, 1, 2, 2, 2, 3, 3], [5, 0, 1]),
    lambda: ab.Graph.batch([ab.Graph([[0, 1], [1, 2]], num_nodes=3)] * 2),
    lambda: ab.Graph([[0, 1, 2], [1, 2, 5]], num_nodes=6).reorder("rcm")[1],
    lambda: ab.knn_graph([[0.0], [1.0], [3.0], [3.5], [9.0], [9.1]], 2),
]


@pytest.mark.parametrize("make", MADE_ON_THE_HOST)
def test_relations_are_made_on_the_host(make):
    """Tensors made from lists, arrays and other relations went to the default device."""
    wanted = make()
    with torch.device("meta"):
        assert make() == wanted and torch.equal(make().dense(6, 6), wanted.dense(6, 6))


LAYERS = [
    lambda: nn.RelationalAttention(8, 2, ab.Causal(), rotary=nn.Rotary(4)),
    lambda: nn.StridedAttention(8, 2, heads=2),
    lambda: nn.MultiheadAttention(8, 2, relation=ab.Padding([3, 5]), batch_first=True),
    lambda: nn.MLRAttention(8, 2, [2, 2]),
    lambda: nn.BilinearMLRAttention(8, 2, [2, 2]),
    lambda: nn.BilinearBTTAttention(8, 2),
    lambda: nn.BilinearAttention([LowRank(torch.randn(8, 2), torch.randn(8, 2))] * 2),
]


@pytest.mark.parametrize("make", LAYERS)
def test_layers_without_data_are_filled_later(make):
    """A large model is made on "meta" and gets its weights from a file; the relation already has data."""
    layer = make()
    with torch.device("meta"):
        empty = make()
    empty.load_state_dict(layer.state_dict(), assign=True)
    x = torch.randn(2, 5, 8)
    inputs = (x, x, x) if isinstance(layer, nn.MultiheadAttention) else (x,)
    for got, wanted in zip(empty(*inputs), layer(*inputs), strict=True):
        assert got is wanted is None or torch.equal(got, wanted)
