"""Score terms for the Triton kernels: as the kernels read them, and what comes back of their gradients.

Tiles read the parts where they lie; edges get a number each, made here by PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..terms import PARTS

if TYPE_CHECKING:
    from ..problem import Call

Places = dict[str, tuple[Tensor, ...]]


def pack(call: Call) -> tuple[Any, ...] | None:
    """The parts as ``kernels.bias`` wants them; None without terms."""
    if not call.spec:
        return None
    parts = call.parts
    packed: list[Any] = []
    for name in PARTS:
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


def find_places(call: Call) -> Places:
    """Where each part has the value of each edge of the layout's list: indices of its last dimensions."""
    layout, q_len = call.layout, call.query.shape[2]
    count = layout.sizes["edges"]
    keys = layout.edge_key[:count].long()
    rows = torch.arange(len(layout.edge_ptr) - 1, device=keys.device) % max(q_len, 1)
    rows = rows.repeat_interleave(layout.edge_ptr.diff().long(), output_size=count)
    places: Places = {"relative": (keys - rows + q_len - 1,), "key": (keys,), "pair": (rows, keys)}
    if "grid" in call.parts:
        query_code, key_code = call.codes
        places["grid"] = (query_code.long()[rows] - key_code.long()[keys],)
    return {name: places[name] for name in call.parts}


def bias_of_edges(call: Call) -> Tensor | None:
    """The sum of all parts at each edge, float32 [B, H, edges]; None without terms or edges."""
    if not call.spec or not call.layout.edges:
        return None
    batch, heads = call.query.shape[:2]
    total = call.query.new_zeros((batch, heads, call.layout.edges), dtype=torch.float32)
    places = find_places(call)
    for name, part in call.parts.items():
        index: tuple[slice | Tensor, ...] = (slice(None), slice(None), *places[name])
        total += part[index]
    return total


class Gradients:
    """Gradients of the parts that are wanted, while the kernels make them."""

    def __init__(self, call: Call, needs: Sequence[bool]) -> None:
        self.call = call
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
        self.edges: Tensor | None = None  # [B, H, edges]

    def finish(self) -> list[Tensor]:
        """Return the gradients of all parts, without elements where not wanted."""
        places = find_places(self.call) if self.wanted and self.edges is not None else {}
        grads = []
        for name, part in self.call.parts.items():
            if name not in self.wanted:
                grads.append(part.new_empty(0))
                continue
            grad = self._of_tiles(name)
            if self.edges is not None:
                *row, last = places[name]
                flat = row[0] * part.shape[-1] + last if row else last
                grad = _add_at(grad.flatten(2), flat, self.edges).view_as(grad)
            if name == "pair":  # summed over what has size 1, in torch's one order
                for i in (0, 1):
                    grad = grad.sum(i, keepdim=True) if part.shape[i] == 1 else grad
            grads.append(grad)
        return grads

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
