"""Calls that are a part of a larger problem: equal to its rows, keys, batches and heads."""

import pytest
import torch
from cases import places as cases
from cases.places import CASES, GRAPH, GRAPHS, LEVELS, PICKS, RELATIONS, Case, cut, draw, results, run

import attnbias as ab
from attnbias.backends.places import Places
from attnbias.op.problem import Problem
from attnbias.op.run import attend

BACKENDS = ["reference", "rows"]
EXACT = pytest.mark.parametrize("backend", BACKENDS)


@EXACT
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("relation", ["causal", "per head"])
def test_part_equals_the_whole_with_every_option(backend, name, relation):
    case = CASES[name]
    cases.check_exact(backend, case, cut(RELATIONS[relation], case, PICKS["scattered tiles"]))


@EXACT
@pytest.mark.parametrize(
    ("relation", "pick"),
    [*(("causal", pick) for pick in PICKS), *((relation, "ragged end") for relation in RELATIONS)],
)
def test_part_equals_the_whole_for_every_relation(backend, relation, pick):
    case = CASES["all"]
    cases.check_exact(backend, case, cut(RELATIONS[relation], case, PICKS[pick]))


@EXACT
@pytest.mark.parametrize("form", ["edges", "auto"])
@pytest.mark.parametrize("relation", ["window", "mixed", "empty rows"])
def test_part_equals_the_whole_in_other_forms(backend, form, relation):
    case = CASES["all"]
    cases.check_exact(backend, case, cut(RELATIONS[relation], case, PICKS["ragged end"], form))


@EXACT
@pytest.mark.parametrize("pick", ["scattered tiles", "tile + 1"])
@pytest.mark.parametrize("relation", ["causal", "full"])
@pytest.mark.parametrize("name", LEVELS)
def test_part_equals_the_whole_with_levels(backend, name, relation, pick):
    case = LEVELS[name]
    cases.check_exact(backend, case, cut(RELATIONS[relation], case, PICKS[pick]))


@EXACT
@pytest.mark.parametrize("name", GRAPHS)
def test_part_of_a_graph_equals_the_whole(backend, name):
    case, rows = GRAPHS[name], range(0, cases.Q, 3)
    cases.check_exact(backend, case, cut(GRAPH, case, rows, "edges"))


@EXACT
def test_queries_may_start_before_the_keys(backend):
    case = Case(((cases.H,),), lambda x: [ab.ALiBi(x)], lambda x: ab.MultiLevel([8, 4, 4], [None, 96, 24]))
    part = cut(RELATIONS["window"], case, PICKS["ragged end"], q_start=-40)
    cases.check_exact(backend, case, part, q_start=-40)


def test_own_terms_get_positions():
    class Uneven:
        def value(self, b, h, q, k):
            return torch.sin(q * 0.3 + k * k * 0.01 + h)

    case = Case(terms=lambda: [Uneven()])
    part = cut(RELATIONS["causal"], case, PICKS["scattered tiles"])
    cases.check_exact("reference", case, part)


POSITIONAL = {name: CASES[name] for name in ("dropout", "ALiBi", "T5", "grid", "key", "pair")}


@pytest.mark.parametrize("side", ["queries", "keys"])
@pytest.mark.parametrize("name", [*POSITIONAL, "levels"])
def test_other_positions_give_other_results(name, side):
    """Guard the tests above: they would miss positions that nothing reads."""
    case = LEVELS["none"] if name == "levels" else POSITIONAL[name]
    if (name, side) == ("key", "queries"):
        pytest.skip("a number for each key does not depend on the query")
    part = cut(RELATIONS["full"], case, PICKS["ragged end"])
    inputs = [x.detach() for x in draw(case, torch.float64)]
    rows, keys = part.places.queries.long() - cases.START, part.places.keys.long()
    inputs[:3] = [x[:, :, at] for x, at in zip(inputs[:3], (rows, keys, keys), strict=True)]
    other = getattr(part.places, side).clone()
    other[: cases.TILE] += cases.TILE if side == "keys" else -cases.TILE  # the first tile stands elsewhere
    moved = part.places._replace(**{side: other})
    for backend in BACKENDS:
        here, there = (run(backend, inputs, case, part.local, at)[0] for at in (part.places, moved))
        assert not torch.equal(here, there)


@pytest.mark.parametrize("name", ["dropout", "all"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_batches_and_heads_may_be_a_part(backend, name):
    q, k, v = ab.testing.make_inputs(1, 3, 8, 4, 70, 97, 8, 5, torch.float64)
    slopes, sink = torch.rand(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    options = {"dropout_p": 0.5, "q_start": 27}

    def call(heads, batches, places=None):
        key_heads = slice(heads.start // 2, heads.stop // 2)
        terms = [ab.ALiBi(slopes[heads])] if name == "all" else []
        some = (q[batches, heads], k[batches, key_heads], v[batches, key_heads])
        problem = Problem(
            *some, ab.Causal(), places=places, terms=terms, sink=sink[heads], return_lse=True, **options
        )
        problem.seed = cases.SEED
        return attend(problem, backend)[:2]

    whole, heads, batches = call(slice(0, 8), slice(0, 3)), slice(2, 6), slice(1, 3)
    part = call(heads, batches, Places(first_batch=1, first_head=2))
    for got, want in zip(part, whole, strict=True):
        assert (got - want[batches, heads]).abs().max() <= 1e-12
    elsewhere = call(heads, batches, Places(first_batch=1, first_head=3))
    assert not torch.equal(elsewhere[0], part[0])


@pytest.mark.parametrize("name", ["all", "levels", "graph"])
def test_places_compile_whole(name):
    case = {"all": CASES["all"], "levels": LEVELS["all"], "graph": GRAPHS["all"]}[name]
    case = Case(case.shapes, case.terms, case.score, case.sink, {"softcap": 3.0})
    form = "edges" if name == "graph" else "tiles"
    part = cut(GRAPH if name == "graph" else RELATIONS["causal"], case, PICKS["97 rows"], form)
    inputs = draw(case, torch.float64)
    rows, keys = part.places.queries.long() - cases.START, part.places.keys.long()

    def call(inputs, layout, queries, keys_at):
        query, key, value, *rest = inputs
        local = [query.index_select(2, rows), key.index_select(2, keys), value.index_select(2, keys), *rest]
        places = Places(queries, keys_at, cases.Q, cases.K, cases.START)
        return run("rows", local, case, layout, places)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    given = inputs, part.local, part.places.queries, part.places.keys
    found = []
    for function in (compiled, call):
        out, lse, top = function(*given)
        loss = out.sin().sum() + lse.masked_fill(lse == -torch.inf, 0).cos().sum()
        found.append([out, lse, top, *torch.autograd.grad(loss, inputs, allow_unused=True)])
    for got, want in zip(*found, strict=True):
        assert (got is None) == (want is None)
        assert got is None or torch.equal(got, want)


def test_a_watched_call_has_places():
    """The op carries them wherever a profiler or a dispatch mode sends a call through it."""
    case = CASES["all"]
    part = cut(RELATIONS["causal"], case, PICKS["97 rows"])
    plain = results("rows", case, part, draw(case), is_part=True)
    with torch.profiler.profile():
        watched = results("rows", case, part, draw(case), is_part=True)
    for got, want in zip(watched, plain, strict=True):
        assert all(torch.equal(got[name], want[name]) for name in want)


LAYOUT = ab.Causal().layout(3, 4)
AT = Places(torch.arange(3, dtype=torch.int32), torch.arange(4, dtype=torch.int32), 9, 9)


@pytest.mark.parametrize(
    ("places", "relation", "words"),
    [
        (Places(first_head=-1), None, "places.first_head: wanted at least 0, got -1"),
        (Places(first_batch=-2), None, "places.first_batch: wanted at least 0, got -2"),
        (
            AT._replace(keys=None),
            LAYOUT,
            "places.keys: wanted positions, as the other side has them, got None",
        ),
        (
            AT._replace(queries=None),
            LAYOUT,
            "places.queries: wanted positions, as the other side has them, got None",
        ),
        (
            AT._replace(keys=torch.arange(4)),
            LAYOUT,
            r"places.keys: wanted torch.int32 \[4\], got torch.int64 \[4\]",
        ),
        (
            AT._replace(queries=AT.keys),
            LAYOUT,
            r"places.queries: wanted torch.int32 \[3\], got torch.int32 \[4\]",
        ),
        (
            AT._replace(keys=AT.keys.to("meta")),
            LAYOUT,
            "places.keys: wanted the query's device, cpu, got meta",
        ),
        (
            AT._replace(keys=torch.arange(8, dtype=torch.int32)[::2]),
            LAYOUT,
            "places.keys: wanted a dense tensor, got a stride of 2",
        ),
        (AT._replace(q_len=2), LAYOUT, "places.q_len: wanted at least the 3 queries here, got 2"),
        (AT._replace(k_len=3), LAYOUT, "places.k_len: wanted at least the 4 keys here, got 3"),
        (
            AT,
            ab.Causal(),
            r"relation: wanted a Layout of the queries and keys at these places, got Causal\(\)",
        ),
        (AT._replace(q_start=2), LAYOUT, "q_start: this layout was built with q_start=0, got 2"),
    ],
)
def test_wrong_places_are_refused(places, relation, words):
    query, key = torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 4, 2)
    with pytest.raises(ValueError, match=words):
        Problem(query, key, key, relation, places=places)


def test_sdpa_takes_no_places():
    query = torch.zeros(1, 1, 3, 2)
    problem = Problem(query, query, query, ab.Causal(), places=Places(first_head=1))
    with pytest.raises(NotImplementedError, match="places: not supported"):
        attend(problem, "sdpa")
