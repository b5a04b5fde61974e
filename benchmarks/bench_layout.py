"""Layout building under pytest-benchmark: ``pytest benchmarks --benchmark-autosave``."""

import time

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from .measure import layout_times

TOKENS = 16_384

pytestmark = pytest.mark.benchmark(timer=time.process_time)


@pytest.mark.benchmark(group="causal & window, 16,384 tokens")
def test_local_layout(benchmark: BenchmarkFixture) -> None:
    layout_times.LOCAL.check(2_000)
    benchmark(layout_times.LOCAL.build, TOKENS)


@pytest.mark.benchmark(group="causal & window, 16,384 tokens")
def test_local_block_mask(benchmark: BenchmarkFixture) -> None:
    benchmark.pedantic(layout_times.block_mask, (TOKENS,), rounds=3, warmup_rounds=1)


@pytest.mark.benchmark(group="growth")
@pytest.mark.parametrize("tokens", [2**14, 2**17, 2**20])
@pytest.mark.parametrize("case", layout_times.GROWTH, ids=lambda case: case.name)
def test_growth(benchmark: BenchmarkFixture, case: layout_times.Case, tokens: int) -> None:
    layout = benchmark.pedantic(case.build, (tokens,), rounds=5, warmup_rounds=1)
    benchmark.extra_info["bytes"] = layout.stats().bytes


@pytest.mark.benchmark(group="graph, 2 M edges")
def test_graph_layout(benchmark: BenchmarkFixture) -> None:
    edges = layout_times.random_edges()
    benchmark.pedantic(layout_times.build_graph, (edges,), rounds=5, warmup_rounds=1)


@pytest.mark.benchmark(group="graph, 2 M edges")
def test_graph_scipy(benchmark: BenchmarkFixture) -> None:
    pytest.importorskip("scipy")
    source, target = layout_times.random_edges().numpy()
    benchmark.pedantic(layout_times.csr_both_ways, (source, target), rounds=5, warmup_rounds=1)
