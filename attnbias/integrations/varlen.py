"""``torch.nn.attention.varlen.varlen_attn`` with the same arguments, on any device, with gradients."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..arguments import check_dense
from ..attention import attention
from .sequences import in_sequences, read_offsets, read_window


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend within packed sequences with torch's arguments, the last query of each at its last key.

    Args:
        query: [all queries, H, D].
        key: [all keys, Hk, D].
        value: [all keys, Hk, E].
        cu_seq_q: [sequences + 1], where each sequence's queries begin, and the end of the last.
        cu_seq_k: the same for keys.
        max_q: accepted and ignored.
        max_k: accepted and ignored.
        return_aux: torch's ``AuxRequest``; ``lse=True`` asks for the logarithm of each softmax sum, too.
        scale: factor of the products, ``D**-0.5`` if None.
        window_size: keys before and after the query's position; -1 means no limit, (-1, 0) is causal.
        enable_gqa: allow fewer key heads than query heads.
        seqused_k: must be None.
        block_table: must be None.
        num_splits: accepted and ignored; results never depend on the batch around a sequence.

    Returns:
        [all queries, H, E]; with ``return_aux`` a tuple of it and lse [H, all queries], the shape that torch
        returns. A query without a key has 0 and -inf.

    Raises:
        NotImplementedError: for ``seqused_k`` and ``block_table`` (paged keys).
        TypeError: if an argument has the wrong type.
        ValueError: if a shape does not fit, or the offsets do not end at the number of tokens.

    Example:
        >>> import torch
        >>> q = k = v = torch.randn(8, 4, 16)
        >>> starts = torch.tensor([0, 3, 8])
        >>> varlen_attn(q, k, v, starts, starts, 5, 5, window_size=(-1, 0)).shape
        torch.Size([8, 4, 16])
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_dense(name, x)
        if x.dim() != 3:
            raise ValueError(f"{name}: wanted [tokens, H, D], got {list(x.shape)}")
    for name, given in (("seqused_k", seqused_k), ("block_table", block_table)):
        if given is not None:
            kind = type(given).__name__
            raise NotImplementedError(f"{name}: wanted None, paged keys are not supported, got {kind}")
    starts = read_offsets("cu_seq_q", cu_seq_q, query), read_offsets("cu_seq_k", cu_seq_k, key)
    if len(starts[1]) != len(starts[0]):
        raise ValueError(f"cu_seq_k: wanted {len(starts[0])} offsets as in cu_seq_q, got {len(starts[1])}")
    relation = in_sequences(read_window(False, window_size), *starts)
    q, k, v = (x.transpose(0, 1) for x in (query, key, value))
    out, lse = attention(q, k, v, relation, scale=scale, enable_gqa=enable_gqa, return_lse=True)
    out = out.transpose(0, 1)
    return (out, lse) if return_aux is not None and return_aux.lse else out
