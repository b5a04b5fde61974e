"""How many programs take the list of one tile: decided by counts that the host has, so that nothing waits.

A program walks the list of its own tile alone. One query of a few heads over many keys is then a few
programs, and the row of a global token keeps one program busy long after all others. So long lists are cut
into parts, each for a program of its own, and their results are joined in the order of the list
(``tiles/pieces.py``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

FEWEST = 128  # multiprocessors that are reckoned with, where a device has fewer or cannot be asked
TOGETHER = 2  # programs that a multiprocessor should have
LEAST = 256  # keys of a part (queries, by key): fewer cost less than to write and read the result
SHORTEST = 2048  # keys of the longest list: a program is done with fewer before another kernel is launched
STEP = 32  # keys (queries, by key) that most kernels take at once, or fewer
UNCUT = 8  # lists that are this many times shorter than the longest are not cut


class Lengths(NamedTuple):
    """How many tiles the lists of one side hold."""

    sorted: tuple[int, ...]  # shortest first, one for each tile of a group
    total: int

    @classmethod
    def of(cls, lengths: Iterable[int]) -> Lengths:
        """Count the lists of a layout with one group, which kernels take longest first."""
        found = tuple(sorted(lengths))
        return cls(found, sum(found))

    @classmethod
    def even(cls, total: int, lists: int) -> Lengths:
        """Assume equal lists, where only their sum is known or kernels do not take them by length."""
        return cls((-(-total // max(lists, 1)),) * lists, total)


class Work(NamedTuple):
    """How long the lists of both sides are."""

    by_query: Lengths
    by_key: Lengths


class Split(NamedTuple):
    """The tiles of each head whose lists are cut, and into how many parts."""

    tiles: int  # of a kernel, the first ones in the order
    parts: int

    @property
    def more(self) -> int:
        """Programs of a head that are there besides one for each tile."""
        return self.tiles * (self.parts - 1)


def choose_split(
    lengths: Lengths, *, lines: int, size: int, own: int, length: int, processors: int = 0, turns: int = 1
) -> Split | None:
    """Cut the lists that would keep one program busy for twice as long as the device needs for all; or None.

    Args:
        lengths: of the lists.
        lines: batches times heads.
        size: of the lists' tiles.
        own: rows of a kernel's own tile.
        length: rows of the own side.
        processors: multiprocessors of the device; 0 = not known.
        turns: heads for which a program walks its lists.

    Example:
        One query over 32,768 keys in 16 heads, on 132 multiprocessors:

        >>> one = Lengths.of([256])
        >>> choose_split(one, lines=16, size=128, own=64, length=1, processors=132)
        Split(tiles=1, parts=16)
        >>> choose_split(one, lines=1024, size=128, own=64, length=1, processors=132)
    """
    if not lengths.total or not lines:
        return None
    lists = len(lengths.sorted)
    steps = size // own if lists > 1 else -(-length // own)
    programs = TOGETHER * max(processors, FEWEST)
    share = max(lengths.total * lines * steps / programs, LEAST / size / turns)
    longest = lengths.sorted[-1]
    # The list of each head is cut by itself: what is less than a kernel's step would be empty.
    parts = min(int(longest // share), longest * size // STEP)
    if parts < 2 or longest * size * turns < SHORTEST:
        return None
    cut = lists - bisect_right(lengths.sorted, max(share, longest / UNCUT))
    return Split(cut * steps, parts)
