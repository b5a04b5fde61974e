"""Documents packed into one sequence, and relations inside each of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..arguments import as_count, as_indices
from ..layouts.outline import Fault, Grid, Outline, outline_labels
from ..sets.bound import MOST_PER_ROW, Bound, Place, intersect
from ..sets.intervals import Intervals, Ints, pointer
from .algebra import Compound
from .relation import Relation
from .tables import distinct_rows, look_up
from .value import kept, show


class Documents(Relation):
    """Keys of the query's own document, for sequences packed into one.

    Args:
        ids: document of each position, [L] or [B, L]; -1 is padding, related to nothing.
        key_ids: documents of the keys where they differ from the queries', [K] or [B, K].

    Example:
        >>> import attnbias as ab
        >>> print((ab.Documents.from_lengths([2, 3]) & ab.Causal()).picture(5, 5))
        #....
        ##...
        ..#..
        ..##.
        ..###
    """

    ids: Tensor
    key_ids: Tensor | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", as_indices("ids", self.ids, (1, 2)))
        if self.key_ids is not None:
            key_ids = as_indices("key_ids", self.key_ids, (1, 2))
            object.__setattr__(self, "key_ids", key_ids.to(self.ids.device))
            sizes = {len(x) for x in (self.ids, key_ids) if x.dim() == 2 and len(x) != 1}
            if len(sizes) > 1:
                raise ValueError(
                    f"key_ids: wanted the batch of ids, got shapes {list(key_ids.shape)} "
                    f"and {list(self.ids.shape)}"
                )
        super().__post_init__()

    def _check(self, at: Place) -> None:
        try:
            super()._check(at)
        except ValueError as error:
            if self.key_ids is None and self.ids.dim() == 1 and int(self.ids.sum()) == at.k_len:
                lengths = f"for documents of these lengths use Documents.from_lengths({show(self.ids)})"
                raise ValueError(f"{error}; {lengths}") from None
            raise

    @classmethod
    def from_lengths(cls, lengths: Sequence[int] | Tensor, *, total: int | None = None) -> Documents:
        """Make documents of the given lengths, one after another.

        Args:
            lengths: [n].
            total: positions in all; those after the last document are padding. None takes the sum of the
                lengths, which is read where they are on a GPU.
        """
        sizes = as_indices("lengths", lengths, (1,))
        if total is None or _is_known(sizes):
            sizes = sizes.cpu()
            if len(sizes) and int(sizes.min()) < 0:
                raise ValueError(f"lengths: wanted 0 or more, got {int(sizes.min())}")
        return cls(_number_positions(sizes.cumsum(0), total))

    @classmethod
    def from_cu_seqlens(
        cls, cu_q: Tensor, cu_k: Tensor | None = None, *, total: int | tuple[int, int] | None = None
    ) -> Documents:
        """Make documents from cumulative lengths ``[0, n1, n1 + n2, ...]`` of queries (and of keys).

        Args:
            cu_q: [n + 1].
            cu_k: [n + 1].
            total: as for :meth:`from_lengths`; (queries, keys) where they differ.
        """
        if isinstance(total, tuple) and len(total) != 2:
            raise ValueError(f"total: wanted a number, or (queries, keys), got {total!r}")
        of_queries, of_keys = total if isinstance(total, tuple) else (total, total)
        ids = _ids_from_offsets("cu_q", cu_q, of_queries)
        if cu_k is None:
            return cls(ids)
        cu_q, cu_k = as_indices("cu_q", cu_q, (1,)), as_indices("cu_k", cu_k, (1,))
        if len(cu_k) != len(cu_q):
            raise ValueError(f"cu_k: wanted {len(cu_q)} offsets as in cu_q, got {len(cu_k)}")
        return cls(ids, _ids_from_offsets("cu_k", cu_k, of_keys))

    def each(self, relation: Relation) -> Relation:
        """Return a relation inside each document, in positions counted from the document's first."""
        if not isinstance(relation, Relation):
            raise TypeError(f"relation: wanted a relation, got {relation!r}")
        if relation.lengths != (None, None):
            raise ValueError(f"relation: wanted one that fits documents of any length, got {relation!r}")
        return EachDocument(self, relation)

    @property
    def _keys(self) -> Tensor:
        return self.ids if self.key_ids is None else self.key_ids

    @property
    def batch_size(self) -> int:
        return max(len(ids) if ids.dim() == 2 else 1 for ids in (self.ids, self._keys))

    @property
    def lengths(self) -> tuple[int, int]:
        return self.ids.shape[-1], self._keys.shape[-1]

    def related(self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        query_id = look_up(self.ids, q, b, -1)
        return (query_id == look_up(self._keys, k, b, -1)) & (query_id >= 0)

    def _bind(self, at: Place) -> Bound:
        of_queries, of_keys, group = self._numbered()
        queries, keys = _find_runs(of_queries[:, at.q_start : at.q_start + at.q_len]), _find_runs(of_keys)
        order = np.argsort(keys.document, kind="stable")
        known = keys.document[order]
        # Looked up once for each run of queries: the runs of keys of its document.
        first = np.searchsorted(known, queries.document)
        count = np.searchsorted(known, queries.document, side="right") - first
        count[queries.document < 0] = 0
        if count @ queries.length > MOST_PER_ROW * max(len(of_queries) * at.q_len, 1):
            return super()._bind(at)
        ptr = pointer(np.repeat(count, queries.length))
        before = np.repeat(first, queries.length) - ptr[:-1]
        picked = order[np.arange(ptr[-1]) + np.repeat(before, np.diff(ptr))]
        start, stop = keys.first[picked], (keys.first + keys.length)[picked]
        return Bound(Intervals(at.q_len, at.k_len, group[:, None], ptr, start, stop))

    def _outline(self, at: Place, tile: int) -> Outline:
        grid = Grid.of(at, tile)
        of_queries, of_keys = (torch.atleast_2d(x.to(grid.device)) for x in (self.ids, self._keys))
        is_wrong = (of_queries < -1).any() | (of_keys < -1).any()
        fault = Fault(is_wrong, "ids: wanted -1 (padding) or more, got less")
        batch = max(len(of_queries), len(of_keys)) if len(of_queries) and len(of_keys) else 0
        of_queries, of_keys = (x.expand(batch, -1).contiguous() for x in (of_queries, of_keys))
        # A document's label is its first key: labels rise where documents follow one another.
        known, place = of_keys.sort(dim=-1, stable=True)
        labels = [_labels(ids, known, place) for ids in (of_queries, of_keys)]
        return outline_labels(labels[0], labels[1], grid)._replace(faults=(fault,))

    def _numbered(self) -> tuple[Ints, Ints, Ints]:
        """Return the documents of queries and keys on the host, and the group of each batch.

        Documents are numbered through all groups, so that one axis holds them all; -1 is padding.
        """
        tables = (self.ids,) if self.key_ids is None else (self.ids, self.key_ids)
        rows, group = distinct_rows(*tables)
        documents, (queries, keys) = _number(rows), self.lengths
        return documents[:, :queries], documents[:, documents.shape[1] - keys :], group

    @property
    def T(self) -> Relation:
        return self if self.key_ids is None else Documents(self.key_ids, self.ids)


def _labels(ids: Tensor, known: Tensor, place: Tensor) -> Tensor:
    """Return the place of the first number equal to each id, -1 for padding and where there is none."""
    if not known.shape[1]:
        return torch.full_like(ids, -1)
    at = torch.searchsorted(known, ids).clamp(max=known.shape[1] - 1)
    is_there = (known.gather(1, at) == ids) & (ids >= 0)
    return torch.where(is_there, place.gather(1, at), -1)


def _ids_from_offsets(name: str, offsets: Tensor, total: int | None) -> Tensor:
    ends = as_indices(name, offsets, (1,))
    if total is None or _is_known(ends):
        ends = ends.cpu()
        if len(ends) == 0 or ends[0] != 0 or (len(ends) > 1 and int(ends.diff().min()) < 0):
            raise ValueError(f"{name}: wanted offsets that rise from 0, got {ends.tolist()}")
    return _number_positions(ends[1:], total)


def _is_known(numbers: Tensor) -> bool:
    """Return whether the host may look at numbers: not while it traces, and not without need on a GPU."""
    return numbers.device.type == "cpu" and not torch.compiler.is_compiling()


def _number_positions(ends: Tensor, total: int | None) -> Tensor:
    """Return the document of each position, from the ends of the documents; -1 after the last."""
    if total is None or _is_known(ends):
        last = int(ends[-1]) if len(ends) else 0
        total = last if total is None else as_count("total", total)
        if total < last:
            raise ValueError(f"total: wanted at least the {last} positions of the documents, got {total}")
    place = torch.arange(total, device=ends.device)
    number = torch.searchsorted(ends, place, right=True)
    return torch.where(number < len(ends), number, -1)


def _number(ids: Ints) -> Ints:
    """Number the documents of all groups [groups, L] from 0; -1 stays -1."""
    flat = ids.reshape(-1)
    if not len(flat):
        return ids
    first = _run_starts(flat)
    values, number = np.unique(flat[first], return_inverse=True)
    if values[0] < -1:
        raise ValueError(f"ids: wanted -1 (padding) or more, got {int(values[0])}")
    number -= values[0] == -1
    numbers: Ints = np.repeat(number, _run_lengths(first, len(flat))).reshape(ids.shape)
    if len(ids) > 1:
        numbers = np.where(numbers < 0, -1, np.arange(len(ids))[:, None] * len(values) + numbers)
    return numbers


class _Runs(NamedTuple):
    """Positions of one document that follow one another, group by group; padding is document -1."""

    document: Ints  # [n]
    group: Ints  # [n]
    first: Ints  # [n], position
    length: Ints  # [n]


def _find_runs(documents: Ints) -> _Runs:
    """Find the runs of documents [groups, L]."""
    flat = documents.reshape(-1)
    begin = _run_starts(flat)
    group, first = np.divmod(begin, max(documents.shape[1], 1))
    return _Runs(flat[begin], group, first, _run_lengths(begin, len(flat)))


def _run_starts(flat: Ints) -> Ints:
    """Return where each run of equal numbers begins."""
    fresh = np.ones(len(flat), bool)
    np.not_equal(flat[1:], flat[:-1], out=fresh[1:])
    return np.flatnonzero(fresh)


def _run_lengths(first: Ints, end: int) -> Ints:
    """Return the lengths of the runs that begin at ``first``, the last one ending at ``end``."""
    lengths: Ints = np.empty_like(first)
    np.subtract(first[1:], first[:-1], out=lengths[:-1])
    lengths[-1:] = end - first[-1:]
    return lengths


class EachDocument(Compound):
    """A relation inside each document; written ``documents.each(relation)``."""

    documents: Documents
    relation: Relation

    @property
    def inner(self) -> tuple[Relation, ...]:
        return self.documents, self.relation

    def related(self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        of_queries, of_keys = self._local
        local_q, local_k = look_up(of_queries, q, b, 0), look_up(of_keys, k, b, 0)
        return self.documents.related(q, k, b, h) & self.relation.related(local_q, local_k, b, h)

    @kept
    def _local(self) -> tuple[Tensor, Tensor]:
        """Positions of queries and of keys within their documents."""
        return _local_positions(self.documents.ids), _local_positions(self.documents._keys)

    def _bind(self, at: Place) -> Bound:
        if self.relation.batch_size == 1 and self.relation.head_count == 1:
            form = self._place_documents()
            if form is not None:
                return Bound(form.take_queries(at.q_start, at.q_len))
        return intersect(super()._bind(at), self.documents._bind(at), at.rule(self.related))

    def _outline(self, at: Place, tile: int) -> Outline | None:
        if not self.relation._is_on_host:
            return None
        found = self.documents._outline(at, tile).blur()
        sizes = self.batch_size or at.batch or 1, self.head_count or at.heads or 1
        return found._replace(kind=found.kind.expand(*sizes, -1, -1))

    def _place_documents(self) -> Intervals | None:
        """Bind the relation once per shape of document, and put it at each document's corner.

        Returns:
            None if a document is in pieces, or the relation is not made of ranges.
        """
        of_queries, of_keys, group = self.documents._numbered()
        corners = _find_corners(of_queries, of_keys)
        if corners is None:
            return None
        queries, keys = self.documents.lengths
        shapes, which = np.unique(corners[:, 3:], axis=0, return_inverse=True)
        row, start, stop = [], [], []
        for number, (q_size, k_size) in enumerate(shapes.tolist()):
            inner = self.relation._bind(Place(q_size, k_size))
            if not isinstance(inner.solid, Intervals) or inner.edges is not None:
                return None
            at = corners[which.reshape(-1) == number]
            first_row = at[:, 0] * queries + at[:, 1]
            row.append((first_row[:, None] + inner.solid.row).reshape(-1))
            start.append((at[:, 2:3] + inner.solid.start).reshape(-1))
            stop.append((at[:, 2:3] + inner.solid.stop).reshape(-1))
        form = Intervals.empty(queries, keys, group[:, None])
        none = np.zeros(0, np.int64)
        return form.from_ranges(*(np.concatenate((none, *x)) for x in (row, start, stop)))

    @property
    def T(self) -> Relation:
        turned = self.documents.T
        assert isinstance(turned, Documents)
        return EachDocument(turned, self.relation.T)

    def __repr__(self) -> str:
        return f"{self.documents!r}.each({self.relation!r})"


def _find_corners(of_queries: Ints, of_keys: Ints) -> Ints | None:
    """Return group, first query, first key, queries and keys of every document that has both, [n, 5].

    Documents are [groups, L]; the result is None if one of them is in pieces.
    """
    runs = [_find_runs(documents) for documents in (of_queries, of_keys)]
    q, k = (_Runs(*(x[each.document >= 0] for x in each)) for each in runs)
    if any(len(np.unique(each.document)) < len(each.document) for each in (q, k)):
        return None
    _, in_q, in_k = np.intersect1d(q.document, k.document, assume_unique=True, return_indices=True)
    return np.stack((q.group[in_q], q.first[in_q], k.first[in_k], q.length[in_q], k.length[in_k]), 1)


def _local_positions(ids: Tensor) -> Tensor:
    """Return how many earlier positions have the same id, for each position of [L] or [B, L]."""
    order = ids.sort(dim=-1, stable=True)
    count = torch.arange(ids.shape[-1], device=ids.device).expand_as(ids)
    first = torch.searchsorted(order.values.contiguous(), order.values.contiguous())
    return torch.zeros_like(ids).scatter(-1, order.indices, count - first)
