"""Kernels of other libraries, where installed: xFormers, NATTEN, flashinfer, cuDNN's Flex Attention.

Each takes [B, N, H, D], and is given tensors stored so. One that cannot run a case raises with a reason.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import Tensor

from ..cases.graphs import GraphCase
from ..cases.tokens import Attend, Case
from . import masks
from .reasons import CannotRunError, load

MOST_RANGES = 8  # of a query: cuDNN Flex takes two endpoints for each, and was made for few


def cudnn_flex(case: Case) -> Attend:
    """Call cuDNN's Flex Attention on the ranges of keys of each query; the plan is made outside the call."""
    found = load(case, "cudnn.flex_attention", least=90, below=120)
    if isinstance(case, GraphCase) or masks.neighbours(case) is not None:
        raise CannotRunError("knows only ranges of keys, not scattered pairs")
    try:
        ranges = case.relation.ranges(case.q_len, case.tokens, case.layout.q_start)
    except ValueError:
        raise CannotRunError("knows only ranges of keys") from None
    endpoints = ranges.to_cudnn(case.tokens)  # [1, 2 n - 1, Q]
    count = endpoints.shape[1] // 2 + 1
    if count > MOST_RANGES:
        raise CannotRunError(f"takes only {MOST_RANGES} ranges of keys a query here, which has {count}")
    packed = endpoints.repeat(1, 1, case.batch).to(case.device)
    query, key, value = (x.transpose(1, 2).contiguous() for x in case.inputs()[:3])
    plan = found.create_mask_plan(packed, query, key, value, build_backward=True)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out: Tensor = found.flex_attn_func(query, key, value, mask_plan=plan)
        return out

    return attend


def xformers(case: Case) -> Attend:
    """Call xFormers with its bias classes: the same cases."""
    load(case, "xformers")
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
            query, key, value = (x.view(1, -1, *x.shape[2:]) for x in (query, key, value))
        out: Tensor = ops.memory_efficient_attention(query, key, value, attn_bias=bias)
        return out.view(shape)

    return attend


def natten(case: Case) -> Attend:
    """Call NATTEN: neighbourhoods on a grid of one to three axes."""
    grid, widths = masks.grid(case)
    if not grid:
        raise CannotRunError("knows only neighbourhoods on grids")
    found = load(case, "natten")
    call = getattr(found.functional, f"na{len(grid)}d")

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        on_grid = (x.view(x.shape[0], *grid, *x.shape[2:]) for x in (query, key, value))
        out: Tensor = call(*on_grid, kernel_size=widths)
        return out.reshape(query.shape)

    return attend


def flashinfer(case: Case) -> Attend:
    """Call flashinfer's prefill of one sequence: full, causal, windows; forward only."""
    found = load(case, "flashinfer")
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

    return attend
