"""Ranges in the forms of other libraries: cuDNN, FlashMask and MagiAttention."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..arguments import as_count, as_flag, as_indices
from ..sets.intervals import Intervals, Ints, make_groups

Table = tuple[Tensor, Tensor]  # first keys, and one more than the last, [B, H, Q, n] each

_CAUSAL, _INVERSE_CAUSAL, _BI_CAUSAL = 1, 2, 3  # MagiAttention's types; 0 is full


def from_cudnn(endpoints: Any, batch: int) -> Table:
    """See :meth:`Ranges.from_cudnn`."""
    table = as_indices("endpoints", endpoints, (2, 3))
    table = table[(None,) * (3 - table.dim())]
    heads, count, rows = table.shape
    batch = as_count("batch", batch, least=1)
    if count % 2 == 0:
        raise ValueError(f"endpoints: wanted an odd number for each query, got {count}")
    if rows % batch:
        raise ValueError(f"endpoints: wanted batch = {batch} sequences of one length, got {rows} queries")
    table = table.view(heads, count, batch, rows // batch).permute(2, 0, 3, 1)
    return torch.nn.functional.pad(table[..., 1::2], (1, 0)), table[..., 0::2]


def to_cudnn(form: Intervals) -> Tensor:
    """See :meth:`Ranges.to_cudnn`."""
    counts, begins = np.diff(form.ptr), np.zeros(form.rows, bool)
    begins[counts > 0] = form.start[form.ptr[:-1][counts > 0]] == 0  # a range from key 0 has its own place
    width = int((counts + ~begins).max(initial=1))
    table = _spread(form, width, form.k_len, ~begins)
    table[:, 0][~begins] = 0
    (batch, heads), count = form.group.shape, 2 * width - 1
    table = table.reshape(form.rows, 2 * width)[:, 1:].reshape(batch, heads, form.q_len, count)
    flat = np.ascontiguousarray(table.transpose(1, 3, 0, 2)).reshape(heads, count, batch * form.q_len)
    return torch.from_numpy(flat)


def from_flashmask(startend_row_indices: Any, causal: bool, q_len: int | None) -> Table:
    """Return the queries that see each key; see :meth:`Ranges.from_flashmask`."""
    table = as_indices("startend_row_indices", startend_row_indices, (2, 3, 4))
    causal, keys, columns = as_flag("causal", causal), table.shape[-2], table.shape[-1]
    wanted = (1, 2) if causal else (2, 4)
    if columns not in wanted:
        raise ValueError(
            f"startend_row_indices: wanted {wanted[0]} or {wanted[1]} numbers for each key with "
            f"causal={causal}, got {columns}"
        )
    if table.dim() == 3:
        table = table[:, None]
    queries = keys if q_len is None else as_count("q_len", q_len)
    low, *rest = table.clamp(0, queries).unbind(-1)
    end, begin = torch.full_like(low, queries), torch.zeros_like(low)
    if causal:
        begin = begin + torch.arange(keys, device=low.device).clamp(max=queries)
    if causal or columns == 4:
        hidden = list(zip([low, *rest[1::2]], rest[::2] or [end], strict=True))
    else:
        hidden = [(low, end), (torch.zeros_like(low), rest[0])]
    shown = [(begin, end)]
    for first, last in hidden:  # what is left of each range before and after the hidden one
        after = torch.maximum(first, last)
        shown = [x for a, b in shown for x in ((a, torch.minimum(b, first)), (torch.maximum(a, after), b))]
    start = torch.stack([a for a, _ in shown], -1)
    return start, torch.stack([b for _, b in shown], -1).maximum(start)


def to_flashmask(form: Intervals) -> Tensor:
    """See :meth:`Ranges.to_flashmask`."""
    hidden = ~form
    most = int(np.diff(hidden.ptr).max(initial=0))
    if most > 2:
        raise ValueError(f"ranges: wanted at most two hidden ranges of queries for each key, got {most}")
    table = _spread(hidden, 2, hidden.k_len)
    return torch.from_numpy(table.reshape(*form.group.shape, form.q_len, 4))


def _spread(form: Intervals, width: int, unused: int, later: Any = 0) -> Any:
    """Return start and stop of the ranges of each row in turn, int32 [rows, width, 2]."""
    table = np.full((form.rows, width, 2), unused, np.int32)
    place = np.arange(len(form.row)) - form.ptr[form.row] + np.broadcast_to(later, form.rows)[form.row]
    table[form.row, place] = np.stack((form.start, form.stop), 1)
    return table


def from_magi(q_ranges: Any, k_ranges: Any, types: Any, q_len: int | None) -> Intervals:
    """See :meth:`Ranges.from_magi`."""
    kinds = as_indices("types", types, (1,)).cpu().numpy()
    (first, last), (low, high) = (
        _read_pairs(name, given, len(kinds))
        for name, given in (("q_ranges", q_ranges), ("k_ranges", k_ranges))
    )
    if len(kinds) and not (kinds.min() >= 0 and kinds.max() <= _BI_CAUSAL):
        raise ValueError(f"types: wanted 0, 1, 2 or 3, got {int(kinds[(kinds < 0) | (kinds > 3)][0])}")
    reach = int(last.max(initial=0))
    queries = reach if q_len is None else as_count("q_len", q_len)
    if reach > queries:
        raise ValueError(f"q_ranges: wanted at most q_len = {queries}, got {reach}")
    sizes = last - first
    which = np.repeat(np.arange(len(kinds)), sizes)
    inside = np.arange(len(which)) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # row in its slice
    rises = np.isin(kinds[which], (_INVERSE_CAUSAL, _BI_CAUSAL))
    falls_short = np.isin(kinds[which], (_CAUSAL, _BI_CAUSAL))
    start = low[which] + np.where(rises, inside, 0)
    stop = high[which] - np.where(falls_short, sizes[which] - 1 - inside, 0)
    form = Intervals.empty(queries, int(high.max(initial=0)), make_groups())
    return form.from_ranges(first[which] + inside, start, np.maximum(stop, start))


def _read_pairs(name: str, given: Any, count: int) -> Ints:
    array: Ints = as_indices(name, given, (2,)).cpu().numpy()
    if array.shape != (count, 2):
        raise ValueError(f"{name}: wanted [{count}, 2], a row for each type, got {list(array.shape)}")
    wrong = np.flatnonzero((array[:, 0] < 0) | (array[:, 1] < array[:, 0]))
    if len(wrong):
        raise ValueError(f"{name}: wanted 0 <= first <= last in each row, got {array[wrong[0]].tolist()}")
    return array.T


def to_magi(form: Intervals) -> tuple[Tensor, Tensor, Tensor]:
    """See :meth:`Ranges.to_magi`."""
    place = np.arange(len(form.row)) - form.ptr[form.row]
    order = np.lexsort((form.row, place))  # the first range of every query, then the second ones
    row, start, stop, place = (x[order] for x in (form.row, form.start, form.stop, place))
    up, on = np.diff(start), np.diff(stop)
    follows = (np.diff(row) == 1) & (np.diff(place) == 0) & (up >= 0) & (up <= 1) & (on >= 0) & (on <= 1)
    step = np.append(np.where(follows, 2 * up + on, -1), -1)[
        : len(row)
    ]  # the type that both rows could share
    firsts, lasts, kinds, taken = [], [], [], 0
    ends = [*np.flatnonzero(np.diff(step, prepend=-2)).tolist(), len(step)]
    for begin, end in itertools.pairwise(ends):
        kind = int(step[begin])
        if kind >= 0 and taken <= end:  # rows begin..end share it; the first may be taken
            firsts.append(np.array([taken]))
            lasts.append(np.array([end]))
            kinds.append(np.array([kind]))
            taken = end + 1
        elif kind < 0 and taken < end:
            alone = np.arange(taken, end)
            firsts.append(alone)
            lasts.append(alone)
            kinds.append(0 * alone)
            taken = end
    none = [np.zeros(0, np.int64)]
    first, last, shared = (np.concatenate(none + x) for x in (firsts, lasts, kinds))
    slices = np.stack((row[first], row[last] + 1), 1), np.stack((start[first], stop[last]), 1), shared
    q_ranges, k_ranges, types = (torch.from_numpy(x.astype(np.int32)) for x in slices)
    return q_ranges, k_ranges, types
