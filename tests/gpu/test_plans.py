"""Launches kept for later calls: that they are the launches that Triton would make."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
import triton
from fakecuda import fake_gpu, why_not
from ptxemu import emulated_gpu

import attnbias as ab
from attnbias.backends import triton as backend
from attnbias.kernels.launch import plans
from attnbias.kernels.launch.config import VARIABLE, target_of
from attnbias.kernels.launch.plans import PLANS, Hole, Plan, Planned, surroundings
from attnbias.kernels.tiles.extras import PLAIN
from attnbias.kernels.tiles.forward import tiles_forward
from attnbias.kernels.tiles.row_sums import row_sums

needs_fake = pytest.mark.skipif(bool(why_not()), reason=f"fake libcuda: {why_not()}")


@pytest.fixture(autouse=True)
def _no_plans():
    PLANS.clear()
    yield
    PLANS.clear()


@pytest.fixture
def starts(monkeypatch):
    """Count the launches that are made in Triton's own way."""
    made = []
    start = PLANS.start

    def count(kernel, *given, **more):
        made.append(kernel.fn.__name__)
        return start(kernel, *given, **more)

    monkeypatch.setattr(PLANS, "start", count)
    return made


def draw(seed, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def step(seed, relation, *, Hk=2, terms=(), **options):
    """Return the results of attention and its gradients for random inputs."""
    sizes = (2, 2, 97, 16), (2, Hk, 97, 16), (2, Hk, 97, 24)
    q, k, v = (draw(seed + i, *size, dtype=torch.float16).requires_grad_() for i, size in enumerate(sizes))
    slopes = draw(seed + 3, 2).requires_grad_()
    terms = [ab.ALiBi(slopes)] if terms else []
    torch.manual_seed(seed)  # of dropout
    out, lse = ab.attention(q, k, v, relation, terms=terms, return_lse=True, backend="triton", **options)
    grads = torch.autograd.grad((out, lse), (q, k, v, slopes)[: 3 + len(terms)], (out * 0.5, lse.sin()))
    return out, lse, *grads


RING = torch.stack((torch.arange(97), (torch.arange(97) * 5 + 1) % 97))
HUB = torch.cat((RING, torch.stack((torch.arange(300) % 97, torch.zeros(300).long()))), 1)
STEPS = {
    "tiles": (ab.Causal() & ab.Window(before=40), {}),
    "shared heads, dropout": (ab.Causal(), {"Hk": 1, "dropout_p": 0.3}),
    "learned terms": (ab.Causal(), {"terms": True, "softcap": 3.0}),
    "edges": (ab.Graph(HUB, num_nodes=97), {}),
}


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("name", STEPS)
def test_a_kept_launch_gives_the_bits_of_a_first_one(name, arch, starts):
    relation, options = STEPS[name]
    with emulated_gpu(arch, late=True, bounds="exact", ptxas=False):
        first = step(0, relation, **options)
        assert starts
        starts.clear()
        again = step(100, relation, **options)
        assert not starts
        PLANS.clear()
        wanted = step(100, relation, **options)
    for x, y, other in zip(again, wanted, first, strict=True):
        assert torch.equal(x, y) and not torch.equal(x, other)


def records(gpu):
    return [(x.name, x.kernel, x.grid, x.threads, x.shared, x.stream, x.numbers()) for x in gpu.launches]


def room(*shape, dtype=torch.bfloat16, offset=0, order="BHLD"):
    """Return memory of a shape [B, H, L, D], its first element this far from a multiple of 64 bytes."""
    b, h, n, d = shape
    flat = torch.zeros(b * h * n * d + 64, dtype=dtype)
    first = -(flat.data_ptr() // dtype.itemsize) % (64 // dtype.itemsize) + offset
    flat = flat[first : first + b * h * n * d]
    return flat.view(shape) if order == "BHLD" else flat.view(b, n, h, d).transpose(1, 2)


def forward_call(*, H=4, Hk=2, D=64, Q=256, dtype=torch.bfloat16, shifted=(), order="BHLD", **options):
    """Return a function that runs the forward kernel on memory of its own."""
    layout = ab.Layout.build(ab.Causal(), Q, Q, form="tiles")
    sizes = {"q": (1, H, Q, D), "k": (1, Hk, Q, D), "v": (1, Hk, Q, D), "out": (1, H, Q, D)}
    given = [
        room(*shape, dtype=dtype, offset=int(name in shifted), order=order) for name, shape in sizes.items()
    ]
    lse = torch.zeros(1, H, Q)
    options = {"scale": 0.125, **options}

    def run():
        lists = backend.backend._lists(layout)[0]
        tiles_forward(*given, lse, lists, target_of(given[0].device), **options)

    return run


SINK = torch.zeros(4)
CALLS = {
    "first": {},
    "the same on other memory": {},
    "q off by 2 bytes": {"shifted": ("q",)},
    "k off by 2 bytes": {"shifted": ("k",)},
    "out off by 2 bytes": {"shifted": ("out",)},
    "other strides": {"order": "BLHD"},
    "other length": {"Q": 240},
    "other heads": {"H": 8},
    "other key heads": {"Hk": 4},
    "one key head": {"Hk": 1},
    "other dtype": {"dtype": torch.float16},
    "other head size": {"D": 48},
    "softcap": {"softcap": 2.0},
    "other softcap": {"softcap": 3.0},
    "other scale": {"scale": 0.25},
    "scale 0": {"scale": 0.0},
    "sink": {"sink": SINK},
    "row_max": {"row_max": torch.zeros(1, 4, 256)},
    "q_start": {"extras": PLAIN._replace(q_start=16)},
}


@needs_fake
@pytest.mark.parametrize("cc", [80, 90])
def test_no_call_takes_the_plan_of_another(cc, starts):
    """Every launch has the kernel, the grid and the parameters that it has without plans."""
    calls = {name: forward_call(**options) for name, options in CALLS.items()}
    with fake_gpu(cc) as gpu:
        for run in calls.values():
            run()
        # Memory is no part of a key; all else is.
        assert len(PLANS) == len(starts) == len(calls) - 1
        gpu.reset()
        for run in calls.values():
            run()
        kept = records(gpu)
        assert len(starts) == len(calls) - 1
        gpu.reset()
        for run in calls.values():
            PLANS.clear()
            run()
        assert kept == records(gpu)
    assert len({str(x) for x in kept}) == len(calls)


@needs_fake
def test_devices_have_plans_of_their_own(starts):
    run = forward_call()
    for number in (0, 1):
        with fake_gpu(80, number=number) as gpu:
            run()
            run()
            gpu.stream = 5
            run()
            assert [x.stream for x in gpu.launches] == [0, 0, 5]
    assert len(starts) == len(PLANS) == 2


@needs_fake
def test_other_row_sums():
    """The padded sums have the same shape for some lengths."""
    with fake_gpu(80) as gpu:
        for n, grad_lse in ((129, None), (130, None), (130, torch.zeros(1, 2, 130))):
            out, lse = torch.zeros(1, 2, n, 32), torch.zeros(1, 2, n)
            for _ in range(2):
                row_sums(out, lse, out, grad_lse)
            numbers = [x.numbers() for x in gpu.launches[-2:]]
            assert numbers[0].count(n) == numbers[1].count(n) > 0
            assert len(numbers[0]) == len(numbers[1])
            assert (grad_lse is not None) == (grad_lse is not None and grad_lse.data_ptr() in numbers[1])


@needs_fake
def test_plans_are_bounded(monkeypatch):
    monkeypatch.setattr(plans, "MOST", 3)
    calls = [forward_call(Q=Q) for Q in (64, 65, 100, 128, 256)]
    with fake_gpu(80) as gpu:
        for run in calls * 2:
            run()
            assert len(PLANS) <= 3
        assert gpu.count() == 10


@needs_fake
@pytest.mark.parametrize("relation", [ab.Causal(), ab.Graph(HUB, num_nodes=97)], ids=["tiles", "edges"])
def test_plans_keep_no_tensor(relation):
    with fake_gpu(90):
        inputs = [torch.zeros(1, 2, 97, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
        layout = ab.Layout.build(relation, 97, 97)
        gc.collect()
        gc.disable()
        try:
            for _ in range(2):
                out = ab.attention(*inputs, layout, backend="triton")
                grads = torch.autograd.grad(out, inputs, torch.zeros_like(out))
            alive = [weakref.ref(x) for x in (*inputs, layout.buffer, out, *grads)]
            assert len(PLANS) >= 3
            del inputs, layout, out, grads
            assert [x() for x in alive] == [None] * len(alive)
        finally:
            gc.enable()


@needs_fake
def test_hooks_see_every_launch():
    seen = []
    run, runtime = forward_call(), triton.knobs.runtime
    with fake_gpu(80) as gpu:
        run()
        for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
            hook.add(seen.append)
            try:
                run()
                run()
            finally:
                hook.remove(seen.append)
        run()
        assert gpu.count() == 6
    assert [x.get()["name"] for x in seen] == ["forward_kernel"] * 4


@needs_fake
def test_changes_of_configurations_are_seen(monkeypatch):
    run = forward_call()
    with fake_gpu(80) as gpu:
        for change in ("", "forward: 32x32 w4 s2", ""):
            monkeypatch.setenv(VARIABLE, change)
            run()
            run()
        grids = [x.grid[0] for x in gpu.launches]
    assert grids[2:4] == [32, 32] and grids[:2] == grids[4:] and 32 not in grids[:2]


@needs_fake
def test_debugging_is_seen(monkeypatch, starts):
    run = forward_call()
    with fake_gpu(80):
        run()
        monkeypatch.setattr(triton.knobs.runtime, "debug", True)
        run()
    assert len(starts) == 2


@needs_fake
def test_threads_share_plans(starts):
    calls = [forward_call(Q=Q) for Q in (64, 128) for _ in range(3)]
    wrong = []
    with fake_gpu(80):
        calls[0]()  # compiles

        def work(run):
            try:
                for _ in range(50):
                    run()
            except Exception as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(run,)) for run in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong and len(PLANS) == 2
        assert 2 <= len(starts) <= 6  # several may find none at first


def test_what_triton_does_not_compile_has_no_plan():
    assert surroundings(lambda: None) is None


def test_records_are_filled_inner_ones_first():
    class Kernel:
        arg_names = "a", "b", "c", "d"

    class Compiled:
        function, packed_metadata = 7, (1, 2)
        got = None

        def run(self, *given):
            self.got = given

    arguments = {"a": (Hole(1), (3, Hole(0), (Hole(0),))), "c": Hole(2), "b": 4, "d": (5, 6)}
    x, y, z = torch.zeros(3, 1)
    given = plans.Given([])
    given.add((x, (1.5, y), z, None))
    compiled = Compiled()
    plan = Plan(Kernel, compiled, Planned((9,), arguments, {}), 3, [])

    plan.launch(given.addresses, given.tensors, 12)
    assert compiled.got[:9] == (9, 1, 1, 12, 7, (1, 2), None, None, None)
    a, b, c, d = compiled.got[9:]
    assert a[0] is y and a[1][0] == 3 and a[1][1] is x and a[1][2][0] is x
    assert b == 4 and c is z and d == (5, 6)
