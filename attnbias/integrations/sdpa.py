"""``torch.nn.functional.scaled_dot_product_attention``, with a relation."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops import attention
from ..relations import Causal, Dense, Relation
from ..terms import PairBias, Term


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    relation: Relation | None = None,
) -> Tensor:
    """Torch's function with its own arguments, and one more: a relation.

    A boolean mask becomes ``Dense``, a float one ``PairBias``; either is a [Q, K] tensor, which a relation
    is not. What differs from torch: a query without a key gets zeros, and dropout draws other bits.

    Args:
        query: [..., H, Q, D].
        key: [..., Hk, K, D]; leading dimensions broadcast.
        value: [..., Hk, K, E].
        attn_mask: broadcasts to [..., H, Q, K]; True = may attend, or numbers to add to the scores.
        dropout_p: share of the weights to drop.
        is_causal: ``Causal()``, whose first query stands at the first key, as in torch.
        scale: factor of the products, ``D**-0.5`` if None.
        enable_gqa: allow fewer key heads than query heads.
        relation: which query attends to which key; with a mask, both must hold.

    Raises:
        ValueError: if both ``attn_mask`` and ``is_causal`` are given, or a shape does not fit.

    Example:
        >>> import torch
        >>> import attnbias as ab
        >>> q = k = v = torch.randn(2, 4, 100, 8)
        >>> scaled_dot_product_attention(q, k, v, relation=ab.Window(before=15)).shape
        torch.Size([2, 4, 100, 8])
    """
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask: wanted None with is_causal=True, got a mask")
    if min(x.dim() for x in (query, key, value)) < 2:
        raise ValueError(f"query: wanted [..., H, Q, D], got {list(query.shape)}")
    leading = torch.broadcast_shapes(*(x.shape[:-3] for x in (query, key, value)))
    if attn_mask is not None:
        leading = torch.broadcast_shapes(leading, attn_mask.shape[:-3])
    terms: list[Term] = []
    if is_causal:
        relation = Causal() if relation is None else relation & Causal()
    elif attn_mask is not None:
        q_len, k_len = query.shape[-2], key.shape[-2]
        spread = attn_mask.expand(*attn_mask.shape[:-2], q_len, k_len)
        mask = _four(spread, leading) if spread.dim() > 3 else spread
        if mask.dtype == torch.bool:
            relation = Dense(mask) if relation is None else relation & Dense(mask)
        else:
            terms.append(PairBias(mask))
    out = attention(
        _four(query, leading),
        _four(key, leading),
        _four(value, leading),
        relation,
        terms=terms,
        scale=scale,
        dropout_p=dropout_p,
        enable_gqa=enable_gqa,
    )
    return out.reshape(*leading, *query.shape[-3:-1], value.shape[-1])


def _four(x: Tensor, leading: torch.Size) -> Tensor:
    """[..., H, L, D] as [B, H, L, D]: all but the last three dimensions become one."""
    if x.dim() == 2:
        x = x[None]
    return x.expand(*leading, *x.shape[-3:]).reshape(-1, *x.shape[-3:])
