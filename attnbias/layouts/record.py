"""The plain record of a layout: two tensors, their sizes and fields, and facts kept about them.

The modules that build, check, draw and count layouts work on :class:`Record`; ``layout.Layout`` adds methods.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.serialization import add_safe_globals
from typing_extensions import Self

from .header import Fields, Header
from .streams import Made

if TYPE_CHECKING:
    from ..sets.levels import Levels


class Kept:
    """Facts about the two tensors of a layout, found once; valid while neither tensor changes.

    It is kept on the buffer, because a traced program carries the tensors and makes a new Layout in every
    call. It holds no reference to the buffer, only to its memory: a cycle through a tensor is never freed.
    """

    is_trusted = False  # the lists were made by the builder, or validated: kernels may follow them
    fields: Fields[Tensor] | None = None
    edge_numbers: int | None = None
    used_tiles: int | None = None
    longest: tuple[int, int] | None = None
    lengths: tuple[list[int], list[int]] | None = None
    made: Made | None = None  # of a layout in a cache

    def __init__(self, buffer: Tensor, where: Tensor) -> None:
        self.where = where
        self.address = buffer.data_ptr()
        # How often each tensor was changed; those of inference_mode do not count.
        self.buffer_version = None if buffer.is_inference() else buffer._version
        self.where_version = None if where.is_inference() else where._version
        self.prepared: dict[str, Any] = {}  # made of the layout by backends, by a name of their own

    @cached_property
    def header(self) -> Header:
        """The sizes."""
        return Header.read(self.where)

    def is_of(self, buffer: Tensor, where: Tensor) -> bool:
        """Return whether these are facts about these tensors as they are now."""
        return (
            self.where is where
            and self.address == buffer.data_ptr()
            and (self.buffer_version is None or self.buffer_version == buffer._version)
            and (self.where_version is None or self.where_version == where._version)
        )

    def __reduce__(self) -> tuple[type[_Nothing], tuple[()]]:
        return _Nothing, ()  # a copy of the buffer is another buffer


class _Nothing:
    """Stands for the facts in a copy of a buffer."""

    def is_of(self, buffer: Tensor, where: Tensor) -> bool:
        return False


add_safe_globals([_Nothing])


class _Size:
    """A size, read from the header."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, record: Record, owner: type | None = None) -> int:
        number: int = getattr(record.kept.header, self.name)
        return number


class _Field:
    """A field, a view of the buffer."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, record: Record, owner: type | None = None) -> Tensor:
        view: Tensor = getattr(record.fields, self.name)
        return view


class Record:
    """Two tensors: ``buffer`` with the fields and ``where`` with the header; see :class:`attnbias.Layout`."""

    q_len = _Size()
    k_len = _Size()
    q_start = _Size()
    batch = _Size()
    heads = _Size()
    groups = _Size()
    tile = _Size()
    classes = _Size()
    tiles = _Size()
    patterns_count = _Size()
    edges = _Size()

    group = _Field()
    q_ptr = _Field()
    q_tile = _Field()
    q_mark = _Field()
    k_ptr = _Field()
    k_tile = _Field()
    k_mark = _Field()
    patterns = _Field()
    patterns_t = _Field()
    q_order = _Field()
    k_order = _Field()
    edge_ptr = _Field()
    edge_key = _Field()
    edge_id = _Field()
    col_ptr = _Field()
    col_query = _Field()
    col_edge = _Field()

    def __init__(self, buffer: Tensor, where: Tensor) -> None:
        self.buffer = buffer
        self.where = where

    @classmethod
    def empty(cls, header: Header, device: torch.device | str = "cpu") -> Self:
        """Return a record with this header, its fields all 0."""
        if torch.device(device).type == "cpu":  # NumPy's zeros are not written before they are overwritten
            buffer = torch.from_numpy(np.zeros(header.length, np.int32))
        else:
            buffer = torch.zeros(header.length, dtype=torch.int32, device=device)
        record = cls(buffer, header.write())
        record.kept.header = header
        return record

    @property
    def kept(self) -> Kept:
        """Facts about the tensors as they are now."""
        buffer, where = self.buffer, self.where
        kept: Kept | None = getattr(buffer, "_attnbias_kept", None)
        if kept is None or not kept.is_of(buffer, where):
            kept = Kept(buffer, where)
            buffer._attnbias_kept = kept  # type: ignore[attr-defined]
        return kept

    @property
    def header(self) -> Header:
        """The sizes as one record."""
        return self.kept.header

    @property
    def fields(self) -> Fields[Tensor]:
        """The fields as one record, made once."""
        kept = self.kept
        if kept.fields is None:
            kept.fields = kept.header.view(self.buffer.detach())
        return kept.fields

    @property
    def levels(self) -> Levels | None:
        """The levels of the multi-level score that it is for."""
        return self.header.levels

    @property
    def device(self) -> torch.device:
        """The device of the buffer."""
        return self.buffer.device

    def trust(self) -> Self:
        """Note that the lists are right as they are now: made by the builder, or validated."""
        self.kept.is_trusted = True
        return self

    @property
    def is_trusted(self) -> bool:
        """Whether the lists were found right and are unchanged, so that kernels may follow them."""
        return self.kept.is_trusted

    @property
    def edge_numbers(self) -> int:
        """One more than the largest number that the caller gave an edge; read once: it waits for a GPU."""
        kept = self.kept
        if kept.edge_numbers is None:
            kept.edge_numbers = int(self.fields.edge_id.max()) + 1 if kept.header.edges else 0
        return kept.edge_numbers

    def listed(self, batch: int, heads: int) -> int:
        """Return the tiles of all lists of a call, those of a group as often as it is used.

        Counted on the host before a layout is moved. One that was made on a GPU has a group for each batch
        and head, and counts all its room; else the groups are counted once, which waits.
        """
        header, kept = self.header, self.kept
        cells = header.batch * header.heads
        if header.groups == 1:
            return batch * heads * header.tiles
        if kept.used_tiles is None and (header.groups != cells or self.device.type == "cpu"):
            ptr = self.fields.q_ptr.reshape(header.groups, -1)
            counts = ptr[:, -1] - ptr[:, 0] if ptr.shape[1] else torch.zeros(header.groups)
            kept.used_tiles = int(counts[self.fields.group.long()].sum())
        used = header.tiles if kept.used_tiles is None else kept.used_tiles
        return used * (batch * heads // max(cells, 1))

    @property
    def longest(self) -> tuple[int, int]:
        """The most edges of a row and of a column; counted once: that waits for a GPU."""
        kept = self.kept
        if kept.longest is None:
            ptrs = (self.fields.edge_ptr, self.fields.col_ptr) if kept.header.edges else ()
            row, column = torch.stack([x.diff().max() for x in ptrs]).tolist() if ptrs else (0, 0)
            kept.longest = row, column
        return kept.longest

    @property
    def lengths(self) -> tuple[list[int], list[int]] | None:
        """How many tiles each list holds, by query and by key; None if only a GPU knows: nothing waits."""
        kept = self.kept
        if kept.lengths is None and self.buffer.device.type == "cpu":
            pointers = (self.fields.q_ptr.numpy(), self.fields.k_ptr.numpy())
            by_query, by_key = ((ptr[..., -1] - ptr[..., 0]).reshape(-1).tolist() for ptr in pointers)
            kept.lengths = by_query, by_key
        return kept.lengths

    def to(self, device: torch.device | str) -> Self:
        """Return the same layout on another device."""
        moved = type(self)(self.buffer.to(device), self.where)
        if not self.is_trusted:
            return moved
        # Counted where nothing waits, while it is on the host.
        self.listed(self.batch, self.heads)
        moved.kept.used_tiles = self.kept.used_tiles
        moved.kept.longest = self.longest
        if self.header.tiles:
            moved.kept.lengths = self.lengths
        return moved.trust()
