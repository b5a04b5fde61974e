"""Ranges read back from layouts: equal to the relation, row by row, for whatever tiles it was built of."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

import attnbias as ab
from attnbias.backends.cudnn import make_endpoints
from attnbias.layouts.runs import find_runs
from attnbias.testing import random_relation

B, H = 2, 4
LENGTHS = (1, 31, 63, 64, 65, 97, 130)


def build(relation, q_len, k_len, tile, **how):
    return ab.Layout.build(relation, q_len, k_len, form="tiles", tile=tile, **how)


def dense_of(endpoints, batch, k_len):
    """Return what NVIDIA documents that endpoints mean, [batch, 1 or H, Q, K], after its checks of them."""
    heads, count, rows = endpoints.shape
    assert endpoints.dtype == torch.int32 and endpoints.is_contiguous() and count % 2 == 1
    table = endpoints.view(heads, count, batch, rows // batch).permute(2, 0, 3, 1).numpy()
    begin, end = np.pad(table[..., 1::2], ((0, 0),) * 3 + ((1, 0),)), table[..., 0::2]
    assert (begin >= 0).all() and (begin <= end).all() and (end <= k_len).all()
    assert (begin[..., 1:] >= end[..., :-1]).all()
    key = np.arange(k_len)
    return ((key >= begin[..., None]) & (key < end[..., None])).any(3)


def compare(seed):
    """Compare a random relation with its layouts; return how many have few enough ranges in each row."""
    rng, done = random.Random(seed), 0
    q_len, k_len = rng.choice(LENGTHS), rng.choice(LENGTHS)
    relation = random_relation(rng, rng.randint(0, 2), q_len=q_len, k_len=k_len, batch=B, heads=H)
    want = relation.dense(q_len, k_len, batch=B, heads=H).expand(B, H, q_len, k_len).numpy()
    most = int((np.diff(want, axis=-1, prepend=False) & want).sum(-1).max())
    for tile in (64, 128):
        try:
            layout = build(relation, q_len, k_len, tile, batch=B, heads=H)
        except ValueError:  # repeated edges, which only edges hold
            continue
        runs = find_runs(layout, 8)
        assert (runs is None) == (most > 8), (seed, relation)
        if runs is not None:
            mine = runs.dense().reshape(-1, q_len, k_len)[np.broadcast_to(runs.group, (B, H))]
            assert (mine == want).all(), (seed, relation)
            assert (dense_of(make_endpoints(runs, B, H), B, k_len) == want).all(), (seed, relation)
            done += 1
    return done


def test_runs_and_endpoints_equal_the_relation():
    assert sum(map(compare, range(200))) > 200


@pytest.mark.slow
def test_runs_and_endpoints_equal_the_relation_for_thousands():
    assert sum(map(compare, range(1000, 3500))) > 2500


@pytest.mark.parametrize("name", ["q_ptr", "q_tile", "q_mark", "patterns"])
def test_every_list_of_the_layout_is_read(name):
    """Break a list: the ranges change."""
    relation = ab.Causal() & ab.Window(before=150) | ab.Global([3])
    layout = build(relation, 300, 300, 64)
    want = find_runs(layout, 8)
    field = getattr(layout, name).view(-1)
    if name == "q_ptr":
        field[1] += 1  # a partial tile is taken for a full one
    elif name == "q_tile":
        field[-3] -= 1
    elif name == "q_mark":
        field[(field[:-1] > 0).nonzero()[-1]] -= 1
    else:
        field[0] ^= 1 << 5
    got = find_runs(layout, 8)
    assert got is None or any(
        not np.array_equal(getattr(got, each), getattr(want, each)) for each in ("ptr", "start", "stop")
    )


@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize(("q_len", "k_len"), [(0, 5), (5, 0), (0, 0), (1, 1), (300, 1), (1, 300)])
def test_short_sides(q_len, k_len, tile):
    runs = find_runs(build(ab.Full(), q_len, k_len, tile), 1)
    assert runs.dense().shape == (q_len, k_len) and runs.dense().all()


def test_many_patterns_are_read_in_parts(monkeypatch):
    relation = ab.Ranges(torch.arange(600) * 7 % 400, torch.arange(600) * 7 % 400 + 150)
    layout = build(relation, 600, 600, 64)
    whole = find_runs(layout, 8)
    monkeypatch.setattr("attnbias.layouts.runs._PATTERNS_AT_ONCE", 3)
    assert layout.patterns_count > 9
    parts = find_runs(layout, 8)
    assert np.array_equal(parts.dense(), whole.dense())
    assert np.array_equal(whole.dense(), relation.dense(600, 600).numpy())


def test_a_row_with_more_ranges_than_wanted_gives_none():
    inside = build(ab.Dense((torch.arange(64) % 7 == 0).expand(20, 64)), 20, 64, 64)  # in one tile
    across = build(ab.Dense((torch.arange(256) % 64 == 0).expand(20, 256)), 20, 256, 64)  # one in each
    for layout, count in ((inside, 10), (across, 4)):
        assert find_runs(layout, count) is not None
        assert find_runs(layout, count - 1) is None


def test_depths_of_a_multilevel_layout_make_no_difference():
    score = ab.MultiLevel([8, 8])
    layout = build(ab.Causal(), 200, 200, 64, score=score)
    assert np.array_equal(find_runs(layout, 1).dense(), ab.Causal().dense(200, 200).numpy())


def test_edges_are_refused():
    layout = ab.Layout.build(ab.Causal(), 5, 5, form="edges")
    with pytest.raises(ValueError, match=r"^layout: wanted tiles only, got 15 edges$"):
        find_runs(layout, 8)


def test_heads_that_share_a_mask_have_one():
    same = find_runs(build(ab.Causal(), 70, 70, 64), 8)
    assert make_endpoints(same, 3, 4).shape == (1, 1, 3 * 70)
    batches = ab.PerBatch([ab.Causal(), ab.Window(before=3)])
    assert make_endpoints(find_runs(build(batches, 70, 70, 64, batch=2, heads=4), 8), 2, 4).shape[0] == 1
    heads = ab.PerHead([ab.Causal(), ab.Window(before=3)])
    assert make_endpoints(find_runs(build(heads, 70, 70, 64, batch=3, heads=2), 8), 3, 2).shape == (2, 3, 210)
