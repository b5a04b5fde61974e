"""Race detection: two accesses to the same memory that nothing orders.

In global memory, between CTAs: one CTA writes a word and another writes or reads it, atomics aside.

In shared memory, between the warps of a CTA: one warp writes a word and another touches it, with no barrier
between. Warps run in lockstep here, so a missing barrier does not change results; vector clocks reveal it. A
warp's *view* is how far it knows each other warp to have come. bar.sync makes the views of all participants
equal; an mbarrier passes the views of those who arrive to those who wait. An access to memory last touched
beyond the warp's view is a race.

Asynchronous engines have clocks of their own: the part of a wgmma that belongs to each warp, TMA, and the
tensor core of sm_100 (tcgen05). Their accesses are in no view until a wait or an mbarrier reports them done.
The bytes of a cp.async are in no view until its thread has waited for them.

When in doubt, nothing is reported: lanes of one warp count as ordered, shared atomics are not followed, and
waiting for one TMA copy counts as waiting for all issued before it.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from .memory import Mapped
from .values import Array

if TYPE_CHECKING:
    from .mbarrier import Barrier

NEVER = np.iinfo(np.int32).max  # the clock of a copy that nobody has waited for


class RaceError(RuntimeError):
    """The results may depend on which warp or CTA comes first."""


class GlobalRaces:
    """Words of global memory, with the CTAs that wrote and read them last."""

    def __init__(self, memory: Mapped, granularity: int) -> None:
        self._memory, self._granularity = memory, granularity
        self._writer = np.zeros(memory.size // granularity + 1, np.int32)  # number of the CTA + 1
        self._reader = np.zeros_like(self._writer)
        self.found: Counter[str] = Counter()

    def _words(self, offsets: Array, size: int) -> Array:
        parts = np.arange(0, size, self._granularity)
        return self._memory.number(offsets[:, None] + parts) // self._granularity  # [accesses, parts]

    def write(self, offsets: Array, size: int, cta: Array) -> None:
        if not offsets.size:
            return
        words, who = self._words(offsets, size), np.broadcast_to(cta, offsets.shape)[:, None] + 1
        writer, reader = self._writer[words], self._reader[words]
        self._report("two CTAs write", (writer != 0) & (writer != who))
        self._report("a CTA writes what another has read", (reader != 0) & (reader != who))
        self._writer[words] = who
        self._report("two CTAs write", self._writer[words] != who)  # in this very store

    def read(self, offsets: Array, size: int, cta: Array) -> None:
        if not offsets.size:
            return
        words, who = self._words(offsets, size), np.broadcast_to(cta, offsets.shape)[:, None] + 1
        writer = self._writer[words]
        self._report("a CTA reads what another has written", (writer != 0) & (writer != who))
        self._reader[words] = who

    def _report(self, what: str, wrong: Array) -> None:
        if wrong.any():
            self.found[f"global memory: {what} ({self._granularity}-byte words)"] += int(wrong.sum())


class SharedRaces:
    """Words of the shared memory of a batch, with who wrote and read them last, and all views.

    Clocks are numbered: first the warps, then the tensor cores' work for each warp, TMA, tcgen05.
    """

    def __init__(self, ctas: int, threads: int, shared_bytes: int, granularity: int) -> None:
        self.warps = threads // 32
        self.tma = 2 * self.warps
        self.tcgen05 = self.tma + 1
        clocks = self.tcgen05 + 1
        self._granularity = granularity
        words = ctas * shared_bytes // granularity
        self._writer = np.zeros(words, np.int16)
        self._written = np.zeros(words, np.int32)  # the writer's clock then
        self._read = np.zeros((words, clocks), np.int32)  # each reader's clock at its last read
        self.view = np.zeros((ctas, clocks, clocks), np.int32)  # view[cta, who, of whom]
        self._own = np.arange(clocks)
        self.view[:, self._own, self._own] = 1
        self._committed: dict[tuple[int, int], list[int]] = {}  # clocks of each warp's wgmma groups
        self.found: Counter[str] = Counter()

    # ---- views

    def barrier(self, places: Array, warps: Array) -> None:
        """Give the participating warps [CTAs, warps] of these CTAs each other's views."""
        part = self.view[places, : self.warps]
        known = np.where(warps[:, :, None], part, 0).max(1, keepdims=True)  # [CTAs, 1, clocks]
        self.view[places, : self.warps] = np.where(warps[:, :, None], known, part)
        cta, warp = np.nonzero(warps)
        self.view[places[cta], warp, warp] += 1  # their later accesses are in no other view

    def use(self, barrier: Barrier, place: int, warp: int) -> None:
        """Report an mbarrier whose initialisation is not in the view of the warp that uses it."""
        maker, clock = barrier.maker
        self._report(
            "an mbarrier", "is used that another has initialised", self.view[place, warp, maker] < clock
        )

    def arrive(self, barrier: Barrier, place: int, warp: int) -> None:
        barrier.arriving = np.maximum(barrier.arriving, self.view[place, warp])
        self.view[place, warp, warp] += 1

    def engine_arrives(self, barrier: Barrier, place: int, warp: int, engine: int) -> None:
        """Record that the engine has finished the warp's work, and pass on the warp's view of that time."""
        arriving = np.maximum(barrier.arriving, self.view[place, warp])
        arriving[engine] = max(arriving[engine], self.view[place, engine, engine])
        barrier.arriving = arriving
        self.view[place, warp, warp] += 1
        self.view[place, engine, engine] += 1

    def wait(self, barrier: Barrier, place: int, warp: int) -> None:
        self.view[place, warp] = np.maximum(self.view[place, warp], barrier.arrived)

    def wait_for_engine(self, places: Array, warps: Array, engine: int) -> None:
        """Record that these warps have waited for all work of the engine."""
        done = self.view[places, engine, engine]
        self.view[places, warps, engine] = np.maximum(self.view[places, warps, engine], done)
        self.view[places, engine, engine] += 1

    def commit_wgmma(self, place: int, warp: int) -> None:
        engine = self.warps + warp
        clocks = self._committed.setdefault((place, warp), [])
        clocks.append(int(self.view[place, engine, engine]))
        self.view[place, engine, engine] += 1

    def wait_wgmma(self, place: int, warp: int, pending: int) -> None:
        """Record that the warp has waited for all but its last ``pending`` groups."""
        clocks = self._committed.get((place, warp), [])
        if len(clocks) > pending:
            engine, done = self.warps + warp, clocks[-1 - pending]
            self.view[place, warp, engine] = max(self.view[place, warp, engine], done)

    # ---- accesses

    def words(self, start: Array, size: int) -> Array:
        """Return the words [accesses, words of each] of ``size`` bytes at these places in shared memory."""
        return (start[:, None] + np.arange(0, size, self._granularity)) // self._granularity

    def read(self, what: str, words: Array, place: Array, warp: Array, engine: int | None = None) -> None:
        """Record that warps, or an engine on behalf of a warp, read words."""
        place, warp = place[:, None], warp[:, None]
        unknown = self._written[words] > self.view[place, warp, self._writer[words]]
        self._report(what, "reads what another has written", unknown)
        who = warp if engine is None else np.full_like(warp, engine)
        self._read[words, who] = self.view[place, who, who]

    def write(
        self,
        what: str,
        words: Array,
        place: Array,
        warp: Array,
        engine: int | None = None,
        *,
        pending: bool = False,
        lost: Array | None = None,
    ) -> None:
        """Record that warps, or an engine on behalf of a warp, write words.

        Args:
            what: name of the instruction, for the report.
            words: result of ``words``.
            place: place of the CTA of each access.
            warp: number of the warp of each access.
            engine: the engine that writes; None for the warp itself.
            pending: the words may not be touched until ``complete``.
            lost: accesses whose value was overwritten within the instruction.
        """
        place, warp = place[:, None], warp[:, None]
        view = self.view[place, warp]  # [accesses, 1, clocks]
        unknown = self._written[words] > np.take_along_axis(view[:, 0], self._writer[words], 1)
        self._report(what, "writes what another has written", unknown)
        since: Array = np.any(self._read[words] > view, axis=-1)
        self._report(what, "writes what another has read", since)
        who = np.broadcast_to(warp if engine is None else engine, words.shape)
        self._writer[words] = who
        self._written[words] = NEVER if pending else self.view[place, who, who]
        several = self._writer[words] != who
        if several.any():
            if lost is not None:
                self._report(
                    what, "writes what another warp writes at the same time", several & lost[:, None]
                )
            self._written[words[several]] = 0  # all wrote the same value, so the order does not matter

    def complete(self, words: Array, place: Array, warp: Array) -> None:
        """Record that pending copies are done, and that their threads know it."""
        who = np.broadcast_to(warp[:, None], words.shape)
        still = (self._written[words] == NEVER) & (self._writer[words] == who)
        clock = np.broadcast_to(self.view[place, warp, warp][:, None], words.shape)
        self._written[words[still]] = clock[still]

    def _report(self, what: str, how: str, wrong: Array | bool) -> None:
        if np.any(wrong):
            self.found[f"shared memory: {what} {how}, no barrier between"] += int(np.sum(wrong))
