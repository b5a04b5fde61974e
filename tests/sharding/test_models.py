"""Models over processes equal models in one: tensor parallel, FSDP2, layers on a shard."""

from __future__ import annotations

import pytest
from cases import parallel
from cases.processes import pool

import attnbias as ab
from attnbias.nn import RelationalAttention


def check(wrong):
    assert not any(wrong), "\n".join(wrong[0])


@pytest.mark.parametrize("local", [True, False], ids=["local", "DTensor"])
def test_plan_of_tensor_parallelism_works_unchanged(local):
    check(pool(2).run(parallel.tensor_parallel, local, 97))


def test_fsdp_and_a_shard_train_as_one_process_does():
    check(pool(2).run(parallel.fully_sharded, 300))


@pytest.mark.parametrize("length", [1, 129, 400])
def test_layers_take_a_shard_or_a_mesh(length):
    check(pool(2).run(parallel.layers_on_shards, max(length, 4)))


@pytest.mark.parametrize("length", [4, 129, 400])
def test_layers_with_structured_scores_take_a_shard_or_a_mesh(length):
    check(pool(2).run(parallel.structured_on_shards, length))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mesh": 2}, "length: wanted the number of tokens of all ranks with mesh=, got None"),
        ({"length": 9}, "length: wanted None without mesh=, got 9"),
        ({"relation": ab.shard(ab.Causal(), 9, 1), "return_weights": True}, "return_weights: wanted False"),
    ],
)
def test_layer_refuses_what_does_not_go_together(options, words):
    with pytest.raises(ValueError, match=words):
        RelationalAttention(8)(parallel.tokens(9)[..., :8].float(), **options)


def test_layer_refuses_a_layout_with_a_mesh():
    with pytest.raises(TypeError, match="relation: wanted a Relation or None with mesh=, got Layout"):
        RelationalAttention(8)(
            parallel.tokens(9)[..., :8].float(), relation=ab.Causal().layout(9, 9), mesh=2, length=9
        )
