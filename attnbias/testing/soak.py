"""Random problems compared with the textbook: ``attnbias verify --random``."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..attention import attention
from ..op.problem import Problem
from ..scores.additive import AdditiveScore
from ..scores.terms import ALiBi
from .compare import Comparison, Result, compare, compare_max, faults_of
from .draw import Drawn, draw_problem
from .textbook import Leaves, attend_rows, count_pairs, leaves_of, with_leaves
from .tolerance import magnitudes

if TYPE_CHECKING:
    from ..layouts.layout import Layout


def check(
    seed: int, backend: str | None, *, small: bool = False, device: torch.device | str = "cpu"
) -> tuple[Drawn, list[str], bool]:
    """Draw a problem and compare; without its options if the backend refuses them.

    Returns:
        The problem, what is wrong (see ``find_faults``), and whether the options were left out.

    Raises:
        NotImplementedError: if the backend refuses the problem even without options.
    """
    drawn = draw_problem(seed, small=small)
    try:
        return drawn, find_faults(drawn, backend, device), False
    except NotImplementedError:
        drawn = draw_problem(seed, small=small, plain=True)
        return drawn, find_faults(drawn, backend, device), True


def find_faults(drawn: Drawn, backend: str | None = None, device: torch.device | str = "cpu") -> list[str]:
    """Return what is wrong with a backend's results and gradients, one line per result; empty = nothing.

    See ``find_results``.
    """
    return faults_of(find_results(drawn, backend, device))


def find_results(
    drawn: Drawn,
    backend: str | None = None,
    device: torch.device | str = "cpu",
    layout: Layout | None = None,
) -> dict[str, Comparison]:
    """Compare a backend's results and gradients, and the largest score of each row, with the textbook's.

    The backend computes on ``device``, the textbook on the CPU.

    Args:
        drawn: the call.
        backend: by name; None for the chosen one.
        device: of the backend.
        layout: what the backend gets in place of the relation, such as one that was made on the device.

    Raises:
        NotImplementedError: if the backend refuses the problem.
    """
    problem = Problem(*drawn.inputs, drawn.relation, **drawn.options)
    (batch, heads, q_len), k_len = problem.query.shape[:3], problem.key.shape[2]
    relation: Any = drawn.relation if layout is None else layout
    if drawn.form and layout is None:
        sizes = {"q_start": problem.q_start, "batch": batch, "heads": heads}
        relation = relation.layout(q_len, k_len, form=drawn.form, device=device, **sizes)
    if problem.dropout_p:  # the dropout seed is the call's first and only draw
        torch.manual_seed(drawn.seed)
        problem.seed = torch.randint(0, 2**63 - 1, (1,), device=device).cpu()

    def attend(leaves: Leaves, **more: bool) -> Result:
        torch.manual_seed(drawn.seed)
        mine = with_leaves(problem, leaves)
        changed = {"terms": mine.terms, "score": mine.score, "sink": mine.sink}
        options: dict[str, Any] = drawn.options | changed
        inputs = mine.query, mine.key, mine.value
        return attention(*inputs, relation, return_lse=True, backend=backend, **options, **more)  # type: ignore[call-overload, no-any-return]

    results = compare(
        attend,
        partial(attend_rows, problem),
        leaves_of(problem),
        partial(_sizes, problem),
        seed=drawn.seed,
        device=device,
    )
    # In a call of its own, because kernels without it are others.
    there = {name: x.detach().to(device) for name, x in leaves_of(problem).items()}
    none = torch.zeros(0)
    size = _sizes(problem, none, none, none)["lse"]
    try:
        row_max = attend(there, return_max=True)[-1]
    except NotImplementedError:  # the backend has none
        return results
    assert row_max is not None
    results["max"] = compare_max(problem, row_max.cpu(), size)
    return results


def _sizes(problem: Problem, d_out: Tensor, d_lse: Tensor, out: Tensor) -> dict[str, float]:
    """Return the size of the numbers rounded on the way to each result."""
    query, key, value = problem.query, problem.key, problem.value
    heads, scale, score = query.shape[1], problem.scale, problem.score
    leaves = leaves_of(problem)
    # The gradient of a slope is that of its pairs times their distances.
    farthest = query.shape[2] + key.shape[2] + 9.0
    factors = {
        f"term {i}": farthest if isinstance(term, ALiBi) else 1.0
        for i, term in enumerate(problem.terms)
        if f"term {i}" in leaves
    }
    bias = sum(times * _largest(leaves[name]) for name, times in factors.items())
    inputs = query, key, value, d_out, d_lse
    if not isinstance(score, AdditiveScore):
        sizes = magnitudes(*inputs, scale, problem.dropout_p, bias, out)
    else:
        weight = torch.ones(1, query.shape[3]) if score.weight is None else score.weight.detach().float()
        scale = abs(scale) * max(1.0, abs(score.negative_slope))
        nodes = sum(float(x.detach().float().norm(dim=-1).max()) for x in (query, key))
        bias += scale * float(weight.norm(dim=-1).max()) * nodes
        sizes = magnitudes(*inputs, 0.0, problem.dropout_p, bias, out)
        share = heads // key.shape[1]
        sizes["query"] = sizes["key"] = scale * float(weight.abs().max()) * sizes["sink"] * math.sqrt(share)
        sizes["weight"] = scale * nodes * sizes["sink"]
    # An entry of a term's tensor adds up pairs as a sink does, those of all heads if they share it.
    for name, times in factors.items():
        sizes[name] = sizes["sink"] * times * math.sqrt(heads)
    # A pair of n edges is added n times, each with the same error of half a step; eager adds it once.
    counts = count_pairs(problem, torch.arange(query.shape[2], device=query.device))
    most = float(counts.max()) if counts.numel() else 1.0
    return {name: size * max(1.0, most / 2) for name, size in sizes.items()}


def _largest(x: Tensor) -> float:
    """Return the largest finite absolute value; 0 if there is none."""
    sizes = x.detach()[x.detach().isfinite()].abs()
    return float(sizes.max()) if sizes.numel() else 0.0
