"""Matrix fragments, shared memory, copies, atomics, barriers and branches, from PTX written by hand."""

import re

import numpy as np
import pytest
from cases.handwritten_ptx import THREADS, launch
from ptxemu import Deadlock, Kernel, OutOfBounds, Unsupported

# -- matrices --------------------------------------------------------------------------------------


def operand(rng, shape, kind):
    """Draw values of a type, and return them with their bits."""
    if kind == "s8":
        values = rng.integers(-128, 128, shape, np.int8)
        return values.astype(np.float64), values.view(np.uint8)
    values = rng.integers(-8, 9, shape).astype(np.float32) / 4  # exact in every type
    if kind == "f16":
        return values.astype(np.float64), values.astype(np.float16).view(np.uint16)
    if kind == "bf16":
        return values.astype(np.float64), (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(np.float64), values.view(np.uint32)


@pytest.mark.parametrize(
    ("kind", "k", "total"),
    [("f16", 16, "f32"), ("bf16", 16, "f32"), ("f16", 8, "f32"), ("tf32", 8, "f32"), ("s8", 32, "s32")],
)
def test_mma(kind, k, total):
    """Fragments are laid out as in the manual's tables, element by element."""
    rng = np.random.default_rng(0)
    (a, a_bits), (b, b_bits) = operand(rng, (16, k), kind), operand(rng, (k, 8), kind)
    per = 4 // a_bits.itemsize  # elements of a register
    number = np.float32 if total == "f32" else np.int32
    c = rng.integers(-9, 9, (16, 8)).astype(number)
    step = 4 * per  # columns of k that 4 lanes hold in one register
    A, B = np.zeros((32, k // step * 2, per), a_bits.dtype), np.zeros((32, k // step, per), a_bits.dtype)
    C = np.zeros((32, 4), number)
    for lane in range(32):
        group, t = divmod(lane, 4)
        for chunk in range(k // step):
            for e in range(per):
                column = chunk * step + t * per + e
                A[lane, 2 * chunk, e], A[lane, 2 * chunk + 1, e] = (
                    a_bits[group, column],
                    a_bits[group + 8, column],
                )
                B[lane, chunk, e] = b_bits[column, group]
        for i in range(4):
            C[lane, i] = c[group + 8 * (i // 2), 2 * t + i % 2]
    registers = {"A": A.shape[1], "B": B.shape[1], "C": 4}
    lines, names, first = [], {}, 10
    for i, (name, count) in enumerate(registers.items()):
        names[name] = [f"%r{first + j}" for j in range(count)]
        lines.append(f"mad.lo.u64 %l1, %l59, {4 * count}, %l{50 + i};")
        lines += [f"ld.global.b32 {register}, [%l1+{4 * j}];" for j, register in enumerate(names[name])]
        first += count
    lists = {name: "{" + ", ".join(each) + "}" for name, each in names.items()}
    lines.append(
        f"mma.sync.aligned.m16n8k{k}.row.col.{total}.{kind}.{kind}.{total} "
        f"{lists['C']}, {lists['A']}, {lists['B']}, {lists['C']};"
    )
    lines.append("mad.lo.u64 %l1, %l59, 16, %l52; st.global.v4.b32 [%l1], " + lists["C"] + ";")
    arrays, report = launch("\n".join(lines), [A.view(np.uint32), B.view(np.uint32), C], threads=32)
    d, wanted = arrays[2], a @ b + c
    for lane in range(32):
        for i in range(4):
            assert d[lane, i] == wanted[lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2]
    assert report.counters.macs == 16 * 8 * k


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_matrices_in_shared_memory(count, transposed):
    """Lane 4 r + c has columns 2 c and 2 c + 1 of row r; transposed, rows of column r."""
    x = np.arange(count * 64, dtype=np.uint16).reshape(count, 8, 8)
    trans = ".trans" if transposed else ""
    registers = "{" + ", ".join(f"%r{i + 2}" for i in range(count)) + "}"
    stores = "\n".join(f"st.global.b32 [%l2+{4 * i}], %r{i + 2};" for i in range(count))
    body = f"""
      mad.lo.u64 %l1, %l59, {4 * count}, %l50; mul.lo.s32 %r1, %r299, {4 * count};
      {" ".join(f"ld.global.b32 %r9, [%l1+{4 * i}]; st.shared.b32 [%r1+{4 * i}], %r9;" for i in range(count))}
      bar.sync 0; mul.lo.s32 %r1, %r299, 16; and.b32 %r1, %r1, {128 * count - 1};
      ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {registers}, [%r1];
      mad.lo.u64 %l2, %l59, {4 * count}, %l51; {stores}
      bar.sync 0; stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%r1], {registers};
      bar.sync 0; mul.lo.s32 %r1, %r299, {4 * count}; mad.lo.u64 %l1, %l59, {4 * count}, %l52;
      {" ".join(f"ld.shared.b32 %r9, [%r1+{4 * i}]; st.global.b32 [%l1+{4 * i}], %r9;" for i in range(count))}
    """
    out = np.zeros((32, count, 2), np.uint16)
    arrays, _ = launch(body, [x, out, np.zeros_like(x)], threads=32, shared=128 * count, racecheck=True)
    for lane in range(32):
        row, column = divmod(lane, 4)
        for e in range(2):
            at = (2 * column + e, row) if transposed else (row, 2 * column + e)
            assert (arrays[1][lane, :, e] == x[(slice(None), *at)]).all()
    np.testing.assert_array_equal(arrays[2], x)  # and back


def test_a_matrix_of_a_constant():
    """A register made of constants, the same in all lanes, counts once per lane."""
    body = """
      cvt.rn.bf16.f32 %rs1, 0f3F800000; cvt.rn.bf16.f32 %rs2, 0f40000000; mov.b32 %r2, {%rs1, %rs2};
      mul.lo.s32 %r1, %r299, 16; and.b32 %r1, %r1, 127;
      stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r1], {%r2};
      bar.sync 0; mul.lo.s32 %r1, %r299, 4; mad.lo.u64 %l1, %l59, 4, %l50;
      ld.shared.b32 %r9, [%r1]; st.global.b32 [%l1], %r9;
    """
    arrays, _ = launch(body, [np.zeros((32, 2), np.uint16)], threads=32, shared=128)
    assert (arrays[0] == [0x3F80, 0x4000]).all()


# -- memory and synchronisation --------------------------------------------------------------------


def test_copies_of_fewer_bytes_are_filled_with_zeros():
    x = np.arange(128, dtype=np.uint32)
    body = """
      mad.lo.u64 %l1, %l59, 16, %l50; mul.lo.s32 %r1, %r299, 16;
      and.b32 %r2, %r299, 3; mul.lo.s32 %r2, %r2, 4;
      cp.async.cg.shared.global [%r1], [%l1], 16, %r2;
      cp.async.commit_group; cp.async.wait_group 0;
      ld.shared.v4.b32 {%r3, %r4, %r5, %r6}, [%r1];
      mad.lo.u64 %l1, %l59, 16, %l51; st.global.v4.b32 [%l1], {%r3, %r4, %r5, %r6};
    """
    for late in (False, True):
        arrays, report = launch(
            body, [x, np.zeros_like(x)], threads=32, shared=512, late=late, racecheck=True
        )
        keep = np.arange(4) < (np.arange(32) % 4)[:, None]
        np.testing.assert_array_equal(arrays[1].reshape(32, 4), np.where(keep, x.reshape(32, 4), 0))
        assert not report.races


def test_shared_memory_is_not_cleared():
    arrays, _ = launch(
        "ld.shared.f32 %r1, [smem]; mad.lo.u64 %l1, %l59, 4, %l50; st.global.f32 [%l1], %r1;",
        [np.zeros(32, np.float32)],
        threads=32,
        shared=16,
    )
    assert np.isnan(arrays[0]).all()


ATOMICS = [
    ("add.u32", lambda x: x.sum()),
    ("max.s32", lambda x: x.max()),
    ("and.b32", lambda x: np.bitwise_and.reduce(x, initial=-1)),
    ("inc.u32", lambda x: 100),
]


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize(("operation", "function"), ATOMICS, ids=lambda x: x if isinstance(x, str) else "")
def test_atomics(operation, function, space):
    x = np.arange(3, 3 + THREADS, dtype=np.int32) | 64
    start = {"and.b32": -1, "max.s32": 0}.get(operation, 0)
    operand = "1000" if "inc" in operation else "%r1"
    where = "[%l51]" if space == "global" else "[smem]"
    body = f"""
      mad.lo.u64 %l1, %l59, 4, %l50; ld.global.b32 %r1, [%l1];
      setp.eq.u32 %p1, %r299, 0; @%p1 st.shared.b32 [smem], {start}; bar.sync 0;
      atom.{space}.{operation} %r2, {where}, {operand};
      bar.sync 0; ld.shared.b32 %r3, [smem]; @%p1 st.global.b32 [%l52], %r3;
    """
    arrays, _ = launch(body, [x, np.array([start], np.int32), np.zeros(1, np.int32)], shared=16)
    wanted = THREADS if "inc" in operation else function(x)
    assert arrays[1 if space == "global" else 2][0] == wanted


def test_diverged_warps_meet_at_named_barriers():
    """One warp produces, the other consumes; neither may get ahead of the other."""
    body = """
      setp.lt.u32 %p1, %r299, 32; and.b32 %r1, %r299, 31; mul.lo.s32 %r1, %r1, 4;
      @!%p1 bra take;
      ld.global.b32 %r2, [%l50]; st.shared.b32 [%r1], %r2; bar.arrive 1, 64; bra.uni done;
      take: bar.sync 1, 64; ld.shared.b32 %r3, [%r1]; cvt.u64.u32 %l1, %r1; add.s64 %l1, %l1, %l51;
      st.global.b32 [%l1], %r3;
      done: bar.sync 0;
    """
    arrays, report = launch(body, [np.array([7]), np.zeros(32, np.uint32)], shared=128, racecheck=True)
    assert (arrays[1] == 7).all() and not report.races
    _, report = launch(re.sub(r"bar\.\w+ 1, 64;", "", body), arrays, shared=128, racecheck=True)
    assert any("ld.shared reads what another has written" in race for race in report.races)
    with pytest.raises(Deadlock):
        launch(body.replace("bar.arrive 1, 64;", ""), arrays, shared=128)


def test_waiting_for_an_mbarrier_takes_its_phase():
    body = """
      setp.eq.u32 %p1, %r299, 0; @%p1 mbarrier.init.shared::cta.b64 [smem], 2; bar.sync 0;
      setp.lt.u32 %p2, %r299, 2; @%p2 st.shared.b32 [smem+16], 5;
      @%p2 mbarrier.arrive.shared::cta.b64 _, [smem];
      wait: mbarrier.try_wait.parity.shared::cta.b64 %p3, [smem], 0; @!%p3 bra wait;
      ld.shared.b32 %r1, [smem+16]; mad.lo.u64 %l1, %l59, 4, %l50; st.global.b32 [%l1], %r1;
    """
    out = np.zeros(THREADS, np.uint32)
    arrays, report = launch(body, [out], shared=32, racecheck=True)
    assert (arrays[0] == 5).all() and not report.races
    with pytest.raises(Deadlock, match="all warps of a CTA wait at an mbarrier"):
        launch(body.replace("[smem], 2;", "[smem], 3;"), [out], shared=32)
    with pytest.raises(RuntimeError, match="was not initialised"):
        launch(body.replace("@%p1 mbarrier.init", "@%p4 mbarrier.init"), [out], shared=32)


def test_divergent_threads_meet_again():
    body = """
      and.b32 %r1, %r299, 7; mov.b32 %r2, 0;
      loop: setp.ge.u32 %p1, %r2, %r1; @%p1 bra out; add.s32 %r2, %r2, 1; bra.uni loop;
      out: bar.sync 0; mul.lo.s32 %r2, %r2, 10; mad.lo.u64 %l1, %l59, 4, %l50; st.global.b32 [%l1], %r2;
    """
    arrays, _ = launch(body, [np.zeros(2 * THREADS, np.uint32)], ctas=1)
    np.testing.assert_array_equal(arrays[0][:THREADS], np.arange(THREADS) % 8 * 10)


def test_exited_threads_are_not_waited_for():
    body = """
      setp.gt.u32 %p1, %r299, 40; @%p1 ret;
      bar.sync 0; mad.lo.u64 %l1, %l59, 4, %l50; st.global.b32 [%l1], 1;
    """
    arrays, _ = launch(body, [np.zeros(THREADS, np.uint32)])
    assert arrays[0].sum() == 41


BULK = """
  setp.eq.u32 %p1, %r299, 0; mul.lo.s32 %r1, %r299, 8; mad.lo.u64 %l1, %l59, 8, %l50;
  ld.global.v2.b32 {%r2, %r3}, [%l1]; st.shared.v2.b32 [%r1], {%r2, %r3}; bar.sync 0;
  mov.b32 %r4, 512; mov.u32 %r5, %ctaid.x; cvt.u64.u32 %l2, %r5; mad.lo.u64 %l2, %l2, STRIDE, %l51;
  @%p1 cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%l2], [smem], %r4;
  cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;
"""


def test_bulk_additions():
    """float32 numbers of shared memory are added to global memory, by several CTAs to the same."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 128)).astype(np.float32)
    arrays, report = launch(BULK.replace("STRIDE", "0"), [x, y], ctas=3, shared=512, racecheck=True)
    np.testing.assert_array_equal(arrays[1], y + x + x + x)
    assert not report.races and report.counters.bytes["tma.st"] == 3 * 512
    arrays, _ = launch(BULK.replace("STRIDE", "256"), [x, np.zeros(256, np.float32)], ctas=3, shared=512)
    wanted = np.zeros(256, np.float32)
    for start in (0, 64, 128):
        wanted[start : start + 128] += x
    np.testing.assert_array_equal(arrays[1], wanted)


def test_bulk_additions_are_checked():
    x = np.zeros(128, np.float32)
    with pytest.raises(OutOfBounds, match=r"global access out of bounds.* size 512"):
        launch(BULK.replace("STRIDE", "16"), [x, x], ctas=2, shared=512)
    with pytest.raises(OutOfBounds, match="misaligned global access"):
        launch(BULK.replace("STRIDE", "4"), [x, np.zeros(256, np.float32)], ctas=2, shared=512)
    with pytest.raises(OutOfBounds, match="shared access out of bounds"):
        launch(BULK.replace("STRIDE", "0"), [x, x], shared=496, threads=32)
    lost = BULK.replace("STRIDE", "0").replace("bar.sync 0;", "")
    races = launch(lost, [x, x], shared=512, racecheck=True)[1].races
    assert any("cp.reduce.async.bulk" in race and "reads what another" in race for race in races)
    with pytest.raises(Unsupported, match=r"cp\.reduce\.async\.bulk.*add\.f16"):
        launch(BULK.replace("STRIDE", "0").replace("add.f32", "add.f16"), [x, x], shared=512)


def test_bulk_stores_of_two_ctas_to_one_place_are_a_race():
    plain = BULK.replace("cp.reduce", "cp").replace("bulk_group.add.f32", "bulk_group")
    x, out = np.arange(128, dtype=np.float32), np.zeros(256, np.float32)
    arrays, report = launch(plain.replace("STRIDE", "512"), [x, out], ctas=2, shared=512, racecheck=True)
    assert (arrays[1] == np.tile(x, 2)).all() and not report.races
    races = launch(plain.replace("STRIDE", "256"), [x, out], ctas=2, shared=512, racecheck=True)[1].races
    assert any("global memory: two CTAs write" in race for race in races)


def test_clusters_have_one_cta():
    """An address in the cluster is one of the CTA; other ranks and larger clusters are refused."""
    body = """
      shl.b32 %r1, %r299, 2; st.shared.b32 [%r1], %r299; mov.u32 %r2, %cluster_ctarank;
      mapa.shared::cluster.u32 %r3, %r1, %r2; ld.shared.b32 %r4, [%r3];
      mad.lo.u64 %l1, %l59, 4, %l50; st.global.b32 [%l1], %r4;
    """
    arrays, _ = launch(body, [np.zeros(THREADS, np.uint32)], shared=4 * THREADS)
    np.testing.assert_array_equal(arrays[0], np.arange(THREADS))
    with pytest.raises(Unsupported, match=r"wanted rank 0 in a cluster of one CTA, got 1"):
        launch(body.replace("%r1, %r2;", "%r1, 1;"), arrays, shared=4 * THREADS)
    with pytest.raises(Unsupported, match=r"^two: wanted clusters of one CTA, got 4"):
        Kernel(".entry two() .reqntid 32 .reqnctapercluster 2, 2, 1 { ret; }")


def test_unknown_instructions_are_named():
    with pytest.raises(Unsupported, match=r"^frobnicate\.b32 %r1, %r2$"):
        launch("frobnicate.b32 %r1, %r2;", [])
    with pytest.raises(Unsupported, match="m8n8k4"):
        launch("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%l1, %l2}, {%l3}, {%l4}, {%l1, %l2};", [])
    with pytest.raises(KeyError, match="no kernel other; the module has"):
        Kernel(".entry one() { ret; }", "other")


def test_traps():
    with pytest.raises(RuntimeError, match="trap"):
        launch("setp.eq.u32 %p1, %r299, 5; @%p1 trap;", [])
    launch("setp.eq.u32 %p1, %r299, 500; @%p1 trap;", [])


def test_races_raise_only_when_asked():
    body = "mul.lo.s32 %r1, %r299, 0; st.shared.b32 [%r1], %r299; ld.shared.b32 %r2, [%r1];"
    assert not launch(body, [], shared=16)[1].races
    found = launch(body, [], shared=16, racecheck=True)[1].races
    assert any("writes what another warp writes at the same time" in race for race in found)
