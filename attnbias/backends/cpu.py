"""The C++ kernels for CPU tensors, called through ctypes; ``csrc/attnbias.h`` describes them."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..layouts.layout import FIELDS, SIZES
from ..library import library_path, open_library
from ..scores import why_not_terms
from . import edge_terms
from .strides import empty_like_query

if TYPE_CHECKING:
    from ..layouts.layout import Layout
    from ..problem import Call, Problem

name = "cpu"

ABI_VERSION = 4
LARGEST = 256  # of E, and of D on edges
LARGEST_SCORE = 1024  # of D on tiles
FEW = 16  # queries that csrc/few.h takes at most, with scratch; a forward pass over more seldom needs any

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_ERRORS = {1: "no memory", 2: "too little scratch", 3: "an argument the kernels do not take"}
_TILE_PARTS = ("relative", "key", "pair", "grid")  # those that tiles read where they lie
_NONE = (0, 0, 0, 0, 0, 0)  # an ab_tensor that is not there

# struct ab_call: what every call has; terms, sink and dropout; scratch; the layout.
_HEAD = struct.Struct("=7q" + "4q2i" * 8 + "4Q2q2f2i")
_EXTRAS = struct.Struct("=q" + "2Q6q" * 4 + "2Qq" + "Q" + "2Qqff" + "2Qq")
_SCRATCH = struct.Struct("=Qq")
_LAYOUT = struct.Struct(f"=8i{len(FIELDS)}QQ")
_NO_SCRATCH = _SCRATCH.pack(0, 0)
_NO_EXTRAS = bytes(_EXTRAS.size)


class _Library:
    """The functions of the shared library; a call is passed as the bytes of its struct."""

    def __init__(self, library: ctypes.CDLL) -> None:
        version = library.ab_abi_version()
        if version != ABI_VERSION:
            raise OSError(f"{library_path().name} has interface {version}, wanted {ABI_VERSION}")
        self.forward = library.ab_forward
        self.backward = library.ab_backward
        self.scratch_bytes = library.ab_scratch_bytes
        self.force_level = library.ab_force_level
        self.level = library.ab_level
        self.levels = library.ab_levels
        self.call_bytes = library.ab_call_bytes
        for function in (self.forward, self.backward, self.force_level):
            function.argtypes = (ctypes.c_char_p,)
            function.restype = ctypes.c_int32
        self.scratch_bytes.argtypes = (ctypes.c_char_p, ctypes.c_int32)
        self.scratch_bytes.restype = self.call_bytes.restype = ctypes.c_int64
        self.level.restype = self.levels.restype = ctypes.c_char_p


@cache
def _load() -> _Library | str:
    """Load the library, or say in words why that cannot be done."""
    opened = open_library()
    if isinstance(opened, str):
        return opened
    try:
        return _Library(opened)
    except OSError as error:
        return f"library: {error}"


def missing() -> str | None:
    """Say why there is no library, or None."""
    found = _load()
    return found if isinstance(found, str) else None


def library() -> _Library:
    """Return the library or raise."""
    found = _load()
    if isinstance(found, str):
        raise OSError(found)
    return found


def level() -> str:
    """Name the instruction level in use."""
    return str(library().level().decode())


def levels() -> list[str]:
    """Name the instruction levels that this machine can run, best first."""
    return str(library().levels().decode()).split()


def force_level(wanted: str | None) -> None:
    """Use one instruction level from now on, or the best again with None; for tests."""
    if library().force_level((wanted or "").encode()):
        raise ValueError(f"level: wanted one of {', '.join(levels())}, got {wanted!r}")


def why_not(problem: Problem) -> list[str]:
    """Say what keeps the C++ kernels from running this problem."""
    query, found = problem.query, _load()
    D, E = query.shape[3], problem.value.shape[3]
    reasons = []  # asked in every call, so no sentence is made before it is needed
    if isinstance(found, str):
        reasons.append(found)
    if query.device.type != "cpu":
        reasons.append(f"device: only the CPU, got {query.device}")
    if query.dtype not in _DTYPES:
        reasons.append(f"dtype: float32, bfloat16 or float16, got {query.dtype}")
    if D > LARGEST_SCORE or E > LARGEST:
        reasons.append(f"head size: at most D={LARGEST_SCORE} and E={LARGEST}, got D={D} and E={E}")
    elif D > LARGEST and not _is_tiled(problem):
        reasons.append(f"head size: at most D={LARGEST} unless all pairs are in tiles, got D={D}")
    return reasons + why_not_terms(problem.terms, problem.score) if problem.terms else reasons


def _is_tiled(problem: Problem) -> bool:
    """Whether no pair will be kept as an edge."""
    return problem.form == "tiles" if problem.layout is None else not problem.layout.sizes["edges"]


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Compute out [B, H, Q, E] and lse [B, H, Q]."""
    query = call.query
    B, H, Q, D = query.shape
    E = call.value.shape[3]
    is_plain = E == D and query.is_contiguous()  # the usual case, told apart quickly
    out = torch.empty_like(query) if is_plain else empty_like_query(query, E)
    lse = query.new_empty((B, H, Q), dtype=torch.float32)
    inputs = _dense(query), _dense(call.key), _dense(call.value)
    extras = _Extras(call) if _has_extras(call) else None
    head = _head(call, inputs, out, lse, extras=extras)
    layout, needs_scratch = _layout(call.layout)
    run = library()
    _run(run.forward, run.scratch_bytes if needs_scratch else None, head, layout, 0)
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
    # Names keep the copies alive: the struct holds addresses alone.
    inputs = _dense(call.query), _dense(call.key), _dense(call.value)
    out, grad_out = _dense(out), _dense(grad_out)
    grads = [
        torch.empty_like(x) if need else x.new_empty(0)
        for x, need in zip((call.query, call.key, call.value), needs, strict=False)
    ]
    # A gradient lies in memory like its input; the kernels write dense rows.
    written = [_empty_dense(grad) for grad in grads]
    if grad_lse is not None:
        grad_lse = grad_lse.contiguous()
    extras = _Extras(call, needs[4:]) if _has_extras(call) else None
    head = _head(
        call,
        inputs,
        out,
        lse,
        grad_out,
        [x if need else None for x, need in zip(written, needs, strict=False)],
        grad_lse,
        extras,
    )
    layout, _ = _layout(call.layout)
    run = library()
    _run(run.backward, run.scratch_bytes, head, layout, 1)
    for grad, rows in zip(grads, written, strict=True):
        if rows is not grad:
            grad.copy_(rows)
    more = [call.query.new_empty(0) for _ in needs[3:]]
    if more and needs[3]:
        more[0] = _grad_sink(call, out, lse, grad_out, grad_lse)
    if extras is not None:
        from_terms = extras.finish()
        more[1 : 1 + len(from_terms)] = from_terms
    return [*grads, *more]


def _grad_sink(call: Call, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None) -> Tensor:
    """The sink is a column of the probabilities without a value: its gradient is -p * delta, summed."""
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


def _run(function: object, scratch_bytes: object, head: bytes, layout: bytes, is_backward: int) -> None:
    """Call the library, with scratch where it wants some."""
    scratch = None
    tail = _NO_SCRATCH
    if scratch_bytes is not None:
        count = scratch_bytes(head + tail + layout, is_backward)  # type: ignore[operator]
        if count:
            scratch = torch.empty(count + 64, dtype=torch.uint8, device="cpu")
            start = scratch.data_ptr()
            tail = _SCRATCH.pack(start + -start % 64, count)
    status = function(head + tail + layout)  # type: ignore[operator]
    if status:
        raise RuntimeError(f"the CPU kernels failed: {_ERRORS.get(status, status)}")


def _dense(x: Tensor) -> Tensor:
    """Return x, or a copy whose columns are dense."""
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def _empty_dense(x: Tensor) -> Tensor:
    return x if x.dim() != 4 or x.stride(3) == 1 or x.shape[3] == 1 else x.new_empty(x.shape)


def _tensor(x: Tensor | None) -> tuple[int, ...]:
    """Return the fields of an ab_tensor."""
    if x is None:
        return _NONE
    b, h, row, _ = x.stride()
    return x.data_ptr(), b, h, row, _DTYPES[x.dtype], 0


def _head(
    call: Call,
    inputs: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor | None = None,
    grads: Sequence[Tensor | None] = (None, None, None),
    grad_lse: Tensor | None = None,
    extras: _Extras | None = None,
) -> bytes:
    """Return an ab_call up to its scratch."""
    query, key, value = inputs
    edge_bias = None if extras is None else extras.edge_bias
    d_edge_bias = None if extras is None else extras.d_edge_bias
    more = _NO_EXTRAS if extras is None else extras.packed
    B, H, Q, D = query.shape
    _, Hk, K, E = value.shape
    return (
        _HEAD.pack(
            *(B, H, Hk, Q, K, D, E),
            *_tensor(query),
            *_tensor(key),
            *_tensor(value),
            *_tensor(out),
            *_tensor(grad_out),
            *_tensor(grads[0]),
            *_tensor(grads[1]),
            *_tensor(grads[2]),
            *(lse.data_ptr(), _address(grad_lse), _address(edge_bias), _address(d_edge_bias)),
            *((0, 0) if extras is None else extras.bias_strides),
            *(call.kernel_scale, call.softcap),
            *(torch.get_num_threads(), extras is not None and extras.bias_by_place),
        )
        + more
    )


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _has_extras(call: Call) -> bool:
    return bool(call.spec) or call.sink is not None or call.dropout_p != 0


class _Extras:
    """Terms, sink and dropout of a call, ready for the kernels, and the gradients of the terms.

    Tiles read the parts where they lie, and edges the part of edges, if there is no other; else they get
    a number each, whose gradient goes back in ``finish``.
    """

    __slots__ = (
        "bias_by_place",
        "bias_strides",
        "call",
        "d_edge_bias",
        "edge_bias",
        "edge_places",
        "grads",
        "kept",
        "packed",
        "score_grads",
    )

    def __init__(self, call: Call, needs: Sequence[bool] = ()) -> None:
        self.call = call
        self.edge_bias: Tensor | None = None  # [B, H, edges], or [E, H or 1]
        self.d_edge_bias: Tensor | None = None
        self.bias_strides = (0, 0)  # from edge to edge, from head to head
        self.bias_by_place = False
        self.edge_places: dict[str, tuple[Tensor, ...]] = {}
        self.grads: list[Tensor] = []
        parts = call.parts
        # The kernels read dense rows of all parts but pairs. `kept` has the copies alive.
        dense = {
            name: x if name in ("pair", "edge") or x.stride(2) == 1 else x.contiguous()
            for name, x in parts.items()
        }
        weight, negative_slope = (None, 0.0) if call.additive is None else call.additive
        d_weight = None
        if weight is not None:
            weight = weight.contiguous()
            wants_weight, *needs = needs or (False,)
            d_weight = torch.zeros_like(weight) if wants_weight else None
        wanted = dict(zip(parts, needs, strict=False))
        grads = {name: torch.zeros(x.shape, device="cpu") for name, x in parts.items() if wanted.get(name)}
        self.grads = [grads.get(name, call.query.new_empty(0)) for name in parts]
        unwanted = call.query.new_empty(0)
        self.score_grads = [] if weight is None else [unwanted if d_weight is None else d_weight]
        sink = None if call.sink is None else call.sink.float().contiguous()
        codes = [x.contiguous() for x in call.codes]
        self.kept = (dense, sink, codes, weight, d_weight)
        bias_batch = 0
        if list(parts) == ["edge"]:
            # A gradient has to lie like its input: strides are given once.
            self.edge_bias, self.d_edge_bias = parts["edge"].contiguous(), grads.get("edge")
            self.bias_strides = (self.edge_bias.stride(0), int(self.edge_bias.shape[1] > 1))
        elif parts and call.layout.sizes["edges"]:
            self.edge_places = edge_terms.find_places(call)
            self.edge_bias = edge_terms.add_up(call, self.edge_places)
            self.d_edge_bias = torch.zeros_like(self.edge_bias) if grads else None
            bias_batch, head, edge = self.edge_bias.stride()
            self.bias_strides, self.bias_by_place = (edge, head), True
        seed, drop_below, kept_share = _dropout(call)
        self.packed = _EXTRAS.pack(
            bias_batch,
            *(field for name in _TILE_PARTS for field in _part(dense.get(name), grads.get(name))),
            *(_address(x) for x in codes or (None, None)),
            dense["grid"].shape[2] if "grid" in dense else 0,
            _address(sink),
            *(seed, drop_below, call.layout.q_start, kept_share),
            *(negative_slope, _address(weight), _address(d_weight)),
            call.multilevel is not None and call.multilevel.normalize == "pair",
        )

    def finish(self) -> list[Tensor]:
        """Return the gradients of the score's weight and of the parts."""
        if self.d_edge_bias is not None and self.bias_by_place:
            edge_terms.take_back(self.d_edge_bias, self.call, self.edge_places, self.grads)
        return self.score_grads + self.grads


def _dropout(call: Call) -> tuple[int, int, float]:
    """Return the key, the number below which bits drop a pair, and what kept pairs are multiplied by."""
    if call.dropout_p == 0:
        return 0, 0, 1.0
    assert call.seed is not None
    kept = 1 - call.dropout_p
    return int(call.seed.item()) % 2**64, math.floor(call.dropout_p * 2**32), 1 / kept if kept else 1.0


def _part(x: Tensor | None, grad: Tensor | None) -> tuple[int, ...]:
    """Return the fields of an ab_part; a size of 1 serves all."""

    def strides(y: Tensor) -> list[int]:
        return [0 if y.shape[i] == 1 else y.stride(i) for i in (0, 1)]

    if x is None:
        return (0,) * 8
    rest = (x.stride(2), x.stride(3)) if x.dim() == 4 else (0, 1)
    return x.data_ptr(), _address(grad), *strides(x), *rest, *((0, 0) if grad is None else strides(grad))


def _layout(layout: Layout) -> tuple[bytes, bool]:
    """Return an ab_layout, and whether a forward pass over it needs scratch."""
    buffer = layout.buffer
    if not layout.is_trusted:
        layout.validate()
    # Kept on the tensor: the op makes a new Layout around it in every call.
    kept: tuple[int, Tensor, bytes, bool] | None = getattr(buffer, "_attnbias_cpu", None)
    start = buffer.data_ptr()
    if kept is None or kept[0] != start or kept[1] is not layout.where:
        fixed = len(SIZES) + len(FIELDS)
        offsets = layout.where.tolist()[len(SIZES) : fixed]
        sizes = layout.sizes
        packed = _LAYOUT.pack(
            *(sizes["batch"], sizes["heads"], sizes["groups"], sizes["tile"]),
            *(sizes["tiles"], sizes["patterns_count"], sizes["edges"], sizes["classes"]),
            *(start + 4 * offset for offset in offsets),
            layout.where.data_ptr() + 8 * fixed,
        )
        few = sizes["q_len"] <= FEW
        kept = (start, layout.where, packed, few or sizes["groups"] > 1 or sizes["edges"] > 0)
        buffer._attnbias_cpu = kept  # type: ignore[attr-defined]
    return kept[2], kept[3]
