"""Attention weights: rows sum to one, the forms agree, gradients flow through."""

import pytest
import torch

import attnbias as ab
from attnbias.op import weights as module
from attnbias.testing import make_inputs

B, H, N = 2, 4, 40
RELATIONS = {
    "causal": ab.Causal(),
    "empty rows": ab.Window(before=5) & ab.Prefix(20),
    "per head": ab.PerHead([ab.Causal(), ab.Full(), ab.Empty(), ab.Causal()]),
    "graph": ab.Graph(torch.randint(N, (2, 150), generator=torch.Generator().manual_seed(0)), num_nodes=N),
}
OPTIONS = {"plain": {}, "cap": {"softcap": 2.0}, "term": {"terms": [ab.ALiBi(torch.rand(H).double())]}}
WITH_SINK = OPTIONS | {"sink": {"sink": torch.linspace(-1, 1, H, dtype=torch.float64)}}


def inputs(dtype=torch.float64):
    q, k, v = make_inputs(0, B, H, 2, N, N, 8, 8, dtype, requires_grad=True)
    return q, k, v


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("relation", RELATIONS)
def test_dense_weights_are_stochastic_and_give_the_result(relation, options):
    q, k, v = inputs()
    rel, extra = RELATIONS[relation], OPTIONS[options]
    dense = ab.attention_weights(q, k, rel, **extra)
    out, lse = ab.attention(q, k, v, rel, return_lse=True, backend="reference", **extra)
    torch.testing.assert_close(dense.sum(-1), lse.isfinite().double())  # Proposition 1; an empty row has none
    torch.testing.assert_close(dense @ v.repeat_interleave(2, 1), out)
    assert not dense[~rel.dense(N, N, batch=B, heads=H).expand_as(dense)].any()  # Lemma 1


@pytest.mark.parametrize("options", WITH_SINK)
@pytest.mark.parametrize("relation", RELATIONS)
def test_sparse_rows_agree_with_dense(relation, options, monkeypatch):
    monkeypatch.setattr(module, "PAIRS_AT_ONCE", 100)  # many parts
    q, k, _ = inputs()
    rel, extra = RELATIONS[relation], WITH_SINK[options]
    want = ab.attention_weights(q, k, rel, **extra)
    got = torch.zeros_like(want)
    for rows in ab.attention_weights(q, k, rel, form="csr", **extra):
        assert len(rows.ptr) == N + 1 and rows.ptr[-1] == len(rows.key)
        query = torch.repeat_interleave(torch.arange(N), rows.ptr.diff())
        place = (rows.batch[:, None], rows.head[:, None], query, rows.key)
        got = got.index_put(place, rows.values, accumulate=True)  # each duplicate edge has its own
    torch.testing.assert_close(got, want)
    grads = [torch.autograd.grad(x.sin().sum(), (q, k)) for x in (got, want)]
    torch.testing.assert_close(*grads)


def test_edges_are_in_the_callers_order_and_dropped_edges_have_no_weight():
    q, k, _ = inputs()
    graph = RELATIONS["graph"]
    source, target = graph.edge_index
    got = ab.attention_weights(q, k, graph, form="edges")
    assert got.shape == (B, 150, H)
    dense = ab.attention_weights(q, k, graph)
    often = graph.multiplicity(target, source)
    torch.testing.assert_close(got * often[:, None], dense[:, :, target, source].mT)
    causal = graph & ab.Causal()
    got = ab.attention_weights(q, k, causal, form="edges")
    assert not got[:, source > target].any()
    assert got[:, (source <= target) & (often == 1)].all()


def test_neighbours_have_one_edge_per_slot():
    q, k, _ = inputs()
    index = torch.randint(-1, N, (N, 3), generator=torch.Generator().manual_seed(1))
    got = ab.attention_weights(q, k, ab.Neighbors(index), form="edges")
    assert got.shape == (B, 3 * N, H)
    assert torch.equal(got[0, :, 0] != 0, (index >= 0).flatten())


@pytest.mark.parametrize("bias", [0.0, -1e4, -1e30, 1e30])
def test_weights_of_a_row_sum_to_one_for_any_score(bias):
    q, k, _ = inputs(torch.float32)
    graph = RELATIONS["graph"]
    term = ab.EdgeBias(torch.full((150,), bias))
    target = graph.edge_index[1]
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            weights = ab.attention_weights(q, k, graph, form="edges", terms=[term])
        total = torch.zeros(B, N, H).index_add(1, target, weights)
        torch.testing.assert_close(
            total, (torch.bincount(target, minlength=N) > 0).float().view(1, N, 1).expand_as(total)
        )


def test_row_with_a_nan_bias_has_nan_weights():
    q, k, _ = inputs(torch.float32)
    graph = RELATIONS["graph"]
    bias = torch.zeros(150)
    bias[7] = torch.nan
    weights = ab.edge_weights(q, k, graph, terms=[ab.EdgeBias(bias)])
    wanted = (graph.edge_index[1] == graph.edge_index[1, 7])[:, None].expand(B, 150, H)
    assert torch.equal(weights.isnan(), wanted)


def test_three_dimensions():
    q, k = torch.randn(2, 3, 5, 8)
    assert ab.attention_weights(q, k, ab.Causal()).shape == (3, 5, 5)


@pytest.mark.parametrize(
    ("relation", "options", "words"),
    [
        (None, {"form": "coo"}, "form: wanted 'dense', 'edges' or 'csr', got 'coo'"),
        (None, {"dropout_p": 0.5}, "dropout_p: weights are those before dropout, wanted 0, got 0.5"),
        (
            ab.Causal(),
            {"form": "edges"},
            "form: wanted a Graph or Neighbors, by itself or & other, whose edges have numbers, got Causal",
        ),
        (ab.Causal().layout(N, N), {"form": "csr"}, "form: wanted a relation for 'csr', got a layout"),
        (RELATIONS["graph"] | ab.Causal(), {"form": "edges"}, "form: wanted a Graph or Neighbors, by"),
    ],
)
def test_bad_input_raises_a_clear_error(relation, options, words):
    q, k, _ = inputs()
    with pytest.raises(ValueError, match=f"^{words}"):
        ab.attention_weights(q, k, relation, **options)


def test_key_that_is_not_a_tensor_raises_a_clear_error():
    with pytest.raises(TypeError, match=r"^key: wanted a tensor, got list"):
        ab.edge_weights(torch.zeros(1, 2, 4), [1.0], ab.Graph([[0], [1]], num_nodes=2))
