"""Forward and backward and peers: ``pytest benchmarks/bench_backward.py --benchmark-group-by=group``."""

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from . import suite

pytestmark = pytest.mark.benchmark(timer=suite.clock)


@pytest.mark.parametrize("side", suite.SIDES)
@pytest.mark.parametrize("case", suite.names(graphs=False))
def test_backward(benchmark: BenchmarkFixture, case: str, side: str) -> None:
    suite.run(benchmark, case, side, backward=True)
