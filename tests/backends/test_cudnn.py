"""The backend on a stand-in for NVIDIA's package, which checks what the package checks, in float64."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError

import pytest
import torch
from cases import fake_cudnn
from cases.tiles import check, make_call

import attnbias as ab
from attnbias.backends import cudnn
from attnbias.backends.call import Needs
from attnbias.op import dispatch
from attnbias.op.problem import Problem
from attnbias.testing import checklist, make_inputs

FIND_ARCHITECTURE = cudnn.find_architecture
VERSIONS = {"nvidia-cudnn-frontend": "1.32.0", "nvidia-cutlass-dsl": "4.8.1"}
# B, H, Hk, Q, K, D, E
SHAPES = [
    (1, 1, 1, 64, 64, 64, 64),
    (2, 4, 2, 97, 129, 16, 24),
    (2, 2, 1, 65, 63, 80, 40),
    (1, 6, 2, 1, 97, 8, 128),
    (1, 2, 2, 129, 97, 128, 8),
]
TWO = [ab.Causal(), ab.Window(before=40) - ab.Window(before=5)]
RELATIONS = {
    "full": ab.Full(),
    "empty": ab.Empty(),
    "causal": ab.Causal(),
    "window": ab.Causal() & ab.Window(before=31),
    "strictly past": ab.Causal() & ~ab.Window(before=0),  # row 0 is empty
    "global": ab.Window(9, 9) | ab.Global([0, 17]),
    "far": ab.Window(before=300) & ~ab.Window(before=60),  # rows with no tile at all
}


@pytest.fixture(autouse=True)
def nvidia(monkeypatch):
    """Pretend that CPU tensors are on Hopper, and that the package is installed."""
    for name, module in fake_cudnn.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(cudnn, "find_architecture", lambda device: 90)
    monkeypatch.setattr(cudnn, "version", VERSIONS.__getitem__)
    cudnn.why_not_package.cache_clear()
    fake_cudnn.made.clear()
    yield
    cudnn.why_not_package.cache_clear()


def inputs(B=1, H=2, Hk=1, Q=40, K=40, D=16, E=16, dtype=torch.bfloat16, **how):
    return make_inputs(0, B, H, Hk, Q, K, D, E, dtype, **how)


def tiles(relation, Q=40, K=40, **how):
    return ab.Layout.build(relation, Q, K, form="tiles", **how)  # of no cache: it keeps nothing yet


# -- results ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", RELATIONS)
def test_results_and_gradients(name, shape):
    for dtype, tile in ((torch.bfloat16, 64), (torch.float16, 128)):
        check(cudnn, make_call(RELATIONS[name], shape, tile=tile, dtype=dtype))


@pytest.mark.parametrize(
    "relation",
    [
        ab.PerHead(TWO * 2),
        ab.PerBatch(TWO),
        ab.PerBatch([ab.PerHead(TWO * 2), ab.PerHead([*TWO[::-1]] * 2)]),
    ],
)
def test_masks_by_head_and_by_batch(relation):
    check(cudnn, make_call(relation, (2, 4, 2, 97, 129, 16, 24), dtype=torch.bfloat16))


@pytest.mark.parametrize(
    "how", [{"order": "BLHD"}, {"order": "LBHD"}, {"order": "DBHL"}, {"strided": True}], ids=str
)
def test_strides_of_the_caller(how):
    """What NVIDIA cannot read is copied, and results come in our strides."""
    call = make_call(ab.Causal(), (2, 4, 2, 97, 129, 16, 24), dtype=torch.bfloat16, **how)
    check(cudnn, call)
    out, lse = cudnn.forward(call)
    expected = dispatch.rows.forward(call)[0]
    assert out.stride() == expected.stride()
    needs = Needs(True, True, True)
    grads = cudnn.backward(call, out, lse, torch.ones_like(out), None, needs)
    assert [x.stride() for x in grads[:3]] == [torch.empty_like(x).stride() for x in call.inputs[:3]]


def test_aligned_inputs_are_not_copied(monkeypatch):
    given = []
    monkeypatch.setattr(
        fake_cudnn.FlexAttentionFwd, "execute", lambda self, *tensors, **_: given.extend(tensors)
    )
    call = make_call(ab.Causal(), (2, 4, 2, 97, 129, 16, 24), dtype=torch.bfloat16, order="BLHD")
    out, _ = cudnn.forward(call)
    for mine, theirs in zip((*call.inputs[:3], out), given, strict=False):
        assert theirs.data_ptr() == mine.data_ptr() and theirs.shape == mine.transpose(1, 2).shape


@pytest.mark.parametrize("scale", [-0.3, 0.0, 2.0])
def test_scales_of_every_sign(scale):
    """NVIDIA hides pairs before it scales: with a negative scale those would weigh most."""
    check(cudnn, make_call(ab.Causal(), (1, 4, 2, 97, 129, 16, 24), dtype=torch.bfloat16, scale=scale))


def test_an_integer_as_scale():
    q, k, v = inputs()
    got = ab.attention(q, k, v, tiles(ab.Causal()), scale=2, backend="cudnn")
    assert torch.equal(got, ab.attention(q, k, v, tiles(ab.Causal()), scale=2.0, backend="cudnn"))


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)])
def test_nothing_to_attend_to(lengths):
    Q, K = lengths
    q, k, v = (x.requires_grad_() for x in inputs(Q=Q, K=K))
    out, lse = ab.attention(q, k, v, tiles(ab.Full(), Q, K), return_lse=True, backend="cudnn")
    (out.sum() + lse.sum()).backward()
    assert not out.any() and (lse == -torch.inf).all()
    assert not any(x.grad.any() for x in (q, k, v)) and fake_cudnn.made == []


def test_only_needed_gradients_are_returned():
    call = make_call(ab.Causal(), (1, 2, 1, 65, 65, 16, 16), dtype=torch.bfloat16)
    out, lse = cudnn.forward(call)
    whole = cudnn.backward(call, out, lse, torch.ones_like(out), None, Needs(True, True, True))
    for place in range(3):
        needs = Needs(*(i == place for i in range(3)))
        some = cudnn.backward(call, out, lse, torch.ones_like(out), None, needs)
        assert [x is not None for x in some[:3]] == list(needs[:3])
        assert torch.equal(some[place], whole[place])


def test_a_gradient_of_one_number_for_all():
    """What ``out.sum().backward()`` passes on: a tensor without strides of its own."""
    call = make_call(ab.Causal(), (1, 2, 1, 65, 65, 16, 16), dtype=torch.bfloat16)
    out, lse = cudnn.forward(call)
    ones, needs = out.new_ones(()).expand_as(out), Needs(True, True, True)
    got, want = (cudnn.backward(call, out, lse, x, None, needs)[:3] for x in (ones, ones.contiguous()))
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("place", [(0, 0, 5), (0, 1, 30), (0, 2, 39)])
def test_a_wrong_endpoint_is_found(place, monkeypatch):
    """The comparison can fail: a key more or less in one row."""
    call = make_call(ab.Window(9, 9), (1, 2, 1, 40, 40, 16, 16), dtype=torch.bfloat16)
    plain = cudnn.make_endpoints

    def mutated(*given):
        endpoints = plain(*given)
        heads, row_place, row = place
        endpoints[heads, row_place, row] += 1 if row_place == 0 else -1
        return endpoints

    monkeypatch.setattr(cudnn, "make_endpoints", mutated)
    with pytest.raises(AssertionError):
        check(cudnn, call)


# -- what is kept ----------------------------------------------------------------------------------


def test_a_second_call_makes_nothing(capsys):
    layout = tiles(ab.Causal())
    for _ in range(2):
        q, k, v = (x.requires_grad_() for x in inputs())
        out, lse = ab.attention(q, k, v, layout, return_lse=True, backend="cudnn")
        (out.float().square().sum() + lse.square().sum()).backward()
        assert fake_cudnn.made == ["plan", "FlexAttentionFwd", "FlexAttentionBwd"]
    assert capsys.readouterr().out == ""


def test_other_sizes_and_strides_make_their_own():
    layout = tiles(ab.Causal())
    ab.attention(*inputs(), layout, backend="cudnn")
    ab.attention(*inputs(order="BLHD"), layout, backend="cudnn")
    assert fake_cudnn.made == ["plan", "FlexAttentionFwd", "FlexAttentionFwd"]
    ab.attention(*inputs(B=2), layout, backend="cudnn")
    ab.attention(*inputs(dtype=torch.float16), layout, backend="cudnn")
    assert fake_cudnn.made[3:] == ["plan", "FlexAttentionFwd"] * 2


def test_a_layout_keeps_the_latest_only(monkeypatch):
    monkeypatch.setattr(cudnn, "_MOST_KEPT", 2)
    layout = tiles(ab.Causal())
    for batch in (1, 2, 3, 3, 2):
        ab.attention(*inputs(B=batch), layout, backend="cudnn")
    assert fake_cudnn.made.count("plan") == 3
    ab.attention(*inputs(B=1), layout, backend="cudnn")
    assert fake_cudnn.made.count("plan") == 4
    assert all(len(made) == 2 for made in layout.kept.prepared["cudnn"][1:])


def test_a_layout_by_hand_is_validated():
    layout = tiles(ab.Causal())
    layout.q_tile[0] = 9
    with pytest.raises(ValueError, match=r"^layout"):
        ab.attention(*inputs(), layout, backend="cudnn")


def test_a_changed_layout_gets_a_plan_of_its_own():
    layout = tiles(ab.Full(), 64, 64)
    given = inputs(Q=64, K=64)
    ab.attention(*given, layout, backend="cudnn")
    layout.buffer.copy_(tiles(ab.Full(), 64, 64).buffer)
    ab.attention(*given, layout, backend="cudnn")
    assert fake_cudnn.made.count("plan") == 2


# -- through the library ---------------------------------------------------------------------------


def test_compiled_calls():
    layout = tiles(ab.Window(before=9))

    @torch.compile(backend="aot_eager", fullgraph=True)
    def run(q, k, v):
        out, lse = ab.attention(q, k, v, layout, return_lse=True, backend="cudnn")
        return out.float().sum() + lse.sum()

    def eager(q, k, v):
        out, lse = ab.attention(q, k, v, layout, return_lse=True, backend="cudnn")
        return out.float().sum() + lse.sum()

    grads = []
    for each in (run, eager):
        leaves = [x.requires_grad_() for x in inputs()]
        grads.append(torch.autograd.grad(each(*leaves), leaves))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert fake_cudnn.made.count("plan") == 1


def test_by_name_explained_and_verified():
    given, layout = inputs(), tiles(ab.Causal())
    assert ab.explain(*given, layout).backend != "cudnn"
    with ab.use_backend("cudnn"):
        explanation = ab.explain(*given, layout)
        assert (explanation.backend, explanation.why) == ("cudnn", "it was asked for")
        assert ab.verify(*given, layout).ok
    others = ab.explain(*given, layout, backend="rows").others
    assert others["cudnn"] == "it runs only when asked for by name: no GPU has run it yet"
    assert "FlexAttentionBwd" in fake_cudnn.made


def test_verify_on_the_command_line_covers_it():
    found = list(checklist.lines("cpu", "cudnn", "causal "))
    assert {line.which for line in found} == {checklist.FORWARD, checklist.BACKWARD}
    assert [line for line in found if line.fault] == []
    assert fake_cudnn.made


# -- refusals --------------------------------------------------------------------------------------

SIZES = "head size: multiples of 8 up to 128, got"
REFUSED = [
    ({"dtype": torch.float32}, {}, "dtype: float16 or bfloat16, got torch.float32"),
    ({"D": 20}, {}, f"{SIZES} D=20 and E=16"),
    ({"E": 136}, {}, f"{SIZES} D=16 and E=136"),
    ({"D": 192, "E": 192}, {}, f"{SIZES} D=192 and E=192"),
    ({}, {"terms": [ab.ALiBi(torch.ones(2))]}, "terms: not supported"),
    ({}, {"score": ab.MultiLevel([8, 8])}, "score: only the dot product"),
    ({}, {"softcap": 2.0}, "softcap: not supported"),
    ({}, {"sink": torch.zeros(2)}, "sink: not supported"),
    ({}, {"dropout_p": 0.5}, "dropout_p: not supported"),
    ({}, {"return_max": True}, "return_max: it returns none"),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "options", "words"), REFUSED, ids=[words for *_, words in REFUSED])
def test_each_refusal_has_its_sentence(sizes, options, words):
    assert cudnn.why_not(Problem(*inputs(**sizes), ab.Causal(), **options)) == [words]


def test_places_are_refused():
    problem = Problem(*inputs(), ab.Causal())
    problem.places = object()
    assert cudnn.why_not(problem) == ["places: not supported"]


def test_all_reasons_are_given_and_raised():
    words = r"^backend 'cudnn' cannot run this: dtype: float16 .*; sink: not supported$"
    with pytest.raises(NotImplementedError, match=words):
        ab.attention(*inputs(dtype=torch.float32), sink=torch.zeros(2), backend="cudnn")


def test_edges_and_many_ranges_are_refused():
    layout = ab.Causal().layout(40, 40, form="edges")
    words = "relation: its layout has 820 edges; layout(form='tiles') makes one without"
    assert cudnn.why_not(Problem(*inputs(), layout)) == [words]
    words = "relation: at most 8 ranges of keys in a row, its layout has more"
    assert cudnn.why_not(Problem(*inputs(), tiles(ab.Columns(4)))) == [words]
    assert cudnn.why_not(Problem(*inputs(), tiles(ab.Columns(5)))) == []
    ab.attention(*inputs(), tiles(ab.Columns(5)), backend="cudnn")


@pytest.mark.parametrize("architecture", [80, 89, 120])
def test_other_architectures_are_refused(architecture, monkeypatch):
    monkeypatch.setattr(cudnn, "find_architecture", lambda device: architecture)
    words = f"device: only sm_90, sm_100 and sm_103, got sm_{architecture}"
    assert cudnn.why_not(Problem(*inputs(), ab.Causal())) == [words]


def test_architectures_are_those_of_cuda_devices(monkeypatch):
    monkeypatch.setattr(cudnn, "find_architecture", FIND_ARCHITECTURE)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 3))
    assert cudnn.find_architecture(torch.device("cuda", 1)) == 103
    assert cudnn.why_not(Problem(*inputs(), ab.Causal())) == ["device: only CUDA, got cpu"]
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert cudnn.find_architecture(torch.device("cuda", 1)) is None


@pytest.mark.parametrize(
    ("package", "found", "words"),
    [
        ("nvidia-cudnn-frontend", None, ">=1.32,<1.33, got none; pip install 'attnbias[cudnn]'"),
        ("nvidia-cudnn-frontend", "1.31.9", ">=1.32,<1.33, got 1.31.9"),
        ("nvidia-cudnn-frontend", "1.33.0", ">=1.32,<1.33, got 1.33.0"),
        ("nvidia-cudnn-frontend", "soon", ">=1.32,<1.33, got soon"),
        ("nvidia-cutlass-dsl", None, ">=4.8,<5.0, got none; pip install 'attnbias[cudnn]'"),
        ("nvidia-cutlass-dsl", "4.7.2", ">=4.8,<5.0, got 4.7.2"),
    ],
)  # fmt: skip
def test_the_package_must_be_of_a_version_that_was_tried(package, found, words, monkeypatch):
    def version(name):
        if name == package and found is None:
            raise PackageNotFoundError(name)
        return found if name == package else VERSIONS[name]

    monkeypatch.setattr(cudnn, "version", version)
    cudnn.why_not_package.cache_clear()
    problem = Problem(*inputs(dtype=torch.float32), ab.Causal())
    assert cudnn.why_not(problem) == [f"package: wanted {package} {words}", REFUSED[0][2]]


def test_a_package_that_does_not_import(monkeypatch):
    monkeypatch.setitem(sys.modules, "cudnn", None)
    words = r"^backend: wanted cudnn.flex_attention, got import of cudnn halted; None in sys.modules$"
    with pytest.raises(ImportError, match=words):
        ab.attention(*inputs(), tiles(ab.Causal()), backend="cudnn")
