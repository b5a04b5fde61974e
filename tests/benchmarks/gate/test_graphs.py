"""The benchmark of graphs: its floors, limits and cases match the table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from attnbias.backends import cpu
from attnbias.benchmarks.cases import stored as graphs
from attnbias.benchmarks.cases.graphs import GRAPHS, SHAPES, GraphCase
from attnbias.benchmarks.cases.stored import GraphData
from attnbias.benchmarks.gate import graphs as graph_gate
from attnbias.benchmarks.measure import graph_memory
from attnbias.benchmarks.measure.race import OURS, Result
from attnbias.benchmarks.measure.timing import Spread
from attnbias.benchmarks.peers.registry import PEERS, CannotRunError

pytest.importorskip("scipy")
needs_library = pytest.mark.skipif(cpu.missing() is not None, reason=str(cpu.missing()))

SMALL = GraphData("ring", np.stack((np.arange(50), (np.arange(50) + 1) % 50)), 50)


def result(ratio: float, *, backward: bool = False) -> Result:
    case = GraphCase.of(SMALL, 1, 8)
    spread = Spread(ratio, ratio, ratio)
    return Result(case, backward, {OURS: Spread(1e-3, 1e-3, 1e-3)}, {"PyG": spread}, {})


def test_the_worst_shape_is_judged() -> None:
    cells, held = graph_gate._worst("cora", "PyG", {"1x64": result(30), "4x32": result(5.9)})
    assert not held and cells[0].startswith("cora, 4x32") and cells[-1] == "below floor"
    cells, held = graph_gate._worst("cora", "PyG", {"1x64": result(30), "4x32": result(20)})
    assert held and cells[-1] == "goal"
    cells, held = graph_gate._worst("cora", "PyG", {"1x64": result(4.1, backward=True)})
    assert held and cells[-1] == "ok" and cells[3:5] == ["4", "12"]


def test_every_floor_has_a_graph() -> None:
    assert set(graph_gate.FLOORS) <= set(GRAPHS)
    assert SHAPES == ((1, 64), (4, 32), (8, 16))


def test_a_missing_graph_is_left_out(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def missing() -> GraphData:
        raise graphs.MissingGraphError("cora: no folder has it")

    monkeypatch.setitem(GRAPHS, "cora", missing)
    assert list(graph_gate.lines(1, "cora")) == []
    assert "left out: cora: no folder has it" in capsys.readouterr().err


def test_a_wrong_result_is_not_timed() -> None:
    good, other = GraphCase.of(SMALL, 1, 8), GraphData("other", SMALL.edge_index[:, ::-1][::-1], 50)
    assert good.fault == ""
    bad = GraphCase("bad", other.relation(), 50, heads=1, size=8, graph=SMALL)
    assert "error" in bad.fault


def test_peers_of_graphs_refuse_other_relations() -> None:
    from attnbias.benchmarks.cases.tokens import causal

    for name in ("PyG", "torch.sparse"):
        with pytest.raises(CannotRunError, match="knows only graphs"):
            PEERS[name](causal(16))


@needs_library
@pytest.mark.slow
def test_memory_stays_below_its_limit() -> None:
    used = graph_memory.measure("mol1024", 4, 32)
    if used is None:
        pytest.skip("the system does not report peak memory")
    graph = graphs.load("mol1024")
    out = 4 * graph.num_nodes * 4 * 32
    assert 4 * out <= used <= graph_memory.limit(graph.edges, graph.num_nodes, 4, 32)
