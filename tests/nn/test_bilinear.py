"""``BilinearAttention`` against dense matrices in float64, for every family."""

import copy
import pickle

import pytest
import torch
from torch import nn

import attnbias as ab
from attnbias.nn import BilinearAttention, parameter_groups
from attnbias.structured import BTT, MLBTC, MLR, Butterfly, Kronecker, LowRank, MLBTCLevel, Monarch

D, T, K = 16, 21, 34


def draw(*shape):
    return torch.randn(shape, dtype=torch.float64)


FAMILIES = {
    "low rank": lambda: LowRank(draw(D, 3), draw(D, 3)),
    "mlr": lambda: MLR([draw(1, D, 2), draw(4, 4, 1)], [draw(1, D, 2), draw(4, 4, 1)]),
    "btt": lambda: BTT(draw(8, 2, 4, 3), draw(4, 4, 8, 3)),
    "monarch": lambda: Monarch(draw(4, 4, 4), draw(4, 4, 4)),
    "kronecker": lambda: Kronecker(draw(2, 4), draw(8, 4)),
    "butterfly": lambda: Butterfly(draw(4, 8, 2, 2)),
    "mlbtc": lambda: MLBTC(
        [
            MLBTCLevel(draw(8, 2, 1), draw(2, 4, 8), torch.randperm(8), torch.randperm(D), alpha=0.5),
            MLBTCLevel(draw(1, D, 3), draw(1, 3, D)),
        ]
    ),
}
MAKERS = {name: [make] * 2 for name, make in FAMILIES.items()}
MAKERS["one head"] = [FAMILIES["btt"]]
MAKERS["ranks of each head"] = [
    FAMILIES["low rank"],
    lambda: LowRank(draw(D, 5), draw(D, 5)),
]
MAKERS["all kinds"] = [*FAMILIES.values(), FAMILIES["low rank"]]


def make_layer(name, **options):
    torch.manual_seed(0)
    layer = BilinearAttention([make() for make in MAKERS[name]], scale=0.05, **options)
    nn.init.normal_(layer.output.weight)
    return layer


def by_dense_matrices(layer, x, memory, related):
    """Compute the layer with ``x^T M x'``, each M written out through the umbrella family."""
    M = torch.stack([factors().to_mlbtc().dense() for factors in layer.matrices])
    scores = torch.einsum("bin,hnm,bjm->bhij", x, M, memory) * 0.05
    weights = scores.masked_fill(~related, -torch.inf).softmax(-1)
    weights = torch.where(related.any(-1, keepdim=True), weights, 0)
    value = (memory @ layer.value.weight.T).unflatten(-1, (layer.heads, -1))
    return torch.einsum("bhij,bjhe->bihe", weights, value).flatten(2) @ layer.output.weight.T


@pytest.mark.parametrize("name", MAKERS)
def test_result_and_gradients_equal_dense_matrices(name):
    """Query 0 has no key."""
    layer = make_layer(name)
    x, memory = draw(2, T, D).requires_grad_(), draw(2, K, D).requires_grad_()
    relation = ab.Window(before=9) & ~ab.Window(before=0)
    got = layer(x, memory, relation=relation)
    wanted = by_dense_matrices(layer, x, memory, relation.dense(T, K))
    assert (got - wanted).abs().max() < 1e-12 * wanted.abs().max()
    weight, given = torch.randn_like(wanted), (x, memory, *layer.parameters())
    results = [torch.autograd.grad((out * weight).sum(), given) for out in (got, wanted)]
    assert len(given) == 4 + sum(len(factors().parameters) for factors in layer.matrices)
    for mine, theirs in zip(*results, strict=True):
        assert theirs.abs().max() > 0 and (mine - theirs).abs().max() < 1e-11 * theirs.abs().max()


@pytest.mark.parametrize("name", MAKERS)
def test_the_kernels_of_float32_agree(name):
    layer = make_layer(name)
    x = draw(2, T, D)
    wanted = by_dense_matrices(layer, x, x, ab.Causal().dense(T, T))
    with ab.use_backend("reference"):
        eager = layer.float()(x.float())
    ab.testing.assert_no_worse("out", layer(x.float()), eager, wanted)


@pytest.mark.parametrize("name", MAKERS)
def test_the_matrices_are_copied_and_move_with_the_layer(name):
    matrices = [make() for make in MAKERS[name]]
    before = [matrix.dense() for matrix in matrices]
    layer = BilinearAttention(matrices)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(1)
    assert all(torch.equal(matrix.dense(), old) for matrix, old in zip(matrices, before, strict=True))
    x = draw(5, D)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), layer(x))
    fresh = BilinearAttention([make() for make in MAKERS[name]])
    fresh.load_state_dict(layer.state_dict())  # permutations, too
    assert torch.equal(fresh(x), layer(x))
    small = layer.float()
    assert {p.dtype for p in small.parameters()} == {torch.float32} and small(
        x.float()
    ).dtype == torch.float32


def test_score_sizes():
    x = draw(2, 5, D)
    for name, size in (("low rank", 3), ("mlr", 6), ("butterfly", D), ("ranks of each head", 5)):
        query, key, value = make_layer(name).project(x, x)
        assert query.shape == key.shape == (2, 2, 5, size) and value.shape == (2, 2, 5, 8)
    assert make_layer("btt").project(x, x)[0].stride(1) == 0  # the heads share the tokens as queries


@pytest.mark.parametrize("name", ["low rank", "btt", "all kinds"])
def test_it_compiles_whole(name):
    torch._dynamo.reset()
    layer = make_layer(name)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    x, memory = draw(2, T, D), draw(2, K, D)
    assert torch.equal(compiled(x, memory), layer(x, memory))


def test_learning_rates():
    """Nothing caps these weights, so factors with short sums learn at the base rate."""
    train = BTT(draw(16, 2, 2, 16), draw(2, 16, 16, 16))
    layer = BilinearAttention([LowRank(draw(32, 3), draw(32, 3)), train])
    rates = {id(p): group["lr"] for group in parameter_groups(layer, 1.0) for p in group["params"]}
    low, train = (factors().parameters for factors in layer.matrices)
    assert [rates[id(p)] for p in low] == [24.0, 24.0]
    assert [rates[id(p)] for p in train] == [24.0, 48.0]
    assert rates[id(layer.value.weight)] == 24.0
    small = make_layer("butterfly")
    assert {group["lr"]: len(group["params"]) for group in parameter_groups(small, 1.0)} == {1.0: 2, 48.0: 2}


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: BilinearAttention([]), ValueError, "matrices: wanted a list of .*, got none"),
        (
            lambda: BilinearAttention(FAMILIES["btt"]()),
            TypeError,
            "matrices: wanted a list of structured matrices, one for each head, got BTT",
        ),
        (lambda: BilinearAttention([draw(D, D)]), TypeError, "matrices: wanted .*, got Tensor in it"),
        (
            lambda: BilinearAttention([FAMILIES["btt"](), LowRank(draw(D, 2), draw(9, 2))]),
            ValueError,
            r"matrices: wanted square ones of one size, got \[\[16, 16\], \[16, 9\]\]",
        ),
        (
            lambda: BilinearAttention([FAMILIES["btt"]()] * 3),
            ValueError,
            "heads: wanted a number that divides d_model = 16, got 3",
        ),
    ],
)
def test_wrong_matrices_are_named(make, kind, words):
    with pytest.raises(kind, match=words):
        make()
