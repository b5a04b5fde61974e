"""FlashAttention 2, 3 and 4: full, causal, windows, and documents packed end to end.

They take [B, N, H, D], and are given tensors stored so: packing is then a view.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..cases.tokens import Attend, Case
from . import masks
from .reasons import CannotRunError, load


def cumulative(case: Case, documents: tuple[int, ...]) -> Tensor:
    """Return the start of each document, with the batch laid end to end, and the end."""
    lengths = torch.tensor(documents * case.batch)
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(case.device, torch.int32)


def fa2(case: Case) -> Attend:
    """Call the package flash-attn."""
    return _call(case, load(case, "flash_attn"))


def fa3(case: Case) -> Attend:
    """Call FlashAttention 3, which is for Hopper alone."""
    return _call(case, load(case, "flash_attn_interface", least=90, below=100))


def fa4(case: Case) -> Attend:
    """Call FlashAttention 4, in CuTe: for Hopper and newer."""
    return _call(case, load(case, "flash_attn.cute", least=90))


def _call(case: Case, found: Any) -> Attend:
    if documents := masks.documents(case):
        return partial(_packed, found, cumulative(case, documents), max(documents))
    if width := masks.window(case):
        return partial(_plain, found, {"causal": True, "window_size": (width - 1, 0)})
    if masks.is_full(case) or masks.is_causal(case):
        return partial(_plain, found, {"causal": masks.is_causal(case)})
    raise CannotRunError("knows only full, causal, windows and documents")


def _plain(found: Any, given: dict[str, Any], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return _out(found.flash_attn_func(query, key, value, **given))


def _packed(found: Any, starts: Tensor, longest: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    rows = (x.view(-1, *x.shape[2:]) for x in (query, key, value))  # a view, or it raises: no copy is timed
    out = found.flash_attn_varlen_func(
        *rows,
        cu_seqlens_q=starts,
        cu_seqlens_k=starts,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        causal=True,
    )
    return _out(out).view(query.shape)


def _out(result: Any) -> Tensor:
    """Return the first of the results: versions differ in whether they add the lse."""
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out
