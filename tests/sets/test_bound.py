"""Binding relations to lengths, batches and heads; each test describes a former bug."""

from __future__ import annotations

import pytest
import torch

import attnbias as ab
from attnbias.relations.recipe import restore


def test_mask_mod_that_differs_by_head_needs_the_number_of_heads():
    """A layout described only batch 0 and head 0, and attention accepted it."""
    by_head = ab.Where(lambda b, h, q, k: (h == 1) & (q == k))
    for relation in (by_head, ~by_head, by_head & ab.Causal(), by_head.T, by_head.shift(1)):
        with pytest.raises(
            ValueError, match=r"heads: .* differs by heads, so their number is wanted, got None"
        ):
            relation.layout(8, 8)
        assert relation.layout(8, 8, heads=2).heads == 2
    with pytest.raises(ValueError, match="differs by heads"):
        by_head.count(3, 3)
    assert by_head.count(3, 3, heads=2) == 3
    assert by_head.picture(2, 2, head=1) == "#.\n.#"
    with pytest.raises(ValueError, match=r"head: wanted 0\.\.1, got 9"):
        ab.PerHead([ab.Full(), ab.Causal()]).picture(2, 2, head=9)
    assert ab.Where(lambda b, h, q, k: q >= k).layout(8, 8).groups == 1


@pytest.mark.parametrize(
    "relation", [ab.Prefix(2), ab.Columns(2), ab.Chunks(2).shift(1), ab.Bipartite(1)], ids=repr
)
def test_reversed_relations_at_positions_before_the_first_key(relation):
    """Rows at negative positions were left empty."""
    turned = relation.T
    assert turned.count(7, 4, "end") == int(turned.dense(7, 4, "end").sum())


def test_reversed_neighbours_of_part_of_the_rows():
    """The list was checked against the bound rows instead of the keys it names."""
    turned = ab.Neighbors([[0, 2], [1, -1], [2, 2], [0, 1]]).T
    assert turned.layout(2, 4).rows(0, 2)[0, 0].tolist() == [[1, 0, 0, 1], [0, 1, 0, 1]]
    assert turned.layout(2, 4, q_start=1).rows(0, 2)[0, 0].tolist() == [[0, 1, 0, 1], [1, 0, 2, 0]]


def test_documents_and_the_relation_inside_them_agree_on_the_batch():
    documents = ab.Documents([[0, 0, 1, 1], [0, 1, 1, 1]])
    assert documents.each(ab.Causal()).batch_size == 2
    with pytest.raises(ValueError, match=r"parts for batch \[2, 3\] do not combine"):
        documents.each(ab.Padding([1, 2, 2])).dense(4, 4)


def test_equal_small_data_shares_layouts():
    one, two = ab.Documents([0, 1]), ab.Documents([0, 1])
    assert one.layout(2, 2) is two.layout(2, 2)
    assert ab.Neighbors(torch.zeros(0, 3).long()) != ab.Neighbors(torch.zeros(0, 2).long())


def test_relations_of_other_modules_never_share_by_name():
    """Two classes of the same name, as in a notebook cell run twice, shared their layouts."""
    made = []
    for least in (0, 1):

        class Mine(ab.Relation):
            """Keys at least this far before."""

            def related(self, q, k, b=None, h=None, least=least):
                return q - k >= least

        made.append(Mine())
    assert made[0].layout(4, 4) != made[1].layout(4, 4)
    for mine in made:  # a compiled call also finds the class that it was given
        again = restore(mine.recipe.text, mine.recipe.data)
        assert type(again) is type(mine) and torch.equal(again.dense(4, 4), mine.dense(4, 4))


def test_windows_without_limits_are_the_relations_with_a_name():
    assert ab.Window(before=None) == ab.Causal()
    assert ab.Window(None, None) == ab.Full()
    assert hash(ab.Window(before=None)) == hash(ab.Causal())
    for relation in (ab.Causal(), ab.Window(before=None), ab.Window(3, None), ab.Full()):
        assert relation == relation.T.T


def test_heads_with_and_without_ranges_are_tiled_each_by_its_own_rule():
    """One predicate turned every head of PerHead into a predicate, tested pair by pair."""
    asked = []

    def odd(q, k):
        asked.append(torch.broadcast_shapes(q.shape, k.shape).numel())
        return (q + k) % 2 == 1

    heads = ab.PerHead([ab.Window(before=9), ab.Columns(64), ab.Where(odd), ab.Causal()])
    layout = heads.layout(256, 256)
    assert torch.equal(layout.to_dense(), heads.dense(256, 256))
    asked.clear()
    ab.Layout.build(heads, 1024, 1024)
    assert sum(asked) == 1024**2  # its own head, once
    ab.Layout.build(ab.PerHead([ab.Window(before=9)] * 15 + [ab.Columns(128)]), 1 << 16, 1 << 16)


def test_huge_parameters_cost_no_more_than_their_pairs():
    assert ab.RandomBlocks(4, 10**5).count(64, 64) == 64 * 64
    assert ab.RandomBlocks(4, 10**5).dense(8, 8).all()
    assert ab.Neighborhood((4, 4), 10**7).count(16, 16) == 256
    assert ab.Dilated(2, 10**8).count(4, 4) == 6
    for make in (
        lambda: ab.Window(2**63 - 1),
        lambda: ab.Neighborhood((2**20, 2**20), 1),
        lambda: ab.Chunks(2**70),
    ):
        with pytest.raises(ValueError, match=r"wanted less than 2\^31, got"):
            make()
