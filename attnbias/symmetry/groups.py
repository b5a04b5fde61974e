"""Symmetries of a relation: the permutations that leave it unchanged and commute with a layer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ..arguments import as_count, as_indices
from ..op import dispatch
from ..relations import Relation

Partition = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Automorphisms:
    """The permutations of tokens that leave a relation unchanged: ``related(p[i], p[j]) == related(i, j)``.

    Where the keys are separate tokens, a permutation is over all points, queries before keys.

    Example:
        >>> import attnbias as ab
        >>> from attnbias.symmetry import automorphisms
        >>> automorphisms(ab.Chunks(2), 4).order  # exchange tokens in a chunk, and chunks
        8
    """

    points: int
    order: int  # the number of permutations
    generators: tuple[tuple[int, ...], ...]  # every permutation is a product of these

    @cached_property
    def orbits(self) -> Partition:
        """Sets of points that can be moved to one another."""
        return _join(self.points, ((i, p[i]) for p in self.generators for i in range(self.points)))

    @property
    def name(self) -> str:
        """The group's usual name if it is trivial, cyclic or a product of symmetric groups; else its order.

        Example:
            >>> import attnbias as ab
            >>> automorphisms(ab.Full(), 5).name, automorphisms(ab.Causal(), 5).name
            ('S_5', 'trivial')
        """
        sizes = sorted((len(orbit) for orbit in self.orbits if len(orbit) > 1), reverse=True)
        if self.order == 1:
            return "trivial"
        if self.order == math.prod(math.factorial(size) for size in sizes):
            return " x ".join(f"S_{size}" for size in sizes)
        if sizes == [self.order] and any(_cycle_length(p) == self.order for p in self.generators):
            return f"Z_{self.order}"
        return f"order {self.order}"

    def blocks(self) -> tuple[Partition, ...]:
        """Find block systems: partitions that every automorphism maps to themselves, each by joining a pair.

        The two trivial ones (single points; all in one block) are left out.

        Example:
            >>> import attnbias as ab
            >>> automorphisms(ab.Chunks(2), 6).blocks()
            (((0, 1), (2, 3), (4, 5)),)
        """
        found: dict[Partition, None] = {}
        for orbit in self.orbits:
            for other in orbit[1:]:
                blocks = self._close(orbit[0], other)
                if 1 < len(blocks) < self.points and any(len(block) > 1 for block in blocks):
                    found[blocks] = None
        return tuple(found)

    def _close(self, i: int, j: int) -> Partition:
        """Return the finest invariant partition in which two points share a block."""
        joined, pairs = {(i, j)}, [(i, j)]
        while pairs:
            a, b = pairs.pop()
            for p in self.generators:
                image = (min(p[a], p[b]), max(p[a], p[b]))
                if image not in joined:
                    joined.add(image)
                    pairs.append(image)
        return _join(self.points, joined)


def automorphisms(relation: Relation, n: int, keys: int | None = None) -> Automorphisms:
    """Find the symmetry group of a relation, with igraph's BLISS.

    An automorphism keeps batches, heads and the multiplicity of edges, since attention depends on them.

    Args:
        relation: a relation among n tokens.
        n: number of tokens, or of queries if ``keys`` is given.
        keys: number of keys if they are not the queries' tokens, as in encoder-decoder attention; queries and
            keys are then permuted separately.

    Raises:
        ImportError: without igraph.

    Example:
        >>> import attnbias as ab
        >>> group = automorphisms(ab.Bipartite(3), 5)
        >>> group.order, group.name
        (12, 'S_3 x S_2')
    """
    try:
        import igraph
    except ImportError as error:
        raise ImportError(
            "automorphisms: wanted igraph (pip install igraph), which is not installed"
        ) from error
    n = as_count("n", n)
    offset = n if keys is not None else 0
    points = n + (as_count("keys", keys) if keys is not None else 0)
    kinds = _pair_kinds(relation, n, n if keys is None else keys)
    # BLISS colours vertices, not edges. So a token's colour is the kind of its loop; the most frequent kind
    # of pair is a plain arrow; any other kind is an arrow with a vertex of that colour in the middle.
    loops = {i: kind for (i, k), kind in kinds.items() if keys is None and i == k}
    arrows = {(i, k + offset): kind for (i, k), kind in kinds.items() if keys is not None or i != k}
    counts = Counter(arrows.values())
    plain = max(counts, key=lambda kind: counts[kind], default=())
    names: dict[object, int] = {}

    def colour(what: object) -> int:
        return names.setdefault(what, len(names))

    colours = [colour(("point", i >= n and keys is not None, loops.get(i))) for i in range(points)]
    edges = []
    for (i, k), kind in arrows.items():
        if kind == plain:
            edges.append((i, k))
        else:
            edges += [(i, len(colours)), (len(colours), k)]
            colours.append(colour(("pair", kind)))
    graph = igraph.Graph(n=len(colours), edges=edges, directed=True)
    generators = graph.automorphism_group(color=colours)
    return Automorphisms(
        points,
        int(graph.count_automorphisms(color=colours)),
        tuple(tuple(p[:points]) for p in generators),
    )


def _pair_kinds(relation: Relation, q_len: int, k_len: int) -> dict[tuple[int, int], tuple[int, ...]]:
    """Map each pair that any batch and head relates to its multiplicity in each of them."""
    relation.check(q_len, k_len)
    b = torch.arange(relation.batch_size or 1).view(-1, 1, 1, 1)
    h = torch.arange(relation.head_count or 1).view(-1, 1, 1)
    q, k = torch.arange(q_len).view(-1, 1), torch.arange(k_len)
    counts = relation.multiplicity(q, k, b, h)
    if counts is None:
        counts = relation.related(q, k, b, h).long()
    counts = counts.expand(len(b), len(h), q_len, k_len).flatten(0, 1)  # [B * H, Q, K]
    pairs = counts.amax(0).nonzero().tolist() if counts.numel() else []
    return {(i, j): tuple(counts[:, i, j].tolist()) for i, j in pairs}


def _join(points: int, pairs: Iterable[tuple[int, int]]) -> Partition:
    """Return the partition in which each pair shares a part; parts and their members are in order."""
    parent = list(range(points))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    for i, j in pairs:
        a, b = sorted((root(i), root(j)))
        parent[b] = a
    parts: dict[int, list[int]] = {}
    for i in range(points):
        parts.setdefault(root(i), []).append(i)
    return tuple(map(tuple, parts.values()))


def _cycle_length(permutation: Sequence[int]) -> int:
    """Return the length of the cycle of the first moved point."""
    start = next((i for i, j in enumerate(permutation) if i != j), 0)
    length, at = 1, permutation[start]
    while at != start:
        length, at = length + 1, permutation[at]
    return length


def equivariance(
    layer_or_op: Callable[..., Any],
    relation: Relation,
    permutation: Tensor | Sequence[int],
    *,
    size: int = 16,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Tensor:
    """Measure how far a layer is from commuting with a permutation: ``f(P x) - P f(x)`` on random tokens.

    Args:
        layer_or_op: a layer of ``attnbias.nn`` (called as ``layer(x, relation=relation)``), or a function
            called as ``attention(query, key, value, relation)``.
        relation: a relation among ``len(permutation)`` tokens.
        permutation: P, ``(P x)[i] = x[permutation[i]]``.
        size: features per token, unless the layer has a ``d_model``.
        dtype: dtype of the tokens.
        seed: seed of the tokens.

    Returns:
        The largest difference at each token, [n]: 0 up to rounding if P is an automorphism of the relation.

    Example:
        >>> import attnbias as ab
        >>> swap = [1, 0, 2, 3]
        >>> bool(equivariance(ab.attention, ab.Full(), swap).max() < 1e-12)
        True
        >>> (equivariance(ab.attention, ab.Causal(), swap) > 1e-3).tolist()
        [True, True, False, False]
    """
    order = as_indices("permutation", permutation, (1,))
    n = len(order)
    if not torch.equal(order.sort().values, torch.arange(n)):
        raise ValueError(f"permutation: wanted each of 0..{n - 1} once, got {order.tolist()}")
    rng = torch.Generator().manual_seed(seed)
    # No kernel takes float64. To name the reference is to be spared the warning about a slow backend.
    backend = "reference" if dtype == torch.float64 else None
    with torch.no_grad(), dispatch.use_backend(dispatch.asked_for(None) or backend):
        if isinstance(layer_or_op, nn.Module):
            width = getattr(layer_or_op, "d_model", size)
            x = torch.randn(n, width, generator=rng, dtype=torch.float64).to(dtype)
            moved = layer_or_op(x[order], relation=relation)
            still = layer_or_op(x, relation=relation)
        else:
            x = torch.randn(3, 1, 1, n, size, generator=rng, dtype=torch.float64).to(dtype)
            moved = layer_or_op(*x[..., order, :], relation)[0, 0]
            still = layer_or_op(*x, relation)[0, 0]
    difference: Tensor = (moved - still[order]).abs().amax(-1)
    return difference
