"""The Triton kernels against float64, in Triton's interpreter.

Triton decides at import whether it interprets, so all but one of these tests run in a process of their own,
which that one starts. Only float32 and float16: the interpreter computes bfloat16 on its raw bits.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from cases.interpreter import interpreted, not_interpreted, poison_all, run_interpreted  # noqa: F401
from cases.tiles import RELATIONS, SHAPES, check, compute, make_call, make_grads
from torch import Tensor

import attnbias as ab
from attnbias.backends import triton
from attnbias.backends.call import Call, Inputs, Needs
from attnbias.backends.strides import empty_like_query
from attnbias.kernels.launch.config import Target
from attnbias.testing import assert_no_worse, eager, make_inputs, random_relation

pytest.importorskip("triton")
from attnbias.kernels.launch import launch

pytestmark = pytest.mark.usefixtures("poison_all")


@not_interpreted
@pytest.mark.parametrize("part", ["float32", "not float32"])
def test_interpreted(part):
    """Run this file once more, interpreted, in two parts for two workers."""
    run_interpreted(__file__, "-k", part)


@interpreted
@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("relation", RELATIONS)
def test_float32(relation, shape, tile):
    check(triton, make_call(RELATIONS[relation], shape, tile=tile))


@interpreted
@pytest.mark.parametrize("tile", [64, 128])
def test_lists_with_room_to_spare(tile):
    """Layouts made with a capacity end with entries that no bound names."""
    relation = ab.Documents(torch.arange(97) // 40) & ab.Causal()
    check(triton, make_call(relation, (2, 2, 1, 97, 97, 16, 8), tile=tile, capacity=9))


@interpreted
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("relation", ["full", "scattered"])
def test_half_precision(relation, shape):
    check(triton, make_call(RELATIONS[relation], shape, dtype=torch.float16, tile=128))


@interpreted
@pytest.mark.parametrize("arch", [80, 86, 90, 100])
@pytest.mark.parametrize("size", [64, 128, 200])
def test_configurations_of_every_architecture(arch, size, monkeypatch):
    """Run their tiles, and descriptors where they are used, which need aligned inputs."""
    target = Target(arch, (3, 7), is_interpreted=True)
    monkeypatch.setattr(triton.backend, "target_of", lambda device: target)
    call = make_call(RELATIONS["strictly past"], (1, 2, 1, 70, 130, size, 64), dtype=torch.float16, tile=128)
    call.inputs = Inputs(*(x.clone() for x in call.inputs[:3]))
    check(triton, call)


@interpreted
@pytest.mark.parametrize("tile", [64, 128])
def test_the_smallest_tiles(tile, monkeypatch):
    """The last fallback of every choice, with two steps per word of a pattern."""
    target = Target(80, (3, 7), is_interpreted=True)
    smallest = launch.candidates(target, "forward", torch.float32, 8, 8, tile)[-1]
    assert smallest.rows == smallest.cols == 16
    monkeypatch.setattr(launch, "candidates", lambda *given: (smallest,))
    check(triton, make_call(RELATIONS["scattered"], (1, 1, 1, 40, 70, 8, 8), tile=tile))


@interpreted
@pytest.mark.parametrize("Q", [1, 63, 65, 129])
@pytest.mark.parametrize("K", [1, 64, 97])
def test_lengths(Q, K):
    check(triton, make_call(ab.Causal() | ab.Prefix(K // 2), (1, 2, 1, Q, K, 8, 8), tile=None, form="auto"))


@interpreted
@pytest.mark.parametrize("order", ["BLHD", "LBHD", "BHDL"])
@pytest.mark.parametrize("strided", [False, True])
def test_strides(order, strided):
    call = make_call(RELATIONS["causal"], (2, 2, 1, 97, 65, 48, 40), order=order, strided=strided)
    check(triton, call)
    out, lse = triton.forward(call)
    assert out.stride() == empty_like_query(call.query, 40).stride()
    d_out, _ = make_grads(call)
    grads = triton.backward(call, out, lse, d_out, None, Needs(True, True, True))
    for grad, x in zip(grads[:3], call.inputs[:3], strict=True):
        assert grad.stride() == torch.empty_like(x).stride()


@interpreted
@pytest.mark.parametrize("scale", [0.0, -0.3, 2.0])
@pytest.mark.parametrize("softcap", [0.0, 3.0, 50.0])
def test_scale_and_softcap(scale, softcap):
    check(
        triton,
        make_call(RELATIONS["strictly past"], (1, 2, 2, 97, 129, 32, 32), scale=scale, softcap=softcap),
    )


@interpreted
@pytest.mark.parametrize("scale", [1e12, -1e12, 1e-40])
def test_scales_that_leave_float32(scale):
    """Products with c, and with the initial maximum, must not become inf - inf."""
    call = make_call(RELATIONS["strictly past"], (1, 1, 1, 97, 129, 32, 32), scale=scale)
    mask = call.layout.to_dense()
    inputs = call.query, call.key, call.value
    same = eager(*inputs, mask, scale=scale)
    truth = eager(*(x.double() for x in inputs), mask, scale=scale)
    for name, *three in zip(("out", "lse"), triton.forward(call), same, truth, strict=True):
        assert_no_worse(name, *three)


@interpreted
@pytest.mark.parametrize("relation", ["strictly past", "empty", "scattered"])
def test_sink(relation):
    call = make_call(RELATIONS[relation], (2, 2, 1, 97, 65, 16, 16), sink=True, softcap=2.0)
    check(triton, call)
    assert call.sink is not None
    call.inputs = call.inputs._replace(sink=call.sink.to(torch.float64))
    assert compute(triton, call, *make_grads(call))[5].dtype == torch.float64


@interpreted
@pytest.mark.parametrize("tile", [64, 128])
def test_groups(tile):
    heads = ab.PerHead([ab.Causal(), ab.Full(), ab.Empty(), ab.Causal() & ab.Window(before=7)])
    check(triton, make_call(heads, (2, 4, 2, 65, 70, 8, 8), tile=tile))
    batches = ab.PerBatch([ab.Causal(), ab.Full()])
    check(triton, make_call(batches, (2, 2, 2, 65, 70, 8, 8), tile=tile))
    check(triton, make_call(batches & heads, (2, 4, 4, 65, 70, 8, 8), tile=tile))


EDGES = torch.tensor([[0, 1, 1, 5, 96, 3, 3, 3], [0, 0, 0, 5, 2, 96, 96, 96]])


@interpreted
@pytest.mark.parametrize(("dtype", "sink"), [(torch.float32, True), (torch.float16, False)], ids=str)
def test_tiles_and_edges(dtype, sink):
    """Edges resume from tiles; some rows have only one of them, or neither."""
    relation = ab.Graph(EDGES, num_nodes=97) | (ab.Causal() & ab.Bipartite(40))
    call = make_call(relation, (1, 2, 1, 97, 97, 8, 8), form="auto", tile=None, dtype=dtype, sink=sink)
    assert call.layout.tiles and call.layout.edges
    check(triton, call)


@interpreted
def test_only_edges():
    call = make_call(ab.Graph(EDGES, num_nodes=97), (1, 2, 1, 97, 97, 8, 8), form="edges", sink=True)
    assert not call.layout.tiles
    check(triton, call)


@interpreted
@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=4)), ids=str)
def test_needs(needs):
    call = make_call(RELATIONS["causal"], (1, 2, 1, 130, 70, 32, 24), sink=True)
    d_out, _ = make_grads(call)
    out, lse, *whole = compute(triton, call, d_out, None)
    grads = triton.backward(call, out, lse, d_out, None, Needs(*needs))
    for need, got, want in zip(needs, grads[:4], whole, strict=True):
        assert torch.equal(got, want) if need else got is None


@interpreted
@pytest.mark.parametrize("seed", range(12))
def test_random_relations_through_attention(seed):
    """Relations of all kinds, in any form, through the op and autograd."""
    relation = random_relation(seed, 2, q_len=70, k_len=70, batch=2, heads=2)
    made = make_inputs(seed, 2, 2, 1, 70, 70, 8, 8)
    results = []
    for dtype, backend in ((torch.float32, "triton"), (torch.float32, "eager"), (torch.float64, "eager")):
        leaves = [x.detach().to(dtype).requires_grad_() for x in made]
        if backend == "triton":
            out, lse = ab.attention(*leaves, relation, return_lse=True, backend=backend)
        else:
            layout = ab.Layout.build(relation, 70, 70, batch=2, heads=2)
            out, lse = eager(*leaves, counts=layout.rows(0, 70))
        total = out.square().sum() + torch.where(lse.isfinite(), lse, 0).sum()
        results.append([out.detach(), lse.detach(), *torch.autograd.grad(total, leaves)])
    for name, got, same, truth in zip(("out", "lse", "dq", "dk", "dv"), *results, strict=True):
        assert_no_worse(name, got, same, truth, 3.0, magnitude=70.0)


@interpreted
def test_empty_rows_ignore_the_gradient_of_their_lse():
    """This holds even if it is NaN, as from exp(lse - lse)."""
    call = make_call(RELATIONS["strictly past"], (1, 2, 1, 70, 65, 8, 8))
    d_out, d_lse = make_grads(call)
    want = compute(triton, call, d_out, d_lse)
    d_lse[:, :, 0] = torch.nan
    assert (want[1][:, :, 0] == -torch.inf).all()
    for got, x in zip(compute(triton, call, d_out, d_lse), want, strict=True):
        assert torch.equal(got, x)


@interpreted
def test_nan_reaches_the_result():
    call = make_call(RELATIONS["full"], (1, 1, 1, 70, 130, 16, 16))
    call.query[0, 0, 5, 3] = torch.nan
    out, lse = triton.forward(call)
    assert out[0, 0, 5].isnan().all() and lse[0, 0, 5].isnan()
    assert out[0, 0, :5].isfinite().all() and out[0, 0, 6:].isfinite().all()


@interpreted
@pytest.mark.parametrize("sink", [False, True])
def test_zero_lengths(sink):
    for B, H, Q, K in ((0, 2, 5, 5), (1, 0, 5, 5), (1, 2, 0, 5), (1, 2, 5, 0)):
        call = make_call(ab.Full(), (B, H, H, Q, K, 8, 4), sink=sink)
        out, lse, dq, dk, dv, *rest = compute(triton, call, torch.ones(B, H, Q, 4), torch.ones(B, H, Q))
        assert out.shape == (B, H, Q, 4) and not out.any()
        wanted = torch.full((H,), -torch.inf) if call.sink is None else call.sink
        assert torch.equal(lse, wanted[:, None].expand(B, H, Q)) or K
        assert dq.shape == call.query.shape and dk.shape == call.key.shape and dv.shape == call.value.shape
        assert not dq.any() and not dk.any() and not dv.any()
        assert len(rest) == sink
        for d_sink in rest:
            assert torch.equal(d_sink, torch.full((H,), float(B * Q if K == 0 else 0)))


@interpreted
def test_two_runs_give_the_same_bits():
    call = make_call(RELATIONS["scattered"], (1, 2, 1, 70, 70, 16, 16))
    for x, y in zip(*(compute(triton, call, *make_grads(call)) for _ in range(2)), strict=True):
        assert torch.equal(x, y)


@interpreted
@pytest.mark.parametrize("step", ["head", "row"])
def test_offsets_past_32_bits(step):
    """Query, key, value and the gradient of out have elements past 2^31; few pages are touched."""
    H, L, D = 2, 70, 16
    strides = (0, 2**31, D, 1) if step == "head" else (0, D, 2**31 // (L - 2), 1)
    size = sum((n - 1) * s for n, s in zip((1, H, L, D), strides, strict=True)) + 1
    assert size > 2**31
    call = make_call(RELATIONS["causal"], (1, H, H, L, L, D, D), dtype=torch.float16, tile=128)
    d_out, d_lse = make_grads(call)
    want = compute(triton, call, d_out, d_lse)
    # numpy's memory, because torch.empty would fill it with NaN
    memory = [
        torch.from_numpy(np.empty(size, np.float16)).as_strided((1, H, L, D), strides) for _ in range(4)
    ]
    for far, near in zip(memory, (call.query, call.key, call.value, d_out), strict=True):
        far.copy_(near)
    *inputs, d_out = memory
    call.inputs = Inputs(*inputs)
    for got, x in zip(_compute_dense(call, d_out, d_lse), want, strict=True):
        assert torch.equal(got, x)


def _compute_dense(call: Call, d_out: Tensor, d_lse: Tensor) -> list[Tensor]:
    """Compute into contiguous results: with the inputs' strides they would need as much memory again."""
    from attnbias.kernels.tiles.backward_key import tiles_backward_key
    from attnbias.kernels.tiles.backward_query import tiles_backward_query
    from attnbias.kernels.tiles.forward import tiles_forward
    from attnbias.kernels.tiles.row_sums import row_sums

    target = Target(80, (3, 7), is_interpreted=True)
    by_query, by_key, _ = triton.backend._lists(call.layout)
    out, dq, dk, dv = (torch.empty(call.query.shape, dtype=torch.float16) for _ in range(4))
    lse = torch.empty(call.query.shape[:3])
    given = call.query, call.key, call.value
    tiles_forward(*given, out, lse, by_query, target, scale=call.scale)
    sums = row_sums(out, lse, d_out, d_lse)
    tiles_backward_query(*given, d_out, *sums, dq, by_query, target, scale=call.scale)
    tiles_backward_key(*given, d_out, *sums, dk, dv, by_key, target, scale=call.scale)
    return [out, lse, dq, dk, dv]
