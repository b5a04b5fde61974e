"""The Triton backend: its requirements, its configurations, and what it compiles."""

from __future__ import annotations

import itertools
import sys
from types import SimpleNamespace

import pytest
import torch
from cases.interpreter import not_interpreted as compiled

import attnbias as ab
from attnbias.backends import triton as backend
from attnbias.backends.call import Call, Inputs, Needs
from attnbias.kernels.launch import config
from attnbias.kernels.launch.config import Config, Present, Target, candidates, target_of
from attnbias.op import dispatch
from attnbias.op.problem import Problem

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402 - not before it is known to be there

from attnbias.kernels.launch import launch  # noqa: E402
from attnbias.kernels.launch.tune import changed, choices, tune  # noqa: E402
from attnbias.kernels.tiles.backward_key import backward_key_kernel  # noqa: E402
from attnbias.kernels.tiles.backward_query import backward_query_kernel  # noqa: E402
from attnbias.kernels.tiles.extras import PLAIN, least_score  # noqa: E402
from attnbias.kernels.tiles.forward import forward_kernel  # noqa: E402

PASSES = ("forward", "backward_query", "backward_key")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CPU = torch.device("cpu")


class Driver:
    """A Triton driver for CPU tensors that compiles for an absent GPU and launches nothing."""

    def __init__(self, arch=80, of="cuda"):
        self.target = GPUTarget(of, arch, 32)
        self.utils = self

    def get_current_target(self):
        return self.target

    def get_active_torch_device(self):
        return CPU

    def get_current_device(self):
        return 4000 + self.target.arch

    def get_current_stream(self, device=None):
        return 0

    def get_device_properties(self, device):
        return {"max_shared_mem": 99 << 10}

    def load_binary(self, name, kernel, shared, device):
        return None, None, 0, 0, 1024  # module, function, registers, spills, threads

    def launcher_cls(self, source, metadata):
        return lambda *arguments: None


@pytest.fixture
def driver(monkeypatch):
    """Make Triton use the driver above."""

    def activate(**given):
        made = Driver(**given)
        monkeypatch.setattr(triton.runtime.driver, "_active", made)
        return made

    return activate


def every_choice():
    archs, sizes = (80, 86, 89, 90, 100, 103, 110, 120, 121), (1, 16, 64, 65, 128, 129, 256)
    for arch, version in itertools.product(archs, ((3, 6), (3, 7), (3, 9))):
        for which, dtype, size, tile in itertools.product(PASSES, DTYPES, sizes, (64, 128)):
            yield Target(arch, version), which, dtype, size, tile


def _uncut(choices):
    return [choice._replace(chunk=0) for choice in choices]


def test_tiles_divide_the_lists():
    for target, which, dtype, size, tile in every_choice():
        choices = candidates(target, which, dtype, size, 1, tile)
        swapped = candidates(target, which, dtype, 1, size, tile)
        assert _uncut(choices) == _uncut(swapped)  # values are not cut
        for choice in choices:
            assert tile % choice.rows == 0 and tile % choice.cols == 0
            assert choice.rows >= 16 and choice.cols >= 16 and choice.warps in (4, 8)
        assert choices[-1].rows * choices[-1].cols == 256  # the smallest, known to fit in 99 KB


def test_flags_are_set_only_where_they_work():
    for target, which, dtype, size, tile in every_choice():
        first = candidates(target, which, dtype, size, size, tile)[0]
        if first.packed:
            assert target.arch in (100, 103, 110) and first.warps == 4 and which == "forward"
        if first.half:
            assert which == "backward_query" and dtype != torch.float32
        if first.by_fma:
            assert dtype == torch.bfloat16  # its rounding hides the polynomial's
        if first.tma:
            assert target.arch >= 90
        plain = candidates(target._replace(is_interpreted=True), which, dtype, size, size, tile)[0]
        assert not plain.packed and not plain.half
        assert (plain.rows, plain.cols) == (first.rows, first.cols) or dtype == torch.float32


@pytest.mark.parametrize(
    ("arch", "nearest"), [(87, 86), (89, 86), (103, 100), (110, 100), (121, 120), (200, 120)]
)
def test_newer_architecture_uses_the_nearest_known(arch, nearest):
    for which in PASSES:
        new, known = (
            candidates(Target(x, (3, 7)), which, torch.bfloat16, 64, 64, 128) for x in (arch, nearest)
        )
        assert new == known


def test_triton_versions_have_their_own():
    old, new = (
        candidates(Target(80, version), "forward", torch.bfloat16, 128, 128, 128)[0]
        for version in ((3, 7), (3, 9))
    )
    assert new == old._replace(fixed=True) != old


@pytest.mark.parametrize("which", PASSES)
def test_sm_80_pads_no_head_of_80_or_96(which):
    def chunk(arch, dtype, size, **levels):
        return candidates(Target(arch, (3, 7)), which, dtype, size, size, 128, **levels)[0].chunk

    sizes = 32, 64, 72, 80, 96, 97, 128, 256
    assert [chunk(80, torch.bfloat16, size) for size in sizes] == [0, 0, 64, 64, 64, 0, 0, 0]
    assert chunk(86, torch.bfloat16, 80) == chunk(90, torch.float16, 80) == 0
    assert chunk(80, torch.bfloat16, 80, has_levels=True) == 0


def test_float32_has_entries_of_its_own():
    """By architecture, by memory, and for heads of 65 to 96, whose last chunk would be narrow."""

    def forward(arch, d):
        return str(candidates(Target(arch, (3, 7)), "forward", torch.float32, d, d, 128)[0])

    assert [forward(arch, 128) for arch in (80, 89, 90, 100)] == [
        *("32x32 w4 s2 C64", "32x32 w4 s2 C64", "64x32 w4 s2 C64", "32x32 w4 s2 C64")
    ]
    assert [forward(arch, 256) for arch in (80, 90, 120)] == ["16x32 w4 s1 C64"] * 3

    def query(d):
        return str(candidates(Target(80, (3, 7)), "backward_query", torch.float32, d, d, 128)[0])

    assert [query(d) for d in (64, 72, 96, 128)] == [
        *("32x32 w4 s2", "16x32 w4 s2", "16x32 w4 s2", "32x32 w4 s2 F C64")
    ]


def test_parse():
    assert Config.parse("128x64 w8 s3 T N A P E2 H F") == Config(128, 64, 8, 3, *[True] * 4, 2, True, True)
    assert Config.parse("32x16 w4 s1") == Config(32, 16, 4, 1)


def test_flags_of_the_same_field():
    for text in ("64x32 w4 s2 C64", "64x32 w4 s2 N C128", "128x64 w4 s3 T A W"):
        assert str(Config.parse(text)) == text


def test_configuration_survives_a_round_trip_through_text():
    for target, which, dtype, size, tile in every_choice():
        for choice in candidates(target, which, dtype, size, size, tile):
            assert Config.parse(str(choice)) == choice


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Return an empty user cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget = (config.tuned.cache_clear, candidates.cache_clear, launch._fitting.clear)
    for clear in forget:
        clear()
    yield config.tuned_path()
    for clear in forget:
        clear()


GIVEN = "forward", Target(90, (3, 7)), torch.bfloat16, 64, 64, 128


def in_use():
    which, target, *shape = GIVEN
    return candidates(target, which, *shape)[0]


def measure(run):
    """Time the configuration that ``in_use`` returns: large tiles of 8 warps do not fit."""
    config_in_use = run()
    if config_in_use.rows == 128 and config_in_use.warps == 8:
        raise launch.OutOfResources(1, 0, "shared memory")
    return {"64x128 w4 s2 N": 1.0, "128x64 w4 s3": 0.5}.get(str(config_in_use), 2.0)


def test_tuning_stores_and_uses_the_fastest(cache):
    _, target, *shape = GIVEN
    table = in_use()
    found = tune(in_use, *GIVEN, measure=measure)
    assert str(found.best) == "128x64 w4 s3" and found.table == table
    assert found.times[found.best] == 0.5 and any("shared memory" in words for words in found.failed.values())
    assert in_use() == found.best
    assert candidates(target, "backward_query", *shape)[0] != found.best
    for clear in (config.tuned.cache_clear, candidates.cache_clear):
        clear()  # as in the next process
    assert in_use() == found.best
    assert tune(in_use, *GIVEN, measure=measure).table == table  # not what an earlier run chose
    cache.write_text("no JSON")
    for clear in (config.tuned.cache_clear, candidates.cache_clear):
        clear()
    assert in_use() == table


def test_tuning_passes_over_a_fast_configuration_that_is_wrong(cache):
    lines = []
    found = tune(
        in_use,
        *GIVEN,
        measure=measure,
        check=lambda: "out: error 1" * (in_use().rows == 128),
        say=lines.append,
    )
    assert str(found.best) == "64x128 w4 s2 N"
    assert found.failed[Config.parse("128x64 w4 s3")] == "out: error 1"
    assert "forward 128x64 w4 s3: 500.0 us" in lines and "forward 128x64 w4 s3: out: error 1" in lines


def test_tuning_without_a_right_configuration_keeps_the_table(cache):
    table = in_use()
    with pytest.raises(RuntimeError, match=r"forward bfloat16 D=64 .*: none of 2 configurations ran and was"):
        tune(in_use, *GIVEN, among=[Config(64, 64, 4, 2)], measure=measure, check=lambda: "out: error 1")
    assert in_use() == table and not cache.exists()


def test_tuned_configurations_can_run():
    sizes = itertools.product(PASSES, DTYPES, (64, 128, 256), (64, 128), (80, 89, 90, 100, 120))
    for which, dtype, size, tile, arch in sizes:
        found = choices(which, Target(arch, (3, 7)), dtype, size, size, tile)
        assert found[0] == candidates(Target(arch, (3, 7)), which, dtype, size, size, tile)[0]
        assert 5 < len(found) < 30 and all(tile % x.rows == 0 and tile % x.cols == 0 for x in found)
        assert any(x.tma for x in found) == (arch >= 90)
        assert any(x.one_buffer for x in found) == (arch == 100)
        assert any(x.packed for x in found) == (arch == 100 and which == "forward")
        assert any(x.half for x in found) == (which == "backward_query" and dtype != torch.float32)
        assert any(x.chunk for x in found) == (size > 64) and all(x.chunk < size for x in found)
        for x in found:
            if x.specialised:
                assert arch == 100 and which == "forward" and x.tma and not x.ahead and not x.packed
        if arch == 100 and which == "forward" and dtype != torch.float32:
            assert any(x.specialised for x in found)
        assert any(x.by_fma for x in found) == (which == "forward" and dtype == torch.bfloat16)


def test_environment_changes_configurations():
    before = in_use()
    with changed("forward: 128x32 w8 s2 N; all: without N"):
        assert str(in_use()) == "128x32 w8 s2"
        with changed("s1 w8 without T"):
            assert in_use() == before._replace(tma=False, stages=1, warps=8)
        assert str(in_use()) == "128x32 w8 s2"
    with changed("backward_key: 16x16 w4 s1"):
        assert in_use() == before
    with changed(" ; "):
        assert in_use() == before
    assert in_use() == before


@pytest.mark.parametrize(
    "text",
    [
        "forwards: 128x64 w4 s3",
        "forward:",
        "forward: 128x64",
        "128x64 w4 s3 Z",
        "without",
        "without Q",
        "q3",
        "s0",
        "w3",
        "8x64 w4 s1",
        "forward: 64xa w4 s1",
    ],
)
def test_unreadable_environment_is_one_error(text):
    words = "ATTNBIAS_TRITON: wanted changes such as 'forward: 128x64 w4 s3;"
    with pytest.raises(ValueError, match=words) as e, changed(text):
        pass
    assert str(e.value).endswith(f"got {text!r}") and "\n" not in str(e.value)


def test_tile_of_the_environment_divides_the_lists():
    words = "ATTNBIAS_TRITON: wanted a tile that divides the lists' 64, got 128x64"
    with changed("forward: 128x64 w4 s3"), pytest.raises(ValueError, match=words):
        candidates(Target(90, (3, 7)), "forward", torch.bfloat16, 64, 64, 64)


class Picky:
    """A kernel that accepts only tiles up to a certain size."""

    def __init__(self, most):
        self.most, self.tried = most, []

    def __getitem__(self, grid):
        def run(SPEC, **others):
            self.tried.append((SPEC.rows, SPEC.cols))
            if SPEC.rows * SPEC.cols > self.most:
                raise launch.OutOfResources(1, 0, "shared memory")

        return run


def test_configuration_that_does_not_fit_falls_back_to_a_smaller_one(monkeypatch):
    monkeypatch.setattr(launch, "_fitting", {})
    lists = backend.backend._lists(ab.Layout.build(ab.Causal(), 128, 128, tile=128, form="tiles"))[0]
    x = torch.zeros(1, 1, 128, 64, dtype=torch.float16)
    given = "forward", Target(80, (3, 7)), lists, dict.fromkeys(("q", "k", "v", "out"), x), Present()
    kernel = Picky(1024)
    launch.launch(kernel, *given)
    assert kernel.tried == [(128, 64), (64, 32), (32, 32)]
    launch.launch(kernel, *given)
    assert kernel.tried[3:] == [(32, 32)]  # remembered
    monkeypatch.setattr(launch, "_fitting", {})
    with pytest.raises(launch.OutOfResources):
        launch.launch(Picky(0), *given)


def test_numbers():
    plain, capped = (PLAIN.present(softcap) for softcap in (0.0, 4.0))
    assert plain == Present() and capped == Present(softcap=True)
    assert PLAIN.arguments(-2.0, 4.0)["inner"] == -0.5
    for scale in (0.0, -0.0, 2.0, 1e-45, 1e30):
        c = PLAIN.arguments(scale, 0.0)["c"]
        assert c > 0 and least_score(c) < -1 and abs(least_score(c) * c) < 3e38


def test_descriptors_need_steps_of_16_bytes():
    def can(x):
        return launch._can_describe(x)

    x = torch.zeros(2, 3, 40, 64, dtype=torch.bfloat16)
    assert can(x) and can(x.transpose(1, 2)) and can(x[:, :, 3:]) and can(x[..., :40])
    assert not can(x[..., 1:])  # its start
    assert not can(x[:, :1].expand(2, 3, 40, 64))  # a step of 0
    assert not can(torch.zeros(2, 3, 40, 7, dtype=torch.bfloat16))
    assert can(torch.zeros(1, 1, 1, 7, dtype=torch.bfloat16))  # no steps at all
    assert not can(x[:0])
    one = launch._describe(torch.zeros(1, 1, 1, 7, dtype=torch.bfloat16), 0, 32)
    assert one.fields["strides"] == [16, 16, 16, 1] and one.fields["base"] is None


def test_float32_products_follow_the_switch_of_torch():
    switch = torch.backends.cuda.matmul
    before = switch.fp32_precision
    try:
        switch.fp32_precision = "ieee"
        assert launch.precision(torch.float32) == "tf32x3"
        switch.fp32_precision = "tf32"
        assert launch.precision(torch.float32) == "tf32"
    finally:
        switch.fp32_precision = before


def problem(D=8, E=8, dtype=torch.float32, **options):
    q, k, v = (torch.zeros(1, 2, 4, n, dtype=dtype) for n in (D, D, E))
    return Problem(q, k, v, ab.Causal(), **options)


@compiled
def test_why_not(driver, monkeypatch):
    assert backend.why_not(problem()) == ["device: only CUDA, got cpu"]
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "triton")
        assert target_of(CPU) == "device: only CUDA, got cpu"  # and triton is not imported to find out
        assert "triton" not in sys.modules
    driver()
    assert backend.why_not(problem()) == []
    assert backend.why_not(problem(dtype=torch.float64)) == [
        "dtype: float32, float16 or bfloat16, got torch.float64"
    ]
    assert backend.why_not(problem(257, 3)) == ["head size: at most 256, got D=257 and E=3"]
    assert backend.why_not(problem(dropout_p=0.5)) == []
    term = SimpleNamespace(value=lambda b, h, q, k: q)
    assert backend.why_not(problem(terms=[term])) == [
        "terms[0]: SimpleNamespace is known by its values alone, which only the reference reads"
    ]
    driver(arch=75)
    assert backend.why_not(problem()) == ["device: compute capability 8.0 or newer, got 7.5"]
    driver(of="hip")
    assert backend.why_not(problem()) == ["device: only NVIDIA GPUs, got hip"]
    monkeypatch.setitem(sys.modules, "triton", None)
    assert config._gpu_target.__wrapped__(0) == "triton: not installed"


@compiled
@pytest.mark.parametrize("version", ["2.3.1", "3.2.0", "3.5.1+git0d1"])
def test_only_the_version_of_an_old_triton_is_read(version, monkeypatch):
    """Triton before 3.4 has no knobs: attention on a CPU failed once torch.compile had imported it."""
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=version))
    words = f"triton: wanted 3.6 or newer, got {version}"
    assert backend.why_not(problem()) == [words]
    assert config._gpu_target.__wrapped__(0) == words


def test_triton_is_the_default_for_cuda_tensors():
    assert dispatch.KERNELS["cuda"] == backend.name
    in_op = [name for name in dispatch.BACKENDS if name in dispatch.IN_OP]
    assert in_op[0] == backend.name


def compilations(monkeypatch, calls):
    """Count the kernels that calls would compile, without compiling them."""
    seen = set()

    def note(**given):
        seen.add(given["key"])
        return True  # do not compile

    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", note)
    for call in calls:
        out, lse = backend.forward(call)
        backend.backward(call, out, lse, torch.zeros_like(out), None, Needs(True, True, True))
    return len(seen)


@compiled
def test_descriptors_are_arguments_of_their_own(driver, monkeypatch):
    """Triton's launcher looks for them there only; inside a record they would fail, but only on a GPU."""
    driver(arch=90)
    found = {}

    def note(**given):
        found[given["fn"].name] = given["compile"]["signature"]
        return True  # do not compile

    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", note)
    backend.forward(laid_out(ab.Causal()))
    signature = found["forward_kernel"]
    assert signature["d_tiles"].startswith("tensordesc") and signature["e_tiles"].startswith("tensordesc")
    assert not any("tensordesc" in str(kind) for kind in signature.values() if not isinstance(kind, str))


def laid_out(relation, Q=100, K=100, B=2, H=4, Hk=4, D=64, dtype=torch.bfloat16, tile=128):
    q, k, v = (torch.zeros(B, h, n, D, dtype=dtype) for h, n in ((H, Q), (Hk, K), (Hk, K)))
    layout = ab.Layout.build(relation, Q, K, form="tiles", tile=tile, batch=B, heads=H)
    return Call(Inputs(q, k, v), layout, 0.125)


@compiled
@pytest.mark.parametrize("arch", [80, 90])
def test_relations_lengths_and_groups_compile_nothing_new(arch, driver, monkeypatch):
    driver(arch=arch)
    by_head = ab.PerHead([ab.Causal(), ab.Full(), ab.Empty(), ab.Window(before=9)])
    calls = [
        laid_out(ab.Causal()),
        *(laid_out(ab.Causal(), Q, K) for Q in (1, 16, 17, 128, 512) for K in (1, 16, 130)),
        *(laid_out(x) for x in (ab.Full(), ab.Empty(), by_head, ab.PerBatch([ab.Causal(), ab.Full()]))),
        *(laid_out(ab.Causal(), B=B, H=H, Hk=H) for B in (1, 3) for H in (1, 16)),
    ]
    assert compilations(monkeypatch, calls) == 4  # delta, and one per pass
    shared = [laid_out(ab.Causal(), H=H, Hk=Hk) for H, Hk in ((4, 2), (16, 1), (32, 1))]
    # dk and dv loop over heads; where these are many, the loop is cut, and its parts are added up.
    assert compilations(monkeypatch, [*calls, *shared]) == 7
    assert compilations(monkeypatch, [laid_out(ab.Causal(), D=D) for D in (64, 32)]) == 8
    assert compilations(monkeypatch, [laid_out(ab.Causal(), tile=tile) for tile in (64, 128)]) == 7


@pytest.mark.slow
@compiled
@pytest.mark.parametrize("arch", [86, 120])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [64, 128, 256])
def test_first_choices_fit_in_99_kb(size, dtype, arch, driver, monkeypatch):
    """Checks sm_86, whose configurations sm_89 uses, and sm_120, and that no kernel is just a trap."""
    made = driver(arch=arch)
    monkeypatch.setattr(launch, "_fitting", {})
    call = laid_out(ab.Causal(), B=1, H=1, Hk=1, D=size, dtype=dtype)
    out, lse = backend.forward(call)
    backend.backward(call, out, lse, torch.zeros_like(out), None, Needs(True, True, True))
    assert len(launch._fitting) == 3 and not any(launch._fitting.values())
    for kernel in (forward_kernel, backward_query_kernel, backward_key_kernel):
        for compiled_kernel in kernel.device_caches[made.get_current_device()][0].values():
            assert "mma" in compiled_kernel.asm["ptx"]
