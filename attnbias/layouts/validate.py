"""Checks of a layout that came from outside: after them a kernel can follow every index."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..sets.intervals import Ints
from .header import FIXED, MOST_ENTRIES, SIZES, VERSION, Fields, Header
from .record import Record
from .tiles import Words, transpose_words, unpack_bits


class _Tiles(NamedTuple):
    """The tiles of one side."""

    row: Ints  # [n], g * tiles along the side + tile
    col: Ints  # [n]
    is_partial: NDArray[np.bool_]  # [n]
    mark: Ints  # [n]


def validate(layout: Record) -> None:
    """Raise ValueError, saying what is wrong, unless every field is consistent."""
    header = _check_header(layout)
    on_host = layout.fields.map(lambda field: field.cpu().numpy())
    words = on_host.patterns.view(np.uint32)
    if not np.array_equal(transpose_words(words), on_host.patterns_t.view(np.uint32)):
        _fail("patterns_t is not patterns transposed")
    fields: Fields[Ints] = on_host.map(lambda field: field.astype(np.int64, copy=False))
    _inside("group", fields.group, header.groups)
    by_query = _check_tiles(header, "q", fields.q_ptr, fields.q_tile, fields.q_mark, fields.q_order)
    by_key = _check_tiles(header, "k", fields.k_ptr, fields.k_tile, fields.k_mark, fields.k_order)
    _check_patterns(header, words, by_query, by_key)
    _check_sides(header, by_query, by_key)
    if header.edges:
        _check_edges(header, fields)
        _check_disjoint(header, words, fields, by_query)


def _check_header(layout: Record) -> Header:
    where, buffer = layout.where, layout.buffer
    if where.dtype != torch.int64 or where.stride() != (1,) or len(where) < FIXED:
        _fail(f"where: wanted at least {FIXED} dense int64, got {_kind(where)}")
    if buffer.dtype != torch.int32 or buffer.dim() != 1:
        _fail(f"buffer: wanted int32 [n], got {_kind(buffer)}")
    header = layout.header
    if header.version != VERSION:
        _fail(f"version {header.version}, this library reads {VERSION}")
    for name, value in header.sizes.items():
        least = {"classes": 2, "groups": 1}.get(name, 0)
        if name != "q_start" and not least <= value < MOST_ENTRIES:
            _fail(f"{name}: wanted {least} or more, below 2^31, got {value}")
    if header.tile not in (64, 128):
        _fail(f"tile: wanted 64 or 128, got {header.tile}")
    wanted = 2 * (header.classes - 2)
    if len(header.tail) != wanted:
        _fail(
            f"where: wanted {wanted} numbers of levels for {header.classes} classes, got {len(header.tail)}"
        )
    _check_levels(header)
    if header.length >= MOST_ENTRIES:  # a Python integer, which does not overflow
        _fail(f"its sizes ask for {header.length} entries, fewer than 2^31 are possible")
    if where[len(SIZES) : FIXED].tolist() != header.offsets or len(buffer) != header.length:
        _fail(f"buffer: its sizes ask for {header.length} entries at aligned offsets, got {len(buffer)}")
    return header


def _check_levels(header: Header) -> None:
    levels = header.levels
    if levels is None:
        return
    for wide, narrow in pairwise(levels.widths):
        if not (0 < narrow < MOST_ENTRIES and wide % narrow == 0):
            _fail(f"widths {list(levels.widths)} do not nest")
    if not 0 <= levels.widths[0] < MOST_ENTRIES:
        _fail(f"widths: wanted 0 or more, below 2^31, got {list(levels.widths)}")
    if any(a >= b for a, b in pairwise((0, *levels.prefixes))):
        _fail(f"prefixes must increase from 1 or more, got {list(levels.prefixes)}")
    if header.edges:
        _fail(f"edges: wanted 0 with a multi-level score, got {header.edges}")


def _check_tiles(header: Header, side: str, ptr: Ints, listed: Ints, marks: Ints, order: Ints) -> _Tiles:
    """Check the lists of one side, and return them tile by tile."""
    last = header.classes - 1
    bounds = ptr.reshape(-1, header.classes + 1)
    count = int(bounds[-1, -1]) if len(bounds) else 0  # a layout with a capacity has room for more
    if len(bounds):
        _not_decreasing(f"{side}_ptr", ptr.reshape(-1))
        if bounds[0, 0] != 0 or (bounds[1:, 0] != bounds[:-1, -1]).any():
            _fail(f"{side}_ptr leaves tiles out")
        if count > header.tiles:
            _fail(f"{side}_ptr names {count} tiles, there is room for {header.tiles}")
    elif header.tiles:
        _fail(f"{header.tiles} tiles without rows")
    _inside(f"{side}_tile", listed, max(header.k_tiles if side == "q" else header.q_tiles, 1))
    tile, mark = listed[:count], marks[:count]
    row = np.repeat(np.arange(len(bounds)), bounds[:, -1] - bounds[:, 0])
    kind = np.repeat(np.tile(np.arange(last + 1), len(bounds)), np.diff(bounds).reshape(-1))
    is_partial = kind == last
    same = (row[1:] == row[:-1]) & (kind[1:] == kind[:-1])
    _not_decreasing(f"{side}_tile", tile, same, " within a class of a row", step=1)
    _inside(f"{side}_mark", mark[is_partial], header.patterns_count)
    if (mark != kind)[~is_partial].any():
        _fail(f"{side}_mark gives a full tile a depth that is not its class")
    _permutation(f"{side}_order", order)
    return _Tiles(row, tile, is_partial, mark)


def _check_patterns(header: Header, words: Words, by_query: _Tiles, by_key: _Tiles) -> None:
    """Raise if a bit stands for a pair past the ends, or a full tile reaches there along its side."""
    tile = header.tile
    height, width = np.zeros((2, len(words)), np.int64)
    for start in range(0, len(words), 256):
        bits = unpack_bits(words[start : start + 256])
        for extent, axis in ((height, 2), (width, 1)):
            used = np.flip(bits.any(axis=(axis,)), 1)
            extent[start : start + 256] = np.where(used.any(1), tile - used.argmax(1), 0)
    queries = ("q_len", header.q_len, max(header.q_tiles, 1), height)
    keys = ("k_len", header.k_len, max(header.k_tiles, 1), width)
    for side, down, across in ((by_query, queries, keys), (by_key, keys, queries)):
        kept = side.is_partial
        for place, (name, length, tiles, extent) in ((side.row, down), (side.col, across)):
            if (place[kept] % tiles * tile + extent[side.mark[kept]] > length).any():
                _fail(f"a pattern has bits past {name}")
        if ((side.col[~kept] + 1) * tile > across[1]).any():
            _fail(f"a full tile reaches past {across[0]}")


def _check_sides(header: Header, by_query: _Tiles, by_key: _Tiles) -> None:
    """Raise unless both sides list the same tiles, a full one differing only at a ragged end."""
    g, query_tile = np.divmod(by_query.row, max(header.q_tiles, 1))
    one = np.stack((g, query_tile, by_query.col))
    order = np.lexsort(one[::-1])
    g, key_tile = np.divmod(by_key.row, max(header.k_tiles, 1))
    two = np.stack((g, by_key.col, key_tile))
    back = np.lexsort(two[::-1])
    if not np.array_equal(one[:, order], two[:, back]):
        _fail("the lists by query and by key hold different tiles")
    _, query_tile, key_tile = one[:, order]
    inner = (query_tile < header.q_len // header.tile) & (key_tile < header.k_len // header.tile)
    same_kind = by_query.is_partial[order] == by_key.is_partial[back]
    if not same_kind[inner].all():
        _fail("a tile is full by query and partial by key")
    if (by_query.mark[order] != by_key.mark[back])[same_kind].any():
        _fail("a tile has another pattern or depth by query than by key")


def _check_edges(header: Header, fields: Fields[Ints]) -> None:
    rows, columns = (
        _check_list(header.edges, *names, ptr, index, limit)
        for names, ptr, index, limit in (
            (("edge_ptr", "edge_key"), fields.edge_ptr, fields.edge_key, header.k_len),
            (("col_ptr", "col_query"), fields.col_ptr, fields.col_query, header.q_len),
        )
    )
    if fields.edge_id.min() < 0:
        _fail(f"edge_id: wanted 0 or more, got {fields.edge_id.min()}")
    place = fields.col_edge
    _permutation("col_edge", place)
    g, query = np.divmod(rows, header.q_len)
    if not (
        np.array_equal(query[place], fields.col_query)
        and np.array_equal((g * header.k_len + fields.edge_key)[place], columns)
    ):
        _fail("the edges by row and by column differ")


def _check_list(count: int, ptr_name: str, name: str, ptr: Ints, index: Ints, limit: int) -> Ints:
    """Check one list of edges, and return the row of each."""
    _not_decreasing(ptr_name, ptr)
    if ptr[0] != 0 or ptr[-1] != count:
        _fail(f"{ptr_name} does not cover the {count} edges")
    _inside(name, index, limit)
    row = _rows(ptr)
    _not_decreasing(name, index, row[1:] == row[:-1], " within a row")
    return row


def _check_disjoint(header: Header, words: Words, fields: Fields[Ints], tiles: _Tiles) -> None:
    """Raise if a pair is both in a tile and an edge: it would count twice."""
    if not len(tiles.row):
        return
    tile, q_tiles, k_tiles = header.tile, max(header.q_tiles, 1), max(header.k_tiles, 1)
    g, query = np.divmod(_rows(fields.edge_ptr), header.q_len)
    key = fields.edge_key
    listed = tiles.row * k_tiles + tiles.col
    order = np.argsort(listed, kind="stable")
    asked = (g * q_tiles + query // tile) * k_tiles + key // tile
    at = np.minimum(np.searchsorted(listed[order], asked), len(listed) - 1)
    hit = listed[order][at] == asked
    entry, query, key = order[at[hit]], query[hit] % tile, key[hit] % tile
    some = tiles.is_partial[entry]
    word = words[tiles.mark[entry[some]], query[some], key[some] // 32]
    if not some.all() or ((word >> (key[some] % 32).astype(np.uint32)) & 1).any():
        _fail("a pair is both in a tile and an edge")


def _rows(ptr: Ints) -> Ints:
    return np.repeat(np.arange(len(ptr) - 1), np.diff(ptr))


def _inside(name: str, values: Ints, limit: int) -> None:
    if values.size and not (values.min() >= 0 and values.max() < limit):
        _fail(f"{name} holds {values.min()}..{values.max()}, wanted 0..{limit - 1}")


def _not_decreasing(
    name: str, values: Ints, where: NDArray[np.bool_] | bool = True, scope: str = "", step: int = 0
) -> None:
    """Raise, naming the first offender, unless each number is at least ``step`` more than the one before."""
    wrong = np.flatnonzero((np.diff(values) < step) & where)
    if len(wrong):
        i = int(wrong[0])
        rule = "increase" if step else "not decrease"
        _fail(f"{name} must {rule}{scope}: {values[i]}, then {values[i + 1]} at index {i + 1}")


def _permutation(name: str, values: Ints) -> None:
    if not np.array_equal(np.sort(values), np.arange(len(values))):
        _fail(f"{name} is not a permutation")


def _kind(x: Tensor) -> str:
    return f"{x.dtype} {list(x.shape)}"


def _fail(what: str) -> NoReturn:
    raise ValueError(f"layout: {what}")
