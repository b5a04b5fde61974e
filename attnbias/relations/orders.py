"""Orders of nodes in which neighbours lie near each other."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..sets.intervals import Ints

MOST_BITS = 63  # of a code


def as_points(name: str, points: Any) -> NDArray[np.float64]:
    """Return finite coordinates [N, d] given as a tensor, an array or nested lists."""
    if hasattr(points, "detach"):
        points = points.detach().double().cpu()  # NumPy has no bfloat16
    try:
        array = np.asarray(points, np.float64)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: wanted coordinates [N, d], got {type(points).__name__}") from None
    if array.ndim != 2 or not array.shape[1]:
        raise ValueError(f"{name}: wanted coordinates [N, d], got shape {list(array.shape)}")
    if not np.isfinite(array).all():
        raise ValueError(f"{name}: wanted finite coordinates, got NaN or infinity")
    return array


def morton(points: Any) -> Ints:
    """Return the order of points along a Z-order curve: interleave their coordinates' bits, sort once."""
    array = as_points("points", points)
    count, axes = array.shape
    if axes > MOST_BITS:
        raise ValueError(f"points: wanted at most {MOST_BITS} coordinates, got {axes}")
    if not count:
        return np.zeros(0, np.int64)
    bits = min(MOST_BITS // axes, 31)
    low = array.min(0)
    extent = (array.max(0) - low).max() or 1.0  # one scale for all axes, so that cells are cubes
    cell = ((array - low) / extent * ((1 << bits) - 1)).astype(np.int64)
    code = np.zeros(count, np.int64)
    for axis in range(axes):
        for bit in range(bits):
            code |= (cell[:, axis] >> bit & 1) << (bit * axes + axis)
    return np.argsort(code, kind="stable")


def reverse_cuthill_mckee(query: Ints, key: Ints, nodes: int) -> Ints:
    """Return scipy's order of small bandwidth; edges are taken in both directions."""
    try:
        from scipy.sparse import coo_matrix
        from scipy.sparse.csgraph import reverse_cuthill_mckee as order_of
    except ImportError:
        raise ImportError("reorder: 'rcm' needs scipy, which is not installed") from None
    if not nodes:
        return np.zeros(0, np.int64)
    ones = np.ones(len(query), np.int8)
    graph = coo_matrix((ones, (query, key)), shape=(nodes, nodes)).tocsr()
    order: Ints = order_of(graph, symmetric_mode=False).astype(np.int64)
    return order
