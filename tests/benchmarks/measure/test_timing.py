"""Clocks and samples."""

from __future__ import annotations

import itertools

import pytest
import torch
from cases.fake_cuda import FakeCuda

from attnbias.benchmarks.measure import terminal, timing


@pytest.fixture
def gpu(monkeypatch):
    return FakeCuda(monkeypatch, timing)


CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("host", "device", "eager"),
    [(300e-6, 100e-6, 300e-6), (50e-6, 500e-6, 500e-6)],
    ids=["Python is longer", "the kernel is longer"],
)
def test_device_and_eager_times_are_apart(gpu, host, device, eager):
    """A call of 0.1 ms on the device took 0.3 ms in the table, because Python prepared the next one."""
    ready = timing.CudaTimer(CUDA).ready(gpu.call(host, device))
    assert ready.device() == pytest.approx(device, rel=1e-6) and ready.note == ""
    assert ready.eager() == pytest.approx(
        eager, rel=0.2
    )  # the first and the last call of a sample overlap less
    assert gpu.log.count("replay") == 1 + timing.GPU_CALLS


def test_call_that_cannot_be_captured_is_timed_behind_a_wait(gpu):
    gpu.why_not = RuntimeError("operation not permitted when stream is capturing\nmore")
    ready = timing.CudaTimer(CUDA).ready(gpu.call(300e-6, 100e-6))
    assert ready.device() == pytest.approx(100e-6, rel=1e-6)
    assert ready.note.startswith("not captured: RuntimeError: operation not permitted")
    assert ready.eager() == pytest.approx(300e-6, rel=0.2)
    assert gpu.stream == "default" and "replay" not in gpu.log


def test_samples_keep_both_times_and_clocks_are_raised_after_compiling(gpu):
    def fail():
        raise RuntimeError("in the third call")

    failed = []
    functions = [gpu.call(300e-6, 100e-6), fail, gpu.call(50e-6, 500e-6)]
    found = timing.alternate(functions, 2, timing.CudaTimer(CUDA), lambda *error: failed.append(error))
    assert [len(each.device) for each in found] == [len(each.eager) for each in found] == [2, 0, 2]
    assert found[0].device == pytest.approx([100e-6] * 2) and found[2].eager == pytest.approx(
        [500e-6] * 2, 0.2
    )
    assert [number for number, _ in failed] == [1]
    assert gpu.log.index("settle") > gpu.log.index("replay") and gpu.log.count("settle") == 1
    assert timing.interleave(functions[:1], 2, timing.CudaTimer(CUDA)) == [pytest.approx([100e-6] * 2)]


def test_a_cpu_has_one_time():
    (found,) = timing.alternate([lambda: None], 2)
    assert len(found.device) == 2 and found.eager == [] and found.note == ""


def test_no_round_begins_after_the_budget_is_spent(monkeypatch):
    clock = itertools.count(step=10)  # each look takes ten seconds
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    for budget, rounds in ((5, 2), (15, 3), (1e9, 6)):
        (found,) = timing.alternate([lambda: None], 6, budget=budget)
        assert len(found.device) == rounds


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
