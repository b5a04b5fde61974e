"""What the suites under pytest-benchmark share: ``pytest benchmarks --device cuda --benchmark-autosave``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from . import suite
from .timing import one_thread


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the device be named."""
    parser.addoption("--device", default="cpu", help="where the cases are timed: cpu, cuda or cuda:1")


def pytest_configure(config: pytest.Config) -> None:
    """Note the device before the tests are collected: their names depend on it."""
    suite.choose(config.getoption("--device"))


@pytest.fixture(autouse=True)
def single_thread() -> Iterator[None]:
    """One thread, whose CPU time is taken."""
    with one_thread():
        yield
