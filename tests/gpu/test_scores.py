"""Edge biases and additive scores in the Triton kernels as compiled: accesses in bounds, no race."""

import pytest
import torch
from cases.scores import CASES, check, graph

OFTEN = ("bias by head", "GATv2 and all else")  # each takes seconds to compile


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[] if x in OFTEN else [pytest.mark.slow]) for x in CASES]
)
def test_against_float64(gpu, name):
    relation, sizes, options = CASES[name]
    check(relation, sizes, **options)


@pytest.mark.slow
def test_bfloat16(gpu):
    sizes = (1, 4, 2, 9, 11, 16, 16)
    check(graph(), sizes, edge_bias=2, weight=True, dtype=torch.bfloat16)
