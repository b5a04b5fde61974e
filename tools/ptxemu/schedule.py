"""Control flow: which block runs next, for which lanes.

While all warps of a CTA go the same way, CTAs run in lockstep as groups. A group whose CTAs diverge is split,
and groups that meet at a block are merged (the lowest block runs first). Where the warps or threads of a CTA
diverge, they run one after the other as *contexts*, masks over the lanes of the group, until they reconverge;
bar.sync and mbarrier hold a context back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np

from .decode import Source, Step
from .state import Batch, Group
from .values import Array, Mask

EXIT = -1
FAIR = 4096  # turns after which the last block goes first for a while, so that no lock is starved

Next: TypeAlias = int | Array  # the block that follows, or one for each lane


class Deadlock(RuntimeError):
    """All warps wait."""


class Terminator(Protocol):
    """A function that returns the block, or each lane's block, that follows."""

    def __call__(self, group: Group, mask: Mask, /) -> Next: ...


@dataclass
class Block:
    """Instructions that run one after the other.

    Attributes:
        steps: each with its guarding predicate, if any.
        terminator: returns what follows.
        barrier: set if the block is a bar.sync or bar.arrive.
        waits: whether it tests an mbarrier; a jump to itself then means waiting.
    """

    steps: list[tuple[Source | None, Step]]
    terminator: Terminator
    barrier: NamedBarrier | None = None
    waits: bool = False

    def run(self, group: Group, mask: Mask) -> Next:
        for guard, step in self.steps:
            if guard is None:
                step(group, mask)
            else:
                held = group.wide(guard(group))
                step(group, held if mask is None else held & mask)
        return self.terminator(group, mask)


@dataclass(frozen=True)
class NamedBarrier:
    """bar.sync or bar.arrive on one of a CTA's 16 barriers, for all its threads or a given number."""

    number: Source
    threads: Source | None
    arrives_only: bool = False


def run(blocks: Sequence[Block], batch: Batch, group: Group, start: Next) -> None:
    """Run all CTAs of a batch to their end."""
    ready: dict[int, list[Group]] = {}
    turn, warps = 0, group.threads // 32

    def go(group: Group, to: Next) -> None:
        for part, block in _split(blocks, group, to):
            if block != EXIT:
                ready.setdefault(block, []).append(part)

    go(group, start)
    while ready:
        turn += 1
        at = (max if turn // FAIR % 2 else min)(ready)
        group = Group.merge(ready.pop(at))
        while True:
            batch.launch.counters.blocks[at] += len(group.places) * warps
            block = blocks[at]
            if block.barrier is not None and batch.races is not None:
                batch.races.barrier(group.places, np.ones((len(group.places), warps), bool))
            to = block.run(group, None)
            if block.waits and np.any(np.equal(to, at)):
                raise Deadlock("deadlock: all warps of a CTA wait at an mbarrier")
            if isinstance(to, int) and to != EXIT and not ready:
                at = to  # the usual case: no other group
                continue
            go(group, to)
            break


def _split(blocks: Sequence[Block], group: Group, to: Next) -> list[tuple[Group, int]]:
    """Split a group by where its CTAs go; diverged warps of a CTA run until they reconverge."""
    if not isinstance(to, int):
        by_cta = to.reshape(-1, group.threads)
        if (by_cta != by_cta[:, :1]).any():
            to = _Contexts(blocks, group).run(to)
        else:
            ways = np.unique(by_cta[:, 0])
            if len(ways) > 1:
                return [(group.take(by_cta[:, 0] == way), int(way)) for way in ways]
            to = int(ways[0])
    return [(group, to)]


@dataclass
class _Waiting:
    """Lanes that have reached a named barrier.

    Attributes:
        mask: the lanes.
        threads: number that the barrier waits for; None for all of the CTA that still run.
        then: the block they go on to; None for those that only arrived.
    """

    mask: Array
    threads: int | None
    then: int | None


@dataclass
class _Contexts:
    """Warps or threads that have diverged."""

    blocks: Sequence[Block]
    group: Group
    at: dict[int, Array] = field(default_factory=dict)  # block -> lanes that are there
    waiting: defaultdict[int, list[_Waiting]] = field(default_factory=lambda: defaultdict(list))
    stuck: set[int] = field(default_factory=set)  # blocks whose lanes wait at an mbarrier

    def __post_init__(self) -> None:
        self.done = np.zeros(self.group.lanes, bool)

    def run(self, to: Next) -> int:
        """Run until all lanes are at one block, or done."""
        batch = self.group.batch
        self._go(np.ones(self.group.lanes, bool), to)
        turn, seen = 0, batch.barrier_events
        while True:
            if not self.at:
                if self.done.all():
                    return EXIT
                raise Deadlock("deadlock: every warp waits at a barrier")
            if len(self.at) == 1 and not self.waiting and not self.done.any() and not self.stuck:
                ((block, mask),) = self.at.items()
                if mask.all() and self.blocks[block].barrier is None:
                    return block
            if batch.barrier_events != seen:
                self.stuck.clear()
                seen = batch.barrier_events
            ready = [block for block in self.at if block not in self.stuck]
            if not ready:
                raise Deadlock("deadlock: every warp waits at an mbarrier or a barrier")
            turn += 1
            self._step((max if turn // FAIR % 2 else min)(ready))

    def _go(self, mask: Array, to: Next) -> None:
        """Send lanes to a block, or each to its own."""
        if not isinstance(to, int):
            for way in np.unique(to[mask]):
                self._go(mask & (to == way), int(way))
        elif to == EXIT:
            self.done |= mask
            for number in list(self.waiting):  # fewer lanes are left to wait for
                self._release(number)
        elif mask.any():
            self.at[to] = self.at[to] | mask if to in self.at else mask

    def _step(self, number: int) -> None:
        block, mask = self.blocks[number], self.at.pop(number)
        self.group.launch.counters.blocks[number] += int(mask.reshape(-1, 32).any(1).sum())
        if block.barrier is not None:
            self._arrive(block.barrier, mask, number + 1)
            self.stuck.clear()
            return
        to = block.run(self.group, mask)
        if block.waits and np.any(np.equal(to if isinstance(to, int) else to[mask], number)):
            self.stuck.add(number)
        self._go(mask, to)

    def _arrive(self, barrier: NamedBarrier, mask: Array, then: int) -> None:
        group = self.group
        numbers = group.wide(barrier.number(group))
        threads = None if barrier.threads is None else group.wide(barrier.threads(group))
        for number in np.unique(numbers[mask]):
            here = mask & (numbers == number)
            count = None if threads is None else int(threads[here][0])
            self.waiting[int(number)].append(_Waiting(here, count, None if barrier.arrives_only else then))
            if barrier.arrives_only:
                self._go(here, then)
            self._release(int(number))

    def _release(self, number: int) -> None:
        """Release the CTAs in which enough threads have arrived."""
        group, waiting = self.group, self.waiting.pop(number)
        ctas = len(group.places)
        come = sum(entry.mask.reshape(ctas, -1).sum(1) for entry in waiting)
        wanted = waiting[0].threads or group.threads - self.done.reshape(ctas, -1).sum(1)
        enough = np.repeat(come >= wanted, group.threads)
        if group.batch.races is not None and enough.any():
            part = np.logical_or.reduce([entry.mask for entry in waiting]) & enough
            group.batch.races.barrier(group.places, part.reshape(ctas, -1, 32).any(2))
        for entry in waiting:
            if entry.then is not None:
                self._go(entry.mask & enough, entry.then)
            if (entry.mask & ~enough).any():
                self.waiting[number].append(_Waiting(entry.mask & ~enough, entry.threads, entry.then))
