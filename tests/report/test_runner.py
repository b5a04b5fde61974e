"""The steps of a report: what raises, dies, hangs or is wrong is noted, and the next step runs."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from attnbias.report import runner, store
from attnbias.report.runner import Outcome, Run, Status, Step, exit_code, start_process, supervise, work
from attnbias.report.store import Store, scrub

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "results" / "gpu.json.gz"


def run_of(path, device=CPU, say=lambda line: None):
    return Run(Store(path), device, None, say)


def right():
    return Outcome()


def wrong():
    return Outcome(Status.WRONG, "out: error 1")


def fail():
    raise RuntimeError("Triton Error [CUDA]: out of resources")


def section(*runs):
    return lambda run: [Step(f"part: {number}", each) for number, each in enumerate(runs)]


def statuses(path):
    return [x["status"] for x in Store(path).steps.values()]


def test_steps_after_one_that_raises_run(path):
    lines = []
    assert work(run_of(path, say=lines.append), [section(right, fail, right)]) == 0
    assert statuses(path) == ["right", "raised", "right"]
    assert Store(path).steps["part: 1"]["words"] == "RuntimeError: Triton Error [CUDA]: out of resources"
    assert lines[2] == "part: 1 ..." and lines[3].startswith("    RAISED in 0.0 s: RuntimeError")
    assert Store(path).data["is_whole"]


def test_step_is_said_and_saved_before_it_runs(path):
    lines, seen = [], []

    def look():
        seen.append((lines[-1], Store(path).data["running"]))
        return Outcome()

    work(run_of(path, say=lines.append), [section(look)])
    assert seen == [("part: 0 ...", "part: 0")]


def test_rerun_continues_and_a_fresh_one_does_not(path):
    calls = []

    def count():
        calls.append(1)
        return Outcome()

    for _ in range(2):
        work(run_of(path), [section(count, count)])
    assert len(calls) == 2
    work(Run(Store(path, fresh=True), CPU, None, print), [section(count, count)])
    assert len(calls) == 4


def test_section_sees_what_came_before_it(path):
    def later(run):
        if any(x["status"] == "wrong" for x in run.found("part").values()):
            yield Step("later: bisect", right)

    work(run_of(path), [section(right, wrong), later])
    assert list(Store(path).steps) == ["part: 0", "part: 1", "later: bisect"]


def test_refusal_and_missing_memory_are_no_faults(path):
    def refuse():
        raise NotImplementedError("backend 'triton' cannot run this: no")

    def grow():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB\nmore lines")

    work(run_of(path), [section(refuse, grow)])
    assert statuses(path) == ["skipped", "no room"]
    assert Store(path).steps["part: 1"]["words"].startswith("out of memory; run it alone on the GPU")
    assert "\n" not in Store(path).steps["part: 1"]["words"]
    assert exit_code(Store(path)) == 0


@pytest.mark.parametrize(
    ("runs", "code"),
    [
        ((right,), 0),
        ((right, wrong), 1),
        ((fail, wrong), 3),
    ],
)
def test_exit_codes(path, runs, code):
    work(run_of(path), [section(*runs)])
    assert exit_code(Store(path)) == code


class FakeCuda:
    """A device whose context can die: every wait then raises."""

    def __init__(self, monkeypatch):
        self.is_dead = False
        monkeypatch.setattr(torch.cuda, "synchronize", self.wait)
        zeros = torch.zeros

        def zeros_here(*shape, device):
            return zeros(*shape)

        monkeypatch.setattr(torch, "zeros", zeros_here)

    def wait(self, device=None):
        if self.is_dead:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def kill(self):
        """Launch a kernel that reads what is not there: nothing is raised before the next wait."""
        self.is_dead = True
        return Outcome()


def test_dead_context_ends_the_process_and_the_next_one_goes_on(path, monkeypatch):
    gpu, lines = FakeCuda(monkeypatch), []

    def start():
        gpu.is_dead = False  # a new process has a new context
        return work(run_of(path, CUDA, lines.append), [section(right, gpu.kill, right, fail, right)])

    supervise(path, start, lines.append)
    assert statuses(path) == ["right", "dead", "right", "raised", "right"]
    assert "then the context is gone: RuntimeError: CUDA error" in Store(path).steps["part: 1"]["words"]
    assert exit_code(Store(path)) == 4 and "    going on in a new process" in lines


WORKER = """
import os, signal, sys, time, torch
from pathlib import Path
from attnbias.report.runner import Outcome, Run, Step, work
from attnbias.report.store import Store

def crash():
    os.kill(os.getpid(), signal.SIGSEGV)

def hang():
    time.sleep(600)

def steps(run):
    for name, each in (("a", Outcome), ("crash", crash), ("b", Outcome), ("hang", hang), ("c", Outcome)):
        yield Step(f"part: {name}", each)

sys.exit(work(Run(Store(Path(sys.argv[1])), torch.device("cpu"), None, print), [steps]))
"""


def test_crash_and_hang_of_a_process_are_left_behind(path):
    lines = []
    command = [sys.executable, "-u", "-c", WORKER, str(path)]
    Store(path).save()
    begun = time.monotonic()
    subprocess.run([sys.executable, "-c", "import attnbias.report.runner"], check=True)
    patience = 2 + 4 * (time.monotonic() - begun)  # a start is no hang, however slow the machine is
    supervise(path, lambda: start_process(command, path, lines.append, patience), lines.append)
    found = Store(path).steps
    assert [x["status"] for x in found.values()] == ["right", "dead", "right", "dead", "right"]
    assert found["part: crash"]["words"] == f"the process ended with code {-signal.SIGSEGV}"
    assert found["part: hang"]["words"] == "it hung, or was ended by the system"
    assert "part: c ..." in lines and exit_code(Store(path)) == 4


def test_process_that_cannot_start_is_an_error(path):
    with pytest.raises(
        RuntimeError, match="the process of the report ended with code 7 before its first step"
    ):
        supervise(path, lambda: 7, print)


def test_device_that_always_dies_ends_the_report(path, monkeypatch):
    monkeypatch.setattr(runner, "MOST_PROCESSES", 3)
    lines = []

    def start():
        kept = Store(path)
        kept.begin(f"part: {len(kept.steps)}")
        return -11

    Store(path).save()
    supervise(path, start, lines.append)
    assert (
        statuses(path) == ["dead"] * 3 and lines[-1] == "ended after 3 processes: this device dies too often"
    )


# -- the file ---------------------------------------------------------------------------------------


def test_file_has_no_names_of_hosts_users_or_folders(path, monkeypatch):
    monkeypatch.setattr(store.platform, "node", lambda: "gpu-box.example.org")
    monkeypatch.setattr(store.getpass, "getuser", lambda: "alice")

    def tell():
        words = (
            "File /home/alice/.venv/lib/torch/nn.py on gpu-box, gpu-box.example.org: ~/x/y.py "
            r"C:\Users\alice\a.py /var/alice-7/b.cubin"
        )
        return Outcome(Status.WRONG, words, {"deep": ["alice", {"at": "/opt/a/b"}]})

    work(run_of(path), [section(tell)])
    text = gzip.decompress(path.read_bytes()).decode()
    for name in ("alice", "gpu-box", "example", "home", "Users", "/tmp", "/opt", "venv"):
        assert name not in text
    assert "<path>/nn.py on <host>" in text and "<path>/b.cubin" in text


def test_fractions_are_no_paths():
    kept = "2 x 4/1 heads, 100 MB/s, 3/4/5, sm_80/90/100, a/b"
    assert scrub(kept) == kept


def test_user_without_a_name_is_accepted(monkeypatch):
    def none():
        raise KeyError("getpwuid(): uid not found: 1000")

    monkeypatch.setattr(store.getpass, "getuser", none)
    assert scrub("words") == "words"


@pytest.mark.parametrize(
    ("kept", "words"),
    [
        (b"no gzip", "gpu.json.gz: it cannot be read; start anew with --fresh"),
        (gzip.compress(b'{"version": 0}'), "gpu.json.gz: it is of another version; start anew with --fresh"),
    ],
    ids=["no gzip", "old version"],  # compressed bytes hold the clock, and workers must agree on names
)
def test_unreadable_file_is_one_sentence(path, kept, words):
    path.parent.mkdir()
    path.write_bytes(kept)
    with pytest.raises(ValueError, match=words):
        Store(path)
    assert Store(path, fresh=True).steps == {}


def test_plain_json_is_written_too(tmp_path):
    kept = Store(tmp_path / "a.json")
    kept.end("part: 0", {"status": "right", "words": ""})
    assert json.loads((tmp_path / "a.json").read_text())["steps"]["part: 0"]["status"] == "right"
    assert os.listdir(tmp_path) == ["a.json"]
