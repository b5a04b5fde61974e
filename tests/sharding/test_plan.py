"""Plans on paper: laws that hold for every relation, split and number of ranks, without a process."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
import torch

import attnbias as ab
from attnbias.sharding.plan import Plan
from attnbias.sharding.report import draw as draw_plan
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


def draw_shard(seed: int) -> tuple[ab.Shard, ab.Relation]:
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
    shard, relation = draw_shard(seed)
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
    plan = draw_shard(seed)[0].plan
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


def documents(length: int, mean: float, seed: int) -> ab.Relation:
    """Return causal documents with lengths of an exponential distribution."""
    lengths = []
    rng = random.Random(seed)
    while sum(lengths) < length:
        lengths.append(min(1 + int(rng.expovariate(1 / mean)), length - sum(lengths)))
    return ab.Documents.from_lengths(lengths) & ab.Causal()


@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize(
    "relations",
    [
        [ab.Causal()],
        [ab.Window(before=1023)],
        [documents(131_072, 2000, 0)],
        [ab.Causal() | ab.Prefix(20_000)],
        [ab.Window(before=1023), ab.Causal()],
    ],
    ids=["causal", "window", "documents", "prefix", "hybrid"],
)
def test_work_is_balanced(relations, ranks):
    shard = ab.shard(relations, 131_072, ranks)
    executed = sum(each.explain().executed for each in shard)
    assert executed.max() / executed.mean() <= 1.05


def test_work_is_what_layouts_execute():
    """The counted work of a tile row is that of its layout's tiles, and a rank's pairs are its layout's."""
    shard = ab.shard(ab.Window(before=300), 4000, 4)
    report = shard.explain()
    for rank in range(4):
        mine = ab.Shard(shard.plans, shard.ranks._replace(rank=rank), "keys", 1, False)
        assert mine.layout(CPU, "tiles").stats().pairs == report.pairs[rank]
    layout = ab.Layout.build(shard.relation, 4000, 4000, tile=128, form="tiles")
    short = 4000 % TILE  # the plan counts the last key tile, which only the last queries see, as a whole one
    assert report.executed.sum() == layout.stats().executed + short * (TILE - short)


@pytest.mark.parametrize(
    ("relation", "most"),
    [
        (ab.Window(before=1023), 1 / 100),
        (ab.Window(before=4095), 1 / 25),
        (ab.Causal(), 0.76),
        (ab.Full(), 1.0),
    ],
)
def test_bytes_beside_an_all_gather(relation, most):
    ways = {way.name: way for way in ab.shard(relation, 131_072, 8).explain().ways}
    assert ways["keys"].share <= most
    assert ways["all-gather"].traffic.forward.mean() == 131_072 * 7 / 8 * 8 * 2 * 128 * 2
    assert ways["ring"].traffic.backward.sum() == 2 * ways["all-gather"].traffic.forward.sum()
    assert ways["heads"].share == 0.625  # (2 * 32 + 2 * 8) heads in and out, against 2 * 8 from 8 ranks


def test_bytes_of_documents_beside_an_all_gather():
    """Documents that are cut anywhere cost few bytes; balanced ones, of which long ones are shared, more."""
    packed = [documents(131_072, 2000, seed) for seed in range(16)]
    for split, most in (("even", 1 / 50), ("auto", 1 / 30)):
        shares = [ab.shard(each, 131_072, 8, split=split).explain().ways[0].share for each in packed]
        assert np.mean(shares) <= most


def test_a_graph_fetches_single_rows_and_each_once():
    """A path needs the neighbours across a cut, whatever lies between; a duplicate costs nothing."""
    ring = torch.stack((torch.arange(1000), torch.arange(1000).roll(1)))
    graph = ab.Graph(torch.cat((ring, ring), 1), num_nodes=1000)
    assert ab.shard(graph, 1000, 4).plan.received.sum() == 4
    assert ab.shard(graph, 1000, 4, whole_tiles=True).plan.received.sum() == 3 * TILE + TILE
    owner = torch.arange(1000) % 4
    assert ab.shard(graph, 1000, 4, split=owner).plan.received.sum() == 1000


def test_an_order_is_cut_evenly():
    order = torch.arange(1000).flip(0)
    shard = ab.shard(ab.Causal(), 1000, 4, split=order, rank=0)
    assert shard.positions.tolist() == list(range(750, 1000))


def test_a_shard_over_one_rank_is_the_plain_call():
    x = torch.randn(1, 2, 300, 8)
    shard = ab.shard(ab.Causal(), (300, 300), 1, q_start="end")
    assert torch.equal(ab.attention(x, x, x, shard), ab.attention(x, x, x, ab.Causal()))
    assert shard.gather(x, 2) is x


def test_a_report_has_a_table_a_picture_and_numbers():
    shard = ab.shard(ab.Window(before=99), 1024, 4, split="even")
    report = shard.explain(4, 2, (8, 16), torch.float32)
    lines = str(report).splitlines()
    assert lines[0] == "Window(before=99): 1,024 tokens on 4 ranks, split 'even'"
    assert lines[5].split() == ["fetched", "96", "128", "1.333"]
    assert lines[10].split() == ["keys", "18.4", "kB", "24.6", "kB", "18.4", "kB", "24.6", "kB", "0.125"]
    numbers = report.as_dict()
    assert numbers["rows"] == [256] * 4
    assert numbers["ways"]["keys"]["forward"] == [0] + [128 * 2 * 24 * 4] * 3
    tested = ab.shard(ab.Where(lambda q, k: (q * k) % 7 == 0), 300, 2).explain()
    assert "pairs are tested one by one" in str(tested)
    assert draw_plan(shard.plan).splitlines()[1] == ("1 " + "." * 8 + "#" * 8 + "o" * 16 + "." * 32)


def test_a_plan_is_quick():
    """Limits of several times what it takes; documents are planned in every step."""
    for relation, length, ranks, seconds in (
        (documents(16_384, 2000, 0), 16_384, 8, 0.05),
        (ab.Window(before=4095), 1 << 20, 1024, 10.0),
        (ab.Causal(), 1 << 20, 1024, 30.0),
    ):
        times = []
        for _ in range(5 if length < 1 << 20 else 1):
            began = time.process_time()
            shard = ab.shard(relation, length, ranks)
            assert shard.part.queries.size == length // ranks
            times.append(time.process_time() - began)
        assert min(times) < seconds


def test_lengths_of_queries_and_keys_stand_together_or_apart():
    wanted = ab.shard(ab.Full(), (300, 500), 3, rank=1)
    given = ab.shard(ab.Full(), 300, 500, 3, rank=1)
    assert torch.equal(given.positions, wanted.positions)
    assert torch.equal(given.key_positions, wanted.key_positions) and len(given.key_positions) == 128
