"""Recipes for images and video."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..arguments import as_count, as_indices
from ..relations import Blocks, Causal, Documents, Global, Padding, Relation
from .pieces import as_places, as_sizes, before, number


def transfusion(length: int, images: Sequence[Sequence[int]]) -> Relation:
    """Attend causally, and in both directions inside an image.

    Transfusion (Zhou et al., 2024, arXiv 2408.11039).

    Args:
        length: number of tokens.
        images: first token of each image, and the one after its last.

    Example:
        >>> import attnbias as ab
        >>> print(ab.recipes.transfusion(6, images=[(1, 4)]).picture(6, 6))
        #.....
        ####..
        ####..
        ####..
        #####.
        ######
    """
    image = torch.full((as_count("length", length),), -1, device="cpu")
    for place, (start, stop) in enumerate(_as_spans(images, length)):
        image[start:stop] = place
    return Causal() | Documents(image)


def _as_spans(images: Sequence[Sequence[int]], length: int) -> list[list[int]]:
    spans = [as_sizes("images", span) for span in images]
    for span in spans:
        if len(span) != 2 or not span[0] <= span[1] <= length:
            raise ValueError(f"images: wanted a start and a stop up to {length}, got {span}")
    for one, other in itertools.pairwise(sorted(spans)):
        if other[0] < one[1]:
            raise ValueError(f"images: wanted spans that do not overlap, got {one} and {other}")
    return spans


def flamingo(
    length: int, images: Sequence[int], sizes: int | Sequence[int], *, runs: bool = False
) -> Relation:
    """Attend from text to the image before it.

    Queries are the text, keys the tokens of all images; text before the first image sees nothing. Flamingo
    (Alayrac et al., 2022, arXiv 2204.14198). With ``runs``, images whose marks follow one another are seen
    together by the text behind them, as in torchtune and Llama 3.2.

    Args:
        length: tokens of the text.
        images: positions of the images' marks in the text, rising.
        sizes: tokens of an image, or of each image.
        runs: whether images that follow one another are seen together.

    Example:
        >>> import attnbias as ab
        >>> print(ab.recipes.flamingo(6, images=[0, 4], sizes=3).picture(6, 6))
        ###...
        ###...
        ###...
        ###...
        ...###
        ...###
    """
    places = as_places("images", images, as_count("length", length))
    if any(place >= after for place, after in itertools.pairwise(places)):
        raise ValueError(f"images: wanted rising positions, got {places}")
    tokens = [as_count("sizes", sizes)] * len(places) if isinstance(sizes, int) else as_sizes("sizes", sizes)
    if len(tokens) != len(places):
        raise ValueError(f"sizes: wanted one for each of {len(places)} images, got {len(tokens)}")
    seen = torch.zeros(length, dtype=torch.int64, device="cpu").scatter(
        0, as_indices("images", places, (1,)), 1
    )
    seen = seen.cumsum(0)  # images up to each token
    if not runs:
        return Documents(seen - 1, number(tokens))
    run = torch.tensor([0, *itertools.accumulate(place - 1 not in places for place in places)], device="cpu")
    ends = torch.tensor([0, *itertools.accumulate(tokens)], device="cpu")
    return Documents(run[seen] - 1, run[1:][number(tokens)] - 1) & before(ends[seen])


def sliding_tile(shape: Sequence[int], tile: Sequence[int], kernel: Sequence[int], text: int = 0) -> Relation:
    """Attend from each tile of a video to the tiles near it.

    Tokens are ordered tile by tile, text last. The window is as large at the borders: it is moved inside.
    Text sees all and is seen by all. STA (Zhang et al., 2025, arXiv 2502.04507).

    Args:
        shape: tokens along each axis, such as time, height and width.
        tile: tokens of a tile along each axis; they divide ``shape``.
        kernel: tokens of a window along each axis; whole tiles.
        text: tokens of the text.

    Example:
        >>> import attnbias as ab
        >>> print(ab.recipes.sliding_tile([8], tile=[2], kernel=[4], text=1).picture(9, 9))
        ####....#
        ####....#
        ####....#
        ####....#
        ..####..#
        ..####..#
        ....#####
        ....#####
        #########
    """
    shape, tile, kernel = (
        as_sizes(name, x, 1) for name, x in (("shape", shape), ("tile", tile), ("kernel", kernel))
    )
    if not len(shape) == len(tile) == len(kernel):
        raise ValueError(f"tile: wanted {len(shape)} axes, as in shape, got {tile} and kernel {kernel}")
    for name, given, most in (("shape", shape, shape), ("kernel", kernel, shape)):
        for n, t, m in zip(given, tile, most, strict=True):
            if n % t or n > m:
                raise ValueError(f"{name}: wanted whole tiles of {t} tokens, at most {m}, got {n}")
    index = torch.zeros(1, 1, dtype=torch.int64, device="cpu")  # [tiles, tiles of the window]
    for n, t, k in zip(shape, tile, kernel, strict=True):
        tiles, wide = n // t, k // t
        first = (torch.arange(tiles, device="cpu") - wide // 2).clamp(0, tiles - wide)
        near = first[:, None] + torch.arange(wide, device="cpu")
        index = (index[:, None, :, None] * tiles + near[:, None, :]).reshape(len(index) * tiles, -1)
    video, size = math.prod(shape), math.prod(tile)
    total = video + as_count("text", text)
    rows = torch.cat((index, torch.full((-(-text // size), index.shape[1]), -1, device="cpu")))
    return Blocks(rows, size) | Global(range(video, total))


def video_blocks(
    index: Sequence[Sequence[int]] | Tensor, size: int, real: Sequence[int] | None = None
) -> Relation:
    """Attend from each cube of a video to the cubes that were chosen for it.

    Tokens are ordered cube by cube. The fine stage of VSA (Zhang et al., 2025, arXiv 2505.13389): a coarse
    attention between means of cubes chooses, for each, those of the highest scores.

    Args:
        index: cubes that each cube sees, [cubes, n], or [H, cubes, n] for heads of their own.
        size: tokens of a cube, padding included.
        real: tokens of each cube that are not padding; all by default.

    Example:
        >>> import attnbias as ab
        >>> print(ab.recipes.video_blocks([[0, 2], [1, 0], [2, 1]], size=2).picture(6, 6))
        ##..##
        ##..##
        ####..
        ####..
        ..####
        ..####
    """
    table = as_indices("index", index, (2, 3))
    cubes = table.shape[-2]
    if table.numel() and not 0 <= int(table.min()) <= int(table.max()) < cubes:
        raise ValueError(
            f"index: wanted cubes from 0 to {cubes - 1}, got {int(table.min())} to {int(table.max())}"
        )
    chosen = Blocks(table, size)
    if real is None:
        return chosen
    counts = as_sizes("real", real)
    if len(counts) != cubes or max(counts, default=0) > size:
        raise ValueError(f"real: wanted {cubes} numbers up to {size}, one for each cube, got {counts}")
    is_real = torch.arange(size, device="cpu") < torch.tensor(counts, device="cpu")[:, None]  # [cubes, size]
    return chosen & Padding.from_mask(is_real.reshape(1, -1))
