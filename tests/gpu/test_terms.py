"""Score terms and dropout in the Triton kernels as compiled: every access in bounds, no race."""

import pytest
import torch

import attnbias as ab
from attnbias.backends import triton
from attnbias.philox import keep_mask
from attnbias.problem import Call
from attnbias.testing import make_inputs


@pytest.mark.parametrize("form", ["tiles", "edges"])
@pytest.mark.parametrize("seed", [-3, 2**60 + 17])
def test_dropout_bits(gpu, form, seed):
    """The same bits as everywhere, and a gradient of values that comes from the weights that were kept."""
    B, H, Q, K, p = 2, 2, 20, 32, 0.4
    layout = ab.Layout.build(ab.Full(), Q, K, q_start=-5, form=form, batch=B, heads=H)
    query, key, _ = make_inputs(1, B, H, 1, Q, K, 16, 16)
    value = torch.eye(K).expand(B, 1, K, K)
    call = Call(query, key, value, layout, (), None, torch.tensor([seed]), 0.25, 0.0, p, "")
    out, lse = triton.forward(call)
    b, h = torch.arange(B)[:, None, None, None], torch.arange(H)[:, None, None]
    q, k = torch.arange(-5, Q - 5)[:, None], torch.arange(K)
    assert torch.equal(out != 0, keep_mask(torch.tensor([seed]), p, b, h, q, k))
    ones = torch.ones_like(out)
    grads = triton.backward(call, out, lse, ones, None, [True, True, True, False])
    # Tensor-core products of float32 are three of TF32: 22 bits.
    torch.testing.assert_close(
        grads[2][:, 0], out.sum((1, 2))[:, :, None].expand(B, K, K), rtol=1e-5, atol=1e-5
    )
