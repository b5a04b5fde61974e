"""The text of relations: names that are mistyped, short reprs, and lengths left out."""

from __future__ import annotations

import re

import pytest
import torch

import attnbias as ab
from attnbias.relations import parse
from attnbias.symmetry import hierarchy


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("causal()", "'causal' is not known; did you mean Causal()?"),
        ("causal", "'causal' is not known; did you mean Causal()?"),
        ("Graf([[0], [0]])", "'Graf' is not known; did you mean Graph(edge_index=...)?"),
        ("Causal", "'Causal' is no relation by itself; write Causal()"),
        ("Global & 3", "'Global' is no relation by itself; write Global(positions=...)"),
    ],
)
def test_mistyped_names_are_guessed(text, words):
    with pytest.raises(ValueError, match=re.escape(f"expression: {words}")):
        parse(text)


def test_there_are_as_many_keys_as_queries_unless_said():
    relation, wider = ab.Window(before=2), ab.Causal()
    assert relation.picture(5) == relation.picture(5, 5)
    assert torch.equal(relation.dense(5), relation.dense(5, 5))
    assert relation.layout(5) is relation.layout(5, 5)
    assert ab.Layout.build(relation, 5) == ab.Layout.build(relation, 5, 5)
    assert relation.count(5) == 12 and relation.ranges(5) == relation.ranges(5, 5)
    assert relation.within(wider, 5) and not relation.equivalent(wider, 5)
    assert str(hierarchy({"a": relation, "b": wider}, 5)) == "b\na  <  b"


def later(q, k):
    return q > k


def test_long_ranges_and_functions_are_short_in_a_repr():
    """Global(range(64)) printed 64 numbers, and a lambda had two pairs of brackets."""
    assert repr(ab.Global(range(3, 64))) == "Global(positions=range(3, 64))"
    assert parse(repr(ab.Global(range(3, 640)))) == ab.Global(range(3, 640))
    assert repr(ab.Global([0, 1, 2])) == "Global(positions=[0, 1, 2])"
    assert repr(ab.Global([0, 2, 3, 4, 5, 6, 7, 8, 9])) == "Global(positions=[0, 2, 3, 4, 5, 6, 7, 8, 9])"
    assert repr(ab.Where(lambda q, k: q > k)).endswith(".<locals>.<lambda>)")
    assert repr(ab.Where(later)) == "Where(later)"
