"""Counts of compiled code: the reader, on kernels whose counts are known; the gate; the labels."""

import dataclasses
import re
import sys

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import attnbias as ab
from attnbias.benchmarks.static import __main__ as command
from attnbias.benchmarks.static import figures, flow, gate, issue, ours, sass, table, work
from attnbias.benchmarks.static.arch import occupancy
from attnbias.benchmarks.static.count import Counts
from attnbias.benchmarks.static.figures import Key, rows_of

try:
    sass.tool("nvdisasm"), sass.tool("cuobjdump")
except FileNotFoundError as error:
    pytest.skip(f"no disassembler: {error}", allow_module_level=True)

OURS, PEER = "attnbias, triton 3.7.1", "FlexAttention, torch 2.13.0, triton 3.7.1"


@triton.jit
def multiply(x, y, n, SIZE: tl.constexpr):
    """Loop over one product of SIZE x SIZE and the exp2 of each of its elements."""
    row = tl.arange(0, SIZE)
    at = row[:, None] * SIZE + row[None, :]
    a = tl.load(x + at)
    sums = tl.zeros([SIZE, SIZE], tl.float32)
    for i in range(n):
        product = tl.dot(a, tl.load(x + i * SIZE * SIZE + at))
        sums += tl.math.exp2(product)
    tl.store(y + at, sums)


@triton.jit
def copy(x, y, SIZE: tl.constexpr):
    """Copy without a loop."""
    at = tl.arange(0, SIZE)
    tl.store(y + at, tl.load(x + at))


def compiled(kernel, cc, types, warps=4, **options):
    constants = {"SIZE": 64}
    signature = {**types, "SIZE": "constexpr"}
    attrs = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types.values()) if kind[0] == "*"}
    source = ASTSource(kernel, signature, constants, attrs)
    made = triton.compile(source, target=GPUTarget("cuda", cc, 32), options={"num_warps": warps, **options})
    return sass.Compiled.of(made, cc)


def multiplied(cc, warps=4, **options):
    return compiled(multiply, cc, {"x": "*fp16", "y": "*fp32", "n": "i32"}, warps, **options)


@pytest.mark.parametrize("cc", [80, 90, 100, 120])
def test_counts_of_a_known_loop(cc):
    report = sass.analyse(multiplied(cc))
    (loop,) = report.loops
    assert loop.flops == 2 * 64**3
    assert loop.ops["MUFU"] == loop.counts["xu"] == 64 * 64 // (4 * 32)  # one per element
    assert sum(loop.counts.values()) == sum(loop.ops.values()) == loop.n
    assert loop.instructions == pytest.approx(loop.n * 4 / (2 * 64**3 / 1e6))
    assert loop.spills == report.spills == 0
    if cc in (80, 120):  # 16 x 8 x 16 per instruction; elsewhere one does the work of four warps, or of all
        assert loop.ops["HMMA"] == 64**3 // (16 * 8 * 16) // 4
    assert loop.cycles["tensor"] == 64**3 / {80: 1024, 90: 2048, 100: 4096, 120: 256}[cc]
    assert loop.cycles["xu"] == 64 * 64 / 16
    assert 0 < loop.model <= loop.bound <= 1


def test_spills_are_counted():
    """With few registers, the same loop keeps its sums in local memory."""
    whole, cramped = (sass.analyse(multiplied(80, 1, **options)) for options in ({}, {"maxnreg": 64}))
    assert cramped.regs <= 64 < whole.regs
    assert cramped.loops[0].spills > whole.loops[0].spills
    assert cramped.spills >= cramped.loops[0].spills


def test_a_kernel_without_a_loop():
    report = sass.analyse(compiled(copy, 80, {"x": "*fp32", "y": "*fp32"}))
    assert report.loops == [] and report.n > 0 and report.regs > 0
    with pytest.raises(ValueError, match=r"copy, sm_80: wanted two loops of .* flops, found"):
        figures.loops_of(report, "forward", 64, 64 * 64)


@dataclasses.dataclass
class Line:
    addr: int
    op: str
    args: str = ""
    pred: str = ""

    @property
    def base(self):
        return self.op.partition(".")[0]


def test_nested_loops():
    """0; outer 1-5 around inner 2-3; 6: the inner one is its own loop, and part of the outer one."""
    jumps = {3: ("`(.L_2)", "@P0"), 5: ("`(.L_1)", "@!P1")}
    lines = [Line(16 * i, "BRA" if i in jumps else "FADD", *jumps.get(i, ())) for i in range(7)]
    blocks, successors = flow.cfg(lines, {".L_1": 16, ".L_2": 32})
    found = flow.loops(successors)
    assert {head: sorted(body) for head, body in found.items()} == {1: [1, 2, 4], 2: [2]}
    assert blocks[2] == (2, 4) and blocks[4] == (4, 6)
    with pytest.raises(ValueError, match="a jump through a table at 0x10"):
        flow.cfg([Line(0, "NOP"), Line(16, "BRX")], {})


def test_occupancy():
    assert occupancy(80, 255, 128, 48 << 10) == (2, "registers")
    assert occupancy(80, 64, 128, 80 << 10) == (2, "shared memory")
    assert occupancy(120, 32, 32, 0) == (24, "blocks")
    assert occupancy(100, 128, 128, 0, tmem=256) == (2, "tensor memory")
    assert occupancy(120, 32, 128, 100 << 10).ctas == 0  # more than a block may have


def test_issue_model_is_bound_by_the_busiest_pipe():
    """32 special functions take 8 cycles each; the 4 warps of a block are on 4 sub-partitions."""
    steps = [issue.Step.of("MUFU", "MUFU.EX2", "R0, R0", "xu", 8, 1, 7, 7, 0) for _ in range(32)]
    assert issue.simulate(steps, 4, 1) == pytest.approx(32 * 8, rel=0.01)
    assert issue.simulate(steps, 4, 2) == pytest.approx(32 * 8, rel=0.05)  # the pipe is full already
    waits = [issue.Step.of("BAR", "BAR.SYNC", "0x0", "ctrl", 1, 1, 7, 7, 0)]
    assert issue.simulate(waits, 8, 1) > 0


def test_our_kernels_are_recorded_as_launched():
    kernels = ours.build(80, 64, 128)
    assert list(kernels) == list(figures.PASSES)
    report = sass.analyse(kernels["forward"], model=False)
    loops = figures.loops_of(report, "forward", 64, 128 * 64)
    extra = loops["masked"].counts - loops["unmasked"].counts
    assert extra["alu"] > 0 and not extra["tensor"] and not extra["xu"]


@pytest.fixture
def stored():
    both = figures.load(OURS), figures.load(PEER)
    assert len(both[1]) == 48 and both[1].keys() <= both[0].keys()
    return both


def changed(counts, key, **values):
    return {**counts, key: dataclasses.replace(counts[key], **values)}


def test_stored_counts_hold_every_floor(stored):
    assert gate.broken_floors(*stored, (3, 7)) == []
    assert gate.worse(rows_of(stored[0]), rows_of(stored[0])) == []


KEY = Key(80, 64, 128, "forward", "masked")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"instructions": 9999.0},
            "sm_80 D=64 forward masked: instructions .* of FlexAttention's, at most 0.78",
        ),
        ({"instructions": 9999.0}, "sm_80 D=64 forward masked: the mask costs .* instructions"),
        ({"spills": 1}, "sm_80 D=64 forward masked: 1 spills in the loop, at most 0"),
        ({"bound": 0.5}, "sm_80 D=64 forward masked: bound 0.500 .*, at least 0.970"),
        ({"ctas": 1}, "sm_80 D=64 forward masked: 1 blocks on an SM, at least 2"),
    ],
)
def test_a_floor_breaks(stored, values, words):
    mine, peer = stored
    faults = gate.broken_floors(changed(mine, KEY, **values), peer, (3, 7))
    assert any(re.match(words, fault) for fault in faults), faults


def test_missing_loop_breaks_a_floor(stored):
    mine, peer = stored
    rest = {key: value for key, value in mine.items() if key != KEY}
    assert "sm_80 D=64 forward masked: not counted" in gate.broken_floors(rest, peer, (3, 7))
    assert gate.worse(rows_of(rest), rows_of(mine)) == ["sm_80 D=64 forward masked: no longer counted"]


def test_floors_of_a_newer_triton():
    assert gate.most_instructions(KEY, (3, 7)) == 0.78
    assert gate.most_instructions(KEY, (3, 9)) == 0.95
    assert gate.most_instructions(KEY._replace(loop="unmasked"), (3, 10)) == pytest.approx(0.90)
    spilling = Key(120, 64, 128, "forward", "masked")
    assert (gate.most_spills(spilling, (3, 7)), gate.most_spills(spilling, (3, 9))) == (0, 1)


@pytest.mark.parametrize("is_doctored", [False, True])
def test_the_gate_fails_on_doctored_counts(stored, is_doctored, tmp_path, monkeypatch, capsys):
    """The stored counts are made better than the current ones."""
    mine, peer = stored
    was = mine[KEY].instructions
    before = changed(mine, KEY, instructions=was - 1) if is_doctored else mine
    path = tmp_path / "counts.json"
    figures.store({OURS: rows_of(before), PEER: rows_of(peer)}, path)
    monkeypatch.setattr(command, "versions", lambda: ("2.13.0", "3.7.1"))
    monkeypatch.setattr(command, "names", lambda: (OURS, PEER, "edges", "levels", "options"))
    monkeypatch.setattr(command, "count", lambda *options: Counts(*stored, [], [], []))
    monkeypatch.setattr(work, "cases", list)
    monkeypatch.setattr(sys, "argv", ["static", "--gate", "--counts", str(path)])
    if not is_doctored:
        command.main()
        assert "0 floors broken" in capsys.readouterr().out
        return
    with pytest.raises(SystemExit) as stopped:
        command.main()
    assert stopped.value.code == 1
    assert f"sm_80 D=64 forward masked: instructions {was - 1:g} -> {was:g}" in capsys.readouterr().out


def test_counts_are_read_as_stored(stored, tmp_path):
    path = tmp_path / "counts.json"
    figures.store({OURS: rows_of(stored[0])}, path)
    figures.store({PEER: rows_of(stored[1])}, path)
    assert (figures.load(OURS, path), figures.load(PEER, path)) == stored
    assert figures.load("another", path) == {} == figures.load(OURS, tmp_path / "none")
    path.write_text('{"x": {"sm_80": {}}}')
    with pytest.raises(ValueError, match="counts: wanted the name of a loop, got 'sm_80'"):
        figures.load("x", path)


def test_every_figure_has_its_kind(stored, capsys):
    table.show(*stored, (3, 7))
    lines = capsys.readouterr().out.splitlines()
    kinds = next(line.split() for line in lines if "modelled" in line.split())
    header = next(line for line in lines if line.startswith("loop"))
    assert kinds.count("static") == 10 and kinds.count("modelled") == 2
    assert {"bound", "model", "instr/MFLOP", "regs", "spills"} <= set(header.split())
    case = work.Case("window", ab.Causal() & ab.Window(before=255), 1024, most=1.3)
    found = work.measure(case)
    table.show_work([found])
    assert {"static", "emulated"} <= set(capsys.readouterr().out.split())
    assert found.faults() == []


def test_executed_work():
    case = work.Case("causal", ab.Causal(), 512)
    found = work.measure(case)
    needed = 512 * 513 // 2
    assert found.by_tile == {128: 10 * 128**2 / needed, 64: 36 * 64**2 / needed}
    assert found.flex == found.by_tile[128]
    assert found.ours == found.by_tile[found.tile] and found.emulated in (None, found.ours)
    wasteful = found._replace(ours=found.flex + 0.1, most=1.2, emulated=None)
    assert len(wasteful.faults()) == 2
    assert len(found._replace(emulated=2.0).faults()) == 1


def test_without_tools(monkeypatch):
    sass.tool.cache_clear()
    monkeypatch.setattr(sass.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sass.shutil, "which", lambda *args, **kwargs: None)
    with pytest.raises(FileNotFoundError, match="nvdisasm: neither in Triton's wheel nor on the path"):
        sass.tool("nvdisasm")
    monkeypatch.undo()
    sass.tool.cache_clear()


def test_driver_is_restored():
    from triton.runtime.driver import driver

    before = driver._active
    with ours.recording(90):
        assert driver.active.get_current_target().arch == 90
        assert torch.device("cpu") == driver.active.get_active_torch_device()
    assert driver._active is before


@pytest.mark.parametrize(("kind", "macs"), [(1, 64 * 32 * 16), (2, 64 * 32 * 8)], ids=["bfloat16", "tf32"])
def test_tcgen05_product_of_each_type(kind, macs):
    """The same instruction multiplies 16 columns of 16 bits, or 8 of TF32: its descriptor says which."""
    descriptor = kind << 7 | (32 >> 3) << 17 | (64 >> 4) << 24
    move = sass.Ins(0, "", "UMOV", f"UR4, {descriptor:#x}", 1, 7, 7, 0)
    multiply = sass.Ins(16, "", "UTCHMMA", "gdesc[UR8], gdesc[UR10], tmem[UR6], idesc[UR4]", 1, 7, 7, 0)
    assert sass.tensor_fma([move, multiply], 1).macs == macs
