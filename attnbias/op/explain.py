"""Say what a call would do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from ..backends import sdpa, triton
from ..backends.triton.work import describe_splits
from ..scores.multilevel import MultiLevel
from . import dispatch
from .problem import Problem

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..layouts.layout import Layout
    from ..layouts.stats import Stats
    from ..relations.relation import Relation
    from .problem import Options


@dataclass(frozen=True, repr=False)
class Explanation:
    """The backend of a call, the reasons for it, and the work; print it to read it."""

    backend: str
    why: str
    others: dict[str, str]  # why not the others
    layout: Stats  # of all groups: heads and batch elements that share a relation share a group
    split: str = ""  # into how many GPU programs long rows are split, for each result; "" if none is
    score: MultiLevel | None = None  # in place of the dot product

    def __str__(self) -> str:
        stats = self.layout
        rows = [
            ("backend", f"{self.backend}: {self.why}"),
            *(("not", f"{name}: {why}") for name, why in self.others.items()),
            ("tiles", f"{stats.tiles_full} full, {stats.tiles_partial} partial, of {stats.tile}"),
            ("edges", f"{stats.edges}"),
            *((("score", repr(self.score)),) if self.score else ()),
            ("pairs", f"{stats.pairs} needed, {stats.executed} executed ({stats.waste:.2f}x)"),
            ("layout", f"{stats.bytes} bytes, {stats.patterns} patterns"),
            *((("split", self.split),) if self.split else ()),
        ]
        return "\n".join(f"{name:8}{what}" for name, what in rows)

    __repr__ = __str__  # what a notebook shows


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    relation: Relation | Layout | None = None,
    *,
    return_lse: bool = False,
    return_max: bool = False,
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
        not     sdpa: it is the default only on CUDA devices
        not     triton: ...
        not     cudnn: ...
        not     cpu: ...
        not     rows: it could run this, but 'reference' was chosen
        tiles   ... full, ... partial, of ...
        edges   0
        pairs   32896 needed, ... executed (...x)
        layout  ... bytes, 1 patterns
    """
    problem = Problem(query, key, value, relation, return_lse=return_lse, return_max=return_max, **options)
    name = dispatch.asked_for(backend)
    chosen = dispatch.choose(problem, name)
    others = {other: _why_not(problem, other, chosen) for other in dispatch.BACKENDS if other != chosen}
    layout = problem.lay_out()
    split = describe_splits(problem, layout) if chosen == triton.name else ""
    score = problem.score if isinstance(problem.score, MultiLevel) else None
    return Explanation(chosen, _why(name, chosen), others, layout.stats(), split, score)


def _why(asked: str | None, chosen: str) -> str:
    if asked is not None:
        return "it was asked for"
    return sdpa.WHY_DEFAULT if chosen == sdpa.name else "it is the first that can run this"


def _why_not(problem: Problem, name: str, chosen: str) -> str:
    reasons = [*dispatch.BACKENDS[name].why_not(problem), *dispatch.why_not_by_default(problem, name)]
    return "; ".join(reasons) or f"it could run this, but {chosen!r} was chosen"
