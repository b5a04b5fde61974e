"""Recipes for models that predict several tokens at once: block diffusion and drafts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..arguments import as_count
from ..relations import Causal, Dilated, Documents, Prefix, Relation
from .pieces import as_places, as_sizes, before, number


def block_diffusion(length: int, block: int) -> Relation:
    """Train block diffusion: noised blocks see themselves and the clean blocks before.

    The sequence is the noised copy and then the clean copy, 2 * length tokens. Clean tokens see the clean
    blocks up to their own. BD3-LM (Arriola et al., 2025, arXiv 2503.09573).

    Args:
        length: tokens of one copy.
        block: tokens in a block; the last one of a copy may be shorter.

    Example:
        >>> import attnbias as ab
        >>> print(ab.recipes.block_diffusion(length=4, block=2).picture(8, 8))
        ##......
        ##......
        ..####..
        ..####..
        ....##..
        ....##..
        ....####
        ....####
    """
    starts = range(0, as_count("length", length), as_count("block", block, 1))
    blocks = Documents.from_lengths([min(block, length - start) for start in starts] * 2)
    return blocks | (Causal() - Prefix(length)) | ((Causal() - blocks).shift(length) & Prefix(length).T)


def dflash(length: int | Sequence[int], anchors: Sequence[int] | Tensor, block: int) -> Relation:
    """Train a drafter on blocks that start at anchors of a text.

    There are ``block`` queries for each anchor. Keys are the text and then those blocks. A block sees the
    text before its anchor, in the anchor's document, and itself. DFlash (Chen et al., 2026, arXiv
    2602.06036).

    Args:
        length: tokens of the text, or of each of its documents.
        anchors: positions in the text, one for each block.
        block: tokens in a block.

    Example:
        >>> import attnbias as ab
        >>> print(ab.recipes.dflash(length=5, anchors=[1, 4], block=2).picture(4, 9))
        #....##..
        #....##..
        ####...##
        ####...##
    """
    document = number([as_count("length", length)] if isinstance(length, int) else as_sizes("length", length))
    places = torch.tensor(as_places("anchors", anchors, len(document)), dtype=torch.int64, device="cpu")
    stop = places.repeat_interleave(as_count("block", block, 1))  # [Q]
    mine = number([block] * len(places))
    texts = Documents(document[stop], torch.cat((document, torch.full_like(mine, -1))))
    blocks = Documents(mine, torch.cat((torch.full_like(document, -1), mine)))
    return (texts & before(stop)) | blocks


def eagle3(length: int | Sequence[int], steps: int) -> Relation:
    """Train a drafter on its own outputs for several steps.

    Each step adds ``length`` keys to those of the text, and a token sees, of each step, its own key. There
    are ``length`` queries and ``length * (1 + steps)`` keys. EAGLE-3's training-time test (Li et al., 2025,
    arXiv 2503.01840).

    Args:
        length: tokens of the text, or of each of its documents.
        steps: steps whose keys are behind those of the text.

    Example:
        >>> import attnbias as ab
        >>> print(ab.recipes.eagle3(length=3, steps=2).picture(3, 9))
        #..#..#..
        ##..#..#.
        ###..#..#
    """
    document = number([as_count("length", length)] if isinstance(length, int) else as_sizes("length", length))
    steps, tokens = as_count("steps", steps), max(len(document), 1)
    return Documents(document, document.repeat(1 + steps)) & (Causal() | Dilated(tokens, 0, after=steps))


def multi_token_prediction(length: int, masks: int) -> Relation:
    """Train the prediction of several tokens by mask tokens behind each token.

    The text comes first, then the mask tokens of its first token, those of the second, and so on: length *
    (1 + masks) tokens. Text is causal and sees no mask token. A mask token sees the text up to its token, and
    the mask tokens before it of the same token. As in Samragh et al., "Your LLM Knows the Future" (2025,
    arXiv 2507.11851), who put the mask tokens between those of the text; ``.permute`` does that.

    Args:
        length: tokens of the text.
        masks: mask tokens of each.

    Example:
        >>> import attnbias as ab
        >>> print(ab.recipes.multi_token_prediction(length=3, masks=2).picture(9, 9))
        #........
        ##.......
        ###......
        #..#.....
        #..##....
        ##...#...
        ##...##..
        ###....#.
        ###....##
    """
    sizes = [as_count("masks", masks)] * as_count("length", length)
    owner = torch.cat((number([1] * length), number(sizes)))
    return before(owner + 1) | (Documents.from_lengths([length, *sizes]) & Causal())
