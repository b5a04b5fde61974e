"""Sequences packed into one row: the documents of a training batch, and the requests of continuous batching.

transformers looks for packed documents only where there is no cache, and the default is to make one. Its
flash-attention path looks in every call; so does this module.
"""

from __future__ import annotations

import operator
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...relations import Causal, Documents, Relation, Window
from ..sequences import in_sequences
from .masks import Mask, move, refuse

# What DataCollatorWithFlattening returns besides ids, labels and positions.
PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")

# What continuous batching passes, and its cache has read.
_PAGED = ("read_index", "write_index", "logits_indices", "logits_processor_args", "block_table")


def read_documents(
    module: Any,
    query: Tensor,
    key: Tensor,
    mask: Mask,
    packing: dict[str, Any],
    options: dict[str, Any],
) -> Mask:
    """Return a mask within the documents that are packed in its rows; they are looked for once per call.

    Args:
        module: the attention layer.
        query: [B, H, Q, D].
        key: [B, Hk, K, D].
        mask: of this call.
        packing: the options of :data:`PACKING`; where documents begin, or the number of each token's.
        options: the others, among which ``position_ids`` restart in each document.
    """
    offsets, numbers = packing["cu_seq_lens_q"], packing["seq_idx"]
    positions = options.get("position_ids")
    B, Q, K = len(query), query.shape[2], key.shape[2]
    if isinstance(mask, Requests) or mask.shards is not None:
        return mask
    if offsets is None and numbers is None:
        causal = options.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        if not causal or Q == 1 or Q != K or not isinstance(positions, Tensor):
            return mask
        if positions.shape not in ((1, K), (B, K)) or not mask.unsearched:
            return mask
    elif Q != K or (offsets is not None and B != 1):
        name, rows = ("seq_idx", "rows") if offsets is None else ("cu_seq_lens_q", "1 row")
        raise refuse(module, f"{name}: wanted {rows} of as many keys as queries, got {B} of {K} and {Q}")
    if "documents" not in mask.kept:
        documents = _find_documents(module, packing, positions)
        found = None if documents is None else Mask(mask.relation & documents, mask.q_start, mask.offset)
        mask.kept["documents"] = found
    return mask.kept["documents"] or mask


def _find_documents(module: Any, packing: dict[str, Any], positions: Any) -> Relation | None:
    from transformers.masking_utils import find_packed_sequence_indices

    offsets, of_keys, numbers = packing["cu_seq_lens_q"], packing["cu_seq_lens_k"], packing["seq_idx"]
    if offsets is not None:
        if of_keys is not None and of_keys is not offsets and not torch.equal(of_keys, offsets):
            raise refuse(module, "cu_seq_lens_k: wanted cu_seq_lens_q, got other offsets")
        return Documents.from_cu_seqlens(offsets)
    if numbers is None:
        numbers = find_packed_sequence_indices(positions)
    return None if numbers is None else Documents(numbers)


# -- continuous batching ----------------------------------------------------------------------------


class Requests(Mask):
    """The mask of a step of continuous batching: each request's last query is at its last key.

    Args:
        window: keys before a query, or None.
        starts: where the queries and the keys of the requests begin, and the ends, [requests + 1] each.
        positions: of the queries in their requests, [1, Q].
    """

    def __init__(self, window: int | None, starts: tuple[Tensor, Tensor], positions: Tensor) -> None:
        super().__init__(in_sequences(Causal() if window is None else Window(before=window), *starts), 0)
        self._starts, self._positions = starts, positions

    def with_relation(self, other: Relation | None) -> Relation:
        """Intersect with a relation in positions of each request; computed once for all layers."""
        if other is None:
            return self.relation
        if id(other) not in self._combined:
            self._combined[id(other)] = other, self.relation & self._in_each(other)
        return self._combined[id(other)][1]

    def row(self, other: Relation | None, query: Tensor, key: Tensor) -> Tensor | None:
        """See :class:`Mask`."""
        return self._row_of(self.with_relation(other), 0, query, key)

    def _in_each(self, relation: Relation) -> Relation:
        """Move a relation to each request: to where its queries are, and the first key that is cached."""
        documents = Documents.from_cu_seqlens(*self._starts)
        of_queries, of_keys = documents.ids, documents.key_ids
        assert of_keys is not None
        queries, keys = (starts.long().cpu() for starts in self._starts)
        first = self._positions[0].cpu()[queries[:-1]]
        first_key = first + queries.diff() - keys.diff()
        moves = torch.stack((first - first_key, first_key * (not relation.stationary)), 1).numpy()
        parts = []
        for ahead, dropped in np.unique(moves, axis=0).tolist():
            here = torch.as_tensor((moves == (ahead, dropped)).all(1))
            ids, key_ids = (torch.where(here[each], each, -1) for each in (of_queries, of_keys))
            moved = move(relation, dropped)
            moved = moved.shift(ahead) if relation.stationary else moved.T.shift(-ahead).T
            parts.append(Documents(ids, key_ids).each(moved))
        return reduce(operator.or_, parts)


def update_cache(
    cache: Any, module: Any, key: Tensor, value: Tensor, mask: Any, options: dict[str, Any]
) -> tuple[Tensor, Tensor, Requests]:
    """Write keys and values to a paged cache; return those of all requests, one after another, and the mask.

    Args:
        cache: transformers' ``PagedAttentionCache``.
        module: the attention layer.
        key: of the new tokens, [1, Hk, Q, D].
        value: [1, Hk, Q, E].
        mask: of this call, which keeps the result for the next layers.
        options: of the call; those of continuous batching are removed.
    """
    if options.get("block_table") is not None:
        raise refuse(module, "block_table: wanted None, attnbias reads caches by index, got a table")
    cached = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=options)
    starts = options.pop("cu_seq_lens_q"), options.pop("cu_seq_lens_k")
    for name in (*_PAGED, *PACKING):
        options.pop(name, None)
    window = options.get("sliding_window")
    kept = mask.kept if isinstance(mask, Mask) else {}
    if window not in kept:
        kept[window] = Requests(None if window is None else window - 1, starts, options["position_ids"])
    return *cached, kept[window]
