"""Edge biases and additive scores for tests of the kernels: relations, calls and expected results."""

import torch

import attnbias as ab
from attnbias.testing import assert_no_worse, magnitudes, make_inputs


def graph(Q=9, K=11, count=40, hub=0):
    """Draw edges in no order, some twice; some rows and keys have none; ``hub`` more lead to row 2."""
    rng = torch.Generator().manual_seed(2)
    ends = torch.stack(
        (torch.randint(0, K - 2, (count,), generator=rng), torch.randint(0, Q - 2, (count,), generator=rng))
    )
    many = torch.stack((torch.randint(0, K - 2, (hub,), generator=rng), torch.full((hub,), 2)))
    return ab.Graph(torch.cat((ends, ends[:, :7], many), 1), size=(K, Q))


def neighbours(B, H, Q=9, K=11):
    return ab.Neighbors(torch.randint(-1, K, (B, H, Q, 4), generator=torch.Generator().manual_seed(3)))


def check(relation, sizes, *, edge_bias=0, weight=None, dtype=torch.float32, terms=(), slope=0.2, **options):
    """Compare results and all gradients, bias and weight included, with the reference in float64.

    Args:
        relation: fits the queries and keys of the sizes.
        sizes: B, H, Hk, Q, K, D, E.
        edge_bias: 0 for none, 1 for [edges], 2 for [edges, H], -1 for [edges, 1].
        weight: None for the dot product, False or True for an additive score without or with a weight.
        dtype: dtype of the inputs.
        terms: functions that make further terms from a leaf, with the leaf's shape.
        slope: slope of an additive score.
        **options: options of attention.
    """
    B, H, _, Q, _, D, E = sizes
    inputs = make_inputs(1, *sizes, dtype)
    rng = torch.Generator().manual_seed(1)
    count = relation.edge_index.shape[1] if isinstance(relation, ab.Graph) else relation.index.numel()
    shapes = {0: [], 1: [(count,)], 2: [(count, H)], -1: [(count, 1)]}[edge_bias]
    shapes += [(H, D)] * bool(weight) + [shape for _, shape in terms]
    leaves = [torch.randn(shape, generator=rng).to(dtype) for shape in shapes]
    d_out, d_lse = torch.randn(B, H, Q, E, generator=rng).to(dtype), torch.randn(B, H, Q, generator=rng)

    def results(backend, precision):
        made = [x.detach().to(precision).requires_grad_() for x in (*inputs, *leaves)]
        rest = list(made[3:])
        given = [ab.EdgeBias(rest.pop(0))] if edge_bias else []
        score = None if weight is None else ab.AdditiveScore(rest.pop(0) if weight else None, slope)
        given += [make(leaf) for (make, _), leaf in zip(terms, rest, strict=True)]
        torch.manual_seed(5)
        out, lse = ab.attention(
            *made[:3], relation, terms=given, score=score, return_lse=True, backend=backend, **options
        )
        exists = lse.isfinite()
        loss = (out * d_out.to(out.dtype)).sum() + (lse[exists] * d_lse.to(lse.dtype)[exists]).sum()
        return [out, lse, *torch.autograd.grad(loss, made)]

    got, same = results("triton", dtype), results("reference", dtype)
    truth = results("reference", torch.float64)
    scale = options.get("scale", D**-0.5 if weight is None else 1.0)
    sizes = magnitudes(*inputs, d_out, d_lse, scale, options.get("dropout_p", 0.0), 8.0, truth[0])
    names = ("out", "lse", "query", "key", "value", *(f"leaf {i}" for i in range(len(leaves))))
    for name, mine, theirs, exact in zip(names, got, same, truth, strict=True):
        factor = 2.0 if name in ("out", "lse") else 3.0
        assert_no_worse(name, mine, theirs, exact, factor, magnitude=sizes.get(name, sizes["sink"]))
    return got


SHAPE = (2, 4, 2, 9, 11, 8, 16)


CASES = {
    "bias": (graph(), SHAPE, {"edge_bias": 1}),
    "bias by head": (graph(), SHAPE, {"edge_bias": 2, "softcap": 2.0}),
    "bias for all heads": (graph(), SHAPE, {"edge_bias": -1, "sink": torch.linspace(-1, 1, 4)}),
    "bias of neighbours": (neighbours(2, 4), SHAPE, {"edge_bias": 2}),
    "bias and distance": (graph(), SHAPE, {"edge_bias": 2, "terms": [(ab.ALiBi, (4,))], "dropout_p": 0.3}),
    "bias of half precision": (graph(), (1, 2, 2, 9, 11, 16, 16), {"edge_bias": 2, "dtype": torch.float16}),
    "GAT": (graph(), (1, 4, 4, 9, 11, 1, 8), {"weight": False}),
    "GATv2": (graph(), SHAPE, {"weight": True}),
    "GATv2 of neighbours": (neighbours(1, 2), (2, 2, 1, 9, 11, 5, 3), {"weight": True, "scale": -0.5}),
    "GATv2, steep below zero": (
        graph(),
        (1, 2, 2, 9, 11, 3, 4),
        {"weight": True, "slope": 2.0, "softcap": 1.5},
    ),
    "GATv2 and all else": (
        graph(hub=270),
        (1, 2, 1, 9, 11, 8, 8),
        {"weight": True, "edge_bias": 2, "dropout_p": 0.4, "sink": torch.tensor([0.5, -1.0]), "softcap": 3.0},
    ),
    "GATv2 of half precision": (graph(), (1, 2, 2, 9, 11, 16, 16), {"weight": True, "dtype": torch.float16}),
    "no edges": (ab.Graph(torch.zeros(2, 0, dtype=torch.int64), num_nodes=5), (1, 2, 2, 5, 5, 4, 4), {}),
}
