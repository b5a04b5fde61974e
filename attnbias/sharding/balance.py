"""Tiles to ranks by counted work: as many tokens on each rank, related tiles together if possible."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from math import ceil
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..sets.intervals import Ints

Floats = NDArray[np.float64]

_CONTENT = 1.049  # work of the busiest rank over the mean, at which tiles stop changing places
_PIECES = (1.0, 0.5)  # of a rank's mean work: heavier runs are cut before they are given away
_PARTNERS = 3  # ranks that the busiest one looks at, those with the least work
_SWAPS = 32  # for each rank, at most


class Weights(NamedTuple):
    """The numbers that a split looks at, for each tile of queries."""

    work: Floats  # [tiles]
    first: Ints  # [tiles], the first tile of keys that it needs
    stop: Ints  # [tiles], one more than the last


class _Runs(NamedTuple):
    """Runs of so many consecutive tiles, by their first tile."""

    size: int
    work: Floats
    first: Ints  # the first tile of keys that it needs
    stop: Ints
    cost: Ints  # tiles of keys that are fetched if the run lies by itself, of its own and of its neighbours


class _Swap(NamedTuple):
    """Two runs of the same size that change places."""

    price: float  # tiles of keys to fetch, for each unit by which the busiest rank is relieved
    size: int
    rank: int  # that the busiest one exchanges with
    given: int  # first tile of the run that the busiest rank gives away
    taken: int


def balance(weights: Weights, ranks: int, starts: Sequence[Ints], enough: float) -> Ints:
    """Return the rank of each tile: numbers of tiles differ by one at most, work as little as they allow.

    Runs of tiles that hardly need one another's keys, such as documents, are given away whole, then runs
    change places. Where that does not do, smaller pieces are given away, then the starts are tried.
    """
    best: tuple[float, Ints] | None = None
    for start in chain((deal(weights, ranks, piece) for piece in _PIECES), starts):
        owner = _exchange(weights, start, ranks)
        excess = imbalance(weights.work, owner, ranks)
        if best is None or excess < best[0]:
            best = excess, owner
        if excess <= enough:
            break
    assert best is not None
    return best[1]


def imbalance(work: Floats, owner: Ints, ranks: int) -> float:
    """Return the work of the busiest rank over the mean; 1 without work."""
    of_rank = np.bincount(owner, weights=work, minlength=ranks)
    total = float(of_rank.sum())
    return float(of_rank.max()) * ranks / total if total else 1.0


def deal(weights: Weights, ranks: int, piece: float) -> Ints:
    """Give away runs, the heaviest first, to the rank with the least work that has room.

    Args:
        weights: work and needs of each tile.
        ranks: number of ranks.
        piece: share of a rank's mean work; heavier runs are cut first.
    """
    tiles = len(weights.work)
    total = np.append(0.0, np.cumsum(weights.work))
    left: list[int] = np.diff(np.arange(ranks + 1) * tiles // ranks).tolist()
    load = [0.0] * ranks
    owner = np.empty(tiles, np.int64)
    queue = [
        (-float(total[stop] - total[first]), first, stop)
        for run in _natural_runs(weights)
        for first, stop in _cut(*run, total, piece * float(total[-1]) / ranks, max(left, default=1))
    ]
    heapq.heapify(queue)
    while queue:
        work, first, stop = heapq.heappop(queue)
        fitting = [rank for rank in range(ranks) if left[rank] >= stop - first]
        if fitting:
            rank = min(fitting, key=load.__getitem__)
            owner[first:stop] = rank
            load[rank] -= work
            left[rank] -= stop - first
            continue
        middle = first + max(left)
        for low, high in ((first, middle), (middle, stop)):
            heapq.heappush(queue, (-float(total[high] - total[low]), low, high))
    return owner


def _natural_runs(weights: Weights) -> Iterator[tuple[int, int]]:
    """Cut the tiles where at most one tile of keys is needed across the cut: first and stop of each run."""
    tiles = len(weights.work)
    place = np.arange(tiles)
    before = np.maximum(place - np.minimum.accumulate(weights.first[::-1])[::-1], 0)
    reach = np.append(0, np.maximum.accumulate(weights.stop))[:-1]
    cuts = np.flatnonzero((before + np.maximum(reach - place, 0) <= 1) | (place == 0))
    return zip(cuts.tolist(), [*cuts[1:].tolist(), tiles], strict=False)


def _cut(first: int, stop: int, total: Floats, heaviest: float, longest: int) -> Iterator[tuple[int, int]]:
    """Cut a run that is too heavy or too long into pieces of equal work."""
    work = float(total[stop] - total[first])
    parts = max(ceil(work / heaviest) if heaviest else 1, ceil((stop - first) / longest))
    steps = total[first] + np.arange(1, parts) * (work / parts)
    cuts = {first, stop, *(first + np.searchsorted(total[first:stop], steps)).tolist()}
    # Work may be so uneven that a piece is still too long.
    cuts |= {first + longest * i for i in range(1, ceil((stop - first) / longest))} if parts > 1 else set()
    return pairwise(sorted(cuts))


def _exchange(weights: Weights, owner: Ints, ranks: int) -> Ints:
    """Let the busiest rank exchange a run of tiles with one of the least busy, again and again.

    It is the run for which the fewest keys are fetched, measured by what it relieves. So documents move as a
    whole, and the end of a long one before its middle.
    """
    owner = owner.copy()
    load = np.bincount(owner, weights=weights.work, minlength=ranks).astype(np.float64)
    content = _CONTENT * float(load.mean())
    held = [np.flatnonzero(owner == rank) for rank in range(ranks)]
    runs = _all_runs(weights, max(map(len, held), default=0))
    for _ in range(_SWAPS * ranks):
        busy = int(load.argmax())
        if load[busy] <= content:
            break
        partners = np.argsort(load, kind="stable")[:_PARTNERS].tolist()
        swaps = [
            swap
            for rank in partners
            for some in runs
            if rank != busy and (swap := _find_swap(some, held, load, busy, rank, content))
        ]
        if not swaps:
            break
        best = min(swaps)
        span = np.arange(best.size)
        owner[best.given + span], owner[best.taken + span] = best.rank, busy
        for rank in (busy, best.rank):
            held[rank] = np.flatnonzero(owner == rank)
            load[rank] = weights.work[held[rank]].sum()
    return owner


def _all_runs(weights: Weights, most: int) -> list[_Runs]:
    """Return the runs of 1, 2, 4 ... tiles."""
    made = []
    work, first, stop = weights
    size = 1
    while size <= max(1, most // 2) and len(work):
        place = np.arange(len(work))
        after = np.append(weights.first[size:], place[-1] + size)[: len(place)]  # of the tile behind the run
        used = np.where(after < place + size, size, 0)
        cost = np.maximum(place - first, 0) + np.maximum(stop - place - size, 0) + used
        made.append(_Runs(size, work, first, stop, cost))
        work, first, stop = work[:-size] + work[size:], *_join(first, stop, size)
        size *= 2
    return made


def _join(first: Ints, stop: Ints, size: int) -> tuple[Ints, Ints]:
    return np.minimum(first[:-size], first[size:]), np.maximum(stop[:-size], stop[size:])


def _find_swap(
    runs: _Runs, held: list[Ints], load: Floats, busy: int, rank: int, content: float
) -> _Swap | None:
    """Return the cheapest swap of two runs that relieves the busiest rank."""
    size = runs.size
    mine, theirs = _whole(held[busy], size), _whole(held[rank], size)
    if not len(mine) or not len(theirs):
        return None
    moved = runs.work[mine][:, None] - runs.work[theirs]
    relief = np.minimum(moved, load[busy] - load[rank] - moved)
    relief = np.minimum(relief, load[busy] - content)
    cost = runs.cost[mine][:, None] + runs.cost[theirs] + 1.0
    price = np.divide(cost, relief, out=np.full(cost.shape, np.inf), where=relief > 0)
    i, j = np.unravel_index(int(price.argmin()), price.shape)
    if not np.isfinite(price[i, j]):
        return None
    return _Swap(float(price[i, j]), size, rank, int(mine[i]), int(theirs[j]))


def _whole(held: Ints, size: int) -> Ints:
    """Return the first tiles of the runs of this size that a rank holds."""
    first, last = held[: len(held) - size + 1], held[size - 1 :]
    found: Ints = first[last - first == size - 1]
    return found
