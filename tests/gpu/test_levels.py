"""Multi-level scores in the Triton kernels as compiled: every access in bounds, no race, against float64."""

import pytest
import torch

import attnbias as ab
from attnbias.testing import make_inputs


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str
)
def test_levels(gpu, dtype):
    """Full tiles at two depths, mixed ones, and ragged ends."""
    score = ab.MultiLevel([6, 14, 12], widths=[None, 64, 16])
    q, k, v = make_inputs(1, 1, 2, 1, 70, 134, 32, 16, dtype)
    found = ab.verify(q, k, v, ab.Causal(), score=score, q_start="end", backend="triton")
    assert found.ok, found
