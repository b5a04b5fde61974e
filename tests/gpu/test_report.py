"""``attnbias report`` on an emulated GPU: right kernels pass, and the cause of a wrong one is named."""

from __future__ import annotations

import pytest
import torch
from ptxemu import emulated_gpu

from attnbias.report import bisection, smoke
from attnbias.report.runner import Run, exit_code, work
from attnbias.report.store import Store
from attnbias.report.summary import summarise

pytestmark = pytest.mark.slow
CHANGES = {"without TMA": "without T", "without flag N": "without N"}


def report(tmp_path, monkeypatch):
    """Run smoke and bisection for 70 tokens and a head size of 64; return the run and what it said."""
    for owner, name, less in (
        (smoke, "SIZES", (64,)),
        (smoke, "LENGTHS", (70,)),
        (bisection, "CHANGES", CHANGES),
        (bisection, "PROBLEMS", {}),
    ):
        monkeypatch.setattr(owner, name, less)
    said = []
    run = Run(Store(tmp_path / "gpu.json.gz"), torch.device("cpu"), "triton", said.append)
    with emulated_gpu(90, late=True, ptxas=False):
        assert work(run, [smoke.steps, bisection.steps]) == 0
    return run, said


def test_right_kernels_pass_and_are_named(tmp_path, monkeypatch):
    run, said = report(tmp_path, monkeypatch)
    assert exit_code(run.store) == 0 and not run.found("bisect")
    (step,) = run.found("smoke").values()
    assert "forward 64x128 w4 s2 TMA" in step["words"]
    assert {kernel["which"] for kernel in step["data"]["kernels"]} >= {
        "forward",
        "backward_query",
        "backward_key",
    }
    assert any("compiling forward_kernel" in line for line in said)


def test_a_fault_of_tma_is_located_and_named(tmp_path, monkeypatch):
    """Descriptors end a row early, so that the last key and query read as 0."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    def shorten(descriptor):
        descriptor.shape[2] -= 1

    monkeypatch.setattr(TensorDescriptor, "__post_init__", shorten)
    run, _ = report(tmp_path, monkeypatch)
    assert exit_code(run.store) == 1
    (step,) = run.found("smoke").values()
    assert step["status"] == "wrong" and "rows only 69" in step["words"]
    assert bisection.verdicts(run) == ["D 64: right without TMA"]
    assert "bisection: D 64: right without TMA" in summarise(run)
