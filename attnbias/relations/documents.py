"""Relations that come with the data of a batch: packed documents and padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..arguments import check_dense
from ..layouts.bound import Bound, Place, intersect
from ..layouts.intervals import Intervals, Ints, pointer
from .algebra import common_size
from .patterns import RANGES_PER_ROW, as_lengths, key_ranges, per_batch
from .relation import Relation, as_indices


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

    @classmethod
    def from_lengths(cls, lengths: Sequence[int] | Tensor) -> Documents:
        """Documents of the given lengths, one after another."""
        sizes = as_indices("lengths", lengths, (1,)).cpu()
        if len(sizes) and int(sizes.min()) < 0:
            raise ValueError(f"lengths: wanted 0 or more, got {int(sizes.min())}")
        return cls(torch.repeat_interleave(torch.arange(len(sizes), device="cpu"), sizes))

    @classmethod
    def from_cu_seqlens(cls, cu_q: Tensor, cu_k: Tensor | None = None) -> Documents:
        """Documents from cumulative lengths ``[0, n1, n1 + n2, ...]`` of queries (and of keys)."""
        ids = _ids_from_offsets("cu_q", cu_q)
        if cu_k is None:
            return cls(ids)
        if len(cu_k) != len(cu_q):
            raise ValueError(f"cu_k: wanted {len(cu_q)} offsets as in cu_q, got {len(cu_k)}")
        return cls(ids, _ids_from_offsets("cu_k", cu_k))

    def each(self, relation: Relation) -> Relation:
        """A relation inside each document, in positions counted from the document's first."""
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
        q_ids, k_ids, group = self._numbered()
        found = _runs_of_rows(q_ids[:, at.q_start : at.q_start + at.q_len], k_ids)
        if found is None:
            return super()._bind(at)
        return Bound(Intervals(at.q_len, at.k_len, group[:, None], *found))

    def _numbered(self) -> tuple[Ints, Ints, Ints]:
        """Documents of queries and of keys on the host, numbered from 0, and the row of each batch."""
        if self.key_ids is None:
            rows, group = distinct_rows(self.ids)
            ids = _number(rows)
            return ids, ids, group
        rows, group = distinct_rows(self.ids, self.key_ids)
        ids, split = _number(rows), self.ids.shape[-1]
        return ids[:, :split], ids[:, split:], group

    @property
    def T(self) -> Relation:
        return self if self.key_ids is None else Documents(self.key_ids, self.ids)


def look_up(table: Tensor, position: Tensor, b: Tensor | None, outside: int) -> Tensor:
    """``table[b, position]`` for a table [L] or [B, L]; ``outside`` where there is no such position."""
    table = table.to(position.device)
    exists = (position >= 0) & (position < table.shape[-1])
    if table.shape[-1] == 0:
        return torch.full_like(position, outside)
    index = position.clamp(0, table.shape[-1] - 1)
    if table.dim() == 1 or len(table) == 1:
        found = table.reshape(-1)[index]
    else:
        batch = torch.zeros((), dtype=torch.int64, device=table.device) if b is None else b
        found = table[batch.clamp(max=len(table) - 1), index]
    return torch.where(exists, found, outside)


def distinct_rows(*tables: Tensor) -> tuple[Ints, Ints]:
    """Tables [L] or [B, L] joined row by row on the host, equal rows held once; and the row of each batch."""
    host = [np.atleast_2d(table.cpu().numpy()) for table in tables]
    batch = max(len(table) for table in host) if all(map(len, host)) else 0
    if batch == 0:
        return np.full((1, sum(x.shape[1] for x in host)), -1, np.int64), np.zeros(1, np.int64)
    if batch == 1:
        return np.concatenate(host, 1), np.zeros(1, np.int64)
    joined = np.concatenate([np.broadcast_to(x, (batch, x.shape[1])) for x in host], 1)
    first: dict[bytes, int] = {}  # np.unique(axis=0) takes a hundred times as long
    group = np.array([first.setdefault(row.tobytes(), len(first)) for row in joined])
    return joined[np.unique(group, return_index=True)[1]], group


def _number(ids: Ints) -> Ints:
    """Number the ids of all rows from 0, -1 staying -1, so that arithmetic on them cannot overflow."""
    flat = ids.reshape(-1)
    if not len(flat):
        return ids
    first = _run_starts(flat)
    values, number = np.unique(flat[first], return_inverse=True)
    if values[0] < -1:
        raise ValueError(f"ids: wanted -1 (padding) or more, got {int(values[0])}")
    number -= values[0] == -1
    return np.repeat(number, _run_lengths(first, len(flat))).reshape(ids.shape)


def _run_starts(flat: Ints) -> Ints:
    """Where each run of equal numbers begins."""
    fresh = np.ones(len(flat), bool)
    np.not_equal(flat[1:], flat[:-1], out=fresh[1:])
    return np.flatnonzero(fresh)


def _run_lengths(first: Ints, end: int) -> Ints:
    """How long the runs are that begin at ``first``, the last one ending at ``end``."""
    lengths: Ints = np.empty_like(first)
    np.subtract(first[1:], first[:-1], out=lengths[:-1])
    lengths[-1:] = end - first[-1:]
    return lengths


def _ids_from_offsets(name: str, offsets: Tensor) -> Tensor:
    host = as_indices(name, offsets, (1,)).cpu()
    sizes = host.diff()
    if len(host) == 0 or host[0] != 0 or (len(sizes) and int(sizes.min()) < 0):
        raise ValueError(f"{name}: wanted offsets that start at 0 and never fall, got {host.tolist()}")
    return torch.repeat_interleave(torch.arange(len(sizes), device="cpu"), sizes)


def _runs_of_rows(q_ids: Ints, k_ids: Ints) -> tuple[Ints, Ints, Ints] | None:
    """For each query the runs of keys with its id: ``ptr, start, stop``; None when they are too many."""
    span = int(max(q_ids.max(initial=0), k_ids.max(initial=0))) + 2
    # One axis for all groups: a run never joins the next group's, because the ids differ there.
    of_key, of_query = (_by_group(ids, span).reshape(-1) for ids in (k_ids, q_ids))
    place = _run_starts(of_key)
    order = np.argsort(of_key[place], kind="stable")
    known = of_key[place][order]
    # Looked up once for each run of queries.
    begin = _run_starts(of_query)
    asked, repeats = of_query[begin], _run_lengths(begin, len(of_query))
    first = np.searchsorted(known, asked)
    size = np.searchsorted(known, asked, side="right") - first
    size[q_ids.reshape(-1)[begin] < 0] = 0
    if size @ repeats > RANGES_PER_ROW * max(len(of_query), 1):
        return None
    ptr = pointer(np.repeat(size, repeats))
    picked = order[np.arange(ptr[-1]) + np.repeat(np.repeat(first, repeats) - ptr[:-1], np.diff(ptr))]
    start = place % max(k_ids.shape[1], 1)
    stop = start + _run_lengths(place, len(of_key))
    return ptr, start[picked], stop[picked]


def _by_group(ids: Ints, span: int) -> Ints:
    """Ids that differ between groups as well, [groups, L]."""
    numbers: Ints = np.arange(len(ids))[:, None] * span + ids
    return numbers


class EachDocument(Relation):
    """A relation inside each document; written ``documents.each(relation)``."""

    documents: Documents
    relation: Relation

    @property
    def batch_size(self) -> int | None:
        return common_size("batch", [self.documents.batch_size, self.relation.batch_size])

    @property
    def head_count(self) -> int | None:
        return self.relation.head_count

    @property
    def lengths(self) -> tuple[int, int]:
        return self.documents.lengths

    def related(self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        of_queries, of_keys = self._local
        local_q, local_k = look_up(of_queries, q, b, 0), look_up(of_keys, k, b, 0)
        return self.documents.related(q, k, b, h) & self.relation.related(local_q, local_k, b, h)

    @property
    def _local(self) -> tuple[Tensor, Tensor]:
        """Positions of queries and of keys within their documents."""
        made: tuple[Tensor, Tensor] | None = self.__dict__.get("_local_")
        if made is None:
            docs = self.documents
            made = local_positions(docs.ids), local_positions(docs._keys)
            object.__setattr__(self, "_local_", made)
        return made

    def _bind(self, at: Place) -> Bound:
        q_ids, k_ids, group = self.documents._numbered()
        whole = _are_runs(q_ids) and _are_runs(k_ids)
        if self.relation.batch_size == 1 and self.relation.head_count == 1 and whole:
            form = self._place_documents(q_ids, k_ids, group)
            if form is not None:
                rows = np.arange(len(q_ids))[:, None] * q_ids.shape[1] + at.positions
                return Bound(form.take_rows(rows.reshape(-1), at.q_len))
        return intersect(super()._bind(at), self.documents._bind(at))

    def _place_documents(self, q_ids: Ints, k_ids: Ints, group: Ints) -> Intervals | None:
        """Bind the relation once per shape of document, and put it at each document's corner."""
        queries = q_ids.shape[1]
        corners = _corners(q_ids, k_ids)  # [n, 5]: group, q, k, q_size, k_size
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
        form = Intervals.empty(queries, k_ids.shape[1], group[:, None])
        none = np.zeros(0, np.int64)
        return form.from_ranges(*(np.concatenate((none, *x)) for x in (row, start, stop)))

    @property
    def T(self) -> Relation:
        turned = self.documents.T
        assert isinstance(turned, Documents)
        return EachDocument(turned, self.relation.T)

    @property
    def _device(self) -> torch.device | str:
        return self.documents._device

    def _numbers(self) -> int:
        return 0

    def __repr__(self) -> str:
        return f"{self.documents!r}.each({self.relation!r})"


def local_positions(ids: Tensor) -> Tensor:
    """How many earlier positions have the same id, for each position of [L] or [B, L]."""
    order = ids.sort(dim=-1, stable=True)
    count = torch.arange(ids.shape[-1], device=ids.device).expand_as(ids)
    first = torch.searchsorted(order.values.contiguous(), order.values.contiguous())
    return torch.zeros_like(ids).scatter(-1, order.indices, count - first)


def _are_runs(ids: Ints) -> bool:
    """Whether the positions of every document follow one another."""
    number = _by_group(ids, int(ids.max(initial=0)) + 2).reshape(-1)
    first = _run_starts(number)
    first = first[ids.reshape(-1)[first] >= 0]
    return len(np.unique(number[first])) == len(first)


def _corners(q_ids: Ints, k_ids: Ints) -> Ints:
    """Group, first query, first key, queries and keys of every document that has both, [n, 5]."""
    span = int(max(q_ids.max(initial=0), k_ids.max(initial=0))) + 2
    found = []
    for ids in (q_ids, k_ids):
        number, first, size = np.unique(_by_group(ids, span)[ids >= 0], return_index=True, return_counts=True)
        position = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)[ids >= 0][first]
        found.append((number, position, size))
    (q_number, q_first, q_size), (k_number, k_first, k_size) = found
    both, in_q, in_k = np.intersect1d(q_number, k_number, return_indices=True)
    return np.stack((both // span, q_first[in_q], k_first[in_k], q_size[in_q], k_size[in_k]), 1)


class Padding(Relation):
    """Keys before each batch's length: what a padded batch may attend to.

    Args:
        lengths: number of real keys in each batch, [B].
    """

    lengths_: Tensor | None = None
    mask: Tensor | None = None

    def __init__(self, lengths: Sequence[int] | Tensor, *, mask: Tensor | None = None) -> None:
        # The attribute is not "lengths", for every relation has a property of that name.
        object.__setattr__(self, "lengths_", None)
        object.__setattr__(self, "mask", mask)
        if mask is None:
            if isinstance(lengths, int):
                raise TypeError(f"lengths: wanted one per batch, got {lengths!r}")
            object.__setattr__(self, "lengths_", as_lengths("lengths", lengths))
        self.__post_init__()

    @classmethod
    def from_mask(cls, mask: Tensor) -> Padding:
        """From booleans [B, K], True at real keys, which may stand anywhere (left padding too)."""
        mask = mask if isinstance(mask, Tensor) else torch.as_tensor(mask, device="cpu")
        check_dense("mask", mask)
        if mask.dtype != torch.bool or mask.dim() != 2:
            raise ValueError(f"mask: wanted booleans [batch, keys], got {mask.dtype} {list(mask.shape)}")
        return cls((), mask=mask.detach().clone())

    @property
    def batch_size(self) -> int:
        table = self.mask if self.lengths_ is None else self.lengths_
        assert table is not None
        return len(table)

    @property
    def lengths(self) -> tuple[None, int | None]:
        return None, None if self.mask is None else self.mask.shape[1]

    def related(self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        if self.mask is not None:
            return (look_up(self.mask.long(), k, b, 0) > 0) & torch.ones_like(q, dtype=torch.bool)
        assert self.lengths_ is not None
        return k < per_batch(self.lengths_, q, b) + torch.zeros_like(q)

    def _bind(self, at: Place) -> Bound:
        if self.lengths_ is not None:
            return key_ranges(at, self.lengths_)
        assert self.mask is not None
        # Every query sees the same keys: the runs of real keys, once per batch.
        host, group = distinct_rows(self.mask.long())
        found = _runs_of_rows(np.ones((len(host), 1), np.int64), np.where(host > 0, 1, -1))
        if found is None:
            return super()._bind(at)
        one = Intervals(1, at.k_len, group[:, None], *found)
        rows = np.repeat(np.arange(len(host)), at.q_len)
        return Bound(one.take_rows(rows, at.q_len))

    def _values(self) -> list[tuple[str, Any, Any]]:
        if self.mask is not None:
            return [("mask", self.mask, None)]
        return [("lengths", self.lengths_, None)]

    def __repr__(self) -> str:
        return super().__repr__().replace("Padding(mask=", "Padding.from_mask(", 1)
