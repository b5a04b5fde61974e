"""Which rank holds which tokens: whole tiles in the order of positions, or a vector given by the user."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from ..sets.intervals import Ints, ceil_div, pointer
from .balance import Weights, balance, imbalance

TILE = 128  # tokens that stay together: a tile of either size then lies on one rank, as in one process
BALANCED = 1.05  # work of the busiest rank over the mean, up to which "auto" is content

Name = Literal["auto", "even", "zigzag", "work"]
NAMES: tuple[Name, ...] = ("auto", "even", "zigzag", "work")


@dataclass(frozen=True, eq=False)
class Split:
    """The rank of every token; each rank keeps its tokens in the order of their positions."""

    name: str
    ranks: int
    owner: Ints  # [length], the rank of each token
    tile_owner: Ints | None  # [tiles], the rank of each whole tile; None: tiles are torn apart

    @classmethod
    def of_tiles(cls, name: str, ranks: int, length: int, tile_owner: Ints) -> Split:
        """Return a split of whole tiles."""
        return cls(name, ranks, np.repeat(tile_owner, tile_sizes(length)), tile_owner)

    @classmethod
    def of_owners(cls, ranks: int, owner: Ints) -> Split:
        """Return a split by the rank of each token; it is noted if no tile is torn apart."""
        first = owner[::TILE]
        whole = np.array_equal(np.repeat(first, tile_sizes(len(owner))), owner)
        return cls("given", ranks, owner, first if whole else None)

    @property
    def length(self) -> int:
        """Tokens of all ranks."""
        return len(self.owner)

    @cached_property
    def counts(self) -> Ints:
        """Tokens of each rank, [ranks]."""
        return np.bincount(self.owner, minlength=self.ranks)

    @cached_property
    def order(self) -> Ints:
        """All tokens by rank, and by position in a rank, [length]."""
        return np.argsort(self.owner, kind="stable")

    @cached_property
    def slot(self) -> Ints:
        """The place of each token among those of its rank, [length]."""
        slot = np.empty(self.length, np.int64)
        slot[self.order] = np.arange(self.length) - np.repeat(pointer(self.counts)[:-1], self.counts)
        return slot

    def tokens(self, rank: int) -> Ints:
        """Return the tokens of a rank, increasing."""
        first = pointer(self.counts)
        return self.order[first[rank] : first[rank + 1]]

    def is_same(self, other: Split) -> bool:
        """Return whether the other one gives each token to the same rank."""
        return self is other or (self.ranks == other.ranks and np.array_equal(self.owner, other.owner))


def tile_sizes(length: int) -> Ints:
    """Return the tokens in each tile; only the last may be short."""
    return np.diff(np.minimum(np.arange(0, length + TILE, TILE), length))[: ceil_div(length, TILE)]


def even(tiles: int, ranks: int) -> Ints:
    """Give each rank consecutive tiles; numbers differ by one at most."""
    return np.repeat(np.arange(ranks), np.diff(np.arange(ranks + 1) * tiles // ranks))


def zigzag(tiles: int, ranks: int) -> Ints:
    """Give rank r the r-th run of tiles from the front and the r-th from the back."""
    front = even(tiles, 2 * ranks)
    return np.minimum(front, 2 * ranks - 1 - front)


def by_name(name: Name, length: int, ranks: int, weights: Weights) -> Split:
    """Return the split of a name; "auto" takes the first of even, zigzag and work that is balanced."""
    tiles = ceil_div(length, TILE)
    owners: dict[Name, Ints] = {"even": even(tiles, ranks), "zigzag": zigzag(tiles, ranks)}
    excess = {each: imbalance(weights.work, owner, ranks) for each, owner in owners.items()}
    if name == "auto":
        name = next((each for each in owners if excess[each] <= BALANCED), "work")
    if name == "work":
        starts = sorted(owners, key=excess.__getitem__)
        owners["work"] = balance(weights, ranks, [owners[start] for start in starts], BALANCED)
    return Split.of_tiles(name, ranks, length, owners[name])


def by_vector(vector: Ints, length: int, ranks: int) -> Split:
    """Return the split that a user gave: the rank of each token, or an order of the tokens to cut evenly."""
    if len(vector) != length:
        raise ValueError(f"split: wanted a rank for each of the {length} tokens, got {len(vector)}")
    if length > ranks and np.array_equal(np.sort(vector), np.arange(length)):
        owner = np.empty(length, np.int64)
        owner[vector] = np.repeat(np.arange(ranks), np.diff(np.arange(ranks + 1) * length // ranks))
        return Split.of_owners(ranks, owner)
    wrong = np.flatnonzero((vector < 0) | (vector >= ranks))
    if len(wrong):
        raise ValueError(
            f"split: wanted ranks from 0 to {ranks - 1} or an order of the tokens, "
            f"got {vector[wrong[0]]} for token {wrong[0]}"
        )
    return Split.of_owners(ranks, vector)
