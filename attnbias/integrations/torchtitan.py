"""A module to stand where torchtitan's models have their inner attention; torchtitan is not imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from ..arguments import check_dense
from ..attention import attention
from ..relations import Causal, Documents, Relation
from .flex import from_block_mask

# The masks of the latest call, and the relation made of them: the layers of a model share one layout.
_latest: dict[str, tuple[Any, Relation | None, Relation]] = {}


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
                another through all rows; or a BlockMask. The module's relation must allow a pair, too.
                The relation made of them is kept for the next layers: pass new masks, not changed ones.
            scale: factor of the products, ``D**-0.5`` if None.
            enable_gqa: allow fewer key heads than query heads.
            out_transform: called with the result and lse, without its last dimension.

        Returns:
            [B, L, H, E] or [T, H, E], or what ``out_transform`` returns.

        Raises:
            TypeError: for other masks.
            ValueError: if a shape does not fit.
        """
        for name, x in (("q", q), ("k", k), ("v", v)):
            check_dense(name, x)
            if x.dim() not in (3, 4) or x.shape[:-2] != q.shape[:-2]:
                wanted = (
                    "[B, L, H, D] or [T, H, D]" if name == "q" else f"tokens {list(q.shape[:-2])} as in q"
                )
                raise ValueError(f"{name}: wanted {wanted}, got {list(x.shape)}")
        rows = q.shape[:-2]
        if hasattr(attention_masks, "cu_seq_q"):
            q, k, v = (x.flatten(0, -3) for x in (q, k, v))
        relation = self._read(attention_masks)
        q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
        out, lse = attention(q, k, v, relation, scale=scale, enable_gqa=enable_gqa, return_lse=True)
        heads = out.shape[-3]
        out = out.transpose(-3, -2).reshape(*rows, heads, -1)
        return out if out_transform is None else out_transform(out, lse.mT.reshape(*rows, heads))

    def _read(self, masks: Any) -> Relation | None:
        """Return the relation of a call, made once for the layers that share masks and relation."""
        if masks is None:
            return self.relation
        of_masks, own, relation = _latest.get("call", (None, None, None))
        if of_masks is not masks or own is not self.relation:
            found = _to_relation(masks)
            relation = found if self.relation is None else found & self.relation
            _latest["call"] = masks, self.relation, relation  # at once: another thread may have other masks
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
