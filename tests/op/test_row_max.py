"""The largest score of each row, on every backend, against float64."""

import importlib.util

import pytest
import torch
from cases.edges import mixed
from cases.interpreter import INTERPRETED, not_interpreted, run_interpreted

import attnbias as ab
from attnbias.backends import cpu, reference
from attnbias.op.problem import Problem
from attnbias.testing import make_inputs, tolerance
from attnbias.testing.compare import compare_max

if INTERPRETED:
    import triton  # noqa: F401 - it runs on the host only once it is imported

    BACKENDS = ["triton"]
else:
    BACKENDS = ["reference", "rows"] + ([] if cpu.missing() else [f"cpu {isa}" for isa in cpu.isas()])
SEED = 3


@pytest.fixture(params=BACKENDS)
def backend(request):
    """Name the backend; the C++ kernels run on the instruction set asked for."""
    name, _, isa = request.param.partition(" ")
    if isa:
        cpu.force_isa(isa)
    yield name
    if isa:
        cpu.force_isa("")


def graph(n, edges, hub=0):
    """Draw edges, some of them twice, ``hub`` more into node 1, and none into the last nodes."""
    rng = torch.Generator().manual_seed(SEED)
    pairs = torch.randint(0, n, (2, edges + hub), generator=rng)
    pairs[1, edges:] = 1
    pairs[1].clamp_(max=n - 4)
    return ab.Graph(torch.cat((pairs, pairs[:, :7]), 1), num_nodes=n)


def check(backend, inputs, relation, **options):
    """Compare with float64, and the other results with those of a call without it."""
    torch.manual_seed(SEED)
    out, lse, row_max = ab.attention(
        *inputs, relation, return_lse=True, return_max=True, backend=backend, **options
    )
    torch.manual_seed(SEED)
    want = ab.attention(*inputs, relation, return_lse=True, backend=backend, **options)
    assert torch.equal(out, want[0]) and torch.equal(lse, want[1])
    problem = Problem(*inputs, relation, **options)
    none, bias = torch.zeros(0), 3.0 * len(problem.terms)
    sizes = tolerance.magnitudes(*inputs, none, none, problem.scale, 0.0, bias)
    assert row_max.dtype == problem.sizes.dtype and not row_max.requires_grad
    result = compare_max(problem, row_max, sizes["lse"])
    assert not result.fault, result.fault
    return row_max


DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16, torch.float64])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", [(1, 1), (1, 300), (3, 65), (65, 64), (97, 130)], ids=str)
def test_ragged_lengths(backend, dtype, lengths):
    if backend == "cpu" and dtype == torch.float64:
        pytest.skip("the C++ kernels take no float64")
    inputs = make_inputs(SEED, 1, 2, 1, *lengths, 16, 8, dtype)
    check(backend, inputs, ab.Causal() & ab.Window(before=70), q_start="end")
    check(backend, inputs, ab.Full())


def test_it_is_of_the_whole_row(backend):
    """The largest score of each row is at another tile; that of one tile, or of the last, is another."""
    n = 260
    query, key, value = make_inputs(SEED, 1, 2, 2, n, n, 8, 8)
    at = torch.arange(n) * 7 % n  # [Q]
    key[:] = torch.nn.functional.normalize(key, dim=-1)
    query[:] = 9 * key[:, :, at]
    forms = ["tiles"] if INTERPRETED else ["tiles", "edges"]  # so many edges take the interpreter minutes
    for relation in (ab.Full().layout(n, n, form=form) for form in forms):
        row_max = check(backend, (query, key, value), relation, scale=1.0)
        torch.testing.assert_close(row_max, torch.full((1, 2, n), 9.0))


@pytest.mark.parametrize(
    "options",
    [
        {"scale": -0.4},
        {"scale": 0.0},
        {"softcap": 1.5},
        {"sink": torch.tensor([50.0, -50.0, 0.0, 1.0])},
        {"dropout_p": 0.5},
        {"dropout_p": 1.0, "sink": torch.full((4,), 50.0)},
        {"terms": [ab.ALiBi(torch.tensor([0.5, -0.01, 0.0, 0.02]))], "softcap": 2.0},
        {"terms": [ab.KeyBias(torch.tensor([0.0, -torch.inf, 1.0]).repeat(1, 30)[:, :70])]},
    ],
    ids=str,
)
@pytest.mark.parametrize("form", ["tiles", "edges"])
def test_options(backend, form, options):
    n = 70
    inputs = make_inputs(SEED, 1, 4, 2, n, n, 16, 16)
    relation = ab.Causal() & ab.Window(before=9) & ~ab.Window(before=0)  # the first row is empty
    check(backend, inputs, relation.layout(n, n, form=form), **options)


@pytest.mark.parametrize("sink", [None, torch.tensor([9.0, -9.0, 0.0, 9.0])], ids=["plain", "sink"])
@pytest.mark.parametrize("heads", [(4, 4, 16), (4, 2, 5)], ids=["together", "one by one"])
def test_edges(backend, heads, sink):
    """Rows of few edges, of many, of so many that they are cut, and of none."""
    n, (H, Hk, D) = 60 if INTERPRETED else 300, heads
    hub = 600 if INTERPRETED else 20000
    inputs = make_inputs(SEED, 1, H, Hk, n, n, D, D)
    row_max = check(backend, inputs, graph(n, 3 * n, hub), sink=sink)
    assert (row_max[..., -3:] == -torch.inf).all()


@pytest.mark.parametrize("sink", [None, torch.tensor([9.0, -9.0, 0.0, 9.0])], ids=["plain", "sink"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_tiles_and_edges_in_one_layout(backend, dtype, sink):
    layout = mixed(240)
    for D in (16,) if INTERPRETED else (16, 5):
        row_max = check(backend, make_inputs(SEED, 1, 4, 4, 240, 240, D, D, dtype), layout, sink=sink)
        assert (row_max[..., -5:] == -torch.inf).all() and (row_max[..., :64] > -torch.inf).all()


@pytest.mark.parametrize("heads", [(4, 4, 16), (4, 2, 5)], ids=["together", "one by one"])
@pytest.mark.parametrize("number", [torch.nan, torch.inf], ids=str)
def test_what_is_not_finite_is_seen(backend, heads, number):
    """A maximum that is followed with care for speed loses a NaN, and monitoring needs it most."""
    n, (H, Hk, D) = 70, heads
    for relation in (ab.Full().layout(n, n, form="tiles"), graph(n, 5 * n, 300), mixed(240)):
        length = 240 if isinstance(relation, ab.Layout) and relation.q_len == 240 else n
        query, key, value = make_inputs(SEED, 1, H, Hk, length, length, D, D)
        query[:, :, 3] = query[:, :, 3].abs()
        key[:, 0, 5] = number  # scores of row 3 and of many others
        row_max = ab.attention(query, key, value, relation, return_max=True, backend=backend)[1]
        want = reference.row_max(Problem(query, key, value, relation))
        assert torch.equal(row_max.isnan(), want.isnan()) and torch.equal(
            row_max == torch.inf, want == torch.inf
        )
        few = ab.attention(query[:, :, 3:4], key, value, return_max=True, backend=backend)[1]
        assert (few[:, 0].isnan() if number is torch.nan else few[:, 0] == torch.inf).all()
        query[:, :, 3] = torch.nan
        few = ab.attention(query[:, :, 3:4], key, value, return_max=True, backend=backend)[1]
        assert few.isnan().all()


def test_duplicate_edges(backend):
    """They count twice in the softmax, and once in its largest score."""
    n = 128
    dense = torch.cartesian_prod(torch.arange(n), torch.arange(16)).T
    more = torch.stack((torch.arange(n), torch.full((n,), 100)))
    twice = torch.cat((dense, more, more), 1)
    layout = ab.Layout.build(ab.Graph(twice.flip(0), num_nodes=n), n, n, tile=64)
    query, key, value = make_inputs(SEED, 1, 4, 4, n, n, 16, 16)
    check(backend, (query, key, value), layout)
    key[:, :, 100] = 3 * query.mean(2)
    check(backend, (query, key, value), layout, sink=torch.full((4,), 7.0))


@pytest.mark.parametrize("bias", [False, True])
def test_scores_of_edges(backend, bias):
    relation = graph(90, 500)
    rng = torch.Generator().manual_seed(SEED)
    terms = [ab.EdgeBias(torch.randn(507, 4, generator=rng))] if bias else []
    for D in (1, 12):
        weight = torch.randn(4, D, generator=rng)
        score = ab.AdditiveScore(weight, negative_slope=0.2)
        check(backend, make_inputs(SEED, 1, 4, 4, 90, 90, D, 8), relation, score=score, terms=terms)
    check(backend, make_inputs(SEED, 1, 4, 4, 90, 90, 16, 16), relation, terms=terms)


@pytest.mark.parametrize("normalize", ["pair", "levels", None])
def test_levels(backend, normalize):
    score = ab.MultiLevel(
        [6, 6, 4], widths=[None if normalize == "pair" else 128, 64, 32], normalize=normalize
    )
    inputs = make_inputs(SEED, 1, 2, 2, 150, 150, 16, 16)
    check(backend, inputs, ab.Causal(), score=score)
    check(backend, inputs, ab.Causal() & ~ab.Window(before=0), score=score, softcap=0.7)


@pytest.mark.parametrize("sizes", [(1, 2, 0, 5), (1, 2, 5, 0), (0, 2, 3, 4)], ids=str)
def test_no_lengths(backend, sizes):
    B, H, Q, K = sizes
    query, key = torch.randn(B, H, Q, 8), torch.randn(B, H, K, 8)
    _, row_max = ab.attention(query, key, key, return_max=True, backend=backend)
    assert row_max.shape == (B, H, Q) and (row_max == -torch.inf).sum() == (0 if K else B * H * Q)
    most = ab.max_logit(query, key, backend=backend)
    assert most.shape == (H,) and (B * Q * K > 0 or (most == -torch.inf).all())


def test_max_logit(backend):
    query, key, _ = make_inputs(SEED, 2, 4, 2, 70, 70, 16, 16, requires_grad=True)
    terms = [ab.ALiBi(torch.rand(4, requires_grad=True))]
    options = {"terms": terms, "softcap": 3.0, "scale": 0.7, "q_start": 2}
    got = ab.max_logit(query, key, ab.Causal(), backend=backend, **options)
    _, rows = ab.attention(query, key, key, ab.Causal(), return_max=True, backend=backend, **options)
    assert not got.requires_grad
    assert torch.equal(got, rows.amax((0, 2)))
    single = ab.max_logit(query[0], key[0], ab.Causal(), backend=backend, **options)
    assert torch.equal(single, rows[0].amax(1))


def test_gradients_do_not_change(backend):
    """The maximum takes no part in them, and cannot be differentiated."""
    inputs = make_inputs(SEED, 1, 2, 2, 40, 40, 8, 8, requires_grad=True)
    out, lse, row_max = ab.attention(*inputs, ab.Causal(), return_lse=True, return_max=True, backend=backend)
    got = torch.autograd.grad(out.sum() + lse.sin().sum(), inputs)
    assert not row_max.requires_grad and row_max.grad_fn is None
    out, lse = ab.attention(*inputs, ab.Causal(), return_lse=True, backend=backend)
    want = torch.autograd.grad(out.sum() + lse.sin().sum(), inputs)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


def attend(query, key, value):
    """Return all three results."""
    return ab.attention(query, key, value, ab.Causal(), return_lse=True, return_max=True)


@not_interpreted
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic):
    inputs = make_inputs(SEED, 1, 2, 2, 40, 40, 8, 8, requires_grad=True)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    got, want = compiled(*inputs), attend(*inputs)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    assert not got[2].requires_grad
    grads = [torch.autograd.grad(x[0].sum() + x[1].sum(), inputs) for x in (got, want)]
    assert all(torch.equal(x, y) for x, y in zip(*grads, strict=True))
    most = torch.compile(ab.max_logit, fullgraph=True, backend="aot_eager")
    assert torch.equal(most(*inputs[:2]), ab.max_logit(*inputs[:2]))


@not_interpreted
def test_export_and_meta():
    inputs = make_inputs(SEED, 1, 2, 2, 40, 40, 8, 8)

    class Module(torch.nn.Module):
        def forward(self, query, key, value):
            return attend(query, key, value)

    program = torch.export.export(Module(), inputs)
    got = program.module()(*inputs)
    assert all(torch.equal(x, y) for x, y in zip(got, attend(*inputs), strict=True))
    shapes = [x.shape for x in attend(*(x.to("meta") for x in inputs))]
    assert shapes == [x.shape for x in got]


@not_interpreted
def test_sdpa_refuses():
    inputs = make_inputs(SEED, 1, 2, 2, 4, 4, 8, 8)
    with pytest.raises(NotImplementedError, match="return_max: it returns none"):
        ab.attention(*inputs, return_max=True, backend="sdpa")
    with pytest.raises(TypeError, match="return_max: wanted True or False, got 1"):
        ab.attention(*inputs, return_max=1)
    assert ab.explain(*inputs, return_max=True).others["sdpa"].startswith("return_max")
    assert ab.verify(*inputs, return_max=True).results["max"].fault == ""


@not_interpreted
def test_alone_it_comes_second():
    inputs = make_inputs(SEED, 1, 2, 2, 4, 4, 8, 8)
    out, row_max = ab.attention(*inputs, return_max=True)
    assert out.shape == (1, 2, 4, 8) and row_max.shape == (1, 2, 4)
    assert torch.equal(ab.attention(*(x[0] for x in inputs), return_max=True)[1], row_max[0])


@not_interpreted
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_interpreted():
    """Run this file once more, interpreted."""
    run_interpreted(__file__, "-x")
