"""Multi-level scores in the Triton kernels, in Triton's interpreter, and counts of their compiled code.

As in test_tiles.py, the interpreted tests run in a process of their own, which one of them starts.
"""

from __future__ import annotations

import pytest
import torch
from cases.interpreter import interpreted, not_interpreted, run_interpreted

import attnbias as ab
from attnbias.testing import make_inputs

pytest.importorskip("triton")
from attnbias.benchmarks.static import levels as static
from attnbias.benchmarks.static.figures import read
from attnbias.kernels.launch.config import PLAIN_LOOPS
from attnbias.kernels.tiles.extras import PLAIN, Extras
from attnbias.kernels.tiles.levels import Levels, plan, table

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
@pytest.mark.parametrize("heads", [1, 2])
def test_depths_of_one_loop(heads):
    """Full tiles of three depths, two of which read part of a chunk: the rest must not enter the sums."""
    score = ab.MultiLevel([3, 6, 7], widths=[None, 128, 64])
    q, k, v = make_inputs(1, 1, heads, 1, 192, 130, 16, 16)
    layout = ab.Layout.build(ab.Full(), 192, 130, tile=64, form="tiles", score=score)
    by_depth = layout.k_ptr.diff(dim=-1).sum((0, 1)).tolist()
    assert min(by_depth[1:4]) > 0, by_depth
    found = ab.verify(q, k, v, layout, score=score, backend="triton")
    assert found.ok, found


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
def test_gradients_of_relative_terms():
    """Slots for sums of diagonals are counted from the ends of lists, which have one class per depth."""
    q, k, v = make_inputs(1, 1, 3, 1, 150, 200, 16, 16)
    grads = []
    for backend in ("triton", "reference"):
        slopes = torch.linspace(0.1, 0.9, 3, requires_grad=True)
        out = ab.attention(
            *(q, k, v, ab.Causal()),
            score=ab.MultiLevel([8, 4, 4], widths=[None, 64, 16]),
            terms=[ab.ALiBi(slopes)],
            q_start="end",
            backend=backend,
        )
        grads += torch.autograd.grad(out.pow(2).sum(), slopes)
    torch.testing.assert_close(*grads)


@interpreted
def test_half_precision_and_dropout():
    q, k, v = make_inputs(1, 1, 2, 1, 100, 100, 16, 16, torch.float16)
    for dropout_p in (0.0, 0.3):
        found = ab.verify(q, k, v, ab.Causal(), score=SCORES["thirds"], dropout_p=dropout_p, backend="triton")
        assert found.ok, found


@interpreted
def test_dims_of_deeper_levels_are_not_read():
    """k's dims beyond a pair's prefix do not change a bit of its result."""
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
    """Prefixes are grouped by chunks: multiples of 16 waste nothing, and full tiles have at most 4 loops."""
    for ranks in ([16] * 4, [8] * 8, [32, 8, 6, 4, 4, 4, 4, 2], [64], [1] * 64, [16] * 16, [5, 200], [40]):
        prefixes = tuple(torch.tensor(ranks).cumsum(0).tolist())
        for shares_first in (False, True):
            chunks, loops = plan(prefixes, shares_first)
            assert [chunk.first for chunk in chunks] == [0, *(x.first + x.columns for x in chunks[:-1])]
            assert all(x.columns >= 16 and x.columns & (x.columns - 1) == 0 for x in chunks)
            assert len(loops) <= 5 and loops[-1].stop == len(ranks) + 2 and loops[-1].is_partial
            assert [loop.first for loop in loops] == [int(shares_first), *(x.stop for x in loops[:-1])]
            for loop in loops[:-1]:
                ends = [x.first + x.columns for x in chunks[: loop.chunks]]
                assert ends[-1] >= prefixes[loop.stop - 2]
                least = (0, *prefixes)[loop.first]
                assert all(
                    (min(end, prefixes[-1]) <= least) == (i < loop.whole) for i, end in enumerate(ends)
                )
    _, loops = plan((16, 32, 48, 64), True)
    assert [loop.chunks for loop in loops] == [1, 2, 3, 4, 4] and all(x.whole == x.chunks for x in loops[:-1])
    assert PLAIN.present(0.0).loops == PLAIN_LOOPS
    assert Extras(levels=Levels(None, (16, 32))).present(0.0).levels == 2


@not_interpreted
@pytest.mark.parametrize("width", [1, 2, 3, 21, 63, 128, 1000, 2**20 + 1, 2**30 - 1, 2**31 - 1, 0])
@pytest.mark.parametrize("q_start", [0, -300])
def test_blocks_by_a_product(width, q_start):
    """Dividing by the table's factor and shift, as kernels do, is exact for every position."""
    before, factor, shift, *_ = table([width], [16], q_start, torch.device("cpu"))[1].tolist()
    for first in (q_start, 0, 5 * width - 150, 10**9):
        position = torch.arange(max(first, q_start), max(first, q_start) + 300).clamp(max=2**30 - 1)
        found = [(2 * at + before) % 2**32 * (factor % 2**32) >> 32 >> shift for at in position.tolist()]
        wanted = [at // width - q_start // width if width else 0 for at in position.tolist()]
        assert found == wanted


@not_interpreted
@pytest.mark.slow
@pytest.mark.parametrize("cc", static.CAPABILITIES)
@pytest.mark.parametrize("d", static.PREFIXES)
def test_tensor_work_falls_with_the_prefix(cc, d):
    """Static: each loop multiplies only its prefix's chunks, and no kernel spills more than allowed."""
    found = static.figures(cc, d)
    assert [(x.which, x.prefix) for x in found] == [
        (which, prefix) for which in static.PRODUCTS for prefix in static.PREFIXES[d]
    ]
    assert static.broken_floors(found) == []


COUNTED = static.Figures(
    80,
    64,
    "forward",
    16,
    "128x64 w4 s3",
    2264,
    320,
    0.25,
    255,
    2,
    0,
    0,
    plain_instructions=2564,
    plain_inside=0,
    plain_spills=0,
)


@not_interpreted
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"score": 0.5}, "0.500 of plain's tensor work for scores, not 0.25"),
        ({"inside": 1}, "1 spills in the loop, at most 0"),
        ({"spills": 2}, "2 spills in the kernel, at most 0"),
        ({"instructions": 2400}, "2400 instructions, 2400 with the prefix 32"),
        ({"tensor": 400}, "400 instructions on tensor cores, 384 with the prefix 32"),
    ],
)
def test_a_static_floor_breaks(changed, words):
    deeper = COUNTED._replace(prefix=32, score=0.5, instructions=2400, tensor=384)
    another = COUNTED._replace(which="backward_query")
    assert static.broken_floors([COUNTED, deeper, another]) == []
    assert static.broken_floors([COUNTED._replace(**changed), deeper]) == [
        f"sm_80 D=64 levels forward 16: {words}"
    ]


@not_interpreted
@pytest.mark.parametrize("version", ["3.7.1", "3.9.0"])
def test_static_figures_are_shown_and_stored(version, capsys):
    """Figures are stored for every prefix and architecture, and are better than the floors."""
    rows = read(f"attnbias levels, triton {version}")
    found = [static.Figures(**row) for row in rows.values()]
    assert [x.name for x in found] == list(rows)
    assert len(rows) == len(static.CAPABILITIES) * len(static.PRODUCTS) * sum(
        map(len, static.PREFIXES.values())
    )
    assert static.broken_floors(found) == []
    static.show(found)
    assert capsys.readouterr().out.count("sm_") == 24
