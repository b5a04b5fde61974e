"""Neighbourhoods on grids against NATTEN's rule and their definition, pair by pair, and convolutions."""

import itertools
import pickle
import random

import pytest
import torch

import attnbias as ab
from attnbias.relations import parse


def is_neighbor(x, y, length, size, dilation, causal):
    """Apply NATTEN's rule along an axis, among the tokens that the dilation leaves."""
    if x % dilation != y % dilation:
        return False
    tokens = len(range(x % dilation, length, dilation))
    x, y = x // dilation, y // dilation
    if causal:
        return max(x - size + 1, 0) <= y <= x
    first = min(max(x - size // 2, 0), tokens - size)
    return first <= y < first + size


def by_definition(shape, sizes, dilations, causal):
    coordinates = list(itertools.product(*map(range, shape)))
    axes = list(zip(shape, sizes, dilations, causal, strict=True))
    grid = [
        [all(is_neighbor(x, y, *axis) for x, y, axis in zip(q, k, axes, strict=True)) for k in coordinates]
        for q in coordinates
    ]
    return torch.tensor(grid)


CASES = [
    ((9,), (3,), (1,), (False,)),
    ((9,), (9,), (1,), (False,)),
    ((10,), (3,), (3,), (False,)),  # 4, 3 and 3 tokens
    ((9,), (4,), (1,), (True,)),
    ((9,), (5,), (1,), (True,)),
    ((11,), (4,), (2,), (True,)),
    ((4, 7), (3, 5), (1, 1), (False, False)),
    ((5, 6), (2, 3), (1, 2), (True, False)),
    ((6, 5), (3, 4), (2, 1), (False, True)),
    ((3, 4, 5), (2, 3, 3), (1, 1, 1), (True, False, False)),
]


@pytest.mark.parametrize(("shape", "sizes", "dilations", "causal"), CASES, ids=str)
def test_kernel_equals_nattens(shape, sizes, dilations, causal):
    """The docs gave ``2 * radius + 1`` for all axes; a causal one has ``radius + 1`` tokens."""
    relation = ab.Neighborhood.from_kernel(shape, sizes, dilation=dilations, is_causal=causal)
    tokens = relation.lengths[0]
    want = by_definition(shape, sizes, dilations, causal)
    assert torch.equal(relation.dense(tokens, tokens), want)
    assert torch.equal(relation.layout(tokens, tokens).to_dense(), want)


def test_one_number_is_for_all_axes():
    made = ab.Neighborhood.from_kernel((5, 6), 3, is_causal=True)
    assert made == ab.Neighborhood((5, 6), (2, 2), causal=True, border="clamp")
    assert ab.Neighborhood.from_kernel(7, 3) == ab.Neighborhood((7,), 1, border="clamp")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kernel_size": 4}, "kernel_size: wanted odd numbers along axes that are not causal, got 4"),
        ({"kernel_size": (3, 4), "is_causal": (True, False)}, "kernel_size: wanted odd numbers along axes"),
        ({"kernel_size": 0}, "kernel_size: wanted at least 1, got 0"),
        ({"kernel_size": (3, 3, 3)}, "kernel_size: wanted one for each of 2 axes"),
        (
            {"kernel_size": 3, "stride": 2},
            "stride: wanted 1, windows that queries share are not offered, got 2",
        ),
        ({"kernel_size": 3, "stride": (1, 2)}, r"stride: wanted 1, .*, got \(1, 2\)"),
        ({"kernel_size": 7}, r"radius: border='clamp' wants \(2 \* radius \+ 1\) \* dilation <= 5 tokens"),
    ],
)
def test_unsupported_natten_options_are_named(options, words):
    with pytest.raises(ValueError, match=f"^{words}"):
        ab.Neighborhood.from_kernel((5, 6), **options)


@pytest.mark.parametrize("seed", range(60))
def test_offset_moves_the_middle_of_the_neighbours(seed):
    rng = random.Random(seed)
    shape = [rng.randint(1, 5) for _ in range(rng.randint(1, 3))]
    radius, dilation = ([rng.randint(least, 2 + least) for _ in shape] for least in (0, 1))
    causal, offset = [rng.random() < 0.3 for _ in shape], [rng.randint(-6, 6) for _ in shape]
    relation = ab.Neighborhood(shape, radius, dilation, causal, offset=offset)

    def is_near(x, y, axis):
        r, d, is_causal, o = axis
        away = y - (x + o)
        return away % d == 0 and abs(away) <= r * d and (y <= x or not is_causal)

    axes, places = (
        list(zip(radius, dilation, causal, offset, strict=True)),
        list(itertools.product(*map(range, shape))),
    )
    want = torch.tensor([[all(map(is_near, q, k, axes)) for k in places] for q in places])
    n = len(places)
    for mine, wanted in ((relation, want), (relation.T, want.T)):
        assert torch.equal(mine.dense(n, n), wanted)
        assert torch.equal(mine.layout(n, n).to_dense(), wanted)
        assert torch.equal(mine.layout(n // 2, n, q_start=n // 3).to_dense(), wanted[n // 3 :][: n // 2])
    assert relation.T.T == relation == parse(repr(relation)) == pickle.loads(pickle.dumps(relation))


def test_offset_of_zero_is_no_offset():
    plain = ab.Neighborhood((2, 3), 1)
    assert ab.Neighborhood((2, 3), 1, offset=(0, 0)) == plain and "offset" not in repr(plain)
    assert ab.Neighborhood((2, 3), 1, offset=(0, 1)) != plain
    turned = ab.Neighborhood((2, 3), 0, offset=(0, 1)).T
    assert turned == ab.Neighborhood((2, 3), 0, offset=(0, -1)) and plain.T is plain


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"offset": (1, 2, 3)}, ValueError, r"offset: wanted one for each of 2 axes, got \(1, 2, 3\)"),
        ({"offset": 0.5}, TypeError, "offset: wanted an integer, got 0.5"),
        (
            {"offset": -1, "border": "clamp"},
            ValueError,
            r"offset: wanted 0 with border='clamp', got \(-1, -1\)",
        ),
    ],
)
def test_wrong_offsets_are_named(options, error, words):
    with pytest.raises(error, match=f"^{words}"):
        ab.Neighborhood((5, 6), 1, **options)


# -- convolutions ----------------------------------------------------------------------------------


def convolve(image, kernel, dilation):
    """Convolve [B, channels, *shape] with [out, channels, *sizes]: a head of attention per tap."""
    shape, sizes = image.shape[2:], kernel.shape[2:]
    taps = itertools.product(*(range(size) for size in sizes))
    middle = [(size - 1) // 2 for size in sizes]
    offsets = [tuple(d * (t - m) for t, m, d in zip(tap, middle, dilation, strict=True)) for tap in taps]
    relation = ab.PerHead([ab.Neighborhood(shape, radius=0, offset=offset) for offset in offsets])
    tokens = image.flatten(2).mT[:, None]  # [B, 1, L, channels]
    value = tokens @ kernel.flatten(2).permute(2, 1, 0)  # [B, taps, L, out]
    zeros = value[..., :1] * 0  # scores do not matter: a query has one key, or none
    out = ab.attention(zeros, zeros, value, relation).sum(1)  # [B, L, out]
    return out.mT.unflatten(2, shape)


@pytest.mark.parametrize(
    ("shape", "sizes", "dilation"),
    [
        ((17,), (3,), (1,)),
        ((17,), (4,), (1,)),
        ((5,), (7,), (2,)),
        ((1,), (3,), (1,)),
        ((6, 9), (3, 3), (1, 1)),
        ((7, 5), (2, 5), (1, 1)),
        ((7, 8), (3, 5), (2, 3)),
        ((3, 4, 5), (3, 1, 2), (1, 2, 1)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_head_per_offset_is_a_convolution(shape, sizes, dilation, dtype):
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(2, *shape, 8, dtype=dtype, generator=generator)
    image = wide[..., ::2].movedim(-1, 1).requires_grad_()  # strided: every other number, channels last
    kernel = torch.randn(3, 4, *sizes, dtype=dtype, generator=generator, requires_grad=True)
    mine = convolve(image, kernel, dilation)
    torchs = getattr(torch.nn.functional, f"conv{len(shape)}d")
    sides = [
        (d * ((n - 1) // 2), d * (n // 2)) for n, d in zip(sizes, dilation, strict=True)
    ]  # a longer end if n is even
    padding = [side for pair in reversed(sides) for side in pair]

    def formula(image, kernel):
        return torchs(torch.nn.functional.pad(image, padding), kernel, dilation=dilation)

    # A sum of n products is off by at most n steps of the sum of their sizes; two results by twice that.
    absolute = image.detach().abs().requires_grad_(), kernel.detach().abs().requires_grad_()
    grad = torch.randn(mine.shape, dtype=dtype, generator=generator)
    steps = 2 * max(4 * kernel[0, 0].numel(), mine.numel()) * torch.finfo(dtype).eps
    results = mine, formula(image, kernel), formula(*absolute)
    grads = [
        torch.autograd.grad(out, leaves, each)
        for out, leaves, each in zip(
            results, [(image, kernel)] * 2 + [absolute], (grad, grad, grad.abs()), strict=True
        )
    ]
    for got, want, size in zip(
        *([out, *each] for out, each in zip(results, grads, strict=True)), strict=True
    ):
        assert got.shape == want.shape
        assert ((got - want).abs() <= steps * size).all()
