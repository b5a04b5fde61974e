"""Relations, shapes, calls and the same by autograd, for tests of tile kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import attnbias as ab
from attnbias.backends.call import Call, Inputs, Needs
from attnbias.op.dispatch import InOp
from attnbias.testing import assert_no_worse, eager, magnitudes, make_inputs

NAMES = ("out", "lse", "query", "key", "value", "sink")
RELATIONS = {
    "full": ab.Full(),
    "empty": ab.Empty(),
    "causal": ab.Causal(),
    "window": ab.Causal() & ab.Window(before=31),
    "strictly past": ab.Causal() & ~ab.Window(before=0),  # row 0 is empty
    "scattered": ab.Where(lambda q, k: (q * 7 + k * 3) % 5 == 0),
    "far": ab.Window(before=300) & ~ab.Window(before=60),  # rows with no tile at all
}
# B, H, Hk, Q, K, D, E
SHAPES = [
    (1, 1, 1, 64, 64, 64, 64),
    (1, 2, 1, 97, 129, 16, 24),
    (2, 2, 1, 65, 63, 80, 33),
    (1, 2, 2, 129, 97, 7, 1),
    (1, 1, 1, 130, 260, 128, 96),
]


def make_call(
    relation: ab.Relation,
    shape: tuple[int, ...],
    *,
    tile: int | None = 64,
    form: Any = "tiles",
    scale: float | None = None,
    softcap: float = 0.0,
    sink: bool = False,
    capacity: int | None = None,
    **how: Any,
) -> Call:
    """Draw inputs of B, H, Hk, Q, K, D, E and lay the relation out."""
    B, H, _, Q, K, D, _ = shape
    q, k, v = make_inputs(sum(shape), *shape, **how)
    layout = ab.Layout.build(relation, Q, K, form=form, tile=tile, batch=B, heads=H, capacity=capacity)
    logits = torch.linspace(-1, 2, H) if sink else None
    scale = D**-0.5 if scale is None else scale
    return Call(Inputs(q, k, v, logits), layout, scale, softcap)


def make_grads(call: Call) -> tuple[Tensor, Tensor]:
    """Draw the gradients of out and lse."""
    B, H, Q, _ = call.query.shape
    rng = torch.Generator().manual_seed(1)
    d_out = torch.randn(B, H, Q, call.value.shape[3], generator=rng).to(call.query.dtype)
    return d_out, torch.randn(B, H, Q, generator=rng)


def expected(call: Call, dtype: torch.dtype, d_out: Tensor, d_lse: Tensor) -> list[Tensor]:
    """Compute results and gradients from the layout's dense counts, by autograd in one precision."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in (call.query, call.key, call.value)]
    if call.sink is not None:
        leaves.append(call.sink.detach().to(dtype).requires_grad_())
    sink = leaves[3] if call.sink is not None else None
    counts = call.layout.rows(0, call.query.shape[2])
    out, lse = eager(*leaves[:3], counts=counts, scale=call.scale, softcap=call.softcap, sink=sink)
    finite = torch.where(lse.isfinite(), lse, 0)
    total = (out.double() * d_out.double()).sum() + (finite.double() * d_lse.double()).sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(total, leaves)]


def compute(backend: InOp, call: Call, d_out: Tensor, d_lse: Tensor | None) -> list[Tensor]:
    """Compute out, lse and every gradient with a backend."""
    out, lse = backend.forward(call)
    needs = Needs(True, True, True, call.sink is not None)
    grads = backend.backward(call, out, lse, d_out, d_lse, needs)
    return [out, lse, *(grad for grad in grads if grad is not None)]


def check(backend: InOp, call: Call) -> None:
    """Compare results and gradients with eager code of the same dtype and with float64."""
    d_out, d_lse = make_grads(call)
    got = compute(backend, call, d_out, d_lse)
    same = expected(call, call.query.dtype, d_out, d_lse)
    truth = expected(call, torch.float64, d_out, d_lse)
    sizes = magnitudes(call.query, call.key, call.value, d_out, d_lse, call.scale)
    empty = (truth[1] == -torch.inf)[..., None]
    for name, x, eager_x, oracle in zip(NAMES, got, same, truth, strict=False):
        factor = 2.0 if name in ("out", "lse") else 3.0
        where = empty if name in ("out", "query") else None
        assert_no_worse(name, x, eager_x, oracle, factor, empty=where, magnitude=sizes[name])
