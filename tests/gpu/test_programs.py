"""Triton programs on the emulated GPU, against torch, and the features of the driver."""

import pytest
import torch
import triton
from cases import gpu_programs as programs
from ptxemu import OutOfBounds, RaceError, emulated_gpu
from torch.testing import assert_close

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# dtype, precision of float32 products, units in the last place of the largest result
PRODUCTS = [
    (torch.float16, "tf32", 2**-20),
    (torch.bfloat16, "tf32", 2**-20),
    (torch.float32, "tf32", 2**-9),
    (torch.float32, "tf32x3", 2**-19),
    (torch.float32, "ieee", 2**-19),
    (torch.int8, "ieee", 0),
    (E5M2, "ieee", 2**-20),
    (E4M3, "ieee", 2**-20),
]


@pytest.mark.parametrize(("dtype", "precision", "bound"), PRODUCTS, ids=str)
@pytest.mark.parametrize("warps", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_products(gpu, dtype, precision, bound, warps):
    if dtype == E4M3 and gpu.cc < 89:
        pytest.skip("no e4m3 on this architecture")
    rng = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, generator=rng) * 3 for size in ((100, 96), (96, 72)))
    a, b = a.to(dtype), b.to(dtype)
    out = torch.int32 if dtype == torch.int8 else torch.float32
    c = programs.matmul(a, b, out, precision, num_warps=warps)
    exact = a.double() @ b.double()
    error = (c.double() - exact).abs().max()
    assert error <= bound * (a.double().abs() @ b.double().abs()).max()
    if precision == "tf32" and dtype == torch.float32:
        assert error > 2**-20 * exact.abs().max()  # really in 10 bits
    if dtype in (torch.float16, torch.bfloat16):
        assert gpu.launches[0].macs == (2 * 64) * (2 * 64) * 96


@pytest.mark.parametrize("specialize", [False, True])
def test_tensor_descriptors(gpu, specialize):
    if specialize and gpu.cc != 100:
        pytest.skip("warps are specialised on sm_100 only")
    a, b = torch.randn(200, 256).half(), torch.randn(136, 256).half()
    c = programs.described_matmul(a, b, specialize)
    assert_close(c, (a.float() @ b.float().T).half())
    (launch,) = gpu.launches
    assert launch.macs == 256 * 256 * 256
    assert ("tma.ld" in launch.bytes) == (gpu.cc >= 90)
    assert (launch.warps > 4) == specialize


def test_a_kernel_outlives_the_cache_that_it_was_compiled_in(gpu, monkeypatch, tmp_path):
    """Its PTX was read at every launch, and was missing once TRITON_CACHE_DIR had changed."""
    x = torch.randn(7, 200)
    first = programs.softmax(x, 8.0, 1)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert torch.equal(programs.softmax(x, 8.0, 1), first)


@pytest.mark.parametrize("warps", [1, 4])
def test_reductions(gpu, warps):
    x = torch.randn(7, 200)
    assert_close(programs.softmax(x, 8.0, warps), x.softmax(1))


@pytest.mark.parametrize("warps", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_sorts_and_scans(gpu, warps):
    x = torch.randn(128)
    ordered, sums, largest = torch.empty(128), torch.empty(128), torch.empty(128, dtype=torch.int32)
    programs.sort_kernel[(1,)](x, ordered, sums, largest, WIDTH=128, num_warps=warps)
    assert torch.equal(ordered, x.sort().values)
    assert_close(sums, x.double().cumsum(0).float())
    towards_zero = torch.div((x * 1000).int(), 7, rounding_mode="trunc")
    assert torch.equal(largest, (x.argmax() + towards_zero).int())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int32], ids=str)
def test_atomics(gpu, dtype):
    x, at = torch.randint(-3, 4, (300,)).to(dtype), torch.randint(0, 20, (300,), dtype=torch.int32)
    sums, last = torch.zeros(20, dtype=dtype), torch.full((20,), -1, dtype=torch.int32)
    programs.scatter_kernel[(2,)](x, at, sums, last, 300, WIDTH=256)
    assert_close(sums.float(), torch.zeros(20).index_add_(0, at.long(), x.float()))
    wanted = torch.full((20,), -1).scatter_reduce(0, at.long(), torch.arange(300), "amax")
    assert torch.equal(last.long(), wanted)


# -- the driver ------------------------------------------------------------------------------------


def test_drivers_nest_and_are_restored():
    from triton.runtime.driver import driver

    before = driver._active
    x, y = torch.randn(128), torch.empty(128)
    with emulated_gpu(80, ptxas=False) as outer:
        with emulated_gpu(90, ptxas=False) as inner:
            compiled = programs.copy_kernel[(1,)](x, y, WIDTH=128)
            assert driver.active is inner
        programs.copy_kernel[(1,)](x, y, WIDTH=128)
        assert driver.active is outer
        assert len(outer.launches) == len(inner.launches) == 1
        with pytest.raises(RuntimeError, match=r"compiled for emulated_gpu\(90\)"):
            compiled[(1, 1, 1)](x, y, 128)
    assert driver._active is before
    assert torch.equal(x, y)


def test_unknown_settings_raise():
    with pytest.raises(ValueError, match=r"^cc: wanted one of \[75, 80, .*\], got 81$"):
        emulated_gpu(81)
    with pytest.raises(ValueError, match=r"^bounds: wanted one of .*, got 'loose'$"):
        emulated_gpu(80, bounds="loose")


def test_bounds():
    big, out = torch.randn(64, 128), torch.zeros(64 * 128)
    packed = torch.randn(4, 3, 128)
    with emulated_gpu(80, ptxas=False) as gpu:
        programs.copy_kernel[(3,)](big[:2], out, WIDTH=128)  # past the view, inside the storage
        with pytest.raises(OutOfBounds, match=r"^copy_kernel: global access out of bounds: .* from its end"):
            programs.copy_kernel[(65,)](big, out, WIDTH=128)
        gpu.bounds = "view"
        programs.copy_kernel[(2,)](big[:2], out, WIDTH=128)
        with pytest.raises(OutOfBounds):
            programs.copy_kernel[(3,)](big[:2], out, WIDTH=128)
        programs.copy_kernel[(3,)](packed[:, 0], out, WIDTH=128)
        gpu.bounds = "exact"
        programs.copy_kernel[(1,)](packed[:, 0], out, WIDTH=128)
        with pytest.raises(OutOfBounds, match="between the elements of a view"):
            programs.copy_kernel[(2,)](packed[:, 0], out, WIDTH=128)


def test_races_between_ctas():
    with emulated_gpu(80, racecheck=True, ptxas=False):
        x = torch.ones(600, dtype=torch.int8)
        programs.copy_kernel[(4,)](x[1:513], torch.empty(513, dtype=torch.int8)[1:], WIDTH=128)  # other bytes
        with pytest.raises(RaceError, match=r"^clash_kernel: global memory: two CTAs write"):
            programs.clash_kernel[(2,)](torch.zeros(128), WIDTH=128)


def test_ctas_that_wait_for_each_other():
    lock, x = torch.zeros(1, dtype=torch.int32), torch.zeros(1)
    with emulated_gpu(80, ptxas=False):
        programs.locked_kernel[(20,)](lock, x, num_warps=1)
    assert x.item() == 20


def test_device_assertions():
    x = torch.arange(32, dtype=torch.int32)
    with emulated_gpu(80, ptxas=False):
        programs.checked_kernel[(1,)](x, 32, WIDTH=32, debug=True)
        with pytest.raises(RuntimeError, match="assertion"):
            programs.checked_kernel[(1,)](x, 31, WIDTH=32, debug=True)


def test_tuples_and_small_floats():
    x, y = torch.randint(-3000, 3000, (64,)) / 8, torch.empty(64)
    with emulated_gpu(90, ptxas=False):
        programs.tuples_kernel[(1,)]((x, y), (2.0, 3), WIDTH=64)
    assert torch.equal(y, x.to(E4M3).float() * 2 + 3)


def test_autotuning_takes_the_first():
    x, y = torch.randn(300), torch.empty(300)
    with emulated_gpu(90, ptxas=False) as gpu:
        programs.tuned_kernel[lambda meta: (triton.cdiv(300, meta["WIDTH"]),)](x, y, 300)
    assert torch.equal(y, x * 3)
    assert [launch.grid for launch in gpu.launches] == [(3, 1, 1)]


def test_shared_memory_is_that_of_the_device():
    a = torch.zeros(256, 256)
    with emulated_gpu(86, ptxas=False), pytest.raises(triton.runtime.errors.OutOfResources):
        programs.matmul(a, a, block=(128, 256, 128), num_warps=8, num_stages=4)


def test_counters():
    a, b = torch.randn(64, 64).half(), torch.randn(64, 64).half()
    with emulated_gpu(80, conflicts=True) as gpu:  # and ptxas accepts it
        programs.matmul(a, b)
    (launch,) = gpu.launches
    assert launch.macs == 64**3
    assert launch.bytes == {"cp.async": 2 * 64 * 64 * 2, "st": 64 * 64 * 4}
    assert sum(n for name, n in launch.instructions.items() if name.startswith("mma")) == 64**3 // (
        16 * 8 * 16
    )
    assert all(found.actual >= found.ideal for found in launch.report.counters.conflicts.values())
    assert "tensor-core multiply-adds: 262144" in str(launch)
