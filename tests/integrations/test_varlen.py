"""``varlen_attn`` against attention of each sequence by definition, and torch's signature."""

import inspect
from itertools import pairwise

import pytest
import torch

from attnbias.integrations.varlen import varlen_attn
from attnbias.testing import assert_no_worse

SIZES = [
    ((3, 1, 0, 5), (3, 1, 0, 5)),
    ((3, 1, 2, 5), (6, 4, 2, 5)),
    ((1, 1, 1), (97, 0, 64)),
    ((5, 0, 70, 2), (2, 4, 70, 0)),
]
WINDOWS = [(-1, -1), (-1, 0), (3, 0), (2, 1), (-1, 2), (4, -1)]


def draw(sizes, dtype=torch.float32, heads=(4, 2)):
    """Return query [., H, 8], key and value [., Hk, 8 and 6], and the offsets."""
    rng = torch.Generator().manual_seed(0)
    queries, keys = (sum(each) for each in sizes)
    shapes = (queries, heads[0], 8), (keys, heads[1], 8), (keys, heads[1], 6)
    tensors = [torch.randn(shape, generator=rng).to(dtype).requires_grad_() for shape in shapes]
    return tensors, [torch.tensor([0, *torch.tensor(each).cumsum(0)], dtype=torch.int32) for each in sizes]


def by_definition(q, k, v, starts, window=(-1, -1), scale=None):
    """Return out and lse [H, queries], sequence by sequence."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    outs, sums = [q.new_zeros(0, q.shape[1], v.shape[2])], [q.new_zeros(q.shape[1], 0)]
    for q_span, k_span in zip(*(pairwise(x) for x in starts), strict=True):
        (a, b), (c, d) = q_span, k_span
        i, j = torch.arange(b - a)[:, None] + (d - c) - (b - a), torch.arange(d - c)
        allowed = torch.ones(b - a, d - c, dtype=torch.bool)
        allowed &= (j >= i - window[0]) | (window[0] < 0)
        allowed &= (j <= i + window[1]) | (window[1] < 0)
        scores = torch.einsum("qhd,khd->hqk", q[a:b], k[c:d]) * (8**-0.5 if scale is None else scale)
        scores = scores.masked_fill(~allowed, -torch.inf)
        is_empty = ~allowed.any(-1)
        weights = torch.softmax(scores.masked_fill(is_empty[:, None], 0), -1)
        weights = weights.masked_fill(is_empty[:, None], 0)
        outs.append(torch.einsum("hqk,khe->qhe", weights, v[c:d]))
        sums.append(scores.logsumexp(-1) if d > c else scores.new_full(scores.shape[:2], -torch.inf))
    return torch.cat(outs), torch.cat(sums, 1)


def run(f, tensors, dtype):
    inputs = [x.detach().to(dtype).requires_grad_() for x in tensors]
    out, lse = f(*inputs)
    weight = torch.arange(out.numel()).view(out.shape).to(dtype).cos()
    loss = (out * weight).sum() + lse.masked_fill(lse == -torch.inf, 0).sum()
    return out, lse, torch.autograd.grad(loss, inputs)


class Aux:
    lse = True


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("heads", [(4, 2), (3, 3)])
def test_equals_attention_of_each_sequence_with_gradients(sizes, window, heads):
    tensors, starts = draw(sizes, heads=heads)
    options = {"window_size": window, "enable_gqa": heads[0] != heads[1], "return_aux": Aux, "scale": 0.7}
    ours = run(lambda *x: varlen_attn(*x, *starts, 9, 9, **options), tensors, torch.float32)

    def oracle(*x):
        return by_definition(*x, starts, window, 0.7)

    eager, exact = (run(oracle, tensors, dtype) for dtype in (torch.float32, torch.float64))
    assert_no_worse("out", ours[0], eager[0], exact[0], empty=(exact[1] == -torch.inf).T[..., None])
    assert_no_worse("lse", ours[1], eager[1], exact[1])
    for name, *grads in zip(("query", "key", "value"), ours[2], eager[2], exact[2], strict=True):
        assert_no_worse(name, *grads, 3)


def test_no_sequences_at_all():
    tensors, starts = draw(((), ()))
    out, lse = varlen_attn(*tensors, *starts, 0, 0, return_aux=Aux, enable_gqa=True)
    assert (out.shape, lse.shape) == ((0, 4, 6), (4, 0))
    assert [x.shape for x in torch.autograd.grad(out.sum(), tensors)] == [x.shape for x in tensors]


def test_lse_is_returned_on_request_only():
    tensors, starts = draw(SIZES[0], heads=(2, 2))
    torch_varlen = pytest.importorskip("torch.nn.attention.varlen", reason="torch has no varlen_attn")
    out, lse = varlen_attn(*tensors, *starts, 5, 5, return_aux=torch_varlen.AuxRequest(lse=True))
    assert lse.shape == (2, 9)
    for request in (None, torch_varlen.AuxRequest()):
        assert torch.equal(varlen_attn(*tensors, *starts, 5, 5, return_aux=request), out)


def test_signature_is_torchs():
    varlen = pytest.importorskip("torch.nn.attention.varlen", reason="torch has no varlen_attn")
    wanted = inspect.signature(varlen.varlen_attn).parameters
    if "block_table" not in wanted:
        pytest.skip("this torch's varlen_attn has fewer arguments")
    ours = inspect.signature(varlen_attn).parameters
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in wanted.values()
    ]


def test_wrong_arguments_raise():
    (q, k, v), starts = draw(SIZES[0])
    with pytest.raises(ValueError, match=r"^query: wanted \[tokens, H, D\], got \[1, 9, 4, 8\]$"):
        varlen_attn(q[None], k, v, *starts, 5, 5)
    with pytest.raises(
        ValueError, match=r"^cu_seq_k: wanted offsets that end at the number of tokens, 9, got 4$"
    ):
        varlen_attn(q, k, v, starts[0], starts[1][:3], 5, 5, enable_gqa=True)
    with pytest.raises(ValueError, match=r"^key: .*heads"):
        varlen_attn(q, k, v, *starts, 5, 5)
    with pytest.raises(TypeError, match=r"^window_size: wanted"):
        varlen_attn(q, k, v, *starts, 5, 5, window_size=3)
    for name in ("seqused_k", "block_table"):
        with pytest.raises(NotImplementedError, match=f"^{name}: wanted None, paged keys are not supported"):
            varlen_attn(q, k, v, *starts, 5, 5, **{name: starts[0]})
    falling, few = torch.tensor([0, 5, 4, 9]), torch.tensor([0, len(k)])
    with pytest.raises(ValueError, match=r"^cu_seq_q: wanted offsets that rise from 0, got \[0, 5, 4, 9\]$"):
        varlen_attn(q[:9], k, v, falling, starts[1], 5, 5, enable_gqa=True)
    with pytest.raises(
        ValueError, match=rf"^cu_seq_k: wanted {len(starts[0])} offsets as in cu_seq_q, got 2$"
    ):
        varlen_attn(q, k, v, starts[0], few, 5, 5, enable_gqa=True)
