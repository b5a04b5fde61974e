"""Process CPU time on one thread, which moves less than wall time on a shared machine."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median, quantiles
from typing import NamedTuple

import torch

LEAST = 0.02  # seconds that one sample takes at least, so that a short call is a mean over many


class Spread(NamedTuple):
    """The median of some samples, and what four in five exceed or stay below."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: list[float]) -> "Spread":
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0])
        fifths = quantiles(samples, n=5, method="inclusive")
        return cls(median(samples), fifths[0], fifths[-1])


class Point(NamedTuple):
    """What a layout costs at one number of tokens."""

    tokens: int
    time: Spread
    bytes: int


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute on one thread inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def sample(function: Callable[[], object]) -> float:
    """Seconds of process CPU time of one call."""
    calls = 0
    start = time.process_time()
    while (spent := time.process_time() - start) < LEAST:
        function()
        calls += 1
    return spent / calls


def interleave(functions: list[Callable[[], object]], rounds: int) -> list[list[float]]:
    """Sample each function once a round, so that a slow spell of the machine strikes all alike."""
    for function in functions:
        function()
    by_round = [[sample(function) for function in functions] for _ in range(rounds)]
    return [list(samples) for samples in zip(*by_round, strict=True)]
