"""Crossover and regret of a sweep over density."""

from __future__ import annotations

import pytest
from cases.benchmarks import point

from attnbias.benchmarks.measure import sweep


def test_crossover_lies_between_the_points_around_it():
    assert sweep.crossover([point(0.01, 10.0), point(1.0, 0.1)]) == pytest.approx(0.1)
    assert sweep.crossover([point(0.01, 10.0), point(1.0, 1.1)]) is None
    assert sweep.crossover([point(1.0, 0.5), point(0.25, 2.0)]) == pytest.approx(0.5)


def test_regret_is_against_the_better_form():
    assert sweep.regret(point(0.1, 1.0, tiles=1.0, edges=0.8)) == pytest.approx(1.25)
    assert sweep.regret(point(0.1, 1.0, tiles=1.2, edges=1.1)) == 1.0
