"""Layers with structured scores against their formulas in float64."""

import math

import pytest
import torch
from torch import nn

import attnbias as ab
from attnbias.nn import BilinearBTTAttention, BilinearMLRAttention, MLRAttention, parameter_groups
from attnbias.nn.structured import cap_rms, factor_width
from attnbias.structured import BTT

T, D, H = 70, 32, 4
LAYERS = {
    "mlr": lambda **k: MLRAttention(D, H, [4, 2, 2], **k),
    "bilinear mlr": lambda **k: BilinearMLRAttention(D, H, [2, 2, 4], **k),
    "bilinear btt": lambda **k: BilinearBTTAttention(D, H, rank=2, **k),
}


def wake(layer):
    """Make a layer's output nonzero and its gains different from one."""
    for name, parameter in layer.named_parameters():
        if "norm" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
    nn.init.normal_(layer.output.weight, std=0.3)
    return layer


def norm(x, gain):
    x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain


def attend(layer, x, scores):
    """Apply a causal softmax to scores [B, H, T, T], head by head."""
    B, T, _ = x.shape
    scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
    value = (x @ layer.value.weight.T).view(B, T, H, -1)
    out = torch.einsum("bhij,bjhe->bihe", scores.softmax(-1), value)
    return out.reshape(B, T, -1) @ layer.output.weight.T


def mlr_scores(layer, x):
    B, T, _ = x.shape
    q = norm((x @ layer.query.weight.T).view(B, T, H, -1), layer.query_norm.weight)
    k = norm((x @ layer.key.weight.T).view(B, T, H, -1), layer.key_norm.weight)
    total, count, first = torch.zeros(B, H, T, T, dtype=x.dtype), torch.zeros(T, T), 0
    width = -(-T // 4) * 4
    for level, rank in enumerate(layer.score.ranks):
        block = torch.arange(T) // (width >> level)
        same = block[:, None] == block
        part = torch.einsum("bihr,bjhr->bhij", q[..., first : first + rank], k[..., first : first + rank])
        total, count, first = total + part / rank * same, count + same, first + rank
    return total / count


def bilinear_mlr_scores(layer, x):
    """Compute x_i^T M x_j level by level, where the norms allow it: q and k feature by feature."""
    B, T, _ = x.shape
    total = torch.zeros(B, H, T, T, dtype=x.dtype)
    for level, rank in enumerate(layer.ranks):
        slices = 2**level
        sides = []
        for cores, norms in ((layer.query, layer.query_norms), (layer.key, layer.key_norms)):
            weight = cores[level]
            rho = math.sqrt(min(D // slices, H * rank)) / (D // slices)
            weight = weight / max(1, (weight.square().mean() + 1e-8).sqrt() / rho)
            made = torch.empty(B, T, H, rank * slices, dtype=x.dtype)
            for h in range(H):
                for rho_index in range(rank):
                    for k in range(slices):
                        part = x[..., k * D // slices : (k + 1) * D // slices]
                        made[..., h, rho_index * slices + k] = part @ weight[k, :, h * rank + rho_index]
            sides.append(norm(made, norms[level].weight))
        total += torch.einsum("bihr,bjhr->bhij", *sides) / math.sqrt(rank * slices)
    return total


def bilinear_btt_scores(layer, x):
    few, many, rank = layer.shape
    right = cap_rms(layer.right, many, H * many * rank).view(few, many, H, many, rank)
    left = cap_rms(layer.left, few * rank, few).view(H, many, few, few, rank)
    keys = []
    for h in range(H):
        matrix = BTT(left[h], right[:, :, h])  # the note's index order is the family's
        assert matrix.rank() == D
        keys.append(norm(x @ matrix.dense().T, layer.key_norm.weight))
    return torch.einsum("bid,bhjd->bhij", x, torch.stack(keys, 1)) / math.sqrt(D)


FORMULAS = {"mlr": mlr_scores, "bilinear mlr": bilinear_mlr_scores, "bilinear btt": bilinear_btt_scores}


@pytest.mark.parametrize("name", LAYERS)
def test_formula(name):
    torch.manual_seed(0)
    layer = wake(LAYERS[name](dtype=torch.float64))
    x = torch.randn(2, T, D, dtype=torch.float64)
    wanted = attend(layer, x, FORMULAS[name](layer, x))
    assert (layer(x) - wanted).abs().max() < 1e-12 * (1 + wanted.abs().max())


@pytest.mark.parametrize("name", LAYERS)
def test_kernels_agree_with_the_reference(name):
    torch.manual_seed(0)
    layer = wake(LAYERS[name]())
    x = torch.randn(2, T, D, requires_grad=True)
    results = []
    for backend in (None, "reference"):
        with ab.use_backend(backend):
            out = layer(x)
        results.append([out, *torch.autograd.grad(out.square().sum(), (x, *layer.parameters()))])
    for got, wanted in zip(*results, strict=True):
        assert (got - wanted).abs().max() < 2e-4 * (1 + wanted.abs().max())


@pytest.mark.parametrize("name", LAYERS)
def test_a_fresh_layer_adds_nothing(name):
    torch.manual_seed(0)
    layer = LAYERS[name]()
    assert not layer(torch.randn(1, 9, D)).any()
    assert abs(layer.value.weight.std() - D**-0.5) < 0.1 * D**-0.5
    assert all((p == 1).all() for name, p in layer.named_parameters() if "norm" in name)


def test_initial_deviations():
    torch.manual_seed(0)
    mlr = BilinearMLRAttention(256, 4, [32, 16, 16])
    for cores in (mlr.query, mlr.key):
        for level, core in enumerate(cores):
            assert abs(core.std() * (256 / 2**level) ** 0.5 - 1) < 0.05
    btt = BilinearBTTAttention(256, 4)
    assert btt.right.shape == (8, 32, 4 * 32) and btt.left.shape == (4 * 32, 8, 8)
    assert abs(btt.right.std() * 32**0.5 - 1) < 0.05 and abs(btt.left.std() * 8**0.5 - 1) < 0.05


def test_learning_rates():
    groups = {g["lr"]: g["params"] for g in BilinearMLRAttention(384, 4, [32, 32, 32]).parameter_groups(1.0)}
    # 768 / fan_in: gains 1; value, output and level 0 from 384 features; levels 1 and 2 from 192 and 96.
    assert {rate: len(found) for rate, found in groups.items()} == {1.0: 6, 2.0: 4, 4.0: 2, 8.0: 2}
    groups = {g["lr"]: g["params"] for g in BilinearBTTAttention(768, 4).parameter_groups(2.0)}
    assert {rate: len(found) for rate, found in groups.items()} == {2.0: 3, 2 * 768 / 32: 1, 2 * 768 / 24: 1}
    model = nn.Sequential(nn.Linear(96, 96), MLRAttention(96, 3, [16, 16]))
    found = parameter_groups(model, 0.5)
    assert sum(len(group["params"]) for group in found) == len(list(model.parameters()))
    torch.optim.AdamW(found)


def test_rms_cap():
    small, large = torch.full((4, 8), 0.1), torch.full((4, 8), 30.0, requires_grad=True)
    assert torch.equal(cap_rms(small, 4, 8), small)
    capped = cap_rms(large, 4, 8)
    assert abs(capped.square().mean().sqrt() - 0.5) < 1e-6  # sqrt(4) / 4
    grad = torch.autograd.grad(capped.sum(), large)[0]
    assert grad.abs().max() < 1e-6  # only the direction matters, so the gradient is zero


def test_widths_of_the_block_tensor_train():
    wanted = {
        16: (2, 8),
        64: (4, 16),
        256: (8, 32),
        1024: (16, 64),
        128: (8, 16),
        512: (16, 32),
        768: (24, 32),
    }
    assert {width: factor_width(width) for width in wanted} == wanted


def test_dense_block_tensor_train_equals_its_factors():
    torch.manual_seed(0)
    layer = BilinearBTTAttention(D, H, rank=2, dtype=torch.float64)
    x = torch.randn(2, D, D, dtype=torch.float64)
    token_by_token = torch.cat([layer.keys(part) for part in x.split(1, 1)], 1)  # too few for a dense one
    assert (layer.keys(x) - token_by_token).abs().max() < 1e-13


@pytest.mark.parametrize("size", [260, 416, 1000])
def test_large_scores_run_on_the_kernels(size):
    """Score sizes beyond 256, and one query for all heads, read with a stride of 0."""
    torch.manual_seed(0)
    q = torch.randn(2, 1, 90, size, requires_grad=True)
    k, v = torch.randn(2, 4, 90, size, requires_grad=True), torch.randn(2, 4, 90, 16, requires_grad=True)
    shared = q.expand(-1, 4, -1, -1)
    for relation in (ab.Causal(), ab.Window(before=3)):
        assert ab.explain(shared, k, v, relation).backend == "cpu"
        assert ab.verify(shared, k, v, relation, backend="cpu").ok
    score = ab.MultiLevel([size // 2, size - size // 2])
    assert ab.verify(shared, k, v, ab.Causal(), score=score, backend="cpu").ok
    few = ab.verify(shared[:, :, :3], k, v, ab.Causal(), q_start="end", backend="cpu")
    assert few.ok
    graph = ab.Graph(torch.randint(90, (2, 200)), num_nodes=90)
    with pytest.raises(
        NotImplementedError, match=f"at most D=256 unless all pairs are in tiles, got D={size}"
    ):
        ab.attention(shared, k, v, graph, backend="cpu")
    with pytest.raises(NotImplementedError, match="head size: at most D=1024 and E=256, got D=1025"):
        ab.attention(*torch.zeros(3, 1, 1, 4, 1025), backend="cpu")


def test_bad_input():
    with pytest.raises(ValueError, match="heads: wanted a number that divides d_model = 30, got 4"):
        MLRAttention(30, 4, [8])
    for make in (MLRAttention, BilinearMLRAttention):
        with pytest.raises(
            ValueError, match=r"ranks: wanted numbers of at least 1 that sum to 8, got \[4, 2\]"
        ):
            make(32, 4, [4, 2])
    with pytest.raises(
        ValueError, match=r"ranks: wanted 2\*\*\(levels - 1\) to divide d_model = 36, got 4 levels"
    ):
        BilinearMLRAttention(36, 3, [3, 3, 3, 3])
    for make in (
        lambda: BilinearBTTAttention(32, 4, scaling="x"),
        lambda: BilinearMLRAttention(32, 4, [8], scaling="x"),
    ):
        with pytest.raises(ValueError, match="scaling: wanted 'sp' or 'mup', got 'x'"):
            make()
    with pytest.raises(ValueError, match="rank: wanted at least 1, got 0"):
        BilinearBTTAttention(32, 4, rank=0)
