"""Starting kernels over tiles: descriptors, and a configuration that fits the device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

from ..records import Lists, Strided
from .config import Chunk, Config, Pass, Present, Spec, Target, candidates

WIDE_ROW = 1 << 23  # a row stride from which 128 rows need offsets of more than 32 bits
# The tensors [B, H, L, D] and [B, H, L, E] whose tiles the loops of a pass fetch.
_WALKED = {
    "forward": ("k", "v"),
    "backward_query": ("k", "v"),
    "backward_key": ("q", "grad_out"),
}


def launch(
    kernel: Any,
    which: Pass,
    target: Target,
    lists: Lists,
    tensors: Mapping[str, Tensor],
    present: Present,
    by_spec: Callable[[Spec], dict[str, Any]] | None = None,
    **arguments: Any,
) -> None:
    """Run a kernel in the first of its configurations that the device has room for.

    Triton compares a compiled kernel's shared memory with the device's before it loads it.

    Args:
        kernel: the Triton function.
        which: its pass.
        target: what it is compiled for.
        lists: the tiles.
        tensors: those that a kernel takes with their strides, q, k and the walked ones among them.
        present: what the call has.
        by_spec: gives arguments that depend on the configuration, those of a ``Split`` among them.
        arguments: the others, by name.
    """
    (batch, q_heads, q_len, _), (_, k_heads, k_len, _) = tensors["q"].shape, tensors["k"].shape
    d_side, e_side = _WALKED[which]
    first, second = tensors[d_side], tensors[e_side]
    sizes = first.shape[3], second.shape[3], lists.size
    strided = {name: Strided.of(x) for name, x in tensors.items()}
    is_wide = max([x.at for x in strided.values()]) >= WIDE_ROW
    heads = k_heads if which == "backward_key" else q_heads  # of the own side
    choices = candidates(target, which, first.dtype, *sizes, present.levels > 0)
    key = which, target, first.dtype, first.device, sizes, present
    for i in range(_fitting.get(key, 0), len(choices)):
        config = choices[i]
        own, walked = (config.cols, config.rows) if which == "backward_key" else (config.rows, config.cols)
        # Levels read parts of rows.
        tma = config.tma and not present.levels and _can_describe(first) and _can_describe(second)
        strides = (strided[d_side].at, strided[e_side].at) if config.fixed else (0, 0)
        spec = _spec(config, which, target, sizes, strides, is_wide, tma, precision(first.dtype), present)
        if by_spec is not None:
            arguments |= by_spec(spec)
        of_head = lists.ptr.shape[1] * (lists.size // own)
        if arguments.get("parts") is not None:
            of_head += arguments["cut_tiles"] * (arguments["parts"] - 1)
        try:
            kernel[batch * heads * of_head,](
                **strided,
                **arguments,
                **lists.numbers,
                lists=lists,
                d_tiles=_describe(first, walked) if tma else None,
                e_tiles=_describe(second, walked) if tma else None,
                heads=heads,
                heads_per_key=q_heads // k_heads,
                q_len=q_len,
                k_len=k_len,
                SPEC=spec,
                num_warps=config.warps,
                num_stages=config.stages,
                enable_fp_fusion=True,
            )
        except OutOfResources:
            if i + 1 == len(choices):
                raise
            continue
        _fitting[key] = i
        return


_fitting: dict[tuple[Any, ...], int] = {}  # place of the configuration that fits


@functools.cache
def _spec(
    config: Config,
    which: Pass,
    target: Target,
    sizes: tuple[int, int, int],
    row_strides: tuple[int, int],
    is_wide: bool,
    tma: bool,
    precision: str,
    present: Present,
) -> Spec:
    d, e, tile = sizes
    chunks = present.chunks or (Chunk(0, columns(d)),)
    walked = mixed = config.rows if which == "backward_key" else config.cols
    # Partial tiles of levels hold more at once; the slots for the gradients of terms are of whole tiles.
    if present.levels and not present.terms:
        mixed = max(walked // (2 if which == "forward" else 4), 16)
    return Spec(
        d=d,
        d_columns=chunks[-1].first + chunks[-1].columns,
        e=e,
        e_columns=columns(e),
        tile=tile,
        rows=config.rows,
        cols=config.cols,
        ahead=config.ahead,
        one_buffer=config.one_buffer,
        packed=config.packed,
        by_fma=config.by_fma,
        # The gradients of terms are sums of float32 dS.
        half=config.half and not present.terms and not present.levels,
        tma=tma,
        row_strides=row_strides,
        is_wide=is_wide,
        shift=0 if 100 <= target.arch < 120 else 6,  # a thread of tcgen05 owns a row, not column pairs
        ptx=not target.is_interpreted,
        precision=precision,
        has=present,
        chunks=chunks,
        loops=tuple(x._replace(walked=mixed if x.is_partial else walked) for x in present.loops),
    )


def columns(size: int) -> int:
    """Return the columns of a tile whose rows have this size: a power of 2, and enough for tl.dot."""
    return max(16, 1 << (size - 1).bit_length())


def precision(dtype: torch.dtype) -> str:
    """Say how float32 products are computed: in full, or as torch's own switch says."""
    if dtype != torch.float32:
        return "tf32"  # of no effect
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"


def _can_describe(x: Tensor) -> bool:
    step = 16 // x.element_size()
    steps = (n == 1 or (s > 0 and s % step == 0) for n, s in zip(x.shape[:3], x.stride()[:3], strict=True))
    return x.numel() > 0 and x.data_ptr() % 16 == 0 and all(steps)


def _describe(x: Tensor, rows: int) -> TensorDescriptor:
    """Make the descriptor of x [B, H, L, D] for tiles of rows; what is past the ends reads as 0."""
    size = columns(x.shape[3])
    # The stride of a dimension of size 1 may be anything, and a descriptor takes but multiples of 16 bytes.
    strides = [size if n == 1 else s for n, s in zip(x.shape[:3], x.stride()[:3], strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, rows, size])
