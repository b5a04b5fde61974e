"""Layouts of ranges by the builder of ``csrc/layout/layout.h``: the work of ``host.py`` in one call."""

from __future__ import annotations

import ctypes

import numpy as np

from ..native import open_library
from ..sets.intervals import Intervals, count_groups
from ..sets.sort import address
from .costs import Costs
from .fill import Form
from .header import Header
from .record import Record

_FORMS = ("auto", "tiles", "edges")  # enum ab_form
_BAD_ARGUMENT = 3  # what the library answers; any other number but 0 is a lack of memory


class _Ranges(ctypes.Structure):
    """``struct ab_ranges``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("ptr", "start", "stop")),
        *((name, ctypes.c_int64) for name in ("count", "groups", "q_len", "k_len", "form", "sizes")),
        ("size", ctypes.c_int64 * 2),
        ("size_cost", ctypes.c_double * 2),
        ("edge_cost", ctypes.c_double),
        ("skips", ctypes.c_int64),
        ("run_cost", ctypes.c_double),
        ("partial_cost", ctypes.c_double),
        ("most_listed", ctypes.c_int64),
    )


class _Planned(ctypes.Structure):
    """``struct ab_planned``."""

    _fields_ = (
        ("plan", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("tile", "tiles", "patterns", "edges")),
    )


def lay_out_ranges(
    ranges: Intervals, form: Form, tile: int | None, costs: Costs, q_start: int
) -> Record | None:
    """Return the layout of a set of ranges, as ``host.py`` builds it; None where the library is missing.

    Raises:
        ValueError: if the ranges break the rules of :class:`Intervals`, or the layout is too large.
    """
    library = open_library()
    if isinstance(library, str):
        return None
    ptr, start, stop, group = (
        np.ascontiguousarray(array, np.int64)
        for array in (ranges.ptr, ranges.start, ranges.stop, ranges.group)
    )
    groups, sizes = count_groups(group), costs.sizes(tile)
    asked = _Ranges(
        *(address(array) for array in (ptr, start, stop)),
        *(len(start), groups, ranges.q_len, ranges.k_len, _FORMS.index(form), len(sizes)),
        sizes,
        tuple(costs.tile[size] for size in sizes),
        *(costs.edge, costs.run is not None, costs.run or 0.0, costs.partial, costs.keys_listed),
    )
    planned = _Planned()
    fits = len(ptr) == groups * ranges.q_len + 1 and len(start) == len(stop)
    status = library.ab_plan_layout(ctypes.byref(asked), ctypes.byref(planned)) if fits else _BAD_ARGUMENT
    _check(status, ranges)
    plan = ctypes.c_void_p(planned.plan)
    try:
        header = Header.of(
            ranges.q_len,
            ranges.k_len,
            q_start,
            group,
            groups,
            planned.tile,
            tiles=planned.tiles,
            patterns_count=planned.patterns,
            edges=planned.edges,
        )
        record = Record.empty(header)
        places = (record.where.data_ptr(), address(group), record.buffer.data_ptr())
        _check(library.ab_fill_layout(plan, *map(ctypes.c_void_p, places)), ranges)
    finally:
        library.ab_drop_plan(plan)
    return record


def _check(status: int, ranges: Intervals) -> None:
    if status == _BAD_ARGUMENT:
        raise ValueError(
            f"relation: wanted ranges that increase in each row, without overlap, from 0 to {ranges.k_len}; "
            "got others: make them with Intervals.one_per_row or from_ranges"
        )
    if status:
        raise MemoryError(f"relation: no memory to lay out {len(ranges.start)} ranges")
