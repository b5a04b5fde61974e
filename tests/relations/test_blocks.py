"""Blocks chosen by maps and by lists."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import attnbias as ab

SIZES = [
    (1, 1, 4, 4, 16, 16),
    (2, 1, 3, 2, 8, 7),
    (1, 3, 5, 1, 9, 5),
    (2, 2, 1, 4, 3, 13),
    (1, 1, 7, 7, 3, 50),
]


def draw(B: int, H: int, q_size: int, k_size: int, Q: int, K: int) -> tuple[Tensor, Tensor]:
    """Draw a block map, and the mask that it means."""
    rng = np.random.default_rng(Q)
    blocks = rng.random((B, H, -(-Q // q_size), -(-K // k_size))) < 0.4
    mask = blocks.repeat(q_size, 2).repeat(k_size, 3)[:, :, :Q, :K]
    return torch.from_numpy(blocks), torch.from_numpy(mask.copy())


def as_lists(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """List the blocks in a random order; places beyond the count hold block 0."""
    lists = torch.zeros(blocks.shape, dtype=torch.int32)
    for place in np.ndindex(*blocks.shape[:3]):
        chosen = blocks[place].nonzero().squeeze(1)
        lists[place][: len(chosen)] = chosen[torch.randperm(len(chosen))].int()
    return lists, blocks.sum(-1)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("form", ["map", "lists"])
def test_blocks_relate_whole_blocks(sizes: tuple[int, ...], form: str) -> None:
    blocks, mask = draw(*sizes)
    Q, K = mask.shape[-2:]
    made = (blocks, sizes[2:4]) if form == "map" else (as_lists(blocks)[0], sizes[2:4], as_lists(blocks)[1])
    relation = ab.Blocks(*made)
    assert torch.equal(relation.dense(Q, K).expand(mask.shape), mask)
    assert torch.equal(ab.Layout.build(relation, Q, K).to_dense().expand(mask.shape), mask)
    turned = ab.Layout.build(relation.T, K, Q).to_dense()
    assert torch.equal(turned.expand(*mask.shape[:2], K, Q), mask.transpose(2, 3))
    for first in range(0, Q, 2):
        part = ab.Layout.build(relation, Q - first, K, q_start=first).to_dense()
        assert torch.equal(part.expand(mask[:, :, first:].shape), mask[:, :, first:])
    for distance in (-3, 2):
        moved = relation.shift(distance)
        assert torch.equal(ab.Layout.build(moved, Q, K).to_dense(), moved.dense(Q, K))


@pytest.mark.parametrize("size", [64, 128, 96, 256])
def test_attention_over_blocks_equals_attention_over_their_mask(size: int) -> None:
    torch.manual_seed(0)
    blocks = torch.rand(2, -(-300 // size), -(-270 // size)) < 0.5
    relation = ab.Blocks(blocks, size)
    q = torch.randn(1, 2, 300, 16, dtype=torch.float64)
    k, v = torch.randn(2, 1, 2, 270, 16, dtype=torch.float64)
    mask = ab.Dense(relation.dense(300, 270))
    oracle = ab.attention(q, k, v, mask, backend="reference")
    single = [x.float() for x in (q, k, v)]
    eager = ab.attention(*single, mask, backend="reference")
    for backend in ("cpu", "rows", "reference"):
        out = ab.attention(*single, relation, backend=backend)
        ab.testing.assert_no_worse(backend, out, eager, oracle)


def test_topk_chooses_the_highest_scores_and_never_minus_infinity() -> None:
    scores = torch.randn(3, 5, 7).masked_fill(torch.rand(3, 5, 7) < 0.5, -torch.inf)
    relation = ab.topk_blocks(scores, 3, size=(2, 4))
    dense = relation.dense(10, 28)
    ranks = scores.argsort(-1, descending=True).argsort(-1)
    chosen = (ranks < 3) & (scores > -torch.inf)
    want = chosen.repeat_interleave(2, 1).repeat_interleave(4, 2)
    assert torch.equal(dense[0], want)
    assert ab.topk_blocks(scores, 99, size=4).blocks.shape == (3, 5, 7)


def test_topk_never_chooses_a_nan() -> None:
    assert ab.topk_blocks(torch.tensor([[torch.nan, 1.0, 2.0]]), 2).blocks.sort().values.tolist() == [[1, 2]]
    assert ab.topk_blocks(torch.tensor([[torch.nan, torch.inf]]), 2).blocks.tolist() == [[1, -1]]


def test_empty_lists_hold_no_blocks() -> None:
    assert not ab.Blocks([[], []], 4).dense(8, 4).any()


def test_topk_reads_nothing_from_the_device() -> None:
    relation = ab.topk_blocks(torch.empty(2, 4, 4, device="meta"), 2)  # reading a meta tensor raises
    assert relation.blocks.device.type == "meta"
    assert relation.size == (128, 128)


BAD: list[tuple[Any, str]] = [
    (lambda: ab.Blocks([[True]], size=0), "size: wanted at least 1, got 0"),
    (lambda: ab.Blocks([[True]], size=(1, 2, 3)), "size: wanted one number, or those of queries and keys"),
    (lambda: ab.Blocks([[True]], size=2.5), "size: wanted an integer, got 2.5"),
    (lambda: ab.Blocks([True], size=2), "blocks: wanted 2 or 3 or 4 dimensions"),
    (lambda: ab.Blocks([[0.5]], size=2), "blocks: wanted integers"),
    (lambda: ab.Blocks([[-2]], size=2), r"blocks: wanted -1 \(none\) or more, got -2"),
    (lambda: ab.Blocks([[0], [0, 1]], size=2), "blocks: wanted"),
    (lambda: ab.Blocks([[True]], 2, counts=[1]), "counts: wanted None with a map of booleans"),
    (lambda: ab.Blocks([[0, 1]], 2, counts=[3]), "counts: wanted 0 to 2, got 3"),
    (lambda: ab.Blocks([[0, 1]], 2, counts=[-1]), "counts: wanted 0 to 2, got -1"),
    (lambda: ab.Blocks([[0, 1]], 2, counts=[1, 1]), r"counts: wanted \[1\], one for each list, got \[2\]"),
    (lambda: ab.Blocks([[True]], 4).bind(5, 4), "these Blocks have 1 blocks of 4 queries, got q_len = 5"),
    (lambda: ab.Blocks([[True]], 4).bind(4, 5), "these Blocks have 1 blocks of 4 keys, got k_len = 5"),
    (lambda: ab.Blocks([[True, True]], 4).bind(4, 4), "these Blocks have 2 blocks of 4 keys, got k_len = 4"),
    (lambda: ab.Blocks([[True]], 4).bind(2, 4, q_start=3), "4 queries, got q_len = 2 at q_start = 3"),
    (lambda: ab.Blocks([[2]], 4).bind(4, 8), r"blocks: wanted key blocks from -1 \(none\) to 1, got 2"),
    (lambda: ab.Blocks([[[True]]] * 2, 4).bind(4, 4, heads=3), "this Blocks has heads 2, got heads 3"),
    (lambda: ab.topk_blocks(torch.zeros(3, dtype=torch.int64), 1), "scores: wanted floating-point numbers"),
    (lambda: ab.topk_blocks(torch.zeros(3), 1), "scores: wanted floating-point numbers"),
    (lambda: ab.topk_blocks([[1.0]], 1), "scores: wanted a tensor, got list"),
    (lambda: ab.topk_blocks(torch.zeros(2, 2), -1), "k: wanted at least 0, got -1"),
]


@pytest.mark.parametrize(("make", "message"), BAD, ids=[text[:40] for _, text in BAD])
def test_bad_blocks_raise_one_sentence(make: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        make()
    assert "\n" not in str(caught.value)
