"""Layouts of ranges by the builder of ``csrc/layout.h``: what ``build.py`` does with NumPy, in one call."""

from __future__ import annotations

import ctypes

import numpy as np

from ..library import open_library
from .costs import Costs
from .intervals import Intervals, count_groups
from .layout import Form, Layout, empty_layout
from .sort import address

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
    ranges: Intervals,
    *,
    q_start: int,
    form: Form,
    sizes: tuple[int, ...],
    costs: Costs,
    most_listed: int,
) -> Layout | None:
    """Build the layout of a set of ranges; None where the library is missing.

    Args:
        ranges: the related pairs.
        q_start: position of the first query among the keys.
        form: "tiles", "edges", or "auto" for whichever is less work.
        sizes: one or two tile sizes to choose from.
        costs: of pairs in tiles and as edges.
        most_listed: rows of more keys on average stay in tiles when ``form`` is "auto".

    Raises:
        ValueError: if the ranges break the rules of :class:`Intervals`, or the layout is too large.
    """
    library = open_library()
    if isinstance(library, str) or not hasattr(library, "ab_plan_layout"):  # built before there was one
        return None
    ptr, start, stop, group = (
        np.ascontiguousarray(array, np.int64)
        for array in (ranges.ptr, ranges.start, ranges.stop, ranges.group)
    )
    groups = count_groups(group)
    asked = _Ranges(
        *(address(array) for array in (ptr, start, stop)),
        *(len(start), groups, ranges.q_len, ranges.k_len, _FORMS.index(form), len(sizes)),
        sizes,
        tuple(costs.tile[size] for size in sizes),
        *(costs.edge, costs.run is not None, costs.run or 0.0, costs.partial, most_listed),
    )
    planned = _Planned()
    fits = len(ptr) == groups * ranges.q_len + 1 and len(start) == len(stop)
    status = library.ab_plan_layout(ctypes.byref(asked), ctypes.byref(planned)) if fits else _BAD_ARGUMENT
    _check(status, ranges)
    plan = ctypes.c_void_p(planned.plan)
    try:
        layout = empty_layout(
            q_len=ranges.q_len,
            k_len=ranges.k_len,
            q_start=q_start,
            batch=group.shape[0],
            heads=group.shape[1],
            groups=groups,
            tile=planned.tile,
            tiles=planned.tiles,
            patterns_count=planned.patterns,
            edges=planned.edges,
        )
        places = (layout.where.data_ptr(), address(group), layout.buffer.data_ptr())
        _check(library.ab_fill_layout(plan, *map(ctypes.c_void_p, places)), ranges)
    finally:
        library.ab_drop_plan(plan)
    return layout


def _check(status: int, ranges: Intervals) -> None:
    if status == _BAD_ARGUMENT:
        raise ValueError(
            f"relation: wanted ranges that increase in each row, without overlap, from 0 to {ranges.k_len}; "
            "got others: make them with Intervals.one_per_row or from_ranges"
        )
    if status:
        raise MemoryError(f"relation: no memory to lay out {len(ranges.start)} ranges")
