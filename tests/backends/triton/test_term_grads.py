"""Room for the gradients of score terms, and their sums: the host's part, without a kernel."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from cases.reads import Reads
from torch import Tensor

import attnbias as ab

pytest.importorskip("triton")
from attnbias.backends.triton.backend import _lists
from attnbias.kernels.tiles import term_grads
from attnbias.kernels.tiles.term_grads import TermGrads

B, H, Q, K = 2, 4, 70, 197
GRID = 11
RELATIONS = {
    "one group": ab.Causal(),
    "empty rows": ab.Window(before=20) & ~ab.Bipartite(60),
    "a group for each head": ab.PerHead([ab.Causal(), ab.Window(before=9), ab.Empty(), ab.Full()]),
    "shared groups": ab.PerHead([ab.Causal(), ab.Window(before=9), ab.Causal(), ab.Empty()]),
    "nothing": ab.Empty(),
}
TILES = [(32, 64), (64, 16), (16, 16), (64, 64)]


def run_kernel(grads: TermGrads, ds: Tensor, layout: ab.Layout, rows: int, cols: int) -> int:
    """Store what the kernel would, tile by tile; return the most bytes of room."""
    lists, size, most = _lists(layout)[0], layout.tile, 0
    padded = torch.nn.functional.pad(ds, (0, -K % size, 0, -Q % size)).flatten(0, 1)
    for count in grads.rounds():
        arguments = grads.make_room(SimpleNamespace(rows=rows, cols=cols, tile=size))
        room, first_line = arguments["room"], arguments["first_line"]
        most = max(most, sum(x.numel() * x.element_size() for x in room if x is not None))
        around = rows // cols if rows > cols else 1
        for line in range(count):
            x = padded[first_line + line]
            if room.pairs is not None:
                room.pairs[line] = x[:Q, :K]
            g = int(layout.group.expand(B, H).flatten()[first_line + line])
            for i, (begin, *_, end) in enumerate(layout.q_ptr[g].tolist()):
                for t in range(begin, end):
                    j = int(lists.tile[t])
                    tile = x[i * size : (i + 1) * size, j * size : (j + 1) * size]
                    if room.tiles is not None:
                        room.tiles[room.first[line] + t] = tile
                    if room.sums is None:
                        continue
                    for r in range(size // rows):
                        for c in range(size // cols):
                            part = tile[r * rows : (r + 1) * rows, c * cols : (c + 1) * cols]
                            slot = ((room.first[line] + t) * (size // cols) + c) * (size // rows) + r
                            sums = torch.zeros((around + 1) * cols)
                            for n in range(-rows + 1, cols):
                                sums[n + around * cols] = part.diagonal(n).sum()
                            room.sums[slot] = sums
                            corner = (j * size + c * cols) - (i * size + r * rows)
                            block = (corner + -(-Q // rows) * rows) // min(rows, cols)
                            room.places[slot] = room.blocks[line] + block
    return most


def make(
    relation: str, pair: tuple[int, int] | None, seed: int = 0
) -> tuple[ab.Layout, Tensor, TermGrads, Tensor]:
    """Return a layout, gradients of its pairs, what adds them up, and the place of each in a table."""
    layout = ab.Layout.build(RELATIONS[relation], Q, K, q_start=K - Q, form="tiles", tile=64, heads=H)
    rng = torch.Generator().manual_seed(seed)
    ds = torch.randint(-8, 9, (B, H, Q, K), generator=rng).float()  # whole numbers: sums are exact
    ds *= layout.rows(0, Q).expand(B, H, Q, K) > 0
    codes = torch.randint(5, GRID, (Q,), generator=rng).int(), torch.randint(0, 5, (K,), generator=rng).int()
    grads = TermGrads(
        _lists(layout)[0],
        (B, H, Q, K),
        layout.listed(B, H),
        relative=torch.zeros(B, H, Q + K - 1),
        pair=None if pair is None else torch.zeros(*pair, Q, K),
        grid=torch.zeros(B, H, GRID),
        codes=codes,
    )
    return layout, ds, grads, codes[0][:, None].long() - codes[1]


@pytest.mark.parametrize("room", [1, 1 << 17, 1 << 28])
@pytest.mark.parametrize(
    ("relation", "pair", "tiles"),
    [
        ("one group", (1, 1), TILES[0]),
        ("one group", (B, H), TILES[1]),
        ("empty rows", (1, H), TILES[2]),
        ("empty rows", None, TILES[3]),
        ("a group for each head", (B, 1), TILES[0]),
        ("shared groups", (1, H), TILES[3]),
        ("nothing", (1, 1), TILES[0]),
    ],
)
def test_sums_of_pairs(
    relation: str,
    pair: tuple[int, int] | None,
    tiles: tuple[int, int],
    room: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(term_grads, "ROOM", room)
    monkeypatch.setattr(term_grads, "_PAIRS_AT_ONCE", 1 << 13)  # two tiles
    layout, ds, grads, place = make(relation, pair)
    run_kernel(grads, ds, layout, *tiles)
    assert grads.relative is not None and grads.grid is not None
    for n in range(1 - Q, K):
        wanted = ds.diagonal(n, 2, 3).sum(-1)
        assert torch.equal(grads.relative[:, :, n + Q - 1], wanted), n
    table = torch.zeros(B, H, GRID).index_add_(2, place.flatten(), ds.flatten(2))
    assert torch.equal(grads.grid, table)
    if pair is not None:
        assert grads.pair is not None
        summed = [i for i in (0, 1) if pair[i] == 1]
        assert torch.equal(grads.pair, ds.sum(summed, keepdim=True) if summed else ds)


def test_lines_are_computed_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(term_grads, "ROOM", 1 << 19)
    *_, grads, _ = make("one group", (1, 1))
    counts = [grads.make_room(SimpleNamespace(rows=64, cols=64)) and n for n in grads.rounds()]
    assert sum(counts) == B * H and 1 < len(counts) < B * H
    monkeypatch.setattr(term_grads, "ROOM", 1)
    *_, grads, _ = make("a group for each head", None)
    assert [grads.make_room(SimpleNamespace(rows=64, cols=64)) and n for n in grads.rounds()] == [B * H]


def test_room_does_not_grow_with_heads() -> None:
    """At 32k causal tokens and 16 heads the slots of diagonals took 1.1 GB, and pairs 69 GB."""
    n, heads = 32768, 16
    layout = ab.Causal().layout(n, n, heads=heads).to("meta")
    assert layout.tile == 128
    zeros = {"relative": torch.zeros(1, heads, 2 * n - 1, device="meta")}
    grads = TermGrads(_lists(layout)[0], (1, heads, n, n), layout.listed(1, heads), **zeros)
    rounds = grads.rounds()
    lines = next(rounds)
    room = grads.make_room(SimpleNamespace(rows=64, cols=128))["room"]
    taken = sum(x.numel() * x.element_size() for x in room if x is not None)
    tiles = layout.tiles
    assert tiles == 256 * 257 // 2
    of_line = tiles * 2 * (256 * 4 + 8)  # two tiles of 64 x 128, 256 sums and a place each
    assert taken == lines * (of_line + 16)
    assert taken < term_grads.ROOM < heads * of_line // 4


def test_a_layout_says_how_many_tiles_its_calls_have() -> None:
    """Nothing is read for it in a call: it is found while the layout is on the host."""
    for relation in RELATIONS.values():
        layout = ab.Layout.build(relation, Q, K, form="tiles", tile=64, heads=H)
        counts = (layout.q_ptr[:, -1, -1] - layout.q_ptr[:, 0, 0])[layout.group.expand(B, H).long()]
        assert layout.listed(B, H) == int(counts.sum())
        moved, wanted = layout.to("meta"), layout.listed(B, H)
        assert moved.header == layout.header  # read from ``where``, which is on the host
        with Reads() as reads:
            assert moved.listed(B, H) == wanted
        assert (reads.numbers, reads.lists) == (0, 0)
    assert layout.groups == 1
    shared = ab.Layout.build(RELATIONS["shared groups"], Q, K, form="tiles", heads=H)
    assert shared.groups == 3  # two heads have the same
