"""From transformers' mask functions to relations, and the object that carries them to a model's layers.

A mask function is a closure that transformers builds of a few known ones. Those are known by their code and
read for what they hold; any other is kept as a function of pairs, ``Where``, which is tested tile by tile.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from ..relations import Causal, Documents, Full, Padding, Relation, Where, Window

MaskFunction = Callable[..., Tensor]


class Mask:
    """What a model carries from where masks are made to its layers: a relation and where queries stand.

    A model that computes with its mask, instead of only handing it on, computes with the numbers that
    ``eager`` would give it, [B, 1, Q, K]; from there on it has a tensor.

    Args:
        relation: in positions among the keys at hand; or what makes it, if it comes to that.
        q_start: position of the first query there.
        offset: position in the sequence of the first of these keys (a sliding cache drops the earlier ones).
        call: the arguments with which transformers asked for it.
    """

    ndim = 4

    def __init__(
        self,
        relation: Relation | Callable[[], Relation],
        q_start: int,
        offset: int = 0,
        call: dict[str, Any] | None = None,
    ) -> None:
        self._relation, self.q_start, self.offset, self._call = relation, q_start, offset, call
        self.lengths = None if call is None else (call["q_length"], call["kv_length"])
        self._combined: dict[int, tuple[Relation, Relation]] = {}
        self._rows: dict[tuple[int, int, int], tuple[Relation | None, Tensor | None]] = {}
        self._numbers: Tensor | None = None

    @property
    def relation(self) -> Relation:
        """What the model itself relates."""
        if not isinstance(self._relation, Relation):
            self._relation = self._relation()
        return self._relation

    def __repr__(self) -> str:
        return f"Mask({self.relation!r}, q_start={self.q_start}, offset={self.offset})"

    def with_relation(self, other: Relation | None) -> Relation:
        """The relation and another one, in positions of the sequence; made once for all layers."""
        if other is None:
            return self.relation
        if id(other) not in self._combined:
            moved = other
            if self.offset and not other.stationary:
                moved = other.T.shift(-self.offset).T.shift(-self.offset)
            self._combined[id(other)] = other, self.relation & moved
        return self._combined[id(other)][1]

    def row(self, other: Relation | None, query: Tensor, key: Tensor) -> Tensor | None:
        """The keys of a single query, the other relation's too: booleans for [B, H, 1, K]; None = all."""
        at = id(other), query.shape[1], key.shape[2]
        if at not in self._rows:
            if other is None:
                row = self._row_of(self.relation, 0, query, key) if self._call is None else self._own_row()
            else:
                own, row = self.row(None, query, key), self._row_of(other, self.offset, query, key)
                row = own if row is None else row if own is None else own & row
            self._rows[at] = other, row
        return self._rows[at][1]

    def _own_row(self) -> Tensor | None:
        """The row of the mask as transformers makes it; None where it hides no key."""
        from transformers.masking_utils import sdpa_mask

        assert self._call is not None
        row: Tensor | None = sdpa_mask(**self._call)
        return row

    def _row_of(self, relation: Relation, offset: int, query: Tensor, key: Tensor) -> Tensor | None:
        B, H = query.shape[:2]
        row = relation.dense(1, offset + key.shape[2], offset + self.q_start, batch=B, heads=H)[..., offset:]
        hides_none = not torch.compiler.is_compiling() and bool(row.all())
        return None if hides_none else row.to(query.device)

    # -- what models ask of a tensor ------------------------------------------------------------------

    @property
    def shape(self) -> torch.Size:
        """[B, 1, Q, K]."""
        assert self._call is not None and self.lengths is not None
        return torch.Size((self._call["batch_size"], 1, *self.lengths))

    def to(self, *args: Any, **options: Any) -> Mask | Tensor:
        """Itself on any device; numbers of another dtype."""
        if all(isinstance(each, str | int | torch.device) for each in args) and "dtype" not in options:
            return self
        return self.numbers().to(*args, **options)

    def contiguous(self) -> Mask:
        """Itself: ``generate`` asks for it with a static cache."""
        return self

    def numbers(self) -> Tensor:
        """The mask as ``eager`` has it: 0, or the least of numbers where a pair is hidden."""
        from transformers.masking_utils import eager_mask

        assert self._call is not None
        if self._numbers is None:
            self._numbers = eager_mask(**(self._call | {"allow_is_bidirectional_skip": False}))
        return self._numbers

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = torch.utils._pytree.tree_map_only(Mask, Mask.numbers, (args, kwargs or {}))
        return function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.numbers(), name)


def _of_numbers(name: str) -> Callable[..., Any]:
    """An operator of the numbers; Python looks for operators in the class only."""
    return lambda mask, *others: getattr(mask.numbers(), name)(*others)


for _name in ("getitem", "add", "radd", "sub", "rsub", "mul", "rmul", "neg", "and", "or", "invert"):
    setattr(Mask, f"__{_name}__", _of_numbers(f"__{_name}__"))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Mask, f"__{_name}__", _of_numbers(f"__{_name}__"))


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    *,
    mask_function: MaskFunction,
    attention_mask: Tensor | Mask | None = None,
    **options: Any,
) -> Mask:
    """What transformers calls in place of ``sdpa_mask``: makes a relation of a mask function and padding."""
    if isinstance(attention_mask, Mask):  # ``generate`` makes masks for a static cache before the model does
        return attention_mask
    q_offset = int(q_offset)
    lengths = {"q_length": q_length, "kv_length": kv_length, "q_offset": q_offset, "kv_offset": kv_offset}
    make = partial(to_relation, mask_function, attention_mask, *lengths.values())
    given = {"batch_size": batch_size, "mask_function": mask_function, "attention_mask": attention_mask}
    return Mask(make, q_offset - kv_offset, kv_offset, options | lengths | given)


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
    mask_function: MaskFunction,
    padding: Tensor | None,
    q_len: int,
    k_len: int,
    q_offset: int,
    k_offset: int,
) -> Relation:
    """The relation, in positions among the keys, of a mask function and a padding mask.

    Args:
        mask_function: of positions in the sequence.
        padding: True at real tokens of the sequence, [B, L]; tokens beyond are not real.
        q_len: queries.
        k_len: keys.
        q_offset: position of the first query in the sequence.
        k_offset: position of the first key.
    """
    place = _Place(q_len, k_len, q_offset, k_offset)
    relation = _read(mask_function, place)
    if padding is not None:
        real = place.keys(padding.bool(), outside=0)
        if not bool(real.all()):
            relation = relation & Padding.from_mask(real)
    return relation


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
