"""The edge kernels against float64, for every instruction set of this machine."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from cases import edge_call
from cases.edge_call import Options, backward, forward
from cases.edges import NAMES, Case, assert_right, assert_same, by_edge, graph, hubs, mixed
from torch import Tensor

import attnbias as ab
from attnbias.testing import assert_no_worse, eager, magnitudes

BUDGET = 256 << 20


@pytest.fixture(params=edge_call.ISAS, autouse=True)
def level(request: Any) -> Any:
    edge_call.force_isa(request.param)
    yield request.param
    edge_call.force_isa("")
    edge_call.library.ab_set_edge_budget(BUDGET)


def kernel(
    case: Case, layout: ab.Layout, options: Options, needs: tuple[bool, ...] = (True,) * 4
) -> list[Tensor | None]:
    """Compute out, lse and every gradient with the kernels."""
    out, lse = forward(case.q, case.k, case.v, layout, case.bias, options)
    return [out, lse, *backward(*case[:3], layout, case.bias, options, out, lse, *case[4:], needs)]


def check(case: Case, layout: ab.Layout, options: Options) -> list[Tensor | None]:
    got = kernel(case, layout, options)
    assert_right(got, case, layout, options)
    return got


SHAPES = [
    # B, H, Hk, Q, K, D, E
    (1, 1, 1, 40, 40, 64, 64),
    (2, 3, 3, 33, 47, 32, 32),
    (1, 4, 2, 65, 20, 48, 24),
    (2, 6, 2, 17, 90, 80, 17),
    (1, 2, 1, 30, 31, 1, 1),
    (1, 2, 2, 30, 31, 3, 130),
    (1, 1, 1, 60, 50, 256, 255),
    (1, 8, 8, 50, 60, 16, 16),
    (2, 8, 8, 21, 60, 32, 16),
    (1, 16, 16, 51, 60, 8, 8),
    (1, 8, 4, 21, 60, 16, 16),
    (1, 1, 1, 25, 9, 7, 7),
    (1, 4, 4, 50, 60, 32, 32),
    (2, 12, 12, 33, 41, 16, 16),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [None, 1, 2])
def test_against_float64(shape: tuple[int, ...], bias: int | None) -> None:
    edges = 5 * shape[3]
    layout = graph(1, *shape[3:5], edges, rows=max(1, shape[3] - 3))
    unit = shape[5] ** -0.5
    for seed, options in enumerate((Options(2 * unit), Options(-4 * unit, softcap=1.5), Options(0.0))):
        sizes = None if bias is None else (edges, shape[1])[:bias]
        order = ("BHLD", "BLHD", "BHLD")[seed]
        check(Case.draw(seed, shape, sizes, lse=seed != 1, order=order, strided=seed == 2), layout, options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES[:3] + SHAPES[7:8] + SHAPES[10:11] + SHAPES[12:13], ids=str)
def test_half_precision(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    layout = graph(2, *shape[3:5], 6 * shape[3])
    check(Case.draw(0, shape, dtype=dtype), layout, Options(shape[5] ** -0.5))
    check(Case.draw(1, shape, (6 * shape[3],), dtype=dtype), layout, Options(0.5, softcap=2.0))


@pytest.mark.parametrize("degree", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 255, 256, 257, 600])
def test_degrees(degree: int) -> None:
    """Cover every remainder of a step and of a chunk, and rows longer than the buffer."""
    row, key = torch.arange(24 * degree) % 24, torch.arange(24 * degree) * 37 % 700
    layout = ab.Layout.build(ab.Graph(torch.stack((key, row)), size=(700, 24)), 24, 700, form="edges")
    for shape in ((1, 2, 2, 24, 700, 32, 32), (1, 8, 8, 24, 700, 16, 16)):
        check(Case.draw(0, shape), layout, Options(0.4))


@pytest.mark.parametrize("shape", [(1, 2, 1, 5000, 6000, 32, 24), (1, 8, 8, 5000, 6000, 16, 16)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_long_rows_are_cut_and_merged(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    layout = hubs(*shape[3:5], 4321, 77)
    assert int(layout.edge_ptr.diff().max()) > 12000
    assert int(layout.col_ptr.diff().max()) > 10000
    case = Case.draw(0, shape, (layout.edges,) if shape[1] == 2 else None, dtype=dtype)
    for budget in (BUDGET, 0):
        edge_call.library.ab_set_edge_budget(budget)
        one = check(case, layout, Options(0.2))
        for threads in (2, 3, 8):
            assert_same(one, kernel(case, layout, Options(0.2, threads=threads)))


@pytest.mark.parametrize("shape", [(2, 4, 2, 900, 800, 48, 40), (3, 8, 8, 900, 800, 16, 16)], ids=str)
def test_bits_do_not_depend_on_threads(shape: tuple[int, ...]) -> None:
    """The bits agree for every number of threads, with p and dS stored and recomputed.

    Head by head, storing and recomputing also agree. Eight heads at a time they cannot: p and dS are equal,
    but one adds the rows of a column in order, the other in up to four interleaved sums.
    """
    layout = graph(3, *shape[3:5], 9000)
    case = Case.draw(0, shape, (9000, shape[1]))
    both = []
    for budget in (BUDGET, 0):
        edge_call.library.ab_set_edge_budget(budget)
        both.append(check(case, layout, Options(0.2, softcap=3.0)))
        for threads in (1, 2, 3, 8):
            assert_same(both[-1], kernel(case, layout, Options(0.2, softcap=3.0, threads=threads)))
    if shape[1] != shape[2]:
        assert_same(*both)


@pytest.mark.parametrize("shape", [(2, 2, 2, 60, 480, 32, 32), (2, 8, 8, 60, 480, 16, 16)], ids=str)
def test_stored_and_recomputed_weights_are_the_same_bits(shape: tuple[int, ...]) -> None:
    """With one edge per column, the results are p and dS themselves."""
    keys = torch.randperm(480, generator=torch.Generator().manual_seed(0))
    index = torch.stack((keys, torch.arange(480) * 7 % 60))
    layout = ab.Layout.build(ab.Graph(index, size=(480, 60)), 60, 480, form="edges")
    case = Case.draw(0, shape, (480,))
    handed = kernel(case, layout, Options(0.2, softcap=3.0))
    edge_call.library.ab_set_edge_budget(0)
    assert_same(handed, kernel(case, layout, Options(0.2, softcap=3.0)))


@pytest.mark.parametrize("shape", [(1, 2, 1, 70, 90, 32, 40), (1, 8, 8, 70, 90, 16, 32)], ids=str)
@pytest.mark.parametrize("budget", [BUDGET, 0])
def test_only_needed_gradients_are_computed(shape: tuple[int, ...], budget: int) -> None:
    edge_call.library.ab_set_edge_budget(budget)
    layout, case = graph(4, *shape[3:5], 500), Case.draw(0, shape, (500,))
    whole = kernel(case, layout, Options(0.2))
    for needs in itertools.product((False, True), repeat=4):
        wanted = [x if need else None for x, need in zip(whole, (True, True, *needs), strict=True)]
        assert_same(kernel(case, layout, Options(0.2), needs), wanted)


@pytest.mark.parametrize(
    "shape", [(2, 4, 4, 60, 70, 32, 32), (2, 8, 8, 60, 70, 16, 16), (2, 4, 2, 60, 70, 64, 16)], ids=str
)
def test_groups(shape: tuple[int, ...]) -> None:
    """Neighbours differ by batch and by head, even among heads that share a key head."""
    B, H, _, Q, K = shape[:5]
    rng = torch.Generator().manual_seed(0)
    for batch, heads in ((B, H), (1, H), (B, 1)):
        index = torch.randint(-1, K, (batch, heads, Q, 9), generator=rng)
        layout = ab.Layout.build(ab.Neighbors(index), Q, K, form="edges")
        assert layout.groups == batch * heads
        for budget in (BUDGET, 0):
            edge_call.library.ab_set_edge_budget(budget)
            one = check(Case.draw(0, shape, (index.numel(),)), layout, Options(0.3))
            assert_same(one, kernel(Case.draw(0, shape, (index.numel(),)), layout, Options(0.3, threads=3)))


def test_shared_key_head_with_long_columns_per_head() -> None:
    """One head's column is cut, the other's is not: both go into the same dk and dv."""
    Q, K = 4500, 10
    index = torch.arange(Q)[None, None, :, None].repeat(1, 2, 1, 1) % K
    index[0, 0, :, 0] = 3
    layout = ab.Layout.build(ab.Neighbors(index), Q, K, form="edges")
    for dtype in (torch.float32, torch.bfloat16):
        case = Case.draw(0, (1, 2, 1, Q, K, 32, 32), dtype=dtype)
        one = check(case, layout, Options(0.3))
        assert_same(one, kernel(case, layout, Options(0.3, threads=3)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (8, 8)])
def test_edges_resume_from_tiles(heads: tuple[int, int], dtype: torch.dtype) -> None:
    """Rows have only tiles, only edges, both or neither."""
    n = 200
    rng = torch.Generator().manual_seed(0)
    index = torch.randint(0, n, (2, 300), generator=rng)
    index[:, :50] = index[:, 50:100]  # duplicates, which are always edges
    relation = (ab.Chunks(64) & ab.Prefix(130)) | ab.Graph(index, num_nodes=n)
    layout = ab.Layout.build(relation, n, n, tile=64)
    if not (layout.tiles and layout.edges):
        layout = mixed(n)
    counts = layout.rows(0, n)
    for size in (16, 40):
        case = Case.draw(0, (2, *heads, n, n, size, size), dtype=dtype)
        got = kernel(case, layout, Options(0.3))
        made = []
        for precision in (dtype, torch.float64):
            q, k, v = (x.detach().to(precision).requires_grad_() for x in case[:3])
            out, lse = eager(q, k, v, counts > 0, counts=counts.clamp(min=1), scale=0.3)
            assert case.dlse is not None
            torch.autograd.backward((out, lse), (case.dout.to(precision), case.dlse.to(lse.dtype)))
            made.append((out, lse, q.grad, k.grad, v.grad))
        for name, mine, same, truth in zip(NAMES[:5], got[:5], *made, strict=True):
            assert mine is not None and same is not None and truth is not None
            assert_no_worse(name, mine, same, truth, 2 if name in ("out", "lse") else 3)
        for threads in (2, 3, 8):
            assert_same(got, kernel(case, layout, Options(0.3, threads=threads)))


def test_empty_rows_are_exactly_zero() -> None:
    for shape in ((1, 2, 2, 30, 20, 24, 24), (1, 8, 8, 30, 20, 16, 16)):
        layout, case = graph(0, 30, 20, 12, rows=4), Case.draw(0, shape)
        out, lse, dq, dk, dv, _ = check(case, layout, Options(0.3))
        assert out is not None and lse is not None and dq is not None and dk is not None and dv is not None
        assert not out[:, :, 4:].any() and not dq[:, :, 4:].any() and (lse[:, :, 4:] == -torch.inf).all()
        unseen = layout.col_ptr.diff() == 0
        assert unseen.any() and not dk[:, :, unseen].any() and not dv[:, :, unseen].any()


def test_a_bias_of_minus_infinity_removes_the_edge() -> None:
    for shape in ((1, 2, 2, 30, 20, 24, 24), (1, 8, 8, 30, 20, 16, 16)):
        layout, case = graph(0, 30, 20, 200), Case.draw(0, shape, (200,))
        assert case.bias is not None
        case.bias[::3] = -torch.inf
        case.bias[layout.edge_id[: int(layout.edge_ptr[1])].long()] = -torch.inf  # all of row 0
        out, lse, *grads = check(case, layout, Options(0.3))
        assert out is not None and lse is not None
        assert not out[:, :, 0].any() and (lse[:, :, 0] == -torch.inf).all()
        assert grads[3] is not None and not grads[3][::3].any()


def test_dropped_edges_have_no_gradient() -> None:
    rng = torch.Generator().manual_seed(0)
    index = torch.randint(0, 40, (2, 300), generator=rng)
    layout = ab.Layout.build(ab.Graph(index, num_nodes=40) & ab.Causal(), 40, 40, form="edges")
    case = Case.draw(0, (2, 3, 3, 40, 40, 16, 16), (300, 3))
    dbias = check(case, layout, Options(0.3))[5]
    assert dbias is not None
    kept = torch.zeros(300, dtype=torch.bool)
    kept[layout.edge_id.long()] = True
    assert not dbias[~kept].any() and dbias[kept].any()


@pytest.mark.parametrize("shape", [(30, 2, 1, 400, 400, 32, 32), (6, 8, 8, 400, 400, 16, 16)], ids=str)
def test_a_batch_of_features_on_one_graph(shape: tuple[int, ...]) -> None:
    """Each batch equals the batch computed by itself, however many heads are in memory at a time."""
    layout, case = graph(5, 400, 400, 30000), Case.draw(0, shape)
    together = kernel(case, layout, Options(0.2))
    for b in range(0, shape[0], 5):
        alone = Case(*(None if x is None else x[b : b + 1] for x in case))
        wanted = [None if x is None else x[b : b + 1] for x in together]
        assert_same(kernel(alone, layout, Options(0.2)), wanted)


@pytest.mark.parametrize("shape", [(2, 4, 4, 50, 60, 32, 32), (2, 8, 8, 50, 60, 16, 16)], ids=str)
def test_the_order_in_memory_does_not_matter(shape: tuple[int, ...]) -> None:
    layout = graph(6, 50, 60, 400)
    whole = kernel(Case.draw(0, shape), layout, Options(0.2))
    for order in ("BLHD", "LBHD", "LHBD"):
        assert_same(
            kernel(Case.draw(0, shape, order=order, strided=order == "LBHD"), layout, Options(0.2)), whole
        )


@pytest.mark.parametrize("one", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("others", ["BHLD", "BLHD"])
@pytest.mark.parametrize("shape", [(2, 4, 4, 50, 60, 32, 32), (2, 8, 8, 50, 60, 16, 16)], ids=str)
def test_one_tensor_has_another_memory_order(shape: tuple[int, ...], others: str, one: str) -> None:
    layout = graph(6, 50, 60, 400)
    case = Case.draw(0, shape, order="BLHD" if others == "BHLD" else "BHLD")
    moved = Case.draw(0, shape, order=others)._replace(**{one: getattr(case, one)})
    assert_same(kernel(moved, layout, Options(0.2)), kernel(Case.draw(0, shape), layout, Options(0.2)))


@pytest.mark.parametrize("near", [False, True], ids=["far", "near"])
@pytest.mark.parametrize("shape", [(1, 1, 1, 900, 9000, 64, 64), (1, 8, 8, 5000, 5000, 16, 16)], ids=str)
def test_keys_that_do_not_fit_a_cache(shape: tuple[int, ...], near: bool) -> None:
    """With more than 1 MB of keys and values, each edge's are prefetched, or those at the diagonal."""
    Q, K = shape[3:5]
    layout = graph(7, Q, K, 9000)
    if near:
        row = torch.arange(Q - 3).repeat_interleave(3)
        index = torch.stack((row + torch.arange(3).repeat(Q - 3), row))
        layout = ab.Layout.build(ab.Graph(index, size=(K, Q)), Q, K, form="edges")
    check(Case.draw(0, shape, order="BLHD"), layout, Options(0.2))


def test_large_scores() -> None:
    """Scores far below or above 0 neither vanish nor overflow."""
    for shape in ((1, 2, 2, 30, 30, 32, 8), (1, 8, 8, 30, 30, 16, 16)):
        layout = graph(0, 30, 30, 200)
        for bias, scale in ((-1e4, 0.3), (1e4, 0.3), (0.0, 40.0)):
            case = Case.draw(0, shape, (200,))
            assert case.bias is not None
            case.bias[:] += bias
            got = kernel(case, layout, Options(scale))
            same, oracle = (by_edge(case, layout, Options(scale), x) for x in (torch.float32, torch.float64))
            # A score is rounded at its own size, most of which is the bias.
            assert case.dlse is not None
            sizes = magnitudes(*case[:3], case.dout, case.dlse, scale)
            growth = (sizes["lse"] + abs(bias)) / sizes["lse"]
            results = zip(NAMES[:5], sizes, got, same, oracle, strict=False)
            for name, size, mine, eagers, truth in results:
                assert mine is not None and eagers is not None and truth is not None
                factor = 2 if name in ("out", "lse") else 3
                assert_no_worse(name, mine, eagers, truth, factor, magnitude=sizes[size] * growth)
            assert got[5] is not None and got[5].isfinite().all()
