"""Calls that are a part of a larger problem, on every instruction set."""

import pytest
import torch
from cases import places as cases
from cases.places import CASES, GRAPH, GRAPHS, LEVELS, PICKS, RELATIONS, Case, cut, draw, run

import attnbias as ab
from attnbias.backends import cpu
from attnbias.backends.places import Places
from attnbias.op.problem import Problem
from attnbias.op.run import attend

pytestmark = pytest.mark.skipif(cpu.missing() is not None, reason=str(cpu.missing()))


@pytest.fixture(params=[] if cpu.missing() else cpu.isas(), autouse=True)
def isa(request):
    cpu.force_isa(request.param)
    yield request.param
    cpu.force_isa(None)


@pytest.mark.parametrize("name", CASES)
def test_part_has_the_bits_of_the_whole_with_every_option(name):
    case = CASES[name]
    cases.check_bits("cpu", case, cut(RELATIONS["causal"], case, PICKS["scattered tiles"]))


@pytest.mark.parametrize("name", ["plain", "all"])
@pytest.mark.parametrize("relation", RELATIONS)
def test_part_has_the_bits_of_the_whole_for_every_relation(name, relation):
    case = CASES[name]
    cases.check_bits("cpu", case, cut(RELATIONS[relation], case, PICKS["ragged end"]))


@pytest.mark.parametrize("pick", PICKS)
def test_part_of_any_length(pick):
    """A few rows have kernels of their own, whose sums have another order."""
    case = CASES["all"]
    part = cut(RELATIONS["prefix"], case, PICKS[pick])
    cases.check_bits("cpu", case, part, same=pick != "one row")


def test_part_in_tiles_of_128():
    case, rows = CASES["all"], [*range(128, cases.Q)]
    cases.check_bits("cpu", case, cut(RELATIONS["causal"], case, rows, tile=128))


@pytest.mark.parametrize("relation", ["window", "global"])
def test_part_as_edges(relation):
    case = CASES["all"]
    cases.check_bits("cpu", case, cut(RELATIONS[relation], case, PICKS["ragged end"], "edges"), same=False)


def test_part_with_tiles_and_edges():
    case = CASES["all"]
    part = cut(RELATIONS["mixed"], case, PICKS["97 rows"], "auto")
    assert part.local.tiles and part.local.edges
    cases.check_bits("cpu", case, part, same=False)


@pytest.mark.parametrize("pick", ["scattered tiles", "tile + 1"])
@pytest.mark.parametrize("relation", ["causal", "full"])
@pytest.mark.parametrize("name", LEVELS)
def test_part_has_the_bits_of_the_whole_with_levels(name, relation, pick):
    case = LEVELS[name]
    cases.check_bits("cpu", case, cut(RELATIONS[relation], case, PICKS[pick]))


@pytest.mark.parametrize("name", GRAPHS)
def test_part_of_a_graph(name):
    case = GRAPHS[name]
    cases.check_bits("cpu", case, cut(GRAPH, case, range(0, cases.Q, 3), "edges"), same=False)


def test_part_of_a_graph_with_heads_that_go_together():
    """Eight heads of eight numbers have kernels of their own, and so has the pass that computes twice."""
    inputs = ab.testing.make_inputs(1, cases.B, 8, 8, cases.Q, cases.K, 8, 8)
    case = Case(numbers={"dropout_p": 0.4})
    part = cut(GRAPH, Case(), range(0, cases.Q, 3), "edges")
    rows, keys = part.places.queries.long() - cases.START, part.places.keys.long()
    local = [x[:, :, at] for x, at in zip(inputs, (rows, keys, keys), strict=True)]
    found = []
    before = cpu.library().ab_set_edge_budget
    for budget in (1 << 28, 0):
        kept = before(budget)
        for given, layout, places in ((inputs, part.whole, None), (local, part.local, part.places)):
            leaves = [x.detach().requires_grad_() for x in given]
            out, lse, top = run("cpu", [*leaves, None], case, layout, places)
            picked = [x if places else x[:, :, rows] for x in (out, lse, top)]
            grads = torch.autograd.grad(picked[0].sin().sum() + picked[1].clamp(min=-9).sum(), leaves)
            at = (slice(None) if places else index for index in (rows, keys, keys))
            found.append([*picked, *(x[:, :, index] for x, index in zip(grads, at, strict=True))])
        before(kept)
    for got in found[1:]:
        for mine, theirs in zip(got, found[0], strict=True):
            torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("form", ["tiles", "edges"])
def test_batches_and_heads_may_be_a_part(form):
    q, k, v = ab.testing.make_inputs(1, 3, 8, 4, 97, 97, 8, 5)

    def call(heads, batches, places=None):
        key_heads = slice(heads.start // 2, heads.stop // 2)
        layout = ab.Window(before=30).layout(97, 97, form=form)
        some = (q[batches, heads], k[batches, key_heads], v[batches, key_heads])
        problem = Problem(*some, layout, places=places, dropout_p=0.5, return_lse=True)
        problem.seed = cases.SEED
        return attend(problem, "cpu")[:2]

    whole, heads, batches = call(slice(0, 8), slice(0, 3)), slice(2, 6), slice(1, 3)
    part = call(heads, batches, Places(first_batch=1, first_head=2))
    for got, want in zip(part, whole, strict=True):
        assert torch.equal(got, want[batches, heads])


@pytest.mark.parametrize("side", ["queries", "keys"])
@pytest.mark.parametrize("name", ["dropout", "ALiBi", "levels"])
def test_other_positions_give_other_results(name, side):
    """Guard the tests above: they would miss positions that nothing reads."""
    case = LEVELS["none"] if name == "levels" else CASES[name]
    part = cut(RELATIONS["full"], case, PICKS["ragged end"])
    inputs = [x.detach() for x in draw(case)]
    rows, keys = part.places.queries.long() - cases.START, part.places.keys.long()
    inputs[:3] = [x[:, :, at] for x, at in zip(inputs[:3], (rows, keys, keys), strict=True)]
    other = getattr(part.places, side).clone()
    other[: cases.TILE] += cases.TILE if side == "keys" else -cases.TILE
    moved = part.places._replace(**{side: other})
    here, there = (run("cpu", inputs, case, part.local, at)[0] for at in (part.places, moved))
    assert not torch.equal(here, there)
