"""The record that kernels read: tiles by query and by key, their patterns, and edges."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.serialization import add_safe_globals
from torch.utils import _pytree
from torch.utils.data._utils.collate import default_collate_fn_map

from .intervals import gather_ranges

if TYPE_CHECKING:
    from pathlib import Path

    from ..multilevel import Levels, MultiLevel
    from ..relations.relation import Relation

VERSION = 1
SIZES = (
    "version",
    "q_len",
    "k_len",
    "q_start",
    "batch",
    "heads",
    "groups",
    "tile",
    "classes",
    "tiles",
    "patterns_count",
    "edges",
)
FIELDS = (
    "group",
    "q_ptr",
    "q_tile",
    "q_mark",
    "k_ptr",
    "k_tile",
    "k_mark",
    "patterns",
    "patterns_t",
    "q_order",
    "k_order",
    "edge_ptr",
    "edge_key",
    "edge_id",
    "col_ptr",
    "col_query",
    "col_edge",
)
ALIGNMENT = 4  # int32 entries: every field starts at a multiple of 16 bytes

Form = Literal["auto", "tiles", "edges"]


def field_shapes(sizes: dict[str, int]) -> dict[str, tuple[int, ...]]:
    """The shape of every field, from the host integers alone."""
    tile, groups, n = sizes["tile"], sizes["groups"], sizes["tiles"]
    q_tiles, k_tiles = -(-sizes["q_len"] // tile), -(-sizes["k_len"] // tile)
    edges, bounds = sizes["edges"], sizes["classes"] + 1
    words = (sizes["patterns_count"], tile, tile // 32)
    some = 1 if edges else 0
    return {
        "group": (sizes["batch"], sizes["heads"]),
        "q_ptr": (groups, q_tiles, bounds),
        "q_tile": (n + 1,),
        "q_mark": (n + 1,),
        "k_ptr": (groups, k_tiles, bounds),
        "k_tile": (n + 1,),
        "k_mark": (n + 1,),
        "patterns": words,
        "patterns_t": words,
        "q_order": (groups * q_tiles,),
        "k_order": (groups * k_tiles,),
        "edge_ptr": (some * (groups * sizes["q_len"] + 1),),
        "edge_key": (edges,),
        "edge_id": (edges,),
        "col_ptr": (some * (groups * sizes["k_len"] + 1),),
        "col_query": (edges,),
        "col_edge": (edges,),
    }


def field_offsets(sizes: dict[str, int]) -> tuple[list[int], int]:
    """Where each field starts in the buffer, and the buffer's length."""
    offsets, end = [], 0
    for shape in field_shapes(sizes).values():
        offsets.append(end)
        end += -(-math.prod(shape) // ALIGNMENT) * ALIGNMENT
    return offsets, end


@dataclass(frozen=True)
class Stats:
    """What a layout holds and what it costs; pairs are those of one use of each group."""

    tile: int
    tiles_full: int
    tiles_partial: int
    patterns: int
    edges: int
    pairs: int
    executed: int
    waste: float
    bytes: int
    score_macs: int  # multiply-adds of the executed scores; 0 in a layout for no multi-level score

    def __iter__(self) -> Iterator[str]:
        return iter(self.__dataclass_fields__)

    def __getitem__(self, name: str) -> float:
        value: float = getattr(self, name)
        return value

    def keys(self) -> list[str]:
        """The names, so that ``dict(stats)`` works."""
        return list(self)

    def __str__(self) -> str:
        return (
            f"{self.tiles_full} full and {self.tiles_partial} partial tiles of {self.tile} "
            f"({self.patterns} patterns), {self.edges} edges; {self.pairs} pairs needed, "
            f"{self.executed} executed ({self.waste:.2f}x), {self.bytes} bytes"
            + (f"; {self.score_macs} multiply-adds of scores" if self.score_macs else "")
        )


class Layout:
    """A relation bound to lengths: plain tensors that every kernel, layer and process can share.

    Its whole state is two tensors: ``buffer``, int32 on the layout's device, and ``where``, int64 on the
    host, which holds the sizes below and the offset of each field in the buffer. All fields are views.
    With G groups, C = 2 classes (0 full tiles, 1 partial tiles), ``q_tiles = ceil(q_len / tile)``, and with a
    multi-level score of L levels C = L + 2 (full tiles by their depth, 0 to L, then partial ones):

    ================  ======================  ============================================================
    field             shape                   meaning
    ================  ======================  ============================================================
    ``group``         [batch, heads]          the group that serves a batch and head; batch, heads may be 1
    ``q_ptr``         [G, q_tiles, C + 1]     bounds of each class in ``q_tile`` for a query tile
    ``q_tile``        [tiles + 1]             key tiles by query tile, increasing in a class; one spare entry
    ``q_mark``        [tiles + 1]             pattern of a partial tile, depth of a full one: its class
    ``k_ptr`` ...     as above                the same tiles by key tile: ``k_ptr, k_tile, k_mark``
    ``patterns``      [P, tile, tile / 32]    bit j of word w of row r: query r, key 32 w + j
    ``patterns_t``    [P, tile, tile / 32]    the same with rows = keys
    ``q_order``       [G * q_tiles]           ``g * q_tiles + t``, longest work first; ``k_order`` likewise
    ``edge_ptr``      [G * q_len + 1]         edges of row ``g * q_len + i`` (empty without edges)
    ``edge_key``      [E]                     key of each edge, increasing in a row
    ``edge_id``       [E]                     the caller's number of the edge
    ``col_ptr``       [G * k_len + 1]         the same edges by key
    ``col_query``     [E]                     query of each edge, increasing in a column
    ``col_edge``      [E]                     its place in ``edge_key``
    ================  ======================  ============================================================

    A full tile has no bounds to check along the side that a kernel walks: by query, the key tile at a
    ragged end is partial; by key, the query tile at a ragged end is partial. Bits past the ends are 0.
    With a multi-level score a tile whose pairs differ in depth is partial, too, and ``where`` goes on with
    the widths and prefixes of the levels.
    """

    buffer: Tensor
    where: Tensor

    def __init__(self, buffer: Tensor, where: Tensor) -> None:
        self.buffer = buffer
        self.where = where

    @staticmethod
    def build(
        relation: Relation,
        q_len: int,
        k_len: int,
        *,
        q_start: int | Literal["end"] = 0,
        device: torch.device | str = "cpu",
        form: Form = "auto",
        tile: int | None = None,
        batch: int | None = None,
        heads: int | None = None,
        score: MultiLevel | None = None,
    ) -> Layout:
        """Build anew, past every cache.

        Args:
            relation: what to lay out.
            q_len: number of queries.
            k_len: number of keys.
            q_start: position of the first query among the keys, or "end".
            device: where the tensors go; "cpu" costs are assumed on the CPU, a GPU's elsewhere.
            form: "tiles" or "edges" forces one form, "auto" chooses per query tile by counted work.
            tile: 64 or 128; chosen by counted work when None.
            batch: batch size, for relations that fit any.
            heads: head count, for relations that fit any.
            score: the multi-level score that it is for; its pairs are all in tiles.

        Example:
            >>> import attnbias as ab
            >>> stats = ab.Layout.build(ab.Causal(), 256, 256, tile=64).stats()
            >>> stats.tiles_full, stats.tiles_partial, stats.patterns, stats.pairs, stats.executed
            (6, 4, 1, 32896, 40960)
        """
        from .build import build_layout

        return build_layout(
            relation,
            q_len,
            k_len,
            q_start=q_start,
            device=device,
            form=form,
            tile=tile,
            batch=batch,
            heads=heads,
            score=score,
        )

    @cached_property
    def _numbers(self) -> list[int]:
        numbers: list[int] = self.where.tolist()
        return numbers

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The host integers by name."""
        return dict(zip(SIZES, self._numbers, strict=False))

    @property
    def levels(self) -> Levels | None:
        """The levels of the multi-level score that it is for."""
        if self.sizes["classes"] == 2:
            return None
        from ..multilevel import Levels

        count, tail = self.sizes["classes"] - 2, self._numbers[len(SIZES) + len(FIELDS) :]
        return Levels(tuple(tail[:count]), tuple(tail[count:]))

    def __getattr__(self, name: str) -> Any:
        # Only reached for names that are not ordinary attributes: the sizes and the fields.
        if name in SIZES:
            return self._numbers[SIZES.index(name)]
        if name in FIELDS:
            return self._view(name)
        raise AttributeError(f"Layout has no attribute {name!r}")

    def _view(self, name: str) -> Tensor:
        shape = field_shapes(self.sizes)[name]
        offset = self._numbers[len(SIZES) + FIELDS.index(name)]
        return self.buffer[offset : offset + math.prod(shape)].view(shape)

    @property
    def device(self) -> torch.device:
        """Where the buffer lives."""
        return self.buffer.device

    def to(self, device: torch.device | str) -> Layout:
        """The same layout on another device."""
        moved = Layout(self.buffer.to(device), self.where)
        return moved.trust() if self.is_trusted else moved

    def trust(self) -> Layout:
        """Note that the lists are right as they are now: made by the builder, or validated.

        Noted on the buffer, because the op makes a new Layout around it in every call; a change of it, or
        another ``where``, ends the trust.
        """
        self.buffer._attnbias_trusted = self._state  # type: ignore[attr-defined]
        return self

    @property
    def is_trusted(self) -> bool:
        """Whether the lists were found right and are unchanged, so that kernels may follow them."""
        kept = getattr(self.buffer, "_attnbias_trusted", None)
        return kept is not None and kept[0] is self.where and kept[1:] == self._state[1:]

    @property
    def edge_numbers(self) -> int:
        """One more than the largest number that the caller gave an edge; read once: it waits for a GPU."""
        kept = getattr(self.buffer, "_attnbias_edge_numbers", None)
        if kept is None or kept[0] != self._state[1:] or kept[1] is not self.where:
            count = int(self.edge_id.max()) + 1 if self.sizes["edges"] else 0
            kept = (self._state[1:], self.where, count)
            self.buffer._attnbias_edge_numbers = kept  # type: ignore[attr-defined]
        return int(kept[2])

    @property
    def _state(self) -> tuple[Tensor, int, int]:
        return self.where, _version(self.buffer), _version(self.where)

    def check(self, q_len: int, k_len: int, batch: int, heads: int) -> None:
        """Raise unless the layout fits tensors of these sizes."""
        sizes = self.sizes  # asked in every call, and quicker than the attributes
        if sizes["q_len"] != q_len or sizes["k_len"] != k_len:
            raise ValueError(
                f"relation: this layout is for {self.q_len} queries and {self.k_len} keys, "
                f"query and key have {q_len} and {k_len}"
            )
        for name, theirs in (("batch", batch), ("heads", heads)):
            if sizes[name] not in (1, theirs):
                raise ValueError(f"relation: this layout has {name} {sizes[name]}, query has {theirs}")

    def columns(self, g: int, t: int) -> tuple[Tensor, Tensor]:
        """Decode query tile ``t`` of group ``g``: keys [n], and how often each pair counts [rows, n]."""
        tile, device = self.tile, self.buffer.device
        first, stop = t * tile, min((t + 1) * tile, self.q_len)
        begin, *_, middle, end = self.q_ptr[g, t].tolist()
        inside = torch.arange(tile, device=device)
        keys = (self.q_tile[begin:end].long()[:, None] * tile + inside).reshape(-1)
        counts = torch.ones(stop - first, end - begin, tile, dtype=torch.int64, device=device)
        words = self.patterns[self.q_mark[middle:end].long()][:, : stop - first].long()
        bits = (words[..., None] >> torch.arange(32, device=device)) & 1  # [n, rows, tile/32, 32]
        counts[:, middle - begin :] = bits.flatten(2).transpose(0, 1)
        counts = counts.reshape(stop - first, (end - begin) * tile)
        exists = keys < self.k_len
        keys, counts = keys[exists], counts[:, exists]
        if self.edges:
            ptr = self.edge_ptr[g * self.q_len + first : g * self.q_len + stop + 1].long()
            edge_key = self.edge_key[int(ptr[0]) : int(ptr[-1])].long()
            row = torch.repeat_interleave(torch.arange(stop - first, device=device), ptr[1:] - ptr[:-1])
            extra, place = torch.unique(edge_key, return_inverse=True)
            more = torch.zeros(stop - first, len(extra), dtype=torch.int64, device=device)
            more.index_put_((row, place), torch.ones_like(row), accumulate=True)
            keys, counts = torch.cat((keys, extra)), torch.cat((counts, more), 1)
        return keys, counts

    def rows(self, start: int, stop: int) -> Tensor:
        """How often each pair of query rows ``start:stop`` counts, [batch, heads, stop - start, k_len]."""
        strips = torch.zeros(
            self.groups, stop - start, self.k_len, dtype=torch.int64, device=self.buffer.device
        )
        for g in range(self.groups):
            for t in range(start // self.tile, -(-stop // self.tile)):
                keys, counts = self.columns(g, t)
                low, high = max(start, t * self.tile), min(stop, (t + 1) * self.tile)
                part = counts[low - t * self.tile : high - t * self.tile]
                strips[g, low - start : high - start].index_add_(1, keys, part)
        return strips[self.group.long()]

    def to_dense(self) -> Tensor:
        """The related pairs as booleans, [q_len, k_len], or [batch, heads, q_len, k_len]."""
        dense = self.rows(0, self.q_len) > 0
        return dense[0, 0] if self.batch == self.heads == 1 else dense

    def stats(self) -> Stats:
        """Tiles by kind, pairs needed and executed, edges and bytes, summed over the groups."""
        from .levels import count_macs

        ptr = self.q_ptr.cpu().numpy().astype(np.int64).reshape(-1, self.classes + 1)
        full = ptr[:, -2] - ptr[:, 0]
        # A full tile by query may have fewer rows than its size, never fewer keys.
        height = np.full(-(-self.q_len // self.tile), self.tile)
        height[self.q_len // self.tile :] = self.q_len % self.tile
        area = int((full.reshape(self.groups, -1) * height).sum()) * self.tile
        bits = np.unpackbits(self.patterns.cpu().numpy().view(np.uint8).reshape(-1))
        per_pattern = bits.reshape(self.patterns_count, self.tile**2).sum(1, dtype=np.int64)
        bounds = np.append(ptr[:, -2:].reshape(-1), self.tiles)  # alternating: partial tiles, full tiles
        _, partial = gather_ranges(bounds, np.arange(0, len(bounds) - 1, 2))
        marks = self.q_mark.cpu().numpy()[partial]
        pairs = area + int(per_pattern[marks].sum()) + self.edges
        executed = self.tiles * self.tile**2 + self.edges
        return Stats(
            tile=self.tile,
            tiles_full=int(full.sum()),
            tiles_partial=len(partial),
            patterns=self.patterns_count,
            edges=self.edges,
            pairs=pairs,
            executed=executed,
            waste=executed / pairs if pairs else 1.0,
            bytes=self.buffer.numel() * 4 + self.where.numel() * 8,
            score_macs=count_macs(self, partial),
        )

    def validate(self) -> None:
        """Raise ValueError, saying what is wrong, unless every field is consistent."""
        from .storage import validate

        validate(self)
        self.trust()

    def save(self, path: str | Path) -> None:
        """Write to a safetensors file."""
        from .storage import save

        save(self, path)

    @staticmethod
    def load(path: str | Path, device: torch.device | str = "cpu") -> Layout:
        """Read a file that :meth:`save` wrote; a damaged one raises ValueError."""
        from .storage import load

        return load(path, device)

    def picture(self, path: str | Path | None = None, *, group: int = 0) -> str:
        """Draw the tiles: '#' full, '+' partial, '.' empty, 'e' edges; as a PNG too when a path is given."""
        from .picture import draw

        return draw(self, path, group)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        return torch.equal(self.where, other.where) and torch.equal(
            self.buffer, other.buffer.to(self.buffer.device)
        )

    __hash__ = None  # type: ignore[assignment]  # a record of tensors, compared by content

    def __reduce__(self) -> tuple[type[Layout], tuple[Tensor, Tensor]]:
        return Layout, (self.buffer, self.where)

    def __repr__(self) -> str:
        return (
            f"Layout(q_len={self.q_len}, k_len={self.k_len}, q_start={self.q_start}, "
            f"batch={self.batch}, heads={self.heads}, tile={self.tile}, tiles={self.tiles}, "
            f"edges={self.edges}, device={str(self.device)!r})"
        )


def _version(x: Tensor) -> int:
    """How often a tensor was changed; those made under inference_mode do not count."""
    return 0 if x.is_inference() else x._version


def empty_layout(device: torch.device | str = "cpu", **given: int) -> Layout:
    """A layout of these sizes (all of ``SIZES`` but the version and the classes), to be filled in."""
    given |= {"version": VERSION, "classes": 2}
    sizes = {name: given[name] for name in SIZES}
    offsets, length = field_offsets(sizes)
    if length >= 1 << 31:
        raise ValueError(
            f"relation: a layout of {length} entries at {sizes['q_len']} x {sizes['k_len']}; "
            "fewer than 2^31 are possible"
        )
    where = torch.tensor([*sizes.values(), *offsets], dtype=torch.int64, device="cpu")
    if torch.device(device).type == "cpu":  # NumPy's zeros are not written before they are overwritten
        return Layout(torch.from_numpy(np.zeros(length, np.int32)), where)
    return Layout(torch.zeros(length, dtype=torch.int32, device=device), where)


_pytree.register_pytree_node(
    Layout,
    lambda layout: ([layout.buffer, layout.where], None),
    lambda leaves, _: Layout(*leaves),
    serialized_type_name="attnbias.Layout",
    flatten_with_keys_fn=lambda layout: (
        [(_pytree.GetAttrKey(name), getattr(layout, name)) for name in ("buffer", "where")],
        None,
    ),
)


def _collate(batch: list[Layout], **_: Any) -> Layout:
    """Let samples of a batch share one layout; see :func:`torch.utils.data.default_collate`."""
    if any(layout != batch[0] for layout in batch):
        raise TypeError(
            "layout: samples with different layouts do not make a batch; put relations into the samples, "
            "and call layout() on what they become"
        )
    return batch[0]


default_collate_fn_map[Layout] = _collate
add_safe_globals([Layout])  # torch.load(weights_only=True) may make one: it is validated before use
