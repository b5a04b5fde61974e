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
    assert "causal@8192 D=64 16/16" in quick and "causal@2048 D=64 16/16" not in quick and len(quick) < 28
    everything = catalog.cases_of("cuda", is_quick=False)
    assert quick.keys() < everything.keys() and "SBM 170k 8x16" in everything


def test_quick_gpu_cases_have_head_sizes_float32_short_sequences_and_graphs():
    quick = catalog.cases_of("cuda", is_quick=True)
    made = {name: tokens.gpu_cases("cpu")[name]() for name in quick if name in tokens.gpu_cases("cpu")}
    assert {case.size for case in made.values()} == {64, 96, 128, 256}
    assert {case.dtype for case in made.values()} == {torch.bfloat16, torch.float32}
    assert min(case.tokens for case in made.values()) == 256
    graphs = quick.keys() - made.keys()
    assert graphs == set(catalog.GPU_QUICK_GRAPHS) and all(catalog.is_graph(name) for name in graphs)
    for name in ("airfoil 4x32", "mol1024 4x32"):
        case = catalog.graph_cases("cuda")[name]()
        assert case.device == "cuda" and case.edge_index.device.type == "cpu"
