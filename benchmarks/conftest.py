"""Options and fixtures of the bench files: ``pytest benchmarks --device cuda --benchmark-autosave``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from . import suite
from .measure.timing import one_thread


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--device``."""
    parser.addoption("--device", default="cpu", help="where the cases are timed: cpu, cuda or cuda:1")


def pytest_configure(config: pytest.Config) -> None:
    """Note the device before the tests are collected: their names depend on it."""
    suite.choose(config.getoption("--device"))


@pytest.fixture(autouse=True)
def single_thread() -> Iterator[None]:
    """Run on one thread, whose CPU time is taken."""
    with one_thread():
        yield
