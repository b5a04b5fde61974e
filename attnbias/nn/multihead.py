"""``torch.nn.MultiheadAttention`` with a relation, instead of its mask or combined with it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import and_
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..arguments import as_flag, check_dense
from ..attention import attention
from ..op.weights import attention_weights
from ..relations import Causal, Dense, Padding, Relation
from ..scores.terms import KeyBias, PairBias, Term
from .relational import check_relation, join_heads, split_heads


class MultiheadAttention(nn.MultiheadAttention):
    """A drop-in for ``torch.nn.MultiheadAttention`` that takes a relation.

    State dicts load both ways. It works inside torch's ``TransformerEncoderLayer`` and
    ``TransformerDecoderLayer``, and turns off their fast path, which knows no relation. Two things differ:
    weights are returned only on request, and a query without a key gives the bias of the output projection,
    not NaN.

    Args:
        embed_dim: features per token.
        num_heads: number of heads; divides ``embed_dim``.
        relation: which token attends to which; a call may override it. None relates all.
        **options: ``dropout, bias, kdim, vdim, batch_first, device, dtype`` of torch's layer.

    Raises:
        ValueError: for ``add_bias_kv`` and ``add_zero_attn``, which are not supported.

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
                raise ValueError(f"{name}: wanted False, the only choice here, got {options[name]!r}")
        super().__init__(embed_dim, num_heads, **options)
        self.relation = relation if relation is None else check_relation(relation, num_heads)

    def _reset_parameters(self) -> None:
        self._qkv_same_embed_dim = self.in_proj_weight is not None
        super()._reset_parameters()
        # Only torch's encoder layers read it; when True they compute with the weights and skip this layer.
        self._qkv_same_embed_dim = False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        relation: Relation | None = None,
        q_start: int | Literal["end"] = 0,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend with the arguments of torch's layer.

        Args:
            query: [Q, embed_dim], [Q, B, embed_dim], or with ``batch_first`` [B, Q, embed_dim].
            key: [K, kdim], with a batch like ``query``.
            value: [K, vdim], with a batch like ``query``.
            key_padding_mask: booleans [B, K] or [K], True at keys to leave out, as in torch; or numbers to
                add to the scores of each key.
            need_weights: also return the weights.
            attn_mask: booleans [Q, K] or [B * H, Q, K], True at pairs to leave out, as in torch; or numbers
                to add to the scores. It combines with the relation: both must allow a pair.
            average_attn_weights: average the returned weights over the heads.
            is_causal: ``attn_mask`` is causal: use ``Causal()`` instead of it.
            relation: replaces the layer's own.
            q_start: position of the first query among the keys.

        Returns:
            The output, shaped like ``query``, and the weights [B, Q, K] or [B, H, Q, K], or None.

        Raises:
            TypeError: if a tensor is sparse or nested, or a mask is neither boolean nor floating-point.
            ValueError: if a mask's shape does not fit.
        """
        for name, x in (("query", query), ("key", key), ("value", value)):
            if isinstance(x, Tensor) and x.is_nested:
                raise TypeError(
                    f"{name}: wanted a dense tensor, got a nested one; "
                    "make torch's TransformerEncoder with enable_nested_tensor=False"
                )
            check_dense(name, x)
        has_batch = query.dim() == 3
        if has_batch and not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        own = self.relation if relation is None else relation
        limits = [] if own is None else [own]
        terms: list[Term] = []
        if is_causal:
            limits.append(Causal())
        elif attn_mask is not None:
            if q_start != 0:
                raise ValueError(
                    f"q_start: wanted 0 with attn_mask, whose rows are the queries, got {q_start}"
                )
            self._add_mask(attn_mask, query, key, limits, terms)
        if key_padding_mask is not None:
            shape = (query.shape[0], key.shape[-2]) if has_batch else (key.shape[-2],)
            mask = _check_mask("key_padding_mask", key_padding_mask, [shape]).reshape(-1, shape[-1])
            if mask.dtype == torch.bool:
                limits.append(Padding.from_mask(~mask))
            else:
                terms.append(KeyBias(mask))
        used = reduce(and_, limits) if limits else None
        q, k, v = (split_heads(x, self.num_heads) for x in self._project(query, key, value))
        dropout_p = self.dropout if self.training else 0.0
        out = attention(q, k, v, used, terms=terms, dropout_p=dropout_p, q_start=q_start)
        out = self.out_proj(join_heads(out))
        if has_batch and not self.batch_first:
            out = out.transpose(0, 1)
        if not as_flag("need_weights", need_weights):
            return out, None
        weights = attention_weights(q, k, used, terms=terms, q_start=q_start)
        averaged = as_flag("average_attn_weights", average_attn_weights)
        return out, weights.mean(-3) if averaged else weights

    def _add_mask(
        self, mask: Tensor, query: Tensor, key: Tensor, limits: list[Relation], terms: list[Term]
    ) -> None:
        """Append a mask to the limits (booleans) or to the terms (numbers)."""
        pairs = (query.shape[-2], key.shape[-2])
        batch = query.shape[0] if query.dim() == 3 else 1
        mask = _check_mask("attn_mask", mask, [pairs, (batch * self.num_heads, *pairs)])
        mask = mask.view(batch, self.num_heads, *pairs) if mask.dim() == 3 else mask
        if mask.dtype == torch.bool:
            limits.append(Dense(~mask))
        else:
            terms.append(PairBias(mask))

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project to the queries, keys and values of all heads, [..., embed_dim]."""
        packed, bias = cast("Tensor | None", self.in_proj_weight), cast("Tensor | None", self.in_proj_bias)
        weights: Sequence[Tensor] = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        if packed is not None:
            weights = packed.chunk(3)
        biases: Sequence[Tensor | None] = (None, None, None) if bias is None else bias.chunk(3)
        q, k, v = map(functional.linear, (query, key, value), weights, biases)
        return q, k, v


def _check_mask(name: str, mask: Any, shapes: list[tuple[int, ...]]) -> Tensor:
    """Return a boolean or floating-point mask of one of the shapes, or raise."""
    if isinstance(mask, Relation):
        raise TypeError(f"{name}: wanted a tensor, got {mask!r}; pass it as relation=")
    check_dense(name, mask)
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"{name}: wanted booleans or floating-point numbers, got {mask.dtype}")
    if tuple(mask.shape) not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"{name}: wanted {wanted}, got {list(mask.shape)}")
    checked: Tensor = mask
    return checked
