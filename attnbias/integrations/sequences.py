"""Sequences packed into one, as flash-attn and ``varlen_attn`` describe them: offsets and a window."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import NoneType

import torch
from torch import Tensor

from ..arguments import as_indices
from ..relations import Causal, Documents, Ranges, Relation, Window
from ..relations.patterns import window_of

Band = Causal | Window


def read_offsets(name: str, given: Tensor | Sequence[int], tokens: Tensor) -> Tensor:
    """Return where the sequences among tokens [n, H, D] begin, and the end, int64."""
    offsets = as_indices(name, given, (1,))
    if len(offsets) > 1 and (int(offsets[0]) != 0 or int(offsets.diff().min()) < 0):
        raise ValueError(f"{name}: wanted offsets that rise from 0, got {offsets.tolist()}")
    last = int(offsets[-1]) if len(offsets) else None
    if last != len(tokens):
        raise ValueError(
            f"{name}: wanted offsets that end at the number of tokens, {len(tokens)}, got {last}"
        )
    return offsets


def read_window(causal: bool, window_size: tuple[int | None, int | None]) -> Band | None:
    """Return the relation of flash-attn's (before, after), of which -1 and None have no limit; None = all."""
    given = window_size if isinstance(window_size, (tuple, list)) else ()
    if len(given) != 2 or any(not isinstance(n, (int, NoneType)) or isinstance(n, bool) for n in given):
        raise TypeError(f"window_size: wanted (before, after), -1 for no limit, got {window_size!r}")
    before, after = (math.inf if size is None or size < 0 else size for size in given)
    after = 0 if causal else after
    if before == after == math.inf:
        return None
    found = window_of(before, after)
    assert isinstance(found, Band)
    return found


def in_sequences(window: Band | None, starts_q: Tensor, starts_k: Tensor) -> Relation:
    """Restrict a window, None for all pairs, to each sequence, its last query at its last key.

    The result has one range of keys per query, however many sequences of different lengths there are.
    """
    documents = Documents.from_cu_seqlens(starts_q, starts_k)
    if window is None:
        return documents
    before, after = window.band
    number = documents.ids  # [Q]
    starts_q, starts_k = (x.to(number.device) for x in (starts_q, starts_k))
    first, last = starts_k[:-1][number], starts_k[1:][number]
    place = torch.arange(len(number), device=number.device) - starts_q[1:][number] + last
    start = first if before == math.inf else torch.maximum(first, place - int(before))
    stop = last if after == math.inf else torch.minimum(last, place + int(after) + 1)
    return Ranges(start, torch.maximum(start, stop))
