"""Plans on paper: laws that hold for every relation, split and number of ranks, without a process."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

import attnbias as ab
from attnbias.sharding.plan import Plan
from attnbias.sharding.split import TILE
from attnbias.testing import random_relation

CPU = torch.device("cpu")
SPLITS = ("auto", "even", "zigzag", "work")
LENGTHS = (1, 97, TILE - 1, TILE, TILE + 1, 3 * TILE - 5, 700)


def whole(relation: ab.Relation, plan: Plan) -> torch.Tensor:
    """Return the relation as booleans, [batch, heads, q_len, k_len], a size of 1 where it does not differ."""
    place = plan.place
    grid = relation.dense(*place[:3], batch=place.batch, heads=place.heads)
    return grid if grid.dim() == 4 else grid[None, None]


def draw(seed: int) -> tuple[ab.Shard, ab.Relation]:
    """Draw a relation, lengths and a split."""
    rng = random.Random(seed)
    q_len = rng.choice(LENGTHS)
    k_len = rng.choice((q_len, q_len, rng.choice(LENGTHS)))
    batch, heads, first = rng.choice((1, 2)), rng.choice((1, 3)), rng.choice((0, 0, 5))
    relation = random_relation(
        rng, rng.randint(0, 3), q_len=first + q_len, k_len=k_len, batch=batch, heads=heads
    )
    ranks = rng.choice((1, 2, 3, 4, 7, 64))
    split = rng.choice((*SPLITS, [rng.randrange(ranks) for _ in range(q_len)]))
    return (
        ab.shard(
            *(relation, (q_len, k_len), ranks),
            split=split,
            q_start=first,
            batch=batch,
            heads=heads,
            whole_tiles=rng.random() < 0.3,
        ),
        relation,
    )


@pytest.mark.parametrize("seed", range(120))
def test_every_related_pair_is_on_one_rank_and_its_layout_is_a_slice_of_the_whole(seed):
    shard, relation = draw(seed)
    plan = shard.plan
    grid = whole(relation, plan)
    seen = np.zeros(plan.place.q_len, np.int64)
    for rank in range(plan.ranks):
        part = plan.of(rank)
        seen[part.queries] += 1
        rows = grid[:, :, part.queries]
        others = np.setdiff1d(np.arange(plan.place.k_len), part.keys)
        assert not rows[..., others].any()  # all related keys are fetched
        assert len(np.unique(part.keys)) == len(part.keys)
        mine = ab.Shard(shard.plans, shard.ranks._replace(rank=rank), "keys", 1, False)
        layout = mine.layout(CPU)
        layout.validate()
        local = layout.to_dense() if layout.q_len and layout.k_len else rows[..., part.keys]
        assert torch.equal(local.expand_as(rows[..., part.keys]), rows[..., part.keys])
    assert (seen == 1).all()


@pytest.mark.parametrize("seed", range(120))
def test_what_is_sent_arrives_at_its_place(seed):
    """Move the numbers of keys by the lists of all ranks, as the collective would."""
    plan = draw(seed)[0].plan
    parts = [plan.of(rank) for rank in range(plan.ranks)]
    sent = [
        np.split(plan.keys.tokens(r)[part.give], np.cumsum(part.give_sizes)[:-1])
        for r, part in enumerate(parts)
    ]
    for rank, part in enumerate(parts):
        came = np.concatenate([sent[other][rank] for other in range(plan.ranks)])
        assert [len(sent[other][rank]) for other in range(plan.ranks)] == part.take_sizes
        assert part.take_sizes == plan.received[rank].tolist()
        assert part.take_sizes[rank] == part.give_sizes[rank] == 0
        needed = np.full(len(part.keys), -1)
        needed[part.take] = came
        needed[part.own_to] = plan.keys.tokens(rank)[part.own_from]
        assert np.array_equal(needed, part.keys)


@pytest.mark.parametrize("split", ["even", "zigzag", "work"])
@pytest.mark.parametrize(
    ("length", "ranks"), [(0, 3), (1, 3), (97, 4), (129, 2), (1000, 3), (4096, 7), (9000, 64)]
)
def test_ranks_hold_whole_tiles_and_shares_differ_by_one_tile(split, length, ranks):
    plan = ab.shard(ab.Causal(), length, ranks, split=split).plan
    tiles = np.arange(length) // TILE
    assert all(len(set(plan.queries.owner[tiles == tile].tolist())) == 1 for tile in np.unique(tiles))
    held = np.bincount(plan.queries.tile_owner, minlength=ranks)
    assert plan.queries.counts.sum() == length
    assert held.max() - held.min() <= (2 if split == "zigzag" else 1)  # a zigzag rounds two runs
    for rank in range(ranks):
        assert (np.diff(plan.queries.tokens(rank)) > 0).all()
