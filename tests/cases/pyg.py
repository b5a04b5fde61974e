"""Graphs and options for comparing the layers of ``attnbias.integrations.pyg`` with PyG's."""

import torch

from attnbias.benchmarks.cases import stored

IN, OUT, HEADS, FEATURES = 12, 5, 3, 4
REAL = stored.NAMES


def draw(seed):
    return torch.Generator().manual_seed(seed)


def random_graph(sources, targets, edges, seed=0):
    """Draw an asymmetric graph with duplicates, self-loops and isolated nodes."""
    rng = draw(seed)
    index = torch.stack([torch.randint(n - 3, (edges,), generator=rng) for n in (sources, targets)])
    index[:, :6] = index[:, 6:12]  # twice
    index[:, 12:15] = index[:, 6:9]  # and three times
    index[1, 15:20] = index[0, 15:20] = torch.arange(5)
    return index, sources, targets


def star(nodes):
    """Make two hubs: a target of all nodes, and a source of all nodes."""
    others = torch.arange(1, nodes)
    zero = torch.zeros_like(others)
    return torch.stack([torch.cat([others, zero + 1]), torch.cat([zero, others])]), nodes, nodes


def no_edges(nodes):
    return torch.zeros(2, 0, dtype=torch.int64), nodes, nodes


GRAPHS = {
    "random": random_graph(40, 40, 160),
    "to fewer": random_graph(43, 21, 130, 1),
    "to more": random_graph(17, 50, 130, 2),
    "hubs": star(300),
    "only loops": (torch.arange(7).expand(2, -1).contiguous(), 7, 7),
    "no edges": no_edges(6),
    "one node": no_edges(1),
}
PLAIN = ({}, {"edge_dim": FEATURES})
OPTIONS = {
    "TransformerConv": (
        *PLAIN,
        {"concat": False},
        {"beta": True},
        {"beta": True, "concat": False, "edge_dim": FEATURES},
        {"bias": False, "edge_dim": FEATURES},
        {"root_weight": False, "beta": True},
    ),
    "GATConv": (
        *PLAIN,
        {"concat": False, "residual": True},
        {"negative_slope": 0.0, "bias": False},
        {"add_self_loops": False, "edge_dim": FEATURES},
        {"add_self_loops": False},
        *({"edge_dim": FEATURES, "fill_value": fill} for fill in ("add", "min", "max", "mul", 0.5)),
        {"edge_dim": FEATURES, "fill_value": torch.linspace(-1, 1, FEATURES), "residual": True},
    ),
    "GATv2Conv": (
        *PLAIN,
        {"concat": False, "residual": True},
        {"share_weights": True},
        {"share_weights": True, "edge_dim": FEATURES, "bias": False},
        {"add_self_loops": False, "negative_slope": 0.7},
        {"add_self_loops": False, "edge_dim": FEATURES},
        {"edge_dim": FEATURES, "fill_value": "max"},
        {"edge_dim": FEATURES, "fill_value": -2},
    ),
}


def real_graph(name):
    """Return a real graph from the package or from the folder named by ATTNBIAS_GRAPHS, or None."""
    try:
        graph = stored.load(name)
    except stored.MissingGraphError:
        return None
    return torch.from_numpy(graph.edge_index), graph.num_nodes, graph.num_nodes


def make_inputs(graph, options, dtype=torch.float64, seed=5):
    """Return x (a pair if there are two kinds of nodes) and edge_attr or None, as leaves."""
    index, sources, targets = graph
    rng = draw(seed)
    x = [torch.randn(n, IN, generator=rng, dtype=torch.float64) for n in (sources, targets)]
    x = [part.to(dtype).requires_grad_() for part in (x if sources != targets else x[:1])]
    attr = None
    if "edge_dim" in options:
        attr = torch.randn(index.shape[1], FEATURES, generator=rng, dtype=torch.float64)
        attr = attr.to(dtype).requires_grad_()
    return (x[0] if len(x) == 1 else tuple(x)), attr


def run(layer, graph, options, dtype, index=None):
    """Return the result, weights and all gradients by name, in one precision."""
    layer = layer.to(dtype)
    x, attr = make_inputs(graph, options, dtype)
    index = graph[0] if index is None else index
    out, (_, weights) = layer(x, index, edge_attr=attr, return_attention_weights=True)
    rng = draw(9)
    loss = sum(
        (y * torch.randn(y.shape, generator=rng, dtype=torch.float64).to(dtype)).sum() for y in (out, weights)
    )
    leaves = {f"x{i}": part for i, part in enumerate(x if isinstance(x, tuple) else (x,))}
    leaves |= {} if attr is None else {"edge_attr": attr}
    leaves |= dict(layer.named_parameters())
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    found = {"out": out.detach(), "weights": weights.detach()}
    for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
        found[name] = torch.zeros_like(leaf) if grad is None else grad
    return found
