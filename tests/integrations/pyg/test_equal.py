"""The layers equal PyG's: results, weights, gradients, state dicts, dropout draws."""

import importlib
import inspect
import math

import pytest
import torch
from cases.pyg import FEATURES, GRAPHS, HEADS, IN, OPTIONS, OUT, PLAIN, REAL, make_inputs, real_graph, run

import attnbias as ab
from attnbias.backends import cpu
from attnbias.integrations import pyg as ours
from attnbias.integrations.pyg import edges as pyg_edges
from attnbias.testing import assert_no_worse

geometric = pytest.importorskip("torch_geometric", reason="PyG is not installed: nothing to compare with")
theirs = pytest.importorskip("torch_geometric.nn")


def has_loops(layer, options):
    return layer != "TransformerConv" and "edge_dim" in options and options.get("add_self_loops", True)


CASES = [
    (layer, options, graph)
    for layer, all_options in OPTIONS.items()
    for graph in GRAPHS
    for options in (all_options if graph in ("random", "to more") else PLAIN)
    # PyG fails to fill self-loops where there are more targets than sources: see below.
    if not (has_loops(layer, options) and graph == "to more")
]


def name_case(case):
    layer, options, graph = case
    return f"{layer}-{graph}-" + ",".join(f"{k}={v}" for k, v in options.items())


def make_pair(layer, options, seed=0, in_channels=IN):
    """Return PyG's layer and ours with the same parameters, none of them zero."""
    torch.manual_seed(seed)
    made = [getattr(module, layer)(in_channels, OUT, heads=HEADS, **options) for module in (theirs, ours)]
    with torch.no_grad():
        for parameter in made[0].parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    made[1].load_state_dict(made[0].state_dict())
    return made


@pytest.fixture
def score(monkeypatch):
    """Record the largest score that PyG's layers see, in a list of one number."""
    largest = [0.0]
    for name in ("transformer_conv", "gat_conv", "gatv2_conv"):
        module = importlib.import_module(f"torch_geometric.nn.conv.{name}")

        def softmax(scores, *others, plain=module.softmax):
            largest[0] = max([largest[0], *scores.detach().abs().view(-1).tolist()])
            return plain(scores, *others)

        monkeypatch.setattr(module, "softmax", softmax)
    return largest


def compare(got, single, want, score, count):
    """Fail unless ``got`` is as near PyG's float64 as PyG's own float32 is, both in steps of their dtype.

    A score is rounded at its own size, so the relative error of a weight is as large. Gradients of scores are
    differences of numbers as large as the largest gradient; PyG's happen to cancel exactly where a node has
    one edge. Those of parameters are sums over all edges and nodes (``count``) in another order than PyG's,
    with as many roundings of random sign. So each may be off by one step of that size.
    """
    step = torch.finfo(got["out"].dtype).eps / torch.finfo(torch.float32).eps
    results, inputs = ("out", "weights"), ("x0", "x1", "edge_attr")
    sizes = {name: value.abs().max().item() for name, value in want.items() if value.numel()}
    largest = max((size for name, size in sizes.items() if name not in results), default=0.0)
    for name, value in want.items():
        near = value + (single[name].double() - value) * step
        magnitude = sizes.get(name, 0.0) if name in results else largest
        roundings = 1 if name in results + inputs else math.sqrt(count)
        factor = 2.0 if name in results else 3.0
        assert_no_worse(name, got[name], near, value, factor, magnitude=(1 + score) * magnitude * roundings)


def count_terms(graph):
    return graph[0].shape[1] + sum(graph[1:])


def prepare(case):
    layer, options, graph = case
    return make_pair(layer, options), options, GRAPHS[graph]


@pytest.mark.parametrize("case", CASES, ids=name_case)
def test_float64_equals_pyg_to_rounding(case, score):
    (peer, mine), options, graph = prepare(case)
    single = run(peer, graph, options, torch.float32)
    want = run(peer, graph, options, torch.float64)
    with ab.use_backend("reference"):
        got = run(mine, graph, options, torch.float64)
    compare(got, single, want, score[0], count_terms(graph))


@pytest.mark.skipif(cpu.missing() is not None, reason=str(cpu.missing()))
@pytest.mark.parametrize("case", CASES, ids=name_case)
def test_float32_is_as_exact_as_pyg(case, score):
    (peer, mine), options, graph = prepare(case)
    single = run(peer, graph, options, torch.float32)
    want = run(peer, graph, options, torch.float64)
    with ab.use_backend("cpu"):
        got = run(mine, graph, options, torch.float32)
    compare(got, single, want, score[0], count_terms(graph))


@pytest.mark.parametrize("layer", ["GATConv", "GATv2Conv"])
def test_loops_are_filled_where_there_are_more_targets_than_sources(layer):
    """PyG raises an index error there; with the loops in its input it gives the same results."""
    options = {"edge_dim": FEATURES}
    peer, mine = (made.double() for made in make_pair(layer, options, in_channels=(IN, IN)))
    graph = GRAPHS["to more"]
    index, sources, targets = graph
    x, attr = make_inputs(graph, options)
    kept = index[0] != index[1]
    mean = torch.zeros(targets, FEATURES).double().index_add(0, index[1, kept], attr[kept])
    mean = mean / torch.bincount(index[1, kept], minlength=targets).clamp(min=1)[:, None]
    loops = torch.arange(sources).expand(2, -1)
    peer.add_self_loops = False
    want, (_, want_weights) = peer(
        x,
        torch.cat([index[:, kept], loops], 1),
        torch.cat([attr[kept], mean[:sources]]),
        return_attention_weights=True,
    )
    got, (_, weights) = mine(x, index, attr, return_attention_weights=True)
    torch.testing.assert_close((got, weights), (want, want_weights))


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("edge_dim", [None, FEATURES])
@pytest.mark.parametrize("layer", OPTIONS)
@pytest.mark.parametrize("name", REAL)
def test_real_graphs(name, layer, edge_dim, dtype, score):
    graph = real_graph(name)
    if graph is None:
        pytest.skip(f"{name}.npz is not available")
    options = {} if edge_dim is None else {"edge_dim": edge_dim}
    peer, mine = make_pair(layer, options)
    single = run(peer, graph, options, torch.float32)
    want = run(peer, graph, options, torch.float64)
    compare(run(mine, graph, options, dtype), single, want, score[0], count_terms(graph))


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("size", [1e3, 1e9])
def test_features_that_are_not_normalised(size, dropout):
    """With scores up to 1e18 the weights are still a softmax and sum to one."""
    peer, mine = make_pair("TransformerConv", {"edge_dim": FEATURES, "dropout": dropout})
    index = GRAPHS["random"][0]
    x, attr = make_inputs(GRAPHS["random"], {"edge_dim": FEATURES}, torch.float32)

    def results(layer, dtype):
        torch.manual_seed(1)
        layer, inputs = layer.to(dtype), (x.to(dtype) * size, index, attr.to(dtype) * size)
        out, (_, weights) = layer(*inputs, return_attention_weights=True)
        return out / size, weights

    got, same = results(mine, torch.float32), results(peer, torch.float32)
    truth = results(peer, torch.float64)
    for name, *three in zip(("out", "weights"), got, same, truth, strict=True):
        assert_no_worse(name, *three, magnitude=three[2].abs().max().item())


@pytest.mark.parametrize("layer", OPTIONS)
def test_all_forms_of_edges(layer):
    peer, mine = (made.double() for made in make_pair(layer, {}))
    index = torch.unique(GRAPHS["random"][0], dim=1)
    nodes = GRAPHS["random"][1]
    x, _ = make_inputs(GRAPHS["random"], {})
    want = mine(x, index)
    order = torch.argsort(index[1], stable=True)
    matrix = torch.sparse_coo_tensor(index.flip(0), torch.ones(index.shape[1]), (nodes, nodes)).coalesce()
    for form in (
        ab.Graph(index, num_nodes=nodes),
        geometric.EdgeIndex(index[:, order], sparse_size=(nodes, nodes), sort_order="col"),
        index.int(),
        matrix,
        matrix.to_sparse_csr(),
        matrix.to_sparse_csc(),
    ):
        torch.testing.assert_close(mine(x, form), want)
    for form in (index, matrix, matrix.to_sparse_csr()):
        out, (edges, weights) = mine(x, form, return_attention_weights=True)
        want_out, (want_edges, want_weights) = peer(x, form, return_attention_weights=True)
        torch.testing.assert_close((out, weights), (want_out, want_weights))
        assert edges.layout == want_edges.layout
        dense = [y.to_dense() if y.layout != torch.strided else y for y in (edges, want_edges)]
        torch.testing.assert_close(*dense)


def test_vectors_in_a_sparse_matrix_are_edge_features():
    peer, mine = (made.double() for made in make_pair("TransformerConv", {"edge_dim": FEATURES}))
    index = torch.unique(GRAPHS["random"][0].flip(0), dim=1)
    x, _ = make_inputs(GRAPHS["random"], {})
    attr = torch.randn(index.shape[1], FEATURES, dtype=torch.float64)
    matrix = torch.sparse_coo_tensor(index, attr, (len(x), len(x), FEATURES)).coalesce()
    dense = matrix.to_dense()
    for form in (matrix, dense.to_sparse_csr(dense_dim=1), dense.to_sparse_csc(dense_dim=1)):
        torch.testing.assert_close(mine(x, form), peer(x, matrix))


def test_sources_without_targets():
    peer, mine = (made.double() for made in make_pair("GATConv", {"residual": True}))
    for name, sizes in (("random", None), ("to fewer", (43, 21)), ("to more", (17, 50))):
        index, sources, _ = GRAPHS[name]
        x = torch.randn(sources, IN, dtype=torch.float64)
        torch.testing.assert_close(mine((x, None), index, size=sizes), peer((x, None), index, size=sizes))


@pytest.mark.parametrize(
    "options", [{}, {"share_weights": True}, {"residual": True, "edge_dim": 3}, {"edge_dim": -1}]
)
@pytest.mark.parametrize("layer", OPTIONS)
@pytest.mark.parametrize("in_channels", [IN, (IN, 7), -1])
def test_parameters_and_their_initialisation_equal_pygs(layer, options, in_channels):
    known = inspect.signature(getattr(theirs, layer)).parameters
    options = {name: value for name, value in options.items() if name in known}
    attr = torch.ones(1, 3) if "edge_dim" in options else None
    x = (torch.ones(2, IN), torch.ones(2, 7)) if isinstance(in_channels, tuple) else torch.ones(2, IN)
    made = []
    for module in (theirs, ours):
        torch.manual_seed(3)
        made.append(getattr(module, layer)(in_channels, OUT, heads=HEADS, **options))
        if -1 in (in_channels, options.get("edge_dim")):
            made[-1](x, torch.tensor([[0], [1]]), attr)
    peer, mine = made
    torch.testing.assert_close(dict(mine.named_parameters()), dict(peer.named_parameters()))
    assert repr(mine) == repr(peer)
    mine.reset_parameters()
    peer.load_state_dict(mine.state_dict())
    mine.reset_parameters()
    mine.load_state_dict(peer.state_dict())
    assert all(map(torch.equal, mine.state_dict().values(), peer.state_dict().values()))


@pytest.mark.parametrize("layer", OPTIONS)
def test_defaults_of_message_passing_are_accepted(layer):
    known = inspect.signature(geometric.nn.MessagePassing).parameters
    getattr(ours, layer)(IN, OUT, **{name: each.default for name, each in known.items()})


@pytest.mark.parametrize(
    ("layer", "options"),
    [
        ("TransformerConv", {"edge_dim": FEATURES}),
        *((name, options) for name in ("GATConv", "GATv2Conv") for options in PLAIN),
    ],
)
def test_dropout_by_edge_draws_as_pyg(layer, options):
    peer, mine = (made.double() for made in make_pair(layer, {**options, "dropout": 0.4}))
    graph = GRAPHS["random"]
    found = []
    for made in (peer, mine):
        torch.manual_seed(11)
        found.append(run(made, graph, options, torch.float64))
    torch.testing.assert_close(found[1], found[0])
    assert not torch.equal(found[0]["out"], run(peer.eval(), graph, options, torch.float64)["out"])
    torch.testing.assert_close(
        run(mine.eval(), graph, options, torch.float64), run(peer, graph, options, torch.float64)
    )


@pytest.mark.parametrize("layer", OPTIONS)
def test_parts_of_the_edges_add_up(layer, monkeypatch):
    options = {"edge_dim": FEATURES, "dropout": 0.5}
    _, mine = make_pair(layer, options)
    found = []
    for numbers in (1 << 22, 1):
        monkeypatch.setattr(pyg_edges, "NUMBERS_AT_ONCE", numbers)
        torch.manual_seed(2)
        found.append(run(mine, GRAPHS["random"], options, torch.float64))
    torch.testing.assert_close(found[1], found[0])
