"""What goes wrong is named, and no rank waits for ever."""

from __future__ import annotations

import pytest
import torch
from cases.processes import Failure, Pool, pool
from cases.sharded import differ, fail_on_one, misuse

import attnbias as ab


@pytest.mark.parametrize("how", ["raise", "die"])
def test_other_ranks_raise_within_the_timeout(how):
    timeout = 3.0
    alone = Pool(3, timeout)
    try:
        results = alone.run(fail_on_one, how, each=True)
    finally:
        alone.close()
    assert isinstance(results[1], Failure)
    assert ("bad data" if how == "raise" else "the process died") in results[1].text
    assert all(0 <= results[rank] < 5 * timeout for rank in (0, 2)), results
    assert not any(process.is_alive() for process in alone.processes)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("nothing", "equal"),
        ("relation", "relation: wanted the same on all ranks, got Window(before=200) "),
        ("length", "length: wanted the same on all ranks, got (600, 600) on rank 0, (601, 601) on rank 1"),
        ("stages", "stages: wanted the same on all ranks, got 1 on rank 0, 2 on rank 1"),
        ("split", "split: wanted the same on all ranks, got "),
        (
            "dtype",
            "dtype: wanted the same on all ranks, got torch.float32 on rank 0, torch.float64 on rank 1",
        ),
        ("heads", "heads: wanted the same on all ranks, got 2 on rank 0, 4 on rank 1"),
    ],
)
def test_check_names_the_rank_that_differs(what, words):
    assert all(text.startswith(words) for text in pool(3).run(differ, what))


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("whole", "ValueError: query: wanted the 128 tokens of rank 0, of 600, got 600 in [1, 2, 600, 8]"),
        ("keys", "ValueError: key: wanted the"),
        ("values", "ValueError: value: wanted the"),
        ("list", "TypeError: query: wanted a tensor, got list []"),
        ("q_start", "ValueError: q_start: wanted none with a shard; give it to ab.shard(..., q_start=)"),
        ("option", "TypeError: dropout: no such argument; there are terms"),
        ("dtype", "TypeError: key: wanted the query's dtype, torch.float32, got torch.float64"),
        ("stages", "ValueError: stages: wanted at most the 2 key heads, got 3"),
        ("both", "ValueError: relation: wanted one of the shard's 2 relations, such as shard[0], got all"),
        ("torn", "ValueError: split: terms and dropout want whole tiles of tokens unless"),
        (
            "levels",
            "ValueError: score: a MultiLevel wants whole tiles of tokens and keys; make the shard with",
        ),
        ("scatter", "ValueError: whole: wanted 600 queries along dimension 0, got [599]"),
        ("gather", "ValueError: part: wanted this rank's"),
        ("side", "ValueError: of: wanted 'queries' or 'keys', got 'values'"),
        ("on", "ValueError: mesh: wanted rank 0 of 4, for which this shard is made, got rank"),
        (
            "mesh",
            "TypeError: mesh: wanted a DeviceMesh, a ProcessGroup, None or a number of ranks, got str 'cp'",
        ),
        ("rank", "ValueError: rank: wanted None unless mesh is a number of ranks, got 0"),
        ("dims", "ValueError: mesh: wanted one dimension, got 2: [1, 3]"),
        ("names", "ValueError: mesh: wanted one dimension, such as mesh['cp'], got 2: [1, 3]"),
        ("batch", "ValueError: relation: this layout has batch 3, query has 1"),
    ],
)
def test_wrong_calls_are_named_on_every_rank(what, words):
    first, *others = pool(3).run(misuse, what)
    name = words.partition(":")[0]
    assert first.startswith(words), first
    assert all(text.startswith(name) for text in others), others


CAUSAL = ab.Causal()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ab.shard(None, 8, 2), "relation: wanted a Relation or a list of them, got NoneType None"),
        (lambda: ab.shard([], 8, 2), "relation: wanted a Relation or a list of them, got list []"),
        (lambda: ab.shard([CAUSAL, 3], 8, 2), "relation[1]: wanted a Relation, got int 3"),
        (
            lambda: ab.shard(CAUSAL.layout(8, 8), 8, 2),
            "relation: wanted a Relation or a list of them, got Layout",
        ),
        (lambda: ab.shard(CAUSAL, -1, 2), "length: wanted at least 0, got -1"),
        (lambda: ab.shard(CAUSAL, 8.5, 2), "length: wanted an integer, got 8.5"),
        (
            lambda: ab.shard(CAUSAL, (8, 8, 8), 2),
            "length: wanted a number of tokens or (q_len, k_len), got (8, 8, 8)",
        ),
        (lambda: ab.shard(CAUSAL, (8, -2), 2), "k_len: wanted at least 0, got -2"),
        (lambda: ab.shard(CAUSAL, (None, 2), 2), "q_len: wanted an integer, got None"),
        (lambda: ab.shard(CAUSAL, 8, 0), "mesh: wanted at least 1, got 0"),
        (lambda: ab.shard(CAUSAL, 8, True), "mesh: wanted an initialized torch.distributed"),
        (lambda: ab.shard(CAUSAL, 8), "mesh: wanted an initialized torch.distributed"),
        (lambda: ab.shard(CAUSAL, 8, 2, rank=2), "rank: wanted 0..1, got 2"),
        (lambda: ab.shard(CAUSAL, 8, 2, rank=-1), "rank: wanted at least 0, got -1"),
        (lambda: ab.shard(CAUSAL, 8, 2, rank="0"), "rank: wanted an integer, got '0'"),
        (
            lambda: ab.shard(CAUSAL, 8, 2, split="odd"),
            "split: wanted one of 'auto', 'even', 'zigzag', 'work' or a vector, got 'odd'",
        ),
        (
            lambda: ab.shard(CAUSAL, 8, 2, split=[0, 1]),
            "split: wanted a rank for each of the 8 tokens, got 2",
        ),
        (
            lambda: ab.shard(CAUSAL, 3, 2, split=[0, 1, 5]),
            "split: wanted ranks from 0 to 1 or an order of the tokens, got 5 for token 2",
        ),
        (
            lambda: ab.shard(CAUSAL, 3, 2, split=[0, -1, 1]),
            "split: wanted ranks from 0 to 1 or an order of the tokens, got -1",
        ),
        (lambda: ab.shard(CAUSAL, 2, 2, split=[0.5, 1]), "split: wanted integers, got torch.float32"),
        (lambda: ab.shard(CAUSAL, 2, 2, split=[[0, 1]]), "split: wanted 1 dimensions, got shape [1, 2]"),
        (lambda: ab.shard(CAUSAL, 8, 2, by="rows"), "by: wanted 'keys', 'heads' or 'auto', got 'rows'"),
        (lambda: ab.shard(CAUSAL, 8, 2, stages=0), "stages: wanted at least 1, got 0"),
        (lambda: ab.shard(CAUSAL, 8, 2, stages=1.5), "stages: wanted an integer, got 1.5"),
        (
            lambda: ab.shard([CAUSAL], 8, 2, weights=[1, 2]),
            "weights: wanted 1 numbers, one for each relation, got [1, 2]",
        ),
        (
            lambda: ab.shard([CAUSAL], 8, 2, weights=[-1]),
            "weights: wanted numbers of at least 0, not all 0, got [-1]",
        ),
        (
            lambda: ab.shard([CAUSAL], 8, 2, weights=[0]),
            "weights: wanted numbers of at least 0, not all 0, got [0]",
        ),
        (
            lambda: ab.shard([CAUSAL], 8, 2, weights="ab"),
            "weights: wanted a number for each relation, got 'ab'",
        ),
        (lambda: ab.shard(CAUSAL, 8, 2, q_start="begin"), "q_start: wanted an integer or 'end', got 'begin'"),
        (lambda: ab.shard(CAUSAL, 8, 2, whole_tiles=1), "whole_tiles: wanted True or False, got 1"),
        (lambda: ab.shard(CAUSAL, 8, 2, check="yes"), "check: wanted True or False, got 'yes'"),
        (
            lambda: ab.shard(ab.Documents([0, 1]), 8, 2),
            "relation: this Documents is for 2 keys, got k_len = 8",
        ),
        (
            lambda: ab.shard(ab.PerHead([CAUSAL] * 2), 8, 2, heads=3),
            "relation: this PerHead has heads 2, got heads 3",
        ),
        (lambda: ab.shard(ab.Where(lambda b, h, q, k: k <= q + h), 8, 2), "heads: "),
        (lambda: ab.shard(CAUSAL, 8, 2)[1], "range object index out of range"),
        (
            lambda: ab.shard(CAUSAL, 8, 2).explain(heads=4, key_heads=3),
            "key_heads: wanted a number that divides the 4 heads, got 3",
        ),
        (lambda: ab.shard(CAUSAL, 8, 2).explain(heads=0), "heads: wanted at least 1, got 0"),
        (lambda: ab.shard(CAUSAL, 8, 2).explain(dim=(8, 0)), "dim: wanted at least 1, got 0"),
        (lambda: ab.shard(CAUSAL, 8, 2).explain(batch=0), "batch: wanted at least 1, got 0"),
        (lambda: ab.shard(CAUSAL, 8, 2).on(), "mesh: wanted an initialized torch.distributed"),
        (
            lambda: ab.attention(*[torch.zeros(1, 1, 128, 8)] * 3, ab.shard(CAUSAL, 256, 2)),
            "relation: wanted a shard on a process group, got a plan for 2 ranks on paper; use shard.on",
        ),
        (
            lambda: ab.explain(*[torch.zeros(1, 1, 8, 8)] * 3, ab.shard(CAUSAL, 8, 1)),
            "relation: wanted a Relation, a Layout or None (= Full), got a Shard",
        ),
    ],
)
def test_wrong_arguments_are_named(make, words):
    with pytest.raises((TypeError, ValueError, IndexError)) as caught:
        make()
    assert str(caught.value).startswith(words)
