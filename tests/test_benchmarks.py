"""The benchmark's parts: cases, peers, timers, the record, tables and the page."""

from __future__ import annotations

import itertools
import json
import platform
import sys
import types
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import attnbias as ab
from attnbias.benchmarks import __main__ as command
from attnbias.benchmarks import (
    attention,
    cases,
    catalog,
    levels,
    libraries,
    page,
    peers,
    report,
    results,
    run,
    sweep,
    sweep_gate,
    tables,
    timing,
)

SMALL = {
    "full": lambda: cases.full(96),
    "cross": lambda: cases.full(96, 32),
    "causal": lambda: cases.causal(96),
    "window": lambda: cases.window(96, width=16),
    "documents": lambda: cases.documents(96, 3),
    "prefix": lambda: cases.prefix(96),
    "bipartite": lambda: cases.bipartite(96),
    "chunks": lambda: replace(cases.chunks(96), relation=ab.Chunks(32), chunk=32, mask_mod=None),
    "dilated": lambda: cases.dilated(96),
    "bigbird": lambda: cases.bigbird(256),
    "grid 2": lambda: cases.neighborhood((8, 12), 2),
    "grid 3": lambda: cases.neighborhood((4, 5, 6), 1),
    "knn": lambda: cases.nearest(96),
    "decoding": lambda: cases.decoding(96),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("name", SMALL)
def test_a_case_says_the_same_to_every_peer(name):
    """Its mask_mod and every peer in plain torch agree with the relation."""
    case = SMALL[name]()
    assert case.fault == ""
    if case.mask_mod is not None:
        q, k = torch.arange(case.tokens - case.q_len, case.tokens)[:, None], torch.arange(case.tokens)
        zero = torch.zeros((), dtype=torch.long)
        dense = case.relation.dense(case.q_len, case.tokens, "end")
        assert torch.equal(case.mask_mod(zero, zero, q, k).expand_as(dense), dense)
    names = [peer for peer in peers.PEERS if not peer.startswith("Flex")]
    found = attention.race(case, names, backward=False, rounds=1)
    assert not [why for why in found.refused.values() if "other results" in why or "failed" in why]
    assert len(found.ratios) >= 1


def test_a_peer_with_another_relation_is_not_timed(monkeypatch):
    monkeypatch.setitem(peers.PEERS, "SDPA", lambda case: sdpa)
    found = attention.race(cases.causal(96), ["SDPA"], backward=False, rounds=1)
    assert found.refused == {"SDPA": "gives other results, so it is not timed"} and not found.ratios


def test_a_peer_that_fails_says_how(monkeypatch):
    def fail(case):
        raise RuntimeError("no such kernel\nand a trace")

    monkeypatch.setitem(peers.PEERS, "SDPA", fail)
    found = attention.race(cases.causal(96), ["SDPA"], backward=False, rounds=1)
    assert found.refused == {"SDPA": "failed: RuntimeError: no such kernel | and a trace"}


def test_a_peer_whose_backward_pass_fails_costs_no_other_figure(monkeypatch):
    """Peers ran forward alone before they were timed, so one failing backward pass ended the benchmark."""

    class OnlyForward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            return sdpa(q, k, v, is_causal=True)

        @staticmethod
        def backward(ctx, d_out):
            raise RuntimeError("out of shared memory: only 99 KB")

    monkeypatch.setitem(peers.PEERS, "SDPA, mask", lambda case: OnlyForward.apply)
    found = attention.race(
        cases.causal(96), ["SDPA, mask", "SDPA"], backward=True, rounds=1, with_memory=True
    )
    why = "failed: RuntimeError: out of shared memory: only 99 KB"
    assert found.refused == {"SDPA, mask": why}
    assert found.times.keys() == found.bytes.keys() == {"attnbias", "SDPA"}
    assert not tables._is_plain(why)  # it is printed


def test_gpu_cases_have_the_known_shapes():
    named = cases.gpu_cases("cpu")
    assert {"causal@32768 D=128 16/4", "window@2048 D=64 16/16", "grid@128x128 D=64"} <= named.keys()
    case = named["causal@8192 D=128 16/4"]()
    assert (case.batch, case.heads, case.key_heads, case.size, case.dtype) == (4, 16, 4, 128, torch.bfloat16)
    quick = catalog.cases_of("cuda", is_quick=True)
    assert "causal@8192 D=64 16/16" in quick and "causal@2048 D=64 16/16" not in quick and len(quick) < 20


# -- libraries that are not installed here, by stand-ins that compute what these document --------------


def _fake_flash():
    def flash_attn_func(q, k, v, causal=False, window_size=(-1, -1)):
        rel = ab.Causal() if causal else ab.Full()
        if window_size[0] >= 0:
            rel = rel & ab.Window(before=window_size[0], after=max(window_size[1], 0))
        return ab.attention(*(x.transpose(1, 2) for x in (q, k, v)), rel).transpose(1, 2)

    def flash_attn_varlen_func(q, k, v, starts_q, starts_k, most_q, most_k, causal=False):
        assert starts_q.dtype == torch.int32 and most_q == int(starts_q.diff().max())
        rel = ab.Documents.from_cu_seqlens(starts_q) & ab.Causal()
        return ab.attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), rel)[0].transpose(0, 1)

    return types.SimpleNamespace(
        flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func
    )


def _fake_xformers():
    class Bias:
        def __init__(self, *given):
            self.relation = ab.Window(before=given[0] - 1) if given else ab.Causal()

        @classmethod
        def from_seqlens(cls, lengths):
            made = cls()
            made.relation = ab.Documents.from_lengths(lengths) & ab.Causal()
            return made

    def memory_efficient_attention(q, k, v, attn_bias=None):
        rel = ab.Full() if attn_bias is None else attn_bias.relation
        return ab.attention(*(x.transpose(1, 2) for x in (q, k, v)), rel).transpose(1, 2)

    names = (
        "BlockDiagonalCausalMask",
        "LowerTriangularFromBottomRightLocalAttentionMask",
        "LowerTriangularMask",
    )
    biases = types.SimpleNamespace(**dict.fromkeys(names, Bias))
    ops = types.SimpleNamespace(memory_efficient_attention=memory_efficient_attention)
    return {
        "xformers": types.SimpleNamespace(),
        "xformers.ops": ops,
        "xformers.ops.fmha": types.SimpleNamespace(),
        "xformers.ops.fmha.attn_bias": biases,
    }


def _fake_natten():
    def neighbours(q, k, v, kernel_size):
        grid = tuple(q.shape[1:-2])
        rel = ab.Neighborhood(grid, kernel_size[0] // 2, border="clamp")
        flat = (x.flatten(1, -3).transpose(1, 2) for x in (q, k, v))
        return ab.attention(*flat, rel).transpose(1, 2).reshape(q.shape)

    return types.SimpleNamespace(functional=types.SimpleNamespace(na2d=neighbours, na3d=neighbours))


def _fake_flashinfer():
    def single_prefill_with_kv_cache(q, k, v, causal, window_left):
        rel = ab.Causal() if causal else ab.Full()
        if window_left >= 0:
            rel = rel & ab.Window(before=window_left)
        out = ab.attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), rel, q_start="end")
        return out[0].transpose(0, 1)

    return types.SimpleNamespace(single_prefill_with_kv_cache=single_prefill_with_kv_cache)


@pytest.mark.parametrize(
    ("peer", "names"),
    [
        ("flash-attn", ("full", "causal", "window", "documents")),
        ("xFormers", ("full", "causal", "window", "documents")),
        ("NATTEN", ("grid 2", "grid 3")),
        ("flashinfer", ("full", "causal", "window")),
    ],
)
def test_libraries_are_called_as_they_document(monkeypatch, peer, names):
    fakes = {"flash_attn": _fake_flash(), "natten": _fake_natten(), "flashinfer": _fake_flashinfer()}
    for name, fake in {**fakes, **_fake_xformers()}.items():
        monkeypatch.setitem(sys.modules, name, fake)
    for name in names:
        case = replace(SMALL[name](), dtype=torch.bfloat16)
        found = attention.race(case, [peer], backward=False, rounds=1)
        assert found.refused == {peer: "runs on CUDA devices alone"}
        with monkeypatch.context() as patch:  # as if the tensors were on a GPU
            patch.setattr(libraries, "is_on_gpu", lambda case: True)
            inputs = case.inputs()
            out = peers.PEERS[peer](case)(*inputs[:3])
            assert (out - case.attend(*inputs[:3])).norm() < 0.02 * out.norm(), name
            with pytest.raises(libraries.CannotRunError, match="alone"):
                peers.PEERS[peer](SMALL["knn"]())


# -- timing ----------------------------------------------------------------------------------------


def test_cuda_samples_are_between_events_after_a_flush(monkeypatch):
    """On stand-ins for torch.cuda: each call has its own events, between which nothing else happens."""
    order, clock = [], itertools.count(0.0, 5.0)

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            order.append("event")
            self.at = next(clock)

        def elapsed_time(self, end):
            return end.at - self.at

    class Flushed:
        def zero_(self):
            order.append("flush")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: order.append("wait"))
    monkeypatch.setattr(torch.cuda, "device", lambda device: timing.using_threads(1))
    timer = timing.CudaTimer.__new__(timing.CudaTimer)
    timer.device, timer.flushed = torch.device("cpu"), Flushed()
    assert timer.sample(lambda: order.append("call")) == 5e-3
    assert order == ["flush", "event", "call", "event"] * timing.GPU_CALLS + ["wait"]
    order.clear()
    timer.warm_up(lambda: order.append("call"))
    assert order == ["call"] * timing.GPU_WARM_UP + ["wait"]


def test_peak_bytes_counts_what_is_held_at_once():
    x = torch.zeros(1000)

    def call():
        y = x + 1
        z = y + 1
        del y
        return z * 2

    assert 8000 <= timing.CpuTimer().peak_bytes(call) < 9000


def test_a_sample_has_a_call_though_its_time_is_over_before_the_first(monkeypatch):
    """On a busy machine the clock could pass the limit before any call, and seconds were divided by zero."""
    timer = timing.CpuTimer()
    monkeypatch.setattr(timer, "clock", itertools.count(0.0, 2 * timing.LEAST).__next__)
    calls = []
    assert timer.sample(lambda: calls.append("call")) == 2 * timing.LEAST and calls == ["call"]


def test_clocks_by_threads():
    assert "CPU time" in timing.timer_of(torch.device("cpu")).words
    assert timing.timer_of(torch.device("cpu"), 2).words == "wall time of 2 threads"


# -- a run -----------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch):
    """A benchmark of two small cases."""
    named = {"causal@96": lambda: cases.causal(96), "knn@96": lambda: cases.nearest(96)}
    monkeypatch.setattr(run, "cases_of", lambda device, is_quick: named)
    monkeypatch.setattr(command, "cases_of", lambda device, is_quick: named)
    monkeypatch.setattr(run, "QUICK_FLEX", ())
    monkeypatch.setattr(run, "SWEPT", {"cpu": 128})
    monkeypatch.setattr(run, "LENGTHS", {"cpu": (128, 256)})
    monkeypatch.setattr(run, "QUICK_MATMUL", 64)
    monkeypatch.setattr(sweep, "QUICK_DENSITIES", (0.1, 1.0))
    monkeypatch.setattr(timing, "LEAST", 1e-4)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_bench_leaves_table_json_plots_and_page(small, tmp_path, capsys):
    assert command.main(["--results", str(tmp_path), "--rounds", "2"]) == 0
    printed = capsys.readouterr().out
    assert "causal@96" in printed and "Beside SDPA's quickest call with the same result, 4 cases" in printed
    (path,) = tmp_path.glob("*.json")
    found = results.load(path)
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
    assert "Now beside" in capsys.readouterr().out


def test_bench_breaks_off_with_the_results_so_far(small, tmp_path, capsys, monkeypatch):
    plain, calls = run.race, []

    def race(*args, **kwargs):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return plain(*args, **kwargs)

    monkeypatch.setattr(run, "race", race)
    assert command.main(["--results", str(tmp_path), "--rounds", "1"]) == 130
    (path,) = tmp_path.glob("*.json")
    found = results.load(path)
    assert not found["is_whole"] and [entry["case"] for entry in found["entries"]] == ["causal@96"] * 2
    assert "broken off" in path.with_suffix(".html").read_text()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_bench_goes_on_after_a_case_that_raises(small, tmp_path, capsys, monkeypatch):
    """One exception ended the whole run, and nothing of it was saved."""
    plain, saved = cases.Case.attend, []

    def attend(self, q, k, v):
        if self.name == "causal" and q.requires_grad and q.shape[1] > 1:  # all heads: it is timed
            raise RuntimeError("no such kernel\nat line 3")
        return plain(self, q, k, v)

    def make():
        raise OSError("no such points")

    def save(found, path):
        saved.append((len(found["entries"]), list(found["raised"])))
        results.save(found, path)

    known = {"lost@96": make, **run.cases_of("cpu", is_quick=True)}
    monkeypatch.setattr(run, "cases_of", lambda device, is_quick: known)
    monkeypatch.setattr(cases.Case, "attend", attend)
    monkeypatch.setattr(command, "save", save)
    monkeypatch.setattr(run.sweep, "measure_lengths", lambda *given, **options: 1 / 0)
    assert command.main(["--results", str(tmp_path), "--rounds", "1"]) == 1
    error = "RuntimeError: no such kernel | at line 3"
    assert f"causal@96, forward and backward: raised {error}" in capsys.readouterr().out
    (path,) = tmp_path.glob("*.json")
    found = results.load(path)
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


def test_no_time_for_a_wrong_result(small, tmp_path, capsys, monkeypatch):
    plain = cases.Case.attend
    monkeypatch.setattr(cases.Case, "attend", lambda self, q, k, v: plain(self, q, k, v) * 1.01)
    assert command.main(["--results", str(tmp_path), "--rounds", "1", "--case", "knn"]) == 1
    printed = capsys.readouterr().out
    assert "wrong result: no time" in printed and "error" in printed
    found = results.load(next(tmp_path.glob("*.json")))
    assert all(entry["fault"] and not entry["seconds"] for entry in found["entries"])
    assert "wrong result: no time" in next(tmp_path.glob("*.html")).read_text()


def test_without_matplotlib_and_rich_the_rest_runs(small, tmp_path, capsys, monkeypatch):
    for module in (command, report):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert command.main(["--results", str(tmp_path), "--rounds", "1", "--case", "causal"]) == 0
    printed = capsys.readouterr().out
    assert "no plots: matplotlib is not installed" in printed and "causal@96" in printed
    assert not list(tmp_path.glob("*.png"))
    assert "Every case" in next(tmp_path.glob("*.html")).read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--case", "nothing"], "--case: no case holds 'nothing'; there are"),
        (["--backend", "cuda"], "--backend: wanted one of"),
        (["--device", "tpu"], "--device: wanted cpu"),
        (["--device", "meta"], "--device: wanted cpu or cuda, got 'meta'"),
        (["--device", "cuda:7"], "--device: 'cuda:7' is not there: torch sees"),
        (["--threads", "0"], "--threads: wanted at least 1, got 0"),
        (["--rounds", "0"], "--rounds: wanted at least 1, got 0"),
        (["--compare", "none.json"], "--compare: cannot read none.json"),
        (["gate", "--level", "mmx"], "level: wanted one of"),
    ],
)
def test_bad_input_is_a_sentence_and_exit_code_2(capsys, arguments, words):
    assert command.main(arguments) == 2
    assert words in capsys.readouterr().err


def test_a_file_that_is_no_result_is_refused(tmp_path):
    (tmp_path / "x.json").write_text("[")
    with pytest.raises(ValueError, match="is not JSON"):
        results.load(tmp_path / "x.json")
    (tmp_path / "x.json").write_text(json.dumps({"version": 0}))
    with pytest.raises(ValueError, match="is not a result of this version"):
        results.load(tmp_path / "x.json")


# -- what is said ----------------------------------------------------------------------------------


def point(density, dense, tiles=1.0, edges=2.0):
    ratios = {"tiles": tiles, "edges": edges, "SDPA, mask": 2 * dense, "SDPA, all pairs": dense}
    spread = {name: [ratio] * 3 for name, ratio in ratios.items()}
    return {
        "structure": "random pairs",
        "backward": False,
        "tokens": 2048,
        "density": density,
        "chosen": "tiles",
        "seconds": {"auto": [1.0] * 3},
        "ratios": spread,
    }


def test_crossover_lies_between_the_points_around_it():
    assert sweep.crossover([point(0.01, 10.0), point(1.0, 0.1)]) == pytest.approx(0.1)
    assert sweep.crossover([point(0.01, 10.0), point(1.0, 1.1)]) is None
    assert sweep.crossover([point(1.0, 0.5), point(0.25, 2.0)]) == pytest.approx(0.5)


def test_regret_is_against_the_better_form():
    assert sweep.regret(point(0.1, 1.0, tiles=1.0, edges=0.8)) == pytest.approx(1.25)
    assert sweep.regret(point(0.1, 1.0, tiles=1.2, edges=1.1)) == 1.0


def test_the_gate_of_the_sweep_finds_what_is_slower(monkeypatch):
    monkeypatch.setattr(sweep_gate, "STRUCTURES", {"random pairs": None})
    monkeypatch.setattr(sweep_gate, "QUICK_DENSITIES", (0.1, 1.0))
    for dense, edges, want in ((2.0, 1.1, [True] * 4), (0.4, 0.9, [False] * 4)):
        made = lambda s, density, *_, d=dense, e=edges, **__: point(density, d, edges=e)  # noqa: E731
        monkeypatch.setattr(sweep_gate, "measure_density", made)
        found = list(sweep_gate.lines(1))
        assert [held for _, held in found] == want
        assert all(len(cells) == 7 for cells, _ in found)


def test_the_gate_of_levels_judges_each_score(monkeypatch):
    """Four limits and a floor; the formula has the same results, or nothing would be timed."""
    monkeypatch.setattr(levels, "TOKENS", 128)
    monkeypatch.setattr(levels, "FORMULA_TOKENS", 128)
    monkeypatch.setattr(levels, "over_plain", lambda *_, backward: timing.Spread(0.7, 0.7, 0.7))
    found = list(levels.lines(1))
    assert [held for _, held in found[:4]] == [True, False, True, True]
    assert [cells[-1] for cells, _ in found[:2]] == ["ok", "above limit"]
    assert found[4][0][2] == "formula" and found[4][0][3] == "10"
    monkeypatch.setattr(levels, "by_formula", lambda q, k, v, ranks: v)
    with pytest.raises(AssertionError, match="not close"):
        levels.over_formula(cases.causal(128), (8,) * 8, 1)


def test_verdicts_name_what_is_slower():
    found = results.start({"device": "x"})
    found["sweep"] = [point(0.01, 10.0), point(1.0, 0.4, edges=0.5)]
    (line,) = tables.verdicts(found)
    assert "takes 2.00 of the time" in line and "at 100.0%" in line and "from 73% on with a mask" in line


def test_tiles_are_drawn_as_runs():
    drawn = page.tiles_svg("##.\n.+e")
    assert "viewBox='0 0 3 2'" in drawn
    assert "M0 0h2v1h-2z" in drawn and "M1 1h1v1h-1z" in drawn and "M2 1h1v1h-1z" in drawn
    assert drawn.count("<path") == 3


def test_the_static_table_has_a_figure_for_every_loop():
    rows = page.static_rows()
    assert len(rows) == 6 and all(0.2 < float(cell) < 2 for row in rows for cell in row[1:])


def test_bytes_and_times_have_units():
    assert report.size(512) == "512 B" and report.size(3 << 20) == "3 MiB" and report.size(5 << 30) == "5 GiB"
    assert report.time(2e-6) == "2 us" and report.time(0.25) == "250 ms" and report.time(2) == "2 s"
