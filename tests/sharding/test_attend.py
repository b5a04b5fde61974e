"""Attention over processes equals attention in one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from cases.processes import pool
from cases.sharded import KINDS, compare_random, draw


def check(size: int, seeds: Sequence[int], kind: str, **more: object) -> None:
    wrong = pool(size).run(compare_random, seeds, kind, more)
    assert not any(wrong), "\n".join(wrong[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_random_problems_give_the_same_results_and_gradients(size, kind):
    count = 30 if kind == "plain" else 8
    check(size, range(size * 100, size * 100 + count), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 4])
def test_heads_for_tokens_give_the_same_results_and_gradients(size, kind):
    """There are fewer heads than ranks, or fewer key heads, in some of these."""
    check(size, range(size * 100, size * 100 + 6), kind, by="heads")


@pytest.mark.parametrize("kind", KINDS)
def test_stages_give_the_same_results_and_gradients(kind):
    seeds = [seed for seed in range(500, 560) if draw(seed, 3, kind).tensors[1].shape[1] > 1][:5]
    check(3, seeds, kind, stages=2)
