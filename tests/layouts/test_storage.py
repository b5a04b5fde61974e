"""A damaged or hostile layout raises a clear error before any kernel sees it."""

from __future__ import annotations

import pytest
import torch

import attnbias as ab
from attnbias.layouts.header import FIELDS, SIZES, VERSION

safetensors = pytest.importorskip("safetensors.torch")


@pytest.fixture
def layout():
    graph = ab.Graph([[300, 290], [10, 10]], num_nodes=320)
    made = ab.Layout.build(ab.Causal() | graph, 320, 320, tile=64)
    assert made.tiles and made.edges
    return ab.Layout(made.buffer.clone(), made.where.clone())


def damage(layout, field, index, value):
    getattr(layout, field).view(-1)[index] = value


DAMAGES = [
    ("group", 0, 7, r"group holds 7\.\.7, wanted 0\.\.0"),
    ("q_ptr", 1, 9, "q_ptr must not decrease: 9, then 1 at index 2"),
    ("q_ptr", 3, 2, "q_ptr leaves tiles out"),
    ("q_tile", 3, 99, r"q_tile holds 0\.\.99, wanted 0\.\.4"),
    ("q_tile", 3, -1, "q_tile holds -1"),
    ("q_tile", 4, 0, "q_tile must increase within a class of a row"),
    ("q_mark", 0, 5, r"q_mark holds 0\.\.5"),
    ("q_mark", 1, 1, "q_mark gives a full tile a depth"),
    ("k_tile", 1, 4, "k_tile must increase within a class of a row"),
    ("q_order", 0, 1, "q_order is not a permutation"),
    ("patterns", 0, 3, "patterns_t is not patterns transposed"),
    ("edge_ptr", 100, 0, "edge_ptr must not decrease: 2, then 0 at index 100"),
    ("edge_key", 0, 320, "edge_key holds"),
    ("edge_key", 0, 319, "edge_key must not decrease within a row: 319, then 300 at index 1"),
    ("edge_key", 0, 289, "the edges by row and by column differ"),
    ("edge_id", 0, -1, "edge_id: wanted 0 or more, got -1"),
    ("col_query", 0, 11, "the edges by row and by column differ"),
    ("col_edge", 0, 1, "col_edge is not a permutation"),
]


@pytest.mark.parametrize(("field", "index", "value", "words"), DAMAGES, ids=[d[3][:40] for d in DAMAGES])
def test_damaged_field_raises(layout, field, index, value, words):
    layout.validate()
    damage(layout, field, index, value)
    with pytest.raises(ValueError, match=f"layout: {words}"):
        ab.Layout(layout.buffer, layout.where).validate()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("version", VERSION + 1, f"version {VERSION + 1}, this library reads {VERSION}"),
        ("tile", 32, "tile: wanted 64 or 128, got 32"),
        ("q_len", -1, r"q_len: wanted 0 or more, below 2\^31, got -1"),
        ("k_len", 1 << 40, "k_len: wanted 0 or more"),
        ("groups", 1 << 30, "entries"),
        ("edges", 100, "its sizes ask for"),
    ],
)
def test_hostile_size_raises_before_any_read(layout, name, value, words):
    layout.where[SIZES.index(name)] = value
    with pytest.raises(ValueError, match=f"layout: .*{words}"):
        ab.Layout(layout.buffer, layout.where).validate()


def test_hostile_offset_raises(layout):
    layout.where[len(SIZES) + FIELDS.index("edge_key")] = 1 << 40
    with pytest.raises(ValueError, match="its sizes ask for"):
        ab.Layout(layout.buffer, layout.where).validate()


def test_pair_in_both_a_tile_and_an_edge_raises(layout):
    other = ab.Layout.build(ab.Graph([[0, 5], [10, 10]], num_nodes=320), 320, 320, tile=64, form="edges")
    for name in ("edge_key", "col_ptr", "col_query", "col_edge", "edge_ptr"):
        getattr(layout, name).copy_(getattr(other, name))
    with pytest.raises(ValueError, match="a pair is both in a tile and an edge"):
        ab.Layout(layout.buffer, layout.where).validate()


def test_bits_past_the_end_raise():
    made = ab.Layout.build(ab.Causal(), 100, 100, tile=64, form="tiles")
    layout = ab.Layout(made.buffer.clone(), made.where)
    mark = int(layout.q_mark[int(layout.q_ptr[0, 1, 1])])  # of the last, ragged tile
    layout.patterns[mark, 0, 1] = -1
    with pytest.raises(ValueError, match="patterns_t is not patterns transposed"):
        ab.Layout(layout.buffer, layout.where).validate()
    layout.patterns_t[mark, 32:, 0] |= 1
    with pytest.raises(ValueError, match="a pattern has bits past k_len"):
        ab.Layout(layout.buffer, layout.where).validate()


def test_lists_that_disagree_raise():
    tall = ab.Layout.build(ab.Causal(), 128, 128, tile=64, form="tiles")
    layout = ab.Layout(tall.buffer.clone(), tall.where)
    layout.k_tile[:3] = torch.tensor([0, 1, 0])
    with pytest.raises(ValueError, match="hold different tiles"):
        ab.Layout(layout.buffer, layout.where).validate()
    layout = ab.Layout(tall.buffer.clone(), tall.where)
    layout.k_ptr[0, 0, 1] = 0
    layout.k_tile[:2] = torch.tensor([0, 1])
    with pytest.raises(ValueError, match="a tile is full by query and partial by key"):
        ab.Layout(layout.buffer, layout.where).validate()


def test_wrong_tensors_raise(layout):
    with pytest.raises(ValueError, match=r"buffer: wanted int32 \[n\], got torch\.int64"):
        ab.Layout(layout.buffer.long(), layout.where).validate()
    with pytest.raises(ValueError, match=r"where: wanted at least 29 dense int64, got torch\.int64 \[3\]"):
        ab.Layout(layout.buffer, layout.where[:3]).validate()


def test_files_that_are_not_layouts_raise(tmp_path, layout):
    path = tmp_path / "x.safetensors"
    with pytest.raises(FileNotFoundError, match="path: no such file"):
        ab.Layout.load(path)
    path.write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="is not a safetensors file"):
        ab.Layout.load(path)
    safetensors.save_file({"other": torch.zeros(1)}, str(path))
    with pytest.raises(ValueError, match=r"holds \['other'\], a layout holds buffer and where"):
        ab.Layout.load(path)
    layout.save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-64])
    with pytest.raises(ValueError, match="is not a safetensors file"):
        ab.Layout.load(path)
    damage(layout, "q_tile", 3, 99)
    layout.save(path)
    with pytest.raises(ValueError, match="is damaged: layout: q_tile holds"):
        ab.Layout.load(path)


def test_random_damage_never_passes_unless_harmless(layout):
    """Change entries at random: either validate raises, or the layout still holds the same pairs."""
    generator = torch.Generator().manual_seed(0)
    wanted = layout.to_dense()
    told = 0
    for _ in range(300):
        damaged = ab.Layout(layout.buffer.clone(), layout.where)
        place = int(torch.randint(len(layout.buffer), (), generator=generator))
        damaged.buffer[place] ^= 1 << int(torch.randint(31, (), generator=generator))
        try:
            damaged.validate()
        except ValueError:
            told += 1
            continue
        assert torch.equal(damaged.to_dense(), wanted), place
    assert told > 200


def ring():
    return ab.Layout.build(ab.Graph([[0, 1, 2], [1, 2, 0]], num_nodes=3), 3, 3, form="edges")


def test_layout_written_by_torch_is_validated_before_use():
    """docs/layouts.md lists which writes are noticed."""
    layout = ring()
    q, k, v = torch.randn(3, 1, 1, 3, 4)
    ab.attention(q, k, v, layout)
    layout.edge_key[1] = 1 << 30
    with pytest.raises(ValueError, match="edge_key holds"):
        ab.attention(q, k, v, layout)


@pytest.mark.parametrize("alias", [lambda x: x.numpy(), lambda x: x.data, torch.from_dlpack])
def test_write_that_bypasses_torch_is_found_only_by_validate(alias):
    layout = ring()
    alias(layout.edge_key)[1] = 1 << 30
    assert layout.is_trusted
    with pytest.raises(ValueError, match="edge_key holds"):
        layout.validate()


def test_fields_and_their_shapes_have_one_order():
    assert tuple(ab.Causal().layout(5, 5).header.shapes) == FIELDS
