"""The products that the tiles of the table execute, over those that they need (emulated)."""

import pytest
import torch

import attnbias as ab
from attnbias.benchmarks.static.figures import PRODUCTS
from attnbias.benchmarks.static.ours import KERNELS, as_shipped
from attnbias.testing import make_inputs

TOKENS = 128  # one tile of the lists, so that nothing is executed for pairs that are not there
# Head sizes of one entry each; at 256 two groups of warps compute the same scores (see whole_table.KNOWN).
TWICE = {(90, torch.bfloat16, 256, "backward_key"): 1.5, (120, torch.float32, 256, "backward_key"): 1.5}
SIZES = [pytest.param(64), *(pytest.param(d, marks=pytest.mark.slow) for d in (128, 256))]


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("d", SIZES)
def test_no_product_is_executed_twice(gpu, d, dtype):
    """8 warps on a tile of few rows execute the products of scores once for each of two groups."""
    inputs = make_inputs(0, 1, 1, 1, TOKENS, TOKENS, d, d, dtype, requires_grad=True)
    layout = ab.Layout.build(ab.Full(), TOKENS, TOKENS, form="tiles", tile=TOKENS)
    with as_shipped():
        out = ab.attention(*inputs, layout, backend="triton")
        torch.autograd.grad(out.float().sum(), inputs)
    macs = {KERNELS[x.name]: x.macs for x in gpu.launches if x.name in KERNELS}
    assert set(macs) == set(PRODUCTS)
    for which, executed in macs.items():
        of_float32 = 3 if dtype == torch.float32 else 1  # a product is three of TF32
        needed = of_float32 * PRODUCTS[which] * TOKENS**2 * d
        assert executed == needed * TWICE.get((gpu.cc, dtype, d, which), 1), which


@pytest.mark.slow
@pytest.mark.parametrize("d", [80, 128, 256])
def test_float32_as_shipped(gpu, d):
    """Heads in chunks, the last of which may be narrow or padded, with a ragged tile at the end."""
    inputs = make_inputs(0, 1, 1, 1, 140, 140, d, d, torch.float32, requires_grad=True)
    layout = ab.Layout.build(ab.Causal(), 140, 140, form="tiles", tile=TOKENS)
    with as_shipped():
        found = ab.verify(*inputs, layout, backend="triton")
    assert found.ok, found
