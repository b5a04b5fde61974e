"""Score terms: their values by hand, and results and gradients on every backend."""

import math

import pytest
import torch

import attnbias as ab
from attnbias import terms
from attnbias.backends import cpu
from attnbias.testing import assert_no_worse, eager, magnitudes, make_inputs

# What has code for terms here; each backend runs the same tests.
BACKENDS = [
    "reference",
    "rows",
    pytest.param("cpu", marks=pytest.mark.skipif(bool(cpu.missing()), reason="no library")),
]
B, H, Q, K = 2, 4, 70, 97
START = K - Q
GRID = (7, 14)  # 98 places


def at(term, b, h, q, k):
    return term.value(*(torch.tensor(x) for x in (b, h, q, k))).item()


def make_terms(dtype=torch.float32):
    """One of each, as leaves and terms."""
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
    """Results and all gradients, those of the terms too, against float64."""
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
        # A table's entry adds up pairs as a sink does, each as often as the distance counts.
        largest = max((x.detach().abs().max().item() for x in leaves), default=1.0)
        magnitude = sizes.get(name, sizes["sink"] * largest)
        assert_no_worse(name, mine, theirs, exact, factor, magnitude=magnitude)


def replaced(term, leaf):
    """The same term around another tensor."""
    rest = [value for name, value in vars(term).items()][1:]
    return type(term)(leaf, *rest)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_each_term(backend, relation, name):
    leaves, term = make_terms()[name]
    check(backend, RELATIONS[relation], leaves, [term])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_all_terms_together(backend, dtype):
    made = make_terms(dtype).values()
    leaves = [leaf for each, _ in made for leaf in each]
    check(backend, ab.Causal(), leaves, [term for _, term in made], dtype, softcap=4.0)


@pytest.fixture
def threads():
    """Restore the number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_the_same_bits_each_time(backend):
    made = make_terms()
    leaves = [leaf for each, _ in made.values() for leaf in each]
    query, key, value = make_inputs(1, B, H, 2, Q, K, 16, 24)

    def grads():
        terms = [term for _, term in made.values()]
        out = ab.attention(query, key, value, ab.Causal(), terms=terms, q_start="end", backend=backend)
        return torch.autograd.grad(out.sum(), leaves, allow_unused=True)

    first, second = grads(), grads()
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_the_same_bits_with_threads(backend, threads):
    """On `rows` and the reference they were not: threads add float32 numbers as they come."""
    n, rng = 300, torch.Generator().manual_seed(1)
    query, key, value = make_inputs(1, B, H, 2, n, n, 8, 8)
    leaves = [torch.randn(x, generator=rng, requires_grad=True) for x in ((H, 32), (H, 39 * 39), (n, n))]
    table, grid, pairs = leaves
    terms = [ab.RelativeBias(table, ab.t5_buckets()), ab.GridBias(grid, (20, 20)), ab.PairBias(pairs)]
    d_out = torch.randn(B, H, n, 8, generator=rng)

    def grads(count):
        torch.set_num_threads(count)
        out = ab.attention(query, key, value, ab.Causal(), terms=terms, backend=backend)
        return torch.autograd.grad(out, leaves, d_out)

    first = grads(8)
    counts = (8, 8) if backend == "reference" else (8, 1, 2)  # torch's own sums depend on the number
    for count in counts:
        assert all(torch.equal(x, y) for x, y in zip(first, grads(count), strict=True)), count


def test_a_table_of_many_distances_has_one_gradient(threads):
    """A long sequence's distances are enough numbers for torch to use threads."""
    term = make_terms()["T5"][1]
    sizes = terms.Sizes(1, H, 8192, 8192, 0, torch.device("cpu"), torch.float32)
    d_part = torch.randn(1, H, 2 * 8192 - 1, generator=torch.Generator().manual_seed(1))
    found = []
    for count in (1, 2, 8, 8):
        torch.set_num_threads(count)
        found.append(torch.autograd.grad(term.make_part(sizes), term.table, d_part)[0])
    assert all(torch.equal(x, found[0]) for x in found)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [name for name in NAMES if name != "pair by row"])
def test_a_step_of_decoding_equals_its_row_of_prefill(backend, name):
    leaves, term = make_terms()[name]
    query, key, value = make_inputs(1, B, H, 2, K, K, 8, 8)
    whole = ab.attention(query, key, value, ab.Causal(), terms=[term], backend=backend)
    for t in (0, 1, 50, K - 1):
        inputs = query[:, :, t : t + 1], key[:, :, : t + 1], value[:, :, : t + 1]
        if name.startswith("key"):
            term = ab.KeyBias(leaves[0][..., : t + 1])
        if name in ("pair", "pair for all"):
            term = ab.PairBias(leaves[0][..., : t + 1])
        step = ab.attention(*inputs, ab.Causal(), terms=[term], q_start="end", backend=backend)
        torch.testing.assert_close(step[:, :, 0], whole[:, :, t])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_term_of_minus_infinity_removes_the_pair(backend):
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


def test_alibi_by_hand():
    term = ab.ALiBi(torch.tensor([0.5, 0.25]))
    assert [at(term, 0, 1, 7, 3), at(term, 0, 0, 3, 7), at(term, 1, 0, 2, 2)] == [-1.0, -2.0, 0.0]
    by_batch = ab.ALiBi(torch.tensor([[1.0], [2.0]]))
    assert [at(by_batch, 0, 0, 4, 1), at(by_batch, 1, 0, 4, 1)] == [-3.0, -6.0]


def test_t5_buckets_by_hand():
    """As the published models have them: 32 buckets, 128 away."""
    both = ab.t5_buckets(bidirectional=True, max_distance=128)
    distances = torch.tensor([0, -1, -7, -8, -11, -12, -90, -91, -127, -500, 1, 7, 8, 16, 500])
    wanted = [0, 1, 7, 8, 8, 9, 14, 15, 15, 15, 17, 23, 24, 26, 31]
    assert both(distances, 32).tolist() == wanted
    behind = ab.t5_buckets(bidirectional=False, max_distance=128)
    distances = torch.tensor([3, 0, -1, -15, -16, -20, -21, -112, -113, -127, -500])
    assert behind(distances, 32).tolist() == [0, 0, 1, 15, 16, 17, 18, 30, 31, 31, 31]


def test_t5_buckets_take_a_flag():
    """Any object was taken for its truth: "no" for True."""
    with pytest.raises(TypeError, match=r"^bidirectional: wanted True or False, got 'no'"):
        ab.t5_buckets("no")


def test_t5_buckets_are_those_of_transformers():
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    distances = torch.arange(-1000, 1001)
    for bidirectional in (True, False):
        for count, most in ((32, 128), (16, 20), (64, 512), (4 if bidirectional else 2, 2), (5, 3)):
            theirs = t5.T5Attention._relative_position_bucket(distances, bidirectional, count, most)
            assert torch.equal(ab.t5_buckets(bidirectional, most)(distances, count), theirs)


def test_grid_bias_by_hand():
    table = torch.arange(3 * 5.0)[None]  # 2 x 3 places: dy from -1 to 1, dx from -2 to 2
    term = ab.GridBias(table, (2, 3))
    assert at(term, 0, 0, 0, 0) == 7  # in the middle
    assert at(term, 0, 0, 5, 0) == 14  # one below, two right
    assert at(term, 0, 0, 2, 3) == 4  # one above, two right
    assert at(term, 0, 0, 0, 1) == 6


REFUSED = [
    (ab.ALiBi(torch.ones(3)), ValueError, r"ALiBi.slopes: wanted \[H\] = \[4\] or \[B, H\], got \[3\]"),
    (ab.ALiBi(torch.ones(3, 4)), ValueError, r"ALiBi.slopes: wanted \[H\] = \[4\] or \[B, H\], got \[3, 4\]"),
    (
        ab.ALiBi(torch.ones(4).int()),
        TypeError,
        "ALiBi.slopes: wanted a floating-point tensor, got torch.int32",
    ),
    (ab.ALiBi([1.0] * 4), TypeError, "ALiBi.slopes: wanted a tensor"),
    (
        ab.ALiBi(torch.ones(4, device="meta")),
        ValueError,
        "ALiBi.slopes: wanted the query's device, cpu, got meta",
    ),
    (
        ab.RelativeBias(torch.ones(3, 5), ab.linear_buckets(2)),
        ValueError,
        r"RelativeBias.table: wanted \[H, n\] = \[4, n\], got \[3, 5\]",
    ),
    (
        ab.RelativeBias(torch.ones(4, 5), ab.linear_buckets(3)),
        ValueError,
        "RelativeBias.buckets: wanted buckets from 0 to 4, got 6 at distance 3",
    ),
    (
        ab.RelativeBias(torch.ones(4, 5), lambda distance, n: distance),
        ValueError,
        "RelativeBias.buckets: wanted buckets from 0 to 4, got -96 at distance -96",
    ),
    *(
        (
            ab.RelativeBias(torch.ones(4, n), ab.t5_buckets(both)),
            ValueError,
            f"t5_buckets: wanted a table of at least {4 if both else 2} entries, got {n}",
        )
        for both, n in ((True, 1), (True, 2), (True, 3), (False, 1))
    ),
    (
        ab.RelativeBias(torch.ones(4, 32), ab.t5_buckets(max_distance=8)),
        ValueError,
        "t5_buckets.max_distance: wanted more than 8, .* got 8",
    ),
    (
        ab.RelativeBias(torch.ones(4, 5), lambda distance, n: distance.clamp(-2, 2) + 2.0),
        TypeError,
        "RelativeBias.buckets: wanted a function that returns integers, got torch.float32; add .long",
    ),
    (
        ab.RelativeBias(torch.ones(4, 5), lambda distance, n: distance > 0),
        TypeError,
        "RelativeBias.buckets: wanted a function that returns integers, got torch.bool",
    ),
    (
        ab.RelativeBias(torch.ones(4, 5), lambda distance, n: [0] * len(distance)),
        TypeError,
        "RelativeBias.buckets: wanted a function that returns integers in a tensor, got list",
    ),
    (
        ab.RelativeBias(torch.ones(4, 5), lambda distance, n: distance[:1].clamp(0, 0)),
        ValueError,
        r"RelativeBias.buckets: .* of its argument's shape \[166\], got \[1\]",
    ),
    (
        ab.GridBias(torch.ones(4, 9), (3, 3)),
        ValueError,
        r"GridBias.table: wanted .* = \[4, 25\], got \[4, 9\]",
    ),
    (
        ab.GridBias(torch.ones(4, 25), (3, 3)),
        ValueError,
        "GridBias.shape: 3 x 3 has 9 places, queries stand from 27 to 96",
    ),
    (ab.KeyBias(torch.ones(2, 96)), ValueError, r"KeyBias.bias: wanted \[B, K\] or .*, got \[2, 96\]"),
    (ab.PairBias(torch.ones(3, 1, 97, 97)), ValueError, r"PairBias.bias: wanted .*, got \[3, 1, 97, 97\]"),
    (
        ab.PairBias(torch.ones(70, 97)),
        ValueError,
        "PairBias.bias: has rows for positions 0 to 69, queries stand from 27 to 96",
    ),
]


@pytest.mark.parametrize(("term", "error", "words"), REFUSED)
def test_bad_terms_are_a_sentence(term, error, words):
    """Tables too small for T5 ended in a ZeroDivisionError, odd buckets in torch's words or wrong numbers."""
    query, key, value = make_inputs(1, B, H, 2, Q, K, 8, 8)
    with pytest.raises(error, match=f"^terms: {words}"):
        ab.attention(query, key, value, ab.Causal(), terms=[term], q_start="end")


def test_what_kernels_cannot_know_is_told():
    class Distance:
        def value(self, b, h, q, k):
            return -(q - k).abs().float()

    query, key, value = make_inputs(1, B, H, 2, 8, 8, 8, 8)
    words = r"terms\[0\]: Distance is known by its values alone, which only the reference reads"
    with pytest.raises(NotImplementedError, match=words):
        ab.attention(query, key, value, terms=[Distance()], backend="rows")
    grids = [ab.GridBias(torch.zeros(H, 9), (2, 2)), ab.GridBias(torch.zeros(H, 15), (2, 3))]
    words = r"terms: grids of one shape, got GridBias of shapes \[\(2, 2\), \(2, 3\)\]"
    with pytest.raises(NotImplementedError, match=words):
        ab.attention(query[:, :, :4], key[:, :, :4], value[:, :, :4], terms=grids, backend="rows")


def test_terms_compile():
    table = make_terms()["T5"][0][0]
    query, key, value = make_inputs(1, B, H, 2, K, K, 8, 8, requires_grad=True)

    def step(q, k, v, table):
        made = [ab.RelativeBias(table, ab.t5_buckets(True, 50)), ab.ALiBi(table[:, 0])]
        return ab.attention(q, k, v, ab.Causal(), terms=made)

    inputs = (query, key, value, table)
    got = torch.compile(step, backend="aot_eager", dynamic=True)(*inputs)
    want = step(*inputs)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(
        torch.autograd.grad(got.sin().sum(), inputs), torch.autograd.grad(want.sin().sum(), inputs)
    )


# -- merge -----------------------------------------------------------------------------------------


def test_merge_joins_disjoint_parts():
    query, key, value = make_inputs(1, B, H, 2, Q, K, 8, 8, torch.float64, requires_grad=True)
    whole = ab.Window(before=20) & ~ab.Bipartite(60)  # with empty rows
    near = ab.Window(before=5)

    def attend(relation):
        return ab.attention(query, key, value, relation, q_start="end", return_lse=True, backend="reference")

    want = attend(whole)
    got = ab.merge(*zip(attend(whole & near), attend(whole - near), attend(ab.Empty()), strict=True))
    torch.testing.assert_close(got, want)

    def grads(out, lse):
        loss = out.sin().sum() + lse[lse.isfinite()].cos().sum()
        return torch.autograd.grad(loss, (query, key, value))

    torch.testing.assert_close(grads(*got), grads(*want))


def test_merge_refuses():
    with pytest.raises(ValueError, match="lses: wanted as many as outs and at least one, got 0 and 0"):
        ab.merge([], [])
    x = torch.zeros(1, 1, 2, 3)
    with pytest.raises(ValueError, match="got 1 and 2"):
        ab.merge([x], [x[..., 0], x[..., 0]])
