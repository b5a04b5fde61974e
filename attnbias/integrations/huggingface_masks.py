"""From transformers' mask functions to relations.

A mask function is a closure that transformers builds of a few known ones. Those are known by their code and
read for what they hold; any other is kept as a function of pairs, ``Where``, which is tested tile by tile.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from ..relations import Causal, Documents, Full, Padding, Relation, Where, Window

MaskFunction = Callable[..., Tensor]


class _Place:
    """Which positions of the sequence the queries and keys at hand have."""

    def __init__(self, q_len: int, k_len: int, q_offset: int, k_offset: int) -> None:
        self.k_len, self.q_offset, self.k_offset = k_len, q_offset, k_offset
        self.end = max(q_offset + q_len, k_offset + k_len)

    def keys(self, table: Tensor, outside: int) -> Tensor:
        """The entries [B, K] of the keys in a table by position [B, L]."""
        return _cut(table, self.k_offset, self.k_offset + self.k_len, outside)

    def queries(self, table: Tensor, outside: int) -> Tensor:
        """The entries of all positions from the first key's on, where queries are looked up."""
        return _cut(table, self.k_offset, self.end, outside)


def to_relation(
    mask_function: MaskFunction | None,
    padding: Tensor | None,
    q_len: int,
    k_len: int,
    q_offset: int,
    k_offset: int,
) -> Relation:
    """The relation, in positions among the keys, of a mask function and a padding mask.

    Args:
        mask_function: of positions in the sequence; None relates all pairs.
        padding: True at real tokens of the sequence, [B, L]; tokens beyond are not real.
        q_len: queries.
        k_len: keys.
        q_offset: position of the first query in the sequence.
        k_offset: position of the first key.
    """
    place = _Place(q_len, k_len, q_offset, k_offset)
    relation = Full() if mask_function is None else _read(mask_function, place)
    if padding is not None:
        real = place.keys(padding.bool(), outside=0)
        if not bool(real.all()):
            relation = relation & Padding.from_mask(real)
    return relation


def one_row(
    batch: int,
    q_len: int,
    k_len: int,
    q_offset: int,
    k_offset: int,
    mask_function: MaskFunction,
    padding: Tensor | None,
    **options: Any,
) -> Tensor | None:
    """The mask of a single query as transformers makes it, [B, 1, 1, K]; None where it hides no key."""
    from transformers.masking_utils import sdpa_mask

    row: Tensor | None = sdpa_mask(
        batch_size=batch,
        q_length=q_len,
        kv_length=k_len,
        q_offset=q_offset,
        kv_offset=k_offset,
        mask_function=mask_function,
        attention_mask=padding,
        **options,
    )
    return row


def _read(function: MaskFunction, place: _Place) -> Relation:
    code = getattr(function, "__code__", None)
    reader = _readers().get(code) if code is not None else None
    if reader is None:
        offset = place.k_offset
        if not offset:
            return Where(function)

        def moved(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return function(b, h, q + offset, k + offset)

        moved.__qualname__ = getattr(function, "__qualname__", "mask_function")
        return Where(moved)
    names = function.__code__.co_freevars
    held = dict(zip(names, (cell.cell_contents for cell in function.__closure__ or ()), strict=True))
    return reader(place, **held)


def _readers() -> dict[CodeType, Callable[..., Relation]]:
    """For the code of each known mask function, what makes a relation of what it holds.

    Not kept: dynamo traces its making, but warns of a cache and cannot guard a dictionary by code.
    """
    from transformers import masking_utils as masks

    one = torch.zeros(1, 1, dtype=torch.int64)
    known: list[tuple[Any, Callable[..., Relation]]] = [
        (masks.causal_mask_function, lambda place: Causal()),
        (masks.bidirectional_mask_function, lambda place: Full()),
        (masks.and_masks(masks.causal_mask_function), _read_all),
        (masks.or_masks(masks.causal_mask_function), _read_any),
        (masks.sliding_window_overlay(1), _read_window),
        (masks.sliding_window_bidirectional_overlay(1), _read_both_sides),
        (masks.chunked_overlay(1, one[0]), _read_chunks),
        (masks.blockwise_overlay(one), _read_blocks),
        (masks.padding_mask_function(one), _read_padding),
        (masks.packed_sequence_mask_function(one), _read_packed),
    ]
    return {function.__code__: reader for function, reader in known}


def _read_all(place: _Place, mask_functions: tuple[MaskFunction, ...]) -> Relation:
    found: Relation = Full()
    for each in mask_functions:
        found = found & _read(each, place)
    return found


def _read_any(place: _Place, mask_functions: tuple[MaskFunction, ...]) -> Relation:
    found, *rest = (_read(each, place) for each in mask_functions)
    for each in rest:
        found = found | each
    return found


def _read_window(place: _Place, sliding_window: int) -> Relation:
    return Window(before=sliding_window - 1, after=None)


def _read_both_sides(place: _Place, sliding_window: int) -> Relation:
    return Window(before=sliding_window, after=sliding_window)


def _read_chunks(place: _Place, chunk_size: int, left_padding: Tensor) -> Relation:
    position = torch.arange(place.end, device=left_padding.device)
    chunk = (position - left_padding[:, None]).div(chunk_size, rounding_mode="floor")  # [B, L]
    return _documents(place, chunk - chunk.min())


def _read_blocks(place: _Place, block_sequence_ids: Tensor) -> Relation:
    return _documents(place, block_sequence_ids.clamp(min=-1))


def _read_padding(place: _Place, padding_mask: Tensor) -> Relation:
    return Padding.from_mask(place.keys(padding_mask.bool(), outside=0))


def _read_packed(place: _Place, packed_sequence_mask: Tensor) -> Relation:
    return _documents(place, packed_sequence_mask - packed_sequence_mask.min())


def _documents(place: _Place, ids: Tensor) -> Relation:
    """The same number among the queries and the keys at hand, from numbers by position [B, L]."""
    if len(ids) > 1 and bool((ids == ids[:1]).all()):
        ids = ids[:1]
    queries, keys = place.queries(ids, -1), place.keys(ids, -1)
    return Documents(queries) if queries.shape == keys.shape else Documents(queries, keys)


def _cut(table: Tensor, start: int, stop: int, outside: int) -> Tensor:
    """Columns from start to stop, those that the table has not filled."""
    part = table[:, start:stop]
    missing = stop - start - part.shape[1]
    return torch.nn.functional.pad(part, (0, missing), value=outside) if missing else part
