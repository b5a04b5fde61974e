"""Ranges of keys as data: the definition, its converse, and the forms of other libraries."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import attnbias as ab

SIZES = [(1, 1, 7, 9, 1), (2, 1, 5, 3, 2), (1, 3, 4, 8, 3), (2, 2, 6, 6, 2), (1, 1, 0, 4, 2), (1, 1, 3, 1, 4)]


def draw(B: int, H: int, Q: int, K: int, n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, Tensor]:
    """Draw ranges that overlap and touch, and the mask that they mean."""
    rng = np.random.default_rng(seed)
    start = rng.integers(0, K + 1, (B, H, Q, n))
    stop = np.minimum(start + rng.integers(0, 4, start.shape), K)
    mask = torch.zeros(B, H, Q, K, dtype=torch.bool)
    for b, h, q, i in np.ndindex(*start.shape):
        mask[b, h, q, start[b, h, q, i] : stop[b, h, q, i]] = True
    return start, stop, mask


def dense(relation: ab.Relation, mask: Tensor) -> Tensor:
    return relation.dense(*mask.shape[-2:]).expand(mask.shape)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("sizes", SIZES)
def test_ranges_relate_their_keys(sizes: tuple[int, ...], dtype: Any) -> None:
    start, stop, mask = draw(*sizes)
    relation = ab.Ranges(start.astype(dtype), torch.from_numpy(stop.astype(dtype)))
    assert torch.equal(dense(relation, mask), mask)
    built = ab.Layout.build(relation, *mask.shape[-2:]).to_dense()
    assert torch.equal(built.expand(mask.shape), mask)
    for first in range(mask.shape[2]):  # some rows only
        part = relation.layout(mask.shape[2] - first, mask.shape[3], q_start=first).to_dense()
        assert torch.equal(part.expand(mask[:, :, first:].shape), mask[:, :, first:])


@pytest.mark.parametrize("shape", [(5,), (5, 2), (2, 5, 2), (2, 3, 5, 2)])
def test_shapes_are_queries_then_batches_then_heads(shape: tuple[int, ...]) -> None:
    relation = ab.Ranges(np.zeros(shape, int), np.ones(shape, int))
    sizes = {1: (1, 1), 2: (1, 1), 3: (2, 1), 4: (2, 3)}[len(shape)]
    assert (relation.batch_size, relation.head_count, relation.lengths) == (*sizes, (5, None))


@pytest.mark.parametrize("sizes", SIZES)
def test_the_converse_is_exact(sizes: tuple[int, ...]) -> None:
    start, stop, mask = draw(*sizes)
    turned = ab.Ranges(start, stop).T
    want = mask.transpose(2, 3)
    assert torch.equal(dense(turned, want), want)
    built = ab.Layout.build(turned, *want.shape[-2:]).to_dense()
    assert torch.equal(built.expand(want.shape), want)


def test_a_relation_gives_its_ranges() -> None:
    for relation in (ab.Causal(), ab.Window(3) | ab.Global([0, 5]), ab.Graph([[0, 3], [2, 2]], num_nodes=9)):
        found = relation.ranges(9, 9)
        assert isinstance(found, ab.Ranges)
        assert torch.equal(found.dense(9, 9), relation.dense(9, 9))
    heads = ab.PerHead([ab.Causal(), ab.Window(1)])
    assert torch.equal(heads.ranges(5, 5).dense(5, 5), heads.dense(5, 5))
    late = ab.Causal().ranges(3, 9, q_start="end")
    assert torch.equal(late.dense(3, 9), ab.Causal().dense(3, 9, q_start="end"))
    with pytest.raises(ValueError, match="ranges: wanted a relation made of ranges or edges, got Where"):
        ab.Where(lambda q, k: q == k).ranges(4, 4)


@pytest.mark.parametrize("sizes", SIZES)
def test_cudnn_endpoints_come_back(sizes: tuple[int, ...]) -> None:
    start, stop, mask = draw(*sizes)
    endpoints = ab.Ranges(start, stop).to_cudnn(mask.shape[3])
    heads, count, rows = endpoints.shape
    assert (endpoints.dtype, heads, rows) == (torch.int32, mask.shape[1], mask.shape[0] * mask.shape[2])
    assert count % 2 == 1
    assert (endpoints.diff(dim=1) >= 0).all(), "cuDNN wants endpoints that do not fall"
    back = ab.Ranges.from_cudnn(endpoints, batch=mask.shape[0])
    assert torch.equal(dense(back, mask), mask)


def flashmask(table: np.ndarray, causal: bool, queries: int) -> np.ndarray:
    """Expand FlashMask's rule: what it hides, key by key."""
    *lead, keys, columns = table.shape
    shown = np.ones((*lead, queries, keys), bool)
    for b, h, k in np.ndindex(*lead, keys):
        numbers = table[b, h, k]
        column = shown[b, h, :, k]
        if causal:
            column[:k] = False
        if columns == 1:
            column[numbers[0] :] = False
        elif columns == 2 and not causal:
            column[numbers[0] :] = False
            column[: numbers[1]] = False
        else:
            for first, last in numbers.reshape(-1, 2):
                column[first:last] = False
    return shown


@pytest.mark.parametrize(("causal", "columns"), [(True, 1), (True, 2), (False, 2), (False, 4)])
@pytest.mark.parametrize("queries", [6, 3, 9])
def test_flashmask_is_read_as_published(causal: bool, columns: int, queries: int) -> None:
    rng = np.random.default_rng(columns)
    for _ in range(20):
        table = rng.integers(0, queries + 1, (2, 2, 6, columns))
        found = ab.Ranges.from_flashmask(table, causal=causal, q_len=queries)
        want = torch.from_numpy(flashmask(table, causal, queries))
        assert torch.equal(found.dense(queries, 6), want)
        back = ab.Ranges.from_flashmask(found.T.to_flashmask(queries), causal=False, q_len=queries)
        assert torch.equal(back.dense(queries, 6), want)


def magi(slices: tuple[Tensor, ...], queries: int, keys: int) -> Tensor:
    """Expand MagiAttention's rule, pair by pair."""
    mask = torch.zeros(queries, keys, dtype=torch.bool)
    for (q0, q1), (k0, k1), kind in zip(*(x.tolist() for x in slices), strict=True):
        for q in range(q0, q1):
            for k in range(k0, k1):
                below = k - k1 <= q - q1 or kind in (0, 2)
                above = k - k0 >= q - q0 or kind in (0, 1)
                mask[q, k] |= below and above
    return mask


def test_magi_slices_are_read_as_published_and_come_back() -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        lows, sizes = rng.integers(0, 5, (2, 3)), rng.integers(0, 5, (2, 3))
        q_ranges, k_ranges = (torch.from_numpy(np.stack((lows[i], lows[i] + sizes[i]), 1)) for i in (0, 1))
        slices = q_ranges, k_ranges, torch.from_numpy(rng.integers(0, 4, 3))
        want = magi(slices, 10, 10)
        found = ab.Ranges.from_magi(*slices, q_len=10)
        assert torch.equal(found.dense(10, 10), want)
        assert torch.equal(magi(found.to_magi(), 10, 10), want)


def test_magi_slices_are_few() -> None:
    documents = ab.Documents.from_lengths([300, 200, 500]) & ab.Causal()
    q_ranges, k_ranges, types = documents.ranges(1000, 1000).to_magi()
    assert q_ranges.tolist() == k_ranges.tolist() == [[0, 300], [300, 500], [500, 1000]]
    assert types.tolist() == [1, 1, 1]
    assert ab.Window(before=9).ranges(100, 100).to_magi()[2].tolist() == [1, 3]


BAD: list[tuple[Any, str]] = [
    (lambda: ab.Ranges([0, 3], [1, 2]), r"stop: wanted at least start, which is 3 at \[1\], got 2"),
    (lambda: ab.Ranges([-1], [2]), "start: wanted 0 or more, got -1"),
    (lambda: ab.Ranges([0, 1], [2]), r"stop: wanted the shape of start, \[2\], got \[1\]"),
    (lambda: ab.Ranges([0.5], [1]), "start: wanted integers"),
    (lambda: ab.Ranges([0], [True]), "stop: wanted integers"),
    (lambda: ab.Ranges(0, 1), "start: wanted 1 or 2 or 3 or 4 dimensions"),
    (lambda: ab.Ranges(np.zeros((1, 1, 1, 1, 1), int), [0]), "start: wanted 1 or 2 or 3 or 4 dimensions"),
    (lambda: ab.Ranges("abc", [0]), "start: wanted integers in a tensor"),
    (lambda: ab.Ranges([[0], [0, 1]], [0]), "start: wanted integers in a tensor"),
    (lambda: ab.Ranges([0, 0], [5, 2]).bind(2, 4), "stop: wanted at most k_len = 4, got 5"),
    (lambda: ab.Ranges([0, 0], [1, 1]).bind(3, 4), "this Ranges is for 2 queries, got q_len = 3"),
    (lambda: ab.Ranges([0, 0], [1, 1]).bind(1, 4, q_start=2), "for 2 queries, got q_len = 1 at q_start = 2"),
    (
        lambda: ab.Ranges([0, 0], [1, 1]).bind(1, 4, q_start=-1),
        "for 2 queries, got q_len = 1 at q_start = -1",
    ),
    (lambda: ab.Ranges([[[0]]] * 2, [[[1]]] * 2).bind(1, 4, batch=3), "this Ranges has batch 2, got batch 3"),
    (lambda: ab.Ranges.from_cudnn([[1, 1]] * 2), "endpoints: wanted an odd number for each query, got 2"),
    (lambda: ab.Ranges.from_cudnn([[1, 1, 1]], batch=2), "endpoints: wanted batch = 2 sequences"),
    (lambda: ab.Ranges.from_cudnn([1, 1]), "endpoints: wanted 2 or 3 dimensions"),
    (lambda: ab.Ranges.from_cudnn([[1]], batch=0), "batch: wanted at least 1, got 0"),
    (lambda: ab.Ranges.from_cudnn([[1], [3], [2]]), "stop: wanted at least start"),
    (
        lambda: ab.Ranges.from_flashmask([[1, 2, 3]]),
        "startend_row_indices: wanted 1 or 2 numbers for each key",
    ),
    (lambda: ab.Ranges.from_flashmask([[1]], causal=False), "startend_row_indices: wanted 2 or 4 numbers"),
    (lambda: ab.Ranges.from_flashmask([[1]], causal="yes"), "causal: wanted True or False, got 'yes'"),
    (lambda: ab.Ranges.from_flashmask([1]), "startend_row_indices: wanted 2 or 3 or 4 dimensions"),
    (lambda: ab.Ranges.from_flashmask([[1]], q_len=-1), "q_len: wanted at least 0, got -1"),
    (lambda: ab.Columns(2).ranges(9, 9), "ranges: wanted a relation made of ranges or edges, got Columns"),
    (
        lambda: ab.Ranges([[0, 2, 4]], [[1, 3, 5]]).to_flashmask(7),
        "ranges: wanted at most two hidden ranges of queries for each key, got 3",
    ),
    (lambda: ab.Ranges.from_magi([[0, 1]], [[0, 1]], [4]), "types: wanted 0, 1, 2 or 3, got 4"),
    (
        lambda: ab.Ranges.from_magi([[2, 1]], [[0, 1]], [0]),
        r"q_ranges: wanted 0 <= first <= last in each row",
    ),
    (
        lambda: ab.Ranges.from_magi([[0, 1]], [[-1, 1]], [0]),
        r"k_ranges: wanted 0 <= first <= last in each row",
    ),
    (
        lambda: ab.Ranges.from_magi([[0, 1]], [[0, 1]], [0, 1]),
        r"q_ranges: wanted \[2, 2\], a row for each type",
    ),
    (
        lambda: ab.Ranges.from_magi([[0, 9]], [[0, 1]], [0], q_len=4),
        "q_ranges: wanted at most q_len = 4, got 9",
    ),
    (
        lambda: ab.Ranges([[[0]]] * 2, [[[1]]] * 2).to_magi(),
        "ranges: wanted one sequence and head, got batch 2",
    ),
]


@pytest.mark.parametrize(("make", "message"), BAD, ids=[text[:40] for _, text in BAD])
def test_bad_ranges_raise_one_sentence(make: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_one_number_of_any_stride_is_hashed():
    """A relation of a single number that was cut from a tensor of stride 0 had no hash, so did not run."""
    start = torch.zeros(1, dtype=torch.int64).as_strided((1, 1), (1, 0))
    assert hash(ab.Ranges(start, start + 1)) == hash(ab.Ranges([[0]], [[1]]))
