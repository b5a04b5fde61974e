"""Multi-level scores in the Triton kernels, in Triton's interpreter, and what they are compiled to.

As in test_triton.py, the interpreted tests run in a process of their own, which one of them starts.
"""

from __future__ import annotations

import pytest
import torch
from interpreter import interpreted, not_interpreted, run_interpreted

import attnbias as ab
from attnbias.problem import Call
from attnbias.testing import make_inputs

pytest.importorskip("triton")
from attnbias.kernels.levels import Levels, cut, loops

SCORES = {
    "halving": ab.MultiLevel([5, 4, 3, 2, 1, 1]),
    "thirds": ab.MultiLevel([4, 4, 8], widths=[None, 63, 21]),
    "far pairs share none": ab.MultiLevel([20, 20], widths=[48, 16], normalize=None),
    "by levels": ab.MultiLevel([8, 16, 16, 24], widths=[256, 64, 32, 4], normalize="levels"),
}


@not_interpreted
def test_interpreted():
    run_interpreted(__file__)


@interpreted
@pytest.mark.parametrize("name", SCORES)
def test_results_and_gradients(name):
    score = SCORES[name]
    scattered = ab.Where(lambda q, k: (q * 7 + k * 3) % 5 == 0)
    q, k, v = make_inputs(1, 1, 2, 1, 70, 150, sum(score.ranks), 20)
    assert ab.verify(
        q, k, v, scattered if name == "thirds" else ab.Causal(), score=score, backend="triton"
    ).ok


@interpreted
@pytest.mark.parametrize("q_start", [-7, 60])
def test_positions(q_start):
    score = ab.MultiLevel([4, 4, 8], widths=[None, 60, 20])
    q, k, v = make_inputs(1, 1, 2, 1, 70, 140, 16, 16)
    assert ab.verify(q, k, v, ab.Causal(), score=score, q_start=q_start, backend="triton").ok


@interpreted
@pytest.mark.parametrize("scale", [-0.7, 0.0, 2.0])
def test_scale_softcap_terms_and_sink(scale):
    q, k, v = make_inputs(1, 1, 2, 2, 70, 70, 16, 16)
    given = {"terms": [ab.ALiBi(torch.rand(2)), ab.KeyBias(torch.randn(1, 70))], "sink": torch.randn(2)}
    for softcap, options in ((None, {}), (2.0, given)):
        found = ab.verify(
            q,
            k,
            v,
            ab.Causal(),
            score=SCORES["halving"],
            scale=scale,
            softcap=softcap,
            backend="triton",
            **options,
        )
        assert found.ok, found


@interpreted
def test_half_precision_and_dropout():
    q, k, v = make_inputs(1, 1, 2, 1, 100, 100, 16, 16, torch.float16)
    for dropout_p in (0.0, 0.3):
        found = ab.verify(q, k, v, ab.Causal(), score=SCORES["thirds"], dropout_p=dropout_p, backend="triton")
        assert found.ok, found


@interpreted
def test_dims_of_deeper_levels_are_not_read():
    """To the bit: k's dims beyond a pair's prefix change nothing for it."""
    T, score = 150, ab.MultiLevel([6, 5, 3, 2], widths=[None, 96, 24, 6])
    q, k, v = make_inputs(3, 1, 1, 1, T, T, 16, 16)
    plain = ab.attention(q, k, v, score=score, backend="triton")
    depth = score.depth(torch.arange(T)[:, None], torch.arange(T), q_len=T, k_len=T)
    for level, prefix in enumerate((6, 11, 14), 1):
        changed = k.clone()
        changed[..., 77, prefix:] += 100
        got = ab.attention(q, changed, v, score=score, backend="triton")
        same = depth[:, 77] <= level
        assert torch.equal(got[0, 0, same], plain[0, 0, same])
        assert not torch.equal(got[0, 0, ~same], plain[0, 0, ~same])


@not_interpreted
def test_loops():
    """Prefixes by the chunks that they need: multiples of 16 lose nothing; at most 4 loops at D = 64."""
    assert cut(7) == ((0, 16),) and cut(256) == ((0, 16), (16, 16), (32, 32), (64, 64), (128, 128))
    for ranks in ([16] * 4, [8] * 8, [32, 8, 6, 4, 4, 4, 4, 2], [64], [1] * 64):
        prefixes = tuple(torch.tensor(ranks).cumsum(0).tolist())
        found = loops(prefixes, cut(64))
        assert len(found) <= 4
        assert [loop.first for loop in found] == [0, *(loop.stop for loop in found[:-1])]
        assert found[-1].is_partial and found[-1].stop == len(ranks) + 2
    assert Levels().present == {} and Levels(None, 0, (16,), True).present["has_levels"]


@pytest.mark.slow
@not_interpreted
@pytest.mark.parametrize("cc", [80, 90, 100, 120])
def test_tensor_work_falls_with_the_prefix(cc):
    """Static: each loop multiplies its prefix's chunks alone; at full depth as much as plain attention."""
    from attnbias.backends import triton
    from attnbias.benchmarks.static.ours import recording
    from attnbias.benchmarks.static.sass import analyse

    work = {}
    for score in (None, ab.MultiLevel([16] * 4)):
        layout = ab.Layout.build(ab.Causal(), 512, 512, tile=128, form="tiles", score=score)
        q, k, v, grad = torch.zeros(4, 2, 2, 512, 64, dtype=torch.bfloat16)
        call = Call(q, k, v, layout, (), None, None, 0.125, 0.0, 0.0, f"levels={score.key}")
        with recording(cc) as launched:
            out, lse = triton.forward(call)
            triton.backward(call, out, lse, grad, None, [True, True, True, False])
        for kernel in launched:
            if kernel.name != "delta_kernel":
                found = sorted(loop.flops for loop in analyse(kernel).loops)
                work[kernel.name, score is not None] = found
    for name, products in (
        ("forward_kernel", (1, 1)),
        ("backward_query_kernel", (2, 1)),
        ("backward_key_kernel", (2, 2)),
    ):
        plain, levels = work[name, False], work[name, True]
        by_dims, by_values = products
        whole = plain[0] / (by_dims + by_values) / 64
        wanted = [whole * (by_dims * dims + by_values * 64) for dims in (16, 32, 64)]
        assert levels[:3] == wanted, (name, plain, levels)
