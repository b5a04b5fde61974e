"""The two flash-attn functions that most code calls, with the same names and arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..arguments import check_dense
from ..attention import attention
from ..relations import Relation
from ..scores.terms import ALiBi
from .sequences import in_sequences, read_offsets, read_window


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    relation: Relation | None = None,
) -> Tensor:
    """Attend with flash-attn's arguments: tensors [B, L, H, D], the last query at the last key.

    Args:
        q: [B, Q, H, D].
        k: [B, K, Hk, D].
        v: [B, K, Hk, E].
        dropout_p: fraction of the weights to drop.
        softmax_scale: factor of the products, ``D**-0.5`` if None.
        causal: hide later keys.
        window_size: keys before and after the query's position; -1 or None means no limit.
        softcap: bound on the scores; 0 turns it off.
        alibi_slopes: [H] or [B, H].
        deterministic: accepted; results always are.
        return_attn_probs: must be False.
        relation: combined with ``causal`` and ``window_size``, in the same positions; all must allow a pair.

    Returns:
        [B, Q, H, E].

    Raises:
        NotImplementedError: for ``return_attn_probs``.
        TypeError: if an argument has the wrong type.
        ValueError: if a shape does not fit.

    Example:
        >>> import torch
        >>> q = k = v = torch.randn(2, 100, 4, 8)
        >>> flash_attn_func(q, k, v, causal=True, window_size=(15, 0)).shape
        torch.Size([2, 100, 4, 8])
    """
    _check("[B, L, H, D]", q, k, v, return_attn_probs)
    if relation is not None and not isinstance(relation, Relation):
        raise TypeError(f"relation: wanted a Relation or None, got {type(relation).__name__}")
    window = read_window(causal, window_size)
    allowed = relation if window is None else window if relation is None else window & relation
    numbers = {"scale": softmax_scale, "softcap": softcap, "dropout_p": dropout_p}
    return _attend(q, k, v, allowed, alibi_slopes, **numbers, q_start="end")


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | Sequence[int],
    cu_seqlens_k: Tensor | Sequence[int],
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    """Attend within packed sequences with flash-attn's arguments, the last query of each at its last key.

    Args:
        q: [all queries, H, D].
        k: [all keys, Hk, D].
        v: [all keys, Hk, E].
        cu_seqlens_q: [sequences + 1], where each sequence's queries begin, and the end of the last.
        cu_seqlens_k: the same for keys.
        max_seqlen_q: accepted and ignored.
        max_seqlen_k: accepted and ignored.
        alibi_slopes: [H]; every sequence must then have as many keys as queries.
        block_table: must be None. All other arguments are those of :func:`flash_attn_func`.

    Returns:
        [all queries, H, E].

    Raises:
        NotImplementedError: for ``return_attn_probs``, ``block_table`` (paged keys), slopes per batch, and
            slopes where a sequence has more keys than queries.
        TypeError: if an argument has the wrong type.
        ValueError: if a shape does not fit, or the offsets do not end at the number of tokens.
    """
    _check("[tokens, H, D]", q, k, v, return_attn_probs)
    if block_table is not None:
        raise NotImplementedError(
            f"block_table: wanted None, paged keys are not supported, got {type(block_table).__name__}"
        )
    starts = read_offsets("cu_seqlens_q", cu_seqlens_q, q), read_offsets("cu_seqlens_k", cu_seqlens_k, k)
    if alibi_slopes is not None:
        check_dense("alibi_slopes", alibi_slopes)
        if alibi_slopes.dim() != 1:
            raise NotImplementedError(f"alibi_slopes: wanted [H], got {list(alibi_slopes.shape)}")
        if not torch.equal(*starts):
            raise NotImplementedError("alibi_slopes: wanted cu_seqlens_q equal to cu_seqlens_k")
    allowed = in_sequences(read_window(causal, window_size), *starts)
    numbers = {"scale": softmax_scale, "softcap": softcap, "dropout_p": dropout_p}
    return _attend(q, k, v, allowed, alibi_slopes, **numbers)


def _check(wanted: str, q: Tensor, k: Tensor, v: Tensor, return_attn_probs: bool) -> None:
    if return_attn_probs:
        raise NotImplementedError(
            "return_attn_probs: wanted False, got True; attnbias.attention_weights returns the weights"
        )
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_dense(name, x)
        if x.dim() != wanted.count(",") + 1:
            raise ValueError(f"{name}: wanted {wanted}, got {list(x.shape)}")


def _attend(
    q: Tensor, k: Tensor, v: Tensor, relation: Relation | None, slopes: Tensor | None, **options: Any
) -> Tensor:
    """Attend with flash-attn's order of dimensions, [..., L, H, D]."""
    query, key, value = (x.transpose(-3, -2) for x in (q, k, v))
    terms = [] if slopes is None else [ALiBi(slopes)]
    out: Tensor = attention(query, key, value, relation, terms=terms, **options)
    return out.transpose(-3, -2)
