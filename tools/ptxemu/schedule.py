"""Control flow: which block runs next, for which lanes.

While all warps of a CTA go the same way, CTAs run in lockstep as groups. A group whose CTAs diverge is split,
and groups that meet at a block are merged (the lowest block runs first). Where the warps or threads of a CTA
diverge, they run one after the other as *contexts*, masks over the lanes of the group, until they reconverge.
bar.sync and mbarrier hold lanes back, and so do instructions at which a warp or warpgroup meets
(``converge``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np

from .converge import Meeting, name_lanes
from .decode import Source, Step
from .state import Batch, Group
from .values import Array, Mask

EXIT = -1
FAIR = 4096  # turns after which the blocks take turns for a while, so that nobody is starved

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
        meetings: steps, by their index, that wait for other lanes where the group has diverged.
    """

    steps: list[tuple[Source | None, Step]]
    terminator: Terminator
    barrier: NamedBarrier | None = None
    waits: bool = False
    meetings: dict[int, Meeting] = field(default_factory=dict)

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


@dataclass
class _Turns:
    """Which block runs next: the lowest, so that groups and lanes meet; at times, that which waited longest.

    If only the lowest and the highest were chosen, one between two that spin until it is done would starve.
    """

    turn: int = 0
    last: dict[int, int] = field(default_factory=dict)  # block -> its last turn

    def choose(self, ready: Iterable[int]) -> int:
        self.turn += 1
        fair = self.turn // FAIR % 2
        chosen = min(ready, key=lambda block: self.last.get(block, 0)) if fair else min(ready)
        self.last[chosen] = self.turn
        return chosen


def run(blocks: Sequence[Block], batch: Batch, group: Group, start: Next) -> None:
    """Run all CTAs of a batch to their end."""
    ready: dict[int, list[Group]] = {}
    turns, warps = _Turns(), group.threads // 32

    def go(group: Group, to: Next) -> None:
        for part, block in _split(blocks, group, to):
            if block != EXIT:
                ready.setdefault(block, []).append(part)

    go(group, start)
    while ready:
        at = turns.choose(ready)
        group = Group.merge(ready.pop(at))
        while True:
            batch.launch.counters.blocks[at] += len(group.places) * warps
            block = blocks[at]
            if block.barrier is not None and batch.races is not None:
                batch.races.barrier(group.places, np.ones((len(group.places), warps), bool))
            to = block.run(group, None)
            if block.waits and _all_of_a_cta(group, to, at):
                raise Deadlock("deadlock: all warps of a CTA wait at an mbarrier")
            if isinstance(to, int) and to != EXIT and not ready:
                at = to  # the usual case: no other group
                continue
            go(group, to)
            break


def _all_of_a_cta(group: Group, to: Next, number: int) -> bool:
    """Return whether all lanes of some CTA go to this block."""
    if isinstance(to, int):
        return to == number
    return bool((to.reshape(-1, group.threads) == number).all(1).any())


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
    meeting: dict[tuple[int, int], Array] = field(
        default_factory=dict
    )  # block, step -> lanes that wait there

    def __post_init__(self) -> None:
        self.done = np.zeros(self.group.lanes, bool)

    def run(self, to: Next) -> int:
        """Run until all lanes are at one block, or done."""
        batch = self.group.batch
        self._go(np.ones(self.group.lanes, bool), to)
        turns, seen = _Turns(), batch.barrier_events
        while True:
            if not self.at:
                if self.done.all():
                    return EXIT
                raise Deadlock(f"deadlock: every warp waits at a barrier{self._meetings()}")
            if len(self.at) == 1 and not self.waiting and not self.done.any() and not self.stuck:
                ((block, mask),) = self.at.items()
                if mask.all() and self.blocks[block].barrier is None:
                    return block
            if batch.barrier_events != seen:
                self.stuck.clear()
                seen = batch.barrier_events
            ready = [block for block in self.at if block not in self.stuck]
            if not ready:
                raise Deadlock(f"deadlock: every warp waits at an mbarrier or a barrier{self._meetings()}")
            self._step(turns.choose(ready))

    def _go(self, mask: Array, to: Next) -> None:
        """Send lanes to a block, or each to its own."""
        if not isinstance(to, int):
            for way in np.unique(to[mask]):
                self._go(mask & (to == way), int(way))
        elif to == EXIT:
            self.done |= mask
            for (block, i), lanes in self.meeting.items():
                self.blocks[block].meetings[i].gathered(self.group, lanes, self.done)
            for number in list(self.waiting):  # fewer lanes are left to wait for
                self._release(number)
        elif mask.any():
            self.at[to] = self.at[to] | mask if to in self.at else mask
            self.stuck.discard(to)  # those who come may wait for another mbarrier

    def _step(self, number: int) -> None:
        block, mask = self.blocks[number], self.at.pop(number)
        self.group.launch.counters.blocks[number] += int(mask.reshape(-1, 32).any(1).sum())
        if block.barrier is not None:
            self._arrive(block.barrier, mask, number + 1)
            self.stuck.clear()
            return
        mask = self._meet(number, mask)
        if not mask.any():
            return
        to = block.terminator(self.group, mask)
        self._go(mask, to)
        if block.waits and np.any(np.equal(to if isinstance(to, int) else to[mask], number)):
            self.stuck.add(number)

    def _meet(self, number: int, mask: Array) -> Array:
        """Run a block's steps; hold back lanes that wait for others, and return those at its end."""
        group, together = self.group, 0  # the lanes are whole groups of this size
        for i, (guard, step) in enumerate(self.blocks[number].steps):
            meeting = self.blocks[number].meetings.get(i)
            if meeting is not None and (number, i) in self.meeting:
                mask, together = mask | self.meeting.pop((number, i)), 0
            active = mask if guard is None else group.wide(guard(group)) & mask
            if meeting is not None and not (together >= meeting.size and guard is meeting.members is None):
                early = active & ~meeting.gathered(group, active, self.done)
                if early.any():
                    self.meeting[number, i] = early
                    mask, active = mask & ~early, active & ~early
                if guard is meeting.members is None:
                    together = meeting.size
            if not mask.any():
                break
            step(group, active)
        return mask

    def _meetings(self) -> str:
        """Say which lanes wait for others, and where."""
        return "".join(
            f"; {name_lanes(self.group, lanes)} wait for others at {self.blocks[number].meetings[i].text}"
            for (number, i), lanes in self.meeting.items()
        )

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
