"""Calls that are a part of a larger problem, in the Triton kernels as compiled: every access in bounds."""

from dataclasses import replace

import pytest
import torch

import attnbias as ab
from attnbias.backends.places import Places
from attnbias.op.problem import Problem
from attnbias.op.run import attend
from attnbias.testing import assert_no_worse, magnitudes, make_inputs

B, H, WHOLE, FIRST_ROW, FIRST_KEY = 1, 2, 148, 128, 64
Q, K, D = WHOLE - FIRST_ROW, WHOLE - FIRST_KEY, 16


@pytest.mark.parametrize("form", ["tiles", "edges"])
def test_part(gpu, form):
    """The last rows of a window: terms, dropout and, on tiles, the gradients of distances."""
    relation = ab.Window(before=40)
    made = ab.Layout.build(relation, Q, K, q_start=FIRST_ROW - FIRST_KEY, form=form, tile=64)
    layout = ab.Layout(made.buffer, replace(made.header, q_start=0).write())
    whole = ab.Layout.build(relation, WHOLE, WHOLE, form=form, tile=64)
    inputs = make_inputs(1, B, H, 1, WHOLE, WHOLE, D, D)
    slopes = torch.rand(H, generator=torch.Generator().manual_seed(2))
    rows, keys = torch.arange(FIRST_ROW, WHOLE), torch.arange(FIRST_KEY, WHOLE)
    places = Places(rows.int(), keys.int(), WHOLE, WHOLE)

    def results(backend, dtype, is_part):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (*inputs, slopes)]
        given = [x[:, :, at] for x, at in zip(leaves, (rows, keys, keys), strict=False)]
        problem = Problem(
            *(given if is_part else leaves[:3]),
            layout if is_part else whole,
            places=places if is_part else None,
            terms=[ab.ALiBi(leaves[3])],
            dropout_p=0.4,
            return_lse=True,
        )
        problem.seed = torch.tensor([2**40 + 3])
        out, lse, _ = attend(problem, backend)
        if not is_part:
            out, lse = out[:, :, rows], lse[:, :, rows]
        return [out, lse, *torch.autograd.grad(out.sin().sum() + lse.sum(), leaves)]

    got = results("triton", torch.float32, is_part=True)
    same, truth = (results("rows", dtype, is_part=False) for dtype in (torch.float32, torch.float64))
    ones = torch.ones(B, H, Q, D)
    sizes = magnitudes(*inputs, ones, ones[..., 0], D**-0.5, 0.4, 40.0)
    sizes["slopes"] = sizes["sink"] * 40
    names = ("out", "lse", "query", "key", "value", "slopes")
    for name, mine, theirs, exact in zip(names, got, same, truth, strict=True):
        factor = 2.0 if name in ("out", "lse") else 3.0
        assert_no_worse(name, mine, theirs, exact, factor, magnitude=sizes[name])
