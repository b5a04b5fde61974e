"""The structs of the C interface: Python packs every field at its offset in the C header."""

import ctypes
import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from attnbias.backends import cpu
from attnbias.backends.cpu import abi

RECORDS = (abi.TENSOR, abi.PART, abi.LAYOUT, abi.CALL)
HEADERS = Path(__file__).parents[3] / "csrc"
COMPILER = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), None)


@pytest.mark.skipif(cpu.missing() is not None, reason=str(cpu.missing()))
def test_size_of_a_call():
    assert cpu.library().ab_call_bytes() == abi.CALL.size


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_packed_bytes_and_ctypes_view_agree(record):
    at = 0
    for name, kind in record.fields.items():
        assert getattr(record.view, name).offset == at
        at += struct.calcsize("=" + kind.code)
    assert record.size == ctypes.sizeof(record.view) == at


@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
def test_offset_of_every_field(tmp_path):
    asked = {f"sizeof({record.name})": record.size for record in RECORDS}
    for record in RECORDS:
        for name in record.fields:
            asked[f"offsetof({record.name}, {name})"] = getattr(record.view, name).offset
    lines = [f'printf("%zu\\n", {expression});' for expression in asked]
    includes = [f"#include {name}" for name in ("<stddef.h>", "<stdio.h>", '"attnbias.h"')]
    source, program = tmp_path / "offsets.c", tmp_path / "offsets"
    source.write_text("\n".join([*includes, "int main(void) {", *lines, "}"]))
    subprocess.run([str(COMPILER), f"-I{HEADERS}", str(source), "-o", str(program)], check=True)
    printed = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout
    assert dict(zip(asked, map(int, printed.split()), strict=True)) == asked
