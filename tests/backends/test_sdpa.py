"""A single query on the backend ``sdpa``, on which the steps of Hugging Face models run."""

from types import SimpleNamespace

import pytest
import torch

import attnbias as ab
from attnbias.backends import sdpa

B, H, K = 3, 4, 37
DRAW = torch.Generator().manual_seed(0)
RELATIONS = {
    "full": (ab.Full(), 5),
    "causal": (ab.Causal(), K - 1),
    "row": (ab.Dense(torch.rand(1, K, generator=DRAW) > 0.4), 0),
    "own row per head": (ab.Dense(torch.rand(B, H, 1, K, generator=DRAW) > 0.6), 0),
    "row of a table": (ab.Dense(torch.rand(H, 5, K, generator=DRAW) > 0.5), 3),
    "empty": (ab.Dense(torch.zeros(1, K, dtype=torch.bool)), 0),
}


def inputs(key_heads=2, dtype=torch.float32, queries=1):
    shapes = (B, H, queries, 8), (B, key_heads, K, 8), (B, key_heads, K, 5)
    return [torch.randn(shape, generator=DRAW, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("biases", [0, 2])
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"sink": True}, {"softcap": 2.0, "sink": True}])
@pytest.mark.parametrize("name", RELATIONS)
def test_a_single_query_verifies(name, options, biases, dtype):
    """In float64 models, a softcap was computed in float32."""
    relation, q_start = RELATIONS[name]
    bias = torch.randn(B, 1, 40, K, generator=DRAW)
    options = options | {"terms": [ab.PairBias(bias[0, :, 3:4]), ab.PairBias(bias)][:biases]}
    if "sink" in options:
        options["sink"] = torch.randn(H, generator=DRAW)
    result = ab.verify(*inputs(dtype=dtype), relation, q_start=q_start, backend="sdpa", scale=0.3, **options)
    assert result.ok and result.backend == "sdpa", f"\n{result}"


@pytest.mark.parametrize(
    ("words", "relation", "options"),
    [
        ("relation: only Full(), Causal() and Dense, not as a layout", ab.Window(before=3), {}),
        ("terms: only PairBias", ab.Full(), {"terms": [ab.KeyBias(torch.zeros(1, K))]}),
        ("softcap: not supported", ab.Causal(), {"softcap": 2.0}),  # the first query sees one key
    ],
)
def test_a_single_query_is_refused(words, relation, options):
    with pytest.raises(NotImplementedError) as caught:
        ab.attention(*inputs(), relation, backend="sdpa", **options)
    assert str(caught.value) == f"backend 'sdpa' cannot run this: {words}"


def test_one_row_mask_does_not_make_sdpa_the_default():
    def on_cuda(relation, softcap=0.0):
        """Return what the choice reads of a problem whose tensors lie on a GPU, which is not there."""
        shape, device = (B, H, 1, 8), torch.device("cuda", 0)
        query = SimpleNamespace(device=device, dtype=torch.float32, shape=shape)
        given = {"terms": (), "softcap": softcap, "sink": None, "q_start": K - 1}
        return SimpleNamespace(query=query, key=query, value=query, relation=relation, **given)

    relation, _ = RELATIONS["row"]
    assert sdpa.why_not_by_default(on_cuda(ab.Full())) == []
    for problem in (on_cuda(relation), on_cuda(ab.Full(), softcap=2.0)):
        assert sdpa.why_not_by_default(problem) == ["it is the default only without a mask"]
