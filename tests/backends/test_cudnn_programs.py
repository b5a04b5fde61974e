"""NVIDIA's kernels as the backend ``cudnn`` would run them: compiled, and those of the plan emulated.

Runs in an environment that has NVIDIA's packages, which ``make test-cudnn`` makes; skipped elsewhere.
"""

from __future__ import annotations

import importlib.util
import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import ROOT

import attnbias as ab
from attnbias.backends import cudnn
from attnbias.layouts.runs import find_runs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        cudnn.why_not_package() is not None or importlib.util.find_spec("cutlass") is None,
        reason="needs NVIDIA's packages: make test-cudnn",
    ),
]
ARCHITECTURES = ("sm_90a", "sm_100a")
# D, E, H, Hk, and whether each head has a mask of its own
SIZES = [(64, 64, 4, 4, 1), (128, 128, 8, 2, 1), (128, 128, 8, 2, 8)]
TILE = 128


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Return a function that compiles once for an architecture and sizes: kernels by file, and the folder."""
    done = {}

    def compile_for(arch, sizes):
        if (arch, sizes) not in done:
            folder = tmp_path_factory.mktemp(arch)
            program = ROOT / "tests" / "cases" / "cudnn_programs.py"
            command = [sys.executable, str(program), arch, str(folder), *map(str, sizes)]
            run = subprocess.run(command, capture_output=True, text=True, check=False)
            assert run.returncode == 0, run.stderr[-3000:]
            lines = run.stdout.splitlines()
            assert len(lines) == 1, f"NVIDIA printed: {lines[:-1]}"
            done[arch, sizes] = json.loads(lines[0]), folder
        return done[arch, sizes]

    return compile_for


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_plan_forward_and_backward_compile_without_spills(arch, sizes, compiled):
    files, _ = compiled(arch, sizes)
    for kind in ("classify", "materialize", "fwdforward", "bwdbackward"):
        assert any(kind in name for name in files), (kind, list(files))
    frames = {name: kernel["frame"] for name, made in files.items() for kernel in made.values()}
    most = 8 if (arch, sizes[0]) == ("sm_100a", 128) else 0  # bytes, of the backward kernel alone
    assert frames and max(frames.values()) <= most, frames


def pack(pointer, shape, strides):
    """Return a tensor as the compiled kernels take it: address, sizes of 4 bytes, strides of 8."""
    sizes = b"".join(struct.pack("<i", n) for n in shape)
    sizes += bytes(-len(sizes) % 8)
    return struct.pack("<Q", pointer) + sizes + b"".join(struct.pack("<q", n) for n in strides)


def classify(kernel, endpoints, batch, k_len):
    """Run the planner's first kernel: which tiles are visible, which full, their counts, its verdict."""
    from ptxemu.memory import Memory

    heads, count, total = endpoints.shape
    q_len, memory = total // batch, Memory()
    rows, columns = -(-q_len // TILE), -(-k_len // TILE)
    words = max(1, -(-columns // 32))
    given = memory.put(endpoints)
    visible, full = (memory.put(np.zeros((heads, batch * rows, words), np.uint32)) for _ in range(2))
    partial_count, full_count = (memory.put(np.zeros((heads, batch * rows), np.int32)) for _ in range(2))
    is_wrong = memory.put(np.zeros(1, np.uint32))
    by_tile = (heads, batch * rows, words), (batch * rows * words, words)
    by_row = (heads, batch * rows), (batch * rows,)
    arguments = [
        pack(given, endpoints.shape, (count * total, total)),
        *(pack(x, *by_tile) for x in (visible, full)),
        *(pack(x, *by_row) for x in (partial_count, full_count)),
        pack(is_wrong, (1,), ()),
        *(batch, q_len, k_len, total, batch * k_len, rows, columns, count),
    ]
    kernel.launch((batch * rows, heads), arguments, memory, shared=1024)

    def bits(x):
        unpacked = np.unpackbits(memory.get(x).view(np.uint8), axis=-1, bitorder="little")
        return unpacked.reshape(heads, batch, rows, -1)[..., :columns].astype(bool)

    counts = (memory.get(x).reshape(heads, batch, rows) for x in (partial_count, full_count))
    return bits(visible), bits(full), *counts, int(memory.get(is_wrong)[0])


def kernel_of(compiled):
    from ptxemu.kernel import Kernel

    _, folder = compiled("sm_90a", SIZES[0])
    (path,) = Path(folder).glob("*q2k_classify*.ptx")
    return Kernel(path.read_text())


RELATIONS = [
    ab.Full(),
    ab.Causal(),
    ab.Window(40, 3),
    ab.Causal() & ~ab.Window(before=0),
    ab.Prefix(50) | ab.Causal(),
    ab.Window(9, 9) | ab.Global([0, 200]),
    ab.Empty(),
    ab.PerHead([ab.Causal(), ab.Window(before=3)]),
    ab.PerBatch([ab.Causal(), ab.Window(before=3)]),
]


@pytest.mark.parametrize("relation", RELATIONS, ids=str)
@pytest.mark.parametrize(("q_len", "k_len"), [(1, 129), (130, 64), (300, 500)])
def test_nvidias_planner_finds_our_tiles(relation, q_len, k_len, compiled):
    layout = ab.Layout.build(relation, q_len, k_len, form="tiles", batch=2, heads=2)
    endpoints = cudnn.make_endpoints(find_runs(layout, 8), 2, 2).numpy()
    visible, full, partial_count, full_count, is_wrong = classify(kernel_of(compiled), endpoints, 2, k_len)
    dense = relation.dense(q_len, k_len, batch=2, heads=2).expand(2, 2, q_len, k_len)
    dense = dense.transpose(0, 1)[: len(endpoints)]
    padded = torch.nn.functional.pad(dense, (0, -k_len % TILE, 0, -q_len % TILE)).numpy()
    tiles = padded.reshape(*padded.shape[:2], -(-q_len // TILE), TILE, -(-k_len // TILE), TILE)
    some, every = tiles.any((3, 5)), tiles.all((3, 5))
    assert not is_wrong
    assert (visible == some).all() and (full == every).all()
    assert (full_count == every.sum(-1)).all() and (partial_count == (some & ~every).sum(-1)).all()


def test_nvidias_planner_refuses_wrong_endpoints(compiled):
    endpoints = np.zeros((1, 3, 2 * 130), np.int32)
    endpoints[0, :, 7] = 5, 3, 9
    assert classify(kernel_of(compiled), endpoints, 2, 64)[-1]
