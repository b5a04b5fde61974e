"""The cost of score terms, softcap and dropout over the plain kernel; a learnable table against SDPA."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import attnbias as ab

from ..cases.tokens import Case
from ..measure.race import steps
from ..measure.timing import Spread, interleave

# Limits of the forward time over the plain kernel's.
LIMITS = {"ALiBi": 1.25, "T5 table": 1.25, "softcap": 1.35, "dropout": 1.5}
# Floor of SDPA's time with the bias as a tensor over ours, forward and backward.
LEARNABLE_FLOOR = 3.0
BUCKETS = ab.t5_buckets(bidirectional=False, max_distance=128)


def options(case: Case) -> dict[str, dict[str, Any]]:
    """Return the options of ``attention`` that have a limit."""
    table = torch.randn(case.heads, 32, generator=torch.Generator().manual_seed(0))
    return {
        "ALiBi": {"terms": [ab.ALiBi(0.5 ** torch.arange(1, case.heads + 1))]},
        "T5 table": {"terms": [ab.RelativeBias(table, BUCKETS)]},
        "softcap": {"softcap": 20.0},
        "dropout": {"dropout_p": 0.1},
    }


def costs(case: Case, rounds: int) -> dict[str, Spread]:
    """Measure the forward time of each option over the plain kernel's, in turn."""
    attend = partial(ab.attention, relation=case.relation)
    named = options(case)
    calls = [attend, *(partial(attend, **given) for given in named.values())]
    functions = [steps(call, case.inputs(), backward=False) for call in calls]
    plain, *others = interleave(functions, rounds)
    return {
        name: Spread.of([with_option / without for with_option, without in zip(each, plain, strict=True)])
        for name, each in zip(named, others, strict=True)
    }


def learnable(case: Case, rounds: int) -> Spread:
    """Measure SDPA with a T5 table expanded to all pairs, over ours, with all gradients."""
    q, k, v, d_out = case.inputs()
    table = torch.randn(case.heads, 32, generator=torch.Generator().manual_seed(0))
    leaves = [x.requires_grad_() for x in (q, k, v, table)]
    positions = torch.arange(case.tokens)
    distance = positions - positions[:, None]
    bucket, future = BUCKETS(distance, 32), distance > 0

    def ours() -> tuple[Tensor, ...]:
        out = ab.attention(q, k, v, case.relation, terms=[ab.RelativeBias(table, BUCKETS)])
        return torch.autograd.grad(out, leaves, d_out)

    def theirs() -> tuple[Tensor, ...]:
        bias = table[:, bucket].masked_fill(future, -torch.inf)[None]
        out = scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return torch.autograd.grad(out, leaves, d_out)

    pairs = zip(*interleave([ours, theirs], rounds), strict=True)
    return Spread.of([theirs / ours for ours, theirs in pairs])
