"""Flags of configurations that the table sets in no entry, or in few (emulated)."""

import pytest
import torch

import attnbias as ab
from attnbias.kernels.launch.config import Config
from attnbias.kernels.launch.tune import changed
from attnbias.testing import assert_no_worse, make_inputs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("d", "config"), [(64, "128x64 w4 s3 T A W"), (64, "128x128 w8 s2 T A W"), (128, "128x128 w8 s2 T A W")]
)
def test_warps_that_specialise(gpu, d, config):
    """Late copies and the check for races are on; the window leaves ragged tiles at both ends."""
    if gpu.cc != 100:
        pytest.skip("warps specialise on sm_100 only")
    relation = ab.Causal() & ab.Window(before=200)
    inputs = make_inputs(1, 1, 2, 1, 456, 456, d, d, torch.bfloat16)
    layout = ab.Layout.build(relation, 456, 456, form="tiles", tile=128)
    with changed(f"forward: {config}"):
        got = ab.attention(*inputs, layout, backend="triton")
    same = ab.attention(*inputs, relation, backend="reference")
    exact = ab.attention(*(x.double() for x in inputs), relation, backend="reference")
    assert_no_worse("out", got, same, exact)
    (forward,) = gpu.launches
    assert forward.warps > Config.parse(config).warps  # those that load, multiply and correct, too


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("d", "e"), [(80, 24), (96, 96), (65, 16)])
def test_heads_cut_into_chunks(gpu, d, e, dtype):
    """Ragged lengths, and heads whose last chunk is padded or is not."""
    inputs = make_inputs(2, 1, 2, 1, 97, 129, d, e, dtype)
    with changed("32x32 w4 s2 C64"):
        found = ab.verify(*inputs, ab.Causal(), scale=-0.1, backend="triton")
    assert found.ok, found


@pytest.mark.slow
@pytest.mark.parametrize("size", [80, 96])
def test_head_sizes_that_sm_80_does_not_pad(gpu, size):
    """As shipped: 64 and 16 or 32 columns in place of 128."""
    if gpu.cc != 80:
        pytest.skip("only sm_80 has such entries")
    inputs = make_inputs(3, 1, 2, 1, 140, 150, size, size, torch.bfloat16)
    layout = ab.Layout.build(ab.Causal(), 140, 150, form="tiles", tile=128)
    found = ab.verify(*inputs, layout, terms=[ab.ALiBi(torch.tensor([0.1, 0.2]))], backend="triton")
    assert found.ok, found
