"""Relations that store their pairs one by one: looking them up, numbering them, reordering their nodes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from typing_extensions import Self

from ..sets.bound import Bound, Place
from ..sets.pairs import Pairs
from .algebra import And
from .orders import morton, reverse_cuthill_mckee
from .portion import Portion
from .relation import Relation
from .tables import find_rows
from .value import kept


class Listing(NamedTuple):
    """Edges one by one, in the caller's order; those for any batch or any head have no number of it."""

    number: Tensor  # [n], the caller's
    b: Tensor | None  # [n]
    h: Tensor | None  # [n]
    q: Tensor  # [n], position of the query
    k: Tensor  # [n]

    def keep(self, which: Tensor, device: torch.device) -> Listing:
        """Return some of the edges, by a mask or their places."""
        return Listing(*(None if x is None else x[which].to(device) for x in self))  # type: ignore[arg-type]


class Listed(Relation):
    """Pairs stored one by one, which are looked up in the sorted list of their codes."""

    listed = repeats = True

    @property
    def _shape(self) -> tuple[int, int, int]:
        """Batches, heads and queries that the list has rows for."""
        return cast(tuple[int, int, int], (self.batch_size, self.head_count, self.lengths[0]))

    @property
    def _least_keys(self) -> int:
        """The smallest number of keys that the pairs imply."""
        return self.lengths[1] or 0

    @property
    def _edge_count(self) -> int:
        """Count the caller's numbers for edges, one for each place in the list."""
        raise NotImplementedError

    def _offer(self, at: Place) -> Pairs:
        """Return the pairs at a place, in the caller's order, some of them perhaps not there."""
        raise NotImplementedError

    def _list(self, at: Place) -> Pairs:
        """Return the pairs at a place, in the caller's order."""
        offered = self._offer(at)
        if offered.is_there is None:
            return offered
        place = offered.is_there.nonzero().squeeze(1)
        number = place if offered.number is None else offered.number[place]
        return Pairs(offered.group, offered.row[place], offered.key[place], number)

    def _targets(self) -> Tensor:
        """Return the query of each of the caller's numbers."""
        raise NotImplementedError

    def _extremes(self) -> Tensor | None:
        """Return the numbers that ``_check_extremes`` needs, on the device; None without pairs."""
        raise NotImplementedError

    def _check_extremes(self, extremes: Sequence[int], keys: int) -> None:
        """Raise ValueError unless every pair is among the queries and this many keys."""
        raise NotImplementedError

    def _check_numbers(self, keys: int = 0) -> None:
        """Raise ValueError unless every pair is among the queries and this many keys; reads the extremes."""
        extremes = self._extremes()
        if extremes is not None:
            self._check_extremes(extremes.tolist(), keys)

    def _nodes(self) -> int:
        """Return how many nodes there are; raise ValueError unless each is both a query and a key."""
        raise NotImplementedError

    def _relabel(self, order: Tensor) -> Self:
        """Return the same pairs among nodes in another order: new node ``i`` is old ``order[i]``."""
        raise NotImplementedError

    def list_pairs(
        self, q_len: int, k_len: int, q_start: int, batch: int | None, heads: int | None
    ) -> Pairs | None:
        if torch.device(self._device).type == "cpu":
            return None
        self.check(q_len, k_len, q_start, batch, heads)
        offered, extremes = self._offer(Place(q_len, k_len, q_start)), self._extremes()
        if extremes is None:
            return offered
        # Read where the host reads the rest.
        return offered._replace(extremes=extremes, check=partial(self._check_extremes, keys=k_len))

    def _bind(self, at: Place) -> Bound:
        if self.lengths[1] is not None or not at.is_moved:
            self._check_numbers(at.k_len)
        group, row, key, number, *_ = self._list(at)
        numbers = None if number is None else number.cpu().numpy()
        return at.bind_pairs(row.cpu().numpy(), key.cpu().numpy(), group, numbers)

    def _edges(self) -> Listing:
        """Return all edges."""
        batch, heads, queries = self._shape
        _, row, key, number, *_ = self._list(Place(queries, 0))
        if number is None:
            number = torch.arange(len(row), device=row.device)
        group, q = row // max(queries, 1), row % max(queries, 1)
        b, h = group // heads if batch > 1 else None, group % heads if heads > 1 else None
        return Listing(number, b, h, q, key)

    @kept
    def _codes(self) -> tuple[Tensor, int]:
        """The sorted codes ``row * keys + key`` of all pairs, and the number of keys."""
        _, row, key, *_ = self._list(Place(self._shape[2], 0))
        keys = max(self._least_keys, 1)
        return (row * keys + key).sort().values, keys

    def multiplicity(self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        codes, keys = self._codes
        row, exists = find_rows(self._shape, q, b, h)
        asked = (row * keys + k.clamp(0, keys - 1)).contiguous()
        codes = codes.to(q.device)
        count = torch.searchsorted(codes, asked, right=True) - torch.searchsorted(codes, asked)
        return torch.where(exists & (k >= 0) & (k < keys), count, 0)

    def related(self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        return self.multiplicity(q, k, b, h) > 0

    def reorder(self, method: Literal["rcm", "morton"], points: Any = None) -> tuple[Tensor, Self]:
        """Return an order of the nodes in which neighbours lie near each other, and the relation in it.

        Large graphs spend their time on fetching keys and values from memory; in a good order most are in
        a cache already. Permute the features once, before the first layer, not in every layer: the
        permutation costs about as much as it saves there. Edge terms stay as they are, since edges keep
        their order.

        Args:
            method: "rcm", reverse Cuthill-McKee, needs only the edges; "morton" follows the Z-order curve
                through ``points`` and is better where there are coordinates.
            points: [N, d] coordinates of the nodes, for "morton".

        Returns:
            The order [N] (new node ``i`` is old node ``order[i]``) and the relation among the new nodes.

        Example:
            >>> import torch
            >>> import attnbias as ab
            >>> ring = ab.Graph([[0, 3, 1, 4, 2], [3, 1, 4, 2, 0]], num_nodes=5)
            >>> order, ordered = ring.reorder("rcm")
            >>> x = torch.randn(1, 1, 5, 8)
            >>> y = x[:, :, order]
            >>> out = torch.empty_like(x)
            >>> out[:, :, order] = ab.attention(y, y, y, ordered)  # back in the old order
            >>> torch.allclose(out, ab.attention(x, x, x, ring))
            True
        """
        nodes = self._nodes()
        if method == "rcm":
            if points is not None:
                raise ValueError(f"points: wanted None with 'rcm', got {type(points).__name__}")
            edges = self._edges()
            order = reverse_cuthill_mckee(edges.q.cpu().numpy(), edges.k.cpu().numpy(), nodes)
        elif method == "morton":
            if points is None:
                raise ValueError("points: wanted coordinates [N, d] for 'morton', got None")
            order = morton(points)
            if len(order) != nodes:
                raise ValueError(f"points: wanted {nodes}, one for each node, got {len(order)}")
        else:
            raise ValueError(f"method: wanted 'rcm' or 'morton', got {method!r}")
        placed = torch.from_numpy(order).to(self._device)
        return placed, self._relabel(placed)


def new_numbers(order: Tensor) -> Tensor:
    """Return the new number of each old node, where new node ``i`` is old ``order[i]``."""
    new = torch.empty_like(order)
    new[order] = torch.arange(len(order), device=order.device)
    return new


def outside(extremes: Sequence[int], low: int, count: int) -> int | None:
    """Return which of the least and the most of some numbers is outside ``low .. count - 1``, or None."""
    least, most = extremes
    return least if least < low else most if most >= count else None


def numbered(relation: Relation) -> Listed | None:
    """Return the graph or the neighbours whose numbers the edges of a relation have, None without such."""
    if isinstance(relation, Portion):  # its edges keep their numbers in the whole
        return numbered(relation.whole)
    if isinstance(relation, Listed):
        return relation
    parts = relation.parts if isinstance(relation, And) else ()
    repeating = [part for part in parts if isinstance(part, Listed) or part.repeats]
    return repeating[0] if len(repeating) == 1 and isinstance(repeating[0], Listed) else None


def find_edges(relation: Relation, what: str) -> Listed:
    """Return the graph or the neighbours that a relation is, or that it intersects with others.

    Raises:
        ValueError: naming ``what``, if there is no such one or more than one.
    """
    found = numbered(relation)
    if found is not None:
        return found
    parts = relation.parts if isinstance(relation, And) else ()
    if sum(isinstance(part, Listed) for part in parts) != 1:
        raise ValueError(
            f"{what}: wanted a Graph or Neighbors, by itself or & other, whose edges have numbers, "
            f"got {type(relation).__name__}"
        )
    raise ValueError(
        f"{what}: wanted one Graph or Neighbors & relations that count a pair once, got another list in "
        f"{type(relation).__name__}"
    )


def count_edges(relation: Relation, what: str) -> int:
    """Return how many numbers the caller has for the edges; neighbours have one for places without a key."""
    return find_edges(relation, what)._edge_count


def list_edges(relation: Relation, what: str) -> Listing:
    """Return the edges whose pairs may be related: all of the graph or the neighbours."""
    return find_edges(relation, what)._edges()
