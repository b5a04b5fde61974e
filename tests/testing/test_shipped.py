"""The checks of the shipped kernels find what they are for, and say where it is."""

from __future__ import annotations

import itertools

import pytest
import torch

from attnbias.backends import cpu
from attnbias.relations import Causal
from attnbias.testing import shipped
from attnbias.testing.checklist import shipped_lines
from attnbias.testing.shipped import Problem, Verdict

CPU = torch.device("cpu")
PROBLEM = Problem(Causal(), torch.bfloat16, 64, length=192)
NO_KERNELS = pytest.mark.skipif(bool(cpu.missing()), reason=cpu.missing() or "never")


def test_every_size_tile_and_16_bit_dtype_of_the_table_is_checked_first():
    names = [check.name for check in shipped.checks(None, CPU)]
    wanted = itertools.product(("bfloat16", "float16"), (128, 64), (64, 128, 256))
    assert names[:12] == [f"Causal {dtype} D {size}, tile {tile}" for dtype, tile, size in wanted]
    assert {name.partition("tile 128, ")[2] for name in names} >= set(shipped.OPTIONS)
    assert {f"{kind} made on the device" for kind in ("Graph", "Neighbors", "Documents")} <= set(names)
    assert len(set(names)) == len(names)


def test_the_quick_checks_are_some_of_them():
    quick = {check.name for check in shipped.checks(None, CPU, quick=True)}
    whole = {check.name.replace("D 128", "D 64") for check in shipped.checks(None, CPU)}
    assert quick < whole | {check.name for check in shipped.checks(None, CPU)}


@NO_KERNELS
def test_right_kernels_have_no_fault(monkeypatch):
    """Nor a name: those of Triton that the process has compiled did not run."""
    monkeypatch.setattr(shipped, "describe", lambda *sizes: "compiled before")
    assert PROBLEM.check("cpu", CPU) == Verdict({})


class Broken:
    """Kernels whose ``out`` is changed in some rows; the change knows the number of calls."""

    def __init__(self, monkeypatch, change):
        self.calls, self.plain = 0, cpu.forward
        self.change = change
        monkeypatch.setattr(cpu, "forward", self.forward)

    def forward(self, call):
        out, lse = self.plain(call)
        self.calls += 1
        self.change(out[:, 1, 64:128], self.calls)
        return out, lse


@NO_KERNELS
def test_wrong_rows_are_located_and_called_steady(monkeypatch):
    Broken(monkeypatch, lambda rows, calls: rows.add_(1))
    faults = PROBLEM.check("cpu", CPU).faults
    assert list(faults) == ["out", "query", "key"]  # the backward pass reads out
    assert "first at b 0, h 1, row 64, column 0; 4096 of 49152; rows fill 1 tile of 64" in faults["out"]
    assert faults["out"].endswith("no NaN; a second run gives the same bits")


@NO_KERNELS
def test_an_unsteady_fault_is_called_so(monkeypatch):
    Broken(monkeypatch, lambda rows, calls: rows.add_(calls))
    assert PROBLEM.check("cpu", CPU).faults["out"].endswith("a second run gives other bits")


@NO_KERNELS
def test_a_fault_that_goes_away_is_called_so(monkeypatch):
    Broken(monkeypatch, lambda rows, calls: rows.add_(calls == 1))
    assert "a second run" in PROBLEM.check("cpu", CPU).faults["out"]


@NO_KERNELS
@pytest.mark.parametrize(
    "name", ["two runs have equal bits", pytest.param("torch.compile", marks=pytest.mark.slow)]
)
def test_a_backend_that_gives_other_bits_each_time_breaks_its_promise(name, monkeypatch):
    promise = shipped._PROMISES[name]
    assert promise("cpu", CPU).faults == {}
    Broken(monkeypatch, lambda rows, calls: rows.add_(calls))
    assert "gives other bits" in promise("cpu", CPU).faults["out"]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("two streams have equal bits", "only CUDA has streams"),
        ("a device that is not current", "there is one device"),
        ("CUDA graph captured and replayed", "only CUDA has graphs"),
        ("offsets above 2^31", "only GPUs: it takes gigabytes"),
    ],
)
def test_what_a_cpu_has_not_is_skipped_with_a_reason(name, why):
    assert shipped._PROMISES[name](None, CPU).skipped == why


@NO_KERNELS
@pytest.mark.parametrize("name", list(shipped._MADE_THERE))
def test_layouts_made_on_the_device_are_compared_with_relations_made_here(name, monkeypatch):
    monkeypatch.setattr(shipped, "LENGTH", 200)
    check = next(each for each in shipped.checks("cpu", CPU) if each.name == f"{name} made on the device")
    assert not check.run().faults
    draw, relate = shipped._MADE_THERE[name]
    layouts = iter([relate(draw(shipped.LENGTH)), relate(draw(shipped.LENGTH).roll(1, 0))])
    monkeypatch.setitem(shipped._MADE_THERE, name, (draw, lambda x: next(layouts)))
    check = next(each for each in shipped.checks("cpu", CPU) if each.name == f"{name} made on the device")
    assert check.run().faults


def test_a_check_that_raises_is_a_line_and_the_next_one_runs(monkeypatch):
    def fail():
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access")

    listed = [
        shipped.Check("first", fail),
        shipped.Check("second", lambda: Verdict({"query": "query: error 1"}, "128x64 w4 s3 TMA")),
        shipped.Check("third", lambda: Verdict({}, skipped="there is one device")),
    ]
    monkeypatch.setattr(shipped, "checks", lambda backend, device: iter(listed))
    lines = [(line.what, line.fault) for line in shipped_lines(CPU, "cpu")]
    assert lines[0] == (
        "shipped: first",
        "RAISED RuntimeError: Triton Error [CUDA]: an illegal memory access",
    )
    assert lines[1] == ("shipped: second  128x64 w4 s3 TMA", "")
    assert lines[2] == ("shipped: second  128x64 w4 s3 TMA", "WRONG query: error 1")
    assert lines[3][0] == "shipped: third (skipped: there is one device)"
