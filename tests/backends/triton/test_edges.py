"""The Triton edge kernels against float64: interpreted, and compiled for a GPU that is emulated.

Triton decides at import whether it interprets. So these tests run on compiled code, where the emulator is
available, and once more in a process of their own, interpreted.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from cases.edges import NAMES, Case, assert_right, assert_same, graph, hubs, mixed
from cases.interpreter import INTERPRETED, not_interpreted, run_interpreted
from torch import Tensor

import attnbias as ab
from attnbias.backends.strides import dense_rows
from attnbias.testing import assert_no_worse, eager

pytest.importorskip("triton")

from attnbias.kernels.edges.forward import edges_forward
from attnbias.kernels.edges.items import PIECE, EdgeLists, cut_rows
from attnbias.kernels.edges.launch import Score, choose_shape
from attnbias.kernels.edges.rows import edges_backward


def rarely(test: Any) -> Any:
    """Mark cases as slow unless interpreted: each kernel here takes seconds to compile."""
    return test if INTERPRETED else pytest.mark.slow(test)


def devices() -> list[Any]:
    if INTERPRETED:
        return ["interpreter"]
    slow = [pytest.param(f"sm_{cc}", marks=pytest.mark.slow) for cc in (100, 120)]
    return ["sm_80", pytest.param("sm_90", marks=pytest.mark.slow), *slow]


@pytest.fixture(params=devices())
def device(request: Any) -> Any:
    """Run kernels in the interpreter or on an emulated GPU, with every allocation full of NaN."""
    where: AbstractContextManager[Any] = nullcontext()
    if not INTERPRETED:
        emulated_gpu = pytest.importorskip("ptxemu").emulated_gpu
        where = emulated_gpu(int(request.param[3:]), racecheck=True, bounds="exact", ptxas=False)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # fills the results of torch.empty with NaN
    with where as gpu:
        yield gpu
    torch.use_deterministic_algorithms(before)


class Options(NamedTuple):
    scale: float
    softcap: float = 0.0


def lists_of(layout: ab.Layout) -> EdgeLists:
    names = ("group", "edge_ptr", "edge_key", "edge_id", "col_ptr", "col_query", "col_edge")
    return EdgeLists(*(getattr(layout, name) for name in names), layout.groups, layout.longest)


def kernel(
    case: Case,
    layout: ab.Layout,
    options: Options,
    needs: tuple[bool, ...] = (True,) * 4,
    start: tuple[Tensor, ...] | None = None,
    lists: EdgeLists | None = None,
) -> list[Tensor | None]:
    """Compute out, lse and every gradient with the kernels."""
    lists = lists_of(layout) if lists is None else lists
    q, k, v, bias, dout, dlse = case
    q, k, v, dout = (dense_rows(x) for x in (q, k, v, dout))  # as the backend does
    how = Score(*options, bias=bias)
    out = torch.full((*q.shape[:3], v.shape[3]), torch.nan, dtype=q.dtype)
    lse = torch.full(q.shape[:3], torch.nan)
    given = None if start is None else (start[0], start[1])
    edges_forward(q, k, v, lists, out, lse, how, start=given)
    grads = [
        torch.full_like(x, torch.nan) if need else None for x, need in zip((q, k, v), needs, strict=False)
    ]
    starts = (None, None, None) if start is None else start[2:]
    needs_bias = bias is not None and needs[3]
    dbias, _ = edges_backward(
        q,
        k,
        v,
        lists,
        out,
        lse,
        dout,
        dlse,
        grads,
        how,
        needs_bias=needs_bias,
        starts=starts,
    )
    return [out, lse, *grads, dbias]


def check(case: Case, layout: ab.Layout, options: Options) -> list[Tensor | None]:
    got = kernel(case, layout, options)
    assert_right(got, case, layout, options)
    return got


FLOAT, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
CASES = {
    # B, H, Hk, Q, K, D, E; bias; scale, softcap; how
    "1x64": ((1, 1, 1, 21, 17, 64, 64), 0, (0.2,), {"dtype": HALF, "order": "BLHD"}),
    "8x16, bias": ((1, 8, 8, 12, 30, 16, 16), 2, (0.4,), {"dtype": BRAIN, "order": "BLHD"}),
    "8x64": ((1, 8, 8, 9, 11, 64, 64), 0, (0.2,), {"dtype": HALF, "order": "BLHD"}),
    "12 heads, strided": ((1, 12, 12, 5, 7, 20, 20), 1, (-0.5, 1.5), {"strided": True}),
    "3 heads, D != E": ((2, 3, 3, 9, 11, 20, 40), 2, (0.5,), {"order": "BLHD"}),
    "shared keys": ((2, 4, 2, 9, 11, 32, 16), 1, (0.3, 2.0), {"order": "BLHD"}),
    "D 1": ((1, 2, 1, 40, 31, 1, 1), 0, (0.0,), {}),
    "D 256": ((1, 1, 1, 9, 11, 256, 255), 0, (0.1,), {"order": "LHBD"}),
    "8x8 half": ((1, 8, 8, 15, 17, 8, 8), 1, (0.4,), {"dtype": HALF}),
    "columns apart": ((2, 2, 2, 9, 10, 16, 16), 0, (0.3,), {"order": "HDLB"}),
    "4x32": ((2, 4, 4, 15, 17, 32, 32), 0, (0.2,), {"dtype": BRAIN, "order": "LBHD", "strided": True}),
}
# The interpreter computes bfloat16 on its bits.
OFTEN = CASES if INTERPRETED else ("1x64", "8x16, bias", "3 heads, D != E", "shared keys")
NAMED = [name for name, (_, _, _, how) in CASES.items() if not (INTERPRETED and how.get("dtype") == BRAIN)]


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[] if x in OFTEN else [pytest.mark.slow]) for x in NAMED]
)
def test_against_float64(device: Any, name: str) -> None:
    shape, bias, numbers, how = CASES[name]
    edges = 4 * shape[3]
    layout = graph(1, *shape[3:5], edges, rows=max(1, shape[3] - 3))
    sizes = (edges, shape[1])[:bias] if bias else None
    check(Case.draw(0, shape, sizes, lse=bias != 1, **how), layout, Options(*numbers))


def test_long_rows_are_cut_and_merged(device: Any) -> None:
    """Rows of a piece less one edge, a piece, and one edge more; a hub of twenty pieces; long columns."""
    counts = (PIECE - 1, PIECE, PIECE + 1, 5200)
    row = torch.cat([torch.full((count,), i) for i, count in enumerate(counts)])
    ends = torch.stack((torch.arange(len(row)) * 7 % 11, row))
    layout = ab.Layout.build(ab.Graph(ends, size=(11, 6)), 6, 11, form="edges")
    case = Case.draw(0, (1, 1, 1, 6, 11, 64, 64), (layout.edges,), dtype=HALF)
    got = check(case, layout, Options(0.2))
    if not INTERPRETED:
        assert_same(kernel(case, layout, Options(0.2)), got)


@rarely
def test_long_rows_of_many_cells(device: Any) -> None:
    rng = torch.Generator().manual_seed(0)
    ends = torch.stack((torch.randint(0, 9, (700,), generator=rng), torch.arange(700) % 2))
    layout = ab.Layout.build(ab.Graph(ends, size=(9, 5)), 5, 9, form="edges")
    check(Case.draw(1, (2, 1, 1, 5, 9, 8, 24)), layout, Options(0.5, 2.0))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [FLOAT, HALF])
def test_hubs(device: Any, dtype: torch.dtype) -> None:
    layout = hubs(900, 1100, 77, 321)
    case = Case.draw(0, (1, 4, 2, 900, 1100, 32, 16), (layout.edges, 4), dtype=dtype)
    check(case, layout, Options(0.2))


@rarely
def test_molecules(device: Any) -> None:
    """Many rows of a few edges, in blocks; some nodes are isolated."""
    rng = torch.Generator().manual_seed(0)
    first = torch.arange(0, 120, 8).repeat_interleave(12)
    ends = first + torch.randint(0, 7, (2, len(first)), generator=rng)
    layout = ab.Layout.build(ab.Graph(ends, num_nodes=120), 120, 120, form="edges")
    got = check(Case.draw(0, (1, 2, 2, 120, 120, 8, 8), order="BLHD"), layout, Options(0.4))
    alone, unseen = layout.edge_ptr.diff() == 0, layout.col_ptr.diff() == 0
    out, lse, dq, dk, dv, _ = got
    assert out is not None and lse is not None and dq is not None and dk is not None and dv is not None
    assert alone.any() and not out[:, :, alone].any() and not dq[:, :, alone].any()
    assert (lse[:, :, alone] == -torch.inf).all()
    assert unseen.any() and not dk[:, :, unseen].any() and not dv[:, :, unseen].any()


@rarely
@pytest.mark.parametrize("sizes", [(2, 4), (1, 4), (2, 1)], ids=str)
def test_groups(device: Any, sizes: tuple[int, int]) -> None:
    """Neighbours differ by batch and by head, even among heads that share a key head."""
    rng = torch.Generator().manual_seed(0)
    index = torch.randint(-1, 13, (*sizes, 9, 5), generator=rng)
    layout = ab.Layout.build(ab.Neighbors(index), 9, 13, form="edges")
    assert layout.groups == sizes[0] * sizes[1]
    check(Case.draw(0, (2, 4, 2, 9, 13, 16, 16), (index.numel(),)), layout, Options(0.3))


@rarely
def test_groups_that_heads_share(device: Any) -> None:
    """There are fewer lists than heads; gradients of the bias add up over heads that share edges."""
    rng = torch.Generator().manual_seed(0)
    wide = ab.Graph(torch.randint(0, 12, (2, 400), generator=rng), num_nodes=12)
    layout = ab.Layout.build(ab.PerHead([wide, wide & ab.Causal(), wide]), 12, 12, form="edges")
    assert layout.groups == 2 and layout.heads == 3
    lists = lists_of(layout)
    assert lists.places == 2 * 400 + int(layout.edge_ptr[-1]) - 400
    check(Case.draw(0, (2, 3, 3, 12, 12, 16, 16), (400, 3)), layout, Options(0.3))
    check(Case.draw(0, (1, 3, 1, 12, 12, 16, 16), (400,)), layout, Options(0.3, 2.0))


@rarely
def test_a_bias_of_minus_infinity_removes_the_edge(device: Any) -> None:
    layout, case = graph(0, 15, 12, 90), Case.draw(0, (1, 2, 2, 15, 12, 24, 24), (90,))
    assert case.bias is not None
    case.bias[::3] = -torch.inf
    case.bias[layout.edge_id[: int(layout.edge_ptr[1])].long()] = -torch.inf  # all of row 0
    out, lse, *grads = check(case, layout, Options(0.3))
    assert out is not None and lse is not None
    assert not out[:, :, 0].any() and (lse[:, :, 0] == -torch.inf).all()
    assert grads[3] is not None and not grads[3][::3].any()
    assert case.dlse is not None
    case.dlse[:, :, 0] = torch.inf  # the lse of an empty row is constant, whatever its incoming gradient
    assert_same(kernel(case, layout, Options(0.3)), [out, lse, *grads])


@rarely
def test_nonfinite_values_reach_only_related_rows_and_keys(device: Any) -> None:
    """Rows and keys without edges share a program with others, so their memory is read too."""
    ends = torch.tensor([[5, 0, 1, 2], [3, 0, 1, 6]])  # row 4 follows row 3, key 6 follows key 5
    layout = ab.Layout.build(ab.Graph(ends, size=(7, 8)), 8, 7, form="edges")
    case = Case.draw(0, (1, 1, 1, 8, 7, 16, 16))
    start = torch.randn(1, 1, 8, 16), torch.randn(1, 1, 8)
    for x in (case.k, case.v):
        x[:, :, 5] = torch.nan
    for x in (case.q, case.dout):
        x[:, :, 3] = torch.inf
    apart, unseen = torch.arange(8) != 3, torch.arange(7) != 5
    out, lse, dq, dk, dv, _ = kernel(case, layout, Options(0.3))
    assert out is not None and lse is not None and dq is not None and dk is not None and dv is not None
    assert (
        out[:, :, apart].isfinite().all()
        and dq[:, :, apart].isfinite().all()
        and not lse.isnan()[:, :, apart].any()
    )
    assert dk[:, :, unseen].isfinite().all() and dv[:, :, unseen].isfinite().all()
    edges_forward(*case[:3], lists_of(layout), out, lse, Score(0.3), start=start)
    alone = layout.edge_ptr.diff() == 0
    assert_same(
        [out[:, :, alone], None, None, None, None, None],
        [start[0][:, :, alone], None, None, None, None, None],
    )


@rarely
def test_dropped_edges_have_no_gradient(device: Any) -> None:
    rng = torch.Generator().manual_seed(0)
    index = torch.randint(0, 20, (2, 120), generator=rng)
    layout = ab.Layout.build(ab.Graph(index, num_nodes=20) & ab.Causal(), 20, 20, form="edges")
    dbias = check(Case.draw(0, (2, 3, 3, 20, 20, 16, 16), (120, 3)), layout, Options(0.3))[5]
    assert dbias is not None
    kept = torch.zeros(120, dtype=torch.bool)
    kept[layout.edge_id.long()] = True
    assert not dbias[~kept].any() and dbias[kept].any()


@rarely
def test_only_needed_gradients_are_computed(device: Any) -> None:
    layout, case = graph(4, 9, 10, 50), Case.draw(0, (1, 2, 1, 9, 10, 32, 8), (50,))
    for options in (Options(0.2), Options(0.2, 2.0)):
        whole = kernel(case, layout, options)
        for needs in ((True, False, False, False), (False, True, False, True), (False, False, True, False)):
            wanted = [x if need else None for x, need in zip(whole, (True, True, *needs), strict=True)]
            assert_same(kernel(case, layout, options, needs), wanted)
        assert_same(
            kernel(case, layout, options, (False,) * 3 + (True,)), [*whole[:2], None, None, None, whole[5]]
        )


@pytest.mark.parametrize("dtype", [FLOAT] if INTERPRETED else [FLOAT, BRAIN])
def test_edges_resume_from_tiles(device: Any, dtype: torch.dtype) -> None:
    """Start from the tiles' results; rows have only tiles, only edges, both or neither, and some are cut."""
    n, edges = 24, 600
    rng = torch.Generator().manual_seed(0)
    index = torch.randint(0, n, (2, edges), generator=rng)
    index[1, : edges - 60] = 5  # a hub, of three pieces
    index[1, edges - 60 :] = torch.randint(0, 14, (60,), generator=rng)
    layout = ab.Layout.build(ab.Graph(index, num_nodes=n), n, n, form="edges")
    some = torch.rand(n, n, generator=rng) < 0.4
    some[:4] = some[18:] = False
    counts = layout.rows(0, n)
    case = Case.draw(0, (1, 2, 2, n, n, 16, 24), dtype=dtype, order="BLHD")

    def attend(x: torch.dtype, counts: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (y.detach().to(x).requires_grad_() for y in case[:3])
        out, lse = eager(q, k, v, counts > 0, counts=counts.clamp(min=1), scale=0.3)
        assert case.dlse is not None
        torch.autograd.backward((out, lse), (case.dout.to(x), case.dlse.to(lse.dtype)))
        assert q.grad is not None and k.grad is not None and v.grad is not None
        return out.detach(), lse.detach(), q.grad, k.grad, v.grad

    def tiles(lse: Tensor, out: Tensor) -> tuple[Tensor, ...]:
        """Return the tiles' part of the gradients, in float64."""
        q, k, v = (y.detach().double() for y in case[:3])
        score = (q @ k.mT * 0.3).masked_fill(~some, -torch.inf)
        p = torch.exp(score - lse.double().masked_fill(lse == -torch.inf, 0)[..., None])
        dout = case.dout.double()
        assert case.dlse is not None
        ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True) + case.dlse.double()[..., None])
        return (ds @ k * 0.3).float(), (ds.mT @ q * 0.3).float(), (p.mT @ dout).float()

    both = counts + some
    oracle, same = attend(torch.float64, both), attend(dtype, both)
    first = attend(torch.float64, some.long().expand(1, 1, n, n))
    start = (first[0].float(), first[1].float(), *tiles(oracle[1], oracle[0]))
    got = kernel(case, layout, Options(0.3), start=start)
    for name, mine, eagers, truth in zip(NAMES[:5], got[:5], same, oracle, strict=True):
        assert mine is not None
        assert_no_worse(name, mine, eagers, truth, 2 if name in ("out", "lse") else 3)
    alone = (both == 0).all(-1)[0, 0]
    assert alone.any() and got[0] is not None and not got[0][:, :, alone].any()
    if dtype == FLOAT:  # in place
        q, k, v = case[:3]
        out, lse = start[0].clone(), start[1].clone()
        edges_forward(q, k, v, lists_of(layout), out, lse, Score(0.3), start=(out, lse))
        assert_same([out, lse, None, None, None, None], [*got[:2], None, None, None, None])


@rarely
def test_a_sink_takes_its_share(device: Any) -> None:
    """Covers whole, cut and empty rows; the other gradients need only the lse."""
    rng = torch.Generator().manual_seed(0)
    index = torch.stack((torch.randperm(600, generator=rng), torch.randint(0, 9, (600,), generator=rng)))
    index[1, 40:] = 3
    layout = ab.Layout.build(ab.Graph(index, size=(600, 12)), 12, 600, form="edges")
    case = Case.draw(0, (1, 4, 4, 12, 600, 16, 16))
    sink = torch.tensor([0.5, -torch.inf, 3.0, 6.0])
    counts = layout.rows(0, 12)
    made = []
    for x in (FLOAT, torch.float64):
        q, k, v = (y.detach().to(x) for y in case[:3])
        made.append(eager(q, k, v, counts > 0, counts=counts.clamp(min=1), scale=0.3, sink=sink.to(x)))
    out, lse = torch.full(case.q.shape, torch.nan), torch.full(case.q.shape[:3], torch.nan)
    edges_forward(*case[:3], lists_of(layout), out, lse, Score(0.3), sink=sink)
    for name, mine, same, truth in zip(NAMES[:2], (out, lse), *made, strict=True):
        assert_no_worse(name, mine, same, truth)


@rarely
def test_more_cells_than_a_grid_holds(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnbias.kernels.edges.launch.MOST_CELLS", 4)
    layout, case = graph(0, 5, 6, 20), Case.draw(0, (3, 3, 3, 5, 6, 8, 8))
    check(case, layout, Options(0.3))


def test_one_compilation_serves_every_graph(device: Any) -> None:
    if INTERPRETED:
        pytest.skip("nothing is compiled")
    from attnbias.kernels.edges import columns, forward, launch, rows

    functions = forward.edge_forward, rows.edge_rows, columns.edge_columns, launch.edge_merge

    def compiled() -> int:
        return sum(len(caches[0]) for f in functions for caches in f.device_caches.values())

    def run(layout: ab.Layout, B: int) -> None:
        Q, K = layout.q_len, layout.k_len
        kernel(Case.draw(0, (B, 2, 2, Q, K, 16, 16), order="BLHD"), layout, Options(0.3))

    run(graph(0, 20, 30, 2000, rows=1), 1)
    before = compiled()
    for seed, (Q, K, edges_count) in enumerate(((7, 5, 9), (40, 41, 300), (64, 16, 3000))):
        run(graph(seed, Q, K, edges_count, rows=2), seed + 1)
    index = torch.randint(-1, 8, (3, 1, 10, 4))
    run(ab.Layout.build(ab.Neighbors(index), 10, 8, form="edges"), 3)
    assert compiled() == before


def test_items_cover_every_edge_once() -> None:
    rng = torch.Generator().manual_seed(0)
    for cells, groups, length, times in (
        ((1, 1), 1, 40, 9),
        ((2, 3), 6, 7, 9),
        ((1, 4), 2, 11, 9),
        ((2, 3), 6, 7, 2),  # 8 at most: none is cut
    ):
        group = torch.arange(cells[0] * cells[1]).view(cells).int() % groups
        degree = torch.randint(0, 5, (groups * length,), generator=rng)
        degree[::5] *= times
        ptr = torch.cat((torch.zeros(1, dtype=torch.int64), degree.cumsum(0))).int()
        places = int(degree.view(groups, -1).sum(1)[group.flatten().long()].sum())
        items, cuts, pieces = cut_rows(ptr, group, length, places, int(degree.max()), piece=8)
        assert (pieces > 0) == (times == 9) and places > 9
        kept = items.row >= 0
        assert ((items.end - items.begin)[~kept] == 0).all() and (items.slot[~kept] == -1).all()
        seen = []
        for cell, row, begin, end, _ in zip(*(x[kept].tolist() for x in items), strict=True):
            assert end - begin <= 8
            first = int(group.flatten()[cell]) * length + row
            assert int(ptr[first]) <= begin <= end <= int(ptr[first + 1])
            seen += [(cell, e) for e in range(begin, end)]
        wanted = [
            (cell, e)
            for cell, g in enumerate(group.flatten().tolist())
            for e in range(int(ptr[g * length]), int(ptr[(g + 1) * length]))
        ]
        assert sorted(seen) == wanted
        steps = (items.end - items.begin + 3) // 4
        assert (steps[:-1] >= steps[1:]).all()
        slots = items.slot[items.slot >= 0]
        assert sorted(slots.tolist()) == list(range(len(slots))) and len(slots) <= pieces
        for cell, row, begin, end in zip(*(x[cuts.row >= 0].tolist() for x in cuts[:4]), strict=True):
            mine = (items.slot >= begin) & (items.slot < end)
            assert (items.row[mine] == row).all() and (items.cell[mine] == cell).all()
            order = items.begin[mine][items.slot[mine].argsort()]
            assert len(order) == end - begin > 1 and (order.diff() == 8).all()


def test_shapes_fill_a_warp() -> None:
    """Each lane has 16 or 32 bytes; there are at most 32 items; heads come in whole blocks."""
    for H in (1, 2, 3, 4, 6, 8, 12, 16, 20, 32):
        for D, E in ((1, 1), (3, 8), (16, 16), (64, 64), (20, 100), (256, 256), (256, 1)):
            for size in (2, 4):
                shape = choose_shape(H, D, E, size)
                width = shape.HEADS * max(shape.D_PAD, shape.E_PAD)
                assert shape.HEADS * shape.BLOCKS == H
                assert width * shape.LANES * size // 32 <= 32 and shape.LANES <= 32
                assert shape.LANES == 32 or width * shape.LANES * size // 32 >= 16


@not_interpreted
def test_interpreted() -> None:
    """Run this file once more, interpreted."""
    run_interpreted(__file__, "-x")


def test_mixed_layouts_have_both_forms() -> None:
    """Edges of a layout with tiles are read like those of any other."""
    layout = mixed(200)
    sides = lists_of(layout).by_query, lists_of(layout).by_key
    for side in sides:
        assert int((side.items.end - side.items.begin).sum()) == layout.edges
