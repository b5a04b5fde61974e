"""The forward pass and its peers: ``pytest benchmarks/bench_forward.py --benchmark-group-by=group``."""

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from . import suite

pytestmark = pytest.mark.benchmark(timer=suite.clock)


@pytest.mark.parametrize("side", suite.SIDES)
@pytest.mark.parametrize("case", suite.names(graphs=False))
def test_forward(benchmark: BenchmarkFixture, case: str, side: str) -> None:
    suite.run(benchmark, case, side, backward=False)
