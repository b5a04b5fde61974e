"""Neighbourhoods on grids against NATTEN's rule, pair by pair."""

import itertools

import pytest
import torch

import attnbias as ab


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
