"""Edge biases and additive scores in the Triton kernels, in Triton's interpreter: see test_tiles."""

import pytest
import torch
from cases.interpreter import interpreted, not_interpreted, poison_all, run_interpreted  # noqa: F401
from cases.scores import CASES, SHAPE, check, graph

import attnbias as ab
from attnbias.testing import make_inputs

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("poison_all")


@not_interpreted
def test_interpreted():
    """Run this file once more, interpreted."""
    run_interpreted(__file__)


@interpreted
@pytest.mark.parametrize("name", CASES)
def test_against_float64(name):
    relation, sizes, options = CASES[name]
    check(relation, sizes, **options)


@interpreted
def test_no_edges_have_gradients_of_zero():
    relation, sizes, _ = CASES["no edges"]
    out, lse, *grads = check(relation, sizes, edge_bias=2, weight=True)
    assert not out.any() and (lse == -torch.inf).all() and not any(x.any() for x in grads)


@interpreted
def test_dropped_edges_have_no_gradient():
    """``& other`` keeps the numbers of the remaining edges, duplicates of a pair included."""
    ends = torch.tensor([[0, 4, 1, 1, 3], [2, 2, 2, 2, 1]])
    bias = torch.randn(5, 2, generator=torch.Generator().manual_seed(1)).requires_grad_()
    query, key, value = make_inputs(1, 1, 2, 2, 5, 5, 8, 8)
    relation = ab.Graph(ends, num_nodes=5) & ab.Causal()
    found = []
    for backend in ("triton", "reference"):
        out = ab.attention(query, key, value, relation, terms=[ab.EdgeBias(bias)], backend=backend)
        found.append(torch.autograd.grad(out.square().sum(), bias)[0])
    assert not found[0][[1, 4]].any() and found[0][[0, 2, 3]].all()
    torch.testing.assert_close(*found)


@interpreted
def test_gradients_are_the_same_bits_each_time():
    options = {"weight": True, "edge_bias": 2}
    first, second = check(graph(), SHAPE, **options), check(graph(), SHAPE, **options)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
