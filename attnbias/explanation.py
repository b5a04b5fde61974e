"""Say what a call would do, and check what it does on the caller's own tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from . import dispatch, testing
from .backends import reference, sdpa
from .multilevel import MultiLevel
from .ops import attend, layout_of
from .problem import Problem
from .scores import AdditiveScore

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .layouts.layout import Layout, Stats
    from .problem import Options
    from .relations.relation import Relation


@dataclass(frozen=True)
class Explanation:
    """What ``attention`` does with a call; print it to read it."""

    backend: str
    why: str
    others: dict[str, str]  # why not these
    layout: Stats  # of all groups: heads and batch elements that share a relation share a group

    def __str__(self) -> str:
        stats = self.layout
        rows = [
            ("backend", f"{self.backend}: {self.why}"),
            *(("not", f"{name}: {why}") for name, why in self.others.items()),
            ("tiles", f"{stats.tiles_full} full, {stats.tiles_partial} partial, of {stats.tile}"),
            ("edges", f"{stats.edges}"),
            ("pairs", f"{stats.pairs} needed, {stats.executed} executed ({stats.waste:.2f}x)"),
            ("layout", f"{stats.bytes} bytes, {stats.patterns} patterns"),
        ]
        return "\n".join(f"{name:8}{what}" for name, what in rows)


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    relation: Relation | Layout | None = None,
    *,
    return_lse: bool = False,
    backend: str | None = None,
    **options: Unpack[Options],
) -> Explanation:
    """Say which backend ``attention`` runs with these arguments, why, and how much work that is.

    Takes and checks the arguments of ``attention``, and computes nothing but the layout.

    Raises:
        NotImplementedError: as ``attention`` does, if the named backend cannot run this.

    Example:
        >>> import torch
        >>> import attnbias as ab
        >>> q = k = v = torch.zeros(1, 8, 256, 64)
        >>> print(ab.explain(q, k, v, ab.Causal(), backend="reference"))
        backend reference: it was asked for
        not     sdpa: it is the default only on CUDA devices of sm_90 and newer
        not     triton: ...
        not     cpu: ...
        not     rows: it could, and was not taken before reference
        tiles   ... full, ... partial, of ...
        edges   0
        pairs   32896 needed, ... executed (...x)
        layout  ... bytes, 1 patterns
    """
    problem = Problem(query, key, value, relation, return_lse=return_lse, **options)
    name = dispatch.asked_for(backend)
    chosen = dispatch.choose(problem, name)
    others = {other: _why_not(problem, other, chosen) for other in dispatch.BACKENDS if other != chosen}
    why = "it was asked for" if name else "it is the first that can run this"
    return Explanation(chosen, why, others, layout_of(problem).stats())


def _why_not(problem: Problem, name: str, chosen: str) -> str:
    reasons = list(dispatch.BACKENDS[name].why_not(problem))
    if name == sdpa.name:
        reasons += sdpa.why_not_by_default(problem)
    return "; ".join(reasons) or f"it could, and was not taken before {chosen}"


class Comparison(NamedTuple):
    """One result against float64: the largest errors, and what is wrong with it ("" = nothing)."""

    error: float
    eager: float  # of the textbook computation in the same dtype
    largest: float  # absolute value of the exact result
    fault: str


@dataclass(frozen=True)
class Verification:
    """How exact a call of ``attention`` is on given tensors; print it to read it."""

    backend: str
    results: dict[str, Comparison]  # by name: out, lse, query, key, value, sink

    @property
    def ok(self) -> bool:
        """Whether no error is above 2 times (gradients: 3 times) the textbook computation's."""
        return not any(result.fault for result in self.results.values())

    def __str__(self) -> str:
        head = f"{self.backend:10}{'error':>10}{'textbook':>10}{'largest':>10}"
        lines = [
            f"{name:10}{result.error:10.1e}{result.eager:10.1e}{result.largest:10.1e}  {result.fault or 'ok'}"
            for name, result in self.results.items()
        ]
        return "\n".join([head, *lines])


def verify(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    relation: Relation | Layout | None = None,
    *,
    return_lse: bool = False,
    backend: str | None = None,
    **options: Unpack[Options],
) -> Verification:
    """Compare what ``attention`` computes with these arguments, gradients too, with float64.

    Takes the arguments of ``attention``; the gradients are those of a random weighting of the
    results. Beside each error stands that of the textbook computation in the same dtype: no
    tolerance is tuned. Memory is bounded, so that long inputs can be verified; the time is that of
    all Q x K pairs.

    Example:
        >>> import torch
        >>> import attnbias as ab
        >>> q, k, v = torch.randn(3, 1, 2, 50, 8)
        >>> ab.verify(q, k, v, ab.Causal()).ok
        True
    """
    problem = Problem(query, key, value, relation, return_lse=return_lse, **options)
    problem.draw_seed()
    name = dispatch.choose(problem, dispatch.asked_for(backend))
    weights = _draw_weights(problem)
    got = _differentiate(_detached(problem), weights, lambda copy: attend(copy, name))
    if "lse" not in got:
        weights = weights[:1]
    exact = _differentiate(_detached(problem, torch.float64), weights, reference.attend)
    textbook = _textbook(problem, weights)
    grad_out, grad_lse = _draw_weights(problem)
    levels = problem.score if isinstance(problem.score, MultiLevel) else None
    scale = problem.scale if levels is None else problem.scale / min(levels.ranks)
    sizes = testing.magnitudes(
        problem.query, problem.key, problem.value, grad_out, grad_lse, scale, problem.dropout_p
    )
    results = {what: _compare(what, got[what], textbook[what], exact[what], sizes[what]) for what in got}
    return Verification(name, results)


def _draw_weights(problem: Problem) -> list[Tensor]:
    """Random gradients of out and lse, the same in every call, past the user's generator."""
    query, generator = problem.query, torch.Generator().manual_seed(0)
    shapes = (*query.shape[:3], problem.value.shape[3]), query.shape[:3]
    return [torch.randn(shape, generator=generator, device="cpu").to(query) for shape in shapes]


def _detached(problem: Problem, dtype: torch.dtype | None = None) -> Problem:
    """The same problem on leaves that collect gradients, in another dtype when one is given."""
    leaves = copy(problem)
    leaves.query = problem.query.detach().to(dtype).requires_grad_()
    leaves.key = problem.key.detach().to(dtype).requires_grad_()
    leaves.value = problem.value.detach().to(dtype).requires_grad_()
    if problem.sink is not None:
        leaves.sink = problem.sink.detach().to(dtype).requires_grad_()
    return leaves


def _differentiate(
    problem: Problem,
    weights: Sequence[Tensor],
    run: Callable[[Problem], tuple[Tensor, Tensor | None]],
) -> dict[str, Tensor]:
    """Return out, lse if there is one, and the gradients, by name."""
    leaves = {"query": problem.query, "key": problem.key, "value": problem.value}
    if problem.sink is not None:
        leaves["sink"] = problem.sink
    with torch.enable_grad():
        out, lse = run(problem)
    results = {"out": out} if lse is None else {"out": out, "lse": lse}
    pairs = list(zip(results.values(), weights, strict=False))
    grads = torch.autograd.grad(
        [result for result, _ in pairs],
        list(leaves.values()),
        [weight.to(result.dtype) for result, weight in pairs],
        materialize_grads=True,
    )
    return results | dict(zip(leaves, grads, strict=True))


def _textbook(problem: Problem, weights: Sequence[Tensor]) -> dict[str, Tensor]:
    """Compute every pair in the dtype of the inputs, a strip of query rows at a time."""
    B, H, Q, _ = problem.query.shape
    rows = max(1, reference.STRIP_ELEMENTS // max(1, B * H * problem.key.shape[2]))
    strips = [
        _textbook_strip(problem, weights, slice(start, min(start + rows, Q)))
        for start in range(0, max(1, Q), rows)
    ]
    by_row = {name: torch.cat([strip[name] for strip in strips], dim=2) for name in ("out", "lse", "query")}
    # Summed in float64: the strips are our doing, their sum must not add to the error.
    whole = {
        name: torch.stack([strip[name].double() for strip in strips]).sum(0)
        for name in strips[0].keys() - by_row.keys()
    }
    return by_row | whole


def _textbook_strip(problem: Problem, weights: Sequence[Tensor], rows: slice) -> dict[str, Tensor]:
    strip = _detached(problem)
    strip.query = problem.query.detach()[:, :, rows].requires_grad_()
    strip.q_start = problem.q_start + rows.start
    B, H, Q, _ = strip.query.shape
    device = strip.query.device
    at = (
        torch.arange(strip.q_start, strip.q_start + Q, device=device)[:, None],
        torch.arange(strip.key.shape[2], device=device),
        torch.arange(B, device=device)[:, None, None, None],
        torch.arange(H, device=device)[:, None, None],
    )
    mask = counts = None
    if problem.layout is not None:
        counts = problem.layout.rows(rows.start, rows.stop)
    elif problem.relation is not None:
        mask, counts = problem.relation.related(*at), problem.relation.multiplicity(*at)
    return _differentiate(
        strip,
        [weight[:, :, rows] for weight in weights],
        lambda strip: testing.eager(
            strip.query,
            strip.key,
            strip.value,
            mask,
            counts=counts,
            terms=strip.terms,
            score=problem.score if isinstance(problem.score, (AdditiveScore, MultiLevel)) else None,
            scale=strip.scale,
            softcap=strip.softcap,
            sink=strip.sink,
            dropout_p=strip.dropout_p,
            seed=strip.seed,
            q_start=strip.q_start,
        ),
    )


def _compare(name: str, got: Tensor, eager: Tensor, exact: Tensor, magnitude: float) -> Comparison:
    def distance(x: Tensor) -> float:
        far = (x.double() - exact).abs().masked_fill(exact == -torch.inf, 0)
        return far.max().item() if far.numel() else 0.0

    fault = ""
    try:
        factor = 2.0 if name in ("out", "lse") else 3.0
        testing.assert_no_worse(name, got, eager, exact, factor, magnitude=magnitude)
    except AssertionError as error:
        fault = str(error)
    return Comparison(distance(got), distance(eager), distance(torch.zeros_like(exact)), fault)
