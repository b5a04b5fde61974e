"""Score terms: their values by hand, and results and gradients on every backend."""

import pytest
import torch
from cases.terms import NAMES, RELATIONS, B, H, K, Q, check, check_minus_infinity, check_same_bits, make_terms

import attnbias as ab
from attnbias.backends import cpu
from attnbias.scores import buckets, terms
from attnbias.testing import make_inputs

# Backends with code for terms; each runs the same tests.
BACKENDS = [
    "reference",
    "rows",
    pytest.param("cpu", marks=pytest.mark.skipif(bool(cpu.missing()), reason="no library")),
]


def at(term, b, h, q, k):
    return term.value(*(torch.tensor(x) for x in (b, h, q, k))).item()


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
    check_same_bits(backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_the_same_bits_with_threads(backend, threads):
    """On `rows` and the reference they were not: threads added float32 numbers in any order."""
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
    counts = (8, 8) if backend == "reference" else (8, 1, 2)  # torch's sums depend on the number of threads
    for count in counts:
        assert all(torch.equal(x, y) for x, y in zip(first, grads(count), strict=True)), count


def test_a_table_of_many_distances_has_one_gradient(threads):
    """A long sequence has enough distances for torch to use threads."""
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
    check_minus_infinity(backend)


def test_alibi_by_hand():
    term = ab.ALiBi(torch.tensor([0.5, 0.25]))
    assert [at(term, 0, 1, 7, 3), at(term, 0, 0, 3, 7), at(term, 1, 0, 2, 2)] == [-1.0, -2.0, 0.0]
    by_batch = ab.ALiBi(torch.tensor([[1.0], [2.0]]))
    assert [at(by_batch, 0, 0, 4, 1), at(by_batch, 1, 0, 4, 1)] == [-3.0, -6.0]


def test_t5_buckets_by_hand():
    """As in the published models: 32 buckets, 128 away."""
    both = ab.t5_buckets(bidirectional=True, max_distance=128)
    distances = torch.tensor([0, -1, -7, -8, -11, -12, -90, -91, -127, -500, 1, 7, 8, 16, 500])
    wanted = [0, 1, 7, 8, 8, 9, 14, 15, 15, 15, 17, 23, 24, 26, 31]
    assert both(distances, 32).tolist() == wanted
    behind = ab.t5_buckets(bidirectional=False, max_distance=128)
    distances = torch.tensor([3, 0, -1, -15, -16, -20, -21, -112, -113, -127, -500])
    assert behind(distances, 32).tolist() == [0, 0, 1, 15, 16, 17, 18, 30, 31, 31, 31]


def test_t5_buckets_take_a_flag():
    """Any object was accepted by its truth value: "no" as True."""
    with pytest.raises(TypeError, match=r"^bidirectional: wanted True or False, got 'no'"):
        ab.t5_buckets("no")


def test_t5_buckets_equal_those_of_transformers():
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
    (ab.ALiBi(torch.ones(3)), ValueError, r"ALiBi.slopes: wanted \[H\] or \[B, H\] = \[2, 4\], got \[3\]"),
    (
        ab.ALiBi(torch.ones(3, 4)),
        ValueError,
        r"ALiBi.slopes: wanted \[H\] or .* = \[2, 4\], got \[3, 4\]",
    ),
    (
        ab.ALiBi(torch.ones(4).int()),
        TypeError,
        "ALiBi.slopes: wanted a floating-point tensor .*, got torch.int32",
    ),
    (ab.ALiBi([1.0] * 4), TypeError, r"ALiBi.slopes: wanted a floating-point tensor .*, got list \[1.0, "),
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
        r"GridBias.shape: wanted places for queries at 27 to 96, got 9 \(3 x 3\)",
    ),
    (ab.KeyBias(torch.ones(2, 96)), ValueError, r"KeyBias.bias: wanted \[B, K\] or .*, got \[2, 96\]"),
    (ab.PairBias(torch.ones(3, 1, 97, 97)), ValueError, r"PairBias.bias: wanted .*, got \[3, 1, 97, 97\]"),
    (
        ab.PairBias(torch.ones(70, 97)),
        ValueError,
        "PairBias.bias: wanted rows for positions 27 to 96, got 0 to 69",
    ),
]


@pytest.mark.parametrize(("term", "error", "words"), REFUSED)
def test_bad_terms_raise_a_clear_error(term, error, words):
    """Tables too small for T5 raised ZeroDivisionError; odd buckets gave torch's errors or wrong numbers."""
    query, key, value = make_inputs(1, B, H, 2, Q, K, 8, 8)
    with pytest.raises(error, match=f"^terms: {words}"):
        ab.attention(query, key, value, ab.Causal(), terms=[term], q_start="end")


def test_terms_without_kernel_code_raise_on_kernels():
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


def test_buckets_are_copied_to_a_device_once():
    """A copy in every call waits for a GPU, and no CUDA graph captures it."""
    lengths, meta = (5, 3, 8, 0), torch.device("meta")
    first = buckets.buckets_of_distances(ab.linear_buckets(2), *lengths, meta)
    assert first.device == meta and first.shape == (10,)
    assert buckets.buckets_of_distances(ab.linear_buckets(2), *lengths, meta) is first
    for other in ((5, 3, 8, 1), (5, 4, 8, 0), (7, 3, 8, 0)):
        assert buckets.buckets_of_distances(ab.linear_buckets(2), *other, meta) is not first
    assert buckets._buckets_on.cache_info().maxsize == 64


def test_lengths_of_zero_have_no_buckets():
    cpu_device = torch.device("cpu")
    assert not buckets.buckets_of_distances(ab.linear_buckets(2), 5, 0, 0, 0, cpu_device).numel()


def test_logarithm_of_a_gate_multiplies_the_weights_by_it():
    """Zeris's energy gate: a gate per key and head on the weights, which are normalised again."""
    q, k, v = make_inputs(0, 2, 3, 3, 17, 17, 8, 8, torch.float64)
    relation = ab.Causal() & ab.Documents([0] * 9 + [-1] + [1] * 7)
    gate = torch.sigmoid(
        torch.randn(2, 3, 17, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    )
    weights = ab.attention_weights(q, k, relation) * gate[:, :, None]
    wanted = (
        weights / weights.sum(-1, keepdim=True).masked_fill(~relation.dense(17, 17).any(-1)[:, None], 1) @ v
    )
    got = ab.attention(q, k, v, relation, terms=[ab.KeyBias(gate.log())])
    assert (got - wanted).abs().max() < 1e-14
