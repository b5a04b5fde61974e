"""Terms, sink, dropout and scores other than q.k: packed for the kernels, and the gradients of the terms."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import edge_terms
from ..call import NO_NEEDS, Needs, name_parts, parts_needed
from ..places import NO_PLACES
from .abi import EXTRAS, address, pack_part

if TYPE_CHECKING:
    from ..call import Call

_TILE_PARTS = ("relative", "key", "pair", "grid")  # tiles read these in place


class Extras:
    """The extras of one call.

    Tiles read the parts of the terms in place. Edges read the "edge" part in place if it is the only one;
    otherwise they get one number per edge, whose gradient ``finish`` takes back to the parts.
    """

    __slots__ = ("call", "d_edge_bias", "d_weight", "edge_entries", "grads", "kept", "packed")

    def __init__(self, call: Call, needs: Needs = NO_NEEDS) -> None:
        self.call = call
        self.d_edge_bias: Tensor | None = None  # where it has to go back to the parts
        self.edge_entries: dict[str, tuple[Tensor, ...]] = {}
        parts = call.parts
        # The kernels want dense rows of all parts but pairs and edges.
        dense = {
            name: x if name in ("pair", "edge") or x.stride(2) == 1 else x.contiguous()
            for name, x in parts.items()
        }
        weight, negative_slope = (None, 0.0) if call.additive is None else call.additive
        weight = None if weight is None else weight.contiguous()
        d_weight = torch.zeros_like(weight) if weight is not None and needs.weight else None
        grads = {name: torch.zeros(parts[name].shape, device="cpu") for name in parts_needed(needs)}
        self.d_weight, self.grads = d_weight, grads
        sink = None if call.sink is None else call.sink.float().contiguous()
        codes = [x.contiguous() for x in call.codes]
        query_code, key_code = codes or (None, None)
        edge_bias, edge_fields = self._edge_bias(parts, grads)
        # The struct holds addresses only: this keeps the copies alive.
        self.kept = (dense, edge_bias, sink, codes, weight, d_weight)
        self.packed = EXTRAS.pack(
            **edge_fields,
            **{name: pack_part(dense[name], grads.get(name)) for name in _TILE_PARTS if name in dense},
            query_code=address(query_code),
            key_code=address(key_code),
            grid_size=dense["grid"].shape[2] if "grid" in dense else 0,
            sink=address(sink),
            **_dropout(call),
            q_start=call.layout.q_start,
            **_places(call),
            negative_slope=negative_slope,
            additive=address(weight),
            dadditive=address(d_weight),
            per_pair=call.multilevel is not None and call.multilevel.normalize == "pair",
        )

    def _edge_bias(
        self, parts: dict[str, Tensor], grads: dict[str, Tensor]
    ) -> tuple[Tensor | None, dict[str, Any]]:
        """Return the bias of edges, [E, H or 1] or [B, H, edges], and the fields of it and its gradient."""
        if list(parts) == ["edge"]:
            # The gradient has the strides of its input, because the struct has one pair of strides.
            bias = parts["edge"].contiguous()
            grad = grads.get("edge")
            batch, head, edge = 0, int(bias.shape[1] > 1), bias.stride(0)
        elif parts and self.call.layout.edges:
            self.edge_entries = edge_terms.find_entries(self.call)
            bias = edge_terms.add_up(self.call, self.edge_entries)
            grad = self.d_edge_bias = torch.zeros_like(bias) if grads else None
            batch, head, edge = bias.stride()
        else:
            return None, {}
        return bias, {
            "bias_by_place": bool(self.edge_entries),
            "edge_bias": bias.data_ptr(),
            "dedge_bias": address(grad),
            "bias_edge": edge,
            "bias_head": head,
            "bias_batch": batch,
        }

    def finish(self) -> dict[str, Tensor | None]:
        """Return the gradients of the score's weight and of the parts, by the names of ``Grads``."""
        if self.d_edge_bias is not None:
            edge_terms.take_back(self.d_edge_bias, self.edge_entries, self.grads)
        return {"weight": self.d_weight, **name_parts(self.grads)}


def _places(call: Call) -> dict[str, int]:
    """Return where rows and keys stand, and the numbers of the first batch and head."""
    places = NO_PLACES if call.places is None else call.places
    return {
        "q_position": address(places.queries),
        "k_position": address(places.keys),
        "q_len": call.query.shape[2] if places.queries is None else places.q_len,
        "first_batch": places.first_batch,
        "first_head": places.first_head,
    }


def _dropout(call: Call) -> dict[str, Any]:
    """Return the seed, the number below which bits drop a pair, and the factor of the pairs kept."""
    if call.dropout_p == 0:
        return {}
    assert call.seed is not None
    kept = 1 - call.dropout_p
    return {
        "seed": int(call.seed.item()) % 2**64,
        "drop_below": math.floor(call.dropout_p * 2**32),
        "kept_share": 1 / kept if kept else 1.0,
    }
