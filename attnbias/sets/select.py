"""Some queries and keys of a set of pairs, numbered anew: what one of several processes holds."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from .bound import Bound
from .edges import Edges
from .intervals import Intervals, Ints, count_groups
from .predicate import Positions, Predicate


class Selection(NamedTuple):
    """Queries and keys of a larger set, in the order in which they are numbered anew."""

    query: Ints  # [q]
    key: Ints  # [k]; every range of keys that is kept stays together
    number: Ints  # [k_len of the larger set], the new number of each key; what is left out has any
    is_tiled: bool  # whether queries, and keys of ranges, follow one another inside of each tile
    edge: Ints | None = None  # increasing numbers of edges, which are numbered anew; None: they keep theirs


def select(bound: Bound, chosen: Selection) -> Bound:
    """Return the pairs of the chosen queries; all of their keys must be chosen, too."""
    solid, edges = bound.solid, bound.edges
    if isinstance(solid, Predicate):
        solid = _select_predicate(solid, chosen)
    elif solid is not None:
        solid = _select_ranges(solid, chosen)
    return Bound(solid, None if edges is None else _select_edges(edges, chosen))


def _rows(form: Intervals | Edges, query: Ints) -> Ints:
    """Return the rows of the chosen queries, group by group."""
    rows: Ints = (np.arange(count_groups(form.group))[:, None] * form.q_len + query).reshape(-1)
    return rows


def _select_ranges(form: Intervals, chosen: Selection) -> Intervals:
    picked = form.take_rows(_rows(form, chosen.query), len(chosen.query))
    start, stop = chosen.number[picked.start], chosen.number[picked.stop - 1] + 1
    assert np.array_equal(stop - start, picked.stop - picked.start), "a range was torn apart"
    narrow = start.astype(np.int32), stop.astype(np.int32)
    return replace(picked, k_len=len(chosen.key), start=narrow[0], stop=narrow[1])


def _select_edges(form: Edges, chosen: Selection) -> Edges:
    picked = form.take_rows(_rows(form, chosen.query), len(chosen.query))
    key = chosen.number[picked.key]
    edge_id = picked.id if chosen.edge is None else np.searchsorted(chosen.edge, picked.id)
    return Edges.from_pairs(len(chosen.query), len(chosen.key), form.group, picked.row, key, edge_id)


def _select_predicate(form: Predicate, chosen: Selection) -> Predicate:
    at = Positions(form.query_at(chosen.query), form.key_at(chosen.key))
    return replace(
        form,
        bound=_select_ranges(form.bound, chosen),
        also=None if form.also is None else _select_ranges(form.also, chosen),
        parts=tuple(None if part is None else _select_predicate(part, chosen) for part in form.parts),
        stationary=form.stationary and chosen.is_tiled,
        at=at,
    )
