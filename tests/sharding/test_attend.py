"""Attention over processes equals attention in one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from cases.processes import pool
from cases.sharded import (
    KINDS,
    compare_float32,
    compare_random,
    compile_whole,
    count_bytes,
    draw,
    run_twice,
    use_whole_tensors,
)

import attnbias as ab


def check(size: int, seeds: Sequence[int], kind: str, **more: object) -> None:
    wrong = pool(size).run(compare_random, seeds, kind, more)
    assert not any(wrong), "\n".join(wrong[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_random_problems_give_the_same_results_and_gradients(size, kind):
    count = 16 if kind == "plain" else 5
    check(size, range(size * 100, size * 100 + count), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_heads_for_tokens_give_the_same_results_and_gradients(kind):
    """There are fewer heads than ranks, or fewer key heads, in some of these."""
    check(4, range(400, 405), kind, by="heads")


@pytest.mark.parametrize("kind", KINDS)
def test_stages_give_the_same_results_and_gradients(kind):
    seeds = [seed for seed in range(500, 560) if draw(seed, 3, kind).tensors[1].shape[1] > 1][:4]
    check(3, seeds, kind, stages=2)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_many_random_problems_give_the_same_results_and_gradients(size, kind):
    check(size, range(1000, 1060), kind)
    check(size, range(2000, 2030), kind, by="heads")
    check(size, range(3000, 3030), kind, by="auto")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_errors_are_no_larger_than_those_of_eager(dtype):
    pool(3).run(compare_float32, range(700, 706), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3])
def test_two_runs_have_the_same_bits_and_those_of_one_process(size, dtype):
    """Whole tiles travel and stay in order, so that sums have the order of the whole's."""
    for same in pool(size).run(run_twice, dtype):
        assert all(same.values()), [name for name, is_same in same.items() if not is_same]


@pytest.mark.parametrize("by", ["keys", "heads"])
@pytest.mark.parametrize(
    ("relation", "length"),
    [
        (ab.Window(before=100), 1000),
        (ab.Causal(), 700),
        (ab.Documents.from_lengths([128, 256, 256]), 640),  # nothing has to travel
        (ab.Graph(torch.randint(0, 300, (2, 900), generator=torch.Generator().manual_seed(0)), 300), 300),
    ],
)
def test_counted_bytes_are_those_that_the_collective_is_handed(relation, length, by):
    for forward, backward, counted, counted_back in pool(3).run(
        count_bytes, relation, length, {"by": by, "split": "even"}
    ):
        assert (forward, backward) == (counted, counted_back)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_model_is_one_graph_for_all_documents(backend):
    for found in pool(2).run(compile_whole, backend, limit=300.0):
        assert not found["wrong"]
        assert found["more"] == 0  # lists and layouts are tensors: new ones compile nothing
        assert "wanted shard.prepare(device) before tracing, got a new shard" in found["unprepared"]
        assert "wanted shard.prepare(device, form='edges') for this call, got none" in found["form"]
        assert "by: wanted 'keys' in a traced program, got 'heads'" in found["heads"]


def test_whole_tensors_are_scattered_and_gathered():
    for facts in pool(3).run(use_whole_tensors):
        assert facts["same"] and facts["positions"] and facts["grad"] and all(facts["attention"])
        assert facts["relations"] == [ab.Causal(), ab.Window(before=99)]
        assert facts["max"] < 1e-5
        assert facts["max_logit"] < 1e-5
        assert facts["half"] == torch.bfloat16
