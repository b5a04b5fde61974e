"""``torch.nn.functional.scaled_dot_product_attention`` with a relation."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..arguments import check_dense
from ..attention import attention
from ..relations import Causal, Dense, Relation
from ..scores.terms import PairBias, Term


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
    """Attend with the arguments of torch's function, plus a relation.

    A boolean mask becomes ``Dense`` and a float mask ``PairBias``; both hold [Q, K] tensors, a relation does
    not. Three things differ from torch: a query without a key gets zeros, dropout draws other bits, and a
    mask combines with ``is_causal`` for all shapes (torch refuses some).

    Args:
        query: [..., H, Q, D].
        key: [..., H, K, D]; all but the last two dimensions broadcast.
        value: [..., H, K, E].
        attn_mask: broadcasts to [..., H, Q, K]; True means may attend, numbers are added to the scores.
        dropout_p: fraction of the weights to drop.
        is_causal: apply ``Causal()`` with the first query at the first key, as in torch.
        scale: factor of the products, ``D**-0.5`` if None.
        enable_gqa: let key and value have fewer heads, a divisor of the query's.
        relation: which query attends to which key; with a mask, both must allow a pair.

    Raises:
        ValueError: if a shape does not fit.
        TypeError: if an argument is not a dense tensor, or the mask is neither boolean, float32 nor of the
            query's dtype.

    Example:
        >>> import torch
        >>> import attnbias as ab
        >>> q = k = v = torch.randn(2, 4, 100, 8)
        >>> scaled_dot_product_attention(q, k, v, relation=ab.Window(before=15)).shape
        torch.Size([2, 4, 100, 8])
    """
    least = 3 if enable_gqa else 2
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_dense(name, x)
        if x.dim() < least:
            wanted = "[..., H, L, D] with enable_gqa" if enable_gqa else "[..., L, D]"
            raise ValueError(f"{name}: wanted {wanted}, got {list(x.shape)}")
    rank = max(query.dim(), key.dim(), value.dim())
    query, key, value = (x if x.dim() > 2 else x[None] for x in (query, key, value))
    leading = _broadcast("batches", [x.shape[:-3] for x in (query, key, value)])
    query, key, value = _match_heads(query, key, value, enable_gqa)
    lead = (*leading, query.shape[-3]) if rank > 2 else ()
    terms: list[Term] = []
    if is_causal:
        relation = Causal() if relation is None else relation & Causal()
    if attn_mask is not None:
        shape = (*lead, query.shape[-2], key.shape[-2])
        mask = _check_mask(attn_mask, shape, query.dtype)
        mask = _four(mask, leading) if mask.dim() > 3 else mask
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
    )
    return out.reshape(*lead, query.shape[-2], value.shape[-1])


def _broadcast(what: str, shapes: list[torch.Size]) -> torch.Size:
    try:
        shape: torch.Size = torch.broadcast_shapes(*shapes)
    except RuntimeError:
        got = ", ".join(str(list(shape)) for shape in shapes)
        hint = "; enable_gqa=True lets heads share keys" if what == "heads" else ""
        raise ValueError(
            f"query: wanted {what} that broadcast with those of key and value, got {got}{hint}"
        ) from None
    return shape


def _match_heads(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Expand query, key and value [..., H, L, D] to head counts that ``attention`` takes."""
    if enable_gqa:
        heads = query.shape[-3]
        for name, x in (("key", key), ("value", value)):
            if x.shape[-3] != heads and (x.shape[-3] == 0 or heads % x.shape[-3]):
                raise ValueError(
                    f"{name}: wanted a head count that divides the query's {heads}, got {x.shape[-3]}"
                )
    else:
        heads = _broadcast("heads", [x.shape[-3:-2] for x in (query, key, value)])[0]
        query = query.expand(*query.shape[:-3], heads, -1, -1)
    if key.shape[-3] == value.shape[-3]:  # attention shares heads without a copy
        return query, key, value
    key, value = (x.repeat_interleave(heads // max(x.shape[-3], 1), -3) for x in (key, value))
    return query, key, value


def _check_mask(mask: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Check the mask, and expand its last two dimensions to [Q, K]."""
    check_dense("attn_mask", mask)
    if mask.dtype not in (torch.bool, torch.float32, dtype):
        raise TypeError(f"attn_mask: wanted booleans, float32 or the query's {dtype}, got {mask.dtype}")
    wanted = shape[len(shape) - mask.dim() :]
    fits = all(mine in (1, size) for mine, size in zip(mask.shape, wanted, strict=False))
    if not 2 <= mask.dim() <= len(shape) or not fits:
        raise ValueError(
            f"attn_mask: wanted a shape that broadcasts to {list(shape)}, got {list(mask.shape)}"
        )
    return mask.expand(*mask.shape[:-2], *shape[-2:])


def _four(x: Tensor, leading: torch.Size) -> Tensor:
    """Flatten [..., H, L, D] to [B, H, L, D]."""
    return x.expand(*leading, *x.shape[-3:]).reshape(math.prod(leading), *x.shape[-3:])
