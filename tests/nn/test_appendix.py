"""The classes of the paper's appendix B against its listings, with the listings' own weights."""

import copy

import pytest
import torch
from torch import nn

from attnbias.nn import appendix
from attnbias.testing import assert_no_worse

D = 12
STRIDES = (1, 2, 3, 9, 20)


class Listing(nn.Module):
    """What appendix B prints, in one class: every pair, and -1e9 where the mask is 0."""

    def __init__(self, mask):
        super().__init__()
        self.Q = nn.Linear(D, D, bias=False)
        self.K = nn.Linear(D, D, bias=False)
        self.V = nn.Linear(D, D, bias=False)
        self.mask = mask  # a function of the tokens; None leaves all pairs

    def forward(self, x, other=None):
        memory = other if other is not None and self.mask is None else x
        query, key, value = self.Q(x), self.K(memory), self.V(memory)
        scores = torch.matmul(query, key.T) / D**0.5
        if self.mask is not None:
            scores = scores.masked_fill(self.mask(x, other) == 0, -1e9)
        att = nn.functional.softmax(scores, dim=-1)
        return torch.matmul(att, value), att


def subsequent(x, other):
    """Return B.2's mask."""
    return torch.triu(torch.ones(len(x), len(x)), diagonal=1) == 0


def stride_mask(stride):
    """Return B.4's mask, a function of the tokens."""

    def mask(x, other):
        blocked = torch.ones(len(x), len(x))
        for i in range(len(x)):
            for j in range(stride):
                blocked[i, max(0, i - j)] = 0
        return blocked == 0

    return mask


def weighted_graph(n):
    """Return an adjacency matrix with loops, in which any number but 0 is an edge."""
    rng = torch.Generator().manual_seed(n)
    numbers = torch.randn(n, n, generator=rng)
    return torch.where(torch.rand(n, n, generator=rng) < 0.4, numbers, 0.0).fill_diagonal_(-2.0)


CASES = {
    "B.1": (appendix.SelfAttention, (), None, None),
    "B.2": (appendix.MaskAttention, (), subsequent, None),
    "B.3": (appendix.EncDecAttention, (), None, lambda n: torch.randn(5, D)),
    **{f"B.4 {s}": (appendix.SparseAttention, (s,), stride_mask(s), None) for s in STRIDES},
    "B.5": (appendix.GraphAttention, (), lambda x, adj: adj, weighted_graph),
}


@pytest.mark.parametrize("n", [1, 10, 70])
@pytest.mark.parametrize("case", CASES)
def test_listings_weights_give_the_listings_results(case, n):
    """Output, weights and the gradients of all parameters and tokens, each to 1e-6."""
    make, options, mask, other = CASES[case]
    torch.manual_seed(n)
    listing, layer = Listing(mask), make(D, *options)
    layer.load_state_dict(listing.state_dict())
    wide = copy.deepcopy(listing).double()
    x, given = torch.randn(n, D), () if other is None else (other(n),)
    grads = torch.randn(n, D), torch.randn(n, len(given[0]) if case == "B.3" else n)
    results = []
    for each, dtype in ((layer, torch.float32), (listing, torch.float32), (wide, torch.float64)):
        tokens = x.to(dtype).requires_grad_()
        outs = each(tokens, *(y.to(dtype) for y in given))
        wanted = [tokens, *each.parameters()]
        results.append([*outs, *torch.autograd.grad(outs, wanted, [g.to(dtype) for g in grads])])
    names = ["h", "att", "x", "Q", "K", "V"]
    for name, got, eager, truth in zip(names, *results, strict=True):
        assert_no_worse(name, got, eager, truth, 3)
        size = truth.abs().max().clamp(min=1)
        assert (got - truth).abs().max() <= 1e-6 * size, name


def test_a_wrong_stride_is_noticed():
    listing, layer = Listing(stride_mask(3)), appendix.SparseAttention(D, stride=2)
    layer.load_state_dict(listing.state_dict())
    x = torch.randn(10, D)
    assert (layer(x)[0] - listing(x)[0]).abs().max() > 1e-3


def test_default_stride_is_the_listings():
    assert appendix.SparseAttention(D).stride == 3


def test_batches_are_computed_one_by_one():
    x = torch.randn(3, 7, D)
    layer = appendix.MaskAttention(D)
    h, att = layer(x)
    for i in range(3):
        assert_no_worse("h", h[i], layer(x[i])[0], layer(x[i])[0].double())
        assert_no_worse("att", att[i], layer(x[i])[1], layer(x[i])[1].double())


def test_an_isolated_node_gets_zeros():
    """The first difference: the listing gives it the mean of all nodes."""
    adj, x = torch.eye(4), torch.randn(4, D)
    adj[2] = 0
    listing, layer = Listing(lambda x, adj: adj), appendix.GraphAttention(D)
    layer.load_state_dict(listing.state_dict())
    h, att = layer(x, adj)
    assert not h[2].any() and not att[2].any()
    assert torch.equal(listing(x, adj)[1][2], torch.full((4,), 0.25))


def test_float16_works():
    """The second difference: the listing's -1e9 does not fit."""
    layer = appendix.MaskAttention(D).half()
    assert layer(torch.randn(5, D).half())[0].isfinite().all()
    with pytest.raises(RuntimeError, match="overflow"):
        Listing(subsequent).half()(torch.randn(5, D).half())


def test_a_stride_without_keys_is_refused():
    with pytest.raises(ValueError, match=r"^stride: wanted at least 1, got 0"):
        appendix.SparseAttention(D, stride=0)
