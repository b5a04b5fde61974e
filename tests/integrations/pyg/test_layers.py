"""The layers with PyG's names: tests that do not need PyG."""

import subprocess
import sys

import pytest
import torch
from cases.pyg import FEATURES, GRAPHS, IN, OPTIONS, make_inputs
from torch.utils._python_dispatch import TorchDispatchMode

import attnbias as ab
from attnbias.integrations import pyg
from attnbias.integrations.pyg import edges as pyg_edges


def make(layer, heads=2, **options):
    torch.manual_seed(0)
    return getattr(pyg, layer)(IN, 4, heads=heads, **options)


def test_import_does_not_need_pyg():
    code = (
        "import sys; sys.modules['torch_geometric'] = None\n"
        "import torch\n"
        "from attnbias.integrations.pyg import GATConv, GATv2Conv, TransformerConv\n"
        "for layer in (GATConv, GATv2Conv, TransformerConv):\n"
        "    assert layer(3, 2)(torch.ones(2, 3), torch.tensor([[0], [1]])).shape == (2, 2)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor that an operation makes."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for x in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                self.numbers = max(self.numbers, x.numel())
        return made


@pytest.mark.parametrize("edge_dim", [None, 3])
@pytest.mark.parametrize("layer", OPTIONS)
def test_no_vector_per_edge_is_stored(layer, edge_dim, monkeypatch):
    monkeypatch.setattr(pyg_edges, "NUMBERS_AT_ONCE", 1)
    monkeypatch.setattr("attnbias.op.weights.PAIRS_AT_ONCE", 1000)
    nodes, edges, heads, size = 60, 6000, 4, 16
    net = getattr(pyg, layer)(IN, size, heads=heads, edge_dim=edge_dim)
    index = torch.randint(nodes, (2, edges), generator=torch.Generator().manual_seed(0))
    x = torch.randn(nodes, IN, requires_grad=True)
    attr = None if edge_dim is None else torch.randn(edges, edge_dim, requires_grad=True)
    with Largest() as largest:
        net(x, index, attr).square().sum().backward()
    per_edge = heads if edge_dim is None else max(heads, edge_dim)
    assert largest.numbers <= max((edges + nodes) * per_edge, 4 * nodes * heads * size)


@pytest.mark.parametrize("layer", OPTIONS)
def test_tensor_is_read_again_only_after_a_change(layer):
    net, index = make(layer).double(), GRAPHS["random"][0].clone()
    x, _ = make_inputs(GRAPHS["random"], {})
    first, again = (pyg_edges.read_edges(index, None, (40, 40)).graph for _ in range(2))
    assert first is again
    before = net(x, index)
    index[:, 3] = torch.tensor([1, 2])
    torch.testing.assert_close(net(x, index), net(x, ab.Graph(index, num_nodes=40)))
    assert not torch.equal(net(x, index), before)
    with torch.inference_mode():  # tensors made here do not count writes
        written = index.clone()
        before = net(x, written)
        written[:, 3] = torch.tensor([2, 1])
        assert not torch.equal(net(x, written), before)


@pytest.mark.parametrize("edge_dim", [None, FEATURES])
@pytest.mark.parametrize("layer", OPTIONS)
def test_training_after_inference_mode(layer, edge_dim):
    """A first validation pass leaves graphs and loops in caches."""
    options = {} if edge_dim is None else {"edge_dim": edge_dim}
    net, index = make(layer, **options), GRAPHS["random"][0].clone()
    x, attr = make_inputs(GRAPHS["random"], options, torch.float32)
    for form in (index, ab.Graph(index, num_nodes=40)):
        with torch.inference_mode():
            net(x, form, attr)
        net(x, form, attr).sum().backward()


def test_a_graph_keeps_its_layouts_with_loops():
    graph = ab.Graph(GRAPHS["random"][0], num_nodes=40)
    read = [pyg_edges.read_edges(graph, None, (40, 40), add_self_loops=True).graph for _ in range(2)]
    assert read[0] is read[1]
    x, _ = make_inputs(GRAPHS["random"], {}, torch.float32)
    net = make("GATConv")
    net(x, graph)
    built = len(read[0].__dict__["_layouts_"])
    net(x, graph)
    assert len(read[0].__dict__["_layouts_"]) == built == 1


@pytest.mark.parametrize("edge_dim", [None, FEATURES])
@pytest.mark.parametrize("layer", OPTIONS)
def test_relabelling_the_nodes_relabels_the_result(layer, edge_dim):
    options = {} if edge_dim is None else {"edge_dim": edge_dim}
    net = make(layer, **options).double()
    index, nodes, _ = GRAPHS["random"]
    x, attr = make_inputs(GRAPHS["random"], options)
    order = torch.randperm(nodes, generator=torch.Generator().manual_seed(1))
    moved = net(x[order], torch.argsort(order)[index], attr)
    torch.testing.assert_close(moved, net(x, index, attr)[order])


@pytest.mark.parametrize("layer", OPTIONS)
def test_dropout_in_the_kernels(layer):
    """Weights of n equal edges keep a mean of 1, and the kept share is as given."""
    p, nodes, degree = 0.3, 200, 20
    net = make(layer, dropout=p, bias=False)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
        for name in ("lin_value", "lin_l", "lin"):
            if getattr(net, name, None) is not None:
                getattr(net, name).weight.fill_(1.0)  # every value is the sum of a node's features
    if layer != "TransformerConv":
        net.add_self_loops = False
    index = torch.stack([torch.arange(nodes * degree) % nodes, torch.arange(nodes).repeat_interleave(degree)])
    x = torch.full((nodes, IN), 1 / IN)
    torch.manual_seed(4)
    out = net(x, index)
    torch.manual_seed(4)
    assert torch.equal(out, net(x, index))
    kept = out[:, ::4].double() * (1 - p) * degree  # one column per head: the number of kept edges
    # Each edge adds 1 / (1 - p), rounded, and the sum is rounded once more per edge.
    assert (kept - kept.round()).abs().max() <= degree * 4 * torch.finfo(torch.float32).eps
    deviation = (p * (1 - p) / (degree * kept.numel())) ** 0.5
    assert abs(kept.mean() / degree - (1 - p)) < 6 * deviation
    net.eval()
    torch.testing.assert_close(net(x, index), torch.ones(nodes, 8))
    net.train()
    net.dropout = 1.0
    assert not net(x, index).any()


class SparseTensor:
    """The part of torch_sparse's class that is read; rows are targets."""

    def __init__(self, index, sizes, value=None):
        self.index, self.sizes, self.value = index, sizes, value

    def coo(self):
        return self.index[1], self.index[0], self.value

    def sparse_sizes(self):
        return self.sizes


@pytest.mark.parametrize("layer", OPTIONS)
def test_a_sparse_tensor_is_read_and_its_vectors_are_edge_features(layer):
    options = {"edge_dim": FEATURES}
    x, attr = make_inputs(GRAPHS["random"], options)
    index = GRAPHS["random"][0]
    net = make(layer, **options).double()
    given = SparseTensor(index, (40, 40), attr)
    torch.testing.assert_close(net(x, given), net(x, index, attr))
    out, (edges, weights) = net(x, given, return_attention_weights=True)
    assert edges.shape[1] == len(weights) and torch.equal(out, net(x, given))
    plain = make(layer).double()
    ones = SparseTensor(index, (40, 40), torch.ones(index.shape[1]))  # scalars are weights, which PyG drops
    torch.testing.assert_close(plain(x, ones), plain(x, index))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("layer", OPTIONS)
def test_a_layer_is_exported_with_a_graph_or_a_tensor(layer, strict):
    """Exporting with a tensor failed with a page of guards on unknown numbers."""
    index, nodes, _ = GRAPHS["random"]
    net, graph = make(layer).eval(), ab.Graph(index, num_nodes=nodes)

    class OnGraph(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            return self.net(x, graph)

    x = torch.randn(nodes, IN)
    want = net(x, graph)
    assert torch.equal(torch.export.export(OnGraph(), (x,), strict=strict).module()(x), want)
    program = torch.export.export(net, (x, index.clone()), strict=strict).module()
    for edges in (index, torch.randint(nodes, index.shape)):
        torch.testing.assert_close(program(x, edges), net(x, edges))


def test_graphs_and_neighbours_are_made_inside_a_compiled_function():
    """Their numbers are checked when it runs."""
    x = torch.randn(1, 2, 9, 4)
    for make_relation, index in (
        (lambda index: ab.Graph(index, num_nodes=9), torch.randint(9, (2, 30))),
        (ab.Neighbors, torch.randint(9, (9, 3))),
    ):

        def call(x, index, make_relation=make_relation):
            return ab.attention(x, x, x, make_relation(index))

        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x, index), call(x, index))
        with pytest.raises(ValueError, match=r"(got|is) 1[0-9]"):
            compiled(x, index + 8)


def bad_calls():
    x, graph = torch.ones(3, IN), torch.tensor([[0, 1], [1, 2]])
    attr = torch.ones(2, 3)
    every = tuple(OPTIONS)
    gats = ("GATConv", "GATv2Conv")
    yield every, {}, (x[0], graph), r"x: wanted \[N, 12\], got \[12\]"
    yield every, {}, (x[:, :5], graph), r"x: wanted \[N, 12\], got \[3, 5\]"
    yield every, {}, ((x, x[:, :5]), graph), r"x: wanted \[N, 12\], got \[3, 5\]"
    yield every, {}, (x.long(), graph), "x: wanted floating-point features, got torch.int64"
    yield every, {}, ((x, "x"), graph), "x: wanted floating-point features, got str"
    yield every, {}, ([x, x, x], graph), r"x: wanted a tensor \[N, F\] or a pair \(x_src, x_dst\), got list"
    yield (
        every,
        {},
        (x, [[0], [1]]),
        r"edge_index: wanted a tensor \[2, E\], a Graph, a Shard or a sparse matrix .*, got list",
    )
    yield every, {}, (x, graph.float()), "edge_index: wanted integers, got torch.float32"
    yield every, {}, (x, graph.T.repeat(2, 1)), r"edge_index: wanted shape \[2, E\], got \[4, 2\]"
    yield every, {}, (x, graph + 1), r"edge_index: size = \(3, 3\) but a target is 3"
    yield every, {}, (x, graph - 1), r"edge_index: size = \(3, 3\) but a source is -1"
    few = ab.Graph(graph, num_nodes=4)
    yield (
        every,
        {},
        (x, few),
        "edge_index: wanted 3 sources and 3 targets, as many as x has rows, got a graph of 4",
    )
    with_attr = {"edge_dim": 3}
    yield every, with_attr, (x, graph, attr[:1]), r"edge_attr: wanted \[E, edge_dim\] = \[2, edge_dim\], got"
    yield (
        every,
        with_attr,
        (x, graph, attr[:, :2]),
        r"edge_attr: wanted \[E, edge_dim\] = \[\d, 3\], got \[\d, 2\]",
    )
    yield (
        every,
        with_attr,
        (x, graph, attr.long()),
        "edge_attr: wanted a floating-point tensor .*, got torch.int64",
    )
    yield (
        every,
        with_attr,
        (x, graph, attr.to_sparse()),
        "edge_attr: wanted a dense tensor, got torch.sparse_coo",
    )
    nested = torch.nested.nested_tensor(list(x))
    yield every, {}, (nested, graph), "x: wanted a dense tensor, got a nested one"
    yield every[:1], with_attr, (x, graph), r"edge_attr: wanted \[E, edge_dim\] = \[E, 3\], got None"
    yield (
        ("TransformerConv", "GATv2Conv"),
        {},
        (x, graph, attr),
        r"edge_attr: wanted None because .* was made without edge_dim, got \[",
    )
    yield ("TransformerConv", "GATv2Conv"), {}, ((x, None), graph), r"x: wanted \(x_src, x_dst\), got"
    yield every, {"flow": "target_to_source"}, None, "flow: wanted 'source_to_target', .*edge_index.flip"
    yield every, {"aggr": "max"}, None, "aggr: wanted 'add', the only choice here, got 'max'"
    yield every, {"heads": 0}, None, "heads: wanted at least 1, got 0"
    yield every, {"heads": 2.0}, None, "heads: wanted an integer, got 2.0"
    yield every, {"edge_dim": "3"}, None, "edge_dim: wanted an integer, got '3'"
    yield every, {"dropout": "0.5"}, None, "dropout: wanted a fraction from 0 to 1, got '0.5'"
    yield every, {"dropout": 2.0}, None, "dropout: wanted a fraction from 0 to 1, got 2.0"
    yield every, {"droput": 0.5}, None, "droput: .*Conv has no such argument"
    yield (
        gats,
        {"fill_value": "median"},
        None,
        "fill_value: wanted a number, a tensor or one of 'add', .*'median'",
    )


@pytest.mark.parametrize("layer", OPTIONS)
@pytest.mark.parametrize(
    ("in_channels", "words"),
    [
        ((1, 2, 3), r"in_channels: wanted a number or a pair for \(sources, targets\), got \(1, 2, 3\)"),
        ("a", "in_channels: wanted an integer, got 'a'"),
        (-2, "in_channels: wanted at least -1, got -2"),
    ],
)
def test_bad_channels_raise_a_clear_error(layer, in_channels, words):
    with pytest.raises((TypeError, ValueError), match=f"^{words}$"):
        getattr(pyg, layer)(in_channels, 4)


@pytest.mark.parametrize(
    ("layer", "options", "arguments", "words"),
    [(layer, *rest) for layers, *rest in bad_calls() for layer in layers],
)
def test_bad_input_raises_a_clear_error(layer, options, arguments, words):
    with pytest.raises((TypeError, ValueError), match=f"^{words}"):
        make(layer, **options)(*arguments)
