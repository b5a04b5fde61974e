"""The one comparison: it accepts correct results, and each of its callers detects wrong ones."""

from __future__ import annotations

import pytest
import torch

import attnbias as ab
from attnbias.benchmarks.cases.drawn import knn_cloud
from attnbias.benchmarks.cases.graphs import GraphCase
from attnbias.benchmarks.cases.tokens import causal
from attnbias.op import dispatch
from attnbias.op.problem import Problem
from attnbias.testing import checklist, make_inputs, soak
from attnbias.testing.compare import by_relation, compare, compare_rows, faults_of
from attnbias.testing.draw import Drawn
from attnbias.testing.textbook import attend_rows, leaves_of
from attnbias.testing.tolerance import magnitudes

Q, K = 40, 50
OPTIONS = {"sink": torch.randn(4, generator=torch.Generator().manual_seed(1)), "softcap": 5.0}


def make_problem(**options):
    inputs = make_inputs(0, 1, 4, 2, Q, K, 8, 8)
    return Problem(*inputs, ab.Window(before=9), q_start=3, **OPTIONS, **options)


def run(problem, attend=None, **options):
    """Compare ``attend``, by default the textbook itself in one piece, with the textbook."""
    sizes = ("out", "lse", *leaves_of(problem))
    rows = torch.arange(Q)
    return compare(
        attend or (lambda leaves: attend_rows(problem, rows, leaves)),
        lambda rows, leaves: attend_rows(problem, rows, leaves),
        leaves_of(problem),
        lambda *_: dict.fromkeys(sizes, 0.0),
        **options,
    )


def test_the_textbook_agrees_with_itself_and_every_result_is_compared():
    results = run(make_problem(terms=[ab.ALiBi(torch.rand(4))]))
    assert list(results) == ["out", "lse", "query", "key", "value", "sink", "term 0"]
    assert not faults_of(results)
    assert all(result.error == result.eager and result.largest > 0 for result in results.values())


@pytest.mark.parametrize("rows", [None, torch.arange(5, 25)])
def test_strips_change_nothing_but_rounding(rows):
    whole, parts = (run(make_problem(), rows=rows, strip=strip) for strip in (Q, 7))
    assert not faults_of(whole) and not faults_of(parts)
    for name, result in whole.items():
        assert parts[name].largest == pytest.approx(result.largest, rel=1e-12)


@pytest.mark.parametrize("name", ["out", "lse", "query", "key", "value", "sink", "term 0"])
def test_an_error_is_found_in_the_result_that_has_it(name):
    """One entry is off by 1e-3 of itself, in a result or in the gradient of a leaf."""
    problem = make_problem(terms=[ab.ALiBi(torch.rand(4))])

    def off(x):
        x = x.clone()
        x.view(-1)[x.abs().argmax()] *= 1.001
        return x

    def attend(leaves):
        leaves = {leaf: x.view_as(x) for leaf, x in leaves.items()}
        if name in leaves:
            leaves[name].register_hook(off)
        out, lse = attend_rows(problem, torch.arange(Q), leaves)
        return off(out) if name == "out" else out, off(lse) if name == "lse" else lse

    results = run(problem, attend)
    # Altering out or lse alters its gradients too.
    assert results[name].fault.startswith(f"{name}: error")
    assert name in ("out", "lse") or faults_of(results) == [results[name].fault]


def test_a_call_without_lse_is_compared_without():
    problem = make_problem()
    results = run(problem, lambda leaves: (attend_rows(problem, torch.arange(Q), leaves)[0], None))
    assert "lse" not in results and not faults_of(results)


def test_only_the_chosen_rows_are_compared():
    inputs = make_inputs(0, 1, 2, 1, 300, 300, 8, 8)

    def attend(q, k, v):
        out = ab.attention(q, k, v, ab.Causal())
        return torch.cat((out[:, :, :150], out[:, :, 150:] + 1e-3), 2)

    textbook = by_relation(ab.Causal())
    assert not compare_rows(attend, textbook, inputs, torch.arange(0, 150, 2))
    for rows in (torch.arange(149, 151), torch.tensor([299, 0]), None):
        (fault,) = compare_rows(attend, textbook, inputs, rows)
        assert fault.startswith("out: error 1.000e-03")


class Wrong:
    """The layout reference whose first row of out is off by 1e-3."""

    name = "rows"
    why_not = staticmethod(dispatch.rows.why_not)
    backward = staticmethod(dispatch.rows.backward)

    def forward(self, call):
        out, lse = dispatch.rows.forward(call)
        out[:, :, 0] += 1e-3
        return out, lse


def by_verify():
    inputs = make_inputs(0, 1, 4, 2, Q, K, 8, 8)
    return [x.fault for x in ab.verify(*inputs, ab.Causal(), backend="rows").results.values() if x.fault]


def by_soak():
    inputs = make_inputs(0, 1, 4, 2, Q, K, 8, 8)
    return soak.find_faults(Drawn(0, inputs, ab.Causal(), {"q_start": 0}, None), "rows")


def by_checklist():
    found = checklist.lines("cpu", "rows", "causal                          any    float32   1 x 1/1")
    return [line.fault.removeprefix("WRONG ") for line in found if line.fault]


def by_long_checklist():
    found = checklist.long_lines("cpu", "rows", 256)
    return [line.fault.removeprefix("WRONG ") for line in found if line.fault]


def by_benchmark():
    fault = causal(64, backend="rows").fault
    return fault.split("\n") if fault else []


def by_graph_benchmark():
    case = GraphCase.of(knn_cloud(200, 4), 2, 8)
    object.__setattr__(case, "backend", "rows")
    return case.fault.split("\n") if case.fault else []


@pytest.mark.parametrize(
    "caller", [by_verify, by_soak, by_checklist, by_long_checklist, by_benchmark, by_graph_benchmark]
)
def test_every_caller_detects_an_error(monkeypatch, caller):
    assert caller() == []
    monkeypatch.setitem(dispatch.IN_OP, "rows", Wrong())
    faults = caller()
    assert faults and faults[0].startswith("out: error"), faults


@pytest.mark.parametrize("H", [1, 2])
def test_verify_takes_a_bias_for_each_edge(H):
    """It raised NotImplementedError, because the textbook did not know the edges of a relation."""
    q, k, v = make_inputs(0, 1, 2, 2, 6, 6, 8, 8)
    graph = ab.Graph(torch.tensor([[0, 1, 1, 2, 5, 5], [3, 3, 3, 4, 0, 0]]), num_nodes=6)
    bias = torch.randn(6, H, generator=torch.Generator().manual_seed(0))
    result = ab.verify(q, k, v, graph, terms=[ab.EdgeBias(bias)])
    assert result.ok, f"\n{result}"


def test_magnitudes_grow_with_what_is_rounded():
    q, k, v = make_inputs(0, 1, 2, 1, 5, 6, 4, 3)
    grads = torch.ones(1, 2, 5, 3), torch.ones(1, 2, 5)
    plain = magnitudes(q, k, v, *grads, 0.5)
    for more in (magnitudes(q, k, v, *grads, 1.0), magnitudes(q, k, v, *grads, 0.5, bias=2.0)):
        assert all(more[name] > plain[name] for name in plain)
    half = [x.half() for x in (q, k, v)]
    known = magnitudes(*half, *grads, 0.5, out=torch.ones(1, 2, 5, 3))
    rest = magnitudes(*half, *grads, 0.5)
    assert [name for name in rest if known[name] > rest[name]] == ["query", "key", "sink"]
