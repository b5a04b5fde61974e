"""Other libraries' kernels, where they are installed: flash-attn, xFormers, NATTEN, flashinfer.

Each takes [B, L, H, D]; the transposed views cost nothing. One that cannot run a case says why, in words.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from .cases import Attend, Case


class CannotRunError(Exception):
    """A peer has no way to compute a case."""


def is_on_gpu(case: Case) -> bool:
    """Whether the case's tensors are CUDA tensors."""
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
        raise CannotRunError("runs on CUDA devices alone")
    if case.dtype == torch.float32:
        raise CannotRunError("takes half precision alone")
    return found


def _by_token(call: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Call with [B, L, H, D]."""
    return call(*(x.transpose(1, 2) for x in (query, key, value))).transpose(1, 2)


def _cumulative(case: Case) -> Tensor:
    """Where each document starts, of all batch elements in a row, and the end."""
    lengths = torch.tensor(case.documents * case.batch)
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(case.device, torch.int32)


def flash_attn(case: Case) -> Attend:
    """Flash-attn: full, causal, windows, and packed documents."""
    found = _load(case, "flash_attn")
    if case.documents:
        starts, longest = _cumulative(case), max(case.documents)

        def packed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            out: Tensor = found.flash_attn_varlen_func(
                *(x.flatten(0, 1) for x in (query, key, value)), starts, starts, longest, longest, causal=True
            )
            return out.view(query.shape)

        return partial(_by_token, packed)
    if case.window:
        return partial(
            _by_token, partial(found.flash_attn_func, causal=True, window_size=(case.window - 1, 0))
        )
    if case.is_full or case.is_causal:
        return partial(_by_token, partial(found.flash_attn_func, causal=case.is_causal))
    raise CannotRunError("knows full, causal, windows and documents alone")


def xformers(case: Case) -> Attend:
    """The same cases by xFormers' bias classes."""
    _load(case, "xformers")
    ops, biases = import_module("xformers.ops"), import_module("xformers.ops.fmha.attn_bias")
    if case.key_heads is not None:
        raise CannotRunError("shares keys among heads by 5-D tensors, which is another call")
    bias: Any = None
    if case.documents:
        bias = biases.BlockDiagonalCausalMask.from_seqlens(list(case.documents * case.batch))
    elif case.window:
        bias = biases.LowerTriangularFromBottomRightLocalAttentionMask(case.window)
    elif case.is_causal:
        bias = biases.LowerTriangularMask()
    elif not case.is_full:
        raise CannotRunError("knows full, causal, windows and documents alone")

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        shape = query.shape
        if case.documents:
            query, key, value = (x.reshape(1, -1, *x.shape[2:]) for x in (query, key, value))
        out: Tensor = ops.memory_efficient_attention(query, key, value, attn_bias=bias)
        return out.view(shape)

    return partial(_by_token, attend)


def natten(case: Case) -> Attend:
    """NATTEN's neighbourhoods on a grid of one to three axes."""
    if not case.grid:
        raise CannotRunError("knows neighbourhoods on grids alone")
    found = _load(case, "natten")
    call = getattr(found.functional, f"na{len(case.grid)}d")
    width = (2 * case.radius + 1,) * len(case.grid)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        on_grid = (x.reshape(x.shape[0], *case.grid, *x.shape[2:]) for x in (query, key, value))
        out: Tensor = call(*on_grid, kernel_size=width)
        return out.reshape(query.shape)

    return partial(_by_token, attend)


def flashinfer(case: Case) -> Attend:
    """Flashinfer's prefill of one sequence: full, causal and windows; it has no backward pass."""
    found = _load(case, "flashinfer")
    if case.batch > 1:
        raise CannotRunError("has this call for one sequence alone")
    if not (case.is_full or case.is_causal or case.window):
        raise CannotRunError("knows full, causal and windows alone")
    left = case.window - 1 if case.window else -1

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out: Tensor = found.single_prefill_with_kv_cache(
            query[0], key[0], value[0], causal=not case.is_full, window_left=left
        )
        return out[None]

    return partial(_by_token, attend)


LIBRARIES: dict[str, Callable[[Case], Attend]] = {
    "flash-attn": flash_attn,
    "xFormers": xformers,
    "NATTEN": natten,
    "flashinfer": flashinfer,
}
