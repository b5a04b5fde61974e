"""To and from FlexAttention's BlockMask."""

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
    with pytest.raises(ValueError, match="a BlockMask has no edges; build with form='tiles'"):
        flex.to_block_mask(ab.Graph([[0], [1]], num_nodes=2).layout(2, 2, form="edges"))
