"""Pictures of relations: the cells that ``attnbias.layouts.html`` and ``plot`` draw."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from ..layouts.html import page
from ..layouts.picture import KINDS, MOST_PAIRS, Cells, cells_of

if TYPE_CHECKING:
    from .relation import Relation, Start

LENGTH = 32  # of a picture of a relation that fits any
_MOST_CHECKED = 1 << 15  # tokens along a side that a notebook waits for


def lengths_of(
    relation: Relation, q_len: int | None = None, k_len: int | None = None, default: int = LENGTH
) -> tuple[int, int]:
    """Return these lengths; in place of None those of the relation's data, or ``default`` if it fits any."""
    if q_len is None:
        queries, keys = relation.lengths
        k_len = keys if k_len is None else k_len
        q_len = queries if queries is not None else default if k_len is None else k_len
    return q_len, q_len if k_len is None else k_len


def pairs(relation: Relation, q_len: int, k_len: int, q_start: Start, batch: int, head: int) -> Tensor:
    """Return booleans [q_len, k_len]: which pairs one batch and head relates."""
    batches, heads = _sizes(relation, batch, head)
    grid = relation.dense(q_len, k_len, q_start, batch=batches, heads=heads)
    return grid if grid.dim() == 2 else grid[min(batch, len(grid) - 1), min(head, grid.shape[1] - 1)]


def cells(relation: Relation, q_len: int, k_len: int, q_start: Start, batch: int, head: int) -> Cells:
    """Return the picture of one batch and head: each pair up to 128 tokens, counted in tiles above."""
    batches, heads = _sizes(relation, batch, head)
    related = KINDS.index("related")
    if max(q_len, k_len) <= MOST_PAIRS:
        grid = pairs(relation, q_len, k_len, q_start, batch, head).numpy()
        return Cells(np.where(grid, related, 0), grid.astype(float), 1, (q_len, k_len))
    layout = relation.layout(q_len, k_len, q_start=q_start, batch=batches, heads=heads)
    group = layout.group[min(batch, layout.batch - 1), min(head, layout.heads - 1)]
    found = cells_of(layout, int(group))
    return found._replace(kinds=np.where(found.kinds > 0, related, 0))


def _sizes(relation: Relation, batch: int, head: int) -> tuple[int, int]:
    """Return the numbers of batches and heads to look at, which have the one that is wanted."""
    sizes = relation.batch_size or batch + 1, relation.head_count or head + 1
    for name, number, size in zip(("batch", "head"), (batch, head), sizes, strict=True):
        if size > 1 and not 0 <= number < size:
            raise ValueError(f"{name}: wanted 0..{size - 1}, got {number}")
    return sizes


def as_html(relation: Relation) -> str | None:
    """Return a picture for a notebook, or None, for its text, if it is too long or not for these lengths."""
    q_len, k_len = lengths_of(relation)
    if max(q_len, k_len) > _MOST_CHECKED:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of lengths that nobody asked for
            found = cells(relation, q_len, k_len, 0, 0, 0)
    except Exception:  # a function of the user's may raise anything where nobody asked it for a picture
        return None
    share = float(found.share.mean()) if found.share.size else 0.0
    notes = [f"{q_len:,} queries (down) x {k_len:,} keys (across), {share:.2g} of all pairs"]
    of = [
        f"{name} 0 of {size}"
        for name, size in (("batch", relation.batch_size), ("head", relation.head_count))
        if size is not None and size > 1
    ]
    if of:
        notes.append(", ".join(of))
    return page(found, repr(relation), notes)
