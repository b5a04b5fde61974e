"""Counts of what a layout holds and what it costs to run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..sets.intervals import gather_ranges
from .header import tile_lengths
from .levels import count_macs
from .record import Record


@dataclass(frozen=True, repr=False)
class Stats:
    """Tiles, edges, pairs and bytes of a layout; each group counts once, however many heads use it.

    ``executed`` counts the edges, and the pairs of the listed tiles that are inside the lengths.
    """

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
        """Return the names, so that ``dict(stats)`` works."""
        return list(self)

    def __str__(self) -> str:
        return (
            f"{self.tiles_full} full and {self.tiles_partial} partial tiles of {self.tile} "
            f"({self.patterns} patterns), {self.edges} edges; {self.pairs} pairs needed, "
            f"{self.executed} executed ({self.waste:.2f}x), {self.bytes} bytes"
            + (f"; {self.score_macs} multiply-adds of scores" if self.score_macs else "")
        )

    __repr__ = __str__  # what a notebook shows


def count_work(layout: Record) -> Stats:
    """Count tiles by kind, pairs needed and executed, edges and bytes, summed over the groups."""
    header, fields = layout.header, layout.fields
    tile = header.tile
    ptr = fields.q_ptr.cpu().numpy().astype(np.int64).reshape(-1, header.classes + 1)
    full = ptr[:, -2] - ptr[:, 0]
    # A full tile by query may have fewer rows than its size, never fewer keys.
    height = tile_lengths(header.q_len, tile)
    area = int((full.reshape(header.groups, -1) * height).sum()) * tile
    bits = np.unpackbits(fields.patterns.cpu().numpy().view(np.uint8).reshape(-1))
    per_pattern = bits.reshape(header.patterns_count, tile**2).sum(1, dtype=np.int64)
    listed = int(ptr[-1, -1]) if len(ptr) else 0  # a layout with a capacity has room for more
    bounds = np.append(ptr[:, -2:].reshape(-1), listed)  # alternating: partial tiles, full tiles
    _, partial = gather_ranges(bounds, np.arange(0, len(bounds) - 1, 2))
    marks = fields.q_mark.cpu().numpy()[partial]
    pairs = area + int(per_pattern[marks].sum()) + header.edges
    width = tile_lengths(header.k_len, tile)[fields.q_tile[:listed].cpu().numpy()]
    executed = int((np.repeat(np.tile(height, header.groups), ptr[:, -1] - ptr[:, 0]) * width).sum())
    executed += header.edges
    return Stats(
        tile=tile,
        tiles_full=int(full.sum()),
        tiles_partial=len(partial),
        patterns=header.patterns_count,
        edges=header.edges,
        pairs=pairs,
        executed=executed,
        waste=executed / pairs if pairs else 1.0,
        bytes=layout.buffer.numel() * 4 + layout.where.numel() * 8,
        score_macs=count_macs(layout, partial),
    )
