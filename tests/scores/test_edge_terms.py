"""Edge biases and additive scores: every backend against message passing over the edge list."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import attnbias as ab
from attnbias.backends import cpu
from attnbias.testing import assert_no_worse, magnitudes

BACKENDS = ["reference", "rows", *(f"cpu {isa}" for isa in ([] if cpu.missing() else cpu.isas()))]
B, N, SOURCES = 2, 47, 61  # queries and keys
HUB = 5000  # edges of one target: more than one piece of a row


@pytest.fixture(params=BACKENDS)
def backend(request):
    name, _, isa = request.param.partition(" ")
    if isa:
        cpu.force_isa(isa)
    yield name
    if isa:
        cpu.force_isa(None)


def make_graph(count: int = 400, hub: int = 0) -> ab.Graph:
    """Draw random edges with duplicates, targets without any, and optionally a hub."""
    rng = torch.Generator().manual_seed(count)
    source = torch.randint(0, SOURCES, (count + hub,), generator=rng)
    target = torch.randint(0, N - 5, (count + hub,), generator=rng)
    target[:hub] = 7
    order = torch.randperm(count + hub, generator=rng)
    return ab.Graph(torch.stack([source, target])[:, order], size=(SOURCES, N))


def make_neighbors(batch: int, heads: int) -> ab.Neighbors:
    rng = torch.Generator().manual_seed(heads)
    return ab.Neighbors(torch.randint(-1, SOURCES, (batch, heads, N, 6), generator=rng))


def list_edges(relation: ab.Relation, heads: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return batch, head, query, key and number of every edge, for all batches and heads."""
    if isinstance(relation, ab.Graph):
        key, query = relation.edge_index
        number = torch.arange(len(key))
        b = torch.arange(B).repeat_interleave(heads * len(key))
        h = torch.arange(heads).repeat_interleave(len(key)).repeat(B)
        return b, h, *(x.repeat(B * heads) for x in (query, key, number))
    table = relation.index.expand(B, heads, -1, -1)
    numbers = torch.arange(relation.index.numel()).view(relation.index.shape).expand_as(table)
    b, h, query, n = torch.nonzero(table >= 0, as_tuple=True)
    return b, h, query, table[b, h, query, n], numbers[b, h, query, n]


def pass_messages(relation, query, key, value, bias, weight, options) -> tuple[Tensor, Tensor]:
    """Compute attention as graph libraries define it: a softmax over the edges of each target."""
    heads, share = query.shape[1], query.shape[1] // key.shape[1]
    b, h, i, j, number = list_edges(relation, heads)
    mine, other = query[b, h, i], key[b, h // share, j]
    if weight is None:
        scores = (mine * other).sum(-1) * options.get("scale", query.shape[3] ** -0.5)
    else:
        lifted = torch.nn.functional.leaky_relu(mine + other, 0.1)
        scores = (lifted * weight[h]).sum(-1) * options.get("scale", 1.0)
    if "softcap" in options:
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    if bias is not None:
        bias = bias[:, None] if bias.dim() == 1 else bias
        scores = scores + bias[number, h % bias.shape[1]]
    row = (b * heads + h) * N + i
    rows = B * heads * N
    top = scores.detach().new_full((rows,), -torch.inf).scatter_reduce(0, row, scores.detach(), "amax")
    top = top.masked_fill(top == -torch.inf, 0)
    total = scores.new_zeros(rows).index_add(0, row, torch.exp(scores - top[row]))
    lse = torch.where(total > 0, total, 1).log() + top
    probs = torch.exp(scores - lse[row])
    out = value.new_zeros(rows, value.shape[3]).index_add(0, row, probs[:, None] * value[b, h // share, j])
    lse = lse.masked_fill(total == 0, -torch.inf)
    return out.view(B, heads, N, -1), lse.view(B, heads, N)


def check(backend, relation, heads, key_heads, size, value_size, *, bias=None, additive=False, **options):
    dtype = options.pop("dtype", torch.float32)
    rng = torch.Generator().manual_seed(size)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng)

    by_node = options.pop("by_node", False)
    shapes = [(B, heads, N, size), (B, key_heads, SOURCES, size), (B, key_heads, SOURCES, value_size)]
    inputs = [leaf(*shape).to(dtype) for shape in shapes]
    if by_node:
        inputs = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    extras = [leaf(*bias) if bias else None, leaf(heads, size) if additive else None]
    d_out, d_lse = leaf(B, heads, N, value_size).to(dtype), leaf(B, heads, N)

    def results(run, wanted: torch.dtype) -> list[Tensor]:
        leaves = [x if x is None else x.detach().clone().to(wanted) for x in (*inputs, *extras)]
        if wanted == dtype:
            leaves[:3] = inputs
        leaves = [x if x is None else x.detach().requires_grad_() for x in leaves]
        out, lse = run(*leaves)
        finite = torch.where(lse.isfinite(), lse, 0)
        total = (out.double() * d_out.double()).sum() + (finite.double() * d_lse.double()).sum()
        return [out, lse, *torch.autograd.grad(total, [x for x in leaves if x is not None])]

    def ours(query, key, value, bias, weight):
        terms = [] if bias is None else [ab.EdgeBias(bias)]
        score = None if weight is None else ab.AdditiveScore(weight, 0.1)
        return ab.attention(
            query, key, value, relation, terms=terms, score=score, return_lse=True, backend=backend, **options
        )

    def textbook(*leaves):
        return pass_messages(relation, *leaves, options)

    got, same, oracle = results(ours, dtype), results(textbook, dtype), results(textbook, torch.float64)
    sizes = magnitudes(*inputs, d_out, d_lse, options.get("scale", size**-0.5), 0.0, 4.0)
    if additive:  # each product of the gradient contains a weight
        largest = max(1.0, float(extras[1].abs().max())) * size**0.5
        sizes = {name: x * largest for name, x in sizes.items()}
    names = ["out", "lse", "query", "key", "value", *(["bias"] if bias else []), *(["weight"] * additive)]
    empty = (oracle[1] == -torch.inf)[..., None]
    for name, x, eager, exact in zip(names, got, same, oracle, strict=True):
        magnitude = sizes.get(name, sizes["sink"] * len(list_edges(relation, heads)[0]) ** 0.5)
        where = empty if name in ("out", "query") else None
        factor = 2.0 if name in ("out", "lse") else 3.0
        assert_no_worse(name, x, eager, exact, factor, empty=where, magnitude=magnitude)


@pytest.mark.parametrize("bias", [(400,), (400, 8), (400, 1)], ids=str)
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0, "scale": -0.7}], ids=["plain", "softcap"])
def test_bias_of_a_graphs_edges(backend, bias, options):
    check(backend, make_graph(), 8, 8, 16, 16, bias=bias, **options)


def test_bias_of_neighbours(backend):
    check(backend, make_neighbors(1, 1), 4, 2, 8, 5, bias=(N * 6, 4))
    check(backend, make_neighbors(B, 4), 4, 2, 8, 5, bias=(B * 4 * N * 6,))


@pytest.mark.parametrize("heads, key_heads, size, value_size", [(8, 8, 1, 16), (6, 3, 1, 7), (4, 4, 1, 1)])
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 2.0, "scale": -0.7, "by_node": True}], ids=["", "softcap"]
)
def test_score_of_gat(backend, heads, key_heads, size, value_size, options):
    check(backend, make_graph(), heads, key_heads, size, value_size, additive=True, **options)


@pytest.mark.parametrize("heads, key_heads, size, value_size", [(8, 8, 16, 16), (4, 2, 37, 5), (2, 2, 8, 8)])
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0, "by_node": True}], ids=["", "softcap"])
def test_score_of_gatv2(backend, heads, key_heads, size, value_size, options):
    check(backend, make_graph(), heads, key_heads, size, value_size, additive=True, **options)


def test_additive_score_with_a_bias_on_neighbours_by_head(backend):
    check(backend, make_neighbors(B, 4), 4, 2, 1, 5, bias=(B * 4 * N * 6, 4), additive=True)
    check(backend, make_neighbors(B, 4), 4, 2, 6, 5, bias=(B * 4 * N * 6,), additive=True)


@pytest.mark.parametrize("size", [1, 8])
def test_hub(backend, size):
    check(backend, make_graph(300, HUB), 2, 2, size, 8, bias=(300 + HUB, 2), additive=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(backend, dtype):
    check(backend, make_graph(), 8, 8, 16, 16, bias=(400, 8), dtype=dtype)
    check(backend, make_graph(), 8, 8, 1, 16, additive=True, dtype=dtype)


def test_each_duplicate_edge_has_its_own_bias(backend):
    graph = ab.Graph([[0, 1, 1], [0, 0, 0]], num_nodes=2)
    q, k = torch.zeros(1, 2, 4), torch.zeros(1, 2, 4)
    v = torch.tensor([[[1.0], [0.0]]])
    bias = torch.tensor([0.0, 1.0, 2.0]).log1p().requires_grad_()  # weights 1, 2, 3
    out = ab.attention(q, k, v, graph, terms=[ab.EdgeBias(bias)], backend=backend)
    torch.testing.assert_close(out[0, :, 0], torch.tensor([1 / 6, 0.0]))
    weights = ab.edge_weights(q, k, graph, terms=[ab.EdgeBias(bias)])
    torch.testing.assert_close(weights[:, 0], torch.tensor([1 / 6, 2 / 6, 3 / 6]))
    out.sum().backward()
    torch.testing.assert_close(bias.grad, torch.tensor([5 / 36, -2 / 36, -3 / 36]))


@pytest.mark.parametrize("score", [-1e30, 0.0, 1e30])
@pytest.mark.parametrize("by_bias", [False, True])
def test_duplicate_edges_count_with_any_score(backend, score, by_bias):
    graph = ab.Graph([[0, 1, 1], [0, 0, 0]], num_nodes=2)
    q, k = torch.full((1, 2, 1), 1e15), torch.full((1, 2, 1), 0.0 if by_bias else score / 1e15)
    v = torch.tensor([[[1.0], [0.0]]])
    terms = [ab.EdgeBias(torch.full((3,), score))] if by_bias else []
    out = ab.attention(q, k, v, graph, terms=terms, backend=backend)
    torch.testing.assert_close(out[0, :, 0], torch.tensor([1 / 3, 0.0]))


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_nonfinite_bias_shows_in_its_row(backend, wrong):
    graph = make_graph()
    bias = torch.zeros(400)
    bias[5] = wrong
    row = int(graph.edge_index[1, 5])
    for heads, size in ((2, 4), (8, 16), (4, 32)):
        q, k, v = torch.randn(3, 1, heads, SOURCES, size)
        terms = [ab.EdgeBias(bias)]
        out, lse = ab.attention(q[:, :, :N], k, v, graph, terms=terms, return_lse=True, backend=backend)
        assert out[:, :, row].isnan().all() and out.isnan().sum() == heads * size
        is_wrong = lse.isnan() | (lse == torch.inf)
        assert is_wrong[:, :, row].all() and is_wrong.sum() == heads


def test_edges_dropped_by_an_intersection_get_no_gradient(backend):
    graph = make_graph() & ab.Window(before=5, after=5)
    q, k, v = torch.randn(3, 1, 2, SOURCES, 4)
    q = q[:, :, :N]
    bias = torch.randn(400, requires_grad=True)
    out = ab.attention(q, k, v, graph, terms=[ab.EdgeBias(bias)], backend=backend)
    (out * torch.randn_like(out)).sum().backward()
    source, target = (
        graph.parts[0].edge_index if isinstance(graph.parts[0], ab.Graph) else graph.parts[1].edge_index
    )
    far = (source - target).abs() > 5
    assert (bias.grad[far] == 0).all()
    assert (bias.grad[~far] != 0).any()


OTHERS = {
    "window": ab.Window(before=9, after=9),
    "not a graph": ~make_graph(200),
    "a function": ab.Where(lambda b, h, q, k: (q + k) % 3 != 0),
    "two graphs": make_graph(900) | make_graph(901),  # adds pairs that are listed without numbers
    "by head": ab.PerHead([ab.Window(before=9, after=9), make_graph(900) | make_graph(901)]),
}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("other", OTHERS)
def test_an_intersection_keeps_duplicate_edges(backend, other, first):
    """``graph & other`` dropped all but the first edge of a pair, its bias with it."""
    graph, other = make_graph(), OTHERS[other]
    graph = ab.Graph(graph.edge_index[:, torch.arange(400) // 2], size=(SOURCES, N))  # every edge twice
    both = graph & other if first else other & graph
    q, k, v = torch.randn(3, 1, 2, SOURCES, 4, generator=torch.Generator().manual_seed(0))
    q, bias = q[:, :, :N], torch.linspace(-2, 2, 400)
    weights = ab.edge_weights(q, k, both, terms=[ab.EdgeBias(bias)])
    source, target = graph.edge_index
    for head in (0, 1):
        kept = other.related(target, source, None, torch.tensor(head))
        rest = ab.Graph(graph.edge_index[:, kept], size=(SOURCES, N))
        here = slice(head, head + 1)
        for some, numbers in (([], []), ([ab.EdgeBias(bias)], [ab.EdgeBias(bias[kept])])):
            got = ab.attention(q, k, v, both, terms=some, return_lse=True, backend=backend)
            want = ab.attention(
                q[:, here], k[:, here], v[:, here], rest, terms=numbers, return_lse=True, backend="reference"
            )
            torch.testing.assert_close((got[0][:, here], got[1][:, here]), want)
        alone = ab.edge_weights(q[:, here], k[:, here], rest, terms=[ab.EdgeBias(bias[kept])])
        torch.testing.assert_close(weights[kept, head], alone[:, 0])
        assert not weights[~kept, head].any()


def test_an_intersection_of_neighbours_keeps_duplicates(backend):
    """So did ``neighbors & other``; and a shifted one counted differently on each backend."""
    near = ab.Neighbors(torch.tensor([[0, 0, 1], [1, 1, 3], [2, 0, 2], [3, 3, 3]]))
    q, k, v = torch.randn(3, 1, 2, 8, 4, generator=torch.Generator().manual_seed(0))
    q = q[:, :, :4]
    earlier = ab.Where(lambda b, h, q, k: k <= q)
    for relation, first in (
        (near & ab.Causal(), 0),
        ((near & ab.Causal()).shift(2), 2),
        ((earlier & ab.PerHead([near, ab.Full() & near])).shift(2), 2),
        ((earlier & ab.PerHead([near, near]) & ab.Full()).shift(1).shift(1), 2),
    ):
        keys = torch.tensor([0, 0, 1, 1, 2, 0, 2, 3, 3, 3]) + first  # the keys not after the query
        listed = ab.Graph([keys, torch.tensor([0, 0, 1, 1, 2, 2, 2, 3, 3, 3])], size=(8, 4))
        want = ab.attention(q, k, v, listed, backend="reference")
        torch.testing.assert_close(ab.attention(q, k, v, relation, backend=backend), want)


def test_an_intersection_of_wide_heads_keeps_duplicates():
    """Wide heads go to tiles, which cannot hold duplicates, unless the relation is a graph."""
    graph = ab.Graph([[0, 1, 1], [1, 1, 1]], num_nodes=2)
    q, k, v = torch.randn(3, 1, 1, 2, 257)
    out = ab.attention(q, k, v, graph & ab.Causal())
    torch.testing.assert_close(out, ab.attention(q, k, v, graph, backend="reference"))


def test_bias_with_two_lists_of_duplicates_raises():
    """If two lists each repeat a pair, its edges have no unique numbers."""
    graph = make_graph()
    q, k, v = torch.randn(3, 1, 2, SOURCES, 4)
    both = graph & ab.PerHead([make_graph(900), ab.Full()])
    with pytest.raises(ValueError, match=r"^terms: EdgeBias: wanted one Graph or Neighbors & "):
        ab.attention(q[:, :, :N], k, v, both, terms=[ab.EdgeBias(torch.zeros(400))])


def test_minus_infinity_removes_an_edge(backend):
    graph = make_graph()
    bias = torch.zeros(400)
    bias[::2] = -torch.inf
    bias[graph.edge_index[1] == 3] = -torch.inf
    q, k, v = torch.randn(3, 1, 2, SOURCES, 4).requires_grad_()
    out, lse = ab.attention(
        q[:, :, :N], k, v, graph, terms=[ab.EdgeBias(bias)], return_lse=True, backend=backend
    )
    rest = ab.Graph(graph.edge_index[:, bias == 0], size=(SOURCES, N))
    torch.testing.assert_close(out, ab.attention(q[:, :, :N], k, v, rest, backend="reference"))
    assert (out[:, :, 3] == 0).all()
    assert (lse[:, :, 3] == -torch.inf).all()
    assert torch.autograd.grad(out.sum(), q)[0].isfinite().all()


@pytest.mark.skipif(bool(cpu.missing()), reason=str(cpu.missing()))
@pytest.mark.parametrize("additive", [False, True])
def test_bits_do_not_depend_on_threads(additive):
    graph, heads = make_graph(3000, HUB), 8
    rng = torch.Generator().manual_seed(0)
    leaves = [torch.randn(B, heads, n, 1, generator=rng) for n in (N, SOURCES)]
    leaves += [torch.randn(B, heads, SOURCES, 16, generator=rng), torch.randn(3000 + HUB, 1, generator=rng)]
    leaves += [torch.randn(heads, 1, generator=rng)]
    found = []
    before = torch.get_num_threads()
    for threads in (1, 8):
        torch.set_num_threads(threads)
        q, k, v, bias, weight = (x.detach().requires_grad_() for x in leaves)
        score = ab.AdditiveScore(weight) if additive else None
        out = ab.attention(q, k, v, graph, terms=[ab.EdgeBias(bias)], score=score, backend="cpu")
        wanted = [q, k, v, bias, *([weight] if additive else [])]
        found.append([out, *torch.autograd.grad(out.square().sum(), wanted)])
    torch.set_num_threads(before)
    for x, y in zip(*found, strict=True):
        assert torch.equal(x, y)


def test_no_edges_and_no_nodes(backend):
    for count in (0, 4):
        graph = ab.Graph(torch.zeros(2, 0, dtype=torch.int64), num_nodes=count)
        x = torch.randn(1, 2, count, 3, requires_grad=True)
        weight = torch.ones(2, 3, requires_grad=True)
        bias = torch.zeros(0, 2, requires_grad=True)
        out = ab.attention(
            x, x, x, graph, terms=[ab.EdgeBias(bias)], score=ab.AdditiveScore(weight), backend=backend
        )
        assert (out == 0).all()
        grads = torch.autograd.grad(out.sum(), [x, bias, weight])
        assert all((grad == 0).all() for grad in grads)


def test_layout_of_edges_is_accepted(backend):
    graph = make_graph()
    q, k, v = torch.randn(3, 1, 2, SOURCES, 4)
    q, bias = q[:, :, :N], torch.randn(400, 2)
    layout = graph.layout(N, SOURCES, form="edges")
    options = {"terms": [ab.EdgeBias(bias)], "score": ab.AdditiveScore(), "backend": backend}
    wanted = ab.attention(q, k, v, graph, **options)
    torch.testing.assert_close(ab.attention(q, k, v, layout, **options), wanted)


GRAPH = make_graph()


@pytest.mark.parametrize(
    "relation, options, words",
    [
        (
            GRAPH,
            {"terms": [ab.EdgeBias(torch.zeros(399))]},
            "EdgeBias.bias: wanted 400 numbers, one per edge, got 399",
        ),
        (
            GRAPH,
            {"terms": [ab.EdgeBias(torch.zeros(400, 3))]},
            r"EdgeBias.bias: wanted \[E\] or \[E, H\] = \[E, 2\]",
        ),
        (
            GRAPH | ab.Causal(),
            {"terms": [ab.EdgeBias(torch.zeros(400))]},
            "terms: EdgeBias: wanted a Graph or Neigh",
        ),
        (
            ~GRAPH,
            {"terms": [ab.EdgeBias(torch.zeros(400))]},
            "terms: EdgeBias: wanted a Graph or Neighbors, by itself",
        ),
        (
            ab.Causal().layout(N, SOURCES),
            {"terms": [ab.EdgeBias(torch.zeros(400))]},
            "terms: EdgeBias wants a layout with edges only; build it with form='edges'",
        ),
        (
            GRAPH.layout(N, SOURCES, form="edges"),
            {"terms": [ab.EdgeBias(torch.zeros(9))]},
            "this layout names edges up to 399, got 9 numbers",
        ),
        (
            ab.Causal().layout(N, SOURCES),
            {"score": ab.AdditiveScore()},
            "score: AdditiveScore wants a layout with edges only; build it with form='edges'",
        ),
        (
            GRAPH,
            {"score": ab.AdditiveScore(torch.zeros(2, 3))},
            r"AdditiveScore.weight: wanted .* \[2, 4\], got \[2, 3\]",
        ),
        (
            GRAPH,
            {"score": ab.AdditiveScore(None, float("nan"))},
            "negative_slope: wanted a finite number, got nan",
        ),
        (
            GRAPH,
            {"score": ab.AdditiveScore(torch.zeros(2, 4, device="meta"))},
            "AdditiveScore.weight: wanted the query's device, cpu, got meta",
        ),
    ],
)
def test_bad_input_raises_a_clear_error(relation, options, words):
    q, k, v = torch.zeros(3, 1, 2, SOURCES, 4)
    with pytest.raises(ValueError, match=words):
        ab.attention(q[:, :, :N], k, v, relation, **options)


def test_weight_of_another_type():
    q, k, v = torch.zeros(3, 1, 2, SOURCES, 4)
    for weight, got in ((3, "int 3"), (torch.zeros(2, 4, dtype=torch.int64), "torch.int64")):
        with pytest.raises(TypeError, match=f"AdditiveScore.weight: wanted a floating-point .* got {got}"):
            ab.attention(q[:, :, :N], k, v, GRAPH, score=ab.AdditiveScore(weight))


def test_levels_with_an_edge_bias_run_on_the_reference():
    """Kernels support levels on tiles and biases on edges; only the reference has both."""
    q, k, v = torch.randn(3, 1, 2, SOURCES, 4)
    given = {"score": ab.MultiLevel([2, 2]), "terms": [ab.EdgeBias(torch.randn(400))]}
    words = "score: a MultiLevel is computed on tiles, the numbers of an EdgeBias on edges"
    for name in ("rows", "cpu"):
        assert words in ab.explain(q[:, :, :N], k, v, GRAPH, **given).others[name]
    out = ab.attention(q[:, :, :N], k, v, GRAPH, **given)
    assert torch.equal(out, ab.attention(q[:, :, :N], k, v, GRAPH, backend="reference", **given))
    layout = ab.Causal().layout(N, SOURCES, score=given["score"])
    with pytest.raises(ValueError, match="terms: EdgeBias wants a layout with edges only"):
        ab.attention(q[:, :, :N], k, v, layout, **given)
