"""Calls that are a part of a larger problem, in Triton's interpreter: see test_tiles."""

import pytest
import torch
from cases import places as cases
from cases.interpreter import interpreted, not_interpreted, poison_all, run_interpreted  # noqa: F401
from cases.places import CASES, GRAPH, GRAPHS, LEVELS, PICKS, RELATIONS, cut, draw, run

import attnbias as ab
from attnbias.backends.places import Places
from attnbias.op.problem import Problem
from attnbias.op.run import attend

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("poison_all")


@not_interpreted
def test_interpreted():
    """Run this file once more, interpreted."""
    run_interpreted(__file__)


@interpreted
@pytest.mark.parametrize(
    ("name", "relation", "pick"),
    [
        ("plain", "causal", "scattered tiles"),
        ("dropout", "window", "ragged end"),
        ("T5", "window", "tile + 1"),
        ("all", "causal", "97 rows"),
        ("all", "per head", "one row"),
    ],
)
def test_part_has_the_bits_of_the_whole(name, relation, pick):
    case = CASES[name]
    cases.check_bits("triton", case, cut(RELATIONS[relation], case, PICKS[pick]))


@interpreted
def test_part_has_the_bits_of_the_whole_with_levels():
    case = LEVELS["all"]
    cases.check_bits("triton", case, cut(ab.Window(before=20), case, PICKS["tile + 1"]))


@interpreted
def test_part_of_a_graph():
    case = GRAPHS["all"]
    cases.check_bits("triton", case, cut(GRAPH, case, range(0, cases.Q, 40), "edges"), same=False)


@interpreted
def test_part_with_tiles_and_edges():
    case = CASES["all"]
    part = cut(RELATIONS["mixed"], case, PICKS["97 rows"], "auto")
    assert part.local.tiles and part.local.edges
    cases.check_bits("triton", case, part, same=False)


@interpreted
@pytest.mark.parametrize("form", ["tiles", "edges"])
def test_batches_and_heads_may_be_a_part(form):
    q, k, v = ab.testing.make_inputs(1, 2, 4, 2, 9, 9, 8, 5)

    def call(heads, batches, places=None):
        key_heads = slice(heads.start // 2, heads.stop // 2)
        layout = ab.Window(before=3).layout(9, 9, form=form)
        some = (q[batches, heads], k[batches, key_heads], v[batches, key_heads])
        problem = Problem(*some, layout, places=places, dropout_p=0.5, return_lse=True)
        problem.seed = cases.SEED
        return attend(problem, "triton")[:2]

    whole, heads, batches = call(slice(0, 4), slice(0, 2)), slice(2, 4), slice(1, 2)
    part = call(heads, batches, Places(first_batch=1, first_head=2))
    for got, want in zip(part, whole, strict=True):
        assert torch.equal(got, want[batches, heads])


@interpreted
@pytest.mark.parametrize("side", ["queries", "keys"])
@pytest.mark.parametrize("name", ["dropout", "ALiBi", "levels"])
def test_other_positions_give_other_results(name, side):
    """Guard the tests above: they would miss positions that nothing reads."""
    case = LEVELS["none"] if name == "levels" else CASES[name]
    part = cut(RELATIONS["full"], case, PICKS["tile + 1"])
    inputs = [x.detach() for x in draw(case)]
    rows, keys = part.places.queries.long() - cases.START, part.places.keys.long()
    inputs[:3] = [x[:, :, at] for x, at in zip(inputs[:3], (rows, keys, keys), strict=True)]
    other = getattr(part.places, side).clone()
    other[: cases.TILE] += cases.TILE if side == "keys" else -cases.TILE
    moved = part.places._replace(**{side: other})
    here, there = (run("triton", inputs, case, part.local, at)[0] for at in (part.places, moved))
    assert not torch.equal(here, there)
