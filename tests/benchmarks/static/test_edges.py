"""Counts of the edge kernels, and the detection of broken floors."""

import pytest
import torch

from attnbias import AdditiveScore

pytest.importorskip("triton")

from attnbias.benchmarks.static.edges import (
    EDGES,
    FEWER,
    SHAPES,
    Figures,
    broken_floors,
    build,
    figures,
    in_flight,
)
from attnbias.benchmarks.static.sass import Ins


def ins(op, wr=7, wait=0):
    return Ins(0, "", op, "", 1, wr, 7, wait)


def test_bytes_in_flight():
    """Two gathers at once, then one; loading the key's number is not a gather; a wait ends one."""
    body = [
        ins("LDG.E.128", wr=0),
        ins("LDG.E.128", wr=1),
        ins("LDG.E", wr=2),
        ins("FADD", wait=0b11),
        ins("LDG.E.128", wr=0),
        ins("FADD", wait=0b1),
    ]
    assert in_flight(body) == 2 * 32 * 16
    assert in_flight([*body[:4], body[4]]) == 3 * 32 * 16  # the last gather of a trip lasts into the next


def loop(which="forward", **changed):
    plain = {"instructions": 10.0, "outside": 300, "regs": 64, "warps": 32, "in_flight": 2.0}
    none = {"spills": 0, "barriers": 0, "shared": 0}
    return Figures(80, 1, 64, which, **(plain | none | changed))


NAIVE = loop("naive", instructions=10.0 * FEWER[1, 64], barriers=7, shared=9, in_flight=0.3)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"instructions": 10.1}, "of one at a time"),
        ({"in_flight": 1.4}, "bytes in flight"),
        ({"spills": 1}, "spills"),
        ({"barriers": 1}, "barriers"),
        ({"shared": 1}, "shared memory"),
    ],
)
def test_floors(changed, words):
    assert broken_floors([NAIVE, loop()], (3, 7)) == []
    (fault,) = broken_floors([NAIVE, loop(**changed)], (3, 7))
    assert words in fault


def test_a_backward_loop_may_have_two_barriers():
    fine = loop("rows", barriers=2, shared=3, in_flight=0.5, instructions=99.0)
    assert broken_floors([NAIVE, fine], (3, 7)) == []
    (fault,) = broken_floors([NAIVE, fine._replace(barriers=3)], (3, 7))
    assert "barriers" in fault


@pytest.mark.slow
@pytest.mark.parametrize("cc", [80, 90, 100, 120])
@pytest.mark.parametrize("score", [None, AdditiveScore()], ids=["edge", "additive"])
def test_scores_of_edges_do_not_spill(cc, score):
    """Compiled loops have no more barriers and spills than plain loops may have."""
    for H, D in SHAPES:
        more = {"edge_bias": torch.zeros(EDGES, H)} if score is None else {"weight": torch.zeros(H, D)}
        for which, kernel in build(cc, H, D, score=score, **more).items():
            found = figures(kernel, which, H, D)
            most = 0 if which == "forward" else 2
            assert which == "naive" or (found.spills == 0 and found.barriers <= most), found
