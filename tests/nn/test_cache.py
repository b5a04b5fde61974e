"""The cache of a multi-level score against attention over all keys, in float64, step by step."""

import pytest
import torch
from torch import nn

import attnbias as ab
from attnbias.nn import MLRAttention, MultiLevelCache

T = 53
SCORES = {
    "shared, 24, 8": ab.MultiLevel([3, 2, 4], widths=[None, 24, 8]),
    "one level": ab.MultiLevel([9], widths=[None]),
    "width 1": ab.MultiLevel([4, 4, 1], widths=[None, 7, 1]),
    "closed": ab.MultiLevel([5, 4], widths=[64, 16]),
    "far pairs share none": ab.MultiLevel([5, 4], widths=[20, 10], normalize=None),
    "by levels": ab.MultiLevel([2, 2, 5], widths=[40, 20, 5], normalize="levels"),
}
PARTS = {
    "tokens": [1] * T,
    "prompt": [29, *[1] * (T - 29)],
    "prompts": [10, 15, 1, 7, 0, 3, *[1] * 5, 12],
}


def make(B, H, Hk, dtype=torch.float64):
    torch.manual_seed(0)
    return [torch.randn(*B, heads, T, size, dtype=dtype) for heads, size in ((H, 9), (Hk, 9), (Hk, 6))]


def run(cache, inputs, parts, *args, **options):
    """Yield the result of each part, after the cache has seen it."""
    for chunk in torch.arange(T).split(PARTS[parts]):
        yield cache.attend(*(x[..., chunk, :] for x in inputs), *args, **options)


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("heads", [(1, 1), (4, 2)])
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("name", SCORES)
def test_equals_the_full_cache_at_every_step(name, parts, heads, batch):
    inputs = make(batch, *heads)
    cache = MultiLevelCache(SCORES[name])
    got = torch.cat(list(run(cache, inputs, parts, scale=0.7)), -2)
    wanted = ab.attention(*inputs, ab.Causal(), score=SCORES[name], scale=0.7)
    assert got.shape == wanted.shape and cache.length == T
    assert (got - wanted).abs().max() < 1e-14 * wanted.abs().max()


EVEN = ab.Where(lambda b, h, q, k: (q + h) % 3 == k % 3) & ab.Causal()


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize(
    "relation",
    [
        ab.Window(before=6),
        ab.Causal() & ~ab.Window(before=0),  # token 0 has no key
        ab.Chunks(5) & ab.Causal(),
        EVEN,
        ab.PerHead([ab.Window(before=n) for n in (0, 3, 9, 40)]),
        ab.PerBatch([ab.Window(before=2), ab.Causal()]),
    ],
    ids=["window", "past", "chunks", "where", "heads", "batch"],
)
def test_relations_count_positions_of_the_sequence(relation, parts):
    inputs, score = make((2,), 4, 2), SCORES["shared, 24, 8"]
    got = torch.cat(list(run(MultiLevelCache(score), inputs, parts, relation)), -2)
    wanted = ab.attention(*inputs, relation, score=score)
    assert (got - wanted).abs().max() < 1e-14 * wanted.abs().max()


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("name", SCORES)
def test_bytes_follow_the_formula(name, parts):
    """Storages are counted: a view of what is kept would hold on to what is dropped."""
    score, inputs = SCORES[name], make((3,), 4, 2)
    cache = MultiLevelCache(score)
    assert cache.nbytes == cache.full_nbytes == 0
    for _ in run(cache, inputs, parts):
        n = cache.length
        counts = [n % width if width else n for width in score.widths]
        numbers = sum(count * rank for count, rank in zip(counts, score.ranks, strict=True)) + 6 * n
        assert cache.nbytes == 3 * 2 * 8 * numbers
        assert cache.full_nbytes == 3 * 2 * 8 * n * (9 + 6)


def test_dropped_numbers_are_those_that_no_later_token_reads():
    """Each kept number changes some later result."""
    score, (q, k, v) = SCORES["shared, 24, 8"], make((), 1, 1)
    for n in (23, 24, 26, 40):
        held = MultiLevelCache(score)
        held.attend(q[:, :n], k[:, :n], v[:, :n])
        key = k[:, :n].clone().requires_grad_()
        later = ab.attention(q[:, n:], torch.cat((key, k[:, n:]), 1), v, ab.Causal(), score=score, q_start=n)
        read = torch.autograd.grad(later.square().sum(), key)[0] != 0
        assert int(read.sum()) * 8 == held.nbytes - v[:, :n].numel() * 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_precisions(dtype):
    inputs, score = make((2,), 4, 2, dtype), SCORES["shared, 24, 8"]
    got = torch.cat(list(run(MultiLevelCache(score), inputs, "prompt")), -2)
    exact = ab.attention(*(x.double() for x in inputs), ab.Causal(), score=score)
    with ab.use_backend("reference"):
        eager = ab.attention(*inputs, ab.Causal(), score=score)
    assert got.dtype == dtype
    ab.testing.assert_no_worse("out", got, eager, exact)


def test_the_callers_tensors_are_not_held():
    """The first keys are a slice of a larger tensor, which the caller may also write to."""
    inputs = make((), 2, 2)
    cache, same = MultiLevelCache(SCORES["one level"]), [x.clone() for x in inputs]
    for chunk in torch.arange(T).split(20):
        part = [x[..., chunk, :] for x in same]
        out = cache.attend(*part)
        part[1].zero_()
        for x in same:
            x[..., chunk, :] = 0
    wanted = ab.attention(*inputs, ab.Causal(), score=SCORES["one level"])[:, 40:]
    assert (out - wanted).abs().max() < 1e-14 * wanted.abs().max()


@pytest.mark.parametrize("batch", [(), (2,)])
def test_a_layer_decodes_with_it(batch):
    torch.manual_seed(0)
    relation = ab.Causal() & ab.Window(before=30)
    layer = MLRAttention(18, 2, [3, 2, 4], relation, widths=[None, 24, 8], scale=2.0, dtype=torch.float64)
    nn.init.normal_(layer.output.weight)
    x = torch.randn(*batch, T, 18, dtype=torch.float64)
    cache = MultiLevelCache(layer.score)
    got = torch.cat([layer(part, cache=cache) for part in x.split(PARTS["prompt"], -2)], -2)
    assert (got - layer(x)).abs().max() < 1e-13 * got.abs().max()
    everyone = MLRAttention(18, 2, [3, 2, 4], None, widths=[None, 24, 8], dtype=torch.float64)
    nn.init.normal_(everyone.output.weight)
    got = everyone(x, cache=MultiLevelCache(layer.score))
    assert (got - everyone(x)).abs().max() < 1e-13 * got.abs().max()


def test_a_call_that_raises_leaves_the_cache_as_it_was():
    score, inputs = SCORES["shared, 24, 8"], make((2,), 4, 2)
    cache = MultiLevelCache(score)
    cache.attend(*(x[:, :, :20] for x in inputs))
    step, two = ([x[:, :, 20 : 20 + n] for x in inputs] for n in (1, 2))
    three_heads = ab.PerHead([ab.Causal()] * 3)
    wrong = (
        (step, three_heads, "relation: this PerHead has heads 3, got heads 4"),
        (two, three_heads, "relation: this PerHead has heads 3, got heads 4"),
        ((*step[:2], step[2][:1]), ab.Causal(), r"value: wanted the key's \[2, 2, 1\], got \[1, 2, 1, 6\]"),
        ((*step[:2], two[2]), ab.Causal(), r"value: wanted the key's \[2, 2, 1\], got \[2, 2, 2, 6\]"),
        ((step[0][:1], *step[1:]), ab.Causal(), r"key: wanted the query's batch, .* query \[1, 4, 1, 9\]"),
        ((step[0][:, :3], *step[1:]), ab.Causal(), r"key: .* heads that divide its own, .* \[2, 3, 1, 9\]"),
        ((step[0][0], *step[1:]), ab.Causal(), r"key: wanted the query's batch, .* query \[4, 1, 9\]"),
    )
    for given, relation, words in wrong:
        with pytest.raises(ValueError, match=words):
            cache.attend(*given, relation)
    with pytest.raises(TypeError, match="relation: wanted a Relation, got NoneType None"):
        cache.attend(*step, None)
    got = cache.attend(*(x[:, :, 20:] for x in inputs))
    wanted = ab.attention(*inputs, ab.Causal(), score=score)[:, :, 20:]
    assert cache.length == T and (got - wanted).abs().max() < 1e-14 * wanted.abs().max()
    with pytest.raises(ValueError, match=r"value: wanted the key's"):  # also in the first call
        MultiLevelCache(score).attend(*step[:2], step[2][:1])


def test_wrong_values_are_named():
    score, (q, k, v) = SCORES["shared, 24, 8"], make((2,), 4, 2)
    with pytest.raises(TypeError, match="score: wanted a MultiLevel, got list"):
        MultiLevelCache([4, 4])
    with pytest.raises(
        ValueError, match="score: wanted widths, which stay while the sequence grows, got None"
    ):
        MultiLevelCache(ab.MultiLevel([4, 4]))
    cache = MultiLevelCache(score)
    with pytest.raises(ValueError, match=r"key: wanted .* the score's 9 dimensions, got \[2, 2, 53, 8\]"):
        cache.attend(q, k[..., :8], v)
    with pytest.raises(ValueError, match=r"key: wanted as many tokens as the query has, .* \[2, 4, 3, 9\]"):
        cache.attend(q[:, :, :3], k, v)
    cache.attend(q, k, v)
    with pytest.raises(
        ValueError, match=r"value: wanted the heads and sizes of the tokens so far, \[2, 2, 53, 6\], got"
    ):
        cache.attend(q[:1], k[:1], v[:1])
    closed = MultiLevelCache(ab.MultiLevel([5, 4], widths=[16, 4]))
    with pytest.raises(ValueError, match=r"wants a first level that all 53 positions share, got .* = 16"):
        closed.attend(q, k, v)
    assert closed.length == 0
    twice = ab.Graph([[0, 0], [0, 0]], num_nodes=1)
    with pytest.raises(ValueError, match="duplicate edges count twice"):
        MultiLevelCache(score).attend(q[:, :, :1], k[:, :, :1], v[:, :, :1], twice)
    layer, x = MLRAttention(18, 2, [3, 2, 4], widths=[None, 24, 8]), torch.randn(2, 4, 18)
    wanted = "cache: wanted one with the layer's score, and neither memory, options nor softcap with it"
    for given in ({"memory": x}, {"q_start": 3}, {"relation": ab.Full()}):
        with pytest.raises(ValueError, match=wanted):
            layer(x, cache=MultiLevelCache(layer.score), **given)
    with pytest.raises(ValueError, match=wanted):
        layer(x, cache=closed)
    with pytest.raises(TypeError, match="cache: wanted a MultiLevelCache or None, got int"):
        layer(x, cache=3)
    cache = MultiLevelCache(layer.score)
    with pytest.raises(ValueError, match=r"x: wanted \[n, 18\] or \[B, n, 18\], .*, got \[2, 4, 17\]"):
        layer(x[..., :17], cache=cache)
    with pytest.raises(TypeError, match="x: wanted a tensor, got list"):
        layer([x], cache=cache)
