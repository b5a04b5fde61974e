"""The op: its registrations, gradients, strides, dropout, autocast and checkpointing."""

import dataclasses
import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import attnbias as ab
from attnbias.backends.call import Inputs
from attnbias.op import dispatch
from attnbias.op.codec import Rest, join
from attnbias.testing import make_inputs

EMPTY_ROWS = ab.Window(before=2) & ab.Prefix(20)  # later queries have no key


def leaves(Q=33, K=33, **kwargs):
    sizes = {"B": 2, "H": 4, "Hk": 2, "Q": Q, "K": K, "D": 8, "E": 5, "requires_grad": True}
    return make_inputs(0, **(sizes | kwargs))


def op_arguments(
    q,
    k,
    v,
    relation,
    *,
    traced=False,
    sink=None,
    seed=None,
    dropout_p=0.0,
    return_max=False,
    positions=(),
    places=(),
):
    """Return the arguments of the op, as in eager or as in a traced call."""
    layout = relation if isinstance(relation, ab.Layout) else relation.layout(q.shape[2], k.shape[2])
    tensors, text = [layout.buffer, layout.where], ""
    if traced and layout is not relation:
        tensors, text = list(relation.recipe.data), relation.recipe.text
    lists = ([], None, seed, tensors, list(positions), list(places))
    rest = Rest(*lists, 0, 0.3, 2.0, dropout_p, "", text, "" if traced else "rows", return_max)
    return join(Inputs(q, k, v, sink), rest)


CASES = {
    "relation": {},
    "relation traced": {"traced": True},
    "layout": {"relation": EMPTY_ROWS.layout(33, 33)},
    "layout traced": {"relation": EMPTY_ROWS.layout(33, 33), "traced": True},
    "sink": {"sink": torch.arange(4.0, requires_grad=True)},
    "dropout": {"seed": torch.tensor([77]), "dropout_p": 0.5},
    "maximum": {"return_max": True},
    "places": {
        "relation": EMPTY_ROWS.layout(33, 33),
        "positions": [torch.arange(64, 97, dtype=torch.int32)] * 2,
        "places": [97, 97, 1, 2],
        "seed": torch.tensor([77]),
        "dropout_p": 0.5,
    },
    "places of heads": {"places": [0, 0, 0, 2], "seed": torch.tensor([77]), "dropout_p": 0.5, "traced": True},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("order", ["BHLD", "BLHD"])
def test_opcheck_forward(case, order):
    options = {"relation": EMPTY_ROWS, **CASES[case]}
    torch.library.opcheck(torch.ops.attnbias.forward.default, op_arguments(*leaves(order=order), **options))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_opcheck_forward_dtypes(dtype):
    arguments = op_arguments(*leaves(dtype=dtype, strided=True), EMPTY_ROWS)
    torch.library.opcheck(torch.ops.attnbias.forward.default, arguments)


@pytest.mark.parametrize(
    ("given", "needs", "traced"),
    [
        ("both", (1, 1, 1, 1), False),
        ("both", (1, 1, 1, 1), True),
        ("out", (1, 0, 0, 0), False),
        ("lse", (0, 1, 0, 1), True),
    ],
)
def test_opcheck_backward(given, needs, traced):
    q, k, v = leaves(order="BLHD", requires_grad=False)
    arguments = op_arguments(q, k, v, EMPTY_ROWS, traced=traced, sink=torch.arange(4.0))
    out, lse, _ = torch.ops.attnbias.forward(*arguments)
    grad_out = None if given == "lse" else torch.randn_like(out)
    grad_lse = None if given == "out" else torch.randn_like(lse)
    torch.library.opcheck(
        torch.ops.attnbias.backward.default,
        (*arguments, out, lse, grad_out, grad_lse, [*map(bool, needs), *[False] * 6]),
    )


def test_gradcheck():
    q, k, v = leaves(Q=6, K=7, H=2, Hk=1, D=3, E=2, dtype=torch.float64)
    sink = torch.randn(2, dtype=torch.float64, requires_grad=True)

    def call(q, k, v, sink):
        out, lse = ab.attention(q, k, v, ab.Causal(), softcap=1.5, sink=sink, return_lse=True, backend="rows")
        return out, lse

    assert torch.autograd.gradcheck(call, (q, k, v, sink))


@pytest.mark.parametrize("use", ["out", "lse", "both"])
def test_gradients_through_either_result(use):
    q, k, v = leaves(dtype=torch.float64)
    grads = []
    for backend in ("rows", "reference"):
        out, lse = ab.attention(q, k, v, EMPTY_ROWS, return_lse=True, backend=backend)
        lse = lse.masked_fill(lse == -math.inf, 0)
        loss = {"out": out.sin().sum(), "lse": lse.cos().sum()}
        loss["both"] = loss["out"] + loss["lse"]
        grads.append(torch.autograd.grad(loss[use], (q, k, v), materialize_grads=True))
    torch.testing.assert_close(*grads)


class Spy:
    """A backend that records its arguments."""

    name = "rows"
    why_not = staticmethod(dispatch.rows.why_not)

    def __init__(self):
        self.calls, self.needs, self.grads = [], [], []

    def forward(self, call):
        assert not torch.is_autocast_enabled("cpu")
        self.calls.append(call)
        return dispatch.rows.forward(call)

    def backward(self, call, out, lse, grad_out, grad_lse, needs):
        assert not torch.is_autocast_enabled("cpu")
        self.calls.append(call)
        self.needs.append(list(needs))
        self.grads.append((grad_out, grad_lse))
        return dispatch.rows.backward(call, out, lse, grad_out, grad_lse, needs)


@pytest.fixture
def spy(monkeypatch):
    spy = Spy()
    monkeypatch.setitem(dispatch.IN_OP, "rows", spy)
    with ab.use_backend("rows"):
        yield spy


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (0, 2), (0, 1, 2, 3)])
def test_only_wanted_gradients_are_computed(spy, wanted):
    inputs = [*leaves(requires_grad=False), torch.randn(4)]
    for i in wanted:
        inputs[i].requires_grad_()
    q, k, v, sink = inputs
    ab.attention(q, k, v, ab.Causal(), sink=sink).sum().backward()
    assert spy.needs == [[i in wanted for i in range(10)]]
    assert [x.grad is not None for x in inputs] == spy.needs[0][:4]


def test_missing_gradient_is_not_filled_with_zeros(spy):
    q, k, v = leaves()
    out, lse = ab.attention(q, k, v, ab.Full(), return_lse=True)
    torch.autograd.grad(out.sum(), q, retain_graph=True)
    torch.autograd.grad(lse.sum(), q)
    assert spy.grads[0][1] is None
    assert spy.grads[1][0].stride() == (0, 0, 0, 0)  # one zero, expanded


def test_nothing_is_saved_if_no_gradient_is_needed():
    q, k, v = leaves(requires_grad=False)
    assert ab.attention(q, k, v, ab.Causal()).grad_fn is None
    q, k, v = leaves()
    with torch.no_grad():
        assert ab.attention(q, k, v, ab.Causal()).grad_fn is None
    with torch.inference_mode():
        assert ab.attention(q, k, v, ab.Causal()).is_inference()


KEPT = {
    "plain": lambda: (ab.Window(before=3) | ab.Prefix(2), []),
    "with data": lambda: (ab.Documents(torch.arange(33) // 5), []),
    "graph": lambda: (ab.Graph(torch.arange(66).view(2, 33) % 33, num_nodes=33), []),
    "edge bias": lambda: (ab.Graph(torch.arange(66).view(2, 33) % 33, 33), [ab.EdgeBias(torch.ones(33))]),
    "buckets": lambda: (ab.Causal(), [ab.RelativeBias(torch.ones(4, 32), ab.t5_buckets(False, 100))]),
}


@pytest.mark.parametrize("backend", [None, "rows", "reference"])
@pytest.mark.parametrize("case", KEPT)
@pytest.mark.parametrize("made_there", [False, True])
def test_training_works_after_inference_mode(case, backend, made_there):
    """Validation often runs first: inference tensors, which autograd refuses, must not stay in a cache."""
    ab.layout_cache.clear()
    q, k, v = leaves()
    relation, terms = KEPT[case]()
    with torch.inference_mode():
        if made_there:
            relation = KEPT[case]()[0]
        ab.attention(q, k, v, relation, terms=terms, backend=backend)
    terms = [dataclasses.replace(term, **_learnable(term)) for term in terms]
    ab.attention(q, k, v, relation, terms=terms, backend=backend).sum().backward()


def _learnable(term):
    name = "table" if isinstance(term, ab.RelativeBias) else "bias"
    return {name: getattr(term, name).clone().requires_grad_()}


@pytest.mark.parametrize("order", ["BHLD", "BLHD", "LBHD", "HBLD"])
@pytest.mark.parametrize("strided", [False, True])
def test_strides_are_read_and_kept(spy, order, strided):
    q, k, v = leaves(order=order, strided=strided)
    out, lse = ab.attention(q, k, v, ab.Causal(), return_lse=True)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    for call in spy.calls:
        for mine, given in ((call.query, q), (call.key, k), (call.value, v)):
            assert mine.data_ptr() == given.data_ptr() and mine.stride() == given.stride()
    dims = ["BHLD".index(letter) for letter in order]
    assert out.permute(dims).is_contiguous() and lse.is_contiguous()
    wanted = [torch.empty_like(x).stride() for x in (q, k, v)]
    assert [grad.stride() for grad in grads] == wanted


@pytest.mark.parametrize("kind", ["fake", "meta"])
@pytest.mark.parametrize("order", ["BHLD", "BLHD", "HBLD"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_meta_and_fake_tensors_have_the_same_shapes_dtypes_and_strides(kind, order, dtype):
    inputs = leaves(order=order, dtype=dtype, requires_grad=False)
    real = ab.attention(*inputs, ab.Causal(), return_lse=True)
    if kind == "meta":
        shown = ab.attention(*(x.to("meta") for x in inputs), ab.Causal(), return_lse=True)
    else:
        mode = FakeTensorMode()
        with mode:
            fakes = [mode.from_tensor(x) for x in inputs]
            shown = ab.attention(*fakes, ab.Causal(), return_lse=True)
    for mine, given in zip(shown, real, strict=True):
        assert mine.shape == given.shape and mine.dtype == given.dtype
        assert mine.stride() == given.stride()


def test_second_derivative_through_the_op_raises():
    q, k, v = leaves()
    (grad,) = torch.autograd.grad(ab.attention(q, k, v).sin().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"^second derivatives: use backend='reference'$"):
        grad.sum().backward()
    out = ab.attention(q, k, v, backend="reference")
    (grad,) = torch.autograd.grad(out.sin().sum(), q, create_graph=True)
    grad.sum().backward()
    assert q.grad.isfinite().all()


def transformed():
    """Return derivatives by torch.func and forward mode, which the kernels do not support."""

    def dual(function, x):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(function(forward_ad.make_dual(x, x))).tangent

    yield "jvp", lambda function, x: torch.func.jvp(function, (x,), (x,))[1]
    yield "grad", lambda function, x: torch.func.grad(lambda y: function(y).sin().sum())(x)
    yield "vmap", lambda function, x: torch.func.vmap(function)(torch.stack([x, x]))
    yield "dual", dual


@pytest.mark.parametrize(("name", "transform"), transformed())
@pytest.mark.parametrize("where", ["query", "value", "term", "score"])
def test_transforms_raise_instead_of_giving_zero(name, transform, where):
    """A kernel that ignores them gives a derivative of zero."""
    q, k, v = (x.detach() for x in leaves(Hk=4))
    bias, weight = torch.randn(66, 4), torch.randn(4, 8)
    graph = ab.Graph(torch.stack([torch.arange(66) % 33, torch.arange(66) // 2]), num_nodes=33)
    of = {
        "query": (q, lambda x: ab.attention(x, k, v, graph)),
        "value": (v, lambda x: ab.attention(q, k, x, graph)),
        "term": (bias, lambda x: ab.attention(q, k, v, graph, terms=[ab.EdgeBias(x)])),
        "score": (weight, lambda x: ab.attention(q, k, v, graph, score=ab.AdditiveScore(x))),
    }
    x, function = of[where]
    with pytest.raises(NotImplementedError, match=r": use backend='reference'$"):
        transform(function, x)
    if name != "vmap" or where == "query":
        with ab.use_backend("reference"):
            assert transform(function, x).abs().max() > 0


def test_transforms_of_other_functions_are_allowed():
    q, k, v = (x.detach() for x in leaves())
    out = ab.attention(q, k, v)
    assert torch.equal(
        torch.func.grad(lambda x: (x * ab.attention(q, k, v)).sum())(torch.ones_like(out)), out
    )


def test_dropout_follows_torchs_generator_and_agrees_with_the_reference():
    q, k, v = leaves(requires_grad=False)
    results = []
    for seed, backend in ((1, "rows"), (1, "rows"), (1, "reference"), (2, "rows")):
        torch.manual_seed(seed)
        results.append(ab.attention(q, k, v, ab.Causal(), dropout_p=0.4, backend=backend))
    assert torch.equal(results[0], results[1])
    torch.testing.assert_close(results[0], results[2])
    assert not torch.equal(results[0], results[3])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_draws_the_same_dropout(use_reentrant):
    q, k, v = leaves()
    sink = torch.randn(4, requires_grad=True)

    def call(q, k, v, sink):
        return ab.attention(q, k, v, ab.Causal(), sink=sink, dropout_p=0.4).sin()

    results = []
    for run in (call, lambda *x: checkpoint(call, *x, use_reentrant=use_reentrant)):
        torch.manual_seed(5)
        inputs = [x.detach().requires_grad_() for x in (q, k, v, sink)]
        out = run(*inputs)
        out.sum().backward()
        results.append((out, *(x.grad for x in inputs)))
    for mine, given in zip(*results, strict=True):
        assert torch.equal(mine, given)


# -- autocast --------------------------------------------------------------------------------------


# Autograd runs its own operations under the autocast of backward(); the op does not.
@pytest.mark.parametrize(
    ("backend", "backward_inside"), [("rows", False), ("rows", True), ("reference", False)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_the_inputs_and_nothing_inside(backend, backward_inside, dtype):
    q, k, v = leaves()
    sink = torch.randn(4, requires_grad=True)
    results = []
    for enabled in (True, False):
        inputs = (q, k, v) if enabled else tuple(x.to(dtype) for x in (q, k, v))
        with torch.autocast("cpu", dtype, enabled=enabled):
            out, lse = ab.attention(*inputs, ab.Causal(), sink=sink, return_lse=True, backend=backend)
        assert out.dtype == dtype and lse.dtype == torch.float32
        with torch.autocast("cpu", dtype, enabled=backward_inside):
            results.append((out, lse, *torch.autograd.grad(out.sum(), (q, k, v, sink))))
    for mine, given in zip(*results, strict=True):
        assert mine.dtype == given.dtype and torch.equal(mine, given)


def test_autocast_follows_sdpa():
    from torch.nn.functional import scaled_dot_product_attention

    for dtype in (torch.float32, torch.float16, torch.float64):
        q, k, v = leaves(dtype=dtype, Hk=4, requires_grad=False)
        # oneDNN's bfloat16 product crashes on machines where AMX is unusable.
        with torch.autocast("cpu", torch.bfloat16), torch.backends.mkldnn.flags(enabled=False):
            theirs = scaled_dot_product_attention(q, k, v, is_causal=True)
            assert ab.attention(q, k, v, ab.Causal()).dtype == theirs.dtype


def test_autocast_does_not_change_the_backward_op(spy):
    q, k, v = leaves()
    with torch.autocast("cpu", torch.bfloat16):
        ab.attention(q, k, v, ab.Causal()).sum().backward()
    assert [call.query.dtype for call in spy.calls] == [torch.bfloat16] * 2
    assert q.grad.dtype == torch.float32


def test_mixed_precision_that_autocast_cannot_fix_raises():
    q, k, v = leaves()
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match=r"^key: wanted"):
        ab.attention(q, k.double(), v)
