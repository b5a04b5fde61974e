"""Counts of kernels with options, and the detection of broken limits."""

import pytest

pytest.importorskip("triton")

from attnbias.benchmarks.static import gate, options
from attnbias.benchmarks.static.options import OPTIONS, Figures, broken_limits, full_loop, why_serial


def figures(**changed):
    return Figures(90, 64, "forward", "softcap", 1.6, 0, ())._replace(**changed)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"instructions": 1.61}, "instructions 1.61 of the plain kernel's, at most 1.60"),
        ({"serial": ("C7515",)}, "wgmma serialised: C7515"),
        ({"d": 128, "serial": ("C7515",)}, "wgmma serialised: C7515"),
    ],
)
def test_limits(changed, words):
    assert broken_limits([figures()]) == []
    (fault,) = broken_limits([figures(**changed)])
    assert fault == f"{figures(**changed).name}: {words}"


def test_limits_of_instructions_are_for_one_head_size():
    assert broken_limits([figures(d=128, instructions=9.0)]) == []


def test_a_higher_limit_is_above_what_is_wanted():
    for (_, option, _), most in options.MISSED.items():
        assert most > OPTIONS[option][1]


def test_counts_are_compared_with_stored_ones():
    stored, now = ({x.name: x._asdict()} for x in (figures(), figures(instructions=1.7, spills=2)))
    name = figures().name
    assert gate.worse(stored, stored) == []
    assert gate.worse(now, stored) == [f"{name}: instructions 1.6 -> 1.7", f"{name}: spills 0 -> 2"]


@pytest.mark.slow
def test_a_softcap_is_counted():
    """It takes instructions on top of the plain kernel's, and tensor work stays the same."""
    plain, capped = options.build(90, 64), options.build(90, 64, softcap=30.0)
    for which, (kernel, ptx) in capped.items():
        loop, beside = full_loop(kernel), full_loop(plain[which][0])
        assert loop.flops == beside.flops and loop.n > beside.n
        assert loop.ops["MUFU"] > beside.ops["MUFU"]
        assert why_serial(90, ptx) == ()
