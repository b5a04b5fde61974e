"""Convert to and from FlexAttention's ``BlockMask``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ..layouts import Layout
from ..relations import Relation, Where


def to_block_mask(layout: Layout) -> BlockMask:
    """Convert a layout to a BlockMask with the same pairs; its ``mask_mod`` reads the layout's own bits.

    Args:
        layout: a layout without edges (``form="tiles"``).

    Example:
        >>> import attnbias as ab
        >>> to_block_mask(ab.Causal().layout(256, form="tiles")).shape
        (1, 1, 256, 256)
    """
    if layout.edges:
        raise ValueError(
            f"layout: wanted one without edges, got {layout.edges} edges; build it with form='tiles'"
        )
    tile, device = layout.tile, layout.device
    q_tiles, k_tiles = -(-layout.q_len // tile), -(-layout.k_len // tile)
    kind = torch.zeros(layout.groups, q_tiles, k_tiles, dtype=torch.int64, device=device)
    mark = torch.zeros_like(kind)
    for side in (0, 1):
        bounds = layout.q_ptr[..., side : side + 2].reshape(-1, 2).long()
        size = bounds[:, 1] - bounds[:, 0]
        row = torch.repeat_interleave(torch.arange(len(size), device=device), size)
        first = torch.repeat_interleave(bounds[:, 0] - (size.cumsum(0) - size), size)
        entry = torch.arange(len(row), device=device) + first
        column = layout.q_tile[entry].long()
        kind.view(-1, k_tiles)[row, column] = 2 - side
        mark.view(-1, k_tiles)[row, column] = layout.q_mark[entry].long()
    group = layout.group.long()
    patterns = layout.patterns.long()

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        g = group[b if group.shape[0] > 1 else 0, h if group.shape[1] > 1 else 0]
        what = kind[g, q // tile, k // tile]
        if not len(patterns):
            return what == 2
        word = patterns[mark[g, q // tile, k // tile], q % tile, k % tile // 32]
        related: Tensor = (what == 2) | ((what == 1) & ((word >> (k % 32)) & 1 > 0))
        return related

    def block_lists(wanted: int) -> tuple[Tensor, Tensor]:
        block = (kind == wanted)[group].int()  # [batch, heads, q_tiles, k_tiles]
        order = block.argsort(dim=-1, descending=True, stable=True)
        return block.sum(-1, dtype=torch.int32), order.to(torch.int32)

    return BlockMask.from_kv_blocks(
        *block_lists(1),
        *block_lists(2),
        BLOCK_SIZE=tile,
        mask_mod=mask_mod,
        seq_lengths=(layout.q_len, layout.k_len),
    )


def from_block_mask(block_mask: BlockMask) -> Relation:
    """Convert a BlockMask to a relation: its ``mask_mod`` within its blocks.

    Example:
        >>> import attnbias as ab
        >>> mask = to_block_mask(ab.Window(before=9).layout(256, form="tiles"))
        >>> from_block_mask(mask).count(256, 256) == ab.Window(before=9).count(256, 256)
        True
    """
    sizes = block_mask.BLOCK_SIZE
    blocks: Any = block_mask.to_dense().bool()  # [B, H, q_blocks, k_blocks]
    mask_mod = block_mask.mask_mod

    def inside(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        there = blocks.to(q.device)
        listed = there[
            b if there.shape[0] > 1 else 0,
            h if there.shape[1] > 1 else 0,
            (q // sizes[0]).clamp(0, there.shape[2] - 1),
            (k // sizes[1]).clamp(0, there.shape[3] - 1),
        ]
        related: Tensor = listed & mask_mod(b, h, q, k)
        return related

    return Where(inside)
