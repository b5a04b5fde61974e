"""The one comparison: run a call and the textbook on the same numbers, gradients included, apply the rule.

A call is checked against the textbook in float64. How exact it has to be follows from the textbook in the
call's own dtype (see ``tolerance``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..backends import reference
from ..relations import Relation
from .textbook import Leaves, eager, leaves_of, with_leaves
from .tolerance import WorseError, assert_no_worse, magnitudes

if TYPE_CHECKING:
    from ..op.problem import Problem

# out [B, H, Q, E] and, if there is one, lse [B, H, Q]; nothing is done with more
Result = tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor | None]
Inputs = tuple[Tensor, Tensor, Tensor]  # query [B, H, Q, D], key [B, Hk, K, D], value [B, Hk, K, E]

STRIP_ELEMENTS = 2**24  # scores that the textbook keeps in memory: longer problems go strip by strip of rows
ROWS_AT_ONCE = 64  # of ``compare_rows``


class Comparison(NamedTuple):
    """One result against float64: the largest errors, and what is wrong with it ("" = nothing)."""

    error: float
    eager: float  # error of the textbook computation in the same dtype
    largest: float  # absolute value of the exact result
    fault: str
    wrong: Tensor | None = None  # bool, of a faulty result: its elements
    got: Tensor | None = None  # a faulty result itself


def compare(
    attend: Callable[[Leaves], Result],
    textbook: Callable[[Tensor, Leaves], Result],
    leaves: Leaves,
    sizes: Callable[[Tensor, Tensor, Tensor], dict[str, float]],
    *,
    rows: Tensor | None = None,
    strip: int | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
) -> dict[str, Comparison]:
    """Compare a call's results, and the gradients of a random weighting of them, with the textbook's.

    The textbook runs over strips of query rows, so that memory stays bounded.

    Args:
        attend: the call to check, on all query rows.
        textbook: the same for some rows, by their numbers; the query that it gets holds only these rows.
        leaves: "query", "key", "value" and every other tensor whose gradient is compared, by name.
        sizes: returns the intermediate sizes by name (see ``magnitudes``); it gets the gradients of out and
            lse and the exact out.
        rows: [n], the query rows to compare; the gradients are those of these rows. None: all.
        strip: rows of a strip; by default as many as ``STRIP_ELEMENTS`` allows.
        seed: of the gradients of out and lse.
        device: where ``attend`` runs; by default where the leaves are. The textbook stays with the leaves.

    Returns:
        A comparison for out, for lse if the call returns one, and for the gradient of each leaf.
    """
    query, home = leaves["query"], leaves["query"].device
    (B, H, Q, _), K = query.shape, leaves["key"].shape[2]
    if rows is not None:
        rows = rows.to(home)
        query = query[:, :, rows]
    generator = torch.Generator().manual_seed(seed)
    shapes = (*query.shape[:3], leaves["value"].shape[3]), query.shape[:3]
    d_out, d_lse = (torch.randn(shape, generator=generator, device="cpu").to(home) for shape in shapes)
    d_out = d_out.to(query.dtype)  # rounded first, so that every precision sees the same numbers
    there = {name: x.to(device) for name, x in leaves.items()}
    got = {name: x.to(home) for name, x in _differentiate(attend, there, (d_out, d_lse), rows).items()}
    numbers = torch.arange(Q, device=home) if rows is None else rows
    gradients = (d_out, d_lse) if "lse" in got else (d_out,)
    strip = strip or max(1, STRIP_ELEMENTS // max(1, B * H * K))
    strips = partial(_by_strips, textbook, rows=numbers, gradients=gradients, strip=strip)
    here = leaves | {"query": query}
    same, exact = strips(here), strips({name: x.double() for name, x in here.items()})
    bounds = sizes(d_out, d_lse, exact["out"])
    return {name: _judge(name, x, same[name], exact[name], bounds[name]) for name, x in got.items()}


def _differentiate(
    call: Callable[[Leaves], Result], leaves: Leaves, gradients: Sequence[Tensor], rows: Tensor | None = None
) -> dict[str, Tensor]:
    """Return out, lse if both the call and ``gradients`` have one, and the gradients, by name."""
    leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}
    with torch.enable_grad():
        pairs = [(x, d) for x, d in zip(call(leaves), gradients, strict=False) if x is not None]
        if rows is not None:
            pairs = [(x[:, :, rows], d) for x, d in pairs]
    results = [x for x, _ in pairs]
    weights = [d.to(x) for x, d in pairs]
    grads = torch.autograd.grad(results, list(leaves.values()), weights, materialize_grads=True)
    found = dict(zip(("out", "lse"), results, strict=False)) | dict(zip(leaves, grads, strict=True))
    if rows is not None:
        found["query"] = found["query"][:, :, rows]
    return {name: x.detach() for name, x in found.items()}


def _by_strips(
    textbook: Callable[[Tensor, Leaves], Result],
    leaves: Leaves,
    *,
    rows: Tensor,
    gradients: Sequence[Tensor],
    strip: int,
) -> dict[str, Tensor]:
    """Return what ``_differentiate`` does, a strip at a time; the query holds the rows of these numbers."""
    by_row: dict[str, list[Tensor]] = {}
    total: dict[str, Tensor] = {}
    by_rows = [x.split(strip, 2) for x in (leaves["query"], *gradients)]
    for part, query, *weights in zip(rows.split(strip), *by_rows, strict=True):
        here = leaves | {"query": query}
        for name, x in _differentiate(partial(textbook, part), here, weights).items():
            if name in ("out", "lse", "query"):
                by_row.setdefault(name, []).append(x)
            else:  # in float64: the strips are ours, their sum must not add to the error
                total[name] = total[name] + x.double() if name in total else x.double()
    return {name: torch.cat(parts, 2) for name, parts in by_row.items()} | total


def _judge(name: str, got: Tensor, eager: Tensor, exact: Tensor, magnitude: float) -> Comparison:
    def distance(x: Tensor) -> float:
        far = (x.double() - exact).abs().masked_fill(exact == -torch.inf, 0)
        return far.max().item() if far.numel() else 0.0

    fault, wrong = "", None
    try:
        factor = 2.0 if name in ("out", "lse", "max") else 3.0
        assert_no_worse(name, got, eager, exact, factor, magnitude=magnitude)
    except WorseError as error:
        fault, wrong = str(error), error.wrong
    sizes = distance(got), distance(eager), distance(torch.zeros_like(exact))
    return Comparison(*sizes, fault, wrong, got if fault else None)


def compare_max(problem: Problem, got: Tensor, magnitude: float) -> Comparison:
    """Compare the largest score of each row, [B, H, Q], with the reference in float64.

    Args:
        problem: what was computed.
        got: the result to judge.
        magnitude: size of the scores (see ``magnitudes``: that of lse).
    """
    wide = {name: x.detach().double() for name, x in leaves_of(problem).items()}
    same, exact = (reference.row_max(x) for x in (problem, with_leaves(problem, wide)))
    return _judge("max", got.to(exact.device), same, exact, magnitude)


def faults_of(results: dict[str, Comparison]) -> list[str]:
    """Return what is wrong, one line per result; empty = nothing."""
    return [result.fault for result in results.values() if result.fault]


def compare_rows(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    textbook: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    inputs: Inputs,
    rows: Tensor | None = None,
    scale: float | None = None,
) -> list[str]:
    """Return what is wrong with some query rows and with the gradients that come from them; empty = nothing.

    All keys take part, and memory and time are those of the rows, not of all pairs.

    Args:
        attend: the call to check, from query, key and value to out.
        textbook: the same for some query rows, whose numbers are its fourth argument (see ``by_relation``).
        inputs: query, key and value.
        rows: [n], numbers of query rows; None: all.
        scale: factor of the dot products; None is D**-0.5.
    """
    query, key, value = inputs
    some = query if rows is None else query[:, :, rows.to(query.device)]
    scale = query.shape[3] ** -0.5 if scale is None else scale
    return faults_of(
        compare(
            lambda x: (attend(x["query"], x["key"], x["value"]), None),
            lambda part, x: (textbook(x["query"], x["key"], x["value"], part), None),
            {"query": query, "key": key, "value": value},
            lambda d_out, d_lse, out: magnitudes(some, key, value, d_out, torch.zeros(1), scale),
            rows=rows,
            strip=None if rows is None else ROWS_AT_ONCE,
        )
    )


def by_relation(relation: Relation, q_start: int = 0) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return the textbook of ``compare_rows`` for a relation that all heads and batch elements share."""

    def attend(query: Tensor, key: Tensor, value: Tensor, rows: Tensor) -> Tensor:
        keys = torch.arange(key.shape[2], device=key.device)
        return eager(query, key, value, relation.related((q_start + rows)[:, None], keys))[0]

    return attend
