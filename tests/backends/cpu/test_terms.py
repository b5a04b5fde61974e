"""Terms, sink and dropout in the C++ kernels: on every instruction set, on tiles, edges and few queries."""

from __future__ import annotations

import itertools
import math
from dataclasses import fields, replace

import pytest
import torch
from cases.edge_call import library
from torch import Tensor

import attnbias as ab
from attnbias.backends import cpu
from attnbias.backends.call import Call, Inputs, Needs, name_parts
from attnbias.scores.terms import Sizes, make_parts
from attnbias.testing import assert_no_worse, eager, magnitudes, make_inputs

if cpu.missing():
    pytest.skip(str(cpu.missing()), allow_module_level=True)
B, H, HK, K, D, E = 2, 4, 2, 150, 16, 24
ROWS, COLUMNS = 11, 14  # of a grid with one place per key
SEED = torch.tensor([-(2**40) + 77])
HEADS = ab.PerHead([ab.Causal(), ab.Full(), ab.Empty(), ab.Window(before=7)])
RELATIONS = {
    "causal": ab.Causal(),
    "empty rows": ab.Window(before=20) & ~ab.Bipartite(60),
    "rare": ab.Where(lambda q, k: (q * 31 + k * 17) % 23 == 0),
    "per head": HEADS,
    "mixed": ab.Window(before=8) | (ab.Prefix(64) & ab.Where(lambda q, k: q < 100)),
}


@pytest.fixture(autouse=True, params=cpu.isas())
def on_isa(request):
    cpu.force_isa(request.param)
    yield request.param
    cpu.force_isa(None)


def make_terms(Q: int) -> dict[str, ab.Term]:
    rng = torch.Generator().manual_seed(3)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng)

    removed = leaf(B, K)
    removed[:, 3::7] = -math.inf
    return {
        "relative": ab.RelativeBias(leaf(H, 16), ab.t5_buckets(True, 50)),
        "key": ab.KeyBias(leaf(B, H, K)),
        "removed": ab.KeyBias(removed),
        "pair": ab.PairBias(leaf(B, H, K, K)),
        "pair for all": ab.PairBias(leaf(K, K)),
        "pair by head": ab.PairBias(leaf(1, H, K, K)),
        "pair by batch": ab.PairBias(leaf(B, 1, K, K).mT),
        "pair by key": ab.PairBias(leaf(B, H, 1, K)),
        "pair by query": ab.PairBias(leaf(B, H, Q, 1), K - Q),
        "grid": ab.GridBias(leaf(H, (2 * ROWS - 1) * (2 * COLUMNS - 1)), (ROWS, COLUMNS)),
    }


NAMES = list(make_terms(1))


def leaf_of(term: ab.Term) -> Tensor:
    return getattr(term, fields(term)[0].name)


class Case:
    """A call of the kernels that skips the choice of a backend."""

    def __init__(self, relation, terms=(), *, Q=K, form="auto", dtype=torch.float32, sink=None, **options):
        self.options = {"softcap": 0.0, "dropout_p": 0.0, **options}
        self.inputs = make_inputs(Q, B, H, HK, Q, K, D, E, dtype)
        self.terms, self.Q = [self._with(term, leaf_of(term).to(dtype)) for term in terms], Q
        self.sink = None if sink is None else sink.to(dtype)
        self.layout = ab.Layout.build(relation, Q, K, q_start="end", form=form, batch=B, heads=H)
        self.mask = relation.dense(Q, K, "end", batch=B, heads=H)
        rng = torch.Generator().manual_seed(1)
        self.d_out = torch.randn(B, H, Q, E, generator=rng).to(dtype)
        self.d_lse = torch.randn(B, H, Q, generator=rng)

    @staticmethod
    def _with(term: ab.Term, leaf: Tensor) -> ab.Term:
        return replace(term, **{fields(term)[0].name: leaf})

    def leaves(self, dtype: torch.dtype) -> list[Tensor]:
        leaves = [*self.inputs, *([] if self.sink is None else [self.sink]), *map(leaf_of, self.terms)]
        return [x.detach().to(dtype).requires_grad_() for x in leaves]

    def split(self, leaves: list[Tensor]) -> tuple[list[Tensor], Tensor | None, list[ab.Term]]:
        """Make inputs, sink and terms from these leaves."""
        at = 3 if self.sink is None else 4
        terms = [self._with(term, leaf) for term, leaf in zip(self.terms, leaves[at:], strict=True)]
        return leaves[:3], leaves[3] if at == 4 else None, terms

    def expected(self, dtype: torch.dtype) -> list[Tensor]:
        leaves = self.leaves(dtype)
        inputs, sink, terms = self.split(leaves)
        start = K - self.Q
        out, lse = eager(*inputs, self.mask, terms=terms, sink=sink, seed=SEED, q_start=start, **self.options)
        finite = torch.where(lse.isfinite(), lse, 0)
        total = (out.double() * self.d_out.double()).sum() + (finite.double() * self.d_lse.double()).sum()
        return [out.detach(), lse.detach(), *torch.autograd.grad(total, leaves)]

    def compute(self) -> list[Tensor]:
        leaves = self.leaves(self.inputs[0].dtype)
        inputs, sink, terms = self.split(leaves)
        sizes = Sizes(B, H, self.Q, K, K - self.Q, torch.device("cpu"), torch.float32)
        parts, codes, _ = make_parts(terms, sizes)
        numbers = (D**-0.5, self.options["softcap"], self.options["dropout_p"])
        parts = name_parts(parts)
        bare = {name: part.detach() for name, part in parts.items()}
        given = Inputs(*(x.detach() for x in inputs), None if sink is None else sink.detach(), **bare)
        call = Call(given, self.layout, *numbers, seed=SEED, codes=codes)
        out, lse = cpu.forward(call)
        needs = Needs(True, True, True, sink is not None, **dict.fromkeys(parts, True))
        grads = cpu.backward(call, out, lse, self.d_out, self.d_lse, needs)
        got = [out, lse, *grads[: 3 if sink is None else 4]]
        if terms:
            made = {name: part for name, part in parts.items() if part.requires_grad}
            from_parts = [getattr(grads, name) for name in made]
            got += torch.autograd.grad(list(made.values()), leaves[len(got) - 2 :], from_parts)
        return got

    def check(self) -> None:
        got = self.compute()
        same, truth = self.expected(self.inputs[0].dtype), self.expected(torch.float64)
        sizes = magnitudes(
            *self.inputs, self.d_out, self.d_lse, D**-0.5, self.options["dropout_p"], 4.0 * len(self.terms)
        )
        names = ["out", "lse", "query", "key", "value", *(["sink"] if self.sink is not None else [])]
        empty = (truth[1] == -torch.inf)[..., None]
        names += [f"leaf {i}" for i in range(len(self.terms))]
        for name, x, eager_x, oracle in zip(names, got, same, truth, strict=True):
            factor = 2.0 if name in ("out", "lse") else 3.0
            where = empty if name in ("out", "query") else None
            magnitude = sizes.get(name, sizes["sink"] * math.sqrt(H))
            assert_no_worse(name, x, eager_x, oracle, factor, empty=where, magnitude=magnitude)


SINK = torch.tensor([0.5, -1.0, 3.0, -math.inf])


@pytest.mark.parametrize("form", ["tiles", "edges"])
@pytest.mark.parametrize("Q", [1, 5, 70, K])
@pytest.mark.parametrize("name", NAMES)
def test_each_term(name, Q, form):
    for relation in ("causal", "empty rows", "per head"):
        Case(RELATIONS[relation], [make_terms(Q)[name]], Q=Q, form=form).check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", ["tiles", "edges", "auto"])
@pytest.mark.parametrize("relation", RELATIONS)
def test_all_together(relation, form, dtype):
    for Q in (3, K):
        terms = list(make_terms(Q).values())
        options = {"softcap": 4.0, "sink": SINK, "dropout_p": 0.3}
        Case(RELATIONS[relation], terms, Q=Q, form=form, dtype=dtype, **options).check()


def test_the_mixed_layout_has_tiles_and_edges():
    layout = ab.Layout.build(RELATIONS["mixed"], K, K, form="auto")
    assert layout.tiles and layout.edges


@pytest.mark.parametrize("form", ["tiles", "edges", "auto"])
@pytest.mark.parametrize("relation", RELATIONS)
def test_sink(relation, form):
    for Q, sink in itertools.product((2, 70), (SINK, SINK + 200, SINK - 200)):
        Case(RELATIONS[relation], Q=Q, form=form, sink=sink).check()


@pytest.mark.parametrize("form", ["tiles", "edges", "auto"])
def test_a_row_without_keys_has_the_lse_of_its_sink(form):
    case = Case(ab.Empty(), form=form, sink=SINK)
    out, lse, *grads = case.compute()
    assert not out.any()
    want = SINK[:, None].expand(B, H, K)
    # Conversion to base 2 and back rounds two products with two constants.
    assert torch.equal(lse, want) or ((lse - want).abs() <= 4 * 2.0**-24 * want.abs())[want.isfinite()].all()
    assert torch.equal(lse.isfinite(), want.isfinite())
    assert not any(grad.any() for grad in grads[:3])
    finite = SINK.isfinite()
    torch.testing.assert_close(grads[3][finite], case.d_lse.sum((0, 2))[finite])
    assert not grads[3][~finite].any()


@pytest.mark.parametrize("relation", ["causal", "rare", "mixed"])
@pytest.mark.parametrize("Q", [5, K])
def test_threads_do_not_change_a_bit(relation, Q):
    case = Case(RELATIONS[relation], list(make_terms(Q).values()), Q=Q, sink=SINK, dropout_p=0.3)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3, 8, 8):
            torch.set_num_threads(threads)
            results.append(case.compute())
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert all(torch.equal(got, want) for got, want in zip(result, results[0], strict=True))


def test_only_needed_gradients_are_returned():
    terms = make_terms(K)
    case = Case(RELATIONS["mixed"], [terms["relative"], terms["pair by head"]])
    whole = case.compute()
    sizes = Sizes(B, H, K, K, 0, torch.device("cpu"), torch.float32)
    parts, *_ = make_parts(case.terms, sizes)
    call = Call(Inputs(*case.inputs, **name_parts(parts)), case.layout, D**-0.5)
    for q, k, v, relative, pair in itertools.product([False, True], repeat=5):
        needs = Needs(q, k, v, relative_bias=relative, pair_bias=pair)
        grads = cpu.backward(call, *whole[:2], case.d_out, case.d_lse, needs)
        assert [grad is not None for grad in grads] == list(needs)
        for got, want in zip(grads[:3], whole[2:5], strict=True):
            assert got is None or torch.equal(got, want)
        if pair:
            assert torch.equal(grads.pair_bias, whole[6].view(1, H, K, K))


def test_tables_of_a_long_sequence_keep_their_precision():
    """Sums of equal scores round in one direction; errors must not add up over 4000 of them."""
    N = 4000
    query, key, value = (torch.zeros(1, 1, N, 4) for _ in range(3))
    table = torch.full((1, 3), 0.7)
    for q in (query, query[:, :, :1]):
        start = N - q.shape[2]
        bias = ab.RelativeBias(table, ab.linear_buckets(1))
        _, lse = ab.attention(q, key, value, terms=[bias], q_start=start, return_lse=True, backend="cpu")
        assert (lse - (math.log(N) + table[0, 0].item())).abs().max() < 2e-6


@pytest.mark.parametrize("relation", ["causal", "per head", "mixed"])
def test_columns_that_recompute_their_weights(relation):
    """p and dS of the edges do not fit the budget."""
    before = library.ab_set_edge_budget(0)
    try:
        form = "auto" if relation == "mixed" else "edges"
        terms = list(make_terms(K).values())
        Case(RELATIONS[relation], terms, form=form, sink=SINK, dropout_p=0.3).check()
    finally:
        library.ab_set_edge_budget(before)


@pytest.mark.parametrize(("Q", "keys"), [(3, 9000), (9000, 3)])
def test_rows_and_columns_cut_into_pieces(Q, keys):
    rng = torch.Generator().manual_seed(2)
    shapes = ((1, 2, Q, 8), (1, 2, keys, 8), (1, 2, keys, 8), (1, keys), (2, 9), (2,))
    leaves = [torch.randn(shape, generator=rng).requires_grad_() for shape in shapes]
    layout = ab.Layout.build(ab.Full(), Q, keys, form="edges", batch=1, heads=2)

    def results(relation, backend, dtype):
        query, key, value, bias, table, sink = again = [x.detach().to(dtype).requires_grad_() for x in leaves]
        terms = [ab.KeyBias(bias), ab.RelativeBias(table, ab.linear_buckets(4))]
        torch.manual_seed(1)
        out, lse = ab.attention(
            query,
            key,
            value,
            relation,
            terms=terms,
            sink=sink,
            dropout_p=0.25,
            return_lse=True,
            backend=backend,
        )
        return out, lse, *torch.autograd.grad(out.sin().sum() + lse.sum(), again)

    got = results(layout, "cpu", torch.float32)
    same, truth = (results(ab.Full(), "reference", dtype) for dtype in (torch.float32, torch.float64))
    names = ("out", "lse", "query", "key", "value", "bias", "table", "sink")
    sizes = magnitudes(*leaves[:3], truth[0].cos(), torch.ones_like(truth[1]), 8**-0.5, 0.25)
    for name, mine, theirs, exact in zip(names, got, same, truth, strict=True):
        factor = 2.0 if name in ("out", "lse") else 3.0
        # A sum of one sign over queries is rounded Q times at its own size, up or down.
        summed = math.sqrt(Q) * exact.abs().max().item()
        assert_no_worse(name, mine, theirs, exact, factor, magnitude=sizes.get(name, summed))
