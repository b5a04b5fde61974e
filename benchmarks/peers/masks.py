"""The kind of a case's mask, read from its relation: most peers know only a few kinds."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

import attnbias as ab
from attnbias.relations.algebra import And

from ..cases.tokens import Case


def is_full(case: Case) -> bool:
    """Return whether every query attends to every key; one causal query at the end does."""
    return isinstance(case.relation, ab.Full) or (isinstance(case.relation, ab.Causal) and case.q_len == 1)


def is_causal(case: Case) -> bool:
    """Return whether the mask is a lower triangle of as many queries as keys."""
    return isinstance(case.relation, ab.Causal) and case.q_len == case.tokens


def window(case: Case) -> int:
    """Return the keys of a row of a causal window, its own included; 0 for other relations."""
    relation = case.relation
    if not isinstance(relation, ab.Window) or relation.before is None or relation.after != 0:
        return 0
    return relation.before + 1


def chunk(case: Case) -> int:
    """Return the tokens of each block on the diagonal; 0 for other relations."""
    return case.relation.size if isinstance(case.relation, ab.Chunks) else 0


def split(case: Case) -> int:
    """Return the query from which on queries attend to all keys before it; 0 for other relations."""
    return case.relation.split if isinstance(case.relation, ab.Bipartite) else 0


def documents(case: Case) -> tuple[int, ...]:
    """Return the lengths of causal documents; none for other relations."""
    parts = case.relation.parts if isinstance(case.relation, And) else ()
    if len(parts) != 2 or not isinstance(parts[0], ab.Documents) or not isinstance(parts[1], ab.Causal):
        return ()
    return tuple(torch.unique_consecutive(parts[0].ids, return_counts=True)[1].tolist())


def grid(case: Case) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the sizes of a grid and the widths of its neighbourhoods, by NATTEN's rule; empty if none."""
    relation = case.relation
    if not isinstance(relation, ab.Neighborhood) or relation.border != "clamp":
        return (), ()
    radii = np.broadcast_to(relation.radius, len(relation.shape)).tolist()
    return tuple(relation.shape), tuple(2 * radius + 1 for radius in radii)


def neighbours(case: Case) -> Tensor | None:
    """Return the listed keys of each query, [tokens, n]; None for other relations."""
    return case.relation.index if isinstance(case.relation, ab.Neighbors) else None
