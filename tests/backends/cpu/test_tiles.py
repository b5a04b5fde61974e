"""The C++ tile kernels against float64, on every instruction set of this machine."""

import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch
from cases import tiles as tile_cases
from cases.tiles import make_call, make_grads
from torch import Tensor

import attnbias as ab
from attnbias.backends import cpu
from attnbias.backends.call import Call, Inputs, Needs
from attnbias.backends.cpu import abi, backend
from attnbias.testing import assert_no_worse, eager, make_inputs

if cpu.missing():
    pytest.skip(str(cpu.missing()), allow_module_level=True)
ISAS = cpu.isas()
RELATIONS = {**tile_cases.RELATIONS, "rare": ab.Where(lambda q, k: (q * 31 + k * 17) % 97 == 0)}
# B, H, Hk, Q, K, D, E
SHAPES = [
    (1, 1, 1, 64, 64, 64, 64),
    (1, 2, 1, 97, 129, 16, 24),
    (2, 4, 2, 65, 63, 80, 33),
    (1, 2, 2, 129, 97, 7, 1),
    (1, 2, 1, 200, 130, 1, 40),
    (1, 1, 1, 63, 260, 128, 96),
    (1, 1, 1, 130, 70, 256, 255),
]


@pytest.fixture(autouse=True, params=ISAS)
def on_isa(request):
    cpu.force_isa(request.param)
    yield request.param
    cpu.force_isa(None)


def compute(call: Call, d_out: Tensor, d_lse: Tensor | None) -> list[Tensor]:
    """Return out, lse and the gradients of query, key and value."""
    return tile_cases.compute(cpu, call, d_out, d_lse)[:5]


def check(call: Call) -> None:
    tile_cases.check(cpu, call)


@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("relation", RELATIONS)
def test_float32(relation, shape, tile):
    check(make_call(RELATIONS[relation], shape, tile=tile))


@pytest.mark.parametrize("size", [1e3, 1e5, 1e9])
@pytest.mark.parametrize("queries", [3, 64])
def test_scores_so_large_that_rounding_hides_one(queries, size):
    """One key has all of the weight; rounding must not change which one."""
    q, k, v = torch.randn(3, 1, 2, 64, 64, generator=torch.Generator().manual_seed(0))
    q, k = q[:, :, :queries] * size, k * size
    for relation in (ab.Full(), ab.Causal()):
        out = ab.attention(q, k, v, relation, backend="cpu")
        truth = ab.attention(q.double(), k.double(), v.double(), relation, backend="reference")
        same, _ = eager(q, k, v, relation.dense(queries, 64))
        assert_no_worse("out", out, same, truth, magnitude=v.abs().max().item())


U = 2.0**-24  # half a step of float32, the largest relative error of a rounding


def biased(*shape: int) -> Tensor:
    """Return numbers from 1 to 2, equal along the last dimension: their sum rounds in one direction."""
    return (1 + torch.rand(*shape[:-1], 1, generator=torch.Generator().manual_seed(0))).expand(shape)


@pytest.mark.parametrize("D", [100, 128, 256, 1024])
def test_dot_products_are_summed_in_parts(D):
    """All of D was summed in one chain of roundings: at D = 256 errors were 1.6 times eager's, now 0.8.

    The lse of a query with one key is its score. No number is rounded more often than a part of 64 and the
    sum of parts are; the score is also rounded as a multiple of log 2 (itself rounded), and back.
    """
    q, k = torch.ones(1, 1, 200, D), biased(1, 1, 200, D)
    relation = ab.Window(before=0)
    _, lse = ab.attention(q, k, k[..., :1], relation, scale=1.0, return_lse=True, backend="cpu")
    truth = D * k[..., 0].double()
    roundings = 63 + (D - 1) // 64 + 3
    assert ((lse - truth).abs() <= roundings * U * truth).all()


def test_sums_over_keys_and_queries_start_at_0_in_each_tile():
    """All tiles were summed in one chain of roundings: at 2,048 keys errors were twice eager's, now 0.8."""
    L, E = 4096, 40
    roundings = 127 + L // 128 + 2  # within a tile, over tiles, of 1 / L and of the product with it
    q, v = torch.zeros(1, 1, L, 8), biased(1, E, L).mT[None]
    for queries in (4, 64):
        out = ab.attention(q[:, :, :queries], q, v, backend="cpu")
        truth = v[:, :, :1].double()
        assert ((out - truth).abs() <= roundings * U * truth).all()
    value = torch.ones(1, 1, L, E, requires_grad=True)
    out = ab.attention(q, q, value, ab.Prefix(1), backend="cpu")  # all weights are 1
    (grad,) = torch.autograd.grad(out, value, v)
    truth = v.double().sum(2)
    assert ((grad[:, :, 0] - truth).abs() <= roundings * U * truth).all()


@pytest.mark.parametrize("queries", [4, 150])
@pytest.mark.parametrize("D", [128, 256])
def test_median_error_is_below_eagers(D, queries):
    """At D = 256 the median was 1.6 times eager's: torch sums in parts, the kernel did not."""
    ratios = []
    for seed in range(9):
        made = make_inputs(seed, 1, 2, 2, queries, 300, D, 32)
        truth = eager(*(x.double() for x in made))[0]
        out = ab.attention(*made, backend="cpu")
        ratios.append(((out - truth).norm() / (eager(*made)[0] - truth).norm()).item())
    assert sorted(ratios)[4] <= 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("relation", ["full", "causal", "scattered"])
def test_half_precision(relation, shape, dtype):
    check(make_call(RELATIONS[relation], shape, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("Q", [1, 2, 3, 4, 5, 8, 16, 17])
@pytest.mark.parametrize("relation", ["full", "causal", "scattered", "rare", "empty"])
def test_few_queries(relation, Q, dtype):
    for D, E in ((64, 64), (20, 13), (3, 200)):
        for softcap in (0.0, 2.0):
            q, k, v = make_inputs(Q, 1, 4, 2, Q, 200, D, E, dtype)
            layout = ab.Layout.build(RELATIONS[relation], Q, 200, form="tiles", q_start="end")
            check(Call(Inputs(q, k, v), layout, D**-0.5, softcap))


@pytest.mark.parametrize("Q", [1, 3, 7])
def test_few_queries_whose_heads_differ(Q):
    """Heads share their keys, with and without a common relation; scores may be negative."""
    odd = ab.Where(lambda q, k: (q + k) % 2 == 1)
    for relation in (ab.PerHead([ab.Full(), odd, ab.Empty(), ab.Prefix(9)]), odd):
        for scale in (-0.4, 0.0, None):
            check(make_call(relation, (2, 4, 2, Q, 150, 16, 16), scale=scale))


@pytest.mark.parametrize("Q", [5, 6, 7, 12, 13, 24, 25])
@pytest.mark.parametrize("relation", ["causal", "scattered"])
def test_more_queries_of_many_keys(relation, Q):
    """With many keys up to one and a half vectors of queries run on the kernels for few."""
    for dtype in (torch.float32, torch.float16):
        q, k, v = make_inputs(Q, 1, 4, 2, Q, 1030, 24, 20, dtype)
        layout = ab.Layout.build(RELATIONS[relation], Q, 1030, form="tiles", q_start="end")
        check(Call(Inputs(q, k, v), layout, 24**-0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_few_queries_against_many_keys(dtype):
    """Keys are split into parts whose sums are merged, with the same bits for any number of threads."""
    call = make_call(ab.Full(), (1, 4, 2, 3, 6500, 32, 24), tile=128, dtype=dtype)
    check(call)
    check_threads(call, *make_grads(call))


@pytest.mark.parametrize("order", ["BLHD", "LBHD", "BHDL"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("strided", [False, True])
def test_strides(order, dtype, strided):
    shape = (2, 4, 2, 97, 129, 48, 40)
    check(make_call(RELATIONS["causal"], shape, dtype=dtype, order=order, strided=strided))


@pytest.mark.parametrize("scale", [0.0, -0.3, 2.0])
@pytest.mark.parametrize("softcap", [0.0, 3.0, 50.0])
def test_scale_and_softcap(scale, softcap):
    for relation in ("causal", "strictly past"):
        shape = (1, 2, 2, 97, 129, 32, 32)
        check(make_call(RELATIONS[relation], shape, scale=scale, softcap=softcap))


@pytest.mark.parametrize("tile", [64, 128])
def test_groups(tile):
    heads = ab.PerHead([ab.Causal(), ab.Full(), ab.Empty(), ab.Causal() & ab.Window(before=7)])
    check(make_call(heads, (2, 4, 2, 150, 150, 16, 16), tile=tile))
    batches = ab.PerBatch([ab.Causal(), ab.Full()])
    check(make_call(batches & heads, (2, 4, 4, 150, 150, 16, 16), tile=tile))


@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=3)), ids=str)
def test_needs(needs):
    call = make_call(RELATIONS["causal"], (1, 2, 1, 130, 130, 32, 24))
    d_out, _ = make_grads(call)
    out, lse, *whole = compute(call, d_out, None)
    grads = cpu.backward(call, out, lse, d_out, None, Needs(*needs))
    for need, got, want in zip(needs, grads[:3], whole, strict=True):
        assert torch.equal(got, want) if need else got is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("relation", ["causal", "scattered", "full"])
def test_threads_do_not_change_a_bit(relation, dtype):
    call = make_call(RELATIONS[relation], (1, 4, 2, 700, 700, 32, 32), dtype=dtype)
    check_threads(call, *make_grads(call))


def check_threads(call: Call, d_out: Tensor, d_lse: Tensor) -> None:
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3, 8, 8):
            torch.set_num_threads(threads)
            results.append(compute(call, d_out, d_lse))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        for got, want in zip(result, results[0], strict=True):
            assert torch.equal(got, want)


def test_poison(monkeypatch):
    """Memory that the adapter allocates may hold any values."""
    call = make_call(RELATIONS["strictly past"], (1, 4, 2, 150, 150, 17, 19), dtype=torch.bfloat16)
    d_out, d_lse = make_grads(call)
    want = compute(call, d_out, d_lse)
    empty, empty_like, new_empty = torch.empty, torch.empty_like, Tensor.new_empty

    def poison(x: Tensor) -> Tensor:
        return x.fill_(255 if x.dtype == torch.uint8 else torch.nan)

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poison(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poison(empty_like(*a, **k)))
    monkeypatch.setattr(Tensor, "new_empty", lambda *a, **k: poison(new_empty(*a, **k)))
    for got, x in zip(compute(call, d_out, d_lse), want, strict=True):
        assert torch.equal(got, x)


@pytest.mark.parametrize("sizes", [(1, 2, 1, 97, 97, 8, 5), (1, 2, 2, 3, 70, 8, 5)], ids=str)
def test_gradients_that_are_views(sizes):
    """A copy made of an expanded gradient was freed before the kernel read it."""
    call = make_call(RELATIONS["causal"], sizes)
    out, lse = cpu.forward(call)
    one, dense = torch.ones(()).expand_as(out), torch.ones_like(out)
    needs = Needs(True, True, True)
    want = cpu.backward(call, out, lse, dense, torch.ones_like(lse), needs)
    for given in (one, dense.mT.contiguous().mT):
        got = cpu.backward(call, out, lse, given, torch.ones(()).expand_as(lse), needs)
        assert all(torch.equal(a, b) for a, b in zip(got[:3], want[:3], strict=True))


def test_nan_reaches_the_result():
    call = make_call(RELATIONS["full"], (1, 1, 1, 70, 130, 16, 16))
    call.query[0, 0, 5, 3] = torch.nan
    out, lse = cpu.forward(call)
    assert out[0, 0, 5].isnan().all() and lse[0, 0, 5].isnan()
    assert out[0, 0, :5].isfinite().all() and out[0, 0, 6:].isfinite().all()


def test_zero_lengths():
    for B, H, Q, K in ((0, 2, 5, 5), (1, 0, 5, 5), (1, 2, 0, 5), (1, 2, 5, 0)):
        q, k, v = torch.randn(B, H, Q, 8), torch.randn(B, H, K, 8), torch.randn(B, H, K, 4)
        layout = ab.Layout.build(ab.Full(), Q, K, form="tiles")
        call = Call(Inputs(q, k, v), layout, 1.0)
        d_out = torch.randn(B, H, Q, 4)
        out, lse, dq, dk, dv = compute(call, d_out, None)
        assert out.shape == d_out.shape and not out.any() and (lse == -torch.inf).all()
        assert not dq.any() and not dk.any() and not dv.any()


@pytest.mark.parametrize("Q", [5, 70])
def test_keys_that_no_head_reads_have_gradients_of_0(Q):
    q, k, v = torch.randn(1, 0, Q, 8), torch.randn(1, 2, 70, 8), torch.randn(1, 2, 70, 4)
    layout = ab.Layout.build(ab.Full(), Q, 70, form="tiles")
    call = Call(Inputs(q, k, v), layout, 1.0)
    *_, dk, dv = compute(call, torch.randn(1, 0, Q, 4), None)
    assert dk.shape == k.shape and not dk.any() and not dv.any()


def test_a_damaged_layout_never_reaches_a_kernel():
    call = make_call(RELATIONS["causal"], (1, 1, 1, 200, 200, 8, 8))
    want = cpu.forward(call)[0]
    again = ab.Layout(call.layout.buffer.clone(), call.layout.where)
    call.layout = again
    assert torch.equal(cpu.forward(call)[0], want) and again.is_trusted
    again.q_tile[0] = 99
    assert not again.is_trusted
    with pytest.raises(ValueError, match="layout: q_tile"):
        cpu.forward(call)
    call.layout = ab.Layout(ab.Layout.build(ab.Causal(), 200, 200).buffer, again.where + 0)
    call.layout.where[1] = 10**6
    with pytest.raises(ValueError, match="layout: "):
        cpu.forward(call)
    with torch.inference_mode():
        assert ab.Layout.build(ab.Causal(), 20, 20).is_trusted


MISSING = """
import torch, attnbias as ab
x = torch.zeros(1, 1, 2, 4)
print(ab.explain(x, x, x))
"""


@pytest.mark.parametrize(("name", "words"), [("no.so", "without its C++ library"), ("bad.so", "bad.so")])
def test_missing_library_gives_the_reason(tmp_path, monkeypatch, name, words):
    (tmp_path / "bad.so").write_text("not a library")
    monkeypatch.setenv("ATTNBIAS_CPU_LIBRARY", str(tmp_path / name))
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    run = subprocess.run([sys.executable, "-c", MISSING], capture_output=True, text=True, check=False)
    assert run.stdout.startswith("backend rows: "), run.stderr
    assert "not     cpu: library: " in run.stdout and words in run.stdout


def test_force_isa(on_isa):
    assert cpu.isa() == on_isa
    with pytest.raises(ValueError, match=r"isa: wanted one of .*baseline.*, got 'mmx'"):
        cpu.force_isa("mmx")


def test_scratch_is_bounded():
    """Backward needs at most 8 bytes x D per token and head; forward needs none here."""
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = make_inputs(0, 1, 4, 4, 4096, 4096, 64, 64, dtype)
        layout = ab.Layout.build(ab.Causal(), 4096, 4096, form="tiles")
        call = Call(Inputs(q, k, v), layout, 1.0)
        out, d_out = torch.zeros_like(q), torch.zeros_like(q)
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        head = backend._head(call, lse, q=q, k=k, v=v, out=out, dout=d_out, dq=q, dk=k, dv=v)
        packed = head + abi.EXTRAS.zero + abi.SCRATCH.zero + backend.pack_layout(layout)
        assert cpu.library().ab_forward(packed) == 0
        assert 0 < -cpu.library().ab_backward(packed) <= 8 * q.numel()


@pytest.mark.slow
@pytest.mark.parametrize("step", ["head", "row"])
def test_offsets_past_32_bits(step):
    """Query, key, value and the gradient of out have elements past 2^31.

    They share one array of 8 GiB, of which few pages are touched: NumPy does not fill it with NaN.
    """
    H, L, D = 2, 70, 16
    strides = (0, 2**31, D, 1) if step == "head" else (0, D, 2**31 // (L - 2), 1)
    size = sum((n - 1) * s for n, s in zip((1, H, L, D), strides, strict=True)) + 1
    assert size > 2**31
    call = make_call(RELATIONS["causal"], (1, H, H, L, L, D, D))
    d_out, d_lse = make_grads(call)
    want = compute(call, d_out, d_lse)
    apart = L * D if step == "head" else H * D
    memory = torch.from_numpy(np.empty(size + 3 * apart, dtype=np.float32))
    far = [memory.as_strided((1, H, L, D), strides, i * apart) for i in range(4)]
    for x, near in zip(far, (call.query, call.key, call.value, d_out), strict=True):
        x.copy_(near)
    call.query, call.key, call.value, d_out = far
    for got, x in zip(compute(call, d_out, d_lse), want, strict=True):
        assert torch.equal(got, x)
