"""Direct calls of the C interface, for tests and benchmarks of the edge kernels.

They pass what the adapter does not: a bias for each edge, a number of threads, poisoned memory.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from attnbias.backends.cpu import missing
from attnbias.backends.strides import empty_like_query
from attnbias.layouts.layout import FIELDS, Layout
from attnbias.library import library_path

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_int32, _int64, _pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", _pointer),
        *((name, _int64) for name in ("batch", "head", "row")),
        *((name, _int32) for name in ("dtype", "unused")),
    ]


_COUNTS = ("batch", "heads", "groups", "tile", "tiles", "patterns_count", "edges", "classes")


class _Layout(ctypes.Structure):
    _fields_ = [
        *((name, _int32) for name in _COUNTS),
        *((name, _pointer) for name in (*FIELDS, "levels")),
    ]


class _Call(ctypes.Structure):
    _fields_ = [
        *((name, _int64) for name in ("B", "H", "Hk", "Q", "K", "D", "E")),
        *((name, _Tensor) for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv")),
        *((name, _pointer) for name in ("lse", "dlse", "edge_bias", "dedge_bias")),
        *((name, _int64) for name in ("bias_edge", "bias_head")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
        *((name, _int32) for name in ("threads", "bias_by_place")),
        ("bias_batch", _int64),
        *((name, _int64 * 8) for name in ("relative", "key", "pair", "grid")),
        *((name, _pointer) for name in ("query_code", "key_code")),
        ("grid_size", _int64),
        ("sink", _pointer),
        *((name, _int64) for name in ("seed", "drop_below", "q_start")),
        *((name, _int32) for name in ("kept_share", "negative_slope")),
        *((name, ctypes.c_void_p) for name in ("additive", "dadditive")),
        ("per_pair", _int64),
        ("scratch", _pointer),
        ("scratch_bytes", _int64),
        ("layout", _Layout),
    ]


if missing():
    pytest.skip(str(missing()), allow_module_level=True)
library = ctypes.CDLL(str(library_path()))
library.ab_scratch_bytes.restype = library.ab_set_edge_budget.restype = _int64
library.ab_set_edge_budget.argtypes = (_int64,)
library.ab_levels.restype = ctypes.c_char_p
library.ab_force_level.argtypes = (ctypes.c_char_p,)
LEVELS = library.ab_levels().decode().split()


class Options(NamedTuple):
    """Everything but tensors and layout."""

    scale: float
    softcap: float = 0.0
    threads: int = 1
    poison: bool = True  # fill what is written, and scratch, with NaN


def force_level(name: str) -> None:
    """Use one instruction level from now on; "" is the best."""
    assert library.ab_force_level(name.encode()) == 0


def _tensor(x: Tensor | None) -> _Tensor:
    if x is None:
        return _Tensor(None, 0, 0, 0, 0, 0)
    assert x.stride(3) == 1 or x.shape[3] == 1
    return _Tensor(x.data_ptr(), *x.stride()[:3], DTYPES[x.dtype], 0)


def _empty(x: Tensor, options: Options) -> Tensor:
    return x.fill_(torch.nan) if options.poison else x


def _layout(layout: Layout) -> _Layout:
    kept = layout.__dict__.get("_edge_call")
    if kept is None:
        fields = (getattr(layout, name).data_ptr() for name in FIELDS)
        kept = _Layout(*(layout.sizes[name] for name in _COUNTS), *fields)
        layout.__dict__["_edge_call"] = kept
    return kept


def _call(q: Tensor, k: Tensor, v: Tensor, layout: Layout, bias: Tensor | None, options: Options) -> _Call:
    call = _Call()
    (call.B, call.H, call.Q, call.D), (_, call.Hk, call.K, call.E) = q.shape, v.shape
    call.q, call.k, call.v = _tensor(q), _tensor(k), _tensor(v)
    call.scale, call.softcap, call.threads = options.scale, options.softcap, options.threads
    call.layout = _layout(layout)
    if bias is not None:
        call.edge_bias, call.bias_edge = bias.data_ptr(), bias.stride(0)
        call.bias_head = bias.stride(1) if bias.dim() == 2 else 0
    return call


def _run(function: ctypes._NamedFuncPointer, call: _Call, backward: int, options: Options) -> None:
    count = library.ab_scratch_bytes(ctypes.byref(call), backward)
    scratch = torch.empty(count + 64, dtype=torch.uint8)
    if options.poison:
        scratch.fill_(0xFF)
    call.scratch, call.scratch_bytes = scratch.data_ptr() + -scratch.data_ptr() % 64, count
    assert function(ctypes.byref(call)) == 0


def forward(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, bias: Tensor | None, options: Options
) -> tuple[Tensor, Tensor]:
    """Compute out [B, H, Q, E] and lse [B, H, Q]."""
    call = _call(q, k, v, layout, bias, options)
    out = _empty(empty_like_query(q, v.shape[3]), options)
    lse = _empty(torch.empty(q.shape[:3]), options)
    call.out, call.lse = _tensor(out), lse.data_ptr()
    _run(library.ab_forward, call, 0, options)
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
    call.dlse = None if dlse is None else dlse.data_ptr()
    grads: list[Tensor | None] = [
        _empty(torch.empty_like(x), options) if need else None
        for x, need in zip((q, k, v), needs, strict=False)
    ]
    call.dq, call.dk, call.dv = (_tensor(x) for x in grads)
    grads.append(torch.zeros_like(bias) if bias is not None and needs[3] else None)
    call.dedge_bias = None if grads[3] is None else grads[3].data_ptr()
    _run(library.ab_backward, call, 1, options)
    return grads
