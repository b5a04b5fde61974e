"""Attention over processes equals attention in one."""

from __future__ import annotations

import pytest
from cases.processes import pool
from cases.sharded import KINDS, compare_random


def check(size: int, seeds: range, kind: str, **more: object) -> None:
    wrong = pool(size).run(compare_random, seeds, kind, more)
    assert not any(wrong), "\n".join(wrong[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_random_problems_give_the_same_results_and_gradients(size, kind):
    count = 30 if kind == "plain" else 8
    check(size, range(size * 100, size * 100 + count), kind)
