"""Multi-level scores in the Triton kernels as compiled: every access in bounds, no race, against float64."""

import pytest
import torch

import attnbias as ab
from attnbias.testing import make_inputs


@pytest.mark.parametrize("case", ["before the keys", pytest.param("float16", marks=pytest.mark.slow)])
def test_levels(gpu, case):
    """Full tiles at two depths, mixed ones, ragged ends, and queries before the first key."""
    relation, q_start, dtype = ab.Full(), -9, torch.float32
    if case == "float16":
        relation, q_start, dtype = ab.Causal(), "end", torch.float16
    score = ab.MultiLevel([6, 14, 12], widths=[None, 64, 16])
    q, k, v = make_inputs(1, 1, 2, 1, 70, 134, 32, 16, dtype)
    found = ab.verify(q, k, v, relation, score=score, q_start=q_start, backend="triton")
    assert found.ok, found
