"""What relations given as lists share: looking pairs up, and a better order of their nodes."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import Self

from ..layouts.bound import Bound, Place
from ..layouts.device import Pairs
from ..layouts.edges import Edges
from .orders import morton, reverse_cuthill_mckee
from .relation import Relation


class Listed(Relation):
    """Pairs held one by one: looked up in the sorted list of their codes."""

    listed = repeats = True

    def _code_parts(self) -> tuple[Tensor, int]:
        """Codes ``(row * keys + key)`` of all pairs, unsorted, and the number of keys."""
        raise NotImplementedError

    def _row(self, q: Tensor, b: Tensor | None, h: Tensor | None) -> tuple[Tensor, Tensor]:
        """The row of each query, and whether it has one."""
        raise NotImplementedError

    def _nodes(self) -> int:
        """How many nodes there are, each both a query and a key."""
        raise NotImplementedError

    def _pairs(self) -> tuple[Tensor, Tensor]:
        """Query and key of each pair, [E] each."""
        raise NotImplementedError

    def _relabel(self, order: Tensor, new: Tensor) -> Self:
        """The same pairs among nodes in another order; ``new`` [N] is the new number of each old one."""
        raise NotImplementedError

    def _list(self, at: Place) -> Pairs:
        """The pairs at a place, checked."""
        raise NotImplementedError

    def list_pairs(
        self, q_len: int, k_len: int, q_start: int, batch: int | None, heads: int | None
    ) -> Pairs | None:
        if torch.device(self._device).type == "cpu":
            return None
        self.check(q_len, k_len, q_start, batch, heads)
        return self._list(Place(q_len, k_len, q_start))

    def _bind(self, at: Place) -> Bound:
        group, *on_device, number = self._list(at)
        row, key = (x.cpu().numpy() for x in on_device)
        numbers = None if number is None else number.cpu().numpy()
        return Bound(None, Edges.from_pairs(at.q_len, at.k_len, group, row, key, numbers))

    def _codes(self, device: torch.device) -> tuple[Tensor, int]:
        cached = self.__dict__.get("_codes_")
        if cached is None:
            codes, keys = self._code_parts()
            cached = codes.sort().values, keys
            object.__setattr__(self, "_codes_", cached)
        return cached[0].to(device), cached[1]

    def multiplicity(self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        codes, keys = self._codes(q.device)
        row, exists = self._row(q, b, h)
        asked = (row * keys + k.clamp(0, max(keys - 1, 0))).contiguous()
        count = torch.searchsorted(codes, asked, right=True) - torch.searchsorted(codes, asked)
        return torch.where(exists & (k >= 0) & (k < keys), count, 0)

    def related(self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        return self.multiplicity(q, k, b, h) > 0

    def reorder(self, method: Literal["rcm", "morton"], points: Any = None) -> tuple[Tensor, Self]:
        """An order of the nodes in which neighbours lie near each other, and the relation in it.

        Large graphs spend their time on fetching keys and values from memory; in a good order most are in
        a cache already. Permute the features once, before the first layer, not in every layer: the
        permutation costs about as much as it saves there. Edge terms stay as they are, since edges keep
        their order.

        Args:
            method: "rcm", reverse Cuthill-McKee, needs the edges alone; "morton" follows the Z-order curve
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
                raise ValueError("points: only 'morton' reads them, got some with 'rcm'")
            query, key = (x.cpu().numpy() for x in self._pairs())
            order = reverse_cuthill_mckee(query, key, nodes)
        elif method == "morton":
            if points is None:
                raise ValueError("points: wanted coordinates [N, d] for 'morton', got None")
            order = morton(points)
            if len(order) != nodes:
                raise ValueError(f"points: wanted {nodes}, one for each node, got {len(order)}")
        else:
            raise ValueError(f"method: wanted 'rcm' or 'morton', got {method!r}")
        placed = torch.from_numpy(order).to(self._device)
        new = torch.empty_like(placed)
        new[placed] = torch.arange(nodes, device=placed.device)
        return placed, self._relabel(placed, new)


def square(name: str, queries: int, keys: int) -> int:
    """The number of nodes that are both queries and keys."""
    if queries != keys:
        raise ValueError(f"{name}: wanted as many sources as targets, got {keys} and {queries}")
    return queries


def worst(index: Tensor, low: int, count: int) -> int | None:
    """A number of ``index`` outside ``low .. count - 1``, or None."""
    if not index.numel():
        return None
    least, most = torch.stack(index.aminmax()).tolist()
    return least if least < low else most if most >= count else None
