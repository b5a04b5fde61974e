"""Triton's real CUDA launcher on a libcuda that runs nothing: what it is handed, and how often."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from fakecuda import fake_gpu, why_not

import attnbias as ab

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"fake libcuda: {why_not()}")


@triton.jit
def copy(x, y, n, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(y + at, tl.load(x + at, mask=at < n), mask=at < n)


@triton.jit
def copy_tile(tile, y, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(y + at[:, None] * SIZE + at[None, :], tile.load([0, 0]))


def test_launches_hold_what_was_passed():
    x, y = torch.zeros(100), torch.zeros(100)
    with fake_gpu(80) as gpu:
        copy[3,](x, y, 100, SIZE=32, num_warps=2)
        gpu.stream = 7
        copy[2, 3](x, y, 100, SIZE=32, num_warps=2)
    first, second = gpu.launches
    assert (first.name, first.grid, first.threads, first.stream) == ("copy", (3, 1, 1), 64, 0)
    assert first.numbers() == [x.data_ptr(), y.data_ptr(), 100, 0, 0]
    assert (second.grid, second.stream, second.kernel) == ((2, 3, 1), 7, first.kernel)
    assert gpu.count("loads") == 1


def test_nothing_is_executed():
    x, y = torch.ones(64), torch.zeros(64)
    with fake_gpu(90):
        copy[2,](x, y, 64, SIZE=32)
    assert not y.any()


def test_refuses_a_grid_that_is_too_large():
    x, y = torch.zeros(100), torch.zeros(100)
    with fake_gpu(80) as gpu:
        with pytest.raises(RuntimeError, match="grid y: wanted 1 to 65535, got 65536"):
            copy[1, 65536](x, y, 100, SIZE=32)
        assert gpu.count() == 0


def test_refuses_a_descriptor_that_no_driver_takes():
    from triton.tools.tensor_descriptor import TensorDescriptor

    y = torch.zeros(64, 64)
    base = torch.zeros(65 * 64 + 1)
    with fake_gpu(90) as gpu:
        copy_tile[1,](TensorDescriptor(base[:-1], [64, 64], [64, 1], [64, 64]), y, SIZE=64)
        assert gpu.count("descriptors") == 1
        odd = TensorDescriptor(base[:-1], [64, 64], [64, 1], [64, 64])
        odd.strides = [65, 1]  # which its own check refuses, too
        with pytest.raises(RuntimeError, match="TMA stride: wanted a multiple of 16, got 260"):
            copy_tile[1,](odd, y, SIZE=64)


def test_refuses_a_launcher_that_packs_something_else(monkeypatch):
    from fakecuda import driver

    monkeypatch.setattr(driver, "_parameter_sizes", lambda ptx: [8, 8, 8, 8])
    x, y = torch.zeros(100), torch.zeros(100)
    with (
        fake_gpu(80, number=1),
        pytest.raises(RuntimeError, match=r"copy: the launcher packs \[8, 8, 4, 8, 8\]"),
    ):
        copy[3,](x, y, 100, SIZE=32)


def test_refuses_too_many_parameters():
    with fake_gpu(80) as gpu, pytest.raises(RuntimeError, match="wide: the fake libcuda has no room"):
        gpu.declare("wide", [4] * 97)


def test_wants_a_known_capability():
    with pytest.raises(ValueError, match=r"cc: wanted one of \[80, .*\], got 70"):
        fake_gpu(70)


def test_says_why_it_cannot_be_used(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert why_not() == "no C compiler"
    with pytest.raises(RuntimeError, match="fake_gpu: no C compiler"):
        fake_gpu(80)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert why_not() == "a real libcuda is in this process"


@pytest.mark.parametrize(("cc", "descriptors"), [(80, 0), (90, 6)])
def test_a_step_over_tiles_is_four_launches(cc, descriptors):
    q, k, v = (torch.zeros(1, 2, 256, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    with fake_gpu(cc) as gpu:
        out = ab.attention(q, k, v, ab.Causal(), backend="triton")
        torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))
    names = [launch.name for launch in gpu.launches]
    assert names == ["forward_kernel", "delta_kernel", "backward_query_kernel", "backward_key_kernel"]
    assert gpu.count("descriptors") == descriptors


@pytest.mark.parametrize(
    ("long", "names"),
    [
        ("", ["edge_forward", "edge_rows", "edge_columns"]),
        ("row", ["edge_forward", "edge_merge", "edge_rows", "edge_merge", "edge_columns"]),
        ("column", ["edge_forward", "edge_rows", "edge_columns", "edge_merge", "edge_merge"]),
    ],
)
def test_a_step_over_edges_merges_only_where_rows_are_long(long, names):
    q, k, v = (torch.zeros(1, 2, 300, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    ring = torch.arange(300)
    index = torch.stack((ring, ring.roll(1)))
    hub = torch.stack((ring, torch.zeros_like(ring)))
    more = {"": hub[:, :0], "row": hub, "column": hub.flip(0)}[long]
    graph = ab.Graph(torch.cat((index, more), 1), num_nodes=300)
    with fake_gpu(80) as gpu:
        out = ab.attention(q, k, v, graph, backend="triton")
        torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))
    assert [launch.name for launch in gpu.launches] == names
