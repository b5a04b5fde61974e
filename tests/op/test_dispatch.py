"""The choice of a backend, its reasons, and how to override it."""

import subprocess
import sys
import threading
import warnings
from types import SimpleNamespace

import pytest
import torch

import attnbias as ab
from attnbias.backends import cpu
from attnbias.op import dispatch
from attnbias.op.problem import Problem
from attnbias.testing.draw import draw_problem

FULL = ab.Full()
KERNEL = "rows" if cpu.missing() else "cpu"  # the default on CPUs


class Distance:
    def value(self, b, h, q, k):
        return -(q - k).abs().float()


def inputs(Q=5, K=7, **kwargs):
    return torch.randn(1, 2, Q, 8, **kwargs), *torch.randn(2, 1, 2, K, 8, **kwargs)


def chosen(*args, **kwargs):
    return ab.explain(*args, **kwargs).backend


def test_default_is_kernels_then_rows_then_reference():
    q, k, v = inputs()
    assert chosen(q, k, v, ab.Causal()) == KERNEL
    assert chosen(q, k, v, ab.Causal().layout(5, 7)) == KERNEL
    assert chosen(q.double(), k.double(), v.double(), ab.Causal()) == "rows"
    assert chosen(q, k, v, ab.Causal(), softcap=1.0, sink=torch.zeros(2), dropout_p=0.5) == KERNEL
    assert chosen(q, k, v, ab.Causal(), terms=[Distance()]) == "reference"


def test_no_backend_in_the_op_takes_what_rows_refuses():
    """While tracing, a problem that ``rows`` accepts becomes the op, whichever backend runs it later."""
    refused = 0
    for seed in range(300):
        drawn = draw_problem(seed)
        problem = Problem(*drawn.inputs, drawn.relation, **drawn.options)
        if dispatch.rows.why_not(problem):
            refused += 1
            assert all(backend.why_not(problem) for backend in dispatch.IN_OP.values()), drawn
    assert refused


def test_argument_overrides_use_backend():
    q, k, v = inputs()
    with ab.use_backend("reference"):
        assert chosen(q, k, v) == "reference"
        assert chosen(q, k, v, backend="rows") == "rows"
        with ab.use_backend("sdpa"):
            assert chosen(q, k, v) == "sdpa"
        with ab.use_backend(None):
            assert chosen(q, k, v) == KERNEL
        assert chosen(q, k, v) == "reference"
    assert chosen(q, k, v) == KERNEL


def test_use_backend_ends_on_an_exception():
    with pytest.raises(KeyError), ab.use_backend("reference"):
        raise KeyError
    assert chosen(*inputs()) == KERNEL


def test_use_backend_holds_for_its_thread_only():
    seen = []
    with ab.use_backend("reference"):
        thread = threading.Thread(target=lambda: seen.append(chosen(*inputs())))
        thread.start()
        thread.join()
    assert seen == [KERNEL]


def test_use_backend_refuses_unknown_names():
    words = "use_backend: wanted one of 'sdpa', 'triton', 'cudnn', 'cpu', 'rows', 'reference', got 'fast'"
    with pytest.raises(ValueError, match=f"^{words}$"):
        ab.use_backend("fast")


CHOSEN = """
import torch, attnbias as ab
x = torch.zeros(1, 1, 2, 4)
print(ab.explain(x, x, x).backend)
with ab.use_backend("rows"):
    print(ab.explain(x, x, x).backend)
"""


def test_environment_names_a_backend(monkeypatch):
    monkeypatch.setenv("ATTNBIAS_BACKEND", "reference")
    run = subprocess.run([sys.executable, "-c", CHOSEN], capture_output=True, text=True, check=False)
    assert run.stdout == "reference\nrows\n", run.stderr


def test_environment_with_an_unknown_name():
    words = "ATTNBIAS_BACKEND: wanted one of 'sdpa', 'triton', 'cudnn', 'cpu', 'rows', 'reference', got 'no'"
    token = dispatch._asked.set("no")
    try:
        with pytest.raises(ValueError, match=f"^{words}$"):
            ab.attention(*inputs())
    finally:
        dispatch._asked.reset(token)


def test_named_backend_that_cannot_run_raises_every_reason():
    q, k, v = inputs()
    words = r"backend 'rows' cannot run this: terms\[0\]: Distance is known by its values alone"
    with pytest.raises(NotImplementedError, match=f"^{words}"):
        ab.attention(q, k, v, terms=[Distance()], backend="rows")
    words = (
        r"^backend 'sdpa' cannot run this: relation: only Full\(\) and Causal\(\), not as a layout; "
        r"terms: not supported; softcap: not supported; sink: not supported; "
        r"dropout_p: drops other pairs than the other backends; return_lse: it returns none$"
    )
    with pytest.raises(NotImplementedError, match=words):
        ab.attention(
            q, k, v, ab.Window(before=2), terms=[Distance()], softcap=1.0, sink=torch.zeros(2),
            dropout_p=0.5, return_lse=True, backend="sdpa",
        )  # fmt: skip


class Kernel:
    """A stand-in for a kernel backend that refuses everything."""

    name = "cpu"

    @staticmethod
    def why_not(problem):
        return ["D: up to 256", "dtype: float32"]


@pytest.fixture
def refusing_kernel(monkeypatch):
    monkeypatch.setitem(dispatch.IN_OP, "cpu", Kernel)
    monkeypatch.setitem(dispatch.BACKENDS, "cpu", Kernel)
    monkeypatch.setattr(dispatch, "_warned", set())


@pytest.mark.usefixtures("refusing_kernel")
def test_slow_backend_on_a_device_with_kernels_warns_once_with_reasons():
    q, k, v = inputs()
    words = (
        "attention runs on the slow backend 'rows' because 'cpu' cannot run this: "
        "D: up to 256; dtype: float32"
    )
    with pytest.warns(UserWarning) as caught:
        ab.attention(q, k, v, ab.Causal())
    assert [str(each.message) for each in caught] == [words]
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ab.attention(q, k, v, ab.Causal())
        ab.attention(q, k, v, ab.Causal(), backend="reference")
        with pytest.raises(UserWarning, match="slow backend 'reference'"):
            ab.attention(q, k, v, ab.Causal(), terms=[Distance()])


def test_device_without_kernels_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ab.attention(*inputs(), ab.Causal())


@pytest.mark.usefixtures("refusing_kernel")
def test_every_reason_is_listed_if_no_backend_can_run():
    problem = Problem(*inputs())
    with pytest.raises(NotImplementedError) as caught:
        dispatch.choose(problem, None, {"cpu": Kernel})
    assert str(caught.value) == "no backend can run this:\n  cpu: D: up to 256; dtype: float32"


# -- sdpa ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("relation", [None, ab.Full(), ab.Causal(), ab.Causal() & ab.Causal()])
@pytest.mark.parametrize("heads", [2, 1])
@pytest.mark.parametrize("lengths", [(5, 5), (5, 7), (7, 5), (1, 7), (0, 3)])
def test_sdpa_by_name_agrees_with_the_reference(relation, heads, lengths):
    q, k, v = (x.requires_grad_() for x in inputs(*lengths))
    k, v = k[:, :heads], v[:, :heads]
    results = [ab.attention(q, k, v, relation, backend=name) for name in ("sdpa", "reference")]
    torch.testing.assert_close(*results)
    grads = [torch.autograd.grad(out.sin().sum(), (q, k, v)) for out in results]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("q_start", ["end", 6, 9])
def test_sdpa_takes_causal_where_every_query_sees_every_key(q_start):
    q, k, v = inputs(Q=1)
    results = [
        ab.attention(q, k, v, ab.Causal(), q_start=q_start, backend=name) for name in ("sdpa", "reference")
    ]
    torch.testing.assert_close(*results)


def test_sdpa_keeps_the_querys_stride_order():
    q, k, v = (torch.randn(2, 6, 3, 8).transpose(1, 2) for _ in range(3))
    assert ab.attention(q, k, v, ab.Causal(), backend="sdpa").transpose(1, 2).is_contiguous()
    q = q.contiguous()
    assert ab.attention(q, k, v, ab.Causal(), backend="sdpa").is_contiguous()


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("q_start: Causal() is aligned at the top left, got 1", {"q_start": 1}),
        ("dropout_p: drops other pairs", {"dropout_p": 0.1}),
        ("return_lse: it returns none", {"return_lse": True}),
    ],
)
def test_sdpa_refuses(words, options):
    with pytest.raises(NotImplementedError) as caught:
        ab.attention(*inputs(), ab.Causal(), backend="sdpa", **options)
    assert words in str(caught.value)


def test_sdpa_refuses_rows_without_keys_and_layouts():
    with pytest.raises(NotImplementedError, match="key: rows without a key are not supported"):
        ab.attention(*inputs(K=0), backend="sdpa")
    with pytest.raises(NotImplementedError, match="not as a layout"):
        ab.attention(*inputs(), ab.Causal().layout(5, 7), backend="sdpa")


def on_cuda(relation=FULL, dtype=torch.bfloat16, heads=(4, 4), sizes=(64, 64), lengths=(9, 9), q_start=0):
    """Return what the choice reads of a problem whose tensors lie on a GPU, which is not there."""
    device = torch.device("cuda", 0)
    query = SimpleNamespace(device=device, dtype=dtype, shape=(2, heads[0], lengths[0], sizes[0]))
    key = SimpleNamespace(shape=(2, heads[1], lengths[1], sizes[0]))
    value = SimpleNamespace(shape=(2, heads[1], lengths[1], sizes[1]))
    return SimpleNamespace(
        query=query,
        key=key,
        value=value,
        relation=relation,
        terms=(),
        softcap=0.0,
        sink=None,
        q_start=q_start,
    )


@pytest.mark.parametrize("relation", [ab.Full(), ab.Causal()])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sdpa_is_the_default_on_every_cuda_device(relation, dtype):
    assert dispatch.sdpa.why_not_by_default(on_cuda(relation, dtype)) == []
    words = "it is the default only on CUDA devices"
    assert dispatch.sdpa.why_not_by_default(Problem(*inputs(), relation)) == [words]
    torch.use_deterministic_algorithms(True)
    try:
        words = "it is not deterministic, and torch.use_deterministic_algorithms is on"
        assert dispatch.sdpa.why_not_by_default(on_cuda(relation, dtype)) == [words]
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (None, {}),
        (None, {"dtype": torch.float16, "sizes": (256, 256), "relation": ab.Causal()}),
        (None, {"relation": ab.Causal(), "lengths": (1, 9), "q_start": 8}),
        ("float32", {"dtype": torch.float32}),
        ("head sizes above 256", {"sizes": (320, 320)}),
        ("head sizes above 256", {"sizes": (64, 320)}),
        ("values of another head size than the keys", {"sizes": (64, 32)}),
        ("Causal() with other numbers of queries and keys", {"relation": ab.Causal(), "lengths": (5, 9)}),
    ],
)
def test_sdpa_leaves_shared_key_heads_that_torch_has_no_fused_kernel_for(words, given):
    """They fall into a matrix of all scores: slow, and out of memory at 16k tokens."""
    reasons = [f"torch makes a matrix of all scores for shared key heads with {words}"] if words else []
    assert dispatch.sdpa.why_not_by_default(on_cuda(heads=(8, 2), **given)) == reasons
    assert dispatch.sdpa.why_not_by_default(on_cuda(heads=(8, 8), **given)) == []


def test_use_backend_is_restored_whichever_thread_exits_first():
    """The first thread restored the state it had found, then the second restored the first's, for good."""
    entered, left = threading.Event(), threading.Event()

    def other():
        with ab.use_backend("rows"):
            entered.set()
            left.wait()

    thread = threading.Thread(target=other)
    with ab.use_backend("reference"):
        thread.start()
        entered.wait()
    left.set()
    thread.join()
    assert dispatch._asked_traced is None
    assert dispatch._entered == [None]


def test_use_backend_nests_in_itself():
    same = ab.use_backend("reference")
    with same, same:
        assert dispatch.asked_for(None) == "reference"
    assert dispatch.asked_for(None) is None
