"""Attention over triples against its definition, which makes every triple."""

from __future__ import annotations

import random

import pytest
import torch
from torch.utils import checkpoint

import attnbias as ab
from attnbias.relations.picked import Picked
from attnbias.testing import assert_no_worse, random_relation

NAMES = ("out", "lse", "query", "key", "value", "key2", "value2")


def define(query, key, value, key2, value2, first, second, between, scale, q_start=0):
    """Return out and lse as the docstring defines them, from all [Q, K, K2] scores."""
    B, H, Q, _ = query.shape
    K, K2 = key.shape[2], key2.shape[2]
    key, value, key2, value2 = (x.repeat_interleave(H // x.shape[1], 1) for x in (key, value, key2, value2))
    sizes = {"batch": B, "heads": H}
    related = first.dense(Q, K, q_start, **sizes).expand(B, H, Q, K)[..., None]
    related = related & second.dense(Q, K2, q_start, **sizes).expand(B, H, Q, K2)[..., None, :]
    if between is not None:
        related = related & between.dense(K, K2, **sizes).expand(B, H, K, K2)[:, :, None]
    scores = scale * torch.einsum("bhid,bhjd,bhkd->bhijk", query, key, key2)
    scores = scores.masked_fill(~related, -torch.inf).flatten(3)
    empty = ~related.flatten(3).any(-1)
    lse = scores.masked_fill(empty[..., None], 0).logsumexp(-1).masked_fill(empty, -torch.inf)
    weights = torch.exp(scores - lse.masked_fill(empty, 0)[..., None]).view(related.shape)
    return torch.einsum("bhijk,bhjd,bhkd->bhid", weights, value, value2), lse


def with_gradients(attend, tensors, grad_out, grad_lse):
    """Return out, lse and the five gradients."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out, lse = attend(*leaves)
    finite = torch.where(lse == -torch.inf, 0, lse)
    loss = (out * grad_out.to(out.dtype)).sum() + (finite * grad_lse.to(lse.dtype)).sum()
    return [out, lse, *torch.autograd.grad(loss, leaves)]


def largest(x):
    return float(x.detach().abs().max()) if x.numel() else 0.0


def draw(seed):
    """Return random tensors in float64, relations and options; ragged lengths, key heads, empty rows."""
    rng = random.Random(seed)
    batch, groups, groups2 = rng.choice([1, 2]), rng.choice([1, 2]), rng.choice([1, 2])
    heads = 2 * rng.choice([1, 1, 2])
    Q, K, K2 = rng.choice([0, 1, 5, 9, 13]), rng.choice([0, 1, 7, 12, 19]), rng.choice([0, 1, 6, 12, 17])
    D, E, start = rng.choice([1, 3, 8]), rng.choice([1, 4]), rng.choice([0, 0, 2])

    def relation(q_len, k_len):
        return random_relation(rng, rng.randint(0, 2), q_len=q_len, k_len=k_len, batch=batch, heads=heads)

    first, second = relation(Q + start, K), relation(Q + start, K2)
    between = relation(K, K2) if rng.random() < 0.6 else None
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, heads, Q, D), (batch, groups, K, D), (batch, groups, K, E), (batch, groups2, K2, D)]
    tensors = [
        torch.randn(shape, dtype=torch.float64, generator=generator)
        for shape in (*shapes, (batch, groups2, K2, E), (batch, heads, Q, E), (batch, heads, Q))
    ]
    relations, scale = (first, second, between), rng.choice([1.0, 0.5, -0.3, 0.0])
    return tensors, relations, scale, start, rng.choice([None, None, 1, 7, 20])


def compare_with_definition(seed):
    """Compare one random problem in float64."""
    (*tensors, grad_out, grad_lse), relations, scale, start, at_once = draw(seed)

    def attend(*tensors):
        options = {"scale": scale, "q_start": start, "pairs_at_once": at_once}
        return ab.simplicial_attention(*tensors, *relations, return_lse=True, **options)

    wanted = with_gradients(lambda *x: define(*x, *relations, scale, start), tensors, grad_out, grad_lse)
    got = with_gradients(attend, tensors, grad_out, grad_lse)
    assert torch.equal(got[1] == -torch.inf, wanted[1] == -torch.inf)
    assert (got[0] == 0)[wanted[1] == -torch.inf].all()
    for name, mine, truth in zip(NAMES, got, wanted, strict=True):
        finite = truth != -torch.inf
        far, size = (largest(x[finite]) for x in (mine - truth, truth))
        assert far <= 1e-12 * max(size, 1), f"seed {seed}: {name} is off by {far} for {relations}"


@pytest.mark.parametrize("tens", range(6))
def test_random_triples_equal_the_definition(tens):
    for seed in range(10 * tens, 10 * tens + 10):
        compare_with_definition(seed)


@pytest.mark.slow
@pytest.mark.parametrize("tens", range(6, 56))
def test_many_random_triples_equal_the_definition(tens):
    for seed in range(10 * tens, 10 * tens + 10):
        compare_with_definition(seed)


# -- what follows from the definition -----------------------------------------------------------------


def make(*sizes, dtype=torch.float64, heads=2, seed=0):
    """Draw query, key, value, key2 and value2 of 6 and 5 numbers; the sizes are Q, K and K2."""
    Q, K, K2 = sizes if len(sizes) == 3 else sizes * 3
    generator = torch.Generator().manual_seed(seed)
    shapes = [(Q, 6), (K, 6), (K, 5), (K2, 6), (K2, 5)]
    return [torch.randn(2, heads, *shape, dtype=dtype, generator=generator) for shape in shapes]


def test_one_second_key_of_ones_is_plain_attention():
    """Each query has one second key, its own, whose key and value are 1."""
    query, key, value, key2, value2 = make(21)
    first = ab.Causal() & ab.Documents([0] * 9 + [-1] * 2 + [1] * 10)
    given = query, key, value, torch.ones_like(key2), torch.ones_like(value2)
    got = ab.simplicial_attention(*given, first, ab.Window(before=0), return_lse=True)
    wanted = ab.attention(query, key, value, first, return_lse=True)
    for mine, truth in zip(got, wanted, strict=True):
        assert largest((mine - truth)[truth != -torch.inf]) < 1e-14
    assert torch.equal(got[1] == -torch.inf, wanted[1] == -torch.inf)


@pytest.mark.parametrize(
    ("first", "second", "between"),
    [
        (ab.Full(), ab.Full(), None),
        (ab.Window(before=6), ab.Window(before=2), None),
        (ab.Causal(), ab.Causal(), ab.Causal() - ab.Window(before=0)),
        (ab.PerHead([ab.Causal(), ab.Window(2)]), ab.PerHead([ab.Empty(), ab.Window(1, 1)]), ab.Chunks(3)),
        (
            ab.PerBatch([ab.Full(), ab.Causal()]),
            ab.PerHead([ab.Full(), ab.Window(1)]),
            ab.Where(lambda q, k: q >= k),
        ),
    ],
    ids=repr,
)
@pytest.mark.parametrize("at_once", [None, 1, 10])
def test_relations_of_every_shape(first, second, between, at_once):
    tensors = make(13)
    got = ab.simplicial_attention(*tensors, first, second, between, pairs_at_once=at_once)
    wanted, _ = define(*tensors, first, second, between, 6**-0.5)
    assert largest(got - wanted) < 1e-13


def triangles(n=12, seed=3):
    """Return a random directed acyclic graph, and its number of triangles i <- j, i <- k, j <- k."""
    edges = torch.rand(n, n, generator=torch.Generator().manual_seed(seed)) < 0.4
    edges = edges.tril(-1)
    count = int(torch.einsum("ij,ik,jk->", *[edges.long()] * 3))
    return ab.Graph.from_adjacency(edges), count


def test_triangles_of_a_graph():
    graph, count = triangles()
    tensors = make(12)
    got, lse = ab.simplicial_attention(*tensors, graph, graph, graph, scale=0.0, return_lse=True)
    assert round(float(lse[0, 0].exp().sum())) == count > 10
    wanted, _ = define(*tensors, graph, graph, graph, 0.0)
    assert largest(got - wanted) < 1e-13


def test_wrong_relation_between_keys_gives_another_result():
    graph, _ = triangles()
    tensors = make(12)
    right = ab.simplicial_attention(*tensors, graph, graph, graph)
    for wrong in (graph.T, graph | ab.Window(before=0), None, ab.Empty()):
        assert largest(ab.simplicial_attention(*tensors, graph, graph, wrong) - right) > 0.1


def test_repeated_edge_counts_once():
    twice, once = ab.Graph([[0, 0, 1], [1, 1, 1]], num_nodes=2), ab.Graph([[0, 1], [1, 1]], num_nodes=2)
    tensors = make(2)
    wanted = ab.simplicial_attention(*tensors, once, once, once.T, return_lse=True)
    got = ab.simplicial_attention(*tensors, twice, twice, twice.T, return_lse=True)
    assert all(torch.equal(mine, truth) for mine, truth in zip(got, wanted, strict=True))


def test_row_without_triple_gets_zeros_and_gradients_of_zero():
    """Query 0 has keys of both kinds, but no pair of them is related."""
    tensors = make(9)
    given = ab.Causal(), ab.Causal(), ab.Causal() - ab.Window(before=0)
    grads = torch.randn(2, 2, 9, 5).double(), torch.randn(2, 2, 9).double()
    attend = lambda *x: ab.simplicial_attention(*x, *given, return_lse=True)  # noqa: E731
    out, lse, *found = with_gradients(attend, tensors, *grads)
    assert (out[:, :, 0] == 0).all() and (lse[:, :, 0] == -torch.inf).all() and lse[:, :, 1:].isfinite().all()
    assert (found[0][:, :, 0] == 0).all() and all(x.isfinite().all() for x in found)


def test_step_of_decoding_equals_the_row_of_prefill():
    query, *rest = make(14)
    relations = ab.Window(before=5), ab.Window(before=2), ab.Causal()
    whole = ab.simplicial_attention(query, *rest, *relations)
    for t in (0, 3, 13):
        step = ab.simplicial_attention(query[:, :, t : t + 1], *rest, *relations, q_start=t)
        assert largest(step - whole[:, :, t : t + 1]) < 1e-14
    last = ab.simplicial_attention(query[:, :, -2:], *rest, *relations, q_start="end")
    assert largest(last - whole[:, :, -2:]) < 1e-14


def test_inputs_without_a_batch():
    tensors = make(8)
    relations = ab.Causal(), ab.Window(before=1)
    out, lse = ab.simplicial_attention(*tensors, *relations, return_lse=True)
    one = ab.simplicial_attention(*(x[1] for x in tensors), *relations, return_lse=True)
    assert torch.equal(one[0], out[1]) and torch.equal(one[1], lse[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lower_precision_is_no_worse_than_the_definition_in_it(dtype):
    tensors = make(40, heads=2, dtype=dtype)
    relations = ab.Window(before=20), ab.Window(before=7), ab.Causal()
    grads = [torch.randn(2, 2, 40, 5, dtype=dtype), torch.randn(2, 2, 40)]
    attend = lambda *x: ab.simplicial_attention(*x, *relations, return_lse=True)  # noqa: E731
    formula = lambda *x: define(*x, *relations, 6**-0.5)  # noqa: E731
    got = with_gradients(attend, tensors, *grads)
    eager = with_gradients(formula, tensors, *grads)
    truth = with_gradients(formula, [x.double() for x in tensors], *(x.double() for x in grads))
    assert got[0].dtype == dtype and got[1].dtype == torch.float32
    # A score, 1 + |q| |k| |k2| / sqrt(D), is rounded at its size; its weight is off by that much of itself.
    q, k, v, k2, v2 = (float(x.double().norm(dim=-1).max()) for x in tensors)
    score = 1 + q * k * k2 * 6**-0.5
    sizes = [score * v * v2, score, *[score**2 * v * v2] * 5]
    for name, size, mine, same, exact in zip(NAMES, sizes, got, eager, truth, strict=True):
        assert_no_worse(name, mine, same, exact, 2 if name in ("out", "lse") else 3, magnitude=size)


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [None, 30])
def test_compiled_function_gives_the_same(at_once):
    tensors = [x.requires_grad_() for x in make(21, dtype=torch.float32)]

    def attend(*tensors):
        given = ab.Window(before=6), ab.Window(before=3), ab.Causal()
        return 2 * ab.simplicial_attention(*tensors, *given, pairs_at_once=at_once)

    compiled = torch.compile(attend, backend="aot_eager")
    for _ in range(2):
        outs = [attend(*tensors), compiled(*tensors)]
        grads = [torch.autograd.grad(out.square().sum(), tensors) for out in outs]
        assert torch.equal(*outs)
        assert all(map(torch.equal, *grads))


def test_autocast_computes_in_bfloat16():
    tensors = make(21, dtype=torch.float32)
    given = ab.Window(before=6), ab.Window(before=3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse = ab.simplicial_attention(*tensors, *given, return_lse=True)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    exact, lower = (
        define(*(x.to(t) for x in tensors), *given, None, 6**-0.5)[0] for t in (torch.double, out.dtype)
    )
    assert_no_worse("out", out, lower, exact)


def test_autocast_takes_what_norms_and_projections_return():
    tensors, given = make(21, dtype=torch.float32), (ab.Window(before=6), ab.Window(before=3))
    mixed = [x.bfloat16() if i in (1, 2, 4) else x for i, x in enumerate(tensors)]
    same = [x.float() for x in mixed]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, wanted = (ab.simplicial_attention(*each, *given) for each in (mixed, same))
        with pytest.raises(TypeError, match="key2: wanted a tensor, got int 3"):
            ab.simplicial_attention(*same[:3], 3, same[4], *given)
    assert got.dtype == torch.bfloat16 and torch.equal(got, wanted)
    with pytest.raises(TypeError, match=r"key: wanted the query's dtype, torch.float32, got torch.bfloat16"):
        ab.simplicial_attention(*mixed, *given)


# -- memory ----------------------------------------------------------------------------------------


def saved_bytes(**options):
    """Count what forward keeps for backward, apart from the inputs."""
    tensors = [x.requires_grad_() for x in make(64, dtype=torch.float32)]
    kept = {}

    def keep(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = ab.simplicial_attention(*tensors, ab.Window(before=20), ab.Window(before=7), **options)
    out.sum().backward()
    return sum(kept.values()) - sum(kept.get(x.untyped_storage().data_ptr(), 0) for x in tensors)


def test_rows_of_parts_are_computed_again_not_kept():
    rows = 2 * 2 * 64 * 8 * 6 * 4  # bytes of one tensor of rows
    assert saved_bytes() > 3 * rows
    assert saved_bytes(pairs_at_once=64) < rows / 2


def test_parts_have_no_more_rows_than_asked_for_and_are_made_once(monkeypatch):
    made = []
    monkeypatch.setattr(
        checkpoint, "checkpoint", lambda f, part, *given, **_: made.append(part) or f(part, *given)
    )
    tensors = [x.requires_grad_() for x in make(33)]
    for _ in range(2):
        ab.simplicial_attention(*tensors, ab.Causal(), ab.Window(before=3), pairs_at_once=20)
    once, again = made[: len(made) // 2], made[len(made) // 2 :]
    # The first three queries have 1, 2 and 3 pairs, the other 30 have 4.
    assert [part.query.shape[2] for part in once] == [18, *[20] * 5, 8]
    assert all(a is b for a, b in zip(once, again, strict=True))


def test_what_inference_makes_serves_training():
    """Tensors made in inference mode cannot be saved for backward."""
    given = ab.Window(before=6), ab.Window(before=5)
    tensors = make(17, seed=1)
    with torch.inference_mode():
        ab.simplicial_attention(*tensors, *given, pairs_at_once=1000)
    leaves = [x.requires_grad_() for x in tensors]
    ab.simplicial_attention(*leaves, *given, pairs_at_once=1000).sum().backward()
    assert all(x.grad.isfinite().all() for x in tensors)


# -- queries picked from a relation ----------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_picked_queries_have_the_pairs_of_their_relation(seed):
    rng = random.Random(seed)
    Q, K, first = rng.choice([1, 7, 40]), rng.choice([0, 1, 9, 70]), rng.choice([0, 3])
    relation = random_relation(rng, 2, q_len=Q + first, k_len=K, batch=2, heads=2)
    numbers = [rng.randint(-1, Q - 1) for _ in range(rng.choice([0, 1, 30, 90]))]
    picked, n = Picked(relation, numbers, first), len(numbers)
    whole = relation.dense(Q, K, first, batch=2, heads=2).expand(2, 2, Q, K)
    wanted = torch.stack([whole[:, :, i] & (i >= 0) for i in numbers], 2) if n else whole[:, :, :0]
    assert torch.equal(picked.dense(n, K, batch=2, heads=2).expand(2, 2, n, K), wanted)
    for form in ("auto", "edges"):
        layout = ab.Layout.build(picked, n, K, form=form, batch=2, heads=2)
        assert torch.equal(layout.to_dense().expand(2, 2, n, K), wanted)
        layout.validate()
    assert picked == Picked(relation, numbers, first) and hash(picked) == hash(
        Picked(relation, numbers, first)
    )


# -- errors ----------------------------------------------------------------------------------------

CALL = {"first": ab.Causal(), "second": ab.Window(before=1)}
ERRORS = [
    ({"first": None}, TypeError, "first: wanted a Relation, got NoneType None"),
    ({"second": ab.Full}, TypeError, r"second: wanted a Relation, got the class Full; .*, Full\(...\)"),
    ({"between": torch.ones(4, 4) > 0}, TypeError, r"between: wanted a Relation, got a tensor \[4, 4\]; "),
    ({"first": ab.Documents([0])}, ValueError, "first: this Documents is for 1 keys, got k_len = 4"),
    ({"second": ab.Documents([0])}, ValueError, "second: this Documents is for 1 keys, got k_len = 4"),
    ({"between": ab.Documents([0])}, ValueError, "between: this Documents is for 1 keys, got k_len = 4"),
    ({"key2": torch.ones(2, 2, 4, 7).double()}, ValueError, "key2: wanted the query's head size D, 6, got 7"),
    (
        {"key2": torch.ones(2, 2, 4, 6)},
        TypeError,
        "key2: wanted the query's dtype, torch.float64, got torch.f",
    ),
    ({"value2": torch.ones(2, 2, 3, 5).double()}, ValueError, "value2: wanted key2's length, 4, got 3"),
    ({"value2": torch.ones(2, 2, 4, 3).double()}, ValueError, "value2: wanted the value's size E, 5, got 3"),
    ({"key": 3}, TypeError, "key: wanted a tensor, got int 3"),
    ({"scale": "x"}, TypeError, "scale: wanted a finite number, got str 'x'"),
    ({"q_start": "END"}, TypeError, "q_start: wanted an int or 'end', got 'END'"),
    ({"pairs_at_once": 0}, ValueError, "pairs_at_once: wanted at least 1, got 0"),
    ({"return_lse": "no"}, TypeError, "return_lse: wanted True or False, got 'no'"),
]


@pytest.mark.parametrize(("given", "error", "words"), ERRORS, ids=[words[:30] for *_, words in ERRORS])
def test_bad_argument_raises_a_clear_error(given, error, words):
    tensors = dict(zip(NAMES[2:], make(4), strict=True))
    with pytest.raises(error, match=f"^{words}"):
        ab.simplicial_attention(**{**tensors, **CALL, **given})
