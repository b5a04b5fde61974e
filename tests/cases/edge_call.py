"""Direct calls of the C interface, for tests and benchmarks of the edge kernels.

They set what the backend does not: a bias per edge, the number of threads, poisoned memory.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from attnbias.backends.cpu import missing
from attnbias.backends.cpu.abi import CALL, DTYPES, LAYOUT, TENSOR, address
from attnbias.backends.strides import empty_like_query
from attnbias.layouts.header import FIELDS
from attnbias.layouts.layout import Layout
from attnbias.native import library_path

if missing():
    pytest.skip(str(missing()), allow_module_level=True)
library = ctypes.CDLL(str(library_path()))
for _function in (library.ab_forward, library.ab_backward, library.ab_set_edge_budget):
    _function.restype = ctypes.c_int64
library.ab_set_edge_budget.argtypes = (ctypes.c_int64,)
library.ab_isas.restype = ctypes.c_char_p
library.ab_force_isa.argtypes = (ctypes.c_char_p,)
ISAS = library.ab_isas().decode().split()


class Options(NamedTuple):
    """Everything but tensors and layout."""

    scale: float
    softcap: float = 0.0
    threads: int = 1
    poison: bool = True  # fill outputs and scratch with NaN


def force_isa(name: str) -> None:
    """Use one instruction set from now on; "" is the best one."""
    assert library.ab_force_isa(name.encode()) == 0


def _tensor(x: Tensor | None) -> Any:
    if x is None:
        return TENSOR.view()
    assert x.stride(3) == 1 or x.shape[3] == 1
    batch, head, row, _ = x.stride()
    return TENSOR.view(data=x.data_ptr(), batch=batch, head=head, row=row, dtype=DTYPES[x.dtype])


def _empty(x: Tensor, options: Options) -> Tensor:
    return x.fill_(torch.nan) if options.poison else x


def _layout(layout: Layout) -> Any:
    kept = layout.__dict__.get("_edge_call")
    if kept is None:
        fields = {name: getattr(layout, name).data_ptr() for name in FIELDS}
        sizes = {name: size for name, size in layout.header.sizes.items() if name in LAYOUT.fields}
        kept = layout.__dict__["_edge_call"] = LAYOUT.view(**sizes, **fields)
    return kept


def _call(q: Tensor, k: Tensor, v: Tensor, layout: Layout, bias: Tensor | None, options: Options) -> Any:
    call = CALL.view()
    (call.B, call.H, call.Q, call.D), (_, call.Hk, call.K, call.E) = q.shape, v.shape
    call.q, call.k, call.v = _tensor(q), _tensor(k), _tensor(v)
    call.scale, call.softcap, call.threads = options.scale, options.softcap, options.threads
    call.layout = _layout(layout)
    if bias is not None:
        call.edge_bias, call.bias_edge = bias.data_ptr(), bias.stride(0)
        call.bias_head = bias.stride(1) if bias.dim() == 2 else 0
    return call


def _run(function: ctypes._NamedFuncPointer, call: Any, options: Options) -> None:
    status = function(ctypes.byref(call))
    if status < 0:  # minus the bytes of scratch that it needs
        scratch = torch.empty(64 - status, dtype=torch.uint8)
        if options.poison:
            scratch.fill_(0xFF)
        call.scratch, call.scratch_bytes = scratch.data_ptr() + -scratch.data_ptr() % 64, -status
        status = function(ctypes.byref(call))
    assert status == 0


def forward(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, bias: Tensor | None, options: Options
) -> tuple[Tensor, Tensor]:
    """Compute out [B, H, Q, E] and lse [B, H, Q]."""
    call = _call(q, k, v, layout, bias, options)
    out = _empty(empty_like_query(q, v.shape[3]), options)
    lse = _empty(torch.empty(q.shape[:3]), options)
    call.out, call.lse = _tensor(out), lse.data_ptr()
    _run(library.ab_forward, call, options)
    return out, lse


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    bias: Tensor | None,
    options: Options,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None = None,
    needs: tuple[bool, bool, bool, bool] = (True, True, True, True),
) -> list[Tensor | None]:
    """Compute dq, dk, dv and dbias; None where not needed."""
    call = _call(q, k, v, layout, bias, options)
    call.out, call.lse, call.dout = _tensor(out), lse.data_ptr(), _tensor(dout)
    call.dlse = address(dlse)
    grads: list[Tensor | None] = [
        _empty(torch.empty_like(x), options) if need else None
        for x, need in zip((q, k, v), needs, strict=False)
    ]
    call.dq, call.dk, call.dv = (_tensor(x) for x in grads)
    grads.append(torch.zeros_like(bias) if bias is not None and needs[3] else None)
    call.dedge_bias = address(grads[3])
    _run(library.ab_backward, call, options)
    return grads
