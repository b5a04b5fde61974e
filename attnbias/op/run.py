"""Run a checked problem: in eager as one ``Call``, while tracing as the op."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from ..backends import reference
from ..backends.call import Call, Inputs, empty_row_numbers
from ..backends.places import Places
from ..scores.additive import AdditiveScore
from ..scores.terms import PARTS, make_parts
from . import dispatch
from .codec import encode, join
from .library import forward_op, is_traced, refuse_transformed, run_eager
from .problem import Problem


def attend(problem: Problem, name: str | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Run a problem on the named backend, or on the first that can.

    Returns:
        out [B, H, Q, E]; lse [B, H, Q], unless the backend has none; and the largest score of each row,
        [B, H, Q], if the problem wants it.
    """
    if is_traced(problem.query):
        in_place = dispatch.choose_traced(problem, name)
        if in_place is not None:
            return _attend_in_place(in_place, problem)
        inputs, codes, slopes = _make_inputs(problem)
        out, lse, row_max = forward_op(*join(inputs, encode(problem, codes, slopes, name)))
        return out, lse, row_max if problem.return_max else None
    name = dispatch.choose(problem, name)
    if name in dispatch.IN_PLACE:
        return _attend_in_place(dispatch.IN_PLACE[name], problem)
    refuse_transformed(_given(problem))
    return run_eager(_make_call(problem), name)


def _attend_in_place(
    backend: dispatch.InPlace, problem: Problem
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    # No other backend in place takes return_max.
    row_max = reference.row_max(problem) if problem.return_max else None
    return *backend.attend(problem), row_max


def _given(problem: Problem) -> Iterator[object]:
    """Yield all that a transform may have wrapped: the inputs, and the fields of terms and score."""
    yield from (problem.query, problem.key, problem.value, problem.sink)
    for part in (*problem.terms, problem.score):
        if part is not None:
            yield from vars(part).values()


def _make_call(problem: Problem) -> Call:
    inputs, codes, slopes = _make_inputs(problem)
    score = problem.score
    if isinstance(score, AdditiveScore):
        score = AdditiveScore(negative_slope=score.negative_slope)  # its weight is among the inputs
    numbers = (problem.scale, problem.softcap, problem.dropout_p)
    row_max = empty_row_numbers(problem.query) if problem.return_max else None
    layout, places = problem.lay_out(), problem.places
    return Call(inputs, layout, *numbers, score, problem.seed, codes, slopes, row_max, places)


def _make_inputs(problem: Problem) -> tuple[Inputs, list[Tensor], Tensor | None]:
    """Return the tensors that may need a gradient, the codes of a grid, and slopes (see ``make_parts``)."""
    tensors = problem.query, problem.key, problem.value, problem.sink
    if not problem.terms and problem.score is None:
        return Inputs(*tensors), [], None
    sizes, weight = problem.sizes, None
    if isinstance(problem.score, AdditiveScore):
        weight = problem.score.make_weight(sizes, problem.query.shape[3])
    parts, codes, slopes = make_parts(problem.terms, sizes)
    if problem.places is not None and problem.places.queries is not None:
        codes = _take_places(problem.places, parts, codes)
    return Inputs(*tensors, weight, *map(parts.get, PARTS)), codes, slopes


def _take_places(places: Places, parts: dict[str, Tensor], codes: list[Tensor]) -> list[Tensor]:
    """Reduce parts that have numbers of keys and rows of the whole to those of the call; return its codes."""
    assert places.queries is not None and places.keys is not None
    rows = places.queries - places.q_start
    if "key" in parts:
        parts["key"] = parts["key"].index_select(2, places.keys)
    if "pair" in parts:
        parts["pair"] = parts["pair"].index_select(2, rows).index_select(3, places.keys)
    return [code.index_select(0, index) for code, index in zip(codes, (rows, places.keys), strict=False)]
