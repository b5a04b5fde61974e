"""What is kept on a GPU, under fakes of its streams: no GPU is needed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import attnbias as ab
from attnbias.layouts import cache, streams
from attnbias.layouts.cache import LayoutCache
from attnbias.scores import buckets

GPU = torch.device("cuda", 0)


class FakeStream:
    """Writes down what a stream is asked."""

    def __init__(self, name: str) -> None:
        self.name, self.calls = name, list[str]()

    def record_event(self) -> str:
        return f"made on {self.name}"

    def wait_event(self, event: str) -> None:
        self.calls.append(event)


class FakeGPU:
    """A GPU whose layouts lie on the host."""

    def __init__(self) -> None:
        self.stream = FakeStream("first")
        self.is_capturing = False
        self.recorded: list[FakeStream] = []


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGPU:
    fake, build = FakeGPU(), ab.Layout.build
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: fake.stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: fake.is_capturing)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: fake.recorded.append(stream))
    monkeypatch.setattr(
        cache.Layout, "build", staticmethod(lambda *given, **how: build(*given, **how | {"device": "cpu"}))
    )
    monkeypatch.setattr(streams, "_held", {})
    monkeypatch.setattr(cache, "layout_cache", LayoutCache(1 << 20))
    return fake


def held(layout: ab.Layout) -> bool:
    return any(x is layout.buffer for x in streams._held.values())


def large() -> ab.Relation:
    """Return a relation that keeps its layouts itself."""
    graph = ab.Graph(np.arange(400).reshape(2, 200), num_nodes=400)
    assert not graph.is_small
    return graph


@pytest.mark.parametrize("is_large", [False, True])
def test_what_a_graph_was_captured_with_is_held(
    is_large: bool, gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache dropped it, and the graph then read what lay there next."""
    relation: Any = large() if is_large else ab.Causal()
    lengths = (400, 400) if is_large else (70, 70)
    kept = relation.layout(*lengths, device=GPU)
    assert not held(kept)
    gpu.is_capturing = True
    assert relation.layout(*lengths, device=GPU).buffer is kept.buffer and held(kept)
    assert not gpu.stream.calls  # which would end the capture
    again = relation.layout(*lengths, device=GPU, form="tiles")
    assert held(again)
    gpu.is_capturing = False
    later = relation.layout(*lengths, device=GPU, form="edges")
    assert not held(later)
    # A cache too small for one more keeps neither.
    monkeypatch.setattr(cache, "layout_cache", LayoutCache(1))
    gpu.is_capturing = True
    dropped = relation.layout(*lengths, device=GPU, heads=2, q_start=0, form="edges")
    assert held(dropped) or dropped.buffer is later.buffer


def test_the_host_is_not_asked_about_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bool:
        raise AssertionError("asked")

    for name in ("is_current_stream_capturing", "current_stream", "current_device"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    ab.Causal().layout(33, 33)
    table = torch.zeros(1, 5)
    q = torch.zeros(1, 1, 9, 8)
    ab.attention(q, q, q, ab.Causal(), terms=[ab.RelativeBias(table, ab.linear_buckets(2))])


def test_the_current_device_is_one_key(gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layout for "cuda" and a call on "cuda:0" built it twice."""
    for relation, n in ((ab.Causal(), 50), (large(), 400)):
        layout = relation.layout(n, n, device="cuda")
        assert relation.layout(n, n, device=GPU).buffer is layout.buffer
        assert relation.layout(n, n, device="cuda:1").buffer is not layout.buffer
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        assert relation.layout(n, n, device="cuda").buffer is not layout.buffer
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def test_another_stream_waits_for_the_one_that_made_a_layout(gpu: FakeGPU) -> None:
    ab.Causal().layout(60, 60, device=GPU)
    first, gpu.stream = gpu.stream, FakeStream("second")
    ab.Causal().layout(60, 60, device=GPU)
    assert gpu.stream.calls == ["made on first"] and gpu.recorded == [gpu.stream]
    gpu.stream = first
    ab.Causal().layout(60, 60, device=GPU)
    assert not first.calls and len(gpu.recorded) == 1


def test_buckets_are_taken_as_layouts_are(gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device: self.clone())
    given = ab.linear_buckets(2), 5, 3, 8, 0, GPU
    buckets._buckets_on.cache_clear()
    index = buckets.buckets_of_distances(*given)
    gpu.stream = FakeStream("second")
    assert buckets.buckets_of_distances(*given) is index and gpu.stream.calls == ["made on first"]
    gpu.is_capturing = True
    buckets.buckets_of_distances(*given)
    assert next(iter(streams._held.values())) is index
    buckets._buckets_on.cache_clear()  # of what is on no GPU


def test_kernels_of_each_stream_have_lists_of_their_own(
    gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are derived by the stream that needs them first, and no other one waits for it."""
    pytest.importorskip("triton")
    from attnbias.backends.triton import backend

    layout = large().layout(400, 400)
    monkeypatch.setattr(ab.Layout, "device", GPU)
    for name in ("first", "second"):
        gpu.stream = FakeStream(name)
        gpu.stream.cuda_stream = hash(name)  # type: ignore[attr-defined]
        edges = backend._lists(layout)[2]
        assert backend._lists(layout)[2] is edges
        assert edges.by_query.items.row.numel()
        gpu.stream = FakeStream("other")
        gpu.stream.cuda_stream = 0  # type: ignore[attr-defined]
        assert backend._lists(layout)[2] is not edges
    gpu.is_capturing = True
    captured = backend._lists(layout)[2]
    assert captured.by_key.items.row.numel()  # made while capturing: not there before a replay
    assert "by_key" not in vars(backend._lists(layout)[2]) and "by_query" in vars(captured)
