"""The named cases of a device."""

from __future__ import annotations

import torch

from attnbias.benchmarks.cases import catalog, tokens


def test_gpu_cases_have_the_known_shapes():
    named = tokens.gpu_cases("cpu")
    assert {"causal@32768 D=128 16/4", "window@2048 D=64 16/16", "grid@128x128 D=64"} <= named.keys()
    case = named["causal@8192 D=128 16/4"]()
    assert (case.batch, case.heads, case.key_heads, case.size, case.dtype) == (4, 16, 4, 128, torch.bfloat16)
    quick = catalog.cases_of("cuda", is_quick=True)
    assert "causal@8192 D=64 16/16" in quick and "causal@2048 D=64 16/16" not in quick and len(quick) < 20
