"""Checks of every row of the configuration table: what is a fault, what is worse than stored, the command."""

import json
import sys

import pytest

pytest.importorskip("triton")

from attnbias.benchmarks.static import __main__ as command
from attnbias.benchmarks.static import sass, whole_table
from attnbias.benchmarks.static.whole_table import Kernels, Row, faults, grid, measure, needed
from attnbias.kernels.launch import config as configs
from attnbias.kernels.launch.launch import columns

try:
    sass.tool("nvdisasm"), sass.tool("cuobjdump")
except FileNotFoundError as error:
    pytest.skip(f"no disassembler: {error}", allow_module_level=True)

GOOD = Row(80, "64x32 w4 s2", regs=200, spills=2, all_spills=5, shared=65536, work=1.0)
STORED = {"sm_80 bfloat16 D=64 dQ": {"spills": 2, "all_spills": 5}}


def doctored(**values):
    return {"sm_80 bfloat16 D=64 dQ": GOOD._replace(**values)}


def test_a_good_row_has_no_fault():
    assert faults(doctored(), STORED) == faults(doctored(), {}) == []
    assert faults(doctored(spills=0, all_spills=0), STORED) == []


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"spills": 26}, "spills in a loop 25 -> 26"),
        ({"shared": 166913}, "166913 bytes of shared memory, at most 166912"),
        ({"regs": 32, "all_spills": 8000}, "8000 spills with 32 registers: ptxas gave up"),
        ({"work": 1.5}, "1.50 of the needed products executed"),
        ({"work": 0.5}, "0.50 of the needed products executed"),
        ({"serial": "C7515"}, "wgmma serialised: C7515"),
        ({"smaller": 1}, "the table's configuration does not fit, 64x32 w4 s2 runs"),
    ],
)
def test_what_must_not_be_is_one_line(values, words):
    assert faults(doctored(**values), {}) == [f"sm_80 bfloat16 D=64 dQ: 64x32 w4 s2: {words}"]


def test_what_got_worse_than_stored_is_one_line():
    start = "sm_80 bfloat16 D=64 dQ: 64x32 w4 s2"
    assert faults(doctored(spills=3), STORED) == [f"{start}: spills in a loop 2 -> 3"]
    assert faults(doctored(all_spills=6), STORED) == [f"{start}: spills 5 -> 6"]


def test_a_known_fault_is_no_news(monkeypatch):
    monkeypatch.setattr(whole_table, "KNOWN", {"sm_80 bfloat16 D=64 dQ": ("1.50 of",)})
    assert faults(doctored(work=1.5), STORED) == []
    assert len(faults(doctored(work=1.6), STORED)) == 1
    assert len(faults(doctored(work=1.5, serial="C7515"), STORED)) == 1


def test_known_faults_are_of_rows_that_are_checked():
    rows = {kernels.name_of(which) for kernels in grid(ALL) for which in whole_table.PASSES}
    assert set(whole_table.KNOWN) <= rows


ALL = (80, 86, 89, 90, 100, 120)


def test_every_entry_of_the_table_is_checked():
    listed = {(x.sm, columns(max(x.d, 64)), x.tile) for x in grid(ALL) if x.dtype == "bfloat16"}
    assert set(configs._HALF) <= listed
    single = {
        (86 if x.sm in configs._SMALL else x.sm, 96 if x.d == 80 else x.d)
        for x in grid(ALL)
        if x.dtype == "float32"
    }
    assert set(configs._FLOAT) <= single
    assert {x.dtype for x in grid(ALL)} == {"bfloat16", "float16", "float32"}
    assert grid([80], [16]) == [Kernels(80, "bfloat16", 16), Kernels(80, "float32", 16)]


def test_needed_products():
    """With D = 64 and E = 32 columns: forward has one of each, dQ two with D, dK/dV two of each."""
    assert needed("forward", 100, 64, 32, "bfloat16") == 200 * 96
    assert needed("backward_query", 100, 64, 32, "bfloat16") == 200 * 160
    assert needed("backward_key", 100, 64, 32, "float16") == 200 * 192
    assert needed("backward_key", 100, 64, 32, "float32") == 600 * 192


def test_a_kernel_is_compiled_and_read():
    found = measure(Kernels(80, "bfloat16", 16))
    assert list(found) == [f"sm_80 bfloat16 D=16 {words}" for words in ("forward", "dQ", "dK/dV")]
    for row in found.values():
        assert row.work == 1 and row.regs > 32 and not row.smaller and row.shared > 0
    assert faults(found, {}) == []


def test_a_wasteful_tile_is_seen(monkeypatch):
    """8 warps share 32 rows of scores: some products are executed twice."""
    wasteful = {**configs._HALF, (80, 64, 128): ("128x64 w4 s3", "128x32 w4 s3 H", "32x16 w8 s2")}
    monkeypatch.setattr(configs, "_HALF", wasteful)
    lines = faults(measure(Kernels(80, "bfloat16", 16)), {})
    assert len(lines) == 1 and "dK/dV: 32x16 w8 s2" in lines[0], lines
    assert "of the needed products executed" in lines[0]


def test_a_kernel_that_does_not_compile_is_a_line(monkeypatch):
    def fail(*arguments):
        raise RuntimeError("no such thing\nmore")

    monkeypatch.setattr("attnbias.benchmarks.static.ours.build", fail)
    found = measure(Kernels(90, "float32", 64))
    assert faults(found, {})[0] == "sm_90 float32 D=64 forward: RuntimeError: no such thing"
    assert len(found) == 3


def run(monkeypatch, path, rows, *arguments):
    monkeypatch.setattr(whole_table, "count", lambda wanted, jobs: rows)
    monkeypatch.setattr(sys, "argv", ["static", "--table", "--counts", str(path), *arguments])
    with pytest.raises(SystemExit) as stopped:
        command.main()
    return stopped.value.code


def test_the_command_stores_and_fails_on_worse(tmp_path, monkeypatch, capsys):
    path = tmp_path / "rows.json"
    assert run(monkeypatch, path, doctored(), "--store") == 0
    stored = json.loads(path.read_text())
    assert [list(rows) for rows in stored.values()] == [["sm_80 bfloat16 D=64 dQ"]]
    assert run(monkeypatch, path, doctored()) == 0
    assert "0 rows wrong" in capsys.readouterr().out
    assert run(monkeypatch, path, doctored(spills=9)) == 1
    out = capsys.readouterr().out
    assert "1 rows wrong" in out and "dQ: 64x32 w4 s2: spills in a loop 2 -> 9" in out
    other = {"sm_90 bfloat16 D=64 dQ": GOOD, "sm_90 float32 D=64 dQ": "CompilationError: no"}
    assert run(monkeypatch, path, other, "--store") == 1  # what did not compile is a fault, not stored
    (rows,) = json.loads(path.read_text()).values()
    assert list(rows) == ["sm_80 bfloat16 D=64 dQ", "sm_90 bfloat16 D=64 dQ"]
