"""Score terms for the Triton kernels: as the kernels read them, and what comes back of their gradients.

Tiles read the parts where they lie; edges get a number each, their own or one made by PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import edge_terms
from ..call import name_parts, parts_needed

if TYPE_CHECKING:
    from ...kernels.records import Lists
    from ...kernels.tiles.term_grads import TermGrads
    from ...kernels.tiles.terms import Terms
    from ..call import Call, Needs


def pack(call: Call) -> Terms | None:
    """Return the parts as the kernels over tiles read them; None without any."""
    parts = call.inputs
    relative, key, pair, grid = parts.relative_bias, parts.key_bias, parts.pair_bias, parts.grid_bias
    if relative is None and key is None and pair is None and grid is None:
        return None
    from ...kernels.records import Strided
    from ...kernels.tiles.terms import GridPart, PairPart, Terms

    slopes = call.slopes
    return Terms(
        relative=None if relative is None or slopes is not None else Strided(*_by_head(relative), 1),
        slope=None if slopes is None else Strided(*_by_head(slopes, is_dense=False), 1),
        key=None if key is None else Strided(*_by_head(key), 1),
        pair=None if pair is None else PairPart(*_by_head(pair, is_dense=False), *pair.stride()[2:]),
        grid=None if grid is None else GridPart(*_by_head(grid), *(x.contiguous() for x in call.codes)),
    )


def _by_head(part: Tensor, is_dense: bool = True) -> tuple[Tensor, int, int]:
    """Return a part, made dense along its rows, and its strides of batch and head: 0 for a size of 1."""
    part = part if not is_dense or part.stride(2) == 1 else part.contiguous()
    (batch, heads), (b, h) = part.shape[:2], part.stride()[:2]
    return part, b if batch > 1 else 0, h if heads > 1 else 0


def bias_of_edges(call: Call) -> Tensor | None:
    """Return the numbers that edges add to their scores; None without terms or edges.

    Without other terms, an ``EdgeBias`` is read where it lies, [E, H] or [E]. With them, each edge of the
    layout's list gets the sum, [B, H, edges].
    """
    parts = call.parts
    if not parts or not call.layout.edges:
        return None
    if list(parts) == ["edge"]:
        bias = parts["edge"]
        return bias if bias.shape[1] > 1 else bias[:, 0]
    return edge_terms.add_up(call, edge_terms.find_entries(call))


class Gradients:
    """Gradients of the parts and of a score's weight that are wanted, while the kernels make them."""

    key: Tensor | None = None
    relative: Tensor | None = None
    grid: Tensor | None = None
    pair: Tensor | None = None  # summed over what has size 1
    edges: Tensor | None = None  # of what bias_of_edges gave
    weight: Tensor | None = None  # [H, D]

    def __init__(self, call: Call, needs: Needs) -> None:
        self.call = call
        self.needs_weight = needs.weight
        self.wanted = parts_needed(needs)
        if not self.wanted:
            return
        batch, heads, k_len = *call.query.shape[:2], call.key.shape[2]

        def zeros(*sizes: int) -> Tensor:
            return call.query.new_zeros((batch, heads, *sizes), dtype=torch.float32)

        self.key = zeros(k_len) if "key" in self.wanted else None
        self.relative = zeros(call.parts["relative"].shape[2]) if "relative" in self.wanted else None
        self.grid = zeros(call.parts["grid"].shape[2]) if "grid" in self.wanted else None
        if "pair" in self.wanted:
            self.pair = call.parts["pair"].new_zeros(call.parts["pair"].shape)

    def by_query(self, lists: Lists) -> TermGrads | None:
        """Return those that the kernel by query makes; None without any."""
        if self.relative is None and self.grid is None and self.pair is None:
            return None
        from ...kernels.tiles.term_grads import TermGrads

        call, whole = self.call, None
        batch, heads, q_len, _ = call.query.shape
        if call.places is not None and call.places.queries is not None:
            whole = call.places.q_len, call.places.k_len
        query_code, key_code = call.codes if self.grid is not None else (None, None)
        return TermGrads(
            lists,
            (batch, heads, q_len, call.key.shape[2]),
            call.layout.listed(batch, heads),
            relative=self.relative,
            whole=whole,
            pair=self.pair,
            grid=self.grid,
            codes=None if query_code is None or key_code is None else (query_code, key_code),
        )

    def finish(self) -> dict[str, Tensor | None]:
        """Return the gradients of the score's weight and of the parts, by the names of ``Grads``."""
        weight = self.weight
        if self.needs_weight and weight is None:
            assert self.call.additive is not None
            weight = torch.zeros_like(self.call.additive[0])
        entries = edge_terms.find_entries(self.call) if self.wanted and self.edges is not None else {}
        return {"weight": weight, **name_parts({name: self._of(name, entries) for name in self.wanted})}

    def _of(self, name: str, entries: edge_terms.Entries) -> Tensor:
        part = self.call.parts[name]
        if name != "edge":
            return self._of_entries(name, part, entries)
        if list(self.call.parts) == ["edge"] and self.edges is not None:
            return self.edges.view_as(part)
        return self._of_edges(part, entries)

    def _of_entries(self, name: str, part: Tensor, entries: edge_terms.Entries) -> Tensor:
        """Of a part that tiles read, too: what they gave, then what edges add."""
        grad = {"relative": self.relative, "key": self.key, "pair": self.pair, "grid": self.grid}[name]
        assert grad is not None
        if self.edges is not None:
            *row, last = entries[name]
            flat = row[0] * part.shape[-1] + last if row else last
            added = self.edges
            for i in (0, 1):  # summed over what has size 1, in torch's one order
                added = added.sum(i, keepdim=True) if grad.shape[i] == 1 else added
            grad = _add_at(grad.flatten(2), flat, added).view_as(grad)
        return grad

    def _of_edges(self, part: Tensor, entries: edge_terms.Entries) -> Tensor:
        """Of the part of edges, [E, H or 1]: summed over the batch, then over the lists that have an edge."""
        grad = torch.zeros_like(part)
        if self.edges is not None:
            by_head = self.edges.sum(0).t()  # [edges, H]
            by_head = by_head if part.shape[1] > 1 else by_head.sum(1, keepdim=True)
            grad.index_put_(entries["edge"], by_head, accumulate=True)
        return grad


def _add_at(to: Tensor, index: Tensor, x: Tensor) -> Tensor:
    """Return ``to`` [B, H, n] with x [B, H, m] added at index [m], in one order."""
    lines = to.flatten(0, 1).t().contiguous()  # [n, B * H]
    # Sorted by torch before it adds on a GPU.
    lines.index_put_((index,), x.flatten(0, 1).t(), accumulate=True)
    return lines.t().reshape(to.shape)
