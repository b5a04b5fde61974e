"""A module to stand where torchtitan's models have their inner attention; torchtitan is not imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from ..arguments import check_dense
from ..attention import attention
from ..relations import Causal, Documents, Relation
from .flex import from_block_mask

# What the latest call was given, and the relation made of it: the layers of a model share one layout. It is
# replaced whole, because other threads may call, too.
_latest: dict[str, tuple[Any, ...]] = {}


class InnerAttention(nn.Module):
    """Attention with the arguments and shapes of torchtitan's ``inner_attention``.

    It has no parameters. Set it where a layer has its own: ``layer.attention.inner_attention = ...``.

    Args:
        relation: the model's, in positions of a row; None relates every pair.

    Example:
        >>> import torch
        >>> import attnbias as ab
        >>> inner = InnerAttention(ab.Window(before=255))
        >>> q, k = torch.randn(2, 64, 8, 16), torch.randn(2, 64, 4, 16)
        >>> inner(q, k, k, enable_gqa=True).shape
        torch.Size([2, 64, 8, 16])
    """

    def __init__(self, relation: Relation | None = Causal()) -> None:  # noqa: B008 - a value
        super().__init__()
        if not isinstance(relation, Relation | None):
            raise TypeError(f"relation: wanted a Relation or None, got {type(relation).__name__}")
        self.relation = relation

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        attention_masks: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Attend; rows are [B, L, H, D], or all tokens in one, [T, H, D].

        Args:
            q: queries.
            k: keys, of as many tokens.
            v: values.
            attention_masks: None; a Relation; torchtitan's ``VarlenMetadata``, whose sequences follow one
                another through all rows; or a BlockMask. The module's relation must allow a pair, too; one
                that is not stationary, or differs by batch, wants sequences that end with their row.
                The relation made of them is kept for the next layers: pass new masks, not changed ones.
            scale: factor of the products, ``D**-0.5`` if None.
            enable_gqa: allow fewer key heads than query heads.
            out_transform: called with the result and lse, without its last dimension.

        Returns:
            [B, L, H, E] or [T, H, E], or what ``out_transform`` returns.

        Raises:
            TypeError: for other masks.
            ValueError: if a shape or a sequence does not fit.
        """
        for name, x in (("q", q), ("k", k), ("v", v)):
            check_dense(name, x)
            if x.dim() not in (3, 4) or x.shape[:-2] != q.shape[:-2]:
                wanted = (
                    "[B, L, H, D] or [T, H, D]" if name == "q" else f"tokens {list(q.shape[:-2])} as in q"
                )
                raise ValueError(f"{name}: wanted {wanted}, got {list(x.shape)}")
        rows = q.shape[:-2]
        own = self.relation
        by_row = len(rows) == 2 and not (own is None or (own.stationary and own.batch_size in (None, 1)))
        if hasattr(attention_masks, "cu_seq_q") and not by_row:
            q, k, v = (x.flatten(0, -3) for x in (q, k, v))
        relation = self._read(attention_masks, rows if by_row else None)
        q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
        out, lse = attention(q, k, v, relation, scale=scale, enable_gqa=enable_gqa, return_lse=True)
        heads = out.shape[-3]
        out = out.transpose(-3, -2).reshape(*rows, heads, -1)
        return out if out_transform is None else out_transform(out, lse.mT.reshape(*rows, heads))

    def _read(self, masks: Any, rows: torch.Size | None) -> Relation | None:
        """Return the relation of a call, made once for the layers that share masks and relation.

        Sequences are cut into rows [B, L] if they are given, where the relation counts its positions.
        """
        if masks is None:
            return self.relation
        latest = _latest.get("call")
        if latest is None or latest[0] is not masks or latest[1] is not self.relation or latest[2] != rows:
            found = _to_relation(masks)
            if rows is not None and isinstance(found, Documents) and hasattr(masks, "cu_seq_q"):
                found = _in_rows(found, rows)
            found = found if self.relation is None else found & self.relation
            latest = _latest["call"] = masks, self.relation, rows, found
        relation: Relation = latest[3]
        return relation


def _to_relation(masks: Any) -> Relation:
    if isinstance(masks, Relation):
        return masks
    if isinstance(masks, BlockMask):
        return from_block_mask(masks)
    if hasattr(masks, "cu_seq_q"):
        return Documents.from_cu_seqlens(masks.cu_seq_q, masks.cu_seq_k)
    wanted = "wanted None, a Relation, VarlenMetadata or a BlockMask"
    raise TypeError(f"attention_masks: {wanted}, got {type(masks).__name__}")


def _in_rows(sequences: Documents, rows: torch.Size) -> Documents:
    """Return sequences among all tokens as sequences in each of the rows [B, L]."""
    if sequences.lengths != (rows.numel(),) * 2:
        raise ValueError(f"attention_masks: wanted offsets that end at {rows.numel()}, got {sequences!r}")
    of_keys = sequences.ids if sequences.key_ids is None else sequences.key_ids
    queries, keys = (x.view(rows) for x in (sequences.ids, of_keys))
    if any(bool((ids[1:, 0] == ids[:-1, -1]).any()) for ids in (queries, keys)):
        wanted = "wanted sequences that end with their row, where the relation counts its positions"
        raise ValueError(f"attention_masks: {wanted}, got one that goes on in the next")
    return Documents(queries, keys)
