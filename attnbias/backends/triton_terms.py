"""Score terms for the Triton kernels: as the kernels read them, and what comes back of their gradients.

Tiles read the parts where they lie; edges get a number each, their own or one made by PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import edge_terms

if TYPE_CHECKING:
    from ..problem import Call

TILE_PARTS = ("relative", "key", "pair", "grid")  # in the order of kernels.bias


def pack(call: Call) -> tuple[Any, ...] | None:
    """The parts as ``kernels.bias`` wants them; None without any."""
    parts = call.parts
    if not parts.keys() & set(TILE_PARTS):
        return None
    packed: list[Any] = []
    for name in TILE_PARTS:
        part = parts.get(name)
        if part is None:
            packed.append(None)
            continue
        # A size of 1 serves all; the kernels read dense rows of all parts but pairs.
        part = part if name == "pair" or part.stride(2) == 1 else part.contiguous()
        strides = [0 if part.shape[i] == 1 else part.stride(i) for i in (0, 1)]
        rest = part.stride()[2:] if name == "pair" else ()
        codes = [x.contiguous() for x in call.codes] if name == "grid" else []
        packed.append((part, (*strides, *rest), *codes))
    return tuple(packed)


def bias_of_edges(call: Call) -> Tensor | None:
    """What edges add to their scores; None without terms or edges.

    Numbers for edges alone are read where they lie, [E, H] or [E]; with other terms each edge of the
    layout's list gets the sum, [B, H, edges].
    """
    parts = call.parts
    if not parts or not call.layout.edges:
        return None
    if list(parts) == ["edge"]:
        bias = parts["edge"]
        return bias if bias.shape[1] > 1 else bias[:, 0]
    return edge_terms.add_up(call, edge_terms.find_places(call))


class Gradients:
    """Gradients of the parts and of a score's weight that are wanted, while the kernels make them."""

    def __init__(self, call: Call, needs: Sequence[bool]) -> None:
        self.call = call
        self.needs_weight = False
        self.weight: Tensor | None = None  # [H, D]
        if call.additive is not None:
            self.needs_weight, *needs = needs
        self.wanted = [name for name, need in zip(call.parts, needs, strict=False) if need]
        batch, heads, q_len, _ = call.query.shape
        k_len = call.key.shape[2]

        def zeros(*sizes: int) -> Tensor:
            return call.query.new_zeros((batch, heads, *sizes), dtype=torch.float32)

        # A number for each pair: as large as a bias of pairs is itself, for each batch and head.
        is_by_pair = "pair" in self.wanted or "grid" in self.wanted
        self.by_pair = zeros(q_len, k_len) if is_by_pair else None
        self.key = zeros(k_len) if "key" in self.wanted else None
        self.relative = zeros(max(q_len + k_len - 1, 0)) if "relative" in self.wanted else None
        self.edges: Tensor | None = None  # of what bias_of_edges gave

    def finish(self) -> list[Tensor]:
        """Return the gradients of all tensors, without elements where not wanted."""
        grads = []
        if self.call.additive is not None:
            weight = self.call.additive[0]
            none = torch.zeros_like(weight) if self.needs_weight else weight.new_empty(0)
            grads.append(none if self.weight is None else self.weight)
        if list(self.call.parts) == ["edge"] and self.edges is not None:
            return [*grads, self.edges.view_as(self.call.parts["edge"])]
        places = edge_terms.find_places(self.call) if self.wanted and self.edges is not None else {}
        for name, part in self.call.parts.items():
            if name not in self.wanted:
                grads.append(part.new_empty(0))
            elif name == "edge":
                grads.append(self._of_edges(part, places))
            else:
                grads.append(self._of_places(name, part, places))
        return grads

    def _of_places(self, name: str, part: Tensor, places: edge_terms.Places) -> Tensor:
        """Of a part that tiles read, too: what they gave, then what edges add."""
        grad = self._of_tiles(name)
        if self.edges is not None:
            *row, last = places[name]
            flat = row[0] * part.shape[-1] + last if row else last
            grad = _add_at(grad.flatten(2), flat, self.edges).view_as(grad)
        if name == "pair":  # summed over what has size 1, in torch's one order
            for i in (0, 1):
                grad = grad.sum(i, keepdim=True) if part.shape[i] == 1 else grad
        return grad

    def _of_edges(self, part: Tensor, places: edge_terms.Places) -> Tensor:
        """Of the part of edges, [E, H or 1]: summed over the batch, then over the lists that have an edge."""
        grad = torch.zeros_like(part)
        if self.edges is not None:
            by_head = self.edges.sum(0).t()  # [edges, H]
            by_head = by_head if part.shape[1] > 1 else by_head.sum(1, keepdim=True)
            grad.index_put_(places["edge"], by_head, accumulate=True)
        return grad

    def _of_tiles(self, name: str) -> Tensor:
        if name == "grid":
            assert self.by_pair is not None
            query_code, key_code = (x.long() for x in self.call.codes)
            index = (query_code[:, None] - key_code).flatten()
            empty = self.by_pair.new_zeros(self.call.parts["grid"].shape)
            return _add_at(empty, index, self.by_pair.flatten(2))
        found = {"relative": self.relative, "key": self.key, "pair": self.by_pair}[name]
        assert found is not None
        # The numbers of pairs serve a grid, too, and are added to.
        return found.clone() if name == "pair" and "grid" in self.wanted else found


def _add_at(to: Tensor, index: Tensor, x: Tensor) -> Tensor:
    """Return ``to`` [B, H, n] with x [B, H, m] added at index [m], in one order."""
    lines = to.flatten(0, 1).t().contiguous()  # [n, B * H]
    # Sorted by torch before it adds on a GPU.
    lines.index_put_((index,), x.flatten(0, 1).t(), accumulate=True)
    return lines.t().reshape(to.shape)
