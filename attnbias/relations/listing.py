"""The caller's edges behind a relation: what a number for each edge belongs to."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .algebra import And
from .graph import Graph
from .neighbors import Neighbors
from .relation import Relation


class Listing(NamedTuple):
    """Edges one by one, in the caller's order; those that are for no batch or head in particular lack it."""

    number: Tensor  # [n], the caller's number
    b: Tensor | None  # [n]
    h: Tensor | None  # [n]
    q: Tensor  # [n], position of the query
    k: Tensor  # [n]

    def keep(self, which: Tensor, device: torch.device) -> Listing:
        """Some of the edges, by a mask or their places."""
        b, h = (None if x is None else x[which].to(device) for x in (self.b, self.h))
        number, q, k = (x[which].to(device) for x in (self.number, self.q, self.k))
        return Listing(number, b, h, q, k)


def find_edges(relation: Relation, what: str) -> Graph | Neighbors:
    """The graph or the neighbours that a relation is, alone or behind ``& other``.

    Raises:
        ValueError: naming ``what``, if there is no such one or more than one.
    """
    if isinstance(relation, (Graph, Neighbors)):
        return relation
    parts = relation.parts if isinstance(relation, And) else ()
    listed = [part for part in parts if isinstance(part, (Graph, Neighbors))]
    if len(listed) != 1:
        raise ValueError(
            f"{what}: wanted a Graph or Neighbors, alone or & other, whose edges have numbers, "
            f"got {type(relation).__name__}"
        )
    if any(part is not listed[0] and part.repeats for part in parts):
        raise ValueError(
            f"{what}: wanted one Graph or Neighbors & relations that count a pair once, got another list in "
            f"{type(relation).__name__}"
        )
    return listed[0]


def count_edges(relation: Relation, what: str) -> int:
    """How many numbers the caller has for the edges; that of neighbours includes places without one."""
    found = find_edges(relation, what)
    return found.edge_index.shape[1] if isinstance(found, Graph) else found.index.numel()


def list_edges(relation: Relation, what: str) -> Listing:
    """The edges whose pairs may be related: all of the graph or the neighbours."""
    found = find_edges(relation, what)
    if isinstance(found, Graph):
        k, q = found.edge_index
        return Listing(torch.arange(len(q), device=q.device), None, None, q, k)
    table = found.index[(None,) * (4 - found.index.dim())]
    b, h, q, n = torch.nonzero(table >= 0, as_tuple=True)
    number = ((b * table.shape[1] + h) * table.shape[2] + q) * table.shape[3] + n
    own = (b if table.shape[0] > 1 else None, h if table.shape[1] > 1 else None)
    return Listing(number, *own, q, table[b, h, q, n])
