"""The Triton kernels for NVIDIA GPUs; ``attnbias.kernels`` holds them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..kernels.config import target_of
from ..layouts.layout import FIELDS, SIZES, field_shapes
from ..scores import why_not_terms
from . import triton_terms
from .strides import empty_like_query

if TYPE_CHECKING:
    from ..kernels.bias import Extras
    from ..kernels.config import Target
    from ..kernels.edge_items import EdgeLists
    from ..kernels.edge_launch import Additive
    from ..kernels.launch import Lists
    from ..kernels.levels import Levels
    from ..layouts.layout import Layout
    from ..problem import Call, Problem

name = "triton"

LARGEST = 256  # of D and E
LOG2E = 1 / math.log(2)
DTYPES = frozenset((torch.float32, torch.float16, torch.bfloat16))

_EDGE_FIELDS = ("edge_ptr", "edge_key", "edge_id", "col_ptr", "col_query", "col_edge")
_NOTHING = nullcontext()


def why_not(problem: Problem) -> list[str]:
    """Say what keeps the Triton kernels from running this problem."""
    query, value = problem.query, problem.value
    D, E = query.shape[3], value.shape[3]
    target = target_of(query.device)
    if isinstance(target, str):  # asked in every call on a CPU, so nothing else is looked at
        return [target]
    no_bits = target.is_interpreted and query.dtype == torch.bfloat16
    refused = (
        (no_bits, "dtype: Triton's interpreter computes with the bits of bfloat16, not with its numbers"),
        (query.dtype not in DTYPES, f"dtype: float32, float16 or bfloat16, got {query.dtype}"),
        (D > LARGEST or E > LARGEST, f"head size: at most {LARGEST}, got D={D} and E={E}"),
    )
    return [words for is_so, words in refused if is_so] + why_not_terms(problem.terms, problem.score)


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Compute out [B, H, Q, E] and lse [B, H, Q]."""
    from ..kernels.edges import edges_forward
    from ..kernels.forward import tiles_forward

    query, layout = call.query, call.layout
    out = empty_like_query(query, call.value.shape[3])
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    if not lse.numel():
        return out, lse
    levels, factors = _levels(call)
    if factors is not None:
        query = (query * factors).to(query.dtype)
    inputs = _dense(query), _dense(call.key), _dense(call.value)
    sink = None if call.sink is None else call.sink.float()
    has_tiles, has_edges = layout.tiles > 0, layout.edges > 0
    by_query, _, edges = _lists(layout)
    extras = _extras(call)
    # The edges go on from the tiles' result, which is not rounded in between; the last one adds the sink.
    partly = torch.empty_like(out, dtype=torch.float32) if has_tiles and has_edges else out
    with _on(query.device):
        if has_tiles or not has_edges:
            last_sink = None if has_edges else sink
            target = _target(query.device)
            tiles_forward(
                *(*inputs, partly, lse, by_query, target),
                sink=last_sink,
                extras=extras,
                levels=levels,
                **_numbers(call),
            )
        if has_edges:
            start = (partly, lse) if has_tiles else None
            edges_forward(
                *(*inputs, edges, out, lse),
                additive=_additive(call),
                bias=triton_terms.bias_of_edges(call),
                dropout=extras.dropout,
                sink=sink,
                start=start,
                **_numbers(call),
            )
    return out, lse


def backward(
    call: Call,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    needs: Sequence[bool],
) -> list[Tensor]:
    """Compute the gradients of (query, key, value, sink, *terms); no elements where not needed."""
    from ..kernels.row_sums import row_sums

    inputs = call.query, call.key, call.value
    grads = [torch.empty_like(x) if need else x.new_empty(0) for x, need in zip(inputs, needs, strict=False)]
    d_sink = [call.query.new_empty(0)]
    rest = [call.query.new_empty(0) for _ in needs[4:]]
    if call.sink is not None and needs[3]:
        d_sink = [torch.zeros_like(call.sink)]
    if not lse.numel():
        parts = triton_terms.Gradients(call, needs[4:]).finish() if call.spec else []
        return [*(grad.zero_() for grad in grads), *d_sink, *parts, *rest[len(parts) :]]
    # A gradient lies in memory like its input; the kernels write dense rows.
    written = [_empty_dense(grad) if need else None for grad, need in zip(grads, needs, strict=False)]
    out, grad_out = _dense(out), _dense(grad_out)
    if grad_lse is not None:
        grad_lse = grad_lse.contiguous()
    with _on(call.query.device):
        # Edges alone compute them on their way.
        needs_sums = call.layout.tiles > 0 or not call.layout.edges or d_sink[0].numel() > 0
        sums = row_sums(out, lse, grad_out, grad_lse) if needs_sums else None
        parts = _backward(call, out, lse, grad_out, grad_lse, sums, written, needs[4:])
    for grad, rows in zip(grads, written, strict=True):
        if rows is not None and rows is not grad:
            grad.copy_(rows)
    if call.sink is not None and needs[3] and sums is not None:
        delta, lse2 = sums
        share = torch.exp2(call.sink.float()[:, None] * LOG2E - lse2)  # [B, H, Q padded]
        d_sink[0].copy_(-(share * delta).sum((0, 2), dtype=torch.float64))
    return [*grads, *d_sink, *parts, *rest[len(parts) :]]


def _backward(
    call: Call,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    sums: tuple[Tensor, Tensor] | None,
    written: list[Tensor | None],
    needs: Sequence[bool],
) -> list[Tensor]:
    """Write dq, dk and dv where there is a place for them: of the tiles, then with the edges added.

    Returns:
        The gradients of an additive score's weight, if there is one, and of the terms' parts.
    """
    from ..kernels.backward import tiles_backward_query
    from ..kernels.backward_key import tiles_backward_key
    from ..kernels.edges_backward import edges_backward

    layout = call.layout
    levels, factors = _levels(call)
    query = call.query if factors is None else (call.query * factors).to(call.query.dtype)
    inputs = _dense(query), _dense(call.key), _dense(call.value)
    by_query, by_key, edges = _lists(layout)
    has_tiles, has_edges = layout.tiles > 0, layout.edges > 0
    extras = _extras(call)
    parts = triton_terms.Gradients(call, needs)
    starts: list[Tensor | None] = [None, None, None]
    if sums is not None and (has_tiles or not has_edges):
        starts = dq, dk, dv = [
            None if x is None else torch.empty_like(x, dtype=torch.float32) if has_edges else x
            for x in written
        ]
        given = *inputs, grad_out, *sums
        target = _target(call.query.device)
        needs_relative = parts.relative is not None
        if dq is not None or needs_relative or parts.by_pair is not None:
            parts.relative = tiles_backward_query(
                *(*given, torch.empty_like(inputs[0]) if dq is None else dq, by_query, target),
                extras=extras,
                levels=levels,
                d_pairs=parts.by_pair,
                needs_relative=needs_relative,
                **_numbers(call),
            )
        if (dk is not None or dv is not None or parts.key is not None) and call.key.shape[2]:
            tiles_backward_key(
                *(*given, dk, dv, by_key, target),
                extras=extras,
                levels=levels,
                d_key_bias=parts.key,
                **_numbers(call),
            )
        if dq is not None and factors is not None:
            dq.mul_(factors)
    if has_edges and (parts.wanted or parts.needs_weight or any(x is not None for x in written)):
        given_out = out, lse, grad_out, grad_lse
        parts.edges, parts.weight = edges_backward(
            *(*inputs, edges, *given_out, written),
            additive=_additive(call),
            needs_weight=parts.needs_weight,
            bias=triton_terms.bias_of_edges(call),
            needs_bias=bool(parts.wanted),
            dropout=extras.dropout,
            starts=starts,
            **_numbers(call),
        )
    return parts.finish()


def _numbers(call: Call) -> dict[str, float]:
    score = call.multilevel
    scale = call.kernel_scale if score is None else call.kernel_scale / min(score.ranks)
    return {"scale": scale, "softcap": call.softcap}


def _levels(call: Call) -> tuple[Levels, Tensor | None]:
    """Return the levels of a multi-level score, and what multiplies the query in front of them, [D].

    That is the least rank over each level's, and the scale divides by the least: these are powers of 2 for
    most ranks that are in use, so that the query is not rounded again.
    """
    from ..kernels.levels import PLAIN, Levels, table

    score = call.multilevel
    if score is None:
        return PLAIN, None
    found, buffer = call.layout.levels, call.layout.buffer
    assert found is not None  # the layout fits the score
    # Kept on the tensor, as the lists are: a copy to the device for each layout, not for each call.
    kept: tuple[Tensor, Tensor] | None = getattr(buffer, "_attnbias_levels", None)
    if kept is None:
        ranks = torch.tensor(score.ranks, device=buffer.device)
        factors = (min(score.ranks) / ranks).repeat_interleave(ranks, output_size=found.prefixes[-1])
        kept = table(found.widths, found.prefixes, call.layout.q_start, buffer.device), factors
        buffer._attnbias_levels = kept  # type: ignore[attr-defined]
    per_pair = score.normalize == "pair"
    return Levels(kept[0], call.layout.q_start, found.prefixes, per_pair, found.widths[0] == 0), kept[1]


def _additive(call: Call) -> Additive | None:
    from ..kernels.edge_launch import Additive

    found = call.additive
    return None if found is None else Additive(found[0].contiguous(), found[1])


def _extras(call: Call) -> Extras:
    from ..kernels.bias import Dropout, Extras

    dropout = Dropout.of(call.dropout_p, call.seed, call.layout.q_start)
    return Extras(dropout, triton_terms.pack(call))


def _target(device: torch.device) -> Target:
    found = target_of(device)
    if isinstance(found, str):
        raise RuntimeError(found)
    return found


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Launch on this device and its current stream."""
    return torch.cuda.device(device) if device.type == "cuda" else _NOTHING


def _dense(x: Tensor) -> Tensor:
    """Return x, or a copy whose last dimension is dense."""
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def _empty_dense(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.new_empty(x.shape)


def _lists(layout: Layout) -> tuple[Lists, Lists, EdgeLists]:
    """Return the tiles by query and by key, and the edges."""
    from ..kernels.edge_items import EdgeLists
    from ..kernels.launch import Lists

    buffer = layout.buffer
    if not layout.is_trusted:
        layout.validate()
    # Kept on the tensor: the op makes a new Layout around it in every call.
    kept: tuple[int, Tensor, Lists, Lists, EdgeLists] | None = getattr(buffer, "_attnbias_triton", None)
    if kept is None or kept[0] != buffer.data_ptr() or kept[1] is not layout.where:
        fields = _fields(layout)
        by_query, by_key = (
            Lists(
                fields["group"],
                fields[f"{side}_ptr"],
                fields[f"{side}_tile"],
                fields[f"{side}_mark"],
                fields[patterns],
                fields[f"{side}_order"],
                layout.tile,
            )
            for side, patterns in (("q", "patterns"), ("k", "patterns_t"))
        )
        edges = EdgeLists(fields["group"], *(fields[name] for name in _EDGE_FIELDS), layout.groups)
        kept = buffer.data_ptr(), layout.where, by_query, by_key, edges
        buffer._attnbias_triton = kept  # type: ignore[attr-defined]
    return kept[2:]


def _fields(layout: Layout) -> dict[str, Tensor]:
    """Return the fields as tensors on the buffer's memory, but no views of it: they are kept on it."""
    buffer, offsets = layout.buffer, layout.where.tolist()[len(SIZES) : len(SIZES) + len(FIELDS)]
    storage, start = buffer.untyped_storage(), buffer.storage_offset()
    fields = {}
    for field, offset in zip(FIELDS, offsets, strict=True):
        shape = field_shapes(layout.sizes)[field]
        dense = torch.empty(shape, device="meta").stride()
        fields[field] = buffer.new_empty(0).set_(storage, start + offset, shape, dense)
    return fields
