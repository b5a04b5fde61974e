"""The texts of ``explain`` and the findings of ``verify``."""

import dataclasses

import pytest
import torch

import attnbias as ab
from attnbias.backends import cpu
from attnbias.op import dispatch
from attnbias.testing import compare, make_inputs

needs_library = pytest.mark.skipif(cpu.missing() is not None, reason=str(cpu.missing()))


def inputs(Q=100, K=100, **kwargs):
    return make_inputs(0, **({"B": 2, "H": 4, "Hk": 2, "Q": Q, "K": K, "D": 8, "E": 5} | kwargs))


class Distance:
    def value(self, b, h, q, k):
        return -0.1 * (q - k).abs()


# -- explain ---------------------------------------------------------------------------------------


@needs_library
def test_explanation_reads_as_a_table():
    q, k, v = torch.zeros(3, 1, 1, 128, 8)
    layout = ab.Causal().layout(128, 128)
    stats = layout.stats()
    assert str(ab.explain(q, k, v, layout)) == (
        "backend cpu: it is the first that can run this\n"
        "not     sdpa: relation: only Full() and Causal(), not as a layout; "
        "it is the default only on CUDA devices\n"
        "not     triton: device: only CUDA, got cpu\n"
        "not     cudnn: device: only CUDA, got cpu; "
        "it runs only when asked for by name: no GPU has run it yet\n"
        "not     rows: it could run this, but 'cpu' was chosen\n"
        "not     reference: it could run this, but 'cpu' was chosen\n"
        f"tiles   {stats.tiles_full} full, {stats.tiles_partial} partial, of {stats.tile}\n"
        "edges   0\n"
        f"pairs   8256 needed, {stats.executed} executed ({stats.waste:.2f}x)\n"
        f"layout  {stats.bytes} bytes, 1 patterns"
    )


def test_explanation_says_why_torchs_kernel_is_the_default(monkeypatch):
    monkeypatch.setattr(dispatch.sdpa, "why_not_by_default", lambda problem: [])
    found = ab.explain(*inputs(), ab.Causal())
    assert found.backend == "sdpa"
    assert found.why == (
        "torch's own kernels are the default for Full() and Causal() on CUDA, because ours are unmeasured"
    )
    assert ab.explain(*inputs(), ab.Causal(), backend="sdpa").why == "it was asked for"


def test_explanation_is_frozen_and_holds_the_numbers():
    explanation = ab.explain(*inputs(), ab.Window(before=3), backend="rows")
    assert explanation.backend == "rows"
    assert explanation.layout == ab.Window(before=3).layout(100, 100).stats()
    assert set(explanation.others) == {"sdpa", "cpu", "triton", "cudnn", "reference"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        explanation.backend = "other"


def test_explanation_of_terms_gives_reasons_against_other_backends():
    explanation = ab.explain(*inputs(), ab.Causal(), terms=[Distance()])
    assert explanation.backend == "reference"
    assert all("terms" in explanation.others[name] for name in ("cpu", "rows"))


def test_explaining_draws_no_random_number():
    before = torch.get_rng_state()
    ab.explain(*inputs(), dropout_p=0.5)
    assert torch.equal(before, torch.get_rng_state())


def test_explain_raises_what_attention_raises():
    with pytest.raises(ValueError, match=r"^dropout_p: wanted"):
        ab.explain(*inputs(), dropout_p=2.0)
    with pytest.raises(NotImplementedError, match=r"^backend 'sdpa' cannot run this: relation"):
        ab.explain(*inputs(), ab.Window(before=3), backend="sdpa")


# -- verify ----------------------------------------------------------------------------------------

EMPTY_ROWS = ab.Window(before=2) & ab.Prefix(50)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backend", ["rows", "reference"])
def test_backends_verify(dtype, backend):
    q, k, v = inputs(dtype=dtype, order="BLHD", strided=True)
    options = {"softcap": 2.0, "sink": torch.randn(4), "dropout_p": 0.2, "backend": backend}
    # Use torch's own bfloat16 product: oneDNN's crashes on machines where AMX is unusable.
    with torch.backends.mkldnn.flags(enabled=False), torch.no_grad():
        result = ab.verify(q, k, v, EMPTY_ROWS, **options)
    assert result.ok and result.backend == backend, f"\n{result}"
    assert list(result.results) == ["out", "lse", "query", "key", "value", "sink"]


@pytest.mark.parametrize(
    ("relation", "options"),
    [
        (None, {}),
        (ab.Causal(), {"backend": "sdpa"}),
        (ab.Causal(), {"terms": [Distance()]}),
        (EMPTY_ROWS.layout(100, 100), {}),
        (ab.Causal().layout(100, 100, q_start=7), {"q_start": 7}),
        (ab.Documents(torch.arange(100) // 9), {"dropout_p": 1.0}),
    ],
    ids=["full", "sdpa", "terms", "layout", "q_start", "dropout"],
)
def test_calls_verify(relation, options):
    result = ab.verify(*inputs(), relation, **options)
    assert result.ok, f"\n{result}"
    assert ("lse" in result.results) == (result.backend != "sdpa")


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (1, 1), (3, 70)])
def test_small_and_empty_inputs_verify(lengths):
    assert ab.verify(*inputs(*lengths), ab.Causal(), q_start="end").ok


def test_long_inputs_are_verified_in_strips(monkeypatch):
    monkeypatch.setattr(compare, "STRIP_ELEMENTS", 2 * 4 * 100 * 30)  # 30 rows at a time
    for relation in (ab.Causal(), EMPTY_ROWS.layout(100, 100)):
        result = ab.verify(*inputs(), relation, dropout_p=0.2, sink=torch.randn(4))
        assert result.ok, f"\n{result}"


def test_verify_does_not_change_the_call():
    q, k, v = inputs(requires_grad=True)
    ab.verify(q, k, v, ab.Causal())
    assert q.grad is None and q.requires_grad


class Wrong:
    """The layout reference with one fault."""

    name = "rows"
    why_not = staticmethod(dispatch.rows.why_not)

    def __init__(self, fault):
        self.fault = fault

    def forward(self, call):
        out, lse = dispatch.rows.forward(call)
        if self.fault == "out":
            out[1, 2, 17] *= 1 + 1e-4
        if self.fault == "lse":
            lse[0, 0, 3] += 1e-4
        return out, lse

    def backward(self, *arguments):
        grads = dispatch.rows.backward(*arguments)
        if self.fault in ("query", "key", "value"):
            grads[("query", "key", "value").index(self.fault)][0, 1, 60] *= 1.001
        if self.fault == "nan":
            grads[0][0, 0, 0] = torch.nan
        return grads


@pytest.mark.parametrize("fault", ["out", "lse", "query", "key", "value", "nan"])
def test_fault_is_located(monkeypatch, fault):
    monkeypatch.setitem(dispatch.IN_OP, "rows", Wrong(fault))
    result = ab.verify(*inputs(), ab.Causal(), backend="rows")
    assert not result.ok
    where = "query" if fault == "nan" else fault
    assert [name for name, each in result.results.items() if each.fault] == [where]
    assert where in str(result) and result.results[where].fault in str(result)


def test_verification_reads_as_a_table():
    lines = str(ab.verify(*inputs(), ab.Causal(), backend="rows")).splitlines()
    assert lines[0].split() == ["rows", "error", "eager", "largest"]
    assert [line.split()[0] for line in lines[1:]] == ["out", "lse", "query", "key", "value"]
    assert all(line.endswith("  ok") for line in lines[1:])


# -- in notebooks ------------------------------------------------------------------------------------


def test_results_show_as_the_text_that_they_print():
    explanation, verification = (
        call(*inputs(), ab.Causal(), backend="rows") for call in (ab.explain, ab.verify)
    )
    assert repr(explanation) == str(explanation) and "backend rows: it was asked for" in repr(explanation)
    assert repr(verification) == str(verification) and repr(verification).startswith("rows ")
    report = ab.shard(ab.Causal(), 256, 2).explain()
    assert repr(report) == str(report) and "256 tokens on 2 ranks" in repr(report)
