"""From a relation to a layout: bind it, then let the builder that fits lay it out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch

from ..arguments import as_count
from ..sets.bound import Bound, Place
from ..sets.intervals import Intervals
from .choose import DUPLICATES, choose_tile
from .costs import Costs, costs_of
from .device import lay_out
from .fill import Form
from .host import lay_out_with_numpy
from .levels import add_levels
from .native import lay_out_ranges
from .outline import Outline, outline_of_record
from .outlined import Capacity, lay_out_outlined
from .overflow import raise_overflow
from .record import Record

if TYPE_CHECKING:
    from ..relations.relation import Relation
    from ..scores.multilevel import MultiLevel


def build_layout(
    relation: Relation,
    q_len: int,
    k_len: int,
    *,
    q_start: int | Literal["end"],
    device: torch.device | str,
    form: Form,
    tile: int | None,
    batch: int | None,
    heads: int | None,
    score: MultiLevel | None = None,
    capacity: int | tuple[int, int] | None = None,
) -> Record:
    """See :meth:`Layout.build`."""
    if form not in ("auto", "tiles", "edges"):
        raise ValueError(f"form: wanted 'auto', 'tiles' or 'edges', got {form!r}")
    if tile not in (None, 64, 128):
        raise ValueError(f"tile: wanted 64, 128 or None, got {tile!r}")
    if not hasattr(relation, "bind"):
        raise TypeError(
            f"relation: wanted a relation, got {type(relation).__name__}; wrap a mask in ab.Dense, "
            "a function in ab.Where"
        )
    device = torch.device(device)
    costs = costs_of(device)
    start = k_len - q_len if q_start == "end" else q_start
    if score is not None:
        if form == "edges":
            raise ValueError("form: wanted 'tiles' or 'auto' with a multi-level score, got 'edges'")
        form = "tiles"
    if capacity is not None:
        if form == "edges" or score is not None:
            got = "form='edges'" if score is None else "a multi-level score"
            raise ValueError(f"capacity: wanted None with {got}, which the host lays out")
        raise_overflow()
        room, at = _as_capacity(capacity), Place(q_len, k_len, start, batch, heads, str(device))
        made = _outlined(relation, at, tile, room)
        if made is None:
            raise ValueError(f"capacity: wanted None, because only the host can lay out {relation!r}")
        return made
    if score is None and device.type != "cpu":
        pairs = relation.list_pairs(q_len, k_len, start, batch, heads)
        if pairs is not None:
            made = lay_out(pairs, q_len, k_len, q_start=start, form=form, tile=tile, costs=costs)
            made.trust().longest  # noqa: B018 - counted now, so that no call waits for it
            return made.to(device)
        if form != "edges" and not relation._is_on_host:
            at = Place(q_len, k_len, start, batch, heads, str(device))
            outlined = _outlined(relation, at, tile, None)
            if outlined is not None:
                return outlined
    bound = relation.bind(
        q_len, k_len, start, batch=batch, heads=heads, device=str(device), most_listed=costs.most_listed
    )
    layout = _lay_out(bound, form, tile, costs, start)
    if score is not None:
        layout = add_levels(layout, score.bind(q_len, k_len, start))
    layout.trust()
    return layout if device.type == "cpu" else layout.to(device)


def _outlined(relation: Relation, at: Place, tile: int | None, capacity: Capacity | None) -> Record | None:
    """Lay out on the device, if the relation can be outlined there."""
    relation._check(at)
    at = at._replace(batch=at.batch or relation.batch_size, heads=at.heads or relation.head_count)
    costs = costs_of(torch.device(at.device))
    made = lay_out_outlined(
        relation._outline, relation.related, at, tile=tile, capacity=capacity, costs=costs
    )
    return None if made is None else made.trust()


def _as_capacity(capacity: int | Sequence[int]) -> Capacity:
    rooms = capacity if isinstance(capacity, Sequence) else (capacity, capacity)
    if len(rooms) != 2:
        raise ValueError(f"capacity: wanted a number of tiles, or (tiles, partial tiles), got {capacity!r}")
    tiles, partial = rooms
    return Capacity(as_count("capacity", tiles), as_count("capacity", partial))


def outline_bound(bound: Bound, at: Place, tile: int) -> Outline:
    """Return which tiles hold pairs of a set that the host knows."""
    if bound.edges is not None:
        bound = _without_edges(bound)
    host = torch.device("cpu")
    return outline_of_record(
        _lay_out(bound, "tiles", tile, costs_of(host), at.q_start), torch.device(at.device)
    )


def lay_out_bound(
    bound: Bound, *, device: torch.device, form: Form, tile: int | None, q_start: int
) -> Record:
    """Lay out a set of pairs that is no relation's own, such as the part of one that a process holds."""
    layout = _lay_out(bound, form, tile, costs_of(device), q_start).trust()
    return layout if device.type == "cpu" else layout.to(device)


def find_tile(bound: Bound, *, device: torch.device, form: Form) -> int:
    """Return the tile size in which a bound relation is laid out; no tiles are listed."""
    if form == "tiles" and bound.edges is not None:
        bound = _without_edges(bound)
    return choose_tile(bound, form, costs_of(device))


def _lay_out(bound: Bound, form: Form, tile: int | None, costs: Costs, q_start: int) -> Record:
    """Lay ranges out in C++ where the library is there, all else with NumPy."""
    if form == "tiles" and bound.edges is not None:
        bound = _without_edges(bound)
    if isinstance(bound.solid, Intervals) and bound.edges is None:
        made = lay_out_ranges(bound.solid, form, tile, costs, q_start)
        if made is not None:
            return made
    return lay_out_with_numpy(bound, form, tile, costs, q_start)


def _without_edges(bound: Bound) -> Bound:
    """Return the same pairs as one solid form, for callers who want tiles only."""
    assert bound.edges is not None
    if bound.edges.repeated.any():
        raise ValueError(DUPLICATES)
    listed = bound.edges.intervals()
    if bound.solid is None:
        return Bound(listed, None)
    if isinstance(bound.solid, Intervals):
        return Bound(bound.solid | listed, None)
    return Bound(bound.solid.unite(listed))
