"""Score terms of the pairs that a layout keeps as edges: a number for each, made by PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .call import Call

Entries = dict[str, tuple[Tensor, ...]]


def find_entries(call: Call) -> Entries:
    """Return where each part has the values of the layout's edges: indices of its last dimensions.

    The part of edges has them in its first dimension.
    """
    layout = call.layout
    count = layout.edges
    keys = layout.edge_key[:count].long()
    rows = torch.arange(len(layout.edge_ptr) - 1, device=keys.device) % max(layout.q_len, 1)
    rows = rows.repeat_interleave(layout.edge_ptr.diff().long(), output_size=count)
    entries: Entries = {"key": (keys,), "pair": (rows, keys)}
    if "relative" in call.parts:
        entries["relative"] = (call.relative_entries(rows, keys),)
    if "grid" in call.parts:
        query_code, key_code = call.codes
        entries["grid"] = (query_code.long()[rows] - key_code.long()[keys],)
    entries["edge"] = (layout.edge_id[:count].long(),)
    return {name: entries[name] for name in call.parts}


def add_up(call: Call, entries: Entries) -> Tensor:
    """Return the sum of all parts at each edge, float32 [B, H, edges]."""
    batch, heads = call.query.shape[:2]
    total = call.query.new_zeros((batch, heads, call.layout.edges), dtype=torch.float32)
    for name, part in call.parts.items():
        if name == "edge":
            total += part[entries[name]].T
            continue
        index: tuple[slice | Tensor, ...] = (slice(None), slice(None), *entries[name])
        total += part[index]
    return total


def take_back(d_edges: Tensor, entries: Entries, grads: Mapping[str, Tensor]) -> None:
    """Add the gradients of the edges, [B, H, edges], to those of the parts in ``grads``, in one order.

    Only for a CPU: elsewhere index_add_ has no order.
    """
    batch, heads = d_edges.shape[:2]
    for name, grad in grads.items():
        if name == "edge":
            by_head = d_edges.sum(0).T  # [edges, H]; each edge is in one place of the list
            grad.index_add_(0, entries[name][0], by_head if grad.shape[1] > 1 else by_head.sum(1, True))
            continue
        *row, last = entries[name]
        flat = row[0] * grad.shape[-1] + last if row else last
        for b in range(batch):
            for h in range(heads):
                # One dimension: here index_add_ goes through its numbers one after the other.
                grad[b % grad.shape[0], h % grad.shape[1]].view(-1).index_add_(0, flat, d_edges[b, h])
