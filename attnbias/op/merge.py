"""Attention over parts of the keys, joined."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Join attentions of the same queries over disjoint sets of keys into that over all of them.

    Args:
        outs: results of ``attention``, [B, H, Q, E] each.
        lses: their log-sum-exps, [B, H, Q] each.

    Returns:
        out [B, H, Q, E], in the dtype of the first, and lse [B, H, Q]; both differentiable.

    Raises:
        ValueError: if there are none, or not as many of one as of the other.

    Example:
        >>> import torch
        >>> import attnbias as ab
        >>> q, k, v = torch.randn(3, 1, 1, 6, 4)
        >>> near, far = ab.Window(before=1), ab.Causal() - ab.Window(before=1)
        >>> parts = [ab.attention(q, k, v, rel, return_lse=True) for rel in (near, far)]
        >>> out, lse = ab.merge(*zip(*parts))
        >>> torch.testing.assert_close(out, ab.attention(q, k, v, ab.Causal()))
    """
    if not outs or len(outs) != len(lses):
        raise ValueError(f"lses: wanted as many as outs and at least one, got {len(outs)} and {len(lses)}")
    stacked = torch.stack(tuple(lses))  # [n, B, H, Q]
    top = stacked.detach().amax(0)
    top = top.masked_fill(top == -torch.inf, 0)  # a row without any key: exp(-inf - 0) = 0
    weights = torch.exp(stacked - top)
    total = weights.sum(0)
    empty = total == 0
    total = total.masked_fill(empty, 1)
    shares = weights / total
    out = sum(share[..., None] * out.to(share.dtype) for share, out in zip(shares, outs, strict=True))
    assert isinstance(out, Tensor)
    return out.to(outs[0].dtype), (top + total.log()).masked_fill(empty, -torch.inf)
