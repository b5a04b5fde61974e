"""Ranges of keys after the keys were put in another order."""

from __future__ import annotations

import numpy as np

from .intervals import Intervals, Ints, count_groups, pointer


def permute(form: Intervals, order: Ints, most: int) -> Intervals | None:
    """Put rows and keys in another order: the new number of ``order[i]`` is ``i``.

    A range is cut where keys that followed one another no longer do, so an order of a few long runs, such as
    exchanged blocks or a reversal, costs as much as it has runs.

    Args:
        form: ranges among as many queries as keys.
        order: [L], each of 0 .. L - 1 once.
        most: pieces up to which it is done; None is returned where there are more.
    """
    length = len(order)
    new: Ints = np.empty(length, np.int64)
    new[order] = np.arange(length)
    step = np.diff(new)
    breaks = np.ones(length, bool)  # whether a run begins at this key
    if length > 1:
        together = np.abs(step) == 1
        together[1:] &= (step[1:] == step[:-1]) | ~together[:-1]  # a turn of direction begins a run
        breaks[1:] = ~together
    run = np.cumsum(breaks) - 1  # [L], the run of each key
    begin = np.flatnonzero(breaks)
    end = np.append(begin[1:], length)

    rows = (np.arange(count_groups(form.group))[:, None] * length + order).reshape(-1)
    form = form.take_rows(rows, length)
    if not len(form.start):
        return form
    first = run[form.start]
    pieces = run[form.stop - 1] - first + 1
    if int(pieces.sum()) > most:
        return None
    which = np.repeat(np.arange(len(pieces)), pieces)
    each = np.arange(len(which)) - np.repeat(pointer(pieces)[:-1], pieces) + first[which]
    low = np.maximum(form.start[which], begin[each])
    high = np.minimum(form.stop[which], end[each])
    start = np.minimum(new[low], new[high - 1])
    return form.from_ranges(form.row[which], start, start + high - low)
