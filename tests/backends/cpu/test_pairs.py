"""The tile kernels on pairs of bfloat16: every weight and its gradient by itself, read out with identities.

Values that are the identity make ``out`` the weights, and a gradient of ``out``, queries or keys that are the
identity make a gradient the weights or those of the scores. So no sum hides a lost, swapped or badly rounded
number, and each is held to its own bound: one rounding to bfloat16, and one more for ``out``, which is
divided by the sum of a row after the first.
"""

import itertools
import math
from functools import partial

import pytest
import torch
from cases.tiles import make_call, make_grads
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import attnbias as ab
from attnbias.backends import cpu
from attnbias.backends.call import Call, Inputs, Needs
from attnbias.backends.philox import keep_mask
from attnbias.testing import assert_no_worse, eager, magnitudes, make_inputs

LEVEL = "avx512bf16"
if cpu.missing() or LEVEL not in cpu.isas():
    pytest.skip(cpu.missing() or f"no {LEVEL} on this machine", allow_module_level=True)
U = 2.0**-8  # half a step of bfloat16, the largest relative error of a rounding
FLOAT32 = 2.0**-14  # a thousand roundings in float32
RELATIONS = {
    "full": ab.Full(),
    "causal": ab.Causal(),
    "strictly past": ab.Causal() & ~ab.Window(before=0),  # row 0 is empty
    "window": ab.Window(before=9),  # begins and ends at odd keys
    "odd keys": ab.Where(lambda q, k: k % 2 == 1),
    "even keys": ab.Where(lambda q, k: k % 2 == 0),
    "scattered": ab.Where(lambda q, k: (q * 7 + k * 3) % 5 == 0),
    "gaps": ab.Where(lambda q, k: (q // 8 + k // 32) % 2 == 0),  # strips and panels that are skipped
    "empty": ab.Empty(),
}
LENGTHS = [17, 63, 64, 65, 97, 128, 129]  # up to 16 queries run on other kernels
ALL = Needs(True, True, True)


@pytest.fixture(autouse=True)
def on_pairs():
    cpu.force_isa(LEVEL)
    yield
    cpu.force_isa(None)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def identity(heads: int, n: int) -> Tensor:
    return torch.eye(n, dtype=torch.bfloat16).expand(1, heads, n, n)


def lay_out(relation: str, Q: int, K: int, tile: int) -> ab.Layout:
    return ab.Layout.build(RELATIONS[relation], Q, K, form="tiles", tile=tile)


def exact(q: Tensor, k: Tensor, scale: float, layout: ab.Layout) -> tuple[Tensor, Tensor]:
    """Return the weights in float64, and which pairs are related."""
    related = layout.to_dense().expand(*q.shape[:3], k.shape[2]) > 0
    keys = k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = (scale * q.double() @ keys.mT).masked_fill(~related, -torch.inf)
    return scores.softmax(-1).nan_to_num(0), related


def assert_close(
    got: Tensor, want: Tensor, related: Tensor, roundings: int = 1, slack: Tensor | float = 0.0
) -> None:
    """Fail unless each number is off by its roundings at most, and 0 where unrelated."""
    assert not got[~related].any()
    assert got.isfinite().all()
    bound = (1 + U) ** roundings - 1 + FLOAT32
    wrong = (got.double() - want).abs() > bound * want.abs() + slack
    assert not wrong.any(), f"{int(wrong.sum())} wrong, first at {wrong.nonzero()[0].tolist()}"


@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize("relation", RELATIONS)
def test_each_weight(relation, tile):
    """``out`` is P where values are the identity."""
    for K, Q, D in zip(LENGTHS, reversed(LENGTHS), itertools.cycle([1, 7, 16, 33]), strict=False):
        q, k = draw(K, 1, 4, Q, D), draw(Q, 1, 2, K, D)
        layout = lay_out(relation, Q, K, tile)
        out, lse = cpu.forward(Call(Inputs(q, k, identity(2, K)), layout, 0.7))
        want, related = exact(q, k, 0.7, layout)
        assert_close(out, want, related, roundings=2)
        assert torch.equal(lse == -torch.inf, ~related.any(-1))


@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize("relation", RELATIONS)
def test_each_weight_of_the_backward_pass(relation, tile):
    """The gradient of values is P^T where that of ``out`` is the identity."""
    for K, Q, D in zip(LENGTHS, reversed(LENGTHS), itertools.cycle([33, 16, 7, 1]), strict=False):
        q, k, v = draw(K, 1, 2, Q, D), draw(Q, 1, 2, K, D), draw(1, 1, 2, K, Q)
        call = Call(Inputs(q, k, v), lay_out(relation, Q, K, tile), 0.7)
        grads = cpu.backward(call, *cpu.forward(call), identity(2, Q), None, Needs(False, False, True))
        want, related = exact(q, k, 0.7, call.layout)
        assert_close(grads.value, want.mT, related.mT)


@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("which", ["query", "key"])
def test_each_gradient_of_a_score(which, relation, tile):
    """The gradient of queries is dS where keys are the identity; that of keys is dS^T where queries are."""
    for K, Q, E in zip(LENGTHS, reversed(LENGTHS), itertools.cycle([1, 24, 33, 7]), strict=False):
        q = draw(K, 1, 2, Q, K) if which == "query" else identity(2, Q)
        k = identity(2, K) if which == "query" else draw(K, 1, 2, K, Q)
        v, d_out = draw(1, 1, 2, K, E), draw(2, 1, 2, Q, E)
        call = Call(Inputs(q, k, v), lay_out(relation, Q, K, tile), 0.7)
        out, lse = cpu.forward(call)
        grads = cpu.backward(call, out, lse, d_out, None, ALL)
        p, related = exact(q, k, 0.7, call.layout)
        d_weights, delta = d_out.double() @ v.double().mT, (d_out * out.double()).sum(-1, keepdim=True)
        want = 0.7 * p * (d_weights - delta)
        slack = FLOAT32 * 0.7 * p * (d_weights.abs() + (d_out * out.double()).abs().sum(-1, keepdim=True))
        if which == "query":
            assert_close(grads.query, want, related, slack=slack)
        else:
            assert_close(grads.key, want.mT, related.mT, slack=slack.mT)


def test_weights_are_rounded_to_nearest():
    """A weight of 1 - 0.9 / 512 becomes 1 in bfloat16; cut off, it would be 1 - 1 / 256."""
    score = torch.log1p(torch.tensor(-0.9 / 512)).item()
    q, k = torch.ones(1, 1, 32, 1).bfloat16(), torch.tensor([0.0, 1.0]).view(1, 1, 2, 1).bfloat16()
    layout = ab.Layout.build(ab.Full(), 32, 2, form="tiles")
    out, _ = cpu.forward(Call(Inputs(q, k, identity(1, 2)), layout, score))
    assert (out == 0.5).all()  # 1 / (2 - 0.9 / 512), not 0.4985


@pytest.mark.parametrize("relation", ["full", "window"])
@pytest.mark.parametrize("K", [96, 97])
def test_dropout_keeps_the_same_pairs(K, relation):
    q, k, seed = torch.zeros(1, 2, 70, 4).bfloat16(), torch.zeros(1, 2, K, 4).bfloat16(), torch.tensor([7])
    layout = lay_out(relation, 70, K, 64)

    def drop(value: Tensor) -> Call:
        return Call(Inputs(q, k, value), layout, 1.0, dropout_p=0.4, seed=seed)

    h, i, j = torch.arange(2)[:, None, None], torch.arange(70)[:, None], torch.arange(K)
    kept = keep_mask(seed, 0.4, torch.zeros(1, 1, 1, 1).long(), h, i, j)
    p, related = exact(q, k, 1.0, layout)
    want, there = torch.where(kept, p / 0.6, 0), related & kept
    assert_close(cpu.forward(drop(identity(2, K)))[0], want, there, roundings=2)
    call = drop(draw(0, 1, 2, K, 70))
    grads = cpu.backward(call, *cpu.forward(call), identity(2, 70), None, ALL)
    assert_close(grads.value, want.mT, there.mT)


OPTIONS = {
    "softcap": {"softcap": 1.5},
    "sink": {"sink": torch.tensor([0.5, -1.0])},
    "negative": {"scale": -0.4},
    "zero": {"scale": 0.0},
    "terms": {"terms": True},
    "terms, softcap": {"terms": True, "softcap": 1.5},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("K", [96, 97])
def test_options(option, K):
    """Their gradients are no worse than eager's; those of terms sum float32 numbers, before any rounding."""
    given = dict(OPTIONS[option])
    q, k, v = make_inputs(3, 1, 2, 1, 75, K, 15, 21, torch.bfloat16)
    d_out = draw(1, 1, 2, 75, 21)
    bias = torch.randn(1, 2, 75, K, generator=torch.Generator().manual_seed(2))
    with_terms = given.pop("terms", False)
    layout = lay_out("causal", 75, K, 64)

    def results(run, dtype):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v, *([bias] if with_terms else []))]
        options = {name: x.to(dtype) if isinstance(x, Tensor) else x for name, x in given.items()}
        out = run(*leaves[:3], terms=[ab.PairBias(x) for x in leaves[3:]], **options)
        return [out, *torch.autograd.grad(out, leaves, d_out.to(dtype))]

    def plain(*inputs, **options):
        return eager(*inputs, layout.to_dense() > 0, **options)[0]

    got = results(partial(ab.attention, relation=layout, backend="cpu"), torch.bfloat16)
    same, truth = results(plain, torch.bfloat16), results(plain, torch.float64)
    scale, no_grad = given.get("scale", 15**-0.5), torch.zeros(1, 2, 75)
    sizes = magnitudes(q, k, v, d_out, no_grad, scale, out=truth[0], bias=bias.max().item())
    for name, x, y, z in zip(["out", "query", "key", "value", "pair"], got, same, truth, strict=False):
        size = sizes.get(name, sizes["sink"])
        assert_no_worse(name, x, y, z, 2.0 if name == "out" else 3.0, magnitude=size)


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("relation", ["full", "causal"])
def test_no_worse_than_sdpa(relation, size):
    """Against PyTorch's own bfloat16 kernels on the same CPU, at a length where they use several blocks."""
    made = make_inputs(0, 1, 2, 2, 700, 700, size, size, torch.bfloat16)
    d_out = draw(1, 1, 2, 700, size)

    def results(run, dtype):
        leaves = [x.detach().to(dtype).requires_grad_() for x in made]
        out = run(*leaves)
        return [out, *torch.autograd.grad(out, leaves, d_out.to(dtype))]

    def sdpa(q, k, v):
        return scaled_dot_product_attention(q, k, v, is_causal=relation == "causal")

    got = results(lambda q, k, v: ab.attention(q, k, v, RELATIONS[relation], backend="cpu"), torch.bfloat16)
    for name, x, y, z in zip(
        ["out", "query", "key", "value"],
        got,
        results(sdpa, torch.bfloat16),
        results(sdpa, torch.float64),
        strict=True,
    ):
        assert_no_worse(name, x, y, z, 2.0 if name == "out" else 3.0)


def test_after_an_odd_last_key_nothing_is_read():
    """A key of zeros stands there, whose weight would be 2^128 at this lse: infinite, and NaN times 0."""
    q, k = torch.ones(1, 1, 64, 1).bfloat16(), torch.ones(1, 1, 97, 1).bfloat16()
    layout = lay_out("full", 64, 97, 64)  # by key all tiles are full: no bits tell the last key
    call = Call(Inputs(q, k, draw(0, 1, 1, 97, 8)), layout, -128 * math.log(2) - math.log(97))
    out, lse = cpu.forward(call)
    assert ((lse / math.log(2) + 128).abs() < 1e-4).all()
    grads = cpu.backward(call, out, lse, draw(1, 1, 1, 64, 8), None, ALL)
    assert all(x.isfinite().all() for x in grads[:3])


def test_the_level_serves_bfloat16_tiles_only():
    """Other dtypes, few queries, multi-level scores and edges have the bits of avx512."""
    shape = (1, 4, 2, 97, 129, 32, 24)

    def on(isa, make):
        cpu.force_isa(isa)
        call = make()
        d_out, d_lse = make_grads(call)
        out, lse = cpu.forward(call)
        return [out, lse, *cpu.backward(call, out, lse, d_out, d_lse, ALL)[:3]]

    def same(make):
        return all(map(torch.equal, on(LEVEL, make), on("avx512", make)))

    assert same(lambda: make_call(ab.Causal(), shape))
    assert same(lambda: make_call(ab.Causal(), shape, dtype=torch.float16))
    few = (1, 4, 2, 16, 129, 32, 24)
    assert same(lambda: make_call(ab.Full(), few, dtype=torch.bfloat16))
    assert same(lambda: make_call(ab.Causal(), shape, dtype=torch.bfloat16, form="edges"))
    assert not same(lambda: make_call(ab.Causal(), shape, dtype=torch.bfloat16))
