"""The op's arguments: how a traced call carries a problem, and how the op reads it back.

Only traced calls come here (``torch.compile``, ``torch.export``, fake and subclassed tensors) and eager calls
that a profiler or a dispatch mode watches. Text carries what torch cannot: dynamo guards it by equality.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..backends.call import Call, Inputs, empty_row_numbers, parts_of
from ..backends.places import Places
from ..layouts.layout import Layout
from ..relations.recipe import restore
from ..scores.additive import AdditiveScore
from ..scores.multilevel import MultiLevel
from ..scores.terms import MadePart
from . import dispatch
from .problem import Problem

if TYPE_CHECKING:
    from ..scores.additive import Score
    from .dispatch import InOp

SCHEMA = (  # extras are the other Inputs, or nothing if all are None
    "Tensor query, Tensor key, Tensor value, Tensor?[] extras, "
    "Tensor[] codes, Tensor? slopes, Tensor? seed, Tensor[] layout, Tensor[] positions, SymInt[] places, "
    "SymInt q_start, float scale, float softcap, float dropout_p, str score, str relation, str backend, "
    "bool return_max"
)
# How operations are dispatched outside of an op.
_ORDINARY = (torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set())


class Rest(NamedTuple):
    """The op's arguments after the inputs, in the order of ``SCHEMA``."""

    codes: list[Tensor]
    slopes: Tensor | None
    seed: Tensor | None
    layout: list[Tensor]  # a layout's buffer and where; or the tensors of a relation's recipe
    positions: list[Tensor]  # queries and keys of Places, or nothing
    places: list[int]  # q_len, k_len, first_batch and first_head of Places, or nothing
    q_start: int
    scale: float
    softcap: float
    dropout_p: float
    score: str  # "" = the dot product
    relation: str  # the text of a recipe; "" = a layout is given
    backend: str  # "" = choose when the op runs
    return_max: bool


def encode(problem: Problem, codes: list[Tensor], slopes: Tensor | None, backend: str | None) -> Rest:
    """Write a traced problem so that it holds for every length: nothing about the layout is read.

    Raises:
        ValueError: if the program is exported and the relation holds a Python object.
    """
    if problem.layout is not None:
        layout, relation = [problem.layout.buffer, problem.layout.where], ""
    else:
        assert problem.relation is not None
        recipe = problem.relation.recipe
        # Not is_exporting(): before torch 2.13 dynamo takes that for True whenever it compiles.
        if torch.compiler._is_exporting_flag and not recipe.is_portable:
            raise ValueError(
                "relation: an exported program cannot carry a Python function or object; "
                f"pass the layout of {problem.relation!r}, relation.layout(q_len, k_len), as an argument"
            )
        layout, relation = list(recipe.data), recipe.text
    return Rest(
        codes,
        slopes,
        problem.seed,
        layout,
        *_write_places(problem.places),
        problem.q_start,
        problem.scale,
        problem.softcap,
        problem.dropout_p,
        write_score(problem.score),
        relation,
        backend or "",
        problem.return_max,
    )


def encode_call(call: Call, backend: str) -> Rest:
    """Write an eager call, whose layout and backend are known."""
    layout = [call.layout.buffer, call.layout.where]
    score = write_score(call.score)
    positions, places = _write_places(call.places)
    lists = (list(call.codes), call.slopes, call.seed, layout, positions, places)
    numbers = (call.layout.q_start, call.scale, call.softcap, call.dropout_p)
    return Rest(*lists, *numbers, score, "", backend, call.row_max is not None)


def join(inputs: Sequence[Tensor | None], rest: Rest) -> tuple[Any, ...]:
    """Return the op's arguments; most calls have no extras, and each argument costs time on its way."""
    query, key, value, *extras = inputs
    return query, key, value, extras if any(x is not None for x in extras) else [], *rest


def split(arguments: Sequence[Any]) -> tuple[Inputs, Rest]:
    """Return what :func:`join` put together."""
    query, key, value, extras, codes, slopes, seed, *lists, q_start = arguments[:11]
    # AOTInductor hands an empty list over as None.
    layout, positions, places = ([] if x is None else x for x in lists)
    rest = Rest(codes or [], slopes, seed, layout, positions, places, q_start, *arguments[11:])
    return Inputs(query, key, value, *(extras or ())), rest


def decode(inputs: Inputs, rest: Rest) -> tuple[Call, InOp]:
    """Read the call and find its backend; a traced call is checked only now."""
    score, places = read_score(rest.score), _read_places(rest)
    own_score = score
    if isinstance(score, AdditiveScore):
        own_score = AdditiveScore(inputs.weight, score.negative_slope)
    edges = None if inputs.edge_bias is None else len(inputs.edge_bias)
    with torch._C._ForceDispatchKeyGuard(*_ORDINARY):  # a relation's function may need what is above the op
        problem = Problem(
            inputs.query,
            inputs.key,
            inputs.value,
            restore(rest.relation, rest.layout) if rest.relation else Layout(*rest.layout),
            terms=[MadePart(name, edges if name == "edge" else None) for name in parts_of(inputs)],
            score=own_score,
            scale=rest.scale,
            softcap=rest.softcap,
            sink=inputs.sink,
            dropout_p=rest.dropout_p,
            q_start=rest.q_start,
            places=places,
        )
        layout = problem.lay_out()
    backend = dispatch.choose(problem, rest.backend or None, dispatch.IN_OP)
    numbers = (rest.scale, rest.softcap, rest.dropout_p)
    row_max = empty_row_numbers(inputs.query) if rest.return_max else None
    call = Call(inputs, layout, *numbers, score, rest.seed, rest.codes, rest.slopes, row_max, places)
    return call, dispatch.IN_OP[backend]


def _write_places(places: Places | None) -> tuple[list[Tensor], list[int]]:
    """Return ``positions`` and ``places`` of a ``Rest``; its q_start is that of the call."""
    if places is None:
        return [], []
    positions = [x for x in (places.queries, places.keys) if x is not None]
    return positions, [places.q_len, places.k_len, places.first_batch, places.first_head]


def _read_places(rest: Rest) -> Places | None:
    """Return what :func:`_write_places` wrote."""
    if not rest.places:
        return None
    q_len, k_len, first_batch, first_head = rest.places
    queries, keys = rest.positions or (None, None)
    return Places(queries, keys, q_len, k_len, rest.q_start, first_batch, first_head)


def write_score(score: Score | None) -> str:
    """Write the name and the numbers of a score; its tensors are inputs of the op."""
    if score is None:
        return ""
    if isinstance(score, AdditiveScore):
        return f"additive={float(score.negative_slope)!r}"
    widths = "" if score.widths is None else ",".join(str(width or 0) for width in score.widths)
    return f"levels={','.join(map(str, score.ranks))};{widths};{score.normalize or ''}"


@lru_cache(maxsize=64)
def read_score(text: str) -> Score | None:
    """Read a score, without its tensors."""
    name, _, numbers = text.partition("=")
    if not name:
        return None
    if name == "additive":
        return AdditiveScore(negative_slope=float(numbers))
    ranks, widths, normalize = numbers.split(";")
    return MultiLevel(
        tuple(map(int, ranks.split(","))),
        tuple(int(width) or None for width in widths.split(",")) if widths else None,
        normalize or None,  # type: ignore[arg-type]
    )
