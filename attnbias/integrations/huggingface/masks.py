"""Turn transformers' mask functions into relations, and carry them to a model's layers.

A mask function is a closure that transformers composes from a few known ones. Those are recognised by their
code and read for the values they hold. Any other becomes ``Where``, a function of pairs that is tested tile
by tile.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from ...relations import Causal, Documents, Full, Padding, Relation, Where, Window
from ...sharding import Shard

MaskFunction = Callable[..., Tensor]


@dataclass(frozen=True, eq=False)
class Shards:
    """The shards of a call over ranks, by the model's own relation and the one that ``set_relation`` set."""

    of: dict[tuple[Relation, Relation | None], Shard]


class Running:
    """The call over ranks that runs, from which every mask that is made takes its shards."""

    shards: Shards | None = None


running = Running()  # not a context variable, which dynamo cannot trace


class Mask:
    """A relation and the position of the queries, passed through a model in place of a mask tensor.

    A model that computes with its mask, instead of only passing it on, computes with the numbers that
    ``eager`` would give it, [B, 1, Q, K]; from there on it has a tensor.

    Args:
        relation: in positions among the keys of this call; or a function that makes it when needed.
        q_start: position of the first query among those keys.
        offset: position of the first of those keys in the sequence (a sliding cache drops the earlier ones).
        call: the arguments of the call that transformers made.
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
        self.kept: dict[Any, Any] = {}  # what the first of the layers made of it for all
        self.shards: Shards | None = None  # of a call over ranks; then the relation is not that of the whole

    @property
    def unsearched(self) -> bool:
        """Whether transformers did not look for packed sequences, and no padding tells them apart."""
        if self._call is None or self._call["attention_mask"] is not None:
            return False
        return not _is_packed(self._call["mask_function"])

    @property
    def relation(self) -> Relation:
        """The model's own relation."""
        if not isinstance(self._relation, Relation):
            self._relation = self._relation()
        return self._relation

    def __repr__(self) -> str:
        return f"Mask({self.relation!r}, q_start={self.q_start}, offset={self.offset})"

    def with_relation(self, other: Relation | None) -> Relation:
        """Intersect with a relation in positions of the sequence; computed once for all layers."""
        if other is None:
            return self.relation
        if id(other) not in self._combined:
            self._combined[id(other)] = other, self.relation & move(other, self.offset)
        return self._combined[id(other)][1]

    def row(self, other: Relation | None, query: Tensor, key: Tensor) -> Tensor | None:
        """Return which keys a single query attends to, broadcast to [B, H, 1, K]; None = all."""
        at = id(other), query.shape[1], key.shape[2]
        if at not in self._rows:
            if other is not None:
                own, row = self.row(None, query, key), self._row_of(other, self.offset, query, key)
                row = own if row is None else row if own is None else own & row
            elif self._call is not None:
                from transformers.masking_utils import sdpa_mask

                row = sdpa_mask(**self._call)
            else:
                row = self._row_of(self.relation, 0, query, key)
            self._rows[at] = other, row
        return self._rows[at][1]

    def _row_of(self, relation: Relation, offset: int, query: Tensor, key: Tensor) -> Tensor | None:
        B, H = query.shape[:2]
        row = relation.dense(1, offset + key.shape[2], offset + self.q_start, batch=B, heads=H)[..., offset:]
        hides_none = not torch.compiler.is_compiling() and bool(row.all())
        return None if hides_none else row.to(query.device)

    # -- the tensor methods that models call ----------------------------------------------------------

    @property
    def shape(self) -> torch.Size:
        """[B, 1, Q, K]."""
        assert self._call is not None and self.lengths is not None
        return torch.Size((self._call["batch_size"], 1, *self.lengths))

    def to(self, *args: Any, **options: Any) -> Mask | Tensor:
        """Return itself for a device, and the numbers for a dtype."""
        if all(isinstance(each, str | int | torch.device) for each in args) and "dtype" not in options:
            return self
        return self.numbers().to(*args, **options)

    def contiguous(self) -> Mask:
        """Return itself; ``generate`` calls this with a static cache."""
        return self

    def numbers(self) -> Tensor:
        """Return the mask as ``eager`` has it: 0, or the lowest number where a pair is hidden."""
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
    """Make an operator that acts on the numbers; Python looks for operators only in the class."""
    return lambda mask, *others: getattr(mask.numbers(), name)(*others)


_OPERATORS = "getitem add radd sub rsub mul rmul neg and or invert eq ne lt le gt ge"
for _name in _OPERATORS.split():
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
    """Make a mask from a mask function and padding; transformers calls this instead of ``sdpa_mask``."""
    if isinstance(attention_mask, Mask):  # with a static cache ``generate`` has already made it
        return attention_mask
    q_offset = int(q_offset)
    place = _Place(q_length, kv_length, q_offset, kv_offset)
    make = partial(_to_relation, mask_function, attention_mask, place)
    lengths = {"q_length": q_length, "kv_length": kv_length, "q_offset": q_offset, "kv_offset": kv_offset}
    given = {"batch_size": batch_size, "mask_function": mask_function, "attention_mask": attention_mask}
    mask = Mask(make, q_offset - kv_offset, kv_offset, options | lengths | given)
    mask.shards = running.shards
    return mask


# -- mask functions as relations ------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """The positions in the sequence of the queries and keys of a call."""

    q_len: int
    k_len: int
    q_offset: int
    k_offset: int

    def keys(self, table: Tensor, outside: int) -> Tensor:
        """Look up the keys in a table by position [B, L]: [B, K]."""
        return _cut(table, self.k_offset, self.k_offset + self.k_len, outside)

    def queries(self, table: Tensor, outside: int) -> Tensor:
        """Look up all positions from the first key on, among which the queries are."""
        return _cut(table, self.k_offset, self.end, outside)

    @property
    def end(self) -> int:
        """The position after the last query and key."""
        return max(self.q_offset + self.q_len, self.k_offset + self.k_len)


def _to_relation(function: MaskFunction, padding: Tensor | None, place: _Place) -> Relation:
    """Turn a mask function of positions in the sequence into a relation in positions among the keys.

    Padding is [B, L], True at the real tokens of the sequence; tokens beyond L are not real.
    """
    relation = _read(function, place)
    if padding is None:
        return relation
    real = place.keys(padding.bool(), outside=0)
    return relation if bool(real.all()) else relation & Padding.from_mask(real)


def _read(function: MaskFunction, place: _Place) -> Relation:
    reader, held = _open(function)
    return move(Where(function), place.k_offset) if reader is None else reader(place, **held)


def _open(function: MaskFunction) -> tuple[Callable[..., Relation] | None, dict[str, Any]]:
    """Return the reader of a known mask function, and the values that its closure holds."""
    code = getattr(function, "__code__", None)
    reader = _readers().get(code) if code is not None else None
    if reader is None:
        return None, {}
    names = function.__code__.co_freevars
    return reader, dict(zip(names, (cell.cell_contents for cell in function.__closure__ or ()), strict=True))


def _readers() -> dict[CodeType, Callable[..., Relation]]:
    """Map the code of each known mask function to a function that makes a relation from its closure.

    Not cached: dynamo can trace this, but warns about a cache and cannot guard a dictionary keyed by code.
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


# The parameters of these functions have the names of the variables that the closures hold.


def _read_all(place: _Place, mask_functions: tuple[MaskFunction, ...]) -> Relation:
    return reduce(operator.and_, (_read(each, place) for each in mask_functions))


def _read_any(place: _Place, mask_functions: tuple[MaskFunction, ...]) -> Relation:
    return reduce(operator.or_, (_read(each, place) for each in mask_functions))


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


def _is_packed(function: MaskFunction) -> bool:
    """Return whether a mask function, or a part of it, separates packed sequences."""
    reader, held = _open(function)
    return reader is _read_packed or any(_is_packed(part) for part in held.get("mask_functions", ()))


def _documents(place: _Place, ids: Tensor) -> Relation:
    """Make the relation "same number" from numbers by position in the sequence, [B, L]."""
    if len(ids) > 1 and bool((ids == ids[:1]).all()):
        ids = ids[:1]
    queries, keys = place.queries(ids, -1), place.keys(ids, -1)
    return Documents(queries) if queries.shape == keys.shape else Documents(queries, keys)


def refuse(module: Any, what: str) -> NotImplementedError:
    """Make the error for something a layer does not support; it names the way back."""
    return NotImplementedError(
        f'{what} in {type(module).__name__}; model.set_attn_implementation("eager") runs it without attnbias'
    )


def _cut(table: Tensor, start: int, stop: int, outside: int) -> Tensor:
    """Return columns start to stop of a table; fill those beyond it with ``outside``."""
    part = table[:, start:stop]
    missing = stop - start - part.shape[1]
    return torch.nn.functional.pad(part, (0, missing), value=outside) if missing else part


def move(relation: Relation, offset: int) -> Relation:
    """Return a relation in positions of the sequence as one in positions that begin at ``offset``."""
    if not offset or relation.stationary:
        return relation
    return relation.T.shift(-offset).T.shift(-offset)
