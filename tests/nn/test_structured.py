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


def exact(got, wanted):
    """Check equality up to the float64 rounding of sums of a few hundred products."""
    assert got.shape == wanted.shape
    return (got - wanted).abs().max() < 1e-12 * (1 + wanted.abs().max())


def norm(x, gain):
    x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain


def attend(layer, memory, scores, related):
    """Apply a softmax over the related keys to scores [B, H, Q, K], head by head; empty rows give zeros."""
    scores = scores.masked_fill(~related, -torch.inf)
    weights = torch.where(related.any(-1, keepdim=True), scores.softmax(-1), 0)
    value = (memory @ layer.value.weight.T).unflatten(-1, (scores.shape[1], -1))
    out = torch.einsum("bhij,bjhe->bihe", weights, value)
    return out.flatten(2) @ layer.output.weight.T


def mlr_scores(layer, x, memory):
    (B, Q, _), K = x.shape, memory.shape[1]
    q = norm((x @ layer.query.weight.T).view(B, Q, H, -1), layer.query_norm.weight)
    k = norm((memory @ layer.key.weight.T).view(B, K, H, -1), layer.key_norm.weight)
    total, count, first = torch.zeros(B, H, Q, K, dtype=x.dtype), torch.zeros(Q, K), 0
    width = -(-K // 4) * 4
    for level, rank in enumerate(layer.score.ranks):
        of_query, of_key = (torch.arange(n) // (width >> level) for n in (Q, K))
        same = (of_query[:, None] == of_key) | (level == 0)
        part = torch.einsum("bihr,bjhr->bhij", q[..., first : first + rank], k[..., first : first + rank])
        total, count, first = total + part / rank * same, count + same, first + rank
    return total / count


def bilinear_mlr_scores(layer, x, memory):
    """Compute x_i^T M x_j level by level, where the norms allow it: q and k feature by feature."""
    total = torch.zeros(len(x), H, x.shape[1], memory.shape[1], dtype=x.dtype)
    for level, rank in enumerate(layer.ranks):
        slices = 2**level
        sides = []
        for tokens, cores, norms in (
            (x, layer.query, layer.query_norms),
            (memory, layer.key, layer.key_norms),
        ):
            weight = cores[level]
            rho = math.sqrt(min(D // slices, H * rank)) / (D // slices)
            weight = weight / max(1, (weight.square().mean() + 1e-8).sqrt() / rho)
            made = torch.empty(*tokens.shape[:2], H, rank * slices, dtype=x.dtype)
            for h in range(H):
                for rho_index in range(rank):
                    for k in range(slices):
                        part = tokens[..., k * D // slices : (k + 1) * D // slices]
                        made[..., h, rho_index * slices + k] = part @ weight[k, :, h * rank + rho_index]
            sides.append(norm(made, norms[level].weight))
        total += torch.einsum("bihr,bjhr->bhij", *sides) / math.sqrt(rank * slices)
    return total


def bilinear_btt_scores(layer, x, memory):
    few, many, rank = layer.shape
    right = cap_rms(layer.right, many, H * many * rank).view(few, many, H, many, rank)
    left = cap_rms(layer.left, few * rank, few).view(H, many, few, few, rank)
    keys = []
    for h in range(H):
        matrix = BTT(left[h], right[:, :, h])  # the note's index order is the family's
        assert matrix.rank() == D
        keys.append(norm(memory @ matrix.dense().T, layer.key_norm.weight))
    return torch.einsum("bid,bhjd->bhij", x, torch.stack(keys, 1)) / math.sqrt(D)


FORMULAS = {"mlr": mlr_scores, "bilinear mlr": bilinear_mlr_scores, "bilinear btt": bilinear_btt_scores}


@pytest.mark.parametrize("name", LAYERS)
def test_formula(name):
    torch.manual_seed(0)
    layer = wake(LAYERS[name](dtype=torch.float64))
    x = torch.randn(2, T, D, dtype=torch.float64)
    wanted = attend(layer, x, FORMULAS[name](layer, x, x), ab.Causal().dense(T, T))
    assert exact(layer(x), wanted)


@pytest.mark.parametrize("K", [1, 53, 96])
@pytest.mark.parametrize("name", LAYERS)
def test_memory_relation_and_terms(name, K):
    """Row 0 of the relation is empty."""
    torch.manual_seed(0)
    layer = wake(LAYERS[name](dtype=torch.float64))
    x, memory = (torch.randn(2, n, D, dtype=torch.float64) for n in (T, K))
    relation, bias = ab.Window(before=15) & ~ab.Window(before=0), torch.rand(2, 1, T, K).double()
    scores, related = FORMULAS[name](layer, x, memory) + bias, relation.dense(T, K)
    out, weights = layer(x, memory, relation=relation, terms=[ab.PairBias(bias)], return_weights=True)
    assert exact(out, attend(layer, memory, scores, related))
    wanted = scores.masked_fill(~related, -torch.inf).softmax(-1)
    assert exact(weights, torch.where(related.any(-1, keepdim=True), wanted, 0))
    layout = relation.layout(T, K, form="tiles", score=layer.score)
    assert exact(layer(x, memory, relation=layout, terms=[ab.PairBias(bias)]), out)


@pytest.mark.parametrize("name", LAYERS)
def test_softcap(name):
    torch.manual_seed(0)
    layer = wake(LAYERS[name](softcap=0.5, dtype=torch.float64))
    x = torch.randn(2, T, D, dtype=torch.float64)
    scores = 0.5 * torch.tanh(FORMULAS[name](layer, x, x) / 0.5)
    assert exact(layer(x), attend(layer, x, scores, ab.Causal().dense(T, T)))


@pytest.mark.parametrize("name", LAYERS)
def test_tokens_without_a_batch(name):
    """An error about ranks said nothing of the missing dimension."""
    torch.manual_seed(0)
    layer = wake(LAYERS[name](dtype=torch.float64))
    x, memory = torch.randn(T, D, dtype=torch.float64), torch.randn(9, D, dtype=torch.float64)
    assert exact(layer(x), layer(x[None])[0])
    assert exact(layer(x, memory), layer(x[None], memory[None])[0])
    assert layer(x[:0]).shape == (0, D) and layer(x[:0][None]).shape == (1, 0, D)


@pytest.mark.parametrize("name", LAYERS)
def test_a_step_of_decoding_equals_prefill(name):
    torch.manual_seed(0)
    widths = {"widths": [None, 24, 8]} if name == "mlr" else {}
    layer = wake(LAYERS[name](dtype=torch.float64, **widths))
    x = torch.randn(2, T, D, dtype=torch.float64)
    whole = layer(x)
    for t in (0, 1, 7, 8, 23, 24, 25, T - 1):
        assert exact(layer(x[:, t : t + 1], x[:, : t + 1], q_start=t), whole[:, t : t + 1])
    assert exact(layer(x[:, 30:41], x[:, :41], q_start="end"), whole[:, 30:41])


@pytest.mark.parametrize("name", LAYERS)
def test_dropout_is_on_only_in_training(name):
    layer, x = wake(LAYERS[name](dropout=0.5)), torch.randn(1, 9, D)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_with_memory_compiles_whole(name):
    torch._dynamo.reset()
    layer = wake(LAYERS[name]())
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    x, memory = torch.randn(2, 20, D), torch.randn(2, 33, D)
    for given in ((x,), (x, memory)):
        grads = [torch.autograd.grad(run(*given).sum(), layer.value.weight)[0] for run in (compiled, layer)]
        assert torch.equal(compiled(*given), layer(*given)) and torch.equal(*grads)


def test_names_of_parameters_stay():
    """State dicts of earlier versions load."""
    names = {name: list(make().state_dict()) for name, make in LAYERS.items()}
    levels = [f"{kind}.{i}" for kind in ("query", "key") for i in range(3)]
    norms = [f"{kind}_norms.{i}.weight" for kind in ("query", "key") for i in range(3)]
    ends = ["value.weight", "output.weight"]
    assert sorted(names["mlr"]) == sorted(
        [*ends, "query.weight", "key.weight", "query_norm.weight", "key_norm.weight"]
    )
    assert sorted(names["bilinear mlr"]) == sorted([*ends, *levels, *norms])
    assert sorted(names["bilinear btt"]) == sorted([*ends, "right", "left", "key_norm.weight"])


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


def test_a_layer_of_few_inputs_learns_as_an_embedding():
    """A ``Linear(1, width)`` learned at 768 times the rate."""
    for inputs, rate in ((1, 1), (15, 1), (16, 48), (768, 1)):
        found = parameter_groups(nn.Linear(inputs, 5, bias=False), 0.5)
        assert [group["lr"] for group in found] == [0.5 * rate]


def test_the_layers_own_matrices_keep_the_papers_rate_however_small():
    small = {g["lr"]: len(g["params"]) for g in MLRAttention(8, 2, [2, 2]).parameter_groups(0.5)}
    assert small == {0.5: 2, 0.5 * 96: 4}
    assert {g["lr"] for g in BilinearBTTAttention(16, 2).parameter_groups(1.0)} == {1.0, 48.0, 96.0, 384.0}


def test_modules_can_be_excluded_from_the_learning_rates():
    model = nn.Sequential(nn.Linear(96, 96), nn.Sequential(nn.Linear(96, 96), MLRAttention(96, 3, [16, 16])))
    rates = {g["lr"]: len(g["params"]) for g in parameter_groups(model, 1.0, exclude=[model[1]])}
    assert rates == {1.0: 9, 8.0: 1}
    with pytest.raises(ValueError, match="exclude: wanted modules of the model, got another Linear"):
        parameter_groups(model, 1.0, exclude=[nn.Linear(96, 96)])


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
    with pytest.raises(ValueError, match="relation: wanted one for 4 heads, got a PerHead for 2"):
        BilinearBTTAttention(32, 4, ab.PerHead([ab.Causal(), ab.Full()]))
    for layer in (make() for make in LAYERS.values()):
        with pytest.raises(ValueError, match=r"x: wanted \[n, 32\] or \[B, n, 32\], .* got \[2, 9, 31\]"):
            layer(torch.randn(2, 9, 31))
        with pytest.raises(ValueError, match=r"memory: wanted .* x and memory alike, got \[7, 32\]"):
            layer(torch.randn(2, 9, 32), torch.randn(7, 32))
    with pytest.raises(ValueError, match="rank: wanted at least 1, got 0"):
        BilinearBTTAttention(32, 4, rank=0)
