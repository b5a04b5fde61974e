"""The structs of ``csrc/attnbias.h``, each written down once.

A :class:`Struct` lists the fields of a C struct in the order of the header. It makes the packer of the
backend and the ctypes view of the tests, and ``tests/backends/cpu/test_abi.py`` checks every offset against
the header. To add a field, add it to ``csrc/attnbias.h`` and below, and increase ``AB_ABI_VERSION`` there and
``ABI_VERSION`` in ``attnbias/native.py``. The fields of a layout come from ``layouts/header.py``.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...layouts.header import FIELDS

LARGEST = 256  # of E, and of D on edges
LARGEST_SCORE = 1024  # of D on tiles

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # enum ab_dtype
ERRORS = {1: "no memory", 3: "an argument the kernels do not take"}  # enum ab_status


class Type(NamedTuple):
    """The type of a field."""

    code: str  # in the format of a struct.Struct
    view: Any  # the ctypes type
    zero: Any = 0  # packed where the field is not given


POINTER = Type("Q", ctypes.c_void_p)
INT64 = Type("q", ctypes.c_int64)
UINT64 = Type("Q", ctypes.c_uint64)
INT32 = Type("i", ctypes.c_int32)
FLOAT32 = Type("f", ctypes.c_float)


class Struct:
    """A C struct, or some fields of one that are packed together.

    ``pack(name=value, ...)`` returns its bytes; fields that are not given are 0. A field whose type is a
    record takes the bytes of that record. ``view`` is the same struct in ctypes.
    """

    def __init__(self, name: str, **fields: Type) -> None:
        packer = struct.Struct("=" + "".join(kind.code for kind in fields.values()))
        views = [(x, kind.view) for x, kind in fields.items()]
        self.name = name
        self.fields = fields
        self.size = packer.size
        self.zero = bytes(packer.size)
        self.view: Any = type(name, (ctypes.Structure,), {"_fields_": views})
        self.type = Type(f"{self.size}s", self.view, self.zero)
        # Made as namedtuple makes __new__: names cost an eager call less than with a dict or a tuple.
        zeros = {f"zero_{x}": kind.zero for x, kind in fields.items()}
        given = ", ".join(f"{x}=zero_{x}" for x in fields)
        self.pack: Callable[..., bytes] = eval(
            f"lambda {given}: pack({', '.join(fields)})", {"pack": packer.pack, **zeros}
        )


def _each(names: str, type_: Type) -> dict[str, Type]:
    return dict.fromkeys(names.split(), type_)


TENSOR = Struct("ab_tensor", data=POINTER, **_each("batch head row", INT64), **_each("dtype unused", INT32))

PART = Struct(
    "ab_part",
    **_each("data grad", POINTER),
    **_each("batch head row column grad_batch grad_head", INT64),
)

LAYOUT = Struct(
    "ab_layout",
    **_each("batch heads groups tile tiles patterns_count edges classes", INT32),
    **dict.fromkeys((*FIELDS, "levels"), POINTER),
)

# An ab_call in four parts, because most calls have no extras, scratch is known last and layouts are kept.
HEAD = Struct(
    "head",
    **_each("B H Hk Q K D E", INT64),
    **_each("q k v out dout dq dk dv", TENSOR.type),
    **_each("lse dlse row_max", POINTER),
    **_each("scale softcap", FLOAT32),
    threads=INT32,
)

EXTRAS = Struct(
    "extras",
    bias_by_place=INT32,
    **_each("edge_bias dedge_bias", POINTER),
    **_each("bias_edge bias_head bias_batch", INT64),
    **_each("relative key pair grid", PART.type),
    **_each("query_code key_code", POINTER),
    grid_size=INT64,
    sink=POINTER,
    **_each("seed drop_below", UINT64),
    q_start=INT64,
    **_each("q_position k_position", POINTER),
    **_each("q_len first_batch first_head", INT64),
    **_each("kept_share negative_slope", FLOAT32),
    **_each("additive dadditive", POINTER),
    per_pair=INT64,
)

SCRATCH = Struct("scratch", scratch=POINTER, scratch_bytes=INT64)

CALL = Struct("ab_call", **HEAD.fields, **EXTRAS.fields, **SCRATCH.fields, layout=LAYOUT.type)


def address(x: Tensor | None) -> int:
    """Return where a tensor is in memory; 0 for None."""
    return 0 if x is None else x.data_ptr()


def pack_tensor(x: Tensor | None) -> bytes:
    """Return an ab_tensor of rows with dense columns; zeros for None."""
    if x is None:
        return TENSOR.zero
    batch, head, row, _ = x.stride()
    # Up to eight in each call: by name they would take 1 us more.
    return TENSOR.pack(x.data_ptr(), batch, head, row, DTYPES[x.dtype])


def pack_part(x: Tensor | None, grad: Tensor | None) -> bytes:
    """Return an ab_part; a dimension of size 1 serves all batches or heads."""
    if x is None:
        return PART.zero
    row, column = x.stride()[2:] if x.dim() == 4 else (0, 1)
    return PART.pack(x.data_ptr(), address(grad), *_strides(x), row, column, *_strides(grad))


def _strides(x: Tensor | None) -> list[int]:
    return [0 if x is None or x.shape[i] == 1 else x.stride(i) for i in (0, 1)]
