"""Attention on DTensors equals attention in one process."""

from __future__ import annotations

import pytest
from cases.dtensors import KINDS, PLACEMENTS, compare_dtensors, errors_of
from cases.processes import pool


@pytest.mark.parametrize("how", PLACEMENTS)
def test_dtensors_give_the_same_results_and_gradients(how):
    wrong = pool(4).run(compare_dtensors, (2, 2), how, range(len(KINDS)))
    assert not any(wrong), "\n".join(wrong[0])


def test_what_does_not_fit_is_refused_on_every_rank():
    """The sentences are those of all ranks: none waits for another."""
    wanted = {
        "plain key": "key: wanted a DTensor, as others are, got a plain tensor",
        "mixed": "query: wanted query, key and value all replicated or all sharded by batch, by heads or by",
        "features": "got S(3), S(3), S(3) on dimension 0 of the mesh; use redistribute, or ab.shard",
        "dimensions": "query: wanted [B, H, Q, D] or [H, Q, D], key and value alike, got 2 dimensions",
        "groups": "key: wanted a head count that divides the query's 4, got 3",
        "few heads": "query: wanted a head on every rank, got 1 heads over [2] ranks",
        "key heads": "replicate keys and values over that dimension of the mesh",
        "torn tiles": "whole tiles of 128 tokens, got chunks of 50 of 100 tokens; use ab.shard",
        "key length": "key: wanted the query's length, 256, or one that DTensor cuts between tiles of 128,",
        "layout": "relation: wanted a Relation or None for DTensors sharded by sequence, got Layout",
        "layout of heads": "relation: wanted a Relation where DTensors are sharded by heads, got a Layout",
        "shard of heads": "relation: wanted a Shard that is the same for all heads",
        "batch size": "relation: this Padding has batch 3, got batch 2",
        "sink size": "sink: wanted a logit per query head, [2], got [3]",
    }
    for found in pool(2).run(errors_of):
        assert set(found) == set(wanted)
        for name, words in wanted.items():
            assert words in found[name], (name, found[name])
