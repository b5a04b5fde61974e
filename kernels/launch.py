"""How kernels are started: lists, descriptors, numbers, and a configuration that fits the device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

from .config import Config, Pass, Spec, Target, candidates

LOG2E = 1 / math.log(2)
SMALLEST = 1e-30  # of c: what is masked becomes -inf * c, which must not be NaN
WIDE_ROW = 1 << 23  # a row stride from which 128 rows need offsets of more than 32 bits


class Lists(NamedTuple):
    """The tiles of one side of a layout; see attnbias.Layout for the fields."""

    group: Tensor  # int32 [1 or B, 1 or H]
    ptr: Tensor  # int32 [G, tiles, 3]
    tile: Tensor  # int32 [n + 1]
    mark: Tensor  # int32 [n + 1]
    patterns: Tensor  # int32 [P, size, size / 32]
    order: Tensor  # int32 [G * tiles]
    size: int  # of a tile

    def arguments(self) -> tuple[Any, ...]:
        """What every kernel over lists takes, in its order."""
        batch, heads = self.group.shape
        groups, tiles, _ = self.ptr.shape
        by_batch, by_head = (heads if batch > 1 else 0), (1 if heads > 1 else 0)
        tensors = self.group, self.ptr, self.tile, self.mark, self.patterns, self.order
        return *tensors, by_batch, by_head, tiles, int(groups == 1)


class Numbers(NamedTuple):
    """Scale and softcap as the kernels want them."""

    c: float  # > 0: from a score to a power of 2
    inner: float  # scale / softcap
    start: float  # below every score; times c it is still finite
    present: dict[str, bool]  # of Spec

    @classmethod
    def of(cls, scale: float, softcap: float) -> Numbers:
        """Split scale and softcap into these; a scale of 0 gives weights of exactly 1."""
        c = max((softcap or abs(scale)) * LOG2E, SMALLEST)
        inner = scale / softcap if softcap else 1.0
        present = {"is_capped": softcap != 0, "is_negated": scale < 0 and softcap == 0}
        return cls(c, inner, -1e38 / max(c, 1e8), present)


class Walked(NamedTuple):
    """The tensors [B, H, L, D] and [B, H, L, E] whose tiles a loop fetches, and those it does not."""

    first: Tensor
    second: Tensor
    others: tuple[Tensor, ...]


def launch(
    kernel: Any,
    which: Pass,
    target: Target,
    heads: int,
    lists: Lists,
    walked: Walked,
    arguments: Callable[[Spec, Any, Any], tuple[Any, ...]],
    **present: Any,
) -> None:
    """Run a kernel in the first of its configurations that the device has room for.

    Triton compares a compiled kernel's shared memory with the device's before it loads it.

    Args:
        kernel: the Triton function.
        which: its pass.
        target: what it is compiled for.
        heads: how many there are, batch included.
        lists: the tiles.
        walked: the tensors that lie in memory as they come.
        arguments: the kernel's arguments, given its Spec and the walked tensors or their descriptors.
        present: fields of Spec that say what a call has.
    """
    first, second = walked.first, walked.second
    sizes = first.shape[3], second.shape[3], lists.size
    choices = candidates(target, which, first.dtype, *sizes, "has_levels" in present)
    key = which, target, first.dtype, first.device, *sizes, *present.values()
    for i in range(_fitting.get(key, 0), len(choices)):
        config = choices[i]
        own, other = (config.cols, config.rows) if which == "backward_key" else (config.rows, config.cols)
        spec = _spec(config, which, target, lists.size, walked, present)
        both = (_describe(first, other), _describe(second, other)) if spec.tma else (first, second)
        programs = heads * lists.ptr.shape[1] * (lists.size // own)
        options = {"num_warps": config.warps, "num_stages": config.stages, "enable_fp_fusion": True}
        try:
            kernel[programs,](*arguments(spec, *both), SPEC=spec, **options)
        except OutOfResources:
            if i + 1 == len(choices):
                raise
            continue
        _fitting[key] = i
        return


_fitting: dict[tuple[Any, ...], int] = {}  # place of the configuration that fits


def _spec(
    config: Config, which: Pass, target: Target, tile: int, walked: Walked, present: dict[str, Any]
) -> Spec:
    first, second = walked.first, walked.second
    d, e = first.shape[3], second.shape[3]
    walked_rows = config.rows if which == "backward_key" else config.cols
    return Spec(
        d=d,
        d_columns=columns(d),
        e=e,
        e_columns=columns(e),
        tile=tile,
        rows=config.rows,
        cols=config.cols,
        ahead=config.ahead,
        one_buffer=config.one_buffer,
        packed=config.packed,
        by_fma=config.by_fma,
        # The gradients of terms are sums of float32 dS; levels read parts of rows.
        half=config.half and not present["has_terms"] and "has_levels" not in present,
        tma=config.tma and "has_levels" not in present and _can_describe(first) and _can_describe(second),
        row_strides=(first.stride(2), second.stride(2)) if config.fixed else (0, 0),
        is_wide=any(x.stride(2) >= WIDE_ROW for x in (first, second, *walked.others)),
        shift=0 if 100 <= target.arch < 120 else 6,  # a thread of tcgen05 owns a row, not column pairs
        ptx=not target.is_interpreted,
        precision=precision(first.dtype),
        # Partial tiles hold more at once; the slots for the gradients of terms are of whole tiles.
        mixed=walked_rows
        if present.get("has_terms")
        else max(walked_rows // (2 if which == "forward" else 4), 16),
        **present,
    )


def columns(size: int) -> int:
    """Columns that a tile of rows of this size has: a power of 2, and no fewer than tl.dot takes."""
    return max(16, 1 << (size - 1).bit_length())


def precision(dtype: torch.dtype) -> str:
    """How float32 products are computed: in full, or as torch's own switch says."""
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
