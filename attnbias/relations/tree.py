"""Trees of tokens: each sees its ancestors and itself. Sequences that share prefixes are packed into one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.serialization import add_safe_globals

from ..arguments import as_indices
from ..sets.bound import MANY_RANGES, MOST_PER_ROW, Bound, Place, intersect
from ..sets.intervals import Intervals, Ints, gather_ranges, make_groups
from ..sets.permute import permute
from .algebra import Compound
from .relation import Relation
from .tables import distinct_rows, look_up
from .value import kept


class Tree(Relation):
    """Each token attends to its ancestors and itself: prefix trees of rollouts, trees of drafted tokens.

    Tokens may stand in any order. Keep the tokens of a subtree together, as :meth:`from_sequences` does, and
    a token has one range of keys for each branching above it; in other orders it may have one for each
    ancestor.

    Args:
        parents: parent of each token, [L] or [B, L]; -1 = none. Several roots make several trees.

    Example:
        >>> import attnbias as ab
        >>> print(ab.Tree([-1, 0, 1, 1, 0]).picture(5, 5))
        #....
        ##...
        ###..
        ##.#.
        #...#
    """

    parents: Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "parents", as_indices("parents", self.parents, (1, 2)))
        super().__post_init__()
        if self.parents.device.type == "cpu" and not torch.compiler.is_compiling():
            _ = self._places  # raises for parents that are not there, and for cycles

    @classmethod
    def from_sequences(cls, sequences: Sequence[Any]) -> PackedTree:
        """Pack sequences of tokens, so that a prefix that several of them share is there once.

        Args:
            sequences: token ids of each sequence, as lists, arrays or tensors.

        Returns:
            The tree, with all that a model and its loss need; see :class:`PackedTree`.

        Example:
            >>> import attnbias as ab
            >>> packed = ab.Tree.from_sequences([[5, 6, 7], [5, 6, 8, 9]])
            >>> packed.ids.tolist(), packed.positions.tolist(), packed.weights.tolist()
            ([5, 6, 7, 8, 9], [0, 1, 2, 2, 3], [2.0, 2.0, 1.0, 1.0, 1.0])
        """
        return _pack(sequences)

    def each(self, relation: Relation) -> Relation:
        """Return a relation among ancestors, in positions counted along the path from the root.

        ``tree.each(Window(before=3))`` is a window by depth: a token and up to three ancestors.
        """
        if not isinstance(relation, Relation):
            raise TypeError(f"relation: wanted a relation, got {relation!r}")
        if relation.lengths != (None, None) or (relation.batch_size, relation.head_count) != (1, 1):
            raise ValueError(f"relation: wanted one that fits paths of any length, got {relation!r}")
        return EachPath(self, relation)

    @property
    def batch_size(self) -> int:
        return len(self.parents) if self.parents.dim() == 2 else 1

    @property
    def lengths(self) -> tuple[int, int]:
        return self.parents.shape[-1], self.parents.shape[-1]

    @property
    def depth(self) -> Tensor:
        """Ancestors of each token, [L] or [B, L]: its position for rotary or learned embeddings."""
        found: Tensor = self._places.depth
        return found

    @kept
    def _places(self) -> _Places:
        host = self.parents.cpu().numpy()
        rows = [_place(parents) for parents in np.atleast_2d(host)]
        found = (np.stack([each[i] for each in rows]) if rows else host for i in range(3))
        return _Places(*(torch.from_numpy(x.reshape(host.shape)).to(self.parents.device) for x in found))

    def related(self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        place, size, _ = self._places
        mine, first = look_up(place, q, b, -1), look_up(place, k, b, 0)
        return (first <= mine) & (mine < first + look_up(size, k, b, 0))

    def _bind(self, at: Place) -> Bound:
        form = self._paths()
        return super()._bind(at) if form is None else Bound(form.take_queries(at.q_start, at.q_len))

    def _paths(self, along: Intervals | None = None) -> Intervals | None:
        """Return the keys of every token; only those that ``along`` relates, by depth, where it is given.

        Returns:
            None where tokens stand in an order that leaves too many ranges.
        """
        _, group = distinct_rows(self.parents)
        if not self.batch_size:
            return Intervals.empty(*self.lengths, make_groups(0))
        length, forms = self.lengths[0], list[Intervals]()
        tables = [np.atleast_2d(x.cpu().numpy()) for x in self._places]
        for row in np.unique(group, return_index=True)[1]:
            place, size, depth = (x[row] for x in tables)
            order = np.argsort(place)
            # With subtrees together, a key is seen by one run of queries: itself to the end of its subtree.
            form = Intervals.one_per_row(length, length, np.arange(length), (place + size)[order]).transpose()
            if along is not None:
                form = _cut(form, depth[order], along)
            placed: Intervals | None = form
            if (place[1:] < place[:-1]).any():
                placed = permute(form, place, max(MOST_PER_ROW * length, MANY_RANGES))
            if placed is None:
                return None
            forms.append(placed)
        return Intervals.stack(forms, group[:, None])


class EachPath(Compound):
    """A relation among ancestors by depth; written ``tree.each(relation)``."""

    tree: Tree
    relation: Relation
    stationary = False

    @property
    def inner(self) -> tuple[Relation, ...]:
        return self.tree, self.relation

    def related(self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        depth = self.tree.depth
        near = self.relation.related(look_up(depth, q, b, 0), look_up(depth, k, b, 0), b, h)
        return self.tree.related(q, k, b, h) & near

    def _bind(self, at: Place) -> Bound:
        deepest = int(self.tree.depth.max()) + 1 if self.tree.depth.numel() else 0
        along = self.relation._bind(Place(deepest, deepest))
        if along.edges is None and isinstance(along.solid, Intervals):
            form = self.tree._paths(along.solid)
            if form is not None:
                return Bound(form.take_queries(at.q_start, at.q_len))
        return intersect(super()._bind(at), self.tree._bind(at), at.rule(self.related))

    def __repr__(self) -> str:
        return f"{self.tree!r}.each({self.relation!r})"


class PackedTree(NamedTuple):
    """Sequences packed into a tree of N tokens.

    The token at ``parents[i]`` predicts token ``i``. So the loss of all sequences is the sum of the loss of
    each token that has a parent, times its weight.
    """

    tree: Tree
    ids: Tensor  # [N]
    positions: Tensor  # [N], place in its sequence
    index: tuple[Tensor, ...]  # type: ignore[assignment]  # where the tokens of each sequence are, [length]
    weights: Tensor  # [N], sequences that a token is in, float32

    @property
    def saved(self) -> float:
        """The share of tokens that packing saves."""
        total = sum(map(len, self.index))
        return 1 - len(self.ids) / total if total else 0.0


add_safe_globals([PackedTree])  # torch.load(weights_only=True) may make one: it holds relations and tensors


class _Places(NamedTuple):
    """Where each token stands when subtrees are together, how large its own is, and its ancestors."""

    place: Any  # [L]
    size: Any  # [L]
    depth: Any  # [L]


def _place(parents: Ints) -> _Places:
    """Find the places of tokens; raise ValueError for parents that are not there, and for cycles."""
    length = len(parents)
    wrong = np.flatnonzero((parents < -1) | (parents >= length))
    if len(wrong):
        raise ValueError(f"parents: wanted -1 (none) to {length - 1}, got {int(parents[wrong[0]])}")
    depth, size = (parents >= 0).astype(np.int64), np.ones(length, np.int64)
    for alive, up in _generations(parents):
        size += np.bincount(up, weights=size[alive], minlength=length).astype(np.int64)
        depth[alive] += depth[up]
    # After its parent come the subtrees of its earlier siblings.
    siblings = np.argsort(parents, kind="stable")
    before = np.cumsum(size[siblings]) - size[siblings]
    is_first = np.diff(parents[siblings], prepend=-2) != 0
    place = np.empty(length, np.int64)
    place[siblings] = before - np.maximum.accumulate(np.where(is_first, before, 0)) + (parents[siblings] >= 0)
    for alive, up in _generations(parents):
        place[alive] += place[up]
    return _Places(place, size, depth)


def _generations(parents: Ints) -> Iterator[tuple[Ints, Ints]]:
    """Go up by 1, 2, 4 ... generations: tokens that have such an ancestor, and the ancestor of each.

    Raises:
        ValueError: if a token is its own ancestor.
    """
    alive = np.flatnonzero(parents >= 0)
    up = parents[alive]
    for _ in range(len(parents).bit_length() + 1):
        if not len(alive):
            return
        yield alive, up
        jump = np.full(len(parents), -1)
        jump[alive] = up
        has_more = jump[up] >= 0
        alive, up = alive[has_more], jump[up[has_more]]
    raise ValueError(f"parents: wanted a tree, got a cycle above token {int(alive[0])}")


def _cut(form: Intervals, depth: Ints, along: Intervals) -> Intervals:
    """Keep what ``along`` relates by depth; ranges are of ancestors, each one level below the one before."""
    levels, picked = gather_ranges(along.ptr, depth[form.row])
    counts = np.diff(levels)
    row, start, stop = (np.repeat(x, counts) for x in (form.row, form.start, form.stop))
    to_key = start - np.repeat(depth[form.start], counts)
    low, high = along.start[picked] + to_key, along.stop[picked] + to_key
    return form.from_ranges(row, np.maximum(start, low), np.minimum(stop, high))


def _pack(sequences: Any) -> PackedTree:
    if not isinstance(sequences, Sequence):
        raise TypeError(f"sequences: wanted a list of token lists, got {type(sequences).__name__}")
    lists = [as_indices(f"sequences[{i}]", each, (1,)).tolist() for i, each in enumerate(sequences)]
    nodes: dict[tuple[int, int], int] = {}  # (parent, token) -> token of the tree
    paths = []
    for tokens in lists:
        path, at = [], -1
        for token in tokens:
            at = nodes.setdefault((at, token), len(nodes))
            path.append(at)
        paths.append(np.array(path, np.int64))
    keys = np.array(list(nodes), np.int64).reshape(-1, 2)
    parents, ids = keys.T
    place, _, depth = _place(parents)
    order = np.argsort(place)
    renumbered = np.append(place, -1)
    weights = np.bincount(np.concatenate([np.zeros(0, np.int64), *paths]), minlength=len(ids))
    return PackedTree(
        Tree(torch.from_numpy(renumbered[parents[order]])),
        torch.from_numpy(ids[order]),
        torch.from_numpy(depth[order]),
        tuple(torch.from_numpy(place[path]) for path in paths),
        torch.from_numpy(weights[order].astype(np.float32)),
    )
