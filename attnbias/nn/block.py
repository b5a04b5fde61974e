"""A pre-norm transformer block."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class Block(nn.Module):
    """Attention, then a two-layer network, each with a residual: ``x + f(norm(x))``.

    Args:
        attention: a layer that maps tokens to tokens, such as ``MaskedAttention(d_model, heads)``.
        d_model: features per token.
        hidden: width of the network, ``4 * d_model`` if None.
        dropout: fraction of each residual branch to drop in training.

    Example:
        >>> import torch
        >>> from attnbias.nn import Block, MaskedAttention
        >>> Block(MaskedAttention(32, heads=4), 32)(torch.randn(2, 10, 32)).shape
        torch.Size([2, 10, 32])
    """

    def __init__(
        self, attention: nn.Module, d_model: int, hidden: int | None = None, dropout: float = 0.0
    ) -> None:
        super().__init__()
        hidden = 4 * d_model if hidden is None else hidden
        self.attention = attention
        self.attention_norm = nn.LayerNorm(d_model)
        self.network_norm = nn.LayerNorm(d_model)
        self.network = nn.Sequential(nn.Linear(d_model, hidden), nn.GELU(), nn.Linear(hidden, d_model))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, *given: Any, **options: Any) -> Tensor:
        """Map tokens [n, d_model] or [B, n, d_model]; further arguments go to the attention."""
        x = x + self.dropout(self.attention(self.attention_norm(x), *given, **options))
        x = x + self.dropout(self.network(self.network_norm(x)))
        return x
