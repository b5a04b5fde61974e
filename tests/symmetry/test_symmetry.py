"""Properties, inclusion and symmetries of relations against brute force over all pairs and permutations."""

import itertools
import sys
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attnbias as ab
from attnbias.nn import GraphAttention, MaskedAttention, RelationalAttention, SelfAttention
from attnbias.op import dispatch
from attnbias.symmetry import automorphisms, equivariance, hierarchy, is_translation_invariant, properties
from attnbias.symmetry.inclusion import families
from attnbias.symmetry.properties import closure, has_only_translations
from attnbias.testing import random_relation

N = 7
RELATIONS = {
    "full": ab.Full(),
    "empty": ab.Empty(),
    "causal": ab.Causal(),
    "window": ab.Window(before=2),
    "band": ab.Window(before=1, after=2),
    "dilated": ab.Dilated(2, before=1, after=1),
    "columns": ab.Columns(3),
    "chunks": ab.Chunks(3),
    "documents": ab.Documents([0, 1, 1, -1, 0, 2, 2]),
    "each": ab.Documents([0, 0, 0, 1, 1, 1, 1]).each(ab.Causal()),
    "prefix": ab.Prefix(3),
    "padding": ab.Padding([5]),
    "bipartite": ab.Bipartite(3),
    "global": ab.Global([2]) | ab.Window(before=0),
    "random": ab.RandomBlocks(2, 1, seed=3),
    "line": ab.Neighborhood((N,), 1),
    "ring": ab.Graph([[0, 1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 0]], num_nodes=N),
    "two rings": ab.Graph([[0, 1, 2, 3, 4, 5], [1, 2, 0, 4, 5, 3]], num_nodes=N),
    "doubled": ab.Graph([[0, 0, 1, 2], [1, 1, 2, 1]], num_nodes=N),
    "star": ab.Graph([[0] * 6, [1, 2, 3, 4, 5, 6]], num_nodes=N),
    "neighbors": ab.Neighbors([[(i + 1) % N, (i + 3) % N] for i in range(N)]),
    "where": ab.Where(lambda q, k: (q + k) % 3 == 0),
    "heads": ab.PerHead([ab.Full(), ab.Chunks(4), ab.Bipartite(4)]),
    "batches": ab.PerBatch([ab.Causal(), ab.Full()]),
    "cycle": (ab.Window(before=1) | ab.Window(before=0).shift(6)),
    "reverse": ab.Causal().T,
    "not": ~ab.Chunks(2),
}


def counts(relation, q_len, k_len):
    """Count how often each batch and head relates each pair, [B, H, Q, K]."""
    b, h = torch.arange(relation.batch_size or 1), torch.arange(relation.head_count or 1)
    at = (torch.arange(q_len)[:, None], torch.arange(k_len), b[:, None, None, None], h[:, None, None])
    found = relation.multiplicity(*at)
    found = relation.related(*at).long() if found is None else found
    return found.expand(len(b), len(h), q_len, k_len).numpy()


def brute_group(table):
    """Return all permutations p with table[p[i], p[j]] == table[i, j]."""
    for p in itertools.permutations(range(table.shape[-1])):
        if np.array_equal(table[..., p, :][..., p], table):
            yield p


def generated(generators, n):
    """Return the group that permutations generate."""
    found, todo = {tuple(range(n))}, [tuple(range(n))]
    while todo:
        p = todo.pop()
        for g in generators:
            product = tuple(g[i] for i in p)
            if product not in found:
                found.add(product)
                todo.append(product)
    return found


@pytest.mark.parametrize("name", RELATIONS)
def test_group_equals_brute_force(name):
    n = 6 if name in ("where", "heads", "batches", "not", "chunks") else N
    group = automorphisms(RELATIONS[name], n)
    truth = set(brute_group(counts(RELATIONS[name], n, n)))
    assert group.order == len(truth)
    assert generated(group.generators, n) == truth


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in RELATIONS if RELATIONS[name].lengths == (None, None)])
def test_group_of_eight_tokens_equals_brute_force(name):
    group = automorphisms(RELATIONS[name], 8)
    assert group.order == sum(1 for _ in brute_group(counts(RELATIONS[name], 8, 8)))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5))
def test_groups_of_random_relations(seed, n):
    relation = random_relation(seed, q_len=n, k_len=n, batch=2, heads=2)
    if None in (relation.batch_size, relation.head_count):
        return  # it fits any number of heads
    group = automorphisms(relation, n)
    assert generated(group.generators, n) == set(brute_group(counts(relation, n, n)))


@pytest.mark.parametrize("relation", [ab.Full(), ab.Prefix(2), ab.Causal(), ab.Neighbors([[0], [1], [1]])])
def test_queries_and_keys_are_permuted_separately(relation):
    group = automorphisms(relation, 3, keys=4)
    table = counts(relation, 3, 4)[0, 0]
    truth = sum(
        np.array_equal(table[p, :][:, q], table)
        for p in itertools.permutations(range(3))
        for q in itertools.permutations(range(4))
    )
    assert group.order == truth
    for p in group.generators:
        keys = [i - 3 for i in p[3:]]
        assert np.array_equal(table[list(p[:3]), :][:, keys], table)


def test_a_large_group_is_counted_exactly():
    assert automorphisms(ab.Full(), 30).order == 265252859812191058636308480000000


def test_groups_are_named():
    named = {name: automorphisms(RELATIONS[name], N).name for name in ("full", "causal", "ring", "star")}
    assert named == {"full": "S_7", "causal": "trivial", "ring": "Z_7", "star": "S_6"}
    assert automorphisms(ab.Full(), 3, keys=4).name == "S_4 x S_3"
    assert automorphisms(ab.Chunks(2), 6).name == "order 48"  # 2^3 swaps inside and 3! of the chunks


def test_block_systems():
    assert automorphisms(ab.Chunks(2), 6).blocks() == (((0, 1), (2, 3), (4, 5)),)
    square = ab.Graph([[0, 1, 2, 3], [1, 2, 3, 0]], num_nodes=4)
    assert automorphisms(square, 4).blocks() == (((0, 2), (1, 3)),)
    assert automorphisms(ab.Full(), 5).blocks() == ()
    assert automorphisms(ab.Bipartite(2), 4).orbits == ((0, 1), (2, 3))


def test_without_igraph_the_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "igraph", None)
    with pytest.raises(ImportError, match=r"automorphisms: wanted igraph \(pip install igraph\)"):
        automorphisms(ab.Full(), 3)


# -- properties -------------------------------------------------------------------------------------


def brute_properties(table):
    """Evaluate each property by its definition, with quantifiers over tokens."""
    n = len(table)
    every = range(n)
    loopless = table & ~np.eye(n, dtype=bool)
    orders = [
        p
        for p in itertools.permutations(every)
        if not any(loopless[p[i], p[j]] for i in every for j in every if i < j)
    ]
    sides = itertools.product((0, 1), repeat=n)
    found = {
        "complete": table.all(),
        "reflexive": all(table[i, i] for i in every),
        "symmetric": all(table[i, j] == table[j, i] for i in every for j in every),
        "antisymmetric": all(not (table[i, j] and table[j, i]) for i in every for j in every if i != j),
        "transitive": all(
            table[i, k] or not (table[i, j] and table[j, k]) for i in every for j in every for k in every
        ),
        "acyclic": len(orders) > 0,
        "unique_topological_order": len(orders) == 1,
        "bipartite": any(all(not table[i, j] or s[i] != s[j] for i in every for j in every) for s in sides),
        "regular": len(set(table.sum(0))) <= 1 and len(set(table.sum(1))) <= 1,
        "translation_invariant": all(
            table[i, j] == table[i + 1, j + 1] for i in range(n - 1) for j in range(n - 1)
        ),
    }
    connected = all(table[i, j] or table[j, i] for i in every for j in every)
    names = ("reflexive", "antisymmetric", "transitive")
    found["total_order"] = connected and all(found[name] for name in names)
    return found


@pytest.mark.parametrize("n", [1, 2, 5, 6])
@pytest.mark.parametrize("name", sorted(RELATIONS))
def test_properties_match_their_definitions(name, n):
    relation = RELATIONS[name]
    if name in ("heads", "batches") or relation.lengths[0] not in (None, n):
        relation = random_relation(100 * n + sorted(RELATIONS).index(name), q_len=n, k_len=n)
        if None in (relation.batch_size, relation.head_count):
            relation = ab.Graph([[0, n - 1], [n - 1, 0]], num_nodes=n)
    got = properties(relation, n)
    truth = brute_properties(relation.dense(n, n).numpy())
    assert {each: getattr(got, each) for each in truth} == truth


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5))
def test_properties_of_random_relations(seed, n):
    relation = random_relation(seed, q_len=n, k_len=n)
    if None in (relation.batch_size, relation.head_count):
        return
    got = properties(relation, n)
    truth = brute_properties(relation.dense(n, n).numpy())
    assert {each: getattr(got, each) for each in truth} == truth


def test_properties_of_no_tokens():
    assert properties(ab.Full(), 0).acyclic


def test_properties_are_of_one_relation():
    with pytest.raises(ValueError, match="relation: wanted one for all batches and heads, got PerHead"):
        properties(RELATIONS["heads"], 6)


def test_translation_invariance_is_not_a_flag():
    """A graph knows nothing of positions; only its pairs reveal the invariance."""
    chain = ab.Graph([[0, 1, 2], [1, 2, 3]], num_nodes=4)
    broken = ab.Graph([[0, 1, 1], [1, 2, 3]], num_nodes=4)
    assert is_translation_invariant(chain, 4) and not is_translation_invariant(broken, 4)


@pytest.mark.parametrize("name", [name for name in RELATIONS if name not in ("heads", "batches")])
def test_closure_is_who_is_reached_in_any_number_of_steps(name):
    n = RELATIONS[name].lengths[0] or N
    step = RELATIONS[name].dense(n, n).double() + torch.eye(n)
    assert torch.equal(closure(RELATIONS[name], n).dense(n, n), torch.linalg.matrix_power(step, n) > 0)


@pytest.mark.parametrize(
    ("relation", "only"),
    [
        (ab.Causal(), True),
        (ab.Causal().T, True),
        (ab.Window(before=1), True),
        (ab.Window(before=3) - ab.Window(before=0), True),  # its closure has the loops
        (ab.Window(before=0), False),  # any permutation
        (ab.Full(), False),
        (ab.Dilated(2, before=3), False),  # even and odd integers move on their own
        (ab.Window(before=1, after=1), False),  # a reflection
        (ab.Chunks(4), False),
        (ab.Causal() | ab.Prefix(3), False),
    ],
)
def test_symmetries_of_the_integers(relation, only):
    assert has_only_translations(relation, 8) == only


# -- inclusion --------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 9), st.integers(0, 3))
def test_within_is_inclusion_of_pairs(first, second, q_len, k_len, grow):
    a = random_relation(first, depth=1, q_len=q_len, k_len=k_len, batch=2, heads=2)
    b = random_relation(second, depth=1, q_len=q_len, k_len=k_len, batch=2, heads=2)
    if grow == 0:  # otherwise few would contain one another
        b = a | b
    elif grow == 1:
        a = a & b
    elif grow == 2:
        b = a & (b | ~b)
    sizes = {"batch": 2, "heads": 2}
    left, right = (x.dense(q_len, k_len, **sizes).expand(2, 2, q_len, k_len) for x in (a, b))
    assert a.within(b, q_len, k_len, **sizes) == bool((~left | right).all())
    assert a.equivalent(b, q_len, k_len, **sizes) == torch.equal(left, right)


def test_within_of_queries_further_on():
    late = ab.Prefix(3)
    assert late.within(ab.Causal(), 4, 8, q_start=2) and not late.within(ab.Causal(), 4, 8, q_start=1)
    assert late.within(ab.Causal(), 4, 8, q_start="end")


MILLION = 1_000_000
DOCUMENTS = ab.Documents.from_lengths([1000] * 1000)


@pytest.mark.parametrize(
    ("a", "b", "held"),
    [
        (ab.Window(before=255), ab.Causal(), True),
        (ab.Causal(), ab.Window(before=MILLION - 2), False),
        (ab.Window(before=255) & DOCUMENTS, DOCUMENTS, True),
        (ab.Causal() & DOCUMENTS, ab.Window(before=999), True),
        (ab.Causal() & DOCUMENTS, ab.Window(before=998), False),
        (ab.Window(before=9) | ab.Prefix(5), ab.Window(before=20) | ab.Prefix(7), True),
    ],
)
def test_within_of_a_million_tokens_takes_less_than_a_second(a, b, held):
    times = []
    while len(times) < 5 and min(times, default=2.0) >= 1:
        start = time.process_time()
        assert a.within(b, MILLION, MILLION) == held
        times.append(time.process_time() - start)
    assert min(times) < 1, times


def test_hierarchy_of_the_mechanisms():
    mechanisms = {
        "self": ab.Full(),
        "masked": ab.Causal(),
        "strided 7": ab.Window(before=7),
        "strided 2": ab.Window(before=2),
        "bipartite": ab.Bipartite(4),
    }
    order = hierarchy(mechanisms, 8, 8)
    assert order.classes == (("self",), ("masked", "strided 7"), ("strided 2",), ("bipartite",))
    assert order.covers == ((1, 0), (2, 1), (3, 1))
    assert str(order).splitlines()[1] == "masked = strided 7  <  self"


def test_mechanisms_are_ordered_by_what_they_can_relate():
    order = families()
    names = [name for each in order.classes for name in each]
    below = {(order.classes[a][0], order.classes[b][0]) for a, b in order.covers}
    assert names == ["graph", "sparse", "strided", "encoder-decoder", "self", "masked"]
    assert below == {
        ("sparse", "graph"),
        ("strided", "sparse"),
        ("encoder-decoder", "sparse"),
        ("self", "sparse"),
        ("masked", "strided"),  # Corollary 1
    }


# -- equivariance -----------------------------------------------------------------------------------


def test_equivariance_of_layers_and_of_the_op():
    swap = [0, 2, 1, 3, 4]
    layer = RelationalAttention(8, heads=2, relation=ab.Full()).double()
    for relation, passes in ((ab.Full(), True), (ab.Causal(), False)):
        for f in (layer, GraphAttention(8).double(), ab.attention):
            difference = equivariance(f, relation, swap)
            assert difference.shape == (5,)
            assert bool(difference.max() < 1e-12) == passes
    rest = equivariance(MaskedAttention(8).double(), ab.Causal(), swap)
    assert (rest > 1e-3).tolist() == [False, True, True, False, False]


def test_a_permutation_is_checked():
    with pytest.raises(ValueError, match=r"permutation: wanted each of 0..2 once, got \[0, 0, 1\]"):
        equivariance(SelfAttention(8), ab.Full(), [0, 0, 1])


def test_equivariance_spares_the_warning_of_slow_backends(recwarn, monkeypatch):
    """It measures in float64, which no kernel takes, and warned of a slow backend."""
    monkeypatch.setattr(dispatch, "_warned", set())
    assert float(equivariance(SelfAttention(8).double(), ab.Full(), [1, 0, 2]).max()) < 1e-12
    assert not dispatch._warned and not recwarn.list
    with ab.use_backend("rows"):
        assert float(equivariance(ab.attention, ab.Causal(), [1, 0, 2]).max()) > 1e-3
