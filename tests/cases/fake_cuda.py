"""A stand-in for torch.cuda in which host and device have clocks of their own."""

from __future__ import annotations

import types
from contextlib import contextmanager

import torch

CYCLES = 2e9  # of the device, a second
REPLAY = 5e-6  # seconds of the host for a CUDA graph


class FakeCuda:
    """Calls cost time of the host, and work of the device that waits for its turn in one queue."""

    def __init__(self, monkeypatch, timing):
        self.host = self.device = 0.0
        self.captured = None  # device seconds of the capture under way
        self.stream = "default"
        self.log = []
        self.why_not = None  # the exception that a capture ends in
        for name in ("Event", "CUDAGraph", "graph", "stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, f"make_{name.lower()}"))
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("side"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream(self.stream))
        monkeypatch.setattr(torch.cuda, "device", lambda device: self.make_stream(Stream(self.stream)))
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: self.wait())
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.work(cycles / CYCLES))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: self.log.append("free"))
        for name in ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, lambda device=None: 7)
        clock = types.SimpleNamespace(perf_counter=lambda: self.host, process_time=lambda: self.host)
        monkeypatch.setattr(timing, "time", clock)
        monkeypatch.setattr(timing, "raise_clocks", lambda device, seconds: self.log.append("settle"))
        empty = torch.empty
        flushed = types.SimpleNamespace(zero_=lambda: self.work(1e-4))

        def make_empty(*shape, device=None, **given):
            is_fake = device is not None and torch.device(device).type == "cuda"
            return flushed if is_fake else empty(*shape, device=device, **given)

        monkeypatch.setattr(torch, "empty", make_empty)

    def call(self, host, device, then=lambda: None):
        """Return a call that takes these seconds of the host and gives this work to the device."""

        def run():
            self.host += host
            self.work(device)
            return then()

        return run

    def work(self, seconds):
        if self.captured is not None:
            self.captured += seconds
        else:
            self.device = max(self.device, self.host) + seconds

    def wait(self):
        self.host = max(self.host, self.device)

    def make_event(self, enable_timing):
        assert enable_timing
        event = types.SimpleNamespace(at=None)

        def record():
            event.at = max(self.device, self.host)

        event.record, event.elapsed_time = record, lambda end: (end.at - event.at) * 1e3
        return event

    def make_cudagraph(self):
        graph = types.SimpleNamespace(seconds=None)

        def replay():
            self.log.append("replay")
            self.host += REPLAY
            self.work(graph.seconds)

        graph.replay = replay
        return graph

    @contextmanager
    def make_graph(self, graph, pool, stream):
        """Capture, as torch does: when it fails at its end, the stream is not put back."""
        self.captured, self.stream = 0.0, "capture"
        try:
            yield
            graph.seconds = self.captured
        finally:
            self.captured = None
        if self.why_not is not None:
            raise self.why_not
        self.stream = stream.name

    @contextmanager
    def make_stream(self, stream):
        before, self.stream = self.stream, stream.name
        try:
            yield
        finally:
            self.stream = before


class Stream:
    """A stream that only has a name."""

    def __init__(self, name):
        self.name = name

    def wait_stream(self, other):
        """Do nothing: there is one queue."""
