"""Recipes for one sequence of tokens: prompts, windows, global tokens, strides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..arguments import as_count
from ..relations import (
    Blocks,
    Causal,
    Chunks,
    Columns,
    Dilated,
    Documents,
    Global,
    Prefix,
    Relation,
    Window,
)
from .pieces import as_sizes, number


def shared_prefix(prefix: int | Sequence[int], lengths: Sequence[int] | Sequence[Sequence[int]]) -> Relation:
    """Attend from several answers to one prompt, which is stored once.

    The prompt comes first, then its answers: each is causal, sees the prompt, and sees no other answer. For
    several prompts, each with its answers behind it, give a list and a list of lists. As in Prefix Grouper
    (Liu et al., 2025, arXiv 2506.05433), for the samples of one prompt in GRPO.

    Args:
        prefix: tokens of the prompt, or of each prompt.
        lengths: tokens of each answer, or of each answer to each prompt.

    Example:
        >>> import attnbias as ab
        >>> print(ab.recipes.shared_prefix(2, [2, 3]).picture(7, 7))
        #......
        ##.....
        ###....
        ####...
        ##..#..
        ##..##.
        ##..###
    """
    prompts = [prefix] if isinstance(prefix, int) else as_sizes("prefix", prefix)
    answers = [lengths] if isinstance(prefix, int) else list(lengths)
    if len(answers) != len(prompts):
        raise ValueError(f"lengths: wanted a list for each of {len(prompts)} prompts, got {len(answers)}")
    groups = [
        [as_count("prefix", prompt), *as_sizes("lengths", each)]
        for prompt, each in zip(prompts, answers, strict=True)
    ]
    group = number([sum(sizes) for sizes in groups])
    is_prompt = torch.cat([number(sizes) == 0 for sizes in groups]) if groups else group > 0
    texts = Documents.from_lengths([size for sizes in groups for size in sizes])
    return (texts | Documents(group, torch.where(is_prompt, group, -1))) & Causal()


def prefix_lm(length: int | Tensor) -> Relation:
    """Attend in both directions inside a prompt, and causally after it.

    The prefix language model of T5 (Raffel et al., 2019, arXiv 1910.10683).

    Args:
        length: tokens of the prompt, or one number per batch [B].

    Example:
        >>> import attnbias as ab
        >>> print(ab.recipes.prefix_lm(3).picture(5, 5))
        ###..
        ###..
        ###..
        ####.
        #####
    """
    return Prefix(length) | Causal()


def streaming(sinks: int, window: int) -> Relation:
    """Attend to the first tokens and to the latest ones.

    The cache of StreamingLLM (Xiao et al., 2023, arXiv 2309.17453), which also counts positions inside the
    cache: rotate queries and keys by those.

    Args:
        sinks: first tokens that stay; the paper keeps 4.
        window: latest tokens, the query's own included.

    Example:
        >>> import attnbias as ab
        >>> print(ab.recipes.streaming(sinks=1, window=2).picture(5, 5))
        #....
        ##...
        ###..
        #.##.
        #..##
    """
    return (Prefix(as_count("sinks", sinks)) | Window(before=as_count("window", window, 1) - 1)) & Causal()


def longformer(window: int, tokens: Iterable[int] = (), dilation: int = 1) -> Relation:
    """Attend to near tokens on both sides, and to and from a few global tokens.

    Longformer (Beltagy et al., 2020, arXiv 2004.05150).

    Args:
        window: tokens around the query, half of them on each side; even.
        tokens: positions that see all and are seen by all.
        dilation: step between the tokens of the window.

    Example:
        >>> import attnbias as ab
        >>> print(ab.recipes.longformer(window=2, tokens=[0]).picture(6, 6))
        ######
        ###...
        ####..
        #.###.
        #..###
        #...##
    """
    if as_count("window", window) % 2:
        raise ValueError(f"window: wanted an even number, half of it on each side, got {window}")
    return Dilated(dilation, window // 2, window // 2) | Global(tokens)


def bigbird(
    length: int, block: int = 64, window: int = 3, first: int = 1, random: int = 3, seed: int = 0
) -> Relation:
    """Attend by blocks: to near ones, to and from the first ones, and to some drawn at random.

    BigBird (Zaheer et al., 2020, arXiv 2007.14062). The random blocks of a query block are distinct, and
    are neither near nor first; where fewer are left, it has them all.

    Args:
        length: number of tokens; the last block may be shorter.
        block: tokens in a block.
        window: near blocks, the query's own in the middle; odd.
        first: blocks at the start that see all and are seen by all.
        random: random blocks of each block of queries.
        seed: another seed, another draw.

    Example:
        >>> import attnbias as ab
        >>> print(ab.recipes.bigbird(8, block=1, random=1).picture(8, 8))
        ########
        ###....#
        ####.#..
        #.###..#
        #..###.#
        #...####
        #..#.###
        #...#.##
    """
    reach, blocks = (
        as_count("window", window, 1) // 2,
        -(-as_count("length", length) // as_count("block", block, 1)),
    )
    if window % 2 == 0:
        raise ValueError(f"window: wanted an odd number of blocks, got {window}")
    place = torch.arange(blocks, device="cpu")
    near = place[:, None] + torch.arange(-reach, reach + 1, device="cpu")  # [blocks, window]
    near = torch.where(near < blocks, near, -1).clamp(min=-1)
    draw = torch.rand(blocks, blocks, generator=torch.Generator().manual_seed(seed), device="cpu")
    draw[((place[:, None] - place).abs() <= reach) | (place < as_count("first", first))] = -1.0
    top = draw.topk(min(as_count("random", random), blocks))
    chosen = torch.cat((near, torch.where(top.values < 0, -1, top.indices)), 1)
    return Blocks(chosen, block) | Global(range(min(first * block, length)))


def dilated(window: int, dilation: int) -> Relation:
    """Attend to every ``dilation``-th token of a window on both sides.

    Args:
        window: how far the window reaches on each side, in tokens.
        dilation: step between related tokens.

    Example:
        >>> import attnbias as ab
        >>> print(ab.recipes.dilated(window=4, dilation=2).picture(6, 6))
        #.#.#.
        .#.#.#
        #.#.#.
        .#.#.#
        #.#.#.
        .#.#.#
    """
    steps = as_count("window", window) // as_count("dilation", dilation, 1)
    return Dilated(dilation, steps, steps)


def sparse_transformer_strided(stride: int) -> Relation:
    """Attend to the last ``stride`` tokens, and to every ``stride``-th one before.

    The strided pattern of Sparse Transformers (Child et al., 2019, arXiv 1904.10509), both heads in one; as
    heads of their own they are ``PerHead([Window(before=stride), Columns(stride)])``.

    Args:
        stride: tokens of the window before the query, and distance between columns.

    Example:
        >>> import attnbias as ab
        >>> print(ab.recipes.sparse_transformer_strided(2).picture(7, 7))
        #......
        ##.....
        ###....
        .###...
        #.###..
        .#.###.
        #.#.###
    """
    return Window(before=as_count("stride", stride, 1)) | Columns(stride)


def sparse_transformer_fixed(length: int, stride: int, summary: int = 1) -> Relation:
    """Attend inside a chunk, and to the last tokens of every earlier chunk.

    The fixed pattern of Sparse Transformers (Child et al., 2019, arXiv 1904.10509), both heads in one.

    Args:
        length: number of tokens.
        stride: tokens in a chunk.
        summary: last tokens of a chunk that all later ones see, c in the paper.

    Example:
        >>> import attnbias as ab
        >>> print(ab.recipes.sparse_transformer_fixed(7, stride=3).picture(7, 7))
        #......
        ##.....
        ###....
        ..##...
        ..###..
        ..####.
        ..#..##
    """
    place = torch.arange(as_count("length", length), device="cpu") % as_count("stride", stride, 1)
    if as_count("summary", summary) > stride:
        raise ValueError(f"summary: wanted at most the {stride} tokens of a chunk, got {summary}")
    seen = torch.where(place >= stride - summary, 0, -1)
    return (Chunks(stride) | Documents(torch.zeros_like(seen), seen)) & Causal()


def local_global(layers: int, window: int, every: int = 6) -> list[Relation]:
    """Return a relation for each layer: windows, and every so often all earlier tokens.

    Gemma 2 (2024, arXiv 2408.00118) has ``every=2``, Gemma 3 (2025, arXiv 2503.19786) ``every=6``.

    Args:
        layers: number of layers.
        window: tokens that a local layer sees, the query's own included.
        every: the last of so many layers is global.

    Example:
        >>> import attnbias as ab
        >>> ab.recipes.local_global(layers=4, window=512, every=2)
        [Window(before=511), Causal(), Window(before=511), Causal()]
    """
    local, every = Window(before=as_count("window", window, 1) - 1), as_count("every", every, 1)
    return [local if (layer + 1) % every else Causal() for layer in range(as_count("layers", layers))]
