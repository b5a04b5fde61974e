"""Seconds and bytes of a call: CPU time of one thread, wall time of several, on a GPU both sides apart.

On one thread process CPU time is taken, which moves less than wall time on a shared machine. A GPU works
while Python prepares the next call, so there are two times: the device's, and the eager one of a program that
calls and calls.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median, quantiles
from typing import NamedTuple, Protocol

import torch

from attnbias.testing.checklist import words_of

from .clocks import raise_clocks

LEAST = 0.02  # least seconds of one sample: a short call is a mean over many
FLUSHED = 256 << 20  # bytes written between two calls on a GPU, more than any L2 cache
GPU_CALLS = 10  # of one sample
GPU_WARM_UP = 3  # calls: the first compiles, the next ones let caches settle
WAIT = 4_000_000  # cycles, about 2 ms: Python gets ahead of a GPU that waits
EAGER_CALLS, EAGER_SECONDS = 50, 0.1  # of one sample: the fewer of both
SETTLED = 0.2  # seconds of products after compiling, in which clocks fell
LEAST_ROUNDS = 2  # whatever the budget


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


class Ready(NamedTuple):
    """A call that is compiled and warm: two clocks for it, in seconds, and what is odd about the first."""

    device: Callable[[], float]
    eager: Callable[[], float]
    note: str = ""


class Samples(NamedTuple):
    """The seconds of a call, round by round; ``eager`` is empty where no device works apart from Python."""

    device: list[float]
    eager: list[float]
    note: str = ""


class Timer(Protocol):
    """A clock for calls on a device."""

    @property
    def words(self) -> str:
        """Describe what the seconds are."""

    @property
    def is_apart(self) -> bool:
        """Return whether the device works apart from Python, so that there are two times."""

    def ready(self, function: Callable[[], object]) -> Ready:
        """Call it until caches and compilers have settled, and return its clocks."""

    def sample(self, function: Callable[[], object]) -> float:
        """Return the seconds of one call, Python's included."""

    def settle(self) -> None:
        """Bring the device to the clocks that it keeps under load."""

    def peak_bytes(self, function: Callable[[], object]) -> int:
        """Return the peak memory of a call beyond its arguments, results included."""


class CpuTimer:
    """Process CPU time of one thread, or wall time of several."""

    is_apart = False

    def __init__(self, threads: int = 1) -> None:
        self.clock = time.process_time if threads == 1 else time.perf_counter
        self.words = "CPU time of one thread" if threads == 1 else f"wall time of {threads} threads"

    def ready(self, function: Callable[[], object]) -> Ready:
        """See :class:`Timer`."""
        function()
        clock = partial(self.sample, function)
        return Ready(clock, clock)

    def settle(self) -> None:
        """See :class:`Timer`; does nothing."""

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
    """Device time by replaying a CUDA graph of the call with an empty L2 cache; eager time by the wall."""

    words = "device time of a replayed CUDA graph, L2 flushed"
    is_apart = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.flushed = torch.empty(FLUSHED, dtype=torch.int8, device=device)
        self.pool = torch.cuda.graph_pool_handle()  # shared: nobody reads the results of a replay

    def ready(self, function: Callable[[], object]) -> Ready:
        """See :class:`Timer`; what cannot be captured is timed behind a wait that is longer than Python."""
        with torch.cuda.device(self.device):
            for _ in range(GPU_WARM_UP):
                function()
            torch.cuda.synchronize(self.device)
            replay, why = self._capture(function)
        eager = partial(self.sample, function)
        if replay is None:
            return Ready(partial(self._between_events, function, wait=True), eager, f"not captured: {why}")
        return Ready(partial(self._between_events, replay, wait=False), eager)

    def _capture(self, function: Callable[[], object]) -> tuple[Callable[[], object] | None, str]:
        """Return the replay of a CUDA graph of a call, or None and the reason."""
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(side):  # left in any case: torch stays on it when a capture fails at its end
            for _ in range(GPU_WARM_UP):
                function()
            torch.cuda.synchronize(self.device)
            try:
                with torch.cuda.graph(graph, pool=self.pool, stream=side):
                    function()
            except Exception as error:  # it reads from the device, or allocates as a graph cannot
                torch.cuda.synchronize(self.device)  # raises if the context is gone
                self.pool = torch.cuda.graph_pool_handle()
                return None, words_of(error)
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph.replay()
        torch.cuda.synchronize(self.device)
        return graph.replay, ""

    def _between_events(self, function: Callable[[], object], *, wait: bool) -> float:
        """Return the median seconds of some calls; the flush hides the launch of a graph."""
        with torch.cuda.device(self.device):
            events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(GPU_CALLS)]
            for start, stop in events:
                if wait:
                    torch.cuda._sleep(WAIT)
                self.flushed.zero_()
                start.record()
                function()
                stop.record()
            torch.cuda.synchronize(self.device)
            milliseconds: list[float] = [start.elapsed_time(stop) for start, stop in events]
            return median(milliseconds) / 1e3

    def sample(self, function: Callable[[], object]) -> float:
        """See :class:`Timer`: the mean of many calls that do not wait for one another."""

        def spent(calls: int) -> float:
            torch.cuda.synchronize(self.device)
            start = time.perf_counter()
            for _ in range(calls):
                function()
            torch.cuda.synchronize(self.device)
            return time.perf_counter() - start

        calls = min(EAGER_CALLS, max(1, int(EAGER_SECONDS / max(spent(1), 1e-9))))
        return spent(calls) / calls

    def settle(self) -> None:
        """See :class:`Timer`."""
        raise_clocks(self.device, SETTLED)

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
    """Sample each function once per round; see :func:`alternate`. On a GPU this is the device's time."""
    return [samples.device for samples in alternate(functions, rounds, timer, on_error)]


def alternate(
    functions: list[Callable[[], object]],
    rounds: int,
    timer: Timer = CPU,
    on_error: Callable[[int, Exception], None] | None = None,
    budget: float = math.inf,
) -> list[Samples]:
    """Sample each function once per round, so that a slow spell of the machine affects all equally.

    Args:
        functions: the functions to time.
        rounds: samples of each.
        timer: the clock.
        on_error: takes the number and the exception of a function that raises, which is not called again;
            without it the exception is passed on.
        budget: seconds of all samples after which no further round begins. A sample that fills it is a mean
            over much work and moves little.
    """
    ready: dict[int, Ready] = {}
    samples = [Samples([], []) for _ in functions]

    def attempt(number: int, take: Callable[[], None]) -> None:
        try:
            take()
        except Exception as error:
            ready.pop(number, None)
            if on_error is None:
                raise
            on_error(number, error)

    def warm_up(number: int) -> None:
        ready[number] = timer.ready(functions[number])
        samples[number] = Samples([], [], ready[number].note)

    def sample(number: int) -> None:
        samples[number].device.append(ready[number].device())
        if timer.is_apart:
            samples[number].eager.append(ready[number].eager())

    for number in range(len(functions)):
        attempt(number, partial(warm_up, number))
    timer.settle()
    start = time.perf_counter()
    for done in range(rounds):
        if done >= LEAST_ROUNDS and time.perf_counter() - start > budget:
            break
        for number in list(ready):
            attempt(number, partial(sample, number))
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
