"""``attnbias.verify``: check a call on the caller's own tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from ..op import dispatch
from ..op.problem import Problem
from ..op.run import attend
from ..scores.multilevel import MultiLevel
from .compare import Comparison, compare, compare_max
from .textbook import attend_rows, leaves_of, with_leaves
from .tolerance import magnitudes

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..layouts.layout import Layout
    from ..op.problem import Options
    from ..relations.relation import Relation

COMPARED = ("query", "key", "value", "sink")  # gradients


@dataclass(frozen=True, repr=False)
class Verification:
    """The errors of a call of ``attention`` on given tensors; print it to read it."""

    backend: str
    results: dict[str, Comparison]  # by name: out, lse, query, key, value, sink, max

    @property
    def ok(self) -> bool:
        """Whether no error is above 2 times (gradients: 3 times) the textbook computation's."""
        return not any(result.fault for result in self.results.values())

    def __str__(self) -> str:
        head = f"{self.backend:10}{'error':>10}{'eager':>10}{'largest':>10}"
        lines = [
            f"{name:10}{result.error:10.1e}{result.eager:10.1e}{result.largest:10.1e}  {result.fault or 'ok'}"
            for name, result in self.results.items()
        ]
        return "\n".join([head, *lines])

    __repr__ = __str__  # what a notebook shows


def verify(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    relation: Relation | Layout | None = None,
    *,
    return_lse: bool = False,
    return_max: bool = False,
    backend: str | None = None,
    **options: Unpack[Options],
) -> Verification:
    """Compare what ``attention`` computes with these arguments, gradients included, with float64.

    Takes the arguments of ``attention``; the gradients are those of a random weighting of the results. Each
    error is printed next to that of eager PyTorch in the same dtype; no tolerance is tuned.
    Memory is bounded, so that long inputs can be verified; the time is that of all Q x K pairs.

    Example:
        >>> import torch
        >>> import attnbias as ab
        >>> q, k, v = torch.randn(3, 1, 2, 50, 8)
        >>> ab.verify(q, k, v, ab.Causal()).ok
        True
    """
    problem = Problem(query, key, value, relation, return_lse=return_lse, return_max=return_max, **options)
    problem.draw_seed()
    name = dispatch.choose(problem, dispatch.asked_for(backend))
    score, scale = problem.score, problem.scale
    if isinstance(score, MultiLevel):
        scale /= min(score.ranks)

    def sizes(d_out: Tensor, d_lse: Tensor, out: Tensor | None = None) -> dict[str, float]:
        inputs = problem.query, problem.key, problem.value
        return magnitudes(*inputs, d_out, d_lse, scale, problem.dropout_p)

    results = compare(
        lambda leaves: attend(with_leaves(problem, leaves), name),
        partial(attend_rows, problem),
        {what: x for what, x in leaves_of(problem).items() if what in COMPARED},
        sizes,
    )
    if return_max:
        row_max = attend(problem, name)[2]
        assert row_max is not None
        none = problem.query.new_zeros(0)
        results["max"] = compare_max(problem, row_max, sizes(none, none)["lse"])
    return Verification(name, results)
