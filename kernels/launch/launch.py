"""Starting kernels over tiles: descriptors, and a configuration that fits the device."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from ..records import Lists, Strided
from .config import VARIABLE, Chunk, Config, Pass, Present, Spec, Target, candidates
from .plans import PLANS, Given, Hole, Planned, TileHole, surroundings, with_holes

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
    lines: int | None = None,
    more: Callable[[int], int] | None = None,
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
        more: gives the programs of a head besides one for each own tile, which has so many rows.
        lines: run for so many heads of batches; None: for all.
        arguments: the others, by name.
    """
    notice_changes()
    around = surroundings(kernel)
    own = which, target, present, by_spec is None, lines, precision(tensors["q"].dtype), candidates
    given = Given([around, *own, lists.group.shape, lists.ptr.shape])
    given.add_shapes(tensors.values())
    given.add(lists)
    given.add(arguments.values())
    if around is not None and PLANS.again(given, by_spec):
        return
    sizes = _sizes(which, tensors, lists)
    dtype, device = tensors["q"].dtype, tensors["q"].device
    choices = candidates(target, which, dtype, *sizes, present.levels > 0)
    place = which, target, dtype, device, sizes, present
    for i in range(_fitting.get(place, 0), len(choices)):
        spec = _choose(choices[i], which, target, lists, tensors, present)
        planned = _plan(choices[i], spec, which, lists, tensors, arguments, lines, more)
        try:
            PLANS.start(kernel, given, planned, by_spec, keep=around is not None)
        except OutOfResources:
            if i + 1 == len(choices):
                raise
            continue
        _fitting[place] = i
        return


def _sizes(which: Pass, tensors: Mapping[str, Tensor], lists: Lists) -> tuple[int, int, int]:
    d_side, e_side = _WALKED[which]
    return tensors[d_side].shape[3], tensors[e_side].shape[3], lists.size


def _choose(
    config: Config,
    which: Pass,
    target: Target,
    lists: Lists,
    tensors: Mapping[str, Tensor],
    present: Present,
) -> Spec:
    """Return what a kernel is compiled for."""
    first, second = (tensors[name] for name in _WALKED[which])
    is_wide = max(x.stride(2) for x in tensors.values()) >= WIDE_ROW
    # Levels and chunks read parts of rows.
    may = config.tma and not present.levels and not config.chunk
    tma = may and _can_describe(first) and _can_describe(second)
    strides = (first.stride(2), second.stride(2)) if config.fixed else (0, 0)
    sizes = _sizes(which, tensors, lists)
    return _spec(config, which, target, sizes, strides, is_wide, tma, precision(first.dtype), present)


def _plan(
    config: Config,
    spec: Spec,
    which: Pass,
    lists: Lists,
    tensors: Mapping[str, Tensor],
    arguments: Mapping[str, Any],
    lines: int | None,
    more: Callable[[int], int] | None,
) -> Planned:
    """Return a launch in this configuration, with a hole for each tensor: strided ones, lists, others."""
    (batch, q_heads, q_len, _), (_, k_heads, k_len, _) = tensors["q"].shape, tensors["k"].shape
    heads = k_heads if which == "backward_key" else q_heads  # of the own side
    own, walked = (config.cols, config.rows) if which == "backward_key" else (config.rows, config.cols)
    of_head = lists.ptr.shape[1] * (lists.size // own) + (0 if more is None else more(own))
    places = {name: i for i, name in enumerate(tensors)}
    d_side, e_side = _WALKED[which]
    hollow, count = with_holes(lists, len(tensors))
    others, _ = with_holes(tuple(arguments.values()), count)
    return Planned(
        ((batch * heads if lines is None else lines) * of_head,),
        {
            **{name: Strided(Hole(places[name]), *x.stride()[:3]) for name, x in tensors.items()},
            **dict(zip(arguments, others, strict=True)),
            **lists.numbers,
            "lists": hollow,
            "d_tiles": _describe(tensors[d_side], places[d_side], walked) if spec.tma else None,
            "e_tiles": _describe(tensors[e_side], places[e_side], walked) if spec.tma else None,
            "heads": heads,
            "heads_per_key": q_heads // k_heads,
            "q_len": q_len,
            "k_len": k_len,
            "SPEC": spec,
        },
        {"num_warps": config.warps, "num_stages": config.stages, "enable_fp_fusion": True},
        spec,
    )


def notice_changes() -> object:
    """Look configurations up again where ``ATTNBIAS_TRITON`` is not what it was; return where they are."""
    text = os.environ.get(VARIABLE, "")
    if text != _seen[0]:
        forget()
        _seen[0] = text
    return candidates


def forget() -> None:
    """Look configurations up again at the next call, because what they follow from has changed."""
    candidates.cache_clear()
    _fitting.clear()
    PLANS.clear()


_seen = [os.environ.get(VARIABLE, "")]
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
    chunks = present.chunks or cut(d, config.chunk)
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
        specialised=config.specialised and tma and 100 <= target.arch < 120,
        row_strides=row_strides,
        is_wide=is_wide,
        shift=0 if 100 <= target.arch < 120 else 6,  # a thread of tcgen05 owns a row, not column pairs
        ptx=not target.is_interpreted,
        precision=precision,
        has=present,
        chunks=chunks,
        loops=tuple(
            x._replace(walked=mixed if x.is_partial else walked)
            if present.levels
            else x._replace(walked=walked, chunks=len(chunks), whole=len(chunks))
            for x in present.loops
        ),
    )


def cut(d: int, most: int) -> tuple[Chunk, ...]:
    """Cut a head into chunks of powers of 2, the widest of at most so many columns first; 0 for one chunk.

    Example:
        >>> [[x.columns for x in cut(d, 64)] for d in (40, 80, 96, 128)], len(cut(96, 0))
        ([[64], [64, 16], [64, 32], [64, 64]], 1)
    """
    chunks: list[Chunk] = []
    at = 0
    while at < d:
        width = columns(d - at)
        # Padding a short rest to a power of 2 costs no more than a chunk of its own would.
        if most and d > most and (width > most or width - (d - at) >= 16):
            width = min(most, 1 << (d - at).bit_length() - 1)
        chunks.append(Chunk(at, width))
        at += width
    return tuple(chunks)


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


def _describe(x: Tensor, place: int, rows: int) -> TileHole:
    """Describe x [B, H, L, D] for tiles of rows; what is past the ends reads as 0."""
    size = columns(x.shape[3])
    # The stride of a dimension of size 1 may be anything, and a descriptor takes but multiples of 16 bytes.
    strides = [size if n == 1 else s for n, s in zip(x.shape[:3], x.stride()[:3], strict=True)]
    return TileHole(place, x, [*strides, 1], [1, 1, rows, size])
