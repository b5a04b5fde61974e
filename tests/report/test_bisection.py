"""A call that fails is run again with one thing changed; the report says which change helped."""

from __future__ import annotations

import os

import pytest
import torch

from attnbias.kernels.launch.config import VARIABLE, Target
from attnbias.report import bisection, smoke
from attnbias.report.runner import Run, Status, work
from attnbias.report.store import Store
from attnbias.report.summary import summarise
from attnbias.testing.shipped import Problem, Verdict

CPU = torch.device("cpu")


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(bisection, "target_of", lambda device: Target(90, (3, 7)))
    monkeypatch.delenv(VARIABLE, raising=False)
    return Run(Store(tmp_path / "gpu.json"), CPU, None, lambda line: None)


def report(run, monkeypatch, is_right):
    """Run smoke and bisection on kernels that are right where ``is_right(problem)`` says so."""

    def check(problem, backend, device):
        return Verdict({} if is_right(problem) else {"out": "out: error 1"}, "128x128 w8 s2 TMA")

    monkeypatch.setattr(Problem, "check", check)
    work(run, [smoke.steps, bisection.steps])
    return bisection.verdicts(run)


def changes():
    return os.environ.get(VARIABLE, "")


def test_nothing_is_bisected_where_all_is_right(run, monkeypatch):
    assert report(run, monkeypatch, lambda problem: True) == []
    assert not run.found("bisect")


def test_a_fault_of_one_flag_is_named(run, monkeypatch):
    """Whatever switches TMA off helps, and nothing else."""

    def is_right(problem):
        return problem.size != 64 or " T" in changes() or changes() == "16x16 w4 s1"

    (line,) = report(run, monkeypatch, is_right)
    assert line == "D 64: right without TMA, without any flag, in one stage, in tiles of 16"
    assert f"bisection: {line}" in summarise(run)
    assert VARIABLE not in os.environ


def test_a_fault_of_masked_tiles_is_named(run, monkeypatch):
    lines = report(run, monkeypatch, lambda problem: type(problem.relation).__name__ == "Full")
    assert lines == ["D 64: right full tiles only", "D 128: right full tiles only"]


def test_the_first_length_that_fails_is_bisected(run, monkeypatch):
    """256 tokens fill their tiles; a fault of ragged ends is looked for at 1,000."""
    report(run, monkeypatch, lambda problem: problem.length == 256)
    assert {name.split(", ")[1] for name in run.found("bisect")} == {"1000 tokens"}


def test_a_fault_that_comes_and_goes_is_called_a_race(run, monkeypatch):
    seen = []

    def is_right(problem):
        seen.append(problem)
        return len(seen) > 1

    assert report(run, monkeypatch, is_right) == [
        "D 64: a second try was right: it fails by chance, which is a race"
    ]


def test_a_fault_that_nothing_mends_is_said(run, monkeypatch):
    lines = report(run, monkeypatch, lambda problem: False)
    assert lines == ["D 64: right in no way that was tried", "D 128: right in no way that was tried"]


def test_changes_come_on_top_of_the_users(run, monkeypatch):
    monkeypatch.setenv(VARIABLE, "forward: w8")
    seen = []
    report(run, monkeypatch, lambda problem: seen.append(changes()))
    assert "forward: w8; without T" in seen and changes() == "forward: w8"


def test_a_change_that_raises_does_not_end_the_bisection(run, monkeypatch):
    def is_right(problem):
        if "s1" in changes():
            raise RuntimeError("out of resources: shared memory")
        return False

    report(run, monkeypatch, is_right)
    statuses = {name.split(", ")[-1]: x["status"] for name, x in run.found("bisect").items()}
    assert statuses["in one stage"] == Status.RAISED.value
    assert statuses["float16"] == Status.WRONG.value
