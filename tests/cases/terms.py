"""Score terms of every kind, and their results and gradients on a backend against float64."""

import math

import torch

import attnbias as ab
from attnbias.testing import assert_no_worse, eager, magnitudes, make_inputs

B, H, Q, K = 2, 4, 70, 97
START = K - Q
GRID = (7, 14)  # 98 places


def make_terms(dtype=torch.float32):
    """Return one term of each kind, as leaves and terms."""
    rng = torch.Generator().manual_seed(3)

    def leaf(*shape):
        return torch.randn(shape, generator=rng).to(dtype).requires_grad_()

    slopes, by_batch = leaf(H), leaf(B, H)
    table, near, grid = leaf(H, 16), leaf(H, 21), leaf(H, 13 * 27)
    keys, heads, pairs, rows = leaf(B, K), leaf(1, H, K), leaf(1, H, K, K), leaf(B, 1, Q, 1)
    shared = leaf(K, K)
    return {
        "ALiBi": ([slopes], ab.ALiBi(slopes)),
        "ALiBi by batch": ([by_batch], ab.ALiBi(by_batch)),
        "T5": ([table], ab.RelativeBias(table, ab.t5_buckets(True, 50))),
        "T5 causal": ([table], ab.RelativeBias(table, ab.t5_buckets(False, 50))),
        "linear": ([near], ab.RelativeBias(near, ab.linear_buckets(10))),
        "grid": ([grid], ab.GridBias(grid, GRID)),
        "key": ([keys], ab.KeyBias(keys)),
        "key and head": ([heads], ab.KeyBias(heads)),
        "pair": ([pairs], ab.PairBias(pairs)),
        "pair for all": ([shared], ab.PairBias(shared)),
        "pair by row": ([rows], ab.PairBias(rows, q_start=START)),
    }


NAMES = list(make_terms())
RELATIONS = {
    "causal": ab.Causal(),
    "empty rows": ab.Window(before=20) & ~ab.Bipartite(60),
    "scattered": ab.Where(lambda q, k: (q * 7 + k * 3) % 11 == 0),
    "per head": ab.PerHead([ab.Causal(), ab.Full(), ab.Empty(), ab.Window(before=7)]),
}


def check(backend, relation, leaves, terms, dtype=torch.float32, **options):
    """Compare results and all gradients, those of the terms included, with float64."""
    query, key, value = make_inputs(1, B, H, 2, Q, K, 16, 24, dtype)
    rng = torch.Generator().manual_seed(1)
    d_out, d_lse = torch.randn(B, H, Q, 24, generator=rng).to(dtype), torch.randn(B, H, Q, generator=rng)
    mask = relation.dense(Q, K, "end", batch=B, heads=H)

    def results(run, precision):
        inputs = [x.detach().to(precision).requires_grad_() for x in (query, key, value, *leaves)]
        again = iter(inputs[3:])
        made = [replaced(term, next(again)) for term in terms]
        out, lse = run(*inputs[:3], made)
        exists = lse.isfinite()
        loss = (out * d_out.to(out.dtype)).sum() + (lse[exists] * d_lse.to(lse.dtype)[exists]).sum()
        return [out, lse, *torch.autograd.grad(loss, inputs)]

    def textbook(q, k, v, made):
        return eager(q, k, v, mask, terms=made, q_start=START, **options)

    def kernel(q, k, v, made):
        return ab.attention(
            q, k, v, relation, terms=made, q_start="end", return_lse=True, backend=backend, **options
        )

    got = results(kernel, dtype)
    same, truth = results(textbook, dtype), results(textbook, torch.float64)
    sizes = magnitudes(query, key, value, d_out, d_lse, 16**-0.5)
    names = ("out", "lse", "query", "key", "value", *(f"leaf {i}" for i in range(len(leaves))))
    for name, mine, theirs, exact in zip(names, got, same, truth, strict=True):
        factor = 2.0 if name in ("out", "lse") else 3.0
        # An entry of a table sums over pairs, as a sink does, each as often as its distance occurs.
        largest = max((x.detach().abs().max().item() for x in leaves), default=1.0)
        magnitude = sizes.get(name, sizes["sink"] * largest)
        assert_no_worse(name, mine, theirs, exact, factor, magnitude=magnitude)


def replaced(term, leaf):
    """Return the same term around another tensor."""
    rest = [value for name, value in vars(term).items()][1:]
    return type(term)(leaf, *rest)


def check_same_bits(backend):
    """Check that gradients are the same bits each time."""
    made = make_terms()
    leaves = [leaf for each, _ in made.values() for leaf in each]
    query, key, value = make_inputs(1, B, H, 2, Q, K, 16, 24)

    def grads():
        terms = [term for _, term in made.values()]
        out = ab.attention(query, key, value, ab.Causal(), terms=terms, q_start="end", backend=backend)
        return torch.autograd.grad(out.sum(), leaves, allow_unused=True)

    first, second = grads(), grads()
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def check_minus_infinity(backend):
    """Check that a term of minus infinity removes the pair."""
    query, key, value = make_inputs(1, 1, 2, 2, 9, 9, 8, 8, requires_grad=True)
    bias = torch.zeros(1, 9)
    bias[0, 4:] = -math.inf
    got = ab.attention(query, key, value, terms=[ab.KeyBias(bias)], return_lse=True, backend=backend)
    want = ab.attention(query, key, value, ab.Prefix(4), return_lse=True, backend=backend)
    torch.testing.assert_close(got, want)
    none = torch.full((1, 9), -math.inf)
    out, lse = ab.attention(query, key, value, terms=[ab.KeyBias(none)], return_lse=True, backend=backend)
    assert not out.any() and (lse == -math.inf).all()
    grads = torch.autograd.grad(out.sum(), (query, key, value))
    assert not any(grad.any() for grad in grads)
