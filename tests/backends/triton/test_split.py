"""Long lists cut into parts, each for a program of its own: where they are cut, and how they are joined."""

from __future__ import annotations

import pytest
import torch
from cases import places as placed
from cases.interpreter import interpreted, not_interpreted, poison_all, run_interpreted  # noqa: F401
from cases.tiles import RELATIONS, check, compute, make_call, make_grads

import attnbias as ab
from attnbias.backends import triton
from attnbias.backends.triton.work import work_of
from attnbias.kernels.launch import split
from attnbias.kernels.launch.split import Lengths, Split, choose_split
from attnbias.testing import assert_no_worse, eager, make_inputs

pytest.importorskip("triton")
from attnbias.kernels.tiles.pieces import Cut

pytestmark = pytest.mark.usefixtures("poison_all")

DEVICES = [0, 20, 58, 108, 132, 148]  # multiprocessors


@not_interpreted
def test_interpreted():
    """Run this file once more, interpreted."""
    run_interpreted(__file__)


# -- how lists are cut -----------------------------------------------------------------------------


def choose(lengths, lines, own=64, length=None, size=128, **how):
    length = len(lengths) * size if length is None else length
    return choose_split(Lengths.of(lengths), lines=lines, size=size, own=own, length=length, **how)


@not_interpreted
@pytest.mark.parametrize("processors", DEVICES)
@pytest.mark.parametrize("size", [64, 128])
def test_decoding_is_at_least_128_programs(size, processors):
    for heads in range(1, 200):
        found = choose([32768 // size], heads, 64, 1, size, processors=processors)
        programs = heads * (1 + (found.more if found else 0))
        assert 128 <= programs <= max(heads, 2 * max(processors, 128))


@not_interpreted
def test_short_lists_and_many_programs_are_not_cut():
    assert choose([8], 1, length=1) is None
    assert choose([16], 1, length=1) == Split(1, 8)
    assert choose([2], 1, length=1, turns=8) == Split(1, 8)  # a program walks it for 8 heads
    assert choose([256], 129, length=1) is None
    assert choose(range(1, 33), 64) is None
    assert choose([0, 0], 1) is None and choose([256], 0, length=1) is None


@not_interpreted
def test_only_the_row_of_a_global_token_is_cut():
    assert choose([256] + [4] * 255, 8, processors=132) == Split(2, 3)
    layout = (ab.Global([5]) | ab.Window(before=128, after=128)).layout(4096, 4096, form="tiles")
    for lengths in work_of(layout):
        assert lengths.total == layout.tiles and lengths.sorted[-1] == 4096 // layout.tile
        found = choose_split(lengths, lines=2, size=layout.tile, own=layout.tile, length=4096)
        assert found.tiles == 1 and found.parts > 4


@not_interpreted
def test_lists_of_several_groups_are_cut_by_their_mean():
    """Kernels do not take them longest first."""
    heads = ab.PerHead([ab.Full(), ab.Window(before=0)])
    layout = heads.layout(128, 4096, heads=2, form="tiles")
    each = -(-layout.tiles // 2)
    lists = 128 // layout.tile
    assert work_of(layout).by_query == Lengths((-(-each // lists),) * lists, each)


@not_interpreted
def test_layout_keeps_the_lengths_of_its_lists_on_the_way_to_a_device():
    layout = ab.Causal().layout(300, 300, form="tiles")
    steps = list(range(1, -(-300 // layout.tile) + 1))
    assert layout.lengths == (steps, steps[::-1])
    moved = layout.to("meta")
    assert moved.lengths == layout.lengths
    unknown = ab.Layout(moved.buffer.clone(), layout.where)
    assert unknown.lengths is None  # nothing reads a device
    assert work_of(unknown).by_query == Lengths.even(layout.tiles, len(steps))


# -- what is computed ------------------------------------------------------------------------------


@pytest.fixture
def cuts(monkeypatch):
    """Cut the shortest lists, and note each kernel that joins pieces, with the split."""
    monkeypatch.setattr(split, "SHORTEST", 1)
    monkeypatch.setattr(split, "LEAST", 32)
    seen, run = [], Cut._run

    def noted(self, kernel, *given, **more):
        if self.split is not None:
            seen.append((kernel.__name__, self.split))
        run(self, kernel, *given, **more)

    monkeypatch.setattr(Cut, "_run", noted)
    yield seen
    assert seen


@interpreted
@pytest.mark.parametrize(
    ("shape", "how"),
    [
        ((2, 2, 1, 1, 97, 16, 24), {"sink": True}),
        ((1, 1, 1, 1, 129, 24, 8), {"dtype": torch.float16, "tile": 128}),
        ((1, 3, 1, 9, 130, 16, 16), {"softcap": 2.0, "scale": -0.7}),
        ((1, 2, 2, 63, 65, 33, 7), {"scale": -0.7, "order": "BLHD", "strided": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("relation", ["full", "scattered"])
def test_equals_the_reference(cuts, relation, shape, how):
    check(triton, make_call(RELATIONS[relation], shape, **how))
    assert [name for name, _ in cuts] == ["merge_kernel"] + ["add_up_kernel"] * 3


@interpreted
@pytest.mark.parametrize("relation", ["strictly past", "far", "causal"])
def test_empty_rows_and_lists_of_all_lengths(cuts, relation):
    check(triton, make_call(RELATIONS[relation], (1, 2, 1, 97, 200, 8, 8), sink=relation == "far"))


@interpreted
@pytest.mark.parametrize("tile", [64, 128])
def test_groups(cuts, tile):
    heads = ab.PerHead([ab.Causal(), ab.Full(), ab.Empty(), ab.Causal() & ab.Window(before=7)])
    check(triton, make_call(heads, (1, 4, 2, 65, 140, 8, 8), tile=tile))


@interpreted
def test_some_tiles_are_cut_and_others_not(cuts, monkeypatch):
    monkeypatch.setattr(split, "LEAST", 128)
    relation = ab.Global([70]) | ab.Window(before=9)
    call = make_call(relation, (1, 1, 1, 257, 257, 8, 8))
    assert sorted(call.layout.lengths[0]) == [2, 2, 3, 3, 5]
    check(triton, call)
    assert {found for _, found in cuts} == {Split(3, 2)}


@interpreted
def test_tiles_and_edges(cuts):
    """Edges go on from what the parts of tiles give."""
    ends = torch.tensor([[0, 1, 1, 5, 96, 3, 3, 3], [0, 0, 0, 5, 2, 96, 96, 96]])
    relation = ab.Graph(ends, num_nodes=97) | (ab.Causal() & ab.Bipartite(40))
    call = make_call(relation, (1, 2, 1, 97, 97, 8, 8), form="auto", tile=None, sink=True)
    assert call.layout.tiles and call.layout.edges
    check(triton, call)


LEARNT = [
    ("ALiBi", lambda x: ab.ALiBi(x[:, 0])),
    ("key", lambda x: ab.KeyBias(x[None])),
    ("pair", lambda x: ab.PairBias(x[None, :, None])),
    ("T5", lambda x: ab.RelativeBias(x[:, :16], ab.t5_buckets(True, 50))),
]


@interpreted
@pytest.mark.parametrize(("name", "make"), LEARNT, ids=[name for name, _ in LEARNT])
def test_terms(cuts, name, make):
    rng = torch.Generator().manual_seed(4)
    leaf = torch.randn(2, 97, generator=rng).requires_grad_()
    given = make_inputs(1, 1, 2, 1, 40, 97, 8, 8, requires_grad=True)
    layout = ab.Full().layout(40, 97, form="tiles")
    found = ab.verify(*given, layout, terms=[make(leaf)], return_max=True, backend="triton")
    assert found.ok, f"\n{found}"
    # The gradient of a key bias comes with dK and dV, those of the others with dQ: their lists stay whole.
    assert sum(kernel == "add_up_kernel" for kernel, _ in cuts) == (1 if name == "key" else 2)


@interpreted
@pytest.mark.parametrize("name", ["dropout", "levels"])
def test_options(cuts, name):
    options = {"dropout_p": 0.3, "sink": torch.tensor([1.0, -2.0])}
    if name == "levels":
        options = {"score": ab.MultiLevel([8, 4, 4], [None, 100, 20])}
    given = make_inputs(1, 1, 2, 1, 33, 130, 16, 8, requires_grad=True)
    found = ab.verify(*given, ab.Full(), return_max=True, backend="triton", **options)
    assert found.ok, f"\n{found}"


@interpreted
def test_part_of_a_larger_problem(cuts):
    case = placed.CASES["dropout"]
    part = placed.cut(placed.RELATIONS["causal"], case, placed.PICKS["ragged end"])
    placed.check_bits("triton", case, part, same=False)


@interpreted
def test_nan_reaches_the_result(cuts):
    call = make_call(RELATIONS["full"], (1, 1, 1, 3, 130, 16, 16))
    call.key[0, 0, 70, 3] = torch.nan  # in one part of several
    call.row_max = torch.empty(1, 1, 3)
    out, lse = triton.forward(call)
    assert out.isnan().all() and lse.isnan().all() and call.row_max.isnan().all()


@interpreted
def test_two_runs_give_the_same_bits(cuts):
    call = make_call(RELATIONS["scattered"], (1, 2, 1, 70, 130, 16, 16))
    for x, y in zip(*(compute(triton, call, *make_grads(call)) for _ in range(2)), strict=True):
        assert torch.equal(x, y)


@interpreted
def test_decoding_as_shipped():
    """No limit is changed."""
    made = make_inputs(0, 1, 1, 1, 1, 32768, 16, 16)
    said = ab.explain(*made, ab.Full(), backend="triton")
    assert said.split == "out by 128 programs in place of 1"
    assert str(said).endswith("split   out by 128 programs in place of 1")
    call = make_call(ab.Full(), (1, 1, 1, 1, 4096, 16, 16), tile=128)
    given = call.query, call.key, call.value
    same, truth = (eager(*(x.to(dtype) for x in given)) for dtype in (torch.float32, torch.float64))
    for name, *three in zip(("out", "lse"), triton.forward(call), same, truth, strict=True):
        assert_no_worse(name, *three)


@interpreted
def test_explanation_names_every_result_that_is_split():
    query, key, value = make_inputs(0, 1, 8, 1, 64, 8192, 8, 8, requires_grad=True)
    said = ab.explain(query, key, value, ab.Full(), backend="triton").split
    assert said == "out by 256 programs in place of 8, dq by 256 programs in place of 8"
    said = ab.explain(query.detach(), key, value, ab.Full(), backend="triton").split
    assert said == "out by 256 programs in place of 8"
    query, key, value = make_inputs(0, 1, 32, 1, 1024, 1024, 8, 8, requires_grad=True)
    terms = [ab.KeyBias(torch.zeros(1, 1024, requires_grad=True))]
    said = ab.explain(query, key, value, ab.Full(), backend="triton").split
    assert said.startswith("dk and dv by ")
    assert not ab.explain(query, key, value, ab.Full(), terms=terms, backend="triton").split
