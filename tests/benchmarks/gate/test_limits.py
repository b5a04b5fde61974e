"""The gate's limits on density and on multi-level scores."""

from __future__ import annotations

import pytest
from cases.benchmarks import point

from attnbias.benchmarks.cases import tokens
from attnbias.benchmarks.gate import density, level_costs
from attnbias.benchmarks.measure import timing


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
