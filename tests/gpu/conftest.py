"""The emulated GPU: a fixture, and the coverage of its runs."""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["*"]
else:
    from ptxemu import Coverage, emulated_gpu

    COVERAGE = pytest.StashKey[Coverage]()

# Compute capabilities; each loads and multiplies tiles in another way.
ARCHITECTURES = [
    pytest.param(80, id="sm_80"),  # cp.async, mma.sync
    pytest.param(90, id="sm_90"),  # TMA, wgmma
    pytest.param(100, id="sm_100", marks=pytest.mark.slow),  # TMA, tcgen05
    pytest.param(120, id="sm_120", marks=pytest.mark.slow),  # TMA, mma.sync
]


@pytest.fixture(params=ARCHITECTURES)
def gpu(request):
    """Emulate a GPU for Triton kernels on CPU tensors, with every check switched on."""
    # Machine code is not executed here; benchmarks/static counts it.
    with emulated_gpu(request.param, late=True, racecheck=True, bounds="exact", ptxas=False) as active:
        yield active


@pytest.fixture(scope="session")
def coverage(pytestconfig):
    """Collect the blocks that ran, for the summary at the end; `gpu.coverage = coverage` adds to them."""
    return pytestconfig.stash.setdefault(COVERAGE, Coverage())


def pytest_addoption(parser):
    parser.addoption("--missing-blocks", action="store_true", help="list PTX blocks that did not run")


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput") and COVERAGE in session.config.stash:
        session.config.workeroutput["ptx coverage"] = session.config.stash[COVERAGE].dump()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """Collect the coverage of a worker that is done."""
    found = getattr(node, "workeroutput", {}).get("ptx coverage")
    if found:
        node.config.stash.setdefault(COVERAGE, Coverage()).load(found)


def pytest_terminal_summary(terminalreporter, config):
    if COVERAGE in config.stash:
        terminalreporter.section("basic blocks of compiled kernels that ran (emulated)")
        for line in config.stash[COVERAGE].lines(config.getoption("--missing-blocks")):
            terminalreporter.write_line(line)
