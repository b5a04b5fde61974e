"""No relation visits all pairs: a law on the memory of binding, for every public relation and every two."""

from __future__ import annotations

import itertools
import random
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
import torch

import attnbias as ab
from attnbias.relations.recipe import registered_classes
from attnbias.sets.predicate import Predicate

TOKENS = 65_536
MOST = 200  # bytes a token


def _ids() -> np.ndarray:
    cuts = np.sort(np.random.default_rng(0).choice(np.arange(1, TOKENS), 99, replace=False))
    return np.repeat(np.arange(100), np.diff(np.concatenate(([0], cuts, [TOKENS]))))


def _edges(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, TOKENS, (2, TOKENS))


def _parents() -> np.ndarray:
    parents = np.arange(-1, TOKENS - 1)
    parents[1024::512] = 1023  # answers of 512 tokens to one prompt
    return parents


MAKERS: dict[str, Callable[[], ab.Relation]] = {
    "Full": ab.Full,
    "Empty": ab.Empty,
    "Causal": ab.Causal,
    "Window": lambda: ab.Window(255, 31),
    "Dilated": lambda: ab.Dilated(4, before=16),
    "Columns": lambda: ab.Columns(128),
    "Chunks": lambda: ab.Chunks(500),
    "Prefix": lambda: ab.Prefix(1000),
    "Padding": lambda: ab.Padding([TOKENS - 7]),
    "Padding.from_mask": lambda: ab.Padding.from_mask(torch.arange(TOKENS)[None] > 99),
    "Bipartite": lambda: ab.Bipartite(30_000),
    "Global": lambda: ab.Global([0, 5, 100]),
    "RandomBlocks": lambda: ab.RandomBlocks(64, 3),
    "Documents": lambda: ab.Documents(_ids()),
    "Documents.each": lambda: ab.Documents(_ids()).each(ab.Causal()),
    "Neighborhood": lambda: ab.Neighborhood((256, 256), 1),
    "Graph": lambda: ab.Graph(_edges(0), num_nodes=TOKENS),
    "~Graph": lambda: ~ab.Graph(_edges(1), num_nodes=TOKENS),
    "Neighbors": lambda: ab.Neighbors(_edges(2)[0][:, None]),
    "Ranges": lambda: ab.Ranges(np.arange(TOKENS) // 64 * 64, np.arange(TOKENS) // 64 * 64 + 64),
    "Tree": lambda: ab.Tree(_parents()),
    "Blocks": lambda: ab.Blocks(np.random.default_rng(3).integers(0, TOKENS // 128, (TOKENS // 128, 4)), 128),
    "shift": lambda: ab.Chunks(500).shift(77),
    "permute": lambda: ab.Causal().permute(np.arange(TOKENS)[::-1].copy()),
}
ALLOWED = {
    "Where",
    "Dense",
    "PerHead",
    "PerBatch",
}  # the first two test pairs, the others are several relations

_made: dict[str, ab.Relation] = {}


def make(name: str) -> ab.Relation:
    if name not in _made:
        _made[name] = MAKERS[name]()
    return _made[name]


def check(relation: ab.Relation) -> None:
    tracemalloc.start()
    bound = relation.bind(TOKENS, TOKENS)
    peak = tracemalloc.get_traced_memory()[1] / TOKENS
    tracemalloc.stop()
    # A rule on q - k is tested once for each distance; any other would be tested for each pair.
    assert not isinstance(bound.solid, Predicate) or bound.solid.stationary, relation
    assert peak < MOST, f"{relation}: {peak:.0f} bytes a token"


def test_every_public_relation_is_under_the_law() -> None:
    public = {cls.__name__ for cls in registered_classes() if getattr(ab, cls.__name__, None) is cls}
    assert public - {name.strip("~").split(".")[0] for name in MAKERS} == ALLOWED


@pytest.mark.parametrize("name", MAKERS)
def test_a_relation_takes_little_memory(name: str) -> None:
    check(make(name))


PAIRS = [(a, b, sign) for a, b in itertools.combinations(MAKERS, 2) for sign in "&|"]


@pytest.mark.parametrize(("a", "b", "sign"), random.Random(0).sample(PAIRS, 40))
def test_two_relations_take_little_memory(a: str, b: str, sign: str) -> None:
    check(make(a) & make(b) if sign == "&" else make(a) | make(b))


@pytest.mark.slow
def test_any_two_relations_take_little_memory() -> None:
    for a, b, sign in PAIRS:
        check(make(a) & make(b) if sign == "&" else make(a) | make(b))


@pytest.mark.parametrize("rows", [300, 5000])  # in one step, and in several
def test_a_rule_united_with_ranges_holds_both(rows: int) -> None:
    for relation in (
        ab.Columns(7) | ab.Chunks(50),
        (ab.Columns(7) | ab.Chunks(50)) & ab.Window(40),
        ~(ab.Columns(7) | ab.Chunks(50)),
        ab.Columns(7) | ab.Dilated(3, 20),
        (ab.Columns(7) | ab.Dilated(3, 20)) - ab.Prefix(30),
        (ab.Columns(7) | ab.Chunks(50)) & (ab.Dilated(3, 20) | ab.Prefix(9)),
        (ab.Columns(7) | ab.Chunks(50)).shift(11),
        ab.PerHead([ab.Columns(7) | ab.Chunks(50), ab.Causal(), ab.Columns(3)]),
        ab.Columns(7) | ab.Chunks(50) | ab.Graph([[1, 2], [3, 200]], num_nodes=300),
    ):
        length = 300 if relation.lengths[0] else rows
        want = relation.dense(length, length)
        assert torch.equal(ab.Layout.build(relation, length, length).to_dense(), want), relation
        assert relation.count(length, length) == int(want.sum())
