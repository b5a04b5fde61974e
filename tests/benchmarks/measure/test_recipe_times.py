"""The tables of recipes in ``attnbias bench layouts``."""

from __future__ import annotations

import pytest
import torch

from attnbias import recipes
from attnbias.benchmarks.cases.recipes import PATTERNS, Pattern
from attnbias.benchmarks.measure import recipe_times, timing


def test_every_recipe_is_timed():
    assert sorted(PATTERNS) == sorted(recipes.RECIPES)


@pytest.mark.parametrize("name", PATTERNS)
def test_mask_has_the_pairs_of_the_recipe(name):
    PATTERNS[name](2_048).check()


def test_mask_with_other_pairs_is_found():
    wrong = Pattern(recipes.prefix_lm(3), 8, 8, lambda b, h, q, k: (k < 4) | (k <= q))
    with pytest.raises(AssertionError, match="the mask_mod has other pairs"):
        wrong.check()


def test_tables_have_a_row_for_each_recipe(monkeypatch, capsys):
    few = {name: PATTERNS[name] for name in ("streaming", "dflash")}
    monkeypatch.setattr(recipe_times, "PATTERNS", few)
    monkeypatch.setattr(recipe_times, "TOKENS", 4_096)
    monkeypatch.setattr(timing, "LEAST", 1e-4)
    recipe_times.run(2_048, rounds=2)
    printed = capsys.readouterr().out
    assert "Layouts of recipes, 4,096 tokens" in printed and "2,048 x 4,096" in printed
    assert "The same pairs by create_block_mask, 2,048 tokens" in printed
    assert printed.count("dflash") == printed.count("streaming") == 2


def test_peak_memory_of_a_call_is_seen():
    if not recipe_times.PEAK.exists():
        pytest.skip("the system does not report it")
    used = recipe_times.added_bytes(lambda: torch.ones(1 << 24))
    assert used is not None and 0.9 * (1 << 26) < used < 2 * (1 << 26)


def test_slow_functions_are_sampled_once(monkeypatch):
    monkeypatch.setattr(recipe_times, "PATIENCE", 0.0001)
    assert [len(times) for times in recipe_times.sample_in_turn([lambda: sum(range(100_000))] * 2, 9)] == [
        1,
        1,
    ]
