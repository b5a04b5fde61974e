"""The emulated GPU: a fixture, a cache for what is compiled, and the coverage of what ran on it."""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["*"]
else:
    from ptxemu import Coverage, emulated_gpu

    COVERAGE = pytest.StashKey[Coverage]()

# Compute capabilities; each is another way to load tiles and to multiply them.
ARCHITECTURES = [
    pytest.param(80, id="sm_80"),  # cp.async, mma.sync
    pytest.param(90, id="sm_90"),  # TMA, wgmma
    pytest.param(100, id="sm_100", marks=pytest.mark.slow),  # TMA, tcgen05
    pytest.param(120, id="sm_120", marks=pytest.mark.slow),  # TMA, mma.sync
]


@pytest.fixture(scope="session", autouse=True)
def compiled(pytestconfig):
    """Keep compiled kernels between tests, workers and runs."""
    with pytest.MonkeyPatch.context() as patch:
        if pytestconfig.cache is not None:
            patch.setenv("TRITON_CACHE_DIR", str(pytestconfig.cache.mkdir("triton")))
        yield


@pytest.fixture(params=ARCHITECTURES)
def gpu(request):
    """A GPU on which Triton kernels run on CPU tensors, with every check switched on."""
    # Machine code is no part of what is executed: benchmarks/static looks at it.
    with emulated_gpu(request.param, late=True, racecheck=True, bounds="exact", ptxas=False) as active:
        yield active


@pytest.fixture(scope="session")
def coverage(pytestconfig):
    """Blocks that ran, for the summary at the end; `gpu.coverage = coverage` adds to them."""
    return pytestconfig.stash.setdefault(COVERAGE, Coverage())


def pytest_addoption(parser):
    parser.addoption("--missing-blocks", action="store_true", help="list PTX blocks that did not run")


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput") and COVERAGE in session.config.stash:
        session.config.workeroutput["ptx coverage"] = session.config.stash[COVERAGE].dump()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """A worker is done: take what it found."""
    found = getattr(node, "workeroutput", {}).get("ptx coverage")
    if found:
        node.config.stash.setdefault(COVERAGE, Coverage()).load(found)


def pytest_terminal_summary(terminalreporter, config):
    if COVERAGE in config.stash:
        terminalreporter.section("basic blocks of compiled kernels that ran (emulated)")
        for line in config.stash[COVERAGE].lines(config.getoption("--missing-blocks")):
            terminalreporter.write_line(line)
