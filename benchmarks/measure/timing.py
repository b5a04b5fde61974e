"""Seconds and bytes of a call: CPU time of one thread, wall time of several, events on a GPU.

On one thread process CPU time is taken, which moves less than wall time on a shared machine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median, quantiles
from typing import NamedTuple, Protocol

import torch

LEAST = 0.02  # least seconds of one sample: a short call is a mean over many
FLUSHED = 256 << 20  # bytes written between two calls on a GPU, more than any L2 cache
GPU_CALLS = 10  # of one sample
GPU_WARM_UP = 3  # calls: the first compiles, the next ones let clocks and caches settle


class Spread(NamedTuple):
    """The median, the 20 % and the 80 % quantile of some samples."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: list[float]) -> Spread:
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0])
        fifths = quantiles(samples, n=5, method="inclusive")
        return cls(median(samples), fifths[0], fifths[-1])


class Point(NamedTuple):
    """The time and bytes of a layout at one number of tokens."""

    tokens: int
    time: Spread
    bytes: int


class Timer(Protocol):
    """A clock for calls on a device."""

    @property
    def words(self) -> str:
        """Describe what the seconds are."""

    def warm_up(self, function: Callable[[], object]) -> None:
        """Call it until caches, clocks and compilers have settled."""

    def sample(self, function: Callable[[], object]) -> float:
        """Return the seconds of one call."""

    def peak_bytes(self, function: Callable[[], object]) -> int:
        """Return the peak memory of a call beyond its arguments, results included."""


class CpuTimer:
    """Process CPU time of one thread, or wall time of several."""

    def __init__(self, threads: int = 1) -> None:
        self.clock = time.process_time if threads == 1 else time.perf_counter
        self.words = "CPU time of one thread" if threads == 1 else f"wall time of {threads} threads"

    def warm_up(self, function: Callable[[], object]) -> None:
        """See :class:`Timer`."""
        function()

    def sample(self, function: Callable[[], object]) -> float:
        """See :class:`Timer`; every call makes new results, as in a program."""
        calls, spent = 0, 0.0
        start = self.clock()
        while not calls or spent < LEAST:  # on a busy machine LEAST may pass before the first call
            function()
            calls += 1
            spent = self.clock() - start
        return spent / calls

    def peak_bytes(self, function: Callable[[], object]) -> int:
        """See :class:`Timer`; counts what torch's allocator hands out."""
        from torch.profiler import ProfilerActivity, profile

        with (
            _quiet_stderr(),  # the profiler reports its start and stop there
            profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled,
        ):
            function()
        taken = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
        held = peak = 0
        for event in sorted(taken, key=lambda event: event.start_ns()):
            held += event.nbytes()
            peak = max(peak, held)
        return peak


class CudaTimer:
    """Events around each call, with an empty L2 cache; the flush also hides the time of the launch."""

    words = "time between CUDA events, L2 flushed"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.flushed = torch.empty(FLUSHED, dtype=torch.int8, device=device)

    def warm_up(self, function: Callable[[], object]) -> None:
        """See :class:`Timer`."""
        for _ in range(GPU_WARM_UP):
            function()
        torch.cuda.synchronize(self.device)

    def sample(self, function: Callable[[], object]) -> float:
        """See :class:`Timer`; the median of some calls."""
        with torch.cuda.device(self.device):
            events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(GPU_CALLS)]
            for start, stop in events:
                self.flushed.zero_()
                start.record()
                function()
                stop.record()
            torch.cuda.synchronize(self.device)
            milliseconds: list[float] = [start.elapsed_time(stop) for start, stop in events]
            return median(milliseconds) / 1e3

    def peak_bytes(self, function: Callable[[], object]) -> int:
        """See :class:`Timer`."""
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        function()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before


CPU = CpuTimer()


def timer_of(device: torch.device, threads: int = 1) -> Timer:
    """Return the timer of a device."""
    return CudaTimer(device) if device.type == "cuda" else CpuTimer(threads)


@contextmanager
def using_threads(count: int) -> Iterator[None]:
    """Let torch use this many threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread inside the block."""
    with using_threads(1):
        yield


def sample(function: Callable[[], object]) -> float:
    """Return the process CPU time of one call in seconds."""
    return CPU.sample(function)


def interleave(
    functions: list[Callable[[], object]],
    rounds: int,
    timer: Timer = CPU,
    on_error: Callable[[int, Exception], None] | None = None,
) -> list[list[float]]:
    """Sample each function once per round, so that a slow spell of the machine affects all equally.

    Args:
        functions: the functions to time.
        rounds: samples of each.
        timer: the clock.
        on_error: takes the number and the exception of a function that raises, which is not called again;
            without it the exception is passed on.
    """
    samples: list[list[float]] = [[] for _ in functions]
    failed = set()
    for turn in range(rounds + 1):
        for number, function in enumerate(functions):
            if number in failed:
                continue
            try:
                if turn == 0:
                    timer.warm_up(function)
                else:
                    samples[number].append(timer.sample(function))
            except Exception as error:
                if on_error is None:
                    raise
                on_error(number, error)
                failed.add(number)
    return samples


@contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Discard what C++ writes to standard error; exceptions pass."""
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
