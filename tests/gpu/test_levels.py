"""Multi-level scores in the Triton kernels as compiled: every access in bounds, no race, against float64."""

import pytest
import torch

import attnbias as ab
from attnbias.testing import make_inputs

CASES = {
    # Full tiles at two depths, mixed ones, ragged ends, and queries before the first key.
    "before the keys": (ab.MultiLevel([6, 14, 12], widths=[None, 64, 16]), (70, 134), -9, torch.float32),
    "float16": (ab.MultiLevel([6, 14, 12], widths=[None, 64, 16]), (70, 134), "end", torch.float16),
    # One loop per multiple of 16, in the tiles of heads of 64, whose counts are gated.
    "a loop each": (ab.MultiLevel([16] * 4, widths=[None, 512, 256, 128]), (700, 700), 0, torch.bfloat16),
    # Two depths that end inside one chunk, in the tiles of heads of 128.
    "wide": (ab.MultiLevel([20, 8, 60, 40], widths=[None, 256, 128, 32]), (300, 300), 0, torch.bfloat16),
}


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[] if x == "before the keys" else [pytest.mark.slow]) for x in CASES]
)
def test_levels(gpu, name):
    score, (q_len, k_len), q_start, dtype = CASES[name]
    relation = ab.Full() if q_start == -9 else ab.Causal()
    if dtype == torch.bfloat16:
        relation = ab.Layout.build(relation, q_len, k_len, tile=128, form="tiles", score=score)
    q, k, v = make_inputs(1, 1, 2, 1, q_len, k_len, sum(score.ranks), 16, dtype)
    found = ab.verify(q, k, v, relation, score=score, q_start=q_start, backend="triton")
    assert found.ok, found
