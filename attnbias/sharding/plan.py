"""The plan of a relation over ranks: who holds what, and who sends what to whom. Nothing is sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..layouts.costs import CPU_COSTS
from ..relations.listing import numbered
from ..relations.relation import Relation
from ..sets.bound import Bound, Place
from ..sets.intervals import Ints, ceil_div
from ..sets.select import Selection
from .balance import Weights
from .needs import Needs, Work, count_work, expand_tiles, find_needs
from .split import TILE, Name, Split, by_name, by_vector, even, tile_sizes


class Part(NamedTuple):
    """What one rank does: its queries and keys, and the rows of keys that it sends and gets.

    A rank numbers the keys that it needs by position. Rows travel in this order, too.
    """

    queries: Ints  # [q], its queries, increasing
    keys: Ints  # [k], the keys that it needs
    give: Ints  # [n], places among its own keys of the rows that it sends, by receiver
    give_sizes: list[int]  # [ranks]
    take: Ints  # [m], places among the needed keys of the rows that it gets, by sender
    take_sizes: list[int]  # [ranks]
    own_from: Ints  # places among its own keys of those that it needs itself
    own_to: Ints  # their places among the needed keys


@dataclass(frozen=True, eq=False)
class Plan:
    """A relation over ranks. Every rank makes the same plan from the same relation."""

    relation: Relation
    bound: Bound
    place: Place
    queries: Split
    keys: Split
    work: Work
    needs: Needs

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.queries.ranks

    @property
    def is_tiled(self) -> bool:
        """Whether every rank holds whole tiles of queries and keys."""
        return self.queries.tile_owner is not None and self.keys.tile_owner is not None

    @cached_property
    def received(self) -> Ints:
        """Keys that each rank gets from each other one, [receiver, sender]."""
        ranks = self.ranks
        counts = np.zeros((ranks, ranks), np.int64)
        if self.keys.tile_owner is not None:
            sizes = tile_sizes(self.keys.length)
            for sender in range(ranks):
                mine = np.flatnonzero(self.keys.tile_owner == sender)
                counts[:, sender] = self.needs.tiles[:, mine] @ sizes[mine]
        rank = np.repeat(np.arange(ranks), np.diff(self.needs.ptr))
        np.add.at(counts, (rank, self.keys.owner[self.needs.key]), 1)
        np.fill_diagonal(counts, 0)
        return counts

    def needed(self, rank: int) -> Ints:
        """Return the keys that a rank's queries need, increasing."""
        tiles = expand_tiles(np.flatnonzero(self.needs.tiles[rank]), self.keys.length)
        return np.concatenate((tiles, self.needs.singles(rank)))

    def of(self, rank: int) -> Part:
        """Return what one rank does; it costs as much as it has rows and needs keys."""
        keys, needed = self.keys, self.needed(rank)
        source = keys.owner[needed]
        own = source == rank
        order = np.argsort(source, kind="stable")
        take = order[~own[order]]
        take_sizes = np.bincount(source[take], minlength=self.ranks).tolist()
        give, give_sizes = self._give(rank)
        return Part(
            *(self.queries.tokens(rank), needed, give, give_sizes, take, take_sizes),
            *(keys.slot[needed[own]], np.flatnonzero(own)),
        )

    def _give(self, rank: int) -> tuple[Ints, list[int]]:
        """Return what a rank sends to each other one: rows of whole tiles, or single rows."""
        needs, keys = self.needs, self.keys
        receivers, given = [], []
        if keys.tile_owner is not None:
            mine = np.flatnonzero(keys.tile_owner == rank)
            receiver, which = np.nonzero(needs.tiles[:, mine])
            given.append(expand_tiles(mine[which], keys.length))
            receivers.append(np.repeat(receiver, tile_sizes(keys.length)[mine[which]]))
        single = np.flatnonzero(keys.owner[needs.key] == rank)
        given.append(needs.key[single])
        receivers.append(np.searchsorted(needs.ptr, single, side="right") - 1)
        receiver, key = np.concatenate(receivers), np.concatenate(given)
        order = np.argsort(receiver, kind="stable")
        order = order[receiver[order] != rank]
        return keys.slot[key[order]], np.bincount(receiver[order], minlength=self.ranks).tolist()

    def selection(self, part: Part, edges: Ints | None = None) -> Selection:
        """Return the queries, keys and edges of a rank, for :func:`attnbias.sets.select.select`."""
        number = np.zeros(self.keys.length, np.int64)
        number[part.keys] = np.arange(len(part.keys))
        return Selection(part.queries, part.keys, number, self.is_tiled, edges)

    def edges_of(self, rank: int) -> Ints | None:
        """Return the caller's numbers of the edges into a rank's queries; None: edges have no numbers."""
        listed = numbered(self.relation)
        if listed is None:
            return None
        row = listed._targets().cpu().numpy() - self.place.q_start
        inside = (row >= 0) & (row < self.place.q_len)
        inside[inside] = self.queries.owner[row[inside]] == rank
        return np.flatnonzero(inside)


def make_plans(
    relations: Sequence[Relation],
    place: Place,
    ranks: int,
    *,
    split: Name | Ints = "auto",
    weights: NDArray[np.float64] | None = None,
    whole_tiles: bool = False,
) -> list[Plan]:
    """Plan relations over the same ranks with one split of the tokens, weighed by layers.

    Args:
        relations: one for each kind of layer.
        place: lengths, the first query's position, and sizes for relations that fit any.
        ranks: number of ranks.
        split: a name, or a vector with the rank of each query.
        weights: [relations], layers of each kind; None: one each.
        whole_tiles: whether keys of edges travel as whole tiles, too.
    """
    bounds = [_bind(relation, place) for relation in relations]
    works = [count_work(bound) for bound in bounds]
    share = np.ones(len(works)) if weights is None else weights
    sums = Weights(
        np.sum([each.executed * factor for each, factor in zip(works, share, strict=True)], 0),
        np.min([each.first for each in works], 0),
        np.max([each.stop for each in works], 0),
    )
    if isinstance(split, str):
        queries = by_name(split, place.q_len, ranks, sums)
    else:
        queries = by_vector(split, place.q_len, ranks)
    keys = queries
    if place.k_len != place.q_len:
        keys = Split.of_tiles("even", ranks, place.k_len, even(ceil_div(place.k_len, TILE), ranks))
    return [
        Plan(
            *(relation, bound, place, queries, keys, work),
            find_needs(bound, work, queries, keys, whole_tiles=whole_tiles),
        )
        for relation, bound, work in zip(relations, bounds, works, strict=True)
    ]


def _bind(relation: Relation, at: Place) -> Bound:
    return relation.bind(
        *(at.q_len, at.k_len, at.q_start),
        batch=at.batch,
        heads=at.heads,
        device=str(relation._device),
        most_listed=CPU_COSTS.most_listed,
    )
