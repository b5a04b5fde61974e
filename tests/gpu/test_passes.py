"""Passes kept for later calls: that they launch what the call would launch without them."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from fakecuda import fake_gpu, why_not
from ptxemu import emulated_gpu

import attnbias as ab
from attnbias.backends.triton import backend
from attnbias.kernels.launch import passes
from attnbias.kernels.launch.config import VARIABLE
from attnbias.kernels.launch.plans import PLANS, Tape

needs_fake = pytest.mark.skipif(bool(why_not()), reason=f"fake libcuda: {why_not()}")
N = 97
RING = torch.stack((torch.arange(N), (torch.arange(N) * 5 + 1) % N))
HUB = torch.cat((RING, torch.stack((torch.arange(300) % N, torch.zeros(300).long()))), 1)
RELATIONS = {
    "tiles": (ab.Causal(), "tiles"),
    "edges": (ab.Graph(RING, num_nodes=N), "edges"),
    "a long row": (ab.Graph(HUB, num_nodes=N), "edges"),
}


def layout_of(name):
    relation, form = RELATIONS[name]
    return ab.Layout.build(relation, N, N, form=form)


@pytest.fixture(autouse=True)
def _no_plans():
    PLANS.clear()
    yield
    PLANS.clear()


@pytest.fixture
def recorded(monkeypatch):
    """Count the passes that are not kept."""
    made = []
    record = PLANS.record

    def count(run):
        made.append(run)
        return record(run)

    monkeypatch.setattr(PLANS, "record", count)
    return made


def kept(layout):
    return layout.kept.prepared.get("triton passes", ())


def room(*shape, dtype, offset, order):
    """Return zeros [B, H, L, D], the first element so far from a multiple of 64 bytes."""
    b, h, n, d = shape
    flat = torch.zeros(b * h * n * d + 64, dtype=dtype)
    first = -(flat.data_ptr() // dtype.itemsize) % (64 // dtype.itemsize) + offset
    flat = flat[first : first + b * h * n * d]
    if order == "BLHD":
        return flat.view(b, n, h, d).transpose(1, 2)
    return flat.view(b, h, d, n).mT if order == "BHDL" else flat.view(shape)


class Step:
    """A call and its derivative, on memory of its own."""

    def __init__(
        self, *, B=1, H=4, Hk=2, D=64, E=64, dtype=torch.bfloat16, shifted=(), order="BHLD", needs="qkv",
        same=False, lse=False, grad_order="BHLD", sink=None, **options,
    ):  # fmt: skip
        sizes = {"q": (B, H, N, D), "k": (B, Hk, N, D), "v": (B, Hk, N, E), "grad": (B, H, N, E)}
        orders = {"grad": grad_order}
        self.given = {
            name: room(*size, dtype=dtype, offset=int(name in shifted), order=orders.get(name, order))
            for name, size in sizes.items()
        }
        if same:
            self.given["k"] = self.given["v"] = self.given["q"]
        self.needs, self.lse, self.options = needs, lse, options
        if sink:
            self.given["sink"] = self.options["sink"] = torch.zeros(H, dtype=sink)
        for name in needs:
            self.given[name].requires_grad_()

    def run(self, gpu, layout):
        """Return the launches, their pointers named by what they point to."""
        gpu.reset()
        q, k, v, grad, *_ = self.given.values()
        torch.manual_seed(0)
        out, lse, *_ = ab.attention(q, k, v, layout, backend="triton", return_lse=True, **self.options)
        made = self.given | {"out": out, "lse": lse}
        seen = named(gpu, layout, made)
        if not self.needs:
            return seen
        gpu.reset()
        outs = {"out": grad} | ({"lse": torch.zeros_like(lse)} if self.lse else {})
        wanted = [self.given[name] for name in self.needs]
        found = torch.autograd.grad([made[x] for x in outs], wanted, list(outs.values()))
        made |= {f"d{name}": x for name, x in zip(self.needs, found, strict=True)}
        made |= {f"grad {name}": x for name, x in outs.items()}
        return seen + named(gpu, layout, made)


def named(gpu, layout, made):
    """Return launches with names for pointers: what is made, lists of the layout, or memory of their own."""
    *_, edges = next(x for name, x in layout.kept.prepared.items() if name.startswith("triton, "))
    lists = {f"list {i}": x for i, x in enumerate(backend._tensors_of(tuple(vars(edges).values())))}
    names = {x.data_ptr(): name for name, x in (lists | made).items()}
    others = []

    def name_of(value):
        number = int.from_bytes(value[:8], "little")
        if number < 1 << 32:
            return number
        inside = number - layout.buffer.data_ptr()
        if 0 <= inside < layout.buffer.nbytes:
            return "layout", inside
        if number not in names and number not in others:
            others.append(number)
        return (names.get(number) or f"other {others.index(number)}"), value[8:]

    return [
        (x.name, x.kernel, x.grid, x.threads, x.shared, x.stream, [*map(name_of, x.values)])
        for x in gpu.launches
    ]


QUICK = {
    "first": {},
    "other memory": {},
    "softcap": {"softcap": 2.0},
    "other softcap": {"softcap": 3.0},
    "other scale": {"scale": 0.25},
    "other heads": {"H": 8},
    "two batches": {"B": 2},
    "no gradients": {"needs": ""},
    "dq": {"needs": "q"},
    "dv": {"needs": "v"},
    "grad_lse": {"lse": True},
    "grad_out in another order": {"grad_order": "BLHD"},
    "dropout": {"dropout_p": 0.5},
    "other dropout": {"dropout_p": 0.25},
    "a slope": {"terms": [ab.ALiBi(torch.ones(4))]},
    "other slopes": {"terms": [ab.ALiBi(torch.arange(4.0))]},
    "grid": {"terms": [ab.GridBias(torch.zeros(4, 19 * 23), (10, 12))], "needs": ""},
    "sink": {"sink": torch.float32},
    "learned sink": {"sink": torch.float32, "needs": (*"qkv", "sink")},
    "return_max": {"return_max": True, "needs": ""},
}
PLAIN = {
    "other order": {"order": "BLHD"},
    "other key heads": {"Hk": 4},
    "one key head": {"Hk": 1},
    "other dtype": {"dtype": torch.float16},
    "single": {"dtype": torch.float32},
    "other value size": {"E": 32},
    "negative scale": {"scale": -0.125},
    "scale 0": {"scale": 0.0},
    "dk": {"needs": "k"},
    "q off by 2 bytes": {"shifted": ("q",)},
    "k off by 2 bytes": {"shifted": ("k",)},
    "grad_out off by 2 bytes": {"shifted": ("grad",)},
}
# Of these no pass is kept: something is computed besides launches, or a tensor has two places.
NOT_KEPT = {
    "one tensor": {"same": True, "Hk": 4, "needs": ""},
    "columns first": {"order": "BHDL", "needs": ""},
    "sink in 16 bits": {"sink": torch.bfloat16, "needs": ""},
}


def compare(cc, relation, calls, recorded):
    layout = layout_of(relation)
    steps = {name: Step(**options) for name, options in calls.items()}
    with fake_gpu(cc) as gpu:
        for step in steps.values():
            step.run(gpu, layout)
        recorded.clear()
        again = {name: step.run(gpu, layout) for name, step in steps.items()}
        from_kept = len(recorded)
        for name, step in steps.items():
            PLANS.clear()
            assert step.run(gpu, layout) == again[name], name
    return layout, from_kept


@needs_fake
@pytest.mark.parametrize("relation", ["tiles", "a long row"])
def test_no_call_takes_the_pass_of_another(relation, recorded):
    """Every call has the kernels, the grids and the parameters that it has without passes."""
    calls = QUICK if relation == "tiles" else {name: QUICK[name] for name in ("first", "softcap", "dq", "dv")}
    # Gradients of edges by key are added up by head outside of kernels, unless each head has its keys.
    calls = {name: {"Hk": options.get("H", 4), **options} for name, options in calls.items()}
    _, from_new = compare(90, relation, calls, recorded)
    assert from_new == 0


@needs_fake
def test_what_is_more_than_launches_is_not_kept(recorded):
    first = {"no gradients": {"needs": "", "Hk": 4}}
    layout, from_new = compare(80, "tiles", NOT_KEPT | first, recorded)
    assert from_new == 2  # "columns first" and "sink in 16 bits"; "one tensor" may take the pass of three
    assert len(kept(layout)) == 2  # of "no gradients", before and after plans were forgotten


@needs_fake
@pytest.mark.slow
@pytest.mark.parametrize("relation", ["tiles", "a long row"])
@pytest.mark.parametrize("cc", [80, 90])
def test_no_call_takes_the_pass_of_any_other(cc, relation, recorded):
    compare(cc, relation, QUICK | PLAIN | NOT_KEPT, recorded)


@pytest.mark.parametrize("relation", ["tiles", pytest.param("a long row", marks=pytest.mark.slow)])
def test_a_kept_pass_gives_the_bits_of_a_first_one(relation, recorded):
    layout = layout_of(relation)

    def step(seed):
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (torch.randn(1, 2, N, 16, generator=generator).half().requires_grad_() for _ in range(3))
        out, lse = ab.attention(q, k, v, layout, backend="triton", return_lse=True)
        return out, lse, *torch.autograd.grad((out, lse), (q, k, v), (out * 0.5, lse.sin()))

    with emulated_gpu(90, late=True, bounds="exact", ptxas=False):
        first = step(0)
        assert len(kept(layout)) == len(recorded) == 2
        again = step(100)
        assert len(recorded) == 2
        PLANS.clear()
        wanted = step(100)
        assert len(recorded) == 4
    for x, y, other in zip(again, wanted, first, strict=True):
        assert torch.equal(x, y) and not torch.equal(x, other)


@needs_fake
def test_surroundings_are_seen(monkeypatch, recorded):
    layout, step = layout_of("tiles"), Step(needs="")
    with fake_gpu(80) as gpu:
        step.run(gpu, layout)
        for stream in (5, 0):
            gpu.stream = stream
            assert [x[5] for x in step.run(gpu, layout)] == [stream]
        assert len(recorded) == 2
        monkeypatch.setenv(VARIABLE, "forward: 32x32 w4 s2")
        assert step.run(gpu, layout)[0][2] == (16, 1, 1)
        assert len(recorded) == 3
    for number in (0, 1):
        with fake_gpu(80, number=number) as gpu:
            step.run(gpu, layout)
    assert len(recorded) == 5


@needs_fake
def test_passes_are_bounded(monkeypatch):
    monkeypatch.setattr(passes, "MOST", 3)
    layout = layout_of("tiles")
    with fake_gpu(80) as gpu:
        for scale in (0.1, 0.2, 0.3, 0.4, 0.1):
            assert len(Step(needs="", scale=scale).run(gpu, layout)) == 1
            assert len(kept(layout)) <= 3


@needs_fake
def test_passes_go_with_their_layout():
    layout, step = layout_of("edges"), Step(Hk=4)
    with fake_gpu(90) as gpu:
        for _ in range(2):
            step.run(gpu, layout)
        alive = [weakref.ref(x) for x in (*step.given.values(), layout.buffer, kept(layout))]
        gc.collect()
        gc.disable()
        try:
            del layout, step
            assert [x() for x in alive] == [None] * len(alive)
        finally:
            gc.enable()


@needs_fake
def test_a_changed_layout_has_no_passes():
    layout, step = layout_of("tiles"), Step(needs="")
    with fake_gpu(80) as gpu:
        step.run(gpu, layout)
        assert kept(layout)
        layout.buffer.add_(0)
        assert not kept(layout)


@needs_fake
def test_scratch_that_is_not_aligned(monkeypatch, recorded):
    layout, step = layout_of("tiles"), Step()
    with fake_gpu(80) as gpu:
        step.run(gpu, layout)
        assert len(recorded) == 2

        def empty(shape, **more):
            return torch.empty(torch.Size(shape).numel() + 1, **more)[1:].view(shape)

        monkeypatch.setattr(passes, "torch", SimpleNamespace(empty=empty))
        step.run(gpu, layout)
        assert len(recorded) == 3  # the backward pass starts anew


def test_a_tensor_of_no_known_place():
    x, y, z = torch.zeros(3, 1)
    tape = Tape()
    tape.launches.append((None, [x, y]))
    passes.Pass(tape, [x, None], [y])
    for given, owned in (([x], [z]), ([x, x], [y])):
        with pytest.raises(LookupError):
            passes.Pass(tape, given, owned)
