"""Structured matrices against their definitions, entry by entry."""

import pytest
import torch

from attnbias.structured import BTT, MLBTC, MLR, Butterfly, Kronecker, LowRank, MLBTCLevel, Monarch

DRAW = torch.Generator().manual_seed(0)


def draw(*shape):
    return torch.randn(shape, generator=DRAW, dtype=torch.float64)


def make_mlr(n, m, ranks):
    levels = [(2**i, r) for i, r in enumerate(ranks)]
    return MLR([draw(p, n // p, r) for p, r in levels], [draw(p, m // p, r) for p, r in levels])


MATRICES = {
    "low rank": LowRank(draw(6, 2), draw(9, 2)),
    "one column": LowRank(draw(5, 1), draw(1, 1)),
    "mlr": make_mlr(16, 24, (3, 1, 2)),
    "btt": BTT(draw(3, 2, 5, 2), draw(5, 4, 3, 2)),
    "monarch": Monarch(draw(4, 4, 4), draw(4, 4, 4)),
    "kronecker": Kronecker(draw(2, 3), draw(5, 4)),
    "butterfly": Butterfly(draw(4, 8, 2, 2)),
    "odd butterfly": Butterfly(draw(5, 16, 2, 2)),
    "smallest butterfly": Butterfly(draw(1, 1, 2, 2)),
    "mlbtc": MLBTC(
        [
            MLBTCLevel(draw(2, 3, 4), draw(4, 2, 5), torch.randperm(8), torch.randperm(6), alpha=0.5),
            MLBTCLevel(draw(1, 6, 3), draw(1, 3, 20)),
        ]
    ),
}


def same(a, b):
    """Check equality up to the float64 rounding of sums of a few hundred products."""
    return (a - b).abs().max() <= 1e-12 * b.abs().max()


@pytest.mark.parametrize("name", MATRICES)
def test_product_dense_and_umbrella_agree(name):
    matrix = MATRICES[name]
    x = draw(matrix.shape[1], 3)
    dense = matrix.dense()
    assert dense.shape == matrix.shape
    assert same(matrix @ x, dense @ x)
    assert (matrix @ x[:, 0]).shape == (matrix.shape[0],)
    assert same(matrix.to_mlbtc().dense(), dense)
    assert same(matrix.to_mlbtc() @ x, matrix @ x)


@pytest.mark.parametrize("name", MATRICES)
def test_parameters_get_gradients(name):
    matrix = MATRICES[name]
    leaves = [x.requires_grad_() for x in matrix.parameters]
    grads = torch.autograd.grad((matrix @ draw(matrix.shape[1])).sum(), leaves)
    assert all(grad.abs().sum() > 0 for grad in grads)
    for x in leaves:
        x.requires_grad_(False)


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("batch", [(), (2,), (0, 3)])
def test_split_gives_the_bilinear_form(name, batch):
    matrix = MATRICES[name]
    x, y = draw(*batch, 5, matrix.shape[0]), draw(*batch, 4, matrix.shape[1])
    a, b = matrix.split(x, y)
    assert a.shape[:-1] == x.shape[:-1] and b.shape[:-1] == y.shape[:-1]
    got, wanted = a @ b.mT, x @ matrix.dense() @ y.mT
    assert got.shape == wanted.shape and (not got.numel() or same(got, wanted))


def test_split_of_low_rank_is_short():
    sizes = {
        name: MATRICES[name].split(draw(3, n), draw(3, m))[0].shape[-1]
        for name, (n, m) in ((name, matrix.shape) for name, matrix in MATRICES.items())
    }
    assert sizes["low rank"] == 2 and sizes["mlr"] == 3 + 2 * 1 + 4 * 2
    assert sizes["btt"] == 6 and sizes["butterfly"] == 16


@pytest.mark.parametrize("name", MATRICES)
def test_other_tensors_make_the_same_kind_of_matrix(name):
    """Permutations are among the tensors, and do not learn."""
    matrix = MATRICES[name]
    twice = matrix.with_tensors(x * 2 if x.is_floating_point() else x for x in matrix.tensors)
    factors = {"butterfly": 4, "odd butterfly": 5, "smallest butterfly": 1}.get(name, 2)
    assert type(twice) is type(matrix)
    assert same(twice.dense(), 2**factors * matrix.dense())
    orders = [x for x in matrix.tensors if not any(x is each for each in matrix.parameters)]
    assert len(orders) == (2 if name == "mlbtc" else 0)


def test_fan_ins_are_those_of_the_sums():
    wanted = {
        "low rank": (6, 9),
        "one column": (5, 1),
        "mlr": (16, 8, 4, 24, 12, 6),
        "btt": (5 * 2, 4),
        "monarch": (4, 4),
        "kronecker": (3, 4),
        "butterfly": (2,),
        "odd butterfly": (2,),
        "smallest butterfly": (2,),
        "mlbtc": (4, 5, 3, 20),
    }
    assert {name: matrix.fan_ins for name, matrix in MATRICES.items()} == wanted
    assert all(len(matrix.fan_ins) == len(matrix.parameters) for matrix in MATRICES.values())


def test_definitions_entry_by_entry():
    low = MATRICES["low rank"]
    assert same(low.dense(), torch.einsum("ir,jr->ij", low.left, low.right))
    mlr = MATRICES["mlr"]
    wanted = torch.zeros(mlr.shape, dtype=torch.float64)
    for left, right in zip(mlr.left, mlr.right, strict=True):
        wanted += torch.block_diag(*(a @ b.T for a, b in zip(left, right, strict=True)))
    assert same(mlr.dense(), wanted)
    btt = MATRICES["btt"]
    assert same(btt.dense(), torch.einsum("jigt,gdjt->ijgd", btt.left, btt.right).reshape(btt.shape))
    monarch = MATRICES["monarch"]
    assert same(monarch.dense(), torch.einsum("jig,gdj->ijgd", monarch.left, monarch.right).reshape(16, 16))
    kronecker = MATRICES["kronecker"]
    assert same(kronecker.dense(), torch.kron(kronecker.left, kronecker.right))
    butterfly = MATRICES["butterfly"]
    wanted = torch.eye(16, dtype=torch.float64)
    for i, factor in enumerate(butterfly.factors):
        step = torch.zeros(16, 16, dtype=torch.float64)
        for k, first in enumerate(j for j in range(16) if not j >> i & 1):
            pair = [first, first + 2**i]
            for a in range(2):
                for b in range(2):
                    step[pair[a], pair[b]] = factor[k, a, b]
        wanted = step @ wanted
    assert same(butterfly.dense(), wanted)


@pytest.mark.parametrize(
    ("size", "ranks", "wanted"),
    [(256, (8, 8, 8, 8), 120), (256, (8, 4, 4, 16), 160), (256, (16, 8, 4, 4), 80), (64, (8, 8, 8, 8), 64)],
)
def test_rank_of_mlr_is_that_of_all_blocks(size, ranks, wanted):
    matrix = make_mlr(size, size, ranks)
    assert matrix.rank() == wanted
    assert matrix.macs() == 2 * size * sum(ranks)


def test_rank_and_multiply_adds():
    low, btt, kronecker = MATRICES["low rank"], MATRICES["btt"], MATRICES["kronecker"]
    assert (low.rank(), low.macs()) == (2, 2 * (6 + 9))
    assert (btt.rank(), btt.macs()) == (6, 3 * 2 * 5 * 2 + 5 * 4 * 3 * 2)
    # 16 features as 2 x 8: full rank for less than a dense matrix's multiply-adds.
    bilinear = BTT(draw(8, 2, 2, 1), draw(2, 8, 8, 1))
    assert (bilinear.rank(), bilinear.macs()) == (16, 16 * (2 + 8))
    assert (kronecker.rank(), kronecker.macs()) == (8, 3 * 4 * 5 + 3 * 5 * 2)
    assert (MATRICES["butterfly"].rank(), MATRICES["butterfly"].macs()) == (16, 4 * 16 * 2)
    assert MATRICES["monarch"].rank() == 16


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LowRank(draw(3), draw(3, 1)), r"left: wanted a tensor \[n, r\], got \[3\]"),
        (lambda: LowRank(draw(3, 2), 5), r"right: wanted a tensor \[m, r\], got int"),
        (lambda: LowRank(draw(3, 2), draw(3, 1)), r"right: wanted \[m, r\] with r = 2, got \[3, 1\]"),
        (lambda: MLR([], []), "left: wanted at least one level, got none"),
        (lambda: MLR([draw(1, 4, 2)], []), "right: wanted as many levels as left, 1, got 0"),
        (
            lambda: MLR([draw(1, 4, 2)], [draw(2, 2, 2)]),
            r"right\[0\]: wanted \[p, j, r\] with p = 1, got \[2, 2, 2\]",
        ),
        (
            lambda: MLR([draw(1, 4, 2)], [draw(1, 4, 3)]),
            r"right\[0\]: wanted \[p, j, r\] with r = 2, got \[1, 4, 3\]",
        ),
        (
            lambda: MLR([draw(1, 4, 2), draw(2, 3, 1)], [draw(1, 4, 2), draw(2, 2, 1)]),
            r"left\[1\]: wanted \[p, i, r\] with p \* i = 4, got \[2, 3, 1\]",
        ),
        (
            lambda: MLR([draw(1, 4, 2), draw(2, 2, 1)], [draw(1, 4, 2), draw(2, 3, 1)]),
            r"right\[1\]: wanted \[p, j, r\] with p \* j = 4, got \[2, 3, 1\]",
        ),
        (
            lambda: BTT(draw(2, 2, 2, 1), draw(2, 2, 3, 1)),
            r"right: wanted \[c, e, b, s\] with b = 2, got \[2, 2, 3, 1\]",
        ),
        (lambda: Monarch(draw(2, 2, 2), draw(2, 3, 2)), r"right: wanted \[b, b, b\] with b = 2"),
        (
            lambda: Butterfly(draw(3, 3, 2, 2)),
            r"factors: wanted a tensor \[log2\(n\), n / 2, 2, 2\], got \[3, 3, 2, 2\]",
        ),
        (lambda: MLBTC([]), "levels: wanted at least one level, got none"),
        (
            lambda: MLBTC(
                [MLBTCLevel(draw(1, 2, 2), draw(1, 2, 2)), MLBTCLevel(draw(1, 3, 2), draw(1, 2, 2))]
            ),
            r"levels\[1\]: wanted the shape \(2, 2\), got \(3, 2\)",
        ),
        (
            lambda: MLBTCLevel(draw(1, 2, 2), draw(1, 3, 2)),
            r"right: wanted \[p, k, l\] with p \* k = q \* j = 2, got \[1, 3, 2\]",
        ),
        (
            lambda: MLBTCLevel(draw(1, 2, 2), draw(1, 2, 2), torch.tensor([0, 0])),
            r"inner: wanted a permutation of 2 numbers, got \[0, 0\]",
        ),
        (lambda: MATRICES["btt"] @ draw(7), r"x: wanted \[20\] or \[20, count\], got \[7\]"),
    ],
)
def test_bad_input(make, words):
    with pytest.raises(ValueError, match=words):
        make()
