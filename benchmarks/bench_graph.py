"""Lists of neighbours against gathers, PyG and SDPA with a mask: ``pytest benchmarks/bench_graph.py``."""

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from . import suite

pytestmark = pytest.mark.benchmark(timer=suite.clock)


@pytest.mark.parametrize("side", suite.SIDES)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("case", suite.names(graphs=True))
def test_graph(benchmark: BenchmarkFixture, case: str, backward: bool, side: str) -> None:
    suite.run(benchmark, case, side, backward=backward)
