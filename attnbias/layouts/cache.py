"""Layouts built once: kept with a relation that holds much data, in one bounded cache for all others."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

import torch

from .fill import Form
from .layout import Layout
from .streams import note_making, take, with_index

if TYPE_CHECKING:
    from ..relations.relation import Relation
    from ..scores.multilevel import MultiLevel

Key = tuple[object, ...]


class LayoutCache:
    """Layouts of small relations; drops the least recently used first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit  # bytes
        self._layouts: OrderedDict[Key, Layout] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, key: Key) -> Layout | None:
        """The layout stored under the key."""
        with self._lock:
            layout = self._layouts.get(key)
            if layout is not None:
                self._layouts.move_to_end(key)
            return layout

    def put(self, key: Key, layout: Layout) -> Layout:
        """Store a layout, unless another thread was first; the stored one."""
        size = _bytes(layout)
        with self._lock:
            if key in self._layouts:
                return self._layouts[key]
            if size <= self.limit:
                self._layouts[key] = layout
                self._bytes += size
            while self._bytes > self.limit:
                self._bytes -= _bytes(self._layouts.popitem(last=False)[1])
        return layout

    def clear(self) -> None:
        """Forget every layout."""
        with self._lock:
            self._layouts.clear()
            self._bytes = 0

    def __len__(self) -> int:
        return len(self._layouts)

    @property
    def bytes(self) -> int:
        """Memory held."""
        return self._bytes


def _bytes(layout: Layout) -> int:
    return layout.buffer.numel() * 4


layout_cache = LayoutCache(limit=1 << 30)
LAYOUTS_KEPT = 32  # with a relation that holds data, the latest


def cached_layout(
    relation: Relation,
    q_len: int,
    k_len: int,
    *,
    q_start: int,
    device: torch.device,
    form: Form,
    batch: int | None,
    heads: int | None,
    score: MultiLevel | None = None,
    capacity: int | tuple[int, int] | None = None,
) -> Layout:
    """See :meth:`Relation.layout`."""
    device = with_index(device)

    def build() -> Layout:
        return Layout.build(
            relation,
            q_len,
            k_len,
            q_start=q_start,
            device=device,
            form=form,
            batch=batch,
            heads=heads,
            score=score,
            capacity=capacity,
        )

    if capacity is not None:  # whether it fits is known later
        return build()
    key: Key = (q_len, k_len, q_start, device, form, batch, heads, score)
    own: dict[Key, Layout] | None = None
    if relation.is_small:
        key = (relation, *key)
        found = layout_cache.get(key)
    else:
        # On the instance, so that they die with it.
        own = relation.__dict__.setdefault("_layouts_", {})
        found = own.get(key)
    if found is None:
        found = build()
        found.kept.made = note_making(device)
        if own is None:
            found = layout_cache.put(key, found)
        else:
            while len(own) >= LAYOUTS_KEPT:  # decoding makes one for every step
                own.pop(next(iter(own)), None)
            found = own.setdefault(key, found)
    take(found.buffer, found.kept.made)
    return found
