"""The layout reference: its analytic gradients, against the textbook and the plain reference."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import gradcheck

from attnbias import Causal, Documents, Empty, Full, Graph, KeyBias, Layout, PerHead, Window
from attnbias.backends import reference, rows
from attnbias.backends.call import Call, Inputs, Needs
from attnbias.op.problem import Problem
from attnbias.testing import assert_no_worse, eager, lengths, magnitudes, make_inputs

SEED = torch.tensor([-(2**50) - 3])


class Listed:
    """A layout whose lists are as awkward as allowed: keys in no order, some twice, some unrelated.

    Equal (batch, head) share a group; the last group is unused.
    """

    def __init__(self, counts, tile=4, q_start=0):
        self.q_start, self.tile = q_start, tile
        numbers = {}
        group = [numbers.setdefault(str(x.tolist()), len(numbers)) for x in counts.flatten(0, 1)]
        self.group = torch.tensor(group, dtype=torch.int32).view(counts.shape[:2])
        self.counts = torch.stack([counts[self.group == g][0] for g in range(len(numbers))])
        self.groups = len(self.counts) + 1

    def columns(self, g, t):
        if g == self.groups - 1:
            g = 0
        counts = self.counts[g, t * self.tile : (t + 1) * self.tile]
        order = torch.randperm(counts.shape[1], generator=torch.Generator().manual_seed(g + t))
        keys = order[counts.any(0)[order] | (order % 3 == 0)]
        listed = counts[:, keys]
        again = listed // 2  # part of the count is in a second column of the same key
        return torch.cat([keys, keys]), torch.cat([listed - again, again], dim=1)

    def rows(self, start, stop):
        return self.counts[self.group.long(), start:stop]


class Attention(torch.autograd.Function):
    """The two passes, joined as in the op."""

    @staticmethod
    def forward(ctx, query, key, value, sink, layout, options):
        ctx.call = call(query, key, value, layout, sink=sink, **options)
        out, lse = rows.forward(ctx.call)
        ctx.save_for_backward(out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, grad_out, grad_lse):
        out, lse = ctx.saved_tensors
        needs = Needs(*ctx.needs_input_grad[:4])
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        with torch.no_grad():
            grads = rows.backward(ctx.call, out, lse, grad_out, grad_lse, needs)
        return *grads[:4], None, None


def call(query, key, value, layout, sink=None, **options):
    defaults = {"seed": SEED, "scale": query.shape[-1] ** -0.5}
    return Call(Inputs(query, key, value, sink), layout, **defaults | options)


def draw_counts(batch, heads, Q, K, seed=0, most=3):
    """Draw random counts with an empty row, an empty column and empty tiles if there is room."""
    rng = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, most + 1, (batch, heads, Q, K), generator=rng)
    counts[:, :, Q // 2] = 0
    counts[0, -1, : Q // 3] = 0
    if K > 1:
        counts[..., K // 2] = 0
    if heads > 1:
        counts[:, 1] = counts[:, 0]  # two heads of one group
    return counts


OPTIONS = {
    "plain": {},
    "scale 0": {"scale": 0.0},
    "negative scale": {"scale": -1.3},
    "softcap": {"softcap": 0.7, "scale": 1.0},
    "sink": {"sink": True},
    "dropout": {"dropout_p": 0.3},
    "drop all": {"dropout_p": 1.0},
    "all": {"softcap": 2.0, "sink": True, "dropout_p": 0.2},
}


@pytest.fixture(autouse=True)
def _poison():
    """Fill the results of torch.empty and similar functions with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def run_rows(layout, options):
    options = {name: x for name, x in options.items() if name != "sink"}

    def run(query, key, value, sink=None):
        return Attention.apply(query, key, value, sink, layout, options)

    return run


def run_eager(counts, options, q_start):
    options = {name: x for name, x in options.items() if name != "sink"}

    def run(query, key, value, sink=None):
        given = {"sink": sink, "seed": SEED, "q_start": q_start, **options}
        return eager(query, key, value, counts=counts, **given)

    return run


def leaves_of(made, options):
    leaves = list(made)
    if options.get("sink"):
        leaves.append(torch.linspace(-1, 2, made[0].shape[1]).to(made[0].dtype))
    return [x.detach().requires_grad_() for x in leaves]


def draw_gradients(B, H, Q, E):
    rng = torch.Generator().manual_seed(11)
    grad_out = torch.randn(B, H, Q, E, generator=rng, dtype=torch.float64)
    return grad_out, torch.randn(B, H, Q, generator=rng, dtype=torch.float64)


def differentiate(run, leaves):
    results = run(*leaves)
    grads = [x.to(y.dtype) for x, y in zip(draw_gradients(*results[0].shape), results, strict=True)]
    return [*results, *torch.autograd.grad(results, leaves, grads)]


def compare(made, counts, options, tile=4, q_start=0):
    """Check results and gradients against eager in the same dtype and in float64."""
    empty = (counts == 0).all(-1, keepdim=True)
    leaves = leaves_of(made, options)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    mine = differentiate(run_rows(Listed(counts, tile, q_start), options), leaves)
    same = differentiate(run_eager(counts, options, q_start), leaves)
    oracle = differentiate(run_eager(counts, options, q_start), exact)
    gradients = draw_gradients(*mine[0].shape)
    sizes = magnitudes(*made, *gradients, options.get("scale", made[0].shape[-1] ** -0.5))
    names = ["out", "lse", "query", "key", "value", "sink"]
    for name, x, y, z in zip(names, mine, same, oracle, strict=False):
        factor = 2.0 if name in ("out", "lse") else 3.0
        zero = empty if name in ("out", "query") else None
        assert_no_worse(name, x, y, z, factor, empty=zero, magnitude=sizes[name])


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (6, 2)], ids=str)
def test_rows_matches_the_textbook(name, heads):
    H, Hk = heads
    made = make_inputs(1, 2, H, Hk, 13, 17, 8, 5)
    compare(made, draw_counts(2, H, 13, 17), OPTIONS[name], q_start=7)


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 4)], ids=str)
def test_rows_expands_a_layout_without_batch_or_heads(shape):
    made = make_inputs(1, 2, 4, 2, 13, 17, 8, 5, order="BLHD", strided=True)
    compare(made, draw_counts(*shape, 13, 17), OPTIONS["all"])


@pytest.mark.parametrize(("Q", "K"), list(itertools.product(lengths(), repeat=2)))
def test_rows_matches_the_textbook_at_ragged_lengths(Q, K):
    made = make_inputs(2, 2, 2, 1, Q, K, 7, 9)
    compare(made, draw_counts(1, 2, Q, K, most=1), {}, tile=64)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_rounds_half_precision_once(dtype):
    options = OPTIONS["all"]
    made = make_inputs(3, 2, 4, 2, 65, 97, 16, 16, dtype)
    counts = draw_counts(2, 4, 65, 97)
    compare(made, counts, options, tile=32)
    run = run_rows(Listed(counts, 32), options)
    leaves = leaves_of(made, options)
    narrow = differentiate(run, leaves)
    wide = run(*(x.float() for x in leaves))
    assert torch.equal(narrow[0], wide[0].to(dtype))
    assert torch.equal(narrow[1], wide[1])
    assert [x.dtype for x in narrow] == [dtype, torch.float32] + [dtype] * 4


@pytest.mark.parametrize("name", OPTIONS)
def test_rows_gradients_are_the_derivatives(name):
    made = make_inputs(4, 1, 2, 1, 5, 4, 2, 3, torch.float64)
    counts = draw_counts(1, 1, 5, 4, most=2)
    run = run_rows(Listed(counts, 3), OPTIONS[name])

    def finite(*leaves):
        out, lse = run(*leaves)
        return out, lse.masked_fill(lse == -math.inf, 0)

    assert gradcheck(finite, leaves_of(made, OPTIONS[name]))


@pytest.mark.parametrize("name", OPTIONS)
def test_rows_agrees_with_the_plain_reference(name):
    options = OPTIONS[name]
    made = make_inputs(5, 2, 6, 3, 33, 29, 8, 8, torch.float64)
    counts = draw_counts(2, 6, 33, 29)
    layout = Listed(counts, 16, q_start=-4)

    def run(query, key, value, sink=None):
        given = {"sink": sink, "scale": 8**-0.5, "softcap": 0.0, "dropout_p": 0.0, "seed": SEED}
        given |= {name: x for name, x in options.items() if name != "sink"}
        given |= {
            "layout": layout,
            "relation": None,
            "terms": (),
            "score": None,
            "q_start": -4,
            "places": None,
        }
        return reference.attend(SimpleNamespace(query=query, key=key, value=value, **given))

    mine = differentiate(run_rows(layout, options), leaves_of(made, options))
    plain = differentiate(run, leaves_of(made, options))
    for x, y in zip(mine, plain, strict=True):
        torch.testing.assert_close(x, y)


EDGES = torch.tensor([[0, 1, 1, 5, 96, 3, 3, 3], [0, 0, 0, 5, 2, 96, 96, 96]])
RELATIONS = [
    Full(),
    Empty(),
    Causal() & Window(before=20),
    PerHead([Causal(), Empty(), Window(before=3), Causal()]),
    Documents([[0] * 50 + [-1] * 17 + [1] * 30, [2] * 97]) & Causal(),
    Graph(EDGES, num_nodes=97),
    Graph(EDGES, num_nodes=97) | Window(before=2),
]


@pytest.mark.parametrize("relation", RELATIONS, ids=lambda relation: type(relation).__name__)
@pytest.mark.parametrize("form", ["auto", "tiles", "edges"])
def test_rows_on_a_built_layout_equals_the_reference_on_its_relation(relation, form):
    if form == "tiles" and type(relation) is Graph:
        pytest.skip("duplicate edges are never tiles")
    options = OPTIONS["all"]
    made = make_inputs(5, 2, 4, 2, 97, 97, 8, 8, torch.float64)
    layout = Layout.build(relation, 97, 97, form=form)

    def run(query, key, value, sink=None):
        problem = Problem(query, key, value, relation, sink=sink, dropout_p=0.2, softcap=2.0)
        problem.seed = SEED
        return reference.attend(problem)

    mine = differentiate(run_rows(layout, options), leaves_of(made, options))
    plain = differentiate(run, leaves_of(made, options))
    for x, y in zip(mine, plain, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("sink", [False, True])
def test_empty_rows_give_zeros_and_zero_gradients(sink):
    """This holds even if the gradient of their lse is NaN, as from exp(lse - lse)."""
    made = make_inputs(6, 2, 4, 2, 9, 7, 4, 3)
    leaves = leaves_of(made, {"sink": sink})
    run = run_rows(Listed(torch.zeros(1, 1, 9, 7, dtype=torch.int64)), {})
    out, lse = run(*leaves)
    assert not out.any()
    wanted = leaves[3] if sink else torch.full((4,), -math.inf)
    assert torch.equal(lse, wanted[:, None].expand(2, 4, 9))
    grad_lse = torch.ones_like(lse) if sink else torch.full_like(lse, math.nan)
    grads = torch.autograd.grad((out, lse), leaves, (torch.ones_like(out), grad_lse))
    assert not any(grad.any() for grad in grads[:3])
    if sink:
        assert torch.equal(grads[3], torch.full((4,), 18.0))


@pytest.mark.parametrize(
    "sizes",
    [(0, 2, 2, 3, 4), (2, 0, 0, 3, 4), (2, 4, 2, 0, 4), (2, 4, 2, 3, 0), (1, 1, 1, 0, 0)],
    ids=str,
)
def test_zero_lengths_work(sizes):
    B, H, Hk, Q, K = sizes
    leaves = leaves_of(make_inputs(0, B, H, Hk, Q, K, 4, 5), {"sink": True})
    layout = Listed(torch.ones(1, 1, Q, K, dtype=torch.int64))
    out, lse, *grads = differentiate(run_rows(layout, {"dropout_p": 0.5}), leaves)
    assert out.shape == (B, H, Q, 5)
    assert not out.any()
    if K == 0:
        assert torch.equal(lse, leaves[3][:, None].expand(B, H, Q))
    assert [x.shape for x in grads] == [x.shape for x in leaves]
    assert not any(grad.any() for grad in grads[:3])


def test_rows_computes_the_gradients_that_are_needed():
    made = make_inputs(7, 2, 4, 2, 9, 7, 4, 3)
    sink = torch.zeros(4)
    given = call(*made, Listed(draw_counts(1, 4, 9, 7)), sink=sink)
    out, lse = rows.forward(given)
    grad_out, grad_lse = torch.ones_like(out), torch.ones_like(lse)
    every = rows.backward(given, out, lse, grad_out, grad_lse, Needs(True, True, True, True))
    for needs in itertools.product([False, True], repeat=4):
        grads = rows.backward(given, out, lse, grad_out, grad_lse, Needs(*needs))
        for need, grad, wanted in zip(needs, grads[:4], every, strict=False):
            assert torch.equal(grad, wanted) if need else grad is None
    none = rows.backward(given, out, lse, grad_out, None, Needs(True, True, True, True))
    zero = rows.backward(given, out, lse, grad_out, torch.zeros_like(lse), Needs(True, True, True, True))
    assert all(torch.equal(x, y) for x, y in zip(none[:4], zero[:4], strict=True))


@pytest.mark.parametrize("order", ["BHLD", "BLHD", "LBHD"])
def test_rows_results_have_the_inputs_stride_order(order):
    made = make_inputs(8, 2, 4, 2, 9, 7, 4, 3, torch.float16, order=order)
    given = call(*made, Listed(draw_counts(1, 1, 9, 7)))
    out, lse = rows.forward(given)
    by_stride = ["BHLD".index(letter) for letter in order]
    assert out.permute(by_stride).is_contiguous()
    assert lse.is_contiguous()
    grads = rows.backward(given, out, lse, torch.ones_like(out), None, Needs(True, True, True))
    for grad, x in zip(grads[:3], made, strict=True):
        assert grad.stride() == torch.empty_like(x).stride()


def test_rows_gives_the_same_bits_twice():
    made = make_inputs(9, 2, 6, 2, 97, 97, 16, 16)
    leaves = leaves_of(made, OPTIONS["sink"])
    run = run_rows(Listed(draw_counts(1, 2, 97, 97).repeat(1, 3, 1, 1), 32), OPTIONS["sink"])
    first, again = differentiate(run, leaves), differentiate(run, leaves)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def test_rows_why_not():
    def reasons(**given):
        return rows.why_not(SimpleNamespace(**{"score": None, "terms": ()} | given))

    assert rows.name == "rows"
    assert reasons() == []
    words = ["terms[1]: str is known by its values alone, which only the reference reads"]
    given = (KeyBias(torch.zeros(1, 1)), "b")
    assert reasons(terms=given) == words
