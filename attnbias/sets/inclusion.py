"""Inclusion of exact sets, decided on ranges and edges without a look at each pair."""

from __future__ import annotations

import numpy as np

from .bound import Bound
from .intervals import Intervals, align


def is_within(a: Bound, b: Bound) -> bool | None:
    """Return whether ``b`` holds every pair of ``a``; None where one is a predicate."""
    a, b = align(a, b)
    if not (isinstance(a.solid, Intervals | None) and isinstance(b.solid, Intervals | None)):
        return None
    if a.edges is not None and not b.contains(a.edges.row, a.edges.key).all():
        return False
    if a.solid is None:
        return True
    if b.edges is None:
        assert b.solid is not None
        return _ranges_within(a.solid, b.solid)
    rest = a.solid if b.solid is None else a.solid - b.solid
    if int(rest.counts().sum()) > len(b.edges.key):
        return False
    return bool(b.edges.contains(*rest.pairs()).all())


def _ranges_within(a: Intervals, b: Intervals) -> bool:
    if a.single and b.single:
        (a_start, a_stop), (b_start, b_stop) = a.single, b.single
        return bool((((a_start >= b_start) & (a_stop <= b_stop)) | (a_start == a_stop)).all())
    # A range lies in the one that begins last before it, or in none: touching ones are joined.
    span = a.k_len + 1
    at = np.searchsorted(b.row * span + b.start, a.row * span + a.start, side="right") - 1
    reach = np.append(b.row * span + b.stop, -1)[at]
    return bool((a.row * span + a.stop <= reach).all())
