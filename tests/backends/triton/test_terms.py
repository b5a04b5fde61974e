"""Score terms and dropout in the Triton kernels, in Triton's interpreter: see test_tiles."""

import math

import pytest
import torch
from cases import terms as term_cases
from cases.interpreter import interpreted, not_interpreted, poison_all, run_interpreted  # noqa: F401

import attnbias as ab
from attnbias.backends.call import Call, Inputs, Needs
from attnbias.backends.philox import keep_mask
from attnbias.testing import assert_no_worse, eager, magnitudes, make_inputs, soak
from attnbias.testing.draw import Drawn

pytest.importorskip("triton")
from attnbias.backends import triton
from attnbias.kernels.launch import launch
from attnbias.kernels.launch.config import Config
from attnbias.kernels.tiles import term_grads

pytestmark = pytest.mark.usefixtures("poison_all")
RELATIONS = {
    "causal": ab.Causal(),
    "empty rows": ab.Window(before=20) & ~ab.Bipartite(60),
    "per head": ab.PerHead([ab.Causal(), ab.Window(before=7)]),
}
B, H, HK, K, D, E = 2, 2, 1, 97, 8, 8
LENGTHS = {"tiles": 70, "edges": 5}  # of queries: the interpreter is slow on rows of edges
SEED = 0x1234_5678_9ABC_DEF0


@not_interpreted
def test_interpreted():
    """Run this file once more, interpreted."""
    run_interpreted(__file__)


def dropout_call(p, relation, form, *, seed=SEED, q_start=20, dtype=torch.float32, softcap=0.0):
    Q = LENGTHS[form]
    layout = ab.Layout.build(relation, Q, K, q_start=q_start, form=form, batch=B, heads=H)
    inputs = make_inputs(1, B, H, HK, Q, K, D, E, dtype)
    return Call(Inputs(*inputs), layout, D**-0.5, softcap, p, seed=torch.tensor([seed]))


@interpreted
@pytest.mark.parametrize("form", LENGTHS)
@pytest.mark.parametrize(("seed", "p", "q_start"), [(SEED, 0.3, 20), (-1, 0.5, -9)])
def test_dropout_bits(form, seed, p, q_start):
    """Unit vectors as values show which keys survive, in every row, head and batch."""
    call = dropout_call(p, ab.Full(), form, seed=seed, q_start=q_start)
    call.inputs = call.inputs._replace(value=torch.eye(K).expand(B, HK, K, K))
    out, _ = triton.forward(call)
    Q = LENGTHS[form]
    b, h = torch.arange(B)[:, None, None, None], torch.arange(H)[:, None, None]
    q, k = torch.arange(q_start, q_start + Q)[:, None], torch.arange(K)
    assert torch.equal(out != 0, keep_mask(torch.tensor([seed]), p, b, h, q, k))


@interpreted
@pytest.mark.parametrize("form", LENGTHS)
@pytest.mark.parametrize("relation", RELATIONS)
def test_dropout(relation, form):
    check_dropout(0.4, relation, form, torch.float16 if relation == "causal" else torch.float32)


@interpreted
@pytest.mark.parametrize("form", LENGTHS)
@pytest.mark.parametrize("p", [2.0**-33, 1.0])
def test_dropout_of_none_and_all(p, form):
    check_dropout(p, "causal", form, torch.float32)


def check_dropout(p, relation, form, dtype):
    call = dropout_call(p, RELATIONS[relation], form, dtype=dtype, softcap=2.0)
    Q = LENGTHS[form]
    rng = torch.Generator().manual_seed(1)
    d_out, d_lse = torch.randn(B, H, Q, E, generator=rng).to(dtype), torch.randn(B, H, Q, generator=rng)
    out, lse = triton.forward(call)
    got = [out, lse, *triton.backward(call, out, lse, d_out, d_lse, Needs(True, True, True))[:3]]

    def expected(precision):
        leaves = [x.to(precision).requires_grad_() for x in (call.query, call.key, call.value)]
        counts = call.layout.rows(0, Q)
        options = {"softcap": 2.0, "dropout_p": p, "seed": call.seed, "q_start": 20}
        out, lse = eager(*leaves, counts=counts, **options)
        loss = (out.double() * d_out).sum() + (lse.double() * d_lse)[lse.isfinite()].sum()
        return [out, lse, *torch.autograd.grad(loss, leaves)]

    sizes = magnitudes(call.query, call.key, call.value, d_out, d_lse, call.scale, dropout_p=p)
    names = ("out", "lse", "query", "key", "value")
    for name, *three in zip(names, got, expected(dtype), expected(torch.float64), strict=True):
        assert_no_worse(name, *three, 2.0 if name in ("out", "lse") else 3.0, magnitude=sizes[name])
    assert p < 1 or not got[0].any()
    assert p > 0.01 or math.isfinite(got[0].sum())


TERMS = term_cases.make_terms()


@interpreted
@pytest.mark.parametrize(
    ("q_start", "slopes", "dtype"),
    [
        (7, [1.0, -0.01], torch.float32),
        (7, [1.0, -0.01], torch.float16),
        (100_000, [2e-5, -1e-5], torch.float32),
    ],
    ids=str,
)
def test_slopes(q_start, slopes, dtype):
    """Distances are computed: of keys on both sides of the queries of a full tile, and of keys far away."""
    inputs = make_inputs(1, 1, 2, 1, 70, 130, 8, 8, dtype)
    terms = [ab.ALiBi(torch.tensor(slopes))]
    found = ab.verify(*inputs, ab.Full(), terms=terms, q_start=q_start, backend="triton")
    assert found.ok, found


EDGES = ab.Where(lambda q, k: (q * 7 + k * 3) % 97 == 0)  # one in a row


@interpreted
@pytest.mark.parametrize("name", TERMS)
def test_each_term(name):
    leaves, term = TERMS[name]
    relation = term_cases.RELATIONS["empty rows" if "key" in name else "causal"]
    term_cases.check("triton", relation, leaves, [term])


@interpreted
@pytest.mark.parametrize(
    ("relation", "dtype"), [("per head", torch.float32), ("edges", torch.float16)], ids=str
)
def test_all_terms_together(relation, dtype):
    made = term_cases.make_terms(dtype).values()
    leaves = [leaf for each, _ in made for leaf in each]
    chosen = {"edges": EDGES, **term_cases.RELATIONS}[relation]
    term_cases.check("triton", chosen, leaves, [term for _, term in made], dtype, softcap=4.0)


@interpreted
def test_same_bits_and_minus_infinity():
    term_cases.check_same_bits("triton")
    term_cases.check_minus_infinity("triton")


@interpreted
@pytest.mark.parametrize("tiles", ["32x64 w4 s1", "64x16 w4 s1"])
def test_diagonals_of_tiles_in_steps(tiles, monkeypatch):
    """Non-square tiles, several per tile of the lists, each have their own sums."""
    monkeypatch.setattr(launch, "candidates", lambda *given: (Config.parse(tiles),))
    leaves, term = TERMS["linear"]
    term_cases.check("triton", term_cases.RELATIONS["causal"], leaves, [term])


@interpreted
def test_gradients_of_some_lines_at_a_time(monkeypatch):
    """Where the room for their gradients is small, each head of each batch has a launch of its own."""
    monkeypatch.setattr(term_grads, "ROOM", 1)
    made = [TERMS[name] for name in ("linear", "grid", "pair", "pair for all")]
    leaves = [leaf for each, _ in made for leaf in each]
    term_cases.check("triton", term_cases.RELATIONS["causal"], leaves, [term for _, term in made])


def check_drawn(relation, sizes, terms, **options):
    """Check results and gradients against float64, like the random problems; return the layout."""
    B, H, _, Q, K, _, _ = sizes
    inputs = make_inputs(1, *sizes, requires_grad=True)
    drawn = Drawn(3, inputs, relation, {"q_start": 0, "terms": terms, **options}, "auto")
    assert soak.find_faults(drawn, "triton") == []
    return relation.layout(Q, K, batch=B, heads=H)


def make_some_terms(H, K):
    rng = torch.Generator().manual_seed(1)
    leaves = [torch.randn(shape, generator=rng, requires_grad=True) for shape in ((H,), (1, K), (H, 39 * 39))]
    return [ab.ALiBi(leaves[0]), ab.KeyBias(leaves[1]), ab.GridBias(leaves[2], (20, 20))]


@interpreted
@pytest.mark.parametrize("relation", [ab.Causal(), EDGES], ids=["tiles", "edges"])
def test_terms_and_dropout(relation):
    check_drawn(relation, (2, 2, 1, 70, 97, 8, 8), make_some_terms(2, 97), dropout_p=0.4)


@interpreted
def test_tiles_and_edges_in_one_layout():
    """A part's gradient is that of the tiles plus that of the edges, with and without dropout."""
    rng = torch.Generator().manual_seed(0)
    few = torch.randint(0, 195, (2, 120), generator=rng)
    relation = ab.Graph(few, num_nodes=200) | (ab.Prefix(100) & ~ab.Bipartite(64))
    layout = check_drawn(relation, (1, 1, 1, 200, 200, 8, 8), make_some_terms(1, 200), dropout_p=0.3)
    assert layout.tiles and layout.edges
    bias = torch.randn(200, 200, generator=rng, requires_grad=True)
    terms = [ab.PairBias(bias), *make_some_terms(1, 200)]
    check_drawn(relation, (1, 1, 1, 200, 200, 8, 8), terms, scale=-0.3)  # tiles take the query negated
