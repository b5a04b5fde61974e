"""Properties of a relation among n tokens, seen as a directed graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
import torch

from ..relations import Dense, Relation
from ..sets.intervals import Intervals, Ints


@dataclass(frozen=True)
class Properties:
    """Properties of a relation among n tokens; print it to list those that hold.

    Example:
        >>> import attnbias as ab
        >>> from attnbias.symmetry import properties
        >>> properties(ab.Causal(), 4).total_order
        True
    """

    complete: bool  # every pair is related
    reflexive: bool  # every token is related to itself
    symmetric: bool  # each pair is related both ways or not at all
    antisymmetric: bool  # no two tokens are related both ways
    transitive: bool  # the neighbours of neighbours are neighbours
    total_order: bool  # reflexive, antisymmetric, transitive, and any two tokens are related
    acyclic: bool  # no cycles other than loops
    unique_topological_order: bool  # acyclic, with exactly one order in which all arrows point back
    bipartite: bool  # two classes with no pair inside either (so no loops)
    regular: bool  # every query has as many keys, every key as many queries
    translation_invariant: bool  # depends only on q - k, away from the borders

    def __str__(self) -> str:
        held = [each.name.replace("_", " ") for each in fields(self) if getattr(self, each.name)]
        return ", ".join(held) or "none"


def properties(relation: Relation, n: int) -> Properties:
    """Compute the properties of a relation among n tokens.

    Time and memory grow with its pairs; transitivity reads n / 8 bytes per pair.

    Args:
        relation: a relation that is the same for all batches and heads.
        n: number of tokens.

    Raises:
        ValueError: if the relation differs between batches or heads.

    Example:
        >>> import attnbias as ab
        >>> print(properties(ab.Causal(), 6))
        reflexive, antisymmetric, transitive, total order, acyclic, unique topological order,
        translation invariant
    """
    row, key = _pairs(relation, n, n)
    pairs = len(row)
    loops = int((row == key).sum())
    both = int(np.isin(row * n + key, key * n + row).sum())  # pairs whose reverse is related too
    reflexive, antisymmetric = loops == n, both == loops
    transitive = _is_transitive(row, key, n)
    acyclic, unique = _is_acyclic(row, key, n)
    degrees = [np.bincount(side, minlength=n) for side in (row, key)]
    return Properties(
        complete=pairs == n * n,
        reflexive=reflexive,
        symmetric=both == pairs,
        antisymmetric=antisymmetric,
        transitive=transitive,
        total_order=reflexive and antisymmetric and transitive and pairs == n * (n + 1) // 2,
        acyclic=acyclic,
        unique_topological_order=unique,
        bipartite=_is_bipartite(row, key, n),
        regular=all(len(np.unique(degree)) <= 1 for degree in degrees),
        translation_invariant=is_translation_invariant(relation, n),
    )


def _pairs(relation: Relation, q_len: int, k_len: int) -> tuple[Ints, Ints]:
    """List every pair once, sorted."""
    bound = relation.bind(q_len, k_len)
    if bound.group.max(initial=0) > 0:
        raise ValueError(f"relation: wanted one for all batches and heads, got {relation!r}")
    if isinstance(bound.solid, Intervals | None):
        parts = [bound.solid.pairs()] if bound.solid is not None else []
        if bound.edges is not None:
            listed = bound.edges.distinct()
            parts.append((listed.row, listed.key))
        row, key = (np.concatenate(side) for side in zip(*parts, strict=True))
    else:
        row, key = relation.dense(q_len, k_len).nonzero().numpy().T
    order = np.argsort(row * max(k_len, 1) + key, kind="stable")
    return row[order], key[order]


def _is_transitive(row: Ints, key: Ints, n: int) -> bool:
    """Return whether the keys of a token's keys are its own keys, using rows of bits."""
    keys = _csr(row, key, n)
    bits = np.zeros((n, n), bool)
    bits[row, key] = True
    packed = np.packbits(bits, axis=1)  # [n, n / 8]
    for token in range(n):
        reached = np.bitwise_or.reduce(packed[keys(token)], axis=0)
        if (reached & ~packed[token]).any():
            return False
    return True


def _csr(row: Ints, key: Ints, n: int) -> Callable[[int], Ints]:
    """Return a function from a row to its keys, for sorted pairs."""
    ptr = np.searchsorted(row, np.arange(n + 1))
    return lambda token: key[ptr[token] : ptr[token + 1]]


def _is_acyclic(row: Ints, key: Ints, n: int) -> tuple[bool, bool]:
    """Return whether there is a topological order, and whether it is unique; loops do not count."""
    proper = row != key
    row, key = row[proper], key[proper]
    order = np.argsort(key, kind="stable")
    asked_by = _csr(key[order], row[order], n)
    waiting = np.bincount(row, minlength=n)  # number of keys not placed yet
    ready = np.flatnonzero(waiting == 0).tolist()
    placed, unique = 0, True
    while ready:
        unique = unique and len(ready) == 1
        token = ready.pop()
        placed += 1
        users = asked_by(token)
        waiting[users] -= 1
        ready.extend(users[waiting[users] == 0].tolist())
    return placed == n, unique and placed == n


def _is_bipartite(row: Ints, key: Ints, n: int) -> bool:
    both, other = np.concatenate((row, key)), np.concatenate((key, row))
    order = np.argsort(both, kind="stable")
    near = _csr(both[order], other[order], n)
    side = np.zeros(n, np.int64)  # 0 = not seen, else 1 or -1
    for start in range(n):
        stack = [start] if side[start] == 0 else []
        side[start] = side[start] or 1
        while stack:
            token = stack.pop()
            found = near(token)
            if (side[found] == side[token]).any():
                return False
            fresh = np.unique(found[side[found] == 0])
            side[fresh] = -side[token]
            stack.extend(fresh.tolist())
    return True


def is_translation_invariant(relation: Relation, n: int) -> bool:
    """Return whether (q, k) is related exactly if (q + 1, k + 1) is, wherever all four are among n tokens.

    This is what "equivariant to translations" can mean for a finite sequence: a translation moves tokens in
    and out at the borders, and rows whose keys are cut off there differ.

    Example:
        >>> import attnbias as ab
        >>> is_translation_invariant(ab.Window(before=2), 8), is_translation_invariant(ab.Chunks(2), 8)
        (True, False)
    """
    if relation.stationary or n < 2:
        return True
    row, key = _pairs(relation, n, n)
    early = (row < n - 1) & (key < n - 1)
    late = (row > 0) & (key > 0)
    same: bool = np.array_equal(row[early] * n + key[early], (row[late] - 1) * n + key[late] - 1)
    return same


def closure(relation: Relation, n: int) -> Dense:
    """Return the reflexive, transitive closure among n tokens: who is reached along any number of pairs."""
    row, key = _pairs(relation, n, n)
    reached = np.eye(n, dtype=bool)
    reached[row, key] = True
    for token in range(n):  # Warshall: paths through this token and those before it
        reached |= reached[:, token : token + 1] & reached[token]
    return Dense(torch.from_numpy(reached))


def has_only_translations(relation: Relation, n: int) -> bool:
    """Return whether the symmetries of the relation, continued to all integers, are exactly the translations.

    They are symmetries if it depends on q - k only. There are no others if its closure is a total order of
    any consecutive tokens: a symmetry keeps the closure, so it maps n consecutive tokens to n consecutive
    tokens in their order. Both are decided on n tokens; a relation that reaches further is not told apart.
    """
    order = properties(closure(relation, n), n)
    return order.total_order and is_translation_invariant(relation, n)
