"""The levels of a multi-level score at given lengths: how positions are cut into blocks that nest."""

from __future__ import annotations

from typing import NamedTuple


class Levels(NamedTuple):
    """The levels of a score at given lengths, coarsest first.

    Two positions share a level when they lie in the same block of it. Blocks nest, so the levels that a pair
    shares are the first ones; their number is the pair's depth.
    """

    widths: tuple[int, ...]  # positions of a block; 0 = one block for all
    prefixes: tuple[int, ...]  # dimensions that a pair of depth l + 1 reads, the first ones
