"""Every recipe at the sizes of a model, and the mask that FlexAttention's users write for the same pairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import attnbias as ab
from attnbias import recipes

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
BLOCK = 64  # tokens in a block of BigBird, in a cube of video
SPAN = 1024  # tokens from one image to the next


@dataclass(frozen=True)
class Pattern:
    """A recipe at some lengths, and the same pairs as a mask_mod."""

    relation: ab.Relation
    queries: int
    keys: int
    mask_mod: MaskMod

    def build(self) -> ab.Layout:
        """Build the layout, whatever is in a cache."""
        return ab.Layout.build(self.relation, self.queries, self.keys)

    def check(self) -> None:
        """Fail unless layout, relation and mask_mod have the same pairs."""
        wanted = self.relation.dense(self.queries, self.keys)
        q, k = torch.arange(self.queries)[:, None], torch.arange(self.keys)
        for name, got in (
            ("layout", self.build().to_dense()),
            ("mask_mod", self.mask_mod(q * 0, q * 0, q, k).expand_as(wanted)),
        ):
            if not torch.equal(got, wanted):
                raise AssertionError(f"{self.relation!r}: the {name} has other pairs")


def shared_prefix(n: int) -> Pattern:
    """One prompt, 24 answers."""
    sizes = [n // 4, *[n // 32] * 24]
    text = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    relation = recipes.shared_prefix(sizes[0], sizes[1:])
    return Pattern(relation, n, n, lambda b, h, q, k: (k <= q) & ((text[q] == text[k]) | (k < n // 4)))


def prefix_lm(n: int) -> Pattern:
    return Pattern(recipes.prefix_lm(n // 4), n, n, lambda b, h, q, k: (k < n // 4) | (k <= q))


def streaming(n: int) -> Pattern:
    relation = recipes.streaming(sinks=4, window=1024)
    return Pattern(relation, n, n, lambda b, h, q, k: (k <= q) & ((k < 4) | (q - k < 1024)))


def longformer(n: int) -> Pattern:
    relation = recipes.longformer(window=512, tokens=[0])
    return Pattern(relation, n, n, lambda b, h, q, k: ((q - k).abs() <= 256) | (q == 0) | (k == 0))


def bigbird(n: int) -> Pattern:
    relation = recipes.bigbird(n, BLOCK)
    corner = torch.arange(0, n, BLOCK)
    chosen = relation.related(corner[:, None], corner)  # [blocks, blocks]
    return Pattern(relation, n, n, lambda b, h, q, k: chosen[q // BLOCK, k // BLOCK])


def dilated(n: int) -> Pattern:
    relation = recipes.dilated(window=256, dilation=16)
    return Pattern(relation, n, n, lambda b, h, q, k: ((q - k).abs() <= 256) & ((q - k) % 16 == 0))


def strided(n: int) -> Pattern:
    relation = recipes.sparse_transformer_strided(128)
    return Pattern(relation, n, n, lambda b, h, q, k: (k <= q) & ((q - k <= 128) | ((q - k) % 128 == 0)))


def fixed(n: int) -> Pattern:
    relation = recipes.sparse_transformer_fixed(n, stride=128, summary=8)
    return Pattern(relation, n, n, lambda b, h, q, k: (k <= q) & ((q // 128 == k // 128) | (k % 128 >= 120)))


def local_global(n: int) -> Pattern:
    """A local layer; a global one is ``Causal()``."""
    relation = recipes.local_global(layers=6, window=1024)[0]
    return Pattern(relation, n, n, lambda b, h, q, k: (k <= q) & (q - k < 1024))


def block_diffusion(n: int) -> Pattern:
    half, block = n // 2, 32

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        clean_q, clean_k, mine, other = q >= half, k >= half, q % half // block, k % half // block
        diagonal = (mine == other) & (clean_q == clean_k)
        return diagonal | ((mine > other) & clean_k & ~clean_q) | ((mine >= other) & clean_k & clean_q)

    return Pattern(recipes.block_diffusion(half, block), n, n, mask_mod)


def dflash(n: int) -> Pattern:
    """As many queries in blocks as tokens in the text."""
    text, block = n // 2, 16
    anchor = torch.randint(text, (text // block,), generator=torch.Generator().manual_seed(0))

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        own = (k >= text) & ((k - text) // block == q // block)
        return own | ((k < text) & (k < anchor[q // block]))

    return Pattern(
        recipes.dflash(text, anchor, block), len(anchor) * block, text + len(anchor) * block, mask_mod
    )


def eagle3(n: int) -> Pattern:
    text = n // 4

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) | ((k >= text) & ((k - q) % text == 0))

    return Pattern(recipes.eagle3(text, steps=3), text, 4 * text, mask_mod)


def multi_token_prediction(n: int) -> Pattern:
    text, masks = n // 4, 3
    place = torch.arange(text * (1 + masks))
    owner = torch.where(place < text, place, (place - text) // masks)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (((k < text) & (k <= owner[q])) | ((k >= text) & (owner[k] == owner[q])))

    return Pattern(recipes.multi_token_prediction(text, masks), len(place), len(place), mask_mod)


def transfusion(n: int) -> Pattern:
    """An image of 256 tokens in every 1,024."""
    place = torch.arange(n)
    image = torch.where((place % SPAN >= 100) & (place % SPAN < 356), place // SPAN, -1)
    spans = [(start + 100, start + 356) for start in range(0, n, SPAN)]
    relation = recipes.transfusion(n, spans)
    return Pattern(relation, n, n, lambda b, h, q, k: (k <= q) | ((image[q] == image[k]) & (image[q] >= 0)))


def flamingo(n: int) -> Pattern:
    """An image of 1,024 tokens for every 1,024 of text."""
    relation = recipes.flamingo(n, range(0, n, SPAN), SPAN)
    return Pattern(relation, n, n, lambda b, h, q, k: q // SPAN == k // SPAN)


def sliding_tile(n: int) -> Pattern:
    """A video of 64 x 64 tokens (short: 16 x 16); windows of 3 x 3 x 3 tiles of 4 x 8 x 8 tokens."""
    side = 64 if n >= 1 << 14 else 16
    times, tile = n // side**2, [4, 8, 8]
    counts = [times // 4, side // 8, side // 8]
    wide = [min(3, count) for count in counts]
    kernel = [w * t for w, t in zip(wide, tile, strict=True)]

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        mine, other, near = q // 256, k // 256, q >= 0
        for count, w in zip(reversed(counts), reversed(wide), strict=True):
            first = (mine % count - w // 2).clamp(0, count - w)
            near = near & (other % count >= first) & (other % count < first + w)
            mine, other = mine // count, other // count
        return near

    return Pattern(recipes.sliding_tile([times, side, side], tile, kernel), n, n, mask_mod)


def video_blocks(n: int) -> Pattern:
    """Each cube of 64 tokens sees 32 cubes."""
    cubes = n // BLOCK
    scores = torch.rand(cubes, cubes, generator=torch.Generator().manual_seed(0))
    index = scores.topk(min(32, cubes)).indices
    chosen = torch.zeros(cubes, cubes, dtype=torch.bool).scatter(1, index, True)
    relation = recipes.video_blocks(index, BLOCK)
    return Pattern(relation, n, n, lambda b, h, q, k: chosen[q // BLOCK, k // BLOCK])


PATTERNS: dict[str, Callable[[int], Pattern]] = {
    "shared_prefix": shared_prefix,
    "prefix_lm": prefix_lm,
    "streaming": streaming,
    "longformer": longformer,
    "bigbird": bigbird,
    "dilated": dilated,
    "sparse_transformer_strided": strided,
    "sparse_transformer_fixed": fixed,
    "local_global": local_global,
    "block_diffusion": block_diffusion,
    "dflash": dflash,
    "eagle3": eagle3,
    "multi_token_prediction": multi_token_prediction,
    "transfusion": transfusion,
    "flamingo": flamingo,
    "sliding_tile": sliding_tile,
    "video_blocks": video_blocks,
}
