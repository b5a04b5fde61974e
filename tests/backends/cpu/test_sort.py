"""Sorting edges in any order into lists by query and by key."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from cases.edge_call import library
from numpy.typing import NDArray


class _Edges(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("row", "key")),
        *((name, ctypes.c_int64) for name in ("wide", "edges", "groups", "q_len", "k_len")),
        *(
            (name, ctypes.c_void_p)
            for name in ("edge_ptr", "edge_key", "edge_id", "col_ptr", "col_query", "col_edge")
        ),
    ]


def sort(
    row: NDArray[Any], key: NDArray[Any], groups: int, q_len: int, k_len: int
) -> tuple[int, list[NDArray[Any]]]:
    n = len(row)
    lists = [np.full(size, -1, np.int32) for size in (groups * q_len + 1, n, n, groups * k_len + 1, n, n)]
    wide = int(row.dtype == np.int64)
    edges = _Edges(
        row.ctypes.data, key.ctypes.data, wide, n, groups, q_len, k_len, *(x.ctypes.data for x in lists)
    )
    return library.ab_sort_edges(ctypes.byref(edges)), lists


def wanted(row: NDArray[Any], key: NDArray[Any], groups: int, q_len: int, k_len: int) -> list[NDArray[Any]]:
    order = np.lexsort((key, row))
    r, k = row[order], key[order]
    column = r // max(q_len, 1) * k_len + k
    turned = np.argsort(column, kind="stable")
    ptr = np.searchsorted(r, np.arange(groups * q_len + 1))
    col_ptr = np.searchsorted(column[turned], np.arange(groups * k_len + 1))
    return [ptr, k, order, col_ptr, (r % max(q_len, 1))[turned], turned]


@pytest.mark.parametrize("dtype", [np.int64, np.int32])
@pytest.mark.parametrize("order", ["none", "row", "key", "both"])
@pytest.mark.parametrize(
    "sizes", [(1, 50, 40, 300), (3, 50, 40, 700), (1, 1, 1, 0), (2, 5, 7, 1), (1, 0, 3, 0), (1, 900, 5, 40)]
)
def test_sort(sizes: tuple[int, int, int, int], order: str, dtype: Any) -> None:
    groups, q_len, k_len, n = sizes
    rng = np.random.default_rng(0)
    row = rng.integers(0, max(groups * q_len, 1), n).astype(dtype)
    key = rng.integers(0, k_len, n).astype(dtype)
    if order == "row":
        row = np.sort(row)
    elif order != "none":
        column = row // max(q_len, 1) * k_len + key
        place = np.lexsort((row, column)) if order == "key" else np.lexsort((key, row))
        row, key = row[place], key[place]
    status, lists = sort(row, key, groups, q_len, k_len)
    assert status == 0
    for got, right in zip(lists, wanted(row, key, groups, q_len, k_len), strict=True):
        assert np.array_equal(got, right)


@pytest.mark.parametrize(("row", "key"), [(-1, 0), (5, 0), (0, -1), (0, 5), (2**32, 0), (0, -(2**40))])
def test_index_out_of_range_raises(row: int, key: int) -> None:
    assert sort(np.array([0, row]), np.array([0, key]), 1, 5, 5)[0] == 1
