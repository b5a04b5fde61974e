"""Checking a layout that came from outside, and keeping one in a file."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .intervals import Ints
from .layout import ALIGNMENT, FIELDS, SIZES, VERSION, Layout, field_offsets, field_shapes
from .tiles import transpose_words, unpack_bits

_LIMIT = 1 << 31


def validate(layout: Layout) -> None:
    """Raise ValueError, saying what is wrong, unless every field is consistent.

    After it a kernel can follow every index without leaving the buffers it was given.
    """
    sizes = _check_sizes(layout)
    view = {
        name: layout._view(name).cpu().numpy().astype(np.int64, copy=False)
        for name in FIELDS
        if not name.startswith("patterns")
    }
    groups = sizes["groups"]
    _inside("group", view["group"], groups)
    q_tiles, k_tiles = (-(-sizes[name] // sizes["tile"]) for name in ("q_len", "k_len"))
    by_query = _check_lists(sizes, view, "q", q_tiles, k_tiles)
    by_key = _check_lists(sizes, view, "k", k_tiles, q_tiles)
    _check_patterns(layout, sizes, by_query, by_key)
    _check_sides(sizes, by_query, by_key)
    if sizes["edges"]:
        _check_edges(sizes, view)
        _check_disjoint(layout, sizes, view, by_query)


def _check_sizes(layout: Layout) -> dict[str, int]:
    where, buffer = layout.where, layout.buffer
    fixed = len(SIZES) + len(FIELDS)
    if where.dtype != torch.int64 or where.stride() != (1,) or len(where) < fixed:
        _fail(f"where is {where.dtype} {list(where.shape)}")
    if buffer.dtype != torch.int32 or buffer.dim() != 1:
        _fail(f"buffer is {buffer.dtype} {list(buffer.shape)}")
    sizes = layout.sizes
    if sizes["version"] != VERSION:
        _fail(f"version {sizes['version']}, this library reads {VERSION}")
    for name, value in sizes.items():
        if name != "q_start" and not 0 <= value < _LIMIT:
            _fail(f"{name} = {value}")
    if sizes["tile"] not in (64, 128) or sizes["classes"] < 2 or sizes["groups"] < 1:
        _fail(f"tile {sizes['tile']}, classes {sizes['classes']}, groups {sizes['groups']}")
    if len(where) != fixed + 2 * (sizes["classes"] - 2):
        _fail(f"classes {sizes['classes']} with {len(where) - fixed} numbers of levels")
    _check_levels(layout, sizes)
    # In Python integers, which do not overflow, before anything is sliced.
    total = sum(int(np.prod([int(n) for n in s], dtype=object)) for s in field_shapes(sizes).values())
    if total >= _LIMIT:
        _fail(f"{total} entries")
    offsets, length = field_offsets(sizes)
    if layout._numbers[len(SIZES) : fixed] != offsets or buffer.numel() != length:
        _fail(
            f"a buffer of {buffer.numel()} entries, its sizes ask for {length} at {ALIGNMENT}-aligned offsets"
        )
    return sizes


def _check_levels(layout: Layout, sizes: dict[str, int]) -> None:
    levels = layout.levels
    if levels is None:
        return
    for wide, narrow in pairwise(levels.widths):
        if not (0 < narrow < _LIMIT and wide % narrow == 0):
            _fail(f"widths {list(levels.widths)} do not nest")
    if not 0 <= levels.widths[0] < _LIMIT or any(a >= b for a, b in pairwise((0, *levels.prefixes))):
        _fail(f"widths {list(levels.widths)} and prefixes {list(levels.prefixes)}")
    if sizes["edges"]:
        _fail("edges with a multi-level score")


def _check_lists(
    sizes: dict[str, int], view: dict[str, Ints], side: str, rows: int, cols: int
) -> tuple[Ints, Ints, Ints, Ints]:
    """Row, column, class and mark of each tile of one side."""
    ptr = view[f"{side}_ptr"].reshape(-1)
    count = sizes["tiles"]
    if len(ptr):
        _rising(f"{side}_ptr", ptr)
        bounds = view[f"{side}_ptr"].reshape(-1, sizes["classes"] + 1)
        if ptr[0] != 0 or ptr[-1] != count or (bounds[1:, 0] != bounds[:-1, -1]).any():
            _fail(f"{side}_ptr does not cover the {count} tiles")
    elif count:
        _fail(f"{count} tiles without rows")
    tile, mark = view[f"{side}_tile"][:count], view[f"{side}_mark"][:count]
    _inside(f"{side}_tile", view[f"{side}_tile"], max(cols, 1))
    bounds = view[f"{side}_ptr"].reshape(-1, sizes["classes"] + 1)
    row = np.repeat(np.arange(len(bounds)), bounds[:, -1] - bounds[:, 0])
    last = sizes["classes"] - 1
    kind = np.repeat(np.tile(np.arange(last + 1), len(bounds)), np.diff(bounds).reshape(-1))
    partial = kind == last
    if ((tile[1:] <= tile[:-1]) & (row[1:] == row[:-1]) & (kind[1:] == kind[:-1])).any():
        _fail(f"{side}_tile does not rise within a row")
    _inside(f"{side}_mark", mark[partial], sizes["patterns_count"])
    if (mark != kind)[~partial].any():
        _fail(f"{side}_mark gives a full tile a depth that is not its class")
    order = view[f"{side}_order"]
    if not np.array_equal(np.sort(order), np.arange(len(order))):
        _fail(f"{side}_order is not a permutation")
    return row, tile, partial.astype(np.int64), mark


def _check_patterns(layout: Layout, sizes: dict[str, int], *sides: tuple[Ints, ...]) -> None:
    words = layout._view("patterns").cpu().numpy().view(np.uint32)
    turned = layout._view("patterns_t").cpu().numpy().view(np.uint32)
    if not np.array_equal(transpose_words(words), turned):
        _fail("patterns_t is not patterns transposed")
    # No bit may stand for a pair past the ends.
    height, width = np.zeros((2, len(words)), np.int64)
    for start in range(0, len(words), 256):
        bits = unpack_bits(words[start : start + 256])
        for extent, axis in ((height, 2), (width, 1)):
            used = np.flip(bits.any(axis=(axis,)), 1)
            extent[start : start + 256] = np.where(used.any(1), sizes["tile"] - used.argmax(1), 0)
    for (row, col, partial, mark), extents, lengths in zip(
        sides,
        ((height, width), (width, height)),
        (("q_len", "k_len"), ("k_len", "q_len")),
        strict=True,
    ):
        kept = partial > 0
        rows = max(-(-sizes[lengths[0]] // sizes["tile"]), 1)
        for place, extent, name in (
            (row % rows, extents[0], lengths[0]),
            (col, extents[1], lengths[1]),
        ):
            if (place[kept] * sizes["tile"] + extent[mark[kept]] > sizes[name]).any():
                _fail(f"a pattern has bits past {name}")
        if ((col[~kept] + 1) * sizes["tile"] > sizes[lengths[1]]).any():
            _fail(f"a full tile reaches past {lengths[1]}")


def _check_sides(sizes: dict[str, int], by_query: tuple[Ints, ...], by_key: tuple[Ints, ...]) -> None:
    """Both sides list the same tiles; a full one differs only at a ragged end."""
    tile = sizes["tile"]
    q_tiles, k_tiles = -(-sizes["q_len"] // tile), -(-sizes["k_len"] // tile)
    row, col, partial, mark = by_query
    g, query_tile = np.divmod(row, max(q_tiles, 1))
    one = np.stack((g, query_tile, col))
    order = np.lexsort(one[::-1])
    row, other_col, other_partial, other_mark = by_key
    g, key_tile = np.divmod(row, max(k_tiles, 1))
    two = np.stack((g, other_col, key_tile))
    back = np.lexsort(two[::-1])
    if not np.array_equal(one[:, order], two[:, back]):
        _fail("the lists by query and by key hold different tiles")
    _, query_tile, key_tile = one[:, order]
    inner = ((query_tile + 1) * tile <= sizes["q_len"]) & ((key_tile + 1) * tile <= sizes["k_len"])
    if (partial[order] != other_partial[back])[inner].any():
        _fail("a tile is full by query and partial by key")
    both = partial[order] == other_partial[back]
    if (mark[order] != other_mark[back])[both].any():
        _fail("a tile has another pattern or depth by query than by key")


def _check_edges(sizes: dict[str, int], view: dict[str, Ints]) -> None:
    count = sizes["edges"]
    for ptr, index, limit in (("edge_ptr", "edge_key", "k_len"), ("col_ptr", "col_query", "q_len")):
        _rising(ptr, view[ptr])
        if view[ptr][0] != 0 or view[ptr][-1] != count:
            _fail(f"{ptr} does not cover the {count} edges")
        _inside(index, view[index], sizes[limit])
        row = np.repeat(np.arange(len(view[ptr]) - 1), np.diff(view[ptr]))
        if ((np.diff(view[index]) < 0) & (row[1:] == row[:-1])).any():
            _fail(f"{index} falls within a row")
    if view["edge_id"].min(initial=0) < 0:
        _fail("edge_id is negative")
    place = view["col_edge"]
    if not np.array_equal(np.sort(place), np.arange(count)):
        _fail("col_edge is not a permutation")
    row = np.repeat(np.arange(len(view["edge_ptr"]) - 1), np.diff(view["edge_ptr"]))
    column = np.repeat(np.arange(len(view["col_ptr"]) - 1), np.diff(view["col_ptr"]))
    g, query = np.divmod(row, sizes["q_len"])
    if not (
        np.array_equal(query[place], view["col_query"])
        and np.array_equal((g * sizes["k_len"] + view["edge_key"])[place], column)
    ):
        _fail("the edges by row and by column differ")


def _check_disjoint(
    layout: Layout, sizes: dict[str, int], view: dict[str, Ints], by_query: tuple[Ints, ...]
) -> None:
    """No pair is both in a tile and an edge: it would count twice."""
    tile = sizes["tile"]
    q_tiles, k_tiles = (max(-(-sizes[name] // tile), 1) for name in ("q_len", "k_len"))
    row = np.repeat(np.arange(len(view["edge_ptr"]) - 1), np.diff(view["edge_ptr"]))
    g, query = np.divmod(row, sizes["q_len"])
    key = view["edge_key"]
    listed = by_query[0] * k_tiles + by_query[1]
    order = np.argsort(listed, kind="stable")
    asked = (g * q_tiles + query // tile) * k_tiles + key // tile
    at = np.minimum(np.searchsorted(listed[order], asked), max(len(listed) - 1, 0))
    if not len(listed):
        return
    hit = listed[order][at] == asked
    entry = order[at[hit]]
    words = layout._view("patterns").cpu().numpy().view(np.uint32)
    full = by_query[2][entry] == 0
    bit = np.zeros(len(entry), bool)
    some = ~full
    inner, column = query[hit][some] % tile, key[hit][some] % tile
    word = words[by_query[3][entry[some]], inner, column // 32]
    bit[some] = (word >> (column % 32).astype(np.uint32)) & 1
    if (full | bit).any():
        _fail("a pair is both in a tile and an edge")


def _inside(name: str, values: Ints, limit: int) -> None:
    if values.size and not (values.min() >= 0 and values.max() < limit):
        _fail(f"{name} holds {values.min()}..{values.max()}, wanted 0..{limit - 1}")


def _rising(name: str, values: Ints) -> None:
    if (np.diff(values) < 0).any():
        _fail(f"{name} falls")


def _fail(what: str) -> None:
    raise ValueError(f"layout: {what}")


def save(layout: Layout, path: str | Path) -> None:
    """Write the two tensors of a layout to a safetensors file."""
    _safetensors().save_file(
        {"buffer": layout.buffer.cpu().contiguous(), "where": layout.where.contiguous()},
        str(path),
        metadata={"format": "attnbias.Layout", "version": str(VERSION)},
    )


def load(path: str | Path, device: torch.device | str = "cpu") -> Layout:
    """Read and check a layout; raises ValueError when the file is not one."""
    safetensors = _safetensors()
    if not Path(path).is_file():
        raise FileNotFoundError(f"path: no such file: {path}")
    try:
        tensors = safetensors.load_file(str(path))
    except Exception as error:  # the reader's own errors have no common class of their own
        raise ValueError(f"path: {path} is not a safetensors file: {error}") from None
    if set(tensors) != {"buffer", "where"}:
        raise ValueError(f"path: {path} holds {sorted(tensors)}, a layout holds buffer and where")
    layout = Layout(tensors["buffer"], tensors["where"])
    try:
        layout.validate()
    except ValueError as error:
        raise ValueError(f"path: {path} is damaged: {error}") from None
    return layout.to(device)


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError:
        raise ImportError("saving layouts needs safetensors: pip install 'attnbias[save]'") from None
    return safetensors.torch
