"""``attnbias bench``: the files that a run writes, and what happens when a case fails."""

from __future__ import annotations

import json
import platform
from dataclasses import replace
from functools import partial

import pytest
import torch
from cases.fake_cuda import FakeCuda

from attnbias.benchmarks import __main__ as command
from attnbias.benchmarks.cases import tokens
from attnbias.benchmarks.measure import clocks, race, record, run, sweep, terminal, timing
from attnbias.benchmarks.measure.race import DEFAULT, OURS
from attnbias.benchmarks.peers.registry import PEERS, CannotRunError
from attnbias.op import dispatch


@pytest.fixture
def small(monkeypatch):
    """Reduce the benchmark to two small cases."""
    named = {"causal@96": lambda: tokens.causal(96), "knn@96": lambda: tokens.nearest(96)}
    monkeypatch.setattr(run, "cases_of", lambda device, is_quick: named)
    monkeypatch.setattr(command, "cases_of", lambda device, is_quick: named)
    monkeypatch.setattr(run, "QUICK_COMPILED", ())
    monkeypatch.setattr(run, "SWEPT", {"cpu": 128})
    monkeypatch.setattr(run, "LENGTHS", {"cpu": (128, 256)})
    monkeypatch.setattr(run, "QUICK_MATMUL", {"cpu": 64, "cuda": 64})
    monkeypatch.setattr(sweep, "QUICK_DENSITIES", (0.1, 1.0))
    monkeypatch.setattr(timing, "LEAST", 1e-4)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_bench_writes_table_json_plots_and_page(small, tmp_path, capsys):
    assert command.main(["--results", str(tmp_path), "--rounds", "2"]) == 0
    printed = capsys.readouterr().out
    assert "causal@96" in printed and "Against SDPA's quickest call with the same result, 4 cases" in printed
    (path,) = tmp_path.glob("*.json")
    found = record.load(path)
    assert found["is_whole"] and len(found["entries"]) == 4 and len(found["sweep"]) == 4
    entry = found["entries"][0]
    assert entry["sizes"]["keys"] == 96 and entry["bytes"]["attnbias"] > 0 and entry["fault"] == ""
    assert len(entry["ratios"]["SDPA"]) == 3 and "not installed" in entry["refused"]["flash-attn"]
    assert platform.node() not in path.read_text() and platform.node() not in path.name
    text = path.with_suffix(".html").read_text()
    assert "causal@96" in text and "static" in text and text.count("<svg") >= 4
    assert not [link for link in ("http://", "https://") if f"src='{link}" in text or f"href='{link}" in text]
    assert len(list(tmp_path.glob("*.png"))) == 3
    assert command.main(["--results", str(tmp_path), "--rounds", "1", "--compare", str(path)]) == 0
    assert "Now against" in capsys.readouterr().out


def test_interrupted_bench_keeps_the_results_so_far(small, tmp_path, capsys, monkeypatch):
    plain, calls = run.race, []

    def interrupted(*args, **kwargs):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return plain(*args, **kwargs)

    monkeypatch.setattr(run, "race", interrupted)
    assert command.main(["--results", str(tmp_path), "--rounds", "1"]) == 130
    (path,) = tmp_path.glob("*.json")
    found = record.load(path)
    assert not found["is_whole"] and [entry["case"] for entry in found["entries"]] == ["causal@96"] * 2
    assert "interrupted" in path.with_suffix(".html").read_text()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_bench_continues_after_a_case_that_raises(small, tmp_path, capsys, monkeypatch):
    """One exception ended the whole run, and nothing was saved."""
    plain, saved = tokens.Case.attend, []

    def attend(self, q, k, v):
        if self.name == "causal" and q.requires_grad and q.shape[1] > 1:  # all heads: it is timed
            raise RuntimeError("no such kernel\nat line 3")
        return plain(self, q, k, v)

    def make():
        raise OSError("no such points")

    def save(found, path):
        saved.append((len(found["entries"]), list(found["raised"])))
        record.save(found, path)

    known = {"lost@96": make, **run.cases_of("cpu", is_quick=True)}
    monkeypatch.setattr(run, "cases_of", lambda device, is_quick: known)
    monkeypatch.setattr(tokens.Case, "attend", attend)
    monkeypatch.setattr(command, "save", save)
    monkeypatch.setattr(run.sweep, "measure_lengths", lambda *given, **options: 1 / 0)
    assert command.main(["--results", str(tmp_path), "--rounds", "1"]) == 1
    error = "RuntimeError: no such kernel | at line 3"
    assert f"causal@96, forward and backward: raised {error}" in capsys.readouterr().out
    (path,) = tmp_path.glob("*.json")
    found = record.load(path)
    assert found["raised"] == {
        "lost@96": "OSError: no such points",
        "causal@96, forward and backward": error,
        "128 tokens": "ZeroDivisionError: division by zero",
        "256 tokens": "ZeroDivisionError: division by zero",
    }
    timed = {(entry["case"], entry["backward"]): bool(entry["seconds"]) for entry in found["entries"]}
    assert timed == {
        ("causal@96", False): True,
        ("causal@96", True): False,
        ("knn@96", False): True,
        ("knn@96", True): True,
    }
    assert found["is_whole"] and len(found["sweep"]) == 4
    lost, raised = ["lost@96"], ["lost@96", "causal@96, forward and backward"]
    assert saved[:3] == [(0, lost), (2, raised), (4, raised)]
    text = path.with_suffix(".html").read_text()
    assert "raised an error: no time" in text and error in text


@pytest.fixture
def gpu(small, monkeypatch):
    """Run the path of a GPU on CPU tensors: a fake torch.cuda, a driver that answers, slow Python."""
    found = FakeCuda(monkeypatch, timing)
    seen = {"sm_mhz": 1980, "slowed_by": ["idle", "power cap"]}
    for module in (run, clocks):
        monkeypatch.setattr(module, "clocks", lambda device: seen)
    monkeypatch.setattr(run, "raise_clocks", lambda device: found.log.append("raise"))
    monkeypatch.setattr(command, "device_of", lambda device: device)
    monkeypatch.setattr(race, "is_on_gpu", lambda case: True)
    plain = tokens.Case.attend

    def attend(case, q, k, v):
        found.call(300e-6, 100e-6)()
        return plain(case, q, k, v)

    def by_default(case, q, k, v):
        found.call(300e-6, 200e-6)()
        return plain(case, q, k, v)

    monkeypatch.setattr(tokens.Case, "attend", attend)
    monkeypatch.setattr(tokens.Case, "attend_by_default", by_default)
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b: (found.call(1e-6, 1e-3)(), mm(a, b))[1])
    sdpa = PEERS["SDPA"]

    def peer(case):
        call = sdpa(case)
        return lambda q, k, v: (found.call(20e-6, 400e-6)(), call(q, k, v))[1]

    monkeypatch.setitem(PEERS, "SDPA", peer)
    for name in PEERS:
        if name != "SDPA":
            monkeypatch.setitem(
                PEERS, name, partial(_fails_in_backward, found) if name == "SDPA, mask" else _is_absent
            )
    return found


class OnlyForward(torch.autograd.Function):
    """A peer whose backward pass needs more than there is."""

    @staticmethod
    def forward(ctx, q, k, v):
        causal = tokens.causal(q.shape[2]).relation.dense(q.shape[2], q.shape[2])
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=causal)

    @staticmethod
    def backward(ctx, grad):
        raise torch.OutOfMemoryError("CUDA out of memory")


def _fails_in_backward(gpu, case):
    return lambda q, k, v: (gpu.call(20e-6, 900e-6)(), OnlyForward.apply(q, k, v))[1]


def _is_absent(case):
    raise CannotRunError("is not installed")


def test_bench_on_a_gpu_tells_device_and_eager_times_apart(gpu, tmp_path, capsys):
    arguments = ["--results", str(tmp_path), "--rounds", "2", "--device", "cuda", "--case", "causal"]
    assert command.main(arguments) == 0
    (path,) = tmp_path.glob("*.json")
    forward, both = record.load(path)["entries"]
    assert forward["seconds"][OURS][0] == pytest.approx(100e-6, rel=1e-3)
    assert forward["eager"][OURS][0] == pytest.approx(300e-6, rel=0.1)
    assert forward["seconds"][DEFAULT][0] == pytest.approx(200e-6, rel=1e-3)
    assert forward["ratios"]["SDPA"][0] == pytest.approx(4, rel=1e-3)
    assert record.eager_ratio(forward, "SDPA") == pytest.approx(4 / 3, rel=0.1)
    assert DEFAULT not in record.others(forward) and record.quickest(forward)[0] == "SDPA"
    assert both["refused"]["SDPA, mask"] == "failed: OutOfMemoryError: CUDA out of memory"
    assert "SDPA, mask" in forward["seconds"] and "SDPA, mask" not in both["seconds"]
    assert forward["clocks"] == both["clocks"] == [{"sm_mhz": 1980, "slowed_by": ["idle", "power cap"]}] * 2
    assert gpu.log[0] == "raise" and "settle" in gpu.log and "free" in gpu.log
    printed = capsys.readouterr().out
    assert (
        "Eager: the wall time" in printed and "causal@96, forward: the GPU was slowed by power cap" in printed
    )
    assert "SDPA, mask: failed: OutOfMemoryError" in printed
    page = path.with_suffix(".html").read_text()
    assert "<br>eager 30" in page and "by default " in page and "; eager 1.3" in page
    assert "the GPU was slowed by power cap" in page and "replayed from a CUDA graph" in page


def test_gpu_run_times_compiled_peers_only_in_the_base_shape():
    plan = run.Plan("cuda")
    base, other = plan.peers("causal@8192 D=64 16/16"), plan.peers("causal@8192 D=256")
    assert {"Flex", "Flex FLASH", "FA4", "cuDNN Flex", DEFAULT} <= set(base)
    assert set(base) - set(other) == {"Flex", "Flex FLASH", "FA4", "cuDNN Flex"}
    assert "Flex max-autotune" not in base and "Flex max-autotune" in replace(plan, is_quick=False).peers("x")
    assert DEFAULT not in run.Plan("cpu").peers("causal@2048")
    assert "Flex" in run.Plan("cpu").peers("causal@2048") and "Flex" not in run.Plan("cpu").peers("full@2048")


def test_yardstick_is_not_bound_by_its_launch():
    """A product of 1024 takes 5 us on a GPU: "of torch.mm" compared with the launch."""
    assert run.QUICK_MATMUL["cuda"] >= 8192 and run.QUICK_MATMUL["cpu"] == 1024


def test_backend_is_that_of_what_was_timed(monkeypatch):
    """A layout is timed, so the entry named sdpa for causal, which runs only relations."""
    asked = []

    def choose(problem, name, among=None):
        asked.append((problem.relation, problem.layout))
        return "triton" if problem.layout is not None else "sdpa"

    monkeypatch.setattr(dispatch, "choose", choose)
    case = tokens.causal(96)
    entry = record.entry_of("causal@96", case, backward=False, build=timing.Spread(1.0, 1.0, 1.0))
    assert entry["backend"] == "triton" and entry["default"] == "sdpa"
    assert asked[0][1] is case.layout and asked[1] == (case.relation, None)


def test_file_of_an_earlier_version_can_be_compared(tmp_path):
    entry = record.entry_of(
        "causal@96", tokens.causal(96), backward=False, build=timing.Spread(1.0, 1.0, 1.0)
    )
    found = record.start({"device": "x"})
    found["entries"] = [entry]
    for name in ("default", "eager", "notes", "clocks"):
        del entry[name]
    del found["layouts_anew"]
    record.save(found, tmp_path / "old.json")
    (read,) = record.load(tmp_path / "old.json")["entries"]
    assert read["eager"] == read["notes"] == {} and read["clocks"] == [] and read["default"] == ""
    assert [each.name for each in tmp_path.iterdir()] == ["old.json"]


def test_file_survives_an_interruption_while_it_is_written(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    record.save(record.start({"device": "first"}), path)

    def stop(source, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(record.os, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        record.save(record.start({"device": "second"}), path)
    assert record.load(path)["machine"] == {"device": "first"}


def test_wrong_result_has_no_time(small, tmp_path, capsys, monkeypatch):
    plain = tokens.Case.attend
    monkeypatch.setattr(tokens.Case, "attend", lambda self, q, k, v: plain(self, q, k, v) * 1.01)
    assert command.main(["--results", str(tmp_path), "--rounds", "1", "--case", "knn"]) == 1
    printed = capsys.readouterr().out
    assert "wrong result: no time" in printed and "error" in printed
    found = record.load(next(tmp_path.glob("*.json")))
    assert all(entry["fault"] and not entry["seconds"] for entry in found["entries"])
    assert "wrong result: no time" in next(tmp_path.glob("*.html")).read_text()


def test_bench_runs_without_matplotlib_and_rich(small, tmp_path, capsys, monkeypatch):
    for module in (command, terminal):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert command.main(["--results", str(tmp_path), "--rounds", "1", "--case", "causal"]) == 0
    printed = capsys.readouterr().out
    assert "no plots: matplotlib is not installed" in printed and "causal@96" in printed
    assert not list(tmp_path.glob("*.png"))
    assert "Every case" in next(tmp_path.glob("*.html")).read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--case", "nothing"], "--case: wanted part of a case's name, got 'nothing'; there are"),
        (["--backend", "cuda"], "--backend: wanted one of"),
        (["--device", "tpu"], "--device: wanted cpu"),
        (["--device", "meta"], "--device: wanted cpu or cuda, got 'meta'"),
        (["--device", "cuda:7"], "--device: 'cuda:7' is not there: torch sees"),
        (["--threads", "0"], "--threads: wanted at least 1, got 0"),
        (["--rounds", "0"], "--rounds: wanted at least 1, got 0"),
        (["--compare", "none.json"], "--compare: cannot read none.json"),
        (["gate", "--level", "mmx"], "isa: wanted one of"),
    ],
)
def test_bad_input_prints_an_error_and_exits_with_2(capsys, arguments, words):
    assert command.main(arguments) == 2
    assert words in capsys.readouterr().err


def test_file_that_is_not_a_result_is_refused(tmp_path):
    (tmp_path / "x.json").write_text("[")
    with pytest.raises(ValueError, match="is not JSON"):
        record.load(tmp_path / "x.json")
    (tmp_path / "x.json").write_text(json.dumps({"version": 0}))
    with pytest.raises(ValueError, match="is not a result of this version"):
        record.load(tmp_path / "x.json")
