"""``torch.nn.MultiheadAttention`` with a relation in place of its mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..arguments import as_flag
from ..ops import attention
from ..relations import Padding, Relation
from ..weights import attention_weights
from .relational import check_relation, join_heads, split_heads


class MultiheadAttention(nn.MultiheadAttention):
    """The parameters and results of ``torch.nn.MultiheadAttention``, over a relation.

    Its state dict loads there and theirs here. What differs: a relation stands where ``attn_mask`` did,
    weights come only when asked for, and a query without a key gives the output projection's bias, not NaN.

    Args:
        embed_dim: features of a token.
        num_heads: heads, which divide it.
        relation: which token attends to which, unless a call says otherwise; None relates all.
        **options: ``dropout, bias, kdim, vdim, batch_first, device, dtype`` of torch's layer.

    Raises:
        ValueError: for ``add_bias_kv`` and ``add_zero_attn``, which are not offered.

    Example:
        >>> import torch
        >>> import attnbias as ab
        >>> theirs = torch.nn.MultiheadAttention(32, 4, batch_first=True)
        >>> ours = MultiheadAttention(32, 4, batch_first=True)
        >>> ours.load_state_dict(theirs.state_dict())
        <All keys matched successfully>
        >>> x = torch.randn(2, 10, 32)
        >>> ours(x, x, x, relation=ab.Causal())[0].shape
        torch.Size([2, 10, 32])
    """

    def __init__(
        self, embed_dim: int, num_heads: int, *, relation: Relation | None = None, **options: Any
    ) -> None:
        for name in ("add_bias_kv", "add_zero_attn"):
            if options.get(name):
                raise ValueError(f"{name}: not offered here, wanted False, got {options[name]!r}")
        super().__init__(embed_dim, num_heads, **options)
        self.relation = relation if relation is None else check_relation(relation, num_heads)

    def forward(  # type: ignore[override]  # a relation, and fewer arguments
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        relation: Relation | None = None,
        average_attn_weights: bool = True,
        *,
        q_start: int | Literal["end"] = 0,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend as torch's layer does.

        Args:
            query: [Q, embed_dim], [Q, B, embed_dim], or with ``batch_first`` [B, Q, embed_dim].
            key: [K, kdim] or with a batch.
            value: [K, vdim] or with a batch.
            key_padding_mask: booleans [B, K] (or [K]), True at keys to leave out, as torch has it.
            need_weights: return weights, too.
            relation: in place of the layer's own.
            average_attn_weights: the mean over heads instead of each head's weights.
            q_start: position of the first query among the keys.

        Returns:
            out like ``query``, and the weights [B, Q, K] or [B, H, Q, K], or None.

        Raises:
            TypeError: if ``key_padding_mask`` is not boolean.
        """
        has_batch = query.dim() == 3
        if has_batch and not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        used = self.relation if relation is None else relation
        if key_padding_mask is not None:
            if key_padding_mask.dtype != torch.bool:
                raise TypeError(f"key_padding_mask: wanted booleans, got {key_padding_mask.dtype}")
            padding = Padding.from_mask(~key_padding_mask.view(-1, key.shape[-2]))
            used = padding if used is None else used & padding
        q, k, v = (split_heads(x, self.num_heads) for x in self._project(query, key, value))
        dropout_p = self.dropout if self.training else 0.0
        out = attention(q, k, v, used, dropout_p=dropout_p, q_start=q_start)
        out = self.out_proj(join_heads(out))
        if has_batch and not self.batch_first:
            out = out.transpose(0, 1)
        if not as_flag("need_weights", need_weights):
            return out, None
        weights = attention_weights(q, k, used, q_start=q_start)
        averaged = as_flag("average_attn_weights", average_attn_weights)
        return out, weights.mean(-3) if averaged else weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of all heads, side by side."""
        packed, bias = cast("Tensor | None", self.in_proj_weight), cast("Tensor | None", self.in_proj_bias)
        weights: Sequence[Tensor] = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        if packed is not None:
            weights = packed.chunk(3)
        biases: Sequence[Tensor | None] = (None, None, None) if bias is None else bias.chunk(3)
        q, k, v = map(functional.linear, (query, key, value), weights, biases)
        return q, k, v
