"""The backend: checks whether the kernels take a problem, and runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...layouts.header import FIELDS, FIXED
from ...scores.additive import why_not_terms
from ..call import Grads
from ..strides import copy_back, dense_rows, empty_dense_rows, empty_grads, empty_like_query
from .abi import DTYPES, ERRORS, EXTRAS, HEAD, LARGEST, LARGEST_SCORE, LAYOUT, SCRATCH, address, pack_tensor
from .extras import Extras
from .library import library, load

if TYPE_CHECKING:
    from ...layouts.layout import Layout
    from ...op.problem import Problem
    from ..call import Call, Needs

name = "cpu"


def why_not(problem: Problem) -> list[str]:
    """Return the reasons why the C++ kernels cannot run this problem; empty if they can."""
    query, found = problem.query, load()
    D, E = query.shape[3], problem.value.shape[3]
    reasons = []  # asked in every call, so no sentence is made before it is needed
    if isinstance(found, str):
        reasons.append(found)
    if query.device.type != "cpu":
        reasons.append(f"device: only the CPU, got {query.device}")
    if query.dtype not in DTYPES:
        reasons.append(f"dtype: float32, bfloat16 or float16, got {query.dtype}")
    if D > LARGEST_SCORE or E > LARGEST:
        reasons.append(f"head size: at most D={LARGEST_SCORE} and E={LARGEST}, got D={D} and E={E}")
    elif D > LARGEST and not _is_tiled(problem):
        reasons.append(f"head size: at most D={LARGEST} unless all pairs are in tiles, got D={D}")
    return reasons + why_not_terms(problem.terms, problem.score) if problem.terms else reasons


def _is_tiled(problem: Problem) -> bool:
    """Return whether no pair will be kept as an edge."""
    return problem.form == "tiles" if problem.layout is None else not problem.layout.edges


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Compute out [B, H, Q, E] and lse [B, H, Q]."""
    query = call.query
    B, H, Q, D = query.shape
    E = call.value.shape[3]
    is_plain = E == D and query.is_contiguous()  # the usual case, found quickly
    out = torch.empty_like(query) if is_plain else empty_like_query(query, E)
    lse = query.new_empty(B, H, Q, dtype=torch.float32)
    q, k, v = map(dense_rows, (query, call.key, call.value))
    extras = None if call.is_plain else Extras(call)
    _run(library().ab_forward, call, _head(call, lse, q=q, k=k, v=v, out=out), extras)
    return out, lse


def backward(
    call: Call, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None, needs: Needs
) -> Grads:
    """Compute the gradients that are needed."""
    # Names keep the copies alive: the struct holds addresses only.
    q, k, v, out, grad_out = map(dense_rows, (call.query, call.key, call.value, out, grad_out))
    # A gradient has the strides of its input, but the kernels write dense rows.
    grads = empty_grads(call.inputs[:3], needs[:3])
    dq, dk, dv = written = list(map(empty_dense_rows, grads))
    if grad_lse is not None:
        grad_lse = grad_lse.contiguous()
    extras = None if call.is_plain else Extras(call, needs)
    head = _head(call, lse, grad_lse, q=q, k=k, v=v, out=out, dout=grad_out, dq=dq, dk=dk, dv=dv)
    _run(library().ab_backward, call, head, extras)
    copy_back(grads, written)
    if extras is None:
        return Grads(*grads)
    d_sink = _grad_sink(call, out, lse, grad_out, grad_lse) if needs.sink else None
    return Grads(*grads)._replace(sink=d_sink, **extras.finish())


def _grad_sink(call: Call, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None) -> Tensor:
    """Return the gradient of the sink, -p * delta summed: a column of the probabilities without a value."""
    assert call.sink is not None
    delta = (grad_out.float() * out.float()).sum(-1)  # [B, H, Q]
    if grad_lse is not None:
        delta = delta - grad_lse
    share = torch.exp(call.sink.float()[:, None] - lse).masked_fill(lse == -torch.inf, 0)
    by_query = -(share * delta).double()
    if not by_query.numel():
        return torch.zeros_like(call.sink)
    # Running sums have one order, whatever the number of threads.
    total = by_query.cumsum(2)[..., -1].cumsum(0)[-1]
    return torch.empty_like(call.sink).copy_(total)


def _run(function: Callable[[bytes], int], call: Call, head: bytes, extras: Extras | None) -> None:
    """Call a function of the library, again with scratch if it needs some."""
    start = head + (EXTRAS.zero if extras is None else extras.packed)
    layout = pack_layout(call.layout)
    status = function(start + SCRATCH.zero + layout)
    if status < 0:
        scratch = torch.empty(64 - status, dtype=torch.uint8, device="cpu")
        first = scratch.data_ptr()
        status = function(start + SCRATCH.pack(scratch=first + -first % 64, scratch_bytes=-status) + layout)
    if status:
        raise RuntimeError(f"the CPU kernels failed: {ERRORS.get(status, status)}")


def _head(call: Call, lse: Tensor, grad_lse: Tensor | None = None, **tensors: Tensor | None) -> bytes:
    """Return an ab_call up to its extras; ``tensors`` have the names of the struct."""
    B, H, Q, D = call.query.shape
    _, Hk, K, E = call.value.shape
    return HEAD.pack(
        *(B, H, Hk, Q, K, D, E),
        **{name: pack_tensor(x) for name, x in tensors.items()},
        lse=lse.data_ptr(),
        dlse=address(grad_lse),
        row_max=address(call.row_max),
        scale=call.kernel_scale,
        softcap=call.softcap,
        threads=torch.get_num_threads(),
    )


def pack_layout(layout: Layout) -> bytes:
    """Return an ab_layout."""
    kept = layout.kept
    if not kept.is_trusted:
        layout.validate()
    packed: bytes | None = kept.prepared.get(name)
    if packed is None:
        header, start = kept.header, layout.buffer.data_ptr()
        sizes = {size: count for size, count in header.sizes.items() if size in LAYOUT.fields}
        fields = {field: start + 4 * offset for field, offset in zip(FIELDS, header.offsets, strict=True)}
        packed = LAYOUT.pack(**sizes, **fields, levels=layout.where.data_ptr() + 8 * FIXED)
        kept.prepared[name] = packed
    return packed
