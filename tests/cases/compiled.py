"""Modules with attention, and a bitwise comparison of compiled and exported ones with eager ones."""

import math

import torch

import attnbias as ab
from attnbias.testing import make_inputs

WINDOW = ab.Causal() & ab.Window(before=5)


def leaves(Q=33, K=None, **kwargs):
    sizes = {"B": 2, "H": 4, "Hk": 2, "Q": Q, "K": K or Q, "D": 8, "E": 5, "requires_grad": True}
    return make_inputs(0, **(sizes | kwargs))


class Distance:
    def value(self, b, h, q, k):
        return -0.1 * (q - k).abs()


class Attend(torch.nn.Module):
    """A module that holds a relation, as a layer does."""

    def __init__(self, relation, **options):
        super().__init__()
        self.relation = relation
        self.options = options

    def forward(self, q, k, v):
        return ab.attention(q, k, v, self.relation, **self.options)


def assert_same(compiled, eager, q, k, v, *rest):
    """Check that results and gradients are equal bit for bit: both run the same code."""
    results = []
    for call in (compiled, eager):
        torch.manual_seed(1)
        out = call(q, k, v, *rest)
        outs = out if isinstance(out, tuple) else (out,)
        loss = sum(x.masked_fill(x == -math.inf, 0).sin().sum() for x in outs)
        results.append((*outs, *torch.autograd.grad(loss, (q, k, v))))
    for mine, given in zip(*results, strict=True):
        assert torch.equal(mine, given) and mine.stride() == given.stride()
