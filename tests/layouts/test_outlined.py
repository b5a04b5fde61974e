"""Layouts of data on a device, made there: the same as the host's, with at most one read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases.reads import Reads, refuse_transfers
from torch import Tensor

import attnbias as ab
from attnbias.layouts import build, overflow
from attnbias.layouts.costs import GPU_COSTS
from attnbias.testing import make_inputs, random_relation

N = 300  # ragged for both tile sizes


@pytest.fixture(autouse=True)
def _forget_messages() -> Iterator[None]:
    yield
    overflow._messages.clear()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let messages arrive later, as those of a GPU do."""
    monkeypatch.setattr(overflow, "arrives_at_once", lambda device: False)


def numbers(low: int, high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def packed(*lengths: int) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def some_ranges(*shape: int) -> ab.Relation:
    start = numbers(0, N, *shape)
    return ab.Ranges(start, (start + numbers(0, 90, *shape, seed=1)).clamp(max=N))


IDS = packed(40, 1, 130, 129)
RELATIONS: dict[str, ab.Relation] = {
    "documents": ab.Documents(IDS),
    "padded documents": ab.Documents(torch.where(torch.arange(N) < 270, IDS, -1)),
    "documents by batch": ab.Documents(torch.stack((IDS, packed(N), packed(*[3] * 100)))),
    "documents in any order": ab.Documents(numbers(-1, 5, N)),
    "documents whose numbers fall": ab.Documents(7 - IDS),
    "documents of other keys": ab.Documents(IDS, torch.cat((packed(100, 0, 150), torch.full((50,), 9)))),
    "causal documents": ab.Documents(IDS) & ab.Causal(),
    "each document": ab.Documents(IDS).each(ab.Window(before=20)),
    "ranges": some_ranges(N),
    "ranges that overlap": some_ranges(N, 4),
    "ranges by batch": some_ranges(2, N, 2),
    "ranges by batch and head": some_ranges(2, 3, N, 1),
    "no ranges": ab.Ranges(torch.zeros(N, 0, dtype=torch.int64), torch.zeros(N, 0, dtype=torch.int64)),
    "ranges of queries": some_ranges(N).T,
    "moved ranges": some_ranges(N, 2).shift(37),
    "block map": ab.Blocks(numbers(0, 3, 10, 10) == 0, 32),
    "block map by head": ab.Blocks(numbers(0, 3, 2, 3, 3, 5) == 0, (128, 64)),
    "odd blocks": ab.Blocks(numbers(0, 2, 43, 28) == 0, (7, 11)),
    "block lists": ab.Blocks(numbers(-1, 19, 2, 19, 4), 16),
    "turned blocks": ab.Blocks(numbers(0, 3, 10, 10) == 0, 32).T & ab.Causal(),
    "top blocks": ab.topk_blocks(torch.rand(5, 5, generator=torch.Generator().manual_seed(3)), 2, 64),
    "padding": ab.Padding(torch.tensor([300, 0, 129])) & ab.Causal(),
    "padding by mask": ab.Padding.from_mask(numbers(0, 5, 2, N) > 0),
    "left padding": ab.Padding.from_mask(torch.arange(N)[None] >= torch.tensor([[128], [1]])),
    "prefix": ab.Prefix(torch.tensor([5, 128, 299])) | ab.Causal(),
    "none": ab.Prefix(torch.tensor([0])),
    "complement": ~ab.Documents(IDS) & ab.Window(before=70),
    "by head": ab.PerHead([ab.Documents(IDS), ab.Causal(), ab.Prefix(torch.tensor([9, 200]))]),
    "by batch": ab.PerBatch([ab.Documents(IDS), ab.Causal() & ab.Blocks(numbers(0, 3, 10, 10) == 0, 32)]),
    "no data": ab.Causal() & ab.Window(before=40) | ab.Global([3, 200]),
    "tree": ab.Tree(torch.arange(N) - 1),
}


def tiles_of(layout: ab.Layout, b: int, h: int, side: str) -> list[tuple[int, int, list[Any]]]:
    """Return the row, column and bits (None: full) of each tile of one batch and head, in order."""
    fields = layout.fields
    g = int(layout.group[min(b, layout.batch - 1), min(h, layout.heads - 1)])
    ptr, listed, mark = (getattr(fields, f"{side}_{name}") for name in ("ptr", "tile", "mark"))
    bits = fields.patterns if side == "q" else fields.patterns_t
    found = []
    for row, (begin, middle, end) in enumerate(ptr[g].tolist()):
        for i in range(begin, end):
            words = None if i < middle else bits[mark[i]].flatten().tolist()
            found.append((row, int(listed[i]), words))
    return found


def assert_same(mine: ab.Layout, theirs: ab.Layout) -> None:
    mine.validate()
    assert (mine.q_len, mine.k_len, mine.q_start) == (theirs.q_len, theirs.k_len, theirs.q_start)
    batch, heads = max(mine.batch, theirs.batch), max(mine.heads, theirs.heads)
    for b in range(batch):
        for h in range(heads):
            for side in "qk":
                assert tiles_of(mine, b, h, side) == tiles_of(theirs, b, h, side), (b, h, side)
    assert (
        mine.stats().executed // mine.groups == theirs.stats().executed // theirs.groups or batch * heads > 1
    )


@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize("name", RELATIONS)
def test_the_same_tiles_as_on_the_host(name: str, tile: int) -> None:
    relation = RELATIONS[name]
    theirs = ab.Layout.build(relation, N, N, form="tiles", tile=tile)
    mine = ab.Layout.build(relation, N, N, tile=tile, capacity=(theirs.groups * 3 * 25, 3 * 25 * 6))
    assert_same(mine, theirs)


@pytest.mark.parametrize("q_start", [0, 100, 203])
def test_some_of_the_queries(q_start: int) -> None:
    for name in ("causal documents", "ranges that overlap", "block lists", "ranges of queries", "prefix"):
        relation = RELATIONS[name]
        theirs = ab.Layout.build(relation, 97, N, q_start=q_start, form="tiles", tile=64)
        mine = ab.Layout.build(relation, 97, N, q_start=q_start, tile=64, capacity=100)
        assert_same(mine, theirs)


@pytest.mark.parametrize("seed", range(200))
def test_any_relation(seed: int) -> None:
    q_len, k_len = [(33, 70), (70, 33), (130, 130)][seed % 3]
    relation = random_relation(seed, 3, q_len=q_len, k_len=k_len, batch=2, heads=2)
    sizes = {"batch": 2, "heads": 2}
    rows, q_start = (q_len, 0) if seed % 2 else (q_len - 10, 7)
    try:
        mine = ab.Layout.build(relation, rows, k_len, q_start=q_start, tile=64, capacity=200, **sizes)
    except ValueError as error:
        assert "only the host can lay out" in str(error)
        assert "Graph" in repr(relation) or "Neighbors" in repr(relation)
        return
    dense = relation.dense(rows, k_len, q_start, **sizes)
    assert torch.equal(mine.to_dense().expand(2, 2, -1, -1), dense.expand(2, 2, -1, -1))
    mine.validate()


TREE = ab.Tree(torch.arange(N) - 1)
ORDER = torch.arange(N).flip(0)
MOVED = {
    "other documents": (~ab.Documents(IDS)).shift(150),
    "documents or causal": (ab.Documents(IDS) | ab.Causal()).shift(140),
    "documents by head": ab.PerHead([ab.Documents(IDS), ~ab.Documents(IDS)]).shift(-70),
    "turned": (~ab.Documents(IDS)).shift(150).T,
    "padding": (~ab.Padding.from_mask(numbers(0, 5, 1, N) > 0)).shift(30),
    "tree": TREE.shift(37),
    "turned tree": TREE.T & ab.Documents(IDS),
    "no tree": ~TREE.T & ab.Padding.from_mask(numbers(0, 5, 3, N) > 0),
    "relabelled": ab.Causal().permute(ORDER).shift(9),
    "mask": ab.Dense(numbers(0, 3, N, N) == 0).shift(20).T,
    "each by batch": ab.Documents(IDS).each(ab.Prefix(torch.tensor([3, 9]))),
    "each by head": ab.Documents(IDS).each(ab.PerHead([ab.Causal(), ab.Full(), ab.Window(before=5)])),
}


@pytest.mark.parametrize("name", MOVED)
def test_moved_data_ends_where_it_ends(name: str) -> None:
    relation = MOVED[name]
    for rows, q_start in ((N, 0), (130, 100), (15, 285)):
        layout = ab.Layout.build(relation, rows, N, q_start=q_start, capacity=900)
        dense = relation.dense(rows, N, q_start)
        assert torch.equal(layout.to_dense(), dense), (rows, q_start)


def test_autocast_and_the_default_device_change_nothing() -> None:
    """Products of block maps must not be rounded: one pair of a tile is missing here."""
    chosen = torch.ones(256, 256, dtype=torch.bool)
    chosen[3, 5] = False
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layout = ab.Blocks(chosen, 1).layout(256, 256, capacity=9)
    assert torch.equal(layout.to_dense(), chosen)
    with torch.device("meta"):
        layout = (ab.Documents([0, 0, 1]) & ab.Causal()).layout(3, 3, capacity=4)
    assert layout.to_dense().int().tolist() == [[1, 0, 0], [1, 1, 0], [0, 0, 1]]


@pytest.mark.parametrize(("q_len", "k_len"), [(0, 5), (5, 0), (0, 0)])
def test_no_queries_or_keys(q_len: int, k_len: int) -> None:
    for relation in (ab.Causal(), ab.Prefix(torch.tensor([1, 0])) | ab.Window(before=1)):
        layout = relation.layout(q_len, k_len, capacity=3)
        layout.validate()
        assert layout.stats().pairs == 0


def test_no_batch() -> None:
    for relation in (ab.Documents(torch.zeros(0, 5).long()), ab.Blocks(torch.zeros(0, 2, 3, 3).bool(), 2)):
        layout = relation.layout(5, 5, capacity=3)
        assert (layout.batch, layout.stats().pairs) == (0, 0)


def test_a_large_capacity_costs_nothing_more() -> None:
    layout = ab.Causal().layout(N, N, capacity=2**31 - 1)
    assert layout.tiles == 9


def test_a_step_of_decoding_reads_its_own_ranges() -> None:
    place = torch.arange(8)
    layout = ab.Ranges(place * 0, place + 1).layout(1, 5, q_start=4, capacity=4)
    assert layout.to_dense().all()


@pytest.mark.parametrize("backend", ["rows", "cpu"])
@pytest.mark.parametrize("name", ["causal documents", "ranges by batch and head", "block lists", "prefix"])
def test_attention_with_room_to_spare(name: str, backend: str) -> None:
    """Kernels follow the bounds of the lists, and not what stands behind them."""
    relation = RELATIONS[name]
    batch, heads = max(relation.batch_size or 1, 1), 6
    inputs = make_inputs(0, batch, heads, 3, N, N, 16, 8, requires_grad=True)
    if relation.head_count not in (1, 6):
        inputs = make_inputs(0, batch, relation.head_count, 1, N, N, 16, 8, requires_grad=True)
    results = []
    for layout in (relation.layout(N, N, capacity=500), relation.layout(N, N, form="tiles")):
        out, lse = ab.attention(*inputs, layout, return_lse=True, backend=backend)
        results.append((out, *torch.autograd.grad(out.sum() + lse[lse > -torch.inf].sum(), inputs)))
    tile = relation.layout(N, N, form="tiles").tile
    for got, want in zip(*results, strict=True):
        if tile == 128:
            assert torch.equal(got, want)
        torch.testing.assert_close(got, want)


# -- what is read ---------------------------------------------------------------------------------


DEVICE_DATA = [name for name in RELATIONS if name not in ("tree", "no data")]


@pytest.mark.parametrize("name", DEVICE_DATA)
@pytest.mark.usefixtures("late")
def test_nothing_is_read_with_a_capacity(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    relation = RELATIONS[name]
    relation.layout(N, N, capacity=499)  # what holds no data is outlined on the host once
    refuse_transfers(monkeypatch)
    with Reads() as reads:
        build.lay_out_outlined(
            relation._outline,
            relation.related,
            _place(relation),
            tile=None,
            capacity=build.Capacity(500, 500),
            costs=GPU_COSTS[80],
        )
    assert reads.numbers == reads.lists == 0


@pytest.mark.parametrize("name", DEVICE_DATA)
def test_one_list_is_read_without_a_capacity(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    relation = RELATIONS[name]
    for tile in (64, 128):
        relation._outline(_place(relation), tile)
    refuse_transfers(monkeypatch)
    with Reads() as reads:
        made = build.lay_out_outlined(
            relation._outline,
            relation.related,
            _place(relation),
            tile=None,
            capacity=None,
            costs=GPU_COSTS[80],
        )
    assert (reads.numbers, reads.lists) == (0, 1)
    monkeypatch.undo()
    assert made is not None
    theirs = ab.Layout.build(relation, N, N, form="tiles", tile=made.tile)
    assert_same(ab.Layout(made.buffer, made.where), theirs)


def _place(relation: ab.Relation) -> Any:
    return build.Place(N, N, 0, relation.batch_size, relation.head_count)


@pytest.mark.parametrize(
    "make",
    [
        ab.Documents,
        lambda x: ab.Documents(x, x) & ab.Causal(),
        lambda x: ab.Documents.from_lengths(x[:4], total=N),
        lambda x: ab.Documents.from_cu_seqlens(x[:4], x[:4], total=(N, N)),
        lambda x: ab.Documents(x).each(ab.Causal()),
        lambda x: ab.Ranges(x, x),
        lambda x: ab.Ranges(x, x).T | ab.Window(before=3),
        lambda x: ab.Blocks(x.view(10, 30), 30, counts=x[:10]),
        lambda x: ab.topk_blocks(x.view(10, 30).float(), 3, 30),
        lambda x: ~ab.Padding(x[:2]),
        lambda x: ab.Padding.from_mask(x.view(1, -1) > 0),
        lambda x: ab.Prefix(x[:2]).shift(3),
        lambda x: ab.PerHead([ab.Documents(x), ab.Causal()]),
    ],
)
def test_a_device_is_never_waited_for(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither when a relation is made nor when it is laid out: to read a meta tensor raises."""
    relation = make(torch.empty(N, dtype=torch.int64, device="meta"))
    monkeypatch.setattr(overflow, "report", lambda *_: None)
    layout = relation.layout(N, N, device="meta", capacity=(8, 5))
    assert layout.device.type == "meta" and (layout.tiles, layout.patterns_count) == (8, 5)


# -- what goes wrong ------------------------------------------------------------------------------


TIGHT = [((4, 5), "got 4 and 5"), ([5, 4], "got 5 and 4"), (0, "got 0 and 0")]


@pytest.mark.parametrize(("capacity", "got"), TIGHT)
def test_what_does_not_fit_raises(capacity: Any, got: str) -> None:
    relation = ab.Documents(IDS) & ab.Causal()
    assert relation.layout(N, N, capacity=(5, 5)).stats().pairs == relation.count(N, N)
    for _ in range(2):  # nothing wrong is kept
        with pytest.raises(
            ValueError, match=f"wanted room for 5 tiles, 5 of them partial, {got}; the layout"
        ):
            relation.layout(N, N, capacity=capacity)


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize(("capacity", "got"), TIGHT)
@pytest.mark.parametrize("backend", [None, "reference"])
def test_what_does_not_fit_on_a_device_is_left_empty_and_raised_later(
    capacity: Any, got: str, backend: str | None
) -> None:
    relation = ab.Documents(IDS) & ab.Causal()
    inputs = make_inputs(0, 1, 1, 1, N, N, 8, 8)
    for _ in range(2):
        layout = relation.layout(N, N, capacity=capacity)
        assert layout.stats().pairs == 0
        with pytest.raises(
            ValueError, match=f"wanted room for 5 tiles, 5 of them partial, {got}; the layout"
        ):
            ab.attention(*inputs, layout, backend=backend)
    layout = relation.layout(N, N, capacity=capacity)
    with pytest.raises(ValueError, match="wanted room for 5 tiles"):
        ab.attention_weights(*inputs[:2], layout)
    layout = relation.layout(N, N, capacity=capacity)
    with pytest.raises(ValueError, match="wanted room for 5 tiles"):
        relation.layout(N, N, capacity=9)
    ab.attention(*inputs, relation.layout(N, N, capacity=9))  # told once


def broken(relation: Any, name: str, value: Tensor) -> Any:
    """Put data in that the host would refuse, as only a device can hold it."""
    object.__setattr__(relation, name, value)
    return relation


BROKEN = [
    (lambda: ab.Documents(torch.full((N,), -2)), "ids: wanted -1 .padding. or more, got less"),
    (
        lambda: ab.Ranges(torch.full((N,), 5), torch.full((N,), 301)),
        "stop: wanted at most k_len = 300, got more",
    ),
    (
        lambda: broken(ab.Ranges([0] * N, [1] * N), "start", torch.full((N,), 2)),
        "stop: wanted 0 <= start <= stop in every range, got another",
    ),
    (
        lambda: broken(ab.Ranges([0] * N, [1] * N), "start", torch.full((N,), -1)),
        "stop: wanted 0 <= start <= stop in every range, got another",
    ),
    (lambda: broken(ab.Prefix([1]), "length", torch.tensor([-1])), "length: wanted 0 or more, got less"),
    (lambda: broken(ab.Padding([1]), "lengths_", torch.tensor([-1])), "lengths: wanted 0 or more, got less"),
    (
        lambda: broken(ab.Blocks([[0]] * 10, 30), "blocks", torch.full((10, 1), -2)),
        "blocks: wanted key blocks from -1 .none. to 9, got another",
    ),
]


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize(("make", "message"), BROKEN)
def test_bad_data_on_a_device_is_told(make: Any, message: str) -> None:
    """With a capacity by the next call, else by the layout itself; both leave kernels nothing to follow."""
    relation = make() & ab.Causal()
    layout = relation.layout(N, N, capacity=50)
    assert layout.stats().pairs == 0
    with pytest.raises(ValueError, match=message):
        ab.attention(*make_inputs(0, 1, 1, 1, N, N, 8, 8), layout)
    with pytest.raises(ValueError, match=message):
        build.lay_out_outlined(
            relation._outline, relation.related, _place(relation), tile=64, capacity=None, costs=GPU_COSTS[80]
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": -1}, "capacity: wanted at least 0, got -1"),
        ({"capacity": 2.5}, "capacity: wanted an integer, got 2.5"),
        (
            {"capacity": (1, 2, 3)},
            r"capacity: wanted a number of tiles, or \(tiles, partial tiles\), got \(1, 2, 3\)",
        ),
        ({"capacity": (5, -1)}, "capacity: wanted at least 0, got -1"),
        (
            {"capacity": 9, "form": "edges"},
            "capacity: wanted None with form='edges', which the host lays out",
        ),
        (
            {"capacity": 9, "score": ab.MultiLevel([4, 4])},
            "capacity: wanted None with a multi-level score, which the host lays out",
        ),
    ],
)
def test_bad_capacities_raise_one_sentence(options: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        ab.Causal().layout(N, N, **options)


def test_graphs_take_no_capacity() -> None:
    graph = ab.Graph(torch.tensor([[0], [1]]), num_nodes=N)
    with pytest.raises(ValueError, match=r"capacity: wanted None, because only the host can lay out .*Graph"):
        (graph & ab.Causal()).layout(N, N, capacity=5)
    with pytest.raises(ValueError, match="this Documents is for 300 queries, got q_len = 301"):
        ab.Documents(IDS).layout(301, N, capacity=5)


def test_totals_of_documents() -> None:
    assert ab.Documents.from_lengths([2, 0, 1], total=5).ids.tolist() == [0, 0, 2, -1, -1]
    assert ab.Documents.from_cu_seqlens(torch.tensor([0, 2]), total=3).ids.tolist() == [0, 0, -1]
    assert ab.Documents.from_lengths([], total=2).ids.tolist() == [-1, -1]
    with pytest.raises(ValueError, match="total: wanted at least the 3 positions of the documents, got 2"):
        ab.Documents.from_lengths([2, 1], total=2)


def test_a_layout_with_room_to_spare_is_saved_and_loaded(tmp_path: Any) -> None:
    layout = (ab.Documents(IDS) & ab.Causal()).layout(N, N, capacity=40)
    layout.save(tmp_path / "x.safetensors")
    assert ab.Layout.load(tmp_path / "x.safetensors") == layout
    stats = layout.stats()
    assert stats.executed == (ab.Documents(IDS) & ab.Causal()).layout(N, N).stats().executed
    assert "+" in layout.picture()
