"""Layouts of ranges built in C++: the same as NumPy's, except for the order of patterns."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import attnbias as ab
from attnbias import native as library_module
from attnbias.layouts import native
from attnbias.layouts.costs import CPU_COSTS, GPU_COSTS, Costs
from attnbias.layouts.fill import Form
from attnbias.layouts.header import FIELDS
from attnbias.layouts.host import lay_out_with_numpy
from attnbias.layouts.layout import Layout
from attnbias.layouts.record import Record
from attnbias.native import open_library
from attnbias.sets.bound import Bound
from attnbias.sets.intervals import Intervals
from attnbias.testing import random_relation

if isinstance(open_library(), str):
    pytest.skip(str(open_library()), allow_module_level=True)

FORMS: list[Form] = ["auto", "tiles", "edges"]
EVEN = Costs(tile={128: 1.0, 64: 1.0}, edge=1.0, run=None)  # a full tile costs as much as its edges
COSTS = [CPU_COSTS, GPU_COSTS[80], EVEN]
lengths = st.sampled_from([0, 1, 63, 64, 65, 97, 127, 128, 129, 300])


def lay_out(ranges: Intervals, **given: Any) -> Layout | None:
    usual = {"q_start": 0, "form": "auto", "tile": None, "costs": CPU_COSTS}
    made = native.lay_out_ranges(ranges, **{**usual, **given})
    return None if made is None else Layout(made.buffer, made.where)


def fields(layout: Record) -> dict[str, NDArray[np.int32]]:
    """Return a copy of every field, with the patterns sorted by their bits."""
    found = {name: getattr(layout, name).numpy().copy() for name in FIELDS}
    bits = found["patterns"].reshape(layout.patterns_count, layout.tile**2 // 32)
    order = np.lexsort(bits.T)
    for name in ("patterns", "patterns_t"):
        found[name] = found[name][order]
    number = np.argsort(order)
    for side in "qk":
        mark = found[f"{side}_mark"]
        for begin, end in found[f"{side}_ptr"].reshape(-1, 3)[:, 1:]:
            mark[begin:end] = number[mark[begin:end]]
    return found


def assert_same(bound: Bound, form: Form, tile: int | None, costs: Costs, q_start: int = 0) -> Layout:
    assert isinstance(bound.solid, Intervals)
    mine = lay_out(bound.solid, q_start=q_start, form=form, tile=tile, costs=costs)
    theirs = lay_out_with_numpy(bound, form, tile, costs, q_start)
    assert mine is not None
    assert mine.header == theirs.header
    got, wanted = fields(mine), fields(theirs)
    for name in FIELDS:
        assert np.array_equal(got[name], wanted[name]), name
    return mine


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.integers(0, 1 << 30),
    lengths,
    lengths,
    st.sampled_from([0, 0, 20]),
    st.sampled_from(FORMS),
    st.sampled_from([None, 64, 128]),
    st.sampled_from(COSTS),
)
def test_equals_numpys_layout(seed, q_len, k_len, q_start, form, tile, costs):
    relation = random_relation(seed, 2, q_len=q_len + q_start, k_len=k_len, batch=2, heads=2)
    bound = relation.bind(q_len, k_len, q_start, batch=2, heads=2)
    assume(isinstance(bound.solid, Intervals) and bound.edges is None)
    layout = assert_same(bound, form, tile, costs, q_start)
    layout.validate()
    dense = relation.dense(q_len, k_len, q_start, batch=2, heads=2)
    assert torch.equal(layout.to_dense().expand_as(dense), dense)


def documents(batch: int, length: int) -> ab.Documents:
    """Make packed documents of many lengths; some tokens are in none."""
    ids = torch.randint(-1, 12, (batch, length), generator=torch.Generator().manual_seed(0))
    return ab.Documents(ids.sort(1).values)


@pytest.mark.parametrize("tile", [None, 64, 128])
@pytest.mark.parametrize("costs", COSTS, ids=["cpu", "gpu", "even"])
@pytest.mark.parametrize("length", [640, 701])
def test_equals_numpys_layout_in_longer_sequences(length, costs, tile):
    for relation in (
        ab.Full(),
        ab.Empty(),
        ab.Causal() & ab.Window(before=255),
        ab.Window(before=58, after=3) | ab.Global([0, 300, 301]),
        ~ab.Window(before=99) - ab.Global([5, 200]),
        documents(3, length) & ab.Causal(),
        ab.PerHead([ab.Causal(), ab.Chunks(130), ab.Empty()]),
    ):
        for form in FORMS:
            assert_same(relation.bind(length, length), form, tile, costs)


@pytest.mark.parametrize("share", [0.0005, 0.05, 0.9, 0.9995])
@pytest.mark.parametrize(("q_len", "k_len"), [(97, 600), (200, 129), (256, 384)])
def test_equals_numpys_layout_for_scattered_ranges(q_len, k_len, share):
    group = np.array([[0, 1], [1, 2]])
    row, key = (np.random.default_rng(0).random((3 * q_len, k_len)) < share).nonzero()
    ranges = Intervals.empty(q_len, k_len, group).from_ranges(row, key, key + 1)
    for form in FORMS:
        for tile in (None, 64, 128):
            for costs in COSTS:
                assert_same(Bound(ranges), form, tile, costs)


@pytest.mark.parametrize("k_len", [100, 128, 193])
def test_equals_numpys_layout_where_few_rows_end_early(k_len):
    for seed in range(10):
        rng = np.random.default_rng(seed)
        start = rng.choice([0, 1, 64], (2, 200), p=[0.96, 0.02, 0.02])
        stop = rng.choice([k_len, k_len - 1, 64], (2, 200), p=[0.96, 0.02, 0.02])
        ranges = Intervals.one_per_row(200, k_len, start, stop)
        for tile in (64, 128):
            assert_same(Bound(ranges), "tiles", tile, CPU_COSTS)


@pytest.mark.parametrize("keys", [CPU_COSTS.keys_listed, CPU_COSTS.keys_listed + 1])
def test_equals_numpys_layout_where_lists_become_too_long(keys):
    row, key = np.divmod(np.arange(70 * keys), keys)
    ranges = Intervals.empty(70, 8 * keys, np.zeros((1, 1), np.int64)).from_ranges(row, 8 * key, 8 * key + 1)
    layout = assert_same(Bound(ranges), "auto", None, CPU_COSTS)
    assert (layout.edges > 0) == (keys <= CPU_COSTS.keys_listed)


def test_equals_numpys_layout_beyond_one_step():
    """NumPy numbers the patterns of 2^19 rows at a time; here there are more."""
    length = 100_000
    bound = (ab.Causal() & ab.Window(before=999)).bind(length, length)
    assert isinstance(bound.solid, Intervals)
    mine, theirs = lay_out(bound.solid), lay_out_with_numpy(bound, "auto", None, CPU_COSTS, 0)
    assert mine is not None
    got, wanted = fields(mine), fields(theirs)
    assert all(np.array_equal(got[name], wanted[name]) for name in FIELDS)


def test_a_library_of_another_interface_is_refused(monkeypatch):
    """Its functions would read structs that have changed since it was built."""
    monkeypatch.setattr(library_module, "ABI_VERSION", 99)
    wanted = r"^library: .* has interface \d+, wanted 99; install g\+\+"
    assert re.match(wanted, library_module.open_library.__wrapped__())


@pytest.mark.parametrize("why", ["library: there is none", "library: it has interface 4, wanted 5"])
def test_numpy_builds_where_the_library_cannot(why, monkeypatch):
    monkeypatch.setattr(native, "open_library", lambda: why)
    relation = documents(2, 300) & ab.Causal()
    bound = relation.bind(300, 300)
    assert isinstance(bound.solid, Intervals)
    assert lay_out(bound.solid) is None
    layout = ab.Layout.build(relation, 300, 300)
    layout.validate()
    assert torch.equal(layout.to_dense()[:, 0], relation.dense(300, 300)[:, 0])


@pytest.mark.parametrize(
    ("ptr", "start", "stop"),
    [
        ([0, 1, 2, 2], [0, -1], [5, 3]),
        ([0, 1, 2, 2], [0, 0], [5, 8]),
        ([0, 1, 2, 2], [0, 3], [5, 3]),
        ([0, 2, 2, 2], [0, 4], [5, 7]),
        ([0, 2, 2, 2], [5, 0], [7, 2]),
        ([1, 1, 2, 2], [0, 0], [5, 5]),
        ([0, 1, 1, 1], [0, 0], [5, 5]),
        ([0, 3, 2, 2], [0, 0], [5, 5]),
        ([0, 2, 1, 2], [0, 3], [2, 5]),
        ([0, 1], [0], [5]),
        ([0, 1, 2, 2], [0, 0], [5]),
    ],
)
def test_invalid_ranges_raise(ptr, start, stop):
    ranges = Intervals(3, 7, np.zeros((1, 1), np.int64), *map(np.array, (ptr, start, stop)))
    with pytest.raises(ValueError, match="relation: wanted ranges that increase in each row"):
        lay_out(ranges)


class Recorder:
    """The library with one function replaced; counts the plans that are alive."""

    def __init__(self, **answers: int) -> None:
        self.answers, self.plans = answers, 0

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any) -> int:
            self.plans += {"ab_plan_layout": 1, "ab_drop_plan": -1}.get(name, 0)
            return self.answers.get(name) or getattr(open_library(), name)(*given)

        return call


def test_plans_are_always_freed(monkeypatch):
    ranges = Intervals.full(5, 5)
    short = Recorder(ab_fill_layout=1)
    monkeypatch.setattr(native, "open_library", lambda: short)
    with pytest.raises(MemoryError, match="relation: no memory to lay out 5 ranges"):
        lay_out(ranges)
    assert short.plans == 0
    usual = Recorder()
    monkeypatch.setattr(native, "open_library", lambda: usual)
    assert lay_out(ranges) is not None
    assert usual.plans == 0
    with pytest.raises(ValueError, match=r"fewer than 2\^31 are possible"):
        lay_out(Intervals.full(1 << 16, 1 << 16), form="edges")
    assert usual.plans == 0
