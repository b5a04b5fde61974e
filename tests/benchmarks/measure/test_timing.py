"""Clocks and samples."""

from __future__ import annotations

import itertools

import torch

from attnbias.benchmarks.measure import terminal, timing


def test_cuda_samples_are_between_events_after_a_flush(monkeypatch):
    """On stand-ins for torch.cuda: each call has its own events, with nothing else between them."""
    order, clock = [], itertools.count(0.0, 5.0)

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            order.append("event")
            self.at = next(clock)

        def elapsed_time(self, end):
            return end.at - self.at

    class Flushed:
        def zero_(self):
            order.append("flush")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: order.append("wait"))
    monkeypatch.setattr(torch.cuda, "device", lambda device: timing.using_threads(1))
    timer = timing.CudaTimer.__new__(timing.CudaTimer)
    timer.device, timer.flushed = torch.device("cpu"), Flushed()
    assert timer.sample(lambda: order.append("call")) == 5e-3
    assert order == ["flush", "event", "call", "event"] * timing.GPU_CALLS + ["wait"]
    order.clear()
    timer.warm_up(lambda: order.append("call"))
    assert order == ["call"] * timing.GPU_WARM_UP + ["wait"]


def test_peak_bytes_counts_what_is_held_at_once():
    x = torch.zeros(1000)

    def call():
        y = x + 1
        z = y + 1
        del y
        return z * 2

    assert 8000 <= timing.CpuTimer().peak_bytes(call) < 9000


def test_sample_makes_a_call_even_if_its_time_is_over(monkeypatch):
    """On a busy machine the clock could pass the limit before the first call, which divided by zero."""
    timer = timing.CpuTimer()
    monkeypatch.setattr(timer, "clock", itertools.count(0.0, 2 * timing.LEAST).__next__)
    calls = []
    assert timer.sample(lambda: calls.append("call")) == 2 * timing.LEAST and calls == ["call"]


def test_clocks_by_threads():
    assert "CPU time" in timing.timer_of(torch.device("cpu")).words
    assert timing.timer_of(torch.device("cpu"), 2).words == "wall time of 2 threads"


def test_bytes_and_times_have_units():
    assert (
        terminal.size(512) == "512 B"
        and terminal.size(3 << 20) == "3 MiB"
        and terminal.size(5 << 30) == "5 GiB"
    )
    assert terminal.time(2e-6) == "2 us" and terminal.time(0.25) == "250 ms" and terminal.time(2) == "2 s"
