"""Layouts: exact, validated, saved, cached, and never larger than necessary."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from torch.utils import _pytree

import attnbias as ab
from attnbias.layouts.cache import LayoutCache
from attnbias.layouts.costs import costs_of
from attnbias.layouts.header import FIELDS, SIZES

SHAPES = [(1, 1), (63, 65), (64, 64), (97, 129), (128, 200), (200, 97)]


def relations(q_len: int, k_len: int) -> list[ab.Relation]:
    """Return relations of every exact form, at these lengths."""
    generator = torch.Generator().manual_seed(q_len * 1000 + k_len)

    def integers(high, *shape, low=0):
        return torch.randint(low, high, shape, generator=generator)

    edges = torch.stack((integers(k_len, 3 * q_len), integers(q_len, 3 * q_len)))
    graph = ab.Graph(edges, size=(k_len, q_len))
    mask = torch.rand(2, 3, q_len, k_len, generator=generator) > 0.6
    scattered = ab.Documents(integers(3, 2, q_len, low=-1), integers(3, 2, k_len, low=-1))
    return [
        ab.Full(),
        ab.Empty(),
        ab.Causal(),
        ab.Window(before=30, after=2),
        ab.Dilated(3, before=5, after=2),
        ab.Dilated(2, before=90),
        ab.Columns(5) | ab.Window(before=4),
        ab.Chunks(50),
        ab.Prefix(torch.tensor([3, k_len])),
        ab.Global([0, 40, 41]),
        ab.RandomBlocks(16, 2),
        graph,
        graph | ab.Window(before=9),
        ~graph & ab.Causal(),
        (ab.Columns(3) | graph) - ab.Prefix(4),
        scattered,
        scattered & ab.Causal(),
        ab.Dense(mask),
        ab.Neighbors(integers(k_len, 3, q_len, 4, low=-1)),
        ab.Where(lambda q, k: (q * k) % 7 < 2),
        ab.Where(lambda b, h, q, k: q + b > k - h),
        ab.PerHead([ab.Causal(), graph, ab.Where(lambda q, k: q > k)]),
        ab.PerBatch([ab.Columns(2), ab.Full()]),
    ]


@pytest.mark.parametrize(("q_len", "k_len"), SHAPES)
@pytest.mark.parametrize("form", ["auto", "tiles", "edges"])
@pytest.mark.parametrize("tile", [64, 128])
def test_layout_holds_exactly_the_related_pairs(q_len, k_len, form, tile):
    for relation in relations(q_len, k_len):
        duplicates = relation.bind(q_len, k_len, batch=2, heads=3).edges
        if form == "tiles" and duplicates is not None and duplicates.repeated.any():
            with pytest.raises(ValueError, match="form='tiles': duplicate edges count twice"):
                ab.Layout.build(relation, q_len, k_len, form=form, tile=tile)
            continue
        layout = ab.Layout.build(relation, q_len, k_len, form=form, tile=tile, batch=2, heads=3)
        layout.validate()
        dense = relation.dense(q_len, k_len, batch=2, heads=3)
        assert torch.equal(layout.to_dense().expand_as(dense), dense), relation
        if form != "auto":
            assert (layout.edges if form == "tiles" else layout.tiles) == 0


def test_counts_are_the_multiplicities_of_a_graph():
    graph = ab.Graph([[0, 0, 1, 2], [0, 0, 0, 2]], num_nodes=3)
    layout = graph.layout(3, 3)
    assert layout.rows(0, 3)[0, 0].tolist() == [[2, 1, 0], [0, 0, 0], [0, 0, 1]]
    assert layout.edge_id.tolist() == [0, 1, 2, 3]
    assert (graph & ab.Prefix(3)).layout(3, 3, form="edges").edges == 4


def test_edges_carry_the_callers_numbers_both_ways():
    edge_index = torch.tensor([[4, 0, 2, 0], [1, 3, 1, 0]])
    layout = ab.Graph(edge_index, num_nodes=5).layout(5, 5, form="edges")
    row = torch.repeat_interleave(torch.arange(5), layout.edge_ptr.diff())
    assert torch.equal(edge_index[:, layout.edge_id.long()], torch.stack((layout.edge_key, row)).long())
    column = torch.repeat_interleave(torch.arange(5), layout.col_ptr.diff())
    turned = edge_index[:, layout.edge_id[layout.col_edge.long()].long()]
    assert torch.equal(turned, torch.stack((column, layout.col_query)).long())


def test_equal_heads_and_batches_share_a_group():
    heads = ab.PerHead([ab.Causal(), ab.Full(), ab.Causal(), ab.Full()])
    assert heads.layout(8, 8).groups == 2
    assert ab.Padding([3, 5, 3]).layout(8, 8).groups == 2
    assert ab.Documents([[0, 1], [0, 1]]).layout(2, 2).groups == 1
    same = ab.Where(lambda b, h, q, k: q >= k).layout(8, 8, batch=4, heads=8)
    assert (same.batch, same.heads, same.groups) == (1, 1, 1)
    by_head = ab.Where(lambda b, h, q, k: q >= k + h).layout(8, 8, batch=4, heads=8)
    assert (by_head.batch, by_head.heads) == (1, 8)


def test_equal_patterns_are_stored_once():
    assert ab.Layout.build(ab.Causal(), 1024, 1024, tile=64).patterns_count == 1
    window = ab.Layout.build(ab.Window(before=255), 4096, 4096, tile=64)
    assert window.patterns_count == 2
    assert ab.Layout.build(ab.Columns(64), 2048, 2048, tile=64, form="tiles").patterns_count == 1


def test_stats_count_needed_and_executed_work():
    window = ab.Layout.build(ab.Causal() & ab.Window(before=255), 4096, 4096, tile=64).stats()
    assert window.pairs == ab.Window(before=255).count(4096, 4096)
    assert round(window.waste, 2) == 1.25
    assert window["tiles_full"] + window["tiles_partial"] == window.executed / 64**2
    assert dict(window)["edges"] == 0
    ragged = ab.Layout.build(ab.Full(), 100, 70, tile=64, form="tiles").stats()
    assert ragged.pairs == 7000
    assert (ragged.tiles_full, ragged.tiles_partial) == (2, 2)
    assert "2 full and 2 partial tiles of 64" in str(ragged)
    assert ragged.executed == 7000 and ragged.waste == 1.0  # nothing is executed past the ends
    short = ab.Layout.build(ab.Causal(), 40, 40, tile=64, form="tiles").stats()
    assert (short.pairs, short.executed) == (820, 1600)
    both = ab.Layout.build(ab.PerHead([ab.Causal(), ab.Window(before=3)]), 70, 130, tile=64, form="tiles")
    assert both.stats().executed == (64 * 64 + 6 * 128) * 2
    edges = ab.Layout.build(ab.Dilated(3, before=20), 40, 40, form="edges").stats()
    assert edges.executed == edges.edges == edges.pairs
    assert ab.Layout.build(ab.Empty(), 0, 0).stats().waste == 1.0


def test_stats_show_as_text():
    stats = ab.Layout.build(ab.Causal(), 40, 40, tile=64, form="tiles").stats()
    assert repr(stats) == str(stats)
    assert "820 pairs needed, 1600 executed (1.95x)" in repr(stats)


def test_full_tiles_need_no_bounds_along_the_side_that_is_walked():
    layout = ab.Layout.build(ab.Full(), 100, 70, tile=64, form="tiles")
    assert layout.q_ptr[0].tolist() == [[0, 1, 2], [2, 3, 4]]  # the last key tile is partial
    assert layout.k_ptr[0].tolist() == [[0, 1, 2], [2, 3, 4]]  # the last query tile is partial
    assert layout.k_tile[:4].tolist() == [0, 1, 0, 1]


def test_work_is_ordered_longest_first():
    layout = ab.Layout.build(ab.Causal(), 512, 512, tile=64)
    assert layout.q_order.tolist() == list(range(7, -1, -1))
    assert layout.k_order.tolist() == list(range(8))


def test_fields_are_aligned_views_of_one_buffer():
    layout = ab.Layout.build(ab.Window(before=49) | ab.Graph([[0], [60]], num_nodes=90), 90, 90)
    assert layout.edges == 1
    offsets = layout.where[len(SIZES) :].tolist()
    assert all(offset % 4 == 0 for offset in offsets)
    for name in FIELDS:
        assert getattr(layout, name).untyped_storage().data_ptr() == layout.buffer.data_ptr()
    with pytest.raises(AttributeError, match="'Layout' object has no attribute 'nope'"):
        _ = layout.nope


@pytest.mark.parametrize("q_len", [0, 1, 5])
@pytest.mark.parametrize("k_len", [0, 1, 5])
def test_zero_lengths(q_len, k_len):
    for relation in (
        ab.Full(),
        ab.Causal(),
        ab.Columns(2),
        ab.Dilated(2, 1),
        ab.Global([0]),
        ~ab.Causal(),
    ):
        for form in ("auto", "tiles", "edges"):
            layout = ab.Layout.build(relation, q_len, k_len, form=form)
            layout.validate()
            assert torch.equal(layout.to_dense(), relation.dense(q_len, k_len))
    ab.Layout.build(ab.Padding([0, 3]), q_len, k_len).validate()
    ab.Graph(torch.zeros(2, 0).long(), size=(k_len, q_len)).layout(q_len, k_len).validate()


def test_picture_draws_tiles_and_edges(tmp_path):
    relation = ab.Causal() | ab.Graph([[300], [10]], num_nodes=320)
    layout = ab.Layout.build(relation, 320, 320, tile=64)
    path = tmp_path / "layout.png"
    pytest.importorskip("matplotlib")
    assert layout.picture(path) == "+...e\n#+...\n##+..\n###+.\n####+"
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match=r"group: wanted 0\.\.0, got 3"):
        layout.picture(group=3)
    with pytest.raises(ValueError, match="tiles are too many to draw"):
        ab.Causal().layout(1, 1 << 20).picture()


def test_layout_is_plain_data(tmp_path):
    pytest.importorskip("safetensors")
    layout = ab.Layout.build(ab.Causal() | ab.Graph([[40], [3]], num_nodes=70), 70, 70)
    assert pickle.loads(pickle.dumps(layout)) == layout
    leaves, spec = _pytree.tree_flatten(layout)
    assert len(leaves) == 2
    assert _pytree.tree_unflatten(leaves, spec) == layout
    assert layout.to("cpu") == layout
    assert layout != ab.Layout.build(ab.Causal(), 70, 70)
    assert layout != 3
    path = tmp_path / "layout.safetensors"
    layout.save(path)
    assert ab.Layout.load(path) == layout
    assert repr(layout).startswith("Layout(q_len=70, k_len=70, q_start=0, batch=1, heads=1, tile=")


def test_cache_on_a_buffer_is_shared_and_dropped_on_a_change():
    layout = ab.Layout.build(ab.Causal() | ab.Graph([[40], [3]], num_nodes=70), 70, 70)
    again = ab.Layout(layout.buffer, layout.where)
    assert again.is_trusted and again.kept is layout.kept
    assert again.edge_numbers == 1 and again.fields is layout.fields
    again.edge_id[0] = 4  # a view made earlier still counts the change
    assert not layout.is_trusted and layout.edge_numbers == 5
    layout.validate()
    assert again.is_trusted and not ab.Layout(layout.buffer, layout.where.clone()).is_trusted


def test_longest_row_and_column_are_known_before_a_move():
    index = torch.tensor([[0, 1, 2, 3, 3], [4, 4, 4, 4, 5]])
    layout = ab.Layout.build(ab.Graph(index, num_nodes=9), 9, 9)
    assert layout.longest == (4, 2)
    assert layout.kept.header.edges == 5
    moved = layout.to("meta")  # where nothing can be read
    assert moved.longest == (4, 2)
    grouped = ab.PerHead([ab.Graph(index, num_nodes=9), ab.Graph(index.flip(0), num_nodes=9)])
    assert ab.Layout.build(grouped, 9, 9).longest == (4, 4)
    assert ab.Layout.build(ab.Causal(), 64, 64, form="tiles").longest == (0, 0)
    layout.edge_key[0] = 0  # counted again
    assert layout.kept.longest is None


def test_layouts_are_freed_without_the_garbage_collector():
    """A view of the buffer in the buffer's own cache would keep it alive forever."""
    layout = ab.Layout.build(ab.Causal(), 200, 200)
    q, k, v = torch.randn(3, 1, 1, 200, 16)
    ab.attention(q, k, v, layout)
    assert layout.stats().edges == layout.edge_numbers == 0
    gone = weakref.ref(layout.kept), weakref.ref(layout.fields.q_tile)
    gc.disable()
    try:
        del layout
        assert [each() for each in gone] == [None, None]
    finally:
        gc.enable()


def test_copies_of_a_layout_start_with_an_empty_cache():
    layout = ab.Layout.build(ab.Causal(), 200, 200)
    q, k, v = torch.randn(3, 1, 1, 200, 16)
    want = ab.attention(q, k, v, layout)
    stream = io.BytesIO()
    torch.save({"layout": layout, "buffer": layout.buffer}, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=True)
    buffer = copy.deepcopy(layout.buffer)
    for each in (
        copy.deepcopy(layout),
        pickle.loads(pickle.dumps(layout)),
        loaded["layout"],
        ab.Layout(loaded["buffer"], layout.where),
        ab.Layout(buffer, layout.where),
    ):
        assert not each.is_trusted and each == layout
        assert torch.equal(ab.attention(q, k, v, each), want)


def test_layout_refuses_other_lengths():
    layout = ab.PerHead([ab.Causal()] * 2).layout(4, 4)
    with pytest.raises(ValueError, match="layout is for 4 queries and 4 keys, query and key have 4 and 5"):
        layout.check(4, 5, 1, 2)
    with pytest.raises(ValueError, match="this layout has heads 2, query has 3"):
        layout.check(4, 4, 1, 3)


def test_build_refuses_unknown_form_and_tile():
    with pytest.raises(ValueError, match="form: wanted 'auto', 'tiles' or 'edges', got 'dense'"):
        ab.Layout.build(ab.Causal(), 4, 4, form="dense")
    with pytest.raises(ValueError, match="tile: wanted 64, 128 or None, got 32"):
        ab.Layout.build(ab.Causal(), 4, 4, tile=32)


def test_layouts_beyond_int32_are_refused():
    with pytest.raises(ValueError, match=r"fewer than 2\^31 are possible"):
        ab.Layout.build(ab.Prefix(1 << 24), 1 << 24, 1 << 24)


def test_relations_without_data_share_a_cache_and_others_keep_their_own():
    ab.layout_cache.clear()
    first = ab.Window(before=3).layout(50, 50)
    assert ab.Window(before=3).layout(50, 50) is first
    assert ab.Window(before=3).layout(50, 50, q_start=0) is first
    assert ab.Window(before=3).layout(50, 51) is not first
    assert len(ab.layout_cache) == 2
    documents = ab.Documents(torch.zeros(100, dtype=torch.int64))
    kept = documents.layout(100, 100)
    assert documents.layout(100, 100) is kept
    assert len(ab.layout_cache) == 2
    gone = weakref.ref(kept)
    del kept, documents
    gc.collect()
    assert gone() is None
    ab.layout_cache.clear()
    assert (len(ab.layout_cache), ab.layout_cache.bytes) == (0, 0)


def test_cache_is_bounded_in_bytes_and_safe_across_threads():
    layouts = [ab.Layout.build(ab.Causal(), n, n, tile=64) for n in range(64, 80)]
    size = layouts[0].buffer.numel() * 4
    cache = LayoutCache(limit=4 * size)

    def work():
        for number, layout in enumerate(layouts * 20):
            cache.put((number % 16,), layout)
            cache.get((number % 7,))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cache.bytes <= cache.limit
    assert 0 < len(cache) <= 4
    assert LayoutCache(limit=1).put(("x",), layouts[0]) is layouts[0]


_GROWTH = """
import resource, sys, attnbias as ab
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
n = 1 << 18
for relation in (
    ab.Causal() & ab.Window(before=255),
    ab.Documents.from_lengths([n // 1000] * 999 + [n - n // 1000 * 999]) & ab.Causal(),
    ab.Window(before=255) | ab.Global(range(64)),
):
    layout = ab.Layout.build(relation, n, n)
    assert layout.buffer.numel() * 4 <= 200 * n, (relation, layout)
n = 1 << 14
for relation in (
    ab.Columns(128), ab.Where(lambda q, k: (q // 64) % 7 == (k // 64) % 5),
    ab.Documents([i % 3 for i in range(n)]), ab.Columns(64) | ab.Window(before=63),
):
    ab.Layout.build(relation, n, n)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) / 1024)
"""


def test_memory_never_grows_as_the_square():
    """A square of 2^18 booleans would take 64 GiB, one of 2^14 256 MiB and its int64 indices 2 GiB."""
    run = subprocess.run([sys.executable, "-c", _GROWTH], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) < 600


def test_costs_follow_the_device(monkeypatch):
    """A window of 256 fills tiles of 64 better; whether that pays off depends on their cost."""
    window = ab.Causal() & ab.Window(before=255)
    assert ab.Layout.build(window, 4096, 4096, device="meta").tile == 64
    for capability, cost in (((8, 0), 1.18), ((8, 9), 1.29), ((9, 0), 1.37), ((10, 3), 2.0), ((13, 0), 1.24)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert costs_of(torch.device("cuda", 0)).tile[64] == cost
    assert costs_of(torch.device("cpu")).run is not None


@pytest.mark.parametrize(("before", "length"), [(20, 500), (30, 3000)])
def test_equal_work_chooses_the_larger_tile(before, length):
    """All pairs are edges at either size, and the rounding of two sums used to choose the smaller."""
    layout = ab.Layout.build(ab.Window(before=before), length, length)
    assert (layout.tiles, layout.tile) == (0, 128)
