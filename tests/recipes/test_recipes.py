"""Every recipe has the pairs of its published definition, written here pair by pair, and runs.

Each predicate below is the definition in its paper or published code, for one query and one key, and shares
nothing with the recipe.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import attnbias as ab
from attnbias import recipes
from attnbias.testing import assert_no_worse

Pair = Callable[[int, int], bool]


def document_of(position: int, lengths: list[int]) -> int:
    """Return the number of the document that holds a position."""
    return next(n for n, end in enumerate(itertools.accumulate(lengths)) if position < end)


def shared_prefix(prefix: list[int], lengths: list[list[int]]) -> Pair:
    """Packed documents, each with the document that is its prompt; a prompt is its own."""
    sizes, prompt_of = [], []
    for size, answers in zip(prefix, lengths, strict=True):
        prompt_of += [len(sizes)] * (1 + len(answers))
        sizes += [size, *answers]
    offsets = [0, *itertools.accumulate(sizes)]

    def related(q: int, k: int) -> bool:
        mine = document_of(q, sizes)
        prompt = prompt_of[mine]
        own = offsets[mine] <= k <= q
        return own or (mine != prompt and offsets[prompt] <= k < offsets[prompt + 1])

    return related


def block_diffusion(length: int, block: int) -> Pair:
    """BD3-LM's three masks: block diagonal, offset block causal, block causal."""

    def related(q: int, k: int) -> bool:
        clean_q, clean_k = q >= length, k >= length
        block_q, block_k = q % length // block, k % length // block
        diagonal = block_q == block_k and clean_q == clean_k
        offset = block_q > block_k and clean_k and not clean_q
        return diagonal or offset or (block_q >= block_k and clean_k and clean_q)

    return related


def dflash(lengths: list[int], anchors: list[int], block: int) -> Pair:
    """The training mask of the speculators library: text before the anchor, then the own block."""
    text = sum(lengths)

    def related(q: int, k: int) -> bool:
        anchor = anchors[q // block]
        if k < text:
            return k < anchor and document_of(k, lengths) == document_of(anchor, lengths)
        return (k - text) // block == q // block

    return related


def eagle3(lengths: list[int]) -> Pair:
    """SpecForge's mask: causal on the text, and the diagonal of each later step."""
    tokens = sum(lengths)

    def related(q: int, k: int) -> bool:
        causal = k <= q and document_of(k, lengths) == document_of(q, lengths)
        return causal or (k >= tokens and (k - q) % tokens == 0)

    return related


def multi_token_prediction(length: int, masks: int) -> Pair:
    """Text sees text; a mask token sees the text up to its token, and the own mask tokens before it."""

    def place(position: int) -> tuple[int, int]:
        """Return the token of the text, and 0 for itself or the number of its mask token."""
        if position < length:
            return position, 0
        return (position - length) // masks, 1 + (position - length) % masks

    def related(q: int, k: int) -> bool:
        (token_q, mask_q), (token_k, mask_k) = place(q), place(k)
        if mask_k == 0:
            return token_k <= token_q
        return token_k == token_q and mask_k <= mask_q

    return related


def transfusion(images: list[tuple[int, int]]) -> Pair:
    def related(q: int, k: int) -> bool:
        return k <= q or any(start <= q < stop and start <= k < stop for start, stop in images)

    return related


def flamingo(images: list[int], sizes: list[int]) -> Pair:
    """The paper: only the image that comes last before the token."""

    def related(q: int, k: int) -> bool:
        before = [number for number, place in enumerate(images) if place <= q]
        return bool(before) and document_of(k, sizes) == before[-1]

    return related


def flamingo_runs(length: int, images: list[int], sizes: list[int]) -> Pair:
    """The mask of torchtune: an image is seen from its mark to the next mark that follows text."""
    stops, last = [0] * len(images), length
    for number in reversed(range(len(images))):
        follows = number + 1 < len(images) and images[number + 1] == images[number] + 1
        if number + 1 < len(images) and not follows:
            last = images[number + 1]
        stops[number] = last
    return lambda q, k: images[document_of(k, sizes)] <= q < stops[document_of(k, sizes)]


def sliding_tile(shape: list[int], tile: list[int], kernel: list[int], text: int) -> Pair:
    """The published mask of STA: the window's centre is clamped, axis by axis, in tiles."""
    video, size = 1, 1
    for n, t in zip(shape, tile, strict=True):
        video, size = video * n, size * t
    counts = [n // t for n, t in zip(shape, tile, strict=True)]

    def place(position: int) -> list[int]:
        tile_number, found = position // size, []
        for count in reversed(counts):
            tile_number, at = divmod(tile_number, count)
            found.insert(0, at)
        return found

    def related(q: int, k: int) -> bool:
        if q >= video or k >= video:
            return k < video + text
        for x, y, count, wide, t in zip(place(q), place(k), counts, kernel, tile, strict=True):
            wide_tiles = wide // t
            left, right = wide_tiles // 2, wide_tiles // 2 + (wide_tiles % 2 - 1)
            centre = min(max(x, left), count - 1 - right)
            if not centre - left <= y <= centre + right:
                return False
        return True

    return related


def video_blocks(index: list[list[int]], size: int, real: list[int] | None) -> Pair:
    def related(q: int, k: int) -> bool:
        return k // size in index[q // size] and (real is None or k % size < real[k // size])

    return related


def longformer(window: int, tokens: list[int], dilation: int) -> Pair:
    def related(q: int, k: int) -> bool:
        near = (q - k) % dilation == 0 and abs(q - k) <= window // 2 * dilation
        return near or q in tokens or k in tokens

    return related


def bigbird(block: int, window: int, first: int) -> Pair:
    """Without random blocks."""

    def related(q: int, k: int) -> bool:
        mine, other = q // block, k // block
        return abs(mine - other) <= (window - 1) // 2 or mine < first or other < first

    return related


def sparse_fixed(stride: int, summary: int) -> Pair:
    """Child et al., equations of the fixed pattern: A1 and A2."""

    def related(q: int, k: int) -> bool:
        return k <= q and (k // stride == q // stride or k % stride in range(stride - summary, stride))

    return related


CASES: list[tuple[ab.Relation, int, int, Pair]] = [
    *(
        (recipes.shared_prefix(p, n), p + sum(n), p + sum(n), shared_prefix([p], [n]))
        for p, n in [(5, [3, 1, 4]), (0, [2, 3]), (7, []), (70, [65, 0, 9])]
    ),
    (recipes.shared_prefix([3, 2], [[2, 2], [4]]), 13, 13, shared_prefix([3, 2], [[2, 2], [4]])),
    *((recipes.prefix_lm(n), 20, 20, lambda q, k, n=n: k < n or k <= q) for n in (0, 1, 7, 20, 33)),
    *(
        (recipes.block_diffusion(n, b), 2 * n, 2 * n, block_diffusion(n, b))
        for n, b in [(12, 4), (13, 4), (5, 7), (9, 1), (97, 32)]
    ),
    (recipes.dflash(11, [3, 0, 10], 4), 12, 23, dflash([11], [3, 0, 10], 4)),
    (recipes.dflash([4, 6, 5], [13, 5, 9, 0], 3), 12, 27, dflash([4, 6, 5], [13, 5, 9, 0], 3)),
    (recipes.dflash(97, list(range(0, 97, 9)), 5), 55, 152, dflash([97], list(range(0, 97, 9)), 5)),
    *(
        (recipes.eagle3(n, s), n, n * (1 + s), eagle3([n]))
        for n, s in [(1, 1), (7, 0), (7, 1), (9, 3), (65, 2)]
    ),
    (recipes.eagle3([4, 1, 6], 2), 11, 33, eagle3([4, 1, 6])),
    *(
        (recipes.multi_token_prediction(n, m), n * (1 + m), n * (1 + m), multi_token_prediction(n, m))
        for n, m in [(1, 1), (6, 0), (7, 3), (33, 2)]
    ),
    *(
        (recipes.transfusion(19, spans), 19, 19, transfusion(spans))
        for spans in ([], [(0, 4)], [(12, 19), (2, 7)], [(3, 4), (4, 9)])
    ),
    (recipes.flamingo(12, [2, 5, 9], [3, 1, 4]), 12, 8, flamingo([2, 5, 9], [3, 1, 4])),
    (recipes.flamingo(9, [0, 1, 8], 2), 9, 6, flamingo([0, 1, 8], [2, 2, 2])),
    *(
        (recipes.flamingo(12, places, 3, runs=True), 12, 3 * len(places), flamingo_runs(12, places, [3] * 9))
        for places in ([0, 1, 7], [1, 2, 3, 5, 10, 11], [4], [0, 11])
    ),
    *(
        (recipes.sliding_tile(*given), total, total, sliding_tile(*given))
        for total, given in [
            (12, ([12], [2], [6], 0)),
            (14, ([12], [3], [6], 2)),
            (53, ([6, 8], [2, 2], [6, 4], 5)),
            (96, ([4, 4, 6], [2, 2, 2], [2, 4, 6], 0)),
            (149, ([4, 6, 6], [2, 2, 3], [4, 2, 3], 5)),
        ]
    ),
    (
        recipes.video_blocks([[0, 2], [1, 0], [2, 1]], 3),
        9,
        9,
        video_blocks([[0, 2], [1, 0], [2, 1]], 3, None),
    ),
    (
        recipes.video_blocks([[3], [0], [0], [2]], 5, real=[5, 2, 4, 1]),
        *(20, 20, video_blocks([[3], [0], [0], [2]], 5, [5, 2, 4, 1])),
    ),
    *(
        (recipes.longformer(w, t, d), 40, 40, longformer(w, t, d))
        for w, t, d in [(0, [], 1), (4, [0], 1), (6, [0, 17, 39], 3), (80, [], 2)]
    ),
    *(
        (recipes.bigbird(n, b, w, first, random=0), n, n, bigbird(b, w, first))
        for n, b, w, first in [(40, 4, 3, 1), (43, 4, 5, 2), (9, 4, 1, 0), (70, 16, 7, 9), (0, 4, 3, 1)]
    ),
    *(
        (recipes.streaming(s, w), 30, 30, lambda q, k, s=s, w=w: k <= q and (k < s or q - k < w))
        for s, w in [(4, 8), (0, 1), (1, 3), (40, 5)]
    ),
    *(
        (recipes.dilated(w, d), 30, 30, lambda q, k, w=w, d=d: abs(q - k) <= w and (q - k) % d == 0)
        for w, d in [(0, 1), (7, 3), (8, 2), (50, 4)]
    ),
    *(
        (
            recipes.sparse_transformer_strided(n),
            *(30, 30, lambda q, k, n=n: max(0, q - n) <= k <= q or (k <= q and (q - k) % n == 0)),
        )
        for n in (1, 2, 5, 16, 50)
    ),
    *(
        (recipes.sparse_transformer_fixed(n, s, c), n, n, sparse_fixed(s, c))
        for n, s, c in [(30, 5, 1), (31, 4, 4), (29, 8, 3), (20, 7, 0), (9, 40, 2)]
    ),
]


def grid_of(related: Pair, queries: int, keys: int) -> torch.Tensor:
    rows = [[related(q, k) for k in range(keys)] for q in range(queries)]
    return torch.tensor(rows, dtype=torch.bool).reshape(queries, keys)


@pytest.mark.parametrize(("relation", "queries", "keys", "related"), CASES)
def test_recipe_has_the_pairs_of_its_definition(relation, queries, keys, related):
    wanted = grid_of(related, queries, keys)
    assert torch.equal(relation.dense(queries, keys), wanted)
    for form in ("tiles", "edges"):
        assert torch.equal(ab.Layout.build(relation, queries, keys, form=form).to_dense(), wanted)


@pytest.mark.parametrize(("relation", "queries", "keys", "related"), CASES[::3])
def test_recipe_attends_as_sdpa_with_its_mask(relation, queries, keys, related):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 16, generator=generator) for n in (queries, keys, keys))
    mask = grid_of(related, queries, keys)
    got = ab.attention(q, k, v, relation, backend="cpu")
    rows = mask.any(1)  # SDPA has no numbers for the others
    assert not got[:, :, ~rows].any()
    if rows.any():
        eager, exact = (
            scaled_dot_product_attention(*(x.to(dtype) for x in (q[:, :, rows], k, v)), attn_mask=mask[rows])
            for dtype in (torch.float32, torch.float64)
        )
        assert_no_worse("out", got[:, :, rows], eager, exact)


def test_local_and_global_layers_alternate():
    """Gemma 2 alternates; Gemma 3 has five local layers, then a global one."""
    for every in (1, 2, 6):
        layers = recipes.local_global(13, window=5, every=every)
        for number, relation in enumerate(layers):
            is_global = number % every == every - 1
            wanted = grid_of(lambda q, k, g=is_global: k <= q and (g or q - k < 5), 9, 9)
            assert torch.equal(relation.dense(9, 9), wanted)


@pytest.mark.parametrize(
    ("length", "block", "window", "first", "random"), [(83, 4, 3, 1, 2), (64, 8, 1, 2, 3)]
)
def test_random_blocks_are_whole_distinct_and_elsewhere(length, block, window, first, random):
    fixed = grid_of(bigbird(block, window, first), length, length)
    drawn = []
    for seed in (0, 0, 1):
        grid = recipes.bigbird(length, block, window, first, random, seed).dense(length, length)
        extra = grid & ~fixed
        assert torch.equal(grid | fixed, grid)
        for start in range(0, length, block):
            rows = extra[start : start + block]
            assert bool((rows == rows[0]).all())
            touched = {k // block for k in rows[0].nonzero().reshape(-1).tolist()}
            assert len(touched) == (random if start >= first * block else 0)
            assert all(bool(rows[0, block * n : block * n + block].all()) for n in touched)
        drawn.append(extra)
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


def test_video_blocks_of_each_head():
    heads = [[[0, 1], [1, 1], [0, 2]], [[2, 0], [0, 1], [1, 2]]]
    grid = recipes.video_blocks(torch.tensor(heads), 2).dense(6, 6)
    for got, index in zip(grid[0], heads, strict=True):
        assert torch.equal(got, grid_of(video_blocks(index, 2, None), 6, 6))


MADE = [
    lambda: recipes.dflash([4, 5], [2, 6], 2),
    lambda: recipes.flamingo(6, [1, 2], 2, runs=True),
    lambda: recipes.sliding_tile([4, 4], [2, 2], [2, 4], text=1),
    lambda: recipes.video_blocks([[0], [1]], 2, real=[2, 1]),
    lambda: recipes.bigbird(9, 2),
    lambda: recipes.multi_token_prediction(3, 2),
    lambda: recipes.eagle3([2, 3], 1),
    lambda: recipes.transfusion(5, [(1, 3)]),
    lambda: recipes.block_diffusion(5, 2),
    lambda: recipes.sparse_transformer_fixed(5, 2),
    lambda: recipes.shared_prefix(2, [1]),
]


@pytest.mark.parametrize("make", MADE)
def test_recipes_are_made_on_the_host(make):
    """Whatever torch's default device is."""
    wanted = make()
    with torch.device("meta"):
        assert make() == wanted


BAD = [
    (recipes.shared_prefix, (-1, [2]), "prefix: wanted at least 0, got -1"),
    (recipes.shared_prefix, (2, [3, -4]), "lengths: wanted 0 or more, got -4"),
    (recipes.shared_prefix, ([2, 3], [[1]]), "lengths: wanted a list for each of 2 prompts, got 1"),
    (recipes.prefix_lm, (-3,), "length: wanted at least 0, got -3"),
    (recipes.streaming, (4, 0), "window: wanted at least 1, got 0"),
    (recipes.streaming, (-4, 8), "sinks: wanted at least 0, got -4"),
    (recipes.longformer, (5, [0]), "window: wanted an even number, half of it on each side, got 5"),
    (recipes.longformer, (4, [-1]), "positions: wanted 0 or more, got -1"),
    (recipes.bigbird, (64, 8, 4), "window: wanted an odd number of blocks, got 4"),
    (recipes.bigbird, (64, 0), "block: wanted at least 1, got 0"),
    (recipes.dilated, (4, 0), "dilation: wanted at least 1, got 0"),
    (recipes.sparse_transformer_strided, (0,), "stride: wanted at least 1, got 0"),
    (recipes.sparse_transformer_fixed, (9, 3, 4), "summary: wanted at most the 3 tokens of a chunk, got 4"),
    (recipes.local_global, (4, 0), "window: wanted at least 1, got 0"),
    (recipes.block_diffusion, (8, 0), "block: wanted at least 1, got 0"),
    (recipes.dflash, (8, [3, 8], 2), "anchors: wanted positions from 0 to 7, got 8"),
    (recipes.dflash, ([4, -1], [0], 2), "length: wanted 0 or more, got -1"),
    (recipes.eagle3, (8, -1), "steps: wanted at least 0, got -1"),
    (recipes.multi_token_prediction, (4, -2), "masks: wanted at least 0, got -2"),
    (recipes.transfusion, (9, [(2, 10)]), "images: wanted a start and a stop up to 9, got [2, 10]"),
    (recipes.transfusion, (9, [(1, 2, 3)]), "images: wanted a start and a stop up to 9, got [1, 2, 3]"),
    (
        *(recipes.transfusion, (9, [(4, 6), (1, 5)])),
        "images: wanted spans that do not overlap, got [1, 5] and [4, 6]",
    ),
    (recipes.flamingo, (9, [3, 3], 2), "images: wanted rising positions, got [3, 3]"),
    (recipes.flamingo, (9, [3, 9], 2), "images: wanted positions from 0 to 8, got 9"),
    (recipes.flamingo, (9, [3, 4], [2]), "sizes: wanted one for each of 2 images, got 1"),
    (recipes.sliding_tile, ([9], [2], [4]), "shape: wanted whole tiles of 2 tokens, at most 9, got 9"),
    (recipes.sliding_tile, ([8], [2], [10]), "kernel: wanted whole tiles of 2 tokens, at most 8, got 10"),
    (recipes.sliding_tile, ([8, 8], [2], [2]), "tile: wanted 2 axes, as in shape, got [2] and kernel [2]"),
    (recipes.video_blocks, ([[0, 2]], 4), "index: wanted cubes from 0 to 0, got 0 to 2"),
    (
        *(recipes.video_blocks, ([[0], [1]], 4, [4, 5])),
        "real: wanted 2 numbers up to 4, one for each cube, got [4, 5]",
    ),
    (recipes.video_blocks, ([0, 1], 4), "index: wanted 2 or 3 dimensions, got shape [2]"),
]


@pytest.mark.parametrize(("recipe", "given", "words"), BAD)
def test_bad_arguments_raise_one_sentence(recipe, given, words):
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        recipe(*given)


def test_every_recipe_is_tested_and_says_where_it_comes_from():
    source = inspect.getsource(inspect.getmodule(grid_of))
    for name, recipe in recipes.RECIPES.items():
        assert f"recipes.{name}(" in source
        assert inspect.getdoc(recipe).splitlines()[0].endswith(".")
        assert "arXiv" in recipe.__doc__ or name == "dilated"
