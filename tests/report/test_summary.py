"""The lines to paste: few, short, the worst first."""

from __future__ import annotations

import pytest
import torch

from attnbias.report.runner import Run
from attnbias.report.store import Store
from attnbias.report.summary import MOST_LINES, MOST_WIDTH, summarise


@pytest.fixture
def run(tmp_path):
    run = Run(Store(tmp_path / "gpu.json"), torch.device("cpu"), None, print)
    run.store.data["is_whole"] = True
    return run


def add(run, name, status="right", words="", data=None):
    run.store.end(name, {"status": status, "words": words, "seconds": 0.1, "data": data})


def timed(device, eager, peer):
    each = {"device": device, "eager": eager, "teraflops_useful": 100.0, "best_peer": "FA3"}
    return {"passes": {"forward": each | {"peers": {"FA3": {"device": peer, "eager": peer}}}}}


def test_faults_stand_before_times_and_counts_before_both(run):
    add(run, "smoke: causal", words="128x128")
    add(run, "table: dropout", "wrong", "out: error 1; a second run gives other bits")
    add(run, "table: offsets above 2^31", "no room", "out of memory")
    add(run, "table: two streams", "raised", "RuntimeError: no")
    add(run, "time: causal@8192", data=timed(0.001, 0.0012, 0.0009))
    lines = summarise(run)
    assert lines[0] == "attnbias report: the machine could not be read"
    assert lines[1] == (
        "exit code 3: something raised; 1 of 3 checks right, 1 wrong, 1 raised, 1 not deterministic; "
        "steps: 2 right, 1 wrong, 1 no room, 1 raised"
    )
    assert lines[2].startswith("WRONG table: dropout: out: error 1")
    assert lines[3] == "RAISED table: two streams: RuntimeError: no"
    assert lines[4] == (
        "causal@8192, forward: 1.000 ms on the device, 1.200 eager, 100.0 TFLOPS useful; "
        "FA3 0.900 ms (0.90 of ours)"
    )
    assert lines[5] == "look at: slowest beside a peer, 1.11 times its time: causal@8192 forward (FA3)"


def test_many_faults_and_long_words_are_cut(run):
    for i in range(200):
        add(run, f"table: {i}", "wrong", "x" * 500)
        add(run, f"time: {i}", data=timed(0.001, 0.01, 0.002))
        add(run, f"host: {i}", words="forward 60 us")
    lines = summarise(run)
    assert len(lines) == MOST_LINES and max(map(len, lines)) == MOST_WIDTH
    assert any(line == "... and 186 more in the file" for line in lines)


def test_a_report_that_was_ended_says_so_first(run):
    run.store.data["is_whole"] = False
    assert summarise(run)[1] == "not finished: the same command goes on where this one ended"


def test_spills_that_the_driver_reports_are_named(run):
    kernel = {"which": "forward", "config": "128x64 w4 s3", "d": 64, "spills": 12}
    add(run, "smoke: causal", data={"kernels": [kernel, kernel | {"spills": 0}]})
    assert summarise(run)[-1] == "look at: the driver reports spills in forward 128x64 w4 s3 D 64 (12)"
