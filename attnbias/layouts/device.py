"""Layouts of pairs that lie on a GPU, made there.

Builds the layout that ``host.py`` builds, with PyTorch's sorts and searches. The host waits once, for the few
numbers that sizes and errors depend on. Where tiles may pay it waits some times more, because how many tiles
and patterns are distinct is known one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..sets.intervals import Ints, count_groups
from ..sets.pairs import Pairs
from .choose import DUPLICATES
from .costs import Costs
from .fill import EdgeLists, Form, Side, fill
from .header import Header
from .record import Record


class _Sizes(NamedTuple):
    """Lengths, and those in tiles."""

    groups: int
    q_len: int
    k_len: int
    tile: int

    @property
    def q_tiles(self) -> int:
        return -(-self.q_len // self.tile)

    @property
    def k_tiles(self) -> int:
        return -(-self.k_len // self.tile)


class _List(NamedTuple):
    """Pairs sorted by row, then key."""

    row: Tensor  # [E]
    key: Tensor  # [E]
    number: Tensor  # [E]
    is_repeated: Tensor  # [E], equal to the pair before it


class _Tiles(NamedTuple):
    """Tiles that hold pairs, in order of (row, col)."""

    row: Tensor  # [n], g * q_tiles + query tile
    col: Tensor  # [n]
    is_covered: Tensor  # [n], every pair that exists is related
    of_pair: Tensor  # [E], the tile of each pair, -1 = none

    def keep(self, which: Tensor) -> _Tiles:
        place = _places(which)
        return _Tiles(self.row[place], self.col[place], self.is_covered[place], _number(which)[self.of_pair])


def lay_out(
    pairs: Pairs, q_len: int, k_len: int, *, q_start: int, form: Form, tile: int | None, costs: Costs
) -> Record:
    """Choose tile size and form by counted work, then list."""
    groups = count_groups(pairs.group)
    sizes = [_Sizes(groups, q_len, k_len, size) for size in costs.sizes(tile)]
    listed, has_repeats, may_pay = _sort(pairs, sizes, costs)
    if form == "tiles" and has_repeats:
        raise ValueError(DUPLICATES)
    if form == "edges" or (form == "auto" and not may_pay):
        return _assemble_edges(pairs.group, q_start, sizes[0], listed)
    tried = []
    for size in sizes:
        tiles = _tile(listed, size)
        kept, work = _weigh(listed, size, tiles, form, costs)
        tried.append((work, size, tiles, kept))
    least = int(torch.stack([work for work, *_ in tried]).argmin()) if len(tried) > 1 else 0
    _, chosen, tiles, kept = tried[least]
    return _assemble(pairs.group, q_start, chosen, listed, tiles.keep(kept[tiles.row]))


def _sort(pairs: Pairs, sizes: Sequence[_Sizes], costs: Costs) -> tuple[_List, bool, bool]:
    """Return the pairs that are there, sorted, whether some are repeated, and whether a tile may pay.

    The host reads once, all that it needs of most graphs: in those no tile row has so many pairs that even a
    single tile could be less work.

    Raises:
        ValueError: if a pair is among no queries and keys.
    """
    groups, q_len, k_len, _ = sizes[0]
    code, stop = pairs.row * k_len + pairs.key, groups * q_len * k_len
    if pairs.is_there is not None:
        code = torch.where(pairs.is_there, code, stop)
    code, place = torch.sort(code, stable=True)
    is_repeated = torch.zeros_like(code, dtype=torch.bool)
    is_repeated[1:] = (code.diff() == 0) & (code[1:] < stop)
    pays = [
        (_count_pairs(code, size) * costs.edge >= _areas(size, code.device) * costs.tile[size.tile]).any()
        for size in sizes
    ]
    facts = torch.stack(((code < stop).sum(), is_repeated.any(), *pays))
    extremes = facts[:0] if pairs.extremes is None else pairs.extremes
    count, has_repeats, *rest = torch.cat((facts, extremes)).tolist()
    if pairs.check is not None:
        pairs.check(rest[len(sizes) :])
    code, place = code[:count], place[:count]
    number = place if pairs.number is None else pairs.number[place]
    listed = _List(code // max(k_len, 1), code % max(k_len, 1), number, is_repeated[:count])
    return listed, bool(has_repeats), any(rest[: len(sizes)])


def _count_pairs(code: Tensor, sizes: _Sizes) -> Tensor:
    """Count the pairs in each tile row, from the sorted ``row * k_len + key``."""
    first = torch.arange(sizes.q_tiles, device=code.device) * (sizes.tile * sizes.k_len)
    of_group = sizes.q_len * sizes.k_len
    begin = torch.arange(sizes.groups, device=code.device)[:, None] * of_group + first
    end = torch.nn.functional.pad(begin.flatten(), (0, 1), value=sizes.groups * of_group)
    return torch.searchsorted(code, end).diff()


def _areas(sizes: _Sizes, device: torch.device) -> Tensor:
    """Return the pairs in a tile of each tile row."""
    return _heights(sizes, device) * min(sizes.tile, sizes.k_len)


def _places(which: Tensor) -> Tensor:
    """Return where a mask is true; the host then waits for the count once, not for each tensor it indexes."""
    return which.nonzero().squeeze(1)


def _number(which: Tensor) -> Tensor:
    """Return the rank of each True entry, -1 for False; padded so that index -1 is also -1."""
    which = torch.nn.functional.pad(which, (0, 1))
    return torch.where(which, which.cumsum(0) - 1, -1)


def _pointer(place: Tensor, size: int) -> Tensor:
    """Return the offsets [size + 1] of sorted numbers below ``size``."""
    return torch.searchsorted(place, torch.arange(size + 1, device=place.device))


def _tile_rows(listed: _List, sizes: _Sizes) -> Tensor:
    """Return the tile row of each pair; sorted, as the rows are."""
    q_len = max(sizes.q_len, 1)
    return listed.row // q_len * sizes.q_tiles + listed.row % q_len // sizes.tile


def _heights(sizes: _Sizes, device: torch.device) -> Tensor:
    """Count the queries in each tile row: fewer at the end."""
    first = torch.arange(sizes.q_tiles, device=device) * sizes.tile
    return (sizes.q_len - first).clamp(max=sizes.tile).repeat(sizes.groups)


def _tile(listed: _List, sizes: _Sizes) -> _Tiles:
    k_tiles = max(sizes.k_tiles, 1)
    place = _tile_rows(listed, sizes) * k_tiles + listed.key // sizes.tile
    place, of_pair, pairs = torch.unique(place, return_inverse=True, return_counts=True)
    row, col = place // k_tiles, place % k_tiles
    width = (sizes.k_len - col * sizes.tile).clamp(max=sizes.tile)
    # Repeated pairs are in the count, but not in the tile rows that are kept.
    return _Tiles(row, col, pairs == _heights(sizes, place.device)[row] * width, of_pair)


def _weigh(listed: _List, sizes: _Sizes, tiles: _Tiles, form: Form, costs: Costs) -> tuple[Tensor, Tensor]:
    """Return which tile rows [groups * q_tiles] are less work as tiles than as edges, and the work of all."""
    area, tile_row = _areas(sizes, tiles.row.device), _tile_rows(listed, sizes)
    rows = len(area)
    as_tiles = _pointer(tiles.row, rows).diff() * area
    as_tiles = as_tiles.double() * costs.tile[sizes.tile]
    ptr = _pointer(tile_row, rows)
    as_edges = ptr.diff().double() * costs.edge
    kept = as_tiles <= as_edges if form == "auto" else torch.full_like(area, form == "tiles").bool()
    repeated = torch.nn.functional.pad(listed.is_repeated.cumsum(0), (1, 0))  # before each pair
    kept = kept & (repeated[ptr].diff() == 0)  # a bit holds a pair once
    return kept, torch.where(kept, as_tiles, as_edges).sum()


def _assemble(group: Ints, q_start: int, sizes: _Sizes, listed: _List, tiles: _Tiles) -> Record:
    """Make the lists that ``Layout`` describes."""
    groups, q_len, k_len, tile = sizes
    g, query_tile = tiles.row // max(sizes.q_tiles, 1), tiles.row % max(sizes.q_tiles, 1)
    # Covered tiles at a ragged end are partial in one list and full in the other.
    by_query = ~(tiles.is_covered & (tiles.col < k_len // tile))
    by_key = ~(tiles.is_covered & (query_tile < q_len // tile))
    mark, *patterns = _patterns(listed, sizes, tiles, by_query | by_key)

    place = _places(tiles.of_pair < 0)
    edges = _List(*(x[place] for x in listed))
    count = {"tiles": len(tiles.row), "patterns_count": len(patterns[0]), "edges": len(edges.row)}
    return fill(
        Header.of(q_len, k_len, q_start, group, groups, tile, **count),
        _groups(group, listed.row.device),
        _side(groups * sizes.q_tiles, tiles.row, tiles.col, by_query, mark),
        _side(groups * sizes.k_tiles, g * sizes.k_tiles + tiles.col, query_tile, by_key, mark),
        (patterns[0], patterns[1]),
        _turn(edges, sizes) if len(edges.row) else None,
    )


def _assemble_edges(group: Ints, q_start: int, sizes: _Sizes, listed: _List) -> Record:
    """Make a layout of edges only; its size is known, so that nothing is read."""
    groups, q_len, k_len, tile = sizes
    counts = {"tiles": 0, "patterns_count": 0, "edges": len(listed.row)}
    none = listed.row.new_zeros(0)
    by_query, by_key = (
        Side(none, none, none, torch.arange(groups * tiles, device=none.device))
        for tiles in (sizes.q_tiles, sizes.k_tiles)
    )
    header = Header.of(q_len, k_len, q_start, group, groups, tile, **counts)
    edges = _turn(listed, sizes) if len(listed.row) else None
    return fill(header, _groups(group, none.device), by_query, by_key, (none, none), edges)


def _groups(group: Ints, device: torch.device) -> Tensor:
    """Return the map [batch, heads] of groups, one for each, without a copy to wait for."""
    return torch.arange(group.size, device=device).view(group.shape)


def _patterns(listed: _List, sizes: _Sizes, tiles: _Tiles, has_one: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The pattern of each tile [n], and the bits of the distinct ones by query and by key."""
    tile = sizes.tile
    mark = _number(has_one)
    of_pair = mark[tiles.of_pair]
    inside = _places(of_pair >= 0)
    number, key = of_pair[inside], listed.key[inside] % tile
    query = listed.row[inside] % max(sizes.q_len, 1) % tile
    count = int(mark.max()) + 1
    words, words_t = (_bits(count, tile, *places) for places in ((number, query, key), (number, key, query)))
    if not count:
        return mark, words, words_t
    distinct, same = torch.unique(words.flatten(1), dim=0, return_inverse=True)
    example = torch.zeros(len(distinct), dtype=torch.int64, device=same.device)
    example.scatter_(0, same, torch.arange(count, device=same.device))  # whichever: they are equal
    return torch.where(mark < 0, -1, same[mark]), words[example], words_t[example]


def _bits(count: int, tile: int, number: Tensor, row: Tensor, bit: Tensor) -> Tensor:
    """Words [count, tile, tile / 32] with these bits set, each given once."""
    words = torch.zeros(count, tile, tile // 32, dtype=torch.int32, device=row.device)
    one = torch.ones_like(row, dtype=torch.int32)
    # A sum of different bits sets them all, the one of the sign too.
    words.view(-1).index_add_(0, (number * tile + row) * (tile // 32) + bit // 32, one << (bit % 32).int())
    return words


def _side(rows: int, row: Tensor, col: Tensor, is_partial: Tensor, mark: Tensor) -> Side:
    """Return the tiles by query or by key: in each row first the full ones, then the partial ones."""
    kind, place = torch.sort(row * 2 + is_partial, stable=True)
    ptr = _pointer(kind, 2 * rows)
    bounds = torch.stack((ptr[:-1:2], ptr[1::2], ptr[2::2]), 1)
    marks = torch.where(is_partial, mark[:-1], 0)
    return Side(bounds, col[place], marks[place], torch.argsort(-ptr[::2].diff(), stable=True))


def _turn(edges: _List, sizes: _Sizes) -> EdgeLists:
    """Return the lists by row and by column."""
    groups, q_len, k_len, _ = sizes
    column, place = torch.sort(edges.row // q_len * k_len + edges.key, stable=True)
    return EdgeLists(
        edge_ptr=_pointer(edges.row, groups * q_len),
        edge_key=edges.key,
        edge_id=edges.number,
        col_ptr=_pointer(column, groups * k_len),
        col_query=(edges.row % q_len)[place],
        col_edge=place,
    )
