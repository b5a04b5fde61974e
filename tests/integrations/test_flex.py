"""Conversion to and from FlexAttention's BlockMask."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, create_mask

import attnbias as ab
from attnbias.integrations import flex


@pytest.mark.parametrize(
    "relation",
    [
        ab.Causal() & ab.Window(before=50),
        ab.Documents.from_lengths([100, 1, 155]) & ab.Causal(),
        ab.PerHead([ab.Causal(), ab.Full()]) & ab.Padding([3, 256]),
        ab.Empty(),
    ],
    ids=repr,
)
def test_a_layout_becomes_a_block_mask_and_back(relation):
    dense = relation.dense(256, 256, batch=2, heads=2).expand(2, 2, 256, 256)
    block_mask = flex.to_block_mask(ab.Layout.build(relation, 256, 256, form="tiles"))
    there = create_mask(block_mask.mask_mod, 2, 2, 256, 256, device="cpu")
    assert torch.equal(there, dense)
    back = flex.from_block_mask(block_mask)
    assert torch.equal(back.dense(256, 256, batch=2, heads=2), dense)


def test_a_users_block_mask_becomes_a_relation():
    block_mask = create_block_mask(
        lambda b, h, q, k: (q >= k) & (q - k < 30 + b), 2, None, 200, 130, device="cpu"
    )
    relation = flex.from_block_mask(block_mask)
    layout = relation.layout(200, 130, batch=2, heads=3)
    assert (layout.batch, layout.heads) == (2, 1)
    at = torch.arange(200)[:, None], torch.arange(130)
    for batch in (0, 1):
        gap = at[0] - at[1]
        assert torch.equal(layout.to_dense()[batch, 0], (gap >= 0) & (gap < 30 + batch))


def test_edges_have_no_block_mask():
    with pytest.raises(
        ValueError, match=r"layout: wanted one without edges, got .* edges; build it with form='tiles'"
    ):
        flex.to_block_mask(ab.Graph([[0], [1]], num_nodes=2).layout(2, 2, form="edges"))


# -- every function that FlexAttention accepts gives its mask -----------------------------------------

LENGTH = 150  # ragged, and different from the numbers of batches and heads
SOME = torch.Generator().manual_seed(0)
IDS = torch.randint(9, (LENGTH,), generator=SOME).sort().values
BATCH_IDS = torch.randint(9, (2, LENGTH), generator=SOME).sort().values
MASK = torch.rand(LENGTH, LENGTH, generator=SOME) < 0.3
MASKS = torch.rand(2, 3, LENGTH, LENGTH, generator=SOME) < 0.3
SPECIAL = torch.tensor([3, 77, 149])
INTERVALS = torch.stack((torch.arange(LENGTH) - 7, torch.arange(LENGTH) + 2), 1)
OFFSETS = torch.tensor([0, 10, 64, 150])


def inside(b, h, q, k):
    first, last = INTERVALS[q]
    return (first <= k) & (k <= last)


def shaped(b, h, q, k):
    return torch.full(q.shape, True) & (q >= k)


def in_place(b, h, q, k):
    k += 1
    return q >= k


MASK_MODS = {
    "scalar of another type": lambda b, h, q, k: q.to(torch.int8) * torch.tensor(100) > k,
    "half and a scalar": lambda b, h, q, k: q.half() / torch.tensor(3.0) == k.float() / torch.tensor(3.0),
    "in place": in_place,
    "causal": lambda b, h, q, k: q >= k,
    "documents": lambda b, h, q, k: (IDS[q] == IDS[k]) & (q >= k),
    "documents of a batch": lambda b, h, q, k: BATCH_IDS[b, q] == BATCH_IDS[b, k],
    "one table": lambda b, h, q, k: MASK[q, k],
    "row, then column": lambda b, h, q, k: MASK[q][k],
    "tables one by one": lambda b, h, q, k: MASKS[b][h][q, k],
    "head, then pair": lambda b, h, q, k: MASKS[0, h][q][k],
    "any of a list": lambda b, h, q, k: (k == SPECIAL).any() | (q - k).abs().lt(3),
    "all of a list": lambda b, h, q, k: (q != SPECIAL).all() & (q >= k),
    "interval by number": lambda b, h, q, k: (INTERVALS[q][0] <= k) & (k < INTERVALS[q][1]),
    "interval unpacked": inside,
    "sum of a list": lambda b, h, q, k: (q >= OFFSETS).sum() == (k >= OFFSETS).sum(),
    "search": lambda b, h, q, k: torch.searchsorted(OFFSETS, q, right=True) == k // 60,
    "isin": lambda b, h, q, k: torch.isin(k, SPECIAL) | (q == k),
    "shape": shaped,
    "where": lambda b, h, q, k: torch.where(k < 20, q >= 0, q - k < 5 + h),
    "rounding": lambda b, h, q, k: torch.div(q, 7, rounding_mode="floor") == k // 7,
    "constant": lambda b, h, q, k: torch.tensor(True),
    "stacked": lambda b, h, q, k: torch.stack((q >= k, q - k < 9)).all(),
}


@pytest.mark.parametrize("mask_mod", MASK_MODS.values(), ids=MASK_MODS)
def test_a_mask_mod_gives_flex_attentions_mask(mask_mod):
    """Functions of scalars got tensors: some raised from deep inside, others silently related all pairs."""
    try:
        want = create_mask(mask_mod, 2, 3, LENGTH, LENGTH, device="cpu")
    except RuntimeError:
        assert torch.__version__ < "2.13"
        pytest.skip("the FlexAttention of this torch refuses it")
    block_mask = create_block_mask(mask_mod, 2, 3, LENGTH, LENGTH, device="cpu")
    for relation in (ab.Where(mask_mod), flex.from_block_mask(block_mask)):
        assert torch.equal(relation.dense(LENGTH, LENGTH, batch=2, heads=3), want)
        assert relation.count(LENGTH, LENGTH, batch=2, heads=3) == want.sum()
        layout = relation.layout(LENGTH, LENGTH, batch=2, heads=3)
        assert torch.equal(layout.to_dense().expand_as(want), want)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("documents of a batch", (2, 1)), ("tables one by one", (2, 3)), ("any of a list", (1, 1))],
)
def test_batches_and_heads_differ_only_if_the_function_reads_them(name, expected):
    layout = ab.Where(MASK_MODS[name]).layout(LENGTH, LENGTH, batch=2, heads=3)
    assert (layout.batch, layout.heads) == expected


def test_function_that_writes_to_its_arguments_changes_nothing_else():
    relation = ab.Where(in_place) & ab.Documents([0] * 9)
    want = create_mask(in_place, 1, 1, 9, 9, device="cpu")[0, 0]
    assert torch.equal(relation.dense(9, 9, batch=1, heads=1), want)
    heads = ab.PerHead([ab.Where(in_place), ab.Window(before=1)])
    assert torch.equal(heads.dense(9, 9, batch=1)[0, 1], ab.Window(before=1).dense(9, 9))


def test_a_function_need_not_be_defined_at_0():
    table = torch.rand(4, 12) < 0.5
    relation = ab.Where(lambda b, h, q, k: table[q - 8][k])
    assert torch.equal(relation.dense(4, 12, 8, batch=1, heads=1), table)


def test_the_sizes_that_a_function_reads_must_be_given():
    """dense assumed one batch where count required the number."""
    by_batch = ab.Where(lambda b, h, q, k: q - k <= b)
    for ask in (by_batch.dense, by_batch.count, by_batch.layout):
        with pytest.raises(ValueError, match="differs by batch, so their number is wanted, got None"):
            ask(5, 5)
    for relation in (by_batch, by_batch | ab.PerHead([ab.Causal(), ab.Full(), ab.Empty()]), ab.Causal()):
        assert relation.count(5, 5, batch=2, heads=3) == relation.dense(5, 5, batch=2, heads=3).sum()
    with pytest.raises(ValueError, match="differs by batch"):
        (by_batch | ab.PerHead([ab.Causal(), ab.Full()])).count(5, 5)


def test_functions_of_two_positions_are_called_pair_by_pair_too():
    related = ab.Where(lambda q, k: MASK[q][k]) | ab.Where(lambda q, k: (k == SPECIAL).any())
    want = MASK | torch.isin(torch.arange(LENGTH), SPECIAL)
    assert torch.equal(related.dense(LENGTH, LENGTH), want)
    assert torch.equal(related.layout(LENGTH, LENGTH).to_dense(), want)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (
            lambda q, k: q >= k if (q > 3).any() else q == k,
            "one pair at a time, .* got RuntimeError",
        ),
        (lambda b, h, q, k: MASK[q], r"wanted one boolean for one pair, got \[150\]"),
        (lambda b, h, q, k: IDS[q], "wanted a boolean tensor, got torch.int64"),
        (lambda q, k: True, "fn: wanted a boolean tensor, got True|can call on one pair at a time"),
    ],
)
def test_a_function_that_flex_attention_refuses_is_named(function, words):
    with pytest.raises(TypeError, match=words):
        ab.Where(function).layout(LENGTH, LENGTH, batch=1, heads=1)
