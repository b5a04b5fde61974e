"""The layers give what PyG's give: results, weights, gradients, state dicts, dropout draws."""

import importlib

import pytest
import torch
from pyg_cases import GRAPHS, HEADS, IN, OPTIONS, OUT, PLAIN, REAL, make_inputs, real_graph, run

import attnbias as ab
from attnbias.integrations import pyg as ours
from attnbias.integrations import pyg_edges
from attnbias.testing import assert_no_worse

geometric = pytest.importorskip("torch_geometric", reason="PyG is not installed: nothing to compare with")
theirs = pytest.importorskip("torch_geometric.nn")

CASES = [
    (layer, options, graph)
    for layer, all_options in OPTIONS.items()
    for graph in GRAPHS
    for options in (all_options if graph in ("random", "to more") else PLAIN)
    if graph == "random" or not ({"fill_value"} & options.keys())  # PyG's own loops need square graphs
]


def name_case(case):
    layer, options, graph = case
    return f"{layer}-{graph}-" + ",".join(f"{k}={v}" for k, v in options.items())


def make_pair(layer, options, seed=0, in_channels=IN):
    """PyG's layer and ours with the same parameters, none of them zero."""
    torch.manual_seed(seed)
    made = [getattr(module, layer)(in_channels, OUT, heads=HEADS, **options) for module in (theirs, ours)]
    with torch.no_grad():
        for parameter in made[0].parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    made[1].load_state_dict(made[0].state_dict())
    return made


@pytest.fixture
def score(monkeypatch):
    """The largest score that PyG's layers see, as a list of one number."""
    largest = [0.0]
    for name in ("transformer_conv", "gat_conv", "gatv2_conv"):
        module = importlib.import_module(f"torch_geometric.nn.conv.{name}")

        def softmax(scores, *others, plain=module.softmax):
            largest[0] = max([largest[0], *scores.detach().abs().view(-1).tolist()])
            return plain(scores, *others)

        monkeypatch.setattr(module, "softmax", softmax)
    return largest


def compare(got, single, want, score):
    """Fail unless ``got`` is as near PyG's float64 as PyG's own float32 is, both in steps of their dtype.

    A score is rounded at its own size, so a weight is off by that much of itself. Gradients of scores are
    differences of numbers as large as the largest gradient; PyG's happen to cancel exactly where a node has
    one edge. So one step of such a size is allowed to each.
    """
    step = torch.finfo(got["out"].dtype).eps / torch.finfo(torch.float32).eps
    results = ("out", "weights")
    sizes = {name: value.abs().max().item() for name, value in want.items() if value.numel()}
    largest = max((size for name, size in sizes.items() if name not in results), default=0.0)
    for name, value in want.items():
        near = value + (single[name].double() - value) * step
        magnitude = (1 + score) * (sizes.get(name, 0.0) if name in results else largest)
        factor = 2.0 if name in results else 3.0
        assert_no_worse(name, got[name], near, value, factor, magnitude=magnitude)


def is_loop_case(case):
    """Where PyG cannot fill self-loops: fewer of them than targets."""
    layer, options, graph = case
    return layer != "TransformerConv" and "edge_dim" in options and graph == "to more"


def prepare(case):
    layer, options, graph = case
    if is_loop_case(case) and options.get("add_self_loops", True):
        pytest.skip("PyG fails to fill loops of fewer sources than targets")
    return make_pair(layer, options), options, GRAPHS[graph]


@pytest.mark.parametrize("case", CASES, ids=name_case)
def test_float64_equals_pyg_to_rounding(case, score):
    (peer, mine), options, graph = prepare(case)
    single = run(peer, graph, options, torch.float32)
    want = run(peer, graph, options, torch.float64)
    with ab.use_backend("reference"):
        got = run(mine, graph, options, torch.float64)
    compare(got, single, want, score[0])


@pytest.mark.parametrize("case", CASES, ids=name_case)
def test_float32_is_as_exact_as_pyg(case, score):
    (peer, mine), options, graph = prepare(case)
    single = run(peer, graph, options, torch.float32)
    want = run(peer, graph, options, torch.float64)
    got = run(mine, graph, options, torch.float32)
    compare(got, single, want, score[0])
