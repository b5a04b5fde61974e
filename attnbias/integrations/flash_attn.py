"""The two functions of flash-attn that most code calls, by their names and arguments there."""

from __future__ import annotations

from collections.abc import Sequence
from types import NoneType

import numpy as np
import torch
from torch import Tensor

from ..arguments import check_dense
from ..ops import attention
from ..relations import Causal, Documents, Empty, Relation, Window
from ..relations.relation import as_indices
from ..terms import ALiBi, Term


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
    """flash-attn's function: tensors [B, L, H, D], the last query at the last key.

    Args:
        q: [B, Q, H, D].
        k: [B, K, Hk, D].
        v: [B, K, Hk, E].
        dropout_p: share of the weights to drop.
        softmax_scale: factor of the products, ``D**-0.5`` if None.
        causal: no later keys.
        window_size: keys before and after the query's position; -1 or None is no limit.
        softcap: bound on the scores, 0 is off.
        alibi_slopes: [H] or [B, H].
        deterministic: accepted; it always is.
        return_attn_probs: must be False.
        relation: which must hold besides; in the same positions.

    Returns:
        [B, Q, H, E].

    Raises:
        NotImplementedError: for ``return_attn_probs``.
        TypeError: if an argument is of the wrong kind.
        ValueError: if a shape does not fit.

    Example:
        >>> import torch
        >>> q = k = v = torch.randn(2, 100, 4, 8)
        >>> flash_attn_func(q, k, v, causal=True, window_size=(15, 0)).shape
        torch.Size([2, 100, 4, 8])
    """
    _refuse_probs(return_attn_probs)
    _check_tensors("[B, L, H, D]", q, k, v)
    if relation is not None and not isinstance(relation, Relation):
        raise TypeError(f"relation: wanted a Relation or None, got {type(relation).__name__}")
    out = attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        _and(_window(causal, window_size), relation),
        terms=_alibi(alibi_slopes),
        scale=softmax_scale,
        softcap=softcap,
        dropout_p=dropout_p,
        q_start="end",
    )
    return out.transpose(1, 2)


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
    """flash-attn's function for sequences one after another, the last query of each at its last key.

    Args:
        q: [all queries, H, D].
        k: [all keys, Hk, D].
        v: [all keys, Hk, E].
        cu_seqlens_q: where each sequence's queries begin, and the end, [sequences + 1].
        cu_seqlens_k: the same for keys.
        max_seqlen_q: accepted; it is not needed.
        max_seqlen_k: accepted; it is not needed.
        dropout_p: share of the weights to drop.
        softmax_scale: factor of the products, ``D**-0.5`` if None.
        causal: no later keys.
        window_size: keys before and after the query's position; -1 or None is no limit.
        softcap: bound on the scores, 0 is off.
        alibi_slopes: [H]; sequences must then have as many keys as queries.
        deterministic: accepted; it always is.
        return_attn_probs: must be False.
        block_table: must be None.

    Returns:
        [all queries, H, E].

    Raises:
        NotImplementedError: for ``return_attn_probs``, ``block_table`` (paged keys), slopes by batch, and
            slopes with sequences of more keys than queries.
        TypeError: if an argument is of the wrong kind.
        ValueError: if a shape does not fit, or offsets do not end at the number of tokens.
    """
    _refuse_probs(return_attn_probs)
    _check_tensors("[tokens, H, D]", q, k, v)
    if block_table is not None:
        raise NotImplementedError("block_table: paged keys are not offered, wanted None")
    starts = _read_offsets("cu_seqlens_q", cu_seqlens_q, q), _read_offsets("cu_seqlens_k", cu_seqlens_k, k)
    if alibi_slopes is not None:
        check_dense("alibi_slopes", alibi_slopes)
        if alibi_slopes.dim() != 1:
            raise NotImplementedError(f"alibi_slopes: wanted [H], got {list(alibi_slopes.shape)}")
        if not torch.equal(*starts):
            raise NotImplementedError("alibi_slopes: wanted cu_seqlens_q equal to cu_seqlens_k")
    out = attention(
        q.transpose(0, 1),
        k.transpose(0, 1),
        v.transpose(0, 1),
        _in_sequences(_window(causal, window_size), *starts),
        terms=_alibi(alibi_slopes),
        scale=softmax_scale,
        softcap=softcap,
        dropout_p=dropout_p,
    )
    return out.transpose(0, 1)


def _check_tensors(wanted: str, *tensors: Tensor) -> None:
    for name, x in zip("qkv", tensors, strict=True):
        check_dense(name, x)
        if x.dim() != wanted.count(",") + 1:
            raise ValueError(f"{name}: wanted {wanted}, got {list(x.shape)}")


def _read_offsets(name: str, given: Tensor | Sequence[int], tokens: Tensor) -> Tensor:
    """Where sequences of tokens [n, H, D] begin, and the end, int64."""
    offsets = as_indices(name, given, (1,))
    last = int(offsets[-1]) if len(offsets) else None
    if last != len(tokens):
        raise ValueError(f"{name}: wanted offsets that end at {len(tokens)}, as many as tokens, got {last}")
    return offsets


def _window(causal: bool, window_size: tuple[int | None, int | None]) -> Relation | None:
    given = window_size if isinstance(window_size, (tuple, list)) else ()
    if len(given) != 2 or any(not isinstance(n, (int, NoneType)) or isinstance(n, bool) for n in given):
        raise TypeError(f"window_size: wanted (before, after), -1 for no limit, got {window_size!r}")
    before, after = (None if size is None or size < 0 else size for size in given)
    if causal:
        return Causal() if before is None else Window(before=before)
    return None if before is None and after is None else Window(before=before, after=after)


def _in_sequences(window: Relation | None, starts_q: Tensor, starts_k: Tensor) -> Relation:
    """A window inside each sequence, its last query at its last key."""
    if window is None:
        return Documents.from_cu_seqlens(starts_q, starts_k)
    ahead = (starts_k.diff() - starts_q.diff()).cpu().numpy()  # keys before the first query
    documents = Documents.from_cu_seqlens(starts_q, starts_k)
    found: Relation = Empty()
    for distance in np.unique(ahead).tolist():
        here = torch.as_tensor(ahead == distance)
        ids, key_ids = (torch.where(here[each], each, -1) for each in (documents.ids, documents._keys))
        found = found | Documents(ids, key_ids).each(window.shift(distance))
    return found


def _and(a: Relation | None, b: Relation | None) -> Relation | None:
    return b if a is None else a if b is None else a & b


def _alibi(slopes: Tensor | None) -> list[Term]:
    return [] if slopes is None else [ALiBi(slopes)]


def _refuse_probs(return_attn_probs: bool) -> None:
    if return_attn_probs:
        raise NotImplementedError(
            "return_attn_probs: wanted False; attnbias.attention_weights gives the weights"
        )
