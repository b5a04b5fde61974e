"""Layers against their definitions, a few lines each, written out here."""

import copy

import pytest
import torch
from torch import nn

import attnbias as ab
from attnbias.nn import (
    Block,
    EncoderDecoderAttention,
    GraphAttention,
    MaskedAttention,
    MultiheadAttention,
    RelationalAttention,
    Rotary,
    SelfAttention,
    SparseAttention,
    StridedAttention,
)
from attnbias.testing import assert_no_worse

D = 12
ADJACENCY = torch.tensor([[0, 1, 0, 1], [1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 1, 0]])  # row = query


def appendix(x, memory, allowed, layer):
    """Compute one head as in the paper's appendix: every pair, with -1e9 where attention is not allowed."""
    query, key, value = x @ layer.query.weight.T, memory @ layer.key.weight.T, memory @ layer.value.weight.T
    scores = query @ key.mT / x.shape[-1] ** 0.5
    weights = torch.softmax(scores.masked_fill(~allowed, -1e9), dim=-1)
    return weights @ value, weights


def masked(n):
    return torch.tril(torch.ones(n, n, dtype=torch.bool))


def strided(n, stride):
    """Return the mask of the appendix's ``stride``: a token keeps itself and stride - 1 before it."""
    return torch.tensor([[0 <= i - j < stride for j in range(n)] for i in range(n)])


def compare(layer, allowed, *tokens, batch=(), **options):
    """Compare result, weights and the gradients of all parameters with the appendix in both precisions."""
    torch.manual_seed(len(tokens))
    n, m = allowed.shape
    inputs = [torch.randn(*batch, n, D), torch.randn(*batch, m, D)][: 2 if tokens else 1]
    wide = copy.deepcopy(layer).double()
    h, weights = layer(*inputs, **options, return_weights=True)
    assert torch.equal(layer(*inputs, **options), h)
    grad = torch.randn_like(h)
    results = {}
    for name, like, dtype in (("eager", layer, torch.float32), ("oracle", wide, torch.float64)):
        given = [x.to(dtype) for x in inputs]
        out, seen = appendix(given[0], given[-1], allowed, like)
        results[name] = out, seen, torch.autograd.grad(out, list(like.parameters()), grad.to(dtype))
    assert_no_worse("h", h, results["eager"][0], results["oracle"][0])
    assert_no_worse("weights", weights, results["eager"][1], results["oracle"][1])
    got = torch.autograd.grad(h, list(layer.parameters()), grad)
    for mine, eager, truth in zip(got, results["eager"][2], results["oracle"][2], strict=True):
        assert_no_worse("gradient", mine, eager, truth, 3)


@pytest.mark.parametrize("n", [1, 2, 9, 65])
@pytest.mark.parametrize("batch", [(), (3,)])
class TestAppendix:
    """With one head, each mechanism equals the appendix's code."""

    def test_self(self, n, batch):
        compare(SelfAttention(D), torch.ones(n, n, dtype=torch.bool), batch=batch)

    def test_masked(self, n, batch):
        compare(MaskedAttention(D), masked(n), batch=batch)

    @pytest.mark.parametrize("stride", [1, 3])
    def test_strided(self, n, batch, stride):
        compare(StridedAttention(D, p=stride - 1), strided(n, stride), batch=batch)

    def test_encoder_decoder(self, n, batch):
        compare(EncoderDecoderAttention(D), torch.ones(n, 5, dtype=torch.bool), "memory", batch=batch)

    def test_sparse(self, n, batch):
        allowed = torch.tensor([[(i + j) % 3 == 0 or i == j for j in range(n)] for i in range(n)])
        compare(SparseAttention(D, ab.Dense(allowed)), allowed, batch=batch)


@pytest.mark.parametrize("batch", [(), (3,)])
def test_graph_attention_equals_the_appendix(batch):
    target, source = ADJACENCY.nonzero().T
    for graph in (ab.Graph(torch.stack((source, target)), num_nodes=4), ab.Dense(ADJACENCY != 0)):
        compare(GraphAttention(D), ADJACENCY != 0, batch=batch, relation=graph)


def test_a_strided_layer_counts_the_previous_tokens():
    """Definition 8: p previous tokens and itself, where the appendix's stride counts all of them."""
    weights = StridedAttention(D, p=3)(torch.randn(10, D), return_weights=True)[1]
    assert (weights[-1] > 0).tolist() == [False] * 6 + [True] * 4


def test_a_node_without_neighbours_gets_zeros():
    lonely = ab.Graph([[0, 1], [1, 0]], num_nodes=3)
    h, weights = GraphAttention(D)(torch.randn(3, D), lonely, return_weights=True)
    assert not h[2].any() and not weights[2].any()
    assert torch.equal(weights.sum(-1) > 0.5, torch.tensor([True, True, False]))


def test_layer_with_its_own_graph_and_an_edge_bias():
    graph = ab.Graph([[0, 1, 2, 0], [1, 0, 1, 2]], num_nodes=3)
    layer, x = GraphAttention(D, relation=graph), torch.randn(3, D)
    assert torch.equal(layer(x), layer(x, graph))
    bias = torch.tensor([0.0, 0.0, -torch.inf, 0.0])
    less = ab.Graph(graph.edge_index[:, bias == 0], num_nodes=3)
    torch.testing.assert_close(layer(x, terms=[ab.EdgeBias(bias)]), layer(x, less))


def test_heads_of_full_width_joined_by_a_layer():
    """The paper's multi-head form: each head is as wide as the model, then a linear layer joins them."""
    layer = RelationalAttention(D, heads=3, relation=ab.Causal(), head_size=D)
    x = torch.randn(7, D)
    single = MaskedAttention(D)
    heads = []
    for h in range(3):
        part = slice(h * D, (h + 1) * D)
        for name in ("query", "key", "value"):
            getattr(single, name).weight.data = getattr(layer, name).weight.data[part]
        heads.append(single(x))
    wide = copy.deepcopy(layer).double()
    truth = []
    for h in range(3):
        part = slice(h * D, (h + 1) * D)
        clone = copy.deepcopy(single).double()
        for name in ("query", "key", "value"):
            getattr(clone, name).weight.data = getattr(wide, name).weight.data[part]
        truth.append(appendix(x.double(), x.double(), masked(7), clone)[0])
    assert_no_worse("h", layer(x), layer.out(torch.cat(heads, -1)), wide.out(torch.cat(truth, -1)))


def test_shapes_with_several_heads():
    layer = SelfAttention(D, heads=3)
    for batch in ((), (2,)):
        h, weights = layer(torch.randn(*batch, 5, D), return_weights=True)
        assert h.shape == (*batch, 5, D) and weights.shape == (*batch, 3, 5, 5)


def test_a_step_of_decoding_equals_prefill():
    layer = RelationalAttention(D, heads=2, relation=ab.Window(before=4), rotary=Rotary(D // 2))
    x = torch.randn(2, 9, D)
    whole, truth = layer(x), copy.deepcopy(layer).double()(x.double())
    for t in range(9):
        step = layer(x[:, t : t + 1], x[:, : t + 1], q_start="end")
        assert_no_worse(f"step {t}", step, whole[:, t : t + 1], truth[:, t : t + 1])


def test_dropout_is_on_only_in_training():
    layer = SelfAttention(D, dropout=0.5)
    x = torch.randn(6, D)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_grouped_heads():
    layer = RelationalAttention(D, heads=4, key_heads=2, relation=ab.Causal())
    assert layer.key.weight.shape == (D // 2, D)
    same = RelationalAttention(D, heads=4, relation=ab.Causal())
    with torch.no_grad():
        for name in ("query", "out"):
            getattr(same, name).weight.copy_(getattr(layer, name).weight)
        for name in ("key", "value"):
            grouped = getattr(layer, name).weight.unflatten(0, (2, 3))
            getattr(same, name).weight.copy_(grouped.repeat_interleave(2, 0).flatten(0, 1))
    x = torch.randn(2, 7, D)
    wide = copy.deepcopy(same).double()
    assert_no_worse("h", layer(x), same(x), wide(x.double()))


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("sizes", [{}, {"kdim": 5, "vdim": 7}, {"bias": False}])
@pytest.mark.parametrize("has_batch", [False, True])
def test_multihead_agrees_with_torch(batch_first, sizes, has_batch):
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(D, 3, batch_first=batch_first, **sizes)
    for parameter in theirs.parameters():  # biases start at zero
        nn.init.normal_(parameter, std=0.5)
    ours = MultiheadAttention(D, 3, batch_first=batch_first, **sizes)
    ours.load_state_dict(theirs.state_dict())
    wide = copy.deepcopy(theirs).double()
    batch = (2,) if has_batch else ()
    inputs = [
        torch.randn(*batch, n, size)
        for n, size in ((6, D), (9, sizes.get("kdim", D)), (9, sizes.get("vdim", D)))
    ]
    if has_batch and not batch_first:
        inputs = [x.transpose(0, 1) for x in inputs]
    relation = ab.Window(before=2, after=3)
    forbidden = ~relation.dense(6, 9)
    padding = None
    if has_batch:
        padding = torch.zeros(2, 9, dtype=torch.bool)
        padding[1, 5:] = True
        forbidden = forbidden.clone()
    for average in (False, True):
        options = {"key_padding_mask": padding, "need_weights": True, "average_attn_weights": average}
        got = ours(*inputs, relation=relation, **options)
        eager = theirs(*inputs, attn_mask=forbidden, **options)
        truth = wide(*(x.double() for x in inputs), attn_mask=forbidden, **options)
        for name, *each in zip(("out", "weights"), got, eager, truth, strict=True):
            assert_no_worse(name, *each)
    assert ours(*inputs, relation=relation)[1] is None


def masks(kind, heads=None):
    """Return a mask [5, 5] or [2 * heads, 5, 5] and a padding mask [2, 5], True = leave out, or numbers."""
    rng = torch.Generator().manual_seed(3)
    mask = torch.rand(5, 5, generator=rng) if heads is None else torch.rand(2 * heads, 5, 5, generator=rng)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    if kind == "bool":
        return (mask > 0.6) & ~torch.eye(5, dtype=torch.bool), padding
    return mask, torch.zeros(2, 5).masked_fill(padding, -torch.inf)


@pytest.mark.parametrize("has_batch", [True, False])
@pytest.mark.parametrize("by_head", [True, False])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_multihead_takes_torchs_masks(kind, by_head, has_batch):
    """There was no ``attn_mask``, and padding masks had to be boolean."""
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(D, 4, batch_first=True)
    ours = MultiheadAttention(D, 4, batch_first=True)
    ours.load_state_dict(theirs.state_dict())
    mask, padding = masks(kind, 4 if by_head else None)
    x = torch.randn(2, 5, D)
    if not has_batch:
        x, padding, mask = x[1], padding[1], mask[:4] if by_head else mask
    wide = copy.deepcopy(theirs).double()
    for given in ({}, {"key_padding_mask": padding}):
        options = {"attn_mask": mask, "need_weights": True, "average_attn_weights": False, **given}
        exact = {
            n: y.double() if torch.is_tensor(y) and y.is_floating_point() else y for n, y in options.items()
        }
        runs = ours(x, x, x, **options), theirs(x, x, x, **options), wide(*[x.double()] * 3, **exact)
        for name, *each in zip(("out", "weights"), *runs, strict=True):
            assert_no_worse(name, *each)


ENCODER_CALLS = {
    "nothing": lambda mask, padding: {},
    "mask": lambda mask, padding: {"src_mask": mask},
    "padding": lambda mask, padding: {"src_key_padding_mask": padding},
    "both": lambda mask, padding: {"src_mask": mask, "src_key_padding_mask": padding},
    "causal": lambda mask, padding: {
        "src_mask": nn.Transformer.generate_square_subsequent_mask(5),
        "is_causal": True,
    },
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("call", ENCODER_CALLS)
def test_multihead_works_in_torchs_encoder_layer(call, kind, training, monkeypatch):
    """It did not: masks were refused, and without gradients torch bypassed the layer."""
    torch.manual_seed(0)
    theirs = nn.TransformerEncoderLayer(D, 4, 20, dropout=0.0, batch_first=True).train(training)
    ours = copy.deepcopy(theirs)
    ours.self_attn = MultiheadAttention(D, 4, batch_first=True).train(training)
    ours.self_attn.load_state_dict(theirs.self_attn.state_dict())
    options = ENCODER_CALLS[call](*masks(kind)).items()
    x = torch.randn(2, 5, D)
    wide = copy.deepcopy(theirs).double()
    runs = []
    if kind == "float":  # torch's fast path reads any number but 0 as True, and gives NaN
        monkeypatch.setattr(torch.backends.mha, "get_fastpath_enabled", lambda: False)
    for layer, dtype in ((ours, torch.float32), (theirs, torch.float32), (wide, torch.float64)):
        given = {
            name: y.to(dtype) if torch.is_tensor(y) and y.is_floating_point() else y for name, y in options
        }
        with torch.set_grad_enabled(training):
            out = layer(x.to(dtype), **given)
        grads = torch.autograd.grad(out.square().sum(), list(layer.parameters())) if training else ()
        runs.append((out, *grads))
    out, *grads = zip(*runs, strict=True)
    assert_no_worse("out", *out)
    for grad in grads:
        assert_no_worse("gradient", *grad, 3, magnitude=grad[2].abs().max().item())


def test_a_relation_holds_in_torchs_layers_without_gradients():
    """Their fast path reads the layer's weights and ignores its relation."""
    torch.manual_seed(0)
    window = ab.Window(before=1)
    encoder = nn.TransformerEncoderLayer(D, 4, 20, dropout=0.0, batch_first=True).eval()
    encoder.self_attn = MultiheadAttention(D, 4, batch_first=True, relation=window).eval()
    decoder = nn.TransformerDecoderLayer(D, 4, 20, dropout=0.0, batch_first=True).eval()
    decoder.self_attn = MultiheadAttention(D, 4, batch_first=True, relation=window).eval()
    decoder.multihead_attn = MultiheadAttention(D, 4, batch_first=True, relation=window).eval()
    x = torch.randn(2, 5, D)
    for run in (encoder, lambda x: decoder(x, x)):
        with torch.no_grad():
            out = run(x)
            changed = run(torch.cat([x[:, :1] + 1, x[:, 1:]], 1))
        assert torch.equal(out, run(x))
        assert torch.equal(out[:, 3:], changed[:, 3:]) and not torch.equal(out[:, :1], changed[:, :1])


def test_multihead_in_torchs_encoder_explains_how_to_keep_tensors_dense():
    """torch packs padded sequences into a nested tensor before the first layer sees them."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 4, 20, batch_first=True), 1).eval()
    encoder.layers[0].self_attn = MultiheadAttention(D, 4, batch_first=True).eval()
    x, padding = torch.randn(2, 5, D), masks("bool")[1]
    with torch.no_grad(), pytest.raises(TypeError, match=r"got a nested one; .* enable_nested_tensor=False"):
        encoder(x, src_key_padding_mask=padding)


def test_multihead_of_a_fully_padded_sequence_is_the_bias():
    layer = MultiheadAttention(D, 3, batch_first=True)
    nn.init.normal_(layer.out_proj.bias)
    x = torch.randn(2, 4, D)
    padding = torch.tensor([[False] * 4, [True] * 4])
    out = layer(x, x, x, key_padding_mask=padding)[0]
    assert torch.equal(out[1], layer.out_proj.bias.expand(4, D))


def turned(x, start, base):
    """Multiply features i and i + 3 of each row, as a complex number, by exp(i * angle)."""
    out = torch.zeros_like(x)
    for row in range(len(x)):
        for i in range(3):
            angle = torch.tensor((row + start) * base ** (-2 * i / 6), dtype=x.dtype)
            number = torch.complex(x[row, i], x[row, i + 3]) * torch.polar(torch.ones_like(angle), angle)
            out[row, i], out[row, i + 3] = number.real, number.imag
    return out


def test_rotary_turns_by_the_definition():
    x = torch.randn(4, 6)
    assert_no_worse("x", Rotary(6, base=50.0)(x, start=3), turned(x, 3, 50.0), turned(x.double(), 3, 50.0))


def test_rotary_takes_a_position_for_each_row():
    x, turn = torch.randn(2, 7, 6), Rotary(6)
    order = torch.tensor([6, 2, 0, 5, 1, 3, 4])
    assert torch.equal(turn(x[:, order], start=order + 3), turn(x, start=3)[:, order])


def test_rotary_keeps_its_digits_in_half_precision():
    """Angles of late positions are meaningless in bfloat16, whose numbers are 512 apart there."""
    x = torch.randn(2, 6).bfloat16()
    eager, truth = (turned(x.to(dtype), 100_000, 10000.0) for dtype in (torch.float32, torch.float64))
    assert_no_worse("x", Rotary(6)(x, start=100_000), eager.bfloat16(), truth)


def test_block_is_pre_norm():
    torch.manual_seed(0)
    block = Block(GraphAttention(D, heads=2), D, hidden=7).double()
    x, ring = torch.randn(3, D).double(), ab.Graph([[0, 1, 2], [1, 2, 0]], num_nodes=3)
    u = x + block.attention(block.attention_norm(x), ring)
    assert torch.equal(block(x, ring), u + block.network(block.network_norm(u)))


def test_layer_survives_copying_and_saving():
    layer = MaskedAttention(D, heads=2)
    x = torch.randn(2, 9, D)
    clone = copy.deepcopy(layer)
    assert torch.equal(clone(x), layer(x)) and clone.relation == ab.Causal()
    assert list(layer.state_dict()) == ["query.weight", "key.weight", "value.weight", "out.weight"]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SelfAttention(10, heads=3), "heads: wanted a number that divides d_model = 10, got 3"),
        (
            lambda: RelationalAttention(12, 4, key_heads=3),
            "key_heads: wanted a number that divides heads = 4",
        ),
        (lambda: RelationalAttention(12, 2, rotary=Rotary(4)), "rotary: wanted one for head_size = 6, got 4"),
        (lambda: Rotary(5), "head_size: wanted an even number of at least 2, got 5"),
        (lambda: Rotary(4)(torch.zeros(3, 6)), r"x: wanted \[..., n, 4\], got \[3, 6\]"),
        (
            lambda: Rotary(4)(torch.zeros(3, 4), torch.arange(2)),
            r"start: wanted a number or a position for each of 3 rows, got \[2\]",
        ),
        (
            lambda: RelationalAttention(12, 4, ab.PerHead([ab.Causal(), ab.Full()])),
            "relation: wanted one for 4 heads, got a PerHead for 2",
        ),
        (lambda: SelfAttention(4)(torch.zeros(3, 5)), r"x: wanted \[n, 4\] or \[B, n, 4\], .* got \[3, 5\]"),
        (lambda: SelfAttention(4)(torch.zeros(3, 4), torch.zeros(1, 3, 4)), "memory: wanted"),
        (lambda: MultiheadAttention(4, 2, add_bias_kv=True), "add_bias_kv: wanted False, .* got True"),
        (lambda: MultiheadAttention(4, 2, add_zero_attn=True), "add_zero_attn: wanted False, .* got True"),
        (
            lambda: MultiheadAttention(4, 2)(*torch.zeros(3, 3, 5, 4), attn_mask=torch.zeros(5, 3, 3)),
            r"attn_mask: wanted \[3, 3\] or \[10, 3, 3\], got \[5, 3, 3\]",
        ),
        (
            lambda: MultiheadAttention(4, 2)(*torch.zeros(3, 3, 5, 4), key_padding_mask=torch.zeros(3, 5)),
            r"key_padding_mask: wanted \[5, 3\], got \[3, 5\]",
        ),
        (
            lambda: MultiheadAttention(4, 2)(
                *torch.zeros(3, 3, 5, 4), attn_mask=torch.zeros(3, 3), q_start=1
            ),
            "q_start: wanted 0 with attn_mask, whose rows are the queries, got 1",
        ),
        (
            lambda: SparseAttention(4, ab.Graph([[0], [1]], num_nodes=2))(torch.zeros(3, 4)),
            "relation: this Graph is for 2 keys, got k_len = 3",
        ),
    ],
)
def test_wrong_values_are_named(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SparseAttention(4, torch.ones(3, 3)), r"got a tensor \[3, 3\]; for an adjacency"),
        (
            lambda: EncoderDecoderAttention(4)(torch.zeros(3, 4)),
            "memory: wanted the encoder's tokens, got None",
        ),
        (lambda: GraphAttention(4)(torch.zeros(3, 4), torch.ones(3, 3)), "use ab.Graph.from_adjacency"),
        (lambda: GraphAttention(4)(torch.zeros(3, 4), None), "^relation: wanted a graph, got None"),
        (lambda: GraphAttention(4)("x", ab.Full()), "^x: wanted a tensor, got str"),
        (lambda: RelationalAttention(4, bias="no"), "^bias: wanted True or False, got 'no'"),
        (lambda: RelationalAttention(4, project=1), "^project: wanted True or False, got 1"),
        (lambda: SelfAttention(4)(torch.zeros(3, 4), return_weights="no"), "^return_weights: wanted True or"),
        (
            lambda: GraphAttention(4)(torch.zeros(3, 4), ab.Full(), return_weights="no"),
            "^return_weights: wanted True or False, got 'no'",
        ),
        (
            lambda: MultiheadAttention(4, 2)(*torch.zeros(3, 2, 4), need_weights="no"),
            "^need_weights: wanted True or False, got 'no'",
        ),
        (
            lambda: MultiheadAttention(4, 2)(
                *torch.zeros(3, 2, 4), need_weights=True, average_attn_weights="no"
            ),
            "^average_attn_weights: wanted True or False, got 'no'",
        ),
        (
            lambda: MultiheadAttention(4, 2)(*torch.zeros(3, 2, 4), key_padding_mask=torch.tensor([0, 1])),
            "key_padding_mask: wanted booleans or floating-point numbers, got torch.int64",
        ),
        (
            lambda: MultiheadAttention(4, 2)(*torch.zeros(3, 2, 4), None, False, ab.Causal()),
            r"attn_mask: wanted a tensor, got Causal\(\); pass it as relation=",
        ),
        (
            lambda: MultiheadAttention(4, 2)(torch.zeros(2, 4).to_sparse(), *torch.zeros(2, 2, 4)),
            "query: wanted a dense tensor, got torch.sparse_coo",
        ),
    ],
)
def test_wrong_kinds_are_named(make, words):
    with pytest.raises(TypeError, match=words):
        make()
