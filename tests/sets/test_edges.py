"""Edge lists: the library's sort and numpy's agree, and both CSRs hold the same edges."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import attnbias as ab
from attnbias.native import open_library
from attnbias.sets import edges as edges_module
from attnbias.sets import sort as sort_module
from attnbias.sets.edges import Edges

if isinstance(open_library(), str):
    pytest.skip(str(open_library()), allow_module_level=True)


def draw(groups: int, q_len: int, k_len: int, n: int, order: str) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    row, key = rng.integers(0, groups * q_len, n), rng.integers(0, k_len, n)
    if order == "rows":
        row = np.sort(row)
    elif order == "both":
        place = np.lexsort((key, row))
        row, key = row[place], key[place]
    return row, key


@pytest.mark.parametrize("numbered", [False, True])
@pytest.mark.parametrize("order", ["none", "rows", "both"])
@pytest.mark.parametrize("sizes", [(1, 9, 7, 60), (3, 9, 7, 90), (2, 1, 1, 4), (1, 5, 3, 0)])
def test_both_sorts_agree(
    sizes: tuple[int, int, int, int], order: str, numbered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, q_len, k_len, n = sizes
    row, key = draw(*sizes, order)
    group = np.arange(groups)[:, None]
    number = np.random.default_rng(1).permutation(1000)[:n] if numbered else None
    by_library = Edges.from_pairs(q_len, k_len, group, row, key, number)
    monkeypatch.setattr(edges_module, "sort_edges", lambda *_: None)
    by_numpy = Edges.from_pairs(q_len, k_len, group, row, key, number)
    assert by_library.key.dtype == np.int32 and by_numpy.key.dtype == np.int64
    for mine, theirs in ((by_library, by_numpy), (by_library.turned, by_numpy.turned)):
        assert (mine.q_len, mine.k_len) == (theirs.q_len, theirs.k_len)
        for name in ("ptr", "key", "id", "row"):
            assert np.array_equal(getattr(mine, name), getattr(theirs, name)), name


def test_filtered_list_is_transposed_again() -> None:
    row, key = draw(1, 9, 7, 60, "none")
    edges = Edges.from_pairs(9, 7, np.zeros((1, 1), np.int64), row, key)
    kept = edges.filter(edges.key > 2)
    assert len(kept.turned.key) == len(kept.key) < 60
    assert np.array_equal(kept.key[kept.turned.id], np.sort(kept.key))


@pytest.mark.parametrize("dtype", [np.int32, np.int16])
def test_integers_of_other_widths(dtype: Any) -> None:
    row, key = (x.astype(dtype) for x in draw(1, 9, 7, 60, "none"))
    lists = sort_module.sort_edges(row, key.astype(np.int64), 1, 9, 7)
    assert lists is not None
    assert np.array_equal(lists.edge_key, key[np.lexsort((key, row))])


def test_values_beyond_int32_are_sorted_by_numpy() -> None:
    none = np.zeros(0, np.int64)
    assert sort_module.sort_edges(none, none, 1 << 16, 1 << 16, 4) is None


def test_errors_of_the_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="edges: wanted rows below 5 and keys below 6, got row 5 and key 0"):
        sort_module.sort_edges(np.array([0, 5]), np.array([0, 0]), 1, 5, 6)

    class Full:
        @staticmethod
        def ab_sort_edges(_: object) -> int:
            return 2

    monkeypatch.setattr(sort_module, "open_library", Full)
    with pytest.raises(MemoryError, match="edges: no memory to sort 1 of them"):
        sort_module.sort_edges(np.array([0]), np.array([0]), 1, 5, 6)


@pytest.mark.parametrize("form", ["auto", "edges"])
@pytest.mark.parametrize("tile", [None, 64, 128])
@pytest.mark.parametrize(("nodes", "edges"), [(300, 900), (300, 30_000), (1, 3), (200, 0)])
def test_a_layout_is_the_same_without_the_library(
    nodes: int, edges: int, tile: Any, form: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sparse graphs take a shortcut to a layout without tiles; dense ones do not."""
    index = torch.randint(nodes, (2, edges), generator=torch.Generator().manual_seed(0))
    graph = ab.Graph(index, num_nodes=nodes)
    mine = ab.Layout.build(graph, nodes, nodes, form=form, tile=tile)
    mine.validate()
    monkeypatch.setattr(edges_module, "sort_edges", lambda *_: None)
    theirs = ab.Layout.build(graph, nodes, nodes, form=form, tile=tile)
    assert torch.equal(mine.buffer, theirs.buffer) and torch.equal(mine.where, theirs.where)
    assert torch.equal(mine.to_dense(), graph.dense(nodes, nodes))


def test_long_filtered_list_is_transposed_in_64_bits():
    """The library's int32 keys are too narrow for a key and a place in one word."""
    rng = np.random.default_rng(0)
    row, key = rng.integers(0, 1 << 15, (2, 1 << 18))
    edges = Edges.from_pairs(1 << 15, 1 << 15, np.zeros((1, 1), np.int64), row, key)
    kept = edges.filter(np.arange(1 << 18) % 2 == 0)
    assert np.array_equal(kept.key[kept.turned.id], np.sort(kept.key))
    assert np.array_equal(kept.row[kept.turned.id], kept.turned.key)
