"""Kernels of other libraries, where installed: flash-attn, xFormers, NATTEN, flashinfer.

Each takes [B, L, H, D]; the transposed views cost nothing. One that cannot run a case raises with a reason.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..cases.tokens import Attend, Case
from . import masks


class CannotRunError(Exception):
    """A peer cannot compute a case."""


def is_on_gpu(case: Case) -> bool:
    """Return whether the case's tensors are CUDA tensors."""
    return case.device.startswith("cuda")


def _load(case: Case, package: str) -> Any:
    """Import a package.

    Raises:
        CannotRunError: if it is not there, or has no kernel for the case's device and dtype.
    """
    try:
        found = import_module(package)
    except ImportError:
        raise CannotRunError("is not installed") from None
    if not is_on_gpu(case):
        raise CannotRunError("runs only on CUDA devices")
    if case.dtype == torch.float32:
        raise CannotRunError("takes only half precision")
    return found


def _by_token(call: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Call with [B, L, H, D]."""
    return call(*(x.transpose(1, 2) for x in (query, key, value))).transpose(1, 2)


def _cumulative(case: Case, documents: tuple[int, ...]) -> Tensor:
    """Return the start of each document, with the batch laid end to end, and the end."""
    lengths = torch.tensor(documents * case.batch)
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(case.device, torch.int32)


def flash_attn(case: Case) -> Attend:
    """Call flash-attn: full, causal, windows, packed documents."""
    found = _load(case, "flash_attn")
    if documents := masks.documents(case):
        starts, longest = _cumulative(case, documents), max(documents)

        def packed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            out: Tensor = found.flash_attn_varlen_func(
                *(x.flatten(0, 1) for x in (query, key, value)), starts, starts, longest, longest, causal=True
            )
            return out.view(query.shape)

        return partial(_by_token, packed)
    if width := masks.window(case):
        return partial(_by_token, partial(found.flash_attn_func, causal=True, window_size=(width - 1, 0)))
    if masks.is_full(case) or masks.is_causal(case):
        return partial(_by_token, partial(found.flash_attn_func, causal=masks.is_causal(case)))
    raise CannotRunError("knows only full, causal, windows and documents")


def xformers(case: Case) -> Attend:
    """Call xFormers with its bias classes: the same cases."""
    _load(case, "xformers")
    ops, biases = import_module("xformers.ops"), import_module("xformers.ops.fmha.attn_bias")
    if case.key_heads is not None:
        raise CannotRunError("needs 5-D tensors for shared key heads, which is another call")
    bias: Any = None
    documents, width = masks.documents(case), masks.window(case)
    if documents:
        bias = biases.BlockDiagonalCausalMask.from_seqlens(list(documents * case.batch))
    elif width:
        bias = biases.LowerTriangularFromBottomRightLocalAttentionMask(width)
    elif masks.is_causal(case):
        bias = biases.LowerTriangularMask()
    elif not masks.is_full(case):
        raise CannotRunError("knows only full, causal, windows and documents")

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        shape = query.shape
        if documents:
            query, key, value = (x.reshape(1, -1, *x.shape[2:]) for x in (query, key, value))
        out: Tensor = ops.memory_efficient_attention(query, key, value, attn_bias=bias)
        return out.view(shape)

    return partial(_by_token, attend)


def natten(case: Case) -> Attend:
    """Call NATTEN: neighbourhoods on a grid of one to three axes."""
    grid, widths = masks.grid(case)
    if not grid:
        raise CannotRunError("knows only neighbourhoods on grids")
    found = _load(case, "natten")
    call = getattr(found.functional, f"na{len(grid)}d")

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        on_grid = (x.reshape(x.shape[0], *grid, *x.shape[2:]) for x in (query, key, value))
        out: Tensor = call(*on_grid, kernel_size=widths)
        return out.reshape(query.shape)

    return partial(_by_token, attend)


def flashinfer(case: Case) -> Attend:
    """Call flashinfer's prefill of one sequence: full, causal, windows; forward only."""
    found = _load(case, "flashinfer")
    if case.batch > 1:
        raise CannotRunError("runs only one sequence in this call")
    is_full, width = masks.is_full(case), masks.window(case)
    if not (is_full or masks.is_causal(case) or width):
        raise CannotRunError("knows only full, causal and windows")

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out: Tensor = found.single_prefill_with_kv_cache(
            query[0], key[0], value[0], causal=not is_full, window_left=width - 1
        )
        return out[None]

    return partial(_by_token, attend)


LIBRARIES: dict[str, Callable[[Case], Attend]] = {
    "flash-attn": flash_attn,
    "xFormers": xformers,
    "NATTEN": natten,
    "flashinfer": flashinfer,
}
