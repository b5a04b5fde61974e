"""Laws of the algebra and of layouts, on relations that hypothesis draws."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attnbias as ab
from attnbias.relations.recipe import restore
from attnbias.testing import random_relation

lengths = st.sampled_from([0, 1, 5, 24, 63, 65, 97])
seeds = st.integers(0, 1 << 30)
forms = st.sampled_from(["auto", "tiles", "edges"])
laws = settings(max_examples=80, deadline=None, derandomize=True)


def drawn(seed, q_len, k_len, depth=1):
    return random_relation(seed, depth, q_len=q_len, k_len=k_len, batch=2, heads=2)


def grid(relation, q_len, k_len, q_start=0):
    return relation.dense(q_len, k_len, q_start, batch=2, heads=2).expand(2, 2, q_len, k_len)


@laws
@given(seeds, seeds, lengths, lengths)
def test_operators_are_set_operations(one, two, q_len, k_len):
    a, b = drawn(one, q_len, k_len), drawn(two, q_len, k_len)
    at = (q_len, k_len)
    assert torch.equal(grid(a & b, *at), grid(a, *at) & grid(b, *at))
    assert torch.equal(grid(a | b, *at), grid(a, *at) | grid(b, *at))
    assert torch.equal(grid(a - b, *at), grid(a, *at) & ~grid(b, *at))
    assert torch.equal(grid(~a, *at), ~grid(a, *at))
    assert ~~a == a
    assert torch.equal(grid(a.T, k_len, q_len), grid(a, *at).mT)
    assert a == a.T.T or torch.equal(grid(a.T.T, *at), grid(a, *at))


@laws
@given(seeds, lengths, lengths, forms, st.sampled_from([64, 128]))
def test_layouts_hold_exactly_the_pairs(seed, q_len, k_len, form, tile):
    relation = drawn(seed, q_len, k_len, depth=2)
    listed = relation.bind(q_len, k_len, batch=2, heads=2).edges
    if form == "tiles" and listed is not None and listed.repeated.any():
        form = "auto"
    layout = ab.Layout.build(relation, q_len, k_len, form=form, tile=tile, batch=2, heads=2)
    layout.validate()
    dense, often = grid(relation, q_len, k_len), layout.rows(0, q_len)
    assert torch.equal((often > 0).expand_as(dense), dense)
    assert relation.repeats or int(often.max() if often.numel() else 0) <= 1


@pytest.mark.parametrize(
    "relation",
    [
        ab.Where(lambda q, k: (q + k) % 3 != 0) & (ab.Columns(16) | ab.Prefix(4) | ab.Dilated(2, 3)),
        ab.Where(lambda q, k: (q + k) % 3 != 0)
        & (ab.recipes.sparse_transformer_strided(16) | ab.Dilated(2, 3)),
        ab.Columns(1) & (ab.Columns(3) | ab.Prefix(2) | ab.Neighbors(torch.arange(64)[:, None])),
    ],
    ids=repr,
)
def test_pairs_of_rules_and_edges_count_once(relation):
    """Where a rule meets a union of a rule, ranges and edges, the edges were in the rule as well."""
    assert relation.count(64, 64) == int(relation.dense(64, 64).sum())
    assert int(relation.layout(64, 64).rows(0, 64).max()) == 1
    assert ab.verify(*torch.randn(3, 1, 1, 64, 8), relation).ok


@laws
@given(seeds, lengths, lengths)
def test_count_is_the_number_of_true_pairs(seed, q_len, k_len):
    relation = drawn(seed, q_len, k_len)
    bound = relation.bind(q_len, k_len, batch=2, heads=2)
    dense = relation.dense(q_len, k_len, batch=2, heads=2)
    times = dense.numel() // max(q_len * k_len, 1) // bound.group.size if dense.numel() else 1
    assert bound.count() * times == int(dense.sum())


@laws
@given(seeds, st.sampled_from([1, 24, 65]), st.sampled_from([24, 65]), st.integers(0, 20))
def test_decoding_step_equals_a_row_of_the_whole(seed, rows, k_len, start):
    relation = random_relation(seed, 2, q_len=rows + start, k_len=k_len, batch=2, heads=2)
    whole = grid(relation, rows + start, k_len)
    assert torch.equal(grid(relation, rows, k_len, start), whole[:, :, start:])
    layout = ab.Layout.build(relation, rows, k_len, q_start=start, batch=2, heads=2)
    assert torch.equal((layout.rows(0, rows) > 0).expand(2, 2, rows, k_len), whole[:, :, start:])


@laws
@given(seeds, st.sampled_from([5, 24]))
def test_values_survive_pickle_and_their_recipe(seed, length):
    relation = drawn(seed, length, length, depth=2)
    assert pickle.loads(pickle.dumps(relation)) == relation
    assert hash(pickle.loads(pickle.dumps(relation))) == hash(relation)
    assert restore(relation.recipe.text, relation.recipe.data) == relation
