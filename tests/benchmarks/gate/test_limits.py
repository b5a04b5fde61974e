"""The gate's limits on density and on multi-level scores, and the floors of pairs of bfloat16."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from cases.benchmarks import point

from attnbias.benchmarks.cases import tokens
from attnbias.benchmarks.gate import density, level_costs, lines, pairs
from attnbias.benchmarks.measure import terminal, timing
from attnbias.benchmarks.measure.timing import Spread


def test_density_gate_finds_slow_points(monkeypatch):
    monkeypatch.setattr(density, "STRUCTURES", {"random pairs": None})
    monkeypatch.setattr(density, "QUICK_DENSITIES", (0.1, 1.0))
    for dense, edges, want in ((2.0, 1.1, [True] * 4), (0.4, 0.9, [False] * 4)):
        made = lambda s, density, *_, d=dense, e=edges, **__: point(density, d, edges=e)  # noqa: E731
        monkeypatch.setattr(density, "measure_density", made)
        found = list(density.lines(1))
        assert [held for _, held in found] == want
        assert all(len(cells) == 7 for cells, _ in found)


def test_level_gate_judges_each_score(monkeypatch):
    """Four limits and a floor; nothing is timed unless the formula gives the same results."""
    monkeypatch.setattr(level_costs, "TOKENS", 128)
    monkeypatch.setattr(level_costs, "FORMULA_TOKENS", 128)
    monkeypatch.setattr(level_costs, "over_plain", lambda *_, backward: timing.Spread(0.7, 0.7, 0.7))
    found = list(level_costs.lines(1))
    assert [held for _, held in found[:4]] == [True, False, True, True]
    assert [cells[-1] for cells, _ in found[:2]] == ["ok", "above limit"]
    assert found[4][0][2] == "formula" and found[4][0][3] == "10"
    monkeypatch.setattr(level_costs, "by_formula", lambda q, k, v, ranks: v)
    with pytest.raises(AssertionError, match="out: error"):
        level_costs.over_formula(tokens.causal(128), (8,) * 8, 1)


def test_gate_of_pairs_judges_every_peer_at_its_level_only(monkeypatch):
    floors = list(pairs.floors())
    assert len(floors) == 12 and sum(len(floor.peers) for floor in floors) == 20
    small = pairs.Floor(tokens.causal(64), False, {pairs.FLOAT32: (1.5, 1.8), "SDPA": (2.0, 0)})
    spread = timing.Spread(1.6, 1.6, 1.6)
    monkeypatch.setattr(pairs, "floors", lambda: iter([small]))
    monkeypatch.setattr(pairs, "over_float32", lambda *_, backward: spread)
    monkeypatch.setattr(pairs, "race", lambda *_, **__: SimpleNamespace(ratios={"SDPA": spread}))
    monkeypatch.setattr(pairs.cpu, "isa", lambda: pairs.LEVEL)
    found = list(pairs.lines(1))
    assert [(cells[2], cells[-1], held) for cells, held in found] == [
        ("float32", "ok", True),
        ("SDPA", "below floor", False),
    ]
    monkeypatch.setattr(pairs.cpu, "isa", lambda: "avx512")
    assert not list(pairs.lines(1))


def test_bfloat16_is_timed_over_float32_of_the_same_case(monkeypatch):
    drawn = []
    monkeypatch.setattr(pairs, "steps", lambda attend, inputs, backward: drawn.append(inputs[0].dtype))
    monkeypatch.setattr(pairs, "interleave", lambda functions, rounds: [[3.0, 6.0], [2.0, 4.0]])
    ratio = pairs.over_float32(tokens.causal(64, dtype=torch.bfloat16), 2, backward=True)
    assert drawn == [torch.float32, torch.bfloat16] and ratio == (1.5, 1.5, 1.5)


def test_summary_names_what_is_below_its_floor():
    slow, ok = Spread(0.9, 0.8, 1.0), Spread(2.0, 1.9, 2.1)
    found = [
        lines.at_least("causal@2048", "forward", "SDPA", 1.25, slow, 1.6),
        lines.at_least("full@2048", "forward", "SDPA", 1.05, ok),
        lines.at_most("time per token", "forward", 1.15, ok),
    ]
    assert lines.summary(found).splitlines() == [
        "1 held, 2 below floor",
        f"  causal@2048, forward, SDPA: {terminal.ratio(slow)}, wanted 1.25",
        f"  time per token, forward: {terminal.ratio(ok)}, wanted <= 1.15",
    ]
