"""Tiles by the depth of a multi-level score: full tiles of one depth become classes of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from .intervals import Ints, pointer
from .layout import FIELDS, SIZES, Layout, field_offsets, field_shapes
from .tiles import PatternBook, Words, transpose_words

if TYPE_CHECKING:
    from ..multilevel import Levels


def tile_depths(levels: Levels, layout: Layout, query_tile: Ints, key_tile: Ints) -> tuple[Ints, Ints]:
    """Levels that all pairs of a tile share, and levels that some pair of it shares."""
    tile = layout.tile
    first_q, first_k = query_tile * tile, key_tile * tile
    last_q = np.minimum(first_q + tile, layout.q_len) - 1 + layout.q_start
    last_k = np.minimum(first_k + tile, layout.k_len) - 1
    first_q = first_q + layout.q_start
    shallow, deep = np.zeros((2, len(query_tile)), np.int64)
    for width in levels.widths:
        if not width:
            shallow, deep = shallow + 1, deep + 1
            continue
        a, b, c, d = (position // width for position in (first_q, last_q, first_k, last_k))
        shallow = shallow + ((a == b) & (c == d) & (a == c))
        deep = deep + ((a <= d) & (c <= b))
    return shallow, deep


def add_levels(layout: Layout, levels: Levels) -> Layout:
    """The same tiles in classes 0 .. L by their depth, which is also their mark, and the partial ones last.

    A full tile of mixed depth becomes a partial one with all its bits: kernels find the depths of the pairs
    of a partial tile from their positions.
    """
    sizes = {**layout.sizes, "classes": len(levels.widths) + 2}
    sides, whole = [], _WholePatterns(layout)
    for side in "qk":
        row, col, partial = _entries(layout, side)
        t = row % max(-(-layout.sizes[f"{side}_len"] // layout.tile), 1)
        query_tile, key_tile = (t, col) if side == "q" else (col, t)
        shallow, deep = tile_depths(levels, layout, query_tile, key_tile)
        mark = shallow.copy()
        mark[partial] = whole.number[_numpy(layout, f"{side}_mark")[:-1][partial]]
        mixed = ~partial & (shallow != deep)
        mark[mixed] = whole.find(query_tile[mixed], key_tile[mixed])
        kind = np.where(partial | mixed, len(levels.widths) + 1, shallow)
        sides.append((side, row, col, kind, mark))
    words = whole.words()
    sizes["patterns_count"] = len(words)
    offsets, length = field_offsets(sizes)
    buffer = np.zeros(length, np.int32)
    shapes = field_shapes(sizes)
    view = {
        name: buffer[offset : offset + int(np.prod(shapes[name], dtype=np.int64))].reshape(shapes[name])
        for name, offset in zip(FIELDS, offsets, strict=True)
    }
    for name in ("group", "q_order", "k_order"):
        view[name][:] = _numpy(layout, name)
    view["patterns"][:] = words.view(np.int32)
    view["patterns_t"][:] = transpose_words(words).view(np.int32)
    classes = sizes["classes"]
    for side, row, col, kind, mark in sides:
        order = np.lexsort((col, kind, row))
        view[f"{side}_tile"][:-1], view[f"{side}_mark"][:-1] = col[order], mark[order]
        bounds = view[f"{side}_ptr"].reshape(-1, classes + 1)
        counts = np.bincount(row * classes + kind, minlength=len(bounds) * classes)
        ends = pointer(counts)
        bounds[:] = ends[np.arange(len(bounds))[:, None] * classes + np.arange(classes + 1)]
    where = [*(sizes[name] for name in SIZES), *offsets, *levels.widths, *levels.prefixes]
    return Layout(torch.from_numpy(buffer), torch.tensor(where, dtype=torch.int64, device="cpu"))


def _numpy(layout: Layout, name: str) -> NDArray[np.int32]:
    return layout._view(name).cpu().numpy()


def _entries(layout: Layout, side: str) -> tuple[Ints, Ints, NDArray[np.bool_]]:
    """Row, column and whether it is partial, for each tile of one side."""
    bounds = _numpy(layout, f"{side}_ptr").astype(np.int64).reshape(-1, layout.classes + 1)
    row: Ints = np.repeat(np.arange(len(bounds)), bounds[:, -1] - bounds[:, 0])
    col = _numpy(layout, f"{side}_tile")[:-1].astype(np.int64)
    partial = np.arange(len(col)) >= np.repeat(bounds[:, -2], bounds[:, -1] - bounds[:, 0])
    return row, col, partial


class _WholePatterns:
    """The patterns of a layout, and those of tiles whose existing pairs are all related."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.book = PatternBook(layout.tile)
        self.number = self.book.add(_numpy(layout, "patterns").view(np.uint32))  # of each old pattern

    def find(self, query_tile: Ints, key_tile: Ints) -> Ints:
        """The number of each tile's pattern."""
        layout = self.layout
        whole_q, whole_k = layout.q_len // layout.tile, layout.k_len // layout.tile
        # Four kinds at most: cut short by the last query or not, by the last key or not.
        kind = (query_tile >= whole_q) * 2 + (key_tile >= whole_k)
        _, example, which = np.unique(kind, return_index=True, return_inverse=True)
        words = self.book.valid_words(layout.q_len, layout.k_len, query_tile[example], key_tile[example])
        return self.book.add(words)[which.reshape(-1)]

    def words(self) -> Words:
        """All patterns."""
        return self.book.words()


def count_macs(layout: Layout, partial: Ints) -> int:
    """Multiply-adds of the scores of all tiles; the listed ones, partial, count as their deepest pairs."""
    levels = layout.levels
    if levels is None:
        return 0
    row, col, _ = _entries(layout, "q")
    mark = _numpy(layout, "q_mark")[:-1].astype(np.int64)
    q_tiles = max(-(-layout.q_len // layout.tile), 1)
    mark[partial] = tile_depths(levels, layout, row[partial] % q_tiles, col[partial])[1]
    dims = int(np.array((0, *levels.prefixes))[mark].sum())
    executed: int = dims * layout.tile**2
    return executed
