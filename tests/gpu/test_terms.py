"""Score terms and dropout in the Triton kernels as compiled: every access in bounds, no race."""

import pytest
import torch

import attnbias as ab
from attnbias.backends import triton
from attnbias.backends.call import Call, Inputs, Needs
from attnbias.backends.philox import keep_mask
from attnbias.testing import assert_no_worse, eager, magnitudes, make_inputs, soak
from attnbias.testing.draw import Drawn


@pytest.mark.parametrize("form", ["tiles", "edges"])
def test_dropout_bits(gpu, form, seed=-(2**60) - 17):
    """The bits are those of the other backends, and the gradient of values uses the kept weights."""
    B, H, Q, K, p = 2, 2, 20, 32, 0.4
    layout = ab.Layout.build(ab.Full(), Q, K, q_start=-5, form=form, batch=B, heads=H)
    query, key, _ = make_inputs(1, B, H, 1, Q, K, 16, 16)
    value = torch.eye(K).expand(B, 1, K, K)
    call = Call(Inputs(query, key, value), layout, 0.25, 0.0, p, seed=torch.tensor([seed]))
    out, lse = triton.forward(call)
    b, h = torch.arange(B)[:, None, None, None], torch.arange(H)[:, None, None]
    q, k = torch.arange(-5, Q - 5)[:, None], torch.arange(K)
    assert torch.equal(out != 0, keep_mask(torch.tensor([seed]), p, b, h, q, k))
    ones = torch.ones_like(out)
    grads = triton.backward(call, out, lse, ones, None, Needs(True, True, True))

    def expected(dtype):
        leaf = value.to(dtype).requires_grad_()
        options = {"scale": 0.25, "dropout_p": p, "seed": call.seed, "q_start": -5}
        made, _ = eager(query.to(dtype), key.to(dtype), leaf, counts=layout.rows(0, Q), **options)
        return torch.autograd.grad(made.sum(), leaf)[0]

    sizes = magnitudes(query, key, value, ones, torch.zeros(1, 1, 1), 0.25, p)
    same, truth = expected(torch.float32), expected(torch.float64)
    assert_no_worse("value", grads[2], same, truth, 3.0, magnitude=sizes["value"])


@pytest.mark.parametrize("case", [pytest.param("tiles", marks=pytest.mark.slow), "tiles of 128", "edges"])
def test_terms(gpu, case):
    """All parts at once, their gradients too, against float64."""
    is_large = case == "tiles of 128"
    B, H, Q, K, D = 1 if is_large else 2, 2, *((70, 140) if is_large else (20, 70)), 64 if is_large else 16
    dtype = torch.float16 if is_large else torch.float32
    rng = torch.Generator().manual_seed(1)
    leaves = [torch.randn(n, generator=rng) for n in ((H,), (H, 13 * 39), (B, K), (1, H, Q, K))]

    def terms(slopes, table, keys, pairs):
        grid = ab.GridBias(table, (7, 20))
        return [ab.ALiBi(slopes), grid, ab.KeyBias(keys), ab.PairBias(pairs, q_start=K - Q)]

    relation = ab.Where(lambda q, k: (q + k) % 5 == 0) if case == "edges" else ab.Causal()
    form, tile = ("edges", None) if case == "edges" else ("tiles", 128 if is_large else 64)
    layout = ab.Layout.build(relation, Q, K, q_start="end", form=form, tile=tile, batch=B, heads=H)
    inputs = make_inputs(1, B, H, 1, Q, K, D, D, dtype)
    d_out = torch.randn(B, H, Q, D, generator=rng).to(dtype)

    def results(precision, backend):
        made = [x.detach().to(precision).requires_grad_() for x in (*inputs, *leaves)]
        options = {"terms": terms(*made[3:]), "softcap": 2.0}
        if backend:
            out, lse = ab.attention(
                *made[:3], layout, q_start="end", return_lse=True, backend=backend, **options
            )
        else:
            out, lse = eager(*made[:3], counts=layout.rows(0, Q), q_start=K - Q, **options)
        return [out, lse, *torch.autograd.grad((out.double() * d_out).sum(), made)]

    truth, same, got = (results(torch.float64, ""), results(dtype, ""), results(dtype, "triton"))
    sizes = magnitudes(*inputs, d_out, torch.zeros(B, H, Q), D**-0.5, bias=8.0)
    names = ("out", "lse", "query", "key", "value", "slopes", "table", "keys", "pairs")
    for name, mine, theirs, exact in zip(names, got, same, truth, strict=True):
        factor = 2.0 if name in ("out", "lse") else 3.0
        # The gradient of a slope sums pairs scaled by up to K.
        magnitude = sizes.get(name, sizes["sink"] * (K if name == "slopes" else 1))
        assert_no_worse(name, mine, theirs, exact, factor, magnitude=magnitude)


@pytest.mark.slow
def test_tiles_and_edges_with_terms_and_dropout(gpu):
    """A layout has both forms: the results of tiles are read and added to."""
    n, rng = 200, torch.Generator().manual_seed(0)
    few = torch.randint(0, n - 5, (2, 120), generator=rng)
    relation = ab.Graph(few, num_nodes=n) | (ab.Prefix(100) & ~ab.Bipartite(64))
    layout = relation.layout(n, n, batch=1, heads=2)
    assert layout.tiles and layout.edges
    leaves = [torch.randn(shape, generator=rng, requires_grad=True) for shape in ((2,), (1, n), (2, 39 * 39))]
    slopes, keys, table = leaves
    terms = [ab.ALiBi(slopes), ab.KeyBias(keys), ab.GridBias(table, (20, 20))]
    inputs = make_inputs(1, 1, 2, 1, n, n, 16, 16, requires_grad=True)
    drawn = Drawn(3, inputs, relation, {"q_start": 0, "terms": terms, "dropout_p": 0.3}, "auto")
    assert soak.find_faults(drawn, "triton") == []
