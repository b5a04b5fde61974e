"""Biases of edges in the reference: several edges of a pair count as one with all their weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...relations.listing import Listing, list_edges
from ...scores.terms import EdgeBias

if TYPE_CHECKING:
    from ...layouts.layout import Layout
    from ...op.problem import Problem


def add_up_edges(problem: Problem, start: int, stop: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the largest bias of each pair's edges and the sum of exp(bias - largest), for some rows.

    Two results, because next to a large bias the logarithm of the sum would be lost.

    Returns:
        [B or 1, H, rows, K] each; -inf and 0 for pairs without an edge.
    """
    (B, H, _, _), K = problem.query.shape, problem.key.shape[2]
    if problem.layout is not None:
        edges = _list_layout(problem.layout)
    else:
        assert problem.relation is not None
        edges = list_edges(problem.relation, "terms: EdgeBias")
    device = problem.query.device
    inside = (edges.q >= start + problem.q_start) & (edges.q < stop + problem.q_start) & (edges.k < K)
    number, b, h, q, k = edges.keep(inside, device)
    row = q - problem.q_start - start
    bias = torch.stack(
        [
            term.make_part(problem.sizes).to(dtype).expand(-1, H)
            for term in problem.terms
            if isinstance(term, EdgeBias)
        ]
    ).sum(0)
    heads = torch.arange(H, device=device) if h is None else h[:, None]  # [n, heads of an edge]
    values = bias[number[:, None], heads]
    first = heads if b is None else b[:, None] * H + heads
    place = ((first * (stop - start) + row[:, None]) * K + k[:, None]).reshape(-1)
    shape = (1 if b is None else B, H, stop - start, K)
    # Less the largest, as in any softmax; finite where all are -inf, so that no gradient is NaN.
    top = values.new_full(shape, -torch.inf).view(-1)
    top = top.scatter_reduce(0, place, values.detach().reshape(-1), "amax")
    base = top.masked_fill(top == -torch.inf, 0)
    total = torch.zeros_like(top).index_add(0, place, torch.exp(values.reshape(-1) - base[place]))
    return top.view(shape), total.view(shape)


def _list_layout(layout: Layout) -> Listing:
    """List the edges of a layout, for each batch and head of its map of groups."""
    batch, heads = layout.group.shape
    listed = []
    for b in range(batch):
        for h in range(heads):
            first = int(layout.group[b, h]) * layout.q_len
            ptr = layout.edge_ptr[first : first + layout.q_len + 1].long()
            slots = slice(int(ptr[0]), int(ptr[-1])) if len(ptr) else slice(0, 0)
            row = torch.arange(max(len(ptr) - 1, 0), device=ptr.device).repeat_interleave(ptr.diff())
            number, key = layout.edge_id[slots].long(), layout.edge_key[slots].long()
            listed.append((number, torch.full_like(number, b), torch.full_like(number, h), row, key))
    number, b_of, h_of, row, key = (torch.cat(parts) for parts in zip(*listed, strict=True))
    own_b, own_h = (b_of if batch > 1 else None), (h_of if heads > 1 else None)
    return Listing(number, own_b, own_h, row + layout.q_start, key)
