"""``attnbias bench``: the files that a run writes, and what happens when a case fails."""

from __future__ import annotations

import json
import platform

import pytest

from attnbias.benchmarks import __main__ as command
from attnbias.benchmarks.cases import tokens
from attnbias.benchmarks.measure import record, run, sweep, terminal, timing


@pytest.fixture
def small(monkeypatch):
    """Reduce the benchmark to two small cases."""
    named = {"causal@96": lambda: tokens.causal(96), "knn@96": lambda: tokens.nearest(96)}
    monkeypatch.setattr(run, "cases_of", lambda device, is_quick: named)
    monkeypatch.setattr(command, "cases_of", lambda device, is_quick: named)
    monkeypatch.setattr(run, "QUICK_FLEX", ())
    monkeypatch.setattr(run, "SWEPT", {"cpu": 128})
    monkeypatch.setattr(run, "LENGTHS", {"cpu": (128, 256)})
    monkeypatch.setattr(run, "QUICK_MATMUL", 64)
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

    def race(*args, **kwargs):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return plain(*args, **kwargs)

    monkeypatch.setattr(run, "race", race)
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
