"""Multi-level scores: the definition, and every backend on CPUs against it."""

import pickle

import pytest
import torch

import attnbias as ab
from attnbias.backends import cpu, rows
from attnbias.backends.call import Call, Inputs, Needs
from attnbias.op import codec
from attnbias.op.problem import Problem
from attnbias.testing import assert_no_worse, eager, magnitudes, make_inputs

BACKENDS = ["rows"] + ([] if cpu.missing() else ["cpu"])
ENGINES = ["rows"] + ([] if cpu.missing() else [f"cpu {isa}" for isa in cpu.isas()])
RELATIONS = {
    "full": ab.Full(),
    "causal": ab.Causal(),
    "window": ab.Causal() & ab.Window(before=31),
    "strictly past": ab.Causal() & ~ab.Window(before=0),  # row 0 is empty
    "scattered": ab.Where(lambda q, k: (q * 7 + k * 3) % 5 == 0),
    "documents": ab.Documents.from_lengths([31, 70, 29]) & ab.Causal(),
    "by head": ab.PerHead([ab.Causal(), ab.Full(), ab.Empty(), ab.Window(before=9)]),
}
SCORES = {
    "one level": ab.MultiLevel([16]),
    "halving": ab.MultiLevel([5, 4, 3, 2, 1, 1]),
    "thirds": ab.MultiLevel([4, 4, 8], widths=[None, 63, 21]),
    "finer than a strip": ab.MultiLevel([10, 3, 2, 1], widths=[256, 32, 4, 1]),
    "far pairs share none": ab.MultiLevel([6, 10], widths=[48, 16], normalize=None),
    "by levels": ab.MultiLevel([6, 6, 4], widths=[128, 64, 32], normalize="levels"),
}


def authors(q, k, ranks, widths, normalize):
    """Compute S [..., T, T] as in the paper's code: zero-filled matrices, block by block."""
    T, first = q.shape[-2], 0
    total, count = torch.zeros(2, *q.shape[:-1], T, dtype=q.dtype)
    for rank, width in zip(ranks, widths, strict=True):
        for start in range(0, T, width):
            block = slice(start, min(start + width, T))
            a, b = (x[..., block, first : first + rank] for x in (q, k))
            total[..., block, block] += a @ b.mT / rank
            count[..., block, block] += 1
        first += rank
    return total / {"pair": count, "levels": len(ranks), None: 1}[normalize]


@pytest.mark.parametrize("normalize", ["pair", "levels", None])
@pytest.mark.parametrize("levels", range(1, 9))
@pytest.mark.parametrize("backend", ["reference", "rows"])
def test_authors_formula(levels, normalize, backend):
    """The note's check (i), in float64, with the default widths."""
    T, ranks = 256, (9 - levels, *range(1, levels))
    q, k, v = make_inputs(levels, 1, 2, 2, T, T, sum(ranks), 8, torch.float64)
    score = ab.MultiLevel(ranks, normalize=normalize)
    out, lse = ab.attention(q, k, v, ab.Causal(), score=score, backend=backend, return_lse=True)
    scores = authors(q, k, ranks, [T >> level for level in range(levels)], normalize)
    scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
    exact = 1e-13 * (1 + scores.logsumexp(-1).abs().max())
    assert (lse - scores.logsumexp(-1)).abs().max() < exact
    assert (out - scores.softmax(-1) @ v).abs().max() < exact * v.abs().max()


@pytest.mark.parametrize("T", [1, 5, 96, 100, 129])
def test_default_widths(T):
    """Widths are T, T/2, T/4, ... if they are integers, else those of the next length for which they are."""
    found = ab.MultiLevel([1, 1, 1]).bind(T, T, 0)
    padded = -(-T // 4) * 4
    assert found == ((0, padded // 2, padded // 4), (1, 2, 3))
    assert ab.MultiLevel([2], normalize=None).bind(T, T, 0) == ((0,), (2,))


def make_call(score, relation, shape, *, tile=64, q_start=0, scale=1.0, softcap=0.0, **kwargs):
    B, H, Hk, Q, K, D, E = shape
    q, k, v = make_inputs(sum(shape), B, H, Hk, Q, K, D, E, **kwargs)
    layout = ab.Layout.build(relation, Q, K, tile=tile, batch=B, heads=H, q_start=q_start, score=score)
    layout.validate()
    return Call(Inputs(q, k, v), layout, scale, softcap, score=score)


def expected(call, dtype, d_out, d_lse):
    inputs = [x.detach().to(dtype).requires_grad_() for x in (call.query, call.key, call.value)]
    numbers = {"scale": call.scale, "softcap": call.softcap, "q_start": call.layout.q_start}
    out, lse = eager(*inputs, call.layout.to_dense(), score=call.score, **numbers)
    finite = torch.where(lse.isfinite(), lse, 0)
    total = (out.double() * d_out.double()).sum() + (finite.double() * d_lse.double()).sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(total, inputs)]


def compute(backend, call, d_out, d_lse):
    module = {"cpu": cpu, "rows": rows}[backend]
    out, lse = module.forward(call)
    return [out, lse, *module.backward(call, out, lse, d_out, d_lse, Needs(True, True, True))[:3]]


def make_grads(call):
    rng = torch.Generator().manual_seed(1)
    shape = (*call.query.shape[:3], call.value.shape[3])
    return torch.randn(shape, generator=rng).to(call.query.dtype), torch.randn(shape[:3], generator=rng)


def check(backend, call):
    d_out, d_lse = make_grads(call)
    got = compute(backend, call, d_out, d_lse)
    same = expected(call, call.query.dtype, d_out, d_lse)
    truth = expected(call, torch.float64, d_out, d_lse)
    empty = (truth[1] == -torch.inf)[..., None]
    scale = call.scale / min(call.score.ranks)
    sizes = magnitudes(call.query, call.key, call.value, d_out, d_lse, scale)
    for name, x, eager_x, oracle in zip(
        ("out", "lse", "query", "key", "value"), got, same, truth, strict=True
    ):
        factor = 2.0 if name in ("out", "lse") else 3.0
        where = empty if name in ("out", "query") else None
        assert_no_worse(name, x, eager_x, oracle, factor, empty=where, magnitude=sizes[name])


@pytest.fixture(params=ENGINES)
def backend(request):
    """Return the name of a backend, on one instruction set."""
    name, _, isa = request.param.partition(" ")
    if isa:
        cpu.force_isa(isa)
    yield name
    if isa:
        cpu.force_isa(None)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("relation", RELATIONS)
def test_results_and_gradients(backend, relation, score):
    for tile in (64, 128) if backend == "cpu" else (64,):
        check(backend, make_call(SCORES[score], RELATIONS[relation], (2, 4, 2, 130, 130, 16, 20), tile=tile))


@pytest.mark.parametrize(
    "shape", [(1, 2, 1, 97, 200, 16, 1), (1, 1, 1, 200, 65, 16, 33), (1, 2, 2, 3, 130, 16, 16)]
)
@pytest.mark.parametrize("q_start", [0, 5, -7, 60, "end"])
def test_lengths_and_positions(backend, shape, q_start):
    """Queries at other positions than keys, even before the first key; few queries, few keys."""
    for score in (SCORES["halving"], SCORES["thirds"], SCORES["far pairs share none"]):
        for relation in ("full", "causal"):
            check(backend, make_call(score, RELATIONS[relation], shape, q_start=q_start))


@pytest.mark.parametrize(
    "ranks",
    [
        *([32, 8, 6, 4, 4, 4, 4, 2], [8] * 8, [16] * 4, [63, 1], [41, *[1] * 23]),
        *([64, 64], [60, 40, 50], [200, 3, 53], [120, *[8] * 4]),  # parts of 64 end in and between levels
    ],
    ids=str,
)
def test_large_heads(backend, ranks):
    shape = (1, 2, 1, 300, 300, sum(ranks), 64)
    check(backend, make_call(ab.MultiLevel(ranks), ab.Causal(), shape, tile=64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(backend, dtype):
    for score in SCORES.values():
        check(backend, make_call(score, ab.Causal(), (1, 2, 1, 150, 150, 16, 24), dtype=dtype))


@pytest.mark.parametrize("scale", [0.0, -0.7, 3.0])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_scale_and_softcap(backend, scale, softcap):
    for score in (SCORES["halving"], SCORES["by levels"]):
        check(backend, make_call(score, ab.Causal(), (1, 2, 2, 97, 97, 16, 16), scale=scale, softcap=softcap))


@pytest.mark.skipif(bool(cpu.missing()), reason="no library")
@pytest.mark.parametrize("order", ["BLHD", "BHDL"])
def test_strides(order):
    for strided in (False, True):
        call = make_call(
            SCORES["halving"], ab.Causal(), (2, 4, 2, 97, 97, 16, 24), order=order, strided=strided
        )
        check("cpu", call)


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_everything_else_that_attention_takes(backend):
    """Terms, a sink and the gradient of the lse, through the public function."""
    q, k, v = make_inputs(3, 2, 4, 2, 130, 130, 16, 16)
    slopes, sink = torch.rand(4), torch.randn(4)
    terms = [ab.ALiBi(slopes), ab.KeyBias(torch.randn(2, 130))]
    for score in SCORES.values():
        given = {"score": score, "terms": terms, "sink": sink, "softcap": 5.0}
        assert ab.verify(q, k, v, RELATIONS["by head"], backend=backend, **given).ok


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_has_the_same_bits(backend):
    q, k, v = make_inputs(3, 1, 2, 2, 100, 100, 16, 16)
    outs = []
    for name in ("reference", backend):
        torch.manual_seed(0)
        outs.append(ab.attention(q, k, v, score=SCORES["halving"], dropout_p=0.3, backend=name))
    assert (outs[0] - outs[1]).abs().max() < 1e-5


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_one_level_is_scaled_attention(backend):
    """The note's check (ii)."""
    q, k, v = make_inputs(3, 1, 2, 2, 100, 100, 16, 16)
    wanted = ab.attention(q, k, v, ab.Causal(), scale=1 / 16, backend=backend)
    got = ab.attention(q, k, v, ab.Causal(), score=ab.MultiLevel([16]), backend=backend)
    assert (got - wanted).abs().max() < 1e-6  # dividing q by 16 is exact; only the order of sums differs


def test_dims_of_deeper_levels_are_not_read(backend):
    """The note's check (iii): k's dims beyond a pair's prefix do not change a bit of its result."""
    T, score = 200, ab.MultiLevel([6, 5, 3, 2], widths=[None, 96, 24, 6])
    q, k, v = make_inputs(3, 1, 1, 1, T, T, 16, 16)
    plain = ab.attention(q, k, v, score=score, return_lse=True, backend=backend)
    depth = score.depth(torch.arange(T)[:, None], torch.arange(T), q_len=T, k_len=T)
    for level, prefix in enumerate((6, 11, 14), 1):
        changed = k.clone()
        changed[..., 77, prefix:] += 100
        got = ab.attention(q, changed, v, score=score, return_lse=True, backend=backend)
        same = depth[:, 77] <= level
        for x, y in zip(got, plain, strict=True):
            assert torch.equal(x[0, 0, same], y[0, 0, same])
            assert not torch.equal(x[0, 0, ~same], y[0, 0, ~same])


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_decoding_equals_prefill(backend):
    """The note's check (v), at every position."""
    T, score = 70, ab.MultiLevel([8, 4, 2, 2], widths=[None, 16, 8, 4])
    q, k, v = make_inputs(3, 1, 2, 1, T, T, 16, 8)
    whole = ab.attention(q, k, v, ab.Causal(), score=score, backend=backend)
    for t in range(T):
        cache = k[:, :, : t + 1], v[:, :, : t + 1]
        step = ab.attention(
            q[:, :, t : t + 1], *cache, ab.Causal(), score=score, q_start="end", backend=backend
        )
        assert (step - whole[:, :, t : t + 1]).abs().max() < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
def test_later_tokens_change_nothing(backend):
    """The note's check (vi)."""
    q, k, v = make_inputs(3, 1, 2, 2, 150, 150, 16, 16)
    before = ab.attention(q, k, v, ab.Causal(), score=SCORES["halving"], backend=backend)
    for x in (q, k, v):
        x[:, :, 100:] = 7
    after = ab.attention(q, k, v, ab.Causal(), score=SCORES["halving"], backend=backend)
    assert torch.equal(before[:, :, :100], after[:, :, :100])


@pytest.mark.parametrize("normalize", ["pair", None])
def test_gradient_with_norms(normalize):
    """The note's check (iv): finite differences, with the layer norm of q and k."""
    score = ab.MultiLevel([3, 2, 1], widths=[None, 6, 3], normalize=normalize)
    gains = [torch.rand(6, dtype=torch.float64) for _ in range(2)]

    def run(q, k, v, gain_q, gain_k):
        q, k = (torch.nn.functional.layer_norm(x, (6,), g) for x, g in ((q, gain_q), (k, gain_k)))
        return ab.attention(q, k, v, ab.Causal(), score=score, backend="rows")

    made = [x.detach() for x in make_inputs(3, 1, 2, 1, 13, 13, 6, 4, torch.float64)] + gains
    assert torch.autograd.gradcheck(run, [x.clone().requires_grad_() for x in made])


@pytest.mark.skipif(bool(cpu.missing()), reason="no library")
def test_threads_do_not_change_a_bit():
    call = make_call(SCORES["finer than a strip"], ab.Full(), (1, 4, 2, 256, 256, 16, 16))
    grads = make_grads(call)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(compute("cpu", call, *grads))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(result, results[0], strict=True))


@pytest.mark.parametrize("q_start", [0, 33, -20])
@pytest.mark.parametrize("name", SCORES)
def test_layout_classes(name, q_start):
    """Full tiles have one depth, which is their class and mark; all others are partial; pairs are kept."""
    score, Q, K = SCORES[name], 200, 330
    if name == "finer than a strip":
        score = ab.MultiLevel([10, 3, 2, 1], widths=[None, 32, 4, 1])
    plain = ab.Layout.build(ab.Causal(), Q, K, q_start=q_start, tile=64, form="tiles")
    layout = ab.Layout.build(ab.Causal(), Q, K, q_start=q_start, tile=64, score=score)
    layout.validate()
    assert layout.levels == score.bind(Q, K, q_start)
    assert torch.equal(layout.to_dense(), plain.to_dense())
    depth = score.depth(
        torch.arange(Q)[:, None] + q_start, torch.arange(K), q_len=Q, k_len=K, q_start=q_start
    )
    found = []
    for t in range(-(-Q // 64)):
        for kind, (start, stop) in enumerate(
            zip(layout.q_ptr[0, t][:-1], layout.q_ptr[0, t][1:], strict=True)
        ):
            for entry in range(start, stop):
                s = layout.q_tile[entry]
                inside = depth[64 * t : 64 * (t + 1), 64 * s : 64 * (s + 1)]
                if kind < layout.classes - 1:
                    assert (inside == kind).all() and layout.q_mark[entry] == kind
                    assert inside.shape[1] == 64
                else:
                    bits = plain.to_dense()[64 * t : 64 * (t + 1), 64 * s : 64 * (s + 1)]
                    assert inside.unique().numel() > 1 or not bits.all() or inside.shape[1] < 64
                found.append(kind)
    assert len(found) == plain.tiles


def test_executed_multiply_adds():
    """The count is the definition's, T * sum r w, plus the rest of whole tiles on the diagonal."""
    T, ranks = 2048, (8,) * 5
    layout = ab.Layout.build(ab.Full(), T, T, tile=64, score=ab.MultiLevel(ranks))
    assert layout.stats().score_macs == T * sum(8 * (T >> level) for level in range(5))
    causal = ab.Layout.build(ab.Causal(), T, T, tile=64, score=ab.MultiLevel(ranks)).stats()
    exact = sum(8 * (T >> level) * ((T >> level) + 1) // 2 << level for level in range(5))
    assert exact < causal.score_macs < exact + T // 64 * 64 * 64 * 40
    assert "multiply-adds of scores" in str(causal)
    assert ab.Layout.build(ab.Causal(), 64, 64).stats().score_macs == 0


def test_layout_is_kept_saved_and_checked(tmp_path):
    score, other = ab.MultiLevel([8, 8], widths=[128, 64]), ab.MultiLevel([8, 8], widths=[128, 32])
    layout = ab.Causal().layout(100, 100, score=score)
    assert layout is ab.Causal().layout(100, 100, score=ab.MultiLevel((8, 8), (128, 64)))
    assert layout is not ab.Causal().layout(100, 100, score=other)
    layout.save(tmp_path / "x.safetensors")
    assert ab.Layout.load(tmp_path / "x.safetensors") == layout == pickle.loads(pickle.dumps(layout))
    q, k, v = make_inputs(0, 1, 1, 1, 100, 100, 16, 16)
    wanted = ab.attention(q, k, v, ab.Causal(), score=score)
    assert torch.equal(ab.attention(q, k, v, layout, score=score), wanted)
    for given in (other, None):
        with pytest.raises(
            ValueError, match=r"score: this layout was built for the levels .* pass the same score"
        ):
            ab.attention(q, k, v, layout, score=given)
    with pytest.raises(ValueError, match="score: this layout was built for the levels None"):
        ab.attention(q, k, v, ab.Causal().layout(100, 100), score=score)
    with pytest.raises(
        ValueError, match="form: wanted 'tiles' or 'auto' with a multi-level score, got 'edges'"
    ):
        ab.Layout.build(ab.Causal(), 9, 9, form="edges", score=score)


def test_compiled():
    score = SCORES["halving"]
    run = torch.compile(
        lambda *x: ab.attention(*x, ab.Causal(), score=score), backend="aot_eager", dynamic=True
    )
    for T in (70, 131):
        q, k, v = make_inputs(T, 1, 2, 1, T, T, 16, 16, requires_grad=True)
        wanted = ab.attention(q, k, v, ab.Causal(), score=score)
        got = run(q, k, v)
        assert torch.equal(got, wanted)
        grads = [torch.autograd.grad(x.sum(), (q, k, v)) for x in (got, wanted)]
        assert all(torch.equal(x, y) for x, y in zip(*grads, strict=True))


def test_value():
    score = ab.MultiLevel([8, 4, 4], [None, 64, 32])
    assert score == ab.MultiLevel((8, 4, 4), (None, 64, 32)) == pickle.loads(pickle.dumps(score))
    assert hash(score) == hash(ab.MultiLevel((8, 4, 4), (None, 64, 32)))
    for each in (score, ab.MultiLevel([3], normalize=None), ab.MultiLevel([3], [8], "levels")):
        assert codec.read_score(codec.write_score(each)) == each


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([],), "ranks: wanted at least one level, got none"),
        (([8, 0],), r"ranks: wanted at least 1 for each level, got \[8, 0\]"),
        (([8, 8], [4, 3]), "widths: wanted each to divide the one before, got 4 and then 3"),
        (([8, 8], [4, 0]), r"widths: wanted numbers from 1 to 2\^31 - 1, got \[4, 0\]"),
        (([1] * 25,), "widths: wanted them for more than 24 levels, got None for 25"),
        (([8, 8], [4]), "widths: wanted one for each of the 2 ranks, got 1"),
        (([8], None, "rows"), "normalize: wanted 'pair', 'levels' or None, got 'rows'"),
    ],
)
def test_bad_values(arguments, words):
    with pytest.raises(ValueError, match=words):
        ab.MultiLevel(*arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((8,), "ranks: wanted a list of integers, got int 8"),
        (([8.0],), r"ranks: wanted a list of integers, got 8.0 in it"),
        (([8, 8], [4, None]), "widths: wanted a list of integers, got None in it"),
        (([8], 64), "widths: wanted a list of integers, got int 64"),
    ],
)
def test_bad_kinds(arguments, words):
    with pytest.raises(TypeError, match=words):
        ab.MultiLevel(*arguments)


def test_bad_calls():
    q, k, v = make_inputs(0, 1, 1, 1, 20, 40, 16, 16)
    with pytest.raises(
        ValueError, match=r"ranks whose sum is the head size 16, got \[8, 4\], whose sum is 12"
    ):
        Problem(q, k, v, score=ab.MultiLevel([8, 4]))
    small = ab.MultiLevel([8, 8], widths=[32, 16])
    with pytest.raises(
        ValueError, match=r"wants a first level that all 40 positions share, got widths\[0\] = 32"
    ):
        Problem(q, k, v, score=small)
    with pytest.raises(ValueError, match="wants a first level that all 60 positions share"):
        Problem(q, k, v, score=ab.MultiLevel([8, 8], widths=[48, 16]), q_start=40)
    Problem(q, k, v, score=ab.MultiLevel([8, 8], widths=[32, 16], normalize="levels"))
    graph = ab.Graph(torch.tensor([[0, 0], [1, 1]]), size=(40, 20))
    with pytest.raises(ValueError, match="duplicate edges count twice, which only edges can hold"):
        ab.attention(q, k, v, graph, score=ab.MultiLevel([8, 8]))
    assert ab.attention(q, k, v, graph, score=ab.MultiLevel([8, 8]), backend="reference").shape == (
        1,
        1,
        20,
        16,
    )
    doubled = ab.Layout.build(ab.Causal(), 20, 40, score=ab.MultiLevel([8, 8]))
    doubled.where[-4] = 5  # the widths are 0 and 20: now they do not nest
    with pytest.raises(ValueError, match=r"widths \[5, 20\] do not nest"):
        doubled.validate()
