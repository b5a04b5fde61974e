"""Sort edges into lists by row and by column, with the counting sort of ``csrc/sort.h``."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..native import open_library

Int32s = NDArray[np.int32]

_RANGE = 1  # what the library answers; any other number but 0 is a lack of memory


class EdgeLists(NamedTuple):
    """Edges by row, keys increasing, and by column, queries increasing; equal pairs as they came."""

    edge_ptr: Int32s  # [rows + 1]
    edge_key: Int32s  # [E]
    edge_id: Int32s  # [E], place in the input
    col_ptr: Int32s  # [columns + 1]
    col_query: Int32s  # [E]
    col_edge: Int32s  # [E], place in edge_key


class _Edges(ctypes.Structure):
    """``struct ab_edges``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("row", "key")),
        *((name, ctypes.c_int64) for name in ("wide", "edges", "groups", "q_len", "k_len")),
        *((name, ctypes.c_void_p) for name in EdgeLists._fields),
    )


def sort_edges(row: NDArray[Any], key: NDArray[Any], groups: int, q_len: int, k_len: int) -> EdgeLists | None:
    """Sort pairs (row, key); None where the library is missing or an int32 is too small."""
    library = open_library()
    edges = len(row)
    if isinstance(library, str) or max(edges, groups * q_len + 1, groups * k_len + 1) >= 1 << 31:
        return None
    if row.dtype != key.dtype or row.dtype not in (np.int64, np.int32):
        row, key = row.astype(np.int64, copy=False), key.astype(np.int64, copy=False)
    row, key = np.ascontiguousarray(row), np.ascontiguousarray(key)
    sizes = (groups * q_len + 1, edges, edges, groups * k_len + 1, edges, edges)
    lists = EdgeLists(*(np.empty(size, np.int32) for size in sizes))
    wide = int(row.dtype == np.int64)
    call = _Edges(address(row), address(key), wide, edges, groups, q_len, k_len, *map(address, lists))
    status = library.ab_sort_edges(ctypes.byref(call))
    if status == _RANGE:
        wrong = np.argmax((row < 0) | (row >= groups * q_len) | (key < 0) | (key >= k_len))
        raise ValueError(
            f"edges: wanted rows below {groups * q_len} and keys below {k_len}, "
            f"got row {row[wrong]} and key {key[wrong]}"
        )
    if status:
        raise MemoryError(f"edges: no memory to sort {edges} of them")
    return lists


def address(array: NDArray[Any]) -> int:
    """Return where an array is in memory."""
    return int(array.__array_interface__["data"][0])
