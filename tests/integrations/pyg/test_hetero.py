"""The layers under PyG's heterogeneous models, hooks and explainers give PyG's numbers."""

import pytest
import torch
from cases.pyg import FEATURES, GRAPHS, HEADS, IN, OPTIONS, OUT, make_inputs

from attnbias.integrations import pyg as ours

geometric = pytest.importorskip("torch_geometric", reason="PyG is not installed: nothing to compare with")
theirs = pytest.importorskip("torch_geometric.nn")
explain = pytest.importorskip("torch_geometric.explain")

NODES = {"paper": (23, 9), "author": (14, 6)}  # number of nodes, features of each
CITES, WRITES, WRITTEN = ("paper", "cites", "paper"), ("author", "writes", "paper"), ("paper", "by", "author")
METADATA = list(NODES), [CITES, WRITES, WRITTEN]


def options_of(layer, edge_dim):
    """Return options without self-loops, which PyG refuses between two kinds of nodes."""
    loops = {} if layer == "TransformerConv" else {"add_self_loops": False}
    return {**loops, "heads": HEADS, "edge_dim": edge_dim}


class Net(torch.nn.Module):
    """Two layers, whose sizes are inferred in the first call."""

    def __init__(self, module, layer, edge_dim):
        super().__init__()
        make, options = getattr(module, layer), options_of(layer, edge_dim)
        self.first = make((-1, -1), OUT, **options)
        self.second = make((-1, -1), OUT, **options)

    def forward(self, x, edge_index, edge_attr):
        return self.second(self.first(x, edge_index, edge_attr).relu(), edge_index, edge_attr)


class PlainNet(Net):
    """The same without edge features."""

    def forward(self, x, edge_index):
        return self.second(self.first(x, edge_index).relu(), edge_index)


def draw_data(edge_dim, dtype=torch.float64):
    """Draw features by node type, edges and their features by edge type; ragged, with duplicates."""
    rng = torch.Generator().manual_seed(3)
    x = {kind: torch.randn(n, size, generator=rng, dtype=dtype) for kind, (n, size) in NODES.items()}
    index = {}
    for edge_type, count in zip(METADATA[1], (60, 31, 17), strict=True):
        ends = [NODES[edge_type[i]][0] - 2 for i in (0, 2)]  # the last nodes have no edge
        index[edge_type] = torch.stack([torch.randint(n, (count,), generator=rng) for n in ends])
        index[edge_type][:, :3] = index[edge_type][:, 3:6]
    attr = {
        edge_type: torch.randn(each.shape[1], FEATURES, generator=rng, dtype=dtype)
        for edge_type, each in index.items()
    }
    return (x, index) if edge_dim is None else (x, index, attr)


def compare(peer, mine, edge_dim):
    """Compare results and gradients of all parameters, with the peer's parameters in both."""
    for made in (peer, mine):
        made(*draw_data(edge_dim, torch.float32))  # infers the sizes
    mine.load_state_dict(peer.state_dict())
    found = []
    for made in (peer.double(), mine.double()):
        out = made(*draw_data(edge_dim))
        loss = sum((y * torch.arange(y.numel()).view_as(y).cos()).sum() for y in out.values())
        grads = torch.autograd.grad(loss, list(made.parameters()), allow_unused=True)
        found.append((out, dict(zip(dict(made.named_parameters()), grads, strict=True))))
    assert set(found[0][0]) == set(NODES)
    torch.testing.assert_close(found[1][0], found[0][0])
    for name, want in found[0][1].items():
        got = found[1][1][name]
        # A single edge has weight 1 and gradient 0, so PyG may leave the parameter out.
        torch.testing.assert_close(*(0 if x is None else x for x in (got, want)), msg=name)


@pytest.mark.parametrize("edge_dim", [None, FEATURES])
@pytest.mark.parametrize("layer", OPTIONS)
@pytest.mark.parametrize("aggr", ["sum", "max"])
def test_to_hetero_gives_pygs_numbers(layer, edge_dim, aggr):
    """PyG took the layers for functions of one edge type, and ran them on the wrong kind of nodes."""
    kind = PlainNet if edge_dim is None else Net
    made = [theirs.to_hetero(kind(module, layer, edge_dim), METADATA, aggr) for module in (theirs, ours)]
    compare(*made, edge_dim)


@pytest.mark.parametrize("edge_dim", [None, FEATURES])
@pytest.mark.parametrize("layer", OPTIONS)
def test_hetero_conv_gives_pygs_numbers(layer, edge_dim):
    def make(module):
        each = {
            edge_type: getattr(module, layer)((-1, -1), OUT, **options_of(layer, edge_dim))
            for edge_type in METADATA[1]
        }
        return theirs.HeteroConv(each, aggr="mean")

    compare(make(theirs), make(ours), edge_dim)


@pytest.mark.parametrize("layer", ["GATConv", "GATv2Conv"])
def test_self_loops_between_two_kinds_of_nodes_are_refused_as_in_pyg(layer):
    for module in (theirs, ours):
        with pytest.raises(ValueError, match="'add_self_loops' attribute set to 'True'"):
            theirs.HeteroConv({WRITES: getattr(module, layer)((-1, -1), OUT)})


@pytest.mark.parametrize("layer", OPTIONS)
def test_bases_are_refused_as_in_pyg(layer):
    """PyG counts messages in the head dimension, so its own attention layers have no bases either."""
    for module in (theirs, ours):
        net = theirs.to_hetero_with_bases(PlainNet(module, layer, None), METADATA, 2, {"x": IN})
        with pytest.raises(ValueError, match=r"Number of messages .* does not match"):
            net(*draw_data(None, torch.float32))


# -- hooks and explanations ---------------------------------------------------------------------------


def make_pair(layer, edge_dim=None, seed=0):
    """Return PyG's layer and ours with the same parameters, in float64."""
    torch.manual_seed(seed)
    made = [
        getattr(module, layer)(IN, OUT, heads=HEADS, edge_dim=edge_dim).double() for module in (theirs, ours)
    ]
    made[1].load_state_dict(made[0].state_dict())
    return made


@pytest.mark.parametrize("edge_dim", [None, FEATURES])
@pytest.mark.parametrize("layer", OPTIONS)
def test_hooks_see_pygs_messages(layer, edge_dim):
    """Hooks on messages never ran; now each of PyG's steps runs as soon as a hook is attached."""
    x, attr = make_inputs(GRAPHS["random"], {} if edge_dim is None else {"edge_dim": edge_dim})
    found = []
    for made in make_pair(layer, edge_dim):
        seen = []

        def halve(layer, given, message, seen=seen):
            seen.append(message.detach())
            return message * torch.arange(len(message))[:, None, None].cos()

        handles = [
            made.register_message_forward_hook(halve),
            made.register_aggregate_forward_pre_hook(lambda layer, given: None),
            made.register_propagate_forward_hook(lambda layer, given, out: out + 1),
        ]
        out = made(x, GRAPHS["random"][0], attr)
        for handle in handles:
            handle.remove()
        found.append((out, *seen, made(x, GRAPHS["random"][0], attr)))
    torch.testing.assert_close(found[1], found[0])
    assert not torch.equal(found[0][0], found[0][2])


@pytest.mark.parametrize("layer", ["GATConv", "GATv2Conv"])
def test_a_hook_that_would_never_run_is_refused(layer):
    _, mine = make_pair(layer)
    for attach in (mine.register_edge_update_forward_hook, mine.register_edge_update_forward_pre_hook):
        with pytest.raises(
            NotImplementedError, match=r"^hook: GATv?2?Conv has no step edge_update; hook the mess"
        ):
            attach(print)


@pytest.mark.parametrize("layer", OPTIONS)
def test_a_subclass_may_change_a_step(layer):
    """A method of PyG that a subclass overrode was never called."""
    x, _ = make_inputs(GRAPHS["random"], {})
    found = []
    for made in make_pair(layer):

        class Own(type(made)):
            def update(self, inputs):
                return 2 * inputs

        Own.__name__ = f"{type(made).__module__}_{layer}"  # PyG caches by name
        own = Own(IN, OUT, heads=HEADS).double()
        own.load_state_dict(made.state_dict())
        found.append(own(x, GRAPHS["random"][0]))
    torch.testing.assert_close(found[1], found[0])


class Classifier(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, edge_index):
        return self.layer(x, edge_index)


@pytest.mark.parametrize("algorithm", ["GNNExplainer", "AttentionExplainer"])
@pytest.mark.parametrize("layer", OPTIONS)
def test_explanations_equal_pygs(layer, algorithm):
    """An explainer's edge mask was ignored, so the output did not depend on it."""
    x, _ = make_inputs(GRAPHS["random"], {})
    found = []
    for made in make_pair(layer):
        options = {"epochs": 5} if algorithm == "GNNExplainer" else {}
        explainer = explain.Explainer(
            Classifier(made),
            getattr(explain, algorithm)(**options),
            explanation_type="model",
            node_mask_type="attributes" if options else None,
            edge_mask_type="object",
            model_config={"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"},
        )
        torch.manual_seed(8)
        explanation = explainer(x.detach(), GRAPHS["random"][0], index=7)
        found.append(explanation.edge_mask)
    torch.testing.assert_close(found[1], found[0])
    assert found[0].any()


@pytest.mark.parametrize("layer", OPTIONS)
def test_pygs_utilities_accept_the_layers(layer):
    x, _ = make_inputs(GRAPHS["random"], {})
    peer, mine = (Classifier(made) for made in make_pair(layer))
    assert geometric.utils.get_num_hops(mine) == 1
    got, want = (geometric.utils.get_embeddings(made, x, GRAPHS["random"][0]) for made in (mine, peer))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("layer", OPTIONS)
def test_scripting_raises_a_clear_error(layer):
    """TorchScript stopped at the first line that it could not compile."""
    with pytest.raises(
        NotImplementedError, match=f"^{layer}: TorchScript is not supported; use torch.compile"
    ):
        torch.jit.script(make_pair(layer)[1])
