"""Lanes and warps that diverged meet again where an instruction needs them, or the emulator raises."""

import numpy as np
import pytest
from cases.handwritten_ptx import THREADS, launch
from ptxemu import AbsentLanes, Deadlock

STORE = "mad.lo.u64 %l1, %l59, 4, %l51; st.global.b32 [%l1], %r2;"
LOAD = "mad.lo.u64 %l1, %l59, 4, %l50; ld.global.b32 %r1, [%l1];"


def on_lanes(body, **options):
    """Run a body from %r1 to %r2, one number for each lane; return the input and the result."""
    x = np.random.default_rng(1).integers(0, 1000, THREADS, np.uint32)
    arrays, report = launch(f"{LOAD}\n{body}\n{STORE}", [x, np.zeros_like(x)], shared=1024, **options)
    assert not report.races
    return x.reshape(-1, 32), arrays[1].reshape(-1, 32)


def detour(code, late):
    """Return code before which the lanes that ``late`` tells, if any, take a way that stands behind it."""
    come = f"setp.eq.u32 %p9, {late}; @%p9 bra away;" if late else ""
    return f"{come} back: {code} bra.uni end; away: add.u32 %r8, %r8, 1; bra.uni back; end:"


WARP_TWO = "%r297, 2"
LANE_TWO = "%r298, 2"
NAMES = "and.b32 %r298, %r299, 31; shr.u32 %r297, %r299, 5;"

PRODUCT = (
    "mov.b64 %l2, 0x1000080000; wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 "
    "{%r2, %r3, %r4, %r5}, %l2, %l2, 0, 1, 1, 0, 0;"
)
MATRICES = {
    "mma.sync": (
        LANE_TWO,
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
        "{%r2, %r3, %r4, %r5}, {%r1, %r6}, {%r1}, {0, 0, 0, 0};",
    ),
    "ldmatrix": (
        LANE_TWO,
        "shl.b32 %r7, %r298, 4; ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r2, %r3, %r4, %r5}, [%r7];",
    ),
    "movmatrix": (LANE_TWO, "movmatrix.sync.aligned.m8n8.trans.b16 %r2, %r1;"),
    "stmatrix": (
        LANE_TWO,
        "shl.b32 %r7, %r298, 4; stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r7], {%r1};"
        "shl.b32 %r7, %r298, 2; ld.shared.b32 %r2, [%r7];",
    ),
    "wgmma, a lane": (LANE_TWO, PRODUCT),
    "wgmma, a warp": (WARP_TWO, PRODUCT),
    "wgmma after a shuffle, a warp": (WARP_TWO, f"shfl.sync.idx.b32 %r9, %r1, 0, 31, -1; {PRODUCT}"),
}


@pytest.mark.parametrize("name", MATRICES)
def test_matrix_instructions_wait_for_all_lanes(name):
    """With lanes or warps that come late, the result is that without."""
    late, code = MATRICES[name]
    x = np.random.default_rng(0).integers(-8, 9, (128, 8)).astype(np.float16)
    fill = f"""
      {NAMES} mov.b32 %r8, 0; mov.b32 %r6, 0; mad.lo.u64 %l1, %l59, 16, %l50; shl.b32 %r7, %r299, 4;
      ld.global.v4.b32 {{%r1, %r2, %r3, %r4}}, [%l1]; st.shared.v4.b32 [%r7], {{%r1, %r2, %r3, %r4}};
      bar.sync 0;
    """
    results = []
    for who in ("", late):
        body = fill + detour(code, who) + STORE
        threads = 128 if "wgmma" in name else 32
        arrays, _ = launch(body, [x, np.zeros(128, np.uint32)], threads=threads, shared=2048)
        results.append(arrays[1])
    assert len(np.unique(results[0])) > 8
    np.testing.assert_array_equal(*results)


def test_warps_in_step_with_their_lanes_only():
    """bar.warp.sync orders accesses of a warp; another warp that waits elsewhere is not waited for."""
    code = f"{NAMES} shl.b32 %r7, %r299, 2; st.shared.b32 [%r7], 0;"
    code += detour(
        "st.shared.b32 [%r7], %r1; bar.warp.sync -1; xor.b32 %r6, %r7, 4; ld.shared.b32 %r2, [%r6];", LANE_TWO
    )
    x, out = on_lanes(code)
    np.testing.assert_array_equal(out, x[:, np.arange(32) ^ 1])


def test_halves_of_a_warp_meet_by_their_member_masks():
    """In two branches, and at one instruction with two masks."""
    code = f"""
      {NAMES} setp.ge.u32 %p1, %r298, 16; @%p1 bra high;
      redux.sync.add.u32 %r2, %r1, 0xffff; bra.uni end;
      high: redux.sync.add.u32 %r2, %r1, 0xffff0000; end:
    """
    x, out = on_lanes(code)
    wanted = np.repeat(x.reshape(-1, 16).sum(1, dtype=np.uint32), 16).reshape(-1, 32)
    np.testing.assert_array_equal(out, wanted)
    x, out = on_lanes(
        f"{NAMES} setp.ge.u32 %p1, %r298, 16; selp.b32 %r3, 0xffff0000, 0xffff, %p1;"
        "redux.sync.add.u32 %r2, %r1, %r3;"
    )
    np.testing.assert_array_equal(out, wanted)
    code = f"{NAMES} setp.ge.u32 %p1, %r298, 16; @%p1 bra end; elect.sync %r2|%p2, 0xfff0; end:"
    with pytest.raises(AbsentLanes, match=r"got lanes \[0, 1, 2, 3\] of warp 0 not in the member mask"):
        on_lanes(code)
    _, out = on_lanes(code.replace("16; @", "16; setp.lt.or.u32 %p1, %r298, 4, %p1; @"))
    assert (out[:, 4:16] == 4).all()  # the first of the members


def test_reading_a_lane_that_takes_no_part_gives_all_ones():
    code = (
        f"{NAMES} setp.ge.u32 %p1, %r298, 16; @%p1 bra end; shfl.sync.down.b32 %r2, %r1, 4, 31, 0xffff; end:"
    )
    x, out = on_lanes(code)
    np.testing.assert_array_equal(out[:, :12], x[:, 4:16])
    assert (out[:, 12:16] == 0xFFFFFFFF).all()


def test_lanes_beyond_a_partial_warp_are_not_waited_for():
    body = f"{LOAD} shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1; {STORE}"
    x = np.arange(40, dtype=np.uint32)
    arrays, _ = launch(body, [x, np.zeros_like(x)], threads=40)
    np.testing.assert_array_equal(arrays[1], x ^ 1)


SHUFFLE = "shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;"
ABSENT = {
    "exited before": "@%p1 exit; {code}",
    "exits while others wait": "@%p1 bra away; {code} bra.uni end; away: add.u32 %r8, %r8, 1; exit; end:",
    "goes round it": "@%p1 bra end; {code} end:",
    "switched off": "@!%p1 {code}",
}
NEEDY = {
    "shfl": SHUFFLE,
    "vote": "vote.sync.ballot.b32 %r2, %p1, -1;",
    "match": "match.any.sync.b32 %r2, %r1, -1;",
    "redux": "redux.sync.add.u32 %r2, %r1, -1;",
    "elect": "elect.sync %r2|%p2, -1;",
    "bar.warp": "bar.warp.sync -1;",
    "mma": MATRICES["mma.sync"][1],
    "ldmatrix": "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r2}, [%r8];",
    "tcgen05": "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r2}, [%r8];",
}


@pytest.mark.parametrize("way", ABSENT)
@pytest.mark.parametrize("name", NEEDY)
def test_a_lane_that_never_comes_is_an_error(name, way):
    code = f"{NAMES} mov.b32 %r8, 0; setp.eq.u32 %p1, %r299, 35; {ABSENT[way].format(code=NEEDY[name])}"
    with pytest.raises(
        AbsentLanes, match=r"wanted all member lanes, got lanes \[3\] of warp 1 exited or switched off"
    ):
        on_lanes(code)


def test_lanes_that_wait_for_each_other_at_two_places_are_a_deadlock():
    code = f"{NAMES} setp.lt.u32 %p1, %r298, 2; @%p1 bra other; {SHUFFLE} bra.uni end; other: {SHUFFLE} end:"
    with pytest.raises(Deadlock, match=r"lanes \[0, 1\] of warp 0 wait for others at shfl\.sync"):
        on_lanes(code)


def test_a_warp_that_never_comes_to_wgmma_is_an_error():
    body = f"{NAMES} setp.eq.u32 %p1, %r297, 2; @%p1 exit; {PRODUCT}"
    with pytest.raises(AbsentLanes, match=r"^wgmma.*got lanes \[0, 1, .* 31\] of warp 2 exited"):
        launch(body, [], threads=128, shared=2048)
    body = f"{NAMES} setp.eq.u32 %p1, %r297, 2; @%p1 bra other; {PRODUCT} bra end; other: bar.sync 1; end:"
    with pytest.raises(Deadlock, match=r"lanes .* of warp 0 wait for others at wgmma"):
        launch(body, [], threads=128, shared=2048)


SPIN = """
  setp.eq.u32 %p1, %r299, 0; @%p1 st.shared.b32 [smem], 0; bar.sync 0; mov.b32 %r4, 0;
  setp.lt.u32 %p1, %r299, 32; @!%p1 bra others;
  low: ld.volatile.shared.b32 %r2, [smem]; setp.eq.u32 %p2, %r2, 0; @%p2 bra low; bra.uni end;
  others: setp.lt.u32 %p1, %r299, 64; @!%p1 bra high;
  middle: add.u32 %r4, %r4, 1; setp.lt.u32 %p2, %r4, 20; @%p2 bra middle;
  st.shared.b32 [smem], 7; mov.b32 %r2, 7; bra.uni end;
  high: ld.volatile.shared.b32 %r2, [smem]; setp.eq.u32 %p2, %r2, 0; @%p2 bra high;
  end: mad.lo.u64 %l1, %l59, 4, %l50; st.global.b32 [%l1], %r2;
"""


def test_a_warp_between_two_that_wait_for_it_runs():
    """In the text it stands between two loops that spin until it has stored."""
    arrays, _ = launch(SPIN, [np.zeros(96, np.uint32)], threads=96, shared=16)
    assert (arrays[0] == 7).all()


# As inline assembly waits: a block that tests, and one that jumps back.
WAIT = """{{ .reg .pred P1; LAB_WAIT: mbarrier.try_wait.parity.shared.b64 P1, [{}], 0, 10000000;
  @P1 bra.uni DONE; bra.uni LAB_WAIT; DONE: }}"""
INIT = """
  setp.eq.u32 %p1, %r299, 0; @%p1 mbarrier.init.shared.b64 [smem], 32;
  @%p1 mbarrier.init.shared.b64 [smem+8], 32;
  bar.sync 0;
"""


def test_a_wait_in_two_blocks_is_a_wait():
    """It costs no turns, the warp between two that wait runs, and with nobody to arrive it is a deadlock."""
    body = f"""
      {INIT} setp.lt.u32 %p2, %r299, 32; setp.ge.u32 %p3, %r299, 64; mov.b32 %r4, 0;
      @!%p2 bra others; {WAIT.format("smem")} bra.uni end;
      others: @%p3 bra high;
      middle: add.u32 %r4, %r4, 1; setp.lt.u32 %p4, %r4, 20; @%p4 bra middle;
      mbarrier.arrive.shared.b64 _, [smem]; bra.uni end;
      high: {WAIT.format("smem")}
      end: mad.lo.u64 %l1, %l59, 4, %l50; st.global.b32 [%l1], 7;
    """
    arrays, report = launch(body, [np.zeros(96, np.uint32)], threads=96, shared=16)
    assert (arrays[0] == 7).all() and sum(report.counters.blocks.values()) < 60
    with pytest.raises(Deadlock, match="every warp waits at an mbarrier"):
        launch(body.replace("mbarrier.arrive.shared.b64 _, [smem];", ""), arrays, threads=96, shared=16)
    with pytest.raises(Deadlock, match="all warps of a CTA wait at an mbarrier"):
        launch(f"{INIT} {WAIT.format('smem')}", [], shared=16)


def test_warps_wait_at_one_instruction_for_different_mbarriers():
    """Whoever comes second to a wait may go on at once, and lanes may wait for different barriers."""
    body = f"""
      {INIT} setp.lt.u32 %p2, %r299, 32; selp.b32 %r5, 0, 8, %p2; mov.b32 %r4, 0; FIRST
      {WAIT.format("%r5")} mbarrier.arrive.shared.b64 _, [smem];
    """
    ready = "@!%p2 mbarrier.arrive.shared.b64 _, [smem+8];"
    launch(body.replace("FIRST", ready), [], shared=16)
    late = "@%p2 bra go; more: add.u32 %r4, %r4, 1; setp.lt.u32 %p4, %r4, 9; @%p4 bra more; go:"
    launch(body.replace("FIRST", ready + late), [], shared=16)
    launch(body.replace("FIRST", ready + late.replace("bra go", "bra.uni go")), [], shared=16)
    behind = f"@!%p2 bra away; back: {WAIT.format('%r5')} mbarrier.arrive.shared.b64 _, [smem]; bra.uni end;"
    behind += "away: add.u32 %r4, %r4, 1; bra.uni back; end:"
    launch(body.partition("FIRST")[0] + ready + behind, [], shared=16)
    lanes = f"{NAMES} and.b32 %r5, %r298, 8; mbarrier.arrive.shared.b64 _, [smem]; {WAIT.format('%r5')}"
    with pytest.raises(Deadlock, match="mbarrier"):
        launch(INIT + lanes, [], threads=32, shared=16)
